"""Which tiles are fastest: rows of the table beside their neighbours, on this machine's GPU.

python -m hopwell tune --head-dims 64,192/128 --lengths 1024,4096,16384
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from ..interface import checks
from ..interface import compile as compiling
from ..interface.cache import Store
from ..kernels import ForwardFacts, forward_function
from ..kernels.tiles import FORWARD, SHORT_LEN_Q, Tiles
from .cells import HIDDEN, Cell, of_tokens
from .timing import Call, times

ROW = "row"  # what the table has
CONSUMERS = {2: (40, 232), 3: (32, 160)}  # warpgroups: registers of (load, consume)


def neighbours(row: Tiles) -> dict[str, Tiles]:
    """The row and, by what is changed, those one change away from it that an SM can run."""
    stages = {
        f"{count} stages of K and V": {"stages_k": count, "stages_v": count} for count in (1, 2, 3)
    }
    widths = {f"tile_kv {kv}": {"tile_kv": kv} for kv in range(row.tile_kv - 48, 257, 16)}
    groups = {
        f"{count} warpgroups": {
            "consumer_warpgroups": count,
            "registers_load": load,
            "registers_consume": consume,
        }
        for count, (load, consume) in CONSUMERS.items()
    }
    changes: dict[str, dict[str, Any]] = {
        ROW: {},
        "turns": {"ping_pong": True, "ping_pong_full": None},
        "no turns": {"ping_pong": False, "ping_pong_full": None},
        f"{3 - row.stages_q} stages of Q": {"stages_q": 3 - row.stages_q},
        **stages,
        **widths,
        **groups,
    }
    found: dict[str, Tiles] = {}
    for name, change in changes.items():
        with contextlib.suppress(ValueError):  # more than an SM has
            if (tiles := replace(row, **change)) not in found.values():
                found[name] = tiles
    return found


def spec(tiles: Tiles, causal: bool) -> compiling.Spec:
    """The kernel of these tiles, bf16."""
    facts = ForwardFacts("bfloat16", tiles.head_dim, tiles.head_dim_v, causal, short=tiles.short)
    fixed = {**asdict(tiles), **asdict(facts)}
    return compiling.Spec(
        "tune",
        tiles.arch,
        tuple(sorted(fixed.items())),
        lambda: forward_function(tiles.arch, facts, tiles),
    )


def build(tiles: Tiles, causal: bool, folder: str) -> int:
    """Compile into a folder; returns the bytes that spill."""
    entry = compiling.save(spec(tiles, causal), Store(Path(folder)))
    return sum(used["local_bytes"] for used in entry.facts["resources"].values())


def cell(tiles: Tiles, length: int, causal: bool) -> Cell:
    """16,384 tokens of hidden size 2048."""
    heads = HIDDEN // tiles.head_dim
    return of_tokens(length, heads, tiles.head_dim, tiles.head_dim_v, causal)


def call(tiles: Tiles, inputs: Sequence[torch.Tensor], causal: bool) -> Call:
    """A launch on q, k, v as `Cell.inputs` makes them."""
    q, k, v = inputs
    batch, length, heads, head_dim = q.shape
    out = torch.empty(batch, length, heads, v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, device=q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch = compiling.launcher(spec(tiles, causal)).call
    return Call(lambda: launch(q, k, v, out, lse, 1 / math.sqrt(head_dim), counter, False))


def table(
    row: Tiles, found: Mapping[str, Mapping[Cell, float]], spilled: Mapping[str, int]
) -> Table:
    """Speed over the row's in each cell; what spills is named, not measured."""
    cells = list(found[ROW])
    drawn = Table(title=f"head_dim {row.head_dim}/{row.head_dim_v}: speed over the row's")
    drawn.add_column("change")
    for one in cells:
        drawn.add_column(f"{one.length} {'causal' if one.causal else 'full'}", justify="right")
    for name, us in found.items():
        ratios = [f"{found[ROW][one] / us[one]:.3f}" if one in us else "-" for one in cells]
        drawn.add_row(name, *ratios)
    for name, size in spilled.items():
        drawn.add_row(name, f"spills {size} bytes")
    return drawn


def measure(row: Tiles, lengths: Sequence[int], jobs: int) -> Table:
    """Build a row's neighbours, each in a process of its own, and time them in turn."""
    there = neighbours(row)
    masks = (True,) if row.short else (False, True)
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            started = {
                (name, causal): pool.submit(build, tiles, causal, folder)
                for name, tiles in there.items()
                for causal in masks
            }
            sizes = {key: future.result() for key, future in started.items()}
        spilled = {name: size for (name, _), size in sizes.items() if size}
        compiling.load(folder)
        found: dict[str, dict[Cell, float]] = {name: {} for name in there if name not in spilled}
        for causal in masks:
            for length in lengths:
                if row.short and length > SHORT_LEN_Q:
                    continue
                one = cell(row, length, causal)
                inputs = one.inputs()
                calls = {name: call(there[name], inputs, causal) for name in found}
                for name, us in times(calls).items():
                    found[name][one] = us.median
    return table(row, found, spilled)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--head-dims", default="", help="Rows up to these only: 64,192/128.")
@click.option("--lengths", default="1024,4096,16384", show_default=True)
@click.option("--jobs", default=os.cpu_count(), show_default=True, help="Compilers at once.")
def main(head_dims: str, lengths: str, jobs: int) -> None:
    """Time each row of the tile table beside its neighbours on this machine's GPU."""
    try:
        checks.gpu_to_measure()
    except RuntimeError as problem:
        raise click.ClickException(str(problem)) from problem
    wanted = set(filter(None, head_dims.split(",")))
    for row in FORWARD:
        name = "/".join(map(str, dict.fromkeys((row.head_dim, row.head_dim_v))))
        if not wanted or name in wanted:
            Console().print(measure(row, [int(length) for length in lengths.split(",")], jobs))
