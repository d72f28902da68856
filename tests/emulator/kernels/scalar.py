"""One table of scalar instructions: the kernel evaluates each on SAMPLES inputs.

An `Op` is an opcode, the kinds of its operands and what it computes. Kinds, result first, then a
colon, then sources: h, r, d are 16, 32 and 64 bit words; p is a predicate (result only, stored as
0 or 1). `expect` receives one array of Python integers (dtype object) a source, so that it can
compute with any width, and returns integers, or float64 values when `result` names a float
format.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Uint16, Uint32, Uint64
from numpy.typing import NDArray

from . import numeric as nm
from .asm import asm
from .launch import compile, fake

SAMPLES = 128
Array = NDArray[Any]
_WORD = {"h": Uint16, "r": Uint32, "d": Uint64}
WIDTH = {"h": 16, "r": 32, "d": 64, "p": 1}


@dataclass(frozen=True)
class Op:
    """One instruction; see the module's text. `rtol`, `atol` apply to approximations alone."""

    opcode: str
    kinds: str
    expect: Callable[..., Any]
    inputs: tuple[str, ...]
    result: str = "bits"  # bits, f32, f16, bf16, f16x2, bf16x2, f64
    rtol: float = 0.0
    atol: float = 0.0
    tail: str = ""  # immediate operands after the sources
    text: str = ""  # the PTX, where it is not simply `opcode result, sources`

    @property
    def name(self) -> str:
        return self.opcode + self.tail.replace(", ", "_")

    def ptx(self) -> str:
        if self.text:
            return self.text
        sources = [f"${i + 1}" for i in range(len(self.inputs))]
        if self.kinds[0] == "p":
            operands = ", ".join(["p", *sources]) + self.tail
            return f"{{ .reg .pred p; {self.opcode} {operands}; selp.b32 $0, 1, 0, p; }}"
        return f"{self.opcode} " + ", ".join(["$0", *sources]) + self.tail + ";"


# ---- expectations ------------------------------------------------------------------------------


def signed(x: Array, width: int = 32) -> Array:
    """Two's complement value of the low `width` bits."""
    top = 1 << (width - 1)
    return ((x & (2 * top - 1)) ^ top) - top


def each(f: Callable[..., int]) -> Callable[..., Array]:
    """Lift a function of Python integers to arrays."""
    return lambda *a: np.array([f(*row) for row in zip(*a, strict=True)], dtype=object)


def words(x: Array) -> nm.Words:
    return x.astype(np.uint64).astype(np.uint32)


def f32(x: Array) -> nm.Floats:
    return nm.f32_values(words(x))


def f16(x: Array) -> nm.Floats:
    return nm.f16_values(words(x))


def bf16(x: Array) -> nm.Floats:
    return nm.bf16_values(words(x))


def clamp(x: Array, low: int, high: int) -> Array:
    return np.minimum(np.maximum(x, low), high)


def flush(x: nm.Floats) -> nm.Floats:
    """Subnormal float32 to zero of its sign (.ftz)."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def saturated(x: nm.Floats) -> nm.Floats:
    """.sat: clamped to [0, 1]; NaN and -0 give +0."""
    return np.nan_to_num(np.clip(x, 0, 1), nan=0.0) + 0.0


def divide(a: int, b: int) -> int:
    """Quotient rounded towards zero."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def permute(a: int, b: int, c: int, mode: str = "") -> int:
    data = (b << 32 | a).to_bytes(8, "little")
    i = c & 3
    picks = {
        "": [(c >> 4 * j) & 15 for j in range(4)],
        "f4e": [i + j for j in range(4)],
        "b4e": [(i - j) % 8 for j in range(4)],
        "rc8": [i] * 4,
        "ecl": [max(i, j) for j in range(4)],
        "ecr": [min(i, j) for j in range(4)],
        "rc16": [(2 * i) % 4 + j % 2 for j in range(4)],
    }[mode]
    out = [(0xFF if data[p & 7] & 0x80 else 0) if p & 8 else data[p & 7] for p in picks]
    return int.from_bytes(bytes(out), "little")


def logic(a: int, b: int, c: int, table: int) -> int:
    return sum(
        ((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1))) & 1) << i
        for i in range(32)
    )


def extract(a: int, b: int, c: int, width: int, is_signed: bool) -> int:
    """bfe: `c` bits of `a` from bit `b`; signed: the sign bit fills what lies above."""
    position, length = b & 255, c & 255
    field = (a >> position) & ((1 << length) - 1)
    if not is_signed or length == 0:
        return field
    last = min(position + length - 1, width - 1)
    if a >> last & 1:
        field |= -1 << min(length, max(width - position, 0))
    return field


def insert(a: int, b: int, c: int, d: int, width: int) -> int:
    """bfi: the low `d` bits of `a` into `b` at bit `c`."""
    position, length = c & 255, d & 255
    mask = (((1 << length) - 1) << position) & ((1 << width) - 1)
    return b & ~mask | (a << position) & mask


def funnel(a: int, b: int, c: int, left: bool, wrap: bool) -> int:
    n = c & 31 if wrap else min(c, 32)
    pair = b << 32 | a
    return (pair << n) >> 32 if left else pair >> n


def top_bit(a: int, width: int, is_signed: bool, shift: bool = False) -> int:
    """bfind: position of the most significant non-sign bit, all ones when there is none."""
    if is_signed and a >> (width - 1):
        a = ~a & ((1 << width) - 1)
    if a == 0:
        return 0xFFFFFFFF
    return width - a.bit_length() if shift else a.bit_length() - 1


def reverse(a: int, width: int) -> int:
    return int(f"{a:0{width}b}"[::-1], 2)


