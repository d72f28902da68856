"""Attention in float64, plainly: what every kernel is measured against.

Tensors are torch float64. Full attention uses the package's layout, q (batch, len_q, heads_q,
head_dim), k (batch, len_kv, heads_kv, head_dim), v (batch, len_kv, heads_kv, head_dim_v), lse
(batch, heads_q, len_q). The loops of the papers work on one head: q (len_q, d), k and v
(len_kv, d), a boolean `mask` (len_q, len_kv), true where a query sees a key.

A row that sees nothing has out 0, lse -inf and gradients 0.

[1] Milakov, Gimelshein: Online normalizer calculation for softmax, 2018
[2] Dao et al.: FlashAttention, 2022     [3] Dao: FlashAttention-2, 2023
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
INF = math.inf


# ---- the definition ------------------------------------------------------------------------------


def visible(len_q: int, len_kv: int, causal: bool) -> Tensor:
    """(len_q, len_kv) bool. Causal is aligned bottom-right: the last query sees every key."""
    everything = torch.ones(len_q, len_kv, dtype=torch.bool)
    return everything.tril(len_kv - len_q) if causal else everything


@dataclass(frozen=True)
class Result:
    """out (batch, len_q, heads_q, head_dim_v) and lse (batch, heads_q, len_q), float64."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """dq, dk, dv in the shapes of q, k, v, float64."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def _scores(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, mask: Tensor | None
) -> tuple[Tensor, float]:
    """Masked scores (batch, heads_kv, group, len_q, len_kv) and the scale used."""
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    heads_kv = k.shape[2]
    folded = q.double().unflatten(2, (heads_kv, -1))
    scores = scale * torch.einsum("bqhgd,bkhd->bhgqk", folded, k.double())
    seen = visible(q.shape[1], k.shape[1], causal).to(q.device)
    if mask is not None:
        seen = seen & mask
    return scores.masked_fill(~seen, -INF), scale


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """softmax over the last axis and its log-sum-exp; zeros and -inf where nothing is seen."""
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse == -INF, 0.0).unsqueeze(-1)), lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Result:
    """softmax(scale q k^T) v and its natural-log LSE.

    Args:
        q, k, v: any floating type; heads_q is a multiple of heads_kv, query head h reads key head
            h // (heads_q / heads_kv).
        scale: 1 / sqrt(head_dim) if None; may be negative or zero.
        causal: query i sees key j where j - len_kv <= i - len_q.
        mask: (len_q, len_kv) or broadcastable to (batch, heads_kv, group, len_q, len_kv), true
            where seen; besides causal.
    """
    scores, _ = _scores(q, k, scale, causal, mask)
    weights, lse = _weights(scores)
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v.double())
    return Result(out.flatten(2, 3), lse.flatten(1, 2))


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse), by the formulas of [2], appendix B.2.

    dS = P * (dP - D), D = rowsum(dO * O); a gradient of lse adds dlse to dP - D, since
    d lse / d S = P.
    """
    scores, scale = _scores(q, k, scale, causal, mask)
    weights, _ = _weights(scores)
    heads_kv = k.shape[2]
    do = dout.double().unflatten(2, (heads_kv, -1))
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v.double())
    row_sum = (do * out).sum(-1).permute(0, 2, 3, 1)  # D, (batch, heads_kv, group, len_q)
    if dlse is not None:
        row_sum = row_sum - dlse.double().unflatten(1, (heads_kv, -1))
    dv = torch.einsum("bhgqk,bqhgd->bkhd", weights, do)
    dp = torch.einsum("bqhgd,bkhd->bhgqk", do, v.double())
    ds = scale * weights * (dp - row_sum.unsqueeze(-1))
    dq = torch.einsum("bhgqk,bkhd->bqhgd", ds, k.double()).flatten(2, 3)
    dk = torch.einsum("bhgqk,bqhgd->bkhd", ds, q.double().unflatten(2, (heads_kv, -1)))
    return Gradients(dq, dk, dv)


# ---- softmax in three passes and online ----------------------------------------------------------


def safe_softmax(x: Tensor) -> Tensor:
    """softmax over the last axis in three passes: maximum, sum, division. Nothing seen gives 0."""
    row_max = torch.full(x.shape[:-1], -INF, dtype=torch.float64)
    for j in range(x.shape[-1]):
        row_max = torch.maximum(row_max, x[..., j])
    shift = row_max.masked_fill(row_max == -INF, 0.0)
    row_sum = torch.zeros_like(row_max)
    for j in range(x.shape[-1]):
        row_sum = row_sum + torch.exp(x[..., j] - shift)
    divisor = row_sum.masked_fill(row_sum == 0, 1.0)
    out = torch.empty_like(x)
    for j in range(x.shape[-1]):
        out[..., j] = torch.exp(x[..., j] - shift) / divisor
    return out


@dataclass(frozen=True)
class Partial:
    """What is known of rows after some of their keys: the monoid (m, l, O) of the online softmax.

    `row_max` m and `row_sum` l, (rows,); `out` O (rows, d), not divided: with x the scores seen,
    m = max x, l = sum exp(x - m), O = sum exp(x - m) v. The neutral element has m = -inf, l = 0,
    O = 0; `merge` is associative and commutative.
    """

    row_max: Tensor
    row_sum: Tensor
    out: Tensor

    @staticmethod
    def neutral(rows: int, d: int) -> Partial:
        zeros = torch.zeros(rows, d, dtype=torch.float64)
        return Partial(torch.full((rows,), -INF, dtype=torch.float64), zeros.sum(-1), zeros)

    @staticmethod
    def of(scores: Tensor, v: Tensor) -> Partial:
        """The keys of one tile: scores (rows, keys), v (keys, d)."""
        row_max = scores.amax(-1)
        weights = torch.exp(scores - row_max.masked_fill(row_max == -INF, 0.0).unsqueeze(-1))
        return Partial(row_max, weights.sum(-1), weights @ v)

    def merge(self, other: Partial) -> Partial:
        """Both sets of keys together ([1], section 3.1)."""
        row_max = torch.maximum(self.row_max, other.row_max)
        shift = row_max.masked_fill(row_max == -INF, 0.0)
        a, b = torch.exp(self.row_max - shift), torch.exp(other.row_max - shift)
        return Partial(
            row_max,
            a * self.row_sum + b * other.row_sum,
            a.unsqueeze(-1) * self.out + b.unsqueeze(-1) * other.out,
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out (rows, d), lse (rows,)): the one division at the end."""
        divisor = self.row_sum.masked_fill(self.row_sum == 0, 1.0)
        return self.out / divisor.unsqueeze(-1), self.row_max + torch.log(self.row_sum)


