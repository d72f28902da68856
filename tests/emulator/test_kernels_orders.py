"""Kernels that synchronise give the same, and raise nothing, whatever completes when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from . import test_kernels_control as control
from . import test_kernels_gemm as gemm
from . import test_kernels_memory as memory
from . import test_kernels_tma as tma
from .kernels.launch import ON_GPU, ordered


def bulk() -> None:
    source, before, after, copy = memory.bulk.__wrapped__()
    for i, reduction in enumerate(memory.REDUCTIONS):
        np.testing.assert_array_equal(after[i], reduction.expect(before[i], source[i]))
    np.testing.assert_array_equal(copy, source ^ np.uint32(0x55))


KERNELS: dict[str, Callable[[], object]] = {
    "ping-pong": control.test_ping_pong,
    "barrier reductions": control.test_barrier_reductions,
    "mbarrier": control.test_mbarrier,
    "cp.async ring": memory.test_async_ring,
    "bulk": bulk,
    "exchange": tma.test_exchange,
    "multicast": tma.test_multicast,
    "swizzled tile": partial(tma.test_swizzle, "128B", 45, 72, {}),
    "three dimensions": partial(tma.test_dimensions, 3),
    "reduction": partial(tma.test_reduction, "add.f32"),
    "gemm": partial(gemm.test_gemm, gemm.GEMMS[0]),
    "gemm, A in registers": partial(gemm.test_gemm, next(g for g in gemm.GEMMS if g.registers)),
}


@pytest.mark.skipif(ON_GPU, reason="a GPU has its own order")
@pytest.mark.parametrize("order", ["deferred", "random"])
@pytest.mark.parametrize("name", KERNELS)
def test_order(name: str, order: str) -> None:
    for seed in range(1 if order == "deferred" or "gemm" in name else 3):
        with ordered(order, seed):
            KERNELS[name]()
