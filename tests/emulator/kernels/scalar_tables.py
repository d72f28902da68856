"""The scalar instructions the emulator is tested on, and what each computes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import numeric as nm
from .scalar import Array, Op

Expect = Callable[..., Any]


def signed(x: Array, width: int = 32) -> Array:
    """Two's complement value of the low `width` bits."""
    top = 1 << (width - 1)
    return ((x & (2 * top - 1)) ^ top) - top


def each(f: Callable[..., int]) -> Expect:
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


def unordered(relation: Expect, when_nan: bool) -> Expect:
    def expect(a: Array, b: Array) -> Any:
        x, y = f32(a), f32(b)
        return np.where(np.isnan(x) | np.isnan(y), when_nan, relation(x, y))

    return expect


HALF = {"f16": (nm.f16_values, nm.F16), "bf16": (nm.bf16_values, nm.BF16)}


def half(fmt: str, f: Expect) -> Expect:
    """`f` on the values of the low 16 bits, its result rounded to `fmt`."""
    decode, spec = HALF[fmt]
    return lambda *a: nm.rounded(f(*(decode(words(x) & 0xFFFF) for x in a)), spec)


def pairs(fmt: str, f: Expect) -> Expect:
    """`half` for the low halves and for the high halves; result of shape (2, SAMPLES)."""
    one = half(fmt, f)
    return lambda *a: np.stack([one(*(x >> shift for x in a)) for shift in (0, 16)])


def pack8(encode: Expect, low: nm.Floats, high: nm.Floats) -> nm.Words:
    return encode(low) | encode(high) << np.uint32(8)


# ---- rows of the tables --------------------------------------------------------------------------


def op(opcode: str, kinds: str, expect: Expect, *inputs: str, **more: Any) -> Op:
    """Sources are of kind "int" unless `inputs` says otherwise."""
    return Op(opcode, kinds, expect, inputs or ("int",) * (len(kinds) - 2), **more)


def sop(opcode: str, kinds: str, expect: Expect, *inputs: str, width: int = 32) -> Op:
    """`expect` sees signed integers of `width` bits."""
    return op(opcode, kinds, lambda *a: expect(*(signed(x, width) for x in a)), *inputs)


def real(
    opcode: str, kinds: str, expect: Expect, *inputs: str, mode: str = "rn", **more: Any
) -> Op:
    """float32 sources, kind "f32" unless said otherwise; the result is rounded to float32."""
    inputs = inputs or ("f32",) * (len(kinds) - 2)

    def rounded(*a: Array) -> nm.Floats:
        return nm.rounded(expect(*map(f32, a)), nm.F32, mode)

    return Op(opcode, kinds, rounded, inputs, result="f32", **more)


def approximation(
    opcode: str, expect: Expect, *inputs: str, rtol: float = 0.0, atol: float = 0.0
) -> Op:
    """float32 sources; the result is within the tolerance the PTX manual gives."""
    kinds = "r:" + "r" * len(inputs)

    def near(*a):
        return expect(*map(f32, a))

    return Op(opcode, kinds, near, inputs, result="f32", rtol=rtol, atol=atol)


RELATIONS: dict[str, Expect] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def both(test: str, first: str) -> str:
    """PTX of a comparison with two results p|q: p counts 1, q counts 2."""
    return (
        f"{{ .reg .pred p, q, t; .reg .b32 x, y; {first} {test}"
        " selp.b32 x, 1, 0, p; selp.b32 y, 2, 0, q; or.b32 $0, x, y; }"
    )


