"""One CTA's modelled time, drawn: a Chrome trace, a page and a picture.

python -m hopwell timeline --arch sm_100a 1x1024x1x128
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from ..emulator.cost import GPUS, Replay, replay
from ..emulator.cost.rates import DEFAULT
from ..emulator.cost.timeline import Mark, chrome, marks, page
from ..emulator.recording import Recording
from ..interface.emulate import emulate
from ..interface.functions import forward
from ..kernels import BlackwellFacts, ForwardFacts
from ..kernels.tiles import BLACKWELL, SHORT_LEN_Q, blackwell_tiles, forward_tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By kind, apart in grey too: light 0.9, middle 0.7 and dark 0.35.
COLOURS = {"wait": "#e6e6e6", "busy": "#e8a838", "work": "#2f5f8f"}
TEXT = {"wait": "#555555", "busy": "black", "work": "white"}
WINDOWS = 3  # of the picture: the beginning, the middle, the end
DPI = 130
LETTER = 0.0115  # of the width of a panel that a letter of a span's name takes


def run(arch: str, shape: Sequence[int], causal: bool) -> tuple[list[Recording], dict[int, str]]:
    """The first cluster of a forward launch on the emulator, and the role of each warp."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tuple(shape), generator=random).to(torch.bfloat16) for _ in range(3))
    with emulate(arch, check=False, record=True) as emulation:
        forward(q, k, v, causal=causal)
    found = emulation.report.recordings[-1]
    pair = sum(one.cluster == found[0].cluster for one in found) > 1
    first = [one for one in found if one.cluster == found[0].cluster]
    return first, roles(arch, shape[-1], causal and shape[1] <= SHORT_LEN_Q, pair)


def roles(arch: str, head_dim: int, short: bool, pair: bool) -> dict[int, str]:
    """The role of each warp of the forward kernel that has one."""
    from ..kernels.fwd_sm90 import FwdSm90
    from ..kernels.fwd_sm100 import FwdSm100

    dims = "bfloat16", head_dim, head_dim, short
    if arch in BLACKWELL:
        facts = BlackwellFacts(*dims, pair=pair)
        graph = FwdSm100(facts, blackwell_tiles(arch, head_dim, head_dim, pair)).graph
    else:
        tiles = forward_tiles(arch, head_dim, head_dim, short)
        graph = FwdSm90(ForwardFacts(*dims, short=short), tiles).graph
    return {warp: role.name for role in graph.roles for warp in role.warps}


def picture(made: Sequence[Mark], found: Replay, title: str) -> Figure:
    """The CTA's whole life, and below it a part of its beginning, middle and end.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    lanes = list(dict.fromkeys(mark.lane for mark in made))
    tall = 0.24 * len(lanes) + 0.55
    figure = Figure((14, (1 + WINDOWS) * tall + 0.9), dpi=DPI)
    axes = figure.subplots(1 + WINDOWS, 1)
    width = found.clocks / max(4.0, found.clocks / 5200)
    middle = (found.clocks - width) / 2
    views = [(0.0, found.clocks), (0.0, width), (middle, middle + width)]
    views.append((found.clocks - width, found.clocks))
    for axis, view in zip(axes, views, strict=True):
        _lanes(axis, made, lanes, view)
    axes[0].set_title(title, fontsize=10, loc="left")
    axes[-1].set_xlabel("clocks of the SM (modelled)", fontsize=9)
    from matplotlib.patches import Patch

    names = {"work": "a warp works", "wait": "a warp waits", "busy": "an engine is busy"}
    handles = [Patch(facecolor=COLOURS[kind], label=text) for kind, text in names.items()]
    figure.legend(handles=handles, loc="lower right", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure


def _lanes(axis: Axes, made: Sequence[Mark], lanes: list[str], view: tuple[float, float]) -> None:
    begin, end = view
    taken = dict.fromkeys(lanes, begin)  # by names, up to there: spans of two warps may overlap
    for mark in made:
        if mark.end < begin or mark.start > end:
            continue
        left, right = max(begin, mark.start), min(end, mark.end)
        y = len(lanes) - 1 - lanes.index(mark.lane)
        colour = COLOURS[mark.kind]
        axis.barh(y, right - left, left=left, height=0.8, color=colour, linewidth=0)
        name = f"{mark.name} {mark.visit}" if mark.kind != "wait" else mark.name
        fits = len(name) * LETTER * 0.56 < (right - left) / (end - begin)
        if fits and left >= taken[mark.lane]:
            taken[mark.lane] = right
            middle = (left + right) / 2
            style: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True}
            axis.text(middle, y, name, fontsize=6.5, color=TEXT[mark.kind], **style)
    axis.set_xlim(begin, end)
    axis.set_ylim(-0.6, len(lanes) - 0.4)
    axis.set_yticks(range(len(lanes)), lanes[::-1], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def summary(found: Replay) -> str:
    """Who was busy, in a line."""
    lanes = [lane for lane in dict.fromkeys(s.lane for s in found.spans) if "warp" not in lane]
    shares = ", ".join(f"{lane} {found.busy(lane) / found.clocks:.0%}" for lane in lanes)
    return f"{found.clocks:.0f} clocks, busy: {shares}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shape", default="1x1024x1x128")
@click.option("--arch", default="sm_90a", show_default=True, help="SM version.")
@click.option("--gpu", help="Whose rates; by default the architecture's: H200, B200 or B300.")
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("timeline"), show_default=True)
def main(shape: str, arch: str, gpu: str | None, causal: bool, out: Path) -> None:
    """Run forward on the emulator and draw one CTA's life in modelled time.

    SHAPE is BATCHxLENGTHxHEADSxHEAD_DIM. Writes OUT.json (Perfetto or chrome://tracing), OUT.html
    (a page of its own) and, with matplotlib, OUT.png.
    """
    try:
        sizes = [int(n) for n in shape.split("x")]
        if len(sizes) != 4:
            raise ValueError
    except ValueError as problem:
        raise click.ClickException(f"shape={shape}: needs BATCHxLENGTHxHEADSxHEAD_DIM") from problem
    name = gpu or DEFAULT.get(arch, "")
    if name not in GPUS:
        raise click.ClickException(f"gpu={name!r}: needs one of {sorted(GPUS)}")
    recordings, named = run(arch, sizes, causal)
    found = replay(recordings, GPUS[name])
    made = marks(found, recordings, named)
    mask = "causal" if causal else "full"
    title = f"forward {shape} {mask}, {arch}, one CTA on a {name} (modelled): {summary(found)}"
    mhz = float(GPUS[name].clock_mhz)
    files = {".json": json.dumps(chrome(made, mhz, title)), ".html": page(made, title)}
    for suffix, text in files.items():
        out.with_suffix(suffix).write_text(text)
    written = [str(out.with_suffix(suffix)) for suffix in files]
    try:
        figure = picture(made, found, title)
    except ImportError:
        click.echo("no picture: matplotlib is not installed (pip install 'hopwell[plot]')")
    else:
        figure.savefig(out.with_suffix(".png"))
        written.append(str(out.with_suffix(".png")))
    click.echo(f"{title}\n{', '.join(written)}")
