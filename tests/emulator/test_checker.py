"""The checker as its user sees it: orders, switches, reports, and kernels that overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hopwell import emulator

from ..kernels.built import build
from . import sm100
from .faults import FACTS, LEN_KV, LEN_Q, TILES
from .kernels import faulty

WORDS = torch.arange(faulty.THREADS, dtype=torch.int32).view(torch.uint32)


@cache
def mistakes() -> Any:
    return faulty.build_mistakes()


def forward(order: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Under a causal mask, with ragged ends and every stage used again: the checker is silent."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 32).bfloat16() for n in (LEN_Q, LEN_KV, LEN_KV))
    out, lse = torch.empty_like(q), torch.empty(1, 1, LEN_Q)
    counter = torch.zeros(1, dtype=torch.int32)
    report = emulator.run(
        build(replace(FACTS, causal=True), TILES).call,
        q,
        k,
        v,
        out,
        lse,
        0.2,
        counter,
        outputs=(out, lse),
        options=emulator.Options(counters=False, order=order, seed=seed, strict=True),
    )
    assert not report.findings
    return out, lse


def test_every_order_is_silent_and_gives_the_same_bits() -> None:
    expected = forward("eager", 0)
    orders = [("deferred", 0), *(("random", seed) for seed in range(20))]
    for order, seed in orders:
        outputs = forward(order, seed)
        assert all(map(torch.equal, outputs, expected)), (order, seed)


def test_without_checks_a_kernel_still_computes() -> None:
    target = torch.zeros_like(WORDS)
    options = emulator.Options(check=False)
    report = emulator.run(mistakes(), faulty.NO_BARRIER, WORDS, target, options=options)
    assert not report.findings
    assert target.tolist() == [i ^ 32 for i in range(faulty.THREADS)]


def test_a_fault_raises_and_names_its_place() -> None:
    target = torch.zeros_like(WORDS)
    with pytest.raises(emulator.KernelFault) as fault:
        emulator.run(mistakes(), faulty.NO_BARRIER, WORDS, target)
    (finding,) = fault.value.findings
    assert finding.file == faulty.__file__
    text = str(fault.value)
    assert text.startswith("race: read of shared memory")
    assert f"\n  at {faulty.__file__}:{finding.line}\n" in text
    assert f"\n  in {finding.kernel}: ld.shared" in text


def test_findings_collect() -> None:
    target = torch.zeros_like(WORDS)
    with emulator.session(emulator.Options(raise_on_fault=False)) as session:
        for which in (faulty.NO_BARRIER, faulty.NONE, faulty.PAST_GLOBAL):
            emulator.call(mistakes(), which, WORDS, target)
    kinds = [finding.kind for finding in session.report.findings]
    assert kinds == ["race", "out of bounds"]
    assert len(session.report.launches) == 3


def test_a_dependent_launch_must_wait() -> None:
    dependent = faulty.build_dependent()
    source, between, target = (torch.zeros(32, dtype=torch.uint32) for _ in range(3))
    for who in (1, 3):
        target.zero_()
        emulator.run(dependent, who, source, between, target)
        assert target.tolist() == [2] * 32
    for who in (0, 2):
        with pytest.raises(emulator.KernelFault, match="griddepcontrol") as fault:
            emulator.run(dependent, who, source, between, target)
        (finding,) = fault.value.findings
        assert finding.kind == "race"
        assert "argument 2 may still be written by the kernel before" in finding.message
        assert finding.kernel.startswith("kernel_cutlass_second")


# Warp 1 does something with all its lanes, and one of them arrives for warp 0, which goes on.
ARRIVAL = """
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [smem], 1;
    st.shared.b32 [smem+16], %r0;
READY:
    bar.sync 0;
    setp.eq.u32 %p2, %r1, 1;
    @!%p2 bra WAITS;
    {first}
    elect.sync %r9|%p3, -1;
    @%p3 mbarrier.arrive.shared.b64 _, [smem];
WAITS:
    @!%p0 bra OVER;
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p4, [smem], 0;
    @!%p4 bra AGAIN;
    {then}
