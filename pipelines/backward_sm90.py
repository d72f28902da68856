"""The pipeline graph of the main kernel of Hopper's backward.

      warpgroup 0: load                       warpgroups 1, 2: consume
     +------------------+   load_k, load_v   +---------------------------------------------+
     | warp 0           | -----------------> | for each tile of Q, of each head of a group:|
     |   TMA: K, V once |   load_q    (ring) |   S = K Q^T, dP = V dO^T  (both from smem)  |
     |   Q and LSE,     | -----------------> |   P = exp2(S - LSE), dS = P (dP - D)        |
     |   dO and D       |   load_do   (ring) |   dV += P dO, dK += dS Q                    |
     | warps 1..3 idle  | -----------------> |   dQ = dS K -> added to global memory       |
     +------------------+                    | dK, dV -> the places of K and V -> TMA store|
                                             +---------------------------------------------+
                                               p_there, ds_there: both warpgroups wrote theirs
                                               place_free, place_full: K and V; dK and dV
                                               dq_turn:  the four warps of one warpgroup

S and dP are transposed: keys are rows, so that P and dS are operands of dV and dK as they are.
"""

from ..layouts.hardware import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from .graph import Edge, Graph, Rendezvous, Role


def backward_graph(
    *,
    consumer_warpgroups: int,
    stages: int,
    k_bytes: int,
    v_bytes: int,
    q_bytes: int,
    do_bytes: int,
    registers_load: int,
    registers_consume: int,
) -> Graph:
    """The graph for these sizes; bytes are those of one stage."""
    consumers = range(1, 1 + consumer_warpgroups)
    consumer_warps = range(WARPGROUP_WARPS, WARPGROUP_WARPS * (1 + consumer_warpgroups))
    threads = WARP_THREADS * len(consumer_warps)
    return Graph(
        roles=(
            Role("load", range(1), range(1), registers_load),
            Role("consume", consumers, consumer_warps, registers_consume),
        ),
        edges=(
            Edge("load_k", "load", "consume", 1, k_bytes),
            Edge("load_v", "load", "consume", 1, v_bytes),
            Edge("load_q", "load", "consume", stages, q_bytes),
            Edge("load_do", "load", "consume", stages, do_bytes),
        ),
        rendezvous=(
            *(
                Rendezvous(name, 1, threads)
                for name in ("p_there", "ds_there", "place_free", "place_full")
            ),
            Rendezvous("dq_turn", consumer_warpgroups, WARPGROUP_THREADS),
        ),
    )
