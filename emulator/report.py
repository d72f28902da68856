"""What a run tells: options in; findings and counters out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .recording import Recording
from .translate import CLASSES

# What PTX forbids and processors bear; see `Options.strict`.
Borne = Literal["registers", "copies", "commits"]


@dataclass(frozen=True)
class Options:
    """How to run.

    Args:
        check: look for races, uninitialised reads, misuse of barriers and the like.
        counters: count bytes, bank conflicts, instructions and tensor-core work.
        order: when asynchronous work completes and who runs next: "eager" at once and in order,
            "deferred" as late as allowed, "random" in a seeded order of warps, CTAs, completions,
            where some warps are so slow that they move only while nothing else can.
        seed: for order "random".
        raise_on_fault: raise `KernelFault` after a launch with findings; else only report.
        max_findings: stop the launch after so many.
        exact: sum 16-bit products on the tensor cores, and interpolate 2**x, as the hardware does,
            cutting off where it does; slower.
        strict: report also what PTX forbids and processors are known to bear, since kernels that
            run on them do it: registers of a tcgen05.ld that are used before tcgen05.wait::ld
            ("registers"); a bulk copy out of shared memory that is in no group when its CTA ends,
            after a wait for all groups ("copies"); a tcgen05.commit that arrives in a CTA which has
            ended since ("commits"). All of it, or what is named.
        record: keep what every warp does, for `emulator.cost`; in order "eager".
    """

    check: bool = True
    counters: bool = True
    order: Literal["eager", "deferred", "random"] = "eager"
    seed: int = 0
    raise_on_fault: bool = True
    max_findings: int = 20
    exact: bool = False
    strict: bool | Collection[Borne] = False
    record: bool = False

    def forbids(self, what: Borne) -> bool:
        return self.strict if isinstance(self.strict, bool) else what in self.strict


@dataclass(frozen=True)
class Finding:
    """One fault: its kind, what happened, and the instruction and Python line it happened at."""

    kind: str
    message: str
    kernel: str
    instruction: str
    file: str
    line: int

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "no line information"
        text = self.instruction if len(self.instruction) < 200 else self.instruction[:197] + "..."
        return f"{self.kind}: {self.message}\n  at {where}\n  in {self.kernel}: {text}"


class KernelFault(RuntimeError):
    """A launch on the emulator had findings."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


class Stop(Exception):
    """Ends a launch that cannot go on; the finding is recorded already."""


@dataclass
class Counters:
    """What one launch did.

    Bytes are counted where they cross the boundary named: `tma_*` by tensor and bulk copies,
    `ld_global`/`st_global` by ordinary accesses of lanes. `warps[w]` counts warp-instructions of
    the CTAs' w-th warp by class: issue (all), mufu, fma, tensor, shared, global, sync.
    """

    kernel: str = ""
    tma_load_bytes: int = 0
    tma_store_bytes: int = 0
    ld_global_bytes: int = 0
    st_global_bytes: int = 0
    shared_read_bytes: int = 0
    operand_b_bytes: int = 0  # of those, what tensor cores read as operand B
    shared_write_bytes: int = 0
    bank_conflicts: int = 0  # extra passes of shared-memory accesses by lanes
    tmem_read_bytes: int = 0  # tensor memory, by loads and as operands of the tensor cores
    tmem_write_bytes: int = 0
    tensor_flops: int = 0
    tensor_clocks: int = 0  # summed over CTAs, of one SM's tensor cores
    warps: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def global_read_bytes(self) -> int:
        return self.tma_load_bytes + self.ld_global_bytes

    @property
    def global_write_bytes(self) -> int:
        return self.tma_store_bytes + self.st_global_bytes

    @property
    def warp_instructions(self) -> int:
        return sum(w["issue"] for w in self.warps.values())

    def total(self, name: str) -> int:
        """Sum of one class over all warps."""
        return sum(w[name] for w in self.warps.values())

    def add_warp(self, warp: int, row: np.ndarray) -> None:
        counts = self.warps.setdefault(warp, dict.fromkeys(CLASSES, 0))
        for name, n in zip(CLASSES, row.tolist(), strict=True):
            counts[name] += n

    def __add__(self, other: Counters) -> Counters:
        total = Counters(self.kernel or other.kernel)
        for name, value in vars(self).items():
            if isinstance(value, int):
                setattr(total, name, value + getattr(other, name))
        for side in (self, other):
            for warp, counts in side.warps.items():
                total.add_warp(warp, np.array([counts[c] for c in CLASSES]))
        return total


@dataclass
class Report:
    """Findings, counters and recordings of all launches of a session, in order."""

    findings: list[Finding] = field(default_factory=list)
    launches: list[Counters] = field(default_factory=list)
    recordings: list[list[Recording]] = field(default_factory=list)  # of a launch: its CTAs

    @property
    def counters(self) -> Counters:
        """Sum over the launches."""
        total = Counters()
        for launch in self.launches:
            total = total + launch
        return total
