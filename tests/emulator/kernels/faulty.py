"""Kernels with a mistake in them: one branch for each, chosen at run time."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64
from cutlass.memory import SmemAllocator

from .asm import asm
from .launch import compile, fake

THREADS = 128
# The branches of `build_mistakes`.
(
    NONE,
    NO_BARRIER,
    NEVER_WRITTEN,
    PAST_SHARED,
    PAST_GLOBAL,
    MISALIGNED_STORE,
    MISALIGNED_BULK,
    TWO_COUNTS,
    ARRIVALS,
    CP_ASYNC,
    OPERAND_A,
) = range(11)

_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], 64, [$2];"
_PRODUCT = (
    "{ .reg .b32 a<4>, d<4>; mov.b32 a0, $0; mov.b32 a1, $0; mov.b32 a2, $0; mov.b32 a3, $0;"
    " mov.b32 d0, 0; mov.b32 d1, 0; mov.b32 d2, 0; mov.b32 d3, 0; wgmma.fence.sync.aligned;"
    " wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {d0, d1, d2, d3}, {a0, a1, a2, a3}, $1,"
    " 1, 1, 1, 0; wgmma.commit_group.sync.aligned; mov.b32 a0, 0;"
    " wgmma.wait_group.sync.aligned 0; st.global.b32 [$2], d0; }"
)


def build_mistakes() -> Any:
    """(which, source (THREADS,) u32, target (THREADS,) u32): one warpgroup.

    Without a mistake, target[i] = source[i ^ 32], by way of shared memory.
    """

    @cute.kernel
    def mistakes(which: Int32, source: cute.Tensor, target: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barrier = smem.allocate_array(Int64, 1)
        # The last that is allocated: nothing lies behind it.
        buffer = smem.allocate_tensor(Uint32, cute.make_layout(THREADS), byte_alignment=128)
        slot = (buffer.iterator + thread).toint().to(Uint32)
        origin = (source.iterator + thread).toint().to(Uint64)
        goal = (target.iterator + thread).toint().to(Uint64)
        if which == NONE:
            buffer[thread] = source[thread]
            cute.arch.sync_threads()
            target[thread] = buffer[thread ^ 32]
        if which == NO_BARRIER:
            buffer[thread] = source[thread]
            target[thread] = buffer[thread ^ 32]  # of another warp
        if which == NEVER_WRITTEN:
            target[thread] = buffer[thread]  # holds nothing
        if which == PAST_SHARED:
            buffer[thread + 1] = source[thread]  # one too far
        if which == PAST_GLOBAL:
            target[thread] = source[thread + 1]  # one too far
        if which == MISALIGNED_STORE:
            asm("st.global.v4.b32 [$0], {$1, $1, $1, $1};", (), goal, Uint32(1))  # four words
        if which == MISALIGNED_BULK and thread == 1:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 64)
            asm(_BULK, (), slot, origin, barrier.toint().to(Uint32))  # thread 1's slot
        if which == TWO_COUNTS:
            if warp < 2:
                cute.arch.barrier(barrier_id=1, number_of_threads=128)
            else:
                cute.arch.barrier(barrier_id=1, number_of_threads=64)  # half of them
        if which == ARRIVALS:
            if thread == 0:
                cute.arch.mbarrier_init(barrier, THREADS - 1)  # one too few
            cute.arch.sync_threads()
            cute.arch.mbarrier_arrive(barrier)
        if which == CP_ASYNC:
            asm("cp.async.ca.shared.global [$0], [$1], 4;", (), slot, origin)
            cute.arch.cp_async_commit_group()
            target[thread] = buffer[thread]  # not waited for
        if which == OPERAND_A:
            buffer[thread] = source[thread]
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            start = ((buffer.iterator.toint() & 0x3FFFF) >> 4).to(Uint64)
            # Unswizzled rows of 16 bytes, 128 bytes from one half of K to the other.
            b = start | Uint64(128 >> 4 << 16 | 256 >> 4 << 32)
            asm(_PRODUCT, (), source[thread], b, goal)  # a0 is written too early

    @cute.jit
    def host(which: Int32, source: cute.Tensor, target: cute.Tensor) -> None:
        mistakes(which, source, target).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    return compile(host, Int32(0), fake(Uint32, (THREADS,)), fake(Uint32, (THREADS,)))


def build_greedy(smem_bytes: int) -> Any:
    """(target (32,) u32): a launch with that much shared memory."""

    @cute.kernel
    def greedy(target: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        target[thread] = thread.to(Uint32)

    @cute.jit
    def host(target: cute.Tensor) -> None:
        greedy(target).launch(grid=(1, 1, 1), block=(32, 1, 1), smem=smem_bytes)

    return compile(host, fake(Uint32, (32,)))


def build_dependent() -> Any:
    """Two kernels, the second of which may start before the first one ends.

    (wait, source, between, target, each (32,) u32): between = source + 1, target = between + 1.
    Who waits for the first kernel in the second: with 0 nobody, with 1 all; with 2 the warp that
    does not read, and with 3 also the one that reads, for that one.
    """

    @cute.kernel
    def first(source: cute.Tensor, between: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        between[thread] = source[thread] + 1

    @cute.kernel
    def second(wait: Int32, between: cute.Tensor, target: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        reads = thread < 32
        if wait == 1 or (wait > 1 and not reads):
            cute.arch.griddepcontrol_wait()
        if wait == 3:
            cute.arch.sync_threads()
        if reads:
            target[thread] = between[thread] + 1

    @cute.jit
    def host(wait: Int32, source: cute.Tensor, between: cute.Tensor, target: cute.Tensor) -> None:
        first(source, between).launch(grid=(1, 1, 1), block=(32, 1, 1))
        second(wait, between, target).launch(grid=(1, 1, 1), block=(64, 1, 1), use_pdl=True)

    return compile(host, Int32(0), *(fake(Uint32, (32,)) for _ in range(3)))
