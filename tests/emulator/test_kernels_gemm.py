"""wgmma: single tiles in every form, and GEMMs made with the DSL, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Float32, Int8, Int32

from .kernels import gemm, wgmma
from .kernels.gemm import GEMMS
from .kernels.launch import launch, once
from .kernels.wgmma import CASES, THREADS

_TORCH: dict[Any, torch.dtype] = {
    BFloat16: torch.bfloat16,
    Float16: torch.float16,
    Float32: torch.float32,
    Float8E4M3FN: torch.float8_e4m3fn,
    Float8E5M2: torch.float8_e5m2,
    Int8: torch.int8,
    Int32: torch.int32,
}


@once
def tiles() -> tuple[wgmma.Data, Any]:
    data = wgmma.data()
    result = torch.empty(data.out_words, dtype=torch.uint32)
    launch(wgmma.build(data), torch.from_numpy(data.words), result, outputs=(result,))
    return data, result.numpy()


@pytest.mark.parametrize("index", [pytest.param(i, id=c.name) for i, c in enumerate(CASES)])
def test_wgmma(index: int) -> None:
    case = CASES[index]
    data, result = tiles()
    start = data.out_at[index]
    registers = result[start : start + THREADS * case.out_registers].reshape(THREADS, -1)
    want = case.expected(data.a[index], data.b[index])
    np.testing.assert_array_equal(case.decode(registers), want)


def operand(dtype: torch.dtype, rows: int, depth: int, mn_major: bool, seed: int) -> torch.Tensor:
    """Small integers, (rows, depth), consecutive along rows if `mn_major`, with a padded pitch."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.integers(-4, 5, (rows, depth)).astype(np.float32)).to(dtype)
    per = 16 // dtype.itemsize
    lines, length = (depth, rows) if mn_major else (rows, depth)
    pitch = -(-length // per) * per + per
    storage = torch.zeros(lines, pitch, dtype=dtype)
    view = storage[:, :length].T if mn_major else storage[:, :length]
    view.copy_(values)
    return view


@pytest.mark.parametrize("spec", GEMMS, ids=lambda g: g.name)
def test_gemm(spec: gemm.Gemm) -> None:
    kernel = gemm.build(spec)
    for m, n, k in ((64, 96, 256), (100, 72, 176), (40, 208, 48)):
        a = operand(_TORCH[spec.a], m, k, spec.a_mn, 1)
        b = operand(_TORCH[spec.b], n, k, spec.b_mn, 2)
        c = torch.empty(m, n, dtype=_TORCH[spec.accumulator])
        launch(kernel, a, b, c, outputs=(c,))
        want = a.double() @ b.double().T
        assert torch.equal(c.double(), want), (m, n, k)
