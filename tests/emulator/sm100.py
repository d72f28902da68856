"""Kernels for tensor memory in hand-written PTX, and what runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopwell.emulator.loader import Launch
from hopwell.emulator.machine import Machine
from hopwell.emulator.memory import Extent, GlobalMemory
from hopwell.emulator.report import Options

THREADS = 128

# %r0 thread, %r1 warp, %r2 address of tensor memory, %r3 the same for the warp's own lanes,
# %d0, %d1 source and result, %d2, %d3 the thread's own places in them.
HEAD = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry test(.param .u64 source, .param .u64 result)
{
    .reg .pred %p<16>;
    .reg .b16 %h<8>;
    .reg .b32 %r<32>;
    .reg .b32 %v<260>;
    .reg .b64 %d<16>;
    .shared .align 1024 .b8 smem[16384];
    mov.u32 %r0, %tid.x;
    shr.u32 %r1, %r0, 5;
    setp.eq.u32 %p0, %r1, 0;
    setp.eq.u32 %p1, %r0, 0;
    ld.param.u64 %d0, [source];
    ld.param.u64 %d1, [result];
"""
ALLOC = """
    @!%p0 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 512;
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r2, [smem];
    and.b32 %r3, %r0, 96;
    shl.b32 %r3, %r3, 16;
    add.u32 %r3, %r3, %r2;
"""
FREE = """
    bar.sync 0; // all have read
    @!%p0 bra FREED;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;
FREED:
"""
TAIL = """
    ret;
}
"""


def vector(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%v{first + i}" for i in range(count)) + "}"


def run(
    body: str,
    source: NDArray[Any],
    result: NDArray[Any],
    cluster: int = 1,
    threads: int = THREADS,
    **options: Any,
) -> Machine:
    """Runs HEAD, body and TAIL, by one cluster."""
    pointers = (ctypes.c_uint64 * 2)(source.ctypes.data, result.ctypes.data)
    first = ctypes.addressof(pointers)
    size = (cluster, 1, 1)
    launch = Launch(HEAD + body + TAIL, "test", size, (threads, 1, 1), size, 0, (first, first + 8))
    memory = GlobalMemory(
        Extent(name, array.ctypes.data, array.shape, array.strides, array.itemsize)
        for name, array in (("source", source), ("result", result))
    )
    made = Machine(launch, memory, Options(**options))
    made.run()
    return made


def layout(shape: Sequence[int], strides: Sequence[int]) -> NDArray[np.int64]:
    """The offsets of a CuTe layout, its first mode fastest."""
    offsets = np.zeros(1, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        offsets = (np.arange(extent)[:, None] * stride + offsets).ravel()
    return offsets
