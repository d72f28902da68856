"""Backward on Hopper: dK and dV of one K/V tile, and what it adds to dQ.

Data:    K, V once, then Q and dO tile by tile --TMA--> swizzled smem --wgmma--> S and dP in
         registers, transposed: keys are rows --> P = exp2(S - LSE), dS = P (dP - D) in registers
         --wgmma--> dV += P dO and dK += dS Q in registers; dS --stmatrix--> smem --wgmma--> dQ in
         registers --red--> float32 in global memory, in fragment order (see bwd_workspace).
Warps:   warpgroup 0 reduces: dQ is nobody else's business, so that no dK waits for it; between two
         tiles one of its warps issues the loads. The two consumer warpgroups split the K/V tile by
         keys, and P never leaves registers; or, for head dims of which registers do not hold 64
         keys, by columns: then each computes the scores of half of the queries, P and dS go
         through smem, and each has half of the columns of dK and dV.
Memory:  K and V stay; a ring each for Q with its LSE and D, and dO; two tiles of dS (and P), one
         read while the next is written. At the end dK and dV take the place of Q and dO.
Overlap: P and dS are computed 16 queries at a time, and the products of each such slice run under
         the next one, those of the other consumer and dQ of the last tile beside them. Where a
         slice dies, its P and dS in 16 bits take its place: no register more than S and dP need.
Order:   a CTA visits the query heads of its group one after the other, and in each the tiles of Q
         that see its keys, first those that need a mask; the loop over the others has none in it.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from ..layouts.fragments import (
    accumulator,
    as_operand_a,
    offsets,
    origin,
    rows_by_columns,
    write_fragment,
)
from ..layouts.gmem import tma_atom, tma_tiles
from ..layouts.hardware import (
    OCTET,
    QUAD_THREADS,
    WARP_THREADS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    WGMMA_DEPTH,
    WGMMA_ROWS,
)
from ..layouts.opaque import opaque
from ..layouts.smem import allocate, row_major_stages, transposed, view
from ..pipelines.backward_sm90 import backward_graph
from ..pipelines.tile_order import TileOrder
from . import BackwardFacts
from .bwd_main import BwdMain, Keys, load_rows
from .bwd_workspace import DqTurn, Workspace, add_quads
from .online_softmax import LOG2_E
from .tiles import BackwardTiles
from .wgmma import InSmem, in_registers, issue, narrow


@dataclass(frozen=True)
class Args:
    """What crosses from host to device. q to dv are coordinates for their TMA atoms."""

    q: cute.Tensor  # (len_q, head_dim, heads_q, batch)
    k: cute.Tensor  # (len_kv, head_dim, heads_kv, batch)
    v: cute.Tensor  # (len_kv, head_dim_v, heads_kv, batch)
    do: cute.Tensor  # (len_q, head_dim_v, heads_q, batch)
    dk: cute.Tensor  # (len_kv, head_dim, heads_kv, batch)
    dv: cute.Tensor  # (len_kv, head_dim_v, heads_kv, batch)
    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    load_do: cute.CopyAtom
    store_dk: cute.CopyAtom
    store_dv: cute.CopyAtom
    workspace: Workspace
    scale: Float32
    order: TileOrder
    sms: Int32  # that CTAs can run on at the same time


@dataclass(frozen=True)
class Smem:
    """Tensors in shared memory."""

    q: cute.Tensor  # (rows, columns, stages)
    k: cute.Tensor  # (keys, columns, 1)
    v: cute.Tensor  # (keys, columns, 1)
    do: cute.Tensor  # (rows, columns, stages)
    p: cute.Tensor  # (rows, keys, stages); where P stays in registers, the same as ds
    ds: cute.Tensor  # (rows, keys, stages)
    dk: cute.Tensor  # (keys, columns, 1), in the place of q
    dv: cute.Tensor  # (keys, columns, 1), in the place of do
    rows: cute.Tensor  # (LSE and D, rows, stages), float32


@dataclass(frozen=True)
class Share:
    """What one consumer warpgroup computes with, and holds across tiles of Q."""

    mma_s: cute.TiledMma
    mma_slice: cute.TiledMma  # of the shape of a slice of S
    mma_dk: cute.TiledMma
    mma_dv: cute.TiledMma
    tSrK: InSmem  # (mma, m, k)
    tSrQ: InSmem  # (mma, n, k, stage)
    tPrV: InSmem  # (mma, m, k)
    tPrdO: InSmem  # (mma, n, k, stage)
    tVrP: InSmem | None  # (mma, m, k, stage); None: in registers
    tVrdO: InSmem  # (mma, n, k, stage)
    tKrdS: InSmem | None  # (mma, m, k, stage); None: in registers
    tKrQ: InSmem  # (mma, n, k, stage)
    sP: cute.Tensor  # (keys, rows, stages), this warpgroup's part
    sdS: cute.Tensor  # (keys, rows, stages), this warpgroup's part
    rows: cute.Tensor  # (LSE and D, 2, row octets, stages): of the rows that this thread holds
    acc_S: cute.Tensor
    acc_dP: cute.Tensor
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    scale_log2: Float32
    group: Int32  # this warpgroup among the consumers
    thread: Int32  # in the warpgroup


@dataclass(frozen=True)
class Reduction:
    """What the reducing warpgroup computes with: a block of dQ^T = K^T dS^T is 64 columns of dQ."""

    mma: cute.TiledMma
    tQrK: InSmem  # (mma, m, k, columns)
    tQrdS: tuple[InSmem, ...]  # (mma, n, k, stage), for each part of the rows
    thread: Int32  # in the warpgroup


class BwdSm90(BwdMain):
    """The main kernel for one set of compile-time facts and one row of the tile table."""

    def __init__(self, facts: BackwardFacts, tiles: BackwardTiles) -> None:
        super().__init__(facts, tiles)
        self.tiles = tiles
        self.by_keys = tiles.split == "keys"
        groups = tiles.consumer_warpgroups
        of_rows, of_columns = (1, 1) if self.by_keys else (groups, groups)
        self.parts = of_columns  # of the columns of dK and dV, and of the rows of S
        self.shape_q = (tiles.tile_q, tiles.q_columns)
        self.shape_k = (tiles.tile_kv, tiles.dq_columns)
        self.shape_v = (tiles.tile_kv, tiles.v_columns)
        self.shape_do = (tiles.tile_q, tiles.v_columns)
        self.shape_ds = (tiles.tile_q, tiles.tile_kv)
        # Of one warpgroup:
        self.shape_s = (WGMMA_ROWS, tiles.tile_q // of_rows)
        self.shape_slice = (WGMMA_ROWS, WGMMA_DEPTH)
        self.shape_dk = (WGMMA_ROWS, tiles.q_columns // of_columns)
        self.shape_dv = (WGMMA_ROWS, tiles.v_columns // of_columns)
        self.graph = backward_graph(
            consumer_warpgroups=groups,
            stages=tiles.stages,
            ds_stages=tiles.ds_stages,
            k_bytes=tiles.k_bytes,
            v_bytes=tiles.v_bytes,
            q_bytes=tiles.q_bytes,
            do_bytes=tiles.do_bytes,
            registers_load=tiles.registers_load,
            registers_consume=tiles.registers_consume,
        )

    def smem_layouts(self) -> SimpleNamespace:
        """(rows, columns, stages) of each buffer."""
        tiles, dtype = self.tiles, self.dtype
        part_q, part_v = self.shape_dk[1], self.shape_dv[1]
        return SimpleNamespace(
            q=row_major_stages(dtype, self.shape_q, tiles.stages, part=part_q),
            k=row_major_stages(dtype, self.shape_k, 1, part=WGMMA_ROWS),
            v=row_major_stages(dtype, self.shape_v, 1),
            do=row_major_stages(dtype, self.shape_do, tiles.stages, part=part_v),
            ds=row_major_stages(dtype, self.shape_ds, tiles.ds_stages, part=WGMMA_ROWS),
            dk=row_major_stages(dtype, (tiles.tile_kv, tiles.q_columns), 1, part=part_q),
            dv=row_major_stages(dtype, self.shape_v, 1, part=part_v),
        )

    def score_mma(self, shape: tuple[int, int]) -> cute.TiledMma:
        """S = K Q^T and dP = V dO^T of one warpgroup, from shared memory."""
        dtypes, one, k = (self.dtype,) * 2, (1, 1, 1), OperandMajorMode.K
        return make_trivial_tiled_mma(*dtypes, k, k, Float32, one, shape)

    def output_mma(self, shape: tuple[int, int]) -> cute.TiledMma:
        """dK += dS Q or dV += P dO, of one warpgroup."""
        dtypes, one, k, mn = (self.dtype,) * 2, (1, 1, 1), OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        place = (k, source.RMEM) if self.by_keys else (mn, source.SMEM)
        return make_trivial_tiled_mma(*dtypes, place[0], mn, Float32, one, shape, place[1])

    def dq_mma(self) -> cute.TiledMma:
        """A block of dQ^T = K^T dS^T, from shared memory."""
        dtypes, one, k, mn = (self.dtype,) * 2, (1, 1, 1), OperandMajorMode.K, OperandMajorMode.MN
        return make_trivial_tiled_mma(*dtypes, mn, k, Float32, one, self.tiles.dq_block)

    def dq_fragment(self, dtype: type[cutlass.Numeric]) -> cute.Tensor:
        """This thread's part of a block of dQ, in the order in which it was added."""
        return accumulator(self.dq_mma(), self.tiles.dq_block, dtype)

    def write_dq(self, fragment: cute.Tensor, block: cute.Tensor, thread: Int32) -> None:
        """A block of dQ in 16 bits, registers -> shared memory (rows, columns)."""
        target = cute.make_tensor(block.iterator, cute.select(block.layout, mode=[1, 0]))
        write_fragment(self.dq_mma(), fragment, target, thread, True)

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
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_q, tma_q = tma_atom(load, q, layouts.q, self.shape_q)
        load_k, tma_k = tma_atom(load, k, layouts.k, self.shape_k)
        load_v, tma_v = tma_atom(load, v, layouts.v, self.shape_v)
        load_do, tma_do = tma_atom(load, do, layouts.do, self.shape_do)
        store_dk, tma_dk = tma_atom(store, dk, layouts.dk, (self.tiles.tile_kv, self.shape_q[1]))
        store_dv, tma_dv = tma_atom(store, dv, layouts.dv, self.shape_v)
        order = self.order(q, k)
        tensors = tma_q, tma_k, tma_v, tma_do, tma_dk, tma_dv
        atoms = load_q, load_k, load_v, load_do, store_dk, store_dv
        self.kernel(Args(*tensors, *atoms, workspace, scale, order, sms)).launch(
            grid=[order.count, 1, 1],
            block=[self.graph.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: Args):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (args.load_k, args.load_q, args.load_v, args.load_do):
                cpasync.prefetch_descriptor(atom)

        allocator, tiles = SmemAllocator(), self.tiles
        barriers = allocator.allocate_array(cutlass.Int64, self.graph.mbarriers)
        smem = self.smem(allocator)
        edges = self.graph.build(barriers)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        if warp_index < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(tiles.registers_load)
            self.reduce(args, edges, smem)
        else:
            cute.arch.setmaxregister_increase(tiles.registers_consume)
            self.consume(args, edges, smem)

    def smem(self, allocator: SmemAllocator) -> Smem:
        """All of it."""
        tiles, layouts = self.tiles, self.smem_layouts()

        memory = allocator.allocate_array(
            Float32, 2 * tiles.tile_q * tiles.stages, byte_alignment=128
        )
        rows = cute.make_tensor(memory, cute.make_layout((2, tiles.tile_q, tiles.stages)))

        def room(*sharing: cute.ComposedLayout) -> list[cute.Tensor]:
            memory = allocate(allocator, self.dtype, max(cute.cosize(x) for x in sharing))
            return [view(memory, layout) for layout in sharing]

        (sK,), (sV,), (sdS,) = room(layouts.k), room(layouts.v), room(layouts.ds)
        sQ, sdK = room(layouts.q, layouts.dk)
        sdO, sdV = room(layouts.do, layouts.dv)
        (sP,) = (sdS,) if self.by_keys else room(layouts.ds)
        return Smem(sQ, sK, sV, sdO, sP, sdS, sdK, sdV, rows)

    @cute.jit
    def reduce(self, args: Args, edges, smem: Smem):
        """Warpgroup 0: dS, K (smem) -> dQ (global, float32); one warp: TMA, global -> smem."""
        keys = self.keys(args)
        gqa_group = args.q.shape[2] // args.k.shape[2]
        total = (keys.end - keys.begin) * gqa_group  # tiles that this CTA visits
        loads = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        if loads:
            self.load_kv(args, edges, smem, keys)
        cute.arch.griddepcontrol_wait()  # for LSE, D, and the zeros in dQ
        ahead = self.tiles.stages - 1
        next_tile, next_head = keys.start, keys.head * gqa_group
        for number in cutlass.range(cutlass.min(ahead, total), unroll=1):
            if loads:
                self.load_tile(args, edges, smem, keys, number, next_tile, next_head)
            next_tile, next_head = keys.after(next_tile, next_head)
        reduction = self.reduction(smem)
        edges.load_k.make_consumer().wait()
        q_tile, head = keys.start, keys.head * gqa_group
        last_tile, last_head = q_tile, head
        for number in cutlass.range(total, unroll=1):
            if loads and number + ahead < total:
                self.load_tile(args, edges, smem, keys, number + ahead, next_tile, next_head)
            next_tile, next_head = keys.after(next_tile, next_head)
            cute.arch.barrier(**self.graph.numbered("ds_there", number % self.tiles.ds_stages))
            turns = None
            if const_expr(self.facts.deterministic):
                last = self.turn(args, reduction, keys, last_tile, last_head)
                turns = last, self.turn(args, reduction, keys, q_tile, head)
                last_tile, last_head = q_tile, head
            part = None, reduction.thread, None
            place = args.workspace.dq[part, None, q_tile, head, keys.batch]
            self.add_dq(place, reduction, number, total, turns)
            q_tile, head = keys.after(q_tile, head)
        if const_expr(self.facts.deterministic):
            last = self.turn(args, reduction, keys, last_tile, last_head)
            if total > 0:
                last.meet()
                last.release()

    def reduction(self, smem: Smem) -> Reduction:
        """Operands of dQ, the same for every thread."""
        mma, rows, tile_kv = self.dq_mma(), self.tiles.dq_rows, self.tiles.tile_kv
        any_thread = mma.get_slice(0)
        sKt = cute.local_tile(transposed(smem.k), (WGMMA_ROWS, tile_kv), (None, 0, 0))
        tQrK = any_thread.make_fragment_A(any_thread.partition_A(sKt))
        sdS = [
            cute.local_tile(smem.ds, (rows, tile_kv), (r, 0, None))
            for r in range(self.tiles.tile_q // rows)
        ]
        tQrdS = [any_thread.make_fragment_B(any_thread.partition_B(part)) for part in sdS]
        return Reduction(
            mma,
            InSmem.of(tQrK, keep=False),
            tuple(InSmem.of(part, keep=False) for part in tQrdS),
            cute.arch.thread_idx()[0],
        )

    @cute.jit
    def add_dq(
        self,
        place: cute.Tensor,
        reduction: Reduction,
        number: Int32,
        total: Int32,
        turns: tuple[DqTurn, DqTurn] | None,
    ):
        """dQ of a tile, block by block, added at `place` to what other K/V tiles gave.

        In deterministic mode `turns` are those of the last tile and of this one.

        One block at a time: a second one under the first one's sum takes the tensor cores from the
        consumers in bursts, 10 % slower at head_dim 128 (H200).
        """
        stage = number % self.tiles.ds_stages
        blocks, parts = self.tiles.dq_blocks, len(reduction.tQrdS)
        # One for all: with one each, ptxas keeps several, and runs out of registers.
        acc_dQ = accumulator(reduction.mma, self.tiles.dq_block, Float32)
        for block in cutlass.range_constexpr(blocks):
            K = reduction.tQrK.stage(block // parts).steps()
            dS = reduction.tQrdS[block % parts].stage(stage).steps()
            issue(reduction.mma, acc_dQ, K, dS, False)
            if const_expr(self.facts.deterministic and block == 0):
                # Under the product. All have added to the last tile: they met at `ds_there`.
                last, own = turns
                if number > 0:
                    last.release()
                own.wait()
            warpgroup.wait_group(0)
            if const_expr(block == blocks - 1):
                awaited = number + self.tiles.ds_stages < total
                if awaited:
                    cute.arch.barrier_arrive(**self.graph.numbered("ds_free", stage))
            add_quads(acc_dQ, place[None, None, block])

    def turn(
        self, args: Args, reduction: Reduction, keys: Keys, q_tile: Int32, head: Int32
    ) -> DqTurn:
        """When this K/V tile may add to a tile of dQ, in deterministic mode."""
        return DqTurn(
            cute.domain_offset((0, q_tile, head, keys.batch), args.workspace.turns).iterator,
            self.rank(args, keys, q_tile),
            Int32(self.graph.barrier("dq_turn")[0]),
            reduction.thread,
        )

    @cute.jit
    def load_kv(self, args: Args, edges, smem: Smem, keys: Keys):
        """K and V of this CTA."""
        load_k, load_v = edges.load_k.make_producer(), edges.load_v.make_producer()
        kv_tile = keys.first // self.tiles.tile_kv
        gK = cute.local_tile(args.k[None, None, keys.head, keys.batch], self.shape_k, (None, 0))
        gV = cute.local_tile(args.v[None, None, keys.head, keys.batch], self.shape_v, (None, 0))
        tKsK, tKgK = tma_tiles(args.load_k, smem.k, gK)
        tVsV, tVgV = tma_tiles(args.load_v, smem.v, gV)
        stage = load_k.acquire_and_advance()
        cute.copy(args.load_k, tKgK[None, kv_tile], tKsK[None, 0], tma_bar_ptr=stage.barrier)
        stage = load_v.acquire_and_advance()
        cute.copy(args.load_v, tVgV[None, kv_tile], tVsV[None, 0], tma_bar_ptr=stage.barrier)

    @cute.jit
    def load_tile(
        self, args: Args, edges, smem: Smem, keys: Keys, number: Int32, q_tile: Int32, head: Int32
    ):
        """Q and dO of a tile, with its LSE and D."""
        state = self.state(number, producer=True)
        gQ = cute.local_tile(args.q[None, None, head, keys.batch], self.shape_q, (None, 0))
        gdO = cute.local_tile(args.do[None, None, head, keys.batch], self.shape_do, (None, 0))
        for edge, atom, in_smem, tiles in (
            (edges.load_q, args.load_q, smem.q, gQ),
            (edges.load_do, args.load_do, smem.do, gdO),
        ):
            slots, sources = tma_tiles(atom, in_smem, tiles)
            edge.producer_acquire(state)
            barrier = edge.producer_get_barrier(state)
            source, slot = sources[None, q_tile], slots[None, state.index]
            cute.copy(atom, source, slot, tma_bar_ptr=barrier)
        barrier = edges.load_q.producer_get_barrier(state)
        place = smem.rows[None, None, state.index].iterator
        tile_q, batch = self.tiles.tile_q, keys.batch
        load_rows(args.workspace, tile_q, q_tile, head, batch, place, barrier)

    @cute.jit
    def consume(self, args: Args, edges, smem: Smem):
        """A consumer warpgroup: Q, K, V, dO (smem) -> dS (smem), its part of dK, dV (global)."""
        keys = self.keys(args)
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPGROUP_WARPS - 1)
        share = self.share(args, group, smem)
        share.acc_dK.fill(0.0)
        share.acc_dV.fill(0.0)
        gqa_group = args.q.shape[2] // args.k.shape[2]
        edges.load_k.make_consumer().wait()
        edges.load_v.make_consumer().wait()
        number = Int32(0)  # of the tile, in the order of visits
        for _ in cutlass.range(gqa_group, unroll=1):
            for rank in cutlass.range(keys.begin, keys.full, unroll=1):
                self.step(share, keys, edges, number, keys.turned(rank), masked=True)
                number += 1
            for _ in cutlass.range(keys.full, keys.end, unroll=1):
                self.step(share, keys, edges, number, None, masked=False)
                number += 1
        cute.arch.griddepcontrol_launch_dependents()
        warpgroup.wait_group(0)
        self.store(args, share, keys, smem)

    def share(self, args: Args, group: Int32, smem: Smem) -> Share:
        """Fragments and running state of consumer warpgroup `group`."""
        mma_s, mma_slice = self.score_mma(self.shape_s), self.score_mma(self.shape_slice)
        mma_dk, mma_dv = self.output_mma(self.shape_dk), self.output_mma(self.shape_dv)
        # Operands in shared memory are the same for every thread of the warpgroup.
        any_s, any_dk, any_dv = (m.get_slice(0) for m in (mma_s, mma_dk, mma_dv))
        # In a register: left to the compiler it is read anew for every tile, which takes long.
        thread = opaque(cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
        own_keys, own_part = (group, 0) if self.by_keys else (0, group)

        def part(tensor: cute.Tensor, shape: tuple[int, int], row, column) -> cute.Tensor:
            """(rows, columns, stages) of one part."""
            return cute.local_tile(tensor, shape, (row, column, None))

        def operand_a(mma, tensor: cute.Tensor) -> InSmem:
            return InSmem.of(mma.make_fragment_A(mma.partition_A(tensor)), self.by_keys)

        def operand_b(mma, tensor: cute.Tensor) -> InSmem:
            return InSmem.of(mma.make_fragment_B(mma.partition_B(tensor)), self.by_keys)

        def own_rows(rows: cute.Tensor) -> cute.Tensor:
            """Of every eight rows, the two that this thread has scores of."""
            octets = self.shape_s[1] // OCTET
            layout = cute.make_layout(
                (2, 2, QUAD_THREADS, octets, self.parts, self.tiles.stages),
                stride=(1, 2, 4, 2 * OCTET, 2 * OCTET * octets, 2 * self.tiles.tile_q),
            )
            apart = cute.make_tensor(rows.iterator, layout)
            return apart[None, None, thread % QUAD_THREADS, None, own_part, None]

        rows_s, tile_q = self.shape_s[1], self.tiles.tile_q
        sK = part(smem.k, (WGMMA_ROWS, self.shape_k[1]), own_keys, 0)
        sV = part(smem.v, (WGMMA_ROWS, self.shape_v[1]), own_keys, 0)
        sQ = part(smem.q, (rows_s, self.shape_q[1]), own_part, 0)
        sdO = part(smem.do, (rows_s, self.shape_do[1]), own_part, 0)
        sQt = part(transposed(smem.q), (self.shape_dk[1], tile_q), own_part, 0)
        sdOt = part(transposed(smem.do), (self.shape_dv[1], tile_q), own_part, 0)
        return Share(
            mma_s=mma_s,
            mma_dk=mma_dk,
            mma_dv=mma_dv,
            mma_slice=mma_slice,
            tSrK=operand_a(any_s, sK).stage(0),
            tSrQ=operand_b(any_s, sQ),
            tPrV=operand_a(any_s, sV).stage(0),
            tPrdO=operand_b(any_s, sdO),
            tVrP=None if self.by_keys else operand_a(any_dv, transposed(smem.p)),
            tVrdO=operand_b(any_dv, sdOt),
            tKrdS=None if self.by_keys else operand_a(any_dk, transposed(smem.ds)),
            tKrQ=operand_b(any_dk, sQt),
            sP=part(transposed(smem.p), self.shape_s, own_keys, own_part),
            sdS=part(transposed(smem.ds), self.shape_s, own_keys, own_part),
            rows=own_rows(smem.rows),
            acc_S=accumulator(mma_s, self.shape_s, Float32),
            acc_dP=accumulator(mma_s, self.shape_s, Float32),
            acc_dK=accumulator(mma_dk, self.shape_dk, Float32),
            acc_dV=accumulator(mma_dv, self.shape_dv, Float32),
            scale_log2=args.scale * LOG2_E,
            group=Int32(group),
            thread=thread,
        )

    def state(self, number: Int32, producer: bool = False) -> pipeline.PipelineState:
        """Stage and phase of a tile, in the rings of Q and dO alike: one register for all."""
        stages = self.tiles.stages
        index, phase = number % stages, (number // stages + int(producer)) % 2
        return pipeline.PipelineState(stages, number, index, phase)

    @cute.jit
    def step(
        self,
        share: Share,
        keys: Keys,
        edges,
        number: Int32,
        q_tile: Int32 | None,  # needed for the mask alone
        masked: cutlass.Constexpr,
    ):
        """One tile of Q."""
        state, turn = self.state(number), number % self.tiles.ds_stages
        edges.load_q.consumer_wait(state)
        rows = self.rows(share, state.index, 0)
        Q = share.tSrQ.stage(state.index).steps()
        # K may have more columns than Q, of zeros.
        issue(share.mma_s, share.acc_S, share.tSrK.steps()[: len(Q)], Q, False)
        edges.load_do.consumer_wait(state)
        dO = share.tPrdO.stage(state.index).steps()
        issue(share.mma_s, share.acc_dP, share.tPrV.steps(), dO, False)
        warpgroup.wait_group(0)
        if const_expr(not self.by_keys):
            before = number - 1  # its products are over, too
            if number > 0:
                self.release(edges, before)
        if number >= self.tiles.ds_stages:
            cute.arch.barrier(**self.graph.numbered("ds_free", turn))
        Q, dO = share.tKrQ.stage(state.index).steps(), share.tVrdO.stage(state.index).steps()
        slices = self.shape_s[1] // WGMMA_DEPTH
        for i in cutlass.range_constexpr(slices):
            # A slice early: behind products in flight a load takes long (20 % at head_dim 64).
            following = self.rows(share, state.index, i + 1) if const_expr(i + 1 < slices) else rows
            P, dS = self.slice(share.acc_S, i), self.slice(share.acc_dP, i)
            self.exponentials(share, P, rows)
            if const_expr(masked):
                self.apply_mask(share, keys, P, q_tile, i)
            self.gradients(P, dS, rows)
            if const_expr(masked):
                self.apply_mask(share, keys, dS, q_tile, i)
            rdS, rP = self.narrowed(dS), self.narrowed(P)
            self.write(share, rdS, share.sdS[None, None, turn], i)
            if const_expr(self.by_keys):
                issue(share.mma_dv, share.acc_dV, in_registers(as_operand_a(rP)), [dO[i]], True)
                issue(share.mma_dk, share.acc_dK, in_registers(as_operand_a(rdS)), [Q[i]], True)
            else:
                self.write(share, rP, share.sP[None, None, turn], i)
            rows = following
        cute.arch.fence_view_async_shared()  # products will read what was written here
        cute.arch.barrier_arrive(**self.graph.numbered("ds_there", turn))
        if const_expr(self.by_keys):
            # Operands in registers: products that read them do not go on into the next tile.
            warpgroup.wait_group(0)
            self.release(edges, number)
        else:
            cute.arch.barrier(**self.graph.numbered("p_there"))
            issue(share.mma_dv, share.acc_dV, share.tVrP.stage(turn).steps(), dO, True)
            issue(share.mma_dk, share.acc_dK, share.tKrdS.stage(turn).steps(), Q, True)

    def release(self, edges, number: Int32) -> None:
        """Nobody in this warpgroup reads Q and dO of the tile any more."""
        edges.load_q.consumer_release(self.state(number))
        edges.load_do.consumer_release(self.state(number))

    def slice(self, acc: cute.Tensor, i: int) -> cute.Tensor:
        """The accumulator of 16 queries."""
        layout = cute.make_layout(((2, 2, 2), 1, 1), stride=((1, 2, 4), 0, 0))
        return cute.make_tensor(acc.iterator + i * cute.size(layout), layout)

    def narrowed(self, acc: cute.Tensor) -> cute.Tensor:
        """In 16 bits."""
        result = cute.make_rmem_tensor(acc.layout, self.dtype)
        narrow(acc, result)
        return result

    def write(self, share: Share, fragment: cute.Tensor, place: cute.Tensor, i: int) -> None:
        """A slice to shared memory."""
        part = cute.local_tile(place, self.shape_slice, (0, i))
        write_fragment(share.mma_slice, fragment, part, share.thread, True)

    def meet(self, name: str) -> None:
        """Both warpgroups wrote to shared memory what products or TMA read after this."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(**self.graph.numbered(name))

    def rows(self, share: Share, stage: Int32, i: int) -> cute.Tensor:
        """LSE and D of a slice: (LSE and D, 2, row octets)."""
        octets = WGMMA_DEPTH // OCTET
        part = cute.local_tile(share.rows[None, None, None, stage], (2, 2, octets), (0, 0, i))
        rows = cute.make_rmem_tensor_like(part)
        cute.autovec_copy(part, rows)
        return rows

    @cute.jit
    def exponentials(self, share: Share, acc: cute.Tensor, rows: cute.Tensor):
        """P = exp2(S - LSE) of a slice, in the place of S."""
        scores, lse_log2 = rows_by_columns(acc), cute.group_modes(rows, 1, 3)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                power = cute.math.fma(scores[r, c], share.scale_log2, -lse_log2[0, c])
                scores[r, c] = cute.math.exp2(power, fastmath=True)

    @cute.jit
    def gradients(self, P: cute.Tensor, acc: cute.Tensor, rows: cute.Tensor):
        """dS = P (dP - D) of a slice, in the place of dP."""
        P, dP, rowsum = rows_by_columns(P), rows_by_columns(acc), cute.group_modes(rows, 1, 3)
        for c in cutlass.range_constexpr(cute.size(dP, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(dP, mode=[0])):
                dP[r, c] = P[r, c] * (dP[r, c] - rowsum[1, c])

    @cute.jit
    def apply_mask(
        self, share: Share, keys: Keys, acc: cute.Tensor, q_tile: Int32, i: cutlass.Constexpr
    ):
        """0 for the elements of P or dS whose score does not exist: also where dP is NaN."""
        own_key, own_row = origin(share.mma_slice, self.shape_slice, share.thread)
        key = own_key + (share.group * WGMMA_ROWS if const_expr(self.by_keys) else 0)
        row = own_row + (0 if const_expr(self.by_keys) else share.group * self.shape_s[1])
        keys.mask.apply_transposed(
            rows_by_columns(acc),
            offsets(share.mma_slice, self.shape_slice),
            keys.first + key,
            q_tile * self.tiles.tile_q + i * WGMMA_DEPTH + row,
        )

    @cute.jit
    def store(self, args: Args, share: Share, keys: Keys, smem: Smem):
        """dK and dV, through the places of Q and dO."""
        share.acc_dK.store(share.acc_dK.load() * args.scale)
        own_keys, own_part = (share.group, 0) if self.by_keys else (0, share.group)
        self.meet("place_free")
        for acc, mma, shape, place in (
            (share.acc_dK, share.mma_dk, self.shape_dk, smem.dk),
            (share.acc_dV, share.mma_dv, self.shape_dv, smem.dv),
        ):
            narrowed = cute.make_rmem_tensor_like(acc, self.dtype)
            narrow(acc, narrowed)
            part = cute.local_tile(place, shape, (own_keys, own_part, 0))
            write_fragment(mma, narrowed, part, share.thread)
        self.meet("place_full")
        thread, _, _ = cute.arch.thread_idx()
        if thread // WARP_THREADS == WARPGROUP_WARPS:  # the first warp of the consumers
            kv_tile = keys.first // self.tiles.tile_kv
            for atom, tensor, place in (
                (args.store_dk, args.dk, smem.dk),
                (args.store_dv, args.dv, smem.dv),
            ):
                shape = cute.size(place, mode=[0]), cute.size(place, mode=[1])
                rows = cute.local_tile(tensor[None, None, keys.head, keys.batch], shape, (None, 0))
                in_smem, in_gmem = tma_tiles(atom, place, rows)
                cute.copy(atom, in_smem[None, 0], in_gmem[None, kv_tile])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
