"""Kernels and small inputs for the mutation harness: every path taken, with little work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hopwell import emulator
from hopwell.emulator import loader
from hopwell.kernels import (
    BackwardFacts,
    BlackwellFacts,
    ForwardFacts,
    backward_function,
    backward_workspace,
    forward_kernel,
)
from hopwell.kernels.fwd_sm100 import FwdSm100
from hopwell.kernels.tiles import BlackwellTiles, blackwell_tiles

from .mutation import Case, Outputs


def _inputs(len_q: int, len_kv: int, head_dim: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, 1, head_dim, dtype=torch.bfloat16) for n in (len_q, len_kv, len_kv)]


def forward(head_dim: int, causal: bool) -> Case:
    """Our own forward kernel, one CTA for all tiles of Q.

    Causal: four, two with more K/V tiles than there are stages, and two without, where waits for K
    and V do not stand in for those for a tile of Q. Full: four, each with more. Both have more
    tiles of Q than there are stages.
    """
    q, k, v = _inputs(600, 472, head_dim) if causal else _inputs(400, 500, head_dim)
    facts = ForwardFacts("bfloat16", head_dim, head_dim, causal)
    function, fakes, options = forward_kernel("sm_90a", facts)
    compiled = loader.compile(function, *fakes, arch="sm_90a", options=options)

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = torch.empty_like(q), torch.empty(1, 1, len(q[0]))
        counter = torch.zeros(1, dtype=torch.int32)
        compiled(q, k, v, out, lse, head_dim**-0.5, counter)
        return out, lse

    return Case(run, grid=(1, 1, 1), strict=True)


def forward_sm100(head_dim: int, launch_queue: bool = False) -> Case:
    """Our own forward kernel for Blackwell, causal, one CTA for all tiles of Q.

    Three pairs of tiles, with five, four and two K/V tiles: each stage of the ring is filled twice.
    The scale is one at which maxima rise by more than O may lag behind, so that it is rescaled.
    With a launch queue the grid has a CTA for each pair of tiles, and those that run take over the
    others'.
    """
    facts = BlackwellFacts("bfloat16", head_dim, head_dim, causal=True)
    row = replace(blackwell_tiles("sm_100a", head_dim, head_dim), launch_queue=launch_queue)
    call = _blackwell(facts, row)
    inputs = _inputs(640, 600, head_dim)
    grid = None if launch_queue else (1, 1, 1)
    return Case(lambda: call(*inputs), grid=grid, strict=True)


def forward_sm100_pair(head_dim: int) -> Case:
    """The same by one pair of CTAs, without a mask, twice.

    Three works of two pairs of tiles of Q each, the last with rows in the first pair alone; four
    K/V tiles, more than the ring has stages for. Then two works of two K/V tiles, fewer than that,
    where waits for K and V do not stand in for others.
    """
    facts = BlackwellFacts("bfloat16", head_dim, head_dim, causal=False, pair=True)
    call = _blackwell(facts, blackwell_tiles("sm_100a", head_dim, head_dim, pair=True))
    long, short = _inputs(1100, 450, head_dim), _inputs(600, 200, head_dim)
    return Case(lambda: (*call(*long), *call(*short)), grid=(2, 1, 1), strict=True)


def _blackwell(facts: BlackwellFacts, row: BlackwellTiles) -> Callable[..., Outputs]:
    """Our forward kernel of these facts by a row of the table, or another, on q, k and v."""
    function = FwdSm100(facts, row)
    fakes = function.fake_arguments()
    compiled = loader.compile(function, *fakes, arch="sm_100a", options="--enable-tvm-ffi")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        out, lse = torch.empty_like(q), torch.empty(1, 1, len(q[0]))
        counter = torch.zeros(1, dtype=torch.int32)
        compiled(q, k, v, out, lse, 1.0, counter)
        return out, lse

    return call


def backward(head_dim: int) -> Case:
    """Our own backward kernels, two CTAs of the main one: all tiles need a mask in one, none in
    the other; both have more tiles of Q than there are stages."""
    q, k, v = _inputs(400, 150, head_dim)
    facts = BackwardFacts("bfloat16", head_dim, head_dim, causal=False)
    function, fakes, options = backward_function("sm_90a", facts)
    compiled = loader.compile(function, *fakes, arch="sm_90a", options=options)
    dout, out = torch.randn_like(q), torch.randn_like(q)
    lse = torch.full((1, 1, len(q[0])), 6.0)
    floats = backward_workspace("sm_90a", facts, 1, 1, len(q[0]))

    def run() -> tuple[torch.Tensor, ...]:
        gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        workspace = torch.zeros(floats)
        compiled(dout, q, k, v, out, lse, *gradients, workspace, head_dim**-0.5, False, 132)
        return gradients

    return Case(run, strict=True)


def backward_sm100(
    head_dim: int, head_dim_v: int, len_q: int, len_kv: int, causal: bool = False
) -> Case:
    """Our own backward kernels for Blackwell: two K/V tiles, of CTAs or of pairs, the last one
    ragged; more loads of Q and dO than the ring has stages, and dQ of several tiles."""
    q, k, _ = _inputs(len_q, len_kv, head_dim)
    dout, _, v = _inputs(len_q, len_kv, head_dim_v)
    facts = BackwardFacts("bfloat16", head_dim, head_dim_v, causal)
    function, fakes, options = backward_function("sm_100a", facts)
    compiled = loader.compile(function, *fakes, arch="sm_100a", options=options)
    out, lse = torch.randn_like(dout), torch.full((1, 1, len_q), 6.0)
    floats = backward_workspace("sm_100a", facts, 1, 1, len_q)

    def run() -> tuple[torch.Tensor, ...]:
        gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        workspace = torch.zeros(floats)
        compiled(dout, q, k, v, out, lse, *gradients, workspace, head_dim**-0.5, False, 148)
        return gradients

    return Case(run, strict=True)


def fa4_forward(head_dim: int, causal: bool, arch: str = "sm_90a", len_q: int = 150) -> Case:
    """The peer package's forward kernel."""
    from . import fa4

    q, k, v = _inputs(len_q, 700, head_dim)
    return Case(lambda: fa4.fa4_forward(q, k, v, causal, arch))


