"""Forward on Hopper: O = softmax(scale Q K^T) V and its LSE, one tile of Q rows a CTA.

Data:   Q, K, V --TMA--> swizzled smem --wgmma--> S in registers --softmax--> P in registers
        --wgmma with V from smem--> O in registers --stmatrix--> Q's smem --TMA--> O.
Warps:  warpgroup 0 gives its registers away and one warp of it issues every load; each consumer
        warpgroup owns 64 rows of Q from the first product to the store.
Memory: one slab of Q (64 rows for each warpgroup), which O borrows at the end, and a ring each for
        K and V.
Overlap: inside a warpgroup, S of the next tile is computed while O takes the last one in, and the
        softmax runs under both (FlashAttention-3, section 3.2); between warpgroups, they take turns
        on the tensor cores, so that one's softmax hides under the other's products (section 3.1).
K/V tiles are visited from the last to the first: the tiles that need a mask, at the ragged end and
on the diagonal, come first, and the loop over all others has no mask in it.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.utils import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from ..layouts.fragments import as_operand_a, rows_by_columns
from ..layouts.gmem import sequence_first, tma_tiles
from ..layouts.smem import SWIZZLE_BYTES, row_major_stages, transposed
from ..pipelines.forward_sm90 import forward_graph
from ..pipelines.tile_order import TileOrder
from ..pipelines.turns import Turns
from . import ForwardFacts
from .mask import Mask
from .online_softmax import OnlineSoftmax, scale_rows
from .tiles import MMA_ROWS, WARPGROUP_THREADS, Tiles, padded_head_dim
from .wgmma import issue

ALIGNMENT_BYTES = 16  # of every row that TMA touches
ALIGNMENT_ELEMENTS = 8


@dataclass(frozen=True)
class Args:
    """What crosses from host to device. Tensors with an atom are coordinates for the TMA unit."""

    q: cute.Tensor  # (len_q, head_dim, heads_q, batch)
    k: cute.Tensor  # (len_kv, head_dim, heads_kv, batch)
    v: cute.Tensor  # (len_kv, head_dim_v, heads_kv, batch)
    o: cute.Tensor  # (len_q, head_dim_v, heads_q, batch)
    lse: cute.Tensor  # (batch, heads_q, len_q), float32
    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_o: cute.CopyAtom
    scale: Float32
    order: TileOrder


class FwdSm90:
    """Forward kernel for one set of compile-time facts and one row of the tile table."""

    def __init__(self, facts: ForwardFacts, tiles: Tiles) -> None:
        self.dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[facts.dtype]
        self.facts = facts
        self.tiles = tiles
        self.columns = padded_head_dim(facts.head_dim)
        self.columns_v = padded_head_dim(facts.head_dim_v)
        self.graph = forward_graph(
            consumer_warpgroups=tiles.consumer_warpgroups,
            stages_k=tiles.stages_k,
            stages_v=tiles.stages_v,
            q_bytes=tiles.q_bytes,
            k_bytes=tiles.k_bytes,
            v_bytes=tiles.v_bytes,
            registers_load=tiles.registers_load,
            registers_consume=tiles.registers_consume,
        )

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments for `cute.compile`: every extent and stride free, strides of 64 bits."""
        batch, len_q, len_kv, heads_q, heads_kv = (cute.sym_int() for _ in range(5))

        def bshd(length: Any, heads: Any, head_dim: int) -> Any:
            strides = (cute.sym_int64(divisibility=ALIGNMENT_ELEMENTS) for _ in range(3))
            return make_fake_tensor(
                self.dtype,
                (batch, length, heads, head_dim),
                (*strides, 1),
                assumed_align=ALIGNMENT_BYTES,
            )

        return (
            bshd(len_q, heads_q, self.facts.head_dim),
            bshd(len_kv, heads_kv, self.facts.head_dim),
            bshd(len_kv, heads_kv, self.facts.head_dim_v),
            bshd(len_q, heads_q, self.facts.head_dim_v),
            make_fake_compact_tensor(Float32, (batch, heads_q, len_q), stride_order=(2, 1, 0)),
            Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    def smem_layouts(self) -> SimpleNamespace:
        """(rows, columns, stages) of each buffer; a stage of Q and O is one warpgroup's rows."""
        tiles, groups = self.tiles, self.tiles.consumer_warpgroups
        slab = tiles.slab_elements
        return SimpleNamespace(
            q=row_major_stages(self.dtype, MMA_ROWS, self.columns, groups, slab),
            k=row_major_stages(self.dtype, tiles.tile_kv, self.columns, tiles.stages_k),
            v=row_major_stages(self.dtype, tiles.tile_kv, self.columns_v, tiles.stages_v),
            o=row_major_stages(self.dtype, MMA_ROWS, self.columns_v, groups, slab),
        )

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The two products of one warpgroup: S = Q K^T and O += P V."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        one = (1, 1, 1)
        mma_s = make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, one, (MMA_ROWS, self.tiles.tile_kv)
        )
        mma_o = make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, mn_major, Float32, one, (MMA_ROWS, self.columns_v),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return mma_s, mma_o

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, len_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim_v)
        o: cute.Tensor,  # (batch, len_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, len_q), float32
        scale: Float32,
        stream,
    ):
        layouts = self.smem_layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_q, tma_q = self.tma(load, q, layouts.q)
        load_k, tma_k = self.tma(load, k, layouts.k)
        load_v, tma_v = self.tma(load, v, layouts.v)
        store_o, tma_o = self.tma(store, o, layouts.o)
        batch, len_q, heads_q, _ = q.shape
        order = TileOrder(
            cute.ceil_div(len_q, self.tiles.tile_q), heads_q, batch, self.facts.causal
        )
        args = Args(
            tma_q, tma_k, tma_v, tma_o, lse, load_q, load_k, load_v, store_o, scale, order
        )
        self.kernel(args).launch(
            grid=[order.count, 1, 1],
            block=[self.graph.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def tma(self, op, tensor: cute.Tensor, layout: cute.ComposedLayout):
        """TMA atom and coordinate tensor for one stage of `layout`, clipped at sequence and head."""
        stage = cute.select(layout, mode=[0, 1])
        shape = (cute.size(layout, mode=[0]), cute.size(layout, mode=[1]))
        return cpasync.make_tiled_tma_atom(op, sequence_first(tensor), stage, shape)

    @cute.kernel
    def kernel(self, args: Args):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (args.load_q, args.load_k, args.load_v, args.store_o):
                cpasync.prefetch_descriptor(atom)

        layouts = self.smem_layouts()
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, self.graph.mbarriers)
        sQ = smem.allocate_tensor(self.dtype, layouts.q.outer, SWIZZLE_BYTES, layouts.q.inner)
        sK = smem.allocate_tensor(self.dtype, layouts.k.outer, SWIZZLE_BYTES, layouts.k.inner)
        sV = smem.allocate_tensor(self.dtype, layouts.v.outer, SWIZZLE_BYTES, layouts.v.inner)
        edges = self.graph.build(barriers)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.tiles.registers_load)
            if warp_index == 0:
                self.load(args, edges, sQ, sK, sV)
        else:
            cute.arch.setmaxregister_increase(self.tiles.registers_consume)
            self.consume(args, edges, sQ, sK, sV)

    def mask(self, args: Args) -> Mask:
        """Causal is a right bound of 0."""
        return Mask(args.q.shape[0], args.k.shape[0], 0 if self.facts.causal else None)

    @cute.jit
    def load(self, args: Args, edges, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor):
        """The producer warp: for each tile Q, then K one tile ahead of V, from last to first."""
        tile_q, tile_kv = self.tiles.tile_q, self.tiles.tile_kv
        groups = self.tiles.consumer_warpgroups
        gqa_group = args.q.shape[2] // args.k.shape[2]
        load_q, load_k, load_v = (
            edge.make_producer() for edge in (edges.load_q, edges.load_k, edges.load_v)
        )
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        for number in cutlass.range(block, args.order.count, blocks, unroll=1):
            q_tile, head, batch = args.order.locate(number)
            _, kv_end = self.mask(args).kv_tiles(q_tile * tile_q, tile_q, tile_kv)
            head_kv = head // gqa_group
            gQ = cute.local_tile(
                args.q[None, None, head, batch], (MMA_ROWS, self.columns), (None, 0)
            )
            gK = cute.local_tile(
                args.k[None, None, head_kv, batch], (tile_kv, self.columns), (None, 0)
            )
            gV = cute.local_tile(
                args.v[None, None, head_kv, batch], (tile_kv, self.columns_v), (None, 0)
            )
            tQsQ, tQgQ = tma_tiles(args.load_q, sQ, gQ)
            tKsK, tKgK = tma_tiles(args.load_k, sK, gK)
            tVsV, tVgV = tma_tiles(args.load_v, sV, gV)
            if kv_end > 0:
                stage = load_q.acquire_and_advance()
                for g in cutlass.range_constexpr(groups):
                    cute.copy(
                        args.load_q,
                        tQgQ[None, q_tile * groups + g],
                        tQsQ[None, g],
                        tma_bar_ptr=stage.barrier,
                    )
                stage = load_k.acquire_and_advance()
                cute.copy(
                    args.load_k,
                    tKgK[None, kv_end - 1],
                    tKsK[None, stage.index],
                    tma_bar_ptr=stage.barrier,
                )
                for step in cutlass.range(1, kv_end, unroll=1):
                    stage = load_k.acquire_and_advance()
                    cute.copy(
                        args.load_k,
                        tKgK[None, kv_end - 1 - step],
                        tKsK[None, stage.index],
                        tma_bar_ptr=stage.barrier,
                    )
                    stage = load_v.acquire_and_advance()
                    cute.copy(
                        args.load_v,
                        tVgV[None, kv_end - step],
                        tVsV[None, stage.index],
                        tma_bar_ptr=stage.barrier,
                    )
                stage = load_v.acquire_and_advance()
                cute.copy(
                    args.load_v, tVgV[None, 0], tVsV[None, stage.index], tma_bar_ptr=stage.barrier
                )

    @cute.jit
    def consume(self, args: Args, edges, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor):
        """One consumer warpgroup: products, softmax and store of its 64 rows of each tile."""
        tile_q, tile_kv = self.tiles.tile_q, self.tiles.tile_kv
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        load_q, load_k, load_v = (
            edge.make_consumer() for edge in (edges.load_q, edges.load_k, edges.load_v)
        )
        wg = self.warpgroup(args, sQ, sK, sV, thread, group)
        if const_expr(self.tiles.ping_pong):
            wg.turns.open()

        mask = self.mask(args)
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        for number in cutlass.range(block, args.order.count, blocks, unroll=1):
            q_tile, head, batch = args.order.locate(number)
            kv_full, kv_end = mask.kv_tiles(q_tile * tile_q, tile_q, tile_kv)
            row = q_tile * tile_q + group * MMA_ROWS
            wg.softmax.reset()
            wg.acc_O.fill(0.0)
            if kv_end > 0:
                load_q.wait()
                load_k = self.first_scores(wg, load_k, mask, row, kv_end - 1)
                # Masked tiles: the diagonal. The first one was, whatever the mask: it may be ragged.
                for step in cutlass.range(1, kv_end - kv_full, unroll=1):
                    load_k, load_v = self.step(wg, load_k, load_v, mask, row, kv_end - 1 - step, True)
                for step in cutlass.range(cutlass.max(kv_end - kv_full, 1), kv_end, unroll=1):
                    load_k, load_v = self.step(wg, load_k, load_v, mask, row, kv_end - 1 - step, False)
                load_v = self.last_product(wg, load_v)
            self.store(args, wg, sQ, head, batch, row, thread, group)
            if kv_end > 0:
                load_q.release()
                load_q.advance()

    def warpgroup(self, args, sQ, sK, sV, thread, group) -> SimpleNamespace:
        mma_s, mma_o = self.tiled_mmas()
        # Descriptors are the same for all threads: slice 0, not this thread's.
        any_s, any_o = mma_s.get_slice(0), mma_o.get_slice(0)
        tSrQ = any_s.make_fragment_A(any_s.partition_A(sQ))
        tSrK = any_s.make_fragment_B(any_s.partition_B(sK))
        tOrV = any_o.make_fragment_B(any_o.partition_B(transposed(sV)))
        acc_O = cute.make_rmem_tensor(
            mma_o.partition_shape_C((MMA_ROWS, self.columns_v)), Float32
        )
        cS = cute.make_identity_tensor((MMA_ROWS, self.tiles.tile_kv))
        tScS = rows_by_columns(mma_s.get_slice(thread).partition_C(cS))
        acc_S_shape = mma_s.partition_shape_C((MMA_ROWS, self.tiles.tile_kv))
        P = cute.make_rmem_tensor_like(
            as_operand_a(cute.make_rmem_tensor(acc_S_shape, Float32)), self.dtype
        )
        first, threads = self.graph.barrier("mma_turn")
        return SimpleNamespace(
            mma_s=mma_s,
            mma_o=mma_o,
            tSrQ=tSrQ[None, None, None, group],
            tSrK=tSrK,
            tOrV=tOrV,
            tOrP=P,
            acc_O=acc_O,
            tScS=tScS,
            softmax=OnlineSoftmax.create(2, args.scale, self.facts.negative_scale),
            turns=Turns(first, threads, self.tiles.consumer_warpgroups, group),
        )

    @cute.jit
    def first_scores(self, wg, load_k, mask, row, kv_tile):
        acc_S = cute.make_rmem_tensor(
            wg.mma_s.partition_shape_C((MMA_ROWS, self.tiles.tile_kv)), Float32
        )
        k = load_k.wait_and_advance()
        issue(wg.mma_s, acc_S, wg.tSrQ, wg.tSrK[None, None, None, k.index], False)
        warpgroup.wait_group(0)
        k.release()
        S = rows_by_columns(acc_S)
        mask.apply(S, wg.tScS, row, kv_tile * self.tiles.tile_kv, wg.softmax.hidden)
        wg.softmax.step(S)
        wg.tOrP.store(as_operand_a(acc_S).load().to(self.dtype))
        return load_k

    @cute.jit
    def step(self, wg, load_k, load_v, mask, row, kv_tile, masked: cutlass.Constexpr[bool]):
        acc_S = cute.make_rmem_tensor(
            wg.mma_s.partition_shape_C((MMA_ROWS, self.tiles.tile_kv)), Float32
        )
        k = load_k.wait_and_advance()
        if const_expr(self.tiles.ping_pong):
            wg.turns.wait()
        issue(wg.mma_s, acc_S, wg.tSrQ, wg.tSrK[None, None, None, k.index], False)
        v = load_v.wait_and_advance()
        issue(wg.mma_o, wg.acc_O, wg.tOrP, wg.tOrV[None, None, None, v.index], True)
        if const_expr(self.tiles.ping_pong):
            wg.turns.release()
        warpgroup.wait_group(1)
        k.release()
        S = rows_by_columns(acc_S)
        if const_expr(masked):
            mask.apply(S, wg.tScS, row, kv_tile * self.tiles.tile_kv, wg.softmax.hidden)
        alpha = wg.softmax.step(S)
        warpgroup.wait_group(0)
        v.release()
        wg.tOrP.store(as_operand_a(acc_S).load().to(self.dtype))
        scale_rows(rows_by_columns(wg.acc_O), alpha)
        return load_k, load_v

    @cute.jit
    def last_product(self, wg, load_v):
        v = load_v.wait_and_advance()
        issue(wg.mma_o, wg.acc_O, wg.tOrP, wg.tOrV[None, None, None, v.index], True)
        warpgroup.wait_group(0)
        v.release()
        return load_v

    @cute.jit
    def store(self, args, wg, sQ, head, batch, row, thread, group):
        inverse, lse = wg.softmax.finish()
        acc_O = rows_by_columns(wg.acc_O)
        scale_rows(acc_O, inverse)

        # LSE: the first lane of each quad holds the row
        cO = cute.make_identity_tensor((MMA_ROWS, self.columns_v))
        tOcO = rows_by_columns(wg.mma_o.get_slice(thread).partition_C(cO))
        if tOcO[0, 0][1] == 0:
            for r in cutlass.range_constexpr(cute.size(lse)):
                if row + tOcO[r, 0][0] < args.q.shape[0]:
                    args.lse[batch, head, row + tOcO[r, 0][0]] = lse[r]

        # borrow q as o
        layout = self.smem_layouts().o
        sO = cute.make_tensor(cute.recast_ptr(sQ.iterator, layout.inner), layout.outer)
        rO = cute.make_rmem_tensor_like(wg.acc_O, self.dtype)
        rO.store(wg.acc_O.load().to(self.dtype))
        first, threads = self.graph.barrier("store_o")
        cute.arch.barrier(barrier_id=first + group, number_of_threads=threads)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, wg.mma_o).get_slice(thread)
        cute.copy(atom, copy.retile(rO), copy.partition_D(sO[None, None, group]))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=first + group, number_of_threads=threads)
        gO = cute.local_tile(args.o[None, None, head, batch], (MMA_ROWS, self.columns_v), (None, 0))
        tOsO, tOgO = tma_tiles(args.store_o, sO, gO)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            cute.copy(args.store_o, tOsO[None, group], tOgO[None, row // MMA_ROWS])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
