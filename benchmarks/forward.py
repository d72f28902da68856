"""Attention on this machine's GPU against its peers: the script behind every claim about speed.

python -m hopwell bench --preset grid --json results.json
python -m hopwell bench --backward --preset grid
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from ..interface import checks, env
from . import accuracy, host
from .cells import PRESETS, Cell, select
from .contenders import OURS, ROUNDS, Backward, contenders, times

PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "fa3-fwd")


@dataclass(frozen=True)
class Row:
    """What was measured in one cell: microseconds, or RMS errors, of those who can run it."""

    cell: Cell
    inputs: str  # a key of accuracy.INPUTS; plain ones where time is measured
    values: Mapping[str, float]
    of: str = "out"  # what was measured: O and its pass; "gradients"; or one gradient's error

    @property
    def flops(self) -> float:
        """Of the pass that was timed."""
        return self.cell.flops if self.of == "out" else self.cell.backward_flops

    def tflops(self, name: str) -> float | None:
        """TFLOP/s of a contender whose value is a time; None if it cannot run the cell."""
        return self.flops / self.values[name] / 1e6 if name in self.values else None


Ratio = Callable[[Row], float | None]


def speedup(row: Row) -> float | None:
    """Of times: our speed over the best peer's; None where we cannot run the cell, or no peer can.

    Above 1 we are faster.
    """
    peers = [value for name, value in row.values.items() if not name.startswith(OURS)]
    return min(peers) / row.values[OURS] if peers and OURS in row.values else None


def relative_error(row: Row) -> float | None:
    """Of errors: ours over the best peer's; None as for `speedup`. Above 1 ours is larger."""
    ratio = speedup(row)
    return None if ratio is None else 1 / ratio


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers; nan of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def means(rows: Sequence[Row], ratio: Ratio) -> dict[str, float]:
    """Geometric means of a ratio over the rows that have one: all, by length, by head_dim."""
    known = [(row.cell, value) for row in rows if (value := ratio(row)) is not None]
    found = {"all": geometric_mean(value for _, value in known)}
    for length in sorted({cell.length for cell, _ in known}):
        found[f"len {length}"] = geometric_mean(v for cell, v in known if cell.length == length)
    for dim in sorted({cell.head_dim for cell, _ in known}):
        found[f"head_dim {dim}"] = geometric_mean(v for cell, v in known if cell.head_dim == dim)
    return found


def extreme(rows: Sequence[Row], ratio: Ratio, pick: Callable[..., Any]) -> str:
    """The cell with the smallest (`pick` = min) or largest ratio, in words."""
    known = [(value, str(row.cell)) for row in rows if (value := ratio(row)) is not None]
    if not known:
        return "no cell that both we and a peer can run"
    value, cell = pick(known)
    return f"{'smallest' if pick is min else 'largest'} {value:.3f} at {cell}"


def speed_table(rows: Sequence[Row], names: Sequence[str], title: str) -> Table:
    """TFLOP/s of each contender, and ours over the best peer's; '-' where one cannot run."""
    table = _table(title, *names, "ours / best peer")
    for row in rows:
        speeds = [_said(row.tflops(name), ".0f") for name in names]
        table.add_row(str(row.cell), *speeds, _said(speedup(row), ".2f"))
    return table


def error_table(rows: Sequence[Row], names: Sequence[str], title: str) -> Table:
    """RMS error of each contender, and ours over the best peer's; '-' where one cannot run."""
    table = _table(title, "of", "inputs", *names, "ours / best peer")
    for row in rows:
        values = [_said(row.values.get(name), ".3e") for name in names]
        table.add_row(str(row.cell), row.of, row.inputs, *values, _said(relative_error(row), ".3f"))
    return table


