"""The tile table: rows fit the SM, and a row that does not is refused by name."""

import dataclasses
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from hopwell.kernels.tiles import (
    BACKWARD,
    FORWARD,
    FORWARD_BLACKWELL,
    HEAD_DIMS,
    backward_tiles,
    blackwell_tiles,
    forward_tiles,
    has_pair,
    padded_head_dim,
)
from hopwell.kernels.tiles_bwd_sm100 import BACKWARD_BLACKWELL, blackwell_backward_tiles
from hopwell.layouts.hardware import registers_at_entry
from hopwell.layouts.tmem_map import TmemMap

ROW = forward_tiles("sm_90a", 128, 128)


def test_rows_are_keyed_once_and_give_a_reason() -> None:
    keys = [(row.arch, row.head_dim, row.head_dim_v, row.short) for row in FORWARD]
    assert len(set(keys)) == len(keys)
    assert all(row.reason for row in FORWARD)
    assert len({row.reason for row in FORWARD}) == len(FORWARD)


def test_sizes_of_a_row() -> None:
    assert ROW.tile_q == 128
    assert ROW.q_bytes == 128 * 128 * 2
    assert ROW.k_bytes == ROW.v_bytes == 128 * 128 * 2
    assert ROW.smem_bytes == 1024 + 6 * 128 * 128 * 2
    assert ROW.registers == 128 * (24 + 2 * 240)


@pytest.mark.parametrize("stages_q", [1, 2])
def test_shared_memory_holds_q_k_and_v_and_no_o(stages_q: int) -> None:
    wide_v = dataclasses.replace(ROW, head_dim=64, head_dim_v=192, tile_kv=64, stages_q=stages_q)
    assert wide_v.q_slabs == 2 * stages_q
    assert wide_v.q_bytes == 128 * 64 * 2
    assert wide_v.smem_bytes == 1024 + 2 * (stages_q * 128 * 64 + 2 * 64 * (64 + 192))
    wide_q = dataclasses.replace(wide_v, head_dim=192, head_dim_v=64)
    assert wide_q.q_bytes == 128 * 192 * 2
    assert wide_q.smem_bytes == 1024 + 2 * (stages_q * 128 * 192 + 2 * 64 * (64 + 192))


