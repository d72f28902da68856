"""Instruction forms on hand-written PTX: those no compiled test kernel has, and those refused."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hopwell.emulator import ptx
from hopwell.emulator.loader import Launch
from hopwell.emulator.machine import Machine
from hopwell.emulator.memory import Extent, GlobalMemory
from hopwell.emulator.report import Options
from hopwell.emulator.translate import Program

LANES = 128
Words = NDArray[np.uint64]

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry test(.param .u64 source, .param .u64 result)
{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<16>;
    .reg .b64 %d<16>;
    .reg .b128 %q<2>;
"""
# Inputs: %d0.. to %d3, their low halves %r0.. and quarters %h0.., and the lane %r15. Result: %d7.
LOAD = """
    ld.param.u64 %d8, [source];
    ld.param.u64 %d9, [result];
    mov.u32 %r15, %tid.x;
    mad.wide.u32 %d8, %r15, 8, %d8;
    mad.wide.u32 %d9, %r15, 8, %d9;
    ld.global.b64 %d0, [%d8];
    ld.global.b64 %d1, [%d8+1024];
    ld.global.b64 %d2, [%d8+2048];
    ld.global.b64 %d3, [%d8+3072];
    cvt.u32.u64 %r0, %d0;
    cvt.u32.u64 %r1, %d1;
    cvt.u32.u64 %r2, %d2;
    cvt.u32.u64 %r3, %d3;
    cvt.u16.u64 %h0, %d0;
    cvt.u16.u64 %h1, %d1;
    cvt.u16.u64 %h2, %d2;
    mov.b64 %d7, 0;
"""
TAIL = """
    st.global.b64 [%d9], %d7;
    ret;
}
"""


def machine(body: str, inputs: Words, result: Words) -> Machine:
    pointers = (ctypes.c_uint64 * 2)(inputs.ctypes.data, result.ctypes.data)
    first = ctypes.addressof(pointers)
    launch = Launch(
        HEAD + LOAD + body + TAIL,
        "test",
        (1, 1, 1),
        (LANES, 1, 1),
        (1, 1, 1),
        0,
        (first, first + 8),
    )
    memory = GlobalMemory(
        Extent(name, array.ctypes.data, array.shape, array.strides, 8)
        for name, array in (("source", inputs), ("result", result))
    )
    made = Machine(launch, memory, Options())
    made.run()
    return made


