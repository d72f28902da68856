"""PTX blocks to Python source over NumPy rows: the emulator's compiler.

A unit is one warpgroup; every register is a row of its up to 128 lanes in one of four banks. Inside
a run of pure instructions, equal operations that do not depend on one another become one array
operation over many rows (`multiply(rf0_64_1, rf7, out=rf64_128_1)`): unrolled kernels execute tens
of instructions for one NumPy call. Each block has a version for all lanes and one under a mask `m`.

The generated code calls ufuncs, `ops` and the methods of `machine.Unit` by name.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import CodeType

import numpy as np

from . import emit_arithmetic, emit_effects, emit_tcgen05, ptx
from .emit import Emitter
from .ptx import Address, Instruction, Kernel
from .steps import DTYPE, Constant, Effect, Pure, Run, literal

_HANDLERS = emit_arithmetic.HANDLERS | emit_effects.HANDLERS | emit_tcgen05.HANDLERS
CLASSES = ("issue", "mufu", "fma", "tensor", "shared", "global", "sync")
_MUFU = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
_FMA = ("add", "sub", "mul", "fma", "mad")


@dataclass(slots=True)
class BlockCode:
    steps: list[Pure | Effect] = field(default_factory=list)
    batches: list[list[list[Pure]] | Effect] = field(default_factory=list)


class Program:
    """A kernel ready to run: register rows, and source of each block on demand."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.rows: dict[str, int] = {}
        self.size = {"P": 0, "H": 0, "R": 0, "D": 0}
        # What the code calls rows (letter and which) and constants.
        self.names: dict[str, tuple[str, int | slice] | np.ndarray] = {}
        self._constants: dict[tuple, str] = {}
        # Registers that tensor cores and tensor memory use or fill in their own time: a bit each.
        self.tracked: dict[str, int] = {}
        self.bits = 0  # how many
        self.loads = 0  # those that a tcgen05.ld fills
        self.followed: set[str] = set()  # registers to which those are moved
        # Of a run of operations by its first site: what each one reads, writes, and its site.
        self.touches: dict[int, list[tuple[int, int, int]]] = {}
        self._loaded: dict[int, int] = {}
        self._code: dict[tuple[int, bool, bool, bool], CodeType] = {}
        self.blocks = [BlockCode() for _ in kernel.blocks]
        self.falls = [b.index + 1 for b in kernel.blocks]
        self.static = np.zeros((len(kernel.blocks), len(CLASSES)), np.int64)
        named = Counter(
            name
            for ins in kernel.instructions
            for name in re.findall(r"[%$\w.]+", repr((ins.operands, ins.predicate)))
        )
        unread = {register for register in kernel.registers if named[register] == 1}
        for block in kernel.blocks:
            steps = self.blocks[block.index].steps
            emit = Emitter(kernel, _HANDLERS, unread, steps, block.index + 1)
            for instruction in block.instructions:
                emit.instruction(instruction)
                self._classify(block.index, instruction)
        self._track()
        for code in self.blocks:
            code.batches = _batches(_issued(_join(code.steps)))
        self._allocate()

    def _classify(self, block: int, ins: Instruction) -> None:
        head = ins.parts[0]
        count = self.static[block]
        count[0] += 1
        if head in _MUFU:
            count[1] += 1
        elif head in _FMA and ("f32" in ins or "f32x2" in ins):
            count[2] += 1
        elif head in ("wgmma", "tcgen05") and ins.parts[1] in ("mma_async", "mma"):
            count[3] += 1
        elif head in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix"):
            count[4 if "matrix" in head or any("shared" in p for p in ins.parts) else 5] += 1
        elif head in ("bar", "barrier", "mbarrier", "fence", "setmaxnreg"):
            count[6] += 1

    def _track(self) -> None:
        for ins in self.kernel.instructions:
            if ins.opcode.startswith("wgmma.mma"):
                self._number(r for o in ins.operands if isinstance(o, tuple) for r in o)
            elif ins.opcode.startswith("tcgen05.ld"):
                self._number(_loaded(ins))
                self.loads |= self.mask_of(_loaded(ins))
        if self.loads:
            self._follow()

    def _number(self, registers: Iterable[object]) -> None:
        for register in map(str, registers):
            if register not in self.tracked:
                self.tracked[register] = 1 << self.bits
                self.bits += 1

    def _follow(self) -> None:
        """What is moved on before it is loaded counts as loaded later: compilers do it early."""
        pures = [s for code in self.blocks for s in code.steps if isinstance(s, Pure)]
        written = Counter(register for register, _ in {(pure.dst, pure.site) for pure in pures})
        for pure in pures:
            if self._moves(pure) and written[pure.dst] == 1:
                bits = self.mask_of(pure.reads()) & self.loads
                if bits:
                    self.tracked[pure.dst] = self.tracked.get(pure.dst, 0) | bits
                    self.followed.add(pure.dst)

    def _moves(self, pure: Pure) -> bool:
        return self.kernel.instructions[pure.site].parts[0] == "mov"

    def mask_of(self, registers: Iterable[str]) -> int:
        bits = 0
        for register in registers:
            bits |= self.tracked.get(register, 0)
        return bits

    def _touched(self, pure: Pure) -> tuple[int, int, int]:
        """What it reads and writes of the tracked registers, and its site."""
        hidden = self.loads if pure.dst in self.followed else 0
        reads, writes = self.mask_of(pure.reads()), self.mask_of([pure.dst])
        return reads & ~hidden, writes & ~hidden, pure.site

    def loaded(self, site: int) -> int:
        """The registers that a tcgen05.ld writes."""
        if site not in self._loaded:
            self._loaded[site] = self.mask_of(_loaded(self.kernel.instructions[site]))
        return self._loaded[site]

    def _allocate(self) -> None:
        """Rows in order of use as a group: tensor cores' operands, then batches' destinations."""
        for ins in self.kernel.instructions:
            for operand in ins.operands:
                if isinstance(operand, tuple) and ins.parts[0] in ("wgmma", "tcgen05"):
                    self._place(str(r) for r in operand)
        for code in self.blocks:
            for item in code.batches:
                if isinstance(item, Effect):
                    self._place(item.writes)
                    continue
                for batch in item:
                    batch.sort(key=self._source_rows)
                    self._place(p.dst for p in batch)
        self._place(self.kernel.registers)

    def _source_rows(self, pure: Pure) -> list[int]:
        last = 1 << 30  # of registers that have no row yet
        return [self.rows.get(str(v), last) for kind, v in pure.srcs if kind not in "cn"]

    def _place(self, registers: Iterable[str]) -> None:
        for register in registers:
            if register in self.kernel.registers and register not in self.rows:
                bank = {"pred": "P", "b16": "H", "b32": "R", "b64": "D"}.get(
                    self.kernel.registers[register], "D"
                )
                self.rows[register] = self.size[bank]
                self.size[bank] += 2 if self.kernel.registers[register] == "b128" else 1

    # Source text ---------------------------------------------------------------------------------

    def view(self, letter: str, register: str) -> str:
        """Name of one register's row seen as `letter`, with a cast behind a colon."""
        base, _, cast = letter.partition(":")
        row = self.rows[register]
        name = f"r{base}{row}"  # r: a row; u8, f32, ... are types
        self.names[name] = (base, row)
        return f"{name}.astype({cast})" if cast else name

    def many(self, letter: str, registers: Sequence[str]) -> tuple[str, bool]:
        """An expression for several rows; the flag says whether it is a view (else a copy)."""
        rows = [self.rows[r] for r in registers]
        base, _, cast = letter.partition(":")
        tail = f".astype({cast})" if cast else ""
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        if step and all(b - a == step for a, b in itertools.pairwise(rows)):
            stop = rows[-1] + (1 if step > 0 else -1)
            name = f"r{base}{rows[0]}_{stop if stop >= 0 else 'x'}_{step}".replace("-", "n")
            self.names[name] = (base, slice(rows[0], stop if stop >= 0 else None, step))
            return name + tail, not cast
        return f"{base}_all[{self.constant(np.array(rows))}]{tail}", False

    def constant(self, value: np.ndarray) -> str:
        key = (value.dtype, value.shape, value.tobytes())
        name = self._constants.setdefault(key, f"k{len(self._constants)}")
        self.names[name] = value
        return name

    def code(self, pc: int, masked: bool, check: bool, trace: bool = False) -> CodeType:
        """The code of one block as a function of the mask `m`."""
        key = (pc, masked, check, trace)
        if key not in self._code:
            source = self.source(pc, masked, check, trace)
            module = compile(source, f"<{self.kernel.name[:40]} block {pc}>", "exec")
            (self._code[key],) = (c for c in module.co_consts if isinstance(c, CodeType))
        return self._code[key]

    def source(self, pc: int, masked: bool, check: bool, trace: bool = False) -> str:
        lines: list[str] = []
        ended = False
        for item in self.blocks[pc].batches:
            if isinstance(item, Effect):
                lines += self._effect(item, masked, check)
                ended = ended or (item.jump and item.guard is None)
            else:
                if check:
                    lines += self._touch([p for batch in item for p in batch])
                for batch in item:
                    lines += self._batch(batch, masked)
                    floats = trace and batch[0].letter == "f"
                    if traced := [p for p in batch if floats and p.dst in self.valued]:
                        rows, sites = [self.rows[p.dst] for p in traced], [p.site for p in traced]
                        lines.append(f"born({rows}, {sites}, m)")
        if not ended:
            lines.append(f"return {pc + 1 if pc + 1 < len(self.blocks) else -1}")
        return "def block(m):\n " + "\n ".join(lines) + "\n"

    @cached_property
    def valued(self) -> set[str]:
        """Registers whose value may go into an effect, and is not only compared."""
        steps = [step for code in self.blocks for step in code.steps]
        valued = {register for step in steps if isinstance(step, Effect) for register in step.reads}
        before = -1
        while len(valued) > before:
            before = len(valued)
            for step in reversed(steps):
                if isinstance(step, Pure) and step.letter != "p" and step.dst in valued:
                    valued.update(str(value) for kind, value in step.srcs if kind not in "cnp")
        return valued

    def _touch(self, pures: list[Pure]) -> list[str]:
        site = pures[0].site
        touched = sorted(map(self._touched, pures), key=lambda entry: entry[2])
        self.touches[site] = touched
        reads = writes = 0
        for read, written, _ in touched:
            reads |= read
            writes |= written
        return [f"touch({reads}, {writes}, {site})"] if reads | writes else []

    def _effect(self, item: Effect, masked: bool, check: bool) -> list[str]:
        lines: list[str] = []
        if check and not item.asynchronous:
            reads, writes = self.mask_of(item.reads), self.mask_of(item.writes)
            if isinstance(item, Run):
                self.touches[item.site] = [
                    (self.mask_of(read), self.mask_of(written), site)
                    for read, written, site in item.parts
                ]
            if reads | writes:
                lines.append(f"touch({reads}, {writes}, {item.site})")
        mask = "m"
        body = item.lines
        if item.guard and not item.jump:
            register, negated = item.guard
            row = self.view("p", register)
            guard = f"~{row}" if negated else row
            lines.append(f"q = m & {guard}" if masked else f"q = {guard} & live")
            lines.append("if cnz(q):")
            mask = "q"
            body = [" " + line for line in body]
        names = _Names(self, mask if (masked or mask == "q") else "None")
        return lines + [names.render(line, masked or mask == "q") for line in body]

    def _batch(self, batch: list[Pure], masked: bool) -> list[str]:
        if len(batch) > 1:
            dst, is_view = self.many(batch[0].letter, [p.dst for p in batch])
            wide = sum(
                1
                for i in range(len(batch[0].srcs))
                if batch[0].srcs[i][0] not in "cn"
                and len({p.srcs[i][1] for p in batch}) > 1
                and not self.many(batch[0].srcs[i][0], [str(p.srcs[i][1]) for p in batch])[1]
            )
            if is_view or len(batch) > 2 + wide:
                return self._render(batch, dst, is_view, masked)
            return [line for p in batch for line in self._batch([p], masked)]
        pure = batch[0]
        return self._render(batch, self.view(pure.letter, pure.dst), True, masked)

    def _render(self, batch: list[Pure], dst: str, is_view: bool, masked: bool) -> list[str]:
        pure = batch[0]
        args = [self._source(batch, i) for i in range(len(pure.srcs))]
        where = self._where(pure, masked)
        if where and pure.letter == "X":
            where += "[:, None]"
        if pure.direct and is_view:
            tail = f", where={where}" if where else ""
            return [f"{pure.code}({', '.join(args)}, out={dst}{pure.options}{tail})"]
        value = (
            f"{pure.code}({', '.join(args)}{pure.options})"
            if pure.direct
            else pure.code.format(*args, m="m" if masked else "None", site=pure.site)
        )
        if not where:
            return [f"{dst}[...] = {value}" if is_view else f"{dst} = {value}"]
        if is_view:
            return [f"copyto({dst}, {value}, 'unsafe', {where})"]
        return [f"{dst} = where({where}, {value}, {dst})"]

    def _where(self, pure: Pure, masked: bool) -> str:
        if pure.guard is None:
            return "m" if masked else ""
        row = self.view("p", pure.guard[0])
        guard = f"~{row}" if pure.guard[1] else row
        return f"({guard} & m)" if masked else f"{guard}" if pure.guard[1] else row

    def _source(self, batch: list[Pure], i: int) -> str:
        kind, value = batch[0].srcs[i]
        if kind == "n":
            return str(value)
        values = [p.srcs[i][1] for p in batch]
        if isinstance(value, Constant):
            numbers = [v.value for v in values if isinstance(v, Constant)]
            if len({repr(n) for n in numbers}) == 1:
                return literal(numbers[0])
            return self.constant(np.array(numbers, DTYPE[value.letter])[:, None])
        if len(set(values)) == 1:
            return self.view(kind, str(value))
        return self.many(kind, [str(v) for v in values])[0]