def test_a_q_has_a_second_stage_where_it_fits() -> None:
    for row in FORWARD:
        assert row.stages_q == (2 if row.head_dim <= 128 else 1)
        if row.stages_q == 1:
            with pytest.raises(ValueError, match=r"smem_bytes"):
                dataclasses.replace(row, stages_q=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_80"}, r"arch='sm_80'"),
        ({"head_dim": 132}, r"head_dim=132: needs a multiple of 8"),
        ({"head_dim_v": 264}, r"head_dim_v=264"),
        ({"tile_kv": 120}, r"tile_kv=120: needs a multiple of 16"),
        ({"tile_kv": 272}, r"tile_kv=272"),
        ({"consumer_warpgroups": 4}, r"consumer_warpgroups=4"),
        ({"consumer_warpgroups": 1}, r"ping_pong=True"),
        (
            {"consumer_warpgroups": 1, "ping_pong": False, "ping_pong_full": True},
            r"ping_pong_full=True",
        ),
        ({"stages_q": 0}, r"stages_q=0"),
        ({"stages_v": 0}, r"stages_v=0"),
        ({"registers_load": 20}, r"registers_load=20"),
        ({"registers_consume": 236}, r"registers_consume=236"),
        ({"registers_load": 32}, r"registers=65536: a CTA gets 64512"),
        ({"registers_consume": 160}, r"registers_consume=160: setmaxnreg .* gives to 168"),
        ({"registers_load": 176}, r"registers_load=176, .* takes from .* 168"),
        ({"consumer_warpgroups": 3}, r"registers=95232: a CTA gets 65536"),
        ({"stages_k": 5}, r"smem_bytes=295936: a CTA has 232448"),
        ({"stages_q": 4}, r"smem_bytes=263168: a CTA has 232448"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ROW, **change)


def test_three_consumer_warpgroups_fit() -> None:
    row = replace(
        ROW,
        head_dim=64,
        head_dim_v=64,
        consumer_warpgroups=3,
        registers_load=32,
        registers_consume=160,
    )
    assert (row.tile_q, row.threads, row.registers) == (192, 512, 65536)


@pytest.mark.parametrize("short", [False, True])
def test_every_pair_of_head_dims_has_tiles_of_its_own_within_its_row(short: bool) -> None:
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        tiles = forward_tiles("sm_90a", head_dim, head_dim_v, short)
        assert (tiles.head_dim, tiles.head_dim_v) == (head_dim, head_dim_v)
        (row,) = (row for row in FORWARD if row.reason == tiles.reason)
        assert row.head_dim >= head_dim and row.head_dim_v >= head_dim_v
        assert row.smem_bytes >= tiles.smem_bytes
        assert row.short <= short


def test_short_queries_have_rows_of_their_own_up_to_head_dim_64_and_above_192() -> None:
    """Up to 64 of two warpgroups, above 192 without the branch around the scaling of O."""
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        tiles = forward_tiles("sm_90a", head_dim, head_dim_v)
        short = forward_tiles("sm_90a", head_dim, head_dim_v, short=True)
        if max(head_dim, head_dim_v) <= 64:
            assert short.short and (short.tile_q, tiles.tile_q) == (128, 192)
        elif max(head_dim, head_dim_v) > 192:
            assert tiles.skip_unmoved
            as_tiles = dataclasses.replace(
                short, short=False, skip_unmoved=True, reason=tiles.reason
            )
            assert short.short and as_tiles == tiles
        else:
            assert short == tiles
        assert not tiles.short


@pytest.mark.parametrize(
    ("dims", "row"),
    [
        ((8, 8), (64, 64)),
        ((64, 72), (96, 96)),
        ((104, 8), (112, 112)),
        ((8, 120), (128, 128)),
        ((128, 128), (128, 128)),
        ((136, 128), (192, 128)),
        ((192, 64), (192, 128)),
        ((128, 192), (192, 192)),
        ((200, 8), (256, 256)),
        ((8, 256), (256, 256)),
    ],
)
def test_the_smallest_row_that_holds_both_is_taken(
    dims: tuple[int, int], row: tuple[int, int]
) -> None:
    assert forward_tiles("sm_90a", *dims).reason == forward_tiles("sm_90a", *row).reason


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90a", 264), ("sm_80", 64)])
def test_no_row_is_a_lookup_error_that_lists_them(arch: str, head_dim: int) -> None:
    with pytest.raises(LookupError, match=rf"{arch} at head_dim={head_dim}, .* rows go up to \["):
        forward_tiles(arch, head_dim, 64)


def test_a_head_dim_in_between_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim=84: needs a multiple of 8 from 8 to 256"):
        forward_tiles("sm_90a", 84, 64)


@pytest.mark.parametrize(("head_dim", "columns"), [(8, 16), (64, 64), (72, 80), (128, 128)])
def test_head_dims_are_rounded_to_the_depth_of_a_product(head_dim: int, columns: int) -> None:
    assert padded_head_dim(head_dim) == columns


@pytest.mark.parametrize(("threads", "registers"), [(256, 256), (384, 168), (512, 128)])
def test_registers_at_entry(threads: int, registers: int) -> None:
    assert registers_at_entry(threads) == registers


@pytest.mark.parametrize("head_dim_v", HEAD_DIMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_backward_has_tiles_for_every_pair_of_head_dims(head_dim: int, head_dim_v: int) -> None:
    tiles = backward_tiles("sm_90a", head_dim, head_dim_v)
    assert (tiles.head_dim, tiles.head_dim_v) == (head_dim, head_dim_v)
    assert tiles.q_columns >= head_dim and tiles.dq_columns >= tiles.q_columns
    assert tiles.v_columns >= head_dim_v
    # The blocks of dQ are a whole tile; a block, four registers of each of 128 threads at a time.
    columns, rows = tiles.dq_block
    assert tiles.dq_blocks * columns * rows == tiles.tile_q * tiles.dq_columns
    assert columns * rows % (4 * 128) == 0
    floats = 6 * tiles.tile_q * (tiles.dq_columns + 2)
    assert tiles.workspace_floats(2, 3, 1, turns=False) == floats
    assert tiles.workspace_floats(2, 3, tiles.tile_q, turns=True) == floats + 6
    assert tiles.workspace_floats(2, 3, tiles.tile_q + 1, turns=True) == 2 * (floats + 6)


@pytest.mark.parametrize(
    ("dims", "row"),
    [
        ((8, 8), (64, 64)),
        ((64, 72), (96, 96)),
        ((96, 96), (96, 96)),
        ((8, 104), (128, 128)),
        ((128, 128), (128, 128)),
        ((136, 8), (256, 256)),
        ((192, 128), (256, 256)),
    ],
)
def test_the_smallest_backward_row_that_holds_both_is_taken(
    dims: tuple[int, int], row: tuple[int, int]
) -> None:
    assert backward_tiles("sm_90a", *dims).reason == backward_tiles("sm_90a", *row).reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "rows"}, "split='rows'"),
        ({"tile_q": 72, "dq_rows": 72}, "tile_q=72: needs a multiple of 16 up to 256"),
        ({"tile_q": 272, "dq_rows": 16}, "tile_q=272"),
        ({"tile_q": 0}, "tile_q=0"),
        ({"split": "columns", "tile_q": 80, "dq_rows": 80}, "tile_q=80: needs a multiple of 32"),
        ({"dq_rows": 24}, "dq_rows=24: needs a multiple of 16 that divides tile_q=96"),
        ({"dq_rows": 64}, "dq_rows=64"),
        ({"dq_rows": 192}, "dq_rows=192"),
        ({"dq_rows": 0}, "dq_rows=0"),
        ({"dq_rows": -48}, "dq_rows=-48"),
        ({"stages": 1}, "stages=1: needs one to read while another is loaded"),
        ({"stages": 7}, "smem_bytes="),
        ({"head_dim": 256, "head_dim_v": 256}, "smem_bytes="),
        ({"registers_load": 128}, "registers=65536: a CTA gets 64512"),
        ({"registers_consume": 248}, "registers="),
        ({"registers_load": 180}, "registers_load=180"),
        ({"arch": "sm_80"}, "arch='sm_80'"),
        ({"head_dim": 4}, "head_dim=4"),
    ],
)
def test_a_backward_row_that_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(BACKWARD[0], **changes)


