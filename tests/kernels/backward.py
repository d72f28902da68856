"""Backward on the emulator, checker on, against float64: what its tests share."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from hopwell import emulator
from hopwell.interface.cubin import Usage, usage
from hopwell.kernels import BackwardFacts, backward_function, backward_workspace
from hopwell.kernels.tiles_bwd_sm100 import BlackwellBackwardTiles

from .built import compiled

FULL = BackwardFacts("bfloat16", 128, 128, causal=False)
CAUSAL = replace(FULL, causal=True)
D64 = replace(CAUSAL, head_dim=64, head_dim_v=64)
D64_FULL = replace(D64, causal=False)
D256 = replace(CAUSAL, head_dim=256, head_dim_v=256)
# Of random orders. `HOPWELL_SEEDS=20 pytest tests/kernels/test_bwd_sm*.py` is the whole of it.
SEEDS = range(int(os.environ.get("HOPWELL_SEEDS", "4")))
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Built(NamedTuple):
    """A compiled function, resources by kernel, PTX and cubin."""

    call: Callable[..., None]
    resources: dict[str, Usage]
    ptx: str
    cubin: bytes


@cache
def build(
    facts: BackwardFacts, arch: str = "sm_90a", tiles: BlackwellBackwardTiles | None = None
) -> Built:
    """From the table, or from a row of its own."""
    made, ptx, cubin = compiled(*backward_function(arch, facts, tiles))
    return Built(made, usage(cubin), ptx, cubin)


@dataclass
class Case:
    """Inputs of one call, laid out (batch, len, heads, head_dim)."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    dlse: torch.Tensor  # (batch, heads_q, len_q)


@dataclass
class Exact:
    """float64: what goes in from forward, the gradients, and what rounding may do to each."""

    out: torch.Tensor
    lse: torch.Tensor
    gradients: tuple[torch.Tensor, ...]  # of q, k, v
    bounds: tuple[torch.Tensor, ...]


def case(
    facts: BackwardFacts,
    len_q: int,
    len_kv: int,
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    scale: float | None = None,
) -> Case:
    torch.manual_seed(len_q + len_kv)

    def normal(length: int, h: int, d: int) -> torch.Tensor:
        return torch.randn(batch, length, h, d).to(DTYPES[facts.dtype])

    return Case(
        normal(len_q, heads[0], facts.head_dim_v),
        normal(len_q, heads[0], facts.head_dim),
        normal(len_kv, heads[1], facts.head_dim),
        normal(len_kv, heads[1], facts.head_dim_v),
        facts.head_dim**-0.5 if scale is None else scale,
        torch.randn(batch, heads[0], len_q),
    )


def exact(facts: BackwardFacts, c: Case) -> Exact:
    dout, q, k, v = (x.double().transpose(1, 2) for x in (c.dout, c.q, c.k, c.v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = c.scale * q @ keys.mT
    if facts.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.clamp(min=-1e300)[..., None])
    out = (p @ values).transpose(1, 2).to(c.q.dtype)
    rowsum = (dout * out.double().transpose(1, 2)).sum(-1)
    if facts.dlse:
        rowsum -= c.dlse.double()
    dp = dout @ values.mT
    ds = p * (dp - rowsum[..., None])
    # P and dS are rounded, each by half an eps, dS of a rounded P by a whole one; what the float32
    # of dP - D loses is of the size of its terms, and so is what is subnormal in fp16.
    eps = torch.finfo(c.q.dtype).eps
    tiny = 2.0**-23 * math.sqrt(facts.head_dim_v)
    lost = 2.0**-24 if facts.dtype == "float16" else 0.0
    size = p * (dout.abs() @ values.abs().mT + rowsum.abs()[..., None])
    ds_error = eps * ds.abs() + tiny * size + lost
    p_error = eps / 2 * p + 2.0**-20 * p + lost

    def members(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    gradients = (c.scale * ds @ keys, members(c.scale * ds.mT @ q), members(p.mT @ dout))
    errors = (
        abs(c.scale) * ds_error @ keys.abs(),
        members(abs(c.scale) * ds_error.mT @ q.abs()),
        members(p_error.mT @ dout.abs()),
    )
    bounds = tuple(
        error + eps / 2 * g.abs() + lost for error, g in zip(errors, gradients, strict=True)
    )
    return Exact(
        out,
        lse.float(),
        tuple(g.transpose(1, 2) for g in gradients),
        tuple(b.transpose(1, 2) for b in bounds),
    )


def run(facts: BackwardFacts, c: Case, e: Exact, **options: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv; options as of `reported`."""
    return reported(facts, c, e, **options)[0]


def reported(
    facts: BackwardFacts,
    c: Case,
    e: Exact,
    views: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    heads_first: bool = False,
    outputs: bool = True,
    more: int = 0,
    content: float = math.nan,
    sms: int = 132,
    arch: str = "sm_90a",
    tiles: BlackwellBackwardTiles | None = None,  # in place of the table's
    **options: Any,
) -> tuple[tuple[torch.Tensor, ...], emulator.Report]:
    """(dq, dk and dv), every byte of which must be written, and what the emulator reports.

    The workspace has `more` elements than it needs, all of them `content`.
    """
    inputs = [views(x) for x in (c.dout, c.q, c.k, c.v, e.out)]
    gradients = [views(torch.empty_like(x)) for x in (c.q, c.k, c.v)]
    if heads_first:
        inputs, gradients = ([x.transpose(1, 2) for x in xs] for xs in (inputs, gradients))
    batch, len_q, heads_q, _ = c.q.shape
    shape = batch, heads_q, len_q
    floats = (
        tiles.workspace_floats(*shape, facts.deterministic)
        if tiles
        else backward_workspace(arch, facts, *shape)
    )
    report = emulator.run(
        build(facts, arch, tiles)[0],
        *inputs,
        e.lse,
        *((c.dlse,) if facts.dlse else ()),
        *gradients,
        torch.full((floats + more,), content),
        c.scale,
        heads_first,
        sms,
        outputs=gradients if outputs else (),
        options=emulator.Options(strict=True, **options),
    )
    return tuple(x.transpose(1, 2) if heads_first else x for x in gradients), report


def check(facts: BackwardFacts, c: Case, **options: Any) -> tuple[torch.Tensor, ...]:
    e = exact(facts, c)
    results = run(facts, c, e, **options)
    for name, found, true, bound in zip("qkv", results, e.gradients, e.bounds, strict=True):
        share = ((found.double() - true).abs() / bound.clamp(min=1e-30)).max().item()
        assert share <= 1, (f"d{name}", share)
    return results
