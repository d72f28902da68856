"""Cluster launch control: clusters that take over the work of others which have not started."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from .asm import asm
from .launch import compile, fake

GRID = (4, 3, 2)
THREADS = 64
RESPONSE_BYTES = 16
_FENCE = "fence.proxy.async::generic.{}.sync_restrict::shared::{}.cluster;"


def _response(address: Uint32) -> tuple[Int32, Int32, Int32, Int32]:
    """As `cute.arch.clc_response`, by the instruction that gives three coordinates at once."""
    text = """{ .reg .b128 response; .reg .pred p;
        ld.shared.b128 response, [$4];
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, response;
        clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {$0, $1, $2, _}, response;
        selp.b32 $3, 1, 0, p; }"""
    x, y, z, valid = asm(text, (Int32,) * 4, address)
    return x, y, z, valid


def build(cluster: int, fault: str = "") -> Any:
    """A loop over the grid's CTAs, in clusters of `cluster`; `fault` leaves something out.

    counts (z, y, x, THREADS) s32: one more for the CTA at (x, y, z) of GRID.
    """
    assert fault in ("", "wait", "barrier", "end")

    @cute.kernel
    def persistent(counts: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        x, y, z = cute.arch.block_idx()
        rank = cute.arch.block_idx_in_cluster()
        smem = SmemAllocator()
        response = smem.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16).iterator
        full = smem.allocate_array(Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        x, phase, valid, asked = x - rank, Int32(0), Int32(1), Int32(0)
        while valid != 0:
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, RESPONSE_BYTES)
                if rank == 0:
                    cute.arch.issue_clc_query(full, response, multicast=cluster > 1)
            if asked == 0:
                counts[z, y, x + rank, thread] = counts[z, y, x + rank, thread] + 1
            if const_expr(fault != "wait"):
                cute.arch.mbarrier_wait(full, phase)
            phase = phase ^ 1
            if const_expr(cluster > 1):
                x, y, z, valid = _response(response.toint().to(Uint32))
            else:
                x, y, z, valid = cute.arch.clc_response(response)
            if const_expr(fault == "end"):  # one more question after the last answer
                asked, valid = asked + (valid == 0).to(Int32), (asked == 0).to(Int32)
            if const_expr(fault == "" and cluster > 1):  # the manual's lighter way
                asm(_FENCE.format("release", "cta"), ())
                cute.arch.cluster_arrive_relaxed()
                cute.arch.cluster_wait()
                asm(_FENCE.format("acquire", "cluster"), ())
            elif const_expr(fault != "barrier"):
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()

    @cute.jit
    def host(counts: cute.Tensor) -> None:
        persistent(counts).launch(grid=GRID, block=(THREADS, 1, 1), cluster=(cluster, 1, 1))

    return compile(host, fake(Int32, (*GRID[::-1], THREADS)), arch="sm_100a")