OVER:
"""
OWN_WORD = "and.b32 %r8, %r0, 31; shl.b32 %r8, %r8, 2; mov.u32 %r7, smem; add.u32 %r8, %r8, %r7;"
READS = f"{OWN_WORD} ld.shared.b32 %r10, [smem+16];"
WRITES = f"{OWN_WORD} st.shared.b32 [%r8+128], %r0; fence.proxy.async.shared::cta;"
BULK = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r7+128], 128;"
STORE = f"mov.u32 %r7, smem; {BULK} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize(
    ("first", "then", "races"),
    [
        (READS, "@%p1 st.shared.b32 [smem+16], %r0;", "the read of warp 1"),
        (WRITES, STORE, "the write of warp 1"),
    ],
    ids=["reads", "fenced writes"],
)
def test_one_lane_arrives_for_others_only_once_they_have_synchronised(
    first: str, then: str, races: str
) -> None:
    result = np.zeros(64, np.uint32)
    for between, found in (("", True), ("bar.warp.sync -1;", False)):
        body = ARRIVAL.replace("{first}", first + between).replace("{then}", then)
        findings = sm100.run(body, np.zeros(64, np.uint32), result).findings
        assert bool(findings) == found, findings
        if found:
            assert findings[0].kind == "race"
            assert races in findings[0].message


def test_arrivals_over_the_count_are_found_whatever_state_they_ask_for() -> None:
    arrive = "mbarrier.arrive.shared.b64 %d4, [smem];"
    expect = "mbarrier.arrive.expect_tx.shared.b64 _, [smem], 16;"
    body = f"@!%p1 bra DONE; mbarrier.init.shared.b64 [smem], 1; {expect} {arrive} {arrive} DONE:"
    empty = np.zeros(64, np.uint32)
    assert sm100.run(body, empty, empty).findings[0].kind == "barrier misuse"


def test_a_bulk_copy_to_a_cta_that_is_not_there_is_found() -> None:
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""
    @!%p1 bra DONE;
    mbarrier.init.shared.b64 [smem], 1;
    mov.u32 %r10, smem;
    add.u32 %r11, %r10, 16777232; // 16 bytes on, in CTA 1
    {copy} [%r11], [%d0], 16, [%r10];
DONE:
    """
    empty = np.zeros(64, np.uint32)
    (found,) = sm100.run(body, empty, empty).findings
    assert found.kind == "out of bounds"
    assert found.message.startswith("a bulk copy goes to CTA 1 of a cluster of 1 (CTA (0, 0, 0)")


COMMIT, WAIT = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize(
    ("stores", "lax", "strict"),
    [
        (BULK + COMMIT + WAIT, "", ""),
        (BULK, "", "never committed"),
        (BULK + COMMIT + WAIT + BULK, "", "never committed"),
        (BULK + COMMIT, "may still read", "may still read"),
        (BULK + COMMIT + BULK, "may still read", "may still read"),
    ],
    ids=["waited for", "no group", "no group after a wait", "no wait", "no group and no wait"],
)
def test_a_copy_in_flight_when_its_cta_ends(stores: str, lax: str, strict: str) -> None:
    """Kernels that run on GPUs leave the last one out of any group: strict alone finds it."""
    body = f"{OWN_WORD} @%p0 st.shared.b32 [%r8+128], %r0; fence.proxy.async.shared::cta;"
    modes: list[tuple[str, Any]] = [
        (lax, False),
        (lax, ["registers", "commits"]),
        (strict, True),
        (strict, ["copies"]),
    ]
    for expected, rules in modes:
        result = np.zeros(64, np.uint32)
        findings = sm100.run(f"{body} bar.sync 0; {stores}", result, result, strict=rules).findings
        assert bool(findings) == bool(expected), findings
        for found in findings:
            assert found.kind == "unfinished copy" and expected in found.message
        assert result[:32].tolist() == list(range(32))


# Two CTAs of a cluster with an mbarrier each; the first thread of the first does something.
CLUSTER = """
    mov.u32 %r4, %cluster_ctarank;
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [smem+64], 1;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    setp.eq.u32 %p2, %r4, 0;
    and.pred %p3, %p1, %p2;
    @!%p3 bra DONE;
    {what}
DONE:
"""
TOGETHER = "barrier.cluster.arrive; barrier.cluster.wait;"
LATE = """
    mov.u32 %r7, 0;
SPIN:
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p5, %r7, 2000;
    @%p5 bra SPIN;
"""
ARRIVE = """
    mov.u32 %r5, smem;
    mapa.shared::cluster.u32 %r5, %r5, 1;
    mbarrier.arrive.shared::cluster.b64 _, [%r5+64];
"""
TO_BOTH = """
    mov.u16 %h0, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 \
[smem+64], %h0;
"""
ENDED = "an mbarrier of CTA 1 of the cluster is used, which has ended"
MAY_HAVE_ENDED = ENDED.replace("has", "may have")


