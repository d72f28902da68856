"""Loads, stores, cp.async, bulk copies, atomics and local memory against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from .kernels import atomics, memory
from .kernels.atomics import CELLS
from .kernels.atomics import OPS as ATOMS
from .kernels.launch import launch, once
from .kernels.memory import BULK, MOVES, REDUCTIONS, SLOT


@once
def moved() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    shape = (len(MOVES), memory.THREADS, SLOT)
    source = np.random.default_rng(9).integers(0, 256, shape, dtype=np.uint8)
    target = np.full(shape, 0xEE, np.uint8)
    words = [torch.from_numpy(x.view(np.uint32)) for x in (source, target)]
    launch(memory.build_moves(), *words, outputs=())
    return source, target


@pytest.mark.parametrize("index", [pytest.param(i, id=m.name) for i, m in enumerate(MOVES)])
def test_move(index: int) -> None:
    source, target = moved()
    want = np.full_like(target[index], 0xEE)
    expected = MOVES[index].expect(source[index])
    want[:, : expected.shape[1]] = expected
    np.testing.assert_array_equal(target[index], want)


def test_async_ring() -> None:
    source = torch.from_numpy(np.random.default_rng(1).integers(-99, 99, (9, 128))).float()
    target = torch.empty(10, 128)
    launch(memory.build_async_ring(), source, target, outputs=(target,))
    np.testing.assert_array_equal(target[:-1].numpy(), np.cumsum(source.numpy(), axis=0))
    np.testing.assert_array_equal(target[-1].numpy(), source[0].numpy())


@once
def bulk() -> tuple[NDArray[np.uint32], ...]:
    source, target = memory.bulk_inputs()
    before = target.copy()
    copy = torch.empty(len(REDUCTIONS), BULK, dtype=torch.uint32)
    tensors = (torch.from_numpy(source), torch.from_numpy(target), copy)
    launch(memory.build_bulk(), *tensors, outputs=(copy,))
    return source, before, target, copy.numpy()


@pytest.mark.parametrize("index", [pytest.param(i, id=r.suffix) for i, r in enumerate(REDUCTIONS)])
def test_bulk_reduction(index: int) -> None:
    source, before, after, _ = bulk()
    want = REDUCTIONS[index].expect(before[index], source[index])
    np.testing.assert_array_equal(after[index], want)


def test_bulk_copy() -> None:
    source, _, _, copy = bulk()
    np.testing.assert_array_equal(copy, source ^ np.uint32(0x55))


@once
def contended() -> tuple[NDArray[np.uint32], ...]:
    cells, operands = atomics.inputs()
    before = cells.copy()
    olds = torch.empty(len(ATOMS), atomics.THREADS, dtype=torch.uint64)
    tensors = (torch.from_numpy(cells), torch.from_numpy(operands), olds)
    launch(atomics.build(), *tensors, outputs=(olds,))
    return before, cells, operands, olds.numpy()


@pytest.mark.parametrize("index", [pytest.param(i, id=op.opcode) for i, op in enumerate(ATOMS)])
def test_atomic(index: int) -> None:
    before, after, operands, olds = (x[index] for x in contended())
    for cell in range(CELLS):
        mine = slice(cell, None, CELLS)
        assert atomics.consistent(
            ATOMS[index], before[cell], after[cell], operands[:, mine], olds[mine]
        ), (before[cell], after[cell], olds[mine])


def test_local_memory() -> None:
    index = np.random.default_rng(2).integers(0, 16, (8, 32), dtype=np.int32)
    result = torch.empty(32, dtype=torch.int32)
    launch(memory.build_local(), torch.from_numpy(index), result, outputs=(result,))
    np.testing.assert_array_equal(
        result.numpy(), (np.arange(1, 9)[:, None] * (index + 1)).sum(axis=0)
    )
