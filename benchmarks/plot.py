"""Pictures of results, each with what its numbers depend on below it; need the extra `plot`.

python -m hopwell plot generations results/ --out generations.png
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import results
from .cells import FLOP_CONVENTION, FORWARD, PASSES, PRESETS
from .contenders import DETERMINISTIC
from .results import Speed, number
from .timing import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ours is strong and dark, peers are shades of grey or hatched: also printed in grey they differ.
STRONG = "#0b3d91"
BARS: dict[str, dict[str, Any]] = {
    OURS: {"facecolor": STRONG, "edgecolor": STRONG},
    DETERMINISTIC: {"facecolor": "white", "edgecolor": STRONG, "hatch": "////"},
    "FA4": {"facecolor": "#8c8c8c", "edgecolor": "black"},
    "FA3": {"facecolor": "#c4c4c4", "edgecolor": "black"},
    "FA2": {"facecolor": "white", "edgecolor": "black"},
    "cuDNN": {"facecolor": "white", "edgecolor": "#555555", "hatch": "xxxx"},
    "flex": {"facecolor": "white", "edgecolor": "#555555", "hatch": "...."},
}
# From one generation to the next, and ours last, on top of all.
LINES: dict[str, dict[str, Any]] = {
    "FA2": {"color": "#b0b0b0", "marker": "o", "linestyle": ":"},
    "FA3": {"color": "#8c8c8c", "marker": "s", "linestyle": "--"},
    "FA4": {"color": "#555555", "marker": "^", "linestyle": "-."},
    "cuDNN": {"color": "black", "marker": "x", "linestyle": (0, (1, 1))},
    OURS: {"color": STRONG, "marker": "D", "linestyle": "-", "linewidth": 2.5},
}
A_ROW = 6  # shapes side by side
COLUMNS = 170  # of the text below
DPI = 130


def bars(folder: Path) -> list[Path]:
    """Draw a folder's results: bars for each contestant in each cell, a file for each pass.

    Args:
        folder: what `results.write` left there.

    Returns:
        The files, `PRESET-PASS.png` in the folder.

    Raises:
        ImportError: without matplotlib.
    """
    facts, rows = results.read(folder)
    files = []
    for which in PASSES:
        if of_pass := [row for row in rows if row.which == which]:
            files.append(folder / f"{facts['preset']}-{which}.png")
            _save(_bars(of_pass, facts), files[-1])
    return files


def generations(folders: Sequence[Path], which: str) -> Figure:
    """Throughput by length, from one generation to the next: a panel for each head_dim and mask.

    Args:
        folders: of results on one device; of a cell that is in several, the last counts. Cells of
            the preset `paper` are drawn, as others differ in more than their length.
        which: "fwd" or "bwd".

    Raises:
        ImportError: without matplotlib.
        FileNotFoundError, ValueError: as for `results.read`; ValueError also if the devices differ
            or there is nothing to draw.
    """
    read = [results.read(folder) for folder in folders]
    devices = sorted({facts["device"] for facts, _ in read})
    if len(devices) > 1:
        raise ValueError(
            f"these are results of {' and '.join(devices)}; needs those of one device in a picture"
        )
    rows = [row for _, rows in read for row in rows if row.which == which]
    of_cell = {row.cell: row for row in rows if row.cell in PRESETS["paper"]}
    if not of_cell:
        raise ValueError(f"no cell of the preset paper was measured in the pass {which}")
    dims = sorted({cell.head_dim for cell in of_cell})
    masks = sorted({cell.causal for cell in of_cell})
    figure = _figure(4.5 * len(masks) + 1, 3 * len(dims) + 1)
    panels = figure.subplots(len(dims), len(masks), squeeze=False, sharey=True)
    for dim, in_row in zip(dims, panels, strict=True):
        for causal, axes in zip(masks, in_row, strict=True):
            there = [row for cell, row in of_cell.items() if _panel(row) == (dim, causal)]
            _lines(axes, sorted(there, key=lambda row: row.cell.length))
            axes.set_title(f"head_dim {dim}, {'causal' if causal else 'full'}", fontsize=10)
    panels[0, 0].set_ylim(bottom=0)  # of all, once all have drawn
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("length")
    _around(figure, panels.flat, f"{PASSES[which]}, bf16, {devices[0]}", [one for one, _ in read])
    return figure


def _panel(row: Speed) -> tuple[int, bool]:
    return row.cell.head_dim, row.cell.causal


def _lines(axes: Axes, rows: Sequence[Speed]) -> None:
    for name, style in LINES.items():
        points = [(row.cell.length, speed) for row in rows if (speed := row.tflops(name))]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    lengths = [row.cell.length for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.grid(axis="y", linewidth=0.4)


def _bars(rows: Sequence[Speed], facts: Mapping[str, Any]) -> Figure:
    names = [name for name in BARS if any(name in (*row.times, *row.absent) for row in rows)]
    parts = [rows[start : start + A_ROW] for start in range(0, len(rows), A_ROW)]
    figure = _figure(14, 2.8 * len(parts) + 1.2)
    panels = figure.subplots(len(parts), squeeze=False, sharey=True)[:, 0]
    for axes, part in zip(panels, parts, strict=True):
        for i, name in enumerate(names):
            _bars_of(axes, part, name, (i - (len(names) - 1) / 2) * 0.85 / len(names), len(names))
        labels = [f"{row.cell}\n{_ratio(row)}" for row in part]
        axes.set_xticks(range(len(part)), labels, fontsize=8)
        axes.set_xlim(-0.5, A_ROW - 0.5)
        axes.set_ylabel("TFLOP/s")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].margins(y=0.12)  # numbers stand above bars
    _around(figure, panels, f"{PASSES[rows[0].which]}, bf16, {facts['device']}", [facts])
    return figure


def _bars_of(axes: Axes, rows: Sequence[Speed], name: str, offset: float, among: int) -> None:
    """One contestant's bars, with their quartiles; 'n/a' where it has no time."""
    speeds, slowest, fastest = (
        [row.tflops(name, at) or 0 for row in rows] for at in ("median", "high", "low")
    )
    below = [speed - slow for speed, slow in zip(speeds, slowest, strict=True)]
    above = [fast - speed for speed, fast in zip(speeds, fastest, strict=True)]
    drawn = axes.bar(
        [place + offset for place in range(len(rows))],
        speeds,
        width=0.85 / among,
        yerr=[below, above],
        error_kw={"linewidth": 0.8},
        label=name,
        linewidth=0.7,
        **BARS[name],
    )
    said = [f"{speed:.0f}" if speed else "n/a" for speed in speeds]
    axes.bar_label(drawn, said, fontsize=6.5, padding=1.5)


