"""FlashAttention's functions by their names, for code that calls them; ours do the work.

Names, order of arguments and defaults are those of FlashAttention 2; what 3 added is taken as
keywords. `checks.FLASH_ATTENTION` lists the arguments that the kernels cannot serve, and the values
at which those ask for nothing. Everything else is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from . import checks
from .autograd import attention

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Window = Sequence[int | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **of_version_3: Any,
) -> Result:
    """`hopwell.attention` with FlashAttention's arguments; differentiable.

    Args:
        q: (batch, len_q, heads, head_dim), fp16 or bf16.
        k, v: (batch, len_kv, heads_kv, head_dim); heads is a multiple of heads_kv.
        softmax_scale, causal: as scale and causal of `hopwell.attention`; causal is aligned at the
            last query.
        deterministic: of the gradients. False leaves it to torch's setting.
        return_attn_probs: also return what the name does not say: see below.
        dropout_p, window_size, softcap, alibi_slopes, of_version_3 (qv, q_descale, k_descale,
            v_descale, attention_chunk, num_splits, pack_gqa, sm_margin): at their defaults.

    Returns:
        out, of q's shape but for v's head_dim; with return_attn_probs (out, lse, empty), lse fp32
        (batch, heads, len_q) and the last one without elements, as FlashAttention 2 returns the
        probabilities where there is no dropout.

    Raises:
        NotImplementedError: an argument asks for what the kernels have not.
        TypeError: there is no such argument; and, as ValueError, as for `hopwell.attention`.
    """
    checks.known("flash_attn_func", of_version_3)
    asked = {
        "dropout_p": dropout_p,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }
    checks.neutral(checks.FLASH_ATTENTION, {**asked, **of_version_3})
    out, lse = attention(
        *(q, k, v),
        scale=softmax_scale,
        causal=causal,
        deterministic=deterministic or None,
        return_lse=True,
    )
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **of_version_3: Any,
) -> Result:
    """`flash_attn_func` of q, k and v that are one tensor, which is read where it lies.

    Args:
        qkv: (batch, len, 3, heads, head_dim), fp16 or bf16. Its gradient is put together from
            three.
        Others: as for `flash_attn_func`, and num_heads_q at its default.

    Returns, raises:
        As `flash_attn_func`.
    """
    checks.packed("qkv", qkv, 3, "[q, k, v]")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **of_version_3,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **of_version_3: Any,
) -> Result:
    """`flash_attn_func` of k and v that are one tensor, which is read where it lies.

    Args:
        q: (batch, len_q, heads, head_dim), fp16 or bf16.
        kv: (batch, len_kv, 2, heads_kv, head_dim). Its gradient is put together from two.
        Others: as for `flash_attn_func`.

    Returns, raises:
        As `flash_attn_func`.
    """
    checks.packed("kv", kv, 2, "[k, v]")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        **of_version_3,
    )


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    """There is no kernel for packed sequences (cu_seqlens) yet: raises NotImplementedError."""
    checks.no_lengths("flash_attn_varlen_func", "packed sequences (cu_seqlens)")


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> NoReturn:
    """There is no kernel for a cache of k and v yet: raises NotImplementedError."""
    checks.no_lengths("flash_attn_with_kvcache", "a cache of k and v (cache_seqlens, block_table)")
