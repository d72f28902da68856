"""Ping-pong: consumer warpgroups take turns to issue products (FlashAttention-3, section 3.1)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Turns:
    """While one warpgroup's products run, the others do their softmax.

    A named barrier for each warpgroup: it waits at its own, and its predecessor arrives there.
    """

    first: int  # number of warpgroup 0's barrier
    threads: int  # of the two warpgroups that meet
    count: int  # warpgroups that take turns
    own: Int32  # this warpgroup's index

    @cute.jit
    def open(self) -> None:
        """Give warpgroup 0 the first turn. Every warpgroup calls it once, before any wait."""
        if self.own == self.count - 1:
            self.release()

    def wait(self) -> None:
        """Block until it is this warpgroup's turn."""
        cute.arch.barrier(barrier_id=self.first + self.own, number_of_threads=self.threads)

    def release(self) -> None:
        """Hand the turn to the next warpgroup."""
        following = (self.own + 1) % self.count
        cute.arch.barrier_arrive(
            barrier_id=self.first + following, number_of_threads=self.threads
        )
