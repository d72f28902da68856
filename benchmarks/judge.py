"""The cost model before the H200: predicted beside measured, for every configuration.

python -m hopwell.benchmarks.configurations --out docs/results/h200/configurations.json   (a GPU)
python -m hopwell.benchmarks.judge                                                        (none)

The measured time is that of a card kept busy by one kernel alone, at the clock that it then keeps.
`--fit` prints what the fitted half of the configurations says the three fitted numbers are.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..emulator.cost import GPUS, Gpu
from ..emulator.cost.rates import Known
from .cells import FORWARD
from .configurations import ARCH, CONFIGURATIONS, Configuration
from .predict import Kernel, Line, line, predict

MEASURED = Path("docs/results/h200/configurations.json")
TABLE = Path("docs/cost-h200.md")
HEAD = """# The cost model on the H200: predicted and measured

Made by `python -m hopwell.benchmarks.judge` from the emulator's runs and `{measured}`.
Microseconds; backward is its three kernels. Measured: half a second of nothing but this kernel, at
the clock that the card keeps under its limit of power. Configurations marked `fitted` were used to
fit the numbers that the table of rates (emulator/cost/rates.py) calls fitted; the others were not.
docs/cost.md says how the model works.

| configuration | | predicted | measured | ratio | clock: predicted | measured |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Judged:
    """One configuration."""

    configuration: Configuration
    line: Line
    us: float  # predicted
    mhz: float
    measured_us: float
    measured_mhz: float

    @property
    def ratio(self) -> float:
        return self.us / self.measured_us


def kernel(configuration: Configuration) -> Kernel:
    """As `predict` takes it."""
    tiles = configuration.tiles if configuration.which == FORWARD else None
    dims = configuration.head_dim, configuration.causal
    return Kernel(ARCH, configuration.which, *dims, tiles)


def judge(measured: Sequence[dict[str, Any]], gpu: Gpu) -> list[Judged]:
    """Predict every configuration that was measured."""
    rows = {row["name"]: row for row in measured}
    found: list[Judged] = []
    for one in CONFIGURATIONS:
        if (row := rows.get(one.name)) is not None:
            made = predict(kernel(one), one.cell, gpu)
            told = made.us, made.mhz, row["held_us"], row["mhz"]
            found.append(Judged(one, made.line, *told))
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """How far the two rank alike."""
    one, other = (np.argsort(np.argsort(np.array(x))) for x in (a, b))
    return float(np.corrcoef(one, other)[0, 1])


def errors(found: Sequence[Judged]) -> tuple[float, float]:
    """(median, largest) distance of the ratio from 1."""
    off = [abs(one.ratio - 1) for one in found]
    return statistics.median(off), max(off)


def tflops(one: Judged, us: float) -> float:
    """Of that time."""
    return one.configuration.cell.flops(one.configuration.which) / us * 1e-6


def table(found: Sequence[Judged]) -> str:
    """Markdown, with a summary below."""
    lines = [HEAD.format(measured=MEASURED)]
    for one in found:
        mark = "fitted" if one.configuration.fitted else ""
        lines.append(
            f"| {one.configuration.name} | {mark} | {one.us:.0f} | {one.measured_us:.0f} "
            f"| {one.ratio:.2f} | {one.mhz:.0f} | {one.measured_mhz:.0f} |\n"
        )
    lines.append("\n| | median error | largest | Spearman of TFLOP/s |\n|---|---|---|---|\n")
    parts = {
        "all": found,
        "fitted": [one for one in found if one.configuration.fitted],
        "not fitted": [one for one in found if not one.configuration.fitted],
    }
    for name, part in parts.items():
        middle, most = errors(part)
        rank = spearman(
            [tflops(one, one.us) for one in part], [tflops(one, one.measured_us) for one in part]
        )
        lines.append(f"| {name} ({len(part)}) | {middle:.1%} | {most:.1%} | {rank:.2f} |\n")
    return "".join(lines)


def fit(measured: Sequence[dict[str, Any]], gpu: Gpu) -> dict[str, float]:
    """The fitted numbers, from the fitted configurations: of the card's clock by least squares, of
    the clocks by least squares of their logarithms."""
    rows = {row["name"]: row for row in measured}
    fitted = [one for one in CONFIGURATIONS if one.fitted and one.name in rows]
    clocks = {one: rows[one.name]["held_us"] * rows[one.name]["mhz"] for one in fitted}
    made = {one: predict(kernel(one), one.cell, replace(gpu, unseen=Known(1))) for one in fitted}
    busy = np.array([made[one].tensor * made[one].clocks / clocks[one] for one in fitted])
    mhz = np.array([rows[one.name]["mhz"] for one in fitted])
    slope, top = np.polyfit(busy, mhz, 1)
    unseen = math.exp(statistics.mean(math.log(clocks[one] / made[one].clocks) for one in fitted))
    return {"busy_mhz": -slope, "busy_free": (top - gpu.clock_mhz) / -slope, "unseen": unseen}


@click.command()
@click.option("--measured", type=click.Path(path_type=Path), default=MEASURED, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=TABLE, show_default=True)
@click.option("--fit", "fitting", is_flag=True, help="Print the fitted numbers, write nothing.")
def main(measured: Path, out: Path, fitting: bool) -> None:
    """Write the table of predicted and measured times."""
    rows = json.loads(measured.read_text())["rows"]
    if fitting:
        for name, value in fit(rows, GPUS["H200"]).items():
            click.echo(f"{name}: {value:.3f}")
        return
    found = judge(rows, GPUS["H200"])
    out.write_text(table(found))
    click.echo(table(found))


__all__ = ["Judged", "fit", "judge", "line", "table"]

if __name__ == "__main__":
    main()