def dot4(a: int, b: int, c: int) -> int:
    return c + sum(
        x * y
        for x, y in zip(
            struct.unpack("4b", a.to_bytes(4, "little")),
            struct.unpack("4b", b.to_bytes(4, "little")),
            strict=True,
        )
    )


def maximum(a: nm.Floats, b: nm.Floats) -> nm.Floats:
    """max of PTX: a NaN operand is passed over; +0 counts as greater than -0."""
    with np.errstate(invalid="ignore"):
        m = np.fmax(a, b)
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a) & np.signbit(b), -0.0, 0.0), m)


def minimum(a: nm.Floats, b: nm.Floats) -> nm.Floats:
    return -maximum(-a, -b)


def or_nan(m: nm.Floats, *sources: nm.Floats) -> nm.Floats:
    """The .NaN variant of `m`."""
    return np.where(np.any(np.isnan(sources), axis=0), np.nan, m)


def float_to_integer(x: nm.Floats, mode: str, width: int, is_signed: bool) -> Array:
    """cvt to an integer: clamps to its range, NaN gives 0 in widths up to 32."""
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if is_signed else (0, (1 << width) - 1)
    whole = np.nan_to_num(nm.to_integer(x, mode), nan=0.0, posinf=2.0**80, neginf=-(2.0**80))
    return clamp(np.array([int(v) for v in whole], dtype=object), low, high)


def as_float(x: Array) -> nm.Floats:
    return x.astype(np.float64)


def unordered(relation: Callable[..., Any], when_nan: bool) -> Callable[..., Any]:
    return lambda a, b: np.where(np.isnan(f32(a)) | np.isnan(f32(b)), when_nan, relation(f32(a), f32(b)))


def halves(fmt: str) -> tuple[Callable[[Array], nm.Floats], nm.Format]:
    return (f16, nm.F16) if fmt == "f16" else (bf16, nm.BF16)


def pairwise(fmt: str, function: Callable[..., nm.Floats]) -> Callable[..., nm.Floats]:
    """Apply to the low halves and to the high halves; result of shape (2, SAMPLES)."""
    decode, _ = halves(fmt)
    return lambda *a: np.stack([function(*(decode(x >> s & 0xFFFF) for x in a)) for s in (0, 16)])


def pack(low: nm.Words, high: nm.Words, bits: int) -> nm.Words:
    return low | high << np.uint32(bits)


# ---- the tables --------------------------------------------------------------------------------

