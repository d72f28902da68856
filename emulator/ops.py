"""Arithmetic of PTX on NumPy arrays: what a ufunc does not already do.

Every function takes arrays of lanes (any shape) and returns a new array. Approximate instructions
(ex2, lg2, rcp, ...) are computed to float32 accuracy: close to the hardware's, not bit-equal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .formats import WHOLE, f32_to_bf16, from_f64, to_f32

Array = NDArray[Any]
u8, i8, u16, i16 = np.uint8, np.int8, np.uint16, np.int16
u32, i32, u64, i64 = np.uint32, np.int32, np.uint64, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64
_SCALARS = (u8, i8, u16, i16, u32, i32, u64, i64, f16, f32, f64)

_TINY = f32(1.1754944e-38)  # smallest normal float32: .ftz flushes what is below

# What generated code calls by a plain name.
NAMES: dict[str, object] = {
    **{name: value for name, value in vars(np).items() if isinstance(value, np.ufunc)},
    **{t.__name__[0] + str(t().itemsize * 8): t for t in _SCALARS},
    "where": np.where,
    "copyto": np.copyto,
    "zeros_like": np.zeros_like,
    "cnz": np.count_nonzero,
    "nan": np.nan,
    "inf": np.inf,
}


# Floating point ----------------------------------------------------------------------------------


def ftz(x: ArrayLike, dtype: Any = f32) -> Array:
    """Flushes subnormal values to (signed) zero."""
    x = np.asarray(x, dtype)
    return np.where(np.abs(x) < np.finfo(dtype).smallest_normal, x * dtype(0), x)


def saturate(x: Array) -> Array:
    """.sat: clamps to [0, 1]; NaN and -0 give +0."""
    return (np.nan_to_num(np.clip(x, 0, 1), nan=0.0) + 0.0).astype(x.dtype)


def relu(x: Array) -> Array:
    """Negative values and -0 to 0; NaN stays."""
    return np.where((x > 0) | np.isnan(x), x, x.dtype.type(0))


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Array:
    """float32 a*b+c to nearest: the product is exact in float64, the sum is rounded there.

    To round it again goes wrong only where it then lies halfway between two float32: seldom, so
    that looking for it (5 % of a forward kernel's time) is cheaper than `wide_fma`. A subnormal
    result, halfway elsewhere, is still rounded twice.
    """
    out = np.multiply(a, b, dtype=f64) + c
    off_half = out.view(u64) & u64((1 << 29) - 1)
    off_half -= u64(1 << 28)
    return (out if off_half.all() else wide_fma(a, b, c)).astype(f32)


def wide_add(a: ArrayLike, b: ArrayLike, down: bool = False) -> Array:
    """float64 a+b rounded to odd: to round it again to 51 bits or fewer is to round once.

    `down` gives a sum of exactly zero the sign that it has when rounding down.
    """
    a, b = np.asarray(a, f64), np.asarray(b, f64)
    out = a + b
    part = out - a
    error = (a - (out - part)) + (b - part)
    even = (out.view(u64) & u64(1)) == 0
    inexact = (error != 0) & np.isfinite(out)
    out = np.where(inexact & even, np.nextafter(out, np.copysign(np.inf, error)), out)
    if down:
        out = np.where((out == 0) & (np.signbit(a) != np.signbit(b)), -0.0, out)
    return out


def wide_subtract(a: ArrayLike, b: ArrayLike, down: bool = False) -> Array:
    return wide_add(a, np.negative(b), down)


def wide_fma(a: ArrayLike, b: ArrayLike, c: ArrayLike, down: bool = False) -> Array:
    """a*b+c as `wide_add`, of factors of up to 26 bits: their product is exact."""
    return wide_add(np.multiply(a, b, dtype=f64), c, down)


def directed(exact: Array, rounding: str) -> Array:
    """Rounds float64 values to float32 in direction rz, rm or rp, or to nearest (rn)."""
    near = exact.astype(f32)
    if rounding == "rn":
        return near
    if rounding == "rz":
        wrong = np.abs(near.astype(f64)) > np.abs(exact)
        return np.where(wrong, np.nextafter(near, f32(0)), near)
    if rounding == "rm":
        return np.where(near.astype(f64) > exact, np.nextafter(near, f32(-np.inf)), near)
    return np.where(near.astype(f64) < exact, np.nextafter(near, f32(np.inf)), near)


def directed_add(a: ArrayLike, b: ArrayLike, rounding: str) -> Array:
    """float32 a+b in direction rz, rm or rp: to nearest, then a step where its error says so.

    Exponentials on the FMA units start so; this takes a third of the time of `directed`.
    """
    near = np.add(a, b, dtype=f32)
    if not np.isfinite(near).all():
        return directed(wide_add(a, b, rounding == "rm"), rounding)
    part = near - a
    error = np.subtract(a, near - part) + np.subtract(b, part)
    bits = near.view(i32)
    if rounding == "rz":
        return (bits - ((error != 0) & (np.signbit(error) != np.signbit(near)))).view(f32)
    outward = bits >> i32(31) | i32(1)  # 1, or -1 for a negative number
    if rounding == "rp":
        return (bits + outward * (error > 0)).view(f32)
    out = (bits - outward * (error < 0)).view(f32)
    if not near.all():
        out = np.where((near == 0) & (np.signbit(a) != np.signbit(b)), f32(-0.0), out)
    return out


def directed_subtract(a: ArrayLike, b: ArrayLike, rounding: str) -> Array:
    return directed_add(a, np.negative(b), rounding)


def _exact_fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


_EXACT: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "fma": _exact_fma,
}


def exact64(op: str, rounding: str, *args: ArrayLike) -> Array:
    """float64 add, sub, mul, div or fma, rounded once, by rational arithmetic a lane at a time."""

    def one(*values: float) -> float:
        operands = [f64(v) for v in values]
        finite = all(map(math.isfinite, values)) and not (op == "div" and values[1] == 0)
        exact = _EXACT[op](*map(Fraction, values)) if finite else Fraction(0)
        if exact == 0:  # or infinite, or not a number: no rounding
            return float(_EXACT[op](*operands))
        try:
            near = exact.numerator / exact.denominator
        except OverflowError:
            near = math.inf if exact > 0 else -math.inf
        up = rounding == "rp" or (rounding == "rz" and exact < 0)
        down = rounding == "rm" or (rounding == "rz" and exact > 0)
        if down and near > exact:
            return math.nextafter(near, -math.inf)
        return math.nextafter(near, math.inf) if up and near < exact else near

    return np.asarray(np.frompyfunc(one, len(args), 1)(*args)).astype(f64)


_BITS = {4: (u32, i32, -(1 << 31)), 8: (u64, i64, -(1 << 63))}


def _both_zero(a: ArrayLike, b: ArrayLike) -> Array:
    return np.equal(a, 0) & np.equal(b, 0)


def fmin(a: ArrayLike, b: ArrayLike, select: Any = np.fmin) -> Array:
    """The smaller value, -0 below +0, which NumPy leaves open; a NaN gives way to a number."""
    found = select(a, b)
    unsigned, _, _ = _BITS[found.itemsize]
    if np.minimum.reduce(found.view(unsigned), axis=None) == 0:  # somewhere +0
        found = np.where(_both_zero(a, b), -(np.negative(a) - b), found)
    return found


def fmax(a: ArrayLike, b: ArrayLike, select: Any = np.fmax) -> Array:
    """The greater value, -0 below +0, which NumPy leaves open; a NaN gives way to a number."""
    found = select(a, b)
    _, signed, minus_zero = _BITS[found.itemsize]
    if np.minimum.reduce(found.view(signed), axis=None) == minus_zero:  # somewhere -0
        found = np.where(_both_zero(a, b), np.add(a, b), found)
    return found


def xorsign(magnitude: Array, a: ArrayLike, b: ArrayLike) -> Array:
    """`magnitude` with the product of the signs of a and b."""
    return np.where(np.signbit(a) ^ np.signbit(b), -magnitude, magnitude)


def ex2_ftz(x: ArrayLike) -> Array:
    """2**x; only its result can be subnormal: 2 to a subnormal power is 1 like 2 to the 0."""
    y = np.exp2(x)
    y *= y >= _TINY
    return y


def rsqrt(x: Array) -> Array:
    return (1.0 / np.sqrt(x.astype(f64))).astype(x.dtype)


def narrow(
    kind: str, function: Callable[..., Array], *words: ArrayLike, ftz: bool = False
) -> Array:
    """An operation on f16, bf16, f16x2 or bf16x2 words: computed in float64 and rounded once."""
    element, packed = kind.removesuffix("x2"), kind.endswith("x2")
    if not packed:
        return _narrow(element, function, [np.asarray(w, u16) for w in words], ftz)
    whole = [np.asarray(w, u32) for w in words]
    low = _narrow(element, function, [w.astype(u16) for w in whole], ftz)
    high = _narrow(element, function, [(w >> u32(16)).astype(u16) for w in whole], ftz)
    return high << u32(16) | low


def _narrow(
    kind: str, function: Callable[..., Array], words: Iterable[Array], flush: bool
) -> Array:
    exponent = {"f16": 0x7C00, "bf16": 0x7F80}[kind]

    def flushed(bits: Array) -> Array:
        return np.where(bits & exponent, bits, bits & 0x8000)

    raw = [flushed(w) if flush else w for w in words]
    bits = from_f64(function(*(to_f32(w, kind).astype(f64) for w in raw)), kind)
    return flushed(bits) if flush else bits


# Integers ----------------------------------------------------------------------------------------


def div_int(a: ArrayLike, b: ArrayLike) -> Array:
    """Integer quotient truncated toward zero; all ones where the divisor is 0."""
    a, b = np.broadcast_arrays(a, b)
    one = a.dtype.type(1)
    safe = np.where(b == 0, one, b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient += (a % safe != 0) & ((a < 0) != (b < 0))
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def rem_int(a: ArrayLike, b: ArrayLike) -> Array:
    """Remainder with the sign of the dividend; the dividend where the divisor is 0."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, a.dtype.type(1), b)
    return np.where(b == 0, a, np.fmod(a, safe))


def mul_hi(a: ArrayLike, b: ArrayLike) -> Array:
    """Upper half of the product, in the operands' type (16, 32 or 64 bits)."""
    dtype = np.result_type(a, b)
    bits = dtype.itemsize * 8
    if bits < 64:
        wide = i64 if dtype.kind == "i" else u64
        return (np.multiply(a, b, dtype=wide, casting="unsafe") >> wide(bits)).astype(dtype)
    product = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return (product >> 64).astype(dtype)


def mul24(a: ArrayLike, b: ArrayLike, dtype: Any, high: bool) -> Array:
    """Bits 0..31 or 16..47 of the product of the low 24 bits, sign-extended by the type."""
    wide = i64 if np.dtype(dtype).kind == "i" else u64
    left, right = ((np.asarray(x, dtype) << dtype(8) >> dtype(8)).astype(wide) for x in (a, b))
    return (left * right >> wide(16 if high else 0)).astype(dtype)


def carry(dtype: Any, a: ArrayLike, b: ArrayLike, carried: ArrayLike) -> Array:
    """Whether the unsigned a + b + carried leaves its type."""
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
    total = a + b
    return (total < a) | (total + carried < total)


def borrow(dtype: Any, a: ArrayLike, b: ArrayLike, borrowed: ArrayLike) -> Array:
    """Whether the unsigned a - b - borrowed is negative."""
    a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
    return (a < b) | ((a == b) & np.asarray(borrowed, bool))


def clamp(x: Array, low: int, high: int) -> Array:
    """Limits integers to [low, high], in their own type."""
    info = np.iinfo(x.dtype)
    return np.clip(x, max(low, info.min), min(high, info.max))


def pairs(dtype: Any, function: Callable[..., Array], *words: ArrayLike) -> Array:
    """An operation on both 16-bit halves of each 32-bit word."""
    halves = [np.ascontiguousarray(w, u32).view(dtype).reshape(*np.shape(w), 2) for w in words]
    return np.ascontiguousarray(function(*halves), dtype).view(u32)[..., 0]


def popc(x: Array) -> Array:
    return np.bitwise_count(x)


def clz(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    out = np.full(x.shape, bits, u32)
    rest = x.copy()
    one = x.dtype.type(1)
    while rest.any():
        out -= (rest != 0).astype(u32)
        rest >>= one
    return out


def brev(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    out = np.zeros_like(x)
    one = x.dtype.type(1)
    for i in range(bits):
        out |= ((x >> x.dtype.type(i)) & one) << x.dtype.type(bits - 1 - i)
    return out


def bfind(x: Array, shift_amount: bool) -> Array:
    """Position of the most significant bit that differs from the sign; all ones if none."""
    value = np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x
    zeros = clz(value.view(f"u{x.dtype.itemsize}"))
    bits = x.dtype.itemsize * 8
    top = u32(bits - 1) - zeros
    return np.where(zeros == bits, u32(0xFFFFFFFF), zeros if shift_amount else top)


def _unsigned(x: ArrayLike, bits: int) -> Array:
    """Bit patterns as int64 below 64 bits, else as Python integers."""
    x = np.asarray(x)
    return (x.astype(i64) if bits < 64 else x.astype(object)) & ((1 << bits) - 1)


def _low(count: Array, bits: int) -> Array:
    """Masks of the lowest `count` bits, for counts up to `bits`."""
    one = np.ones_like(count, i64 if bits < 64 else object)
    return (one << count.astype(one.dtype)) - 1


def bfe(a: Array, start: ArrayLike, length: ArrayLike) -> Array:
    """Bit field of `length` bits from `start`; the type of `a` says what fills the rest: its sign.

    The sign is the field's last bit, or the last of `a` if the field ends beyond it.
    """
    bits = a.dtype.itemsize * 8
    start, length = np.asarray(start, i64) & 0xFF, np.asarray(length, i64) & 0xFF
    whole = _unsigned(a, bits)
    mask = _low(np.minimum(length, np.maximum(bits - start, 0)), bits)
    field = (whole >> np.minimum(start, bits - 1).astype(whole.dtype)) & mask
    if a.dtype.kind == "i":
        sign = (whole >> np.clip(start + length - 1, 0, bits - 1).astype(whole.dtype)) & 1
        field = np.where((sign == 1) & (length > 0), field | ~mask, field)
    return (field & ((1 << bits) - 1)).astype(f"u{a.dtype.itemsize}").view(a.dtype)


def bfi(a: ArrayLike, b: ArrayLike, start: ArrayLike, length: ArrayLike, dtype: DTypeLike) -> Array:
    """Inserts the low `length` bits of `a` into `b` at `start`."""
    bits = np.dtype(dtype).itemsize * 8
    start, length = np.asarray(start, i64) & 0xFF, np.asarray(length, i64) & 0xFF
    start = np.minimum(start, bits)
    inside = _low(np.minimum(length, bits - start), bits)
    at = start.astype(inside.dtype)
    mask = inside << at
    out = _unsigned(b, bits) & ~mask | (_unsigned(a, bits) & inside) << at
    return np.asarray(out).astype(dtype)


def bmsk(start: ArrayLike, length: ArrayLike, clamped: bool) -> Array:
    """Ones in `length` bits from `start`; both modulo 32, or clamped to 32."""
    start, length = np.asarray(start, i64), np.asarray(length, i64)
    if clamped:
        start, length = np.minimum(start, 32), np.minimum(length, 32)
    else:
        start, length = start & 31, length & 31
    return ((_low(length, 32) << start) & 0xFFFFFFFF).astype(u32)


def szext(x: Array, width: ArrayLike, clamped: bool) -> Array:
    """The low `width` bits, sign- or zero-extended by the type; widths as those of `bmsk`."""
    width = np.asarray(width, i64)
    width = np.minimum(width, 32) if clamped else width & 31
    mask = _low(width, 32)
    out = _unsigned(x, 32) & mask
    if x.dtype.kind == "i":
        sign = (out >> np.maximum(width - 1, 0)) & 1
        out = np.where(sign == 1, out | ~mask, out)
    return (out & 0xFFFFFFFF).astype(u32)


def prmt(a: ArrayLike, b: ArrayLike, selector: ArrayLike, mode: str) -> Array:
    """Byte permute: selector nibbles choose among the 8 bytes {b, a}; bit 3 replicates the sign."""
    pool = np.asarray(a, u64) | (np.asarray(b, u64) << u64(32))
    pool, selector = np.broadcast_arrays(pool, np.asarray(selector, u64))
    out = np.zeros(pool.shape, u64)
    for i in range(4):
        nibble = _SELECT[mode](selector & u64(3), i) if mode else selector >> u64(4 * i)
        byte = (pool >> ((nibble & u64(7)) * u64(8))) & u64(255)
        sign = np.where(byte & u64(128), u64(255), u64(0))
        out |= np.where(nibble & u64(8), sign, byte) << u64(8 * i)
    return out.astype(u32)


# The nibble that each mode of prmt takes for byte i, by the selector's low two bits.
_SELECT: dict[str, Callable[[Array, int], Array]] = {
    "f4e": lambda s, i: s + u64(i),
    "b4e": lambda s, i: (s - u64(i)) & u64(7),
    "rc8": lambda s, i: s,
    "ecl": lambda s, i: np.maximum(s, u64(i)),
    "ecr": lambda s, i: np.minimum(s, u64(i)),
    "rc16": lambda s, i: (s & u64(1)) * u64(2) + u64(i % 2),
}


def lop3(a: ArrayLike, b: ArrayLike, c: ArrayLike, table: int) -> Array:
    """Bitwise function of three inputs given by its truth table."""
    a, b, c = (np.asarray(x, u32) for x in (a, b, c))
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), u32)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def funnel(low: ArrayLike, high: ArrayLike, amount: ArrayLike, left: bool, clamped: bool) -> Array:
    """shf.l / shf.r: shifts the 64-bit value {high, low} and keeps 32 bits."""
    amount = np.asarray(amount, u64)
    amount = np.minimum(amount, u64(32)) if clamped else amount & u64(31)
    value = (np.asarray(high, u64) << u64(32)) | np.asarray(low, u64)
    if left:
        return ((value << amount) >> u64(32)).astype(u32)
    return (value >> amount).astype(u32)


def dot(a: ArrayLike, b: ArrayLike, c: Array, types: tuple[Any, Any], first: int) -> Array:
    """dp4a, dp2a: parts of `a` times bytes of `b` from `first` on, added to `c`.

    `types` says how the parts and bytes are seen: four bytes or two halves of `a`.
    """
    shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c))
    left, right = (
        np.ascontiguousarray(np.broadcast_to(np.asarray(x, u32), shape)).view(t).reshape(*shape, -1)
        for x, t in ((a, types[0]), (b, types[1]))
    )
    count = left.shape[-1]
    products = left.astype(i64) * right[..., first : first + count].astype(i64)
    return products.sum(-1) + np.asarray(c).astype(i64)


