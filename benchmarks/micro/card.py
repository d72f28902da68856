"""PTX text on this machine's GPU, by the driver alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

from .kernels import Kernel


def _done(result: tuple[Any, ...]) -> Any:
    """What a call of the driver returned. RuntimeError if it failed."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"{name.decode() if isinstance(name, bytes) else name}")
    return values[0] if len(values) == 1 else values


class Loaded:
    """A kernel on the GPU."""

    def __init__(self, ptx: str, entry: str, threads: int, smem: int) -> None:
        torch.cuda.init()
        torch.empty(1, device="cuda")  # the context
        self.threads, self.smem = threads, smem
        self.module = _done(driver.cuModuleLoadData(ptx.encode() + b"\0"))
        self.function = _done(driver.cuModuleGetFunction(self.module, entry.encode()))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _done(driver.cuFuncSetAttribute(self.function, most, smem))

    def launch(self, ctas: int, arguments: Sequence[bytes]) -> None:
        """Starts it, with parameters as bytes, on torch's stream."""
        held = [ctypes.create_string_buffer(a, len(a)) for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        stream = torch.cuda.current_stream().cuda_stream
        grid, block = (ctas, 1, 1), (self.threads, 1, 1)
        launch = (self.function, *grid, *block, self.smem, stream, ctypes.addressof(pointers), 0)
        _done(driver.cuLaunchKernel(*launch))


def word(value: int) -> bytes:
    """A 64-bit parameter."""
    return value.to_bytes(8, "little")


def run(
    kernel: Kernel, ctas: int = 1, data: torch.Tensor | None = None, rounds: int = 3
) -> list[list[int]]:
    """The clocks that each CTA wrote, in the last of some launches."""
    loaded = Loaded(kernel.ptx, "micro", kernel.threads, kernel.smem)
    results = torch.zeros(ctas, max(1, kernel.results), dtype=torch.int64, device="cuda")
    size = 0 if data is None else data.numel() * data.element_size()
    at = 0 if data is None else data.data_ptr()
    for _ in range(rounds):
        loaded.launch(ctas, [word(results.data_ptr()), word(at), word(size)])
    torch.cuda.synchronize()
    return results.tolist()
