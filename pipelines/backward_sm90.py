"""The pipeline graph of the main kernel of Hopper's backward.

      warpgroup 0: reduce                      warpgroups 1, 2: consume
     +--------------------+   load_k, load_v  +---------------------------------------------+
     | warp 0, between    | ----------------> | for each tile of Q, of each head of a group:|
     | two tiles:         |   load_q   (ring) |   S = K Q^T, dP = V dO^T  (both from smem)  |
     |   TMA: K, V once   | ----------------> |   P = exp2(S - LSE), dS = P (dP - D)        |
     |   Q, LSE, D and dO |   load_do  (ring) |   dV += P dO, dK += dS Q                    |
     |                    | ----------------> |                                             |
     | all four warps:    |   ds_there        |   dS -> smem                                |
     |   dQ = dS K ->     | <---------------- |                                             |
     |   global memory    |   ds_free         | dK, dV -> the places of Q and dO            |
     |                    | ----------------> |        -> TMA store                         |
     +--------------------+                   +---------------------------------------------+
       dq_turn: its warps                       p_there: both wrote their P and dS
                                                place_free, place_full: Q and dO; dK and dV

S and dP are transposed: keys are rows, so that P and dS are operands of dV and dK as they are.
"""

from ..layouts.hardware import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from .graph import Edge, Graph, Rendezvous, Role


def backward_graph(
    *,
    consumer_warpgroups: int,
    stages: int,
    ds_stages: int,
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
            Role("reduce", range(1), range(WARPGROUP_WARPS), registers_load),
            Role("consume", consumers, consumer_warps, registers_consume),
        ),
        edges=(
            Edge("load_k", "reduce", "consume", 1, k_bytes),
            Edge("load_v", "reduce", "consume", 1, v_bytes),
            Edge("load_q", "reduce", "consume", stages, q_bytes),
            Edge("load_do", "reduce", "consume", stages, do_bytes),
        ),
        rendezvous=(
            Rendezvous("ds_there", ds_stages, threads + WARPGROUP_THREADS),
            Rendezvous("ds_free", ds_stages, threads + WARPGROUP_THREADS),
            *(Rendezvous(name, 1, threads) for name in ("p_there", "place_free", "place_full")),
            Rendezvous("dq_turn", 1, WARPGROUP_THREADS),
        ),
    )
