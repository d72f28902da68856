"""What a PTX instruction becomes: an operation on register rows, or an effect of the unit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# A view letter names a bank of rows and the type they are seen as. X: pairs of f32 in a D row.
BANK = {
    **dict.fromkeys("p", "P"),
    **dict.fromkeys("hje", "H"),
    **dict.fromkeys("uif", "R"),
    **dict.fromkeys("UIFX", "D"),
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
class Products(Effect):
    """wgmmas into one accumulator, one behind the other: they run as one, over a longer K."""

    accumulator: tuple[str, ...] = ()
    kind: str = ""  # the arguments they share
    registers: tuple[str, ...] = ()  # of A, if it comes from there
    a: list[str] = field(default_factory=list)  # its descriptors else
    b: list[str] = field(default_factory=list)
    scales: list[str] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)

    def join(self, other: Products) -> bool:
        """Takes over the products of `other` if it may follow at once."""
        alike = (self.accumulator, self.kind) == (other.accumulator, other.kind)
        alike &= bool(self.registers) == bool(other.registers)
        if not alike or self.guard or other.guard or "'f32'" not in self.kind:
            return False
        self.reads += other.reads
        self.registers += other.registers
        for name in ("a", "b", "scales", "sites"):
            getattr(self, name).extend(getattr(other, name))
        return True

    def leaves(self, pure: Pure) -> bool:
        """Whether `pure` may as well run before the products as behind them."""
        mine = {*self.accumulator, *self.registers}
        return pure.dst not in self.reads and mine.isdisjoint(pure.reads())

    def finish(self) -> None:
        """Writes the line of code."""
        registers = f"{{u*:{' '.join(self.registers)}}}"
        a = registers if self.registers else f"({', '.join(self.a)},)"
        letter = {"s32": "i", "f16": "u"}.get(self.kind.split("'")[1], "f")
        acc = f"{{{letter}*:{' '.join(self.accumulator)}}}"
        b, scales = ", ".join(self.b), ", ".join(self.scales)
        self.lines = [f"wgmma({acc}, {a}, ({b},), ({scales},), {tuple(self.sites)}, {self.kind})"]


def literal(value: object) -> str:
    text = repr(value)
    return {"nan": "nan", "inf": "inf", "-inf": "(-inf)"}.get(text, text)
