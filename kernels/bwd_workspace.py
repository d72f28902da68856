"""What backward's three kernels hand on in global memory: dQ in the making, LSE and D, float32.

dQ is kept in *fragment order*: for each block of each tile of Q, the registers of its accumulator
four by four, thread after thread, so that what a warp adds at once is 512 bytes in one piece. The
rows of a sequence are padded to whole tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

from ..layouts.hardware import WARP_THREADS, WARPGROUP_THREADS
from .tiles import BackwardTiles

QUAD = 4  # accumulator registers that are added at once


@dataclass(frozen=True)
class Workspace:
    """Views of one buffer."""

    dq: cute.Tensor  # ((QUAD, thread, quads), block, q_tile, head, batch)
    rows: cute.Tensor  # (lse_log2 and rowsum, row, head, batch)
    turns: cute.Tensor  # (q_tile, head, batch), int32: K/V tiles that are in this dq; in
    #                     deterministic mode alone, behind the buffer's end in the other

    @staticmethod
    def of(
        tiles: BackwardTiles, memory: cute.Tensor, batch: Int32, heads: Int32, len_q: Int32
    ) -> "Workspace":
        """Host code: `memory` has at least `tiles.workspace_floats`."""
        q_tiles = cute.ceil_div(len_q, tiles.tile_q)
        rows = q_tiles * tiles.tile_q
        columns, blocks = tiles.dq_columns, tiles.dq_blocks
        block = tiles.tile_q * columns // blocks
        quads = block // (QUAD * WARPGROUP_THREADS)
        head_rows = Int64(rows)
        batch_rows = head_rows * heads
        dq = cute.make_layout(
            (
                (QUAD, WARPGROUP_THREADS, quads),
                blocks,
                q_tiles,
                heads,
                batch,
            ),
            stride=(
                (1, QUAD, QUAD * WARPGROUP_THREADS),
                block,
                blocks * block,
                cute.assume(head_rows * columns, divby=QUAD),
                cute.assume(batch_rows * columns, divby=QUAD),
            ),
        )
        turns = cute.make_layout((q_tiles, heads, batch), stride=(1, q_tiles, q_tiles * heads))
        pairs = cute.make_layout(
            (2, rows, heads, batch), stride=(1, 2, 2 * head_rows, 2 * batch_rows)
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
