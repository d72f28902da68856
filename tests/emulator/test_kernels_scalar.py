"""Every scalar instruction of the emulator against NumPy, on one table a family."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from .kernels import numeric as nm
from .kernels import scalar
from .kernels.launch import ON_GPU, launch, once
from .kernels.scalar import SAMPLES, WIDTH, Op
from .kernels.scalar_tables import TABLES

_DECODE = {"f32": nm.f32_values, "f16": nm.f16_values, "bf16": nm.bf16_values}


def evaluate(ops: list[Op]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Inputs (ops, 4, SAMPLES) and results (ops, SAMPLES) of one launch."""
    source = scalar.inputs(ops)
    result = torch.empty(len(ops), SAMPLES, dtype=torch.uint64)
    launch(scalar.build(ops), torch.from_numpy(source), result, outputs=(result,))
    return source, result.numpy()


RESULTS = {name: once(partial(evaluate, ops)) for name, ops in TABLES.items()}


def close(got: nm.Floats, want: nm.Floats, op: Op) -> NDArray[np.bool_]:
    """Equal within the op's tolerance; NaN equals NaN; zeros must agree in sign when exact."""
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= np.maximum(op.rtol * np.abs(want), op.atol)
    same = (got == want) | (np.isnan(got) & np.isnan(want)) | near
    if not (op.rtol or op.atol):
        same &= np.isnan(got) | (np.signbit(got) == np.signbit(want))
    return same


@pytest.mark.parametrize(
    ("table", "index"),
    [pytest.param(name, i, id=op.name) for name, ops in TABLES.items() for i, op in enumerate(ops)],
)
def test_instruction(table: str, index: int) -> None:
    op = TABLES[table][index]
    source, result = RESULTS[table]()
    args = [source[index, j].astype(object) for j in range(len(op.inputs))]
    with np.errstate(all="ignore"):
        want = op.expect(*args)
    got = result[index]
    words = got.astype(np.uint32)
    if op.result == "bits":
        mask = (1 << WIDTH[op.kinds[0]]) - 1
        # Above a 16-bit result anything may stand: on an H200 cvt.sat.s16 leaves its sign there.
        good = got.astype(object) & mask == np.asarray(want).astype(object) & mask
    elif op.result == "tf32":  # the 13 bits below the format mean nothing
        good = close(nm.f32_values(words & np.uint32(0xFFFFE000)), want, op)
    elif op.result == "f64":
        good = close(got.view(np.float64), want, op)
    elif op.result.endswith("x2"):
        decode = _DECODE[op.result[:-2]]
        good = close(np.stack([decode(words & np.uint32(0xFFFF)), decode(words >> 16)]), want, op)
        good = good.all(axis=0)
    else:
        good = close(_DECODE[op.result](words), want, op)
    bad = np.flatnonzero(~np.asarray(good, dtype=bool))
    shown = [
        f"{[hex(a[i]) for a in args]} -> {int(got[i]):#x}, want {np.asarray(want)[..., i]!r}"
        for i in bad[:5]
    ]
    assert not len(bad), f"{op.ptx()}: {len(bad)} of {SAMPLES} wrong: " + "; ".join(shown)


@pytest.mark.skipif(ON_GPU, reason="a GPU knows every instruction")
def test_unknown_instruction() -> None:
    """Neither guessed nor skipped: refused, with the instruction and its place in the source."""
    op = Op("fns.b32", "r:rrr", lambda a, b, c: a, ("int",) * 3)
    with pytest.raises(NotImplementedError, match=r"`fns\.b32.*scalar\.py:\d+"):
        evaluate([op])
