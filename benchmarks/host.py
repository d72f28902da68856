"""Time that a call takes of the host, on a problem too small to keep the GPU busy.

python -m hopwell bench --host
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from rich.table import Table

from ..interface.autograd import attention, backward
from ..interface.functions import forward
from .cells import Cell
from .contenders import Contender
from .timing import Call, able

CELL = Cell(1, 128, 2, 2, 64, 64, causal=False)
CALLS = 200  # a sample; fewer than a stream's queue holds, or launches would wait for the GPU
ROUNDS = 15
NEEDED_US = 15.0  # what a warmed call of ours may take


def measure(contenders: Sequence[Contender]) -> dict[str, float]:
    """Host microseconds of one warmed call, by what is called; of those that run.

    Ours is also called in the other layout, through `forward` and `backward`, and with given
    buffers.
    """
    q, k, v = CELL.inputs()
    heads_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out, lse = forward(q, k, v)
    calls = {c.name: c.call((q, k, v), CELL.causal) for c in contenders}
    calls |= {
        "hopwell, bhsd": Call(partial(attention, *heads_first, layout="bhsd")),
        "hopwell.forward": Call(partial(forward, q, k, v)),
        "hopwell.forward, given buffers": Call(partial(forward, q, k, v, out=out, lse=lse)),
        "hopwell.backward": Call(partial(backward, out, q, k, v, out, lse)),
    }
    return {name: host_us(call) for name, call in able(calls)[0].items()}


def host_us(call: Call) -> float:
    """Median over the rounds of the mean microseconds until a warmed call returns."""
    samples: list[float] = []
    with call.context():
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call.launch()
            samples.append(1e6 * (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return statistics.median(samples)


def table(found: Mapping[str, float]) -> Table:
    """Host time of each call; ours in red above what it may take."""
    table = Table(title=f"host time of a warmed call, {CELL}; ours may take {NEEDED_US:.0f} us")
    table.add_column("call")
    table.add_column("us", justify="right")
    for name, us in found.items():
        late = name.startswith("hopwell") and us > NEEDED_US
        table.add_row(name, f"{'[red]' if late else ''}{us:.1f}")
    return table
