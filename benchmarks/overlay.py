"""A real run's clocks laid over the replay's: forward at head_dim 128, one consumer warpgroup each.

python -m hopwell.benchmarks.micro.trace capture FILE --shape 1x1024x64x128
python -m hopwell.benchmarks.micro.trace run FILE docs/results/h200/trace-fwd-d128.json   (a GPU)
python -m hopwell.benchmarks.overlay                                                      (none)

Both are cut where the trace has a stamp: a piece is what lies between two of them. Each stamp takes
time of its own, the shortest piece that was seen; it is taken off every measured piece.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..emulator.cost import GPUS, replay
from ..emulator.cost.timeline import edge_of
from ..emulator.recording import Recording
from .cells import FORWARD
from .micro.trace import stamped
from .predict import Kernel, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACE = Path("docs/results/h200/trace-fwd-d128.json")
PICTURE = Path("docs/cost-overlay.png")
WARPS = (4, 8)  # the first ones of the consumer warpgroups
STEPS = 8  # K/V tiles: 1,024 keys
LONG = 150  # clocks: what is shorter is not compared
# What is done between two edges.
LABELS = {
    "k to turns": "first softmax",
    "k to step": "softmax",
    "mma_s to mma_o": "issue",
    "v to stage": "store of O",
}
SHADES = ("#2f5f8f", "#e8a838", "#9db8d0", "#c9c9c9")


@dataclass(frozen=True)
class Piece:
    """From one stamp to the next one of the same warp."""

    warp: int
    name: str
    measured: float  # clocks
    predicted: float


def predicted_stamps(found: Any, recording: Recording, warp: int) -> list[tuple[int, float]]:
    """As the trace has them: 2 i before instruction i, 2 i + 1 behind it."""
    instructions = recording.program.kernel.instructions
    stamps: list[tuple[int, float]] = []
    for site, came, went in found.stamps[f"warp {warp}"]:
        where = stamped(instructions[site]) if not instructions[site].predicate else None
        if where is None or (stamps and stamps[-1][0] // 2 == site and came == stamps[-1][1]):
            continue  # a barrier is an arrival and a wait
        stamps.append((2 * site, came))
        if where:
            stamps.append((2 * site + 1, went))
    return stamps


def _merged(stamps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """A barrier's arrival and its wait as one instruction: the first stamp, and the last."""
    merged: list[tuple[int, float]] = []
    for site, clock in stamps:
        if len(merged) > 1 and site == merged[-2][0] and merged[-1][0] == site + 1:
            continue
        if merged and merged[-1][0] == site and site & 1:
            merged[-1] = (site, clock)
        else:
            merged.append((site, clock))
    return merged


def pieces(trace: dict[str, Any], tile: int) -> tuple[list[Piece], bool]:
    """Those of one tile of Q, and whether both runs have the same stamps in the same order."""
    kernel = Kernel("sm_90a", FORWARD, 128, False)
    recordings = record(kernel, 4, STEPS)
    found, instructions = (
        replay(recordings, GPUS["H200"]),
        recordings[0].program.kernel.instructions,
    )
    made: list[Piece] = []
    same = True
    for warp in WARPS:
        measured = [(int(s), float(c)) for s, c in trace["stamps"][str(warp)]]
        own = _merged(predicted_stamps(found, recordings[0], warp))
        ends = [[i for i, (s, _) in enumerate(x) if s == x[-1][0]] for x in (measured, own)]
        cost = min(b[1] - a[1] for a, b in pairwise(measured))
        parts = [x[e[tile - 1] : e[tile] + 1] for x, e in zip((measured, own), ends, strict=True)]
        same = same and [s for s, _ in parts[0]] == [s for s, _ in parts[1]]
        for i in range(1, min(map(len, parts))):
            (site, clock), (_, before) = parts[0][i], parts[0][i - 1]
            name = f"{edge_of(instructions[parts[0][i - 1][0] // 2])} to "
            name += edge_of(instructions[site // 2])
            there = parts[1][i][1] - parts[1][i - 1][1]
            made.append(Piece(warp, name, clock - before - cost, there))
    return made, same


def picture(made: list[Piece], title: str) -> Figure:
    """Two bars a warp: measured above predicted, a shade for each kind of piece in turn."""
    from matplotlib.figure import Figure

    figure = Figure((14, 3.4), dpi=130)
    axis = figure.subplots()
    kinds = list(dict.fromkeys(p.name for p in made if max(p.measured, p.predicted) > LONG))
    rows = [(warp, which) for warp in WARPS for which in ("measured", "predicted")]
    for y, (warp, which) in enumerate(reversed(rows)):
        left = 0.0
        for piece in (p for p in made if p.warp == warp):
            width = getattr(piece, which)
            shade = (
                SHADES[kinds.index(piece.name) % len(SHADES)] if piece.name in kinds else "white"
            )
            axis.barh(
                y, width, left=left, height=0.8, color=shade, edgecolor="white", linewidth=0.4
            )
            if width > 800:
                colour = "white" if shade == SHADES[0] else "black"
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6}
                axis.text(left + width / 2, y, LABELS.get(piece.name, ""), color=colour, **style)
            left += width
    labels = [f"consume {warp // 4}, {which}" for warp, which in reversed(rows)]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel("clocks from the end of the last tile of Q", fontsize=8)
    axis.set_title(title, fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), default=TRACE, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=PICTURE, show_default=True)
@click.option("--tile", default=2, help="Which of the CTA's tiles of Q.")
def main(trace: Path, out: Path, tile: int) -> None:
    """Compare, print the long pieces, and draw."""
    made, same = pieces(json.loads(trace.read_text()), tile)
    long = [piece for piece in made if piece.measured > LONG]
    ratios = [piece.predicted / piece.measured for piece in long]
    for piece in long:
        ratio = piece.predicted / piece.measured
        clocks = f"{piece.measured:6.0f} {piece.predicted:6.0f}"
        click.echo(f"{piece.warp:2} {piece.name:40} {clocks} {ratio:.2f}")
    close = sum(abs(ratio - 1) <= 0.3 for ratio in ratios)
    weight = sum(p.measured for p, r in zip(long, ratios, strict=True) if abs(r - 1) <= 0.3)
    share = weight / sum(p.measured for p in long)
    text = (
        f"forward d 128, one tile of Q: order of stamps {'the same' if same else 'DIFFERENT'}; "
        f"{close} of {len(long)} pieces over {LONG} clocks, {share:.0%} of their time, within "
        f"30 %; median ratio {statistics.median(ratios):.2f}"
    )
    click.echo(text)
    picture(made, text).savefig(out)


if __name__ == "__main__":
    main()