def _loaded(ins: Instruction) -> list[str]:
    """Registers that a tcgen05.ld writes: all before the address."""
    where = next(i for i, o in enumerate(ins.operands) if isinstance(o, Address))
    return [str(r) for o in ins.operands[:where] for r in (o if isinstance(o, tuple) else (o,))]


class _Names:
    """Fills the placeholders of an effect.

    {m}, {u:%r1} (a row), {u*:%r1 %r2} (several rows), {ku:0 16} (a column of constants).
    """

    _pattern = re.compile(r"\{(\w+)(\*?):([^}]*)\}")

    def __init__(self, program: Program, mask: str) -> None:
        self.program, self.mask = program, mask

    def render(self, line: str, masked: bool) -> str:
        def fill(found: re.Match[str]) -> str:
            letter, star, names = found.groups()
            if letter[0] == "k":
                numbers = np.array([int(n) for n in names.split()], DTYPE[letter[1]])
                return self.program.constant(numbers[:, None])
            if star:
                return self.program.many(letter, names.split())[0]
            return self.program.view(letter, names)

        if " <- " in line:  # dst <- value, for the lanes of the mask
            dst, value = line.split(" <- ")
            pad = dst[: len(dst) - len(dst.lstrip())]
            target, value = self._pattern.sub(fill, dst.strip()), self._pattern.sub(fill, value)
            value = value.replace("{m}", self.mask)
            if not masked:
                return (
                    f"{pad}{target} = {value}"
                    if "[" in target
                    else (f"{pad}{target}[...] = {value}")
                )
            if "[" in target:
                return f"{pad}{target} = where({self.mask}, {value}, {target})"
            return f"{pad}copyto({target}, {value}, 'unsafe', {self.mask})"
        return self._pattern.sub(fill, line).replace("{m}", self.mask)


