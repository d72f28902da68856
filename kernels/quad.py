"""Exchanges inside a quad: the four lanes that share the rows of an accumulator."""

import cutlass.cute as cute
from cutlass import Boolean, Int32, select_

from ..layouts.hardware import QUAD_THREADS


def quad_transposed(row: list[Int32], lane: Int32) -> list[Int32]:
    """Of 4 x 4 words, a row in each lane of a quad, the column of this lane.

    Args:
        row: four words; what is left out does not matter.
        lane: this one's place in the quad.
    """
    words = row + [Int32(0)] * (QUAD_THREADS - len(row))
    odd, upper = lane % 2 == 1, lane >= 2
    # Lanes 0 and 1, and 2 and 3, exchange: then a lane has two words of columns i and i + 1 each.
    for i in range(0, QUAD_THREADS, 2):
        words[i], words[i + 1] = _exchanged(words[i], words[i + 1], odd, 1)
    # Lanes 0 and 2, and 1 and 3: the half that belongs to the other.
    for i in range(2):
        words[i], words[i + 2] = _exchanged(words[i], words[i + 2], upper, 2)
    return words


def _exchanged(low: Int32, high: Int32, second: Boolean, distance: int) -> tuple[Int32, Int32]:
    """The first of two lanes gives its high word for the other's low one."""
    came = cute.arch.shuffle_sync_bfly(select_(second, low, high), offset=distance)
    return select_(second, came, low), select_(second, high, came)
