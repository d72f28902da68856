"""Backward on Hopper: dK and dV of one K/V tile, and what it adds to dQ.

Data:    K, V once, then Q and dO tile by tile --TMA--> swizzled smem --wgmma--> S and dP in
         registers, transposed: keys are rows --> P = exp2(S - LSE), dS = P (dP - D) in registers
         --wgmma--> dV += P dO and dK += dS Q in registers; dS --stmatrix--> smem --wgmma--> dQ in
         registers --red--> float32 in global memory, in fragment order (see bwd_workspace).
Warps:   warpgroup 0 gives its registers away, and one warp of it issues every load. The two
         consumer warpgroups split the K/V tile by keys, and P never leaves registers; or, for head
         dims of which registers do not hold 64 keys, by columns: then each computes the scores of
         half of the queries, P and dS go through smem, and each has half of the columns of dK, dV.
Memory:  K and V stay; a ring each for Q with its LSE, and dO with its D; two tiles of dS (and P),
         one read while the next is written. At the end dK and dV take the place of K and V.
Overlap: the exponentials run under dP, dS is computed under dV and handed over under dK, and dQ is
         added to global memory under S of the next tile, whose dP is issued before the step ends
         (after FlashAttention-3, appendix B.1). Where operands die decides the order: dK comes
         before dQ, so that S of the next tile finds the place of P and dS free, and dP that of dQ.
Order:   a CTA visits the query heads of its group one after the other, and in each the tiles of Q
         that see its keys, first those that need a mask; the loop over the others has none in it.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
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
    L2_BYTES,
    OCTET,
    QUAD_THREADS,
    WARP_THREADS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    WGMMA_ROWS,
)
from ..layouts.smem import allocate, row_major_stages, transposed, view
from ..pipelines.backward_sm90 import backward_graph
from ..pipelines.tile_order import TileOrder
from . import BackwardFacts
from .bwd_workspace import DqTurn, Workspace, add_quads
from .mask import Mask
from .online_softmax import LOG2_E
from .tiles import ELEMENT_BYTES, BackwardTiles
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


@dataclass(frozen=True)
class Smem:
    """Tensors in shared memory."""

    q: cute.Tensor  # (rows, columns, stages)
    k: cute.Tensor  # (keys, columns, 1)
    v: cute.Tensor  # (keys, columns, 1)
    do: cute.Tensor  # (rows, columns, stages)
    p: cute.Tensor  # (rows, keys, stages); where P stays in registers, the same as ds
    ds: cute.Tensor  # (rows, keys, stages)
    dk: cute.Tensor  # (keys, columns, 1), the place of k
    dv: cute.Tensor  # (keys, columns, 1), the place of v
    lse_log2: cute.Tensor  # (rows, stages), float32
    rowsum: cute.Tensor  # (rows, stages), float32


@dataclass(frozen=True)
class Share:
    """What one consumer warpgroup computes with, and holds across tiles of Q."""

    mma_s: cute.TiledMma
    mma_dk: cute.TiledMma
    mma_dv: cute.TiledMma
    mma_dq: cute.TiledMma
    tSrK: InSmem  # (mma, m, k)
    tSrQ: InSmem  # (mma, n, k, stage)
    tPrV: InSmem  # (mma, m, k)
    tPrdO: InSmem  # (mma, n, k, stage)
    tVrP: InSmem | None  # (mma, m, k, stage); None: in registers
    tVrdO: InSmem  # (mma, n, k, stage)
    tKrdS: InSmem | None  # (mma, m, k, stage); None: in registers
    tKrQ: InSmem  # (mma, n, k, stage)
    tQrdS: InSmem  # (mma, m, k, stage)
    tQrK: InSmem  # (mma, n, k)
    sP: cute.Tensor  # (keys, rows, stages), this warpgroup's part
    sdS: cute.Tensor  # (keys, rows, stages), this warpgroup's part
    lse_log2: cute.Tensor  # (2, row octets, stages): of the rows that this thread holds
    rowsum: cute.Tensor  # (2, row octets, stages)
    acc_S: cute.Tensor  # then P
    acc_dP: cute.Tensor  # then dS
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    scale_log2: Float32
    group: Int32  # this warpgroup among the consumers
    thread: Int32  # in the warpgroup


@dataclass(frozen=True)
class Keys:
    """The K/V tile that a CTA is at."""

    first: Int32  # in its sequence
    head: Int32  # of K and V
    batch: Int32
    mask: Mask


class BwdSm90:
    """The main kernel for one set of compile-time facts and one row of the tile table."""

    def __init__(self, facts: BackwardFacts, tiles: BackwardTiles) -> None:
        self.facts = facts
        self.tiles = tiles
        self.dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[facts.dtype]
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
        self.shape_dk = (WGMMA_ROWS, tiles.q_columns // of_columns)
        self.shape_dv = (WGMMA_ROWS, tiles.v_columns // of_columns)
        self.shape_dq = (WGMMA_ROWS, tiles.dq_columns // groups)
        self.graph = backward_graph(
            consumer_warpgroups=groups,
            stages=tiles.stages,
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
            k=row_major_stages(dtype, self.shape_k, 1, part=self.shape_dq[1]),
            v=row_major_stages(dtype, self.shape_v, 1),
            do=row_major_stages(dtype, self.shape_do, tiles.stages, part=part_v),
            ds=row_major_stages(dtype, self.shape_ds, tiles.stages, part=WGMMA_ROWS),
            dk=row_major_stages(dtype, (tiles.tile_kv, tiles.q_columns), 1, part=part_q),
            dv=row_major_stages(dtype, self.shape_v, 1, part=part_v),
        )

    def score_mma(self) -> cute.TiledMma:
        """S = K Q^T and dP = V dO^T of one warpgroup, from shared memory."""
        dtypes, one, k = (self.dtype,) * 2, (1, 1, 1), OperandMajorMode.K
        return make_trivial_tiled_mma(*dtypes, k, k, Float32, one, self.shape_s)

    def output_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """dK += dS Q, dV += P dO, and dQ = dS K, of one warpgroup."""
        dtypes, one, k, mn = (self.dtype,) * 2, (1, 1, 1), OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        place = (k, source.RMEM) if self.by_keys else (mn, source.SMEM)

        def of_keys(shape: tuple[int, int]) -> cute.TiledMma:
            return make_trivial_tiled_mma(*dtypes, place[0], mn, Float32, one, shape, place[1])

        return (
            of_keys(self.shape_dk),
            of_keys(self.shape_dv),
            make_trivial_tiled_mma(*dtypes, k, mn, Float32, one, self.shape_dq),
        )

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
        batch, len_kv, heads_kv, _ = k.shape
        order = TileOrder(
            tiles=cute.ceil_div(len_kv, self.tiles.tile_kv),
            heads=heads_kv,
            batch=batch,
            section=self.sequences_in_l2(q, k),
            longest="first" if self.facts.causal else None,
        )
        tensors = tma_q, tma_k, tma_v, tma_do, tma_dk, tma_dv
        atoms = load_q, load_k, load_v, load_do, store_dk, store_dv
        self.kernel(Args(*tensors, *atoms, workspace, scale, order)).launch(
            grid=[order.count, 1, 1],
            block=[self.graph.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def sequences_in_l2(self, q: cute.Tensor, k: cute.Tensor) -> Int32:
        """Heads of K, over all batches, whose Q, dO and dQ fit the L2 cache; at least one."""
        columns = self.facts.head_dim + self.facts.head_dim_v
        row_bytes = columns * ELEMENT_BYTES + 4 * self.tiles.dq_columns
        batch, len_q, heads_q, _ = q.shape
        heads_kv = k.shape[2]
        sequences = cutlass.max(Int32(L2_BYTES // row_bytes) // len_q, 1)
        fit = cutlass.max(sequences // (heads_q // heads_kv), 1)
        return cutlass.min(fit, batch * heads_kv)

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
            if warp_index == 0:
                self.load(args, edges, smem)
        else:
            cute.arch.setmaxregister_increase(tiles.registers_consume)
            self.consume(args, edges, smem)

    def smem(self, allocator: SmemAllocator) -> Smem:
        """All of it."""
        tiles, layouts = self.tiles, self.smem_layouts()

        def rows(stages: int) -> cute.Tensor:
            memory = allocator.allocate_array(Float32, tiles.tile_q * stages, byte_alignment=128)
            return cute.make_tensor(memory, cute.make_layout((tiles.tile_q, stages)))

        def room(*sharing: cute.ComposedLayout) -> list[cute.Tensor]:
            memory = allocate(allocator, self.dtype, max(cute.cosize(x) for x in sharing))
            return [view(memory, layout) for layout in sharing]

        lse_log2, rowsum = rows(tiles.stages), rows(tiles.stages)
        sK, sdK = room(layouts.k, layouts.dk)
        sV, sdV = room(layouts.v, layouts.dv)
        (sQ,), (sdO,), (sdS,) = room(layouts.q), room(layouts.do), room(layouts.ds)
        (sP,) = (sdS,) if self.by_keys else room(layouts.ds)
        return Smem(sQ, sK, sV, sdO, sP, sdS, sdK, sdV, lse_log2, rowsum)

    @cute.jit
    def keys(self, args: Args) -> Keys:
        """The tile of this CTA. Under a causal mask the first one sees most queries."""
        number, _, _ = cute.arch.block_idx()
        tile, head, batch = args.order.locate(number)
        right = Int32(0) if const_expr(self.facts.causal) else None
        mask = Mask(args.q.shape[0], args.k.shape[0], right)
        return Keys(tile * self.tiles.tile_kv, head, batch, mask)

    @cute.jit
    def load(self, args: Args, edges, smem: Smem):
        """The producer warp: K and V, then Q and dO of each tile."""
        keys = self.keys(args)
        load_k, load_v, load_q, load_do = (
            edge.make_producer()
            for edge in (edges.load_k, edges.load_v, edges.load_q, edges.load_do)
        )
        kv_tile = keys.first // self.tiles.tile_kv
        gK = cute.local_tile(args.k[None, None, keys.head, keys.batch], self.shape_k, (None, 0))
        gV = cute.local_tile(args.v[None, None, keys.head, keys.batch], self.shape_v, (None, 0))
        tKsK, tKgK = tma_tiles(args.load_k, smem.k, gK)
        tVsV, tVgV = tma_tiles(args.load_v, smem.v, gV)
        stage = load_k.acquire_and_advance()
        cute.copy(args.load_k, tKgK[None, kv_tile], tKsK[None, 0], tma_bar_ptr=stage.barrier)
        stage = load_v.acquire_and_advance()
        cute.copy(args.load_v, tVgV[None, kv_tile], tVsV[None, 0], tma_bar_ptr=stage.barrier)

        begin, _, end = keys.mask.q_tiles(keys.first, self.tiles.tile_kv, self.tiles.tile_q)
        gqa_group = args.q.shape[2] // args.k.shape[2]
        cute.arch.griddepcontrol_wait()  # for LSE, D, and the zeros in dQ
        for member in cutlass.range(gqa_group, unroll=1):
            head = keys.head * gqa_group + member
            gQ = cute.local_tile(args.q[None, None, head, keys.batch], self.shape_q, (None, 0))
            gdO = cute.local_tile(args.do[None, None, head, keys.batch], self.shape_do, (None, 0))
            tQsQ, tQgQ = tma_tiles(args.load_q, smem.q, gQ)
            tOsO, tOgO = tma_tiles(args.load_do, smem.do, gdO)
            lse_log2 = args.workspace.lse_log2[None, head, keys.batch]
            rowsum = args.workspace.rowsum[None, head, keys.batch]
            for q_tile in cutlass.range(begin, end, unroll=1):
                stage = load_q.acquire_and_advance()
                rows, slot = tQgQ[None, q_tile], tQsQ[None, stage.index]
                cute.copy(args.load_q, rows, slot, tma_bar_ptr=stage.barrier)
                self.load_rows(lse_log2, q_tile, smem.lse_log2, stage)
                stage = load_do.acquire_and_advance()
                rows, slot = tOgO[None, q_tile], tOsO[None, stage.index]
                cute.copy(args.load_do, rows, slot, tma_bar_ptr=stage.barrier)
                self.load_rows(rowsum, q_tile, smem.rowsum, stage)

    @cute.jit
    def load_rows(self, source: cute.Tensor, q_tile: Int32, target: cute.Tensor, stage):
        """One float32 for each row of a tile of Q."""
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        rows = cute.local_tile(source, (self.tiles.tile_q,), (q_tile,))
        with cute.arch.elect_one():
            cute.copy(atom, rows, target[None, stage.index], mbar_ptr=stage.barrier)

    @cute.jit
    def consume(self, args: Args, edges, smem: Smem):
        """A consumer warpgroup: its part of dK and dV, and of each dQ."""
        keys = self.keys(args)
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPGROUP_WARPS - 1)
        share = self.share(args, group, smem)
        share.acc_dK.fill(0.0)
        share.acc_dV.fill(0.0)
        begin, full, end = keys.mask.q_tiles(keys.first, self.tiles.tile_kv, self.tiles.tile_q)
        gqa_group = args.q.shape[2] // args.k.shape[2]
        total = (end - begin) * gqa_group  # tiles that this CTA visits
        edges.load_k.make_consumer().wait()
        self.issue_s(share, edges, Int32(0), total == 0)
        edges.load_v.make_consumer().wait()
        self.issue_dp(share, edges, Int32(0), total == 0)
        warpgroup.wait_group(1)  # S is there
        number = Int32(0)  # of the tile, in the order of visits
        for member in cutlass.range(gqa_group, unroll=1):
            head = keys.head * gqa_group + member
            for q_tile in cutlass.range(begin, full, unroll=1):
                self.step(args, share, keys, edges, number, total, q_tile, head, masked=True)
                number += 1
            for q_tile in cutlass.range(full, end, unroll=1):
                self.step(args, share, keys, edges, number, total, q_tile, head, masked=False)
                number += 1
        cute.arch.griddepcontrol_launch_dependents()
        self.store(args, share, keys, smem)

    def share(self, args: Args, group: Int32, smem: Smem) -> Share:
        """Fragments and running state of consumer warpgroup `group`."""
        mma_s = self.score_mma()
        mma_dk, mma_dv, mma_dq = self.output_mmas()
        # Operands in shared memory are the same for every thread of the warpgroup.
        any_s, any_dk, any_dv, any_dq = (m.get_slice(0) for m in (mma_s, mma_dk, mma_dv, mma_dq))
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        own_keys, own_part = (group, 0) if self.by_keys else (0, group)

        def part(tensor: cute.Tensor, shape: tuple[int, int], row, column) -> cute.Tensor:
            """(rows, columns, stages) of one part."""
            return cute.local_tile(tensor, shape, (row, column, None))

        def operand_a(mma, tensor: cute.Tensor) -> InSmem:
            return InSmem.of(mma.make_fragment_A(mma.partition_A(tensor)), self.by_keys)

        def operand_b(mma, tensor: cute.Tensor) -> InSmem:
            return InSmem.of(mma.make_fragment_B(mma.partition_B(tensor)), self.by_keys)

        def own_rows(rows: cute.Tensor) -> cute.Tensor:
            """(2, octets, stages): of every eight rows, the two that this thread has scores of."""
            octets = self.shape_s[1] // OCTET
            layout = cute.make_layout(
                (2, QUAD_THREADS, octets, self.parts, cute.size(rows, mode=[1])),
                stride=(1, 2, OCTET, OCTET * octets, self.tiles.tile_q),
            )
            apart = cute.make_tensor(rows.iterator, layout)
            return apart[None, thread % QUAD_THREADS, None, own_part, None]

        rows_s, tile_q = self.shape_s[1], self.tiles.tile_q
        sK = part(smem.k, (WGMMA_ROWS, self.shape_k[1]), own_keys, 0)
        sV = part(smem.v, (WGMMA_ROWS, self.shape_v[1]), own_keys, 0)
        sQ = part(smem.q, (rows_s, self.shape_q[1]), own_part, 0)
        sdO = part(smem.do, (rows_s, self.shape_do[1]), own_part, 0)
        sQt = part(transposed(smem.q), (self.shape_dk[1], tile_q), own_part, 0)
        sdOt = part(transposed(smem.do), (self.shape_dv[1], tile_q), own_part, 0)
        sKt = part(transposed(smem.k), (self.shape_dq[1], self.tiles.tile_kv), group, 0)
        return Share(
            mma_s=mma_s,
            mma_dk=mma_dk,
            mma_dv=mma_dv,
            mma_dq=mma_dq,
            tSrK=operand_a(any_s, sK).stage(0),
            tSrQ=operand_b(any_s, sQ),
            tPrV=operand_a(any_s, sV).stage(0),
            tPrdO=operand_b(any_s, sdO),
            tVrP=None if self.by_keys else operand_a(any_dv, transposed(smem.p)),
            tVrdO=operand_b(any_dv, sdOt),
            tKrdS=None if self.by_keys else operand_a(any_dk, transposed(smem.ds)),
            tKrQ=operand_b(any_dk, sQt),
            tQrdS=operand_a(any_dq, smem.ds),
            tQrK=operand_b(any_dq, sKt).stage(0),
            sP=part(transposed(smem.p), self.shape_s, own_keys, own_part),
            sdS=part(transposed(smem.ds), self.shape_s, own_keys, own_part),
            lse_log2=own_rows(smem.lse_log2),
            rowsum=own_rows(smem.rowsum),
            acc_S=accumulator(mma_s, self.shape_s, Float32),
            acc_dP=accumulator(mma_s, self.shape_s, Float32),
            acc_dK=accumulator(mma_dk, self.shape_dk, Float32),
            acc_dV=accumulator(mma_dv, self.shape_dv, Float32),
            scale_log2=args.scale * LOG2_E,
            group=Int32(group),
            thread=thread,
        )

    def issue_s(self, share: Share, edges, number: Int32, absent: Boolean) -> None:
        """S of a tile; there is nothing to wait for if it is `absent`."""
        state = self.state(number)
        edges.load_q.consumer_wait(state, absent)
        Q = share.tSrQ.stage(state.index).steps()
        # K may have more columns than Q, of zeros.
        issue(share.mma_s, share.acc_S, share.tSrK.steps()[: len(Q)], Q, False)

    def issue_dp(self, share: Share, edges, number: Int32, absent: Boolean) -> None:
        """dP of a tile, likewise."""
        state = self.state(number)
        edges.load_do.consumer_wait(state, absent)
        dO = share.tPrdO.stage(state.index).steps()
        issue(share.mma_s, share.acc_dP, share.tPrV.steps(), dO, False)

    def state(self, number: Int32) -> pipeline.PipelineState:
        """Stage and phase of a tile, in the rings of Q and dO alike: one register for all."""
        stages = self.tiles.stages  # two: a power of two, at least
        index, phase = number & (stages - 1), (number // stages) & 1
        return pipeline.PipelineState(stages, number, index, phase)

    @cute.jit
    def step(
        self,
        args: Args,
        share: Share,
        keys: Keys,
        edges,
        number: Int32,
        total: Int32,
        q_tile: Int32,
        head: Int32,
        masked: cutlass.Constexpr,
    ):
        """One tile of Q: its S is there, and its dP under way."""
        state = self.state(number)
        self.exponentials(share, state.index)
        if const_expr(masked):
            self.apply_mask(share, keys, share.acc_S, q_tile)
        rP = cute.make_rmem_tensor_like(share.acc_S, self.dtype)
        narrow(share.acc_S, rP)
        if const_expr(not self.by_keys):
            write_fragment(share.mma_s, rP, share.sP[None, None, state.index], share.thread, True)
            self.meet("p_there")
        P = self.operand(rP, share.tVrP, state.index)
        warpgroup.wait_group(0)  # dP is there
        issue(share.mma_dv, share.acc_dV, P, share.tVrdO.stage(state.index).steps(), True)
        self.gradients(share, state.index)
        if const_expr(masked):
            self.apply_mask(share, keys, share.acc_dP, q_tile)
        rdS = cute.make_rmem_tensor_like(share.acc_dP, self.dtype)
        narrow(share.acc_dP, rdS)
        write_fragment(share.mma_s, rdS, share.sdS[None, None, state.index], share.thread, True)
        dS, Q = self.operand(rdS, share.tKrdS, state.index), share.tKrQ.stage(state.index).steps()
        if const_expr(self.by_keys):
            issue(share.mma_dk, share.acc_dK, dS, Q, True)
            self.meet("ds_there")
        else:
            self.meet("ds_there")
            issue(share.mma_dk, share.acc_dK, dS, Q, True)
        acc_dQ = accumulator(share.mma_dq, self.shape_dq, Float32)
        in_smem = share.tQrdS.stage(state.index).steps()
        issue(share.mma_dq, acc_dQ, in_smem, share.tQrK.steps(), False)
        warpgroup.wait_group(2)  # dV is there
        edges.load_do.consumer_release(state)
        warpgroup.wait_group(1)  # dK is there
        edges.load_q.consumer_release(state)
        # After the last tile the same again, for nobody: products in flight and a branch that only
        # some tiles take do not go together.
        following = cutlass.min(number + 1, total - 1)
        self.issue_s(share, edges, following, following == number)
        warpgroup.wait_group(1)  # dQ is there
        self.add_dq(args, share, keys, acc_dQ, q_tile, head)
        self.issue_dp(share, edges, following, following == number)
        warpgroup.wait_group(1)  # S of the next tile is there

    @cute.jit
    def add_dq(
        self, args: Args, share: Share, keys: Keys, acc_dQ: cute.Tensor, q_tile: Int32, head: Int32
    ):
        """Add this warpgroup's part of a dQ to what other K/V tiles gave."""
        place = args.workspace.dq[(None, share.thread, None), share.group, q_tile, head, keys.batch]
        if const_expr(self.facts.deterministic):
            counter = cute.domain_offset(
                (share.group, q_tile, head, keys.batch), args.workspace.turns
            ).iterator
            first, _ = self.graph.barrier("dq_turn")
            rank = keys.first // self.tiles.tile_kv
            turn = DqTurn(counter, rank, first + share.group, share.thread)
            turn.wait()
            add_quads(acc_dQ, place)
            turn.release()
        else:
            add_quads(acc_dQ, place)

    def operand(self, fragment: cute.Tensor, in_smem: InSmem | None, turn: Int32) -> list:
        """The steps of P or dS as an operand A: where this warpgroup has it all, its registers."""
        if in_smem is None:
            return in_registers(as_operand_a(fragment))
        return in_smem.stage(turn).steps()

    def meet(self, name: str) -> None:
        """Both warpgroups wrote to shared memory what products or TMA read after this."""
        number, threads = self.graph.barrier(name)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=number, number_of_threads=threads)

    @cute.jit
    def exponentials(self, share: Share, stage: Int32):
        """P = exp2(S - LSE), in the place of S."""
        lse_log2 = cute.make_rmem_tensor_like(share.lse_log2[None, None, 0])
        cute.autovec_copy(share.lse_log2[None, None, stage], lse_log2)
        scores = rows_by_columns(share.acc_S)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                power = cute.math.fma(scores[r, c], share.scale_log2, -lse_log2[c])
                scores[r, c] = cute.math.exp2(power, fastmath=True)

    @cute.jit
    def gradients(self, share: Share, stage: Int32):
        """dS = P (dP - D), in the place of dP."""
        rowsum = cute.make_rmem_tensor_like(share.rowsum[None, None, 0])
        cute.autovec_copy(share.rowsum[None, None, stage], rowsum)
        P, dP = rows_by_columns(share.acc_S), rows_by_columns(share.acc_dP)
        for c in cutlass.range_constexpr(cute.size(dP, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(dP, mode=[0])):
                dP[r, c] = P[r, c] * (dP[r, c] - rowsum[c])

    @cute.jit
    def apply_mask(self, share: Share, keys: Keys, acc: cute.Tensor, q_tile: Int32):
        """0 for the elements of P or dS whose score does not exist: also where dP is NaN."""
        own_key, own_row = origin(share.mma_s, self.shape_s, share.thread)
        key = own_key + (share.group * WGMMA_ROWS if const_expr(self.by_keys) else 0)
        row = own_row + (0 if const_expr(self.by_keys) else share.group * self.shape_s[1])
        keys.mask.apply_transposed(
            rows_by_columns(acc),
            offsets(share.mma_s, self.shape_s),
            keys.first + key,
            q_tile * self.tiles.tile_q + row,
        )

    @cute.jit
    def store(self, args: Args, share: Share, keys: Keys, smem: Smem):
        """dK and dV, through the places of K and V."""
        share.acc_dK.store(share.acc_dK.load() * args.scale)
        own_keys, own_part = (share.group, 0) if self.by_keys else (0, share.group)
        warpgroup.wait_group(0)  # also S of no tile
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
