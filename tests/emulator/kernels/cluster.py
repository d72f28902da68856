"""Clusters: distributed shared memory in every form, and TMA multicast."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .asm import asm
from .launch import compile, fake

THREADS = 64
WAYS = 6
CLUSTER = 2
CLUSTERS = 2


def _address(pointer: cute.Pointer) -> Uint32:
    return pointer.toint().to(Uint32)


def _remote(pointer: cute.Pointer, peer: cutlass.Int32) -> Uint32:
    """Address of the same place in the CTA of rank `peer`."""
    (mapped,) = asm(
        "mapa.shared::cluster.u32 $0, $1, $2;", (Uint32,), _address(pointer), peer.to(Uint32)
    )
    return mapped


def build_exchange() -> Any:
    """Each CTA of a pair reads or is sent the other's data in WAYS different ways.

    (source (CTAS, THREADS) u32; result (WAYS, CTAS, THREADS) u32), CTAS = CLUSTER * CLUSTERS.
    Row w of a CTA's result is the peer's source + w, got by
    [0] ld.shared::cluster, [1] st.shared::cluster followed by a cluster barrier,
    [2] st.async completing on the receiver's mbarrier, [3] bulk copy shared to shared,
    [4] plain remote store and a remote arrive on the peer's mbarrier,
    [5] atom.shared::cluster on the peer's cell (zero before).
    """
    ctas = CLUSTER * CLUSTERS
    wait = (
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0;"
        " @p bra DONE; bra WAIT; DONE: }"
    )

    @cute.kernel
    def exchange(source: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        rank = cute.arch.block_idx_in_cluster()
        peer = rank ^ 1
        smem = SmemAllocator()
        layout = cute.make_layout((WAYS, THREADS), stride=(THREADS, 1))
        outbox = smem.allocate_tensor(Uint32, layout, byte_alignment=128)
        inbox = smem.allocate_tensor(Uint32, layout, byte_alignment=128)
        barriers = smem.allocate_array(Int64, 3)
        if thread == 0:
            cute.arch.mbarrier_init(barriers, 1)  # st.async
            cute.arch.mbarrier_init(barriers + 1, 1)  # bulk copy
            cute.arch.mbarrier_init(barriers + 2, THREADS)  # remote arrivals
            cute.arch.mbarrier_init_fence()
        for way in cutlass.range_constexpr(WAYS):
            outbox[way, thread] = source[cta, thread] + way
            inbox[way, thread] = Uint32(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        (value,) = asm(
            "ld.shared::cluster.b32 $0, [$1];",
            (Uint32,),
            _remote(outbox.iterator + 0 * THREADS + thread, peer),
        )
        result[0, cta, thread] = value

        asm(
            "st.shared::cluster.b32 [$0], $1;",
            (),
            _remote(inbox.iterator + 1 * THREADS + thread, peer),
            outbox[1, thread],
        )

        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barriers, 4 * THREADS)
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + 1, 4 * THREADS)
        asm(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [$0], $1, [$2];",
            (),
            _remote(inbox.iterator + 2 * THREADS + thread, peer),
            outbox[2, thread],
            _remote(barriers + 0, peer),
        )
        if thread == 0:
            asm(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                " [$0], [$1], $2, [$3];",
                (),
                _remote(inbox.iterator + 3 * THREADS + thread, peer),
                _address(outbox.iterator + 3 * THREADS + thread),
                Uint32(4 * THREADS),
                _remote(barriers + 1, peer),
            )
        asm(
            "st.shared::cluster.b32 [$0], $1;",
            (),
            _remote(inbox.iterator + 4 * THREADS + thread, peer),
            outbox[4, thread],
        )
        asm(
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];",
            (),
            _remote(barriers + 2, peer),
        )
        asm(
            "{ .reg .b32 old; atom.shared::cluster.add.u32 old, [$0], $1; }",
            (),
            _remote(inbox.iterator + 5 * THREADS + thread, peer),
            outbox[5, thread],
        )

        # Thread t reads what the peer's thread t ^ 1 sent: only the barriers order that.
        for way, index in ((2, 0), (3, 1), (4, 2)):
            asm(wait, (), _address(barriers + index))
            result[way, cta, thread ^ 1] = inbox[way, thread ^ 1]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for way in (1, 5):
            result[way, cta, thread ^ 1] = inbox[way, thread ^ 1]

    @cute.jit
    def host(source: cute.Tensor, result: cute.Tensor) -> None:
        exchange(source, result).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1)
        )

    return compile(host, fake(Uint32, (ctas, THREADS)), fake(Uint32, (WAYS, ctas, THREADS)))


ROWS, COLUMNS = 32, 64


def build_multicast() -> Any:
    """CTA r of a pair loads half r of a tile for both; each writes the whole tile it received.

    (source (CLUSTERS, ROWS, COLUMNS) f32; result (CLUSTERS, 2, ROWS, COLUMNS) f32). A second pass
    reuses the buffer once both CTAs have told each other that they have read it; the result is then
    result = tile + 2 * (tile of the next cluster).
    """
    half = ROWS // 2

    @cute.kernel
    def multicast(
        atom: cute.CopyAtom, tensor: cute.Tensor, smem_layout: cute.Layout, result: cute.Tensor
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster = cta // CLUSTER
        smem = SmemAllocator()
        layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
        tile = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        full = smem.allocate_array(Int64, 1)
        empty = smem.allocate_array(Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init(empty, CLUSTER)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        # (half, COLUMNS) x (halves of all clusters' tiles)
        pieces = cute.zipped_divide(tensor, (half, COLUMNS))
        mine = cute.make_tensor(tile.iterator + rank * half * COLUMNS, smem_layout)
        s, g = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(mine, 0, 2), pieces
        )
        for turn in cutlass.range_constexpr(2):
            which = (cluster + turn) % CLUSTERS
            if thread < 32:
                with cute.arch.elect_one():
                    if cutlass.const_expr(turn == 1):
                        cute.arch.mbarrier_wait(empty, 0)
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * ROWS * COLUMNS)
                cute.copy(
                    atom,
                    g[None, (which * 2 + rank, 0)],
                    s,
                    tma_bar_ptr=full,
                    mcast_mask=cutlass.Int16(3),
                )
            cute.arch.mbarrier_wait(full, turn)
            for row in cutlass.range(ROWS):
                value = tile[row, thread]
                if cutlass.const_expr(turn == 0):
                    result[cluster, rank, row, thread] = value
                else:
                    before = result[cluster, rank, row, thread]
                    result[cluster, rank, row, thread] = before + 2.0 * value
            if cutlass.const_expr(turn == 0):
                cute.arch.sync_threads()
                if thread < CLUSTER:
                    cute.arch.mbarrier_arrive(empty, thread)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def host(source: cute.Tensor, result: cute.Tensor) -> None:
        flat = cute.make_tensor(
            source.iterator, cute.make_layout((CLUSTERS * ROWS, COLUMNS), stride=(COLUMNS, 1))
        )
        smem_layout = cute.make_layout((half, COLUMNS), stride=(COLUMNS, 1))
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
            flat,
            smem_layout,
            (half, COLUMNS),
            num_multicast=1,
        )
        multicast(atom, tensor, smem_layout, result).launch(
            grid=(CLUSTER * CLUSTERS, 1, 1), block=(COLUMNS, 1, 1), cluster=(CLUSTER, 1, 1)
        )

    return compile(
        host,
        fake(Float32, (CLUSTERS, ROWS, COLUMNS)),
        fake(Float32, (CLUSTERS, CLUSTER, ROWS, COLUMNS)),
    )
