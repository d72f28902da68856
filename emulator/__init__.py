"""Runs compiled CuTe-DSL kernels on a CPU, from their own PTX, and checks them while they run.

    report = emulator.run(compiled, q, k, v, o, lse, scale, outputs=(o, lse))

Knows nothing of attention: any function made by `cute.compile` runs, on CPU tensors.
"""

from .report import Counters, Finding, KernelFault, Options, Report
from .session import call, emulate, run, session

__all__ = [
    "Counters",
    "Finding",
    "KernelFault",
    "Options",
    "Report",
    "call",
    "emulate",
    "run",
    "session",
]
