"""Rings of stages between roles: a full and a free mbarrier a stage, addressed by a running number.

Who uses a ring counts what passed through it: number n is in stage n % stages, for the
(n // stages)-th time, and no role keeps a phase. On the side of the threads a warp arrives by one
lane, after all of it; on the side of the tensor cores, or of TMA, the hardware does.
"""

from dataclasses import dataclass, replace
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass._mlir.dialects import llvm

By = Literal["tma", "mma", "warps"]


@dataclass(frozen=True)
class Ring:
    """The device's side of one edge of the graph."""

    full: cute.Pointer  # an mbarrier a stage, shared memory
    free: cute.Pointer | None  # as many; None: what follows shows that a stage is free
    stages: cutlass.Constexpr[int]
    stage_bytes: cutlass.Constexpr[int]
    by: cutlass.Constexpr[By]
    freed_by: cutlass.Constexpr[By | None]

    def of(self, tile: Int32 | int) -> "Ring":
        """The ring of one tile of Q, where each has its own: their barriers follow each other."""
        free = None if self.free is None else self.free + tile * self.stages
        return replace(self, full=self.full + tile * self.stages, free=free)

    def stage(self, number: Int32) -> Int32:
        """Which stage a number is in."""
        return number % self.stages

    def phase(self, number: Int32) -> Int32:
        """Parity of the turn in which its stage holds a number."""
        return number // self.stages & 1

    @cute.jit
    def acquire(self, number: Int32, some_bytes: cutlass.Constexpr[int] = 0) -> None:
        """Producer: wait until the stage is free; where TMA fills it, announce the bytes: all of
        them, unless it is only some."""
        if const_expr(self.free is not None):
            cute.arch.mbarrier_wait(self.free + self.stage(number), self.phase(number) ^ 1)
        if const_expr(self.by == "tma"):
            with cute.arch.elect_one():
                size = some_bytes or self.stage_bytes
                cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(number), size)

    def barrier(self, number: Int32) -> cute.Pointer:
        """Where TMA counts its bytes."""
        return self.full + self.stage(number)

    def commit(self, number: Int32, leader: Boolean | None = None) -> None:
        """Producer: the stage is full; with the tensor cores, once what the leader issued is
        done."""
        arrive(self.full + self.stage(number), self.by, leader)

    @cute.jit
    def wait(self, number: Int32) -> None:
        """Consumer: wait until the stage is full."""
        cute.arch.mbarrier_wait(self.full + self.stage(number), self.phase(number))

    def release(self, number: Int32, leader: Boolean | None = None) -> None:
        """Consumer: the stage is free; with the tensor cores, as `commit`."""
        arrive(self.free + self.stage(number), self.freed_by, leader)


@cute.jit
def arrive(barrier: cute.Pointer, by: cutlass.Constexpr[By], leader: Boolean | None) -> None:
    """One arrival: the warp's, after all its lanes, or the tensor cores'."""
    if const_expr(by == "mma"):
        commit(barrier, leader)
    else:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)


def commit(barrier: cute.Pointer, leader: Boolean) -> None:
    """An arrival once every tcgen05 operation that the leading thread has issued is done."""
    text = (
        "{ .reg .pred leads; setp.ne.b32 leads, $1, 0; @leads tcgen05.commit.cta_group::1"
        ".mbarrier::arrive::one.shared::cluster.b64 [$0]; }"
    )
    operands = [Int32(barrier.toint()).ir_value(), Int32(leader).ir_value()]
    llvm.inline_asm(None, operands, text, "r,r", has_side_effects=True)


@cute.jit
def init(barriers: cute.Pointer, stages: cutlass.Constexpr[int], count: cutlass.Constexpr[int]):
    """Make mbarriers of `count` arrivals; all threads call it, and synchronise before use."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(barriers + i, count)
