"""Removes or alters, one at a time, every synchronising instruction of a kernel's PTX.

A mutant is caught if the checker names a fault under one of a few orders of execution. What only
computes with other values, a product that adds where it should not or that takes other columns, may
also be caught by wrong outputs. What is not caught must stand in `harmless.py` with the reason. Run
by hand for the whole table:

    make mutation
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import sys
from collections.abc import Callable, Collection, Iterator

import torch

from hopwell import emulator
from hopwell.emulator import loader, ptx
from hopwell.emulator.report import Borne
from hopwell.emulator.session import Session

from .harmless import HARMLESS

# Tried in this order until one of them shows a fault.
ORDERS = [("eager", 0), ("deferred", 0), *(("random", seed) for seed in range(8))]

# These can only be dropped.
DROPPED = (
    *("fence.", "membar", "bar.warp", "barrier.cluster", "wgmma.fence"),
    *("tcgen05.wait", "tcgen05.fence", "tcgen05.relinquish"),
)

# Edits that let the kernel compute something else: wrong outputs show them too.
OTHER_COLUMNS = 32  # further on in tensor memory
OTHER_ROWS = 64  # of 16 bytes further on in shared memory, eight rows of 128 bytes: a descriptor's
NUMBERS = ("adds or not: flipped", "A on", "B on", "D on", "columns on", "the other CTA")

Outputs = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """Kernels and an input: `run` calls them and returns their outputs."""

    run: Callable[[], Outputs]
    grid: tuple[int, int, int] | None = None  # in place of the launch's own: fewer CTAs, more turns
    strict: bool | Collection[Borne] = False  # as `emulator.Options` has it


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

    @property
    def kind(self) -> str:
        """How it was caught; empty if it was not."""
        if self.finding is not None:
            return self.finding.kind
        return "wrong numbers" if self.changed and self.mutant.edit in NUMBERS else ""


def mutants_of(launch: loader.Launch) -> Iterator[Mutant]:
    """Every mutant of a launched kernel."""
    kernel = ptx.parse(launch.ptx, launch.entry)
    product: ptx.Instruction | None = None  # the last one, with no commit behind it
    for instruction in kernel.instructions:
        start, stop = instruction.span
        named = launch.entry, instruction.index
        what = instruction.text, instruction.source
        for edit, replacement in edits(instruction):
            text = launch.ptx[:start] + replacement + launch.ptx[stop:]
            yield Mutant(*named, edit, *what, launch.ptx, text)
        if instruction.opcode.startswith("tcgen05.commit"):
            if product is not None:
                text = _overtaken(launch, product, instruction)
                yield Mutant(*named, "before the last product", *what, launch.ptx, text)
            product = None
        elif instruction.opcode.startswith("tcgen05.mma"):
            product = instruction


def _overtaken(launch: loader.Launch, product: ptx.Instruction, commit: ptx.Instruction) -> str:
    """The PTX with a product issued behind the commit that it came before, with what it had."""
    guard, opcode, operands = _parts(product)
    kinds = {0: "b32", 3: "b32", len(operands) - 1: "pred"}  # else descriptors
    saved, names = "", []
    for i, operand in enumerate(operands):
        if operand.startswith("{"):  # lanes left out: constants
            names.append(("", "", operand))
            continue
        bare, brackets = operand.strip("[]"), operand.startswith("[")
        base, _, offset = (part.strip() for part in bare.partition("+"))
        kind = "b32" if brackets else kinds.get(i, "b64")
        if kind == "pred" and base.isdigit():
            saved += f"setp.ne.u32 late_{i}, {base}, 0; "
        else:
            saved += f"mov.{kind} late_{i}, {base}; "
        if offset:
            saved += f"add.u32 late_{i}, late_{i}, {offset}; "
        names.append((kind, f"late_{i}", f"[late_{i}]" if brackets else f"late_{i}"))
    held = (
        "".join(f".reg .{kind} {name}; " for kind, name, _ in names if name) + ".reg .pred leader; "
    )
    leads = guard.strip().removeprefix("@") or "1"
    saved += "setp.ne.u32 leader, 1, 0; " if leads == "1" else f"mov.pred leader, {leads}; "
    late = f" @leader {opcode} {', '.join(name for *_, name in names)};"
    text, body = launch.ptx, launch.ptx.index("{", launch.ptx.index(")", _entry(launch))) + 1
    (a, b), c = product.span, commit.span[1]
    return text[:body] + held + text[body:a] + saved + text[b:c] + late + text[c:]


def _entry(launch: loader.Launch) -> int:
    """Where the kernel's name stands before its parameters."""
    return launch.ptx.index(f".entry {launch.entry}(")


