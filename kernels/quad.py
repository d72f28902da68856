"""Exchanges inside a quad: the four lanes that share the rows of an accumulator."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def quad_transposed(row: cute.Tensor, lane: Int32) -> cute.Tensor:
    """Of 4 x 4 words, a row in each lane of a quad, the column of this lane.

    Args:
        row: (4), int32.
        lane: this one's place in the quad.
    """
    odd, upper = lane % 2 == 1, lane >= 2
    column = cute.make_rmem_tensor_like(row)
    # Lanes 0 and 1, and 2 and 3, exchange: then a lane has two words of columns i and i + 1 each.
    for i in cutlass.range_constexpr(0, 4, 2):
        came = cute.arch.shuffle_sync_bfly(row[i] if odd else row[i + 1], offset=1)
        column[i], column[i + 1] = came if odd else row[i], row[i + 1] if odd else came
    # Lanes 0 and 2, and 1 and 3: the half that belongs to the other.
    for i in cutlass.range_constexpr(2):
        came = cute.arch.shuffle_sync_bfly(column[i] if upper else column[i + 2], offset=2)
        column[i], column[i + 2] = came if upper else column[i], column[i + 2] if upper else came
    return column