def test_sizes_of_a_backward_row() -> None:
    row = backward_tiles("sm_90a", 64, 64)
    assert (row.tile_q, row.tile_kv, row.dq_block, row.dq_blocks) == (96, 128, (64, 48), 2)
    assert row.k_bytes == row.v_bytes == 128 * 64 * 2
    assert row.do_bytes == 96 * 64 * 2
    assert row.q_bytes == row.do_bytes + 2 * 96 * 4  # with LSE and D
    assert row.exchange_bytes == 2 * 96 * 128 * 2  # two tiles of dS
    stages = 3 * (row.q_bytes + row.do_bytes)
    assert row.smem_bytes == 1024 + 2 * row.k_bytes + stages + row.exchange_bytes
    by_columns = backward_tiles("sm_90a", 256, 256)
    assert (by_columns.tile_kv, by_columns.dq_blocks) == (64, 4)
    assert by_columns.exchange_bytes == 2 * 2 * 64 * 64 * 2  # and of P


def test_backward_rows_are_keyed_once_and_give_a_reason() -> None:
    assert len({(row.arch, row.head_dim, row.head_dim_v) for row in BACKWARD}) == len(BACKWARD)
    assert len({row.reason for row in BACKWARD}) == len(BACKWARD)
    assert all(row.reason for row in BACKWARD)


