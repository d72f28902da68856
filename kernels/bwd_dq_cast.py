"""After backward's main kernel: dQ = scale * its accumulator, in 16 bits.

Data: fragment order in global memory --16 bytes a lane--> the registers of the product that made it
      --stmatrix--> swizzled smem --TMA, clipped at sequence and head--> dQ.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..layouts.gmem import tma_atom, tma_tiles
from ..layouts.hardware import NAMED_BARRIERS, WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from ..layouts.smem import allocate, row_major_stages, view
from .bwd_workspace import QUAD
from .wgmma import narrow

if TYPE_CHECKING:
    from .bwd_sm90 import BwdSm90
    from .bwd_sm100 import BwdSm100


@dataclass(frozen=True)
class Args:
    """What crosses from host to device."""

    dq: cute.Tensor  # (len_q, head_dim, heads_q, batch), coordinates for its TMA atom
    sums: cute.Tensor  # ((QUAD, thread, quads), block, q_tile, head, batch), float32
    store_dq: cute.CopyAtom
    scale: Float32


class BwdDqCast:
    """The kernel that undoes the fragment order of `main`."""

    def __init__(self, main: "BwdSm90 | BwdSm100") -> None:
        self.main = main
        self.dtype = main.dtype
        self.tiles = main.tiles
        columns, rows = main.tiles.dq_block
        self.shape = rows, columns

    def smem_layout(self) -> cute.ComposedLayout:
        """(rows, columns, block)."""
        return row_major_stages(self.dtype, self.shape, self.tiles.dq_blocks)

    @cute.jit
    def __call__(self, dq: cute.Tensor, sums: cute.Tensor, scale: Float32, stream):
        batch, len_q, heads, _ = dq.shape
        store = cpasync.CopyBulkTensorTileS2GOp()
        store_dq, tma_dq = tma_atom(store, dq, self.smem_layout(), self.shape)
        self.kernel(Args(tma_dq, sums, store_dq, scale)).launch(
            grid=[cute.ceil_div(len_q, self.tiles.tile_q) * heads * batch, 1, 1],
            block=[WARPGROUP_THREADS * self.tiles.dq_blocks, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: Args):
        layout = self.smem_layout()
        smem = SmemAllocator()
        sdQ = view(allocate(smem, self.dtype, cute.cosize(layout)), layout)
        number, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        block = cute.arch.make_warp_uniform(cute.arch.warp_idx() // WARPGROUP_WARPS)
        thread = thread % WARPGROUP_THREADS
        len_q, _, heads, _ = args.dq.shape
        tiles = cute.ceil_div(len_q, self.tiles.tile_q)
        q_tile, sequence = number % tiles, number // tiles
        head, batch = sequence % heads, sequence // heads

        acc_dQ = self.main.dq_fragment(Float32)
        quads = cute.make_layout((QUAD, cute.size(acc_dQ) // QUAD))
        cute.arch.griddepcontrol_wait()
        cute.autovec_copy(
            args.sums[(None, thread, None), block, q_tile, head, batch],
            cute.make_tensor(acc_dQ.iterator, quads),
        )
        acc_dQ.store(acc_dQ.load() * args.scale)
        rdQ = self.main.dq_fragment(self.dtype)
        narrow(acc_dQ, rdQ)
        self.main.write_dq(rdQ, sdQ[None, None, block], thread)
        cute.arch.fence_view_async_shared()  # TMA will read what was written here
        cute.arch.barrier(barrier_id=NAMED_BARRIERS[0] + block, number_of_threads=WARPGROUP_THREADS)
        each = self.tiles.tile_q // self.tiles.dq_rows
        there = cute.ceil_div(self.main.facts.head_dim, self.shape[1])
        if thread < WARP_THREADS and block // each < there:  # one may be padding altogether
            gdQ = cute.local_tile(args.dq[None, None, head, batch], self.shape, (None, None))
            tile = gdQ[None, None, None, block // each]
            tQsQ, tQgQ = tma_tiles(args.store_dq, sdQ, tile)
            cute.copy(args.store_dq, tQsQ[None, block], tQgQ[None, q_tile * each + block % each])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
