"""Attention on this machine's GPU against its peers: the script behind every claim about speed.

python -m hopwell bench --preset paper --pass both --out results/
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from ..interface import checks, env
from . import accuracy, host, plot, results
from .cells import FLOP_CONVENTION, FORWARD, PASSES, PRESETS, Cell, select
from .contenders import PEERS, Contender, contenders
from .results import Error, Rows, Speed, number
from .timing import PROTOCOL, Monitor, able, fits_in_l2, times

COLUMNS = 170  # of a table that goes to a file


def speed(cell: Cell, which: str, there: Sequence[Contender], monitor: Monitor) -> Speed:
    """Time a pass of those who can run a cell, and whose results are right.

    Args:
        cell: the problem.
        which: "fwd" or "bwd".
        there: the contestants.
        monitor: of the clock.
    """
    inputs = cell.inputs()
    calls = {one.name: one.call(inputs, cell.causal, which) for one in there}
    calls, absent = able(calls)
    wrong = accuracy.wrong(accuracy.errors(cell, inputs, calls, which))
    calls = {name: call for name, call in calls.items() if name not in wrong}
    cold = fits_in_l2(cell.bytes(which))
    monitor.take()  # what was noted before
    found = times(calls, cold=cold)
    return Speed(cell, found, which, {**absent, **wrong}, cold, *monitor.take())


def errors(cell: Cell, which: str, there: Sequence[Contender]) -> list[Error]:
    """RMS errors of a pass of those who can run a cell; arguments as for `speed`."""
    rows = []
    for name, outliers in accuracy.INPUTS.items():
        inputs = cell.inputs(outliers=outliers)
        calls, _ = able({one.name: one.call(inputs, cell.causal, which) for one in there})
        found = accuracy.errors(cell, inputs, calls, which)
        rows += [Error(cell, one.of, name, one.rms) for one in found]
    return rows


def extreme(rows: Rows, pick: Callable[..., Any]) -> str:
    """The cell with the smallest (`pick` = min) or largest ratio, in words."""
    known = [(row.ratio, str(row.cell)) for row in rows if row.ratio is not None]
    if not known:
        return "no cell that both we and a peer can run"
    value, cell = pick(known)
    return f"{'smallest' if pick is min else 'largest'} {value:.3f} at {cell}"


def speed_table(rows: Sequence[Speed], names: Sequence[str], title: str) -> Table:
    """TFLOP/s of each contestant and half of its interquartile range, and ours over the best
    peer's; '-' where one has no time."""
    table = _table(title, *names, "ours / best peer", "MHz", "W")
    for row in rows:
        table.add_row(
            f"{row.cell}{' cold' if row.cold else ''}",
            *(_tflops(row, name) for name in names),
            number(row.ratio, ".2f"),
            number(row.clock_mhz, ".0f"),
            number(row.power_w, ".0f"),
        )
    return table


def error_table(rows: Sequence[Error], names: Sequence[str], title: str) -> Table:
    """RMS error of each contestant, and ours over the best peer's; '-' where one cannot run."""
    table = _table(title, "of", "inputs", *names, "ours / best peer")
    for row in rows:
        values = [number(row.rms.get(name), ".3e") for name in names]
        table.add_row(str(row.cell), row.of, row.inputs, *values, number(row.ratio, ".3f"))
    return table


def missing(rows: Sequence[Speed]) -> list[str]:
    """A line for each contestant and reason for which it has no time, and in how many cells."""
    reasons = Counter(reason for row in rows for reason in row.absent.items())
    return [
        f"{name} has no time in {count} of {len(rows)} cells: {why}"
        for (name, why), count in reasons.items()
    ]


def _tflops(row: Speed, name: str) -> str:
    median = row.tflops(name)
    if median is None:
        return "-"
    spread = ((row.tflops(name, "low") or 0) - (row.tflops(name, "high") or 0)) / 2
    return f"{median:.0f} ± {spread:.0f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    table.add_column("batch x len x heads x head_dim", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError as problem:
        raise click.BadParameter(
            f"{text!r} needs to be whole numbers with commas between; pass 64,128 for instance",
            param=option,
        ) from problem


