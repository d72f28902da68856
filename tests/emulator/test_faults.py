"""Faults in the source of kernels: the checker finds each and names it, and the line it is in."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hopwell import emulator

from . import backward_faults, faults_bwd_sm100, faults_sm100
from .backward_faults import BackwardFault
from .faults import FAULTS, Fault, Report, SourceFault, findings, line_of, other_line
from .faults_bwd_sm100 import BlackwellBackwardFault
from .faults_sm100 import BlackwellFault
from .kernels import faulty
from .kernels.launch import launch


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_in_the_forward_kernel(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = findings(fault, tmp_path, monkeypatch)
    assert found, "nothing was found"
    check(found[0], fault, tmp_path)
    assert "FwdSm90" in found[0].kernel


@pytest.mark.parametrize("fault", backward_faults.FAULTS, ids=lambda fault: fault.name)
def test_fault_in_the_backward_kernels(
    fault: BackwardFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = backward_faults.verdict(fault, tmp_path, monkeypatch)
    assert found, "nothing was found"
    check(found, fault, tmp_path)


def test_no_fault_in_the_backward_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backward_faults.verdict(backward_faults.SOUND, tmp_path, monkeypatch) is None


@pytest.mark.parametrize("fault", faults_sm100.FAULTS, ids=lambda fault: fault.name)
def test_fault_in_blackwells_forward_kernel(
    fault: BlackwellFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = faults_sm100.verdict(fault, tmp_path, monkeypatch)
    assert found, "nothing was found"
    check(found, fault, tmp_path)


def test_no_fault_in_blackwells_forward_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults_sm100.verdict(faults_sm100.SOUND, tmp_path, monkeypatch) is None


@pytest.mark.parametrize("fault", faults_bwd_sm100.FAULTS, ids=lambda fault: fault.name)
def test_fault_in_blackwells_backward_kernel(
    fault: BlackwellBackwardFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = faults_bwd_sm100.verdict(fault, tmp_path, monkeypatch)
    assert found, "nothing was found"
    check(found, fault, tmp_path)


@pytest.mark.parametrize("none", faults_bwd_sm100.SOUND, ids=lambda none: none.name)
def test_no_fault_in_blackwells_backward_kernel(
    none: BlackwellBackwardFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults_bwd_sm100.verdict(none, tmp_path, monkeypatch) is None


def check(found: emulator.Finding, fault: SourceFault, folder: Path) -> None:
    """It says what the fault is, and where."""
    assert found.kind == fault.kind
    assert any(says(found, report, folder) for report in fault.reports), found


def says(found: emulator.Finding, report: Report, folder: Path) -> bool:
    said = re.search(report.message, found.message)
    if not said or report.line not in line_of(found):
        return False
    return not report.other or report.other in other_line(said, folder)


class Mistake(NamedTuple):
    """A branch of `faulty.build_mistakes`, and what must be said of it."""

    which: int
    kind: str
    message: str  # regular expression
    line: str  # in the source line that the finding names


MISTAKES = [
    Mistake(
        faulty.NO_BARRIER,
        "race",
        r"read of shared memory at byte 256 and the write of warp 1 at faulty\.py:\d+: st\.shared"
        r".* with no synchronisation between them",
        "# of another warp",
    ),
    Mistake(
        faulty.NEVER_WRITTEN,
        "uninitialised read",
        r"shared memory is read before anything wrote it",
        "# holds nothing",
    ),
    Mistake(
        faulty.PAST_SHARED,
        "out of bounds",
        r"write of 4 bytes at byte 640 of a CTA's 640 bytes of shared memory",
        "buffer[thread + 1] = source[thread]",
    ),
    Mistake(
        faulty.PAST_GLOBAL,
        "out of bounds",
        r"read of 4 bytes of global memory at 0x\w+: 0 bytes past the end of argument 1",
        "target[thread] = source[thread + 1]",
    ),
    Mistake(
        faulty.MISALIGNED_STORE,
        "misaligned",
        r"global address of a 16-byte access is not a multiple of 16",
        'asm("st.global.v4.b32',
    ),
    Mistake(
        faulty.MISALIGNED_BULK,
        "misaligned",
        r"a bulk copy needs addresses and size in multiples of 16 bytes .*warp 0\)",
        "asm(_BULK,",
    ),
    Mistake(
        faulty.TWO_COUNTS,
        "barrier misuse",
        r"a barrier is used for 64 threads and, at faulty\.py:\d+: bar\.sync 1, 128, for 128",
        "# half of them",
    ),
    Mistake(
        faulty.ARRIVALS,
        "barrier misuse",
        r"128 arrivals at mbarrier 0x400 that waits for 127 of 127",
        "cute.arch.mbarrier_arrive(barrier)",
    ),
    Mistake(
        faulty.CP_ASYNC,
        "race",
        r"read of shared memory at byte 128 and the write of cp\.async of warp 0 at faulty\.py:\d+"
        r": cp\.async\.ca.* with no synchronisation between them",
        "# not waited for",
    ),
    Mistake(
        faulty.OPERAND_A,
        "register in flight",
        r"a register is used while a wgmma that has not been waited for may still write or read it",
        "# a0 is written too early",
    ),
]


@cache
def mistakes() -> Any:
    return faulty.build_mistakes()


def run(which: int) -> tuple[torch.Tensor, emulator.Report]:
    source = torch.arange(faulty.THREADS, dtype=torch.int32).view(torch.uint32)
    target = torch.zeros_like(source)
    options = emulator.Options(raise_on_fault=False)
    return target, emulator.run(mistakes(), which, source, target, options=options)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.line)
def test_mistake(mistake: Mistake) -> None:
    _, report = run(mistake.which)
    (found,) = report.findings
    assert found.kind == mistake.kind
    assert re.search(mistake.message, found.message), found.message
    assert mistake.line in line_of(found)


def test_no_mistake() -> None:
    target, report = run(faulty.NONE)
    assert not report.findings
    assert target.tolist() == [i ^ 32 for i in range(faulty.THREADS)]


def test_more_shared_memory_than_an_sm_has() -> None:
    target = torch.empty(32, dtype=torch.uint32)
    launch(faulty.build_greedy(227 << 10), target, outputs=(target,))
    message = "build_greedy|245760 bytes of dynamic shared memory; needed: at most 232448 bytes"
    with pytest.raises(emulator.loader.LaunchError, match=message):
        launch(faulty.build_greedy(240 << 10), target, outputs=(target,))
