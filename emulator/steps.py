"""What a PTX instruction becomes: an operation on register rows, or an effect of the unit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

# A view letter names a bank and the type its rows are seen as.
BANK = {"p": "P", "h": "H", "j": "H", "e": "H", "u": "R", "i": "R", "f": "R",
        "U": "D", "I": "D", "F": "D", "X": "D"}  # fmt: skip
DTYPE = {"p": np.bool_, "h": np.uint16, "j": np.int16, "e": np.float16, "u": np.uint32,
         "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64, "F": np.float64}  # fmt: skip
LETTER = {"pred": "p", "b16": "h", "u16": "h", "s16": "j", "f16": "e", "bf16": "h", "b32": "u",
           "u32": "u", "s32": "i", "f32": "f", "tf32": "u", "f16x2": "u", "bf16x2": "u",
           "b64": "U", "u64": "U", "s64": "I", "f64": "F", "f32x2": "X", "e4m3x2": "h",
           "e5m2x2": "h", "s16x2": "u", "u16x2": "u"}  # fmt: skip
BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "b32": 32, "b64": 64} | {
    t: {"h": 16, "j": 16, "e": 16, "u": 32, "i": 32, "f": 32}.get(x, 64)
    for t, x in LETTER.items()
    if t != "pred"
}
NARROW = {"b8": "u8", "u8": "u8", "s8": "i8", "b16": "u16", "u16": "u16", "s16": "i16",
           "f16": "u16", "bf16": "u16", "b32": "u32", "u32": "u32", "s32": "i32",
           "e4m3x2": "u16", "e5m2x2": "u16"}  # fmt: skip
CLASS_LETTERS = {"pred": "p", "b16": "hj", "b32": "ui", "b64": "UI"}
SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|laneid|warpid|nwarpid|smid|nsmid|gridid|clusterid|nclusterid"
    r"|cluster_ctaid|cluster_nctaid|cluster_ctarank|cluster_nctarank|is_explicit_cluster|clock"
    r"|clock64|clock_hi|globaltimer|globaltimer_lo|globaltimer_hi|lanemask_\w\w|envreg\d+"
    r"|total_smem_size|aggr_smem_size|dynamic_smem_size|pm\d)(\.[xyzw])?$"
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
        if (
            (self.accumulator, self.kind) != (other.accumulator, other.kind)
            or bool(self.registers) != bool(other.registers)
            or self.guard or other.guard or "'f32'" not in self.kind
        ):  # fmt: skip
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
        if self.registers:
            a = f"{{u*:{' '.join(self.registers)}}}"
        else:
            a = f"({', '.join(self.a)},)"
        letter = {"s32": "i", "f16": "u"}.get(self.kind.split("'")[1], "f")
        acc = f"{{{letter}*:{' '.join(self.accumulator)}}}"
        b, scales = ", ".join(self.b), ", ".join(self.scales)
        self.lines = [f"wgmma({acc}, {a}, ({b},), ({scales},), {tuple(self.sites)}, {self.kind})"]


def literal(value: object) -> str:
    text = repr(value)
    return {"nan": "nan", "inf": "inf", "-inf": "(-inf)"}.get(text, text)
