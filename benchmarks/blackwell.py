"""Blackwell, modelled: what binds our forward kernels on a B200 and a B300, and how near they are.

python -m hopwell.benchmarks.blackwell --out docs/cost-blackwell.md   (no GPU; a few minutes)
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from ..emulator.cost import GPUS, Gpu
from ..emulator.cost.rates import DEFAULT
from ..emulator.cost.work import UNITS, measure
from ..emulator.recording import Copy, Mma, Recording, Stretch
from ..kernels.tiles import has_pair
from .cells import FORWARD, TOKENS, Cell
from .predict import STEPS_BLACKWELL as STEPS
from .predict import Kernel, line, predict, record

HEAD = """# Blackwell's forward kernels, modelled

Made by `python -m hopwell.benchmarks.blackwell` from the emulator's runs and the rates of
emulator/cost/rates.py. **Nothing here was measured: every number of ours is modelled.** 16,384
tokens in one sequence, hidden size 2048, bf16; causal counts half of the FLOPs. The clock is taken
as the highest one: no limit of power. A step is one K/V tile for the Q tiles of a CTA (of a pair,
of each); of it, each unit's clocks are those of the busiest SM quarter, and what binds is the unit
with most. Bubble: the share of a step in which the binding unit does nothing.

FlashAttention-4's authors report up to 1605 TFLOP/s forward at d 128 on a B200, 71 % of the peak.

| GPU | kernel | TFLOP/s | of peak | step | {units} | binds | step / bound | bubble |
|---|---|---|---|---|{dashes}---|---|---|
"""
COLUMNS = ("tensor", "shared", *UNITS[:4], "tma")


def demands(kernel: Kernel, gpu: Gpu) -> dict[str, float]:
    """Clocks of a step that each unit of an SM is needed for, alone."""
    few, many = (_demands(record(kernel, 1, steps)[0], gpu) for steps in STEPS)
    between = STEPS[1] - STEPS[0]
    return {name: (many[name] - few[name]) / between for name in COLUMNS}


def _demands(recording: Recording, gpu: Gpu) -> dict[str, float]:
    found: Counter[str] = Counter()
    quarters: list[Counter[str]] = [Counter() for _ in range(gpu.schedulers)]
    works: dict[Stretch, tuple[float, ...]] = {}
    for warp, steps in recording.streams().items():
        for step in steps:
            if isinstance(step, Stretch):
                if step not in works:
                    works[step] = measure(recording.instructions(step), gpu).units
                for name, clocks in zip(UNITS, works[step], strict=True):
                    quarters[warp % gpu.schedulers][name] += clocks  # pyright: ignore
            elif isinstance(step, Mma):
                found["tensor"] += step.clocks  # pyright: ignore
                found["shared"] += step.shared_bytes / gpu.shared_bytes  # pyright: ignore
            elif isinstance(step, Copy):
                found["tma"] += step.nbytes / gpu.l2_bytes  # pyright: ignore
    for name in UNITS:
        found[name] = max(quarter[name] for quarter in quarters)
    return dict(found)


def row(arch: str, head_dim: int, causal: bool) -> str:
    """One line of the table."""
    gpu = GPUS[DEFAULT[arch]]
    pair = not causal and has_pair(head_dim, head_dim)
    kernel = Kernel(arch, FORWARD, head_dim, causal, pair=pair)
    heads = 2048 // head_dim
    cell = Cell(1, TOKENS, heads, heads, head_dim, head_dim, causal)
    made, needs = predict(kernel, cell, gpu), demands(kernel, gpu)
    step = line(kernel, gpu).step
    binds = max(needs, key=lambda name: needs[name])
    flops = cell.flops() / made.us * 1e-6
    peak = gpu.sms * 8192 * gpu.clock_mhz * 1e-6
    clocks = " | ".join(f"{needs[name]:.0f}" for name in COLUMNS)
    mask = "causal" if causal else "full"
    name = f"d {head_dim} {mask}" + (", pair" if kernel.pair else "")
    return (
        f"| {gpu.name} | {name} | {flops:.0f} | {flops / peak:.0%} | {step:.0f} | {clocks} "
        f"| {binds} | {step / needs[binds]:.2f} | {1 - needs[binds] / step:.0%} |\n"
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/cost-blackwell.md"))
@click.option("--arch", default="sm_100a,sm_103a", show_default=True)
@click.option("--head-dims", default="64,128,256", show_default=True)
def main(out: Path, arch: str, head_dims: str) -> None:
    """Write the table."""
    text = HEAD.format(units=" | ".join(COLUMNS), dashes="---|" * len(COLUMNS))[:-1] + "\n"
    for one in arch.split(","):
        for dim in [int(n) for n in head_dims.split(",")]:
            for causal in (False, True):
                text += row(one, dim, causal)
                click.echo(text.splitlines()[-1])
    out.write_text(text)


if __name__ == "__main__":
    main()
