"""Forward on Blackwell: O = softmax(scale Q K^T) V and its LSE, two tiles of Q at a time.

Data:    Q, K, V --TMA--> swizzled smem --tcgen05.mma--> S in TMEM --softmax, a row a thread--> P in
         TMEM --tcgen05.mma, V from smem--> O in TMEM --correction--> smem --TMA--> O.
Warps:   a warpgroup of softmax for each of the tiles of 128 rows, one that corrects O, and of the
         last a warp each that issues products, loads and stores.
Memory:  K and V share one ring. In TMEM S and O have columns for each tile; P takes the first half
         of its S (`borrow_s_as_p`). O leaves through smem of its own, or through Q's.
Overlap: while the tensor cores do one tile's products, the other's softmax runs (FlashAttention-4,
         section 3.1). A share of the exponentials is computed on the FMA units (section 3.2). O is
         multiplied in TMEM only where a maximum may not lag behind (`RowSoftmax`), by a warpgroup
         that does nothing else (section 3.3). P is handed over when three quarters of it are there.
GQA:     heads that share keys (`group` of them) are rows of one tile, at the same positions.
Pair:    without a mask two CTAs may share the tiles of K and V: each loads half, and the products
         of both, which the first issues, read the halves of both.
Order:   K/V tiles are visited from the last to the first; those that need a mask come first. A tile
         of Q that sees no key visits one K/V tile, all hidden.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.utils.blackwell_helpers import (
    make_smem_layout_a,
    make_smem_layout_b,
    make_trivial_tiled_mma,
)

from ..layouts import tmem
from ..layouts.gmem import grouped_tma_atom, tma_atom, tma_tiles
from ..layouts.hardware import (
    OCTET,
    SMS_BLACKWELL,
    TMEM_COLUMNS,
    UMMA_DEPTH,
    UMMA_ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
)
from ..layouts.opaque import elected
from ..layouts.smem import allocate, grouped_rows, row_major_stages, view
from ..pipelines.forward_sm100 import SCORE_BUFFERS, forward_graph
from ..pipelines.rings import leads
from ..pipelines.tile_order import TileOrder
from ..pipelines.tile_queue import NONE, LaunchQueue, TileQueue
from . import BlackwellFacts
from .exp2 import exp2
from .forward import Forward
from .mask import Mask
from .online_softmax import RowSoftmax
from .tiles import ELEMENT_BYTES, BlackwellTiles, padded_head_dim
from .umma import Product, UmmaOperand

P_COLUMNS = 32  # of S, that become P at once
CORRECT_COLUMNS = 16  # of O, in registers at once
WORD_ELEMENTS = 2  # of P in a column of TMEM


@dataclass(frozen=True)
class Args:
    """What crosses from host to device. q, k, v and o are coordinates for their TMA atoms."""

    q: cute.Tensor  # (group, len_q, head_dim, heads_q / group, batch)
    k: cute.Tensor  # (len_kv, head_dim, heads_kv, batch)
    v: cute.Tensor  # (len_kv, head_dim_v, heads_kv, batch)
    o: cute.Tensor  # (group, len_q, head_dim_v, heads_q / group, batch)
    lse: cute.Tensor  # (batch, heads_q, len_q), float32
    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_o: cute.CopyAtom
    scale: Float32
    order: TileOrder
    counter: cute.Tensor  # (1), int32: see TileQueue


@dataclass(frozen=True)
class Smem:
    """Shared memory, and where tensor memory begins."""

    sQ: cute.Tensor  # (group, positions, head_dim, tile)
    sK: cute.Tensor  # (tile_kv, head_dim, stage)
    sV: cute.Tensor  # (tile_kv, head_dim_v, stage)
    sO: cute.Tensor  # (rows, head_dim_v, tile)
    gO: cute.Tensor  # the same as (group, positions, head_dim_v, tile)
    q: cute.Pointer  # of sQ
    kv: cute.Pointer  # of sK and sV
    stats: cute.Tensor  # (rows, tile), float32: alpha, at last 1 / l
    tmem_address: cute.Pointer


@dataclass(frozen=True)
class Operands:
    """What the products read from shared memory, by descriptors, and where tensor memory begins."""

    tSrQ: UmmaOperand  # (mma, m, k, tile)
    tSrK: UmmaOperand  # (mma, n, k, stage)
    tOrV: UmmaOperand  # (mma, n, k, stage)
    base: cute.Pointer
    leader: Boolean  # the thread that issues


class FwdSm100(Forward):
    """The forward kernel for one set of compile-time facts and one row of the tile table."""

    def __init__(self, facts: BlackwellFacts, tiles: BlackwellTiles) -> None:
        super().__init__(facts, facts.packed_heads)
        self.tiles = tiles
        columns, columns_v = padded_head_dim(facts.head_dim), padded_head_dim(facts.head_dim_v)
        self.shape_q = (UMMA_ROWS, columns)
        self.pair = (2, 1, 1) if tiles.pair else (1, 1, 1)
        self.shape_k = (tiles.tile_kv // tiles.ctas, columns)  # of this CTA
        self.shape_v = (tiles.tile_kv, columns_v // tiles.ctas)
        self.shape_o = (UMMA_ROWS, columns_v)
        self.positions = UMMA_ROWS // self.group  # of queries in a tile
        self.graph = forward_graph(
            q_tiles=tiles.q_tiles,
            stages_kv=tiles.stages_kv,
            q_bytes=self.positions * self.group * columns * ELEMENT_BYTES,
            kv_bytes=(tiles.k_bytes, tiles.v_bytes),
            borrow_q_as_o=tiles.borrow_q_as_o,
            pair=tiles.pair,
            registers_softmax=tiles.registers_softmax,
            registers_correction=tiles.registers_correction,
            registers_other=tiles.registers_other,
        )

    def smem_layouts(self) -> SimpleNamespace:
        """(rows, columns, stages) of each tensor."""
        tiles, apart = self.tiles, self.tiles.kv_bytes // ELEMENT_BYTES
        return SimpleNamespace(
            q=row_major_stages(
                self.dtype, self.shape_q, tiles.q_tiles, apart=tiles.q_bytes // ELEMENT_BYTES
            ),
            k=row_major_stages(self.dtype, self.shape_k, tiles.stages_kv, apart=apart),
            v=row_major_stages(self.dtype, self.shape_v, tiles.stages_kv, apart=apart),
            o=row_major_stages(
                self.dtype, self.shape_o, tiles.q_tiles, apart=tiles.o_bytes // ELEMENT_BYTES
            ),
        )

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The products: S = Q K^T from shared memory, O += P V with P from tensor memory."""
        dtypes, k, mn = (self.dtype,) * 2, OperandMajorMode.K, OperandMajorMode.MN
        group, from_tmem = self.cta_group, tcgen05.OperandSource.TMEM
        rows = UMMA_ROWS * self.tiles.ctas
        shape_s, shape_o = (rows, self.tiles.tile_kv), (rows, self.shape_o[1])
        return (
            make_trivial_tiled_mma(*dtypes, k, k, Float32, group, shape_s),
            make_trivial_tiled_mma(*dtypes, k, mn, Float32, group, shape_o, from_tmem),
        )

    @property
    def cta_group(self) -> tcgen05.CtaGroup:
        """CTAs that take part in a product."""
        return tcgen05.CtaGroup.TWO if self.tiles.pair else tcgen05.CtaGroup.ONE

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
        layouts, group = self.smem_layouts(), self.group
        load = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        store = cpasync.CopyBulkTensorTileS2GOp()
        load_q, tma_q = grouped_tma_atom(load, q, grouped_rows(layouts.q, group), group)
        load_k, tma_k = tma_atom(load, k, layouts.k, self.shape_k)
        load_v, tma_v = tma_atom(load, v, layouts.v, self.shape_v)
        store_o, tma_o = grouped_tma_atom(store, o, grouped_rows(layouts.o, group), group)
        batch, len_q, heads_q, _ = q.shape
        order = TileOrder(
            tiles=cute.ceil_div(len_q, self.tiles.ctas * self.tiles.q_tiles * self.positions),
            heads=heads_q // group,
            batch=batch,
            section=self.sequences_in_l2(q, k),
            start="last" if self.facts.causal else None,
        )
        tensors, atoms = (tma_q, tma_k, tma_v, tma_o, lse), (load_q, load_k, load_v, store_o)
        args = Args(*tensors, *atoms, scale, order, counter)
        self.kernel(args).launch(
            grid=[self.ctas(order), 1, 1],
            block=[self.graph.threads, 1, 1],
            cluster=self.pair,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def ctas(self, order: TileOrder) -> Int32:
        """One an SM at most, in pairs where they are; with a launch queue one for each tile."""
        if self.tiles.launch_queue:
            return order.count
        return self.tiles.ctas * cutlass.min(order.count, SMS_BLACKWELL // self.tiles.ctas)

    @cute.kernel
    def kernel(self, args: Args):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (args.load_q, args.load_k, args.load_v, args.store_o):
                cpasync.prefetch_descriptor(atom)
        allocator, graph, tiles = SmemAllocator(), self.graph, self.tiles
        barriers = allocator.allocate_array(cutlass.Int64, graph.mbarriers)
        smem, queue = self.storage(allocator), TileQueue.create(args.order, args.counter, allocator)
        rings = graph.rings(barriers)
        self.clear_spare_rows(smem)
        launches = None
        if const_expr(tiles.launch_queue):
            launches = LaunchQueue.create(args.order, allocator)
        if warp == graph.warps("mma")[0]:
            cute.arch.alloc_tmem(TMEM_COLUMNS, smem.tmem_address, is_two_cta=tiles.pair)
        pipeline.pipeline_init_arrive(self.pair)
        pipeline.pipeline_init_wait(self.pair)
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem_address)

        if warp // WARPGROUP_WARPS < tiles.q_tiles:
            cute.arch.setmaxregister_increase(tiles.registers_softmax)
            self.softmax(args, rings, queue, smem, base, warp // WARPGROUP_WARPS)
        if warp // WARPGROUP_WARPS == tiles.q_tiles:
            cute.arch.setmaxregister_decrease(tiles.registers_correction)
            self.correction(args, rings, queue, smem, base)
        if warp // WARPGROUP_WARPS == tiles.q_tiles + 1:
            cute.arch.setmaxregister_decrease(tiles.registers_other)
        if warp == graph.warps("mma")[0]:
            self.mma(args, rings, queue, smem, base)
        if warp == graph.warps("load")[0]:
            self.load(args, rings, queue, launches, smem)
        if warp == graph.warps("epilogue")[0]:
            self.epilogue(args, rings, queue, smem)
        if const_expr(tiles.pair):  # the other may still arrive at barriers of this one
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def storage(self, allocator: SmemAllocator) -> Smem:
        """Shared memory in the order in which `BlackwellTiles` counts it."""
        layouts, tiles = self.smem_layouts(), self.tiles
        stats = cute.make_layout((UMMA_ROWS, tiles.q_tiles))
        address = allocator.allocate_array(Int32, 1)
        sStats = cute.make_tensor(allocator.allocate_array(Float32, cute.size(stats)), stats)
        q = allocate(allocator, self.dtype, tiles.q_tiles * tiles.q_bytes // ELEMENT_BYTES)
        kv = allocate(allocator, self.dtype, tiles.stages_kv * tiles.kv_bytes // ELEMENT_BYTES)
        o = q if tiles.borrow_q_as_o else allocate(allocator, self.dtype, cute.cosize(layouts.o))
        return Smem(
            sQ=view(q, grouped_rows(layouts.q, self.group)),
            sK=view(kv, layouts.k),
            sV=view(kv, layouts.v),
            sO=view(o, layouts.o),
            gO=view(o, grouped_rows(layouts.o, self.group)),
            q=q,
            kv=kv,
            stats=sStats,
            tmem_address=address,
        )

    @cute.jit
    def clear_spare_rows(self, smem: Smem):
        """Rows of Q past the last whole group of heads, which no load writes, are 0."""
        spare = UMMA_ROWS - self.positions * self.group
        if const_expr(spare > 0):
            layout, threads = self.smem_layouts().q, self.graph.threads
            sQ, columns = view(smem.q, layout), self.shape_q[1]
            thread = cute.arch.thread_idx()[0]
            for i in cutlass.range(thread, spare * columns * self.tiles.q_tiles, threads):
                row, rest = i % spare, i // spare
                place = UMMA_ROWS - 1 - row, rest % columns, rest // columns
                sQ[place] = self.dtype(0.0)
            cute.arch.fence_view_async_shared()

    def operands(self, smem: Smem, base: cute.Pointer) -> Operands:
        """Shared memory as the tensor cores read it: the canonical layouts of both products."""
        tiles = self.tiles
        mma_s, mma_o = self.tiled_mmas()
        rows = UMMA_ROWS * tiles.ctas
        shape_s = (rows, tiles.tile_kv, self.shape_q[1])
        shape_o = (rows, self.shape_o[1], tiles.tile_kv)

        def staged(one: cute.ComposedLayout, stages: int, apart: int) -> cute.ComposedLayout:
            stage = cute.make_layout(stages, stride=apart // ELEMENT_BYTES)
            outer = cute.append(cute.select(one.outer, mode=[0, 1, 2]), stage)
            return cute.make_composed_layout(one.inner, 0, outer)

        ring = tiles.stages_kv, tiles.kv_bytes
        q = staged(make_smem_layout_a(mma_s, shape_s, self.dtype, 1), tiles.q_tiles, tiles.q_bytes)
        k = staged(make_smem_layout_b(mma_s, shape_s, self.dtype, 1), *ring)
        v = staged(make_smem_layout_b(mma_o, shape_o, self.dtype, 1), *ring)
        own_s, own_o = mma_s.get_slice(0), mma_o.get_slice(0)
        return Operands(
            tSrQ=UmmaOperand.of(own_s.make_fragment_A(view(smem.q, q))),
            tSrK=UmmaOperand.of(own_s.make_fragment_B(view(smem.kv, k))),
            tOrV=UmmaOperand.of(own_o.make_fragment_B(view(smem.kv, v))),
            base=base,
            leader=elected(),
        )

    def mask(self, args: Args) -> Mask:
        """Of positions and keys; causal is a right bound of 0."""
        return Mask(args.q.shape[1], args.k.shape[0], Int32(0) if self.facts.causal else None)

    @cute.jit
    def kv_tiles(self, args: Args, q_tile: Int32) -> tuple[Int32, Int32]:
        """(masked, all) K/V tiles that the tiles of Q visit; at least one."""
        positions = self.tiles.q_tiles * self.positions
        full, end = self.mask(args).kv_tiles(q_tile * positions, positions, self.tiles.tile_kv)
        # The first may be ragged, whatever `full` says.
        return cutlass.max(end - full, 1), cutlass.max(end, 1)

    @cute.jit
    def load(self, args: Args, rings, queue: TileQueue, launches: LaunchQueue | None, smem: Smem):
        """The load warp, global -> shared memory: Q, and K and V from the last tile to the first, K
        as far ahead of V as there are buffers of S for."""
        q_tiles, ahead = self.tiles.q_tiles, SCORE_BUFFERS // self.tiles.q_tiles
        work, kv = Int32(0), Int32(0)
        number, rank = self.first_tile()
        while number < args.order.count:
            q_tile, head, batch = args.order.locate(number)
            q_tile = q_tile * self.tiles.ctas + rank
            queue.hand_out(rings.load_tile, work, q_tile, head, batch)
            gQ = cute.local_tile(
                args.q[None, None, None, head, batch],
                (self.group, self.positions, self.shape_q[1]),
                (0, None, 0),
            )
            head_kv = head // (args.q.shape[3] // args.k.shape[2])
            gK = cute.local_tile(args.k[None, None, head_kv, batch], self.shape_k, (None, 0))
            gV = cute.local_tile(args.v[None, None, head_kv, batch], self.shape_v, (None, rank))
            tQsQ, tQgQ = tma_tiles(args.load_q, smem.sQ, gQ)
            tKsK, tKgK = tma_tiles(args.load_k, smem.sK, gK)
            tVsV, tVgV = tma_tiles(args.load_v, smem.sV, gV)
            _, end = self.kv_tiles(args, q_tile)
            for t in cutlass.range_constexpr(q_tiles):
                ring = rings.load_q.of(t)
                ring.acquire(work)
                cute.copy(
                    args.load_q,
                    tQgQ[None, q_tile * q_tiles + t],
                    tQsQ[None, t],
                    tma_bar_ptr=ring.barrier(work),
                )
            ring = rings.load_kv
            for step in cutlass.range(end + ahead, unroll=1):
                if step >= ahead:
                    ring.acquire(kv, self.tiles.v_bytes)
                    slot, tile = tVsV[None, ring.stage(kv)], tVgV[None, end - 1 - step + ahead]
                    cute.copy(args.load_v, tile, slot, tma_bar_ptr=ring.barrier(kv))
                    kv += 1
                if step < end:
                    ring.acquire(kv, self.tiles.k_bytes)
                    slot, tile = (
                        tKsK[None, ring.stage(kv)],
                        tKgK[None, (end - 1 - step) * self.tiles.ctas + rank],
                    )
                    cute.copy(args.load_k, tile, slot, tma_bar_ptr=ring.barrier(kv))
                    kv += 1
            work += 1
            number = self.next_tile(queue, launches, number, work)
        queue.hand_out(rings.load_tile, work, Int32(NONE), Int32(0), Int32(0))
        if const_expr(self.tiles.pair):  # the other CTA's products arrive here until then
            rings.load_kv.drain(kv)
            for t in cutlass.range_constexpr(q_tiles):
                rings.load_q.of(t).drain(work)

    def first_tile(self) -> tuple[Int32, Int32 | int]:
        """(number, rank): of the first tiles of this CTA or pair; of this CTA in it."""
        block, _, _ = cute.arch.block_idx()
        return block // self.tiles.ctas, block % self.tiles.ctas

    def next_tile(
        self, queue: TileQueue, launches: LaunchQueue | None, number: Int32, work: Int32
    ) -> Int32:
        """Drawn from a queue, after `work` tiles; pairs, whose tiles are all alike, take turns."""
        if launches is not None:
            return launches.draw(work - 1)
        if not self.tiles.pair:
            return queue.draw()
        blocks, _, _ = cute.arch.grid_dim()
        return number + blocks // self.tiles.ctas

    @cute.jit
    def mma(self, args: Args, rings, queue: TileQueue, smem: Smem, base: cute.Pointer):
        """The mma warp: S = Q K^T, shared -> tensor memory; O += P V, both -> tensor memory."""
        if const_expr(not self.tiles.pair) or leads():
            self.issue(args, rings, queue, smem, base)
        else:
            self.follow(rings, queue)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.tiles.pair)
        cute.arch.barrier(**self.graph.numbered("tmem_done"))
        cute.arch.dealloc_tmem(base, TMEM_COLUMNS, is_two_cta=self.tiles.pair)

    @cute.jit
    def follow(self, rings, queue: TileQueue):
        """The mma warp of the CTA whose products the other one issues."""
        work = Int32(0)
        q_tile, _, _ = queue.take(rings.load_tile, work)
        while q_tile != NONE:
            work += 1
            q_tile, _, _ = queue.take(rings.load_tile, work)

    @cute.jit
    def issue(self, args: Args, rings, queue: TileQueue, smem: Smem, base: cute.Pointer):
        """Every product, as many S ahead of the softmax as there are buffers."""
        q_tiles, ahead = self.tiles.q_tiles, SCORE_BUFFERS // self.tiles.q_tiles
        operands, load_kv = self.operands(smem, base), rings.load_kv
        work, kv, done = Int32(0), Int32(0), Int32(0)  # tiles of Q; stages; K/V tiles, of all works
        q_tile, _, _ = queue.take(rings.load_tile, work)
        while q_tile != NONE:
            _, end = self.kv_tiles(args, q_tile)
            for i in cutlass.range_constexpr(ahead):
                if i < end:
                    load_kv.wait(kv)
                    for t in cutlass.range_constexpr(q_tiles):
                        if const_expr(i == 0):
                            rings.load_q.of(t).wait(work)
                        self.issue_s(rings, operands, t, done + i, kv)
                    load_kv.release(kv, operands.leader)
                    kv += 1
            for step in cutlass.range(end, unroll=1):
                v, k = kv, kv + 1
                for product, t in self.products():
                    if const_expr(product == "o"):
                        if const_expr(t == 0):
                            load_kv.wait(v)
                        self.issue_o(rings, operands, t, done + step, v, step > 0)
                        if const_expr(t == q_tiles - 1):
                            load_kv.release(v, operands.leader)
                    elif step + ahead < end:
                        if const_expr(t == 0):
                            load_kv.wait(k)
                        self.issue_s(rings, operands, t, done + step + ahead, k)
                        if const_expr(t == q_tiles - 1):
                            load_kv.release(k, operands.leader)
                kv = k + 1 if step + ahead < end else k
            if const_expr(not self.tiles.borrow_q_as_o):
                for t in cutlass.range_constexpr(q_tiles):
                    rings.load_q.of(t).release(work, operands.leader)
            done += end
            work += 1
            q_tile, _, _ = queue.take(rings.load_tile, work)

    def products(self) -> list[tuple[str, int]]:
        """O of a K/V tile and the next S, each of a tile of Q, as they are issued: S behind the O
        that reads P in its place."""
        return [(product, t) for t in range(self.tiles.q_tiles) for product in "os"]

    def score_column(self, t: Int32 | int, step: Int32) -> Int32 | int:
        """The first column of S of tile t of Q and K/V tile `step`, counted over all works."""
        first = self.tiles.tmem.first("s") + t * self.tiles.tile_kv
        if self.tiles.q_tiles == SCORE_BUFFERS:
            return first
        return first + step % SCORE_BUFFERS * self.tiles.tile_kv

    def borrow_s_as_p(self, t: Int32 | int, step: Int32) -> Int32 | int:
        """The first column of P: in the first half of S, in whose second some scores are read
        anew."""
        return self.score_column(t, step)

    def out_column(self, t: int) -> int:
        """The first column of O of tile t of Q."""
        return self.tiles.tmem.first("o") + t * self.shape_o[1]

    @cute.jit
    def issue_s(self, rings, operands: Operands, t: cutlass.Constexpr[int], step: Int32, kv: Int32):
        """S of tile t of Q and the K in stage `kv`."""
        rows = UMMA_ROWS * self.tiles.ctas
        product = Product(self.dtype, (rows, self.tiles.tile_kv), self.tiles.pair)
        d = operands.base + self.score_column(t, step)
        q, k = operands.tSrQ.stage(t), operands.tSrK.stage(rings.load_kv.stage(kv))
        product.issue(operands.leader, d, q, k, Boolean(False), 0, self.shape_q[1] // UMMA_DEPTH)
        rings.mma_s.of(t).commit(step, operands.leader)

    @cute.jit
    def issue_o(
        self,
        rings,
        operands: Operands,
        t: cutlass.Constexpr[int],
        step: Int32,
        kv: Int32,
        accumulate: Boolean,
    ):
        """O of tile t of Q takes in P and the V in stage `kv`."""
        shape = UMMA_ROWS * self.tiles.ctas, self.shape_o[1]
        product = Product(self.dtype, shape, self.tiles.pair, b_transposed=True)
        d = operands.base + self.out_column(t)
        p = Int32((operands.base + self.borrow_s_as_p(t, step)).toint())
        v = operands.tOrV.stage(rings.load_kv.stage(kv))
        early, every = (n // UMMA_DEPTH for n in (self.tiles.early_keys, self.tiles.tile_kv))
        rings.correction_o.of(t).wait(step)
        rings.softmax_p.of(t).wait(step)
        tmem.after_taking_over()
        product.issue(operands.leader, d, p, v, accumulate, 0, early)
        rings.softmax_rest.of(t).wait(step)
        tmem.after_taking_over()
        product.issue(operands.leader, d, p, v, Boolean(True), early, every)
        rings.mma_o.of(t).commit(step, operands.leader)

    @cute.jit
    def softmax(
        self, args: Args, rings, queue: TileQueue, smem: Smem, base: cute.Pointer, t: Int32
    ):
        """A softmax warpgroup, a row a thread: S from tensor memory -> P there; alpha and, at last,
        1 / l -> shared memory; LSE -> global memory."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        softmax = RowSoftmax.create(args.scale, self.facts.negative_scale)
        work, done = Int32(0), Int32(0)
        q_tile, head, batch = queue.take(rings.load_tile, work)
        while q_tile != NONE:
            tile = q_tile * self.tiles.q_tiles + t
            position = tile * self.positions + thread // self.group
            limit = self.mask(args).column_limit(position)
            masked, end = self.kv_tiles(args, q_tile)
            softmax.reset()
            for step in cutlass.range(masked, unroll=1):
                here = limit - (end - 1 - step) * self.tiles.tile_kv
                number = done + step
                self.step(rings, smem, base, softmax, t, number, work, here, thread, True)
            for step in cutlass.range(masked, end, unroll=1):
                number = done + step
                self.step(rings, smem, base, softmax, t, number, work, limit, thread, False)
            inverse, lse = softmax.finish()
            done += end
            rings.softmax_stats.of(t).acquire(done + work)
            self.tell(rings, smem, t, done + work, inverse, thread)
            if thread < self.positions * self.group and position < args.q.shape[1]:
                args.lse[batch, head * self.group + thread % self.group, position] = lse
            work += 1
            q_tile, head, batch = queue.take(rings.load_tile, work)

    @cute.jit
    def step(
        self,
        rings,
        smem: Smem,
        base: cute.Pointer,
        softmax: RowSoftmax,
        t: Int32,
        step: Int32,  # of all works
        work: Int32,
        limit: Int32,
        thread: Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """One row of one K/V tile, of which columns from `limit` on do not exist."""
        tile_kv, early, half = self.tiles.tile_kv, self.tiles.early_keys, self.tiles.tile_kv // 2
        scores = cute.make_rmem_tensor(tile_kv, Float32)
        low, high, last = some(scores, 0, half), some(scores, half), some(scores, early)
        column = self.score_column(t, step)
        # Room for alpha, free by now: its test is not between the maximum and the first power.
        rings.softmax_stats.of(t).acquire(step + work)
        rings.mma_s.of(t).wait(step)
        tmem.after_taking_over()
        tmem.load_row(base, column, low, thread)
        tmem.await_loads()
        tmem.load_row(base, column + half, high, thread)  # under the maximum of the first half
        if const_expr(masked):
            softmax.hide(low, limit)
        largest = softmax.largest(low, softmax.row_max[0])
        tmem.await_loads()
        if const_expr(masked):
            softmax.hide(high, limit - half)
        largest = softmax.largest(high, largest)
        self.tell(rings, smem, t, step + work, softmax.take_in(largest), thread)
        for first in cutlass.range_constexpr(0, tile_kv, P_COLUMNS):
            end = first + P_COLUMNS
            part = some(scores, first, end)
            softmax.powers(part)
            exp2(part, self.tiles.fma_pairs)
            softmax.add(part)
            P = cute.make_rmem_tensor(P_COLUMNS, self.dtype)
            P.store(part.load().to(self.dtype))
            words = cute.recast_tensor(P, Float32)
            place = self.borrow_s_as_p(t, step) + first // WORD_ELEMENTS
            tmem.store_row(base, place, words, thread)
            if const_expr(end == early):
                # Read anew, or ptxas would compute all of P before it hands over the first part.
                tmem.load_row(base, column + early, last, thread)
            if const_expr(end in (early, tile_kv)):
                tmem.await_stores()
                tmem.before_handing_over()
                ring = rings.softmax_p if const_expr(end == early) else rings.softmax_rest
                ring.of(t).commit(step)
            if const_expr(end == early):
                tmem.await_loads()
                if const_expr(masked):
                    softmax.hide(last, limit - early)
        softmax.bound_lag(self.tiles.rescale_log2, self.tiles.flat)

    @cute.jit
    def tell(self, rings, smem: Smem, t: Int32, number: Int32, value: Float32, thread: Int32):
        """Softmax to correction: a number for each row, where the last one has been read."""
        smem.stats[thread, t] = value
        rings.softmax_stats.of(t).commit(number)

    @cute.jit
    def ask(
        self, rings, smem: Smem, t: cutlass.Constexpr[int], number: Int32, thread: Int32
    ) -> Float32:
        """What softmax told about this thread's row."""
        rings.softmax_stats.of(t).wait(number)
        value = smem.stats[thread, t]
        rings.softmax_stats.of(t).release(number)
        return value

    @cute.jit
    def correction(self, args: Args, rings, queue: TileQueue, smem: Smem, base: cute.Pointer):
        """The correction warpgroup, a row a thread: O *= alpha in tensor memory; at last O / l ->
        shared memory."""
        q_tiles = self.tiles.q_tiles
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        work, done = Int32(0), Int32(0)
        q_tile, _, _ = queue.take(rings.load_tile, work)
        while q_tile != NONE:
            _, end = self.kv_tiles(args, q_tile)
            for step in cutlass.range(end, unroll=1):
                for t in cutlass.range_constexpr(q_tiles):
                    alpha = self.ask(rings, smem, t, done + step + work, thread)
                    if step > 0:
                        rings.mma_o.of(t).wait(done + step - 1)
                        if cute.arch.vote_any_sync(alpha != 1.0):
                            self.rescale(base, t, alpha, thread)
                    tmem.before_handing_over()
                    rings.correction_o.of(t).commit(done + step)
            done += end
            for t in cutlass.range_constexpr(q_tiles):
                inverse = self.ask(rings, smem, t, done + work, thread)
                rings.mma_o.of(t).wait(done - 1)
                rings.store_o.of(t).acquire(work)
                self.divide(smem, base, t, inverse, thread)
                cute.arch.fence_view_async_shared()
                rings.store_o.of(t).commit(work)
            work += 1
            q_tile, _, _ = queue.take(rings.load_tile, work)
        tmem.before_handing_over()
        cute.arch.barrier(**self.graph.numbered("tmem_done"))

    @cute.jit
    def rescale(self, base: cute.Pointer, t: cutlass.Constexpr[int], alpha: Float32, thread: Int32):
        """O *= alpha, in tensor memory."""
        tmem.after_taking_over()
        for first in cutlass.range_constexpr(0, self.shape_o[1], CORRECT_COLUMNS):
            part = self.part_of_o(base, t, first, thread)
            for c in cutlass.range_constexpr(0, cute.size(part), 2):
                pair = part[c], part[c + 1]
                part[c], part[c + 1] = cute.arch.mul_packed_f32x2(pair, (alpha, alpha))
            tmem.store_row(base, self.out_column(t) + first, part, thread)
        tmem.await_stores()

    @cute.jit
    def divide(
        self,
        smem: Smem,
        base: cute.Pointer,
        t: cutlass.Constexpr[int],
        inverse: Float32,
        thread: Int32,
    ):
        """O / l, tensor -> shared memory. A row without a score becomes 0, even where 0 * V gave
        NaN."""
        tmem.after_taking_over()
        line = smem.sO[thread, None, t]
        for first in cutlass.range_constexpr(0, self.shape_o[1], CORRECT_COLUMNS):
            part = self.part_of_o(base, t, first, thread)
            for c in cutlass.range_constexpr(cute.size(part)):
                part[c] = Float32(0.0) if inverse == 0.0 else part[c] * inverse
            rO = cute.make_rmem_tensor_like(part, self.dtype)
            rO.store(part.load().to(self.dtype))
            for c in cutlass.range_constexpr(0, cute.size(part), OCTET):
                octet = cute.make_tensor(rO.iterator + c, cute.make_layout(OCTET))
                target = cute.local_tile(line, (OCTET,), ((first + c) // OCTET,))
                cute.autovec_copy(octet, target)

    def part_of_o(self, base: cute.Pointer, t: int, first: int, thread: Int32) -> cute.Tensor:
        """This thread's row of some columns of O, tensor memory -> registers."""
        part = cute.make_rmem_tensor(min(CORRECT_COLUMNS, self.shape_o[1] - first), Float32)
        tmem.load_row(base, self.out_column(t) + first, part, thread)
        tmem.await_loads()
        return part

    @cute.jit
    def epilogue(self, args: Args, rings, queue: TileQueue, smem: Smem):
        """The epilogue warp, shared -> global memory: O, clipped at the end of the sequence."""
        work = Int32(0)
        q_tile, head, batch = queue.take(rings.load_tile, work)
        while q_tile != NONE:
            gO = cute.local_tile(
                args.o[None, None, None, head, batch],
                (self.group, self.positions, self.shape_o[1]),
                (0, None, 0),
            )
            tOsO, tOgO = tma_tiles(args.store_o, smem.gO, gO)
            for t in cutlass.range_constexpr(self.tiles.q_tiles):
                rings.store_o.of(t).wait(work)
                cute.copy(args.store_o, tOsO[None, t], tOgO[None, q_tile * self.tiles.q_tiles + t])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                rings.store_o.of(t).release(work)
                if const_expr(self.tiles.borrow_q_as_o):
                    rings.load_q.of(t).release(work)
            work += 1
            q_tile, head, batch = queue.take(rings.load_tile, work)
        cute.arch.cp_async_bulk_wait_group(0)


def some(fragment: cute.Tensor, begin: int, end: int | None = None) -> cute.Tensor:
    """Elements of a fragment in registers, from one on, up to another or to the last."""
    count = (cute.size(fragment) if end is None else end) - begin
    return cute.make_tensor(fragment.iterator + begin, cute.make_layout(count))
