"""TMA tensor copies: every swizzle, every number of dimensions, boxes over the edge, reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from numpy.typing import NDArray

from .launch import compile, fake

THREADS = 64

# ---- swizzles ------------------------------------------------------------------------------------

ROWS, COLUMNS = 16, 64  # one tile of 16-bit elements
SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128}  # bytes of a row that lie together
_KIND = {
    "none": warpgroup.SmemLayoutAtomKind.K_INTER,
    "32B": warpgroup.SmemLayoutAtomKind.K_SW32,
    "64B": warpgroup.SmemLayoutAtomKind.K_SW64,
    "128B": warpgroup.SmemLayoutAtomKind.K_SW128,
}


def swizzled(tile: NDArray[np.uint16], span: int) -> NDArray[np.uint16]:
    """Shared memory after a tile (ROWS, COLUMNS) came in by boxes of ROWS rows of `span` bytes.

    Byte address a within a box becomes a ^ ((a / 128 mod span / 16) * 16)."""
    out = np.zeros(ROWS * COLUMNS, np.uint16)
    row, column = np.divmod(np.arange(ROWS * COLUMNS), COLUMNS)
    box, inner = np.divmod(2 * column, span)
    address = box * ROWS * span + row * span + inner
    address ^= (address // 128 % (span // 16)) * 16
    out[address // 2] = tile.reshape(-1)
    return out


def build_swizzle(swizzle: str) -> Any:
    """Load a tile with TMA, write shared memory out as it lies, store the tile with TMA.

    Sizes are run-time values; one CTA a tile, rows fastest.
    (source (rows, columns) f16, raw (tiles, ROWS * COLUMNS / 2) u32,
     target (rows, columns) f16), columns a multiple of 8, any row stride that is.
    """

    @cute.kernel
    def copy(
        load: cute.CopyAtom,
        load_tensor: cute.Tensor,
        store: cute.CopyAtom,
        store_tensor: cute.Tensor,
        layout: cute.ComposedLayout,
        raw: cute.Tensor,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        bx, by, _ = cute.arch.block_idx()
        gx, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        words = ROWS * COLUMNS // 2
        linear = smem.allocate_tensor(Uint32, cute.make_layout(words), byte_alignment=1024)
        barrier = smem.allocate_array(Int64, 1)
        tile = cute.make_tensor(
            cute.recast_ptr(linear.iterator, layout.inner, dtype=Float16), layout.outer
        )
        if warp == 0:
            cpasync.prefetch_descriptor(load)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tiles_in = cute.zipped_divide(load_tensor, (ROWS, COLUMNS))
        tiles_out = cute.zipped_divide(store_tensor, (ROWS, COLUMNS))
        one = cute.make_layout(1)
        grouped = cute.group_modes(tile, 0, 2)
        s_in, g_in = cpasync.tma_partition(load, 0, one, grouped, tiles_in)
        s_out, g_out = cpasync.tma_partition(store, 0, one, grouped, tiles_out)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * ROWS * COLUMNS)
            cute.copy(load, g_in[None, (bx, by)], s_in, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        for i in cutlass.range(words // THREADS):
            raw[bx + gx * by, thread + THREADS * i] = linear[thread + THREADS * i]
        if warp == 0:
            cute.copy(store, s_out, g_out[None, (bx, by)])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def host(source: cute.Tensor, raw: cute.Tensor, target: cute.Tensor) -> None:
        piece = warpgroup.make_smem_layout_atom(_KIND[swizzle], Float16)
        layout = cute.tile_to_shape(piece, (ROWS, COLUMNS), (0, 1))
        shape = (ROWS, COLUMNS)
        load, load_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), source, layout, shape
        )
        store, store_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), target, layout, shape
        )
        copy(load, load_tensor, store, store_tensor, layout, raw).launch(
            grid=(
                cute.ceil_div(source.shape[0], ROWS),
                cute.ceil_div(source.shape[1], COLUMNS),
                1,
            ),
            block=(THREADS, 1, 1),
        )

    rows, columns = cute.sym_int(), cute.sym_int(divisibility=8)

    def matrix() -> Any:
        stride = (cute.sym_int64(divisibility=8), 1)
        return make_fake_tensor(Float16, (rows, columns), stride, assumed_align=16)

    raw = fake(Uint32, (cute.sym_int(), ROWS * COLUMNS // 2))
    return compile(host, matrix(), raw, matrix())


# ---- dimensions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A tensor of float32 (dim 0 fastest), strides in elements, and the box that tiles it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuple(-(-n // b) for n, b in zip(self.shape, self.box, strict=True))

    @property
    def span(self) -> int:
        """Elements of storage."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def view(self, storage: NDArray[Any]) -> NDArray[Any]:
        """The tensor in `storage` (1-D, contiguous), indexed [dim 0, dim 1, ...]."""
        stride = tuple(s * storage.itemsize for s in self.stride)
        return np.lib.stride_tricks.as_strided(storage, self.shape, stride)

    def tile(self, values: NDArray[Any], coordinate: tuple[int, ...]) -> NDArray[Any]:
        """One tile, zero beyond the tensor's end, as shared memory holds it: dim 0 fastest."""
        out = np.zeros(self.box, values.dtype)
        low = [c * b for c, b in zip(coordinate, self.box, strict=True)]
        part = values[tuple(slice(a, a + b) for a, b in zip(low, self.box, strict=True))]
        out[tuple(slice(0, n) for n in part.shape)] = part
        return out.reshape(-1, order="F")


