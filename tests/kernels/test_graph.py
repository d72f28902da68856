"""Pipeline graphs: what is derived from them, and what is refused."""

import dataclasses
from typing import Any

import pytest

from hopwell.kernels.tiles import BACKWARD, BackwardTiles
from hopwell.pipelines import forward_sm100
from hopwell.pipelines.backward_sm90 import backward_graph
from hopwell.pipelines.forward_sm90 import forward_graph
from hopwell.pipelines.graph import Edge, Graph, Handover, Rendezvous, Role


def graph(consumer_warpgroups: int = 2, stages_q: int = 2) -> Graph:
    return forward_graph(
        consumer_warpgroups=consumer_warpgroups,
        stages_q=stages_q,
        stages_k=2,
        stages_v=3,
        q_bytes=32768,
        k_bytes=32768,
        v_bytes=16384,
        registers_load=24,
        registers_consume=240,
    )


@pytest.mark.parametrize("stages_q", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_counts_follow_from_the_roles(groups: int, stages_q: int) -> None:
    g = graph(groups, stages_q)
    assert g.threads == 128 * (1 + groups)
    assert g.mbarriers == 2 * (1 + stages_q + 2 + 3)
    # One elected thread announces the bytes of a stage, every consumer warp releases it. Every
    # thread of the producer warp posts a tile, and every consumer thread releases it.
    assert {edge.name: g.arrive_counts(edge) for edge in g.edges} == {
        "load_tile": (32, 128 * groups),
        "load_q": (1, 4 * groups),
        "load_k": (1, 4 * groups),
        "load_v": (1, 4 * groups),
    }


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_named_barriers_do_not_overlap_and_leave_zero_alone(groups: int) -> None:
    g = graph(groups)
    numbers = [
        first + i
        for meeting in g.rendezvous
        for first in [g.barrier(meeting.name)[0]]
        for i in range(meeting.count)
    ]
    assert numbers == list(range(1, 1 + groups))


@pytest.mark.parametrize("row", BACKWARD, ids=lambda row: str(row.head_dim))
def test_counts_and_barriers_of_backward(row: BackwardTiles) -> None:
    g = backward_graph(
        consumer_warpgroups=row.consumer_warpgroups,
        stages=row.stages,
        ds_stages=row.ds_stages,
        k_bytes=row.k_bytes,
        v_bytes=row.v_bytes,
        q_bytes=row.q_bytes,
        do_bytes=row.do_bytes,
        registers_load=row.registers_load,
        registers_consume=row.registers_consume,
    )
    assert g.threads == row.threads == 384
    assert g.mbarriers == 2 * (1 + 1 + 2 * row.stages)
    assert all(g.arrive_counts(edge) == (1, 8) for edge in g.edges)
    # A dS for each of two tiles, of which all three warpgroups know: two write, one reads.
    assert {meeting.name: g.barrier(meeting.name) for meeting in g.rendezvous} == {
        "ds_there": (1, 384),
        "ds_free": (3, 384),
        "p_there": (5, 256),
        "place_free": (6, 256),
        "place_full": (7, 256),
        "dq_turn": (8, 128),
    }
    assert g.numbered("ds_free", 1) == {"barrier_id": 4, "number_of_threads": 384}


def test_an_unknown_rendezvous_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        graph().barrier("nowhere")


LOAD = Role("load", range(1), range(1), 24)
CONSUME = Role("consume", range(1, 3), range(4, 12), 240)
EDGE = Edge("load_k", "load", "consume", 2, 1024)


@pytest.mark.parametrize(
    ("roles", "edges", "rendezvous", "message"),
    [
        ((LOAD, LOAD), (), (), r"names repeat"),
        ((LOAD, CONSUME), (EDGE, EDGE), (), r"names repeat"),
        ((LOAD, Role("other", range(1), range(1), 24)), (), (), r"warps \[0, 0\]: a warp has one"),
        ((LOAD, Role("other", range(1), range(1, 2), 32)), (), (), r"role load: others in its"),
        ((CONSUME,), (), (), r"warpgroups \[1, 2\]: every one needs a role"),
        ((LOAD, Role("consume", range(1, 3), range(4, 8), 240)), (), (), r"role consume"),
        ((LOAD, dataclasses.replace(CONSUME, registers=250)), (), (), r"registers=250"),
        ((LOAD, CONSUME), (dataclasses.replace(EDGE, consumer="mma"),), (), r"edge load_k"),
        ((LOAD, CONSUME), (dataclasses.replace(EDGE, consumer="load"),), (), r"edge load_k"),
        ((LOAD, CONSUME), (dataclasses.replace(EDGE, stages=0),), (), r"stages=0"),
        ((LOAD, CONSUME), (dataclasses.replace(EDGE, stage_bytes=1 << 20),), (), r"stage_bytes"),
        ((LOAD, CONSUME), (EDGE,), (Rendezvous("r", 1, 100),), r"threads=100"),
        ((LOAD, CONSUME), (EDGE,), (Rendezvous("r", 1, 512),), r"threads=512"),
        ((LOAD, CONSUME), (EDGE,), (Rendezvous("r", 16, 128),), r"16 named barriers: there are 15"),
    ],
)
def test_a_graph_that_could_not_run_is_refused(
    roles: tuple[Role, ...],
    edges: tuple[Edge, ...],
    rendezvous: tuple[Rendezvous, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(roles, edges, rendezvous)


# ---- with tensor cores that arrive ---------------------------------------------------------------


def blackwell(q_tiles: int = 2, borrow_q_as_o: bool = False, pair: bool = False) -> Graph:
    return forward_sm100.forward_graph(
        q_tiles=q_tiles,
        stages_kv=3,
        q_bytes=32768,
        kv_bytes=(32768, 16384),
        borrow_q_as_o=borrow_q_as_o,
        pair=pair,
        registers_softmax=192,
        registers_correction=72,
        registers_other=56,
    )


@pytest.mark.parametrize("q_tiles", [1, 2])
def test_arrivals_on_blackwell(q_tiles: int) -> None:
    """A warp arrives once, TMA and the tensor cores once for all they did."""
    g = blackwell(q_tiles)
    assert g.threads == 128 * (2 + q_tiles)
    found = {one.name: g.arrivals(one) for one in g.handovers}
    warps = 4 * q_tiles + 4 + 2  # softmax, correction, mma and epilogue
    assert found["load_tile"] == (1, warps)
    assert found["load_kv"] == found["load_q"] == (1, 1)
    assert found["softmax_p"][0] == found["softmax_rest"][0] == found["correction_o"][0] == 4
    assert found["softmax_stats"] == (4, 4) and found["store_o"] == (4, 1)
    assert found["mma_s"][0] == found["mma_o"][0] == 1
    # One barrier a stage where nothing comes back, else two; S and P have two buffers in all.
    one_way, both = 2 * 3 + q_tiles * 2, 1 + 3 + q_tiles * 3
    assert g.mbarriers == one_way + 2 * both


def test_of_a_pair_warps_of_both_arrive_where_products_are_issued() -> None:
    one, two = blackwell(), blackwell(pair=True)
    for alone, both in zip(one.handovers, two.handovers, strict=True):
        (full, free), found = one.arrivals(alone), two.arrivals(both)
        twice = alone.name in ("softmax_p", "softmax_rest", "correction_o")
        assert found == (full * (2 if twice else 1), free)


def test_who_frees_q_is_who_uses_it_last() -> None:
    for borrow, role, by in ((False, "mma", "mma"), (True, "epilogue", "warps")):
        g = blackwell(borrow_q_as_o=borrow)
        (load_q,) = (one for one in g.handovers if one.name == "load_q")
        assert load_q.consumers == (role,) and load_q.freed_by == by
        assert g.arrivals(load_q) == (1, 1)


HANDOVER = Handover("p", "load", ("consume",), 2, "warps", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"consumers": ("mma",)}, "needs roles of"),
        ({"consumers": ("load",)}, "needs roles of"),
        ({"stages": 0}, "stages=0"),
        ({"by": "tma"}, "stage_bytes=0"),
        ({"stage_bytes": 8}, "stage_bytes=8"),
        ({"by": "tma", "stage_bytes": 1 << 20}, "stage_bytes=1048576"),
    ],
)
def test_a_handover_that_could_not_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"handover p: {message}"):
        Graph((LOAD, CONSUME), (), (), (dataclasses.replace(HANDOVER, **change),))
