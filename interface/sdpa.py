"""Hopwell behind torch's scaled_dot_product_attention, as one of its flash attentions.

torch's registry names implementations; the one that a user activates takes the place of torch's own
kernels, below the operators of flash attention. Those are asked for more than Hopwell does: what it
has no equal of is refused by name. Causal masks are aligned at the last query here and there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import register_flash_attention_impl

from . import checks
from .autograd import gradients
from .functions import Layout, forward

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor]


def register(name: str = "hopwell") -> None:
    """Name Hopwell in torch's registry of flash attentions; until it is activated nothing changes.

    `torch.nn.attention.activate_flash_attention_impl(name)` puts it under
    `torch.nn.functional.scaled_dot_product_attention` on CUDA, forward and backward;
    `torch.nn.attention.restore_flash_attention_impl()` takes it away. On Hopper torch prefers cuDNN
    to any flash attention unless told otherwise, for a while by
    `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` or for good by
    `torch.backends.cuda.enable_cudnn_sdp(False)`.

    torch chooses flash attention for fp16 and bf16, without a mask, and with is_causal only where
    len_q is len_kv; `torch.nn.attention.bias.causal_lower_right` is for others. Everything else
    goes where it went before. out and the gradients lie in memory as q, k and v do.

    Args:
        name: to activate it by.

    Raises, once active and chosen:
        NotImplementedError: dropout, nested tensors, a window, ALiBi, paged keys or a debug mask.
        TypeError, ValueError, NotImplementedError: as `hopwell.attention`; nothing is copied but a
            gradient of out that the kernels cannot read.
    """
    register_flash_attention_impl(name, register_fn=Override)


class Override:
    """Hopwell under the operators of flash attention on one kind of device, until removed."""

    def __init__(self, device: str = "CUDA") -> None:
        self._library = torch.library.Library("aten", "IMPL")
        # torch records what it needs before it comes here, and leaves recording on.
        unrecorded = torch.no_grad()
        for name, implementation in OPERATORS.items():
            if hasattr(torch.ops.aten, name):  # not every torch has them all
                self._library.impl(name, unrecorded(implementation), device)

    def remove(self) -> None:
        """Leave the operators to torch again."""
        self._library._destroy()


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    checks.flash({"dropout_p": dropout_p, "return_debug_mask": return_debug_mask})
    out = torch.empty_like(query)
    _, lse = forward(query, key, value, scale=scale, causal=is_causal, layout="bhsd", out=out)
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *packing_and_options: Any, **others: Any
) -> tuple[Tensor, ...]:
    out = torch.empty_like(query)
    lse = _flash_forward_into(out, query, key, value, *packing_and_options, **others)
    return out, lse, *_unused(query)


def _flash_forward_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    **others: Any,
) -> Tensor:
    packing = {"cum_seq_q": cum_seq_q, "cum_seq_k": cum_seq_k}
    options = {"dropout_p": dropout_p, "return_debug_mask": return_debug_mask}
    checks.flash({**packing, **options, **others})
    _, lse = forward(query, key, value, scale=scale, causal=is_causal, out=out)
    return lse


def _sdpa_backward(*arguments: Any, scale: float | None = None) -> Gradients:
    return _backward("bhsd", *arguments, scale=scale)


def _flash_backward(*arguments: Any, scale: float | None = None, **others: Any) -> Gradients:
    checks.flash(others)
    return _backward("bshd", *arguments, scale=scale)


def _backward(
    layout: Layout,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *random: Tensor,
    scale: float | None,
) -> Gradients:
    checks.flash({"cum_seq_q": cum_seq_q, "cum_seq_k": cum_seq_k, "dropout_p": dropout_p})
    options = {"scale": scale, "causal": is_causal, "layout": layout}
    buffers = {name: torch.empty_like(t) for name, t in (("dq", query), ("dk", key), ("dv", value))}
    return gradients({**options, **buffers}, grad_out, query, key, value, out, logsumexp, None)


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, offset and debug mask, which belong to dropout."""
    seed = query.new_empty(2, dtype=torch.uint64)
    return seed, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


OPERATORS = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_flash_attention_backward": _flash_backward,
}
