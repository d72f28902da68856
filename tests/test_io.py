"""The IO model against its closed forms; the forward kernel's measured bytes against the model."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from hopwell import emulator
from hopwell.benchmarks import io
from hopwell.interface.emulate import emulate
from hopwell.interface.functions import forward
from hopwell.kernels.tiles import forward_tiles


def test_standard_by_hand() -> None:
    row = io.standard(10, 4)
    assert row.read_bytes == 2 * (3 * 10 * 4 + 2 * 10 * 10)
    assert row.write_bytes == 2 * (10 * 4 + 2 * 10 * 10)


def test_fa1_by_hand() -> None:
    # 64 elements of SRAM, d = 4: 4 rows of K and V, 4 of Q; 10 rows are tiles of 4, 4 and 2.
    row = io.fa1(10, 4, sram_bytes=128)
    assert row.tiles == (4, 4)
    assert row.read_bytes == 2 * 10 * 8 + 3 * 10 * (2 * 8 + 8)
    assert row.write_bytes == 10 * (8 + 8) + 3 * 10 * (8 + 8)


def test_fa2_by_hand() -> None:
    row = io.fa2(10, 4, sram_bytes=128)
    assert row.tiles == (4, 4)
    assert row.read_bytes == 10 * 8 + 3 * (2 * 10 * 8)
    assert row.write_bytes == 10 * (8 + 4)


@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("sram", [64 * 1024, 227 * 1024])
def test_closed_forms(d: int, sram: int) -> None:
    """Doubling N, d or M moves the exact counts as the closed forms say, for long sequences."""

    def totals(n: int, d: int, sram: int) -> list[int]:
        return [row.total_bytes for row in io.model(n, d, sram)]

    n = 1 << 16
    base = totals(n, d, sram)
    longer = [b / a for a, b in zip(base, totals(2 * n, d, sram), strict=True)]
    assert longer == pytest.approx([4, 4, 4], rel=0.02)
    more_sram = [b / a for a, b in zip(base, totals(n, d, 2 * sram), strict=True)]
    assert more_sram == pytest.approx([1, 1 / 2, 1 / 2], rel=0.02)
    deeper = [b / a for a, b in zip(base, totals(n, 2 * d, sram), strict=True)]
    assert deeper[1:] == pytest.approx([4, 4], rel=0.08)  # statistics of 8 bytes a row aside
    assert deeper[0] == pytest.approx(1, rel=0.02)


def test_order_of_algorithms() -> None:
    """What the papers promise: FA-1 well below standard attention, FA-2's order below FA-1."""
    standard, fa1, fa2 = io.model(1 << 14, 128, io.H200_SRAM_BYTES)
    assert fa1.total_bytes < standard.total_bytes
    assert fa2.total_bytes < fa1.total_bytes / 1.5
    assert fa2.write_bytes == (1 << 14) * (128 * 2 + 4)


def test_sram_too_small() -> None:
    with pytest.raises(ValueError, match="100 bytes of SRAM do not hold 4 rows of 64 elements"):
        io.fa1(10, 64, sram_bytes=100)


@pytest.mark.parametrize(("len_q", "len_kv"), [(256, 384), (128, 512), (300, 256)])
@pytest.mark.parametrize("d", [64, 80, 128])
def test_kernel_follows_the_model(len_q: int, len_kv: int, d: int) -> None:
    """Measured on the emulator: Q and O once, LSE once, K and V once for each Q tile."""
    q = torch.randn(1, len_q, 1, d, dtype=torch.bfloat16)
    k, v = (torch.randn(1, len_kv, 1, d, dtype=torch.bfloat16) for _ in range(2))
    with emulate("sm_90a", counters=True) as emulation:
        forward(q, k, v)
    counters: emulator.Counters = emulation.report.counters
    tiles_q = -(-len_q // forward_tiles("sm_90a", d, d).tile_q)
    assert counters.tma_load_bytes == 2 * d * (len_q + 2 * len_kv * tiles_q)
    # Beside O and LSE the queue: a number is drawn for each tile, the last draw clears the counter.
    assert counters.st_global_bytes == (2 * d + 4) * len_q + 4 * (tiles_q + 1)
    assert counters.tma_store_bytes == 0
    assert counters.ld_global_bytes == 0


def test_command_line() -> None:
    shown = CliRunner().invoke(io.main, ["-n", "256", "-d", "64"], catch_exceptions=False).output
    for part in ("N = 256, d = 64", "standard", "FA-1", "FA-2 order", "emulated", "N^2 d^2 / M"):
        assert part in shown
    refused = CliRunner().invoke(io.main, ["-d", "64", "--sram", "100"])
    assert refused.exit_code == 1 and "do not hold 4 rows" in refused.output
