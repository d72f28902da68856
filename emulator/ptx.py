"""PTX text to a list of basic blocks: the emulator's front end.

Grammar and semantics follow NVIDIA's PTX ISA documentation. A statement is one of: a directive, a
scope brace, a label, or `[@pred] opcode operands;`. Registers and labels declared inside a scope
(inline assembly reuses names freely) are renamed so that every name in a `Kernel` is unique.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Imm = int | float
# A register or symbol (a predicate perhaps with `!` before it), a literal, `{a, b}`, `[a]`, `a|b`.
Operand: TypeAlias = "str | int | float | tuple[Operand, ...] | Address | Pair"


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, with TMA coordinates behind it if there are any."""

    base: str | int
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`%r1|%p2`: two results of one instruction."""

    first: str
    second: str


@dataclass(slots=True)
class Instruction:
    """One PTX instruction; `operands` hold register names, immediates, tuples and addresses."""

    opcode: str
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    text: str
    frames: tuple[tuple[str, int], ...]  # (file, line), innermost first
    span: tuple[int, int]  # where it stands in the PTX text, its semicolon included
    parts: tuple[str, ...] = ()
    index: int = -1

    def __post_init__(self) -> None:
        self.parts = tuple(self.opcode.split("."))

    def __contains__(self, modifier: str) -> bool:
        return modifier in self.parts

    @property
    def source(self) -> tuple[str, int]:
        """(file, line) of the innermost frame outside the DSL, or ("", 0) without line info."""
        for name, line in self.frames:
            if "nvidia_cutlass_dsl" not in name and "/cutlass/" not in name:
                return name, line
        return self.frames[0] if self.frames else ("", 0)


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    offset: int
    size: int


@dataclass(slots=True)
class Block:
    """A straight run of instructions; falls through to the next block unless it ends in a jump."""

    index: int
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class Kernel:
    """One `.entry`: its parameters, register classes, variables and basic blocks.

    A register `%r` of class b128 is the two of class b64 named `%r.lo` and `%r.hi`.
    """

    name: str
    params: list[Param]
    registers: dict[str, str]  # name -> 'pred' | 'b16' | 'b32' | 'b64' | 'b128'
    # variable -> byte offset from the start of the CTA's window; dynamic ones, placed at launch: -1
    shared: dict[str, int]
    shared_static: int  # bytes of static shared memory
    local: dict[str, int]  # variable -> byte offset in a lane's local memory
    local_bytes: int  # of one lane
    blocks: list[Block]
    labels: dict[str, int]  # label -> block index
    threads: tuple[int, int, int] | None
    arch: str
    instructions: list[Instruction]


SHARED_BASE = 1024  # the first KiB of a CTA's shared memory belongs to the system
_CLASS = {"pred": "pred", "b128": "b128", "f16x2": "b32"} | {
    f"{kind}{bits}": f"b{max(bits, 16)}" for kind in "busf" for bits in (8, 16, 32, 64)
}
_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(?P<space>shared|local)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    r"\.[busf](?P<bits>\d+)\s+(?P<name>[\w$]+)(?P<shape>(?:\[\d*\])*)"
)
_LINE_DIRECTIVES = (".version", ".target", ".address_size", ".loc ", ".loc\t", ".file")
# Instructions that may have to wait or be retried start a block of their own.
STOPS = (
    *("bar.", "barrier.", "mbarrier.try_wait", "mbarrier.test_wait", "setmaxnreg.", "nanosleep"),
    *("shfl.", "vote.", "redux.", "match.", "elect.", "activemask"),
    *("wgmma.", "mma.", "ldmatrix.", "stmatrix.", "movmatrix."),
    *("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish", "tcgen05.ld", "tcgen05.st"),
    "tcgen05.wait",
)
_WHOLE_WARP = (
    *("ldmatrix.", "stmatrix.", "movmatrix."),
    *("tcgen05.dealloc", "tcgen05.relinquish", "tcgen05.ld", "tcgen05.st", "tcgen05.wait"),
)
_MEMBERS = ("shfl.", "vote.", "redux.", "match.", "elect.", "bar.warp.")  # mask is the last operand
_JUMPS = ("bra", "ret", "exit", "trap", "brx")


def _strip_comments(text: str) -> str:
    """Blanks comments, so that every offset stays what it is in the text.

    Line marks inside inline assembly go with them: the compiler adds the assembly's own line
    numbers to the line of the call, which is the one in force before and after.
    """

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found.group())

    def unmarked(found: re.Match[str]) -> str:
        return re.sub(r"^\s*\.loc\s[^\n]*", blank, found.group(), flags=re.MULTILINE)

    inline = r"// begin inline asm\n.*?// end inline asm\n"
    text = re.sub(inline, unmarked, text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)


def _statements(body: str, pos: int, end: int) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yields (kind, text, span): kind in 'line', 'open', 'close', 'label', 'stmt'."""
    visible = re.compile(r"\S")
    label = re.compile(r"([$A-Za-z_][\w$]*)\s*:(?!:)")
    while (start := visible.search(body, pos, end)) is not None:
        pos = start.start()
        char = body[pos]
        if char == "{":
            yield "open", "", (pos, pos + 1)
            pos += 1
        elif char == "}":
            yield "close", "", (pos, pos + 1)
            pos += 1
        elif body.startswith(_LINE_DIRECTIVES, pos):
            stop = body.find("\n", pos)
            stop = end if stop < 0 else stop
            yield "line", body[pos:stop].rstrip(" ;\r"), (pos, stop)
            pos = stop
        elif body.startswith(".section", pos):
            stop = body.index("}", pos) + 1  # debug sections carry no code
            pos = stop
        elif found := label.match(body, pos):
            yield "label", found.group(1), found.span()
            pos = found.end()
        elif char == ";":
            pos += 1
        else:
            stop = body.index(";", pos)
            yield "stmt", " ".join(body[pos:stop].split()), (pos, stop + 1)
            pos = stop + 1