def _peers(_: click.Context, option: click.Parameter, text: str) -> list[str]:
    known = [peer.key for peer in PEERS]
    if unknown := [key for key in text.split(",") if key not in known]:
        raise click.BadParameter(
            f"{', '.join(unknown)!r} needs to be some of {', '.join(known)}, with commas between",
            param=option,
        )
    return text.split(",")


def _passes(_: click.Context, __: click.Parameter, text: str) -> list[str]:
    return list(PASSES) if text == "both" else [text]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--preset", type=click.Choice(list(PRESETS)), default="paper", show_default=True)
@click.option(
    "--pass",
    "passes",
    type=click.Choice([*PASSES, "both"]),
    default=FORWARD,
    show_default=True,
    callback=_passes,
    help="Backward alone is bwd.",
)
@click.option(
    "--peers",
    callback=_peers,
    default=",".join(peer.key for peer in PEERS if peer.default),
    show_default=True,
    help="Who takes part beside ours; there is flex too, which compiles for long.",
)
@click.option("--lengths", callback=_numbers, help="Only these: 1024,4096.")
@click.option("--head-dims", callback=_numbers, help="Only these: 64,128.")
@click.option("--accuracy", "accurate", is_flag=True, help="RMS errors in place of speed.")
@click.option("--host", "on_host", is_flag=True, help="Host time of a call in place of speed.")
@click.option("--out", "folder", type=click.Path(path_type=Path), help="Folder of results.")
@click.option("--commit", help="To note where git does not know it.")
def main(
    preset: str,
    passes: list[str],
    peers: list[str],
    lengths: tuple[int, ...],
    head_dims: tuple[int, ...],
    accurate: bool,
    on_host: bool,
    folder: Path | None,
    commit: str | None,
) -> None:
    """Measure attention on this machine's GPU beside cuDNN and FlashAttention 2, 3 and 4."""
    try:
        checks.gpu_to_measure()
    except RuntimeError as problem:
        raise click.ClickException(str(problem)) from problem
    console = Console()
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    env.configure_log()
    facts = results.about(torch.cuda.get_device_name(), commit)
    of_forward, uninstalled = contenders(FORWARD, peers)
    for name, why in uninstalled.items():
        console.print(f"{name} is left out: {why}", markup=False)
    if on_host:
        found = host.measure(of_forward)
        console.print(host.table(found))
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            noted = json.dumps({**facts, "host_us": found}, indent=1)
            (folder / results.JSON).write_text(noted + "\n")
        return
    cells = select(preset, lengths, head_dims)
    if not cells:
        raise click.ClickException(
            f"preset {preset} has no cell of these --lengths and --head-dims; leave one of them out"
        )
    facts |= {"preset": preset, "dtype": "bf16", "left_out": uninstalled}
    console.print(results.said(facts), markup=False)
    if not accurate:
        facts |= {"flop_convention": FLOP_CONVENTION, "protocol": PROTOCOL}
        console.print(f"{FLOP_CONVENTION}\n{PROTOCOL}", markup=False)
    rows: list[Any] = []
    with Monitor() as monitor:
        if monitor.absent and not accurate:
            console.print(monitor.absent, markup=False)
        for which in passes:
            there, _ = contenders(which, peers)
            of_pass: list[Any] = []
            for cell in cells:
                with console.status(str(cell)):
                    if accurate:
                        of_pass += errors(cell, which, there)
                    else:
                        of_pass.append(speed(cell, which, there, monitor))
                if folder:  # at once, since a later cell may be killed
                    results.write(folder, facts, [*rows, *of_pass])
            rows += of_pass
            draw = error_table if accurate else speed_table
            title = f"{PASSES[which]}, bf16, {'RMS error' if accurate else 'TFLOP/s'}"
            console.print(draw(of_pass, [one.name for one in there], title))
            for line in [] if accurate else missing(of_pass):
                console.print(line, markup=False)
            means = [f"{name} {mean:.3f}" for name, mean in results.means(of_pass).items()]
            console.print(f"geometric means of the ratio: {', '.join(means)}")
            console.print(extreme(of_pass, max if accurate else min), markup=False)
    if folder and not accurate:
        try:
            plot.bars(folder)
        except ImportError as problem:
            console.print(f"no bars are drawn: {problem}; install hopwell[plot]", markup=False)


if __name__ == "__main__":
    main()
