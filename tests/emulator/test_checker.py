"""The checker as its user sees it: orders, switches, reports, and kernels that overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from hopwell import emulator

from ..kernels.built import build
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
        options=emulator.Options(counters=False, order=order, seed=seed),
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
    emulator.run(dependent, 1, source, between, target)
    assert target.tolist() == [2] * 32
    with pytest.raises(emulator.KernelFault, match="griddepcontrol") as fault:
        emulator.run(dependent, 0, source, between, target)
    (finding,) = fault.value.findings
    assert finding.kind == "race"
    assert "argument 2 may still be written by the kernel before" in finding.message
    assert finding.kernel.startswith("kernel_cutlass_second")