# Conversions -------------------------------------------------------------------------------------


def bf16_to_f32(x: ArrayLike) -> Array:
    return to_f32(np.asarray(x, u16), "bf16")


def _element_bits(kind: str) -> int:
    """Bits that an element of the format takes in a word of two."""
    return {"f16": 16, "bf16": 16, "e2m1": 4}.get(kind, 8)


def half(words: ArrayLike, kind: str, at: int) -> Array:
    """float32 values of the low (0) or high (1) half of f16x2, bf16x2, e4m3x2, ... words."""
    element = kind.removesuffix("x2")
    bits = _element_bits(element)
    raw = (np.asarray(words, u32) >> u32(bits * at)) & u32((1 << bits) - 1)
    if element == "ue8m0":  # a power of two; all ones is NaN
        return np.where(raw == 255, f32(np.nan), np.ldexp(f32(1), raw.astype(i32) - 127))
    return to_f32(raw.astype(u16), element)


def _bf16_above(x: ArrayLike) -> Array:
    """The bits of float32 values rounded to nearest bf16, with refuse in the lower half."""
    x = np.asarray(x, f32)
    bits = x.view(u32)
    out = bits >> u32(16)
    out &= u32(1)
    out += u32(0x7FFF)
    out += bits
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FFFFFFF
    return out


