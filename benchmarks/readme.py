"""Writes the tables of measured speed into README.md, from files that `bench` wrote.

    python -m hopwell bench --preset paper --pass both --out results/
    python -m hopwell.benchmarks.readme results/ README.md
    python -m hopwell.benchmarks.readme --check results/ README.md

What stands between the two lines of `MARKERS` is replaced: a table of forward and one of backward,
of our TFLOP/s and our speed over the best peer's in the cells of the preset `paper`, each with what
it depends on. Everything else stays. `--check` writes nothing; its status is 1 if the tables are
not those of the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from . import results
from .cells import HIDDEN, PASSES, PRESETS, TOKENS
from .results import JSON, Speed, number
from .timing import OURS, ROUNDS

MARKERS = "<!-- measured: begin -->", "<!-- measured: end -->"


def tables(folder: Path) -> str:
    """Both tables in Markdown, of those passes that were measured.

    Args:
        folder: of results, or of folders of results; each pass needs to be in one of them.

    Raises:
        FileNotFoundError, ValueError: as for `results.read`; ValueError also if a pass is there
            twice, or no cell of the preset `paper` is.
    """
    found: dict[str, str] = {}
    for file in sorted(folder.rglob(JSON)) or [folder / JSON]:
        facts, rows = results.read(file.parent)
        for which in PASSES:
            of_pass = [row for row in rows if row.which == which and row.cell in PRESETS["paper"]]
            if of_pass and which in found:
                raise ValueError(
                    f"{folder} holds two results of {PASSES[which]}; needs one; name its folder"
                )
            if of_pass:
                found[which] = table(of_pass, facts)
    if not found:
        raise ValueError(
            f"{folder} has no cell of the preset paper; "
            f"needs those of `python -m hopwell bench --preset paper --out {folder}`"
        )
    return "\n\n".join(found[which] for which in PASSES if which in found)


def table(rows: Sequence[Speed], facts: Mapping[str, Any]) -> str:
    """One pass: what it depends on, a table, and the mean of the ratios.

    Args:
        rows: cells of the preset `paper`, alike in pass.
        facts: those of a file of results.
    """
    of_cell = {(row.cell.head_dim, row.cell.length, row.cell.causal): row for row in rows}
    dims, lengths = (sorted({key[at] for key in of_cell}) for at in (0, 1))
    columns = list(product(lengths, (False, True)))
    heads = [f"{length // 1024}k {'causal' if causal else 'full'}" for length, causal in columns]
    lines = [["", *heads]]
    for dim in dims:
        there = [of_cell.get((dim, *column)) for column in columns]
        speeds = [row and row.tflops(OURS) for row in there]
        ratios = [row and row.ratio for row in there]
        lines.append([f"head_dim {dim}, Hopwell", *(number(speed, ".0f") for speed in speeds)])
        lines.append(["over the best peer", *(number(ratio, ".2f") for ratio in ratios)])
    peers = sorted({name for row in rows for name in row.times if not name.startswith(OURS)})
    absent = dict(facts["left_out"])
    absent |= {name: why for row in rows for name, why in row.absent.items() if name not in peers}
    without = "".join(f" {name} has no time: {_first(why)}." for name, why in absent.items())
    which = PASSES[rows[0].which]
    said = (
        f"{which.capitalize()}: {results.said(facts)}; bf16, {TOKENS:,} tokens, hidden size "
        f"{HIDDEN}, TFLOP/s (causal counts half), medians of {ROUNDS} rounds in one process with "
        f"{', '.join(peers) or 'no peer'}.{without}"
    )
    mean = results.means(rows).get("all")
    mean_said = f"The geometric mean of the ratios is {number(mean, '.2f')}."
    return "\n\n".join([said, _markdown(lines), mean_said])


def rewritten(text: str, measured: str) -> str:
    """A README with other tables between its markers.

    Raises:
        ValueError: if the markers are not there once each, in their order.
    """
    begin, end = MARKERS
    before, *rest = text.split(begin)
    parts = rest[0].split(end) if len(rest) == 1 else []
    if len(parts) != 2:
        raise ValueError(
            f"the file needs the lines {begin} and {end}, once each and in this order; "
            "write them around what is to be replaced"
        )
    return f"{before}{begin}\n{measured}\n{end}{parts[1]}"


def _first(reason: str) -> str:
    """Its last clause, without where in a file: `mha_bwd, /a/b.cpp:12, no backward.` has three."""
    return reason.rstrip(".").rsplit(", ", 1)[-1]


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose columns are padded to their widest cell; the first line is its head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    ]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([rows[0], rule, *rows[1:]])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("readme", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--check", is_flag=True, help="Write nothing; status 1 if the tables are others.")
def main(folder: Path, readme: Path, check: bool) -> None:
    """Rewrite the tables of measured speed in README from a FOLDER of results."""
    text = readme.read_text()
    try:
        wanted = rewritten(text, tables(folder))
    except (ValueError, OSError) as problem:
        raise click.ClickException(str(problem)) from problem
    if check and wanted != text:
        raise click.ClickException(f"{readme} has other tables than {folder}; run without --check")
    if wanted != text:
        readme.write_text(wanted)


if __name__ == "__main__":
    main()