def test_no_backward_row_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match=r"sm_80 at head_dim=64"):
        backward_tiles("sm_80", 64, 64)


# ---- Blackwell -----------------------------------------------------------------------------------


def test_rows_of_blackwell_give_a_reason_and_fit() -> None:
    keys = [(row.head_dim, row.head_dim_v, row.pair) for row in FORWARD_BLACKWELL]
    assert len(set(keys)) == len(keys) and all(row.reason for row in FORWARD_BLACKWELL)
    for row in FORWARD_BLACKWELL:
        s, o = row.tmem.columns["s"], row.tmem.columns["o"]
        assert s == (0, 256) and o == (256, row.q_tiles * padded_head_dim(row.head_dim_v))
        with pytest.raises(ValueError, match="smem_bytes"):  # as many stages as there is room for
            replace(row, stages_kv=row.stages_kv + 1)


def test_sizes_of_a_row_of_blackwell() -> None:
    row = blackwell_tiles("sm_100a", 128, 128)
    assert row.q_bytes == row.o_bytes == row.k_bytes == row.v_bytes == 128 * 128 * 2
    assert row.smem_bytes == 2048 + (2 + 2 + 3) * 128 * 128 * 2
    pair = blackwell_tiles("sm_100a", 128, 128, pair=True)
    assert pair.k_bytes == pair.v_bytes == row.k_bytes // 2 and pair.smem_bytes == row.smem_bytes
    wide = blackwell_tiles("sm_103a", 192, 128)
    assert wide.borrow_q_as_o and wide.o_bytes == wide.q_bytes == 128 * 192 * 2
    assert wide.kv_bytes == wide.k_bytes and wide.v_bytes == 128 * 128 * 2
    assert wide.smem_bytes == 2048 + (2 + 2) * 128 * 192 * 2
    # O that borrows a smaller Q.
    odd = blackwell_tiles("sm_100a", 8, 136)
    assert odd.borrow_q_as_o and odd.q_bytes == odd.o_bytes == odd.v_bytes == 128 * 144 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 12}, "head_dim=12"),
        ({"head_dim_v": 264}, "head_dim_v=264"),
        ({"q_tiles": 3}, "q_tiles=3"),
        ({"stages_kv": 1}, "stages_kv=1"),
        ({"pair": True, "launch_queue": True}, "launch_queue=True"),
        ({"registers_softmax": 240}, "registers="),
        ({"stages_kv": 4}, "smem_bytes="),
        ({"head_dim": 8, "head_dim_v": 136, "stages_kv": 2}, "o ends at column 544"),
    ],
)
def test_a_row_of_blackwell_that_cannot_run_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(blackwell_tiles("sm_100a", 128, 128), **change)


def test_columns_of_tensor_memory_do_not_overlap() -> None:
    assert TmemMap({"s": (0, 256), "o": (256, 256)}).first("o") == 256
    with pytest.raises(ValueError, match="o: columns 255 to 511 overlap s"):
        TmemMap({"s": (0, 256), "o": (255, 256)})
    with pytest.raises(ValueError, match="o ends at column 513"):
        TmemMap({"s": (0, 256), "o": (256, 257)})


def test_every_pair_of_head_dims_has_a_row_of_blackwell() -> None:
    for head_dim, head_dim_v in itertools.product(HEAD_DIMS, HEAD_DIMS):
        row = blackwell_tiles("sm_100a", head_dim, head_dim_v)
        assert (row.head_dim, row.head_dim_v) == (head_dim, head_dim_v)
        assert row.q_tiles == (2 if head_dim <= 192 and head_dim_v <= 128 else 1)
        assert blackwell_tiles("sm_103a", head_dim, head_dim_v) == replace(row, fma_pairs=0)
    assert has_pair(128, 128) and not has_pair(128, 120)
    with pytest.raises(LookupError, match="no forward tiles for sm_100a at head_dim=64/64"):
        blackwell_tiles("sm_100a", 64, 64, pair=True)
    for arch, dims in (("sm_90a", (64, 64)), ("sm_100a", (264, 64))):
        with pytest.raises(LookupError, match=f"no forward tiles for {arch}"):
            blackwell_tiles(arch, *dims)


