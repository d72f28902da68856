"""Blackwell, modelled: what binds our kernels on a B200 and a B300, and how near they are.

python -m hopwell.benchmarks.blackwell --out docs/cost-blackwell.md   (no GPU; a few minutes)
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from ..emulator.cost import GPUS, Gpu
from ..emulator.cost.rates import DEFAULT
from ..emulator.cost.work import EXCHANGE, UNITS, Work, measure
from ..emulator.recording import Copy, Mma, Recording, Store, Stretch
from ..kernels.tiles import has_pair
from .cells import BACKWARD, FORWARD, TOKENS, Cell
from .predict import Kernel, line, predict, record, steps_of

HEAD = """# Blackwell's kernels, modelled

Made by `python -m hopwell.benchmarks.blackwell` from the emulator's runs and the rates of
emulator/cost/rates.py. **Nothing here was measured: every number of ours is modelled.** 16,384
tokens in one sequence, hidden size 2048, bf16; causal counts half of the FLOPs, backward 2.5 times
forward's, and its time is that of its three kernels. The clock is taken as the highest one: no
limit of power. A step of forward is one K/V tile for the Q tiles of a CTA (of a pair, of each), of
backward one tile of Q for the K/V tile of a CTA or a pair. Of it, each unit's clocks are those of
the busiest SM quarter, and what binds is the unit with most. Bubble: the share of a step in which
the binding unit does nothing. Shared: shared memory, by products and by warps, not what TMA copies
there. Adds: dQ into L2. Peer: dS into the other CTA of the pair.

FA4: what FlashAttention-4's authors and users report, on GPUs, at another length; sources below.

| GPU | kernel | TFLOP/s | FA4 | of peak | step | {units} | binds | step / bound | bubble |
|---|---|---|---|---|---|{dashes}---|---|---|
"""
FOOT = """
FA4 on a B200: forward d 128 full "up to", as its authors say (together.ai/blog/flashattention-4;
71 % of the peak). The other numbers of d 128, on sm_100, are of 4 x 8,192 tokens and 16 heads:
github.com/Dao-AILab/flash-attention/pull/2280 (backward by two CTAs; by one 1,248 and 1,118). Of
d 64 and of a B300 we found none that names the GPU: flash-attention/pull/2605 has, of 2 x 16,384
tokens, forward 706 to 879 (d 64 full), 834 to 862 (d 64 causal) and 1,330 to 1,401 (d 128 full)
where it takes 2,250 TFLOP/s as the peak (B200 or B300), and 1,225 to 1,243, 1,176 to 1,251 and
1,882 where it takes 2,500 (GB200 or GB300). Of backward at d 64 we found none.

What the numbers of backward hang on. Measured, but on an H200: 16.2 bytes a clock that an SM adds
to dQ in L2 when all do, 22.2 that it stores into its peer's shared memory, and 332 clocks until a
fence knows that the last of these are there. Assumed: shared memory is shared evenly between
products and warps (beside wgmma, writes of 16 bytes keep 0.57 of their rate, reads and shuffles
0.29 to 0.31), and a read of one address by all lanes takes as long as any (of 4 bytes it takes half
on an H200).
"""
COLUMNS = ("tensor", "shared", *UNITS[:EXCHANGE], "tma", "adds", "peer")
# TFLOP/s of FlashAttention-4 on a B200; see FOOT.
FA4 = {
    (FORWARD, 128, False): "1605",
    (FORWARD, 128, True): "1418",
    (BACKWARD, 128, False): "1360",
    (BACKWARD, 128, True): "1209",
}


def demands(kernel: Kernel, gpu: Gpu) -> dict[str, float]:
    """Clocks of a step that each unit of an SM is needed for, alone."""
    few, many = steps_of(kernel)
    less, more = (_demands(record(kernel, 1, steps)[0], gpu) for steps in (few, many))
    return {name: (more[name] - less[name]) / (many - few) for name in COLUMNS}


def _demands(recording: Recording, gpu: Gpu) -> Counter[str]:
    found: Counter[str] = Counter()
    quarters: list[Counter[str]] = [Counter() for _ in range(gpu.schedulers)]
    works: dict[Stretch, Work] = {}

    def need(name: str, clocks: float) -> None:
        found[name] += clocks  # pyright: ignore

    for warp, steps in recording.streams().items():
        for step in steps:
            if isinstance(step, Stretch):
                if step not in works:
                    works[step] = measure(recording.instructions(step), gpu)
                work = works[step]
                for name, clocks in zip(UNITS, work.units, strict=True):
                    quarters[warp % gpu.schedulers][name] += clocks  # pyright: ignore
                need("shared", work.units[EXCHANGE] / gpu.schedulers)
                need("peer", work.peer / gpu.peer_bytes)
            elif isinstance(step, Mma):
                need("tensor", step.clocks)
                need("shared", step.shared_bytes / gpu.shared_bytes)
            elif isinstance(step, Store) and step.adds:
                need("adds", step.nbytes / gpu.l2_add_bytes)
            elif isinstance(step, Copy):
                need("tma", step.nbytes / gpu.l2_bytes)
    for name in UNITS:
        found[name] = max(quarter[name] for quarter in quarters)
    return found


def row(arch: str, which: str, head_dim: int, causal: bool) -> str:
    """One line of the table."""
    gpu = GPUS[DEFAULT[arch]]
    pair = which == FORWARD and not causal and has_pair(head_dim, head_dim)
    kernel = Kernel(arch, which, head_dim, causal, pair=pair)
    heads = 2048 // head_dim
    cell = Cell(1, TOKENS, heads, heads, head_dim, head_dim, causal)
    made, needs = predict(kernel, cell, gpu), demands(kernel, gpu)
    step = line(kernel, gpu).step
    binds = max(needs, key=lambda name: needs[name])
    flops = cell.flops(which) / made.us * 1e-6
    peak = gpu.sms * 8192 * gpu.clock_mhz * 1e-6
    clocks = " | ".join(f"{needs[name]:.0f}" for name in COLUMNS)
    mask = "causal" if causal else "full"
    name = f"{which} d {head_dim} {mask}" + (", pair" if kernel.ctas > 1 else "")
    reported = FA4.get((which, head_dim, causal), "") if gpu.name == "B200" else ""
    return (
        f"| {gpu.name} | {name} | {flops:.0f} | {reported} | {flops / peak:.0%} | {step:.0f} "
        f"| {clocks} | {binds} | {step / needs[binds]:.2f} | {1 - needs[binds] / step:.0%} |\n"
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/cost-blackwell.md"))
@click.option("--arch", default="sm_100a,sm_103a", show_default=True)
@click.option("--head-dims", default="64,128,256", show_default=True)
def main(out: Path, arch: str, head_dims: str) -> None:
    """Write the table."""
    text = HEAD.format(units=" | ".join(COLUMNS), dashes="---|" * len(COLUMNS))[:-1] + "\n"
    for one in arch.split(","):
        for which in (FORWARD, BACKWARD):
            for dim in [int(n) for n in head_dims.split(",")]:
                for causal in (False, True):
                    text += row(one, which, dim, causal)
                    click.echo(text.splitlines()[-1])
    out.write_text(text + FOOT)


if __name__ == "__main__":
    main()
