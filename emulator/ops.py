"""Arithmetic of PTX on NumPy arrays: what a ufunc does not already do.

Every function takes arrays of lanes (any shape) and returns a new array. Approximate instructions
(ex2, lg2, rcp, ...) are computed to float32 accuracy: close to the hardware's, not bit-equal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
u8, i8, u16, i16 = np.uint8, np.int8, np.uint16, np.int16
u32, i32, u64, i64 = np.uint32, np.int32, np.uint64, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64

_TINY = f32(1.1754944e-38)  # smallest normal float32: .ftz flushes what is below


def ftz(x: Array) -> Array:
    """Flushes subnormal float32 values to (signed) zero."""
    x = np.asarray(x, f32)
    return np.where(np.abs(x) < _TINY, x * f32(0), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """float32 a*b+c, rounded once (the product is exact in float64)."""
    return (np.multiply(a, b, dtype=f64) + c).astype(f32)


def fma_round(a: Array, b: Array, c: Array, rounding: str) -> Array:
    """float32 a*b+c rounded toward zero (rz), down (rm) or up (rp)."""
    exact = np.multiply(a, b, dtype=f64) + c
    return directed(exact, rounding)


def directed(exact: Array, rounding: str) -> Array:
    """Rounds float64 values to float32 in direction rz, rm or rp."""
    near = exact.astype(f32)
    if rounding == "rn":
        return near
    if rounding == "rz":
        wrong = np.abs(near.astype(f64)) > np.abs(exact)
        return np.where(wrong, np.nextafter(near, f32(0)), near)
    if rounding == "rm":
        return np.where(near.astype(f64) > exact, np.nextafter(near, f32(-np.inf)), near)
    return np.where(near.astype(f64) < exact, np.nextafter(near, f32(np.inf)), near)


def half_fma(a: Array, b: Array, c: Array) -> Array:
    """float16 a*b+c, rounded once."""
    return (np.multiply(a, b, dtype=f64) + c).astype(f16)


def ex2(x: Array) -> Array:
    return np.exp2(x)


def ex2_ftz(x: Array) -> Array:
    y = np.exp2(x)
    y[y < _TINY] = 0
    return y


def rcp(x: Array) -> Array:
    return f32(1) / x


def rsqrt(x: Array) -> Array:
    return (1.0 / np.sqrt(x.astype(f64))).astype(f32)


def div_int(a: Array, b: Array) -> Array:
    """Integer quotient truncated toward zero; all ones where the divisor is 0."""
    a, b = np.broadcast_arrays(a, b)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, a.dtype.type(1), b))
    safe = np.where(b == 0, a.dtype.type(1), b)
    q = np.trunc_divide(a, safe) if hasattr(np, "trunc_divide") else _truncated(a, safe)
    return np.where(b == 0, a.dtype.type(-1), q)


def _truncated(a: Array, b: Array) -> Array:
    q = a // b
    return q + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def rem_int(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; the dividend where the divisor is 0."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, a.dtype.type(1), b)
    return np.where(b == 0, a, np.fmod(a, safe))


def mul_hi(a: Array, b: Array) -> Array:
    """Upper half of the product, in the operands' type (16, 32 or 64 bits)."""
    dtype = np.result_type(a, b) if hasattr(b, "dtype") else a.dtype
    bits = dtype.itemsize * 8
    if bits < 64:
        wide = np.int64 if dtype.kind == "i" else np.uint64
        return (np.multiply(a, b, dtype=wide, casting="unsafe") >> wide(bits)).astype(dtype)
    product = np.asarray(a).astype(object) * np.asarray(b).astype(object)
    return (product >> 64).astype(dtype)


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


def bfind(x: Array, shift_amount: bool = False) -> Array:
    """Position of the most significant bit that differs from the sign; all ones if none."""
    value = np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x
    zeros = clz(value.view(f"u{x.dtype.itemsize}"))
    bits = x.dtype.itemsize * 8
    top = u32(bits - 1) - zeros
    return np.where(zeros == bits, u32(0xFFFFFFFF), zeros if shift_amount else top)


