"""A small GEMM on Blackwell's tensor cores, in many forms: one tile of C a CTA, or a pair of CTAs.

C (m, n) = A (m, k) B (n, k)^T. A warp loads tiles by TMA, a warp multiplies, four warps take the
product out of tensor memory; before, they put there what does not come through shared memory: A, if
it is to be there, and scale factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Float4E2M1FN,
    Float6E3M2FN,
    Float8E4M3FN,
    Float8E5M2,
    Float8E8M0FNU,
    Float16,
    Float32,
    Int8,
    Int32,
    Int64,
    TFloat32,
    Uint8,
    Uint32,
    pipeline,
)
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import blackwell_helpers as sm100

from .asm import asm
from .launch import compile

STAGES = 2
STORERS = 128  # threads of the four warps
COLUMNS = 512
A_COLUMN, SCALE_A_COLUMN, SCALE_B_COLUMN = 256, 384, 448  # the product is at 0
A_WORDS = 64  # of a row, where A goes to tensor memory: STAGES tiles of 128 bytes


@dataclass(frozen=True)
class Gemm:
    """One instruction's M and N are the tile's.

    `load`: how the product leaves tensor memory. `scale`: the type of scale factors, each of
    `block` elements along k; `copied`: they come through shared memory. `negate`: A's sign is
    turned. `across`: so many tiles along n share the loads of A, multicast within a cluster.
    """

    a: Any
    b: Any
    accumulator: Any
    m: int
    n: int
    load: Any
    pair: bool = False
    a_mn: bool = False
    b_mn: bool = False
    a_tmem: bool = False
    scale: Any = None
    block: int = 0
    copied: bool = False
    negate: bool = False
    across: int = 1

    @property
    def dense4(self) -> bool:
        """Elements of 4 bits without padding."""
        return self.scale is not None and self.a is self.b is Float4E2M1FN

    @property
    def mma_k(self) -> int:
        """K of an instruction."""
        return 64 if self.dense4 else 32 // max(1, self.a.width // 8)

    @property
    def tile_k(self) -> int:
        """One swizzle line."""
        return 4 * self.mma_k

    @property
    def name(self) -> str:
        majors = ("m" if self.a_mn else "k") + ("n" if self.b_mn else "k")
        words = [dtype.__name__ for dtype in (self.a, self.b, self.accumulator)]
        words += [f"{self.m}x{self.n}", majors, type(self.load).__name__]
        flags = {"pair": self.pair, "ts": self.a_tmem, f"scale{self.block}": self.scale}
        flags |= {"cp": self.copied, "multicast": self.across > 1}
        return "-".join([*words, *(flag for flag, on in flags.items() if on)])


_X = tcgen05.Repetition
_PACK = tcgen05.Pack.PACK_16b_IN_32b
_ROWS = tcgen05.Ld32x32bOp(_X.x32)
GEMMS: list[Gemm] = [
    Gemm(BFloat16, BFloat16, Float32, 128, 64, _ROWS, negate=True),
    Gemm(BFloat16, BFloat16, Float32, 128, 72, tcgen05.Ld16x256bOp(_X.x1), a_mn=True),
    Gemm(Float16, Float16, Float16, 128, 64, tcgen05.Ld16x128bOp(_X.x8, _PACK), b_mn=True),
    Gemm(BFloat16, BFloat16, Float32, 64, 64, tcgen05.Ld16x64bOp(_X.x16), a_mn=True, b_mn=True),
    Gemm(Float16, Float16, Float32, 64, 64, tcgen05.Ld16x32bx2Op(_X.x32)),
    Gemm(BFloat16, BFloat16, Float32, 256, 128, _ROWS, pair=True, a_mn=True, b_mn=True),
    Gemm(Float16, Float16, Float32, 128, 128, _ROWS, pair=True, across=2),
    Gemm(BFloat16, BFloat16, Float32, 128, 64, _ROWS, a_tmem=True),
    Gemm(BFloat16, BFloat16, Float32, 128, 128, _ROWS, pair=True, a_tmem=True),
    Gemm(Float32, Float32, Float32, 128, 64, _ROWS, a_mn=True),
    Gemm(Float32, Float32, Float32, 256, 64, _ROWS, pair=True, a_tmem=True),
    Gemm(Float8E4M3FN, Float8E5M2, Float32, 128, 128, _ROWS, a_mn=True, b_mn=True),
    Gemm(Float8E5M2, Float8E5M2, Float16, 256, 64, tcgen05.Ld32x32bOp(_X.x32, _PACK), pair=True),
    Gemm(Float4E2M1FN, Float6E3M2FN, Float32, 128, 64, _ROWS),
    Gemm(Int8, Int8, Int32, 128, 64, _ROWS, pair=True),
    Gemm(Uint8, Uint8, Int32, 128, 64, _ROWS, b_mn=True),
    Gemm(Float8E4M3FN, Float8E4M3FN, Float32, 128, 64, _ROWS, scale=Float8E8M0FNU, block=32),
    Gemm(
        *(Float8E5M2, Float8E4M3FN, Float32, 128, 128, _ROWS),
        pair=True,
        a_tmem=True,
        scale=Float8E8M0FNU,
        block=32,
    ),
    Gemm(Float4E2M1FN, Float4E2M1FN, Float32, 128, 128, _ROWS, scale=Float8E8M0FNU, block=32),
    Gemm(
        *(Float4E2M1FN, Float4E2M1FN, Float32, 256, 256, _ROWS),
        pair=True,
        copied=True,
        scale=Float8E4M3FN,
        block=16,
    ),
    Gemm(
        *(Float4E2M1FN, Float4E2M1FN, Float32, 128, 64, _ROWS),
        a_tmem=True,
        scale=Float8E4M3FN,
        block=16,
    ),
]


def lay(smem: cute.Tensor, words: cute.Tensor, thread: Any) -> None:
    """Scale factors' words [rows, words] to shared memory, a word of 128 rows behind the other.

    Each 512 bytes are as tcgen05.cp wants them: 32 lines of the words of four rows, 32 apart.
    """
    rows, count = words.shape
    for i in range(count * rows // 128):
        word, part = divmod(i, rows // 128)
        smem[128 * i + thread % 32 * 4 + thread // 32] = words[128 * part + thread, word]


def copy(base: Any, column: int, smem: cute.Tensor, group: int) -> None:
    """The same to tensor memory, in each 32 lanes."""
    for i in range(cute.size(smem) // 128):
        start = (smem.iterator.toint() + 512 * i) >> 4 & 0x3FFF
        desc = Int64(start) | Int64(8 << 32 | 1 << 46)  # 128 bytes from eight lines to the next
        place = Int32((base + column + 4 * i).toint())
        asm(f"tcgen05.cp.cta_group::{group}.32x128b.warpx4 [$0], $1;", (), place, desc)


def put(base: Any, column: int, words: cute.Tensor, layout: cute.Layout, thread: Any) -> None:
    """Words in global memory, where `layout` says for a (lane, column), to tensor memory."""
    width = cute.size(layout, mode=[1])
    source = cute.make_tensor(words.iterator, layout)
    target = cute.make_tensor(base + column, cute.make_layout((128, width), stride=(1 << 16, 1)))
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(width)), Uint32)
    me = tcgen05.make_tmem_copy(atom, target).get_slice(thread)
    mine = me.partition_S(source)
    registers = cute.make_rmem_tensor(mine.shape, Uint32)
    cute.autovec_copy(mine, registers)
    cute.copy(atom, registers, me.partition_D(target))


def lanes_of_rows(pitch: Any, rows: int) -> cute.Layout:
    """A's words for each (lane, column): row after row, and again from the 64th lane on."""
    return cute.make_layout(((rows, 128 // rows), A_WORDS), stride=((pitch, 0), 1))


def lanes_of_factors(pitch: Any, rows: int, words: int, parts: int) -> cute.Layout:
    """Scale factors' words for each (lane, column): those of a part's rows in each 32 lanes."""
    own = rows // parts
    return cute.make_layout(
        ((32, 4 // parts, parts), (own // 32, words)),
        stride=((pitch, 0, own * pitch), (32 * pitch, 1)),
    )


def build(gemm: Gemm) -> Any:
    """Compile: (a (m, k), b (n, k), c (m, n) of the accumulator's type, row-major).

    Sizes are multiples of the tile's, leading dimensions of 16 bytes. Elements of less than 8 bits
    come as bytes. What the storers put into tensor memory comes as words: A, if it goes there, (m,
    A_WORDS); scale factors, behind c, (m, words) and (n, words), those of STAGES tiles of k.
    """
    ctas = 2 if gemm.pair else 1
    rows = gemm.m // ctas
    tile = (gemm.m, gemm.n, gemm.tile_k)
    group = tcgen05.CtaGroup.TWO if gemm.pair else tcgen05.CtaGroup.ONE
    a_mode, b_mode = (
        OperandMajorMode.MN if mn else OperandMajorMode.K for mn in (gemm.a_mn, gemm.b_mn)
    )
    source = tcgen05.OperandSource.TMEM if gemm.a_tmem else tcgen05.OperandSource.SMEM
    # Shared memory has narrow elements padded: sixteen in sixteen bytes.
    a_held, b_held = (
        Int8 if dtype.width < 8 and not gemm.dense4 else dtype for dtype in (gemm.a, gemm.b)
    )
    a_bytes, b_bytes = (
        rows * gemm.tile_k * dtype.width // 8
        for rows, dtype in ((gemm.m, gemm.a), (gemm.n, gemm.b))
    )
    scaled = gemm.scale is not None
    stored = gemm.a_tmem or scaled
    step_factors = gemm.mma_k // gemm.block if scaled else 0  # of a row, in an instruction
    tile_words = step_factors  # four instructions, four bytes
    words = STAGES * tile_words
    parts = 2 if gemm.pair and rows == 64 else 1  # B's rows are in halves of the lanes

    @cute.kernel
    def multiply(
        a_atom: cute.CopyAtom,
        a_tensor: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tensor: cute.Tensor,
        c: cute.Tensor,
        scale_a: Any,
        scale_b: Any,
        mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
        cluster: cute.Layout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block_m, tile_n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = block_m % ctas
        at = (block_m // ctas, tile_n, None)
        smem = SmemAllocator()
        if cutlass.const_expr(not gemm.a_tmem):
            sA = smem.allocate_tensor(a_held, a_smem.outer, 1024, swizzle=a_smem.inner)
        sB = smem.allocate_tensor(b_held, b_smem.outer, 1024, swizzle=b_smem.inner)
        tmem = TmemAllocator(
            smem.allocate_array(Int32),
            barrier_for_retrieve=pipeline.NamedBarrier(1, STORERS + 64),
            is_two_cta=gemm.pair,
            two_cta_tmem_dealloc_mbar_ptr=smem.allocate_array(Int64),
        )
        if cutlass.const_expr(gemm.copied):
            sSFA = smem.allocate_tensor(Uint32, cute.make_layout(rows * words), 128)
            sSFB = smem.allocate_tensor(Uint32, cute.make_layout(gemm.n * words), 128)
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        producer, consumer = pipeline.PipelineTmaUmma.create(
            num_stages=STAGES,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, gemm.across),
            tx_count=b_bytes + a_bytes * (not gemm.a_tmem),
            barrier_storage=smem.allocate_array(Int64, 2 * STAGES),
            cta_layout_vmnk=cluster,
        ).make_participants()
        operands_in, operands_out = pipeline.PipelineAsyncUmma.create(
            num_stages=1,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, ctas * STORERS),
            consumer_group=one,
            barrier_storage=smem.allocate_array(Int64, 2),
            cta_layout_vmnk=cluster,
        ).make_participants()
        product_out, product_in = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, ctas * STORERS),
            barrier_storage=smem.allocate_array(Int64, 2),
            cta_layout_vmnk=cluster,
        ).make_participants()
        tmem.allocate(COLUMNS)
        tmem.wait_for_alloc()
        base = tmem.retrieve_ptr(Uint32)
        mine = mma.get_slice(rank)
        gB = cute.local_tile(b_tensor, tile, at, proj=(None, 1, 1))
        gC = cute.local_tile(c, tile, at, proj=(1, 1, None))
        tCtC = cute.make_tensor(
            cute.recast_ptr(base, dtype=gemm.accumulator),
            mma.make_fragment_C(mma.partition_shape_C(tile[:2])).layout,
        )
        tCrB = mma.make_fragment_B(sB)
        if cutlass.const_expr(gemm.a_tmem):
            tCrA = cute.make_tensor(
                cute.recast_ptr(base + A_COLUMN, dtype=TFloat32 if gemm.a is Float32 else gemm.a),
                mma.make_fragment_A(a_smem.outer).layout,
            )
        else:
            tCrA = mma.make_fragment_A(sA)
        tiles_k = cute.size(gB, mode=[2])
        if warp == 4:
            sharers = None
            if cutlass.const_expr(gemm.across > 1):
                here = cluster.get_flat_coord(cute.arch.block_idx_in_cluster())
                sharers = cpasync.create_tma_multicast_mask(cluster, here, mcast_mode=2)
            if cutlass.const_expr(not gemm.a_tmem):
                gA = cute.local_tile(a_tensor, tile, at, proj=(1, None, 1))
                tAsA, tAgA = cpasync.tma_partition(
                    a_atom,
                    tile_n % gemm.across,
                    cute.make_layout(gemm.across),
                    cute.group_modes(sA, 0, 3),
                    cute.group_modes(mine.partition_A(gA), 0, 3),
                )
            tBsB, tBgB = cpasync.tma_partition(
                b_atom,
                0,
                cute.make_layout(1),
                cute.group_modes(sB, 0, 3),
                cute.group_modes(mine.partition_B(gB), 0, 3),
            )
            for k in cutlass.range(tiles_k, unroll=1):
                stage = producer.acquire_and_advance()
                if cutlass.const_expr(not gemm.a_tmem):
                    cute.copy(
                        a_atom,
                        tAgA[None, k],
                        tAsA[None, stage.index],
                        tma_bar_ptr=stage.barrier,
                        mcast_mask=sharers,
                    )
                cute.copy(b_atom, tBgB[None, k], tBsB[None, stage.index], tma_bar_ptr=stage.barrier)
            producer.tail()
        elif warp == 5:
            if rank == 0:
                done = product_out.acquire_and_advance()
                if cutlass.const_expr(stored):
                    there = operands_out.wait_and_advance()
                if cutlass.const_expr(gemm.copied):
                    with cute.arch.elect_one():
                        copy(base, SCALE_A_COLUMN, sSFA, ctas)
                        copy(base, SCALE_B_COLUMN, sSFB, ctas)
                mma.set(tcgen05.Field.NEGATE_A, gemm.negate)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for k in cutlass.range(tiles_k, unroll=1):
                    stage = consumer.wait_and_advance()
                    for step in cutlass.range_constexpr(cute.size(tCrB, mode=[2])):
                        left = tCrA[None, None, step, stage.index]
                        if cutlass.const_expr(scaled):
                            word, byte = divmod(step * step_factors, 4)
                            word = word + tile_words * k
                            at_a = base + SCALE_A_COLUMN + word * (rows // 32)
                            at_b = base + SCALE_B_COLUMN + word * (gemm.n // parts // 32)
                            at_a = cute.recast_ptr(at_a, dtype=gemm.scale) + byte
                            at_b = cute.recast_ptr(at_b, dtype=gemm.scale) + byte
                            mma.set(tcgen05.Field.SFA, at_a)
                            mma.set(tcgen05.Field.SFB, at_b)
                        cute.gemm(mma, tCtC, left, tCrB[None, None, step, stage.index], tCtC)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    stage.release()
                if cutlass.const_expr(stored):
                    there.release()
                done.commit()
        else:
            if cutlass.const_expr(stored):
                there = operands_in.acquire_and_advance()
                if cutlass.const_expr(gemm.a_tmem):
                    own = cute.local_tile(a_tensor, (rows, A_WORDS), (block_m, 0))
                    layout = lanes_of_rows(a_tensor.stride[0], rows)
                    put(base, A_COLUMN, own, layout, thread)
                if cutlass.const_expr(scaled):
                    own_a = cute.local_tile(scale_a, (rows, words), (block_m, 0))
                    own_b = cute.local_tile(scale_b, (gemm.n, words), (tile_n, 0))
                    if cutlass.const_expr(gemm.copied):
                        lay(sSFA, own_a, thread)
                        lay(sSFB, own_b, thread)
                        cute.arch.fence_proxy("async.shared", space="cta")
                    else:
                        layout = lanes_of_factors(scale_a.stride[0], rows, words, 1)
                        put(base, SCALE_A_COLUMN, own_a, layout, thread)
                        layout = lanes_of_factors(scale_b.stride[0], gemm.n, words, parts)
                        put(base, SCALE_B_COLUMN, own_b, layout, thread)
                cute.arch.fence_view_async_tmem_store()
                there.commit()
            atom = cute.make_copy_atom(gemm.load, gemm.accumulator)
            flat = tCtC[(None, None), 0, 0]
            load = tcgen05.make_tmem_copy(atom, flat)
            me = load.get_slice(thread)
            tDtC = me.partition_S(flat)
            tDgC = me.partition_D(mine.partition_C(gC)[(None, None), 0, 0])
            tDrC = cute.make_rmem_tensor(tDgC.shape, gemm.accumulator)
            done = product_in.wait_and_advance()
            cute.copy(load, tDtC, tDrC)
            cute.autovec_copy(tDrC, tDgC)
            done.release()
        tmem.relinquish_alloc_permit()
        pipeline.sync(barrier_id=1)
        tmem.free(base)

    @cute.jit
    def host(
        a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale_a: Any = None, scale_b: Any = None
    ) -> None:
        if cutlass.const_expr(scaled):
            mma = sm100.make_blockscaled_trivial_tiled_mma(
                gemm.a, gemm.b, a_mode, b_mode, gemm.scale, gemm.block, group, tile[:2], source
            )
        else:
            mma = sm100.make_trivial_tiled_mma(
                gemm.a, gemm.b, a_mode, b_mode, gemm.accumulator, group, tile[:2], source
            )
        a_smem = sm100.make_smem_layout_a(mma, tile, a_held, STAGES)
        b_smem = sm100.make_smem_layout_b(mma, tile, b_held, STAGES)
        cluster = cute.tiled_divide(cute.make_layout((ctas, gemm.across, 1)), (mma.thr_id.shape,))
        load = cpasync.CopyBulkTensorTileG2SOp(group)
        load_a = cpasync.CopyBulkTensorTileG2SMulticastOp(group) if gemm.across > 1 else load
        a_atom = None
        if cutlass.const_expr(not gemm.a_tmem):
            a = cute.recast_tensor(a, gemm.a)
            a_atom, a = cute.nvgpu.make_tiled_tma_atom_A(
                load_a,
                a,
                cute.select(a_smem, mode=[0, 1, 2]),
                tile,
                mma,
                cluster.shape,
                internal_type=a_held,
            )
        b_atom, b = cute.nvgpu.make_tiled_tma_atom_B(
            load,
            cute.recast_tensor(b, gemm.b),
            cute.select(b_smem, mode=[0, 1, 2]),
            tile,
            mma,
            cluster.shape,
            internal_type=b_held,
        )
        multiply(a_atom, a, b_atom, b, c, scale_a, scale_b, mma, a_smem, b_smem, cluster).launch(
            grid=(ctas * c.shape[0] // gemm.m, c.shape[1] // gemm.n, 1),
            block=(STORERS + 64, 1, 1),
            cluster=(ctas, gemm.across, 1),
        )

    m, n = cute.sym_int(), cute.sym_int()

    def operand(dtype: Any, rows: Any, mn_major: bool) -> Any:
        dtype = Uint8 if dtype.width < 8 else dtype
        pitch = cute.sym_int64(divisibility=128 // dtype.width)
        stride = (1, pitch) if mn_major else (pitch, 1)
        return make_fake_tensor(dtype, (rows, cute.sym_int()), stride, assumed_align=16)

    def stored_rows(rows: Any) -> Any:
        pitch = cute.sym_int64(divisibility=2)
        return make_fake_tensor(Uint32, (rows, cute.sym_int()), (pitch, 1), assumed_align=8)

    return compile(
        host,
        stored_rows(m) if gemm.a_tmem else operand(gemm.a, m, gemm.a_mn),
        operand(gemm.b, n, gemm.b_mn),
        make_fake_tensor(
            gemm.accumulator, (m, n), (cute.sym_int64(divisibility=8), 1), assumed_align=16
        ),
        *([stored_rows(m), stored_rows(n)] if scaled else []),
        arch="sm_100a",
    )
