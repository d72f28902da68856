"""The order in which CTAs take output tiles: one number stands for (batch, head, q_tile)."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class TileOrder:
    """Tiles in one line, so that no extent meets the limit of 65,535 of a grid's y and z.

    Under a causal mask the last q_tile has most to do. Tiles then come longest first, so that the
    short ones fill the gaps at the end, by sections of sequences whose K and V stay in the L2
    cache. Otherwise q_tile runs fastest: CTAs that start together share K and V.
    """

    q_tiles: Int32
    heads: Int32
    batch: Int32
    section: Int32  # sequences (a head of a batch each) whose K and V fit the L2 cache
    longest_first: cutlass.Constexpr[bool]

    @property
    def count(self) -> Int32:
        """Tiles in all."""
        return self.q_tiles * self.heads * self.batch

    def locate(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """(q_tile, head, batch) of the tile with this number."""
        if self.longest_first:
            sequences = self.heads * self.batch
            section = cutlass.min(self.section, sequences)
            first = number // (section * self.q_tiles) * section
            rest = number - first * self.q_tiles
            width = cutlass.min(section, sequences - first)  # the last section may be narrower
            rank = rest // width
            sequence, q_tile = first + rest - rank * width, self.q_tiles - 1 - rank
        else:
            sequence, q_tile = number // self.q_tiles, number % self.q_tiles
        return q_tile, sequence % self.heads, sequence // self.heads