def _f16_bits(x: ArrayLike) -> Array:
    """f16 bits of float32 values, to nearest; NaN becomes 0x7fff."""
    x = np.asarray(x, f32)
    bits = x.astype(f16).view(u16)
    nan = np.isnan(x)
    return np.where(nan, u16(0x7FFF), bits) if nan.any() else bits


def encode(x: ArrayLike, kind: str, rounding: str, saturated: bool) -> Array:
    """Raw bits of a narrow format, rounded once from float32 or float64."""
    x = np.asarray(x)
    if x.dtype == f32 and rounding == "rn" and not saturated and kind in ("f16", "bf16"):
        return _f16_bits(x) if kind == "f16" else f32_to_bf16(x)
    return from_f64(x.astype(f64), kind, rounding, saturated)


def _ue8m0(x: ArrayLike, up: bool, saturated: bool) -> Array:
    """Exponents of float32 values: powers of two from 2**-127 on, whatever the sign."""
    bits = np.asarray(x, f32).view(u32) & u32(0x7FFFFFFF)
    finite = bits < 0x7F800000
    out = bits >> u32(23)
    if up:
        out += ((bits & u32(0x7FFFFF)) != 0) & (bits > 0x400000) & finite
    return np.where((out == 255) & (bits <= 0x7F800000), u32(254), out) if saturated else out


