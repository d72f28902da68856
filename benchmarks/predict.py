"""The time of a whole kernel, from the emulator's run of a little of it.

A CTA's clocks are taken to be linear: a beginning, so much a tile, and so much a step of its loop.
Two or three small problems on the emulator, replayed by `emulator.cost`, give these; the tiles of
the problem asked for go to the SMs in the kernel's own order, each to the one that is free first.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from .. import emulator
from ..emulator import loader
from ..emulator.cost import Gpu, Replay, replay
from ..emulator.recording import Recording
from ..kernels import (
    BackwardFacts,
    BlackwellFacts,
    ForwardFacts,
    backward_function,
    backward_workspace,
    forward_kernel,
)
from ..kernels.tiles import BackwardTiles, Tiles, backward_tiles, blackwell_tiles, forward_tiles
from ..kernels.tiles_bwd_sm100 import BlackwellBackwardTiles, blackwell_backward_tiles
from ..layouts.hardware import L2_BYTES, UMMA_ROWS
from .cells import BACKWARD, FORWARD, Cell

# Steps of the loop, and tiles of one CTA, in the runs that the line is put through. On Blackwell
# the maximum lags once l is large, so that after the first steps O is corrected at few of them.
STEPS, TILES = (6, 12), (2, 4)
STEPS_BLACKWELL, TILES_BLACKWELL = (10, 18), (1, 2)
# Rates that the replay does not use.
_AROUND = ("unseen", "launch_us", "clock_mhz", "busy_mhz", "busy_free", "dram_bytes")


@dataclass(frozen=True)
class Kernel:
    """A kernel by all that decides its schedule."""

    arch: str
    which: str
    head_dim: int
    causal: bool
    tiles: Tiles | None = None  # in place of the table's row; Hopper's forward alone
    pair: bool = False  # forward's; backward's table says it of itself

    @property
    def rows(self) -> int:
        """Of a tile that a CTA, or a pair, takes at a time: of queries, in backward of keys."""
        if self.which == BACKWARD:
            return self._backward.tile_kv
        if self.arch == "sm_90a":
            return self._hopper.tile_q
        row = blackwell_tiles(self.arch, self.head_dim, self.head_dim, self.pair)
        return UMMA_ROWS * row.q_tiles * row.ctas

    @property
    def step(self) -> int:
        """Rows of a step of the loop: of keys, in backward of queries."""
        if self.which == BACKWARD:
            return self._backward.tile_q
        return self._hopper.tile_kv if self.arch == "sm_90a" else 128

    @property
    def _hopper(self) -> Tiles:
        return self.tiles or forward_tiles(self.arch, self.head_dim, self.head_dim)

    @property
    def _backward(self) -> BackwardTiles | BlackwellBackwardTiles:
        rows = backward_tiles if self.arch == "sm_90a" else blackwell_backward_tiles
        return rows(self.arch, self.head_dim, self.head_dim)

    @property
    def ctas(self) -> int:
        """That work on a tile together."""
        if self.which == BACKWARD:
            return self._backward.ctas
        return 2 if self.pair else 1


@dataclass(frozen=True)
class Line:
    """Clocks of an SM: `start` once, `tile` for each tile, `step` for each step of its loop."""

    start: float
    tile: float
    step: float
    tensor: float  # clocks of the tensor cores of a step

    def of(self, tiles: int, steps: int) -> float:
        return self.start + tiles * self.tile + steps * self.step


@dataclass(frozen=True)
class Prediction:
    """Of one launch, modelled: microseconds, and what they are made of."""

    us: float
    clocks: float
    mhz: float
    tensor: float  # share of the clocks that the tensor cores of the average SM are busy
    line: Line


@contextlib.contextmanager
def _one_cta(module: ModuleType, name: str, ctas: int) -> Iterator[None]:
    """Kernels compiled within launch so many CTAs, however many tiles there are."""
    kept = getattr(module, name)
    setattr(module, name, ctas)
    try:
        yield
    finally:
        setattr(module, name, kept)


@lru_cache(maxsize=64)
def _compiled(kernel: Kernel) -> Callable[..., None]:
    import cutlass.cute as cute

    dims = "bfloat16", kernel.head_dim, kernel.head_dim, kernel.causal
    with loader.device(kernel.arch), contextlib.ExitStack() as stack:
        if kernel.which == BACKWARD:
            function, arguments, options = backward_function(kernel.arch, BackwardFacts(*dims))
        elif kernel.arch == "sm_90a":
            from ..kernels import fwd_sm90

            stack.enter_context(_one_cta(fwd_sm90, "SMS", 1))
            facts = ForwardFacts(*dims)
            function, arguments, options = forward_kernel(kernel.arch, facts, kernel.tiles)
        else:
            from ..kernels import fwd_sm100

            stack.enter_context(_one_cta(fwd_sm100, "SMS_BLACKWELL", kernel.ctas))
            facts = BlackwellFacts(*dims, pair=kernel.pair)
            function, arguments, options = forward_kernel(kernel.arch, facts)
        options += " --generate-line-info --keep-ptx"
        return cute.compile(function, *arguments, options=options)


@lru_cache(maxsize=256)
def record(kernel: Kernel, tiles: int, steps: int) -> list[Recording]:
    """The CTAs, on the emulator, that do so many tiles, one after the other, of so many steps."""
    random, dim = torch.Generator().manual_seed(0), kernel.head_dim
    compiled = _compiled(kernel)

    def normal(length: int, heads: int) -> torch.Tensor:
        return torch.randn(1, length, heads, dim, generator=random).to(torch.bfloat16)

    options = emulator.Options(check=False, counters=False, record=True)
    with loader.device(kernel.arch), emulator.session(options) as session:
        if kernel.which == BACKWARD:
            length = steps * kernel.step
            q, k, v, out, dout = (normal(length, 1) for _ in range(5))
            made = [torch.empty_like(q) for _ in range(3)]
            lse = torch.full((1, 1, length), math.log(length))
            facts = BackwardFacts("bfloat16", dim, dim, kernel.causal)
            workspace = torch.empty(backward_workspace(kernel.arch, facts, 1, 1, length))
            scalars = workspace, dim**-0.5, False, 1 << 10
            session.call(compiled, dout, q, k, v, out, lse, *made, *scalars)
        else:
            q, out = normal(kernel.rows, tiles), normal(kernel.rows, tiles)
            k, v = normal(steps * kernel.step, tiles), normal(steps * kernel.step, tiles)
            lse = torch.empty(1, tiles, kernel.rows)
            counter = torch.zeros(1, dtype=torch.int32)
            session.call(compiled, q, k, v, out, lse, dim**-0.5, counter)
    ctas = max(session.report.recordings, key=lambda made: made[0].launch_smem)
    return [one for one in ctas if one.cluster == ctas[0].cluster]


def replayed(kernel: Kernel, gpu: Gpu, tiles: int, steps: int) -> Replay:
    """The same in modelled time."""
    return replay(record(kernel, tiles, steps), gpu)


_lines: dict[tuple[Kernel, str, tuple[float, ...]], Line] = {}


def line(kernel: Kernel, gpu: Gpu) -> Line:
    """Put through small problems, each replayed once for the same rates."""
    rates = tuple(v for k, v in vars(gpu).items() if isinstance(v, float) and k not in _AROUND)
    key = kernel, gpu.name, rates
    if key not in _lines:
        _lines[key] = _line(kernel, gpu)
    return _lines[key]


def steps_of(kernel: Kernel) -> tuple[int, int]:
    """Of the runs that a kernel's line is put through."""
    lags = kernel.arch != "sm_90a" and kernel.which == FORWARD
    return STEPS_BLACKWELL if lags else STEPS


