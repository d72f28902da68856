"""Compile a test kernel once and launch it: on the emulator, or on a GPU to check the check.

With HOPWELL_TEST_ON_GPU=1 in the environment the very same tests run on the Hopper GPU of the
machine, which shows that what they expect of the emulator is what the hardware does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_compact_tensor
from hopwell import emulator

ON_GPU = os.environ.get("HOPWELL_TEST_ON_GPU") == "1"


def fake(dtype: Any, shape: Sequence[int], align: int = 16) -> cute.Tensor:
    """A row-major stand-in tensor to compile with. `align` in bytes."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, tuple(shape), stride_order=order, assumed_align=align)


def compile(function: Any, *args: Any) -> Any:
    """Compile a `cute.jit` function for sm_90a with the TVM-FFI calling convention."""
    if ON_GPU:
        return cute.compile(function, *args, options="--enable-tvm-ffi --gpu-arch sm_90a")
    return emulator.loader.compile(function, *args, arch="sm_90a", options="--enable-tvm-ffi")


def launch(compiled: Any, *args: Any, outputs: Sequence[torch.Tensor]) -> Any:
    """Run `compiled(*args)` to its end, in place; returns the emulator's Report (None on a GPU).

    `args` are CPU tensors and scalars; `outputs` are those tensors among them whose every byte
    the kernel writes (the emulator poisons them first).
    """
    if ON_GPU:
        moved = {id(a): a.cuda() for a in args if isinstance(a, torch.Tensor)}
        compiled(*(moved.get(id(a), a) for a in args))
        torch.cuda.synchronize()
        for a in args:
            if isinstance(a, torch.Tensor):
                a.copy_(moved[id(a)])
        return None
    return emulator.run(compiled, *args, outputs=outputs)