def _arithmetic() -> list[Op]:
    bounds = (-(2**31), 2**31 - 1)
    ops = [
        op("add.s32", "r:rr", lambda a, b: a + b),
        op("sub.s32", "r:rr", lambda a, b: a - b),
        op("mul.lo.s32", "r:rr", lambda a, b: a * b),
        sop("mul.hi.s32", "r:rr", lambda a, b: a * b >> 32),
        op("mul.hi.u32", "r:rr", lambda a, b: a * b >> 32),
        sop("mul.wide.s32", "d:rr", lambda a, b: a * b),
        op("mul.wide.u32", "d:rr", lambda a, b: a * b),
        sop("mul.wide.s16", "r:hh", lambda a, b: a * b, width=16),
        op("mul.wide.u16", "r:hh", lambda a, b: a * b),
        op("mad.lo.s32", "r:rrr", lambda a, b, c: a * b + c),
        sop("mad.hi.s32", "r:rrr", lambda a, b, c: (a * b >> 32) + c),
        op("mad.hi.u32", "r:rrr", lambda a, b, c: (a * b >> 32) + c),
        op("mad.wide.s32", "d:rrd", lambda a, b, c: signed(a) * signed(b) + c),
        op("mad.wide.u32", "d:rrd", lambda a, b, c: a * b + c),
        sop("mul24.lo.s32", "r:rr", lambda a, b: a * b, width=24),
        op("mad24.lo.u32", "r:rrr", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
        sop("sad.s32", "r:rrr", lambda a, b, c: abs(a - b) + c),
        sop("add.sat.s32", "r:rr", lambda a, b: clamp(a + b, *bounds)),
        sop("sub.sat.s32", "r:rr", lambda a, b: clamp(a - b, *bounds)),
        sop("div.s32", "r:rr", each(divide), "int", "divisor"),
        op("div.u32", "r:rr", lambda a, b: a // b, "int", "divisor"),
        sop("rem.s32", "r:rr", lambda a, b: a - b * each(divide)(a, b), "int", "divisor"),
        op("rem.u32", "r:rr", lambda a, b: a % b, "int", "divisor"),
        sop("abs.s32", "r:r", abs),
        op("neg.s32", "r:r", lambda a: -a),
        sop("min.s32", "r:rr", np.minimum),
        sop("max.s32", "r:rr", np.maximum),
        op("min.u32", "r:rr", np.minimum),
        op("max.u32", "r:rr", np.maximum),
        op("add.s16", "h:hh", lambda a, b: a + b),
        op("sub.s16", "h:hh", lambda a, b: a - b),
        op("mul.lo.s16", "h:hh", lambda a, b: a * b),
        op("neg.s16", "h:h", lambda a: -a),
        op("dp4a.s32.s32", "r:rrr", each(dot4)),
        op("add.s64", "d:dd", lambda a, b: a + b),
        op("sub.s64", "d:dd", lambda a, b: a - b),
        op("mul.lo.s64", "d:dd", lambda a, b: a * b),
        op("mul.hi.u64", "d:dd", lambda a, b: a * b >> 64),
        sop("mul.hi.s64", "d:dd", lambda a, b: a * b >> 64, width=64),
        op("mad.lo.s64", "d:ddd", lambda a, b, c: a * b + c),
        sop("div.s64", "d:dd", each(divide), "int", "divisor", width=64),
        op("rem.u64", "d:dd", lambda a, b: a % b, "int", "divisor"),
        op("neg.s64", "d:d", lambda a: -a),
        sop("min.s64", "d:dd", np.minimum, width=64),
        op("max.u64", "d:dd", np.maximum),
        op(
            "add.cc.u32+addc.u32",
            "d:rrrr",
            lambda a, b, c, d: (b << 32 | a) + (d << 32 | c),
            text="{ .reg .b32 x, y; add.cc.u32 x, $1, $3; addc.u32 y, $2, $4;"
            " mov.b64 $0, {x, y}; }",
        ),
        op(
            "sub.cc.u32+subc.u32",
            "d:rrrr",
            lambda a, b, c, d: (b << 32 | a) - (d << 32 | c),
            text="{ .reg .b32 x, y; sub.cc.u32 x, $1, $3; subc.u32 y, $2, $4;"
            " mov.b64 $0, {x, y}; }",
        ),
        op(
            "mad.lo.cc.u32+madc.hi.u32",
            "d:rrrr",
            lambda a, b, c, d: a * b + (d << 32 | c),
            text="{ .reg .b32 x, y; mad.lo.cc.u32 x, $1, $2, $3; madc.hi.u32 y, $1, $2, $4;"
            " mov.b64 $0, {x, y}; }",
        ),
    ]
    for name, relation in RELATIONS.items():
        ops += [
            sop(f"setp.{name}.s32", "p:rr", relation),
            op(f"setp.{name}.u64", "p:dd", relation),
            sop(f"setp.{name}.s16", "p:hh", relation, width=16),
        ]
    for name, alias in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        ops.append(op(f"setp.{name}.u32", "p:rr", RELATIONS[alias]))
    return ops


def _bits() -> list[Op]:
    def shift(opcode: str, kinds: str, expect: Expect) -> Op:
        return op(opcode, kinds, lambda a, b: expect(a, np.minimum(b, 100)), "int", "shift")

    ops = [
        op("not.b16", "h:h", lambda a: ~a),
        op("not.b32", "r:r", lambda a: ~a),
        op("not.b64", "d:d", lambda a: ~a),
        op("cnot.b32", "r:r", lambda a: (a == 0) * 1, "small"),
        shift("shl.b16", "h:hr", lambda a, n: a << n),
        shift("shr.s16", "h:hr", lambda a, n: signed(a, 16) >> n),
        shift("shr.u16", "h:hr", lambda a, n: a >> n),
        shift("shl.b32", "r:rr", lambda a, n: a << n),
        shift("shr.u32", "r:rr", lambda a, n: a >> n),
        shift("shr.s32", "r:rr", lambda a, n: signed(a) >> n),
        shift("shl.b64", "d:dr", lambda a, n: a << n),
        shift("shr.u64", "d:dr", lambda a, n: a >> n),
        shift("shr.s64", "d:dr", lambda a, n: signed(a, 64) >> n),
        op("popc.b32", "r:r", each(int.bit_count)),
        op("popc.b64", "r:d", each(int.bit_count)),
        op("clz.b32", "r:r", each(lambda a: 32 - a.bit_length())),
        op("clz.b64", "r:d", each(lambda a: 64 - a.bit_length())),
        op("brev.b32", "r:r", each(partial(reverse, width=32))),
        op("brev.b64", "d:d", each(partial(reverse, width=64))),
        op("bfind.u32", "r:r", each(partial(top_bit, width=32, is_signed=False))),
        op("bfind.s32", "r:r", each(partial(top_bit, width=32, is_signed=True))),
        op(
            "bfind.shiftamt.u32",
            "r:r",
            each(partial(top_bit, width=32, is_signed=False, shift=True)),
        ),
        op("slct.b32.s32", "r:rrr", lambda a, b, c: np.where(signed(c) >= 0, a, b)),
        op("slct.f32.f32", "r:rrr", lambda a, b, c: np.where(f32(c) >= 0, a, b), *["f32"] * 3),
        op("prmt.b32", "r:rrr", each(permute)),
        op(
            "mov.b32.unpack",
            "r:r",
            lambda a: (a & 0xFFFF) << 16 | a >> 16,
            text="{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; mov.b32 $0, {hi, lo}; }",
        ),
        op(
            "mov.b64.unpack",
            "d:d",
            lambda a: (a & 0xFFFFFFFF) << 32 | a >> 32,
            text="{ .reg .b32 lo, hi; mov.b64 {lo, hi}, $1; mov.b64 $0, {hi, lo}; }",
        ),
        op(
            "setp.lt.or.s32",
            "r:rrr",
            lambda a, b, c: (
                ((signed(a) < signed(b)) | (c > 1)) * 1 + ((signed(a) >= signed(b)) | (c > 1)) * 2
            ),
            *("int", "int", "small"),
            text=both("setp.lt.or.s32 p|q, $1, $2, t;", "setp.gt.u32 t, $3, 1;"),
        ),
        op(
            "predicated",
            "r:rrr",
            lambda a, b, c: np.where(c > 1, a + b, np.where(c == 1, a, a - 7)),
            *("int", "int", "small"),
            text="{ .reg .pred p, q, s; setp.gt.u32 p, $3, 1; setp.ne.u32 q, $3, 1;"
            " and.pred s, q, p; not.pred q, q; mov.b32 $0, $1; @s add.u32 $0, $1, $2;"
            " or.pred s, p, q; @!s sub.u32 $0, $1, 7; }",
        ),
        op("set.lt.u32.s32", "r:rr", lambda a, b: np.where(signed(a) < signed(b), 0xFFFFFFFF, 0)),
    ]
    logical: dict[str, Expect] = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    for width, kind in ((16, "h"), (32, "r"), (64, "d")):
        for name, f in logical.items():
            ops.append(op(f"{name}.b{width}", f"{kind}:{kind}{kind}", f))
    for width, kind in ((32, "r"), (64, "d")):
        field = partial(extract, width=width)
        kinds, inputs = f"{kind}:{kind}rr", ("int", "shift", "shift")
        ops += [
            op(f"bfe.u{width}", kinds, each(partial(field, is_signed=False)), *inputs),
            op(f"bfe.s{width}", kinds, each(partial(field, is_signed=True)), *inputs),
            op(
                f"bfi.b{width}",
                f"{kind}:{kind}{kind}rr",
                each(partial(insert, width=width)),
                *("int", *inputs),
            ),
        ]
    for left in (True, False):
        for wrap in (True, False):
            name = f"shf.{'l' if left else 'r'}.{'wrap' if wrap else 'clamp'}.b32"
            f = each(partial(funnel, left=left, wrap=wrap))
            ops.append(op(name, "r:rrr", f, "int", "int", "shift"))
    ops += [
        op(f"prmt.b32.{mode}", "r:rrr", each(partial(permute, mode=mode)))
        for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    ]
    ops += [
        op("lop3.b32", "r:rrr", each(partial(logic, table=table)), tail=f", {table:#x}")
        for table in (0xE8, 0x96, 0x1D)
    ]
    return ops


def _floats() -> list[Op]:
    def add(a, b):
        return a + b

    def multiply(a, b):
        return a * b

    def fma(a, b, c):
        return a * b + c

    def flushed(f: Expect) -> Expect:
        return lambda *a: flush(nm.rounded(f(*map(flush, a)), nm.F32))

    def clamped(f: Expect) -> Expect:
        return lambda *a: saturated(nm.rounded(f(*a), nm.F32))

    def exponential(a: nm.Floats) -> nm.Floats:
        return nm.rounded(np.exp2(a), nm.F32)  # it may overflow, or fall below normal numbers

    near, root = 2.0**-22, 2.0**-22.4
    ops = [
        real("add.f32", "r:rr", add),
        real("sub.f32", "r:rr", lambda a, b: a - b),
        real("mul.f32", "r:rr", multiply),
        real("fma.rn.f32", "r:rrr", fma),
        real("add.ftz.f32", "r:rr", flushed(add)),
        real("sub.ftz.f32", "r:rr", flushed(lambda a, b: a - b)),
        real("mul.ftz.f32", "r:rr", flushed(multiply)),
        real("fma.rn.ftz.f32", "r:rrr", flushed(fma)),
        real("add.sat.f32", "r:rr", clamped(add), "near1", "near1"),
        real("mul.sat.f32", "r:rr", clamped(multiply), "near1", "near1"),
        real("fma.rn.sat.f32", "r:rrr", clamped(fma), "near1", "near1", "near1"),
        real("cvt.sat.f32.f32", "r:r", saturated),
        real("cvt.ftz.f32.f32", "r:r", flush),
        real("div.rn.f32", "r:rr", lambda a, b: a / b, "near1", "near1"),
        real("rcp.rn.f32", "r:r", lambda a: 1 / a, "near1"),
        real("sqrt.rn.f32", "r:r", np.sqrt),
        real("abs.f32", "r:r", abs),
        real("neg.f32", "r:r", lambda a: -a),
        real("max.f32", "r:rr", maximum),
        real("min.f32", "r:rr", minimum),
        real("max.NaN.f32", "r:rr", lambda a, b: or_nan(maximum(a, b), a, b)),
        real("min.NaN.f32", "r:rr", lambda a, b: or_nan(minimum(a, b), a, b)),
        real("copysign.f32", "r:rr", lambda a, b: np.copysign(b, a)),
        approximation("ex2.approx.f32", exponential, "exponent", rtol=near),
        approximation("ex2.approx.ftz.f32", lambda a: flush(exponential(a)), "exponent", rtol=near),
        approximation("lg2.approx.f32", np.log2, "positive", rtol=near, atol=near),
        approximation(
            "lg2.approx.ftz.f32", lambda a: np.log2(flush(a)), "positive", rtol=near, atol=near
        ),
        approximation("rcp.approx.f32", lambda a: 1 / a, "normal", rtol=2.0**-23),
        approximation("rcp.approx.ftz.f32", lambda a: 1 / a, "normal", rtol=2.0**-23),
        approximation("rsqrt.approx.f32", lambda a: 1 / np.sqrt(a), "positive", rtol=root),
        approximation("rsqrt.approx.ftz.f32", lambda a: 1 / np.sqrt(a), "positive", rtol=root),
        approximation("sqrt.approx.f32", np.sqrt, "positive", rtol=root),
        approximation("sin.approx.f32", np.sin, "angle", atol=2.0**-20.5),
        approximation("cos.approx.f32", np.cos, "angle", atol=2.0**-20.5),
        approximation("tanh.approx.f32", np.tanh, "near1", rtol=2.0**-10.9),
        approximation("div.approx.f32", lambda a, b: a / b, "near1", "near1", rtol=near),
        approximation("div.full.f32", lambda a, b: a / b, "near1", "near1", rtol=near),
        op("testp.finite.f32", "p:r", lambda a: np.isfinite(f32(a)), "f32"),
        op(
            "setp.lt.and.f32",
            "r:rr",
            lambda a, b: np.where(f32(a) < f32(b), 1, 2),
            *("f32", "f32"),
            text=both("setp.lt.and.f32 p|q, $1, $2, t;", "setp.eq.u32 t, $1, $1;"),
        ),
        op("setp.num.f32", "p:rr", unordered(lambda a, b: a == a, False), "f32", "f32"),
        op("setp.nan.f32", "p:rr", unordered(lambda a, b: a != a, True), "f32", "f32"),
    ]
    for name, relation in RELATIONS.items():
        ops += [
            op(f"setp.{name}.f32", "p:rr", unordered(relation, False), "f32", "f32"),
            op(f"setp.{name}u.f32", "p:rr", unordered(relation, True), "f32", "f32"),
        ]
    for mode in ("rn", "rz", "rm", "rp"):
        ops += [
            real(f"add.{mode}.f32", "r:rr", add, "near1", "near1", mode=mode),
            real(f"mul.{mode}.f32", "r:rr", multiply, "near1", "near1", mode=mode),
            real(f"fma.{mode}.f32", "r:rrr", fma, "short", "short", "short", mode=mode),
        ]
    return ops


def _conversions() -> list[Op]:
    exact = nm.rounded

    def to_float(opcode: str, kinds: str, expect: Expect, kind: str, mode: str = "rn") -> Op:
        """Integer to float32."""
        return Op(
            opcode,
            kinds,
            lambda a: exact(expect(a).astype(np.float64), nm.F32, mode),
            (kind,),
            result="f32",
        )

    def from_float(opcode: str, kinds: str, decode: Expect, kind: str, *spec: Any) -> Op:
        """Float to integer; `spec` is mode, width and signedness."""
        return op(opcode, kinds, lambda a: float_to_integer(decode(a), *spec), kind)

    def to_half(opcode: str, kinds: str, expect: Expect, fmt: str, kind: str) -> Op:
        spec = HALF[fmt][1]
        return op(
            opcode, kinds, lambda a: exact(expect(a).astype(np.float64), spec), kind, result=fmt
        )

    def tf32(mode: str, kind: str) -> Op:
        opcode = f"cvt.{mode}.tf32.f32"
        return op(opcode, "r:r", lambda a: exact(f32(a), nm.TF32, mode), kind, result="tf32")

    ops = [
        op("cvt.s32.s8", "r:r", lambda a: signed(a, 8)),
        op("cvt.u32.u8", "r:r", lambda a: a & 0xFF),
        op("cvt.s32.s16", "r:h", lambda a: signed(a, 16)),
        op("cvt.u32.u16", "r:h", lambda a: a),
        op("cvt.u16.u32", "h:r", lambda a: a),
        op("cvt.s16.s8", "h:h", lambda a: signed(a, 8)),
        op("cvt.s64.s32", "d:r", signed),
        op("cvt.u64.u32", "d:r", lambda a: a),
        op("cvt.u32.u64", "r:d", lambda a: a),
        op("cvt.s64.s8", "d:r", lambda a: signed(a, 8)),
        op("cvt.sat.s8.s32", "r:r", lambda a: clamp(signed(a), -128, 127), "medium"),
        op("cvt.sat.u8.s32", "r:r", lambda a: clamp(signed(a), 0, 255), "medium"),
        op("cvt.sat.s16.s32", "h:r", lambda a: clamp(signed(a), -(2**15), 2**15 - 1)),
        op("cvt.sat.u16.s32", "h:r", lambda a: clamp(signed(a), 0, 2**16 - 1)),
        op("cvt.sat.u32.s32", "r:r", lambda a: clamp(signed(a), 0, 2**31 - 1)),
        op("cvt.sat.s32.u32", "r:r", lambda a: clamp(a, 0, 2**31 - 1)),
        op("cvt.sat.s32.s64", "r:d", lambda a: clamp(signed(a, 64), -(2**31), 2**31 - 1)),
        op("cvt.f32.f16", "r:h", f16, result="f32"),
        op("cvt.f32.bf16", "r:h", bf16, result="f32"),
        op("cvt.f64.f32", "d:r", f32, "f32", result="f64"),
        op(
            "cvt.rn.f32.f64",
            "r:d",
            lambda a: exact(a.astype(np.uint64).view(np.float64), nm.F32),
            "f64",
            result="f32",
        ),
        tf32("rna", "f32"),
        tf32("rn", "normal"),
        tf32("rz", "normal"),
        to_float("cvt.rn.f32.s64", "r:d", lambda a: signed(a, 64), "int48"),
        to_float("cvt.rn.f32.u64", "r:d", lambda a: a, "int48"),
        to_float("cvt.rn.f32.s16", "r:h", lambda a: signed(a, 16), "int"),
        to_float("cvt.rn.f32.u8", "r:h", lambda a: a & 0xFF, "int"),
        to_float("cvt.rn.f32.s8", "r:h", lambda a: signed(a, 8), "int"),
        to_half("cvt.rn.f16.s32", "h:r", signed, "f16", "medium"),
        to_half("cvt.rn.bf16.s32", "h:r", signed, "bf16", "medium"),
        to_half("cvt.rn.f16.u16", "h:h", lambda a: a, "f16", "int"),
        op("cvt.rmi.f16.f16", "h:h", lambda a: np.floor(f16(a)), "f16", result="f16"),
        from_float("cvt.rzi.s64.f32", "d:r", f32, "short", "rz", 64, True),
        from_float("cvt.rzi.s16.f32", "h:r", f32, "integral", "rz", 16, True),
        from_float("cvt.rni.s32.f16", "r:h", f16, "f16", "rn", 32, True),
        from_float("cvt.rzi.u32.bf16", "r:h", bf16, "bf16", "rz", 32, False),
        op(
            "cvt.rni.sat.u8.f32+cvt.u32.u8",
            "r:r",
            lambda a: float_to_integer(f32(a), "rn", 8, False),
            "integral",
            text="{ .reg .b16 h; cvt.rni.sat.u8.f32 h, $1; cvt.u32.u8 $0, h; }",
        ),
    ]
    for mode in ("rn", "rz", "rm", "rp"):
        ops += [
            to_float(f"cvt.{mode}.f32.s32", "r:r", signed, "int", mode),
            to_float(f"cvt.{mode}.f32.u32", "r:r", lambda a: a, "int", mode),
            from_float(f"cvt.{mode}i.s32.f32", "r:r", f32, "integral", mode, 32, True),
            from_float(f"cvt.{mode}i.u32.f32", "r:r", f32, "integral", mode, 32, False),
            real(
                f"cvt.{mode}i.f32.f32",
                "r:r",
                lambda a, m=mode: np.copysign(nm.to_integer(a, m), a),
                "integral",
            ),
        ]
    return ops + [row for fmt in HALF for row in _to_halves(fmt)] + _eights()


def _to_halves(fmt: str) -> list[Op]:
    """float32 to 16 bits; the pair's first source goes to the high half."""
    spec = HALF[fmt][1]

    def pair(mode: str, a: Array, b: Array) -> nm.Floats:
        return np.stack([nm.rounded(f32(b), spec, mode), nm.rounded(f32(a), spec, mode)])

    def relu(mode: str, a: Array, b: Array) -> nm.Floats:
        both = pair(mode, a, b)
        return or_nan(np.maximum(both, 0), both)

    rows: list[Op] = []
    for mode in ("rn", "rz"):

        def one(a, m=mode):
            return nm.rounded(f32(a), spec, m)

        rows.append(op(f"cvt.{mode}.{fmt}.f32", "h:r", one, "f32", result=fmt))
        for relu_, f in (("", pair), (".relu", relu)):
            opcode = f"cvt.{mode}{relu_}.{fmt}x2.f32"
            rows.append(op(opcode, "r:rr", partial(f, mode), "f32", "f32", result=f"{fmt}x2"))
    return rows


def _eights() -> list[Op]:
    """float32 and float16 to and from pairs of 8-bit floats."""
    rows: list[Op] = []
    for name, spec, encode, decode in (
        ("e4m3", nm.E4M3, nm.e4m3_bits, nm.e4m3_values),
        ("e5m2", nm.E5M2, nm.e5m2_bits, nm.e5m2_values),
    ):
        narrow = partial(nm.rounded, fmt=spec, saturate=True)

        def positive(x, n=narrow):
            return or_nan(np.maximum(n(x), 0.0), x)

        rows += [
            op(
                f"cvt.rn.satfinite.{name}x2.f32",
                "h:rr",
                lambda a, b, n=narrow, e=encode: pack8(e, n(f32(b)), n(f32(a))),
                *("f32", "f32"),
            ),
            op(
                f"cvt.rn.satfinite.relu.{name}x2.f32",
                "h:rr",
                lambda a, b, n=positive, e=encode: pack8(e, n(f32(b)), n(f32(a))),
                *("near1", "near1"),
            ),
            op(
                f"cvt.rn.satfinite.{name}x2.f16x2",
                "h:r",
                lambda a, n=narrow, e=encode: pack8(e, n(f16(a)), n(f16(a >> 16))),
                "f16x2",
            ),
            op(
                f"cvt.rn.f16x2.{name}x2",
                "r:h",
                lambda a, d=decode: np.stack([d(words(a)), d(words(a >> 8))]),
                result="f16x2",
            ),
        ]
    return rows


def _packed() -> list[Op]:
    ops: list[Op] = []

    def fma(a, b, c):
        return a * b + c

    def positive(a: nm.Floats, b: nm.Floats, c: nm.Floats) -> nm.Floats:
        return or_nan(np.maximum(fma(a, b, c), 0.0), fma(a, b, c))

    functions: dict[str, Expect] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "fma.rn": fma,
        "fma.rn.relu": positive,
        "min": minimum,
        "max": maximum,
        "max.NaN": lambda a, b: or_nan(maximum(a, b), a, b),
        "neg": lambda a: -a,
        "abs": np.abs,
    }
    for fmt in HALF:
        decode = f16 if fmt == "f16" else bf16
        for name, f in functions.items():
            count = f.__code__.co_argcount if hasattr(f, "__code__") else 1
            kinds = "r:" + "r" * count
            inputs = [f"{fmt}x2"] * count
            ops.append(op(f"{name}.{fmt}x2", kinds, pairs(fmt, f), *inputs, result=f"{fmt}x2"))
        for name in ("add", "mul", "fma.rn", "max"):
            count = 3 if name == "fma.rn" else 2
            kinds = "h:" + "h" * count
            f = half(fmt, functions[name])
            ops.append(op(f"{name}.{fmt}", kinds, f, *[fmt] * count, result=fmt))
        ops.append(op(f"setp.lt.{fmt}", "p:hh", lambda a, b, d=decode: d(a) < d(b), fmt, fmt))

    def approximate(opcode: str, f: Expect, rtol: float = 0.0, atol: float = 0.0) -> Op:
        fmt = "bf16" if "bf16" in opcode else "f16"
        more = {"result": f"{fmt}x2", "rtol": rtol, "atol": atol}
        return op(opcode, "r:r", pairs(fmt, f), f"{fmt}small", **more)

    return [
        *ops,
        op(
            "add.sat.f16x2",
            "r:rr",
            pairs("f16", lambda a, b: saturated(nm.rounded(a + b, nm.F16))),
            *("f16x2", "f16x2"),
            result="f16x2",
        ),
        approximate("ex2.approx.f16x2", np.exp2, rtol=2.0**-9.9, atol=2.0**-24),
        approximate("tanh.approx.f16x2", np.tanh, atol=2.0**-10.9),
        approximate("ex2.approx.ftz.bf16x2", np.exp2, rtol=2.0**-7),
        approximate("tanh.approx.bf16x2", np.tanh, rtol=2.0**-8, atol=2.0**-8),
    ]


TABLES: dict[str, list[Op]] = {
    "arithmetic": _arithmetic(),
    "bits": _bits(),
    "floats": _floats(),
    "conversions": _conversions(),
    "packed": _packed(),
}