def in_cluster(what: str, end: str = "", **options: Any) -> list[emulator.Finding]:
    """Findings where one CTA does something, and `end` follows in both."""
    empty = np.zeros(64, np.uint32)
    body = CLUSTER.replace("{what}", what) + end
    return sm100.run(body, empty, empty, cluster=2, threads=32, **options).findings


def test_an_arrival_at_a_cta_of_the_cluster_that_has_ended() -> None:
    assert not in_cluster(ARRIVE, TOGETHER)
    (found,) = in_cluster(LATE + ARRIVE)
    assert found.kind == "barrier misuse" and found.message.startswith(ENDED)
    assert found.instruction.startswith("mbarrier.arrive")


def test_a_commit_that_arrives_at_a_cta_that_has_ended_since() -> None:
    """Kernels that run on GPUs do this: strict alone finds it. Not a commit issued so late."""
    for order in ("eager", "deferred"):  # in the first it arrives in time
        for strict in (False, ["registers", "copies"]):
            assert not in_cluster(TO_BOTH, TOGETHER, order=order, strict=strict)
        for strict in (True, ["commits"]):
            found, *_ = in_cluster(TO_BOTH, TOGETHER, order=order, strict=strict)
            assert found.kind == "barrier misuse" and found.message.startswith(MAY_HAVE_ENDED)
            assert found.instruction.startswith("tcgen05.commit")
    kinds = [found.kind for found in in_cluster(LATE + TO_BOTH)]
    assert kinds == ["tensor memory misuse", "barrier misuse"]


# The first of four CTAs copies 16 bytes to itself, which count at the mbarrier of another.
COPY = """
    mov.u32 %r4, %cluster_ctarank;
    mov.u32 %r5, smem;
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [smem+64], 1;
    setp.eq.u32 %p4, %r4, {owner};
    @%p4 mbarrier.arrive.expect_tx.shared.b64 _, [smem+64], 16;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    setp.eq.u32 %p2, %r4, 0;
    and.pred %p3, %p1, %p2;
    @!%p3 bra DONE;
    mapa.shared::cluster.u32 %r6, %r5, {owner};
    mov.u32 %r7, 0;
    {copy}
DONE:
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""


LOAD_BOX = """
    cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{group} \
[%r5], [%d0, {%r7}], [%r6+64];
"""
LOAD = """
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%d0], 16, [%r6+64];
"""
WITHIN_CLUSTER = """
    st.shared.v4.b32 [smem+16], {%r7, %r7, %r7, %r7};
    fence.proxy.async.shared::cta;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes \
[%r5], [smem+16], 16, [%r6+64];
"""


@pytest.mark.parametrize(
    ("owner", "group", "message"),
    [
        (0, "", ""),
        (1, "", "without .cta_group::2"),
        (1, ".cta_group::2", ""),
        (2, ".cta_group::2", "another pair"),
    ],
)
def test_a_box_that_counts_at_the_mbarrier_of_another_cta(
    owner: int, group: str, message: str
) -> None:
    data = np.arange(64, dtype=np.uint32)
    tensor_map = np.zeros(32, np.uint32)  # of one box of 4 words; see `tma.decode`
    tensor_map[:2] = np.array([data.ctypes.data], np.uint64).view(np.uint32)
    tensor_map[2], tensor_map[8], tensor_map[13] = 2 | 2 << 7, 4 - 1, 4 - 1 << 24
    body = COPY.replace("{copy}", LOAD_BOX)
    body = body.replace("{owner}", str(owner)).replace("{group}", group)
    findings = sm100.run(body, tensor_map, data, cluster=4, threads=32).findings
    assert bool(findings) == bool(message), findings
    for found in findings:
        assert found.kind == "barrier misuse"
        expected = f"a box goes to CTA 0 of the cluster and counts at an mbarrier of CTA {owner}: "
        assert found.message.startswith(expected + message)


@pytest.mark.parametrize("copy", [LOAD, WITHIN_CLUSTER], ids=["from global memory", "within"])
def test_a_bulk_copy_that_counts_at_the_mbarrier_of_another_cta(copy: str) -> None:
    data = np.arange(64, dtype=np.uint32)
    for owner in (0, 1):
        body = COPY.replace("{copy}", copy).replace("{owner}", str(owner))
        found = sm100.run(body, data, data.copy(), cluster=4, threads=32).findings
        assert [(one.kind, one.message[:73]) for one in found] == owner * [
            (
                "barrier misuse",
                "a bulk copy goes to CTA 0 of the cluster and counts at an mbarrier of CTA",
            )
        ]


def test_warps_that_write_the_same_bytes_by_one_instruction_race() -> None:
    empty = np.zeros(64, np.uint32)
    store = "st.shared.b32 [smem+16], %r0;"
    (found,) = sm100.run(store, empty, empty, threads=64).findings
    assert found.kind == "race"
    assert found.message.startswith("write of shared memory at byte 16 and the write of warp 1 at")
    assert not sm100.run(store, empty, empty, threads=32).findings


# Two CTAs of one warp; %p2 is in the first of them alone, %r7 is smem in the other one.
PEERS = """
    mov.u32 %r4, %cluster_ctarank;
    setp.eq.u32 %p2, %r4, 0;
    mov.u32 %r5, smem;
    xor.b32 %r6, %r4, 1;
    mapa.shared::cluster.u32 %r7, %r5, %r6;
