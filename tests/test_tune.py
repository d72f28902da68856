"""Which neighbours of a row `tune` tries, and what it says of them; times are stand-ins."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from hopwell.benchmarks import tune
from hopwell.kernels.tiles import FORWARD, Tiles, forward_tiles

ROW_128 = forward_tiles("sm_90a", 128, 128)


@pytest.mark.parametrize("row", FORWARD, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_neighbours_are_one_change_away_and_different(row: Tiles) -> None:
    found = tune.neighbours(row)
    assert found[tune.ROW] == row
    assert len(set(found.values())) == len(found) > 3
    fields = {"consumer_warpgroups", "stages_k", "tile_kv", "ping_pong", "stages_q"}
    for name, tiles in found.items():
        changed = {field for field in fields if getattr(tiles, field) != getattr(row, field)}
        assert len(changed) <= 1, name


def test_what_an_sm_cannot_run_is_no_neighbour() -> None:
    found = tune.neighbours(ROW_128)
    with pytest.raises(ValueError, match="smem_bytes"):
        replace(ROW_128, tile_kv=176)
    assert "tile_kv 160" in found and "tile_kv 176" not in found


def test_each_neighbour_is_a_kernel_of_its_own() -> None:
    specs = {
        tune.spec(tiles, causal)
        for tiles in tune.neighbours(ROW_128).values()
        for causal in (False, True)
    }
    assert len(specs) == 2 * len(tune.neighbours(ROW_128))


def test_a_spill_is_seen(tmp_path: Path) -> None:
    wide = replace(forward_tiles("sm_90a", 96, 96), tile_kv=128)
    assert tune.build(wide, True, str(tmp_path)) > 0
    assert tune.build(ROW_128, False, str(tmp_path)) == 0


def test_the_table_compares_with_the_row() -> None:
    cell = tune.cell(ROW_128, 4096, False)
    assert (cell.batch, cell.heads) == (4, 16)
    found = {tune.ROW: {cell: 100.0}, "no turns": {cell: 80.0}, "slow": {}}
    text = io.StringIO()
    Console(file=text, width=100).print(tune.table(ROW_128, found, {"tile_kv 160": 48}))
    said = text.getvalue()
    assert "1.250" in said and "spills 48 bytes" in said and "4096 full" in said


def test_without_a_gpu_it_says_what_it_needs() -> None:
    result = CliRunner().invoke(tune.main, [])
    assert result.exit_code == 1 and "needs one" in result.output