def as_json(rows: Sequence[Row], ratio: Ratio, about: Mapping[str, Any]) -> str:
    """The raw numbers: what `about` says, the rows and the means; numbers only where there are."""
    found = [
        {
            **asdict(row.cell),
            "flops": row.flops,
            "of": row.of,
            "inputs": row.inputs,
            "values": dict(row.values),
            "ratio": ratio(row),
        }
        for row in rows
    ]
    known = {name: mean for name, mean in means(rows, ratio).items() if math.isfinite(mean)}
    return json.dumps({**about, "rows": found, "geometric_means": known}, indent=1) + "\n"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    table.add_column("batch x len x heads x head_dim", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def versions() -> dict[str, Any]:
    """Of what numbers depend on; None where it is not installed."""
    found: dict[str, Any] = {"cuDNN": torch.backends.cudnn.version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _about(**more: Any) -> dict[str, Any]:
    """What the numbers depend on."""
    return {"device": torch.cuda.get_device_name(), "versions": versions(), **more}


def _numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError as problem:
        raise click.BadParameter(
            f"{text!r} needs to be whole numbers with commas between; pass 64,128 for instance",
            param=option,
        ) from problem


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--preset", type=click.Choice(list(PRESETS)), default="grid", show_default=True)
@click.option("--lengths", callback=_numbers, help="Only these: 1024,4096.")
@click.option("--head-dims", callback=_numbers, help="Only these: 64,128.")
@click.option("--backward", is_flag=True, help="Backward alone in place of forward.")
@click.option("--accuracy", "accurate", is_flag=True, help="RMS errors in place of speed.")
@click.option("--host", "on_host", is_flag=True, help="Host time of a call in place of speed.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write raw numbers there.")
def main(
    preset: str,
    lengths: tuple[int, ...],
    head_dims: tuple[int, ...],
    backward: bool,
    accurate: bool,
    on_host: bool,
    file: Path | None,
) -> None:
    """Measure attention on this machine's GPU beside cuDNN, FA3 and FA4."""
    try:
        checks.gpu_to_measure()
    except RuntimeError as problem:
        raise click.ClickException(str(problem)) from problem
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    env.configure_log()
    there, absent = contenders(backward)
    for line in absent:
        console.print(line, markup=False)
    if on_host:
        found = host.measure(there)
        console.print(host.table(found))
        if file:
            file.write_text(json.dumps({**_about(), "host_us": found}, indent=1) + "\n")
        return
    names = [contender.name for contender in there]
    rows: list[Row] = []
    for cell in select(preset, lengths, head_dims):
        with console.status(str(cell)):
            if accurate:
                for inputs, outliers in accuracy.INPUTS.items():
                    measured = accuracy.gradient_errors if backward else accuracy.errors
                    for of, found in measured(cell, there, outliers=outliers).items():
                        rows.append(Row(cell, inputs, found, of))
                continue
            q, k, v = cell.inputs()
            if backward:
                calls = {c.name: Backward(c, (q, k, v), cell.causal) for c in there}
            else:
                calls = {c.name: c.bind(q, k, v, cell.causal) for c in there}
            plain, of = next(iter(accuracy.INPUTS)), "gradients" if backward else "out"
            rows.append(Row(cell, plain, times(calls), of))
    ratio = relative_error if accurate else speedup
    device = torch.cuda.get_device_name()
    which = "backward" if backward else "forward"
    if accurate:
        console.print(error_table(rows, names, f"RMS error against float64, bf16, {device}"))
    else:
        console.print(speed_table(rows, names, f"{which}, bf16, TFLOP/s, {device}"))
    said = [f"{name} {mean:.3f}" for name, mean in means(rows, ratio).items()]
    console.print(f"geometric means of the ratio: {', '.join(said)}")
    console.print(extreme(rows, ratio, max if accurate else min), markup=False)
    if file:
        measured = "rms_error" if accurate else "us"
        about = _about(preset=preset, which=which, values=measured, rounds=ROUNDS)
        file.write_text(as_json(rows, ratio, about))


if __name__ == "__main__":
    main()