def _line(kernel: Kernel, gpu: Gpu) -> Line:
    few, many = steps_of(kernel)
    lane = "cta 0 tensor" if kernel.ctas > 1 else "tensor"
    if kernel.which == BACKWARD:
        a, b = (replayed(kernel, gpu, 1, steps) for steps in (few, many))
        step = (b.clocks - a.clocks) / (many - few)
        tensor = (b.busy(lane) - a.busy(lane)) / (many - few)
        return Line(0.0, a.clocks - few * step, step, tensor)
    first, second = TILES if kernel.arch == "sm_90a" else TILES_BLACKWELL
    a, b = replayed(kernel, gpu, first, few), replayed(kernel, gpu, second, few)
    c = replayed(kernel, gpu, first, many)
    steps = first * (many - few)
    step = (c.clocks - a.clocks) / steps
    tensor = (c.busy(lane) - a.busy(lane)) / steps
    tile = (b.clocks - a.clocks) / (second - first) - few * step
    return Line(a.clocks - first * (tile + few * step), tile, step, tensor)


def _steps(kernel: Kernel, cell: Cell) -> list[int]:
    """Steps of every tile of the problem, in the kernel's order."""
    tiles = -(-cell.length // kernel.rows)
    sequences = cell.batch * cell.heads
    all_steps = -(-cell.length // kernel.step)
    if not cell.causal:
        return [all_steps] * (tiles * sequences)
    if kernel.which == BACKWARD:
        of_tile = [all_steps - i * kernel.rows // kernel.step for i in range(tiles)]
    else:
        ends = (min(cell.length, (i + 1) * kernel.rows) for i in range(tiles))
        of_tile = [-(-end // kernel.step) for end in ends][::-1]
    section = max(1, L2_BYTES // (2 * 2 * kernel.head_dim * cell.length))
    order: list[int] = []
    for first in range(0, sequences, section):
        width = min(section, sequences - first)
        order += [steps for steps in of_tile for _ in range(width)]
    return order


def _makespan(clocks: Sequence[float], workers: int) -> float:
    """When the last is done, if each goes to the worker that is free first."""
    free = [0.0] * workers
    for one in clocks:
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def predict(kernel: Kernel, cell: Cell, gpu: Gpu) -> Prediction:
    """A launch of the kernel on the problem, on the whole GPU."""
    found, order = line(kernel, gpu), _steps(kernel, cell)
    workers = gpu.sms // kernel.ctas
    each = [found.of(1, n) - found.start for n in order]
    clocks = gpu.unseen * (found.start + _makespan(each, workers))
    busy = sum(order) * found.tensor / workers / clocks
    mhz = gpu.mhz(busy)
    us = max(clocks / mhz, cell.bytes(kernel.which) / (1e-3 * gpu.dram_bytes) * 1e-6)
    us += gpu.launch_us
    if kernel.which == BACKWARD:
        us += _around(cell, gpu)
    return Prediction(us, clocks, mhz, busy, found)


def _around(cell: Cell, gpu: Gpu) -> float:
    """Microseconds of the kernels before and behind backward's main one, which move bytes."""
    elements = cell.batch * cell.heads * cell.length * cell.head_dim
    moved = elements * (2 + 2 + 4) + elements * (4 + 2)  # O, dO, zeros for dQ; dQ and its cast
    return moved / (1e3 * gpu.dram_bytes) + 2 * gpu.launch_us


__all__ = [
    "BACKWARD",
    "FORWARD",
    "Kernel",
    "Line",
    "Prediction",
    "line",
    "predict",
    "record",
    "steps_of",
]
