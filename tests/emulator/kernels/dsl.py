"""Arithmetic as the DSL itself compiles it: operators, conversions, math functions, fragments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import (
    BFloat16,
    Boolean,
    Float8E4M3FN,
    Float16,
    Float32,
    Int8,
    Int16,
    Int32,
    Int64,
    Uint8,
    Uint32,
)
from numpy.typing import NDArray

from . import numeric as nm
from .launch import compile, fake

SAMPLES = 128
Floats = NDArray[np.float64]


def _wrap(x: int, bits: int = 32) -> int:
    """Two's complement of the low bits."""
    low = x & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low


@dataclass(frozen=True)
class IntegerOp:
    """A function of two Int32, and the same of two Python integers."""

    name: str
    device: Callable[[Any, Any], Any]
    expect: Callable[[int, int], int]


@dataclass(frozen=True)
class FloatOp:
    """A function of two Float32, the same of float64 arrays; the tolerance is relative."""

    name: str
    device: Callable[[Any, Any], Any]
    expect: Callable[[Floats, Floats], Floats]
    rtol: float = 0.0
    atol: float = 0.0


def _clamped(a: Any, b: Any) -> Any:
    return cutlass.min(cutlass.max(a, Int32(-100)), Int32(100)) + b


def _remainder(a: int, b: int) -> int:
    """The DSL's %: of the quotient rounded towards zero, though its // rounds down."""
    return int(math.fmod(a, b))


