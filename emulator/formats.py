"""Number formats that NumPy lacks: bf16, tf32, e4m3, e5m2 and smaller, as raw bits to and from f32.

Raw arrays are unsigned integers of the format's width. Conversions to f32 are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The raw dtype of each format a tensor core multiplies.
RAW: dict[str, np.dtype] = {
    "bf16": np.dtype(np.uint16),
    "f16": np.dtype(np.uint16),
    "tf32": np.dtype(np.uint32),
    "e4m3": np.dtype(np.uint8),
    "e5m2": np.dtype(np.uint8),
    "s8": np.dtype(np.uint8),
    "u8": np.dtype(np.uint8),
}


@dataclass(frozen=True, slots=True)
class Format:
    """A binary float: a sign, `exponent` bits of bias 2^(exponent-1) - 1, `mantissa` stored bits.

    Attributes:
        top: the bits of the largest finite value.
        infinity: its bits, or those that an overflow gives where there is none.
        nan: the bits of the canonical NaN, or those that take its place.
    """

    exponent: int
    mantissa: int
    top: int
    infinity: int
    nan: int

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal value."""
        return 2 - (1 << (self.exponent - 1))

    def values(self) -> NDArray[np.float32]:
        """The values of all bit patterns that stand for finite numbers by the general rule."""
        bits = np.arange(2 << (self.exponent + self.mantissa))
        stored = bits & ((1 << self.mantissa) - 1)
        exponent = (bits >> self.mantissa) & ((1 << self.exponent) - 1)
        whole = np.where(exponent > 0, stored + (1 << self.mantissa), stored)
        magnitude = np.ldexp(whole, np.maximum(exponent, 1) - 1 + self.lowest - self.mantissa)
        negative = bits >> (self.exponent + self.mantissa) == 1
        return np.where(negative, -magnitude, magnitude).astype(np.float32)


FORMATS: dict[str, Format] = {
    "bf16": Format(8, 7, top=0x7F7F, infinity=0x7F80, nan=0x7FFF),
    "f16": Format(5, 10, top=0x7BFF, infinity=0x7C00, nan=0x7FFF),
    "tf32": Format(8, 10, top=0x3FBFF, infinity=0x3FC00, nan=0x3FFFF),  # above 13 unused bits
    "e4m3": Format(4, 3, top=0x7E, infinity=0x7F, nan=0x7F),
    "e5m2": Format(5, 2, top=0x7B, infinity=0x7C, nan=0x7F),
    "e2m3": Format(2, 3, top=0x1F, infinity=0x1F, nan=0x1F),
    "e3m2": Format(3, 2, top=0x1F, infinity=0x1F, nan=0x1F),
    "e2m1": Format(2, 1, top=0x7, infinity=0x7, nan=0x7),
}


def _e4m3_table() -> NDArray[np.float32]:
    """All 256 e4m3 values: NaN only at exponent and mantissa all ones, no infinities."""
    values = FORMATS["e4m3"].values()
    values[[0x7F, 0xFF]] = np.nan
    return values


# For narrow formats one gather is faster than arithmetic, and than NumPy's own half conversion.
_TABLES: dict[str, NDArray[np.float32]] = {
    "f16": np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32),
    "e4m3": _e4m3_table(),
    "e5m2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
    "s8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "u8": np.arange(256, dtype=np.float32),
    "e2m3": FORMATS["e2m3"].values(),
    "e3m2": FORMATS["e3m2"].values(),
    "e2m1": FORMATS["e2m1"].values(),
    # Scale factors, without sign: bit 7 of ue4m3 is ignored, the top value of ue8m0 is NaN.
    "ue4m3": np.tile(_e4m3_table()[:128], 2),
    "ue8m0": np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32),
}


def to_f32(raw: np.ndarray, dtype: str) -> NDArray[np.float32]:
    """The values a tensor core sees in raw bits; tf32 ignores the low 13 bits of the word.

    Args:
        raw: unsigned integers of `RAW[dtype]` (u8 for the formats below 8 bits and for scale
            factors), any shape and strides.
        dtype: a key of `RAW` or `FORMATS`, ue4m3 or ue8m0.

    Returns:
        f32 of the same shape, C-contiguous, never an alias of `raw`.
    """
    if dtype == "bf16":
        out = np.zeros((*raw.shape, 2), np.uint16)
        out[..., 1] = raw  # bf16 is the upper half of f32
        return out.view(np.float32).reshape(raw.shape)
    if dtype == "tf32":
        return np.bitwise_and(raw, np.uint32(0xFFFFE000), order="C").view(np.float32)
    return _TABLES[dtype].take(raw)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds f32 to the nearest bf16, ties to even; NaN becomes the canonical 0x7fff."""
    rounded = _round_off(values.view(np.uint32), 16) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def round_to_tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds f32 to the nearest tf32, ties to even; infinities and NaN keep their bits."""
    rounded = _round_off(values.view(np.uint32), 13).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def _round_off(bits: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """Clears the low `count` bits, rounding the rest to nearest even."""
    odd = (bits >> np.uint32(count)) & np.uint32(1)
    keep = np.uint32((0xFFFFFFFF << count) & 0xFFFFFFFF)
    return (bits + np.uint32((1 << (count - 1)) - 1) + odd) & keep


def _half_away(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


# To whole numbers: to nearest even, to nearest and ties away from zero, toward 0, down, up.
WHOLE: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "rn": np.rint,
    "rna": _half_away,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
}


def from_f64(
    values: NDArray[np.float64],
    dtype: str,
    rounding: str = "rn",
    saturate: bool = False,
    random: NDArray[np.float64] | float = 0.0,
) -> NDArray[np.uint32]:
    """Rounds to a narrower format, once.

    Args:
        values: any shape.
        dtype: a key of `FORMATS`.
        rounding: a key of `WHOLE`, or "rs": up (in magnitude) if with `random`, in [0, 1), what is
            cut off comes to a unit in the last place.
        saturate: what is too large becomes the largest finite value, infinity too.

    Returns:
        The raw bits in 32-bit words (those of tf32 where they stand in an f32).
    """
    to = FORMATS[dtype]
    finite = np.where(np.isfinite(values), values, 0.0)
    exponent = np.where(finite == 0, to.lowest, np.maximum(np.frexp(finite)[1] - 1, to.lowest))
    # A power of two scales exactly. What rounds up to the next one carries into the exponent.
    steps = np.ldexp(finite, to.mantissa - exponent)
    steps = np.abs(steps) + random if rounding == "rs" else steps
    steps = WHOLE["rm" if rounding == "rs" else rounding](steps)
    bits = np.abs(steps).astype(np.int64) + ((exponent - to.lowest).astype(np.int64) << to.mantissa)
    negative = np.signbit(values)
    inward = np.where(negative, rounding in ("rz", "rp"), rounding in ("rz", "rm"))
    over = np.where(inward | saturate, to.top, to.infinity)
    bits = np.where(bits > to.top, over, bits)
    bits = np.where(np.isinf(values), to.top if saturate else to.infinity, bits)
    bits |= negative.astype(np.int64) << (to.exponent + to.mantissa)
    bits = np.where(np.isnan(values), to.nan, bits)
    return (bits << 13 if dtype == "tf32" else bits).astype(np.uint32)
