"""Divergence, barriers, timers and special registers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from .kernels import control, sync
from .kernels.launch import launch, once


@once
def diverged() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    shape = (control.CTAS, control.THREADS)
    x = np.random.default_rng(1).integers(1, 3000, shape, dtype=np.int32)
    result = torch.empty(len(control.RESULTS), *shape, dtype=torch.int32)
    launch(control.build(), torch.from_numpy(x), result, outputs=(result,))
    return x, result.numpy()


@pytest.mark.parametrize(
    "row", range(len(control.RESULTS)), ids=lambda i: control.RESULTS[i].__name__
)
def test_divergent(row: int) -> None:
    x, result = diverged()
    want = np.vectorize(control.RESULTS[row], otypes=[np.int64])(x)
    np.testing.assert_array_equal(result[row].astype(np.uint32), want.astype(np.uint32))


def test_ping_pong() -> None:
    start = torch.arange(128, dtype=torch.int32) - 50
    result = torch.empty(128, dtype=torch.int32)
    launch(sync.build_ping_pong(), start, result, outputs=(result,))
    value = start.numpy().astype(np.int64)
    for turn in range(2 * sync.ROUNDS):
        value = 3 * value + turn
    np.testing.assert_array_equal(result.numpy(), value.astype(np.int32))


def test_barrier_reductions() -> None:
    x = np.random.default_rng(3).integers(0, 101, 128, dtype=np.uint32)
    result = torch.empty(4, 128, dtype=torch.uint32)
    launch(sync.build_reductions(), torch.from_numpy(x), result, outputs=(result,))
    above = x > 40
    want = [np.full(128, v) for v in (above.sum(), above.all(), (x > 100).any())]
    want.append(x[np.arange(128) ^ 32])
    np.testing.assert_array_equal(result.numpy(), np.stack(want).astype(np.uint32))


def test_mbarrier() -> None:
    result = torch.empty(sync.MBARRIER_STEPS, dtype=torch.uint32)
    source = torch.zeros(8, dtype=torch.uint32)
    launch(sync.build_mbarrier(), source, result, outputs=(result,))
    assert result.tolist() == [0, 1, 1, 0, 0, 1, 1]


def test_timers() -> None:
    data = torch.from_numpy(np.arange(32, dtype=np.uint32))
    times = torch.empty(6, 32, dtype=torch.uint64)
    launch(sync.build_timers(), data, times, outputs=(times,))
    assert data.tolist() == list(range(1, 33))
    clock, clock64, timer = times.numpy().astype(np.int64).reshape(3, 2, 32)
    assert ((clock[1] - clock[0]) % (1 << 32) < 1 << 31).all()
    assert (clock64[1] > clock64[0]).all()
    assert (timer[1] >= timer[0]).all()


def test_special_registers() -> None:
    block, grid = sync.BLOCK, sync.GRID
    threads, ctas = int(np.prod(block)), int(np.prod(grid))
    result = torch.empty(ctas, threads, len(sync.SPECIAL) + 1, dtype=torch.uint32)
    launch(sync.build_special(), result, outputs=(result,))
    thread = np.arange(threads)
    cta = np.arange(ctas)[:, None]
    tid = np.unravel_index(thread, block, order="F")
    ctaid = np.unravel_index(cta, grid, order="F")
    columns = [*tid, *block, *ctaid, *grid, thread % 32, 2048]
    for i, want in enumerate(columns):
        got = result[:, :, i].numpy()
        np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape), str(i))