I2, I3 = ("int", "int"), ("int", "int", "int")
F1, F2, F3 = ("f32",), ("f32", "f32"), ("f32", "f32", "f32")
RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def _integers() -> list[Op]:
    ops = [
        Op("add.s32", "r:rr", lambda a, b: a + b, I2),
        Op("sub.s32", "r:rr", lambda a, b: a - b, I2),
        Op("mul.lo.s32", "r:rr", lambda a, b: a * b, I2),
        Op("mul.hi.s32", "r:rr", lambda a, b: signed(a) * signed(b) >> 32, I2),
        Op("mul.hi.u32", "r:rr", lambda a, b: a * b >> 32, I2),
        Op("mul.wide.s32", "d:rr", lambda a, b: signed(a) * signed(b), I2),
        Op("mul.wide.u32", "d:rr", lambda a, b: a * b, I2),
        Op("mul.wide.s16", "r:hh", lambda a, b: signed(a, 16) * signed(b, 16), I2),
        Op("mul.wide.u16", "r:hh", lambda a, b: a * b, I2),
        Op("mad.lo.s32", "r:rrr", lambda a, b, c: a * b + c, I3),
        Op("mad.hi.s32", "r:rrr", lambda a, b, c: (signed(a) * signed(b) >> 32) + c, I3),
        Op("mad.hi.u32", "r:rrr", lambda a, b, c: (a * b >> 32) + c, I3),
        Op("mad.wide.s32", "d:rrd", lambda a, b, c: signed(a) * signed(b) + c, I3),
        Op("mad.wide.u32", "d:rrd", lambda a, b, c: a * b + c, I3),
        Op("mul24.lo.s32", "r:rr", lambda a, b: signed(a, 24) * signed(b, 24), I2),
        Op("mad24.lo.u32", "r:rrr", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c, I3),
        Op("sad.s32", "r:rrr", lambda a, b, c: abs(signed(a) - signed(b)) + c, I3),
        Op("add.sat.s32", "r:rr", lambda a, b: clamp(signed(a) + signed(b), -(2**31), 2**31 - 1), I2),
        Op("sub.sat.s32", "r:rr", lambda a, b: clamp(signed(a) - signed(b), -(2**31), 2**31 - 1), I2),
        Op("div.s32", "r:rr", lambda a, b: each(divide)(signed(a), signed(b)), ("int", "divisor")),
        Op("div.u32", "r:rr", lambda a, b: a // b, ("int", "divisor")),
        Op("rem.s32", "r:rr", lambda a, b: signed(a) - signed(b) * each(divide)(signed(a), signed(b)), ("int", "divisor")),
        Op("rem.u32", "r:rr", lambda a, b: a % b, ("int", "divisor")),
        Op("abs.s32", "r:r", lambda a: abs(signed(a)), ("int",)),
        Op("neg.s32", "r:r", lambda a: -a, ("int",)),
        Op("min.s32", "r:rr", lambda a, b: np.minimum(signed(a), signed(b)), I2),
        Op("max.s32", "r:rr", lambda a, b: np.maximum(signed(a), signed(b)), I2),
        Op("min.u32", "r:rr", np.minimum, I2),
        Op("max.u32", "r:rr", np.maximum, I2),
        Op("add.s16", "h:hh", lambda a, b: a + b, I2),
        Op("sub.s16", "h:hh", lambda a, b: a - b, I2),
        Op("mul.lo.s16", "h:hh", lambda a, b: a * b, I2),
        Op("neg.s16", "h:h", lambda a: -a, ("int",)),
        Op("shl.b16", "h:hr", lambda a, b: a << np.minimum(b, 64), ("int", "shift")),
        Op("shr.s16", "h:hr", lambda a, b: signed(a, 16) >> np.minimum(b, 64), ("int", "shift")),
        Op("shr.u16", "h:hr", lambda a, b: a >> np.minimum(b, 64), ("int", "shift")),
        Op("and.b32", "r:rr", lambda a, b: a & b, I2),
        Op("or.b32", "r:rr", lambda a, b: a | b, I2),
        Op("xor.b32", "r:rr", lambda a, b: a ^ b, I2),
        Op("not.b32", "r:r", lambda a: ~a, ("int",)),
        Op("and.b16", "h:hh", lambda a, b: a & b, I2),
        Op("or.b16", "h:hh", lambda a, b: a | b, I2),
        Op("xor.b16", "h:hh", lambda a, b: a ^ b, I2),
        Op("not.b16", "h:h", lambda a: ~a, ("int",)),
        Op("cnot.b32", "r:r", lambda a: (a == 0) * 1, ("small",)),
        Op("shl.b32", "r:rr", lambda a, b: a << np.minimum(b, 64), ("int", "shift")),
        Op("shr.u32", "r:rr", lambda a, b: a >> np.minimum(b, 64), ("int", "shift")),
        Op("shr.s32", "r:rr", lambda a, b: signed(a) >> np.minimum(b, 64), ("int", "shift")),
        Op("shf.l.wrap.b32", "r:rrr", each(partial(funnel, left=True, wrap=True)), ("int", "int", "shift")),
        Op("shf.r.wrap.b32", "r:rrr", each(partial(funnel, left=False, wrap=True)), ("int", "int", "shift")),
        Op("shf.l.clamp.b32", "r:rrr", each(partial(funnel, left=True, wrap=False)), ("int", "int", "shift")),
        Op("shf.r.clamp.b32", "r:rrr", each(partial(funnel, left=False, wrap=False)), ("int", "int", "shift")),
        Op("bfe.u32", "r:rrr", each(partial(extract, width=32, is_signed=False)), ("int", "shift", "shift")),
        Op("bfe.s32", "r:rrr", each(partial(extract, width=32, is_signed=True)), ("int", "shift", "shift")),
        Op("bfi.b32", "r:rrrr", each(partial(insert, width=32)), ("int", "int", "shift", "shift")),
        Op("popc.b32", "r:r", each(int.bit_count), ("int",)),
        Op("clz.b32", "r:r", each(lambda a: 32 - a.bit_length()), ("int",)),
        Op("brev.b32", "r:r", each(partial(reverse, width=32)), ("int",)),
        Op("bfind.u32", "r:r", each(partial(top_bit, width=32, is_signed=False)), ("int",)),
        Op("bfind.s32", "r:r", each(partial(top_bit, width=32, is_signed=True)), ("int",)),
        Op("bfind.shiftamt.u32", "r:r", each(partial(top_bit, width=32, is_signed=False, shift=True)), ("int",)),
        Op("dp4a.s32.s32", "r:rrr", each(dot4), I3),
        Op("slct.b32.s32", "r:rrr", lambda a, b, c: np.where(signed(c) >= 0, a, b), I3),
        Op("slct.f32.f32", "r:rrr", lambda a, b, c: np.where(f32(c) >= 0, a, b), ("f32", "f32", "f32")),
        Op("add.s64", "d:dd", lambda a, b: a + b, I2),
        Op("sub.s64", "d:dd", lambda a, b: a - b, I2),
        Op("mul.lo.s64", "d:dd", lambda a, b: a * b, I2),
        Op("mul.hi.u64", "d:dd", lambda a, b: a * b >> 64, I2),
        Op("mul.hi.s64", "d:dd", lambda a, b: signed(a, 64) * signed(b, 64) >> 64, I2),
        Op("mad.lo.s64", "d:ddd", lambda a, b, c: a * b + c, I3),
        Op("div.s64", "d:dd", lambda a, b: each(divide)(signed(a, 64), signed(b, 64)), ("int", "divisor")),
        Op("rem.u64", "d:dd", lambda a, b: a % b, ("int", "divisor")),
        Op("neg.s64", "d:d", lambda a: -a, ("int",)),
        Op("min.s64", "d:dd", lambda a, b: np.minimum(signed(a, 64), signed(b, 64)), I2),
        Op("max.u64", "d:dd", np.maximum, I2),
        Op("and.b64", "d:dd", lambda a, b: a & b, I2),
        Op("or.b64", "d:dd", lambda a, b: a | b, I2),
        Op("xor.b64", "d:dd", lambda a, b: a ^ b, I2),
        Op("not.b64", "d:d", lambda a: ~a, ("int",)),
        Op("shl.b64", "d:dr", lambda a, b: a << np.minimum(b, 100), ("int", "shift")),
        Op("shr.u64", "d:dr", lambda a, b: a >> np.minimum(b, 100), ("int", "shift")),
        Op("shr.s64", "d:dr", lambda a, b: signed(a, 64) >> np.minimum(b, 100), ("int", "shift")),
        Op("popc.b64", "r:d", each(int.bit_count), ("int",)),
        Op("clz.b64", "r:d", each(lambda a: 64 - a.bit_length()), ("int",)),
        Op("brev.b64", "d:d", each(partial(reverse, width=64)), ("int",)),
        Op("bfe.u64", "d:drr", each(partial(extract, width=64, is_signed=False)), ("int", "shift", "shift")),
        Op("bfi.b64", "d:ddrr", each(partial(insert, width=64)), ("int", "int", "shift", "shift")),
        Op("prmt.b32", "r:rrr", each(permute), I3),
        Op("lop3.b32", "r:rrr", each(partial(logic, table=0xE8)), I3, tail=", 0xE8"),
        Op("lop3.b32", "r:rrr", each(partial(logic, table=0x96)), I3, tail=", 0x96"),
        Op("lop3.b32", "r:rrr", each(partial(logic, table=0x1D)), I3, tail=", 29"),
        Op(
            "add.cc.u32+addc.u32", "d:rrrr", lambda a, b, c, d: (b << 32 | a) + (d << 32 | c),
            ("int", "int", "int", "int"),
            text="{ .reg .b32 x, y; add.cc.u32 x, $1, $3; addc.u32 y, $2, $4; mov.b64 $0, {x, y}; }",
        ),
        Op(
            "mov.b32.unpack", "r:r", lambda a: (a & 0xFFFF) << 16 | a >> 16, ("int",),
            text="{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; mov.b32 $0, {hi, lo}; }",
        ),
        Op(
            "mov.b64.unpack", "d:d", lambda a: (a & 0xFFFFFFFF) << 32 | a >> 32, ("int",),
            text="{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $1; mov.b64 $0, {hi, lo}; }",
        ),
        Op(
            "setp.lt.or.s32", "r:rrr", lambda a, b, c: ((signed(a) < signed(b)) | (c > 1)) * 1 + ((signed(a) >= signed(b)) | (c > 1)) * 2,
            ("int", "int", "small"),
            text="{ .reg .pred p, q, s; .reg .b32 x, y; setp.gt.u32 s, $3, 1; setp.lt.or.s32 p|q, $1, $2, s;"
            " selp.b32 x, 1, 0, p; selp.b32 y, 2, 0, q; or.b32 $0, x, y; }",
        ),
        Op(
            "predicated", "r:rrr", lambda a, b, c: np.where(c > 1, a + b, np.where(c == 1, a, a - 7)),
            ("int", "int", "small"),
            text="{ .reg .pred p, q, s; setp.gt.u32 p, $3, 1; setp.ne.u32 q, $3, 1; and.pred s, q, p; not.pred q, q;"
            " mov.b32 $0, $1; @s add.u32 $0, $1, $2; or.pred s, p, q; @!s sub.u32 $0, $1, 7; }",
        ),
        Op(
            "set.lt.u32.s32", "r:rr", lambda a, b: np.where(signed(a) < signed(b), 0xFFFFFFFF, 0), I2
        ),
    ]  # fmt: skip
    ops += [
        Op(f"prmt.b32.{mode}", "r:rrr", each(partial(permute, mode=mode)), I3)
        for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    ]
    for name, relation in RELATIONS.items():
        ops += [
            Op(f"setp.{name}.s32", "p:rr", lambda a, b, r=relation: r(signed(a), signed(b)), I2),
            Op(f"setp.{name}.u64", "p:dd", relation, I2),
            Op(f"setp.{name}.s16", "p:hh", lambda a, b, r=relation: r(signed(a, 16), signed(b, 16)), I2),
        ]  # fmt: skip
    for name, alias in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        ops.append(Op(f"setp.{name}.u32", "p:rr", RELATIONS[alias], I2))
    return ops


def _floats() -> list[Op]:
    value = partial(Op, result="f32")
    exact = nm.rounded
    ops = [
        value("add.f32", "r:rr", lambda a, b: exact(f32(a) + f32(b), nm.F32), F2),
        value("sub.f32", "r:rr", lambda a, b: exact(f32(a) - f32(b), nm.F32), F2),
        value("mul.f32", "r:rr", lambda a, b: exact(f32(a) * f32(b), nm.F32), F2),
        value("fma.rn.f32", "r:rrr", lambda a, b, c: exact(f32(a) * f32(b) + f32(c), nm.F32), F3),
        value("add.ftz.f32", "r:rr", lambda a, b: flush(exact(flush(f32(a)) + flush(f32(b)), nm.F32)), F2),
        value("mul.ftz.f32", "r:rr", lambda a, b: flush(exact(flush(f32(a)) * flush(f32(b)), nm.F32)), F2),
        value("add.sat.f32", "r:rr", lambda a, b: saturated(exact(f32(a) + f32(b), nm.F32)), ("near1", "near1")),
        value("fma.rn.sat.f32", "r:rrr", lambda a, b, c: saturated(exact(f32(a) * f32(b) + f32(c), nm.F32)), ("near1", "near1", "near1")),
        value("div.rn.f32", "r:rr", lambda a, b: exact(f32(a) / f32(b), nm.F32), ("near1", "near1")),
        value("rcp.rn.f32", "r:r", lambda a: exact(1 / f32(a), nm.F32), ("near1",)),
        value("sqrt.rn.f32", "r:r", lambda a: exact(np.sqrt(f32(a)), nm.F32), F1),
        value("abs.f32", "r:r", lambda a: abs(f32(a)), F1),
        value("neg.f32", "r:r", lambda a: -f32(a), F1),
        value("max.f32", "r:rr", lambda a, b: maximum(f32(a), f32(b)), F2),
        value("min.f32", "r:rr", lambda a, b: minimum(f32(a), f32(b)), F2),
        value("max.NaN.f32", "r:rr", lambda a, b: or_nan(maximum(f32(a), f32(b)), f32(a), f32(b)), F2),
        value("min.NaN.f32", "r:rr", lambda a, b: or_nan(minimum(f32(a), f32(b)), f32(a), f32(b)), F2),
        value("copysign.f32", "r:rr", lambda a, b: np.copysign(f32(b), f32(a)), F2),
        value("cvt.sat.f32.f32", "r:r", lambda a: saturated(f32(a)), F1),
        value("ex2.approx.f32", "r:r", lambda a: exact(np.exp2(f32(a)), nm.F32), ("exponent",), rtol=2.0**-22),
        value("ex2.approx.ftz.f32", "r:r", lambda a: flush(exact(np.exp2(f32(a)), nm.F32)), ("exponent",), rtol=2.0**-22),
        value("lg2.approx.f32", "r:r", lambda a: np.log2(f32(a)), ("positive",), rtol=2.0**-22, atol=2.0**-22),
        value("lg2.approx.ftz.f32", "r:r", lambda a: np.log2(flush(f32(a))), ("positive",), rtol=2.0**-22, atol=2.0**-22),
        value("rcp.approx.f32", "r:r", lambda a: 1 / f32(a), ("normal",), rtol=2.0**-23),
        value("rcp.approx.ftz.f32", "r:r", lambda a: 1 / flush(f32(a)), ("normal",), rtol=2.0**-23),
        value("rsqrt.approx.f32", "r:r", lambda a: 1 / np.sqrt(f32(a)), ("positive",), rtol=2.0**-22.4),
        value("rsqrt.approx.ftz.f32", "r:r", lambda a: 1 / np.sqrt(flush(f32(a))), ("positive",), rtol=2.0**-22.4),
        value("sqrt.approx.f32", "r:r", lambda a: np.sqrt(f32(a)), ("positive",), rtol=2.0**-22.4),
        value("sin.approx.f32", "r:r", lambda a: np.sin(f32(a)), ("angle",), atol=2.0**-20.5),
        value("cos.approx.f32", "r:r", lambda a: np.cos(f32(a)), ("angle",), atol=2.0**-20.5),
        value("tanh.approx.f32", "r:r", lambda a: np.tanh(f32(a)), ("near1",), rtol=2.0**-10.9),
        value("div.approx.f32", "r:rr", lambda a, b: f32(a) / f32(b), ("near1", "near1"), rtol=2.0**-22),
        value("div.full.f32", "r:rr", lambda a, b: f32(a) / f32(b), ("near1", "near1"), rtol=2.0**-22),
        Op("testp.finite.f32", "p:r", lambda a: np.isfinite(f32(a)), F1),
        Op("testp.subnormal.f32", "p:r", lambda a: (abs(f32(a)) < 2.0**-126) & (f32(a) != 0), F1),
        Op(
            "setp.lt.and.f32", "r:rr", lambda a, b: (f32(a) < f32(b)) * 1 + ~(f32(a) < f32(b)) * 2, F2,
            text="{ .reg .pred p, q, t; .reg .b32 x, y; setp.eq.u32 t, $1, $1; setp.lt.and.f32 p|q, $1, $2, t;"
            " selp.b32 x, 1, 0, p; selp.b32 y, 2, 0, q; or.b32 $0, x, y; }",
        ),
        Op("cvt.f64.f32", "d:r", lambda a: f32(a), F1, result="f64"),
        value("cvt.rn.f32.f64", "r:d", lambda a: exact(a.astype(np.uint64).view(np.float64), nm.F32), ("f64",), text=""),
    ]  # fmt: skip
    for mode in ("rn", "rz", "rm", "rp"):
        ops += [
            value(f"add.{mode}.f32", "r:rr", lambda a, b, m=mode: exact(f32(a) + f32(b), nm.F32, m), ("near1", "near1")),
            value(f"mul.{mode}.f32", "r:rr", lambda a, b, m=mode: exact(f32(a) * f32(b), nm.F32, m), ("near1", "near1")),
            value(f"fma.{mode}.f32", "r:rrr", lambda a, b, c, m=mode: exact(f32(a) * f32(b) + f32(c), nm.F32, m), ("short", "short", "short")),
            value(f"cvt.{mode}.f32.s32", "r:r", lambda a, m=mode: exact(as_float(signed(a)), nm.F32, m), ("int",)),
            value(f"cvt.{mode}.f32.u32", "r:r", lambda a, m=mode: exact(as_float(a), nm.F32, m), ("int",)),
            value(f"cvt.{mode}i.f32.f32", "r:r", lambda a, m=mode: np.copysign(nm.to_integer(f32(a), m), f32(a)), ("integral",)),
            Op(f"cvt.{mode}i.s32.f32", "r:r", lambda a, m=mode: float_to_integer(f32(a), m, 32, True), ("integral",)),
            Op(f"cvt.{mode}i.u32.f32", "r:r", lambda a, m=mode: float_to_integer(f32(a), m, 32, False), ("integral",)),
        ]  # fmt: skip
    for name, relation in RELATIONS.items():
        ops += [
            Op(f"setp.{name}.f32", "p:rr", unordered(relation, False), F2),
            Op(f"setp.{name}u.f32", "p:rr", unordered(relation, True), F2),
        ]
    ops += [
        Op("setp.num.f32", "p:rr", unordered(lambda a, b: a == a, False), F2),
        Op("setp.nan.f32", "p:rr", unordered(lambda a, b: a != a, True), F2),
        Op("cvt.rzi.s64.f32", "d:r", lambda a: float_to_integer(f32(a), "rz", 64, True), ("short",)),
        Op("cvt.rzi.s16.f32", "h:r", lambda a: float_to_integer(f32(a), "rz", 16, True), ("integral",)),
        Op("cvt.rni.sat.u8.f32+cvt.u32.u8", "r:r", lambda a: float_to_integer(f32(a), "rn", 8, False), ("integral",),
           text="{ .reg .b16 h; cvt.rni.sat.u8.f32 h, $1; cvt.u32.u8 $0, h; }"),
        value("cvt.rn.f32.s64", "r:d", lambda a: exact(as_float(signed(a, 64)), nm.F32), ("int48",)),
        value("cvt.rn.f32.u64", "r:d", lambda a: exact(as_float(a), nm.F32), ("int48",)),
        value("cvt.rn.f32.s16", "r:h", lambda a: as_float(signed(a, 16)), ("int",)),
        value("cvt.rn.f32.u8", "r:h", lambda a: as_float(a & 0xFF), ("int",)),
        value("cvt.rn.f32.s8", "r:h", lambda a: as_float(signed(a, 8)), ("int",)),
    ]  # fmt: skip
    return ops


def _conversions() -> list[Op]:
    exact = nm.rounded
    ops = [
        Op("cvt.s32.s8", "r:r", lambda a: signed(a, 8), ("int",)),
        Op("cvt.u32.u8", "r:r", lambda a: a & 0xFF, ("int",)),
        Op("cvt.s32.s16", "r:h", lambda a: signed(a, 16), ("int",)),
        Op("cvt.u32.u16", "r:h", lambda a: a, ("int",)),
        Op("cvt.u16.u32", "h:r", lambda a: a, ("int",)),
        Op("cvt.s16.s8", "h:h", lambda a: signed(a, 8), ("int",)),
        Op("cvt.s64.s32", "d:r", signed, ("int",)),
        Op("cvt.u64.u32", "d:r", lambda a: a, ("int",)),
        Op("cvt.u32.u64", "r:d", lambda a: a, ("int",)),
        Op("cvt.s64.s8", "d:r", lambda a: signed(a, 8), ("int",)),
        Op("cvt.sat.s8.s32", "r:r", lambda a: clamp(signed(a), -128, 127), ("medium",)),
        Op("cvt.sat.u8.s32", "r:r", lambda a: clamp(signed(a), 0, 255), ("medium",)),
        Op("cvt.sat.s16.s32", "h:r", lambda a: clamp(signed(a), -(2**15), 2**15 - 1), ("int",)),
        Op("cvt.sat.u16.s32", "h:r", lambda a: clamp(signed(a), 0, 2**16 - 1), ("int",)),
        Op("cvt.sat.u32.s32", "r:r", lambda a: clamp(signed(a), 0, 2**31 - 1), ("int",)),
        Op("cvt.sat.s32.u32", "r:r", lambda a: clamp(a, 0, 2**31 - 1), ("int",)),
        Op("cvt.sat.s32.s64", "r:d", lambda a: clamp(signed(a, 64), -(2**31), 2**31 - 1), ("int",)),
        Op(
            "cvt.pack.sat.s8.s32.b32", "r:rrr",
            lambda a, b, c: (c & 0xFFFF) << 16 | (clamp(signed(a), -128, 127) & 0xFF) << 8 | clamp(signed(b), -128, 127) & 0xFF,
            ("medium", "medium", "int"),
        ),
        Op("cvt.f32.f16", "r:h", f16, ("int",), result="f32"),
        Op("cvt.f32.bf16", "r:h", bf16, ("int",), result="f32"),
        Op("cvt.rna.tf32.f32", "r:r", lambda a: exact(f32(a), nm.TF32, "rna"), F1, result="tf32"),
        Op("cvt.rn.tf32.f32", "r:r", lambda a: exact(f32(a), nm.TF32), ("normal",), result="tf32"),
        Op("cvt.rz.tf32.f32", "r:r", lambda a: exact(f32(a), nm.TF32, "rz"), ("normal",), result="tf32"),
        Op("cvt.rni.s32.f16", "r:h", lambda a: float_to_integer(f16(a), "rn", 32, True), ("f16",)),
        Op("cvt.rzi.u32.bf16", "r:h", lambda a: float_to_integer(bf16(a), "rz", 32, False), ("bf16",)),
        Op("cvt.rmi.f16.f16", "h:h", lambda a: np.floor(f16(a)), ("f16",), result="f16"),
        Op("cvt.rn.f16.s32", "h:r", lambda a: exact(as_float(signed(a)), nm.F16), ("medium",), result="f16"),
        Op("cvt.rn.bf16.s32", "h:r", lambda a: exact(as_float(signed(a)), nm.BF16), ("medium",), result="bf16"),
        Op("cvt.rn.f16.u16", "h:h", lambda a: exact(as_float(a), nm.F16), ("int",), result="f16"),
    ]  # fmt: skip
    for mode in ("rn", "rz"):
        for fmt in ("f16", "bf16"):
            _, spec = halves(fmt)
            ops += [
                Op(f"cvt.{mode}.{fmt}.f32", "h:r", lambda a, m=mode, s=spec: exact(f32(a), s, m), F1, result=fmt),
                Op(f"cvt.{mode}.{fmt}x2.f32", "r:rr", lambda a, b, m=mode, s=spec: np.stack([exact(f32(b), s, m), exact(f32(a), s, m)]), F2, result=f"{fmt}x2"),
                Op(f"cvt.{mode}.relu.{fmt}x2.f32", "r:rr", lambda a, b, m=mode, s=spec: or_nan(np.maximum(np.stack([exact(f32(b), s, m), exact(f32(a), s, m)]), 0), np.stack([f32(b), f32(a)])), F2, result=f"{fmt}x2"),
            ]  # fmt: skip
    for name, spec, bits, decode in (
        ("e4m3", nm.E4M3, nm.e4m3_bits, nm.e4m3_values),
        ("e5m2", nm.E5M2, nm.e5m2_bits, nm.e5m2_values),
    ):
        ops += [
            Op(
                f"cvt.rn.satfinite.{name}x2.f32", "h:rr",
                lambda a, b, s=spec, e=bits: pack(e(exact(f32(b), s, saturate=True)), e(exact(f32(a), s, saturate=True)), 8), F2,
            ),
            Op(
                f"cvt.rn.satfinite.relu.{name}x2.f32", "h:rr",
                lambda a, b, s=spec, e=bits: pack(e(or_nan(np.maximum(exact(f32(b), s, saturate=True), 0.0), f32(b))), e(or_nan(np.maximum(exact(f32(a), s, saturate=True), 0.0), f32(a))), 8), ("near1", "near1"),
            ),
            Op(
                f"cvt.rn.satfinite.{name}x2.f16x2", "h:r",
                lambda a, s=spec, e=bits: pack(e(exact(f16(a), s, saturate=True)), e(exact(f16(a >> 16), s, saturate=True)), 8), ("f16x2",),
            ),
            Op(f"cvt.rn.f16x2.{name}x2", "r:h", lambda a, d=decode: np.stack([d(words(a)), d(words(a >> 8))]), ("int",), result="f16x2"),
        ]  # fmt: skip
    return ops


def _packed() -> list[Op]:
    exact = nm.rounded
    ops: list[Op] = []
    for fmt in ("f16", "bf16"):
        decode, spec = halves(fmt)
        result, one, two, three = f"{fmt}x2", (f"{fmt}x2",), (f"{fmt}x2",) * 2, (f"{fmt}x2",) * 3
        fma = lambda a, b, c, s=spec: exact(a * b + c, s)  # noqa: E731
        ops += [
            Op(f"add.{result}", "r:rr", pairwise(fmt, lambda a, b, s=spec: exact(a + b, s)), two, result),
            Op(f"sub.{result}", "r:rr", pairwise(fmt, lambda a, b, s=spec: exact(a - b, s)), two, result),
            Op(f"mul.{result}", "r:rr", pairwise(fmt, lambda a, b, s=spec: exact(a * b, s)), two, result),
            Op(f"fma.rn.{result}", "r:rrr", pairwise(fmt, fma), three, result),
            Op(f"fma.rn.relu.{result}", "r:rrr", pairwise(fmt, lambda a, b, c, f=fma: or_nan(np.maximum(f(a, b, c), 0.0), f(a, b, c))), three, result),
            Op(f"min.{result}", "r:rr", pairwise(fmt, minimum), two, result),
            Op(f"max.{result}", "r:rr", pairwise(fmt, maximum), two, result),
            Op(f"max.NaN.{result}", "r:rr", pairwise(fmt, lambda a, b: or_nan(maximum(a, b), a, b)), two, result),
            Op(f"neg.{result}", "r:r", pairwise(fmt, lambda a: -a), one, result),
            Op(f"abs.{result}", "r:r", pairwise(fmt, np.abs), one, result),
            Op(f"add.{fmt}", "h:hh", lambda a, b, d=decode, s=spec: exact(d(a) + d(b), s), (fmt, fmt), fmt),
            Op(f"mul.{fmt}", "h:hh", lambda a, b, d=decode, s=spec: exact(d(a) * d(b), s), (fmt, fmt), fmt),
            Op(f"fma.rn.{fmt}", "h:hhh", lambda a, b, c, d=decode, f=fma: f(d(a), d(b), d(c)), (fmt, fmt, fmt), fmt),
            Op(f"max.{fmt}", "h:hh", lambda a, b, d=decode: maximum(d(a), d(b)), (fmt, fmt), fmt),
            Op(f"setp.lt.{fmt}", "p:hh", lambda a, b, d=decode: d(a) < d(b), (fmt, fmt)),
            Op(
                f"setp.gt.{result}", "r:rr", lambda a, b, d=decode: (d(a) > d(b)) * 1 + (d(a >> 16) > d(b >> 16)) * 2, two,
                text=f"{{ .reg .pred p, q; .reg .b32 x, y; setp.gt.{result} p|q, $1, $2;"
                " selp.b32 x, 1, 0, p; selp.b32 y, 2, 0, q; or.b32 $0, x, y; }",
            ),
        ]  # fmt: skip
    fp16 = partial(Op, result="f16x2")
    ops += [
        fp16("add.sat.f16x2", "r:rr", pairwise("f16", lambda a, b: saturated(exact(a + b, nm.F16))), ("f16x2", "f16x2")),
        fp16("ex2.approx.f16x2", "r:r", pairwise("f16", np.exp2), ("f16small",), rtol=2.0**-9.9, atol=2.0**-24),
        fp16("tanh.approx.f16x2", "r:r", pairwise("f16", np.tanh), ("f16small",), atol=2.0**-10.9),
        Op("ex2.approx.ftz.bf16x2", "r:r", pairwise("bf16", np.exp2), ("bf16small",), "bf16x2", rtol=2.0**-7),
        Op("tanh.approx.bf16x2", "r:r", pairwise("bf16", np.tanh), ("bf16small",), "bf16x2", atol=2.0**-8, rtol=2.0**-8),
    ]  # fmt: skip
    return ops


TABLES: dict[str, list[Op]] = {
    "integers": _integers(),
    "floats": _floats(),
    "conversions": _conversions(),
    "packed": _packed(),
}

# ---- inputs ------------------------------------------------------------------------------------

_EDGES = [0, 1, 2, 3, 31, 32, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF]
_EDGES += [0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]
_EDGES_64 = [*_EDGES, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_F32_EDGES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 2.0**-126, 65504.0]
_F32_EDGES += [65520.0, 448.0, 449.0, 480.0, 57344.0, 61440.0, 3.4e38, -3.4e38, 2.0**-10, 2.0**-17]
_F32_EDGES += [2.0**-24, 2.0**-25, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]


def sample(kind: str, width: int, rng: np.random.Generator) -> NDArray[np.uint64]:
    """SAMPLES inputs of `kind` as words of `width` bits (zero-extended to 64)."""

    def of_floats(x: Any, edges: Sequence[float] = ()) -> NDArray[np.uint64]:
        x = np.asarray(x, np.float64).copy()
        x[: len(edges)] = rng.permutation(np.asarray(edges))
        return nm.f32_bits(nm.rounded(x, nm.F32)).astype(np.uint64)

    def normal(low: float, high: float) -> nm.Floats:
        """Random signs and mantissas, exponents uniform in [low, high)."""
        return rng.choice([-1, 1], SAMPLES) * np.exp2(rng.uniform(low, high, SAMPLES))

    if kind in ("int", "divisor"):
        bits = rng.integers(0, 1 << 63, SAMPLES, dtype=np.uint64) << np.uint64(1)
        bits >>= rng.integers(0, 64, SAMPLES, dtype=np.uint64)
        edges = rng.permutation(np.array(_EDGES_64, dtype=np.uint64))
        bits[: len(edges)] = edges
        bits &= np.uint64((1 << width) - 1)
        return np.maximum(bits, np.uint64(1)) if kind == "divisor" else bits
    if kind == "int48":  # exactly representable in float64
        return rng.integers(0, 1 << 48, SAMPLES, dtype=np.uint64)
    if kind == "shift":
        return rng.integers(0, 70, SAMPLES, dtype=np.uint64)
    if kind == "small":
        return rng.integers(0, 3, SAMPLES, dtype=np.uint64)
    if kind == "medium":
        return rng.integers(-600, 600, SAMPLES).astype(np.uint64) & np.uint64((1 << width) - 1)
    if kind == "f32":
        return of_floats(normal(-24, 24), _F32_EDGES)
    if kind == "normal":
        return of_floats(normal(-100, 100))
    if kind == "near1":
        return of_floats(normal(-6, 4))
    if kind == "short":  # few bits and like sizes: a product plus a sum is exact in float64
        return of_floats(nm.rounded(normal(-1, 2), nm.Format(20, -126, 1e38)))
    if kind == "positive":
        return of_floats(abs(normal(-100, 100)), [1.0, 2.0, 0.5, 1 + 2.0**-23, np.inf])
    if kind == "exponent":
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -126.0, -126.5, -140.0, -150.0, 128.0]
        return of_floats(rng.uniform(-30, 30, SAMPLES), edges)
    if kind == "angle":
        return of_floats(rng.uniform(-np.pi, np.pi, SAMPLES))
    if kind == "integral":
        ties = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, np.nan, np.inf, -np.inf, 3e9, -3e9, 5e9, 0.0, -0.0]
        return of_floats(normal(-2, 10), ties)
    if kind == "f64":
        return normal(-60, 60).view(np.uint64)
    if kind in ("f16", "bf16"):
        _, fmt = halves(kind)
        encode = nm.f16_bits if kind == "f16" else nm.bf16_bits
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, fmt.largest, 2.0**fmt.min_exponent]
        values = normal(-8, 8)
        values[: len(edges)] = rng.permutation(np.asarray(edges))
        return encode(nm.rounded(values, fmt)).astype(np.uint64)
    if kind in ("f16small", "bf16small"):
        encode, fmt = (nm.f16_bits, nm.F16) if kind == "f16small" else (nm.bf16_bits, nm.BF16)
        low, high = (encode(nm.rounded(rng.uniform(-8, 8, SAMPLES), fmt)) for _ in range(2))
        return pack(low, high, 16).astype(np.uint64)
    if kind in ("f16x2", "bf16x2"):
        low, high = (sample(kind[:-2], 16, rng) for _ in range(2))
        return low | high << np.uint64(16)
    raise ValueError(f"unknown kind of input {kind!r}")


