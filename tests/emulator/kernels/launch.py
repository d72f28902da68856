"""Compile a test kernel once and launch it: on the emulator, or on a GPU to check the check.

With HOPWELL_TEST_ON_GPU=1 in the environment the very same tests run on the Hopper GPU of the
machine, which shows that what they expect of the emulator is what the hardware does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_compact_tensor

T = TypeVar("T")
ON_GPU = os.environ.get("HOPWELL_TEST_ON_GPU") == "1"
if not ON_GPU:
    from hopwell import emulator


_order: tuple[Any, int] = ("eager", 0)


@contextmanager
def ordered(order: str, seed: int = 0) -> Iterator[None]:
    """Within the block the emulator completes asynchronous work in this order."""
    global _order
    before, _order = _order, (order, seed)
    try:
        yield
    finally:
        _order = before


def once(function: Callable[[], T]) -> Callable[[], T]:
    """Call `function` the first time alone; later give its result, or raise what it raised."""
    outcome: list[T | Exception] = []

    @wraps(function)
    def wrapper() -> T:
        if not outcome:
            try:
                outcome.append(function())
            except Exception as error:
                outcome.append(error)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return wrapper


def fake(dtype: Any, shape: Sequence[int], align: int = 16) -> cute.Tensor:
    """A row-major stand-in tensor to compile with. `align` in bytes."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, tuple(shape), stride_order=order, assumed_align=align)


def compile(function: Any, *args: Any, arch: str = "sm_90a") -> Any:
    """Compile a `cute.jit` function for `arch` with the TVM-FFI calling convention."""
    if ON_GPU:
        return cute.compile(function, *args, options=f"--enable-tvm-ffi --gpu-arch {arch}")
    return emulator.loader.compile(function, *args, arch=arch, options="--enable-tvm-ffi")


def launch(compiled: Any, *args: Any, outputs: Sequence[torch.Tensor]) -> Any:
    """Run `compiled(*args)` to its end, in place; returns the emulator's Report (None on a GPU).

    `args` are CPU tensors and scalars; `outputs` are those tensors among them whose every byte
    the kernel writes (the emulator poisons them first).
    """
    if ON_GPU:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        hosts = [torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in tensors]
        devices = [h.cuda() for h in hosts]  # whole storages: gaps between rows travel too
        views = iter(
            [
                d.as_strided(t.shape, t.stride(), t.storage_offset())
                for d, t in zip(devices, tensors, strict=True)
            ]
        )
        compiled(*(next(views) if isinstance(a, torch.Tensor) else a for a in args))
        torch.cuda.synchronize()
        for host, device in zip(hosts, devices, strict=True):
            host.copy_(device)
        return None
    return emulator.run(
        compiled, *args, outputs=outputs, options=emulator.Options(order=_order[0], seed=_order[1])
    )
