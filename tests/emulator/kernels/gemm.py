"""A small warp-specialised GEMM made of the DSL's own parts: TMA pipeline, tiled wgmma, epilogue.

C (m, n) = A (m, k) B (n, k)^T; one CTA a tile, one producer warp, one consumer warpgroup; sizes are
run-time values and need be no multiple of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Float8E4M3FN,
    Float8E5M2,
    Float16,
    Float32,
    Int8,
    Int32,
    Int64,
    pipeline,
)
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from .launch import compile

TILE_M, TILE_N = 64, 96
STAGES = 2


@dataclass(frozen=True)
class Gemm:
    """`a_mn`, `b_mn`: the operand is stored with consecutive rows together (MN-major).
    `registers`: A goes to the tensor core through registers."""

    a: Any
    b: Any
    accumulator: Any
    a_mn: bool = False
    b_mn: bool = False
    registers: bool = False

    @property
    def name(self) -> str:
        majors = ("m" if self.a_mn else "k") + ("n" if self.b_mn else "k")
        return f"{self.a.__name__}-{self.b.__name__}-{majors}{'-rs' * self.registers}"


GEMMS: list[Gemm] = [
    Gemm(BFloat16, BFloat16, Float32),
    Gemm(BFloat16, BFloat16, Float32, a_mn=True),
    Gemm(BFloat16, BFloat16, Float32, b_mn=True),
    Gemm(Float16, Float16, Float32, a_mn=True, b_mn=True),
    Gemm(BFloat16, BFloat16, Float32, registers=True),
    Gemm(Float16, Float16, Float32, b_mn=True, registers=True),
    Gemm(Float8E4M3FN, Float8E4M3FN, Float32),
    Gemm(Float8E5M2, Float8E4M3FN, Float32),
    Gemm(Int8, Int8, Int32),
]


def build(gemm: Gemm) -> Any:
    """Compile: (a (m, k), b (n, k), c (m, n) of the accumulator's type, row-major).

    Leading dimensions of a and b are multiples of 16 bytes."""
    tile_k = 128 * 8 // gemm.a.width  # one swizzle line
    tile = (TILE_M, TILE_N, tile_k)
    a_layout, b_layout = (
        LayoutEnum.COL_MAJOR if mn else LayoutEnum.ROW_MAJOR for mn in (gemm.a_mn, gemm.b_mn)
    )
    a_mode, b_mode = (
        OperandMajorMode.MN if mn else OperandMajorMode.K for mn in (gemm.a_mn, gemm.b_mn)
    )
    source = warpgroup.OperandSource.RMEM if gemm.registers else warpgroup.OperandSource.SMEM
    stage_bytes = (TILE_M + TILE_N) * tile_k * gemm.a.width // 8

    @cute.kernel
    def multiply(
        a_atom: cute.CopyAtom,
        a_tensor: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tensor: cute.Tensor,
        c: cute.Tensor,
        mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        tile_m, tile_n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sA = smem.allocate_tensor(gemm.a, a_smem.outer, 1024, swizzle=a_smem.inner)
        sB = smem.allocate_tensor(gemm.b, b_smem.outer, 1024, swizzle=b_smem.inner)
        barriers = smem.allocate_array(Int64, 2 * STAGES)
        producer, consumer = pipeline.PipelineTmaAsync.create(
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
            tx_count=stage_bytes,
            barrier_storage=barriers,
        ).make_participants()
        gA = cute.local_tile(a_tensor, (TILE_M, tile_k), (tile_m, None))
        gB = cute.local_tile(b_tensor, (TILE_N, tile_k), (tile_n, None))
        tiles_k = cute.size(gA, mode=[2])
        if warp == 4:
            one = cute.make_layout(1)
            tAsA, tAgA = cpasync.tma_partition(
                a_atom, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
            )
            tBsB, tBgB = cpasync.tma_partition(
                b_atom, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
            )
            for k in cutlass.range(tiles_k, unroll=1):
                stage = producer.acquire_and_advance()
                cute.copy(a_atom, tAgA[None, k], tAsA[None, stage.index], tma_bar_ptr=stage.barrier)
                cute.copy(b_atom, tBgB[None, k], tBsB[None, stage.index], tma_bar_ptr=stage.barrier)
            producer.tail()
        else:
            mine = mma.get_slice(thread)
            tCsA = mine.partition_A(sA)
            tCsB = mine.partition_B(sB)
            tCrB = mma.make_fragment_B(tCsB)
            if cutlass.const_expr(gemm.registers):
                tCrA = cute.make_rmem_tensor(tCsA[None, None, None, 0].shape, gemm.a)
            else:
                tCrA = mma.make_fragment_A(tCsA)
            gC = cute.local_tile(c, (TILE_M, TILE_N), (tile_m, tile_n))
            tCgC = mine.partition_C(gC)
            accumulator = cute.make_rmem_tensor(tCgC.shape, gemm.accumulator)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for _ in cutlass.range(tiles_k, unroll=1):
                stage = consumer.wait_and_advance()
                if cutlass.const_expr(gemm.registers):
                    cute.autovec_copy(tCsA[None, None, None, stage.index], tCrA)
                warpgroup.fence()
                for k in cutlass.range_constexpr(cute.size(tCrB, mode=[2])):
                    if cutlass.const_expr(gemm.registers):
                        left = tCrA[None, None, k]
                    else:
                        left = tCrA[None, None, k, stage.index]
                    cute.gemm(mma, accumulator, left, tCrB[None, None, k, stage.index], accumulator)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                stage.release()
            inside = cute.local_tile(
                cute.make_identity_tensor(c.shape), (TILE_M, TILE_N), (tile_m, tile_n)
            )
            tCcC = mine.partition_C(inside)
            for i in cutlass.range_constexpr(cute.size(accumulator)):
                if cute.elem_less(tCcC[i], c.shape):
                    tCgC[i] = accumulator[i]

    @cute.jit
    def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
        mma = sm90.make_trivial_tiled_mma(
            gemm.a, gemm.b, a_mode, b_mode, gemm.accumulator, (1, 1, 1), (64, TILE_N), source
        )
        a_smem = sm90.make_smem_layout_a(a_layout, tile, gemm.a, STAGES)
        b_smem = sm90.make_smem_layout_b(b_layout, tile, gemm.b, STAGES)
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_atom, a_tensor = cpasync.make_tiled_tma_atom(load, a, a_smem, (TILE_M, tile_k))
        b_atom, b_tensor = cpasync.make_tiled_tma_atom(load, b, b_smem, (TILE_N, tile_k))
        multiply(a_atom, a_tensor, b_atom, b_tensor, c, mma, a_smem, b_smem).launch(
            grid=(cute.ceil_div(c.shape[0], TILE_M), cute.ceil_div(c.shape[1], TILE_N), 1),
            block=(160, 1, 1),
        )

    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def operand(dtype: Any, rows: Any, mn_major: bool) -> Any:
        pitch = cute.sym_int64(divisibility=128 // dtype.width)
        stride = (1, pitch) if mn_major else (pitch, 1)
        return make_fake_tensor(dtype, (rows, k), stride, assumed_align=16)

    return compile(
        host,
        operand(gemm.a, m, gemm.a_mn),
        operand(gemm.b, n, gemm.b_mn),
        make_fake_tensor(gemm.accumulator, (m, n), (cute.sym_int64(), 1), assumed_align=4),
    )