def encode_pair(
    high: ArrayLike,
    low: ArrayLike,
    kind: str,
    rounding: str,
    saturated: bool,
    random: ArrayLike | None = None,
) -> Array:
    """The words of two elements, `high` above `low`; `random` bits for rounding rs."""
    if kind == "ue8m0":
        upper, lower = (_ue8m0(x, rounding == "rp", saturated) for x in (high, low))
        return upper << u32(8) | lower
    if random is not None:
        width = {"f16": 13, "bf16": 16}[kind]
        halves = np.asarray(random, u32) >> u32(16), np.asarray(random, u32)
        upper, lower = (
            from_f64(
                np.asarray(x, f64), kind, "rs", saturated, (r & u32((1 << width) - 1)) / 2.0**width
            )
            for x, r in zip((high, low), halves, strict=True)
        )
        return upper << u32(16) | lower
    if kind == "bf16" and rounding == "rn" and not saturated:  # the kernels' own: a fast way
        out, lower = _bf16_above(high), _bf16_above(low)
        out &= u32(0xFFFF0000)
        lower >>= u32(16)
        return out | lower
    upper, lower = (encode(np.asarray(x, f32), kind, rounding, saturated) for x in (high, low))
    return upper.astype(u32) << u32(_element_bits(kind)) | lower


