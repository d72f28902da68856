"""Exact number formats for the expectations: rounding of float64 values and their bit patterns.

Every function works on whole arrays; values are float64, bit patterns are uint32 (the low bits
of a word). The formats are those of the PTX manual's section on fundamental types.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes: `mantissa` stored fraction bits; `min_exponent` exponent of the smallest normal
    number; `largest` greatest finite value; `infinity` whether the format has one (e4m3 has none).
    """

    mantissa: int
    min_exponent: int
    largest: float
    infinity: bool = True


F32 = Format(23, -126, float(np.finfo(np.float32).max))
TF32 = Format(10, -126, (2 - 2.0**-10) * 2.0**127)
F16 = Format(10, -14, 65504.0)
BF16 = Format(7, -126, (2 - 2.0**-7) * 2.0**127)
E4M3 = Format(3, -6, 448.0, infinity=False)
E5M2 = Format(2, -14, 57344.0)

_TO_INTEGER = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
}


def to_integer(x: Floats, mode: str) -> Floats:
    """Round to integral values: rn to even, rz to zero, rm down, rp up, rna ties away."""
    return _TO_INTEGER[mode](x)


def rounded(x: Floats, fmt: Format, mode: str = "rn", saturate: bool = False) -> Floats:
    """Round `x` to `fmt`, exactly: scaling by a power of two is exact in float64.

    Overflow goes to infinity, or to the largest finite value where `mode` rounds towards zero on
    that side or `saturate` is set. Infinity saturates as well; NaN stays NaN.
    """
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        exponent = np.frexp(x)[1] - 1
        step = np.ldexp(1.0, np.maximum(exponent, fmt.min_exponent) - fmt.mantissa)
        y = np.where(np.isfinite(x), to_integer(x / step, mode) * step, x)
        over = np.abs(y) > fmt.largest
        inwards = np.isfinite(x) & (
            (mode == "rz") | ((mode == "rm") & (x > 0)) | ((mode == "rp") & (x < 0))
        )
        bound = np.where(inwards | saturate, fmt.largest, np.inf if fmt.infinity else np.nan)
        return np.where(over, np.copysign(bound, x), y)


def f32_bits(x: Floats) -> Words:
    """Bit patterns of float32-representable values."""
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).view(np.uint32)


def f16_bits(x: Floats) -> Words:
    """Bit patterns (low 16 bits) of float16-representable values."""
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float64).astype(np.float16).view(np.uint16).astype(np.uint32)


def bf16_bits(x: Floats) -> Words:
    """Bit patterns (low 16 bits) of bfloat16-representable values."""
    return f32_bits(x) >> np.uint32(16)


def e5m2_bits(x: Floats) -> Words:
    """Bit patterns (low 8 bits) of e5m2-representable values; NaN becomes the canonical 0x7f."""
    return np.where(np.isnan(x), np.uint32(0x7F), f16_bits(x) >> np.uint32(8)).astype(np.uint32)


def e4m3_bits(x: Floats) -> Words:
    """Bit patterns (low 8 bits) of e4m3-representable values; NaN becomes 0x7f."""
    positive = e4m3_values(np.arange(127, dtype=np.uint32))
    code = np.searchsorted(positive, np.where(np.isnan(x), 0.0, np.abs(x))).astype(np.uint32)
    code |= np.where(np.signbit(x), 0x80, 0).astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7F), code).astype(np.uint32)


def f32_values(bits: Words) -> Floats:
    """Values of float32 bit patterns."""
    return np.asarray(bits, np.uint32).view(np.float32).astype(np.float64)


def f16_values(bits: Words) -> Floats:
    """Values of the low 16 bits as float16."""
    return np.asarray(bits, np.uint32).astype(np.uint16).view(np.float16).astype(np.float64)


def bf16_values(bits: Words) -> Floats:
    """Values of the low 16 bits as bfloat16."""
    return f32_values(np.asarray(bits, np.uint32) << np.uint32(16))


def e5m2_values(bits: Words) -> Floats:
    """Values of the low 8 bits as e5m2 (the upper half of a float16)."""
    return f16_values((np.asarray(bits, np.uint32) & np.uint32(0xFF)) << np.uint32(8))


def e4m3_values(bits: Words) -> Floats:
    """Values of the low 8 bits as e4m3: bias 7, no infinity, 0x7f and 0xff are NaN."""
    bits = np.asarray(bits, np.uint32) & np.uint32(0xFF)
    exponent = ((bits >> 3) & 15).astype(np.int32)
    fraction = (bits & 7).astype(np.float64) / 8
    value = np.where(exponent == 0, np.ldexp(fraction, -6), np.ldexp(1 + fraction, exponent - 7))
    value = np.where((bits & 0x7F) == 0x7F, np.nan, value)
    return np.where(bits & 0x80, -value, value)