def inputs(ops: Sequence[Op]) -> NDArray[np.uint64]:
    """Inputs of a table, shape (ops, 4, SAMPLES); unused sources are zero."""
    rng = np.random.default_rng(2)
    out = np.zeros((len(ops), 4, SAMPLES), np.uint64)
    for i, op in enumerate(ops):
        for j, kind in enumerate(op.inputs):
            out[i, j] = sample(kind, WIDTH[op.kinds[2 + j]], rng)
    return out


# ---- the kernel --------------------------------------------------------------------------------


def build(ops: Sequence[Op]) -> Any:
    """Compile the kernel: (inputs (ops, 4, SAMPLES) u64, results (ops, SAMPLES) u64)."""

    @cute.kernel
    def evaluate(source: cute.Tensor, result: cute.Tensor) -> None:
        lane, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(len(ops)):
            op = ops[i]
            kind = "r" if op.kinds[0] == "p" else op.kinds[0]
            args = [
                source[i, j, lane].to(_WORD[op.kinds[2 + j]])
                for j in range(len(op.inputs))
            ]
            (word,) = asm(op.ptx(), (_WORD[kind],), *args)
            result[i, lane] = word.to(Uint64)

    @cute.jit
    def host(source: cute.Tensor, result: cute.Tensor) -> None:
        evaluate(source, result).launch(grid=(1, 1, 1), block=(SAMPLES, 1, 1))

    return compile(
        host, fake(Uint64, (len(ops), 4, SAMPLES)), fake(Uint64, (len(ops), SAMPLES))
    )
