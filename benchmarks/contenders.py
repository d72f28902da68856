"""Who is measured: ours and its peers, as a table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..interface.autograd import attention
from . import cudnn_graph
from .cells import BACKWARD, FORWARD
from .timing import OURS, Call

DETERMINISTIC = f"{OURS}, deterministic"  # no peer of ours

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v: (batch, len, heads, head_dim)
Bind = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Callable[[], Any]]


def _first(result: Any) -> torch.Tensor:
    """O alone: some versions return a tuple whose first element it is."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _heads_second(out: torch.Tensor) -> torch.Tensor:
    """torch's (batch, heads, len, head_dim_v) as others have it."""
    return out.transpose(1, 2)


@dataclass(frozen=True)
class Contender:
    """One implementation of attention.

    Attributes: `bind` (q, k, v, causal) to a launch that takes no time but its own; `out` finds O,
    (batch, len, heads, head_dim_v), in what a launch returns; `context` needs to be around launches
    of forward. `backward`, of one that autograd knows nothing of, is (inputs, causal, dO) to a
    launch that returns (dq, dk, dv).
    """

    name: str
    bind: Bind
    out: Callable[[Any], torch.Tensor] = _first
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: Callable[[Inputs, bool, torch.Tensor], Callable[[], Any]] | None = None

    def call(self, inputs: Inputs, causal: bool, which: str = FORWARD) -> Call:
        """Of a pass: whose results are (O,), or (dq, dk, dv) for a normal dO.

        Args:
            inputs: q, k, v.
            causal: query i sees keys up to i.
            which: "fwd" or "bwd".
        """
        if which == BACKWARD and self.backward:
            launch = self.backward(inputs, causal, gradient_of_out(inputs))
            return Call(launch, self.context)
        if which == BACKWARD:
            return Call(Backward(self, inputs, causal), self.context)
        return Call(self.bind(*inputs, causal), self.context, lambda result: (self.out(result),))


@dataclass
class Backward:
    """A call of one contender's backward alone: (dq, dk, dv) for a normal dO, like O contiguous.

    Forward runs in the first call, so that a contender without gradients fails there.
    """

    contender: Contender
    inputs: Inputs
    causal: bool
    dout: torch.Tensor = field(init=False)
    _leaves: tuple[torch.Tensor, ...] = field(init=False)
    _out: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._leaves = tuple(tensor.detach().requires_grad_() for tensor in self.inputs)
        self.dout = gradient_of_out(self.inputs)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self._out is None:
            q, k, v = self._leaves
            self._out = self.contender.out(self.contender.bind(q, k, v, self.causal)())
        return torch.autograd.grad(self._out, self._leaves, self.dout, retain_graph=True)


def gradient_of_out(inputs: Inputs) -> torch.Tensor:
    """dO, (batch, len, heads, head_dim_v), from N(0, 1), always the same for those shapes."""
    q, _, v = inputs
    seeded = torch.Generator(q.device).manual_seed(1)
    return torch.randn(*q.shape[:3], v.shape[3], generator=seeded, device=q.device).to(q.dtype)


@dataclass(frozen=True)
class Peer:
    """A row of the table of peers.

    Attributes: `key` names it on the command line; `load` makes its contender, or raises
    ImportError where `package` is not installed; `default`, whether it takes part unless told.
    """

    key: str
    name: str
    package: str
    load: Callable[[str], Contender]
    default: bool = True


def of_torch(backend: SDPBackend, name: str) -> Contender:
    """torch's attention by one of its backends; with a causal mask len_q must be len_kv, since
    torch aligns it at the top left."""
    return Contender(name, sdpa, _heads_second, partial(sdpa_kernel, backend))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], Any]:
    """A launch of torch's attention, which returns (batch, heads, len, head_dim_v)."""
    seen = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    return partial(scaled_dot_product_attention, *seen, is_causal=causal, enable_gqa=grouped)


def of_cudnn(name: str) -> Contender:
    """cuDNN without torch between; a causal mask is aligned at the top left there too."""
    importlib.import_module("cudnn")

    def bind(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> Callable[[], torch.Tensor]:
        return _built_once(lambda: cudnn_graph.Attention(q, k, v, causal).forward())

    def backward(inputs: Inputs, causal: bool, dout: torch.Tensor) -> Callable[[], Any]:
        return _built_once(lambda: cudnn_graph.Attention(*inputs, causal).backward(dout))

    return Contender(name, bind, backward=backward)


def _built_once(build: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """A launch that is built in its first call, so that who has no kernel fails there."""
    built = cache(build)
    return lambda: built()()


def of_module(module: str, name: str) -> Contender:
    """A module's `flash_attn_func`."""
    return Contender(name, _flash(importlib.import_module(module).flash_attn_func))


def of_flex(name: str) -> Contender:
    """torch's flex attention, compiled for each problem anew; causal by its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # With fullgraph it raises where it would otherwise fall back to an implementation that is not
    # what flex attention is for.
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return query >= key

    def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], Any]:
        torch.compiler.reset()  # or torch stops compiling after some problems
        seen = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        lengths = q.shape[1], k.shape[1]
        device = str(q.device)
        mask = create_block_mask(sees, None, None, *lengths, device=device) if causal else None
        return partial(compiled, *seen, block_mask=mask, enable_gqa=q.shape[2] != k.shape[2])

    return Contender(name, bind, _heads_second)


PEERS = (
    Peer("cudnn", "cuDNN", "torch", partial(of_torch, SDPBackend.CUDNN_ATTENTION)),
    Peer("cudnn-frontend", "cuDNN frontend", "nvidia-cudnn-frontend", of_cudnn),
    Peer("fa2", "FA2", "torch", partial(of_torch, SDPBackend.FLASH_ATTENTION)),
    Peer("fa3", "FA3", "fa3-fwd", partial(of_module, "fa3_fwd_interface")),
    Peer("fa4", "FA4", "flash-attn-4", partial(of_module, "flash_attn.cute")),
    Peer("flex", "flex", "torch", of_flex, default=False),  # compiles for minutes
)


def contenders(
    which: str = FORWARD, peers: Sequence[str] | None = None
) -> tuple[list[Contender], dict[str, str]]:
    """Ours, for backward also deterministic, and the peers that are installed.

    Args:
        which: "fwd" or "bwd".
        peers: keys of `PEERS`; those of the default if None.

    Returns:
        Contenders, and why the others of these peers are left out, by name.
    """
    found = [Contender(OURS, _flash(attention))]
    if which == BACKWARD:
        found.append(Contender(DETERMINISTIC, _flash(partial(attention, deterministic=True))))
    absent: dict[str, str] = {}
    for peer in PEERS:
        if not (peer.default if peers is None else peer.key in peers):
            continue
        try:
            found.append(peer.load(peer.name))
        except ImportError as problem:
            absent[peer.name] = f"{problem}; install {peer.package} to have it"
    return found, absent


def _flash(function: Callable[..., Any]) -> Bind:
    """Bind as (q, k, v, causal=...), the way every FlashAttention is called."""
    return lambda q, k, v, causal: partial(function, q, k, v, causal=causal)
