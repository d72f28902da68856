"""Blackwell's backward on the emulator, checker on, against float64."""

from dataclasses import replace

import pytest
import torch

from hopwell.emulator.report import Counters
from hopwell.kernels import BackwardFacts
from hopwell.kernels.tiles_bwd_sm100 import (
    BACKWARD_BLACKWELL,
    BlackwellBackwardTiles,
    blackwell_backward_tiles,
)
from hopwell.layouts.hardware import REGISTER_FILE, WARPGROUP_THREADS

from . import sass
from .backward import SEEDS, build, case, check, exact, reported, run

ARCH = "sm_100a"
SHAPES = [
    (200, 333, (4, 2), 1),
    (130, 257, (7, 1), 2),
    (257, 130, (4, 2), 1),  # causal: the first 127 rows have nothing to attend
    (300, 100, (1, 1), 1),  # causal: the first tiles of Q have nothing to attend
    (1, 513, (2, 1), 1),
    (65, 1, (1, 1), 2),
]
MASKED = (2, 3)  # of these shapes are about the mask
# Every row of the table with both masks, and head dims that rows serve beside their own.
ROWS = [
    BackwardFacts("bfloat16", 64, 64, causal=True),
    BackwardFacts("float16", 64, 64, causal=False),
    BackwardFacts("bfloat16", 96, 96, causal=False),
    BackwardFacts("float16", 96, 96, causal=True),
    BackwardFacts("bfloat16", 120, 120, causal=True),
    BackwardFacts("bfloat16", 120, 120, causal=False),
    BackwardFacts("bfloat16", 128, 128, causal=True),
    BackwardFacts("bfloat16", 128, 128, causal=False),
    BackwardFacts("bfloat16", 192, 128, causal=True),
    BackwardFacts("bfloat16", 192, 128, causal=False),
    BackwardFacts("bfloat16", 256, 256, causal=True),
    BackwardFacts("float16", 256, 256, causal=False),
    BackwardFacts("bfloat16", 8, 16, causal=True, dlse=True),
    BackwardFacts("bfloat16", 104, 40, causal=True),
    BackwardFacts("bfloat16", 8, 128, causal=True),
    BackwardFacts("bfloat16", 136, 200, causal=True),
]
D64, D128 = ROWS[0], ROWS[6]
FOLDED = ROWS[8]


def test_every_row_of_the_table_is_here() -> None:
    there = {(row.head_dim, row.head_dim_v) for row in BACKWARD_BLACKWELL}
    for causal in (False, True):
        assert there <= {(f.head_dim, f.head_dim_v) for f in ROWS if f.causal == causal}


@pytest.mark.parametrize("facts", ROWS, ids=str)
def test_against_float64(facts: BackwardFacts) -> None:
    """Lengths that divide nothing, groups of 1, 2 and 7, one query, one key, and where there is a
    mask rows and tiles that see nothing; from the fourth shape on in other orders of completion."""
    orders = ("eager", "eager", "eager", "deferred", "random", "random")
    for i, (shape, order) in enumerate(zip(SHAPES, orders, strict=True)):
        if facts.causal or i not in MASKED:
            check(facts, case(facts, *shape), arch=ARCH, order=order, seed=3)


@pytest.mark.parametrize("facts", [D64, ROWS[3], D128, ROWS[9], ROWS[11]], ids=str)
def test_errors_beside_hoppers(facts: BackwardFacts) -> None:
    """RMS errors at most 1.05 times those of the sm_90a kernels on the same input."""
    for outliers in (False, True):
        c = case(facts, 300, 420, (2, 1))
        if outliers:
            c.q[torch.rand(c.q.shape) < 1e-2] *= 10
        e = exact(facts, c)
        ours, theirs = (run(facts, c, e, arch=arch) for arch in (ARCH, "sm_90a"))
        for name, a, b, true in zip("qkv", ours, theirs, e.gradients, strict=True):
            ratio = (a.double() - true).norm() / (b.double() - true).norm()
            assert ratio <= 1.05, (f"d{name}", ratio.item())


