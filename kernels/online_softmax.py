"""Online softmax over K/V tiles, in registers (FlashAttention-2, algorithm 1).

For every row: m, the largest scaled score so far, and l, the sum of exp(score - m). A tile that
raises m scales what came before by alpha = exp(m_old - m_new). O is divided by l once, at the end.
Everything is in base 2: exp2(x * scale_log2 - m * scale_log2) is one FMA and one MUFU operation.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
SMALLEST_NORMAL = 2.0**-126
QUAD_THREADS = 4  # lanes that share a row of an accumulator


@dataclass(frozen=True)
class OnlineSoftmax:
    """m and l of the rows that this thread holds; the four lanes of a quad share a row.

    `row_max` is kept in units of the raw product, where the maximum over scale * x is at the
    largest x, or at the smallest when the scale is negative. `row_sum` covers this thread's columns
    alone until `finish`.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32
    negative_scale: cutlass.Constexpr[bool]

    @staticmethod
    def create(rows: int, scale: Float32, negative_scale: bool) -> "OnlineSoftmax":
        """For `rows` rows a thread. `scale` has the sign that `negative_scale` says, or is 0."""
        # A hidden score is an infinity that the scale turns into -inf. A zero scale would make it
        # NaN, so zero is taken as the smallest normal number.
        if negative_scale:
            scale_log2 = cute.arch.fmin(scale * LOG2_E, -SMALLEST_NORMAL)
        else:
            scale_log2 = cute.arch.fmax(scale * LOG2_E, SMALLEST_NORMAL)
        row_max, row_sum = (cute.make_rmem_tensor(rows, Float32) for _ in range(2))
        return OnlineSoftmax(row_max, row_sum, scale_log2, negative_scale)

    @property
    def hidden(self) -> Float32:
        """The raw product of a score that does not exist."""
        return Float32.inf if self.negative_scale else -Float32.inf

    def larger(self, a: Float32, b: Float32) -> Float32:
        """The raw product with the larger score."""
        return cute.arch.fmin(a, b) if self.negative_scale else cute.arch.fmax(a, b)

    def reset(self) -> None:
        """Before the first tile: nothing seen."""
        self.row_max.fill(self.hidden)
        self.row_sum.fill(0.0)

    @cute.jit
    def step(self, scores: cute.Tensor) -> cute.Tensor:
        """Take one tile in: scores (rows, columns) become P, not divided; returns alpha (rows)."""
        alpha = cute.make_rmem_tensor_like(self.row_max)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            old = self.row_max[r]
            new = self._quad_max(self._thread_max(scores, r, old))
            self.row_max[r] = new
            # A row that has seen no score yet: infinity minus infinity would be NaN.
            pivot = Float32(0.0) if new == self.hidden else new
            alpha[r] = cute.math.exp2((old - pivot) * self.scale_log2, fastmath=True)
            shift = pivot * self.scale_log2
            row = scores[r, None].load()
            p = cute.math.exp2(row * self.scale_log2 - shift, fastmath=True)
            scores[r, None].store(p)
            self.row_sum[r] = p.reduce(cute.ReductionOp.ADD, self.row_sum[r] * alpha[r], 0)
        return alpha

    @cute.jit
    def finish(self) -> tuple[cute.Tensor, cute.Tensor]:
        """After the last tile: (1 / l, LSE) of each row; (0, -inf) for a row that saw nothing."""
        inverse = cute.make_rmem_tensor_like(self.row_sum)
        lse = cute.make_rmem_tensor_like(self.row_sum)
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=QUAD_THREADS)
            lse_log2 = self.row_max[r] * self.scale_log2 + cute.math.log2(total, fastmath=True)
            inverse[r] = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
            lse[r] = -Float32.inf if total == 0.0 else lse_log2 * LN_2
        return inverse, lse

    @cute.jit
    def _thread_max(self, scores: cute.Tensor, r: cutlass.Constexpr[int], old: Float32) -> Float32:
        """Largest of `old` and this thread's part of row r, in four independent chains."""
        chains = [old, scores[r, 0], scores[r, 1], scores[r, 2]]
        for c in cutlass.range_constexpr(3, cute.size(scores, mode=[1])):
            chains[c % 4] = self.larger(chains[c % 4], scores[r, c])
        return self.larger(self.larger(chains[0], chains[1]), self.larger(chains[2], chains[3]))

    @cute.jit
    def _quad_max(self, value: Float32) -> Float32:
        for distance in cutlass.range_constexpr(1, 3):
            other = cute.arch.shuffle_sync_bfly(value, offset=distance)
            value = self.larger(value, other)
        return value


@cute.jit
def scale_rows(acc: cute.Tensor, factor: cute.Tensor) -> None:
    """Multiply each row of acc (rows, columns) by its factor."""
    for r in cutlass.range_constexpr(cute.size(factor)):
        acc[r, None].store(acc[r, None].load() * factor[r])
