"""The command line: `python -m hopwell COMMAND`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .cache import Entry


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Exact attention for NVIDIA Hopper and Blackwell, and an emulator to run it without one."""


@main.command()
def demo() -> None:
    """Run attention on the GPU, or on the emulator where there is none, and check it."""
    from .demo import run

    sys.exit(0 if run() else 1)


def _head_dims(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> list[Any] | None:
    """64,192/128 as [64, (192, 128)]; what is no number is left to the checks."""
    if text is None:
        return None
    pairs = [
        tuple(int(n) if n.isdecimal() else n for n in part.split("/")) for part in text.split(",")
    ]
    return [pair[0] if len(pair) == 1 else pair for pair in pairs]


_head_dims_option = click.option(
    "--head-dims", callback=_head_dims, help="Of q and k, or of q and k / of v: 64,80,192/128."
)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--kernels", is_flag=True, help="Registers and memory of each kernel instead.")
@_head_dims_option
def info(as_json: bool, kernels: bool, head_dims: list[Any] | None) -> None:
    """Print versions, GPUs, kernels, cache and environment: what a bug report needs."""
    from . import checks
    from .info import collect, resources

    if kernels:
        try:
            used = resources(checks.arches()[0], head_dims or ())
        except (ValueError, OSError) as problem:
            raise click.ClickException(str(problem)) from problem
        click.echo(json.dumps(used, indent=1) if as_json else _table(used))
        return
    found = collect()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for part, value in found.items():
        click.echo(f"{part}:")
        for line in _lines(value):
            click.echo(f"  {line}")


def _table(rows: list[dict[str, Any]]) -> str:
    """One line a row, what is None stays empty."""
    widths = {name: max(len(name), *(len(_cell(row[name])) for row in rows)) for name in rows[0]}
    lines = [[_cell(row[name]).rjust(width) for name, width in widths.items()] for row in rows]
    head = [name.rjust(width) for name, width in widths.items()]
    return "\n".join("  ".join(line) for line in [head, *lines])


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}: {item}" for name, item in value.items()]
    if isinstance(value, list):
        return [", ".join(_lines(item)) for item in value] or ["none"]
    return [str(value)]


@main.command("compile")
@click.option("--arch", default=None, help="SM versions, separated by commas: sm_90a,sm_100a.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder; the cache if left out.")
@_head_dims_option
@click.option(
    "--gqa-group", multiple=True, type=int, help="For Blackwell: heads of q for one of k."
)
@click.option("--backward", is_flag=True, help="Also the kernels that compute gradients.")
def compile_(
    arch: str | None,
    out: Path | None,
    head_dims: list[Any] | None,
    gqa_group: tuple[int, ...],
    backward: bool,
) -> None:
    """Compile kernels ahead of time, for common head dims unless told; needs no GPU."""
    from . import functions

    try:
        entries = functions.compile(
            arch.split(",") if arch else None,
            out=out,
            head_dims=head_dims or functions.COMMON_HEAD_DIMS,
            gqa_groups=gqa_group or functions.COMMON_GQA_GROUPS,
            backward=backward,
        )
    except (NotImplementedError, ValueError, OSError) as problem:
        raise click.ClickException(str(problem)) from problem
    for entry in entries:
        click.echo(_said(entry))


def _said(entry: Entry) -> str:
    facts = " ".join(f"{name}={value}" for name, value in entry.facts["facts"].items())
    used = [
        f"{usage['registers']} registers, {usage['local_bytes']} B local"
        for usage in entry.facts["resources"].values()
    ]
    return f"{entry.folder.name}  {entry.bytes // 1024} KiB  {facts}  {'; '.join(used)}"


@main.group()
def cache() -> None:
    """Look at or clear the compiled kernels on disk."""


@cache.command("path")
def cache_path() -> None:
    """Print the cache folder."""
    from . import env

    click.echo(env.cache_dir())


@cache.command("list")
def cache_list() -> None:
    """Print every compiled kernel."""
    from . import env
    from .cache import Store

    for entry in Store(env.cache_dir()).entries():
        click.echo(_said(entry))


@cache.command("clear")
def cache_clear() -> None:
    """Remove every compiled kernel."""
    from .functions import clear_cache

    click.echo(f"removed {clear_cache()} kernels")


def _handed_on(command: Callable[..., None]) -> click.Command:
    """A command that leaves its arguments and its help to another."""
    arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(command)
    settings = {"ignore_unknown_options": True}
    return main.command(context_settings=settings, add_help_option=False)(arguments)


@_handed_on
def io(arguments: tuple[str, ...]) -> None:
    """Compare the bytes that attention algorithms move to and from memory."""
    from ..benchmarks import io as model

    model.main(list(arguments), prog_name="python -m hopwell io")


@_handed_on
def tune(arguments: tuple[str, ...]) -> None:
    """Time the tile table's rows beside their neighbours on this machine's GPU."""
    from ..benchmarks import tune as tuning

    tuning.main(list(arguments), prog_name="python -m hopwell tune")


@_handed_on
def bench(arguments: tuple[str, ...]) -> None:
    """Time forward and backward against their peers on this machine's GPU."""
    from ..benchmarks import bench as command

    command.main(list(arguments), prog_name="python -m hopwell bench")


@_handed_on
def timeline(arguments: tuple[str, ...]) -> None:
    """Draw one CTA's modelled time, from the emulator; needs no GPU."""
    from ..benchmarks import timeline as command

    command.main(list(arguments), prog_name="python -m hopwell timeline")


@_handed_on
def plot(arguments: tuple[str, ...]) -> None:
    """Draw results that bench has written."""
    from ..benchmarks import plot as drawing

    drawing.main(list(arguments), prog_name="python -m hopwell plot")
