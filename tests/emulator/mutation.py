"""Removes or alters, one at a time, every synchronising instruction of a kernel's PTX.

A mutant is caught if the checker names a fault under one of a few orders of execution. What is not
caught must stand in `harmless.py` with the reason. Run by hand for the whole table:

    make mutation
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import sys
from collections.abc import Callable, Iterator

import torch

from hopwell import emulator
from hopwell.emulator import loader, ptx
from hopwell.emulator.session import Session

from .harmless import HARMLESS

# Tried in this order until one of them shows a fault.
ORDERS = [("eager", 0), ("deferred", 0), *(("random", seed) for seed in range(4))]

# These can only be dropped.
DROPPED = (
    *("fence.", "membar", "bar.warp", "barrier.cluster", "wgmma.fence"),
    *("tcgen05.wait", "tcgen05.dealloc"),
)

Outputs = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """Kernels and an input: `run` calls them and returns their outputs."""

    run: Callable[[], Outputs]
    grid: tuple[int, int, int] | None = None  # in place of the launch's own: fewer CTAs, more turns


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit of one instruction."""

    kernel: str
    index: int  # of the instruction
    edit: str
    instruction: str
    source: tuple[str, int]
    original: str  # the whole PTX, which may hold other kernels
    text: str  # and edited

    @property
    def place(self) -> str:
        """Where, in words that outlive small changes of the kernel: edit, opcode, source line."""
        opcode = next(w for w in self.instruction.split() if not w.startswith("@"))
        return f"{self.edit}: {opcode.rstrip(';')} in `{linecache.getline(*self.source).strip()}`"


@dataclasses.dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    finding: emulator.Finding | None
    order: str
    changed: bool  # outputs differ from the unmutated kernel's though nothing was found


def mutants_of(launch: loader.Launch) -> Iterator[Mutant]:
    """Every mutant of a launched kernel."""
    kernel = ptx.parse(launch.ptx, launch.entry)
    for instruction in kernel.instructions:
        start, stop = instruction.span
        for edit, replacement in edits(instruction):
            text = launch.ptx[:start] + replacement + launch.ptx[stop:]
            named = launch.entry, instruction.index, edit, instruction.text, instruction.source
            yield Mutant(*named, launch.ptx, text)


def edits(ins: ptx.Instruction) -> Iterator[tuple[str, str]]:
    """(what is done, PTX to put in its place); nothing for what does not synchronise."""
    guard = f"@{'!' if ins.negated else ''}{ins.predicate} " if ins.predicate else ""
    body = ins.text[len(ins.text.split(None, 1)[0]) :].strip() if guard else ins.text
    opcode, _, rest = body.partition(" ")
    operands = [part.strip() for part in _split(rest)]
    head = opcode.split(".")

    def with_operand(i: int, compute: str) -> str:
        """The instruction with operand i replaced by the result of `compute`."""
        changed = [*operands[:i], "mutant", *operands[i + 1 :]]
        return f"{{ .reg .b32 mutant; {compute}; {guard}{opcode} {', '.join(changed)}; }}"

    if opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        yield "wait dropped", f"{guard}setp.eq.u32 {operands[0]}, 0, 0;"
        yield "parity flipped", with_operand(2, f"xor.b32 mutant, {operands[2]}, 1")
    elif "expect_tx" in head and head[0] == "mbarrier":
        size = operands[-1]
        last = len(operands) - 1
        yield "dropped", ""
        yield "bytes halved", with_operand(last, f"shr.u32 mutant, {size}, 1")
        yield "bytes doubled", with_operand(last, f"shl.b32 mutant, {size}, 1")
        if "arrive" in head:
            plain = opcode.replace(".expect_tx", "")
            yield "bytes not expected", f"{guard}{plain} {', '.join(operands[:-1])};"
    elif opcode.startswith("mbarrier.arrive"):
        yield "dropped", ""
        yield "doubled", f"{guard}{body}; {guard}{body};"
    elif opcode.startswith("mbarrier.init"):
        yield "dropped", ""
        yield "count + 1", with_operand(1, f"add.u32 mutant, {operands[1]}, 1")
        yield "count - 1", with_operand(1, f"sub.u32 mutant, {operands[1]}, 1")
    elif opcode.startswith(("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive")):
        yield "dropped", ""
        if len(operands) > 1:
            yield "32 threads more", with_operand(1, f"add.u32 mutant, {operands[1]}, 32")
    elif opcode.startswith("tcgen05.commit"):
        yield "dropped", ""
        yield "doubled", f"{guard}{body}; {guard}{body};"
    elif opcode.startswith(DROPPED) or "commit_group" in head:
        yield "dropped", ""
    elif "wait_group" in head:
        yield "dropped", ""
        yield "one group more", f"{guard}{opcode} {int(operands[0]) + 1};"
    elif head[0] in ("shfl", "vote", "redux", "match", "elect") and operands[-1] == "-1":
        changed = [*operands[:-1], "0x7fffffff"]
        yield "lane 31 not in the mask", f"{guard}{opcode} {', '.join(changed)};"


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[") - (char in "}]")
        if char == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]] if text.strip() else []