def test_rows_of_blackwells_backward_give_a_reason_and_fit() -> None:
    keys = [(row.head_dim, row.head_dim_v) for row in BACKWARD_BLACKWELL]
    assert len(set(keys)) == len(keys) == len({row.reason for row in BACKWARD_BLACKWELL})
    for row in BACKWARD_BLACKWELL:
        assert f"{row.smem_bytes // 1024} KiB" in row.reason


def test_sizes_of_rows_of_blackwells_backward() -> None:
    alone, pair, folded = (blackwell_backward_tiles("sm_100a", d, d) for d in (120, 128, 256))
    assert [row.tile_kv for row in (alone, pair, folded)] == [128, 256, 128]
    assert [row.keys for row in (alone, pair, folded)] == [128, 128, 64]
    assert alone.slot_bytes == 2 * pair.slot_bytes == 32 * 1024
    assert alone.dq_block == pair.dq_block == (128, 128) and folded.dq_block == (256, 64)
    assert pair.tmem.columns == {
        "s": (0, 128),
        "dp": (128, 128),
        "dv": (256, 128),
        "dk": (384, 128),
    }
    assert folded.tmem.columns["dq"] == (384, 128)
    assert pair.workspace_floats(2, 3, 129, True) == 6 * 2 * (128 * 130 + 4)
    assert folded.workspace_floats(2, 3, 129, True) == 6 * 2 * (128 * 258 + 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 1}, r"stages=1: needs 2 or more"),
        ({"score_buffers": 3}, r"score_buffers=3: needs 1 or 2"),
        ({"score_buffers": 2, "stages": 3}, r"stages=3: needs 4 or more"),
        ({"fma_pairs": 9}, r"fma_pairs=9: needs 0 to 8"),
        ({"registers_other": 20}, r"registers_other=20: needs a multiple of 8, 24 to 256"),
        ({"registers_compute": 120}, r"registers_compute=120: setmaxnreg takes from .* 128"),
        ({"registers_reduce": 136}, r"registers_reduce=136: setmaxnreg takes from .* 128"),
        ({"stages": 20}, r"smem_bytes=\d+: a CTA has 232448"),
        ({"registers_compute": 200}, r"registers=\d+: an SM has 65536"),
        ({"borrow_as_dq": "dv"}, r"borrow_as_dq='dv': needs 's', 'dp' or None"),
        ({"borrow_as_dq": "s"}, r"borrow_as_dq='s': needs score_buffers=2"),
        ({"borrow_as_dq": None}, r"ends at column \d+: there are 512"),
        ({"folded": True, "pair": False}, r"folded=True: the accumulators of a pair"),
        ({"pair": False}, r"dq_tiles=2: needs 1, or of a pair 2"),
        ({"borrow_as_dq": "s", "score_buffers": 2, "stages": 4}, r"dq_tiles=2: .* place of dP"),
        ({"head_dim": 12}, r"head_dim=12: needs a multiple of 8"),
    ],
)
def test_a_row_of_blackwells_backward_that_cannot_run_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(blackwell_backward_tiles("sm_100a", 128, 128), **change)


def test_every_pair_of_head_dims_has_a_row_of_blackwells_backward() -> None:
    for dims in itertools.product(HEAD_DIMS, HEAD_DIMS):
        row = blackwell_backward_tiles("sm_100a", *dims)
        assert (row.head_dim, row.head_dim_v) == dims
        assert blackwell_backward_tiles("sm_103a", *dims).fma_pairs == 0
    with pytest.raises(LookupError, match="no backward tiles for sm_90a"):
        blackwell_backward_tiles("sm_90a", 64, 64)


def test_with_two_buffers_of_scores_the_ring_holds_q_of_both() -> None:
    with pytest.raises(ValueError, match="stages=2: needs 3 or more"):
        replace(blackwell_backward_tiles("sm_100a", 64, 64), stages=2)