def _split(text: str) -> list[str]:
    """Splits at commas outside braces, brackets and parentheses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _number(token: str) -> Imm | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
        return struct.unpack(">f", bytes.fromhex(token[2:]))[0]
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", token):
        return struct.unpack(">d", bytes.fromhex(token[2:]))[0]
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", token):
        return int(token.rstrip("U"), 0 if not re.fullmatch(r"-?0\d+U?", token) else 8)
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", token):
        return float(token)
    return None


class _Parser:
    def __init__(self, text: str) -> None:
        self.scopes: list[dict[str, str]] = [{}]
        self.scope_ids: list[int] = [0]
        self.scope_count = 0
        self.registers: dict[str, str] = {}
        self.variables: dict[str, dict[str, int]] = {"shared": {}, "local": {}}
        self.sizes = {"shared": 0, "local": 0}
        self.dynamic: list[str] = []
        self.tables: dict[str, list[str]] = {}  # of brx.idx: label -> targets
        self.serial = 0
        files: list[tuple[str, str]] = re.findall(
            r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, flags=re.M
        )
        self.files = dict(files)
        self.strings: dict[str, str] = {}

    def operand(self, token: str) -> Operand:
        if token.startswith("{"):
            return tuple(self.operand(t) for t in _split(token[1:-1]))
        if token.startswith("["):
            parts = _split(token[1:-1])
            base, offset = parts[0], 0
            if found := re.fullmatch(r"(.+?)\s*([+-])\s*(-?\w+)", base):
                number = _number(found.group(3))
                if isinstance(number, int):
                    base = found.group(1)
                    offset = -number if found.group(2) == "-" else number
            where = self.operand(base)
            if not isinstance(where, (str, int)):
                raise NotImplementedError(f"PTX address {token}")
            coords = tuple(self.operand(p) for p in parts[1:])
            return Address(where, offset, coords)
        if "|" in token:
            first, second = (self.operand(t.strip()) for t in token.split("|"))
            return Pair(str(first), str(second))
        number = _number(token)
        if number is not None:
            return number
        return self.lookup(token)

    def enter(self) -> None:
        self.scope_count += 1
        self.scopes.append({})
        self.scope_ids.append(self.scope_count)

    def leave(self) -> None:
        self.scopes.pop()
        self.scope_ids.pop()

    def lookup(self, name: str) -> str:
        if name.startswith("!"):
            return "!" + self.lookup(name[1:])
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def declare(self, statement: str) -> bool:
        """Handles registers, variables and pragmas; False if `statement` is no declaration."""
        if statement.startswith(".reg"):
            _, kind, names = statement.split(None, 2)
            cls = _CLASS.get(kind.lstrip("."))
            if cls is None:
                raise NotImplementedError(f"PTX registers {statement}")
            for name in _split(names):
                if found := re.fullmatch(r"(.+)<(\d+)>", name):
                    for i in range(int(found.group(2))):
                        self.register(f"{found.group(1)}{i}", cls)
                else:
                    self.register(name, cls)
            return True
        if re.match(r"(\.(extern|visible|weak)\s+)*\.(shared|local)\b", statement):
            self.variable(statement)
            return True
        return statement.startswith((".pragma", ".extern", ".visible", ".weak", ".maxn", ".minn"))

    def variable(self, statement: str) -> None:
        """Places a variable of shared or local memory."""
        found = _VARIABLE.fullmatch(statement)
        if found is None:
            raise NotImplementedError(f"PTX variable {statement}")
        space, name, size = found["space"], found["name"], int(found["bits"]) // 8
        if found["shape"].startswith("[]"):
            self.dynamic.append(name)
            return
        step = int(found["align"] or size)
        start = -(-self.sizes[space] // step) * step
        for count in re.findall(r"\d+", found["shape"]):
            size *= int(count)
        self.variables[space][name] = start
        self.sizes[space] = start + size

    def register(self, name: str, cls: str) -> None:
        unique = name
        if name in self.registers:
            self.serial += 1
            unique = f"{name}@{self.serial}"
        self.scopes[-1][name] = unique
        self.registers[unique] = cls
        if cls == "b128":
            self.registers |= {f"{unique}.lo": "b64", f"{unique}.hi": "b64"}


def _frames(line: str, files: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """`.loc f l c[, function_name x, inlined_at f l c]` -> ((file, line), ...) innermost first."""
    return tuple(
        (files.get(f) or f, int(n))
        for f, n in re.findall(r"(?:\.loc|inlined_at)\s+(\d+)\s+(\d+)", line)
    )


def parse(text: str, entry: str) -> Kernel:
    """Parses the `.entry` named `entry`. Raises NotImplementedError for what it cannot read."""
    clean = _strip_comments(text)
    target = re.search(r"\.target\s+(\w+)", clean)
    found = re.search(r"\.entry\s+" + re.escape(entry) + r"\s*(\((.*?)\))?([^{]*)\{", clean, re.S)
    if found is None:
        raise NotImplementedError(f"PTX holds no .entry {entry}")
    parser = _Parser(text)
    for variable in re.findall(r"^((?:\.\w+\s+)*\.shared[^;]*);", clean[: found.start()], re.M):
        parser.variable(" ".join(variable.split()))
    params = _params(found.group(2) or "")
    shape = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", found.group(3))
    x, y, z = (int(g or 1) for g in shape.groups()) if shape else (0, 0, 0)
    stop = clean.find("\n.visible .entry", found.end())
    body_end = stop if stop > 0 else len(clean)

    items: list[Instruction | str] = []  # instructions and labels in order
    depth, frames = 1, ()
    for kind, statement, span in _statements(clean, found.end(), body_end):
        if kind == "open":
            depth += 1
            parser.enter()
        elif kind == "close":
            depth -= 1
            if depth == 0:
                break
            parser.leave()
        elif kind == "line":
            if statement.startswith(".loc"):
                frames = _frames(statement, parser.files)
        elif kind == "label":
            items.append(f"{statement}@{parser.scope_ids[-1]}")
        elif statement.startswith(".branchtargets"):
            parser.tables[str(items.pop())] = _split(statement.split(None, 1)[1])
        elif not parser.declare(statement):
            items += _instructions(parser, statement, frames, span)
    blocks, labels = _blocks(items)
    shared = parser.variables["shared"] | dict.fromkeys(parser.dynamic, -1)
    return Kernel(
        name=entry,
        params=params,
        registers=parser.registers,
        shared=shared,
        shared_static=parser.sizes["shared"],
        local=parser.variables["local"],
        local_bytes=parser.sizes["local"],
        blocks=blocks,
        labels=labels,
        threads=(x, y, z) if shape else None,
        arch=target.group(1) if target else "",
        instructions=[item for item in items if isinstance(item, Instruction)],
    )


def _params(text: str) -> list[Param]:
    params: list[Param] = []
    offset = 0
    for declaration in _split(text):
        match = re.match(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+?)(\d+)"
            r"(?:\s+\.ptr\S*(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?)?\s+([\w$]+)(?:\[(\d+)\])?",
            " ".join(declaration.split()),
        )
        if match is None:
            raise NotImplementedError(f"PTX parameter {declaration}")
        align, _, bits, name, count = match.groups()
        size = int(bits) // 8 * int(count or 1)
        step = int(align or int(bits) // 8)
        offset = -(-offset // step) * step
        params.append(Param(name, offset, size))
        offset += size
    return params


def _instructions(
    parser: _Parser, statement: str, frames: tuple[tuple[str, int], ...], span: tuple[int, int]
) -> list[Instruction]:
    """The instruction of a statement; or of brx.idx, the tests and branches that amount to it."""
    predicate, negated, rest = None, False, statement
    if statement.startswith("@"):
        guard, rest = statement.split(None, 1)
        negated = guard.startswith("@!")
        predicate = parser.lookup(guard.lstrip("@!"))
    opcode, _, tail = rest.partition(" ")

    def label(name: str) -> tuple[str, ...]:
        """A label is local to its scope, or to an enclosing one."""
        return tuple(f"{name}@{scope}" for scope in reversed(parser.scope_ids))

    def make(
        code: str, operands: tuple[Operand, ...], p: str | None, inverted: bool
    ) -> Instruction:
        return Instruction(code, operands, p, inverted, statement, frames, span)

    if opcode.startswith("bra"):
        return [make(opcode, (label(tail.strip()),), predicate, negated)]
    if not opcode.startswith("brx.idx") or predicate:
        operands = tuple(parser.operand(token) for token in _split(tail))
        return [make(opcode, operands, predicate, negated)]
    index, table = _split(tail)
    targets = next(parser.tables[t] for t in label(table) if t in parser.tables)
    test = "%brx"  # a predicate that nothing else reads
    parser.registers[test] = "pred"
    made: list[Instruction] = []
    for i, target in enumerate(targets[:-1]):
        made.append(make("setp.eq.u32", (test, parser.operand(index), i), None, False))
        made.append(make("bra", (label(target),), test, False))
    return [*made, make("bra.uni", (label(targets[-1]),), None, False)]


def _gathers(ins: Instruction) -> int:
    """Which lanes are surely together once it executes: 2 a warpgroup's, 1 a warp's, 0 unknown."""
    if ins.predicate:
        return 0
    if ins.opcode.startswith("wgmma."):
        return 1 if ins.opcode.startswith("wgmma.wait") else 2
    whole = ins.opcode.startswith(_MEMBERS) and ins.operands[-1] in (-1, 0xFFFFFFFF)
    return int(whole or ins.opcode.startswith(_WHOLE_WARP))


def _blocks(items: list[Instruction | str]) -> tuple[list[Block], dict[str, int]]:
    """Numbers the instructions, splits them into blocks, and gives each branch its label."""
    blocks: list[Block] = [Block(0)]
    labels: dict[str, int] = {}
    gathered = 0  # by the block so far: who has met need not wait for one another again
    count = 0

    def fresh() -> None:
        nonlocal gathered
        if blocks[-1].instructions:
            blocks.append(Block(len(blocks)))
            gathered = 0

    for item in items:
        if isinstance(item, str):
            fresh()
            labels[item] = blocks[-1].index
            continue
        item.index = count
        count += 1
        gathers = _gathers(item)
        if item.opcode.startswith(STOPS) and not 0 < gathers <= gathered:
            fresh()
        gathered = max(gathered, gathers)
        blocks[-1].instructions.append(item)
        if item.parts[0] in _JUMPS:
            fresh()
    for item in items:
        if isinstance(item, Instruction) and item.parts[0] == "bra":
            (candidates,) = item.operands
            names = candidates if isinstance(candidates, tuple) else ()
            target = next((str(t) for t in names if t in labels), None)
            if target is None:
                raise NotImplementedError(f"branch to an unknown label: {item.text}")
            item.operands = (target,)
    return blocks, labels
