"""Which scores exist: the range of K/V tiles of a Q tile, and the predicate inside a tile.

Backward sees the same from the other side: the Q tiles of a K/V tile, and scores transposed.

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

    @cute.jit
    def first_row(self, column: Int32) -> Int32:
        """First row that attends to `column`: 0 or below when all do, len_q when none does."""
        row = Int32(0)
        if const_expr(self.right is not None):
            row = column - self.right - self.len_kv + self.len_q
        return row if column < self.len_kv else self.len_q

    def q_tiles(self, column: Int32, tile_kv: int, tile_q: int) -> tuple[Int32, Int32, Int32]:
        """(begin, full, end) for the K/V tile at `column`: its Q tiles, from `full` on unmasked.

        All are masked where the tile is ragged: what is not there would not be 0, but exp2(-LSE).
        """
        end = cute.ceil_div(self.len_q, tile_q)
        begin = cutlass.min(cutlass.max(self.first_row(column), 0) // tile_q, end)
        last = cutlass.max(self.first_row(column + tile_kv - 1), 0)
        return begin, cutlass.max(cutlass.min(cute.ceil_div(last, tile_q), end), begin), end

    @cute.jit
    def apply_transposed(
        self, scores: cute.Tensor, offsets: cute.Tensor, column: Int32, row: Int32
    ) -> None:
        """Overwrite with 0 what does not exist.

        Args:
            scores: (columns, rows) of this thread, float32.
            offsets: of the same shape, the (column, row) of each from the first.
            column, row: where the first one lies.
        """
        for c in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            first = self.first_row(column + offsets[c, 0][0]) - row
            for r in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[c, r] = scores[c, r] if offsets[0, r][1] >= first else Float32(0.0)
