"""RMS error of O and of its gradients against float64, on plain and on outlier inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from .cells import Cell
from .contenders import Backward, Contender, cudnn_alone, runs

INPUTS = {"N(0,1)": False, "outliers": True}  # 1 entry in 1000 ten times as large
CHUNK_ROWS = 1024  # of Q at a time: 256 MiB of scores at length 32k


def errors(
    cell: Cell, contenders: Sequence[Contender], *, outliers: bool, device: str = "cuda"
) -> dict[str, dict[str, float]]:
    """RMS error of each contender's O over the first and last head of the last sequence.

    Args:
        cell: the problem.
        contenders: whom to measure; those that cannot run it are left out.
        outliers: as for `Cell.inputs`.
        device: where to compute.

    Returns:
        Errors by name, of "out".
    """
    q, k, v = cell.inputs(device, outliers=outliers)
    heads = sorted({0, cell.heads - 1})
    group = cell.heads // cell.heads_kv
    exact = torch.stack(
        [
            reference(q[-1, :, h], k[-1, :, h // group], v[-1, :, h // group], causal=cell.causal)
            for h in heads
        ],
        dim=1,
    )
    found: dict[str, float] = {}
    for contender in contenders:
        call = contender.bind(q, k, v, cell.causal)
        with cudnn_alone():
            if not runs(contender.name, call):
                continue
            out = contender.out(call())
        found[contender.name] = rms(out[-1, :, heads].double() - exact)
    return {"out": found}


def gradient_errors(
    cell: Cell, contenders: Sequence[Contender], *, outliers: bool, device: str = "cuda"
) -> dict[str, dict[str, float]]:
    """RMS error of each contender's dq, dk and dv, over the last key head of the last sequence.

    Args:
        cell, contenders, outliers, device: as for `errors`.

    Returns:
        Errors by name, of "dq", "dk" and "dv".
    """
    inputs = cell.inputs(device, outliers=outliers)
    calls = {one.name: Backward(one, inputs, cell.causal) for one in contenders}
    group = cell.heads // cell.heads_kv
    heads = slice(cell.heads - group, None)  # of q, that share the last head of k
    exact: tuple[torch.Tensor, ...] | None = None
    found: dict[str, dict[str, float]] = {name: {} for name in ("dq", "dk", "dv")}
    for name, call in calls.items():
        with cudnn_alone():
            if not runs(name, call):
                continue
            dq, dk, dv = call()
        if exact is None:
            q, k, v = inputs
            exact = gradients(
                call.dout[-1, :, heads], q[-1, :, heads], k[-1, :, -1], v[-1, :, -1], cell.causal
            )
        ours = dq[-1, :, heads], dk[-1, :, -1], dv[-1, :, -1]
        for of, gradient, right in zip(found, ours, exact, strict=True):
            found[of][name] = rms(gradient.double() - right)
    return found


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
