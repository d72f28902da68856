"""Synchronisation inside one CTA: named barriers, mbarriers, register hand-over, timers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64
from cutlass.memory import SmemAllocator

from .asm import asm
from .launch import compile, fake

ROUNDS = 5


def build_ping_pong() -> Any:
    """Two warpgroups take turns on one buffer, ordered by named barriers alone.

    A third warpgroup gives registers away, fills the buffer and lets the first one start. Turn t
    (even: warpgroup 1, odd: warpgroup 2) does v = 3 v + t on the 128 values, each thread on
    another one than the turn before.

    (start (128,) s32, result (128,) s32)
    """

    @cute.kernel
    def ping_pong(start: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // 128)
        lane = thread % 128
        smem = SmemAllocator()
        buffer = smem.allocate_tensor(Int32, cute.make_layout(128), byte_alignment=16)
        if group == 0:
            cute.arch.setmaxregister_decrease(40)
            buffer[lane] = start[lane]
            cute.arch.barrier_arrive(barrier_id=1, number_of_threads=256)
        else:
            cute.arch.setmaxregister_increase(232)
            mine = group  # barrier ids 1 and 2: "warpgroup g may go"
            other = 3 - group
            for turn in cutlass.range(ROUNDS, unroll=1):
                cute.arch.barrier(barrier_id=mine, number_of_threads=256)
                at = lane ^ (2 * turn + group)
                buffer[at] = buffer[at] * 3 + 2 * turn + group - 1
                if turn < ROUNDS - 1 or group == 1:
                    cute.arch.barrier_arrive(barrier_id=other, number_of_threads=256)
            if group == 2:
                # Its own warpgroup wrote the last turn.
                cute.arch.barrier(barrier_id=3, number_of_threads=128)
                result[lane] = buffer[lane]

    @cute.jit
    def host(start: cute.Tensor, result: cute.Tensor) -> None:
        ping_pong(start, result).launch(grid=(1, 1, 1), block=(384, 1, 1), min_blocks_per_mp=1)

    return compile(host, fake(Int32, (128,)), fake(Int32, (128,)))


PER_WARP_TURNS = 3


def build_reductions() -> Any:
    """Barriers that reduce a predicate, and barriers whose number differs from warp to warp.

    (x (128,) u32, result (4, 128) u32): rows are bar.red.popc, .and, .or of x > 40, 40, 100 over
    the CTA, and x of the thread 32 further on in the same pair of warps."""

    @cute.kernel
    def reductions(x: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        buffer = smem.allocate_tensor(Uint32, cute.make_layout(128), byte_alignment=16)
        value = x[thread]
        (count,) = asm(
            "{ .reg .pred p; setp.gt.u32 p, $1, 40;"
            " barrier.cta.red.popc.aligned.u32 $0, 1, 128, p; }",
            (Uint32,),
            value,
        )
        result[0, thread] = count
        for row, (kind, bound) in enumerate((("and", 40), ("or", 100))):
            (flag,) = asm(
                f"{{ .reg .pred p, q; setp.gt.u32 p, $1, {bound}; bar.red.{kind}.pred q, 2, 128, p;"
                " selp.b32 $0, 1, 0, q; }",
                (Uint32,),
                value,
            )
            result[row + 1, thread] = flag
        buffer[thread] = value
        pair = cute.arch.make_warp_uniform(thread // 64)
        cute.arch.barrier(barrier_id=4 + pair, number_of_threads=64)
        result[3, thread] = buffer[thread ^ 32]

    @cute.jit
    def host(x: cute.Tensor, result: cute.Tensor) -> None:
        reductions(x, result).launch(grid=(1, 1, 1), block=(128, 1, 1))

    return compile(host, fake(Uint32, (128,)), fake(Uint32, (4, 128)))


MBARRIER_STEPS = 7


def build_mbarrier() -> Any:
    """An mbarrier's life, told by one warp; the second warp arrives for the last phase.

    (source (8,) u32; result (MBARRIER_STEPS,) u32): [0] test_wait of the unfinished phase, [1] of
    the finished one by its token, [2] by parity, [3] parity 0 after an arrive with count 2 finished
    phase 1 (parity 1), [4] a phase whose arrivals are complete and whose bytes are not, [5] that
    phase once two bulk copies have brought them, [6] after the other warp's 32 arrivals."""

    test = "{{ .reg .pred p; {} selp.b32 $0, 1, 0, p; }}"

    @cute.kernel
    def life(source: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        target = smem.allocate_tensor(Uint32, cute.make_layout(8), byte_alignment=16)
        barrier = smem.allocate_array(Int64, 2)
        first = barrier.toint().to(Uint32)
        second = (barrier + 1).toint().to(Uint32)
        if thread == 0:
            asm("mbarrier.init.shared::cta.b64 [$0], 2;", (), first)
            asm("mbarrier.init.shared.b64 [$0], 33;", (), second)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread == 0:
            (token,) = asm("mbarrier.arrive.shared.b64 $0, [$1];", (Uint64,), first)
            by_token = "mbarrier.test_wait.shared.b64 p, [$1], $2;"
            by_parity = "mbarrier.test_wait.parity.shared.b64 p, [$1], {};"
            (result[0],) = asm(test.format(by_token), (Uint32,), first, token)
            asm("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", (), first)
            (result[1],) = asm(test.format(by_token), (Uint32,), first, token)
            (result[2],) = asm(test.format(by_parity.format(0)), (Uint32,), first)
            asm("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [$0], 2; }", (), first)
            (result[3],) = asm(test.format(by_parity.format(0)), (Uint32,), first)
            asm("mbarrier.arrive.expect_tx.shared.b64 _, [$0], 16;", (), first)
            asm("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], 16;", (), first)
            asm("mbarrier.arrive.shared.b64 _, [$0];", (), first)
            (result[4],) = asm(test.format(by_parity.format(0)), (Uint32,), first)
            for i in cutlass.range_constexpr(2):
                asm(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                    " [$0], [$1], 16, [$2];",
                    (),
                    (target.iterator + 4 * i).toint().to(Uint32),
                    (source.iterator + 4 * i).toint().to(Uint64),
                    first,
                )
            cute.arch.mbarrier_wait(barrier, 0)
            (result[5],) = asm(
                test.format("mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 0, 1000;"),
                (Uint32,),
                first,
            )
            asm("mbarrier.inval.shared.b64 [$0];", (), first)
            asm("mbarrier.arrive.shared.b64 _, [$0];", (), second)
            asm(
                "{ .reg .pred p;"
                " WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [$0], 0;"
                " @p bra DONE; bra WAIT; DONE: }",
                (),
                second,
            )
            (result[6],) = asm(test.format(by_parity.format(0)), (Uint32,), second)
        if thread >= 32:
            asm("mbarrier.arrive.shared.b64 _, [$0];", (), second)

    @cute.jit
    def host(source: cute.Tensor, result: cute.Tensor) -> None:
        life(source, result).launch(grid=(1, 1, 1), block=(64, 1, 1))

    return compile(host, fake(Uint32, (8,)), fake(Uint32, (MBARRIER_STEPS,)))


def build_timers() -> Any:
    """Clocks run forwards, sleeping takes no less than nothing, griddepcontrol lets through.

    (data (32,) u32 in and out: + 1; times (6, 32) u64: clock, clock64, globaltimer, each before and
    after a nanosleep)"""

    @cute.kernel
    def timers(data: cute.Tensor, times: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        data[thread] = data[thread] + 1
        cute.arch.griddepcontrol_launch_dependents()
        for i in cutlass.range_constexpr(2):
            times[i, thread] = cute.arch.clock().to(Uint64)
            times[2 + i, thread] = cute.arch.clock64().to(Uint64)
            times[4 + i, thread] = cute.arch.globaltimer().to(Uint64)
            asm("nanosleep.u32 100;", ())

    @cute.jit
    def host(data: cute.Tensor, times: cute.Tensor) -> None:
        timers(data, times).launch(grid=(1, 1, 1), block=(32, 1, 1))

    return compile(host, fake(Uint32, (32,)), fake(Uint64, (6, 32)))


SPECIAL = (
    "tid.x",
    "tid.y",
    "tid.z",
    "ntid.x",
    "ntid.y",
    "ntid.z",
    "ctaid.x",
    "ctaid.y",
    "ctaid.z",
    "nctaid.x",
    "nctaid.y",
    "nctaid.z",
    "laneid",
)
BLOCK = (8, 4, 3)
GRID = (3, 2, 2)


def build_special() -> Any:
    """Every thread of a 3-D grid of 3-D blocks tells its special registers, and smem's size.

    (result (CTAS, THREADS, len(SPECIAL) + 1) u32); linear ids, x fastest."""
    threads, ctas = BLOCK[0] * BLOCK[1] * BLOCK[2], GRID[0] * GRID[1] * GRID[2]
    dynamic = 2048

    @cute.kernel
    def special(result: cute.Tensor) -> None:
        tx, ty, tz = cute.arch.thread_idx()
        bx, by, bz = cute.arch.block_idx()
        thread = tx + BLOCK[0] * (ty + BLOCK[1] * tz)
        cta = bx + GRID[0] * (by + GRID[1] * bz)
        for i in cutlass.range_constexpr(len(SPECIAL)):
            (result[cta, thread, i],) = asm(f"mov.u32 $0, %{SPECIAL[i]};", (Uint32,))
        (size,) = asm("mov.u32 $0, %dynamic_smem_size;", (Uint32,))
        result[cta, thread, len(SPECIAL)] = size

    @cute.jit
    def host(result: cute.Tensor) -> None:
        special(result).launch(grid=GRID, block=BLOCK, smem=dynamic)

    return compile(host, fake(Uint32, (ctas, threads, len(SPECIAL) + 1)))
