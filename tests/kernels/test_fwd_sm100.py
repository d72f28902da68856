"""The Blackwell forward kernel on the emulator, checker on, against float64."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from hopwell import emulator, kernels
from hopwell.emulator import loader
from hopwell.emulator.report import Counters
from hopwell.emulator.session import Session
from hopwell.interface.cubin import usage
from hopwell.kernels import BlackwellFacts, ForwardFacts, packed_heads
from hopwell.kernels.exp2 import DEGREE
from hopwell.kernels.tiles import FORWARD_BLACKWELL, BlackwellTiles, blackwell_tiles
from hopwell.layouts.hardware import REGISTER_FILE, registers_at_entry

from . import sass, test_fwd_sm90
from .built import CompiledBlackwell, build, build_blackwell
from .test_fwd_sm90 import Case, case, check, transposed

FULL = BlackwellFacts("bfloat16", 128, 128, causal=False)
CAUSAL = BlackwellFacts("bfloat16", 64, 64, causal=True, packed_heads=7)
# Every row of the table with both masks, and the groups that models have.
ROWS = [
    BlackwellFacts("bfloat16", 64, 64, causal=False),
    CAUSAL,
    BlackwellFacts("float16", 96, 96, causal=False, packed_heads=4),
    BlackwellFacts("bfloat16", 96, 96, causal=True),
    FULL,
    BlackwellFacts("bfloat16", 128, 128, causal=True, packed_heads=4),
    BlackwellFacts("bfloat16", 192, 128, causal=False, packed_heads=7),
    BlackwellFacts("bfloat16", 192, 128, causal=True, packed_heads=8),
    BlackwellFacts("bfloat16", 256, 256, causal=False),
    BlackwellFacts("float16", 256, 256, causal=True, packed_heads=4),
    BlackwellFacts("float16", 72, 40, causal=True, negative_scale=True),
    BlackwellFacts("bfloat16", 8, 8, causal=True, packed_heads=8),
    BlackwellFacts("bfloat16", 24, 136, causal=False, packed_heads=3),  # O larger than Q
]
PAIR = replace(FULL, pair=True)
LSE_ATOL = 1e-5  # the polynomial of a part of P is off by up to 3e-6 of it


def run(facts: BlackwellFacts, c: Case, ctas: int | None = None, **options: Any) -> Counters:
    """On so many CTAs, or on one for each tile."""
    session = Session(emulator.Options(strict=True, **options))

    def launch(one: Any) -> None:
        grid = ((ctas or 0) * one.cluster[0], 1, 1)  # or pairs
        session.launch(replace(one, grid=grid) if ctas else one)

    with loader.intercept(launch):
        session.call(build_blackwell(facts).call, *c.arguments, outputs=(c.o, c.lse))
    assert c.counter.item() == 0
    return session.report.counters


def problem(facts: BlackwellFacts, len_q: int, len_kv: int, heads_kv: int = 1, batch: int = 1):
    heads = facts.packed_heads * heads_kv, heads_kv
    scale = -0.3 if facts.negative_scale else None
    return case(facts, len_q, len_kv, heads, batch, scale)


def test_every_row_of_the_table_is_here() -> None:
    there = {(row.head_dim, row.head_dim_v) for row in FORWARD_BLACKWELL}
    assert [row.head_dim for row in FORWARD_BLACKWELL if row.pair] == [PAIR.head_dim]
    for causal in (False, True):
        assert there <= {(f.head_dim, f.head_dim_v) for f in ROWS if f.causal == causal}


@pytest.mark.parametrize("facts", [*ROWS, PAIR], ids=str)
def test_against_float64(facts: BlackwellFacts) -> None:
    """Lengths that divide nothing, one query, one key, rows and tiles that see nothing."""
    for len_q, len_kv, heads_kv, batch in (
        (200, 333, 2, 1),
        (1, 513, 1, 1),
        (300, 100, 1, 1),
        (65, 1, 1, 2),
    ):
        c = problem(facts, len_q, len_kv, heads_kv, batch)
        run(facts, c)
        check(facts, c, LSE_ATOL)


@pytest.mark.parametrize("order", ["deferred", "random"])
@pytest.mark.parametrize("facts", [FULL, CAUSAL, ROWS[8], PAIR], ids=str)
def test_any_order_of_completion_and_several_tiles_a_cta(facts: BlackwellFacts, order: str) -> None:
    c = problem(facts, 520, 300)
    run(facts, c, ctas=1, order=order, seed=11)
    check(facts, c, LSE_ATOL)


def plain(q: torch.Tensor) -> None:
    """N(0, 1)."""


def outliers(q: torch.Tensor) -> None:
    """One of a hundred elements is ten times as large."""
    q[torch.rand(q.shape) < 1e-2] *= 10


def sharp(q: torch.Tensor) -> None:
    """Scores three times as large: a row attends to little."""
    q *= 3


@pytest.mark.parametrize("edit", [plain, outliers, sharp])
@pytest.mark.parametrize(
    ("facts", "len_kv"),
    [(FULL, 420), (FULL, 2048), (ROWS[0], 900), (ROWS[2], 900), (ROWS[8], 900)],
    ids=str,
)
def test_errors_beside_hoppers(
    facts: BlackwellFacts, len_kv: int, edit: Callable[[torch.Tensor], None]
) -> None:
    """RMS errors of O at most 1.05 times those of the sm_90a kernel on the same input."""
    hopper = ForwardFacts(facts.dtype, facts.head_dim, facts.head_dim_v, facts.causal)
    c = problem(facts, 256, len_kv)
    edit(c.q)
    exact, _, _ = c.exact(facts.causal)
    run(facts, c)
    ours = (c.o.double() - exact).square().mean().sqrt()
    emulator.run(build(hopper).call, *c.arguments, outputs=(c.o, c.lse))
    theirs = (c.o.double() - exact).square().mean().sqrt()
    assert ours <= 1.05 * theirs, f"{ours / theirs:.3f}"


@pytest.mark.parametrize("order", ["eager", "deferred", "random"])
def test_tiles_from_cluster_launch_control(order: str) -> None:
    """As from the counter, which nobody touches."""
    built = launch_queue()
    c = problem(CAUSAL, 300, 200, 3)
    options = emulator.Options(order=order, seed=3, strict=True)
    emulator.run(built.call, *c.arguments, outputs=(c.o, c.lse), options=options)
    check(CAUSAL, c, LSE_ATOL)
    assert "clusterlaunchcontrol.try_cancel" in built.ptx and "atom." not in built.ptx
    grids = []
    with loader.intercept(lambda launch: grids.append(launch.grid)):
        loader.call(built.call, *c.arguments)
    assert grids == [(3 * -(-300 // 36), 1, 1)]  # 18 positions a tile, two tiles a CTA


@cache
def launch_queue() -> CompiledBlackwell:
    """CAUSAL with its tiles from the hardware."""
    return built_from(replace(blackwell_tiles("sm_100a", 64, 64), launch_queue=True), CAUSAL)


def built_from(row: BlackwellTiles, facts: BlackwellFacts) -> CompiledBlackwell:
    """The kernel of these facts by another row than the table's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "blackwell_tiles", lambda *_: row)
        return build_blackwell.__wrapped__(facts)


