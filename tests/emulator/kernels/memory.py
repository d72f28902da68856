"""Moving bytes without tensor maps: loads and stores of every width, cp.async, bulk copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from numpy.typing import NDArray

from .asm import asm
from .launch import compile, fake

THREADS = 64
SLOT = 16  # bytes a thread moves at most


@dataclass(frozen=True)
class Move:
    """PTX that carries up to SLOT bytes of a thread: $0 source (global), $1 target (global),
    $2 a slot in shared memory, $3 the thread. `expect` maps the source's bytes, shape
    (THREADS, SLOT), to the target's; bytes of the target not written keep the value 0xEE."""

    name: str
    text: str
    expect: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


def _first(count: int) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    """The first `count` bytes arrive, the rest of the target is left alone."""

    def expect(source: NDArray[np.uint8]) -> NDArray[np.uint8]:
        out = np.full_like(source, 0xEE)
        out[:, :count] = source[:, :count]
        return out

    return expect


def _filled(counts: NDArray[np.int64], size: int) -> Callable[..., NDArray[np.uint8]]:
    """`counts` bytes of each thread's source arrive, zeros up to `size` (cp.async's src-size)."""

    def expect(source: NDArray[np.uint8]) -> NDArray[np.uint8]:
        out = np.full_like(source, 0xEE)
        out[:, :size] = np.where(np.arange(size) < counts[:, None], source[:, :size], 0)
        return out

    return expect


def _through(load: str, store: str, registers: str, size: int) -> Move:
    """One load and one store of the same registers."""
    kind, names = registers.split(":")
    operand = f"{{{names}}}" if "," in names else names
    text = f"{{ .reg .{kind} {names}; {load} {operand}, [$0]; {store} [$1], {operand}; }}"
    return Move(f"{load}+{store}", text, _first(size))


def _staged(store: str, load: str, registers: str, size: int) -> Move:
    """Global to shared and back with the given shared-memory forms."""
    kind, names = registers.split(":")
    operand = f"{{{names}}}" if "," in names else names
    text = (
        f"{{ .reg .{kind} {names}; .reg .b32 w<4>; ld.global.v4.b32 {{w0, w1, w2, w3}}, [$0];"
        " st.shared.v4.b32 [$2], {w0, w1, w2, w3};"
        f" {load} {operand}, [$2]; xor.b32 w0, w0, w0; st.shared.v4.b32 [$2], {{w0, w0, w0, w0}};"
        f" {store} [$2], {operand}; {load} {operand}, [$2];"
        f" {store.replace('shared', 'global')} [$1], {operand}; }}"
    )
    return Move(f"{store}+{load}", text, _first(size))


