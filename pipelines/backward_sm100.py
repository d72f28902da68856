"""The pipeline graph of the main kernel of Blackwell's backward (FlashAttention-4, section 4).

     load                         mma                              compute: two warpgroups
    +--------------+ load_k,     +------------------------+ mma_s  +-------------------------------+
    | TMA: K, V;   | load_v,     | S^T  = K Q^T -> TMEM   | -----> | P = exp2(S - LSE)             |
    | Q and dO by  | load_kt     | dP^T = V dO^T -> TMEM  | mma_dp |   -> TMEM                     |
    | the products | ----------> |                        | -----> |                               |
    | that take    | load_qdo    | dV += P^T dO  -> TMEM  |  compute_p                             |
    | them         | ----------> |                        | <----- |                               |
    |              | (ring)      | dK += dS^T Q  -> TMEM  |  compute_ds                            |
    | LSE and D    |             | dQ  = dS K    -> TMEM  | <----- | dS = P (dP - D)               |
    +--------------+             +------------------------+        |   -> TMEM and smem            |
           |                      | mma_dq  ^ reduce_dq   |        |                               |
           |   load_rows          v         |             | mma_dkv|                               |
           |             reduce             |             +------> | dK, dV -> smem -> TMA store   |
           |            +----------------------------+             +-------------------------------+
           |            | dQ -> smem -> bulk reduce  |                            ^
           |            +----------------------------+                            |
           +----------------------------------------------------------------------+

Handovers without a way back: S of a tile is issued behind the products that read the P and dS which
it overwrites, by the same thread, and those were allowed by compute_p and compute_ds, which say
that S was read; dP likewise by compute_ds and, where dQ borrows its columns, reduce_dq. dS in
shared memory is free when its dQ is there: dP of the next tile is issued behind it, or, where it is
not, compute waits for mma_dq, too.
"""

from ..layouts.hardware import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from .graph import Graph, Handover, Rendezvous, Role

REDUCE, COMPUTE, OTHER = range(1), range(1, 3), range(3, 4)  # warpgroups


def backward_graph(
    *,
    stages: int,
    rows_stages: int,
    score_buffers: int,
    pair: bool,
    k_bytes: int,
    v_bytes: int,
    slot_bytes: int,
    row_bytes: int,
    registers_reduce: int,
    registers_compute: int,
    registers_other: int,
) -> Graph:
    """The graph for these sizes; bytes are those of one stage."""

    def warps(groups: range) -> range:
        return range(groups.start * WARPGROUP_WARPS, groups.stop * WARPGROUP_WARPS)

    other = warps(OTHER)
    users_of_tmem = len(warps(REDUCE)) + len(warps(COMPUTE)) + 1
    mma, compute = ("mma",), ("compute",)
    return Graph(
        roles=(
            Role("reduce", REDUCE, warps(REDUCE), registers_reduce),
            Role("compute", COMPUTE, warps(COMPUTE), registers_compute),
            Role("mma", OTHER, other[:1], registers_other),
            Role("load", OTHER, other[1:2], registers_other),
        ),
        edges=(),
        rendezvous=(
            Rendezvous("tmem_done", 1, WARP_THREADS * users_of_tmem),
            Rendezvous("gradient_there", len(COMPUTE), WARPGROUP_THREADS),
        ),
        handovers=(
            Handover("load_k", "load", mma, 1, "tma", None, k_bytes),
            Handover("load_v", "load", mma, 1, "tma", None, v_bytes),
            *((Handover("load_kt", "load", mma, 1, "tma", None, k_bytes),) if pair else ()),
            Handover("load_qdo", "load", mma, stages, "tma", "mma", slot_bytes),
            Handover("load_rows", "load", compute, rows_stages, "tma", "warps", row_bytes),
            Handover("mma_s", "mma", compute, score_buffers, "mma", None),
            Handover("mma_dp", "mma", compute, 1, "mma", None),
            Handover("compute_p", "compute", mma, score_buffers, "warps", None),
            Handover("compute_ds", "compute", mma, 1, "warps", None),
            Handover("mma_dq", "mma", ("reduce", "compute"), 1, "mma", None),
            Handover("reduce_dq", "reduce", mma, 1, "warps", None),
            Handover("mma_dkv", "mma", compute, 1, "mma", None),
        ),
        pair=pair,
    )