class _Session(Session):
    """Runs a mutant in place of the kernel it was made from, and keeps every launch."""

    def __init__(self, options: emulator.Options, case: Case, mutant: Mutant | None) -> None:
        super().__init__(options)
        self.case, self.mutant = case, mutant
        self.launches: dict[tuple[str, str], loader.Launch] = {}

    def launch(self, launch: loader.Launch) -> None:
        self.launches.setdefault((launch.ptx, launch.entry), launch)
        mutant = self.mutant
        if mutant and (launch.ptx, launch.entry) == (mutant.original, mutant.kernel):
            launch = dataclasses.replace(launch, ptx=mutant.text)
        if self.case.grid:
            launch = dataclasses.replace(launch, grid=self.case.grid)
        super().launch(launch)


def execute(case: Case, order: str, seed: int, mutant: Mutant | None = None) -> tuple:
    """(outputs or None, finding or None, launches by PTX and entry) of one run."""
    options = emulator.Options(counters=False, order=order, seed=seed, max_findings=1)
    session = _Session(options, case, mutant)
    outputs, finding = None, None
    with loader.intercept(session.launch):
        try:
            outputs = case.run()
        except emulator.KernelFault as fault:
            finding = fault.findings[0]
    return outputs, finding, session.launches


def judge(case: Case, mutant: Mutant, expected: Outputs) -> Verdict:
    """Runs one mutant until an order shows a fault."""
    changed = False
    for order, seed in ORDERS:
        outputs, finding, _ = execute(case, order, seed, mutant)
        if finding is not None:
            return Verdict(mutant, finding, f"{order} {seed}", False)
        changed |= any(not _close(a, b) for a, b in zip(outputs, expected, strict=True))
    return Verdict(mutant, None, "", changed)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the order of fp32 sums and the rounding that follows."""
    finite = b.float().nan_to_num(0, 0, 0)
    return torch.allclose(
        a.float(), b.float(), rtol=2**-6, atol=2**-8 * finite.abs().max().item(), equal_nan=True
    )


def survey(case: Case, every: int = 1) -> list[Verdict]:
    """Verdicts on the mutants, or on each `every`-th, of every kernel that the case launches."""
    expected, finding, launches = execute(case, "eager", 0)
    assert finding is None, f"the unmutated kernel has a finding: {finding}"
    return [
        judge(case, mutant, expected)
        for launch in launches.values()
        for mutant in list(mutants_of(launch))[::every]
    ]


@dataclasses.dataclass
class Score:
    """A survey weighed against the committed list; `stale` has meaning for a whole survey alone."""

    name: str
    verdicts: list[Verdict]

    def __post_init__(self) -> None:
        self.caught = [v for v in self.verdicts if v.finding is not None]
        self.missed: list[Verdict] = []
        left = {place: count for place, (count, _) in HARMLESS.get(self.name, {}).items()}
        for verdict in self.verdicts:
            if verdict.finding is None:
                place = verdict.mutant.place
                if left.get(place, 0) and not verdict.changed:
                    left[place] -= 1
                else:
                    self.missed.append(verdict)
        self.stale = sorted(place for place, count in left.items() if count)

    @property
    def share(self) -> float:
        """Caught, of all that are not harmless."""
        return len(self.caught) / max(1, len(self.caught) + len(self.missed))

    def __str__(self) -> str:
        excused = len(self.verdicts) - len(self.caught) - len(self.missed)
        lines = [
            f"{self.name}: {len(self.verdicts)} mutants, {len(self.caught)} caught, {excused} "
            f"harmless, {len(self.missed)} missed: {self.share:.1%} of the not-harmless caught"
        ]
        kinds = collections.Counter(v.finding.kind for v in self.caught if v.finding)
        lines += [f"  {count:4} {kind}" for kind, count in kinds.most_common()]
        for place, count in collections.Counter(v.mutant.place for v in self.missed).items():
            changed = any(v.changed for v in self.missed if v.mutant.place == place)
            lines.append(f"  missed {count} x {place}{' (OUTPUT CHANGED)' if changed else ''}")
        lines += [f"  in the list of harmless ones for nothing: {place}" for place in self.stale]
        return "\n".join(lines)


def main(names: list[str]) -> None:
    from . import cases

    for name in names:
        print(Score(name, survey(cases.CASES[name]())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["forward-64", "forward-128"])
