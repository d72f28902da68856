"""A real run's clocks laid over the replay's: forward at head_dim 128, with turns.

python -m hopwell.benchmarks.micro.trace capture FILE --shape 1x1024x64x128 --heads-kv 8 --turns
python -m hopwell.benchmarks.micro.trace run FILE docs/results/h200/trace-fwd-d128.json   (a GPU)
python -m hopwell.benchmarks.overlay                                                      (none)

What was measured is the kernel with its stamps, so that the replay has them too: each takes a warp
as long as the shortest time between two that was seen. Both runs are cut in spans, which end where
a warp was handed what it waits for: its turn, S, O, or the next tile of Q; what it did meanwhile
and the wait are one span, since a warp that comes later waits less. Pieces, finer, lie between two
stamps.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..emulator.cost import GPUS, Pauses, replay
from ..emulator.cost.timeline import edge_of
from ..emulator.cost.work import UNITS, Work
from ..emulator.recording import Arrive, Effect, Recording, Wait
from ..kernels.tiles import forward_tiles
from .cells import FORWARD
from .micro.trace import stamped
from .predict import Kernel, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..emulator.ptx import Instruction

TRACE = Path("docs/results/h200/trace-fwd-d128.json")
PICTURE = Path("docs/cost-overlay.png")
WARPS = (4, 8)  # the first ones of the consumer warpgroups
STEPS = 8  # K/V tiles: 1,024 keys
LONG = 150  # clocks: shorter pieces are not compared
CLOSE = 0.3
STAMP_INSTRUCTIONS = 6
# A span's name by the edges that it lies between; edges are the kernel's own lines.
NAMES = {
    ("mma_s", "first_scores"): "first S",
    ("first_scores", "turns"): "first softmax, turn",
    ("turns", "step"): "issue S and O, S there",
    ("step", "step"): "softmax, O there",
    ("step", "turns"): "rescale O, turn",
    ("step", "last_product"): "rescale and last O",
    ("last_product", "mma_s"): "store O, next Q",
}
SHADES = {
    "first S": "#c9c9c9",
    "first softmax, turn": "#2f5f8f",
    "issue S and O, S there": "#e8a838",
    "softmax, O there": "#4f83b5",
    "rescale O, turn": "#9db8d0",
    "rescale and last O": "#9db8d0",
    "store O, next Q": "#b5a188",
}
Stamps = list[tuple[int, float]]  # 2 i before instruction i, or 2 i + 1 behind it; clock


@dataclass(frozen=True)
class Piece:
    """From one stamp to another one of the same warp."""

    warp: int
    name: str
    measured: float  # clocks
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def close(self) -> bool:
        return abs(self.ratio - 1) <= CLOSE


@dataclass(frozen=True)
class Overlay:
    """One tile of Q."""

    spans: list[Piece]
    pieces: list[Piece]
    same: bool  # are the stamps of both runs the same, in the same order?


def _where(ins: Instruction) -> bool | None:
    """As `stamped`; what is predicated has no stamp."""
    return None if ins.predicate else stamped(ins)


def stamps_as_pauses(clocks: float) -> Pauses:
    """What the trace's stamps do to the kernel: each takes so long."""
    units = tuple(STAMP_INSTRUCTIONS * (unit == "issue") for unit in UNITS)
    stamp = Work(clocks, clocks, units)

    def pauses(recording: Recording, effect: Effect) -> tuple[Work | None, Work | None]:
        ins = recording.program.kernel.instructions[effect.site]
        where, barrier = _where(ins), ins.parts[0] in ("bar", "barrier")
        before = where is not None and not (barrier and isinstance(effect, Wait))
        behind = bool(where) and not (barrier and isinstance(effect, Arrive))
        return stamp if before else None, stamp if behind else None

    return pauses


def predicted_stamps(found: Any, recording: Recording, warp: int) -> Stamps:
    """As the trace has them; a barrier's arrival and its wait are one instruction."""
    instructions = recording.program.kernel.instructions
    stamps: Stamps = []
    arrived = -1
    for site, came, went in found.stamps[f"warp {warp}"]:
        where = _where(instructions[site])
        if where is None:
            continue
        if site != arrived:
            stamps.append((2 * site, came))
        barrier = instructions[site].parts[0] in ("bar", "barrier")
        arrived = site if barrier and site != arrived else -1
        if where and arrived < 0:
            stamps.append((2 * site + 1, went))
    return stamps


