"""What backward's three kernels hand on in global memory: dQ in the making, LSE and D, float32.

dQ is kept in *fragment order*: for each block of each tile of Q, the registers of its accumulator
four by four, thread after thread, so that what a warp adds at once is 512 bytes in one piece. Where
it adds more at once, by a bulk reduction, that is the order in each warp's part. The rows of a
sequence are padded to whole tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from ..layouts.hardware import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from ..layouts.opaque import lane
from .tiles import BackwardTiles
from .tiles_bwd_sm100 import BlackwellBackwardTiles

QUAD = 4  # accumulator registers that are added at once


@dataclass(frozen=True)
class Workspace:
    """Views of one buffer."""

    dq: cute.Tensor  # ((QUAD, thread, quads), block, q_tile, head, batch)
    rows: cute.Tensor  # (lse_log2 and rowsum, row, head, batch)
    turns: cute.Tensor  # (turn, q_tile, head, batch), int32: K/V tiles that are in this dq; in
    #                     deterministic mode alone, behind the buffer's end in the other

    @staticmethod
    def of(
        tiles: BackwardTiles | BlackwellBackwardTiles,
        memory: cute.Tensor,
        batch: Int32,
        heads: Int32,
        len_q: Int32,
    ) -> "Workspace":
        """Host code: `memory` has at least `tiles.workspace_floats`."""
        q_tiles = cute.ceil_div(len_q, tiles.tile_q)
        rows = q_tiles * tiles.tile_q
        columns, blocks = tiles.dq_columns, tiles.dq_blocks
        block = tiles.tile_q * columns // blocks
        quads = block // (QUAD * WARPGROUP_THREADS)
        head_rows = Int64(rows)
        batch_rows = head_rows * heads
        threads, quad_stride = WARPGROUP_THREADS, WARPGROUP_THREADS * QUAD
        thread_stride = QUAD
        if tiles.dq_by_warps:
            quad_stride = WARP_THREADS * QUAD
            threads = (WARP_THREADS, WARPGROUP_WARPS)
            thread_stride = (QUAD, quad_stride * quads)
        dq = cute.make_layout(
            ((QUAD, threads, quads), blocks, q_tiles, heads, batch),
            stride=(
                (1, thread_stride, quad_stride),
                block,
                blocks * block,
                cute.assume(head_rows * columns, divby=QUAD),
                cute.assume(batch_rows * columns, divby=QUAD),
            ),
        )
        tile_turns = q_tiles * tiles.turns
        turns = cute.make_layout(
            (tiles.turns, q_tiles, heads, batch),
            stride=(1, tiles.turns, tile_turns, tile_turns * heads),
        )
        row, row_stride, d_stride = rows, 2, 1
        if tiles.rows_apart:
            row, row_stride = (tiles.tile_q, q_tiles), (1, 2 * tiles.tile_q)
            d_stride = tiles.tile_q
        pairs = cute.make_layout(
            (2, row, heads, batch), stride=(d_stride, row_stride, 2 * head_rows, 2 * batch_rows)
        )
        first = memory.iterator + batch_rows * batch * columns
        counters = cute.recast_ptr(first + 2 * batch_rows * batch, dtype=Int32)
        return Workspace(
            cute.make_tensor(memory.iterator, dq),
            cute.make_tensor(first, pairs),
            cute.make_tensor(counters, turns),
        )

    @property
    def lse_log2(self) -> cute.Tensor:
        """(row, head, batch)."""
        return self.rows[0, None, None, None]

    @property
    def rowsum(self) -> cute.Tensor:
        """(row, head, batch): D, less the gradient of LSE."""
        return self.rows[1, None, None, None]


@dataclass(frozen=True)
class DqTurn:
    """The turn of one K/V tile to add to a tile of dQ.

    Nobody may wait for a CTA that cannot begin before this one ends: whoever has a rank before
    must start before, or find room beside. That CTAs start by their number is what GPUs do, not
    what CUDA promises.

    The fence of a release and the answer of the L2 cache to a wait take long, and warp 0 has loads
    to issue: two other warps do them at the same time (5 to 8 % of all backward, H200).
    """

    counter: cute.Pointer  # int32, global: tiles that have had their turn
    rank: Int32  # tiles that come before this one
    barrier: Int32  # of the warpgroup
    thread: Int32  # in the warpgroup

    @cute.jit
    def wait(self) -> None:
        """Until all tiles before are in."""
        if self.thread == 2 * WARP_THREADS:
            done = self.load()
            while done != self.rank:
                done = self.load()
        self.meet()

    @cute.jit
    def release(self) -> None:
        """To the next tile; after a barrier that the warpgroup has met at since it added."""
        if self.thread == WARP_THREADS:
            cute.arch.red(self.counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")

    def load(self) -> Int32:
        return cute.arch.load(self.counter, Int32, sem="acquire", scope="gpu")

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def add_quads(acc: cute.Tensor, target: cute.Tensor) -> None:
    """Add a thread's accumulator to its part of a dQ, (QUAD, quads), in global memory."""
    address = target.iterator.toint()
    flat = cute.make_tensor(acc.iterator, cute.make_layout((QUAD, cute.size(acc) // QUAD)))
    for i in cutlass.range_constexpr(cute.size(flat, mode=[1])):
        offset = cute.crd2idx((0, i), target.layout) * 4
        _red(address, [flat[e, i] for e in range(QUAD)], offset)


def _red(address: Int64, values: list, offset: int) -> None:
    text = f"red.global.add.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
    operands = [address.ir_value(), *(value.ir_value() for value in values)]
    llvm.inline_asm(None, operands, text, "l,f,f,f,f", has_side_effects=True)


@dataclass(frozen=True)
class WarpTurn:
    """The turn of one warp to add its part of a tile of dQ, by bulk reductions of its lane 0."""

    counter: cute.Pointer  # int32, global: of this part, K/V tiles that have had their turn
    rank: Int32  # tiles that come before this one

    @cute.jit
    def wait(self) -> None:
        """Until all tiles before are in."""
        if lane() == 0:
            done = cute.arch.load(self.counter, Int32, sem="acquire", scope="gpu")
            while done != self.rank:
                done = cute.arch.load(self.counter, Int32, sem="acquire", scope="gpu")
            cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()

    @cute.jit
    def release(self) -> None:
        """To the next tile, once the reductions are done."""
        if lane() == 0:
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.fence_proxy("async.global")
            cute.arch.red(self.counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


@dsl_user_op
def reduce_bulk(
    target: cute.Pointer, source: cute.Pointer, size_bytes: int, *, loc=None, ip=None
) -> None:
    """float32 numbers, shared memory -> added to global memory, by one thread."""
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size_bytes};"
    operands = [target.toint().ir_value(), Int32(source.toint()).ir_value()]
    llvm.inline_asm(None, operands, text, "l,r", has_side_effects=True, loc=loc, ip=ip)
