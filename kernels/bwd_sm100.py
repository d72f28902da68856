"""Backward on Blackwell: dK and dV of one K/V tile, and what it adds to dQ.

Data:    K, V once, then Q and dO tile by tile --TMA--> swizzled smem --tcgen05.mma--> S and dP in
         TMEM, transposed: keys are rows --compute, half a row a thread--> P = exp2(S - LSE) and
         dS = P (dP - D) in TMEM --tcgen05.mma--> dV += P dO and dK += dS Q in TMEM; dS --> smem
         --tcgen05.mma--> dQ in TMEM --reduce--> smem --bulk reduction--> float32 in global memory,
         in fragment order (see bwd_workspace).
Warps:   a warpgroup that reduces dQ, two that compute, each half of the queries of a tile, and of
         the last a warp each that issues products and loads (FlashAttention-4, section 4).
Memory:  Q and dO share a ring. In TMEM P and dS take the place of their S, and dQ that of dP or S
         (`borrow_as_dq`). At the end dK and dV leave through the smem of K and V.
Overlap: between dK of a tile and dV of the next there are S and dP of the next and dQ of this one
         to compute, while the exponentials of the next are: the order is that of `issue`.
Pair:    two CTAs, at neighbouring keys, issue their products together and each load half of what
         they read as B: rows of Q and dO for S and dP, columns of Q, dO and K for dK, dV and dQ.
         dQ of both is one product: each CTA has half of its rows (one of two tiles, or half of
         each: `dq_tiles`), and so of dS needs half of the queries, but of all keys. The other half
         goes into the other CTA's shared memory.
Folded:  of head dims past 128 a CTA has 64 keys: columns of S, dP, dV and dK are in two halves, the
         second in lanes 64 to 127, and P and dS are operands in smem.
Order:   a CTA visits the query heads of its group one after the other, and in each the tiles of Q
         that see its keys, first those that need a mask; the loop over the others has none in it.
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
from ..layouts.gmem import tma_atom, tma_tiles
from ..layouts.hardware import (
    OCTET,
    TMEM_COLUMNS,
    UMMA_DEPTH,
    UMMA_ROWS,
    WARP_THREADS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
)
from ..layouts.opaque import elected, lane
from ..layouts.smem import allocate, row_major_stages, store_line_to_cta, store_to_cta, view
from ..pipelines.backward_sm100 import backward_graph
from ..pipelines.rings import leads
from ..pipelines.tile_order import TileOrder
from . import BackwardFacts
from .bwd_main import BwdMain, Keys, load_rows
from .bwd_workspace import QUAD, WarpTurn, Workspace, reduce_bulk
from .exp2 import exp2
from .online_softmax import LOG2_E
from .tiles import ELEMENT_BYTES
from .tiles_bwd_sm100 import DQ_COLUMNS, DQ_STAGES, ROWS_STAGES, BlackwellBackwardTiles
from .umma import STEP_COLUMNS, Product, UmmaOperand
from .wgmma import narrow

COMPUTE_WARPGROUPS = 2
SLICE = 32  # columns of dP, or of a gradient, in registers at once
HELD_COLUMNS = 64  # of dQ in dP's place: the last, which leave it before they are added
WORD_ELEMENTS = 2  # of P and dS in a column of TMEM


@dataclass(frozen=True)
class Source:
    """What TMA copies tiles of: (len, head_dim, heads, batch), coordinates for the atom."""

    tensor: cute.Tensor
    atom: cute.CopyAtom


@dataclass(frozen=True)
class Args:
    """What crosses from host to device."""

    q: cute.Tensor  # (len_q, head_dim, heads_q, batch)
    k: cute.Tensor  # (len_kv, head_dim, heads_kv, batch)
    load_q: Source  # by rows, where a pair has two ways
    load_qt: Source  # by columns
    load_k: Source
    load_kt: Source
    load_v: Source
    load_do: Source
    load_dot: Source
    store_dk: Source
    store_dv: Source
    workspace: Workspace
    scale: Float32
    order: TileOrder
    sms: Int32  # that CTAs can run on at the same time


@dataclass(frozen=True)
class Smem:
    """Shared memory, and where tensor memory begins. Tiles by columns are of a pair alone."""

    q: cute.Tensor  # (tile_q, columns, stage), of a pair half of the rows
    qt: cute.Tensor  # (tile_q, columns, stage), of a pair half of the columns
    do: cute.Tensor  # (tile_q, columns_v, stage), as q
    dot: cute.Tensor  # (tile_q, columns_v, stage), as qt
    k: cute.Tensor  # (keys, columns, 1); at the end dK
    kt: cute.Tensor  # (tile_kv, columns, 1), of a pair half of the columns
    v: cute.Tensor  # (keys, columns_v, 1); at the end dV
    ds: cute.Tensor  # (tile_kv, dq_rows, 1)
    p: cute.Tensor | None  # (keys, tile_q, 1), folded alone
    dst: cute.Tensor | None  # as p: dS as the operand of dK
    rows: cute.Tensor  # (tile_q, LSE and D, stage), float32
    dq: cute.Tensor  # (QUAD, lane, quad, stage, warp), float32
    tmem_address: cute.Pointer


@dataclass(frozen=True)
class Operands:
    """What the products read from shared memory, by descriptors, and where tensor memory begins."""

    tSrK: UmmaOperand  # (mma, m, k, 1)
    tSrQ: UmmaOperand  # (mma, n, k, stage)
    tPrV: UmmaOperand  # (mma, m, k, 1)
    tPrdO: UmmaOperand  # (mma, n, k, stage)
    tVrP: UmmaOperand | None  # (mma, m, k, 1); None: in tensor memory
    tVrdO: UmmaOperand  # (mma, n, k, stage)
    tKrdS: UmmaOperand | None  # (mma, m, k, 1)
    tKrQ: UmmaOperand  # (mma, n, k, stage)
    tQrdS: UmmaOperand  # (mma, m, k, 1)
    tQrK: UmmaOperand  # (mma, n, k, 1)
    base: cute.Pointer
    leader: Boolean  # the thread that issues


@dataclass(frozen=True)
class Part:
    """What one thread computes of every tile: scores of one key and some queries."""

    half: Int32  # of the columns of S and dP: the warpgroup
    thread: Int32  # in it
    key: Int32  # of this CTA's
    first: Int32  # query, in the tile
    rank: Int32  # of this CTA in its pair


class BwdSm100(BwdMain):
    """The main kernel for one set of compile-time facts and one row of the tile table."""

    def __init__(self, facts: BackwardFacts, tiles: BlackwellBackwardTiles) -> None:
        super().__init__(facts, tiles)
        self.tiles = tiles
        ctas, tile_q, keys = tiles.ctas, tiles.tile_q, tiles.keys
        self.pair = (ctas, 1, 1)
        self.shape_q = (tile_q // ctas, tiles.columns)
        self.shape_qt = (tile_q, tiles.columns // ctas)
        self.shape_do = (tile_q // ctas, tiles.columns_v)
        self.shape_dot = (tile_q, tiles.columns_v // ctas)
        self.shape_k = (keys, tiles.columns)
        self.shape_kt = (tiles.tile_kv, tiles.columns // ctas)
        self.shape_v = (keys, tiles.columns_v)
        self.shape_ds = (tiles.tile_kv, tiles.dq_rows)
        self.shape_p = (keys, tile_q)
        # Of the products, both CTAs' together:
        rows = UMMA_ROWS if tiles.folded else UMMA_ROWS * ctas
        self.product_s = (rows, tile_q)
        self.product_dv = (rows, tiles.columns_v)
        self.product_dk = (rows, tiles.columns)
        self.product_dq = (UMMA_ROWS * tiles.dq_tiles, tiles.columns)
        # Which load of a tile of Q each product reads, and whether it is the last to.
        self.uses = 4 if tiles.pair else 2
        self.use = dict(s=0, dp=1, dv=2, dk=3) if tiles.pair else dict(s=0, dp=1, dv=1, dk=0)
        self.last = ("s", "dp", "dv", "dk") if tiles.pair else ("dv", "dk")
        self.graph = backward_graph(
            stages=tiles.stages,
            rows_stages=ROWS_STAGES,
            score_buffers=tiles.score_buffers,
            pair=tiles.pair,
            k_bytes=tiles.k_bytes,
            v_bytes=tiles.v_bytes,
            slot_bytes=tiles.slot_bytes,
            row_bytes=tiles.row_bytes,
            registers_reduce=tiles.registers_reduce,
            registers_compute=tiles.registers_compute,
            registers_other=tiles.registers_other,
        )

    def smem_layouts(self) -> SimpleNamespace:
        """(rows, columns, stages) of each tensor."""

        def ring(shape: tuple[int, int]) -> cute.ComposedLayout:
            apart = self.tiles.slot_bytes // ELEMENT_BYTES
            return row_major_stages(self.dtype, shape, self.tiles.stages, apart=apart)

        def one(shape: tuple[int, int]) -> cute.ComposedLayout:
            return row_major_stages(self.dtype, shape, 1)

        return SimpleNamespace(
            q=ring(self.shape_q),
            qt=ring(self.shape_qt),
            do=ring(self.shape_do),
            dot=ring(self.shape_dot),
            k=one(self.shape_k),
            kt=one(self.shape_kt),
            v=one(self.shape_v),
            ds=one(self.shape_ds),
            p=one(self.shape_p),
        )

    @property
    def cta_group(self) -> tcgen05.CtaGroup:
        """CTAs that take part in a product."""
        return tcgen05.CtaGroup.TWO if self.tiles.pair else tcgen05.CtaGroup.ONE

    def tiled_mma(
        self,
        shape: tuple[int, int],
        a: OperandMajorMode = OperandMajorMode.K,
        b: OperandMajorMode = OperandMajorMode.MN,
    ) -> cute.TiledMma:
        """A product from shared memory, for the layouts of its operands."""
        dtypes = (self.dtype,) * 2
        return make_trivial_tiled_mma(*dtypes, a, b, Float32, self.cta_group, shape)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, len_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim_v)
        do: cute.Tensor,  # (batch, len_q, heads_q, head_dim_v)
        dk: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim)
        dv: cute.Tensor,  # (batch, len_kv, heads_kv, head_dim_v)
        workspace: Workspace,  # with zeros for dQ
        scale: Float32,
        sms: Int32,
        stream,
    ):
        layouts = self.smem_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        store = cpasync.CopyBulkTensorTileS2GOp()

        def source(op, tensor: cute.Tensor, stages: cute.ComposedLayout, shape) -> Source:
            atom, coordinates = tma_atom(op, tensor, stages, shape)
            return Source(coordinates, atom)

        load_q = source(load, q, layouts.q, self.shape_q)
        load_k = source(load, k, layouts.k, self.shape_k)
        order = self.order(q, k)
        args = Args(
            load_q.tensor,
            load_k.tensor,
            load_q,
            source(load, q, layouts.qt, self.shape_qt),
            load_k,
            source(load, k, layouts.kt, self.shape_kt),
            source(load, v, layouts.v, self.shape_v),
            source(load, do, layouts.do, self.shape_do),
            source(load, do, layouts.dot, self.shape_dot),
            source(store, dk, layouts.k, self.shape_k),
            source(store, dv, layouts.v, self.shape_v),
            workspace,
            scale,
            order,
            sms,
        )
        self.kernel(args).launch(
            grid=[order.count * self.tiles.ctas, 1, 1],
            block=[self.graph.threads, 1, 1],
            cluster=self.pair,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: Args):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for one in (args.load_k, args.load_q, args.load_v, args.load_do):
                cpasync.prefetch_descriptor(one.atom)
        allocator, graph, tiles = SmemAllocator(), self.graph, self.tiles
        barriers = allocator.allocate_array(cutlass.Int64, graph.mbarriers)
        smem = self.storage(allocator)
        rings = graph.rings(barriers)
        if warp == graph.warps("mma")[0]:
            cute.arch.alloc_tmem(TMEM_COLUMNS, smem.tmem_address, is_two_cta=tiles.pair)
        pipeline.pipeline_init_arrive(self.pair)
        pipeline.pipeline_init_wait(self.pair)
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem_address)

        group = warp // WARPGROUP_WARPS
        if group == 0:
            cute.arch.setmaxregister_decrease(tiles.registers_reduce)
            self.reduce(args, rings, smem, base)
        elif group <= COMPUTE_WARPGROUPS:
            cute.arch.setmaxregister_increase(tiles.registers_compute)
            self.compute(args, rings, smem, base, group - 1)
        else:
            cute.arch.setmaxregister_decrease(tiles.registers_other)
        if warp == graph.warps("mma")[0]:
            self.mma(args, rings, smem, base)
        if warp == graph.warps("load")[0]:
            self.load(args, rings, smem)
        if const_expr(tiles.pair):  # the other may still arrive at barriers of this one
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def storage(self, allocator: SmemAllocator) -> Smem:
        """Shared memory in the order in which `BlackwellBackwardTiles` counts it."""
        layouts, tiles = self.smem_layouts(), self.tiles
        address = allocator.allocate_array(Int32, 1)
        rows = cute.make_layout((tiles.tile_q, 2, ROWS_STAGES))
        sRows = cute.make_tensor(
            allocator.allocate_array(Float32, cute.size(rows), byte_alignment=128), rows
        )
        quads = DQ_COLUMNS // QUAD
        dq = cute.make_layout((QUAD, WARP_THREADS, quads, DQ_STAGES, WARPGROUP_WARPS))

        def room(size_bytes: int) -> cute.Pointer:
            return allocate(allocator, self.dtype, size_bytes // ELEMENT_BYTES)

        k, v = room(tiles.k_bytes), room(tiles.v_bytes)
        kt = room(tiles.k_bytes) if tiles.pair else k
        ring = room(tiles.stages * tiles.slot_bytes)
        ds = room(tiles.ds_bytes)
        p = dst = None
        if tiles.folded:
            p, dst = (view(room(tiles.scores_bytes // 2), layouts.p) for _ in range(2))
        sdQ = allocator.allocate_array(Float32, cute.size(dq), byte_alignment=128)
        return Smem(
            q=view(ring, layouts.q),
            qt=view(ring, layouts.qt),
            do=view(ring, layouts.do),
            dot=view(ring, layouts.dot),
            k=view(k, layouts.k),
            kt=view(kt, layouts.kt),
            v=view(v, layouts.v),
            ds=view(ds, layouts.ds),
            p=p,
            dst=dst,
            rows=sRows,
            dq=cute.make_tensor(sdQ, dq),
            tmem_address=address,
        )

    def visits(self, args: Args, keys: Keys) -> tuple[Int32, Int32]:
        """(tiles of Q that this CTA visits, query heads of a group)."""
        gqa_group = args.q.shape[2] // args.k.shape[2]
        return (keys.end - keys.begin) * gqa_group, gqa_group

    def rank_in_pair(self) -> Int32 | int:
        """Of this CTA."""
        if not self.tiles.pair:
            return 0
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    @cute.jit
    def load(self, args: Args, rings, smem: Smem):
        """The load warp, global -> shared memory: K and V, then for each tile of Q what its
        products take, in their order, and its LSE and D."""
        keys, rank, ctas = self.keys(args), self.rank_in_pair(), self.tiles.ctas
        total, gqa_group = self.visits(args, keys)
        kv_tile = keys.first // self.tiles.tile_kv
        by_rows, batch = kv_tile * ctas + rank, keys.batch
        self.load_one(args.load_k, rings.load_k, 0, smem.k, 0, by_rows, 0, keys.head, batch)
        self.load_one(args.load_v, rings.load_v, 0, smem.v, 0, by_rows, 0, keys.head, batch)
        if const_expr(self.tiles.pair):
            source, ring = args.load_kt, rings.load_kt
            self.load_one(source, ring, 0, smem.kt, 0, kv_tile, rank, keys.head, batch)
        cute.arch.griddepcontrol_wait()  # for LSE and D
        q_tile, head, ring = keys.start, keys.head * gqa_group, rings.load_qdo
        for number in cutlass.range(total, unroll=1):
            first, by_rows = number * self.uses, q_tile * ctas + rank
            size_q, size_do = self.tiles.q_bytes, self.tiles.do_bytes
            self.load_one(args.load_q, ring, first, smem.q, size_q, by_rows, 0, head, batch)
            rings.load_rows.acquire(number)
            stage = rings.load_rows.stage(number)
            place, barrier = smem.rows[None, None, stage].iterator, rings.load_rows.barrier(number)
            load_rows(args.workspace, self.tiles.tile_q, q_tile, head, batch, place, barrier)
            self.load_one(args.load_do, ring, first + 1, smem.do, size_do, by_rows, 0, head, batch)
            if const_expr(self.tiles.pair):
                self.load_one(
                    args.load_dot, ring, first + 2, smem.dot, size_do, q_tile, rank, head, batch
                )
                self.load_one(
                    args.load_qt, ring, first + 3, smem.qt, size_q, q_tile, rank, head, batch
                )
            q_tile, head = keys.after(q_tile, head)
        if const_expr(self.tiles.pair):  # the other CTA's products arrive here until then
            ring.drain(total * self.uses)

    @cute.jit
    def load_one(
        self,
        source: Source,
        ring,
        number: Int32 | int,
        place: cute.Tensor,  # (rows, columns, stage)
        some_bytes: cutlass.Constexpr[int],
        row: Int32,
        column: Int32 | int,
        head: Int32,
        batch: Int32,
    ):
        """One tile, global -> shared memory."""
        shape = cute.size(place, mode=[0]), cute.size(place, mode=[1])
        tiles = cute.local_tile(source.tensor[None, None, head, batch], shape, (None, column))
        slots, parts = tma_tiles(source.atom, place, tiles)
        ring.acquire(number, some_bytes)
        stage = ring.stage(number)
        cute.copy(
            source.atom, parts[None, row], slots[None, stage], tma_bar_ptr=ring.barrier(number)
        )

    @cute.jit
    def mma(self, args: Args, rings, smem: Smem, base: cute.Pointer):
        """The mma warp: every product, shared and tensor memory -> tensor memory."""
        if const_expr(not self.tiles.pair) or leads():
            self.issue(args, rings, smem, base)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.tiles.pair)
        cute.arch.barrier(**self.graph.numbered("tmem_done"))
        cute.arch.dealloc_tmem(base, TMEM_COLUMNS, is_two_cta=self.tiles.pair)

    @cute.jit
    def issue(self, args: Args, rings, smem: Smem, base: cute.Pointer):
        """The products of all tiles of Q, in an order that leaves computing the time it takes.

        Behind dK, S takes the place of P and dS; dQ takes that of dP, and dP follows when dQ is
        read. Or, with two buffers of S, dP comes first, dQ takes the place of S, and S follows.
        """
        operands, ahead = self.operands(smem, base), self.tiles.score_buffers
        keys = self.keys(args)
        total, _ = self.visits(args, keys)
        rings.load_k.wait(0)
        for i in cutlass.range_constexpr(ahead):
            if i < total:
                self.issue_s(rings, operands, Int32(i))
        rings.load_v.wait(0)
        if total > 0:
            self.issue_dp(rings, operands, Int32(0))
        if const_expr(self.tiles.pair):
            rings.load_kt.wait(0)
        for number in cutlass.range(total, unroll=1):
            rings.compute_p.wait(number)
            tmem.after_taking_over()
            self.issue_dv(rings, operands, number)
            rings.compute_ds.wait(number)
            tmem.after_taking_over()
            self.issue_dk(rings, operands, number)
            if const_expr(self.tiles.borrow_as_dq == "s"):
                if number + 1 < total:
                    self.issue_dp(rings, operands, number + 1)
                self.issue_dq(rings, operands, number)
                rings.reduce_dq.wait(number)
                if number + ahead < total:
                    self.issue_s(rings, operands, number + ahead)
            else:
                if number + ahead < total:
                    self.issue_s(rings, operands, number + ahead)
                tiles = self.tiles.dq_tiles
                if (tiles == 1) or (number % tiles == tiles - 1) | (number + 1 == total):
                    if const_expr(self.tiles.borrow_as_dq is None):
                        rings.reduce_dq.wait(number // tiles - 1)  # before the first: passes
                    self.issue_dq(rings, operands, number // tiles)
                if number + 1 < total:
                    if const_expr(self.tiles.borrow_as_dq == "dp"):
                        rings.reduce_dq.wait((number + 1) // tiles - 1)
                    self.issue_dp(rings, operands, number + 1)
        rings.mma_dkv.commit(0, operands.leader)

    def column(self, name: str) -> int:
        """The first column of a tensor in tensor memory."""
        return self.tiles.tmem.first(name)

    def score_column(self, number: Int32) -> Int32 | int:
        """The first column of S of a tile of Q."""
        if self.tiles.score_buffers == 1:
            return self.column("s")
        buffer = number % self.tiles.score_buffers
        return self.column("s") + buffer * self.tiles.score_columns

    def borrow_s_as(self, name: str, number: Int32, half: Int32 | int) -> Int32 | int:
        """The first column of P or dS of one warpgroup: each in a half of its own half of S."""
        own = self.tiles.score_columns // COMPUTE_WARPGROUPS
        return self.score_column(number) + half * own + (own // 2 if name == "ds" else 0)

    def dq_column(self, number: Int32) -> Int32 | int:
        """The first column of dQ."""
        if self.tiles.borrow_as_dq == "s":
            return self.score_column(number)
        return self.column(self.tiles.borrow_as_dq or "dq")

    @cute.jit
    def take(self, rings, number: Int32, product: cutlass.Constexpr[str]) -> Int32:
        """Waits for what a product reads of a tile of Q; the stage that it is in."""
        use = number * self.uses + self.use[product]
        rings.load_qdo.wait(use)
        return rings.load_qdo.stage(use)

    def give_back(self, rings, operands: Operands, number: Int32, product: str) -> None:
        """After the last product that reads it."""
        if product in self.last:
            rings.load_qdo.release(number * self.uses + self.use[product], operands.leader)

    @cute.jit
    def issue_s(self, rings, operands: Operands, number: Int32):
        """S^T = K Q^T of a tile of Q."""
        q = operands.tSrQ.stage(self.take(rings, number, "s"))
        product = Product(self.dtype, self.product_s, self.tiles.pair)
        d, k = operands.base + self.score_column(number), operands.tSrK.stage(0)
        steps = self.tiles.columns // UMMA_DEPTH
        product.issue(operands.leader, d, k, q, Boolean(False), 0, steps)
        rings.mma_s.commit(number, operands.leader)
        self.give_back(rings, operands, number, "s")

    @cute.jit
    def issue_dp(self, rings, operands: Operands, number: Int32):
        """dP^T = V dO^T."""
        do = operands.tPrdO.stage(self.take(rings, number, "dp"))
        product = Product(self.dtype, self.product_s, self.tiles.pair)
        d, v = operands.base + self.column("dp"), operands.tPrV.stage(0)
        steps = self.tiles.columns_v // UMMA_DEPTH
        product.issue(operands.leader, d, v, do, Boolean(False), 0, steps)
        rings.mma_dp.commit(number, operands.leader)
        self.give_back(rings, operands, number, "dp")

    @cute.jit
    def issue_dv(self, rings, operands: Operands, number: Int32):
        """dV += P^T dO."""
        do = operands.tVrdO.stage(self.take(rings, number, "dv"))
        product = Product(self.dtype, self.product_dv, self.tiles.pair, b_transposed=True)
        d = operands.base + self.column("dv")
        self.issue_gradient(operands, product, d, operands.tVrP, "p", do, number)
        self.give_back(rings, operands, number, "dv")

    @cute.jit
    def issue_dk(self, rings, operands: Operands, number: Int32):
        """dK += dS^T Q."""
        q = operands.tKrQ.stage(self.take(rings, number, "dk"))
        product = Product(self.dtype, self.product_dk, self.tiles.pair, b_transposed=True)
        d = operands.base + self.column("dk")
        self.issue_gradient(operands, product, d, operands.tKrdS, "ds", q, number)
        self.give_back(rings, operands, number, "dk")

    @cute.jit
    def issue_gradient(
        self,
        operands: Operands,
        product: Product,
        d: cute.Pointer,
        a: UmmaOperand | None,
        name: cutlass.Constexpr[str],
        b: UmmaOperand,
        number: Int32,
    ):
        """With P or dS: from tensor memory, where each warpgroup's part is in a place of its own,
        or from shared memory."""
        steps = self.tiles.tile_q // UMMA_DEPTH
        if const_expr(a is not None):
            product.issue(operands.leader, d, a.stage(0), b, number > 0, 0, steps)
        else:
            each = steps // COMPUTE_WARPGROUPS
            for half in cutlass.range_constexpr(COMPUTE_WARPGROUPS):
                before = half * each
                column = self.borrow_s_as(name, number, half) - before * STEP_COLUMNS
                a_address = Int32((operands.base + column).toint())
                adds = (number > 0) | Boolean(half > 0)
                product.issue(operands.leader, d, a_address, b, adds, before, before + each)

    @cute.jit
    def issue_dq(self, rings, operands: Operands, number: Int32):
        """dQ = dS K, of `dq_tiles`; `number` counts these."""
        product = Product(
            self.dtype, self.product_dq, self.tiles.pair, a_transposed=True, b_transposed=True
        )
        d = operands.base + self.dq_column(number)
        ds, k, steps = operands.tQrdS.stage(0), operands.tQrK.stage(0), self.tiles.tile_kv
        product.issue(operands.leader, d, ds, k, Boolean(False), 0, steps // UMMA_DEPTH)
        rings.mma_dq.commit(number, operands.leader)

    def operands(self, smem: Smem, base: cute.Pointer) -> Operands:
        """Shared memory as the tensor cores read it: the canonical layouts of the products."""
        tiles, k_major, mn_major = self.tiles, OperandMajorMode.K, OperandMajorMode.MN
        score = self.tiled_mma(self.product_s, k_major, k_major)
        of_dv, of_dk = self.tiled_mma(self.product_dv), self.tiled_mma(self.product_dk)
        of_dq = self.tiled_mma(self.product_dq, mn_major)
        slot = tiles.slot_bytes // ELEMENT_BYTES

        def staged(one: cute.ComposedLayout, stages: int) -> cute.ComposedLayout:
            stage = cute.make_layout(stages, stride=slot)
            outer = cute.append(cute.select(one.outer, mode=[0, 1, 2]), stage)
            return cute.make_composed_layout(one.inner, 0, outer)

        def a(mma: cute.TiledMma, shape: tuple[int, int], depth: int, at: cute.Tensor):
            layout = make_smem_layout_a(mma, (*shape, depth), self.dtype, 1)
            return UmmaOperand.of(mma.get_slice(0).make_fragment_A(self.same(at, layout)))

        def b(mma: cute.TiledMma, shape: tuple[int, int], depth: int, at: cute.Tensor, stages: int):
            layout = staged(make_smem_layout_b(mma, (*shape, depth), self.dtype, 1), stages)
            return UmmaOperand.of(mma.get_slice(0).make_fragment_B(self.same(at, layout)))

        folded, q = tiles.folded, tiles.tile_q
        return Operands(
            tSrK=a(score, self.product_s, tiles.columns, smem.k),
            tSrQ=b(score, self.product_s, tiles.columns, smem.q, tiles.stages),
            tPrV=a(score, self.product_s, tiles.columns_v, smem.v),
            tPrdO=b(score, self.product_s, tiles.columns_v, smem.do, tiles.stages),
            tVrP=a(of_dv, self.product_dv, q, smem.p) if folded else None,
            tVrdO=b(of_dv, self.product_dv, q, smem.dot, tiles.stages),
            tKrdS=a(of_dk, self.product_dk, q, smem.dst) if folded else None,
            tKrQ=b(of_dk, self.product_dk, q, smem.qt, tiles.stages),
            tQrdS=a(of_dq, self.product_dq, tiles.tile_kv, smem.ds),
            tQrK=b(of_dq, self.product_dq, tiles.tile_kv, smem.kt, 1),
            base=base,
            leader=elected(),
        )

    def same(self, tensor: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
        """The memory of a tensor in another layout."""
        return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner), layout.outer)

    @cute.jit
    def compute(self, args: Args, rings, smem: Smem, base: cute.Pointer, half: Int32):
        """A compute warpgroup: S and dP from tensor memory, LSE and D from shared memory -> P and
        dS to where the products read them; at last dV or dK -> global memory."""
        keys, rank = self.keys(args), self.rank_in_pair()
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        folds = thread // self.tiles.keys  # 0, but in the second half of folded lanes
        first = folds * (self.tiles.tile_q // 2) + half * self.own_queries
        part = Part(half, thread, thread % self.tiles.keys, first, Int32(rank))
        scale_log2 = args.scale * LOG2_E
        total, gqa_group = self.visits(args, keys)
        if self.tiles.dq_tiles > 1 and total == 1 and part.rank == 1:
            # dQ of the second tile is computed, too, but there is none: of anything written. The
            # fence for it is that of dS.
            nothing = cute.make_rmem_tensor(self.tiles.dq_rows, self.dtype)
            nothing.fill(0.0)
            self.write(nothing, smem.ds[half * WARPGROUP_THREADS + thread, None, 0], Int32(0))
        number = Int32(0)  # of the tile, in the order of visits
        for _ in cutlass.range(gqa_group, unroll=1):
            for turn in cutlass.range(keys.begin, keys.full, unroll=1):
                q_tile = keys.turned(turn)
                self.step(rings, smem, base, part, keys, number, scale_log2, q_tile, True)
                number += 1
            for _ in cutlass.range(keys.full, keys.end, unroll=1):
                self.step(rings, smem, base, part, keys, number, scale_log2, None, False)
                number += 1
        cute.arch.griddepcontrol_launch_dependents()
        rings.mma_dkv.wait(0)
        tmem.after_taking_over()
        by_rows = keys.first // self.tiles.tile_kv * self.tiles.ctas + rank
        seen = total > 0
        if half == 0:
            self.store(args.store_dv, smem.v, base, "dv", part, keys, by_rows, Float32(1.0), seen)
        else:
            self.store(args.store_dk, smem.k, base, "dk", part, keys, by_rows, args.scale, seen)
        tmem.before_handing_over()
        cute.arch.barrier_arrive(**self.graph.numbered("tmem_done"))

    @property
    def own_queries(self) -> int:
        """Queries of a tile whose scores a thread has."""
        return self.tiles.score_columns // COMPUTE_WARPGROUPS

    @cute.jit
    def step(
        self,
        rings,
        smem: Smem,
        base: cute.Pointer,
        part: Part,
        keys: Keys,
        number: Int32,
        scale_log2: Float32,
        q_tile: Int32 | None,  # needed for the mask alone
        masked: cutlass.Constexpr[bool],
    ):
        """One tile of Q: this thread's part of P and dS."""
        own, folded = self.own_queries, self.tiles.folded
        hidden = Int32(0)  # of the queries, up to which the key is not seen
        if const_expr(masked):
            key = keys.first + part.rank * self.tiles.keys + part.key
            hidden = keys.mask.first_row(key) - q_tile * self.tiles.tile_q - part.first
        rings.load_rows.wait(number)
        stage = rings.load_rows.stage(number)
        rings.mma_s.wait(number)
        tmem.after_taking_over()
        P = cute.make_rmem_tensor(own, Float32)
        tmem.load_row(base, self.score_column(number) + part.half * own, P, part.thread)
        tmem.await_loads()
        self.exponentials(P, smem.rows[None, 0, stage], part, scale_log2)
        self.hide(P, 0, hidden, masked)
        rP = self.narrowed(P)
        if const_expr(folded):
            self.write(rP, smem.p[part.key, None, 0], part.first)
            cute.arch.fence_view_async_shared()
        else:
            words = cute.recast_tensor(rP, Float32)
            tmem.store_row(base, self.borrow_s_as("p", number, part.half), words, part.thread)
            tmem.await_stores()
        tmem.before_handing_over()
        rings.compute_p.commit(number)

        rings.mma_dp.wait(number)
        tmem.after_taking_over()
        rdS = cute.make_rmem_tensor(own, self.dtype)
        width = min(SLICE, own)
        for first in cutlass.range_constexpr(0, own, width):
            dP = cute.make_rmem_tensor(width, Float32)
            column = self.column("dp") + part.half * own + first
            tmem.load_row(base, column, dP, part.thread)
            tmem.await_loads()
            self.gradients(P, dP, smem.rows[None, 1, stage], part.first, first)
            self.hide(dP, first, hidden, masked)
            narrow(dP, cute.make_tensor(rdS.iterator + first, cute.make_layout(width)))
        rings.load_rows.release(number)
        if const_expr(folded):
            self.write(rdS, smem.dst[part.key, None, 0], part.first)
        else:
            words = cute.recast_tensor(rdS, Float32)
            tmem.store_row(base, self.borrow_s_as("ds", number, part.half), words, part.thread)
            tmem.await_stores()
        if const_expr(self.tiles.borrow_as_dq == "s"):
            # It read dS of the tile before. Else dP, awaited above, was issued behind it. At the
            # first tile this passes.
            rings.mma_dq.wait(number - 1)
        self.hand_out(rdS, smem, part, number)
        tmem.before_handing_over()
        rings.compute_ds.commit(number)

    @cute.jit
    def exponentials(self, P: cute.Tensor, lse_log2: cute.Tensor, part: Part, scale_log2: Float32):
        """P = exp2(S - LSE), in the place of S."""
        scale = (scale_log2, scale_log2)
        for c in cutlass.range_constexpr(0, cute.size(P), QUAD):
            lse = self.quad(lse_log2, part.first + c)
            for i in cutlass.range_constexpr(0, QUAD, 2):
                pair, shift = (P[c + i], P[c + i + 1]), (-lse[i], -lse[i + 1])
                P[c + i], P[c + i + 1] = cute.arch.fma_packed_f32x2(pair, scale, shift)
        exp2(P, self.tiles.fma_pairs)

    @cute.jit
    def gradients(
        self,
        P: cute.Tensor,
        dP: cute.Tensor,
        rowsum: cute.Tensor,
        own_first: Int32,
        first: cutlass.Constexpr[int],
    ):
        """dS = P (dP - D) of some queries, in the place of dP."""
        for c in cutlass.range_constexpr(0, cute.size(dP), QUAD):
            d = self.quad(rowsum, own_first + first + c)
            for i in cutlass.range_constexpr(0, QUAD, 2):
                e = c + i
                less = cute.arch.add_packed_f32x2((dP[e], dP[e + 1]), (-d[i], -d[i + 1]))
                p = P[first + e], P[first + e + 1]
                dP[e], dP[e + 1] = cute.arch.mul_packed_f32x2(p, less)

    def quad(self, row: cute.Tensor, first: Int32) -> cute.Tensor:
        """Four neighbouring numbers of shared memory, which all lanes read."""
        result = cute.make_rmem_tensor(QUAD, Float32)
        cute.autovec_copy(cute.local_tile(row, (QUAD,), (first // QUAD,)), result)
        return result

    @cute.jit
    def hide(
        self,
        values: cute.Tensor,
        first: cutlass.Constexpr[int],
        hidden: Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """0 for the elements of P or dS whose score does not exist: also where dP is NaN."""
        if const_expr(masked):
            for c in cutlass.range_constexpr(cute.size(values)):
                values[c] = values[c] if first + c >= hidden else Float32(0.0)

    def narrowed(self, values: cute.Tensor) -> cute.Tensor:
        """In 16 bits."""
        result = cute.make_rmem_tensor(cute.size(values), self.dtype)
        narrow(values, result)
        return result

    def write(self, values: cute.Tensor, line: cute.Tensor, first: Int32) -> None:
        """16-bit registers to a line of shared memory, from element `first` on."""
        for c in range(0, cute.size(values), OCTET):
            octet = cute.make_tensor(values.iterator + c, cute.make_layout(OCTET))
            target = cute.local_tile(line, (OCTET,), (first // OCTET + c // OCTET,))
            cute.autovec_copy(octet, target)

    @cute.jit
    def hand_out(self, rdS: cute.Tensor, smem: Smem, part: Part, number: Int32):
        """dS to where dQ's product reads it; of a pair to the CTA that has these rows of dQ."""
        if const_expr(self.tiles.pair):
            line = smem.ds[part.rank * self.tiles.keys + part.key, None, 0]
            if const_expr(self.tiles.dq_tiles > 1):  # all rows of the tile
                own = cute.size(rdS)
                place = cute.local_tile(line, (own,), (part.first // own,))
                store_line_to_cta(rdS, place, number % self.tiles.dq_tiles)
            else:
                cta = part.first // self.tiles.dq_rows
                first = part.first % self.tiles.dq_rows
                for c in cutlass.range_constexpr(0, cute.size(rdS), OCTET):
                    octet = cute.make_tensor(rdS.iterator + c, cute.make_layout(OCTET))
                    target = cute.local_tile(line, (OCTET,), (first // OCTET + c // OCTET,))
                    store_to_cta(octet, target, cta)
            cute.arch.fence_proxy("async.shared", space="cluster")
        else:
            self.write(rdS, smem.ds[part.key, None, 0], part.first)
            cute.arch.fence_view_async_shared()

    @cute.jit
    def store(
        self,
        target: Source,
        place: cute.Tensor,  # (keys, columns, 1), shared memory
        base: cute.Pointer,
        name: cutlass.Constexpr[str],
        part: Part,
        keys: Keys,
        row: Int32,
        factor: Float32,
        seen: Boolean,
    ):
        """A gradient of this CTA's keys, tensor -> shared -> global memory; 0 if not seen."""
        _, columns = self.tiles.tmem.columns[name]
        first = part.thread // self.tiles.keys * columns
        width = max(w for w in (SLICE, DQ_COLUMNS) if columns % w == 0)
        for c in cutlass.range_constexpr(0, columns, width):
            acc = cute.make_rmem_tensor(width, Float32)
            tmem.load_row(base, self.column(name) + c, acc, part.thread)
            tmem.await_loads()
            for i in cutlass.range_constexpr(width):
                acc[i] = acc[i] * factor if seen else Float32(0.0)
            self.write(self.narrowed(acc), place[part.key, None, 0], first + c)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(**self.graph.numbered("gradient_there", part.half))
        if part.thread // WARP_THREADS == 0:
            shape = cute.size(place, mode=[0]), cute.size(place, mode=[1])
            there = target.tensor[None, None, keys.head, keys.batch]
            tiles = cute.local_tile(there, shape, (None, 0))
            in_smem, in_gmem = tma_tiles(target.atom, place, tiles)
            cute.copy(target.atom, in_smem[None, 0], in_gmem[None, row])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def reduce(self, args: Args, rings, smem: Smem, base: cute.Pointer):
        """The reduce warpgroup, each warp on its own: dQ, tensor -> shared -> global memory."""
        keys, rank = self.keys(args), self.rank_in_pair()
        total, gqa_group = self.visits(args, keys)
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.griddepcontrol_wait()  # for the zeros in dQ
        q_tile, head = keys.start, keys.head * gqa_group
        own, block = total, rank  # tiles whose dQ this CTA adds, and which block of it
        if const_expr(self.tiles.dq_tiles > 1):
            own, block = (total + 1 - rank) // 2, 0
            if rank == 1:
                q_tile, head = keys.after(q_tile, head)
        for number in cutlass.range(own, unroll=1):
            rings.mma_dq.wait(number)
            tmem.after_taking_over()
            dq, place = args.workspace.dq, (0, warp * WARP_THREADS, 0)
            there = cute.domain_offset((place, block, q_tile, head, keys.batch), dq).iterator
            turn = None
            if const_expr(self.facts.deterministic):
                mine = block * WARPGROUP_WARPS + warp, q_tile, head, keys.batch
                counter = cute.domain_offset(mine, args.workspace.turns).iterator
                turn = WarpTurn(counter, self.rank(args, keys, q_tile))
                turn.wait()
            self.add_dq(rings, smem, base, there, number, thread)
            if const_expr(self.facts.deterministic):
                turn.release()
            for _ in range(self.tiles.dq_tiles):
                q_tile, head = keys.after(q_tile, head)
        if lane() == 0:
            cute.arch.cp_async_bulk_wait_group(0)
        tmem.before_handing_over()
        cute.arch.barrier_arrive(**self.graph.numbered("tmem_done"))

    @cute.jit
    def add_dq(
        self,
        rings,
        smem: Smem,
        base: cute.Pointer,
        there: cute.Pointer,
        number: Int32,
        thread: Int32,
    ):
        """A warp's part of dQ of a tile, added to what other K/V tiles gave."""
        columns = self.tiles.dq_tmem_columns
        floats, warp = WARP_THREADS * DQ_COLUMNS, thread // WARP_THREADS
        held = DQ_COLUMNS
        if const_expr(self.tiles.borrow_as_dq == "dp"):  # dP of the next tile waits
            held = min(HELD_COLUMNS, columns)
        for first in cutlass.range_constexpr(0, columns - held + 1, DQ_COLUMNS):
            width = held if const_expr(first + held == columns) else DQ_COLUMNS
            part = cute.make_rmem_tensor(width, Float32)
            tmem.load_row(base, self.dq_column(number) + first, part, thread)
            tmem.await_loads()
            if const_expr(first + width == columns):
                tmem.before_handing_over()
                rings.reduce_dq.commit(number)
            for c in cutlass.range_constexpr(first, first + width, DQ_COLUMNS):
                stage = (number * (columns // DQ_COLUMNS) + c // DQ_COLUMNS) % DQ_STAGES
                if lane() == 0:
                    cute.arch.cp_async_bulk_wait_group(DQ_STAGES - 1, read=True)
                cute.arch.sync_warp()
                quads = cute.make_layout((QUAD, DQ_COLUMNS // QUAD))
                target = smem.dq[None, thread % WARP_THREADS, None, stage, warp]
                cute.autovec_copy(cute.make_tensor(part.iterator + (c - first), quads), target)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if lane() == 0:
                    source = smem.dq[None, None, None, stage, warp].iterator
                    reduce_bulk(there + c // DQ_COLUMNS * floats, source, floats * 4)
                    cute.arch.cp_async_bulk_commit_group()

    def dq_fragment(self, dtype: type[cutlass.Numeric]) -> cute.Tensor:
        """This thread's part of a block of dQ, in the order in which it was added."""
        return cute.make_rmem_tensor(self.tiles.dq_tmem_columns, dtype)

    def write_dq(self, fragment: cute.Tensor, block: cute.Tensor, thread: Int32) -> None:
        """A block of dQ in 16 bits, registers -> shared memory (rows, columns)."""
        rows = self.tiles.dq_rows
        self.write(fragment, block[thread % rows, None], thread // rows * cute.size(fragment))
