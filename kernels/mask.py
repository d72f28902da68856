"""Which scores exist: the range of K/V tiles of a Q tile, and the predicate inside a tile.

Row i may attend to the columns below min(len_kv, i + 1 + right + len_kv - len_q): the lengths are
aligned at their ends (bottom-right), and causal is right = 0. Only the presence of the bound is a
compile-time fact.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr


@dataclass(frozen=True)
class Mask:
    """The mask of one (batch, head), in units of its own rows and columns."""

    len_q: Int32
    len_kv: Int32
    right: Int32 | int | None  # columns that a row sees past its diagonal; None: all of them

    def column_limit(self, row: Int32) -> Int32:
        """First column that `row` may not attend to; may be negative."""
        if const_expr(self.right is None):
            return self.len_kv
        return cutlass.min(self.len_kv, row + 1 + self.right + self.len_kv - self.len_q)

    def kv_tiles(self, first_row: Int32, tile_q: int, tile_kv: int) -> tuple[Int32, Int32]:
        """(full, end): tiles [0, full) need no mask, tiles [full, end) do, others are not visited.

        Both are 0 when no row of the tile has anything to attend to.
        """
        last_row = cutlass.min(first_row + tile_q, self.len_q) - 1
        full = cutlass.max(self.column_limit(first_row), 0) // tile_kv
        end = cute.ceil_div(cutlass.max(self.column_limit(last_row), 0), tile_kv)
        return full, end

    @cute.jit
    def apply(
        self, scores: cute.Tensor, coordinates: cute.Tensor, row: Int32, column: Int32, hidden
    ) -> None:
        """Overwrite the scores that do not exist with `hidden`.

        Args:
            scores: (rows, columns) of this thread, float32.
            coordinates: the same shape, the (row, column) of each inside the tile.
            row, column: the tile's first row and column.
        """
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            # Relative to this thread's first column, so that the compares have constant operands.
            limit = self.column_limit(row + coordinates[r, 0][0]) - column - coordinates[r, 0][1]
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                offset = 8 * (c // 2) + c % 2
                scores[r, c] = scores[r, c] if offset < limit else hidden