def wide_int(x: Array) -> Array:
    """Integers as float64, rounded to odd where they have more than 53 bits."""
    if x.dtype.itemsize < 8:
        return x.astype(f64)
    large = (x >> x.dtype.type(11)) | ((x & x.dtype.type(2047)) != 0)
    small = np.abs(x.astype(f64)) < 2.0**53
    return np.where(small, x.astype(f64), large.astype(f64) * 2048.0)


def float_to_int(x: Array, dtype: Any, rounding: str) -> Array:
    """Saturating conversion. rounding: rni, rzi, rmi, rpi.

    NaN gives 0, or the lone top bit when either side has 64 bits.
    """
    info = np.iinfo(dtype)
    whole = WHOLE[rounding[:2]](np.asarray(x, f64))
    nan = 1 << (info.bits - 1) if info.bits == 64 or x.dtype == f64 else 0
    over, inside = whole >= float(info.max), np.clip(np.nan_to_num(whole), info.min, info.max)
    out = np.where(over, 0, inside).astype(dtype)
    out = np.where(over, dtype(info.max), out)
    return np.where(np.isnan(x), np.asarray(nan, u64).astype(dtype), out)


def round_float(x: Array, rounding: str) -> Array:
    """To whole numbers of the same type. rounding: rni, rzi, rmi, rpi."""
    return WHOLE[rounding[:2]](x)


def pack_clamped(a: Array, b: Array, c: ArrayLike, bits: int, low: int, high: int) -> Array:
    """cvt.pack.sat: a and b limited to [low, high] in `bits` bits each, above them `c`."""
    mask = u32((1 << bits) - 1)
    upper, lower = (clamp(x, low, high).astype(u32) & mask for x in (a, b))
    return np.asarray(c, u32) << u32(2 * bits) | upper << u32(bits) | lower
