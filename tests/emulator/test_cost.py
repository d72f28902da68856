"""Recordings and their replay: known clocks of tiny kernels, and what must be conserved."""

import ctypes
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hopwell.benchmarks.micro import kernels
from hopwell.benchmarks.timeline import roles
from hopwell.emulator import loader
from hopwell.emulator.cost import GPUS, Gpu, replay
from hopwell.emulator.cost.rates import Known
from hopwell.emulator.cost.replay import Replay, _level
from hopwell.emulator.cost.timeline import chrome, marks, page
from hopwell.emulator.cost.work import LOOKAHEAD, UNITS, Work, measure
from hopwell.emulator.machine import Machine
from hopwell.emulator.memory import Extent, GlobalMemory
from hopwell.emulator.ptx import parse
from hopwell.emulator.recording import Arrive, Copy, Drain, Products, Recording, Wait
from hopwell.emulator.report import Counters, Options
from hopwell.interface.emulate import emulate
from hopwell.interface.functions import forward

H200 = GPUS["H200"]


def run(kernel: kernels.Kernel, data: np.ndarray | None = None) -> tuple[Recording, Counters]:
    """CTA 0 of one micro-benchmark, on the emulator."""
    results = np.zeros(max(1, kernel.results), np.int64)
    data = np.zeros(1 << 18, np.uint8) if data is None else data
    words = [ctypes.c_uint64(v) for v in (results.ctypes.data, data.ctypes.data, data.nbytes)]
    extents = [
        Extent(name, array.ctypes.data, array.shape, array.strides, array.itemsize, written)
        for name, array, written in (("results", results, True), ("data", data, False))
    ]
    memory = GlobalMemory(extents)
    addresses = tuple(ctypes.addressof(word) for word in words)
    one = (1, 1, 1)
    launch = loader.Launch(
        kernel.ptx, "micro", one, (kernel.threads, 1, 1), one, kernel.smem, addresses
    )
    machine = Machine(launch, memory, Options(check=False, record=True))
    machine.run()
    assert not machine.findings
    (recording,) = machine.recordings
    return recording, machine.counters


def longest(found: Replay) -> float:
    """Clocks of the longest stretch of warp 0."""
    return max(s.end - s.start for s in found.spans if s.lane == "warp 0" and s.kind == "work")


def on_h200(kernel: kernels.Kernel) -> Replay:
    """One micro-benchmark in modelled time."""
    return replay([run(kernel)[0]], H200)


def with_rates(**rates: float) -> Gpu:
    return replace(H200, **{name: Known(value, "test") for name, value in rates.items()})


def test_products_take_the_tensor_cores_in_turn() -> None:
    recording, counters = run(kernels.products(128, 8, False, groups=2))
    found = replay([recording], H200)
    # 2 warpgroups, 2 products to warm up and 8, of 64 clocks each.
    assert found.busy("tensor") == 2 * 10 * 64 == counters.tensor_clocks
    spans = [span for span in found.spans if span.lane == "tensor"]
    assert all(a.end <= b.start for a, b in pairwise(spans))


def test_narrow_products_wait_for_shared_memory() -> None:
    recording, _ = run(kernels.products(64, 8, False))
    slow = with_rates(shared_bytes=64)  # 4 KiB of operands: 64 clocks in place of 32
    assert replay([recording], slow).busy("tensor") == 2 * replay([recording], H200).busy("tensor")


@pytest.mark.parametrize("lanes", [16, 32])
def test_exponentials_bind(lanes: int) -> None:
    """64 of them, eight times, by a warp of each scheduler: 512 times 32 lanes of a quarter's."""
    recording, counters = run(kernels.rate([kernels.OPS["ex2"]], 1, 0, loops=8))
    found = replay([recording], with_rates(mufu_lanes=lanes, jump_latency=0))
    assert counters.total("mufu") == 4 * 512
    assert longest(found) == pytest.approx(512 * 32 * 4 / lanes, rel=0.1)


def test_of_two_maxima_that_follow_each_other_ptxas_makes_one() -> None:
    """A chain of five is three instructions; one whose result is used besides stays."""
    chain = [f"max.f32 a{i + 1}, a{i}, b{i};" for i in range(5)]
    used = ["max.f32 c1, c0, b0;", "add.f32 d, c1, c1;", "max.f32 c2, c1, b1;"]
    lines = [".reg .f32 c<3>, d, a<6>, b<5>;", *chain, *used]
    text = f".version 9.0 .target sm_100a .visible .entry k() {{ {' '.join(lines)} ret; }}"
    instructions = parse(text, "k").instructions[:-1]
    alu, issue = UNITS.index("alu"), UNITS.index("issue")
    two, three = (measure(instructions, with_rates(max_inputs=n)).units for n in (2, 3))
    assert (two[issue], three[issue]) == (8, 6) and (two[alu], three[alu]) == (14, 10)