def evaluate(body: str, *columns: NDArray[np.unsignedinteger] | list[int]) -> list[int]:
    """%d7 of each lane, for inputs cycled to fill the lanes."""
    room = np.zeros(5 * LANES + 3, np.uint64)
    aligned = room[-(room.ctypes.data // 8) % 4 :]  # to 32 bytes
    inputs, result = aligned[: 4 * LANES].reshape(4, LANES), aligned[4 * LANES :][:LANES]
    for row, column in zip(inputs, columns, strict=False):
        row[:] = np.resize(np.array([int(x) & (1 << 64) - 1 for x in column], np.uint64), LANES)
    findings = machine(body, inputs, result).findings
    assert not findings, findings[0]
    return result.tolist()


def words(*floats: float) -> list[int]:
    """Bits of float32 values."""
    return np.array(floats, np.float32).view(np.uint32).tolist()


def floats(bits: list[int]) -> NDArray[np.float32]:
    return np.array(bits, np.uint64).astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class Case:
    """One body; `expect` computes the result of a lane from Python integers."""

    body: str
    expect: Callable[..., int]
    inputs: tuple[list[int], ...]

    def __str__(self) -> str:
        return self.body.split(";")[0].split()[0]


M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = [
    0,
    1,
    2,
    31,
    32,
    33,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFF,
    0x12345678,
    0xFEDCBA98,
]
SHIFTED = EDGES[5:] + EDGES[:5]
COUNTS = [0, 1, 5, 31, 32, 33, 63, 64, 255, 7, 16, 8]


def signed(x: int, bits: int = 32) -> int:
    return (x & (1 << bits) - 1 ^ 1 << bits - 1) - (1 << bits - 1)


def clamp(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def bmsk(a: int, b: int, clamped: bool) -> int:
    """The manual's procedure."""
    a1, b1 = a & 31, b & 31
    mask0, total = M32 << a1 & M32, a1 + b1
    mask1 = M32 << total & M32
    if clamped and a >= 32:
        mask0 = 0
    if total >= 32 or (clamped and (a >= 32 or b >= 32)):
        mask1 = 0
    return mask0 & ~mask1


def szext(a: int, b: int, clamped: bool, is_signed: bool) -> int:
    """The manual's procedure."""
    b1, large = b & 31, clamped and b >= 32
    mask = 0 if large else M32 << b1 & M32
    sign = is_signed and not large and b1 and a >> (b1 - 1) & 1
    return a & ~mask | (mask if sign else 0)


def parts(x: int, bits: int, is_signed: bool) -> list[int]:
    values = [x >> i & (1 << bits) - 1 for i in range(0, 32, bits)]
    return [signed(v, bits) if is_signed else v for v in values]


def dp2a(a: int, b: int, c: int, high: bool) -> int:
    halves, octets = parts(a, 16, True), parts(b, 8, False)[2 * high :]
    return (signed(c) + halves[0] * octets[0] + halves[1] * octets[1]) & M32


def halves(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """Of both signed halves of two words."""
    return lambda a, b: sum(
        (function(x, y) & 0xFFFF) << 16 * i
        for i, (x, y) in enumerate(zip(parts(a, 16, True), parts(b, 16, True), strict=True))
    )


def r(body: str) -> str:
    """A body with its result in %r8."""
    return f"{body} cvt.u64.u32 %d7, %r8;"


def h(body: str) -> str:
    """A body with its result in %h3."""
    return f"{body} cvt.u64.u16 %d7, %h3;"


def p(body: str) -> str:
    """A body with its result in %p0 and %p1: bits 0 and 1."""
    return f"""{body} selp.b32 %r8, 1, 0, %p0; selp.b32 %r9, 2, 0, %p1; or.b32 %r8, %r8, %r9;
        cvt.u64.u32 %d7, %r8;"""


WIDE = [0, 1, M64, M64 - 1, 1 << 63, 0x123456789ABCDEF0, 0xFFFFFFFF00000000, 0xFFFFFFFF]
INTEGERS = [
    Case(
        """add.cc.u64 %d4, %d0, %d1; addc.cc.u64 %d5, %d2, %d3; addc.u64 %d6, 0, 0;
        mul.lo.u64 %d4, %d4, 3; mul.lo.u64 %d5, %d5, 5; add.u64 %d7, %d4, %d5;
        mad.lo.u64 %d7, %d6, 7, %d7;""",
        lambda a, b, c, d: (
            (
                ((a + b) & M64) * 3
                + ((c + d + (a + b >> 64)) & M64) * 5
                + (c + d + (a + b >> 64) >> 64) * 7
            )
            & M64
        ),
        (WIDE, WIDE[3:] + WIDE[:3], WIDE[5:] + WIDE[:5], WIDE[2:] + WIDE[:2]),
    ),
    Case(
        """mov.b64 {%r4, %r5}, %d0; mov.b64 {%r6, %r7}, %d1; sub.cc.s32 %r4, %r4, %r6;
        subc.s32 %r5, %r5, %r7; mov.b64 %d7, {%r4, %r5};""",
        lambda a, b: (a - b) & M64,
        (WIDE, WIDE[3:] + WIDE[:3]),
    ),
    Case(  # 64 by 32 bits: the carry of a product's low half into the high half
        """mov.b64 {%r4, %r5}, %d0; mul.lo.u32 %r8, %r4, %r1; mul.hi.u32 %r9, %r4, %r1;
        mad.lo.cc.u32 %r9, %r5, %r1, %r9; madc.hi.u32 %r10, %r5, %r1, 0;
        mov.b64 %d7, {%r9, %r10};""",
        lambda a, b: a * (b & M32) >> 32 & M64,
        (WIDE, WIDE[3:] + WIDE[:3]),
    ),
    Case(  # a guarded one leaves the carry of other lanes alone
        """setp.lt.u32 %p0, %r15, 64; add.cc.u32 %r8, %r0, %r1;
        @%p0 add.cc.u32 %r9, 0, 0; addc.u32 %r8, 0, 0; shl.b32 %r9, %r15, 1;
        and.b32 %r9, %r9, 128; or.b32 %r8, %r8, %r9; cvt.u64.u32 %d7, %r8;""",
        lambda a, b: -1,
        (EDGES, SHIFTED),
    ),
    Case(r("bmsk.clamp.b32 %r8, %r0, %r1;"), lambda a, b: bmsk(a, b, True), (COUNTS, COUNTS[3:])),
    Case(r("bmsk.wrap.b32 %r8, %r0, %r1;"), lambda a, b: bmsk(a, b, False), (COUNTS, COUNTS[3:])),
    *(
        Case(
            r(f"szext.{mode}.{t} %r8, %r0, %r1;"),
            lambda a, b, c=mode == "clamp", s=t == "s32": szext(a, b, c, s),
            (EDGES, COUNTS[:7]),
        )
        for mode in ("clamp", "wrap")
        for t in ("s32", "u32")
    ),
    Case(
        r("dp2a.lo.s32.u32 %r8, %r0, %r1, %r2;"),
        lambda a, b, c: dp2a(a, b, c, False),
        (EDGES, SHIFTED, EDGES[3:]),
    ),
    Case(
        r("dp2a.hi.s32.u32 %r8, %r0, %r1, %r2;"),
        lambda a, b, c: dp2a(a, b, c, True),
        (EDGES, SHIFTED, EDGES[3:]),
    ),
    Case(
        r("mul24.hi.s32 %r8, %r0, %r1;"),
        lambda a, b: signed(a, 24) * signed(b, 24) >> 16 & M32,
        (EDGES, SHIFTED),
    ),
    Case(
        r("mul24.hi.u32 %r8, %r0, %r1;"),
        lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16 & M32,
        (EDGES, SHIFTED),
    ),
    Case(
        r("mad24.hi.sat.s32 %r8, %r0, %r1, %r2;"),
        lambda a, b, c: (
            clamp(signed(signed(a, 24) * signed(b, 24) >> 16) + signed(c), -(1 << 31), M32 >> 1)
            & M32
        ),
        (EDGES, SHIFTED, EDGES[4:]),
    ),
    Case(
        r("mad.hi.sat.s32 %r8, %r0, %r1, %r2;"),
        lambda a, b, c: (
            clamp((signed(a) * signed(b) >> 32) + signed(c), -(1 << 31), M32 >> 1) & M32
        ),
        (EDGES, SHIFTED, EDGES[4:]),
    ),
    Case(r("add.u16x2 %r8, %r0, %r1;"), halves(lambda x, y: x + y), (EDGES, SHIFTED)),
    Case(r("max.s16x2 %r8, %r0, %r1;"), halves(max), (EDGES, SHIFTED)),
    Case(
        r("min.relu.s16x2 %r8, %r0, %r1;"), halves(lambda x, y: max(min(x, y), 0)), (EDGES, SHIFTED)
    ),
    Case(
        r("max.relu.s32 %r8, %r0, %r1;"),
        lambda a, b: max(signed(a), signed(b), 0),
        (EDGES, SHIFTED),
    ),
    Case(  # %p1 is false
        r("""lop3.and.b32 %r8|%p0, %r0, %r1, %r2, 0xC0, %p1; selp.b32 %r9, 1, 0, %p0;
        xor.b32 %r8, %r8, %r9;"""),
        lambda a, b, c: a & b,
        (EDGES, SHIFTED, EDGES),
    ),
    Case(
        "setp.ne.u32 %p1, %r2, 0; lop3.or.b32 _|%p0, %r0, %r1, %r1, 0x3C, !%p1;"
        + p("mov.pred %p1, 0;"),
        lambda a, b, c: int(a ^ b != 0 or c == 0),
        (EDGES, SHIFTED, [0, 1]),
    ),
    Case(
        r("cvt.pack.sat.u16.s32 %r8, %r0, %r1;"),
        lambda a, b: clamp(signed(a), 0, 0xFFFF) << 16 | clamp(signed(b), 0, 0xFFFF),
        (EDGES, SHIFTED),
    ),
    Case(
        r("cvt.pack.sat.s4.s32.b32 %r8, %r0, %r1, %r2;"),
        lambda a, b, c: (
            (c << 8 | (clamp(signed(a), -8, 7) & 15) << 4 | clamp(signed(b), -8, 7) & 15) & M32
        ),
        (EDGES, [M32 - 3, 3, 9], SHIFTED),
    ),
    Case(
        """mov.b128 %q0, {%d0, %d1}; mov.b128 %q1, %q0; mov.b128 {%d4, %d5}, %q1;
        xor.b64 %d5, %d5, 255; add.u64 %d7, %d4, %d5;""",
        lambda a, b: (a + (b ^ 255)) & M64,
        (WIDE, WIDE[3:]),
    ),
    Case(
        "mov.b16 %h3, {%h0, %h1}; cvt.u64.u16 %d7, %h3;",
        lambda a, b: (a & 255) | (b & 255) << 8,
        (EDGES, SHIFTED),
    ),
    Case(
        p("setp.lt.and.s32 %p0|%p1, %r0, %r1, !%p2;"),
        lambda a, b: 1 if signed(a) < signed(b) else 2,
        (EDGES, SHIFTED),
    ),
    Case(  # the combined predicate is one of the results
        "setp.gt.u32 %p0, %r2, 1; " + p("setp.lt.or.u32 %p0|%p1, %r0, %r1, %p0;"),
        lambda a, b, c: int(a < b or c > 1) + 2 * int(a >= b or c > 1),
        (EDGES, SHIFTED, [0, 1, 2, 3]),
    ),
    Case(
        r("slct.ftz.u32.f32 %r8, %r0, %r1, %r2;"),
        lambda a, b, c: a if c != 0xBF800000 else b,
        (EDGES, SHIFTED, words(-1e-40, -1.0, 0.0, -0.0, 1.0)),
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{i}-{c}") for i, c in enumerate(INTEGERS)])
def test_integers(case: Case) -> None:
    got = evaluate(case.body, *case.inputs)
    for lane, value in enumerate(got):
        args = [column[lane % len(column)] for column in case.inputs]
        want = case.expect(*args)
        if want == -1:  # the carry was cleared below lane 64; bit 7 says which lanes those are not
            want = (int(sum(args) > M32) if lane >= 64 else 0) | lane << 1 & 128
        assert value == want, (case.body, [hex(a) for a in args])


# Floating point ----------------------------------------------------------------------------------

TINY = 2.0**-126  # the smallest normal float32
SUBNORMAL = [1e-40, -1e-40, 0.0, -0.0, TINY, -TINY, 1.0, -3.0, 1e-38]
OTHER = SUBNORMAL[4:] + SUBNORMAL[:4]


def flushed(x: np.float32) -> np.float32:
    return x * np.float32(0) if abs(x) < TINY else x


def order(x: np.float32) -> tuple[float, bool]:
    """-0 comes before +0."""
    return float(x), not np.signbit(x)


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add.ftz.f32", lambda a, b, c: a + b),
        ("sub.rn.ftz.f32", lambda a, b, c: a - b),
        ("mul.ftz.f32", lambda a, b, c: a * b),
        ("fma.rn.ftz.f32", lambda a, b, c: np.float32(float(a) * float(b) + float(c))),
        ("max.ftz.f32", lambda a, b, c: max(a, b, key=order)),
        ("min.ftz.NaN.f32", lambda a, b, c: min(a, b, key=order)),
        ("div.rn.ftz.f32", lambda a, b, c: a / b),
        ("neg.ftz.f32", lambda a, b, c: -a),
        ("abs.ftz.f32", lambda a, b, c: abs(a)),
        ("rcp.approx.ftz.f32", lambda a, b, c: 1 / a),
        ("sqrt.approx.ftz.f32", lambda a, b, c: np.sqrt(a)),
        ("rsqrt.approx.ftz.f32", lambda a, b, c: np.float32(1 / np.sqrt(np.float64(a)))),
        ("lg2.approx.ftz.f32", lambda a, b, c: np.log2(a)),
        ("ex2.approx.ftz.f32", lambda a, b, c: np.exp2(a)),
        ("cvt.ftz.f64.f32", lambda a, b, c: a),
        ("cvt.sat.ftz.f32.f32", lambda a, b, c: np.float32(min(max(a, 0), 1)) + np.float32(0)),
    ],
)
def test_subnormal_values_are_flushed(opcode: str, function: Callable[..., np.float32]) -> None:
    names = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "max": 2, "min": 2, "div": 2}
    count = names.get(opcode.split(".")[0], 1)
    sources = ", ".join(f"%r{i}" for i in range(count))
    if opcode == "cvt.ftz.f64.f32":
        body = f"{opcode} %d4, %r0; cvt.rn.f32.f64 %r8, %d4;"
    else:
        body = f"{opcode} %r8, {sources};"
    columns = [SUBNORMAL, OTHER, [*SUBNORMAL[2:], -150.0, -126.5]]
    if opcode.startswith("ex2"):
        columns[0] = [*SUBNORMAL, -126.0, -126.5, -149.0, np.inf, -np.inf]
    got = evaluate(r(body), *(words(*c) for c in columns))
    for lane in range(LANES):
        args = [flushed(np.float32(c[lane % len(c)])) for c in columns]
        with np.errstate(all="ignore"):
            want = flushed(np.float32(function(*args)))
        value = floats(got[lane : lane + 1])[0]
        same = np.isnan(value) if np.isnan(want) else value == want
        assert same and (np.isnan(want) or np.signbit(value) == np.signbit(want)), (
            args,
            value,
            want,
        )


def exact_f32(x: Fraction, mode: str) -> float:
    """A value rounded once to the 24 bits of a float32, or those of a subnormal one."""
    if x == 0:
        return 0.0
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    steps = x / unit
    whole = steps.numerator // steps.denominator
    up = {"rm": 0, "rp": 1, "rz": int(x < 0), "rn": int(steps - whole > Fraction(1, 2))}[mode]
    if steps - whole == Fraction(1, 2) and mode == "rn":
        up = whole & 1
    return float((whole + (up if steps != whole else 0)) * unit)


FAR = [1.0, -1.0, 1.5, 1 + 2.0**-23, -(1 + 2.0**-23), 2.0**-60, -(2.0**-60), 3.0, 12582912.0]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("head", ["add", "sub", "fma"])
def test_sums_round_once(head: str, mode: str) -> None:
    """Addends so far apart that not even float64 holds their sum."""
    left, right = FAR, [*FAR[5:], *FAR[:5], 2.0**-50]
    third = [*FAR[6:], 2.0**-55, -(2.0**-70)]
    if head == "fma":  # products halfway between two float32
        half = 1 + 2.0**-12
        left, right, third = [half, half, *left], [half, -half, *right], [2.0**-70] * 2 + third
    operands = "%r0, %r1, %r2" if head == "fma" else "%r0, %r1"
    columns = [words(*column) for column in (left, right, third)]
    got = evaluate(r(f"{head}.{mode}.f32 %r8, {operands};"), *columns)
    for lane, value in enumerate(floats(got).tolist()):
        a, b, c = (Fraction(x[lane % len(x)]) for x in (left, right, third))
        exact = {"add": a + b, "sub": a - b, "fma": a * b + c}[head]
        assert value == exact_f32(exact, mode), (a, b, c)


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("head", ["add", "sub", "mul", "fma"])
def test_packed_floats(head: str, mode: str, ftz: str) -> None:
    """Two float32 in a 64-bit register: as one by one, subnormal operands and results too."""
    rng = np.random.default_rng(0)
    size = 2.0 ** rng.integers(-75, -20, (3, 2, LANES))
    size[:, :, ::4] = 2.0 ** rng.integers(-3, 3, (3, 2, LANES // 4))
    size[2] = size[0] * size[1] * 2.0 ** rng.integers(-40, 40, (2, LANES))
    values = (rng.uniform(-2, 2, size.shape) * size).astype(np.float32)
    packed = np.ascontiguousarray(values.swapaxes(1, 2)).view(np.uint64)[..., 0]
    count = 3 if head == "fma" else 2
    operands = ", ".join(f"%d{i}" for i in range(count))
    got = np.array(evaluate(f"{head}.{mode}{ftz}.f32x2 %d7, {operands};", *packed), np.uint64)
    for half in (0, 1):
        results = floats((got >> np.uint64(32 * half)).tolist())
        for lane, value in enumerate(results):
            args = [flushed(v) if ftz else v for v in values[:, half, lane]]
            a, b, c = map(Fraction, map(float, args))
            exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[head]
            want = np.float32(exact_f32(exact, mode))
            want = flushed(want) if ftz else want
            assert value == want, (args, value, want)


def test_packed_floats_of_some_lanes() -> None:
    """Under a guard and where lanes have parted; halves are packed and unpacked there too."""
    body = """setp.lt.u32 %p0, %r15, 40; mov.b64 %d7, %d0; @%p0 add.rn.f32x2 %d7, %d0, %d1;
    @!%p0 mov.b64 %d7, {%r1, %r0};
    and.b32 %r4, %r15, 1; setp.eq.u32 %p1, %r4, 0; @%p1 bra EVEN;
    mul.rn.f32x2 %d7, %d7, %d1; mov.b64 {%r5, %r6}, %d7; mov.b64 %d7, {%r6, %r5}; EVEN:"""
    values = np.random.default_rng(1).uniform(-4, 4, (2, LANES, 2)).astype(np.float32)
    a, b = values
    got = np.array(evaluate(body, *values.view(np.uint64)[..., 0]), np.uint64)
    first = (np.arange(LANES) < 40)[:, None]
    swapped = np.stack([b[:, 0], a[:, 0]], axis=1)
    want = np.where(first, a + b, swapped)
    want[1::2] = (want * b)[1::2, ::-1]
    np.testing.assert_array_equal(got.view(np.float32).reshape(LANES, 2), want)


@pytest.mark.parametrize("head", ["add.rm", "add.rn"])
def test_sign_of_an_exact_zero(head: str) -> None:
    got = evaluate(
        r(f"{head}.f32 %r8, %r0, %r1;"), words(1.0, 0.0, -0.0, -2.5), words(-1.0, -0.0, -0.0, 2.5)
    )
    signs = [True, True, True, True] if head == "add.rm" else [False, False, True, False]
    assert [bool(v >> 31) for v in got[:4]] == signs
    assert not any(v & 0x7FFFFFFF for v in got)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("head", ["add", "sub", "mul", "div", "fma"])
def test_f64_rounds_once(head: str, mode: str) -> None:
    values = [1.0, 3.0, -0.1, 1e300, -(2.0**-60), 2.0**-1074, 1 + 2.0**-52, 7e-310]
    columns = [values, values[3:] + values[:3], values[5:] + values[:5]]
    bits = [np.array(c).view(np.uint64).tolist() for c in columns]
    operands = "%d0, %d1, %d2" if head == "fma" else "%d0, %d1"
    got = np.array(evaluate(f"{head}.{mode}.f64 %d7, {operands};", *bits), np.uint64).view(
        np.float64
    )
    for lane, value in enumerate(got.tolist()):
        a, b, c = (Fraction(x[lane % 8]) for x in columns)
        exact = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b, "fma": a * b + c}[head]
        if np.isinf(value):
            assert abs(exact) > Fraction(np.finfo(np.float64).max)
            continue
        low, high = math.nextafter(value, -math.inf), math.nextafter(value, math.inf)
        if mode == "rn":
            best = min(
                abs(Fraction(float(x)) - exact) for x in (low, value, high) if np.isfinite(x)
            )
            assert abs(Fraction(value) - exact) == best
        elif mode == "rm" or (mode == "rz" and exact > 0):
            assert Fraction(value) <= exact and (np.isinf(high) or Fraction(float(high)) > exact)
        else:
            assert Fraction(value) >= exact and (np.isinf(low) or Fraction(float(low)) < exact)


ZEROS = words(0.0, -0.0, 0.0, -0.0)
ONES = words(-0.0, 0.0, 0.0, -0.0)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (r("max.f32 %r8, %r0, %r1;"), [0, 0, 0, 1 << 31]),
        (r("min.f32 %r8, %r0, %r1;"), [1 << 31, 1 << 31, 0, 1 << 31]),
        (r("max.NaN.f32 %r8, %r0, %r1;"), [0, 0, 0, 1 << 31]),
        (r("min.NaN.f32 %r8, %r0, %r1;"), [1 << 31, 1 << 31, 0, 1 << 31]),
        (p("testp.normal.f32 %p0, %r0;"), [1, 1, 1, 1]),
    ],
)
def test_zeros(body: str, want: list[int]) -> None:
    assert evaluate(body, ZEROS, ONES) == want * (LANES // 4)


def h2(low: float, high: float) -> int:
    return int.from_bytes(np.array([low, high], np.float16).tobytes(), "little")


NAN, F32_MAX = np.nan, float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("body", "inputs", "want"),
    [
        (
            r("max.f32 %r8, %r0, %r1, %r2;"),
            [words(1, NAN, 5), words(4, NAN, NAN), words(2, 3, -1)],
            words(4, 3, 5),
        ),
        (
            r("min.NaN.f32 %r8, %r0, %r1, %r2;"),
            [words(1, NAN), words(4, 2), words(-2, 3)],
            words(-2, NAN),
        ),
        (
            r("max.abs.f32 %r8, %r0, %r1, %r2;"),
            [words(1, -7), words(-4, 2), words(2, 3)],
            words(4, 7),
        ),
        (
            r("min.NaN.abs.f32 %r8, %r0, %r1, %r2;"),
            [words(1, -7, 0), words(-4, NAN, -1), words(2, 3, -0.0)],
            words(1, NAN, 0),
        ),
        (
            r("min.f32 %r8, %r0, %r1, %r2;"),
            [ZEROS, ONES, words(1, 1, 0, 0)],
            [*[1 << 31] * 2, 0, 1 << 31],
        ),
        (
            r("max.xorsign.abs.f32 %r8, %r0, %r1;"),
            [words(1, -7, -1), words(-4, 2, -3)],
            words(-4, -7, 3),
        ),
        (
            p("testp.normal.f32 %p0, %r0; testp.subnormal.f32 %p1, %r0;"),
            [words(1.0, 1e-40, NAN, np.inf, -0.0, TINY)],
            [1, 2, 0, 0, 1, 1],
        ),
        *(
            (
                r(f"add.{mode}.f32 %r8, %r0, %r1;"),
                [words(3e38, -3e38, np.inf, NAN), words(3e38, -3e38, 1, 1)],
                words(high, low, np.inf, NAN),
            )
            for mode, high, low in (
                ("rm", F32_MAX, -np.inf),
                ("rp", np.inf, -F32_MAX),
                ("rz", F32_MAX, -F32_MAX),
            )
        ),
        (r("mul.sat.f16x2 %r8, %r0, %r1;"), [[h2(0.5, 3)], [h2(0.5, -1)]], [h2(0.25, 0)]),
        (
            r("fma.rn.relu.f16x2 %r8, %r0, %r1, %r2;"),
            [[h2(1, 2)], [h2(-1, 2)], [h2(0.5, 0.5)]],
            [h2(0, 4.5)],
        ),
        (r("add.ftz.f16x2 %r8, %r0, %r1;"), [[0x00010001], [0x80000000 | 0x3C00]], [0x3C00]),
        (r("max.xorsign.abs.f16x2 %r8, %r0, %r1;"), [[h2(1, -2)], [h2(-3, -1)]], [h2(-3, 2)]),
        (r("neg.bf16x2 %r8, %r0;"), [[0x3F80BF80]], [0xBF803F80]),
        (r("abs.f16x2 %r8, %r0;"), [[0xBC003C00]], [0x3C003C00]),
        # 1 * (1 + 2^-7) + 2^-9 lies just above a tie of bf16, by what float32 would lose
        (
            "{ .reg .b16 %x; fma.rn.bf16 %x, %h0, %h1, %h2; cvt.u64.u16 %d7, %x; }",
            [[0x3F81], [0x3FC0], [0x2F00]],
            [0x3FC2],
        ),
        (r("add.f32.f16 %r8, %h0, %r1;"), [[h2(1.5, 0)], words(2.0**-20)], words(1.5 + 2.0**-20)),
        (r("sub.rz.f32.bf16 %r8, %h0, %r1;"), [[0x3F80], words(2.0**-40)], words(1 - 2.0**-24)),
        (
            r("add.rp.sat.f32.bf16 %r8, %h0, %r1;"),
            [[0x3F00], words(2.0**-40)],
            words(0.5 + 2.0**-24),
        ),
        (
            r("fma.rm.f32.f16 %r8, %h0, %h1, %r2;"),
            [[h2(1.5, 0)], [h2(2, 0)], words(-(2.0**-40))],
            words(3 - 2.0**-22),
        ),
        (
            r("fma.rn.sat.f32.bf16 %r8, %h0, %h1, %r2;"),
            [[0x3F80], [0x4000], words(0.5)],
            words(1.0),
        ),
        (p("setp.gt.f16x2 %p0|%p1, %r0, %r1;"), [[h2(2, 1)], [h2(1, 2)]], [1]),
        (p("setp.neu.bf16x2 %p0|%p1, %r0, %r1;"), [[0x7FC03F80], [0x3F803F80]], [2]),
        (p("setp.ltu.f32 %p0, %r0, %r1;"), [words(1, NAN, 3), words(2, 0, 3)], [1, 1, 0]),
        (p("setp.eq.ftz.f32 %p0, %r0, %r1;"), [words(1e-40, 1.0), words(-0.0, 1.0)], [1, 1]),
        (r("set.lt.f16x2.f16x2 %r8, %r0, %r1;"), [[h2(1, 2)], [h2(2, 1)]], [h2(1, 0)]),
        (r("set.gt.u32.bf16x2 %r8, %r0, %r1;"), [[0x40003F80], [0x3F803F80]], [0xFFFF0000]),
        (r("set.lt.and.s32.f32 %r8, %r0, %r1, !%p3;"), [words(1, 2), words(2, 1)], [M32, 0]),
        # conversions
        (r("cvt.rn.relu.bf16x2.f32 %r8, %r0, %r1;"), [words(-1.0), words(1.0)], [0x00003F80]),
        (
            r("cvt.rz.f16x2.f32 %r8, %r0, %r1;"),
            [words(1 + 2.0**-11), words(-70000.0)],
            [0x3C00FBFF],
        ),
        (r("cvt.rn.satfinite.f16x2.f32 %r8, %r0, %r1;"), [words(np.inf), words(NAN)], [0x7BFF7FFF]),
        (
            "{ .reg .b8 %x; cvt.rn.satfinite.e2m1x2.f32 %x, %r0, %r1; cvt.u64.u8 %d7, %x; }",
            [words(2.5, -0.25, NAN, 9), words(5.0, 0.75, -6, 0)],
            [0x46, 0x82, 0x7F, 0x70],
        ),
        (
            r("{ .reg .b8 %x; cvt.u8.u32 %x, %r0; cvt.rn.f16x2.e2m1x2 %r8, %x; }"),
            [[0x4F, 0x1A]],
            [h2(-6, 2), h2(-1, 0.5)],
        ),
        (
            "{ .reg .b16 %x; cvt.rn.satfinite.e3m2x2.f32 %x, %r0, %r1; cvt.u64.u16 %d7, %x; }",
            [words(28.0, 0.0625), words(-1.0, 99.0)],
            [0x1F2C, 0x011F],
        ),
        (
            "{ .reg .b16 %x; cvt.rn.satfinite.relu.e2m3x2.f32 %x, %r0, %r1; cvt.u64.u16 %d7, %x; }",
            [words(7.5, 1.0), words(-1.0, 0.125)],
            [0x1F00, 0x0801],
        ),
        (r("cvt.rn.bf16x2.ue8m0x2 %r8, %h0;"), [[0x7F80, 0xFF00]], [0x3F804000, 0x7FFF0040]),
        (  # no sign, no zero; infinity has no bits of its own
            h("cvt.rz.ue8m0x2.f32 %h3, %r0, %r1;"),
            [words(3, -1.5, 0, 3e38), words(NAN, np.inf, 2.0**-127, 2.0**-126)],
            [0x80FF, 0x7FFF, 0x0000, 0xFE01],
        ),
        (
            h("cvt.rp.satfinite.ue8m0x2.f32 %h3, %r0, %r1;"),
            [words(3, -1.5, 2, 3e38), words(NAN, np.inf, 2.0**-127, 1.25 * 2.0**-127)],
            [0x81FF, 0x80FE, 0x8000, 0xFE01],
        ),
        (h("cvt.rp.ue8m0x2.bf16x2 %h3, %r0;"), [[0x7F003F81, 0x7F018000]], [0xFE80, 0xFF00]),
        (  # a quarter of a unit is lost, but where 3 quarters of one are added
            r("cvt.rs.bf16x2.f32 %r8, %r0, %r1, %r2;"),
            [words(1 + 2.0**-9, NAN), words(-(1 + 2.0**-9), 3.4e38), [0xC000BFFF, M32]],
            [0x3F81BF80, 0x7FFF7F80],
        ),
        (
            r("cvt.rs.relu.satfinite.f16x2.f32 %r8, %r0, %r1, %r2;"),
            [words(1 + 2.0**-12, -1), words(1 + 2.0**-12, 65519), [0x1800F7FF, M32]],
            [0x3C013C00, 0x00007BFF],
        ),
        (
            r("cvt.rn.satfinite.tf32.f32 %r8, %r0;"),
            [words(np.inf, 1 + 2.0**-11)],
            [0x7F7FE000, 0x3F800000],
        ),
        (
            "cvt.rni.s64.f32 %d7, %r0;",
            [words(NAN, -np.inf, 1e30, 2.5)],
            [1 << 63, 1 << 63, M64 >> 1, 2],
        ),
        (r("cvt.rzi.u32.f32 %r8, %r0;"), [words(NAN, -5.0, 3e10)], [0, 0, M32]),
        (r("cvt.rz.f32.u64 %r8, %d0;"), [[M64, (1 << 60) + 1]], words(2.0**64 - 2.0**40, 2.0**60)),
        (r("cvt.rp.f32.s64 %r8, %d0;"), [[(1 << 60) + 1, M64]], words(2.0**60 + 2.0**37, -1.0)),
        (r("cvt.rn.f16x2.e5m2x2 %r8, %h0;"), [[0x7C3C]], [0x7C003C00]),
    ],
)
def test_floats(body: str, inputs: list[list[int]], want: list[int]) -> None:
    got = evaluate(body, *inputs)
    expected = np.resize(np.array(want, np.uint64), LANES).tolist()
    assert [hex(v) for v in got] == [hex(v) for v in expected]


REDUCED = words(*np.random.default_rng(4).uniform(-9, 9, LANES - 2), 0.0, -0.0)


@pytest.mark.parametrize(
    ("form", "inputs", "want"),
    [
        ("redux.sync.max.f32", REDUCED, lambda x: x.max()),
        ("redux.sync.min.f32", REDUCED, lambda x: x.min()),
        ("redux.sync.min.abs.f32", REDUCED, lambda x: abs(x).min()),
        ("redux.sync.max.abs.NaN.f32", REDUCED, lambda x: abs(x).max()),
        ("redux.sync.max.NaN.f32", [*REDUCED[:-1], *words(NAN)], lambda x: x.max()),
        ("redux.sync.max.f32", words(NAN, -2.0, NAN), lambda x: np.nanmax(x)),
        ("redux.sync.min.f32", words(NAN), lambda x: NAN),
        ("redux.sync.min.f32", words(0.0, -0.0), lambda x: -0.0),
        ("redux.sync.max.f32", words(-1.0, -0.0, 0.0), lambda x: 0.0),
        ("redux.sync.max.f32", words(-0.0, -1.0), lambda x: -0.0),
    ],
)
def test_float_reductions(form: str, inputs: list[int], want: Callable[..., float]) -> None:
    got = floats(evaluate(r(f"{form} %r8, %r0, -1;"), inputs)).reshape(-1, 32)
    source = floats(np.resize(inputs, LANES).tolist()).reshape(-1, 32)
    expected = np.array([[want(warp)] * 32 for warp in source], np.float32)
    np.testing.assert_array_equal(got, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(expected)[number])


# Exponent and mantissa bits, the largest code, and whether a code for NaN is above it.
NARROW = {
    "e4m3": (4, 3, 0x7E, True),
    "e5m2": (5, 2, 0x7B, True),
    "e2m3": (2, 3, 0x1F, False),
    "e3m2": (3, 2, 0x1F, False),
    "e2m1": (2, 1, 0x7, False),
}


def narrow_values(kind: str) -> list[float]:
    """Of all codes without sign."""
    exponent, mantissa, top, _ = NARROW[kind]
    lowest = 2 - 2 ** (exponent - 1)
    values: list[float] = []
    for code in range(top + 1):
        e, m = divmod(code, 1 << mantissa)
        values.append((m + (e > 0) * 2**mantissa) * 2.0 ** (max(e, 1) - 1 + lowest - mantissa))
    return values


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("source", ["f32", "f16x2"])
@pytest.mark.parametrize("kind", NARROW)
def test_to_narrow_floats(kind: str, source: str, relu: str) -> None:
    """To the nearest code, of two the even one; what is too large to the largest."""
    values, bits = narrow_values(kind), 4 if kind == "e2m1" else 8
    edges = [0.0, -0.0, np.inf, -np.inf, *values[-2:], 1.01 * values[-1], 2 * values[-1], -1.0]
    ties = [(a + b) / 2 for a, b in itertools.pairwise(values)][-40:]
    with np.errstate(over="ignore"):
        x = np.float16([*edges, *ties, *(-t for t in ties), *np.linspace(-3, 3, LANES)][:LANES])

    def code(value: float) -> int:
        size = abs(value)
        found = min(range(len(values)), key=lambda i: (abs(values[i] - size), i & 1))
        found = len(values) - 1 if size > values[-1] else found
        negative = np.signbit(value)
        return 0 if relu and negative else found | int(negative) << sum(NARROW[kind][:2])

    register = "b8" if bits == 4 else "b16"
    other = np.roll(x, 1)
    operands, columns = "%r0, %r1", [words(*x), words(*other)]
    if source == "f16x2":
        operands, columns = "%r0", [[h2(b, a) for a, b in zip(x, other, strict=True)]]
    body = f"cvt.rn.satfinite{relu}.{kind}x2.{source} %x, {operands};"
    widen = "cvt.u64.u8" if bits == 4 else "cvt.u64.u16"
    got = evaluate(f"{{ .reg .{register} %x; {body} {widen} %d7, %x; }}", *columns)
    want = [code(float(a)) << bits | code(float(b)) for a, b in zip(x, other, strict=True)]
    assert got == want


@pytest.mark.parametrize("kind", NARROW)
def test_from_narrow_floats(kind: str) -> None:
    """Every code there is, as f16x2."""
    values, bits = narrow_values(kind), 4 if kind == "e2m1" else 8
    sign = 1 << sum(NARROW[kind][:2])
    codes = [i | s for s in (0, sign) for i in range(len(values))]
    register, take = ("b8", "cvt.u8.u64") if bits == 4 else ("b16", "cvt.u16.u64")
    for part in range(0, len(codes), LANES):
        some = codes[part : part + LANES]
        body = f"{take} %x, %d0; cvt.rn.f16x2.{kind}x2 %r8, %x;"
        columns = [code << bits | some[0] for code in some]
        got = evaluate(r(f"{{ .reg .{register} %x; {body} }}"), columns)

        def value(code: int) -> float:
            return values[code % sign] * (-1 if code & sign else 1)

        want = [h2(value(some[0]), value(code)) for code in some]
        assert got[: len(some)] == want


# Memory and control flow -------------------------------------------------------------------------

LOCAL = """
    .local .align 16 .b8 depot[64];
    .reg .b64 %SP;
    mov.b64 %d4, depot;
    cvta.local.u64 %SP, %d4;
"""


def test_local_memory() -> None:
    """Vectors and bytes, by local and by generic addresses; every lane has its own."""
    body = f"""{LOCAL}
    st.local.v2.b32 [%d4+8], {{%r0, %r1}};
    st.b8 [%SP+9], 0x5A;
    and.b32 %r4, %r15, 7;
    mad.wide.u32 %d5, %r4, 4, %d4;
    st.local.b32 [%d5+16], %r15;
    mad.wide.u32 %d5, %r4, 4, %SP;
    ld.b32 %r5, [%d5+16];
    cvta.to.local.u64 %d6, %SP;
    ld.local.u8 %r6, [%d6+9];
    ld.b64 %d7, [%SP+8];
    cvt.u64.u32 %d5, %r5;
    cvt.u64.u32 %d6, %r6;
    shl.b64 %d6, %d6, 32;
    xor.b64 %d7, %d7, %d5;
    xor.b64 %d7, %d7, %d6;
    """
    a, b = list(range(5, 5 + LANES)), list(range(1000, 1000 + LANES))
    got = evaluate(body, a, b)
    want = [
        (y ^ 0x5A) << 32 | (x & ~0xFF00 | 0x5A00) ^ i
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    assert got == want


@pytest.mark.parametrize("access", ["st.local.b32 [%d4+64], %r0", "ld.b64 %d7, [%SP+60]"])
def test_local_memory_has_bounds(access: str) -> None:
    arrays = np.zeros((4, LANES), np.uint64), np.zeros(LANES, np.uint64)
    findings = machine(f"{LOCAL} {access};", *arrays).findings
    assert [f.kind for f in findings] == ["out of bounds"]


def test_128_bits_in_memory() -> None:
    body = """.local .align 16 .b8 spill[32];
    .reg .b64 %at; mov.b64 %at, spill;
    mov.b128 %q0, {%d0, %d1}; st.local.b128 [%at+16], %q0; ld.local.b128 %q1, [%at+16];
    mov.b128 {%d4, %d5}, %q1; mad.lo.u64 %d7, %d5, 3, %d4;"""
    a, b = list(range(LANES)), list(range(7, 7 + LANES))
    assert evaluate(body, a, b) == [x + 3 * y for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("words_of", ["v8.b32", "v4.b64"])
def test_256_bits_in_global_memory(words_of: str) -> None:
    """Each lane reads 32 bytes, the next but seven lane's among them, and writes them back."""
    names = [f"%r{i}" for i in range(4, 12)] if "b32" in words_of else ["%d3", "%d4", "%d5", "%d6"]
    vector = "{" + ", ".join(names) + "}"
    total = "xor.b64 %d7, %d3, %d4; xor.b64 %d5, %d5, %d6; xor.b64 %d7, %d7, %d5;"
    if "b32" in words_of:
        packs = "".join(f"mov.b64 %d{i}, {{%r{2 * i - 2}, %r{2 * i - 1}}};" for i in range(3, 7))
        total = packs + total
    body = f"""and.b32 %r4, %r15, 31; ld.param.u64 %d8, [source]; mad.wide.u32 %d8, %r4, 32, %d8;
    ld.global.{words_of} {vector}, [%d8]; st.global.{words_of} [%d8+2048], {vector};
    ld.global.{words_of} {vector}, [%d8+2048]; {total}"""
    column = np.random.default_rng(5).integers(0, 1 << 63, LANES, dtype=np.uint64)
    want = np.bitwise_xor.reduce(column.reshape(-1, 4), axis=1).tolist()
    assert evaluate(body, column) == want * 4


def test_128_bits_in_shared_memory() -> None:
    body = """.shared .align 16 .b8 tile[2048];
    mov.b32 %r4, tile; mad.lo.u32 %r4, %r15, 16, %r4; mov.b128 %q0, {%d0, %d1};
    st.shared.b128 [%r4], %q0; xor.b32 %r5, %r15, 1; bar.sync 0;
    mov.b32 %r4, tile; mad.lo.u32 %r4, %r5, 16, %r4; ld.shared.b128 %q1, [%r4];
    mov.b128 {%d4, %d5}, %q1; mad.lo.u64 %d7, %d5, 3, %d4;"""
    a, b = list(range(LANES)), list(range(7, 7 + LANES))
    assert evaluate(body, a, b) == [(i ^ 1) + 3 * ((i ^ 1) + 7) for i in range(LANES)]


def test_windows_of_generic_addresses() -> None:
    """isspacep of a global, a shared, a local and a parameter's address, one bit each."""
    body = f"""{LOCAL}
    .shared .align 4 .b8 tile[16];
    mov.b64 %d5, tile;
    cvta.shared.u64 %d5, %d5;
    mov.b64 %d6, source;
    cvta.param.u64 %d6, %d6;
    """
    bit = 1
    for space in ("global", "shared::cta", "shared::cluster", "local", "param", "const"):
        for register in ("%d8", "%d5", "%SP", "%d6"):
            body += f"isspacep.{space} %p0, {register}; @%p0 add.u64 %d7, %d7, {bit};"
            bit <<= 1
    assert evaluate(body) == [0b0000_1000_0100_0010_0010_0001] * LANES


def test_branch_by_a_table() -> None:
    body = """
    cvt.u64.u32 %d7, %r0;
    table: .branchtargets $A, $B, $C;
    brx.idx %r0, table;
    $A: add.u64 %d7, %d7, 10; bra.uni $END;
    $B: add.u64 %d7, %d7, 200;
    $C: add.u64 %d7, %d7, 3000;
    $END:
    """
    assert evaluate(body, [0, 1, 2]) == ([10, 3201, 3002] * LANES)[:LANES]


def test_mbarrier_state() -> None:
    """The pending count that each of several lanes saw, and a transaction completed by hand."""
    body = """
    .shared .align 8 .b8 barrier[8];
    .reg .b32 %at; mov.b32 %at, barrier;
    setp.eq.u32 %p0, %r15, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%at], 200;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %d4, [%at], 1;
    mbarrier.pending_count.b64 %r8, %d4;
    bar.sync 0;
    @%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%at], 16;
    @%p0 mbarrier.arrive.shared::cta.b64 _, [%at], 72;
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%at], 0;
    bar.sync 0;
    @%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%at], 16;
    bar.sync 0;
    mbarrier.test_wait.shared::cta.b64 %p2, [%at], %d4;
    cvt.u64.u32 %d7, %r8;
    @%p1 add.u64 %d7, %d7, 1000;
    @%p2 add.u64 %d7, %d7, 10000;
    """
    assert evaluate(body) == [10200 - lane for lane in range(LANES)]


def test_votes_of_negated_predicates() -> None:
    body = """setp.lt.u32 %p0, %r15, 40;
    vote.sync.ballot.b32 %r4, !%p0, -1;
    vote.sync.any.pred %p1, !%p0, -1;
    bar.red.popc.u32 %r5, 1, 128, !%p0;
    selp.b32 %r6, 256, 0, %p1; add.u32 %r5, %r5, %r6;
    mov.b64 %d7, {%r4, %r5};"""
    masks = [0, 0xFFFFFF00, M32, M32]
    assert evaluate(body) == [masks[i // 32] | (88 + 256 * (i >= 32)) << 32 for i in range(LANES)]


def test_negated_predicates_of_a_scope() -> None:
    """Inline assembly declares its own names; `!` is not part of them."""
    body = """setp.eq.u32 %p0, %r15, 3;
    { .reg .pred %p0; setp.ne.u32 %p0, %r15, 5; setp.eq.and.u32 %p1, %r15, %r15, !%p0; }"""
    assert evaluate(p(body))[:7] == [0, 0, 0, 1, 0, 2, 0]


# What is known, and what is not ------------------------------------------------------------------

# One form a line: those that the emulator knows, then those that it must refuse.
KNOWN, REFUSED = (
    block.split("\n")[1:]
    for block in (Path(__file__).parent / "forms.txt").read_text().strip().split("\n\n")
)


def is_known(form: str) -> bool:
    kernel = ptx.parse(HEAD + form + "; end: ret; }", "test")
    steps = Program(kernel).blocks[0].steps
    return not any("unknown" in line for step in steps for line in getattr(step, "lines", ()))


@pytest.mark.parametrize("form", KNOWN)
def test_a_part_that_no_one_knows_is_refused(form: str) -> None:
    """At every place of the opcode."""
    assert is_known(form)
    opcode, _, operands = form.partition(" ")
    parts = opcode.split(".")
    for place in range(1, len(parts) + 1):
        strange = ".".join([*parts[:place], "strange", *parts[place:]])
        assert not is_known(f"{strange} {operands}"), strange


@pytest.mark.parametrize("form", REFUSED)
def test_what_is_not_known_is_refused(form: str) -> None:
    assert not is_known(form)
