"""The reference is right: against loops over single keys, torch's autograd, finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from . import reference as ref
from .reference import INF, Partial, Tensor


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs(
    batch: int = 2, len_q: int = 5, len_kv: int = 7, heads: int = 4, heads_kv: int = 2, d: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, len_q, heads, d, dtype=torch.float64)
    k = torch.randn(batch, len_kv, heads_kv, d, dtype=torch.float64)
    v = torch.randn(batch, len_kv, heads_kv, d + 1, dtype=torch.float64)
    return q, k, v


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The definition, one query, one key at a time."""
    batch, len_q, heads, _ = q.shape
    len_kv, group = k.shape[1], heads // k.shape[2]
    out = torch.zeros(batch, len_q, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, len_q), -INF, dtype=torch.float64)
    for b, i, h in itertools.product(range(batch), range(len_q), range(heads)):
        keys = [j for j in range(len_kv) if not causal or j - len_kv <= i - len_q]
        if not keys:
            continue
        exponentials = {j: math.exp(scale * float(q[b, i, h] @ k[b, j, h // group])) for j in keys}
        total = sum(exponentials.values())
        lse[b, h, i] = math.log(total)
        for j in keys:
            out[b, i, h] += exponentials[j] / total * v[b, j, h // group]
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.5, -0.7, 0.0])
@pytest.mark.parametrize(("len_q", "len_kv"), [(5, 7), (7, 5), (4, 4), (1, 6), (6, 1)])
def test_attention(len_q: int, len_kv: int, scale: float, causal: bool) -> None:
    q, k, v = inputs(len_q=len_q, len_kv=len_kv)
    got = ref.attention(q, k, v, scale=scale, causal=causal)
    out, lse = by_hand(q, k, v, scale, causal)
    torch.testing.assert_close(got.out, out)
    torch.testing.assert_close(got.lse, lse)


def test_default_scale() -> None:
    q, k, v = inputs(d=16)
    default, explicit = ref.attention(q, k, v), ref.attention(q, k, v, scale=0.25)
    assert torch.equal(default.out, explicit.out)


def test_causal_is_bottom_right() -> None:
    assert ref.visible(2, 4, True).tolist() == [[True, True, True, False], [True] * 4]
    assert ref.visible(3, 1, True).tolist() == [[False], [False], [True]]


def test_nothing_to_attend() -> None:
    q, k, v = inputs(len_q=7, len_kv=5)
    got = ref.attention(q, k, v, causal=True)
    assert (got.out[:, :2] == 0).all() and (got.out[:, 2:] != 0).all()
    assert (got.lse[:, :, :2] == -INF).all() and got.lse[:, :, 2:].isfinite().all()
    grads = ref.gradients(torch.randn_like(got.out), q, k, v, causal=True)
    assert (grads.dq[:, :2] == 0).all()
    assert all(x.isfinite().all() for x in (grads.dq, grads.dk, grads.dv))


def test_no_keys() -> None:
    q, k, v = inputs(len_kv=0)
    got = ref.attention(q, k, v)
    assert (got.out == 0).all() and (got.lse == -INF).all()


def test_mask_joins_causal() -> None:
    q, k, v = inputs(len_q=6, len_kv=6)
    mask = torch.rand(6, 6) > 0.3
    both = ref.attention(q, k, v, causal=True, mask=mask)
    one = ref.attention(q, k, v, mask=mask & ref.visible(6, 6, True))
    assert torch.equal(both.out, one.out)
    free = ref.attention(q, k, v, causal=True)
    assert not torch.equal(both.out, free.out)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = inputs()
    got = ref.attention(1e4 * q, k, v, scale=1.0)
    best = torch.einsum("bqhgd,bkhd->bhgqk", 1e4 * q.unflatten(2, (2, 2)), k).amax(-1)
    torch.testing.assert_close(got.lse, best.flatten(1, 2), rtol=1e-4, atol=0)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("len_q", "len_kv"), [(5, 7), (7, 5)])
def test_gradients_against_autograd(len_q: int, len_kv: int, causal: bool, with_dlse: bool) -> None:
    leaves = [x.requires_grad_() for x in inputs(len_q=len_q, len_kv=len_kv)]
    q, k, v = leaves
    seen = ref.visible(len_q, len_kv, causal)
    scores = 0.3 * torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2))
    # Rows without a key would give NaN through log(0): leave them out of the graph.
    some = seen.any(-1)
    scores = scores[:, :, some].masked_fill(~seen[some], -INF)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(2, 2))
    dout = torch.randn(2, len_q, 4, 4, dtype=torch.float64)
    dlse = torch.randn(2, 4, len_q, dtype=torch.float64) if with_dlse else None
    loss = (dout[:, some] * out).sum()
    if dlse is not None:
        loss = loss + (dlse[:, :, some] * scores.logsumexp(-1)).sum()
    want = torch.autograd.grad(loss, leaves)
    got = ref.gradients(dout, *(x.detach() for x in leaves), scale=0.3, causal=causal, dlse=dlse)
    for a, b in zip((got.dq, got.dk, got.dv), want, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_against_finite_differences() -> None:
    tensors = inputs(batch=1, len_q=3, len_kv=4, heads=2, heads_kv=1, d=2)
    dout = torch.randn(1, 3, 2, 3, dtype=torch.float64)
    dlse = torch.randn(1, 2, 3, dtype=torch.float64)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> float:
        got = ref.attention(q, k, v, scale=-0.8, causal=True)
        return float((dout * got.out).sum() + (dlse * got.lse).sum())

    got = ref.gradients(dout, *tensors, scale=-0.8, causal=True, dlse=dlse)
    step = 1e-5
    for which, gradient in enumerate((got.dq, got.dk, got.dv)):
        numeric = torch.empty_like(gradient)
        for i in range(gradient.numel()):
            losses = []
            for sign in (1, -1):
                moved = [x.clone() for x in tensors]
                moved[which].view(-1)[i] += sign * step
                losses.append(loss(*moved))
            numeric.view(-1)[i] = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(gradient, numeric, atol=1e-8, rtol=1e-6)


# ---- softmax and its monoid ----------------------------------------------------------------------


def masked_scores(rows: int = 9, keys: int = 23) -> Tensor:
    """Scores with some keys masked, one row wholly, one from the start, one of huge values."""
    x = 5 * torch.randn(rows, keys, dtype=torch.float64)
    x[torch.rand(rows, keys) < 0.2] = -INF
    x[0] = -INF
    x[1, :20] = -INF
    x[1, 22] = 0.0
    x[2] *= 1e3
    return x


def test_safe_softmax() -> None:
    x = masked_scores()
    want = x.softmax(-1)
    want[0] = 0
    torch.testing.assert_close(ref.safe_softmax(x), want)


def test_online_softmax() -> None:
    x = masked_scores()
    row_max, row_sum = ref.online_softmax(x)
    assert torch.equal(row_max, x.amax(-1))
    torch.testing.assert_close(row_max + row_sum.log(), x.logsumexp(-1))
    weights = torch.exp(x[1:] - row_max[1:, None]) / row_sum[1:, None]
    torch.testing.assert_close(weights, ref.safe_softmax(x)[1:])


def partials(parts: int) -> tuple[list[Partial], Partial]:
    """Ragged parts of one set of keys, one of them without any that are seen, and the whole."""
    x = masked_scores()
    x[:, 4:9] = -INF
    v = torch.randn(x.shape[1], 3, dtype=torch.float64)
    cuts = [0, 4, 9, 10, 23][: parts + 1]
    pieces = [Partial.of(x[:, a:b], v[a:b]) for a, b in itertools.pairwise(cuts)]
    return pieces, Partial.of(x[:, : cuts[-1]], v[: cuts[-1]])


def assert_same(a: Partial, b: Partial) -> None:
    """The same element: (m, l, O) themselves, not only what `finish` makes of them."""
    for x, y in zip((a.row_max, a.row_sum, a.out), (b.row_max, b.row_sum, b.out), strict=True):
        torch.testing.assert_close(x, y)


def test_monoid_neutral() -> None:
    (part, *_), _ = partials(1)
    neutral = Partial.neutral(9, 3)
    assert_same(neutral.merge(part), part)
    assert_same(part.merge(neutral), part)
    assert_same(neutral.merge(neutral), neutral)


def test_monoid_is_associative_and_commutative() -> None:
    (a, b, c, d), whole = partials(4)
    assert_same(a.merge(b).merge(c).merge(d), whole)
    assert_same(a.merge(b.merge(c.merge(d))), whole)
    for order in itertools.permutations((a, b, c, d)):
        first, second, third, fourth = order
        assert_same(first.merge(second).merge(third.merge(fourth)), whole)


def test_monoid_finish() -> None:
    x, v = masked_scores(), torch.randn(23, 3, dtype=torch.float64)
    out, lse = Partial.of(x, v).finish()
    torch.testing.assert_close(out, ref.safe_softmax(x) @ v)
    torch.testing.assert_close(lse, x.logsumexp(-1))
    assert lse[0] == -INF and (out[0] == 0).all()


# ---- the papers' loops ---------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [ref.fa1, ref.fa2])
@pytest.mark.parametrize(("tile_q", "tile_kv"), [(4, 4), (3, 5), (16, 2), (1, 1), (64, 64)])
@pytest.mark.parametrize("kind", ["full", "causal", "random", "nothing"])
@pytest.mark.parametrize("scale", [0.4, -1.3])
def test_loops(loop: object, tile_q: int, tile_kv: int, kind: str, scale: float) -> None:
    len_q, len_kv = 13, 10
    q, k, v = (x[0, :, 0] for x in inputs(1, len_q, len_kv, 1, 1, 6))
    mask = {
        "full": ref.visible(len_q, len_kv, False),
        "causal": ref.visible(len_q, len_kv, True),  # three rows see nothing
        "random": torch.rand(len_q, len_kv) < 0.15,  # whole tiles unseen, and rows
        "nothing": torch.zeros(len_q, len_kv, dtype=torch.bool),
    }[kind]
    out, lse = loop(q, k, v, mask, scale, tile_q, tile_kv)
    want = ref.attention(
        q[None, :, None], k[None, :, None], v[None, :, None], scale=scale, mask=mask
    )
    torch.testing.assert_close(out, want.out[0, :, 0])
    torch.testing.assert_close(lse, want.lse[0, 0])