def test_two_warps_of_a_scheduler_share_it() -> None:
    clocks = [
        replay([run(kernels.rate([kernels.OPS["fma"]], groups, 0, loops=8))[0]], H200).clocks
        for groups in (1, 4)
    ]
    assert clocks[1] - H200.start > 3 * (clocks[0] - H200.start)


def test_handovers_take_their_latency() -> None:
    """Sixteen turns there and back: so many clocks longer as a hand-over is."""
    for named, latency in ((True, "barrier_latency"), (False, "mbarrier_latency")):
        recording, _ = run(kernels.handover(named, loops=16))
        clocks = [replay([recording], with_rates(**{latency: n})).clocks for n in (50, 150)]
        assert clocks[1] - clocks[0] == pytest.approx(100 * 32, rel=0.1)


def test_copies_take_turns() -> None:
    recording, _ = run(kernels.copies(4, 4))
    moved = sum(s.nbytes for s in recording.streams()[0] if isinstance(s, Copy))
    found = replay([recording], with_rates(l2_bytes=32))
    assert found.busy("tma") == pytest.approx(moved / 32)
    assert moved == 17 * kernels.STAGE_BYTES


def test_bulk_additions_have_their_own_rate() -> None:
    recording, _ = run(kernels.bulk_adds(16, 2048))
    moved = 4 * 16 * 2048
    slow, fast = (replay([recording], with_rates(l2_add_bytes=n)) for n in (16, 32))
    assert slow.busy("adds") == moved / 16 and not slow.busy("tma")
    assert slow.clocks - fast.clocks == pytest.approx(moved / 32, rel=0.1)


def test_reading_for_a_store_ends_before_the_store() -> None:
    """Two copies under way: who waits for shared memory alone does not wait for L2's answer."""
    recording, _ = run(kernels.bulk_adds(16, 2048))
    latencies = [replay([recording], with_rates(tma_latency=n)).clocks for n in (100, 1100)]
    assert latencies[1] - latencies[0] == pytest.approx(1000)


def test_products_wait_where_warps_use_shared_memory() -> None:
    made = [kernels.rate((kernels.OPS[name],), 1, 128, 8) for name in ("ex2", "read")]
    share = with_rates(beside_exchange=0.5)
    bare, slowed = (replay([run(one)[0]], share) for one in made)
    assert slowed.busy("tensor") > 1.2 * bare.busy("tensor")


def test_a_pause_delays_who_waits_for_the_warp() -> None:
    recording, _ = run(kernels.handover(True, loops=16))
    pause = Work(100.0, 100.0, tuple(float(unit == "issue") for unit in UNITS))
    plain = replay([recording], H200)
    paused = replay([recording], H200, lambda _, e: (None, pause if isinstance(e, Wait) else None))
    assert paused.clocks - plain.clocks == pytest.approx(32 * 100, rel=0.1)


@pytest.mark.parametrize(("groups", "measured"), [(1, 17.0), (2, 26.4)])
def test_a_mix_beside_products_is_slower_than_its_slowest_unit(
    groups: int, measured: float
) -> None:
    """Clocks of four instructions of a softmax, as `micro` found them on an H200."""
    loops = 8
    recording, _ = run(kernels.rate(kernels.SOFTMAX, groups, 128, loops))
    found = replay([recording], H200)
    mufu = 8 / H200.beside_mufu * groups
    assert mufu < 4 * longest(found) / (kernels.UNROLL * loops) == pytest.approx(measured, rel=0.15)


def test_what_follows_stores_waits_until_they_left() -> None:
    """Behind 16 stores the H200 reads shared memory after 1,507 clocks, behind 4 after 209, all SMs
    at once (`micro`)."""
    more, few = (longest(on_h200(kernels.stores(count, 1))) for count in (16, 4))
    assert more - few == pytest.approx(1507 - 209, rel=0.15)


def test_a_jump_and_a_test_take_what_was_measured() -> None:
    """`micro`, on an H200: 26 clocks of a branch that is taken, 0.5 of one that is not, 42 of a
    test of an mbarrier."""
    count = kernels.BRANCHES * 8
    taken, passed = (longest(on_h200(kernels.branches(one, 16))) for one in ("taken", "passed"))
    assert taken - passed == pytest.approx(26 * count, rel=0.1)
    assert on_h200(kernels.tests()).clocks - H200.start > 42 * 0.9 * kernels.TESTS


def test_phases_are_the_stretch() -> None:
    lines = [kernels.OPS[name].format(i=i % 8, j=1) for i in range(200) for name in ("ex2", "max")]
    text = ".version 9.0 .target sm_90a .visible .entry k() { .reg .f32 f<16>; "
    work = measure(parse(f"{text} {' '.join(lines)} ret; }}", "k").instructions[:-1], H200)
    parts = work.parts()
    assert len(parts) > 10
    slices = [work.during(a / 3, (a + 1) / 3, work) for a in range(3)]
    for some in (parts, [part for one in slices for part in one.parts()]):
        assert sum(part.alone for part in some) == pytest.approx(work.alone)
        for unit, whole in enumerate(work.units):
            assert sum(part.units[unit] for part in some) == pytest.approx(whole)