def online_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, l) of the last axis in one pass, key by key ([1], algorithm 3): softmax is
    exp(x - m) / l, the log-sum-exp m + log l."""
    row_max = torch.full(x.shape[:-1], -INF, dtype=torch.float64)
    row_sum = torch.zeros_like(row_max)
    for j in range(x.shape[-1]):
        new_max = torch.maximum(row_max, x[..., j])
        shift = new_max.masked_fill(new_max == -INF, 0.0)
        row_sum = row_sum * torch.exp(row_max - shift) + torch.exp(x[..., j] - shift)
        row_max = new_max
    return row_max, row_sum


# ---- the papers' loops ---------------------------------------------------------------------------


def _tiles(length: int, size: int) -> list[slice]:
    """Full tiles, then what is left."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def fa1(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, tile_q: int, tile_kv: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of [2]: K/V tiles outside, Q tiles inside; O, m and l live in HBM and O is kept
    divided, rescaled at every step. Returns (out (len_q, d), lse (len_q,))."""
    len_q = q.shape[0]
    out = torch.zeros(len_q, v.shape[1], dtype=torch.float64)
    row_sum = torch.zeros(len_q, dtype=torch.float64)
    row_max = torch.full((len_q,), -INF, dtype=torch.float64)
    for cols in _tiles(k.shape[0], tile_kv):
        for rows in _tiles(len_q, tile_q):
            scores = (scale * q[rows] @ k[cols].T).masked_fill(~mask[rows, cols], -INF)
            tile_max = scores.amax(-1)
            safe = tile_max.masked_fill(tile_max == -INF, 0.0)
            weights = torch.exp(scores - safe.unsqueeze(-1))
            new_max = torch.maximum(row_max[rows], tile_max)
            shift = new_max.masked_fill(new_max == -INF, 0.0)
            old, new = torch.exp(row_max[rows] - shift), torch.exp(tile_max - shift)
            new_sum = old * row_sum[rows] + new * weights.sum(-1)
            rescaled = (old * row_sum[rows]).unsqueeze(-1) * out[rows]
            divisor = new_sum.masked_fill(new_sum == 0, 1.0).unsqueeze(-1)
            out[rows] = (rescaled + new.unsqueeze(-1) * (weights @ v[cols])) / divisor
            row_sum[rows], row_max[rows] = new_sum, new_max
    return out, row_max + torch.log(row_sum)


def fa2(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, tile_q: int, tile_kv: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of [3]: Q tiles outside, K/V tiles inside; O is divided once at the end and one
    LSE a row is kept. Returns (out (len_q, d), lse (len_q,))."""
    out = torch.empty(q.shape[0], v.shape[1], dtype=torch.float64)
    lse = torch.empty(q.shape[0], dtype=torch.float64)
    for rows in _tiles(q.shape[0], tile_q):
        state = Partial.neutral(rows.stop - rows.start, v.shape[1])
        for cols in _tiles(k.shape[0], tile_kv):
            scores = (scale * q[rows] @ k[cols].T).masked_fill(~mask[rows, cols], -INF)
            new_max = torch.maximum(state.row_max, scores.amax(-1))
            shift = new_max.masked_fill(new_max == -INF, 0.0)
            weights = torch.exp(scores - shift.unsqueeze(-1))
            alpha = torch.exp(state.row_max - shift)
            state = Partial(
                new_max,
                alpha * state.row_sum + weights.sum(-1),
                alpha.unsqueeze(-1) * state.out + weights @ v[cols],
            )
        out[rows], lse[rows] = state.finish()
    return out, lse
