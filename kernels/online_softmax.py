"""Online softmax over K/V tiles, in registers (FlashAttention-2, algorithm 1).

For every row: m, the largest scaled score so far, and l, the sum of exp(score - m). A tile that
raises m scales what came before by alpha = exp(m_old - m_new); O is divided by l once, at the end.
All of it in base 2: exp2(x * scale_log2 - m * scale_log2) is one FMA and one MUFU operation.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..layouts.hardware import QUAD_THREADS

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
SMALLEST_NORMAL = 2.0**-126
CHAINS = 4


@dataclass(frozen=True)
class OnlineSoftmax:
    """m and l of the rows that this thread holds, and shares with the other lanes of its quad.

    A score is scale * x, x an element of Q K^T. `row_max` keeps the x of the largest score: the
    largest x, or the smallest when the scale is negative. `row_sum` covers this thread's columns
    alone until `finish`.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32
    negative_scale: cutlass.Constexpr[bool]

    @staticmethod
    def create(rows: int, scale: Float32, negative_scale: bool) -> "OnlineSoftmax":
        """For `rows` rows a thread; `scale` has the sign that `negative_scale` says, or is 0."""
        scale_log2 = nonzero_scale_log2(scale, negative_scale)
        row_max, row_sum = (cute.make_rmem_tensor(rows, Float32) for _ in range(2))
        return OnlineSoftmax(row_max, row_sum, scale_log2, negative_scale)

    @property
    def hidden(self) -> Float32:
        """The x of a score that does not exist."""
        return Float32.inf if self.negative_scale else -Float32.inf

    def larger(self, a: Float32, b: Float32) -> Float32:
        """The x of the larger score; a NaN loses."""
        return cute.arch.fmin(a, b) if self.negative_scale else cute.arch.fmax(a, b)

    def reset(self) -> None:
        """Before the first tile: no score seen."""
        self.row_max.fill(self.hidden)
        self.row_sum.fill(0.0)

    @cute.jit
    def step(self, scores: cute.Tensor) -> cute.Tensor:
        """Take in one tile.

        Args:
            scores: (rows, columns), float32: x on entry, P (not divided by l) on return.

        Returns:
            alpha: (rows), what everything before this tile is to be multiplied with.
        """
        alpha = cute.make_rmem_tensor_like(self.row_max)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            old = self.row_max[r]
            new = self.quad_max(fold(self.larger, [old, *elements(scores, r)]))
            self.row_max[r] = new
            # Where no score is seen yet, infinity minus infinity would be NaN.
            pivot = Float32(0.0) if new == self.hidden else new
            # Not as an FMA: an unchanged maximum must give exactly 1.
            alpha[r] = cute.math.exp2((old - pivot) * self.scale_log2, fastmath=True)
            shift = -pivot * self.scale_log2
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                power = cute.math.fma(scores[r, c], self.scale_log2, shift)
                scores[r, c] = cute.math.exp2(power, fastmath=True)
            self.row_sum[r] = fold(operator.add, [self.row_sum[r] * alpha[r], *elements(scores, r)])
        return alpha

    @cute.jit
    def finish(self) -> tuple[cute.Tensor, cute.Tensor]:
        """After the last tile: (1 / l, LSE) of each row; (0, -inf) for a row without a score."""
        inverse = cute.make_rmem_tensor_like(self.row_sum)
        lse = cute.make_rmem_tensor_like(self.row_sum)
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=QUAD_THREADS)
            log2 = cute.math.log2(total, fastmath=True)
            lse_log2 = cute.math.fma(self.row_max[r], self.scale_log2, log2)
            empty = total == 0.0  # false for NaN, which stays
            inverse[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            lse[r] = -Float32.inf if empty else lse_log2 * LN_2
        return inverse, lse

    @cute.jit
    def quad_max(self, value: Float32) -> Float32:
        """The largest in the quad, in all of its lanes."""
        for distance in cutlass.range_constexpr(1, 3):
            other = cute.arch.shuffle_sync_bfly(value, offset=distance)
            value = self.larger(value, other)
        return value


def nonzero_scale_log2(scale: Float32, negative_scale: bool) -> Float32:
    """scale * log2(e), of the sign that `negative_scale` says.

    It turns the infinity of a hidden score into -inf. Zero would turn it into NaN, so zero is taken
    as the smallest normal number.
    """
    if negative_scale:
        return cute.arch.fmin(scale * LOG2_E, -SMALLEST_NORMAL)
    return cute.arch.fmax(scale * LOG2_E, SMALLEST_NORMAL)


@dataclass(frozen=True)
class RowSoftmax:
    """m and l of the one row that this thread holds.

    m may lag behind: P is relative to a maximum that is too small, by a power of 2 up to a limit,
    so that O is seldom rescaled (FlashAttention-4, section 3.3). Exact all the same, since l is
    relative to the same m. But the largest P of a row is 1, without rounding, only where m does not
    lag, and that of a row that attends to little else is most of O's error. So m lags only where
    that P is a small part of l.
    """

    row_max: cute.Tensor  # (1), the x of the score that P is relative to
    row_sum: cute.Tensor  # (1)
    shift: cute.Tensor  # (1): -m, scaled; 0 where no score is seen yet
    lag_floor: cute.Tensor  # (1), log2: m lags where alpha would not be below
    scale_log2: Float32
    negative_scale: cutlass.Constexpr[bool]

    @staticmethod
    def create(scale: Float32, negative_scale: bool) -> "RowSoftmax":
        """`scale` has the sign that `negative_scale` says, or is 0."""
        state = (cute.make_rmem_tensor(1, Float32) for _ in range(4))
        return RowSoftmax(*state, nonzero_scale_log2(scale, negative_scale), negative_scale)

    @property
    def hidden(self) -> Float32:
        """The x of a score that does not exist."""
        return Float32.inf if self.negative_scale else -Float32.inf

    def larger(self, a: Float32, b: Float32) -> Float32:
        """The x of the larger score; a NaN loses."""
        return cute.arch.fmin(a, b) if self.negative_scale else cute.arch.fmax(a, b)

    def reset(self) -> None:
        """Before the first tile: no score seen."""
        self.row_max[0] = self.hidden
        self.row_sum[0] = Float32(0.0)
        self.shift[0] = Float32(0.0)
        self.lag_floor[0] = Float32.inf  # the first score is m

    @cute.jit
    def finite(self, largest: Float32) -> Float32:
        """0 where no score is seen yet: infinity minus infinity would be NaN."""
        return Float32(0.0) if largest == self.hidden else largest

    def largest(self, scores: cute.Tensor, old: Float32) -> Float32:
        """The x of the largest score of some, and of an old one."""
        return fold(self.larger, [old, *(scores[c] for c in range(cute.size(scores)))])

    def hide(self, scores: cute.Tensor, limit: Int32) -> None:
        """Scores from `limit` on do not exist."""
        for c in range(cute.size(scores)):
            scores[c] = cutlass.select_(limit > c, scores[c], self.hidden)

    @cute.jit
    def take_in(self, new: Float32) -> Float32:
        """The largest score so far becomes m, unless m may lag behind it; returns alpha, what O
        before is to be multiplied with, as l is."""
        old = self.row_max[0]
        lags = (old - new) * self.scale_log2 >= self.lag_floor[0]  # NaN, without a score: no
        pivot = self.finite(new)
        shift = -pivot * self.scale_log2
        alpha = cute.math.exp2((old - pivot) * self.scale_log2, fastmath=True)
        if lags:
            new, shift, alpha = old, self.shift[0], Float32(1.0)
        self.row_max[0] = new
        self.shift[0] = shift
        self.row_sum[0] *= alpha
        return alpha

    @cute.jit
    def bound_lag(self, lag_log2: cutlass.Constexpr[float], flat: cutlass.Constexpr[float]) -> None:
        """m may lag in the next tile, by `lag_log2` at most, where l, of the tiles before, is at
        least `flat` times the largest P. Known before the tile is: nothing waits for it."""
        log2 = cute.math.log2(self.row_sum[0], fastmath=True)
        self.lag_floor[0] = cute.arch.fmax(math.log2(flat) - log2, -lag_log2)

    @cute.jit
    def powers(self, scores: cute.Tensor) -> None:
        """Some scores to the powers of 2 that P is, in place."""
        scale, shift = (self.scale_log2, self.scale_log2), (self.shift[0], self.shift[0])
        for c in cutlass.range_constexpr(0, cute.size(scores), 2):
            pair = scores[c], scores[c + 1]
            scores[c], scores[c + 1] = cute.arch.fma_packed_f32x2(pair, scale, shift)

    @cute.jit
    def add(self, some: cute.Tensor) -> None:
        """l of some more of P."""
        pairs = [(some[c], some[c + 1]) for c in range(0, cute.size(some), 2)]
        low, high = fold(cute.arch.add_packed_f32x2, pairs)
        self.row_sum[0] += low + high

    @cute.jit
    def finish(self) -> tuple[Float32, Float32]:
        """After the last tile: (1 / l, LSE) of the row; (0, -inf) of one without a score."""
        total = self.row_sum[0]
        log2 = cute.math.log2(total, fastmath=True)
        lse = cute.math.fma(self.row_max[0], self.scale_log2, log2) * LN_2
        empty = total == 0.0  # false for NaN, which stays
        inverse = Float32(0.0) if empty else cute.arch.rcp_approx(total)
        return inverse, -Float32.inf if empty else lse


def elements(fragment: cute.Tensor, row: int) -> list[Float32]:
    """This thread's part of a row."""
    return [fragment[row, c] for c in range(cute.size(fragment, mode=[1]))]


def fold(op: Callable[[Float32, Float32], Float32], values: list[Float32]) -> Float32:
    """Reduce in CHAINS independent chains: no result waits for the one just before."""
    chains = values[:CHAINS]
    for i, value in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = op(chains[i % CHAINS], value)
    return functools.reduce(op, chains)


@cute.jit
def scale_rows(acc: cute.Tensor, factor: cute.Tensor) -> None:
    """Multiply each row of acc (rows, columns) by its factor."""
    for r in cutlass.range_constexpr(cute.size(factor)):
        acc[r, None].store(acc[r, None].load() * factor[r])


@cute.jit
def divide_rows(acc: cute.Tensor, inverse: cute.Tensor) -> None:
    """The division by l. A row without a score becomes 0, even where 0 * V gave NaN."""
    for r in cutlass.range_constexpr(cute.size(inverse)):
        row = acc[r, None].load() * inverse[r]
        zeros = cute.full_like(row, 0.0)
        acc[r, None].store(cute.where(cute.full_like(row, inverse[r]) == 0.0, zeros, row))
