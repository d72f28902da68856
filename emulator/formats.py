"""Number formats that NumPy lacks: bf16, tf32, e4m3 and e5m2, as raw bits to and from f32.

Raw arrays are unsigned integers of the format's width. Conversions to f32 are exact.
"""

from __future__ import annotations

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


def _e4m3_table() -> NDArray[np.float32]:
    """All 256 e4m3 values: bias 7, no infinities, NaN only at exponent and mantissa all ones."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)
    )
    magnitude[(bits & 127) == 127] = np.nan
    return np.copysign(magnitude, np.where(bits & 128, -1.0, 1.0)).astype(np.float32)


# For narrow formats one gather is faster than arithmetic, and than NumPy's own half conversion.
_TABLES: dict[str, NDArray[np.float32]] = {
    "f16": np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32),
    "e4m3": _e4m3_table(),
    "e5m2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
    "s8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "u8": np.arange(256, dtype=np.float32),
}


def to_f32(raw: np.ndarray, dtype: str) -> NDArray[np.float32]:
    """The values a tensor core sees in raw bits; tf32 ignores the low 13 bits of the word.

    Args:
        raw: unsigned integers of `RAW[dtype]`, any shape and strides.
        dtype: a key of `RAW`.

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
