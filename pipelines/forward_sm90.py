"""The pipeline graph of the Hopper forward kernel.

      warpgroup 0: load                       warpgroups 1..n: consume, 64 rows of Q each
     +------------------+   load_tile (1)    +--------------------------------------------+
     | warp 0           | -----------------> | for each tile of Q:                        |
     |   draws tiles    |   load_q    (ring) |   S = Q K^T   (wgmma, both from smem)      |
     |   TMA: Q, K, V   | -----------------> |   P = softmax (registers)                  |
     | warps 1..3 idle  |   load_k    (ring) |   O += P V    (wgmma, P from registers)    |
     |                  | -----------------> |   O / l -> global memory                   |
     |                  |   load_v    (ring) |                                            |
     +------------------+ -----------------> +--------------------------------------------+
                                               mma_turn: ping-pong between the warpgroups

K and V have a ring each, not one in common: a stage of K is free a whole softmax earlier than the
V of the same tile, and the two differ in bytes when head_dim_v is not head_dim.
"""

from ..layouts.hardware import WARPGROUP_THREADS, WARPGROUP_WARPS
from .graph import Edge, Graph, Rendezvous, Role
from .tile_queue import TILE_BYTES


def forward_graph(
    *,
    consumer_warpgroups: int,
    stages_q: int,
    stages_k: int,
    stages_v: int,
    q_bytes: int,
    k_bytes: int,
    v_bytes: int,
    registers_load: int,
    registers_consume: int,
) -> Graph:
    """The graph for these sizes; bytes are those of one stage."""
    consumers = range(1, 1 + consumer_warpgroups)
    consumer_warps = range(WARPGROUP_WARPS, WARPGROUP_WARPS * (1 + consumer_warpgroups))
    return Graph(
        roles=(
            Role("load", range(1), range(1), registers_load),
            Role("consume", consumers, consumer_warps, registers_consume),
        ),
        edges=(
            Edge("load_tile", "load", "consume", 1, TILE_BYTES, by_threads=True),
            Edge("load_q", "load", "consume", stages_q, q_bytes),
            Edge("load_k", "load", "consume", stages_k, k_bytes),
            Edge("load_v", "load", "consume", stages_v, v_bytes),
        ),
        rendezvous=(
            # The warpgroup whose turn it is, and the one that hands it over.
            Rendezvous("mma_turn", consumer_warpgroups, 2 * WARPGROUP_THREADS),
        ),
    )
