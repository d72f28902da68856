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

Imm = int | float


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


Operand = str | int | float | tuple | Address | Pair


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
    """One `.entry`: its parameters, register classes, shared variables and basic blocks."""

    name: str
    params: list[Param]
    registers: dict[str, str]  # name -> 'pred' | 'b16' | 'b32' | 'b64' | 'b128'
    shared: dict[str, int]  # variable -> byte offset from the start of the CTA's window
    shared_static: int  # bytes of static shared memory
    blocks: list[Block]
    labels: dict[str, int]  # label -> block index
    threads: tuple[int, int, int] | None
    arch: str
    instructions: list[Instruction]
    local: dict[str, int]  # variable -> byte offset in each thread's local memory
    local_bytes: int


SHARED_BASE = 1024  # the first KiB of a CTA's shared memory belongs to the system
_CLASS = {"8": "b16", "16": "b16", "32": "b32", "64": "b64", "128": "b128"}
_LINE_DIRECTIVES = (".version", ".target", ".address_size", ".loc\t", ".loc ", ".file")
# Instructions that may have to wait or be retried start a block of their own.
STOPS = (
    "bar.", "barrier.", "mbarrier.try_wait", "mbarrier.test_wait", "shfl.", "vote.", "redux.",
    "match.", "elect.", "wgmma.", "setmaxnreg.", "activemask", "ldmatrix.", "stmatrix.",
    "movmatrix.", "mma.", "tcgen05.", "nanosleep",
)  # fmt: skip
_WHOLE_WARP = ("ldmatrix.", "stmatrix.", "movmatrix.")
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
        self.shared: dict[str, int] = {}
        self.shared_static = 0
        self.local: dict[str, int] = {}
        self.local_bytes = 0
        self.dynamic: list[str] = []
        self.serial = 0
        self.files: dict[str, str] = dict(
            re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, flags=re.M)
        )
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
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def declare(self, statement: str) -> bool:
        """Handles `.reg`, `.shared`, `.local`, pragmas; False if it is not a declaration."""
        if statement.startswith(".reg"):
            kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.+)", statement).groups()  # pyright: ignore[reportOptionalMemberAccess]
            cls = "pred" if kind == "pred" else _CLASS[kind.lstrip("busf")]
            for name in _split(names):
                if found := re.fullmatch(r"(.+)<(\d+)>", name):
                    for i in range(int(found.group(2))):
                        self.register(f"{found.group(1)}{i}", cls)
                else:
                    self.register(name, cls)
            return True
        if found := re.match(
            r"(?:\.extern\s+|\.visible\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+"
            r"([\w$]+)(?:\[(\d*)\])?", statement
        ):  # fmt: skip
            align, bits, name, count = found.groups()
            if count == "":
                self.dynamic.append(name)
            else:
                step = int(align or int(bits) // 8)
                start = -(-self.shared_static // step) * step
                self.shared[name] = start
                self.shared_static = start + int(bits) // 8 * int(count or 1)
            return True
        if found := re.fullmatch(
            r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", statement
        ):
            align, name, size = found.groups()
            self.local[name] = -(-self.local_bytes // int(align)) * int(align)
            self.local_bytes = self.local[name] + int(size)
            return True
        return statement.startswith((".pragma", ".extern", ".visible", ".weak", ".maxn", ".minn"))

    def register(self, name: str, cls: str) -> None:
        unique = name
        if name in self.registers:
            self.serial += 1
            unique = f"{name}@{self.serial}"
        self.scopes[-1][name] = unique
        self.registers[unique] = cls


def _frames(line: str, files: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """`.loc f l c[, function_name x, inlined_at f l c]` -> ((file, line), ...) innermost first."""
    return tuple(
        (files.get(f, f), int(n))
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
    for module_level in re.findall(r"^\s*(?:\.extern\s+|\.visible\s+)?\.shared[^;]*;", clean, re.M):
        parser.declare(" ".join(module_level.strip().rstrip(";").split()))
    params = _params(found.group(2) or "")
    shape = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", found.group(3))
    threads = tuple(int(g or 1) for g in shape.groups()) if shape else None
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
        elif not parser.declare(statement):
            items.append(_instruction(parser, statement, frames, span))
    return _blocks(entry, params, parser, items, threads, target.group(1) if target else "")  # pyright: ignore[reportArgumentType]


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


def _instruction(
    parser: _Parser, statement: str, frames: tuple[tuple[str, int], ...], span: tuple[int, int]
) -> Instruction:
    predicate, negated, rest = None, False, statement
    if statement.startswith("@"):
        guard, rest = statement.split(None, 1)
        negated = guard.startswith("@!")
        predicate = parser.lookup(guard.lstrip("@!"))
    opcode, _, tail = rest.partition(" ")
    operands = tuple(parser.operand(t) for t in _split(tail))
    if opcode.startswith("bra"):  # a label is local to its scope, or to an enclosing one
        operands = (tuple(f"{tail.strip()}@{s}" for s in reversed(parser.scope_ids)),)
    return Instruction(opcode, operands, predicate, negated, statement, frames, span)


def _gathers(ins: Instruction) -> int:
    """Which lanes are surely together once it executes: 2 a warpgroup's, 1 a warp's, 0 unknown."""
    if ins.predicate:
        return 0
    if ins.opcode.startswith("wgmma."):
        return 2
    whole = ins.opcode.startswith(_MEMBERS) and ins.operands[-1] in (-1, 0xFFFFFFFF)
    return int(whole or ins.opcode.startswith(_WHOLE_WARP))


def _blocks(entry, params, parser, items, threads, arch) -> Kernel:
    blocks: list[Block] = [Block(0)]
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    gathered = 0  # by the block so far: who has met need not wait for one another again

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
        item.index = len(instructions)
        instructions.append(item)
        gathers = _gathers(item)
        if item.opcode.startswith(STOPS) and not 0 < gathers <= gathered:
            fresh()
        gathered = max(gathered, gathers)
        blocks[-1].instructions.append(item)
        if item.parts[0] in _JUMPS:
            fresh()
    for item in instructions:
        if item.parts[0] == "bra":
            target = next((t for t in item.operands[0] if t in labels), None)  # pyright: ignore
            if target is None:
                raise NotImplementedError(f"branch to an unknown label: {item.text}")
            item.operands = (target,)
    for name in parser.dynamic:
        parser.shared[name] = -1  # dynamic shared memory: placed behind the static part at launch
    return Kernel(
        entry, params, parser.registers, parser.shared, parser.shared_static, blocks, labels,
        threads, arch, instructions, parser.local, parser.local_bytes,
    )  # fmt: skip
