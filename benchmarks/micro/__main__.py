"""Run every micro-benchmark and print JSON: `python -m hopwell.benchmarks.micro [--out FILE]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch

from . import kernels
from .card import Loaded, run, word

COLUMNS = (64, 80, 96, 112, 128, 192, 256)  # of a product
L2_BYTES = 16 << 20  # of a buffer that L2 holds in both its halves
DRAM_BYTES = 4 << 30
STORED_BYTES = 1 << 30
LAUNCHES = 2000


def _span(found: list[int]) -> int:
    return found[1] - found[0]


def rates() -> list[dict[str, Any]]:
    """Clocks of an instruction of a warp on its scheduler: alone, and beside products."""
    rows = []
    mixes = {name: (op,) for name, op in kernels.OPS.items()} | {"softmax": kernels.SOFTMAX}
    for name, ops in mixes.items():
        for groups in (1, 2):
            for beside in (0, 64, 128):
                for chains in (kernels.CHAINS, 1) if groups == 1 and not beside else (16,):
                    loops = 32
                    (found,) = run(kernels.rate(ops, groups, beside, loops, chains))
                    clocks = max(_span(found[2 * g : 2 * g + 2]) for g in range(groups))
                    row = {"op": name, "warps": groups, "beside": beside, "chains": chains}
                    row["clocks"] = clocks / (kernels.UNROLL * loops * groups)
                    if beside:
                        count = 16 * kernels.PRODUCT_LOOPS * loops
                        row["product"] = _span(found[2 * groups :]) / count
                        row["overlapped"] = _span(found[2 * groups :]) >= clocks
                    rows.append(row)
    return rows


def products() -> list[dict[str, Any]]:
    """Clocks until a group of products is issued and done."""
    rows = []
    for n in COLUMNS:
        for registers in (False, True):
            for groups in (1, 2):
                for count in (1, 4, 8, 16, 32):
                    (found,) = run(kernels.products(n, count, registers, groups))
                    first = min(found[::3])
                    rows.append(
                        {
                            "columns": n,
                            "registers": registers,
                            "warpgroups": groups,
                            "count": count,
                            "issued": [t - first for t in found[1::3]],
                            "done": [t - first for t in found[2::3]],
                        }
                    )
    return rows


def handovers() -> dict[str, float]:
    """Clocks from an arrival until the warp that waits has arrived in turn."""
    loops = 64
    named, mbarrier = (_span(run(kernels.handover(n, loops))[0]) for n in (True, False))
    return {"named": named / (2 * loops), "mbarrier": mbarrier / (2 * loops)}


def copies(sms: int) -> list[dict[str, Any]]:
    """Bulk copies: latency of one alone, and bytes a clock of an SM, from L2 and from DRAM."""
    rows = []
    big = torch.zeros(DRAM_BYTES, dtype=torch.uint8, device="cuda")
    for where, size in (("L2", L2_BYTES), ("DRAM", DRAM_BYTES)):
        for ctas in (1, sms // 2, sms):
            for stages, nbytes in ((1, 16384), (4, 16384), (8, 16384), (4, 32768), (8, 4096)):
                rounds = 32
                made = kernels.copies(rounds, stages, nbytes)
                found = run(made, ctas, big[:size], 3 if where == "L2" else 1)
                clocks = [_span(one) for one in found]
                moved = rounds * stages * nbytes
                rows.append(
                    {
                        "from": where,
                        "ctas": ctas,
                        "stages": stages,
                        "bytes": nbytes,
                        "latency": sorted(one[2] for one in found)[len(found) // 2],
                        "bytes_a_clock": moved * len(clocks) / sum(clocks),
                        "slowest": moved / max(clocks),
                    }
                )
    return rows


def latencies() -> list[dict[str, Any]]:
    """Clocks of an instruction that waits for one of few before it, also beside products."""
    rows, loops = [], 32
    mixes = {name: (kernels.OPS[name],) for name in ("ex2", "fma", "max", "shuffle")}
    for name, ops in (mixes | {"summed": kernels.SUMMED, "softmax": kernels.SOFTMAX}).items():
        for beside, registers in ((0, False), (128, False), (128, True)):
            for groups in (1, 2):
                for chains in (16, 4, 2, 1):
                    made = kernels.rate(ops, groups, beside, loops, chains, registers)
                    (found,) = run(made)
                    clocks = max(_span(found[2 * g : 2 * g + 2]) for g in range(groups))
                    row = {"op": name, "warps": groups, "beside": beside, "chains": chains}
                    each = clocks / (kernels.UNROLL * loops)  # of each warp
                    rows.append({**row, "registers": registers, "clocks": each})
    return rows


def straights() -> list[dict[str, Any]]:
    """Clocks of an instruction of straight code, the first time and after, by how much there is."""
    rows = []
    for groups in (1, 2, 3):
        for count in (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288):
            loops = 8
            (found,) = run(kernels.straight(count, groups, loops), rounds=1)
            first, more = _span(found[:2]) / count, _span(found[2:]) / count / (loops - 1)
            rows.append({"bytes": 16 * count, "warps": groups, "first": first, "clocks": more})
    return rows


def branches() -> list[dict[str, Any]]:
    """Clocks that a branch takes besides the instructions between two."""
    rows, loops = [], 8
    for kind in kernels.BRANCH:
        for apart in (4, 16, 48):
            (found,) = run(kernels.branches(kind, apart, loops=loops))
            each = _span(found) / (kernels.BRANCHES * loops)
            rows.append({"branch": kind, "apart": apart, "clocks": each - apart})
    return rows


def tests() -> dict[str, float]:
    """Clocks of a test, with its branch, of an mbarrier's phase that is over."""
    (found,) = run(kernels.tests())
    return {"mbarrier": _span(found) / kernels.TESTS}


