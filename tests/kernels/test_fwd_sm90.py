"""The Hopper forward kernel on the emulator, checker on, against float64."""

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from hopwell import emulator
from hopwell.emulator import loader, machine
from hopwell.emulator.report import Counters
from hopwell.emulator.session import Session
from hopwell.kernels import BlackwellFacts, ForwardFacts

from .built import CAUSAL, build

D64 = replace(CAUSAL, head_dim=64, head_dim_v=64)
D64_FULL = replace(D64, causal=False)
D64_SHORT = replace(D64, short=True)
D192 = replace(CAUSAL, head_dim=192)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Case:
    """Inputs and outputs of one call, laid out (batch, len, heads, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    scale: float
    counter: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the compiled function takes them."""
        return self.q, self.k, self.v, self.o, self.lse, self.scale, self.counter

    def exact(self, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float64 (O, LSE, P |V|); the last bounds what rounding P can do to O."""
        q, k, v = (x.double().transpose(1, 2) for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = self.scale * q @ k.transpose(-1, -2)
        if causal:
            row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
            scores[..., column > row + k.shape[2] - q.shape[2]] = -math.inf
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse[..., None].clamp(min=-1e300))
        return (p @ v).transpose(1, 2), lse, (p @ v.abs()).transpose(1, 2)


def case(
    facts: ForwardFacts | BlackwellFacts,
    len_q: int,
    len_kv: int,
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    scale: float | None = None,
) -> Case:
    torch.manual_seed(len_q + len_kv)
    shapes = [(len_q, heads[0]), (len_kv, heads[1]), (len_kv, heads[1]), (len_q, heads[0])]
    dims = [facts.head_dim, facts.head_dim, facts.head_dim_v, facts.head_dim_v]
    q, k, v, o = (
        torch.randn(batch, length, h, d).to(DTYPES[facts.dtype])
        for (length, h), d in zip(shapes, dims, strict=True)
    )
    lse = torch.empty(batch, heads[0], len_q)
    return Case(q, k, v, o, lse, facts.head_dim**-0.5 if scale is None else scale)


def run(facts: ForwardFacts, c: Case, outputs: bool = True, **options: Any) -> None:
    """Every byte of the outputs must be written, unless `outputs` says not to look."""
    written = (c.o, c.lse) if outputs else ()
    chosen = emulator.Options(strict=True, **options)
    emulator.run(build(facts).call, *c.arguments, outputs=written, options=chosen)
    assert c.counter.item() == 0


def check(facts: ForwardFacts | BlackwellFacts, c: Case, lse_atol: float = 2e-6) -> None:
    o, lse, bound = c.exact(facts.causal)
    # P and O are each rounded once; half of the smallest subnormal is lost besides in fp16.
    eps = torch.finfo(c.o.dtype).eps
    lost = 2.0**-25 * c.v.double().abs().sum() if facts.dtype == "float16" else 1e-6
    assert ((c.o.double() - o).abs() <= eps * bound + lost).all()
    assert (c.o[lse.transpose(1, 2) == -math.inf] == 0).all()
    torch.testing.assert_close(c.lse.double(), lse, atol=lse_atol, rtol=1e-6)


@pytest.mark.parametrize(
    "facts",
    [D64_FULL, D64, D64_SHORT, replace(CAUSAL, causal=False), CAUSAL],
    ids=["64-full", "64-causal", "64-short", "128-full", "128-causal"],
)
@pytest.mark.parametrize(
    ("len_q", "len_kv", "heads", "batch"),
    [
        (128, 128, (1, 1), 1),
        (200, 333, (4, 1), 1),
        (130, 257, (7, 1), 2),
        (257, 130, (4, 2), 1),  # causal: the first 127 rows have nothing to attend
        (300, 100, (1, 1), 1),  # causal: the first tile of Q has nothing to attend
        (1, 513, (2, 1), 1),
        (65, 1, (1, 1), 2),
        (500, 700, (1, 1), 1),
    ],
)
def test_against_float64(
    facts: ForwardFacts, len_q: int, len_kv: int, heads: tuple[int, int], batch: int
) -> None:
    c = case(facts, len_q, len_kv, heads, batch)
    run(facts, c)
    check(facts, c)


def test_fp16() -> None:
    facts = replace(D64, dtype="float16")
    c = case(facts, 200, 300, (2, 1))
    run(facts, c)
    check(facts, c)


@pytest.mark.parametrize("facts", [D64, D64_FULL], ids=["causal", "full"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 3.0, 1e6])
def test_any_scale(facts: ForwardFacts, scale: float) -> None:
    facts = replace(facts, negative_scale=scale < 0)
    c = case(facts, 150, 200, scale=scale)
    run(facts, c)
    check(facts, c)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_second_head(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 2)[:, :, ::2]


def one_batch(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def one_head(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, :1].expand(x.shape)


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """Batches more than 2**31 elements apart, most of which is never touched."""
    step = 2**31 + 8
    memory = torch.empty(step * (len(x) - 1) + x[0].numel(), dtype=x.dtype)
    return memory.as_strided(x.shape, (step, *x.stride()[1:])).copy_(x)


@pytest.mark.parametrize(
    ("view", "names"),
    [
        (transposed, "qkvo"),
        (every_second_head, "qkvo"),
        (one_batch, "qkv"),
        (one_head, "qkv"),
        (far_apart, "q"),
        (far_apart, "k"),
        (far_apart, "v"),
        (far_apart, "o"),
    ],
)
def test_views_need_no_copy(view: Callable[[torch.Tensor], torch.Tensor], names: str) -> None:
    c = case(D64, 70, 140, (2, 2), batch=2)
    for name in names:
        setattr(c, name, view(getattr(c, name)))
    run(D64, c, outputs=view is not far_apart)  # the bytes between are too many to look at
    check(D64, c)


@pytest.mark.parametrize("heads_first", [False, True], ids=["bshd", "bhsd"])
@pytest.mark.parametrize("head_dim_v", [8, 24, 40, 72, 200])
def test_o_inside_a_larger_tensor_leaves_the_rest_of_it_alone(
    head_dim_v: int, heads_first: bool
) -> None:
    """Octets that do not fill a quad, a length that does not fill a warp: nothing beside them."""
    facts = replace(D64, head_dim_v=head_dim_v)
    c = case(facts, 203, 140, (2, 1), batch=2)
    around = torch.full((2, 2, 205, head_dim_v + 16), 7.0, dtype=c.o.dtype)
    around = around if heads_first else around.transpose(1, 2).contiguous().transpose(1, 2)
    inside = around[:, :, 1:-1, 8:-8]
    c.o = inside.transpose(1, 2)
    run(facts, c)
    check(facts, c)
    inside.fill_(7.0)
    assert (around == 7.0).all()


D256 = replace(CAUSAL, head_dim=256, head_dim_v=256)


@pytest.mark.parametrize("scale", [-0.2, 0.2])
@pytest.mark.parametrize(
    "facts",
    [D192, replace(D192, causal=False), replace(D256, causal=False)],
    ids=["192-causal", "192-full", "256-full"],
)
def test_o_is_scaled_wherever_one_row_of_a_warp_has_a_new_maximum(
    facts: ForwardFacts, scale: float
) -> None:
    """Each warp another pattern of maxima over the five K/V tiles, in the order of visits."""
    facts = replace(facts, negative_scale=scale < 0)
    tiles = build(facts).kernel.tiles
    assert tiles.skip_unmoved and tiles.tile_q == 128
    visits, len_q = 5, 250
    c = case(facts, len_q, visits * tiles.tile_kv, scale=scale)

    # What a row's scores gain at each visit: most have their maximum in the first tile for good.
    gain = torch.zeros(16, 16, visits)  # warp, row, visit
    gain[..., 0] = 40.0
    gain[0] = 8.0 * torch.arange(visits)  # all rows rise at each visit, in warp 1 none ever does
    gain[2, 3, 2] = 80.0  # one row in the upper half of a warp,
    gain[3, 13, 3] = 80.0  # one in the lower half,
    gain[4, [7, 8], [1, 4]] = 80.0  # one in each
    little = 5 * 16 + 6
    gain[5, 6] = 40.0 + 0.4 * torch.arange(visits)  # one row a little, its scores all alike
    gain[8:13] = 40.0 * torch.rand(5, 16, visits)
    gain[14, 0, 4] = gain[15, 9, 4] = 80.0
    tile = torch.arange(visits * tiles.tile_kv) // tiles.tile_kv
    c.q[..., :8], c.k[..., :8], c.q[0, little] = 0.0, 0.0, 0.0
    c.k[0, torch.arange(len(tile)), 0, visits - 1 - tile] = 8.0
    c.q[0, :, 0, :visits] = (gain.reshape(-1, visits)[:len_q] / (8.0 * scale)).to(c.q.dtype)

    # Scores of -inf in one tile, of +inf in one tile, and of NaN, in warps where no maximum moves.
    lowest, highest, nan = 6 * 16 + 2, 6 * 16 + 11, 7 * 16 + 5
    huge = math.copysign(torch.finfo(c.q.dtype).max, scale)
    c.q[0, lowest, 0, 2], c.q[0, highest, 0, 3], c.q[0, nan, 0, 9] = -huge, huge, math.nan
    run(facts, c)
    assert c.o.isnan().all(-1).any(0).nonzero()[:, 0].tolist() == [highest, nan]
    clean = [row for row in range(len_q) if row not in (highest, nan)]
    o, lse, bound = c.exact(facts.causal)
    assert ((c.o.double() - o).abs() <= 2**-7 * bound + 1e-6)[0, clean].all()
    torch.testing.assert_close(c.lse.double()[..., clean], lse[..., clean], atol=2e-5, rtol=1e-6)


def test_nan_stays_in_its_rows() -> None:
    c = case(D64_FULL, 200, 200)
    rows = [37, 150]
    c.q[0, rows[0]], c.q[0, rows[1], 0, 3] = math.nan, math.nan
    run(D64_FULL, c)
    assert c.o.isnan().all(-1).any(0).nonzero()[:, 0].tolist() == rows
    assert c.lse.isnan().nonzero()[:, 2].tolist() == rows
    c.q[0, rows] = 0
    clean = torch.arange(200).ne(rows[0]) & torch.arange(200).ne(rows[1])
    o, _, bound = c.exact(causal=False)
    assert ((c.o.double() - o).abs() <= 2**-7 * bound + 1e-6)[0, clean].all()


@pytest.mark.parametrize("scale", [-0.3, 0.3])
@pytest.mark.parametrize("facts", [D64, D64_FULL], ids=["causal", "full"])
def test_infinite_scores_stay_in_their_rows(facts: ForwardFacts, scale: float) -> None:
    """The difference of two infinite maxima is NaN, of either sign."""
    facts = replace(facts, negative_scale=scale < 0)
    c = case(facts, 200, 500, scale=scale)
    rows = [0, 37, 128, 199]  # some of them in the thread that releases K for its warp
    c.q[0, rows, 0, 0] = math.inf
    run(facts, c)
    assert c.o.isnan().all(-1).any(0).nonzero()[:, 0].tolist() == rows
    clean = torch.ones(200, dtype=torch.bool)
    clean[rows] = False
    c.q[0, rows] = 0
    o, lse, bound = c.exact(facts.causal)
    assert ((c.o.double() - o).abs() <= 2**-7 * bound + 1e-6)[0, clean].all()
    torch.testing.assert_close(c.lse.double()[..., clean], lse[..., clean], atol=2e-6, rtol=1e-6)


def test_rows_with_nothing_to_attend_are_zero_even_beside_nan() -> None:
    c = case(D64, 200, 100)
    c.v[0, 0] = math.nan
    run(D64, c)
    assert (c.o[0, :100] == 0).all()
    assert (c.lse[0, 0, :100] == -math.inf).all()
    assert c.o[0, 100:].isnan().all()


@pytest.mark.parametrize("order", ["deferred", "random"])
@pytest.mark.parametrize("facts", [D64, CAUSAL], ids=["64", "128"])
def test_any_order_of_completion(facts: ForwardFacts, order: str) -> None:
    c = case(facts, 300, 420)
    run(facts, c, order=order, seed=11)
    check(facts, c)


def run_on(ctas: int, facts: ForwardFacts, c: Case, **options: Any) -> Counters:
    """`run` on so many CTAs, in place of one for each tile: each takes several from the queue."""
    session = Session(emulator.Options(strict=True, **options))
    with loader.intercept(lambda launch: session.launch(replace(launch, grid=(ctas, 1, 1)))):
        session.call(build(facts).call, *c.arguments, outputs=(c.o, c.lse))
    assert c.counter.item() == 0
    return session.report.counters


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize(
    "facts",
    [D64, D64_SHORT, D64_FULL, D192],
    ids=["64-causal", "64-short", "64-full", "192-causal"],
)
def test_fewer_ctas_than_tiles_take_them_in_turn(facts: ForwardFacts, ctas: int) -> None:
    """The loop over tiles, with two stages of Q and with one."""
    assert build(facts).kernel.tiles.stages_q == (2 if facts.head_dim == 64 else 1)
    c = case(facts, 500, 300, (2, 1))
    run_on(ctas, facts, c, order="random", seed=ctas)
    check(facts, c)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Collection[int]:
    """CTAs run side by side, three at first; which of them drew a number, in order."""
    step, atomic, draws = machine.Cluster.step, machine.Unit.atomic, []

    def step_beside_others(self: machine.Cluster) -> bool:
        moved = step(self)  # a round in which nothing moves lets another CTA in
        return moved and len(self.machine.slots) >= min(self.machine.launch.grid[0], 3)

    def noted(self: machine.Unit, space: str, *rest: Any) -> Any:
        if space == "global":
            draws.append(self.cta.index[0])
        return atomic(self, space, *rest)

    monkeypatch.setattr(machine.Cluster, "step", step_beside_others)
    monkeypatch.setattr(machine.Unit, "atomic", noted)
    return draws


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("facts", [D64, D64_FULL], ids=["causal", "full"])
def test_each_of_many_tiles_is_computed_once_whoever_takes_it(
    facts: ForwardFacts, seed: int, drawn: Collection[int]
) -> None:
    """Also when all CTAs draw at once: 16 tiles of unlike lengths, three CTAs in random order."""
    c = case(facts, 700, 150, (2, 1), batch=2)
    counts = run_on(3, facts, c, order="random", seed=seed)
    check(facts, c)
    # Each tile's number but the first of a CTA is drawn, and each CTA draws once in vain: a slow
    # one draws a tile or two, but every one takes part, in turns.
    assert Counter(drawn).total() == 16
    assert len(Counter(drawn)) == 3 and min(Counter(drawn).values()) > 1
    assert list(drawn) != sorted(drawn)
    # Computed twice, a tile would be right as well.
    expected = emulator.run(build(facts).call, *c.arguments).counters
    written = c.o.nbytes + c.lse.nbytes + 4 * (16 + 1)  # the counter is drawn from and cleared
    assert counts.st_global_bytes == expected.st_global_bytes == written
    assert counts.tma_load_bytes == expected.tma_load_bytes
    assert counts.tensor_flops == expected.tensor_flops


@pytest.mark.parametrize("ctas", [1, 3, 8])
@pytest.mark.parametrize("facts", [D64, D64_FULL], ids=["causal", "full"])
def test_launches_in_a_row_share_a_counter_and_give_the_same_bits(
    facts: ForwardFacts, ctas: int
) -> None:
    c = case(facts, 700, 100, (2, 1))
    run_on(ctas, facts, c)
    again = replace(c, o=torch.empty_like(c.o), lse=torch.empty_like(c.lse))
    for grid in (ctas, 8):
        run_on(grid, facts, again)
        assert torch.equal(again.o, c.o) and torch.equal(again.lse, c.lse)


@pytest.mark.parametrize("facts", [D64, D64_FULL], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("len_q", "heads", "batch", "ctas"),
    [(1, 1, 1, 1), (193, 33, 2, 132), (192, 133, 1, 132), (1, 1, 131, 131), (1, 1, 66_000, 132)],
)
def test_a_grid_has_a_cta_for_each_tile_up_to_one_for_each_sm(
    facts: ForwardFacts, len_q: int, heads: int, batch: int, ctas: int
) -> None:
    c = case(facts, len_q, 1, (heads, heads), batch)
    grids = []
    with loader.intercept(lambda launch: grids.append(launch.grid)):
        loader.call(build(facts).call, *c.arguments)
    assert grids == [(ctas, 1, 1)]