def _tile(stamps: Stamps, edges: Sequence[str], tile: int) -> Stamps:
    """From the first product of a tile of Q to that of the next."""
    firsts = [
        i - 1
        for i, (site, _) in enumerate(stamps)
        if not site & 1 and edges[site // 2] == "first_scores"
    ]
    return stamps[firsts[tile - 1] : firsts[tile] + 1]


def _pieces(warp: int, edges: Sequence[str], measured: Stamps, predicted: Stamps) -> list[Piece]:
    made: list[Piece] = []
    for (one, other), ((_, begin), (_, end)) in zip(
        pairwise(measured), pairwise(predicted), strict=True
    ):
        between = edges[one[0] // 2], edges[other[0] // 2]
        name = NAMES.get(between, " to ".join(between))
        made.append(Piece(warp, name, other[1] - one[1], end - begin))
    return made


def overlay(trace: dict[str, Any], tile: int) -> Overlay:
    """One tile of Q of both runs."""
    tiles = replace(forward_tiles("sm_90a", 128, 128), ping_pong_full=True)
    recordings = record(Kernel("sm_90a", FORWARD, 128, False, tiles), 4, STEPS)
    measured = {w: [(int(s), float(c)) for s, c in trace["stamps"][str(w)]] for w in WARPS}
    cost = min(b[1] - a[1] for stamps in measured.values() for a, b in pairwise(stamps))
    found = replay(recordings, GPUS["H200"], stamps_as_pauses(cost))
    edges = [edge_of(ins) for ins in recordings[0].program.kernel.instructions]
    made = Overlay([], [], True)
    for warp in WARPS:
        both = measured[warp], predicted_stamps(found, recordings[0], warp)
        one, other = (_tile(stamps, edges, tile) for stamps in both)
        if [site for site, _ in one] != [site for site, _ in other]:
            return Overlay([], [], False)
        made.pieces.extend(_pieces(warp, edges, one, other))
        ends = [i for i, (site, _) in enumerate(one) if site & 1 or i in (0, len(one) - 1)]
        made.spans.extend(_pieces(warp, edges, [one[i] for i in ends], [other[i] for i in ends]))
    return made


def summary(made: Overlay) -> str:
    """One line of spans, one of pieces."""
    long = [piece for piece in made.pieces if piece.measured > LONG]
    lines = [f"forward d 128, one tile of Q: order {'the same' if made.same else 'DIFFERENT'}"]
    for name, parts in (("spans", made.spans), (f"pieces over {LONG} clocks", long)):
        total = sum(part.measured for part in parts)
        share = sum(part.measured for part in parts if part.close) / total
        middle = statistics.median(part.ratio for part in parts)
        close = sum(part.close for part in parts)
        lines.append(
            f"{close} of {len(parts)} {name}, {share:.0%} of their time, within {CLOSE:.0%}; "
            f"median ratio {middle:.2f}"
        )
    return "\n".join(lines)


def picture(made: Overlay) -> Figure:
    """Two bars a warp: measured above predicted, a shade for each kind of span."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure((15, 4.6), dpi=130)
    axis = figure.subplots()
    rows = [(warp, which) for warp in WARPS for which in ("measured", "predicted")]
    for y, (warp, which) in enumerate(reversed(rows)):
        left = 0.0
        for span in (one for one in made.spans if one.warp == warp):
            width, shade = getattr(span, which), SHADES.get(span.name, "white")
            axis.barh(y, width, left=left, height=0.8, color=shade, edgecolor="white")
            if width > 250:
                dark = span.name in ("first softmax, turn", "softmax, O there")
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
                colour = "white" if dark else "black"
                axis.text(left + width / 2, y, f"{width:.0f}", color=colour, **style)
            left += width
    labels = [f"consume {warp // 4}, {which}" for warp, which in reversed(rows)]
    axis.set_yticks(range(len(rows)), labels, fontsize=9)
    axis.tick_params(axis="x", labelsize=9)
    axis.set_xlabel(
        "clocks from the tile's first product (in the bars: clocks of a span)", fontsize=9
    )
    axis.set_title(summary(made), fontsize=9, loc="left")
    patches = [Patch(color=shade, label=name) for name, shade in SHADES.items()]
    axis.legend(
        handles=patches,
        ncols=4,
        fontsize=8,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0.5, 1),
    )
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), default=TRACE, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=PICTURE, show_default=True)
@click.option("--tile", default=2, help="Which of the CTA's tiles of Q.")
def main(trace: Path, out: Path, tile: int) -> None:
    """Compare, print the spans, and draw."""
    made = overlay(json.loads(trace.read_text()), tile)
    for span in made.spans:
        mark = "" if span.close else " *"
        clocks = f"{span.measured:6.0f} {span.predicted:6.0f} {span.ratio:.2f}{mark}"
        click.echo(f"{span.warp:2} {span.name:26} {clocks}")
    click.echo(summary(made))
    picture(made).savefig(out)


if __name__ == "__main__":
    main()