def stores(sms: int) -> list[dict[str, Any]]:
    """Clocks until stores to global memory are issued, and until shared memory is read after."""
    rows = []
    data = torch.zeros(STORED_BYTES, dtype=torch.uint8, device="cuda")
    for ctas in (1, sms // 2, sms):
        for groups in (1, 2):
            for count in (1, 2, 4, 8, 16):
                found = run(kernels.stores(count, groups), ctas, data)
                issued, read = (sum(one[i] - one[0] for one in found) / ctas for i in (1, 2))
                each = {"ctas": ctas, "warpgroups": groups, "stores": count}
                rows.append({**each, "issued": issued, "read": read})
    return rows


def peer_stores(sms: int) -> list[dict[str, Any]]:
    """Bytes a clock that a CTA stores into its pair's other one, while all do or one pair does."""
    rows, loops = [], 16
    for ctas in (2, sms // 4 * 2):
        for groups in (1, 2):
            found = run(kernels.peer_stores(groups, loops), ctas)
            moved = 16 * kernels.WARPGROUP * groups * kernels.PEER_STORES * loops
            clocks = sum(_span(one) for one in found) / len(found)
            each = {"ctas": ctas, "warpgroups": groups, "clocks": clocks / loops}
            rows.append({**each, "bytes_a_clock": moved / clocks})
    return rows


def bulk_adds(sms: int) -> list[dict[str, Any]]:
    """Bytes a clock that an SM adds to float32 in L2 by bulk reductions."""
    rows, rounds = [], 64
    zeros = torch.zeros(L2_BYTES // 4, device="cuda")
    for ctas in (1, sms // 2, sms):
        for nbytes in (512, 2048, 8192):
            found = run(kernels.bulk_adds(rounds, nbytes), ctas, zeros)
            clocks = sum(_span(one) for one in found) / len(found)
            rate = 4 * rounds * nbytes / clocks
            rows.append({"ctas": ctas, "bytes": nbytes, "bytes_a_clock": rate})
    return rows


def chases() -> dict[str, float]:
    """Clocks of a load and of an atomic that need the one before."""
    loops, zeros = 32, torch.zeros(1024, dtype=torch.int32, device="cuda")
    load, atomic = (_span(run(kernels.chase(a, loops), 1, zeros)[0]) for a in (False, True))
    return {"load": load / loops, "atomic": atomic / loops}


def launches(sms: int) -> dict[str, float]:
    """Microseconds from one kernel to the next, of kernels that end at once."""
    made = kernels.nothing()
    loaded = Loaded(made.ptx, "micro", made.threads, made.smem)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            loaded.launch(sms, [word(0)] * 3)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return {"launch_us": 1e3 * begin.elapsed_time(end) / LAUNCHES}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="File for the JSON.")
@click.option("--only", default="", help="Parts, separated by commas: rates,copies,...")
def main(out: Path | None, only: str) -> None:
    """Measure rates and latencies of an SM on this machine's GPU."""
    facts = torch.cuda.get_device_properties()
    sms = facts.multi_processor_count
    found: dict[str, Any] = {"gpu": facts.name, "sms": sms}
    parts = {
        "handovers": handovers,
        "chases": chases,
        "launches": lambda: launches(sms),
        "products": products,
        "copies": lambda: copies(sms),
        "rates": rates,
        "latencies": latencies,
        "straights": straights,
        "branches": branches,
        "tests": tests,
        "stores": lambda: stores(sms),
        "peer_stores": lambda: peer_stores(sms),
        "bulk_adds": lambda: bulk_adds(sms),
    }
    wanted = only.split(",") if only else list(parts)
    for name, part in ((name, parts[name]) for name in wanted):
        try:
            found[name] = part()
        except RuntimeError as problem:  # the others are still worth their time
            found[name] = {"failed": str(problem)}
        text = json.dumps(found, indent=1)
        if out:
            out.write_text(text)
    if not out:
        click.echo(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
