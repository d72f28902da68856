"""Hopper kernels in many shapes, for the cost model to predict and the H200 to be asked.

python -m hopwell.benchmarks.configurations --out FILE   times all of them on this machine's GPU

Half of them, evenly spread, may be used to fit the model (`fitted`); the others only to judge it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

from ..interface import compile as compiling
from ..interface.cache import Store
from ..interface.functions import backward_spec
from ..kernels import BackwardFacts, backward_workspace
from ..kernels.tiles import SHORT_LEN_Q, Tiles, forward_tiles
from . import tune
from .cells import BACKWARD, FORWARD, Cell
from .contenders import gradient_of_out
from .timing import Call, Monitor, times

ARCH = "sm_90a"
HOLD_S = 0.5  # of one kernel alone, for the clock that the card keeps


@dataclass(frozen=True)
class Configuration:
    """A kernel and a problem of 16,384 tokens; `change` is what differs from the table's row."""

    head_dim: int
    causal: bool
    length: int
    fitted: bool
    which: str = FORWARD
    change: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        changes = "".join(f", {name} {value}" for name, value in self.change)
        mask = "causal" if self.causal else "full"
        return f"{self.which} d {self.head_dim} {mask} {self.length}{changes}"

    @property
    def cell(self) -> Cell:
        heads = 2048 // self.head_dim
        tokens = 16384 // self.length
        return Cell(tokens, self.length, heads, heads, self.head_dim, self.head_dim, self.causal)

    @cached_property
    def tiles(self) -> Tiles:
        """Of forward."""
        short = self.causal and self.length <= SHORT_LEN_Q
        row = forward_tiles(ARCH, self.head_dim, self.head_dim, short)
        return replace(row, **dict(self.change))

    @property
    def backward_facts(self) -> BackwardFacts:
        return BackwardFacts("bfloat16", self.head_dim, self.head_dim, self.causal)

    def spec(self) -> compiling.Spec:
        """What to compile."""
        if self.which == BACKWARD:
            return backward_spec(ARCH, self.backward_facts)
        return tune.spec(self.tiles, self.causal)

    def call(self) -> Call:
        """On random inputs on the GPU."""
        inputs = self.cell.inputs()
        if self.which == BACKWARD:
            return self._backward(*inputs)
        return tune.call(self.tiles, inputs, self.causal)

    def _backward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        """With an O of noise, and about the LSE that scores from N(0, 1) have."""
        batch, length, heads, head_dim = q.shape
        facts, device = self.backward_facts, q.device
        rows = torch.full((batch, heads, length), float(length), device=device)
        if self.causal:
            rows = torch.arange(1.0, length + 1, device=device).expand_as(rows)
        lse = (rows.log() + 0.5).contiguous()
        size = backward_workspace(ARCH, facts, batch, heads, length)
        made = *(torch.empty_like(x) for x in (q, k, v)), torch.empty(size, device=device)
        launch, dout = compiling.launcher(self.spec()).call, gradient_of_out((q, k, v))
        tensors = dout, q, k, v, torch.randn_like(v), lse, *made
        sms = torch.cuda.get_device_properties().multi_processor_count
        return Call(lambda: launch(*tensors, 1 / math.sqrt(head_dim), False, sms))


def _change(**changes: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(changes.items())


_ONE = _change(stages_k=1, stages_v=1)
_THREE = _change(stages_k=3, stages_v=3)
_TWO_GROUPS = _change(consumer_warpgroups=2, registers_load=40, registers_consume=232)
_FREE = _change(ping_pong=False)
_TURNS = _change(ping_pong_full=True)
CONFIGURATIONS = (
    Configuration(64, False, 16384, True),
    Configuration(64, False, 4096, False),
    Configuration(64, False, 1024, False),
    Configuration(64, True, 16384, False),
    Configuration(64, True, 1024, True),
    Configuration(64, False, 4096, True, change=_TWO_GROUPS),
    Configuration(64, False, 4096, False, change=_FREE),
    Configuration(64, True, 4096, True, change=_THREE),
    Configuration(64, False, 4096, False, change=_ONE),
    Configuration(128, False, 16384, False, change=_TURNS),
    Configuration(128, False, 4096, True, change=_TURNS),
    Configuration(128, False, 1024, True, change=_TURNS),
    Configuration(128, True, 16384, True),
    Configuration(128, True, 2048, False),
    Configuration(128, False, 4096, False, change=_change(tile_kv=64) + _TURNS),
    Configuration(128, False, 4096, True, change=_change(tile_kv=112) + _TURNS),
    Configuration(128, False, 8192, False, change=_FREE),
    Configuration(128, False, 4096, True, change=_ONE + _TURNS),
    Configuration(256, False, 16384, True),
    Configuration(256, False, 1024, False),
    Configuration(256, True, 4096, False),
    Configuration(256, False, 4096, True, change=_change(tile_kv=64)),
    Configuration(64, False, 4096, True, BACKWARD),
    Configuration(64, True, 16384, False, BACKWARD),
    Configuration(64, False, 1024, False, BACKWARD),
    Configuration(128, False, 16384, True, BACKWARD),
    Configuration(128, True, 4096, False, BACKWARD),
    Configuration(128, False, 1024, True, BACKWARD),
    Configuration(256, False, 4096, False, BACKWARD),
    Configuration(256, True, 16384, True, BACKWARD),
)


def _build(configuration: Configuration, folder: str) -> None:
    compiling.save(configuration.spec(), Store(Path(folder)))


def _hold(call: Call, us: float) -> dict[str, float | None]:
    """Microseconds of a call when the card runs nothing else for long, its clock and its power."""
    with Monitor() as monitor, call.context():
        for kept in (False, True):
            monitor.take()
            begin, launches = time.perf_counter(), max(3, round(HOLD_S * 1e6 / us))
            for _ in range(launches):
                call.launch()
            torch.cuda.synchronize()
            passed = time.perf_counter() - begin
            if kept:
                mhz, watts = monitor.take()
                return {"held_us": 1e6 * passed / launches, "mhz": mhz, "watts": watts}
    raise AssertionError


def measure(configurations: tuple[Configuration, ...], jobs: int) -> list[dict[str, Any]]:
    """Microseconds of each, by the protocol and with the card held; those built in parallel."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            for built in [pool.submit(_build, one, folder) for one in configurations]:
                built.result()
        compiling.load(folder)
        for one in configurations:
            call = one.call()
            us = times({"hopwell": call})["hopwell"]
            row = {"name": one.name, **asdict(one), "us": us.median, "low": us.low, "high": us.high}
            rows.append({**row, **_hold(call, us.median)})
            click.echo(f"{one.name}: {us.median:.1f} us, held {rows[-1]['held_us']:.1f} us")
    return rows


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File for the JSON.")
@click.option("--jobs", default=os.cpu_count(), help="Compilers at once.")
def main(out: Path, jobs: int) -> None:
    """Time every configuration on this machine's GPU."""
    found = measure(CONFIGURATIONS, jobs)
    facts = {"gpu": torch.cuda.get_device_properties().name, "rows": found}
    out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