@pytest.mark.parametrize("facts", [D64, D128, FOLDED], ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.5])
def test_any_scale(facts: BackwardFacts, scale: float) -> None:
    check(facts, case(facts, 150, 200, scale=scale), arch=ARCH)


@pytest.mark.parametrize("facts", [D64, D128, FOLDED, ROWS[7]], ids=str)
def test_any_order_of_completion(facts: BackwardFacts) -> None:
    c = case(facts, 150, 300, (2, 1))
    check(facts, c, arch=ARCH, order="deferred")
    for seed in SEEDS:
        check(facts, c, arch=ARCH, order="random", seed=seed)


@pytest.mark.parametrize("facts", [D64, ROWS[7], ROWS[9]], ids=str)
def test_deterministic_sums_do_not_depend_on_who_is_first(facts: BackwardFacts) -> None:
    """In random order CTAs start in any, so that some wait for others that start later."""
    facts = replace(facts, deterministic=True)
    c = case(facts, 150, 300) if facts.head_dim != 128 else case(facts, 300, 600)
    first, *others = (check(facts, c, arch=ARCH, order="random", seed=seed) for seed in SEEDS)
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


def test_rows_with_nothing_to_attend_get_no_gradient() -> None:
    dq, _, _ = check(D128, case(D128, 300, 100), arch=ARCH)
    assert (dq[:, :200] == 0).all()


# A pair's products at head_dim 128, by CTAs on their own.
ALONE = replace(blackwell_backward_tiles(ARCH, 120, 120), head_dim=128, head_dim_v=128)


def counted(facts: BackwardFacts, tiles: BlackwellBackwardTiles | None) -> Counters:
    """Of the main kernel, the second of three."""
    c = case(facts, 512, 512)
    _, report = reported(facts, c, exact(facts, c), arch=ARCH, tiles=tiles)
    return report.launches[1]


def test_a_pair_halves_what_is_read_as_b_and_what_is_added_to_dq() -> None:
    """docs/blackwell.md has these numbers."""
    facts = ROWS[7]
    check(facts, case(facts, 200, 333), arch=ARCH, tiles=ALONE)
    alone, pair = counted(facts, ALONE), counted(facts, None)
    assert pair.tensor_flops == alone.tensor_flops
    assert pair.operand_b_bytes == alone.operand_b_bytes // 2
    dk_and_dv = 2 * 512 * 128 * 2
    assert pair.tma_store_bytes - dk_and_dv == (alone.tma_store_bytes - dk_and_dv) // 2


@pytest.mark.parametrize(
    ("arch", "facts"),
    [
        *(("sm_100a", facts) for facts in ROWS[:12]),
        *(("sm_103a", facts) for facts in (D64, D128, ROWS[10])),
    ],
    ids=str,
)
def test_machine_code(arch: str, facts: BackwardFacts) -> None:
    """Nothing is spilled; products by two CTAs where they are; exponentials on both units."""
    tiles = blackwell_backward_tiles(arch, facts.head_dim, facts.head_dim_v)
    _, resources, ptx, cubin = build(facts, arch)
    for used in resources.values():
        assert used.local_bytes == used.local_instructions == 0
    threads = 4 * WARPGROUP_THREADS
    main = max(resources.values(), key=lambda used: used.registers)
    assert main.registers * threads <= REGISTER_FILE
    found = sass.opcodes(cubin)
    own = found["UTCHMMA"], found["UTCHMMA.2CTA"]
    assert own == ((0, sum(own)) if tiles.pair else (sum(own), 0)) and sum(own)
    # Scores of a thread, in the loop with a mask and in the one without.
    scores = tiles.score_columns // 2 * 2
    assert sass.count(found, "MUFU.EX2") * 8 == scores * (8 - tiles.fma_pairs)
    assert found["UBLKRED.G.S.ADD.F32.RN"] == tiles.dq_tmem_columns // 16
    assert ".local" not in ptx