def _join(steps: list[Pure | Effect]) -> list[Pure | Effect]:
    """Makes one of instructions that may run as one; what stands between them moves before them."""
    out: list[Pure | Effect] = []
    last: Run | None = None
    for step in steps:
        if last and isinstance(step, Run) and last.join(step):
            continue
        if last and isinstance(step, Pure) and last.leaves(step):
            out.insert(-1, step)
            continue
        last = step if isinstance(step, Run) else None
        out.append(step)
    for step in out:
        if isinstance(step, Run):
            step.finish()
    return out


def _issued(steps: list[Pure | Effect]) -> list[Pure | Effect]:
    """Behind the last of several tcgen05.mma with no other effect between: what issues them."""
    out: list[Pure | Effect] = []
    last: Effect | None = None
    for step in steps:
        if isinstance(step, Effect):
            product = step.lines[0].startswith("tmem_mma(")
            if last and not product:
                out.append(Effect(["tmem_issue()"], (), (), None, last.site))
            last = step if product else None
        out.append(step)
    if last:
        out.append(Effect(["tmem_issue()"], (), (), None, last.site))
    return out


def _batches(steps: list[Pure | Effect]) -> list[list[list[Pure]] | Effect]:
    """Groups equal independent operations between two effects, keeping every dependence."""
    out: list[list[list[Pure]] | Effect] = []
    run: list[Pure] = []

    for step in steps:
        if isinstance(step, Effect):
            if run:
                out.append(_schedule(run))
                run = []
            out.append(step)
        else:
            run.append(step)
    if run:
        out.append(_schedule(run))
    return out