def edits(ins: ptx.Instruction) -> Iterator[tuple[str, str]]:
    """(what is done, PTX to put in its place); nothing for what does not synchronise."""
    guard, opcode, operands = _parts(ins)
    body = f"{opcode} {', '.join(operands)}"
    head = opcode.split(".")

    def with_operand(i: int, compute: str, kind: str = "b32", name: str = "mutant") -> str:
        """The instruction with operand i replaced by the result of `compute`."""
        changed = [*operands[:i], name, *operands[i + 1 :]]
        return f"{{ .reg .{kind} mutant; {compute}; {guard}{opcode} {', '.join(changed)}; }}"

    def moved(i: int, by: int) -> str:
        """The instruction with another address, or descriptor, in operand i."""
        operand = operands[i]
        if not operand.startswith("["):
            return with_operand(i, f"add.s64 mutant, {operand}, {by}", "b64")
        base, _, offset = (part.strip() for part in operand.strip("[]").partition("+"))
        return with_operand(
            i, f"add.u32 mutant, {base}, {int(offset or '0', 0) + by}", name="[mutant]"
        )

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
        if "multicast::cluster" in opcode:
            for rank in (0, 1):
                compute = f"and.b16 mutant, {operands[1]}, {1 << rank}"
                yield f"to CTA {rank} alone", with_operand(1, compute, "b16")
    elif opcode.startswith(("tcgen05.alloc", "tcgen05.dealloc")):
        yield "dropped", ""
        yield "columns halved", with_operand(1, f"shr.u32 mutant, {operands[1]}, 1")
    elif opcode.startswith("tcgen05.mma"):
        adds, source = operands[-1], "[" if operands[1].startswith("[") else ""
        flip = f"setp.{'eq' if adds != '0' else 'ne'}.u32 mutant, 0, 1"
        if not adds.isdigit():
            flip = f"not.pred mutant, {adds}"
        yield "adds or not: flipped", with_operand(len(operands) - 1, flip, "pred")
        yield "D on", moved(0, OTHER_COLUMNS)
        yield "A on", moved(1, OTHER_COLUMNS if source else OTHER_ROWS)
        yield "B on", moved(2, OTHER_ROWS)
    elif opcode.startswith(("tcgen05.ld", "tcgen05.st")):
        where = next(i for i, operand in enumerate(operands) if operand.startswith("["))
        yield "columns on", moved(where, OTHER_COLUMNS)
        yield "lanes on", moved(where, 32 << 16)
    elif opcode.startswith("mapa"):
        yield "the other CTA", with_operand(2, f"xor.b32 mutant, {operands[2]}, 1")
    elif opcode.startswith("cp.async.bulk.tensor") and "mbarrier::complete_tx::bytes" in opcode:
        if "cta_group::2" in head:
            yield "not as a pair", f"{guard}{body.replace('.cta_group::2', '')};"
        if "multicast::cluster" in opcode:
            for rank in (0, 1):
                compute = f"and.b16 mutant, {operands[3]}, {1 << rank}"
                yield f"to CTA {rank} alone", with_operand(3, compute, "b16")
    elif opcode.startswith("cp.async.bulk.shared::cluster.shared::cta"):
        yield "dropped", ""
        yield "bytes halved", with_operand(2, f"shr.u32 mutant, {operands[2]}, 1")
    elif opcode.startswith(DROPPED) or "commit_group" in head:
        yield "dropped", ""
    elif "wait_group" in head:
        yield "dropped", ""
        yield "one group more", f"{guard}{opcode} {int(operands[0]) + 1};"
    elif head[0] in ("shfl", "vote", "redux", "match", "elect") and operands[-1] == "-1":
        changed = [*operands[:-1], "0x7fffffff"]
        yield "lane 31 not in the mask", f"{guard}{opcode} {', '.join(changed)};"


def _parts(ins: ptx.Instruction) -> tuple[str, str, list[str]]:
    """(guard, opcode, operands) as they stand in the PTX."""
    guard = f"@{'!' if ins.negated else ''}{ins.predicate} " if ins.predicate else ""
    body = ins.text[len(ins.text.split(None, 1)[0]) :].strip() if guard else ins.text
    opcode, _, rest = body.partition(" ")
    return guard, opcode, [part.strip() for part in _split(rest)]


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
    """(outputs, finding or None, launches by PTX and entry) of one run."""
    options = emulator.Options(
        counters=False,
        order=order,
        seed=seed,
        max_findings=1,
        strict=case.strict,
        raise_on_fault=False,
    )
    session = _Session(options, case, mutant)
    with loader.intercept(session.launch):
        outputs = case.run()
    found = session.report.findings
    return outputs, found[0] if found else None, session.launches


def judge(case: Case, mutant: Mutant, expected: Outputs) -> Verdict:
    """Runs one mutant until an order shows a fault."""
    changed = False
    for order, seed in ORDERS:
        outputs, finding, _ = execute(case, order, seed, mutant)
        if finding is not None:
            return Verdict(mutant, finding, f"{order} {seed}", False)
        changed |= any(not _close(a, b) for a, b in zip(outputs, expected, strict=True))
        if changed and mutant.edit in NUMBERS:
            break
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
        self.caught = [v for v in self.verdicts if v.kind]
        self.missed: list[Verdict] = []
        left = {place: count for place, (count, _) in HARMLESS.get(self.name, {}).items()}
        for verdict in self.verdicts:
            if not verdict.kind:
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
        kinds = collections.Counter(v.kind for v in self.caught)
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