# Sizes no multiple of the box, gaps between rows, planes and volumes, dims in a shuffled order.
BOXES: dict[int, Box] = {
    1: Box((77,), (1,), (32,)),
    2: Box((20, 13), (1, 24), (8, 4)),
    3: Box((12, 5, 7), (1, 116, 16), (8, 2, 4)),
    4: Box((8, 3, 5, 4), (1, 8, 160, 32), (4, 2, 4, 3)),
    5: Box((12, 3, 2, 3, 5), (1, 12, 600, 40, 120), (8, 2, 2, 2, 2)),
}
TARGET_PAD = 4  # the target's rows lie this many elements further apart


def target_box(box: Box) -> Box:
    """The same tensor, compact but for padded rows, in plain dimension order."""
    stride, step = [1], box.shape[0] + (-box.shape[0]) % 4 + TARGET_PAD
    for n in box.shape[1:]:
        stride.append(step)
        step *= n
    return Box(box.shape, tuple(stride), box.box)


def _build_box(box: Box, store_op: Any, dtype: Any, target: Box, keep_raw: bool) -> Any:
    size = int(np.prod(box.box))
    tiles = int(np.prod(box.tiles))
    rank = len(box.shape)

    @cute.kernel
    def copy(
        load: cute.CopyAtom,
        load_tensor: cute.Tensor,
        store: cute.CopyAtom,
        store_tensor: cute.Tensor,
        layout: cute.Layout,
        raw: cute.Tensor,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        tile = smem.allocate_tensor(dtype, layout, byte_alignment=128)
        linear = cute.make_tensor(tile.iterator, cute.make_layout(size))
        barrier = smem.allocate_array(Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        one = cute.make_layout(1)
        grouped = cute.group_modes(tile, 0, rank)
        s_in, g_in = cpasync.tma_partition(
            load, 0, one, grouped, cute.zipped_divide(load_tensor, box.box)
        )
        s_out, g_out = cpasync.tma_partition(
            store, 0, one, grouped, cute.zipped_divide(store_tensor, box.box)
        )
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size * dtype.width // 8)
            cute.copy(load, g_in[None, cta], s_in, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        if cutlass.const_expr(keep_raw):
            for i in cutlass.range(cute.ceil_div(size, THREADS), unroll=1):
                if thread + THREADS * i < size:
                    raw[cta, thread + THREADS * i] = linear[thread + THREADS * i]
        if warp == 0:
            cute.copy(store, s_out, g_out[None, cta])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def host(source: cute.Tensor, raw: cute.Tensor, goal: cute.Tensor) -> None:
        layout = cute.make_layout(box.box)
        load, load_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), source, layout, box.box
        )
        store, store_tensor = cpasync.make_tiled_tma_atom(store_op, goal, layout, box.box)
        copy(load, load_tensor, store, store_tensor, layout, raw).launch(
            grid=(tiles, 1, 1), block=(THREADS, 1, 1)
        )

    def tensor(b: Box) -> Any:
        return make_fake_tensor(dtype, b.shape, b.stride, assumed_align=16)

    return compile(host, tensor(box), fake(dtype, (tiles, size)), tensor(target))


def build_dimensions(rank: int) -> Any:
    """Copy BOXES[rank] tile by tile, one CTA each, dim 0 of the tiles fastest.

    (source with the box's shape and strides f32, raw (tiles, box size) f32, target f32)"""
    box = BOXES[rank]
    store = cpasync.CopyBulkTensorTileS2GOp()
    return _build_box(box, store, Float32, target_box(box), keep_raw=True)


# ---- reductions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduction:
    """A TMA reduction into global memory; `expect(target, source)` in `numpy` values."""

    kind: str
    dtype: Any
    numpy: Any
    expect: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]