def bfe(a: Array, start: Array, length: Array) -> Array:
    """Bit field of `length` bits from `start`, zero- or sign-extended by the type of `a`."""
    bits = a.dtype.itemsize * 8
    start, length = np.asarray(start, i64) & 0xFF, np.asarray(length, i64) & 0xFF
    wide = a.astype(object) if bits == 64 else a.astype(i64)
    unsigned = wide & ((1 << bits) - 1)
    # What would lie above the word is not of the field: a signed one has its sign there.
    mask = (np.ones_like(wide) << np.clip(bits - start, 0, length)) - 1
    field = (unsigned >> np.minimum(start, bits)) & mask
    if a.dtype.kind == "i":
        top = np.minimum(start + length - 1, bits - 1)
        sign = (unsigned >> top) & 1
        field = np.where((sign == 1) & (length > 0), field | ~mask, field)
    return _wrap(field, a.dtype)


def _wrap(x: Array, dtype: np.dtype) -> Array:
    """Arbitrary integers modulo 2**bits as `dtype`."""
    bits = dtype.itemsize * 8
    low = x & ((1 << bits) - 1)
    return np.asarray(low).astype(f"u{dtype.itemsize}").view(dtype)


def bfi(a: Array, b: Array, start: Array, length: Array) -> Array:
    """Inserts the low `length` bits of `a` into `b` at `start`."""
    bits = b.dtype.itemsize * 8
    start, length = np.asarray(start, i64) & 0xFF, np.asarray(length, i64) & 0xFF
    wide_a, wide_b = np.asarray(a).astype(object), b.astype(object)
    mask = ((1 << length.astype(object)) - 1) << start.astype(object)
    mask = mask & ((1 << bits) - 1)
    out = (wide_b & ~mask) | ((wide_a << start.astype(object)) & mask)
    return out.astype(b.dtype)


def prmt(a: Array, b: Array, selector: Array, mode: str = "") -> Array:
    """Byte permute: selector nibbles choose among the 8 bytes {b, a}; bit 3 replicates the sign."""
    pool = np.asarray(a, u64) | (np.asarray(b, u64) << u64(32))
    pool, selector = np.broadcast_arrays(pool, np.asarray(selector, u64))
    if mode:
        nibbles = _prmt_modes(mode, selector & u64(3))
    else:
        nibbles = [(selector >> u64(4 * i)) & u64(15) for i in range(4)]
    out = np.zeros(pool.shape, u64)
    for i, nibble in enumerate(nibbles):
        byte = (pool >> ((nibble & u64(7)) * u64(8))) & u64(255)
        sign = np.where(byte & u64(128), u64(255), u64(0))
        out |= np.where(nibble & u64(8), sign, byte) << u64(8 * i)
    return out.astype(u32)


