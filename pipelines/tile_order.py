"""The order in which CTAs take output tiles: one number stands for (batch, head, q_tile)."""

from dataclasses import dataclass
from typing import Literal

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class TileOrder:
    """Tiles in one line, so that no extent meets the limit of 65,535 of a grid's y and z.

    A tile is one of queries, or in backward of keys. Under a causal mask the last queries, and the
    first keys, have most to do, and come first, so that the short ones fill the gaps at the end: by
    sections of sequences whose operands stay in the L2 cache. Otherwise the tile runs fastest: CTAs
    that start together share the operands of a sequence.
    """

    tiles: Int32  # of a sequence
    heads: Int32
    batch: Int32
    section: Int32  # sequences (a head of a batch each) that fit the L2 cache together
    start: cutlass.Constexpr[Literal["first", "last"] | None]  # at this tile; None: no sections

    @property
    def count(self) -> Int32:
        """Tiles in all."""
        return self.tiles * self.heads * self.batch

    def locate(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """(tile, head, batch) of the tile with this number."""
        if self.start is None:
            sequence, tile = number // self.tiles, number % self.tiles
        else:
            sequences = self.heads * self.batch
            section = cutlass.min(self.section, sequences)
            first = number // (section * self.tiles) * section
            rest = number - first * self.tiles
            width = cutlass.min(section, sequences - first)  # the last section may be narrower
            rank = rest // width
            sequence = first + rest - rank * width
            tile = rank if self.start == "first" else self.tiles - 1 - rank
        return tile, sequence % self.heads, sequence // self.heads
