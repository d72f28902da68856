"""Ping-pong: consumer warpgroups take turns to issue products (FlashAttention-3, section 3.1)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@dataclass(frozen=True)
class Turns:
    """While the products of one warpgroup run, the others do their softmax.

    A named barrier for each of the `count` warpgroups: it waits at its own, and its predecessor
    arrives there. One warpgroup alone always has the turn.
    """

    own: Int32  # this warpgroup, from 0
    first: Int32  # number of warpgroup 0's barrier
    threads: Int32  # of the two warpgroups that meet
    count: cutlass.Constexpr[int]

    @cute.jit
    def open(self) -> None:
        """Give warpgroup 0 the first turn; all warpgroups call it once."""
        if self.own == self.count - 1:
            self.release()

    @cute.jit
    def wait(self) -> None:
        """Block until it is this warpgroup's turn."""
        if const_expr(self.count > 1):
            cute.arch.barrier(barrier_id=self.first + self.own, number_of_threads=self.threads)

    @cute.jit
    def release(self) -> None:
        """Hand the turn to the next warpgroup."""
        if const_expr(self.count > 1):
            following = self.first + (self.own + 1) % self.count
            cute.arch.barrier_arrive(barrier_id=following, number_of_threads=self.threads)
