"""Before backward's main kernel: D = rowsum(dO * O) - dLSE, LSE in base 2, and a dQ of zeros.

Data:    O, dO --16 bytes a lane--> registers --shuffles--> D of a row; LSE; dQ: zeros.
Rows:    8 or 16 lanes a row, the passes of a CTA's tile of Q in flight together.
Padding: a row that attends nothing, or lies past the end, gets LSE = inf and D = 0, so that its
         P = exp2(S - LSE) is 0, and dS = P (dP - D) too: no mask for rows, and no infinity minus
         infinity.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..layouts.hardware import TMA_ALIGNMENT_BYTES
from . import BackwardFacts
from .bwd_workspace import QUAD, Workspace
from .online_softmax import LOG2_E
from .tiles import ELEMENT_BYTES, BackwardTiles
from .tiles_bwd_sm100 import BlackwellBackwardTiles

THREADS = 128
CHUNK = TMA_ALIGNMENT_BYTES // ELEMENT_BYTES  # elements that a lane loads at once


@dataclass(frozen=True)
class Args:
    """What crosses from host to device."""

    o: cute.Tensor  # (batch, len_q, heads_q, head_dim_v)
    do: cute.Tensor  # (batch, len_q, heads_q, head_dim_v)
    lse: cute.Tensor  # (batch, heads_q, len_q), float32
    dlse: cute.Tensor | None  # (batch, heads_q, len_q), float32
    workspace: Workspace


class BwdRowsum:
    """The kernel for one set of compile-time facts."""

    def __init__(self, facts: BackwardFacts, tiles: BackwardTiles | BlackwellBackwardTiles) -> None:
        self.tiles = tiles
        self.chunks = facts.head_dim_v // CHUNK
        self.lanes = 8 if self.chunks <= 16 else 16  # of a row
        self.deterministic = facts.deterministic
        self.zeros = tiles.tile_q * tiles.dq_columns  # of dQ, for each CTA

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        workspace: Workspace,
        stream,
    ):
        batch, len_q, heads, _ = o.shape
        self.kernel(Args(o, do, lse, dlse, workspace)).launch(
            grid=[cute.ceil_div(len_q, self.tiles.tile_q) * heads * batch, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args: Args):
        cute.arch.griddepcontrol_launch_dependents()
        number, _, _ = cute.arch.block_idx()
        _, len_q, heads, _ = args.o.shape
        blocks = cute.ceil_div(len_q, self.tiles.tile_q)
        block, sequence = number % blocks, number // blocks
        head, batch = sequence % heads, sequence // heads
        self.clear(args, number)
        self.sum_rows(args, block * self.tiles.tile_q, head, batch)

    @cute.jit
    def clear(self, args: Args, number: Int32):
        """Zeros for the part of dQ with this number, and for its turns."""
        thread, _, _ = cute.arch.thread_idx()
        zeros = cute.make_rmem_tensor(QUAD, Float32)
        zeros.fill(0.0)
        before = cute.assume(cutlass.Int64(number) * self.zeros, divby=QUAD)
        start = args.workspace.dq.iterator + before
        quads = cute.make_tensor(start, cute.make_layout((QUAD, self.zeros // QUAD)))
        for i in cutlass.range_constexpr(cute.ceil_div(self.zeros, QUAD * THREADS)):
            quad = i * THREADS + thread
            if (i + 1) * THREADS * QUAD <= self.zeros or quad < self.zeros // QUAD:
                cute.autovec_copy(zeros, quads[None, quad])
        if const_expr(self.deterministic):
            turn = args.workspace.turns.iterator + number * self.tiles.turns + thread
            if thread < self.tiles.turns:
                turn.store(Int32(0))

    @cute.jit
    def sum_rows(self, args: Args, first: Int32, head: Int32, batch: Int32):
        """LSE and D of the rows from `first`."""
        thread, _, _ = cute.arch.thread_idx()
        lane, own = thread % self.lanes, first + thread // self.lanes
        rows, (_, len_q, _, _) = THREADS // self.lanes, args.o.shape
        passes = self.tiles.tile_q // rows
        lse, sums = (cute.make_rmem_tensor(passes, Float32) for _ in range(2))
        for i in cutlass.range_constexpr(passes):
            # Past the end the last row once more: no branch, so that all loads are under way.
            row = cutlass.min(own + i * rows, len_q - 1)
            lse[i] = args.lse[batch, head, row]
            sums[i] = self.dot(
                args.o[batch, row, head, None], args.do[batch, row, head, None], lane
            )
        for i in cutlass.range_constexpr(passes):
            row = own + i * rows
            total = cute.arch.warp_reduction_sum(sums[i], threads_in_group=self.lanes)
            if const_expr(args.dlse is not None):
                total -= args.dlse[batch, head, cutlass.min(row, len_q - 1)]
            empty = row >= len_q or lse[i] == -Float32.inf
            if lane == 0:
                args.workspace.rowsum[row, head, batch] = Float32(0.0) if empty else total
                args.workspace.lse_log2[row, head, batch] = (
                    Float32.inf if empty else lse[i] * LOG2_E
                )

    def dot(self, o: cute.Tensor, do: cute.Tensor, lane: Int32) -> Float32:
        """This lane's part of o * do, over one row."""
        o, do = cute.zipped_divide(o, (CHUNK,)), cute.zipped_divide(do, (CHUNK,))
        total = Float32(0.0)
        for c in range(-(-self.chunks // self.lanes)):
            chunk = c * self.lanes + lane
            whole = (c + 1) * self.lanes <= self.chunks
            at = chunk if whole else cutlass.min(chunk, self.chunks - 1)
            product = self.product(o[None, at], do[None, at])
            total += product if whole else cutlass.select_(chunk < self.chunks, product, 0.0)
        return total

    def product(self, o: cute.Tensor, do: cute.Tensor) -> Float32:
        """The sum of o * do over one chunk."""
        rO, rdO = cute.make_rmem_tensor_like(o), cute.make_rmem_tensor_like(do)
        cute.autovec_copy(o, rO)
        cute.autovec_copy(do, rdO)
        total = Float32(0.0)
        for e in range(CHUNK):
            total += rO[e].to(Float32) * rdO[e].to(Float32)
        return total
