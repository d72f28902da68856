"""What a PTX instruction becomes: an operation on register rows, or an effect of the unit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# A view letter names a bank of rows and the type they are seen as. X: pairs of f32 in a D row;
# L and T: the low and the top 32 bits of one.
BANK = {
    **dict.fromkeys("p", "P"),
    **dict.fromkeys("hje", "H"),
    **dict.fromkeys("uif", "R"),
    **dict.fromkeys("UIFXLT", "D"),
}
DTYPE = {
    "p": np.bool_,
    "h": np.uint16,
    "j": np.int16,
    "e": np.float16,
    "u": np.uint32,
    "i": np.int32,
    "f": np.float32,
    "U": np.uint64,
    "I": np.int64,
    "F": np.float64,
}
# The types of PTX that fill a row, by the letter as which a register of that width is seen.
_TYPES = {
    "p": "pred",
    "h": "b16 u16 bf16",
    "j": "s16",
    "e": "f16",
    "u": "b32 u32 tf32 f16x2 bf16x2",
    "i": "s32",
    "f": "f32",
    "U": "b64 u64",
    "I": "s64",
    "F": "f64",
    "X": "f32x2",
    "L": "b64.lo",
    "T": "b64.hi",
}
LETTER = {type_: letter for letter, types in _TYPES.items() for type_ in types.split()}
BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8} | {
    type_: {"H": 16, "R": 32, "D": 64}[BANK[letter]]
    for type_, letter in LETTER.items()
    if letter != "p"
}
# How the low part of a wider register is read.
NARROW = {
    **{f"{t}{n}": f"u{n}" for t in "bu" for n in (8, 16, 32)},
    **{f"s{n}": f"i{n}" for n in (8, 16, 32)},
}
# Classes of registers: their bank, and the letters of unsigned and of signed values.
CLASS_BANK = {"pred": "P", "b16": "H", "b32": "R", "b64": "D"}
CLASS_LETTERS = {"pred": "p", "b16": "hj", "b32": "ui", "b64": "UI"}
SPECIAL = re.compile(
    r"%((?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]"
    r"|laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank"
    r"|is_explicit_cluster|lanemask_(?:eq|le|lt|ge|gt)|total_smem_size|dynamic_smem_size"
    r"|clock|clock64|clock_hi|globaltimer|globaltimer_lo|globaltimer_hi)"
)


@dataclass(frozen=True, slots=True)
class Constant:
    """An immediate and the letter of its type."""

    letter: str
    value: int | float


@dataclass(slots=True)
class Pure:
    """One register-to-register operation: `code` over `srcs` into one destination row."""

    code: str  # a ufunc's name if `direct`, else an expression in {0}, {1}, ...
    direct: bool
    letter: str
    dst: str
    srcs: tuple[tuple[str, object], ...]  # (letter, register) | ("c", literal) | ("n", name)
    guard: tuple[str, bool] | None
    site: int
    options: str = ""

    @property
    def key(self) -> tuple:
        kinds = tuple(k if k != "n" else ("n", v) for k, v in self.srcs)
        return (self.code, self.letter, kinds, self.options, self.guard)

    def reads(self) -> Iterable[str]:
        for kind, value in self.srcs:
            if kind not in "cn":
                yield str(value)
        if self.guard:
            yield self.guard[0]
            yield self.dst  # lanes outside the guard keep their value


@dataclass(slots=True)
class Effect:
    """An operation with an effect beyond registers: lines of code with {m} for the mask."""

    lines: list[str]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    guard: tuple[str, bool] | None
    site: int
    jump: bool = False
    asynchronous: bool = False  # wgmma: its registers are in flight, not touched


@dataclass(slots=True)
class Run(Effect):
    """Instructions of one kind, one behind the other, that run as one."""

    kind: tuple = ()  # what they share; empty if others may not join
    parts: list[tuple[tuple[str, ...], tuple[str, ...], int]] = field(default_factory=list)
    columns: tuple[list, ...] = ()  # what each has of its own

    def join(self, other: Run) -> bool:
        """Takes over `other` if it may follow at once."""
        if not self.kind or self.kind != other.kind or self.guard or other.guard:
            return False
        if not self.independent(other):
            return False
        self.reads += other.reads
        self.writes += other.writes
        self.parts += other.parts
        for mine, others in zip(self.columns, other.columns, strict=True):
            mine.extend(others)
        return True

    def independent(self, other: Run) -> bool:
        """Whether neither reads what the other writes."""
        return not {*other.reads, *other.writes} & {*self.writes}

    def held(self) -> tuple[str, ...]:
        """Registers that nothing else may read before."""
        return self.writes

    def leaves(self, pure: Pure) -> bool:
        """Whether `pure` may as well come before as behind."""
        return pure.dst not in (*self.reads, *self.writes) and not (
            {*self.held()} & {*pure.reads()}
        )

    @property
    def sites(self) -> tuple[int, ...]:
        return tuple(site for _, _, site in self.parts)

    def finish(self) -> None:
        """Writes the lines of code."""
        raise NotImplementedError


@dataclass(slots=True)
class Products(Run):
    """wgmmas into one accumulator: one product over a longer K."""

    accumulator: tuple[str, ...] = ()
    arguments: str = ""
    from_registers: bool = False  # where A comes from: the first column; else it has descriptors

    def independent(self, other: Run) -> bool:
        return True  # they add to the same registers

    def held(self) -> tuple[str, ...]:
        return (*self.accumulator, *self.columns[0]) if self.from_registers else self.accumulator

    def finish(self) -> None:
        a, b, scales = self.columns
        source = f"{{u*:{' '.join(a)}}}" if self.from_registers else _rows(a)
        letter = {"s32": "i", "f16": "u"}.get(self.arguments.split("'")[1], "f")
        acc = f"{{{letter}*:{' '.join(self.accumulator)}}}"
        self.lines = [
            f"wgmma({acc}, {source}, {_rows(b)}, {_rows(scales)}, {self.sites}, "
            f"{self.from_registers}, {self.arguments})"
        ]


def _rows(texts: list[str]) -> str:
    """Registers '{U:r1}', '{U:r2}' as rows '{U*:r1 r2}'; other operands as a tuple."""
    found = [re.fullmatch(r"\{(\w):([^}]*)\}", text) for text in texts]
    if all(found):
        letter = texts[0][1]
        return f"{{{letter}*:{' '.join(f[2] for f in found if f)}}}"
    return f"({', '.join(texts)},)"


@dataclass(slots=True)
class Accesses(Run):
    """Loads or stores of lanes: one access by more lanes. Columns: bases, offsets, registers."""

    name: str = ""
    arguments: str = ""
    letters: tuple[str, str] = ("", "")  # of addresses and of what is loaded or stored
    view: str | None = None  # what to make of a loaded value; None: a store

    def finish(self) -> None:
        bases, offsets, registers = self.columns
        letter, value_letter = self.letters
        same = len(set(bases)) == 1
        place = f"{{{letter}:{bases[0]}}}" if same else f"{{{letter}*:{' '.join(bases)}}}"
        if len(bases) > 1 and (same or any(offsets)):
            wrap = 1 << 8 * DTYPE[letter]().itemsize
            place += f" + {{k{letter}:{' '.join(str(o % wrap) for o in offsets)}}}"
        elif offsets[0]:
            place += f" {'+' if offsets[0] > 0 else '-'} {abs(offsets[0])}"
        values = f"{{{value_letter}*:{' '.join(registers)}}}"
        if self.view is None:
            call = f"{self.name}({place}, {self.arguments}, {values}, {{m}}, {self.sites})"
            self.lines = [call]
        else:
            call = f"{self.name}({place}, {self.arguments}, {{m}}, {self.sites})"
            self.lines = [f"{values} <- {call}{self.view}"]


def literal(value: object) -> str:
    text = repr(value)
    return {"nan": "nan", "inf": "inf", "-inf": "(-inf)"}.get(text, text)