def _async(opcode: str, size: int, tail: str = "") -> Move:
    """cp.async into the slot, then out again. `tail` is the source size, an operand or nothing.

    Sizes below the copy's are `thread % 5 * size / 4`."""
    counts = np.arange(THREADS) % 5 * (size // 4) if tail else np.full(THREADS, size)
    setup = f"rem.u32 n, $3, 5; mul.lo.u32 n, n, {size // 4};" if tail else "mov.u32 n, 0;"
    width = {4: "b32 x, [$2]; st.global.b32 [$1], x", 8: "b64 y, [$2]; st.global.b64 [$1], y"}.get(
        size, "v2.b64 {y, z}, [$2]; st.global.v2.b64 [$1], {y, z}"
    )
    text = (
        f"{{ .reg .b32 n, x; .reg .b64 y, z; {setup} {opcode} [$2], [$0], {size}{tail};"
        f" cp.async.commit_group; cp.async.wait_group 0; ld.shared.{width}; }}"
    )
    return Move(f"{opcode}.{size}{tail.replace(', ', '.')}", text, _filled(counts, size))


MOVES: list[Move] = [
    _through("ld.global.b8", "st.global.b8", "b16:x", 1),
    _through("ld.global.u8", "st.global.u8", "b32:x", 1),
    _through("ld.global.b16", "st.global.b16", "b16:x", 2),
    _through("ld.global.b32", "st.global.b32", "b32:x", 4),
    _through("ld.global.f32", "st.global.f32", "f32:x", 4),
    _through("ld.global.b64", "st.global.b64", "b64:x", 8),
    _through("ld.global.v2.b8", "st.global.v2.b8", "b16:x, y", 2),
    _through("ld.global.v4.b8", "st.global.v4.b8", "b16:x, y, z, w", 4),
    _through("ld.global.v2.b16", "st.global.v2.b16", "b16:x, y", 4),
    _through("ld.global.v4.u16", "st.global.v4.u16", "b16:x, y, z, w", 8),
    _through("ld.global.v2.b32", "st.global.v2.b32", "b32:x, y", 8),
    _through("ld.global.v4.f32", "st.global.v4.f32", "f32:x, y, z, w", 16),
    _through("ld.global.v2.b64", "st.global.v2.b64", "b64:x, y", 16),
    _through(
        "ld.global.nc.L1::no_allocate.v4.b32",
        "st.global.L1::no_allocate.v4.b32",
        "b32:x, y, z, w",
        16,
    ),
    _through("ld.global.nc.b32", "st.global.wt.b32", "b32:x", 4),
    _through("ld.global.cg.b32", "st.global.cg.b32", "b32:x", 4),
    _through("ld.volatile.global.b32", "st.volatile.global.b32", "b32:x", 4),
    _through("ld.relaxed.gpu.global.b32", "st.relaxed.gpu.global.b32", "b32:x", 4),
    _through("ld.acquire.gpu.global.b32", "st.release.gpu.global.b32", "b32:x", 4),
    _through("ld.b32", "st.b32", "b32:x", 4),  # generic addresses
    _staged("st.shared.b8", "ld.shared.b8", "b16:x", 1),
    _staged("st.shared.b16", "ld.shared.b16", "b16:x", 2),
    _staged("st.shared.b32", "ld.shared.b32", "b32:x", 4),
    _staged("st.shared.v2.b16", "ld.shared.v2.b16", "b16:x, y", 4),
    _staged("st.shared.v4.b16", "ld.shared.v4.b16", "b16:x, y, z, w", 8),
    _staged("st.shared.b64", "ld.shared.b64", "b64:x", 8),
    _staged("st.shared.v2.b32", "ld.shared.v2.b32", "b32:x, y", 8),
    _staged("st.shared.v4.f32", "ld.shared.v4.f32", "f32:x, y, z, w", 16),
    _staged("st.shared.v2.b64", "ld.shared.v2.b64", "b64:x, y", 16),
    Move(
        "generic.shared",
        "{ .reg .b32 x; .reg .b64 a; ld.global.b32 x, [$0]; cvt.u64.u32 a, $2;"
        " cvta.shared.u64 a, a; st.b32 [a], x; ld.shared.b32 x, [$2]; add.u32 x, x, 1;"
        " st.shared.b32 [$2], x; ld.b32 x, [a]; sub.u32 x, x, 1; st.b32 [$1], x; }",
        _first(4),
    ),
    Move(
        "sign",  # loads that widen: a signed byte and half to 32 bits
        "{ .reg .b32 x, y; .reg .b16 h; ld.global.s8 x, [$0]; st.global.b32 [$1], x;"
        " ld.global.s16 y, [$0+2]; st.global.b32 [$1+4], y;"
        " ld.global.u8 h, [$0+4]; st.global.b16 [$1+8], h;"
        " ld.global.s8 h, [$0+5]; st.global.b16 [$1+10], h;"
        " ld.global.u16 x, [$0+6]; st.global.b32 [$1+12], x; }",
        lambda source: np.concatenate(
            [
                source[:, :1].view(np.int8).astype(np.int32).view(np.uint8),
                source[:, 2:4].copy().view(np.int16).astype(np.int32).view(np.uint8),
                source[:, 4:5].astype(np.uint16).view(np.uint8),
                source[:, 5:6].view(np.int8).astype(np.int16).view(np.uint8),
                source[:, 6:8].copy().view(np.uint16).astype(np.uint32).view(np.uint8),
            ],
            axis=1,
        ),
    ),
    _async("cp.async.ca.shared.global", 4),
    _async("cp.async.ca.shared.global", 8),
    _async("cp.async.ca.shared.global", 16),
    _async("cp.async.cg.shared.global", 16),
    _async("cp.async.cg.shared.global.L2::128B", 16),
    _async("cp.async.ca.shared.global", 4, ", n"),
    _async("cp.async.ca.shared.global", 8, ", n"),
    _async("cp.async.cg.shared.global", 16, ", n"),
]


def build_moves() -> Any:
    """Compile: (source (len(MOVES), THREADS, 16) u8 as 4 u32, target likewise, preset to 0xEE)."""

    @cute.kernel
    def move(source: cute.Tensor, target: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        slots = smem.allocate_tensor(Uint32, cute.make_layout(4 * THREADS), byte_alignment=16)
        slot = (slots.iterator + 4 * thread).toint().to(Uint32)
        for i in cutlass.range_constexpr(len(MOVES)):
            offset = (i * THREADS + thread) * 4
            asm(
                MOVES[i].text,
                (),
                (source.iterator + offset).toint().to(Uint64),
                (target.iterator + offset).toint().to(Uint64),
                slot,
                thread.to(Uint32),
            )

    @cute.jit
    def host(source: cute.Tensor, target: cute.Tensor) -> None:
        move(source, target).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    shape = (len(MOVES), THREADS, 4)
    return compile(host, fake(Uint32, shape), fake(Uint32, shape))


# ---- cp.async with groups and with an mbarrier ---------------------------------------------------

STAGES = 4


def build_async_ring() -> Any:
    """cp.async in a ring of STAGES commit groups, and a last tile through an mbarrier.

    (source (tiles, 128) f32, target (tiles + 1, 128) f32): target[t] is the sum of tiles 0..t, and
    target[tiles] is source[0] again. `tiles` is fixed to 9."""
    tiles = 9

    @cute.kernel
    def ring(source: cute.Tensor, target: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        layout = cute.make_layout((STAGES, 128), stride=(128, 1))
        stages = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        barrier = smem.allocate_array(Int64, 1)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        one = cute.make_layout(1)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 128)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        for tile in cutlass.range_constexpr(STAGES - 1):
            cute.copy(
                atom,
                cute.make_tensor(source.iterator + tile * 128 + thread, one),
                cute.make_tensor(stages.iterator + tile * 128 + thread, one),
            )
            cute.arch.cp_async_commit_group()
        total = Float32(0.0)
        for tile in cutlass.range(tiles):
            cute.arch.cp_async_wait_group(STAGES - 2)
            total += stages[tile % STAGES, thread]
            target[tile, thread] = total
            fetch = tile + STAGES - 1
            if fetch < tiles:
                cute.copy(
                    atom,
                    cute.make_tensor(source.iterator + fetch * 128 + thread, one),
                    cute.make_tensor(stages.iterator + (fetch % STAGES) * 128 + thread, one),
                )
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        # Every thread reads its neighbour's copy: only the mbarrier orders that.
        cute.copy(
            atom,
            cute.make_tensor(source.iterator + thread, one),
            cute.make_tensor(stages.iterator + thread, one),
        )
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        target[tiles, thread ^ 1] = stages[0, thread ^ 1]

    @cute.jit
    def host(source: cute.Tensor, target: cute.Tensor) -> None:
        ring(source, target).launch(grid=(1, 1, 1), block=(128, 1, 1))

    return compile(host, fake(Float32, (tiles, 128)), fake(Float32, (tiles + 1, 128)))


# ---- bulk copies ---------------------------------------------------------------------------------

BULK = 256  # 32-bit words a bulk operation moves


@dataclass(frozen=True)
class BulkReduction:
    """cp.reduce.async.bulk of BULK words with `suffix`; `expect(target, source)` as u32 words."""

    suffix: str
    expect: Callable[[NDArray[np.uint32], NDArray[np.uint32]], NDArray[np.uint32]]
    floats: str = ""


def _signed_min(t: NDArray[np.uint32], s: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.minimum(t.view(np.int32), s.view(np.int32)).view(np.uint32)


def _by_float(dtype: Any) -> Callable[..., NDArray[np.uint32]]:
    return lambda t, s: (t.view(dtype) + s.view(dtype)).view(np.uint32)


def _bf16_add(target: NDArray[np.uint32], source: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Sums of small integers in bfloat16: exact, so truncation of the float32 sum is right."""
    wide = [x.view(np.uint16).astype(np.uint32) << np.uint32(16) for x in (target, source)]
    total = wide[0].view(np.float32) + wide[1].view(np.float32)
    return (total.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint32)


REDUCTIONS: list[BulkReduction] = [
    BulkReduction("add.f32", _by_float(np.float32), "f32"),
    BulkReduction("add.noftz.f16", _by_float(np.float16), "f16"),
    BulkReduction("add.noftz.bf16", _bf16_add, "bf16"),
    BulkReduction("add.u32", lambda t, s: t + s),
    BulkReduction("add.s32", lambda t, s: t + s),
    BulkReduction("min.s32", _signed_min),
    BulkReduction("max.u32", np.maximum),
    BulkReduction("and.b32", np.bitwise_and),
    BulkReduction("or.b32", np.bitwise_or),
    BulkReduction("xor.b32", np.bitwise_xor),
    BulkReduction("add.u64", lambda t, s: (t.view(np.uint64) + s.view(np.uint64)).view(np.uint32)),
    BulkReduction("inc.u32", lambda t, s: np.where(t >= s, 0, t + 1).astype(np.uint32)),
]


def bulk_inputs() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """source and target, each (len(REDUCTIONS), BULK) words."""
    rng = np.random.default_rng(4)
    pair = rng.integers(0, 1 << 32, (2, len(REDUCTIONS), BULK), dtype=np.uint32)
    for i, reduction in enumerate(REDUCTIONS):
        if reduction.floats == "f32":
            pair[:, i] = rng.standard_normal((2, BULK)).astype(np.float32).view(np.uint32)
        elif reduction.floats == "f16":
            pair[:, i] = rng.standard_normal((2, 2 * BULK)).astype(np.float16).view(np.uint32)
        elif reduction.floats == "bf16":
            small = rng.integers(-60, 60, (2, 2 * BULK)).astype(np.float32)
            pair[:, i] = (small.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
    return pair[0], pair[1]


def build_bulk() -> Any:
    """Bulk copy in (mbarrier), bulk reduce into `target`, bulk copy out to `copy`.

    (source (R, BULK) u32, target (R, BULK) u32 in and out, copy (R, BULK) u32), R reductions, one
    CTA each.
    """

    @cute.kernel
    def bulk(source: cute.Tensor, target: cute.Tensor, copy: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        staged = smem.allocate_tensor(Uint32, cute.make_layout(BULK), byte_alignment=128)
        barrier = smem.allocate_array(Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        here = staged.iterator.toint().to(Uint32)
        offset = cta * BULK
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, BULK * 4)
            asm(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                " [$0], [$1], $2, [$3];",
                (),
                here,
                (source.iterator + offset).toint().to(Uint64),
                Uint32(BULK * 4),
                barrier.toint().to(Uint32),
            )
        cute.arch.mbarrier_wait(barrier, 0)
        for i in cutlass.range_constexpr(len(REDUCTIONS)):
            if cta == i and thread == 0:
                asm(
                    f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{REDUCTIONS[i].suffix}"
                    " [$0], [$1], $2;",
                    (),
                    (target.iterator + offset).toint().to(Uint64),
                    here,
                    Uint32(BULK * 4),
                )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_threads()
        # The buffer may be written again, and generic writes need the proxy fence.
        for i in cutlass.range_constexpr(BULK // 32):
            staged[thread + 32 * i] = staged[thread + 32 * i] ^ Uint32(0x55)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if thread == 0:
            asm(
                "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;",
                (),
                (copy.iterator + offset).toint().to(Uint64),
                here,
                Uint32(BULK * 4),
            )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def host(source: cute.Tensor, target: cute.Tensor, copy: cute.Tensor) -> None:
        bulk(source, target, copy).launch(grid=(len(REDUCTIONS), 1, 1), block=(32, 1, 1))

    shape = (len(REDUCTIONS), BULK)
    return compile(host, fake(Uint32, shape), fake(Uint32, shape), fake(Uint32, shape))


# ---- local memory --------------------------------------------------------------------------------


def build_local() -> Any:
    """A per-thread array indexed at run time lives in local memory.

    (index (8, 32) s32 with values 0..15, result (32,) s32): cell[index] += position, then the
    cells' sum weighted by their position."""

    @cute.kernel
    def local(index: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cells = cute.make_rmem_tensor(cute.make_layout(16), Int32)
        cells.fill(0)
        for i in cutlass.range(8, unroll=1):
            at = index[i, thread]
            cells[at] = cells[at] + i + 1
        total = Int32(0)
        for i in cutlass.range(16, unroll=1):
            total += cells[i] * (i + 1)
        result[thread] = total

    @cute.jit
    def host(index: cute.Tensor, result: cute.Tensor) -> None:
        local(index, result).launch(grid=(1, 1, 1), block=(32, 1, 1))

    return compile(host, fake(Int32, (8, 32)), fake(Int32, (32,)))
