"""RMS error of O against float64, on plain and on outlier inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .cells import Cell
from .contenders import Contender, cudnn_alone, runs

INPUTS = {"N(0,1)": False, "outliers": True}  # 1 entry in 1000 ten times as large
CHUNK_ROWS = 1024  # of Q at a time: 256 MiB of scores at length 32k


def errors(
    cell: Cell, contenders: Sequence[Contender], *, outliers: bool, device: str = "cuda"
) -> dict[str, float]:
    """RMS error of each contender's O, by name, over the first and last head of the last sequence.

    Args:
        cell: the problem.
        contenders: whom to measure; those that cannot run it are left out.
        outliers: as for `Cell.inputs`.
        device: where to compute.
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
    return found


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
    scale = 1 / math.sqrt(q.shape[1])
    k, v = k.double(), v.double()
    keys = torch.arange(len(k), device=k.device)
    parts = []
    for start in range(0, len(q), rows):
        scores = scale * q[start : start + rows].double() @ k.T
        if causal:
            queries = start + torch.arange(len(scores), device=k.device)
            scores.masked_fill_(keys > queries[:, None], -math.inf)
        parts.append(scores.softmax(-1) @ v)
    return torch.cat(parts)


def rms(difference: torch.Tensor) -> float:
    """Root of the mean square."""
    return difference.square().mean().sqrt().item()
