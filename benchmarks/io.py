"""Bytes that attention moves between HBM and the chip: models by the loop, the kernel measured.

The models walk the loops of the algorithms, tile by tile, and add up what each load and store
moves; beside each stands the closed form of its order (constants left out). One head, no mask,
queries and keys of one length; FlashAttention's Theorem 2 [1] and FlashAttention-2's order [2].

[1] Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness, 2022
[2] Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table

H200_SRAM_BYTES = 227 * 1024  # shared memory one CTA can have
STATISTIC_BYTES = 4  # m, l and LSE are fp32


@dataclass(frozen=True)
class Row:
    """What one algorithm moves.

    Attributes: `read_bytes`, `write_bytes` from and to HBM; `form` the closed form and `form_bytes`
    its value; `tiles` (rows of Q, rows of K and V), (0, 0) without tiles.
    """

    name: str
    read_bytes: int
    write_bytes: int
    form: str
    form_bytes: float
    tiles: tuple[int, int] = (0, 0)

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


def standard(n: int, d: int, element_bytes: int = 2) -> Row:
    """S = QK^T, P = softmax(S), O = PV, each a kernel of its own that reads and writes HBM."""
    narrow, square = n * d * element_bytes, n * n * element_bytes
    return Row(
        "standard",
        read_bytes=(narrow + narrow) + square + (square + narrow),  # Q, K; S; P, V
        write_bytes=square + square + narrow,  # S; P; O
        form="N d + N^2",
        form_bytes=float(narrow + square),
    )


def fa1(n: int, d: int, sram_bytes: int, element_bytes: int = 2) -> Row:
    """FlashAttention's Algorithm 1: K/V tiles outside, Q tiles inside.

    O, m and l of a Q tile come from HBM and go back at every step. Tiles as in the paper: with M
    elements of SRAM, ceil(M / 4d) rows of K and V and min(ceil(M / 4d), d) of Q.

    Raises:
        ValueError: four rows of d elements do not fit in `sram_bytes`.
    """
    tile_kv = _fitting_rows(d, sram_bytes, element_bytes)
    tile_q = min(tile_kv, d)
    row, statistics = d * element_bytes, 2 * STATISTIC_BYTES
    read, write = 0, n * (row + statistics)  # O = 0, l = 0, m = -inf are written first
    for kv_rows in _tiles(n, tile_kv):
        read += 2 * kv_rows * row  # K, V
        read += n * (2 * row + statistics)  # every tile's Q, O, m, l
        write += n * (row + statistics)  # every tile's O, m, l
    form = n * n * d * d / (sram_bytes / element_bytes) * element_bytes
    return Row("FA-1", read, write, "N^2 d^2 / M", form, (tile_q, tile_kv))


def fa2(n: int, d: int, sram_bytes: int, element_bytes: int = 2, tile_q: int | None = None) -> Row:
    """FlashAttention-2's order: Q tiles outside, K/V tiles inside.

    Q is read and O and LSE are written once; K and V are read once for each Q tile. Without
    `tile_q` a tile has as many rows as fit four times (Q, O, K, V) in SRAM.

    Raises:
        ValueError: four rows of d elements do not fit in `sram_bytes`.
    """
    tile_kv = _fitting_rows(d, sram_bytes, element_bytes)
    tile_q = tile_q or tile_kv
    row = d * element_bytes
    read = write = 0
    for q_rows in _tiles(n, tile_q):
        read += q_rows * row  # Q
        read += 2 * n * row  # every tile's K, V
        write += q_rows * (row + STATISTIC_BYTES)  # O, LSE
    form = n * d * element_bytes * (1 + n / tile_q)
    return Row("FA-2 order", read, write, "N d + N^2 d / tile_q", form, (tile_q, tile_kv))


def model(n: int, d: int, sram_bytes: int, element_bytes: int = 2) -> list[Row]:
    """The three models for length n and head_dim d.

    Args:
        n: queries, and keys.
        d: head_dim.
        sram_bytes: on-chip memory a thread block has, in bytes.
        element_bytes: size of an element of Q, K, V, O (and of S and P in standard attention).

    Raises:
        ValueError: four rows of d elements do not fit in `sram_bytes`.
    """
    return [
        standard(n, d, element_bytes),
        fa1(n, d, sram_bytes, element_bytes),
        fa2(n, d, sram_bytes, element_bytes),
    ]


def measured(n: int, d: int, arch: str = "sm_90a") -> list[Row]:
    """This package's forward kernel (bf16, one head): its tiles' model, and the emulator's count.

    Raises:
        LookupError, ValueError: there is no kernel for head_dim d.
    """
    import torch

    from ..interface import emulate
    from ..interface.functions import forward
    from ..kernels.tiles import forward_tiles

    tiles = forward_tiles(arch, d, d)
    expected = fa2(n, d, H200_SRAM_BYTES, tile_q=tiles.tile_q)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, d, generator=random).to(torch.bfloat16) for _ in range(3))
    with emulate.emulate(arch, counters=True) as emulation:
        forward(q, k, v)
    counters = emulation.report.counters
    shape = (tiles.tile_q, tiles.tile_kv)
    return [
        Row(
            "FA-2 order, the kernel's tiles",
            expected.read_bytes,
            expected.write_bytes,
            expected.form,
            expected.form_bytes,
            shape,
        ),
        Row(
            f"{arch} kernel, emulated",
            counters.global_read_bytes,
            counters.global_write_bytes,
            expected.form,
            expected.form_bytes,
            shape,
        ),
    ]


def _fitting_rows(d: int, sram_bytes: int, element_bytes: int) -> int:
    """ceil(M / 4d) with M elements of SRAM."""
    elements = sram_bytes // element_bytes
    if elements < 4 * d:
        raise ValueError(
            f"{sram_bytes} bytes of SRAM do not hold 4 rows of {d} elements of {element_bytes} "
            f"bytes ({4 * d * element_bytes} bytes); give more SRAM or a smaller d"
        )
    return -(-elements // (4 * d))


def _tiles(n: int, size: int) -> Iterator[int]:
    """Rows of each tile: full ones, then what is left."""
    for start in range(0, n, size):
        yield min(size, n - start)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-n", "n", type=click.IntRange(1), default=1024, show_default=True, help="Length.")
@click.option("-d", "d", type=click.IntRange(1), default=128, show_default=True, help="head_dim.")
@click.option(
    "--sram",
    type=click.IntRange(1),
    default=H200_SRAM_BYTES,
    show_default=True,
    help="On-chip memory of a thread block, bytes.",
)
@click.option("--emulate/--no-emulate", default=True, help="Count the kernel's bytes as well.")
def main(n: int, d: int, sram: int, emulate: bool) -> None:
    """Compare the bytes that attention algorithms move to and from memory (bf16, one head)."""
    try:
        rows = model(n, d, sram)
        if emulate:
            rows += measured(n, d)
    except (LookupError, ValueError) as problem:
        raise click.ClickException(str(problem)) from problem
    title = f"bytes to and from HBM: N = {n}, d = {d}, M = {sram} bytes"
    table = Table(title=title)
    table.add_column("algorithm")
    for column in ("tile_q x tile_kv", "read KiB", "written KiB", "total KiB", "of standard"):
        table.add_column(column, justify="right")
    table.add_column("closed form")
    table.add_column("its KiB", justify="right")
    table.add_column("total / form", justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tiles[0]} x {row.tiles[1]}" if row.tiles[0] else "",
            *(f"{x / 1024:,.0f}" for x in (row.read_bytes, row.write_bytes, row.total_bytes)),
            f"{row.total_bytes / rows[0].total_bytes:.1%}",
            row.form,
            f"{row.form_bytes / 1024:,.0f}",
            f"{row.total_bytes / row.form_bytes:.2f}",
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(table)
