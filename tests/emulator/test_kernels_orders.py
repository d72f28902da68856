"""Kernels that synchronise give the same, and raise nothing, whatever completes when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from . import test_kernels_control as control
from . import test_kernels_gemm as gemm
from . import test_kernels_memory as memory
from . import test_kernels_tma as tma
from .kernels.launch import ON_GPU, ordered
from .sm100 import run


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


# Warp 1 waits for the end of the phase before the first, which has ended unless it comes late.
LATE = """
    @!%p1 bra INITED;
    mbarrier.init.shared.b64 [smem], 1;
    INITED:
    bar.sync 0;
    @%p0 bra ARRIVES;
    WAITS:
    mbarrier.try_wait.parity.shared.b64 %p3, [smem], 1;
    @!%p3 bra WAITS;
    bra ENDS;
    ARRIVES:
    @%p1 mbarrier.arrive.shared.b64 %d4, [smem];
    ENDS:
"""


def test_in_random_order_some_warps_come_late() -> None:
    def found(**options: Any) -> set[str]:
        nothing = np.zeros(1, np.uint32)
        return {f.kind for f in run(LATE, nothing, nothing, threads=64, **options).findings}

    assert not found(order="eager") | found(order="deferred")
    assert set().union(*(found(order="random", seed=seed) for seed in range(8))) == {"deadlock"}


# Warp 0 asks for the phase before the first, warp 1 for the first.
TURNS = """
    @!%p1 bra INITED;
    mbarrier.init.shared.b64 [smem], 1;
    INITED:
    bar.sync 0;
    xor.b32 %r4, %r1, 1;
    mbarrier.test_wait.parity.shared.b64 %p3, [smem], %r4;
    selp.b32 %r5, 1, 0, %p3;
    mul.wide.u32 %d4, %r0, 4;
    add.s64 %d4, %d4, %d1;
    st.global.b32 [%d4], %r5;
"""


def test_warps_that_run_together_wait_for_phases_of_their_own() -> None:
    """In random order those of a warpgroup meet at one wait in different turns of a loop."""
    result = np.full(64, 2, np.uint32)
    assert not run(TURNS, np.zeros(1, np.uint32), result, threads=64).findings
    assert result.tolist() == [1] * 32 + [0] * 32
