"""Kernels compiled once for all tests of a process."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import cutlass.cute as cute

from hopwell.kernels import ForwardFacts, forward_kernel
from hopwell.kernels.fwd_sm90 import FwdSm90
from hopwell.kernels.tiles import Tiles

CAUSAL = ForwardFacts("bfloat16", 128, 128, causal=True)
# Rows that the table does not have yet, and the same kernel takes.
COMING = [
    Tiles("sm_90a", 64, 64, 128, 3, 2, 2, 32, 160, True, reason="three consumer warpgroups"),
    Tiles("sm_90a", 192, 128, 112, 2, 2, 2, 24, 240, True, reason="head_dim_v < head_dim"),
    Tiles("sm_90a", 80, 80, 112, 2, 1, 1, 24, 240, True, reason="one stage, no power of two"),
    Tiles("sm_90a", 40, 72, 96, 2, 2, 2, 24, 240, False, reason="padded, head_dim_v > head_dim"),
]


class Compiled(NamedTuple):
    kernel: FwdSm90
    call: Callable[..., None]
    ptx: str
    cubin: bytes

    def count(self, pattern: str) -> int:
        """Instructions of the PTX that match."""
        return len(re.findall(pattern, self.ptx))


def facts_of(tiles: Tiles) -> ForwardFacts:
    """Causal, at the head dims of a row."""
    return replace(CAUSAL, head_dim=tiles.head_dim, head_dim_v=tiles.head_dim_v)


@cache
def build(facts: ForwardFacts, tiles: Tiles | None = None) -> Compiled:
    """The kernel of these facts, from the table or from a row of its own."""
    kernel, arguments, options = forward_kernel("sm_90a", CAUSAL if tiles else facts)
    if tiles:
        kernel = FwdSm90(facts, tiles)
        arguments = kernel.fake_arguments()
    with tempfile.TemporaryDirectory() as folder:
        options += f" --generate-line-info --keep-ptx --keep-cubin --dump-dir {folder}"
        compiled = cute.compile(kernel, *arguments, options=options)
    return Compiled(kernel, compiled, compiled.artifacts.PTX, compiled.artifacts.CUBIN)