def _split(group: list[Pure]) -> list[list[Pure]]:
    """Parts of a group whose members share an operand, if they are large: one row serves a part."""
    for i, (kind, _) in enumerate(group[0].srcs):
        parts: dict[object, list[Pure]] = {}
        for pure in group if kind not in "cn" else ():
            parts.setdefault(pure.srcs[i][1], []).append(pure)
        if 1 < len(parts) <= len(group) // 8:
            return list(parts.values())
    return [group]


def _schedule(run: list[Pure]) -> list[list[Pure]]:
    """An order of the operations, in groups of equal ones that do not depend on one another.

    Next comes a group to which nothing more can be added; if there is none, the largest.
    """
    behind: list[list[int]] = [[] for _ in run]  # what waits for each
    missing = [0] * len(run)  # how many each waits for
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for i, pure in enumerate(run):
        reads = list(pure.reads())
        before = {writer[r] for r in (*reads, pure.dst) if r in writer}
        before.update(readers.get(pure.dst, ()))
        for j in before:
            behind[j].append(i)
        missing[i] = len(before)
        writer[pure.dst], readers[pure.dst] = i, []
        for register in reads:
            readers.setdefault(register, []).append(i)
    left = Counter(pure.key for pure in run)
    ready: dict[tuple, list[int]] = {}
    for i, pure in enumerate(run):
        if not missing[i]:
            ready.setdefault(pure.key, []).append(i)
    groups: list[list[Pure]] = []
    while ready:
        key = max(ready, key=lambda k: (len(ready[k]) == left[k], len(ready[k])))
        group = ready.pop(key)
        left[key] -= len(group)
        groups += _split([run[i] for i in group])
        for i in group:
            for j in behind[i]:
                missing[j] -= 1
                if not missing[j]:
                    ready.setdefault(run[j].key, []).append(j)
    return groups


@lru_cache(maxsize=64)
def program(text: str, entry: str) -> Program:
    """Parses and translates once per PTX text."""
    return Program(ptx.parse(text, entry))
