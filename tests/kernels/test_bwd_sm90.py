"""Hopper's backward on the emulator, checker on, against float64."""

import math
from dataclasses import replace

import pytest
import torch

from hopwell.emulator.machine import Cluster
from hopwell.kernels import BackwardFacts
from hopwell.kernels.tiles import BACKWARD, BackwardTiles

from .backward import CAUSAL, D64, D64_FULL, D256, FULL, SEEDS, case, check, exact, run

SHAPES = [
    (128, 128, (1, 1), 1),
    (200, 333, (4, 2), 1),
    (130, 257, (7, 1), 2),
    (257, 130, (4, 2), 1),  # causal: the first 127 rows have nothing to attend
    (300, 100, (1, 1), 1),  # causal: the first tiles of Q have nothing to attend
    (1, 513, (2, 1), 1),
    (65, 1, (1, 1), 2),
    (500, 700, (1, 1), 1),
]


@pytest.mark.parametrize(
    "facts", [D64_FULL, D64, FULL, CAUSAL], ids=["64-full", "64-causal", "128-full", "128-causal"]
)
@pytest.mark.parametrize(("len_q", "len_kv", "heads", "batch"), SHAPES)
def test_against_float64(
    facts: BackwardFacts, len_q: int, len_kv: int, heads: tuple[int, int], batch: int
) -> None:
    check(facts, case(facts, len_q, len_kv, heads, batch))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("row", BACKWARD, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_lengths_around_a_multiple_of_the_rows_tile(row: BackwardTiles, causal: bool) -> None:
    """Of queries, one less and one more; of keys, as many, so that the diagonal crosses tiles."""
    facts = BackwardFacts("bfloat16", row.head_dim, row.head_dim_v, causal)
    tile = row.tile_q
    for len_q, len_kv in [(2 * tile - 1, row.tile_kv + 1), (tile + 1, tile + 1), (tile, 3 * tile)]:
        check(facts, case(facts, len_q, len_kv, (2, 1)))


@pytest.mark.parametrize("facts", [D64, CAUSAL, D256], ids=["64", "128", "256"])
def test_any_order_of_completion(facts: BackwardFacts) -> None:
    c = case(facts, 150, 300, (2, 1))
    check(facts, c, order="deferred")
    for seed in SEEDS:
        check(facts, c, order="random", seed=seed)


@pytest.mark.parametrize("facts", [D64, FULL, D256], ids=["64", "128-full", "256"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 0.5])
def test_any_scale(facts: BackwardFacts, scale: float) -> None:
    check(facts, case(facts, 150, 200, scale=scale))


def every_second_head(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 2)[:, :, ::2]


@pytest.mark.parametrize("heads_first", [False, True])
def test_views_and_either_layout(heads_first: bool) -> None:
    c = case(CAUSAL, 130, 200, (4, 2), batch=2)
    check(CAUSAL, c, views=every_second_head, heads_first=heads_first)


def test_an_expanded_gradient_of_out() -> None:
    c = case(CAUSAL, 130, 200, (2, 2))
    c.dout = torch.ones(1, dtype=torch.bfloat16).repeat(128).expand(c.dout.shape)
    check(CAUSAL, c)


@pytest.mark.parametrize("facts", [D64, FULL, D256], ids=["64-causal", "128-full", "256-causal"])
def test_nan_stays_where_it_is_seen(facts: BackwardFacts) -> None:
    """A query's NaN goes to its own row and the keys it sees; a key's to the rows that see it."""
    len_q, len_kv, row, key = 200, 300, 70, 250
    seen = torch.ones(len_q, len_kv, dtype=torch.bool)
    if facts.causal:
        seen = seen.tril(len_kv - len_q)
    clean = case(facts, len_q, len_kv)
    for spoiled, rows in (("q", [row]), ("v", seen[:, key].nonzero()[:, 0].tolist())):
        c = replace(clean)
        tensor = getattr(c, spoiled).clone()
        tensor[0, row if spoiled == "q" else key, 0, 3] = math.nan
        setattr(c, spoiled, tensor)
        e = exact(facts, clean)
        e.out[0, rows] = math.nan  # as forward leaves them
        if spoiled == "q":
            e.lse[..., row] = math.nan
        dq, dk, _ = run(facts, c, e, outputs=False)
        assert dq.isnan().any(-1)[0, :, 0].nonzero()[:, 0].tolist() == rows
        keys = seen[rows].any(0)
        found = dk.isnan().any(-1)[0, :, 0]
        # Nothing times the NaN of a query is NaN, in all keys of a tile that is visited for it.
        assert torch.equal(found, keys) if spoiled == "v" else found[keys].all()


def test_rows_with_nothing_to_attend_get_no_gradient() -> None:
    c = case(CAUSAL, 300, 100)
    dq, _, _ = check(CAUSAL, c)
    assert (dq[:, :200] == 0).all()


def test_a_workspace_may_be_larger_and_any_content() -> None:
    c = case(D64, 100, 100)
    e = exact(D64, c)
    first, second = run(D64, c, e), run(D64, c, e, more=1000, content=7.0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("facts", "sms"), [(D64, 132), (D64_FULL, 132), (D64_FULL, 5)], ids=["causal", "full", "few"]
)
def test_deterministic_sums_do_not_depend_on_who_is_first(facts: BackwardFacts, sms: int) -> None:
    """In random order CTAs start in any, so that some wait for others that start later."""
    c = case(facts, 300, 700, (2, 1))
    results = {}
    for chosen in (False, True):
        chosen_facts = replace(facts, deterministic=chosen)
        e = exact(chosen_facts, c)
        results[chosen] = [
            run(chosen_facts, c, e, sms=sms, order="random", seed=s)[0] for s in SEEDS
        ]
    assert all(torch.equal(dq, results[True][0]) for dq in results[True])
    assert not all(torch.equal(dq, results[False][0]) for dq in results[False])


@pytest.mark.parametrize("facts", [CAUSAL, FULL, D256], ids=["causal", "full", "256"])
def test_deterministic_against_float64(facts: BackwardFacts) -> None:
    facts = replace(facts, deterministic=True)
    for len_q, len_kv, heads in [(200, 333, (4, 2)), (257, 130, (2, 1)), (60, 520, (1, 1))]:
        check(facts, case(facts, len_q, len_kv, heads))


@pytest.mark.parametrize("facts", [D64, D64_FULL], ids=["causal", "full"])
def test_deterministic_sums_need_no_more_ctas_than_there_is_room_for(
    facts: BackwardFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six tiles of keys, and room for two: whoever waits must wait for one that has begun."""
    facts, start, most = replace(facts, deterministic=True), Cluster.start, 2

    def within(self: Cluster, first: tuple[int, int, int]) -> None:
        running = sum(slot.running for slot in self.machine.slots)
        assert running < most or self.machine.launch.grid[0] != 6, "no CTA can move"
        start(self, first)

    monkeypatch.setattr(Cluster, "start", within)
    check(facts, case(facts, 300, 700), sms=most)
