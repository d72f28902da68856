"""Forward on Hopper: O = softmax(scale Q K^T) V and its LSE, a tile of Q rows at a time.

Data:    Q, K, V --TMA--> swizzled smem --wgmma--> S in registers --softmax--> P in registers
         --wgmma, V from smem--> O in registers --> O.
Warps:   warpgroup 0 gives its registers away, and one warp of it issues every load; each consumer
         warpgroup owns 64 rows of Q, from the first product to the store.
Memory:  a ring each for Q, K and V; a stage of Q is a slab of 64 rows for each consumer warpgroup.
Overlap: inside a warpgroup, S of the next tile is computed while O takes the last one in, and the
         softmax follows as soon as S is there (FlashAttention-3, section 3.2); between warpgroups,
         they take turns on the tensor cores, so that one's softmax runs under the other's products
         (section 3.1), where that pays.
Tiles:   a CTA an SM takes tiles of Q from a queue; the next Q, K and V load while O leaves.
Order:   K/V tiles are visited from the last to the first. Those that need a mask, at the ragged end
         and on the diagonal, come first; the loop over the others has no mask in it.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from ..layouts.fragments import accumulator, as_operand_a, offsets, origin, rows_by_columns
from ..layouts.gmem import sequence_first, tma_atom, tma_tiles
from ..layouts.hardware import (
    OCTET,
    QUAD_THREADS,
    SMS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    WGMMA_ROWS,
)
from ..layouts.opaque import negative
from ..layouts.smem import allocate, row_major_stages, transposed, view
from ..pipelines.forward_sm90 import forward_graph
from ..pipelines.tile_order import TileOrder
from ..pipelines.tile_queue import NONE, TileQueue
from ..pipelines.turns import Turns
from . import ForwardFacts
from .forward import Forward
from .mask import Mask
from .online_softmax import OnlineSoftmax, divide_rows, scale_rows
from .quad import quad_transposed
from .tiles import ELEMENT_BYTES, Tiles, padded_head_dim
from .wgmma import InSmem, in_registers, issue, narrow


@dataclass(frozen=True)
class Args:
    """What crosses from host to device. q, k and v are coordinates for their TMA atoms."""

    q: cute.Tensor  # (len_q, head_dim, heads_q, batch)
    k: cute.Tensor  # (len_kv, head_dim, heads_kv, batch)
    v: cute.Tensor  # (len_kv, head_dim_v, heads_kv, batch)
    o: cute.Tensor  # (len_q, head_dim_v, heads_q, batch), global
    lse: cute.Tensor  # (batch, heads_q, len_q), float32
    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    scale: Float32
    order: TileOrder
    counter: cute.Tensor  # (1), int32: see TileQueue


@dataclass(frozen=True)
class Share:
    """What one consumer warpgroup computes with, and holds across K/V tiles."""

    mma_s: cute.TiledMma
    mma_o: cute.TiledMma
    tSrQ: InSmem  # (mma, m, k, slab)
    tSrK: InSmem  # (mma, n, k, stage)
    tOrV: InSmem  # (mma, n, k, stage)
    tOrP: cute.Tensor  # (mma, m, k), registers
    acc_O: cute.Tensor  # float32, not divided by l
    softmax: OnlineSoftmax
    turns: Turns
    thread: Int32  # in the warpgroup


@dataclass(frozen=True)
class Rows:
    """The 64 rows of one head that a consumer warpgroup is at."""

    first: Int32  # in its sequence
    head: Int32
    batch: Int32
    mask: Mask
    tSrQ: InSmem  # (mma, m, k)


class FwdSm90(Forward):
    """The forward kernel for one set of compile-time facts and one row of the tile table."""

    def __init__(self, facts: ForwardFacts, tiles: Tiles) -> None:
        super().__init__(facts)
        self.tiles = tiles
        columns, columns_v = padded_head_dim(facts.head_dim), padded_head_dim(facts.head_dim_v)
        self.shape_q = (WGMMA_ROWS, columns)
        self.shape_k = (tiles.tile_kv, columns)
        self.shape_v = (tiles.tile_kv, columns_v)
        self.shape_o = (WGMMA_ROWS, columns_v)
        self.shape_s = (WGMMA_ROWS, tiles.tile_kv)
        self.graph = forward_graph(
            consumer_warpgroups=tiles.consumer_warpgroups,
            stages_q=tiles.stages_q,
            stages_k=tiles.stages_k,
            stages_v=tiles.stages_v,
            q_bytes=tiles.q_bytes,
            k_bytes=tiles.k_bytes,
            v_bytes=tiles.v_bytes,
            registers_load=tiles.registers_load,
            registers_consume=tiles.registers_consume,
        )

    def smem_layouts(self) -> SimpleNamespace:
        """(rows, columns, stages) of each ring; of q (rows, columns, slabs)."""
        slabs = self.tiles.q_slabs
        return SimpleNamespace(
            q=row_major_stages(self.dtype, self.shape_q, slabs),
            k=row_major_stages(self.dtype, self.shape_k, self.tiles.stages_k),
            v=row_major_stages(self.dtype, self.shape_v, self.tiles.stages_v),
        )

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The products of one warpgroup: S = Q K^T from shared memory, O += P V from registers."""
        dtypes, one, k, mn = (self.dtype,) * 2, (1, 1, 1), OperandMajorMode.K, OperandMajorMode.MN
        in_registers = warpgroup.OperandSource.RMEM
        return (
            make_trivial_tiled_mma(*dtypes, k, k, Float32, one, self.shape_s),
            make_trivial_tiled_mma(*dtypes, k, mn, Float32, one, self.shape_o, in_registers),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, len_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim_v)
        o: cute.Tensor,  # (batch, len_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, len_q), float32
        scale: Float32,
        counter: cute.Tensor,  # (1), int32: 0, and 0 again when the kernel ends
        stream,
    ):
        layouts = self.smem_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_q, tma_q = tma_atom(load, q, layouts.q, self.shape_q)
        load_k, tma_k = tma_atom(load, k, layouts.k, self.shape_k)
        load_v, tma_v = tma_atom(load, v, layouts.v, self.shape_v)
        batch, len_q, heads_q, _ = q.shape
        order = TileOrder(
            tiles=cute.ceil_div(len_q, self.tiles.tile_q),
            heads=heads_q,
            batch=batch,
            section=self.sequences_in_l2(q, k),
            start="last" if self.facts.causal else None,
        )
        tensors, atoms = (tma_q, tma_k, tma_v, sequence_first(o), lse), (load_q, load_k, load_v)
        args = Args(*tensors, *atoms, scale, order, counter)
        self.kernel(args).launch(
            grid=[cutlass.min(order.count, SMS), 1, 1],
            block=[self.graph.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, args: Args):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (args.load_q, args.load_k, args.load_v):
                cpasync.prefetch_descriptor(atom)

        smem, layouts, tiles = SmemAllocator(), self.smem_layouts(), self.tiles
        barriers = smem.allocate_array(cutlass.Int64, self.graph.mbarriers)
        queue = TileQueue.create(args.order, args.counter, smem)
        sQ = view(allocate(smem, self.dtype, cute.cosize(layouts.q)), layouts.q)
        sK = view(allocate(smem, self.dtype, cute.cosize(layouts.k)), layouts.k)
        sV = view(allocate(smem, self.dtype, cute.cosize(layouts.v)), layouts.v)
        edges = self.graph.build(barriers)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(tiles.registers_load)
            if warp_index == 0:
                self.load(args, edges, queue, sQ, sK, sV)
        else:
            cute.arch.setmaxregister_increase(tiles.registers_consume)
            self.consume(args, edges, queue, sQ, sK, sV)

    def mask(self, args: Args) -> Mask:
        """Causal is a right bound of 0."""
        return Mask(args.q.shape[0], args.k.shape[0], Int32(0) if self.facts.causal else None)

    @cute.jit
    def load(
        self, args: Args, edges, queue: TileQueue, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor
    ):
        """The producer warp: Q, then K and V from the last tile to the first, K one tile ahead."""
        tile_q, groups = self.tiles.tile_q, self.tiles.consumer_warpgroups
        load_tile, load_q, load_k, load_v = (
            edge.make_producer()
            for edge in (edges.load_tile, edges.load_q, edges.load_k, edges.load_v)
        )
        gqa_group = args.q.shape[2] // args.k.shape[2]
        number, _, _ = cute.arch.block_idx()
        while number < args.order.count:
            q_tile, head, batch = args.order.locate(number)
            load_tile = queue.post(load_tile, q_tile, head, batch)
            head_kv = head // gqa_group
            gQ = cute.local_tile(args.q[None, None, head, batch], self.shape_q, (None, 0))
            gK = cute.local_tile(args.k[None, None, head_kv, batch], self.shape_k, (None, 0))
            gV = cute.local_tile(args.v[None, None, head_kv, batch], self.shape_v, (None, 0))
            tQsQ, tQgQ = tma_tiles(args.load_q, sQ, gQ)
            tKsK, tKgK = tma_tiles(args.load_k, sK, gK)
            tVsV, tVgV = tma_tiles(args.load_v, sV, gV)

            stage = load_q.acquire_and_advance()
            for g in cutlass.range_constexpr(groups):
                rows, slab = tQgQ[None, q_tile * groups + g], tQsQ[None, stage.index * groups + g]
                cute.copy(args.load_q, rows, slab, tma_bar_ptr=stage.barrier)

            _, kv_end = self.mask(args).kv_tiles(q_tile * tile_q, tile_q, self.tiles.tile_kv)
            for step in cutlass.range(kv_end + 1, unroll=1):
                if step < kv_end:
                    stage = load_k.acquire_and_advance()
                    tile, slot = tKgK[None, kv_end - 1 - step], tKsK[None, stage.index]
                    cute.copy(args.load_k, tile, slot, tma_bar_ptr=stage.barrier)
                if step > 0:
                    stage = load_v.acquire_and_advance()
                    tile, slot = tVgV[None, kv_end - step], tVsV[None, stage.index]
                    cute.copy(args.load_v, tile, slot, tma_bar_ptr=stage.barrier)

            number = queue.draw()
        queue.post(load_tile, Int32(NONE), Int32(0), Int32(0))

    @cute.jit
    def consume(
        self, args: Args, edges, queue: TileQueue, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor
    ):
        """A consumer warpgroup: products, softmax and store of its 64 rows of each Q tile."""
        tile_q = self.tiles.tile_q
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPGROUP_WARPS - 1)
        load_tile, load_q, load_k, load_v = (
            edge.make_consumer()
            for edge in (edges.load_tile, edges.load_q, edges.load_k, edges.load_v)
        )
        share = self.share(args, group, sQ, sK, sV)
        share.turns.open()
        q_tile, head, batch, load_tile = queue.read(load_tile)
        while q_tile != NONE:
            mask = self.mask(args)
            q = load_q.wait_and_advance()
            tSrQ = share.tSrQ.stage(q.index * self.tiles.consumer_warpgroups + group)
            rows = Rows(q_tile * tile_q + group * WGMMA_ROWS, head, batch, mask, tSrQ)
            share.softmax.reset()
            share.acc_O.fill(0.0)
            kv_full, kv_end = mask.kv_tiles(q_tile * tile_q, tile_q, self.tiles.tile_kv)
            if kv_end > 0:
                # The first tile may be ragged, whatever kv_full says: masked in any case.
                load_k = self.first_scores(share, rows, load_k, kv_end - 1)
            masked = cutlass.max(kv_end - kv_full, 1)
            k_there = Boolean(False)
            if const_expr(self.facts.causal):
                for step in cutlass.range(1, masked, unroll=1):
                    tile = kv_end - 1 - step
                    load_k, load_v, k_there = self.step(
                        share, rows, load_k, load_v, k_there, tile, masked=True
                    )
            for step in cutlass.range(masked, kv_end, unroll=1):
                tile = kv_end - 1 - step
                load_k, load_v, k_there = self.step(
                    share, rows, load_k, load_v, k_there, tile, masked=False
                )
            q.release()  # every score is there
            if kv_end > 0:
                load_v = self.last_product(share, load_v)
            self.store(args, share, rows)
            q_tile, head, batch, load_tile = queue.read(load_tile)

    def share(self, args, group, sQ, sK, sV) -> Share:
        """Fragments and running state of consumer warpgroup `group`."""
        mma_s, mma_o = self.tiled_mmas()
        # Operands in shared memory are the same for every thread of the warpgroup.
        any_s, any_o = mma_s.get_slice(0), mma_o.get_slice(0)
        p_layout = as_operand_a(accumulator(mma_s, self.shape_s, Float32)).layout
        first, threads = self.graph.barrier("mma_turn")
        takers = self.tiles.turn_takers(self.facts.causal)
        return Share(
            mma_s=mma_s,
            mma_o=mma_o,
            tSrQ=InSmem.of(any_s.make_fragment_A(any_s.partition_A(sQ))),
            tSrK=InSmem.of(any_s.make_fragment_B(any_s.partition_B(sK))),
            tOrV=InSmem.of(any_o.make_fragment_B(any_o.partition_B(transposed(sV)))),
            tOrP=cute.make_rmem_tensor(p_layout, self.dtype),
            acc_O=accumulator(mma_o, self.shape_o, Float32),
            softmax=OnlineSoftmax.create(2, args.scale, self.facts.negative_scale),
            turns=Turns(Int32(group), Int32(first), Int32(threads), takers),
            thread=cute.arch.thread_idx()[0] % WARPGROUP_THREADS,
        )

    @cute.jit
    def first_scores(self, share: Share, rows: Rows, load_k, kv_tile: Int32):
        """P of the last K/V tile; no O to rescale yet."""
        acc_S = accumulator(share.mma_s, self.shape_s, Float32)
        k = load_k.wait_and_advance()
        issue(share.mma_s, acc_S, rows.tSrQ.steps(), share.tSrK.stage(k.index).steps(), False)
        warpgroup.wait_group(0)
        k.release()
        self.apply_mask(share, rows, acc_S, kv_tile)
        share.softmax.step(rows_by_columns(acc_S))
        narrow(acc_S, share.tOrP)
        return load_k

    @cute.jit
    def step(
        self,
        share: Share,
        rows: Rows,
        load_k,
        load_v,
        k_there: Boolean,
        kv_tile: Int32,
        masked: cutlass.Constexpr,
    ):
        """P of `kv_tile`, while O takes in the tile after it; k_there: its K was seen already."""
        acc_S = accumulator(share.mma_s, self.shape_s, Float32)
        k = load_k.wait_and_advance(k_there)
        share.turns.wait()
        issue(share.mma_s, acc_S, rows.tSrQ.steps(), share.tSrK.stage(k.index).steps(), False)
        v = load_v.wait_and_advance(load_v.try_wait())
        P, V = in_registers(share.tOrP), share.tOrV.stage(v.index).steps()
        issue(share.mma_o, share.acc_O, P, V, True)
        share.turns.release()
        warpgroup.wait_group(1)  # S is there
        k.release()
        if const_expr(masked):
            self.apply_mask(share, rows, acc_S, kv_tile)
        alpha = share.softmax.step(rows_by_columns(acc_S))
        moved = Boolean(True)
        if const_expr(self.tiles.skip_unmoved):
            moved = cute.arch.vote_any_sync((alpha[0] != 1.0) | (alpha[1] != 1.0))
        # Never. But memory operations stay in order, and this one needs alpha: without it ptxas may
        # put the wait for O before all exponentials, 10 % slower at head_dim 128 (H200).
        if negative(alpha[0]):
            k.release()
        k_there = Boolean(False)
        if kv_tile > 0:
            k_there = load_k.try_wait()
        warpgroup.wait_group(0)  # O is there, P is read
        v.release()
        narrow(acc_S, share.tOrP)
        if moved:
            scale_rows(rows_by_columns(share.acc_O), alpha)
        return load_k, load_v, k_there

    @cute.jit
    def last_product(self, share: Share, load_v):
        """O takes in the first K/V tile."""
        v = load_v.wait_and_advance()
        P, V = in_registers(share.tOrP), share.tOrV.stage(v.index).steps()
        issue(share.mma_o, share.acc_O, P, V, True)
        warpgroup.wait_group(0)
        v.release()
        return load_v

    @cute.jit
    def apply_mask(self, share: Share, rows: Rows, acc_S: cute.Tensor, kv_tile: Int32):
        """Hide the scores of `acc_S` that do not exist."""
        own_row, own_column = origin(share.mma_s, self.shape_s, share.thread)
        rows.mask.apply(
            rows_by_columns(acc_S),
            offsets(share.mma_s, self.shape_s),
            rows.first + own_row,
            kv_tile * self.tiles.tile_kv + own_column,
            share.softmax.hidden,
        )

    @cute.jit
    def store(self, args: Args, share: Share, rows: Rows):
        """LSE and O / l, from registers to global memory: 16 bytes a lane, 64 a quad."""
        inverse, lse = share.softmax.finish()
        divide_rows(rows_by_columns(share.acc_O), inverse)
        rO = cute.make_rmem_tensor_like(share.acc_O, self.dtype)
        narrow(share.acc_O, rO)

        own_row, own_column = origin(share.mma_o, self.shape_o, share.thread)
        apart = offsets(share.mma_o, self.shape_o)
        lane, octets = own_column // 2, self.facts.head_dim_v // OCTET
        words = rows_by_columns(cute.recast_tensor(rO, Int32))
        for r in cutlass.range_constexpr(cute.size(lse)):
            # Lane i of a quad gets the whole of every fourth octet from octet i on: all take part.
            own = [
                quad_transposed(
                    [words[r, c] for c in range(octets)[first : first + QUAD_THREADS]], lane
                )
                for first in range(0, octets, QUAD_THREADS)
            ]
            row = rows.first + own_row + apart[r, 0][0]
            if row < rows.mask.len_q:
                line = args.o[row, None, rows.head, rows.batch]
                for i in cutlass.range_constexpr(octets // QUAD_THREADS):
                    store_octet(line, i * QUAD_THREADS + lane, own[i])
                for i in cutlass.range_constexpr(octets // QUAD_THREADS, len(own)):
                    if lane < octets % QUAD_THREADS:
                        store_octet(line, i * QUAD_THREADS + lane, own[i])
                if own_column == 0:  # one lane of each quad
                    args.lse[rows.batch, rows.head, row] = lse[r]


def store_octet(line: cute.Tensor, octet: Int32, words: list[Int32]) -> None:
    """16 bytes of a row (columns) in global memory."""
    place = cute.domain_offset(octet * OCTET, line).iterator.align(OCTET * ELEMENT_BYTES)
    target = cute.make_tensor(cute.recast_ptr(place, dtype=Int32), len(words))
    source = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        source[i] = word
    target.store(source.load())
