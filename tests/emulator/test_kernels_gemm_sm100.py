"""tcgen05.mma in GEMMs made with the DSL, in every execution order, against NumPy."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float8E8M0FNU, Float16, Float32, Int32
from numpy.typing import NDArray

from hopwell.emulator import KernelFault, formats

from .kernels import gemm_sm100
from .kernels.gemm_sm100 import GEMMS, STAGES, Gemm
from .kernels.launch import ON_GPU, launch, ordered

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels for another GPU")

_TORCH: dict[Any, torch.dtype] = {
    BFloat16: torch.bfloat16,
    Float16: torch.float16,
    Float32: torch.float32,
    Float8E4M3FN: torch.float8_e4m3fn,
    Float8E5M2: torch.float8_e5m2,
    Int32: torch.int32,
}
_NARROW = {"Float4E2M1FN": "e2m1", "Float6E3M2FN": "e3m2"}


def pack(raw: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Elements of so many bits one behind the other, the first in the lowest bits."""
    each = raw[..., None] >> np.arange(bits) & 1
    return np.packbits(each.reshape(len(raw), -1).astype(np.uint8), axis=1, bitorder="little")


def operand(
    dtype: Any, rows: int, depth: int, mn_major: bool, rng: np.random.Generator
) -> tuple[torch.Tensor, NDArray[np.float64]]:
    """As the kernel takes it, and its values [rows, depth]."""
    if dtype.__name__ in _NARROW:
        raw = rng.integers(0, 1 << dtype.width, (rows, depth))
        values = formats.FORMATS[_NARROW[dtype.__name__]].values()[raw]
        return torch.from_numpy(pack(raw, dtype.width)), values.astype(np.float64)
    if dtype in _TORCH:
        numbers = rng.integers(-4, 5, (rows, depth))
        tensor = torch.from_numpy(numbers).to(_TORCH[dtype])
    else:  # integers of 8 bits
        numbers = rng.integers(-128 * dtype.signed, 256 - 128 * dtype.signed, (rows, depth))
        tensor = torch.from_numpy(numbers.astype(np.int8 if dtype.signed else np.uint8))
    if mn_major:
        tensor = tensor.T.contiguous().T
    return tensor, numbers.astype(np.float64)


def scale_factors(
    dtype: Any, rows: int, count: int, rng: np.random.Generator
) -> tuple[torch.Tensor, NDArray[np.float64]]:
    """Words [rows, count / 4], and values [rows, count]."""
    exponents = rng.integers(-2, 3, (rows, count))
    if dtype is Float8E8M0FNU:
        raw = (exponents + 127).astype(np.uint8)
    else:
        raw = ((exponents + 7) << 3).astype(np.uint8)
    return torch.from_numpy(raw.view(np.uint32)), np.ldexp(1.0, exponents)


def check(kernel: Any, gemm: Gemm, m: int, n: int, depth: int) -> None:
    """Small numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(0)
    a, a_values = operand(gemm.a, m, depth, gemm.a_mn, rng)
    b, b_values = operand(gemm.b, n, depth, gemm.b_mn, rng)
    scales = []
    if gemm.scale is not None:
        for values in (a_values, b_values):
            words, factors = scale_factors(gemm.scale, len(values), depth // gemm.block, rng)
            values *= factors.repeat(gemm.block, axis=1)
            scales.append(words)
    if gemm.a_tmem:
        a = a.view(torch.uint8).view(torch.uint32)
    c = torch.empty(m, n, dtype=_TORCH[gemm.accumulator])
    launch(kernel, a, b, c, *scales, outputs=(c,))
    want = (-1 if gemm.negate else 1) * (a_values @ b_values.T)
    np.testing.assert_array_equal(c.double().numpy(), want)


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_gemm(gemm: Gemm) -> None:
    kernel = gemm_sm100.build(gemm)
    depth = STAGES * gemm.tile_k
    n = gemm.n * gemm.across
    check(kernel, gemm, 2 * gemm.m, n, depth)
    if not (gemm.a_tmem or gemm.scale):
        depth += gemm.tile_k  # a stage is used again
    for order in ("deferred", "random"):
        with ordered(order):
            check(kernel, gemm, gemm.m, n, depth)


def test_scale_factors_in_some_lanes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's in one lane, where the hardware wants them in each 32."""

    def spread(pitch: Any, rows: int, words: int, parts: int) -> cute.Layout:
        return cute.make_layout((128, (rows // 32, words)), stride=(pitch, (0, 1)))

    monkeypatch.setattr(gemm_sm100, "lanes_of_factors", spread)
    gemm = next(g for g in GEMMS if g.scale is not None and g.m == g.n == 128 and not g.pair)
    with pytest.raises(KernelFault, match="not the same in each 32 lanes"):
        check(gemm_sm100.build(gemm), gemm, gemm.m, gemm.n, STAGES * gemm.tile_k)