def _ratio(row: Speed) -> str:
    return f"ours / best peer {number(row.ratio, '.2f')}{', L2 flushed' if row.cold else ''}"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _around(
    figure: Figure, panels: Iterable[Axes], title: str, of_files: Sequence[Mapping[str, Any]]
) -> None:
    """Title and legend above; below, what the numbers depend on and how FLOPs count."""
    shown: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    legend = {"loc": "outside upper right", "ncols": len(shown), "frameon": False}
    figure.legend(list(shown.values()), list(shown), **legend)
    figure.suptitle(title, x=0.01, ha="left")
    left_out = {name: why for one in of_files for name, why in one["left_out"].items()}
    absent = [f"{name} has no time: {why}" for name, why in left_out.items()]
    lines = [*dict.fromkeys(map(results.said, of_files)), FLOP_CONVENTION, *absent]
    columns = round(COLUMNS * figure.get_figwidth() / 14)
    wrapped = [part for line in lines for part in textwrap.wrap(line, columns)]
    figure.supxlabel("\n".join(wrapped), fontsize=7, x=0.01, ha="left")


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file, dpi=DPI)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Draw results of `python -m hopwell bench --out`."""


@main.command("generations")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", "file", required=True, type=click.Path(path_type=Path), help="FILE.png")
@click.option("--pass", "which", type=click.Choice(list(PASSES)), default=FORWARD)
def draw_generations(folders: tuple[Path, ...], file: Path, which: str) -> None:
    """Throughput by length of FA2, FA3, FA4, cuDNN and ours, from FOLDERS of results."""
    try:
        _save(generations(folders, which), file)
    except ImportError as problem:
        raise click.ClickException(f"{problem}; install hopwell[plot]") from problem
    except (ValueError, OSError) as problem:
        raise click.ClickException(str(problem)) from problem
