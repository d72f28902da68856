"""Which scores exist: the range of K/V tiles of a Q tile, and the predicate inside a tile.

Row i attends to the columns below min(len_kv, i + 1 + right + len_kv - len_q): the sequences are
aligned at their ends (bottom-right), and causal is right = 0. Only the presence of the bound is a
compile-time fact.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr


@dataclass(frozen=True)
class Mask:
    """The mask of one sequence, in its own rows and columns."""

    len_q: Int32
    len_kv: Int32
    right: Int32 | None  # columns that a row sees past its diagonal; None: all of them

    def column_limit(self, row: Int32) -> Int32:
        """First column that `row` does not attend to: at most len_kv, below 1 when it sees none."""
        if const_expr(self.right is None):
            return self.len_kv
        return cutlass.min(self.len_kv, row + 1 + self.right + self.len_kv - self.len_q)

    def kv_tiles(self, row: Int32, tile_q: int, tile_kv: int) -> tuple[Int32, Int32]:
        """(full, end) for the Q tile at `row`: [0, full) need no mask, [full, end) do.

        Tiles from `end` on hold no score of this Q tile; both are 0 when it has none at all.
        """
        last_row = cutlass.min(row + tile_q, self.len_q) - 1
        full = cutlass.max(self.column_limit(row), 0) // tile_kv
        end = cute.ceil_div(cutlass.max(self.column_limit(last_row), 0), tile_kv)
        return full, end

    @cute.jit
    def apply(
        self,
        scores: cute.Tensor,
        offsets: cute.Tensor,
        row: Int32,
        column: Int32,
        hidden: Float32,
    ) -> None:
        """Overwrite the scores that do not exist with `hidden`.

        Args:
            scores: (rows, columns) of this thread, float32.
            offsets: of the same shape, the (row, column) of each from the first.
            row, column: where the first one lies.
        """
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            limit = self.column_limit(row + offsets[r, 0][0]) - column
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] if offsets[0, c][1] < limit else hidden