def test_heads_of_a_group_may_be_apart() -> None:
    """A group of 7 by a kernel for one head a tile, as one of 150 is served by tiles of 75."""
    c = case(FULL, 70, 140, (7, 1))
    run(FULL, c)
    check(FULL, c, LSE_ATOL)
    assert [packed_heads(group) for group in (1, 7, 8, 128, 129, 150)] == [1, 7, 8, 128, 43, 75]


@pytest.mark.parametrize("view", [transposed, test_fwd_sm90.every_second_head])
def test_views_need_no_copy(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    c = problem(CAUSAL, 70, 140, 2, batch=2)
    for name in "qkvo":
        setattr(c, name, view(getattr(c, name)))
    run(CAUSAL, c)
    check(CAUSAL, c, LSE_ATOL)


def test_rows_with_nothing_to_attend_are_zero_even_beside_nan() -> None:
    c = problem(CAUSAL, 200, 100)
    c.v[0, 0] = math.nan
    run(CAUSAL, c)
    assert (c.o[0, :100] == 0).all() and (c.lse[0, :, :100] == -math.inf).all()
    assert c.o[0, 100:].isnan().all()


def test_nan_and_infinite_scores_stay_in_their_rows() -> None:
    c = problem(FULL, 200, 200)
    rows = [37, 128, 150]
    c.q[0, 37], c.q[0, 150, 0, 3], c.q[0, 128, 0, 0] = math.nan, math.nan, math.inf
    run(FULL, c)
    assert c.o.isnan().all(-1).any(0).nonzero()[:, 0].tolist() == rows
    clean = torch.ones(200, dtype=torch.bool)
    clean[rows] = False
    c.q[0, rows] = 0
    o, _, bound = c.exact(causal=False)
    assert ((c.o.double() - o).abs() <= 2**-7 * bound + 1e-6)[0, clean].all()


# ---- what the compiler made of it ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "arch"),
    [
        *((facts, "sm_100a") for facts in [*ROWS, PAIR]),
        *((facts, "sm_103a") for facts in ROWS[1:12:4]),
    ],
    ids=str,
)
def test_machine_code(facts: BlackwellFacts, arch: str) -> None:
    """No spill, registers within the file, and the units that the design names."""
    built = build_blackwell(facts, arch)
    tiles = built.kernel.tiles
    (used,) = usage(built.cubin).values()
    assert used.local_bytes == used.local_instructions == 0 and ".local" not in built.ptx
    threads = built.kernel.graph.threads
    assert f".reqntid {threads}" in built.ptx and used.registers <= registers_at_entry(threads)
    wanted = sorted(int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\S*\s+(\d+)", built.ptx))
    registers = [tiles.registers_softmax, tiles.registers_correction, tiles.registers_other]
    assert wanted == sorted(registers)
    held = tiles.q_tiles * registers[0] + registers[1] + registers[2]
    assert 128 * held <= REGISTER_FILE

    found = sass.opcodes(built.cubin)
    loops, columns = 2, built.kernel.shape_o[1]  # over masked tiles and over the others
    chunks = -(-columns // 16)
    assert sass.count(found, "UTCHMMA") >= 3 and sass.count(found, "UTCBAR") >= 3
    # S by 32 columns, the scores behind the first part of P once more.
    assert sass.count(found, "LDTM") == loops * 5 + tiles.q_tiles * 2 * chunks
    assert sass.count(found, "STTM") == loops * 4 + tiles.q_tiles * chunks
    share = tiles.fma_pairs / 8
    more = max(facts.head_dim, facts.head_dim_v) <= 128 and not facts.pair
    assert tiles.fma_pairs == (0 if arch == "sm_103a" else 3 if more else 2)
    assert sass.count(found, "MUFU.EX2") == loops * (128 * (1 - share) + 1)  # and alpha
    assert sass.count(found, "FFMA2") == loops * 64 * (1 + DEGREE * share)
    assert sass.count(found, "MUFU.LG2") == loops + 1  # of l, where m may lag, and of the LSE
    assert not sass.count(found, "LDL", "STL", "HMMA", "HGMMA")


# ---- what FlashAttention-4 adds ------------------------------------------------------------------


def growing(visits: int, gain: float, keys: int = 128) -> Case:
    """Scores whose maximum, that of some keys, grows by `gain` in log2 at each visited K/V tile."""
    tile_kv = 128
    c = case(FULL, 256, visits * tile_kv)
    c.scale = math.log(2.0)
    tile = torch.arange(visits * tile_kv) // tile_kv
    c.q[..., :1], c.k[..., :1] = 1.0, 0.0
    c.q[..., 1:] *= 0.01
    c.k[0, :, 0, 0] = (visits - 1 - tile).to(c.k.dtype) * gain  # visited from the last
    c.k[0, torch.arange(visits * tile_kv) % tile_kv >= keys, 0, 0] = -100.0
    return c


def rescaled(c: Case) -> float:
    """Share of the warps' corrections, but for the first of a tile, that multiplied O."""
    counts = run(FULL, c)
    rows, steps = c.q.shape[1], c.k.shape[1] // 128
    # Lanes write P, 64 words a row and K/V tile, and O where it is multiplied.
    words = (counts.tmem_write_bytes - products(counts)) / 4
    return (words - rows * steps * 64) / (rows * FULL.head_dim * (steps - 1))


def products(counts: Counters) -> int:
    """Bytes of S and O that the tensor cores write: 64 for each 2 * 16 * 16 FLOPs of one."""
    return counts.tensor_flops // (2 * 16) * 4


def test_o_is_multiplied_only_where_a_maximum_grows_by_more_than_the_threshold() -> None:
    tiles = blackwell_tiles("sm_100a", 128, 128)
    assert (tiles.rescale_log2, tiles.flat) == (8.0, 16.0)
    assert 0.1 < rescaled(case(FULL, 256, 2048)) < 0.3  # N(0, 1)
    assert rescaled(growing(12, gain=9.0)) == 1.0  # each time
    assert rescaled(growing(12, gain=2.5)) == pytest.approx(2 / 11)  # lags by 7.5, not by 10
    # At the second tile l is 32, and the largest P 2**0.5 or 2**1.5.
    assert rescaled(growing(2, gain=0.5, keys=32)) == 0.0
    assert rescaled(growing(2, gain=1.5, keys=32)) == 1.0


@cache
def exact_maximum() -> CompiledBlackwell:
    """Without a lag of the maximum."""
    row = blackwell_tiles("sm_100a", 128, 128)
    assert row.rescale_log2 == 8.0
    return built_from(replace(row, rescale_log2=0.0), FULL)


@pytest.mark.parametrize("gain", [0.0, 2.5, 9.0])
def test_a_threshold_of_0_and_of_8_agree(gain: float) -> None:
    """What lags behind is only a common factor of P and l."""
    c = growing(12, gain) if gain else case(FULL, 256, 1536)
    run(FULL, c)
    check(FULL, c, LSE_ATOL)
    lagging = c.o.clone()
    emulator.run(exact_maximum().call, *c.arguments, outputs=(c.o, c.lse))
    check(FULL, c, LSE_ATOL)
    _, _, bound = c.exact(causal=False)
    assert ((c.o - lagging).double().abs() <= 2**-7 * bound + 1e-6).all()


@pytest.mark.parametrize(("arch", "facts"), [("sm_100a", FULL), ("sm_103a", FULL)])
def test_a_share_of_the_exponentials_is_computed_on_the_fma_units(
    arch: str, facts: BlackwellFacts
) -> None:
    built = build_blackwell(facts, arch)
    pairs = built.kernel.tiles.fma_pairs
    assert pairs == (3 if arch == "sm_100a" else 0)
    c = case(facts, 256, 256)
    counts = emulator.run(built.call, *c.arguments, outputs=(c.o, c.lse)).counters
    check(facts, c, LSE_ATOL)
    rows, steps = 256, 2
    others = rows * (2 * steps + 2)  # alpha and log2 of l at each step; at the end log2 and 1 / l
    assert counts.total("mufu") * 32 == rows * 256 * (1 - pairs / 8) + others
