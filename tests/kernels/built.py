"""Kernels compiled once for all tests of a process."""

import re
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import cutlass.cute as cute

from hopwell.interface.cubin import usage
from hopwell.kernels import BlackwellFacts, ForwardFacts, forward_kernel
from hopwell.kernels.fwd_sm90 import FwdSm90
from hopwell.kernels.fwd_sm100 import FwdSm100
from hopwell.kernels.tiles import Tiles
from hopwell.layouts.hardware import registers_at_entry

CAUSAL = ForwardFacts("bfloat16", 128, 128, causal=True)


class Compiled(NamedTuple):
    kernel: FwdSm90
    call: Callable[..., None]
    ptx: str
    cubin: bytes

    def count(self, pattern: str) -> int:
        """Instructions of the PTX that match."""
        return len(re.findall(pattern, self.ptx))


@cache
def build(facts: ForwardFacts, tiles: Tiles | None = None) -> Compiled:
    """The kernel of these facts, from the table or from a row of its own."""
    kernel, arguments, options = forward_kernel("sm_90a", facts, tiles)
    assert isinstance(kernel, FwdSm90)
    return Compiled(kernel, *compiled(kernel, arguments, options))


class CompiledBlackwell(NamedTuple):
    kernel: FwdSm100
    call: Callable[..., None]
    ptx: str
    cubin: bytes


@cache
def build_blackwell(facts: BlackwellFacts, arch: str = "sm_100a") -> CompiledBlackwell:
    """The kernel of these facts, from the table."""
    kernel, arguments, options = forward_kernel(arch, facts)
    assert isinstance(kernel, FwdSm100)
    return CompiledBlackwell(kernel, *compiled(kernel, arguments, options))


def compiled(
    kernel: Callable[..., None], arguments: tuple[Any, ...], options: str
) -> tuple[Callable[..., None], str, bytes]:
    """The function, its PTX and its cubin."""
    with tempfile.TemporaryDirectory() as folder:
        options += f" --generate-line-info --keep-ptx --keep-cubin --dump-dir {folder}"
        made = cute.compile(kernel, *arguments, options=options)
    return made, made.artifacts.PTX, made.artifacts.CUBIN


def check_registers(compiled: Compiled) -> None:
    """Nothing is spilled, and the registers at entry are there."""
    (used,) = usage(compiled.cubin).values()
    assert used.local_bytes == used.local_instructions == 0
    assert used.registers <= registers_at_entry(compiled.kernel.tiles.threads)
    assert used.product_waits == compiled.count(r"wgmma\.wait_group\.")  # else: serialised
    assert ".local" not in compiled.ptx
    # 16-bit operands live in pairs; packed late, they are touched between fence and product.
    assert compiled.count(r"mov\.b32\s+%r\d+, \{%rs") == 0
