"""RMS error of O and of its gradients against float64, on plain and on outlier inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from .cells import BACKWARD, FORWARD, Cell
from .contenders import Inputs, gradient_of_out
from .timing import Call

OF = {FORWARD: ("out",), BACKWARD: ("dq", "dk", "dv")}  # what a pass computes
ALLOWED = 0.01  # of the RMS: rounding of P and dS to bf16 costs 0.25 %
INPUTS = {"N(0,1)": False, "outliers": True}  # 1 entry in 1000 ten times as large
CHUNK_ROWS = 1024  # of Q at a time: 256 MiB of scores at length 32k


@dataclass(frozen=True)
class Errors:
    """RMS errors of what the contestants compute for one quantity, by their names.

    Attributes: `size` is the RMS of what is right.
    """

    of: str  # out, dq, dk or dv
    size: float
    rms: dict[str, float]


def errors(
    cell: Cell, inputs: Inputs, calls: Mapping[str, Call], which: str = FORWARD
) -> list[Errors]:
    """RMS errors of O over the first and last head of the last sequence; or of dq, dk and dv, over
    the last key head of the last sequence and the heads of q that share it.

    Args:
        cell: the problem.
        inputs: its q, k, v.
        calls: those that are `timing.able` to run.
        which: "fwd" or "bwd".

    Returns:
        Of O; or of dq, dk and dv.
    """
    right = _exact(cell, inputs, which)
    found = [Errors(of, rms(exact), {}) for of, exact in zip(OF[which], right, strict=True)]
    for name, call in calls.items():
        parts = _parts(cell, call.once(), which)
        for errors, part, exact in zip(found, parts, right, strict=True):
            errors.rms[name] = rms(part.double() - exact)
    return found


def wrong(found: Iterable[Errors]) -> dict[str, str]:
    """Who is off by more than `ALLOWED` of the RMS of what is right, and by how much, by name."""
    said: dict[str, str] = {}
    for errors in found:
        for name, error in errors.rms.items():
            if not error <= ALLOWED * errors.size:  # nan is not
                share = f"{error / errors.size:.1%}" if errors.size else f"{error:.1e}"
                said.setdefault(name, f"wrong: {errors.of} is {share} off float64's (RMS)")
    return said


def _exact(cell: Cell, inputs: Inputs, which: str) -> tuple[torch.Tensor, ...]:
    """In float64, of the heads that `_parts` takes."""
    q, k, v = inputs
    group = cell.heads // cell.heads_kv
    if which == BACKWARD:
        dout = gradient_of_out(inputs)[-1, :, -group:]
        return gradients(dout, q[-1, :, -group:], k[-1, :, -1], v[-1, :, -1], cell.causal)
    outs = [
        reference(q[-1, :, h], k[-1, :, h // group], v[-1, :, h // group], causal=cell.causal)
        for h in _heads(cell)
    ]
    return (torch.stack(outs, dim=1),)


def _parts(cell: Cell, results: tuple[torch.Tensor, ...], which: str) -> tuple[torch.Tensor, ...]:
    if which == BACKWARD:
        dq, dk, dv = results
        return dq[-1, :, -(cell.heads // cell.heads_kv) :], dk[-1, :, -1], dv[-1, :, -1]
    return (results[0][-1, :, _heads(cell)],)


def _heads(cell: Cell) -> list[int]:
    return sorted({0, cell.heads - 1})


def gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    rows: int = CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the query heads that share a key head, in float64, some rows at a time.

    Args:
        dout, q: (length, heads, head_dim_v) and (length, heads, head_dim).
        k, v: (length, head_dim) and (length, head_dim_v).
        causal: query i sees keys up to i.
        rows: how many of q at a time.

    Returns:
        dq, dk, dv in the shapes of q, k and v, float64.
    """
    k, v = k.double(), v.double()
    dq, dk, dv = torch.empty_like(q, dtype=torch.float64), torch.zeros_like(k), torch.zeros_like(v)
    scale = 1 / math.sqrt(q.shape[2])
    for head in range(q.shape[1]):
        for part, some_q, weights in _weights(q[:, head], k, causal, rows):
            some_do = dout[part, head].double()
            dv += weights.T @ some_do
            dp = some_do @ v.T
            ds = scale * weights * (dp - (weights * dp).sum(-1, keepdim=True))
            dq[part, head] = ds @ k
            dk += ds.T @ some_q
    return dq, dk, dv


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, rows: int = CHUNK_ROWS
) -> torch.Tensor:
    """Attention of one head in float64, some rows at a time.

    Args:
        q, k, v: (length, head_dim) or (length, head_dim_v).
        causal: query i sees keys up to i.
        rows: how many of q at a time.

    Returns:
        (length, head_dim_v), float64.
    """
    k, v = k.double(), v.double()
    return torch.cat([weights @ v for _, _, weights in _weights(q, k, causal, rows)])


def _weights(
    q: torch.Tensor, k: torch.Tensor, causal: bool, rows: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Some rows at a time: which, q (rows, head_dim) and P (rows, length) of them, in float64."""
    scale = 1 / math.sqrt(q.shape[1])
    keys = torch.arange(len(k), device=k.device)
    for start in range(0, len(q), rows):
        part = slice(start, start + rows)
        some = q[part].double()
        scores = scale * some @ k.T
        if causal:
            queries = start + torch.arange(len(scores), device=k.device)
            scores.masked_fill_(keys > queries[:, None], -math.inf)
        yield part, some, scores.softmax(-1)


def rms(difference: torch.Tensor) -> float:
    """Root of the mean square."""
    return difference.square().mean().sqrt().item()