def test_instructions_far_behind_are_not_issued_early() -> None:
    """A chain behind so many others: it begins when it comes within sight."""
    count = 2 * LOOKAHEAD
    others = [f"add.f32 a{i}, b, b;" for i in range(count)]
    chain = ["add.f32 c, c, b;" for _ in range(count)]
    registers = f".reg .f32 a<{count}>, b, c;"
    text = f".version 9.0 .target sm_90a .visible .entry k() {{ {registers} "
    lines = " ".join(others + chain)
    work = measure(parse(f"{text} {lines} ret; }}", "k").instructions[:-1], H200)
    assert work.alone == pytest.approx(LOOKAHEAD + count * H200.alu_latency, rel=0.02)


def test_results_come_later_beside_products() -> None:
    recording, _ = run(kernels.rate((kernels.OPS["ex2"],), 1, 128, 8, chains=1))
    found = [replay([recording], with_rates(beside_latency=n)) for n in (0.0, 3.0)]
    at_once, later = map(longest, found)
    beside = found[1].busy("tensor") / (found[1].clocks - H200.start)
    assert later - at_once == pytest.approx(3 * kernels.UNROLL * 8 * beside, rel=0.1)


def test_a_level_shares_a_limit() -> None:
    assert _level([0.2, 0.9, 0.9], 1.0) == pytest.approx(0.4)
    assert _level([0.6, 0.6], 1.0) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def hopper() -> tuple[list[Recording], Counters]:
    q, k, v = (torch.randn(1, 128, 1, 128).to(torch.bfloat16) for _ in range(3))
    k, v = (x.repeat(1, 4, 1, 1) for x in (k, v))
    with emulate("sm_90a", check=False, counters=True, record=True) as emulation:
        forward(q, k, v)
    return emulation.report.recordings[0], emulation.report.counters


def test_forward_keeps_what_was_counted(hopper: tuple[list[Recording], Counters]) -> None:
    recordings, counters = hopper
    found = replay(recordings, H200)
    assert found.busy("tensor") == pytest.approx(counters.tensor_clocks)
    streams = recordings[0].streams()
    copied = sum(s.nbytes for s in streams[0] if isinstance(s, Copy))
    assert copied == counters.tma_load_bytes
    issued = Counter(type(step) for step in streams[4])
    assert issued[Products] == issued[Drain] == 8  # S and O of four K/V tiles
    for warp, steps in streams.items():
        blocks = [s for s in steps if not isinstance(s, (Arrive, Wait, Copy, Products, Drain))]
        assert blocks or not steps, warp


def test_no_warp_passes_before_what_it_waits_for(
    hopper: tuple[list[Recording], Counters],
) -> None:
    """The first product comes after Q's and K's copies, by TMA's latency at least."""
    slow = with_rates(tma_latency=5000)
    found = replay(hopper[0], slow)
    first = min(span.start for span in found.spans if span.lane == "tensor")
    copy = min(span.end for span in found.spans if span.lane == "tma")
    assert first >= copy + 5000


def test_timeline_is_a_trace_and_a_page(hopper: tuple[list[Recording], Counters]) -> None:
    recordings, _ = hopper
    found = replay(recordings, H200)
    made = marks(found, recordings, roles("sm_90a", 128, False, False))
    assert list(dict.fromkeys(mark.lane for mark in made)) == [
        *("load", "consume 1", "consume 2"),
        *("tensor", "mufu", "tma"),
    ]
    named = {(mark.lane, mark.kind, mark.name) for mark in made}
    assert {("consume 1", "wait", "load_q"), ("tensor", "busy", "mma_s")} <= named
    assert ("consume 2", "wait", "mma_o") in named
    events: list[dict[str, Any]] = json.loads(json.dumps(chrome(made, 1000, "t")))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(made) and all(event["dur"] > 0 for event in spans)
    for lane in {event["tid"] for event in spans}:
        on = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == lane)
        if events[1 + 2 * lane]["args"]["name"] != "mufu":  # which two warps may share
            assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(on))
    html = page(made, "a <title>")
    assert "://" not in html and "src=" not in html  # nothing from anywhere else
    assert "load_q" in html


def test_recording_changes_nothing() -> None:
    q, k, v = (torch.randn(1, 200, 1, 64).to(torch.bfloat16) for _ in range(3))
    outs: list[torch.Tensor] = []
    for record in (False, True):
        with emulate("sm_90a", record=record) as emulation:
            outs.append(forward(q, k, v)[0])
        assert bool(emulation.report.recordings[0]) == record
    assert torch.equal(*outs)


def test_every_number_has_a_source() -> None:
    for gpu in GPUS.values():
        for name, value in vars(gpu).items():
            if isinstance(value, float):
                assert isinstance(value, Known) and value.source, (gpu.name, name)