def _prmt_modes(mode: str, s: Array) -> list[Array]:
    table = {
        "f4e": lambda s, i: s + i,
        "b4e": lambda s, i: (s - i) & 7,
        "rc8": lambda s, i: s,
        "ecl": lambda s, i: np.maximum(s, i),
        "ecr": lambda s, i: np.minimum(s, i),
        "rc16": lambda s, i: (s & 1) * 2 + i % 2,
    }
    return [np.asarray(table[mode](s.astype(i64), i)).astype(u64) for i in range(4)]


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Bitwise function of three inputs given by its truth table."""
    out = np.zeros(np.broadcast_shapes(*(np.shape(x) for x in (a, b, c))), u32)
    a, b, c = (np.asarray(x, u32) for x in (a, b, c))
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def funnel(low: Array, high: Array, amount: Array, left: bool, clamp: bool) -> Array:
    """shf.l / shf.r: shifts the 64-bit value {high, low} and keeps 32 bits."""
    amount = np.asarray(amount, u64)
    amount = np.minimum(amount, u64(32)) if clamp else amount & u64(31)
    value = (np.asarray(high, u64) << u64(32)) | np.asarray(low, u64)
    if left:
        return ((value << amount) >> u64(32)).astype(u32)
    return (value >> amount).astype(u32)


def dot4(a: Array, b: Array, c: Array, signed_a: bool, signed_b: bool) -> Array:
    """dp4a: four-way byte dot product added to `c`."""
    a = np.ascontiguousarray(np.broadcast_to(a, np.shape(c)), u32)
    b = np.ascontiguousarray(np.broadcast_to(b, np.shape(c)), u32)
    left = a.view(i8 if signed_a else u8).reshape(*a.shape, 4).astype(i64)
    right = b.view(i8 if signed_b else u8).reshape(*b.shape, 4).astype(i64)
    return _wrap((left * right).sum(-1) + np.asarray(c).astype(i64), np.asarray(c).dtype)


# Floating-point formats held in integer registers ------------------------------------------------


def bf16_to_f32(x: Array) -> Array:
    return (x.astype(u32) << u32(16)).view(f32)


def f32_to_bf16(x: Array, rounding: str = "rn") -> Array:
    """bf16 bits (uint16); round to nearest even, or toward zero; NaN becomes 0x7fff."""
    bits = np.asarray(x, f32).view(u32)
    if rounding == "rz":
        out = (bits >> u32(16)).astype(u16)
    else:
        out = ((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)).astype(u16)
    nan = np.isnan(x)
    if nan.any():
        out = np.where(nan, u16(0x7FFF), out)
    return out


def pack_bf16(high: Array, low: Array, rounding: str = "rn") -> Array:
    return (f32_to_bf16(high, rounding).astype(u32) << u32(16)) | f32_to_bf16(low, rounding)


def pack_f16(high: Array, low: Array, rounding: str = "rn") -> Array:
    return (f32_to_f16(high, rounding).astype(u32) << u32(16)) | f32_to_f16(low, rounding)


def f32_to_f16(x: Array, rounding: str = "rn") -> Array:
    """f16 bits (uint16); NaN becomes 0x7fff."""
    x = np.asarray(x, f32)
    half = x.astype(f16)
    if rounding == "rz":
        over = np.abs(half.astype(f32)) > np.abs(x)
        half = np.where(over, np.nextafter(half, f16(0)), half)
    bits = half.view(u16)
    nan = np.isnan(x)
    return np.where(nan, u16(0x7FFF), bits) if nan.any() else bits


def halves(x: Array, kind: str) -> tuple[Array, Array]:
    """(high, low) float32 values of packed f16x2 / bf16x2 words."""
    words = np.asarray(x, u32)
    low, high = (words & u32(0xFFFF)).astype(u16), (words >> u32(16)).astype(u16)
    if kind == "bf16x2":
        return bf16_to_f32(high), bf16_to_f32(low)
    return high.view(f16).astype(f32), low.view(f16).astype(f32)


def packed(kind: str, op: str, *args: Array) -> Array:
    """One operation on packed f16x2 / bf16x2 words: each half computed wide and rounded once."""
    split = [halves(x, kind) for x in args]
    out = []
    function, saturates = HALF_OPS[op.removesuffix(".sat")], op.endswith(".sat")
    for side in (0, 1):
        wide = function(*(s[side].astype(f64) for s in split))
        wide = saturate(wide) if saturates else wide
        out.append(wide.astype(f32) if kind == "bf16x2" else wide)
    return (pack_bf16 if kind == "bf16x2" else _pack_f16_wide)(*out)


def _pack_f16_wide(high: Array, low: Array) -> Array:
    halves16 = [np.where(np.isnan(x), u16(0x7FFF), x.astype(f16).view(u16)) for x in (high, low)]
    return (halves16[0].astype(u32) << u32(16)) | halves16[1]


def _max(a: Array, b: Array) -> Array:
    """The greater, or the one that is a number; +0 is greater than -0, which fmax leaves open."""
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


HALF_OPS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": _max,
    "min": lambda a, b: -_max(-a, -b),
    "min.NaN": np.minimum, "max.NaN": np.maximum, "neg": np.negative, "abs": np.abs,
    "fma": lambda a, b, c: a * b + c, "fma.relu": lambda a, b, c: np.maximum(a * b + c, 0),
    "ex2": np.exp2, "tanh": np.tanh,
}  # fmt: skip


def scalar16(kind: str, op: str, *args: Array) -> Array:
    """One operation on f16 / bf16 bits in 16-bit registers."""
    wide = [(bf16_to_f32(x) if kind == "bf16" else x.view(f16)).astype(f64) for x in args]
    out = HALF_OPS[op](*wide)
    return f32_to_bf16(out.astype(f32)) if kind == "bf16" else out.astype(f16).view(u16)


def _minifloat_table(exponent: int, mantissa: int, ieee: bool) -> NDArray[np.float32]:
    """All 256 values of an 8-bit float; e4m3 (not `ieee`) has no infinity."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    e = (codes >> mantissa) & ((1 << exponent) - 1)
    m = codes & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    values = np.where(
        e == 0,
        m * 2.0 ** (1 - bias - mantissa),
        (1 + m / (1 << mantissa)) * 2.0 ** (e.astype(float) - bias),
    )
    if ieee:
        values = np.where(e == (1 << exponent) - 1, np.where(m == 0, np.inf, np.nan), values)
    else:
        values = np.where(codes & 0x7F == 0x7F, np.nan, values)
    return (sign * values).astype(f32)


