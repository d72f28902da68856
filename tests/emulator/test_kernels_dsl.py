"""Arithmetic as the DSL compiles it, against Python and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from .kernels import dsl
from .kernels import numeric as nm
from .kernels.dsl import FLOATS, INTEGERS, SAMPLES
from .kernels.launch import launch, once


@once
def results() -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    integers, floats = (torch.from_numpy(x) for x in dsl.inputs())
    outputs = (
        torch.empty(len(INTEGERS), SAMPLES, dtype=torch.int32),
        torch.empty(len(FLOATS), SAMPLES),
        torch.empty(SAMPLES),
    )
    launch(dsl.build(), integers, floats, *outputs, outputs=outputs)
    return tuple(x.numpy() for x in outputs)


@pytest.mark.parametrize("index", range(len(INTEGERS)), ids=lambda i: INTEGERS[i].name)
def test_integer(index: int) -> None:
    a, b = dsl.inputs()[0].tolist()
    want = [INTEGERS[index].expect(x, y) for x, y in zip(a, b, strict=True)]
    want = (np.array(want, dtype=object) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(results()[0][index], want)


@pytest.mark.parametrize("index", range(len(FLOATS)), ids=lambda i: FLOATS[i].name)
def test_float(index: int) -> None:
    op = FLOATS[index]
    want = op.expect(*dsl.inputs()[1].astype(np.float64))
    np.testing.assert_allclose(results()[1][index], want, rtol=op.rtol, atol=op.atol)


def test_fragment_to_e4m3() -> None:
    want = nm.rounded(dsl.inputs()[1][0].astype(np.float64), nm.E4M3)
    np.testing.assert_array_equal(results()[2], want)