REDUCTIONS: dict[str, Reduction] = {
    "add.f32": Reduction("ADD", Float32, np.float32, np.add),
    "add.f16": Reduction("ADD", Float16, np.float16, np.add),
    "max.f16": Reduction("MAX", Float16, np.float16, np.maximum),
    "add.s32": Reduction("ADD", Int32, np.int32, np.add),
    "min.u32": Reduction("MIN", Uint32, np.uint32, np.minimum),
    "max.u32": Reduction("MAX", Uint32, np.uint32, np.maximum),
    "and.u32": Reduction("AND", Uint32, np.uint32, np.bitwise_and),
    "or.u32": Reduction("OR", Uint32, np.uint32, np.bitwise_or),
    "xor.u32": Reduction("XOR", Uint32, np.uint32, np.bitwise_xor),
    "inc.u32": Reduction(
        "INC", Uint32, np.uint32, lambda t, s: np.where(t >= s, 0, t + 1).astype(np.uint32)
    ),
    # small integers held in bfloat16: their sums are exact
    "add.bf16": Reduction("ADD", BFloat16, np.uint16, lambda t, s: _bf16(_wide(t) + _wide(s))),
}
REDUCE_BOX = Box((24, 11), (1, 24), (16, 4))


def _wide(x: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def reduction_inputs(reduction: Reduction) -> tuple[NDArray[Any], NDArray[Any]]:
    """source and target, each the storage of REDUCE_BOX."""
    rng = np.random.default_rng(5)
    n = REDUCE_BOX.span
    if reduction.dtype is BFloat16:
        a, b = (_bf16(rng.integers(-60, 60, n).astype(np.float32)) for _ in range(2))
    elif np.issubdtype(reduction.numpy, np.floating):
        a, b = (rng.standard_normal(n).astype(reduction.numpy) for _ in range(2))
    else:
        info = np.iinfo(reduction.numpy)
        a, b = (
            rng.integers(info.min, info.max, n, dtype=reduction.numpy, endpoint=True)
            for _ in range(2)
        )
    return a, b


def build_reduction(name: str) -> Any:
    """(source REDUCE_BOX, raw unused, target REDUCE_BOX): target = reduce(target, source)."""
    reduction = REDUCTIONS[name]
    op = cpasync.CopyReduceBulkTensorTileS2GOp(getattr(cute.ReductionKind, reduction.kind))
    return _build_box(REDUCE_BOX, op, reduction.dtype, REDUCE_BOX, keep_raw=False)