E4M3 = _minifloat_table(4, 3, ieee=False)
E5M2 = _minifloat_table(5, 2, ieee=True)


def f32_to_fp8(x: Array, kind: str) -> Array:
    """e4m3 / e5m2 bits, round to nearest even, saturating to the largest finite value."""
    table = E4M3 if kind == "e4m3" else E5M2
    finite = table[:127] if kind == "e4m3" else table[:124]
    magnitude = np.minimum(np.abs(np.asarray(x, f32)), finite[-1]).astype(f64)
    above = np.searchsorted(finite.astype(f64), magnitude).clip(1, len(finite) - 1)
    low, high = finite[above - 1].astype(f64), finite[above].astype(f64)
    middle = (low + high) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(up, above, above - 1).astype(u16)
    code = np.where(np.isnan(x), u16(0x7F), code)
    return code | np.where(np.signbit(x) & ~np.isnan(x), u16(0x80), u16(0))


def fp8_pair(high: Array, low: Array, kind: str) -> Array:
    return (f32_to_fp8(high, kind) << u16(8)) | f32_to_fp8(low, kind)


def fp8_pair_to_f16x2(x: Array, kind: str) -> Array:
    table = E4M3 if kind == "e4m3" else E5M2
    words = np.asarray(x, u16)
    return pack_f16(table[words >> u16(8)], table[words & u16(255)])


def to_tf32(x: Array, rounding: str = "rna") -> Array:
    """tf32 bits in a 32-bit register: 10 mantissa bits; ties to even (rn), away from zero (rna) or
    cut off (rz)."""
    bits = np.asarray(x, f32).view(u32)
    half = {"rna": u32(0x1000), "rn": u32(0xFFF) + ((bits >> u32(13)) & u32(1)), "rz": u32(0)}
    return np.where(np.isfinite(x), (bits + half[rounding]) & ~u32(0x1FFF), bits)


def float_to_int(x: Array, dtype: type, rounding: str) -> Array:
    """Saturating conversion; NaN gives 0. rounding: rni, rzi, rmi, rpi."""
    whole = round_float(np.asarray(x, f64), rounding)
    info = np.iinfo(dtype)
    top = float(info.max) if info.bits < 64 else np.nextafter(float(info.max), 0)
    clipped = np.clip(np.nan_to_num(whole, nan=0.0), float(info.min), top)
    out = clipped.astype(dtype)
    return np.where(whole >= float(info.max), dtype(info.max), out)


def round_float(x: Array, rounding: str) -> Array:
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](x)


def saturate_int(x: Array, dtype: type) -> Array:
    info = np.iinfo(dtype)
    return np.clip(x, info.min, info.max).astype(dtype)


def saturate(x: Array) -> Array:
    """.sat for floats: clamps to [0, 1]; NaN and -0 give +0."""
    return (np.nan_to_num(np.clip(x, 0, 1), nan=0.0) + 0.0).astype(x.dtype)
