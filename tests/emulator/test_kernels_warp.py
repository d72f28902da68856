"""Warp-wide instructions against Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from .kernels import warp
from .kernels.launch import launch, once
from .kernels.warp import DSL_OPS, MATRIX_FORMS, OPS, THREADS, WARPS


def lane_inputs() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """a: any words, the last warp all alike; b: small numbers, 0..31, one warp all alike."""
    rng = np.random.default_rng(7)
    a = rng.integers(0, 1 << 32, (WARPS, 32), dtype=np.uint32)
    b = rng.integers(0, 32, (WARPS, 32), dtype=np.uint32)
    a[-1] = a[-1, 0]
    b[-1] = 13
    return a, b


def run(compiled: Any, rows: int) -> NDArray[np.uint32]:
    a, b = (torch.from_numpy(x.reshape(-1)) for x in lane_inputs())
    result = torch.empty(rows, THREADS, dtype=torch.uint32)
    launch(compiled, a, b, result, outputs=(result,))
    return result.numpy().reshape(rows, WARPS, 32)


@once
def table() -> NDArray[np.uint32]:
    return run(warp.build_table(), len(OPS))


@once
def dsl() -> NDArray[np.uint32]:
    return run(warp.build_dsl(), len(DSL_OPS))


@pytest.mark.parametrize("index", [pytest.param(i, id=op.name) for i, op in enumerate(OPS)])
def test_instruction(index: int) -> None:
    np.testing.assert_array_equal(table()[index], warp.expected(OPS[index], *lane_inputs()))


@pytest.mark.parametrize("index", [pytest.param(i, id=op[0]) for i, op in enumerate(DSL_OPS)])
def test_dsl_function(index: int) -> None:
    expect = DSL_OPS[index][2]
    a, b = lane_inputs()
    want = [
        [expect(x.tolist(), y.tolist(), i) for i in range(32)] for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(dsl()[index], np.array(want, np.uint32))


@once
def matrices() -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    tiles = np.random.default_rng(8).integers(0, 1 << 32, (4, 8, 4), dtype=np.uint32)
    loaded = torch.empty(len(MATRIX_FORMS), 4, 32, dtype=torch.uint32)
    stored = torch.empty(len(MATRIX_FORMS), 4, 8, 4, dtype=torch.uint32)
    launch(warp.build_matrix(), torch.from_numpy(tiles), loaded, stored, outputs=(loaded, stored))
    return tiles, loaded.numpy(), stored.numpy()


@pytest.mark.parametrize("form", range(len(MATRIX_FORMS)))
def test_ldmatrix(form: int) -> None:
    tiles, loaded, _ = matrices()
    np.testing.assert_array_equal(loaded[form], warp.expected_load(tiles, *MATRIX_FORMS[form]))


@pytest.mark.parametrize("form", range(len(MATRIX_FORMS)))
def test_stmatrix(form: int) -> None:
    _, _, stored = matrices()
    np.testing.assert_array_equal(stored[form], warp.expected_store(*MATRIX_FORMS[form]))