"""


@pytest.mark.parametrize("by", ["who wrote", "who reads"])
def test_a_fence_for_own_shared_memory_is_none_for_another_ctas(by: str) -> None:
    """By the CTA that wrote; the one in whose memory it is may fence it as its own."""
    result = np.zeros(64, np.uint32)
    for space, found in (("shared::cta", by == "who wrote"), ("shared::cluster", False)):
        fence = f"fence.proxy.async.{space};"
        sides = (fence, "") if by == "who wrote" else ("", fence)
        body = f"""
    {PEERS}
    shl.b32 %r8, %r0, 2;
    add.u32 %r8, %r8, %r7;
    @%p2 st.shared::cluster.b32 [%r8], %r0;
    {sides[0]}
    {TOGETHER}
    {sides[1]}
    bar.warp.sync -1;
    @%p2 bra DONE;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r5], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
    """
        findings = sm100.run(body, result, result, cluster=2, threads=32).findings
        assert bool(findings) == found, findings
        if found:
            assert findings[0].kind == "missing proxy fence"
            assert "the write of warp 0 at @%p2 st.shared::cluster" in findings[0].message


ARRIVE_THERE = "@%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];"
STORE_THERE = "@%p3 st.shared::cluster.b32 [%r7+16], %r0;"
AWAIT = """
    @!%p2 bra SEEN;
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p4, [smem], 0;
    @!%p4 bra AGAIN;
SEEN:
"""


@pytest.mark.parametrize(
    ("act", "end", "kind"),
    [
        (ARRIVE_THERE, "", "barrier misuse"),
        (ARRIVE_THERE, AWAIT, ""),
        (ARRIVE_THERE, TOGETHER, ""),
        (ARRIVE_THERE, "barrier.cluster.arrive.relaxed; barrier.cluster.wait;", ""),
        (STORE_THERE, "", "race"),
        (STORE_THERE + ARRIVE_THERE, AWAIT, ""),
        (STORE_THERE, TOGETHER, ""),
        (TOGETHER + ARRIVE_THERE, "", "barrier misuse"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_cta_must_not_end_before_others_are_done_with_it(
    act: str, end: str, kind: str, seed: int
) -> None:
    """Whichever of the two is first, in this run."""
    body = f"""
    {PEERS}
    not.pred %p5, %p2;
    and.pred %p3, %p1, %p5;
    @%p1 mbarrier.init.shared.b64 [smem], 1;
    fence.mbarrier_init.release.cluster;
    {TOGETHER}
    {act}
    bar.warp.sync -1;
    {end}
    """
    empty = np.zeros(64, np.uint32)
    options = dict(order="random", seed=seed) if seed else {}
    findings = sm100.run(body, empty, empty, cluster=2, threads=32, **options).findings
    assert [found.kind for found in findings] == ([kind] if kind else []), findings
    if kind:
        assert "of CTA 0 of the cluster is used, which" in findings[0].message
