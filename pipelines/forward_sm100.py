"""The pipeline graph of the Blackwell forward kernel (FlashAttention-4, section 3).

     load                    mma                        softmax t: a warpgroup for tile t of Q
    +-------------+ load_q  +------------------------+ mma_s  +----------------------------------+
    | draws tiles | ------> | S_t = Q_t K^T -> TMEM  | -----> | S -> registers; m, l, P = exp2   |
    | TMA: Q, K, V| load_kv |                        |softmax_p| P -> TMEM, where S was           |
    |             | ------> | O_t += P_t V  -> TMEM  | <----- |   (three quarters, then the rest) |
    +-------------+ (ring)  +------------------------+        +----------------------------------+
                              | mma_o     ^ correction_o        | softmax_stats: alpha, at last 1/l
                              v           |                     v
    epilogue                 correction
    +-------------+ store_o +--------------------------------------------------------------------+
    | TMA: O      | <------ | O_t *= alpha where a maximum grew; at the end O_t / l -> smem      |
    +-------------+         +--------------------------------------------------------------------+

Five handovers need no way back. S of the next K/V tile but one goes where this one's P was, and is
issued behind the product that reads P, by the same thread: that product was allowed by softmax_p
and softmax_rest, which say that S was read and P is written, and by correction_o, which says that
alpha was read and O is as it should be. A role that waits for them has thereby waited for whoever
read what it overwrites.
"""

from ..layouts.hardware import WARP_THREADS, WARPGROUP_WARPS
from .graph import Graph, Handover, Rendezvous, Role
from .rings import By

SCORE_BUFFERS = 2  # of S and P in tensor memory


def forward_graph(
    *,
    q_tiles: int,
    stages_kv: int,
    q_bytes: int,
    kv_bytes: tuple[int, int],
    borrow_q_as_o: bool,
    pair: bool,
    registers_softmax: int,
    registers_correction: int,
    registers_other: int,
) -> Graph:
    """The graph for these sizes; bytes are those of one tile of Q, and of one of K and of V."""
    softmax = tuple(f"softmax{t}" for t in range(q_tiles))
    own = softmax[:1]  # of each tile
    groups = [range(i, i + 1) for i in range(q_tiles + 2)]

    def warps(group: int) -> range:
        return range(group * WARPGROUP_WARPS, (group + 1) * WARPGROUP_WARPS)

    other = warps(q_tiles + 1)
    buffers = SCORE_BUFFERS // q_tiles
    tiles = range(q_tiles)
    everyone = (*softmax, "correction", "mma", "epilogue")
    freed_by: By = "warps" if borrow_q_as_o else "mma"
    last_user = "epilogue" if borrow_q_as_o else "mma"

    def of_tiles(
        name: str,
        producer: str,
        consumers: tuple[str, ...],
        stages: int,
        by: By,
        freed_by: By | None = None,
        stage_bytes: int = 0,
        in_tmem: bool = False,
    ) -> Handover:
        ends = name, producer, consumers
        return Handover(*ends, stages, by, freed_by, stage_bytes, q_tiles, in_tmem)

    return Graph(
        roles=(
            *(Role(softmax[t], groups[t], warps(t), registers_softmax) for t in tiles),
            Role("correction", groups[q_tiles], warps(q_tiles), registers_correction),
            *(
                Role(name, groups[-1], other[i : i + 1], registers_other)
                for i, name in enumerate(("mma", "load", "epilogue"))
            ),
        ),
        edges=(),
        rendezvous=(Rendezvous("tmem_done", 1, WARP_THREADS * (1 + WARPGROUP_WARPS)),),
        handovers=(
            Handover("load_tile", "load", everyone, 1, "warps", "warps"),
            Handover("load_kv", "load", ("mma",), stages_kv, "tma", "mma", max(kv_bytes)),
            of_tiles("load_q", "load", (last_user,), 1, "tma", freed_by, q_bytes),
            of_tiles("mma_s", "mma", own, buffers, "mma"),
            of_tiles("softmax_p", *own, ("mma",), buffers, "warps", in_tmem=True),
            of_tiles("softmax_rest", *own, ("mma",), buffers, "warps", in_tmem=True),
            of_tiles("softmax_stats", *own, ("correction",), 1, "warps", "warps"),
            of_tiles("correction_o", "correction", ("mma",), 1, "warps", in_tmem=True),
            of_tiles("mma_o", "mma", ("correction",), 1, "mma"),
            of_tiles("store_o", "correction", ("epilogue",), 1, "warps", "warps"),
        ),
        pair=pair,
    )