def fa4_forward_pair() -> Case:
    """Its kernel for pairs of CTAs, one pair for all tiles of Q: two works of six K/V tiles.

    Then one of three, of scores so large that maxima rise by more than O may lag behind.
    """
    from . import fa4

    q, k, v = _inputs(700, 700, 128)
    short = 16 * q[:, :512], k[:, :300], v[:, :300]

    def run() -> Outputs:
        outputs = fa4.fa4_forward(q, k, v, False, "sm_100a")
        return *outputs, *fa4.fa4_forward(*short, False, "sm_100a")

    return Case(run, grid=(2, 1, 1), strict=("copies", "commits"))


def fa4_backward(head_dim: int, causal: bool, arch: str = "sm_90a") -> Case:
    """The peer package's backward kernels."""
    from . import fa4

    q, k, v = _inputs(448, 500, head_dim)
    with emulator.session():
        out, lse = fa4.fa4_forward(q, k, v, causal, arch)
    dout = torch.randn_like(out)
    return Case(lambda: fa4.fa4_backward(dout, q, k, v, out, lse, causal, arch))


CASES: dict[str, Callable[[], Case]] = {
    "forward-64": lambda: forward(64, causal=True),
    "forward-128": lambda: forward(128, causal=False),
    "backward-64": lambda: backward(64),
    "forward-sm100-64": lambda: forward_sm100(64),
    "forward-sm100-128": lambda: forward_sm100(128),
    "forward-sm100-pair": lambda: forward_sm100_pair(128),
    "forward-sm100-queue": lambda: forward_sm100(64, launch_queue=True),
    "backward-sm100-64": lambda: backward_sm100(64, 64, 600, 150),
    # Pairs that visit five, three and one tile of Q: dQ of two, and of one alone.
    "backward-sm100-128": lambda: backward_sm100(128, 128, 520, 520, causal=True),
    "backward-sm100-192": lambda: backward_sm100(192, 128, 400, 150),
    "fa4-forward": lambda: fa4_forward(128, causal=True),
    "fa4-backward": lambda: fa4_backward(128, causal=True),
    "fa4-forward-sm100": lambda: fa4_forward(64, True, "sm_100a", len_q=700),
    "fa4-backward-sm100": lambda: fa4_backward(64, True, "sm_100a"),
    # Those for head_dim 128 work in pairs of CTAs, forward only without a mask.
    "fa4-forward-pair": fa4_forward_pair,
    "fa4-backward-pair": lambda: fa4_backward(128, True, "sm_100a"),
}
