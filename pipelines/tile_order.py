"""The order in which CTAs visit output tiles: one number stands for (batch, head, q_tile)."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class TileOrder:
    """Tiles in one line, so that no extent meets the limit of 65,535 of a grid's y and z.

    q_tile runs fastest: CTAs that start together share K and V in the L2 cache.
    """

    q_tiles: Int32
    heads: Int32
    batch: Int32
    longest_first: cutlass.Constexpr[bool]  # under a causal mask the last q_tile has most to do

    @property
    def count(self) -> Int32:
        """Tiles in all."""
        return self.q_tiles * self.heads * self.batch

    def locate(self, number: Int32) -> tuple[Int32, Int32, Int32]:
        """(q_tile, head, batch) of the tile with this number."""
        sequence, q_tile = number // self.q_tiles, number % self.q_tiles
        if self.longest_first:
            q_tile = self.q_tiles - 1 - q_tile
        return q_tile, sequence % self.heads, sequence // self.heads
