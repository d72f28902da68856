"""SM versions, and the kind of host a compiled object can run on."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

# What each x86-64 level adds, from the psABI, as far as LLVM uses it in straight-line host code.
_X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("x86-64-v2", {"cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    ("x86-64", set[str]()),
)


@cache
def hosts() -> tuple[str, ...]:
    """Host kinds whose objects run here, best first: the compiler emits code for the best one.

    A cache folder may be shared by machines of different age (a home directory on a cluster), and
    the DSL compiles its host code for the processor it runs on.
    """
    if platform.machine() != "x86_64":
        return (platform.machine(),)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    levels = [level for level, _ in _X86_LEVELS]
    best = next(
        i for i in range(len(_X86_LEVELS)) if all(needed <= flags for _, needed in _X86_LEVELS[i:])
    )
    return tuple(levels[best:])
