"""Kernels and small inputs for the mutation harness: every path taken, with little work."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hopwell import emulator
from hopwell.emulator import loader
from hopwell.kernels import ForwardFacts, forward_kernel

from .mutation import Run

Case = tuple[Run, Callable[[str], bool]]


def _inputs(len_q: int, len_kv: int, heads_q: int, heads_kv: int, head_dim: int) -> list:
    torch.manual_seed(0)
    shapes = [(len_q, heads_q), (len_kv, heads_kv), (len_kv, heads_kv)]
    return [torch.randn(1, n, h, head_dim, dtype=torch.bfloat16) for n, h in shapes]


def forward(head_dim: int, causal: bool, len_q: int, len_kv: int) -> Case:
    """Our own forward kernel."""
    q, k, v = _inputs(len_q, len_kv, 1, 1, head_dim)
    facts = ForwardFacts(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim, causal=causal)
    function, fakes, options = forward_kernel("sm_90a", facts)
    compiled = loader.compile(function, *fakes, arch="sm_90a", options=options)

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = torch.empty_like(q), torch.empty(1, 1, len_q)
        compiled(q, k, v, out, lse, head_dim**-0.5)
        return out, lse

    return run, lambda entry: True


def fa4(backward: bool, causal: bool, head_dim: int = 128) -> Case:
    """The peer package's kernels."""
    from . import fa4 as peer

    q, k, v = _inputs(448, 700, 1, 1, head_dim)
    if not backward:
        return (lambda: peer.fa4_forward(q, k, v, causal)), lambda entry: True
    with emulator.session():
        out, lse = peer.fa4_forward(q, k, v, causal)
    dout = torch.randn_like(out)
    return (
        lambda: peer.fa4_backward(dout, q, k, v, out, lse, causal),
        lambda entry: True,
    )


CASES: dict[str, Callable[[], Case]] = {
    "forward": lambda: forward(64, True, 150, 650),
    "forward-128": lambda: forward(128, True, 150, 650),
    "fa4-forward": lambda: fa4(False, True),
    "fa4-backward": lambda: fa4(True, True),
}