INTEGERS: list[IntegerOp] = [
    IntegerOp("a + b", lambda a, b: a + b, lambda a, b: a + b),
    IntegerOp("a * b - 3", lambda a, b: a * b - 3, lambda a, b: a * b - 3),
    IntegerOp("a // b", lambda a, b: a // b, lambda a, b: a // b),
    IntegerOp("a % b", lambda a, b: a % b, _remainder),
    IntegerOp("a // 7", lambda a, b: a // 7, lambda a, b: a // 7),
    IntegerOp("a % 24", lambda a, b: a % 24, lambda a, b: _remainder(a, 24)),
    IntegerOp("a // 8", lambda a, b: a // 8, lambda a, b: a // 8),
    IntegerOp("-a", lambda a, b: -a, lambda a, b: -a),
    IntegerOp("~a & b | 5", lambda a, b: ~a & b | 5, lambda a, b: ~a & b | 5),
    IntegerOp("a ^ b", lambda a, b: a ^ b, lambda a, b: a ^ b),
    IntegerOp("a << 3", lambda a, b: a << 3, lambda a, b: a << 3),
    IntegerOp("a >> 5", lambda a, b: a >> 5, lambda a, b: a >> 5),
    IntegerOp("min, max", _clamped, lambda a, b: min(max(a, -100), 100) + b),
    IntegerOp("a < b", lambda a, b: Int32(a < b), lambda a, b: int(a < b)),
    IntegerOp(
        "comparisons",
        lambda a, b: Int32(a >= b) + 2 * Int32(a == b) + 4 * Int32(a != 0) + 8 * Int32(a > 17),
        lambda a, b: (a >= b) + 2 * (a == b) + 4 * (a != 0) + 8 * (a > 17),
    ),
    IntegerOp(
        "and, or, not",
        lambda a, b: Int32(Boolean((a > 0) & (b > 0)) | Boolean(a < -50)),
        lambda a, b: int((a > 0 and b > 0) or a < -50),
    ),
    IntegerOp("Int8", lambda a, b: a.to(Int8).to(Int32), lambda a, b: _wrap(a, 8)),
    IntegerOp("Uint8", lambda a, b: a.to(Uint8).to(Int32), lambda a, b: a & 0xFF),
    IntegerOp("Int16", lambda a, b: a.to(Int16).to(Int32), lambda a, b: _wrap(a, 16)),
    IntegerOp(
        "Int64",
        lambda a, b: ((a.to(Int64) * b.to(Int64)) >> 16).to(Int32),
        lambda a, b: a * b >> 16,
    ),
    IntegerOp(
        "Uint32",
        lambda a, b: (a.to(Uint32) // Uint32(10)).to(Int32),
        lambda a, b: (a & 0xFFFFFFFF) // 10,
    ),
    IntegerOp("popc", lambda a, b: cute.arch.popc(a), lambda a, b: (a & 0xFFFFFFFF).bit_count()),
]


def _abs(a: Any) -> Any:
    return cute.arch.fmax(a, -a)


def _f32(a: Floats) -> Floats:
    return nm.rounded(a, nm.F32)


def _sine(a: Any) -> Any:
    return cute.math.sin(a, fastmath=True)


def _cosine(a: Any) -> Any:
    return cute.math.cos(a, fastmath=True)


FLOATS: list[FloatOp] = [
    FloatOp("a + b", lambda a, b: a + b, lambda a, b: nm.rounded(a + b, nm.F32)),
    FloatOp("a * b", lambda a, b: a * b, lambda a, b: nm.rounded(a * b, nm.F32)),
    FloatOp("a / b", lambda a, b: a / b, lambda a, b: a / b, rtol=2.0**-22),
    FloatOp("-a", lambda a, b: -a, lambda a, b: -a),
    FloatOp("fmax", lambda a, b: cute.arch.fmax(a, b), np.maximum),
    FloatOp("fmin", lambda a, b: cute.arch.fmin(a, b), np.minimum),
    FloatOp("a > b", lambda a, b: Float32(a > b), lambda a, b: (a > b) * 1.0),
    FloatOp("Int32", lambda a, b: a.to(Int32).to(Float32), lambda a, b: np.trunc(a)),
    FloatOp("Float16", lambda a, b: a.to(Float16).to(Float32), lambda a, b: nm.rounded(a, nm.F16)),
    FloatOp(
        "BFloat16", lambda a, b: a.to(BFloat16).to(Float32), lambda a, b: nm.rounded(a, nm.BF16)
    ),
    FloatOp("exp", lambda a, b: cute.math.exp(a), lambda a, b: np.exp(a), rtol=1e-6),
    FloatOp(
        "exp fast", lambda a, b: cute.math.exp(a, fastmath=True), lambda a, b: np.exp(a), rtol=3e-6
    ),
    FloatOp("exp2", lambda a, b: cute.math.exp2(a), lambda a, b: np.exp2(a), rtol=1e-6),
    FloatOp(
        "exp2 fast", lambda a, b: cute.math.exp2(a, fastmath=True), lambda a, b: np.exp2(a), 5e-7
    ),
    FloatOp("log", lambda a, b: cute.math.log(_abs(a)), lambda a, b: np.log(abs(a)), 1e-6, 1e-6),
    FloatOp("log2", lambda a, b: cute.math.log2(_abs(a)), lambda a, b: np.log2(abs(a)), 1e-6, 1e-6),
    FloatOp(
        "log2 fast",
        lambda a, b: cute.math.log2(_abs(a), fastmath=True),
        lambda a, b: np.log2(abs(a)),
        *(1e-6, 1e-6),
    ),
    FloatOp("sqrt", lambda a, b: cute.math.sqrt(_abs(a)), lambda a, b: np.sqrt(abs(a)), 3e-7),
    FloatOp("rsqrt", lambda a, b: cute.math.rsqrt(_abs(a)), lambda a, b: 1 / np.sqrt(abs(a)), 3e-7),
    FloatOp("sin", lambda a, b: cute.math.sin(a * 1e6), lambda a, b: np.sin(_f32(a * 1e6)), 1e-6),
    # The approximations' guarantee is for [-pi, pi].
    FloatOp("sin fast", lambda a, b: _sine(a), lambda a, b: np.sin(a), atol=2.0**-19),
    FloatOp("cos fast", lambda a, b: _cosine(a), lambda a, b: np.cos(a), atol=2.0**-19),
    FloatOp("tanh", lambda a, b: cute.math.tanh(a), lambda a, b: np.tanh(a), rtol=1e-6),
    FloatOp(
        "tanh fast",
        lambda a, b: cute.math.tanh(a, fastmath=True),
        lambda a, b: np.tanh(a),
        rtol=2.0**-10.9,
    ),
    FloatOp("erf", lambda a, b: cute.math.erf(a), lambda a, b: np.vectorize(math.erf)(a), 1e-6),
    FloatOp("rcp", lambda a, b: cute.arch.rcp_approx(a), lambda a, b: 1 / a, rtol=2.0**-23),
    FloatOp("floor", lambda a, b: cute.math.floor(a), lambda a, b: np.floor(a)),
]


FRAGMENT = 8


def inputs() -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Integers (2, SAMPLES), the second row without zero; floats (2, SAMPLES), in [-4, 4]."""
    rng = np.random.default_rng(11)
    integers = rng.integers(-(1 << 31), 1 << 31, (2, SAMPLES), dtype=np.int64)
    integers >>= rng.integers(0, 31, (2, SAMPLES))
    integers[1, integers[1] == 0] = 3
    floats = rng.uniform(-4, 4, (2, SAMPLES))
    return integers.astype(np.int32), floats.astype(np.float32)


def build() -> Any:
    """Compile: (integers (2, SAMPLES) s32, floats (2, SAMPLES) f32,
    integer results (len(INTEGERS), SAMPLES) s32, float results (len(FLOATS), SAMPLES) f32,
    eighths (SAMPLES,) f32: e4m3 of the first floats, back in float32, in fragments of 8)."""

    @cute.kernel
    def evaluate(
        integers: cute.Tensor,
        floats: cute.Tensor,
        integer_results: cute.Tensor,
        float_results: cute.Tensor,
        eighths: cute.Tensor,
    ) -> None:
        lane, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(len(INTEGERS)):
            result = INTEGERS[i].device(integers[0, lane], integers[1, lane])
            integer_results[i, lane] = result.to(Int32)
        for i in cutlass.range_constexpr(len(FLOATS)):
            float_results[i, lane] = FLOATS[i].device(floats[0, lane], floats[1, lane])
        if lane < SAMPLES // FRAGMENT:
            source = cute.local_tile(floats, (1, FRAGMENT), (0, lane))
            fragment = cute.make_rmem_tensor(source.shape, Float32)
            cute.autovec_copy(source, fragment)
            narrow = fragment.load().to(Float8E4M3FN)
            fragment.store(narrow.to(Float32))
            target = cute.local_tile(eighths, (FRAGMENT,), (lane,))
            cute.autovec_copy(cute.make_tensor(fragment.iterator, target.layout), target)

    @cute.jit
    def host(
        integers: cute.Tensor,
        floats: cute.Tensor,
        integer_results: cute.Tensor,
        float_results: cute.Tensor,
        eighths: cute.Tensor,
    ) -> None:
        evaluate(integers, floats, integer_results, float_results, eighths).launch(
            grid=(1, 1, 1), block=(SAMPLES, 1, 1)
        )

    return compile(
        host,
        fake(Int32, (2, SAMPLES)),
        fake(Float32, (2, SAMPLES)),
        fake(Int32, (len(INTEGERS), SAMPLES)),
        fake(Float32, (len(FLOATS), SAMPLES)),
        fake(Float32, (SAMPLES,)),
    )
