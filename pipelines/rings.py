"""Rings of stages between roles: a full and a free mbarrier a stage, addressed by a running number.

Who uses a ring counts what passed through it: number n is in stage n % stages, for the
(n // stages)-th time, and no role keeps a phase. On the side of the threads a warp arrives by one
lane, after all of it; on the side of the tensor cores, or of TMA, the hardware does.

Of a pair of CTAs the first, which leads, issues the products of both: what it waits for is counted
at its barriers, and the tensor cores arrive in both.

What a role calls passes its own place in the source on (`loc`): that is the line which the compiler
notes for the instruction, and which a finding of the emulator names.
"""

from dataclasses import dataclass, replace
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cutlass_dsl import dsl_user_op

By = Literal["tma", "mma", "warps"]
LEADING_CTA = 0  # of a pair


@dataclass(frozen=True)
class Ring:
    """The device's side of one edge of the graph."""

    full: cute.Pointer  # an mbarrier a stage, shared memory
    free: cute.Pointer | None  # as many; None: what follows shows that a stage is free
    stages: cutlass.Constexpr[int]
    stage_bytes: cutlass.Constexpr[int]
    by: cutlass.Constexpr[By]
    freed_by: cutlass.Constexpr[By | None]
    pair: cutlass.Constexpr[bool]  # two CTAs share products
    to_mma: cutlass.Constexpr[bool]  # the tensor cores consume
    in_tmem: cutlass.Constexpr[bool]  # all that is handed over

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

    @dsl_user_op
    def acquire(
        self, number: Int32, some_bytes: cutlass.Constexpr[int] = 0, *, loc=None, ip=None
    ) -> None:
        """Producer: wait until the stage is free; where TMA fills it, announce the bytes: all of
        them, unless it is only some."""
        if self.free is not None:
            self._wait_free(number, loc, ip)
        if self.by == "tma":
            size = some_bytes or self.stage_bytes
            if self.pair and self.to_mma:
                announce_of_both(self.barrier(number), 2 * size)
                return
            with cute.arch.elect_one(loc=loc, ip=ip):
                cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(number), size, loc=loc, ip=ip)

    @dsl_user_op
    def drain(self, number: Int32, *, loc=None, ip=None) -> None:
        """Producer, after its last, `number` being the next: wait until every stage is free."""
        for i in range(self.stages):
            self._wait_free(number + i, loc, ip)

    def _wait_free(self, number: Int32, loc, ip) -> None:
        free = self.free + self.stage(number)
        cute.arch.mbarrier_wait(free, self.phase(number) ^ 1, loc=loc, ip=ip)

    def barrier(self, number: Int32) -> cute.Pointer:
        """Where TMA counts its bytes."""
        return self.full + self.stage(number)

    @dsl_user_op
    def commit(self, number: Int32, leader: Boolean | None = None, *, loc=None, ip=None) -> None:
        """Producer: the stage is full; with the tensor cores, once what the leader issued is
        done."""
        at = LEADING_CTA if self.pair and self.to_mma else None
        # What is handed to another CTA may be in its shared memory.
        far = at is not None and not self.in_tmem
        scope = MemScopeKind.CLUSTER if far else MemScopeKind.CTA
        arrive(self.full + self.stage(number), self.by, leader, self.pair, at, scope, loc, ip)

    @dsl_user_op
    def wait(self, number: Int32, *, loc=None, ip=None) -> None:
        """Consumer: wait until the stage is full."""
        full = self.full + self.stage(number)
        cute.arch.mbarrier_wait(full, self.phase(number), loc=loc, ip=ip)

    @dsl_user_op
    def release(self, number: Int32, leader: Boolean | None = None, *, loc=None, ip=None) -> None:
        """Consumer: the stage is free; with the tensor cores, as `commit`."""
        free, scope = self.free + self.stage(number), MemScopeKind.CTA
        arrive(free, self.freed_by, leader, self.pair, None, scope, loc, ip)


def arrive(
    barrier: cute.Pointer,
    by: By,
    leader: Boolean | None,
    pair: bool,
    at: int | None,
    scope: MemScopeKind,
    loc,
    ip,
) -> None:
    """One arrival: the warp's, after all its lanes, `at` another CTA's barrier; or the tensor
    cores', of a pair in both CTAs."""
    if by == "mma":
        commit(barrier, leader, pair, loc, ip)
    else:
        cute.arch.sync_warp(loc=loc, ip=ip)
        with cute.arch.elect_one(loc=loc, ip=ip):
            cute.arch.mbarrier_arrive(barrier, at, scope=scope, loc=loc, ip=ip)


def commit(barrier: cute.Pointer, leader: Boolean, pair: bool, loc, ip) -> None:
    """An arrival once every tcgen05 operation that the leading thread has issued is done."""
    group, multicast, mask = ("2", ".multicast::cluster", ", both") if pair else ("1", "", "")
    text = (
        "{ .reg .pred leads; .reg .b16 both; setp.ne.b32 leads, $1, 0; mov.b16 both, 3; "
        f"@leads tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
        f"{multicast}.b64 [$0]{mask}; }}"
    )
    operands = [Int32(barrier.toint()).ir_value(), Int32(leader).ir_value()]
    llvm.inline_asm(None, operands, text, "r,r", has_side_effects=True, loc=loc, ip=ip)


def leads() -> Boolean:
    """Whether this CTA is the one of its pair that issues the products."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) == LEADING_CTA


@cute.jit
def announce_of_both(barrier: cute.Pointer, size: cutlass.Constexpr[int]):
    """The leading CTA expects what TMA brings to both."""
    if leads():
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


@cute.jit
def init(barriers: cute.Pointer, stages: cutlass.Constexpr[int], count: cutlass.Constexpr[int]):
    """Make mbarriers of `count` arrivals; all threads call it, and synchronise before use."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(barriers + i, count)
