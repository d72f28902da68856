"""Random problems on a GPU against float64, and against the emulator: run by hand on the machine.

    python -m tests.gpu.sweep
    compute-sanitizer --tool memcheck python -m tests.gpu.sweep --cases 12 --fidelity 0 --peers 0

Prints the failures, the largest error as a share of what rounding allows, our RMS error beside
that of torch's attention on the same input, and the share of elements that GPU and emulator agree
on bitwise. Ends with status 1 if anything is off. `--emulated` tries the sweep itself without a
GPU, on small problems.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hopwell
from hopwell.benchmarks.accuracy import rms
from hopwell.benchmarks.contenders import sdpa
from hopwell.interface.demo import Case, exact, measure
from hopwell.interface.functions import COMMON_HEAD_DIMS
from hopwell.kernels.tiles import FORWARD, HEAD_DIMS, SHORT_LEN_Q, forward_tiles

ARCH = "sm_90a"
PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS_RATIO = 1.02  # that our RMS error may be of the best peer's


@dataclass(frozen=True)
class Configuration:
    """What a kernel is compiled for."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    causal: bool


def configurations(count: int, rng: random.Random) -> list[Configuration]:
    """Random ones; rows of the tile table in turn, each with both masks.

    Those for short queries serve head dims that others do: a length chooses between them.
    """
    pairs = [(head_dim, head_dim_v) for head_dim in HEAD_DIMS for head_dim_v in HEAD_DIMS]
    served: dict[str, list[tuple[int, int]]] = {row.reason: [] for row in FORWARD if not row.short}
    for pair in pairs:
        served[forward_tiles(ARCH, *pair).reason].append(pair)
    turns = list(served.values())
    return [
        Configuration(
            *rng.choice(turns[i // 2 % len(turns)]),
            rng.choice([torch.bfloat16, torch.float16]),
            causal=bool(i % 2),
        )
        for i in range(count)
    ]


def build(one: Configuration) -> None:
    """Compile into the cache on disk."""
    dims = (one.head_dim, one.head_dim_v)
    hopwell.compile(ARCH, dtypes=[one.dtype], head_dims=[dims], causal=[one.causal])


def build_all(
    there: list[Configuration], jobs: int, build: Callable[[Configuration], None] = build
) -> None:
    """One process each: the compiler is not for threads."""
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, there))
    print(f"{len(there)} configurations compiled in {time.perf_counter() - start:.0f} s")


def draw(rng: random.Random, one: Configuration, longest: int) -> Case:
    """A random problem: lengths 1 to `longest`, GQA groups 1, 2, 4 and 7, every kind of scale."""
    heads_kv = rng.choice([1, 1, 2, 3])
    lengths = [1, rng.randint(1, longest // 10), rng.randint(1, longest), rng.randint(1, longest)]
    len_q = rng.choice(lengths)
    usual = 1 / math.sqrt(one.head_dim)
    return Case(
        batch=rng.choice([1, 1, 2, 3]),
        len_q=len_q,
        len_kv=rng.choice([len_q, *lengths]),
        heads=heads_kv * rng.choice([1, 2, 4, 7]),
        heads_kv=heads_kv,
        head_dim=one.head_dim,
        head_dim_v=one.head_dim_v,
        dtype=one.dtype,
        causal=one.causal,
        scale=rng.choice([None, None, None, -usual, 0.0, 3 * usual, usual / 100]),
    )


def with_outliers(tensors: tuple[torch.Tensor, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """One element of a thousand ten times as large."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.where((torch.rand(t.shape, generator=generator) < 1e-3).to(t.device), 10 * t, t)
        for t in tensors
    )


def place(tensors: tuple[torch.Tensor, ...], how: str) -> tuple[torch.Tensor, ...]:
    """The same values in another layout of memory, as (batch, len, heads, head_dim) views."""
    if how == "transposed":
        return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    if how == "sliced":  # out of a wider tensor, rows apart
        return tuple(torch.cat([t, t], dim=-1)[..., : t.shape[-1]] for t in tensors)
    return tensors


def attend(
    case: Case, inputs: tuple[torch.Tensor, ...], layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` on (batch, len, heads, head_dim) views, handed over in either layout."""
    if layout == "bshd":
        return hopwell.forward(*inputs, scale=case.scale, causal=case.causal)
    q, k, v = (t.transpose(1, 2) for t in inputs)
    out, lse = hopwell.forward(q, k, v, scale=case.scale, causal=case.causal, layout="bhsd")
    return out.transpose(1, 2), lse


def nan_stays_in_its_rows(
    case: Case,
    inputs: tuple[torch.Tensor, ...],
    clean: tuple[torch.Tensor, torch.Tensor],
    layout: str,
) -> bool:
    """Every seventh row of Q with a NaN: its O and LSE are NaN if it sees a key, others right."""
    q, k, v = inputs
    rows = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)  # (batch, len, heads)
    rows.view(-1)[::7] = True
    q = q.clone()
    q[..., -1].masked_fill_(rows, math.nan)
    out, lse = attend(case, (q, k, v), layout)
    seeing = rows & ~clean[1].transpose(1, 2).isneginf()
    ill = out[seeing].isnan().all() and lse.transpose(1, 2)[seeing].isnan().all()
    out[rows] = clean[0][rows]
    lse.transpose(1, 2)[rows] = clean[1].transpose(1, 2)[rows]
    return bool(ill) and measure(case, inputs, out, lse).fine


def shapes(count: int, there: list[Configuration], seed: int, device: str, longest: int) -> bool:
    """`count` random problems against float64."""
    rng = random.Random(seed)
    failed, worst, met, rows = 0, 0.0, Counter[str](), set[str]()
    for i in range(count):
        case = draw(rng, there[i % len(there)], longest)
        how, layout = rng.choice(["plain", "transposed", "sliced"]), rng.choice(["bshd", "bhsd"])
        outliers, nan = rng.random() < 0.3, rng.random() < 0.2
        inputs = case.inputs(device)
        inputs = place(with_outliers(inputs, i) if outliers else inputs, how)
        result = attend(case, inputs, layout)
        errors = measure(case, inputs, *result)
        worst = max(worst, errors.share)
        if not errors.fine:
            failed += 1
            print("FAILED", case, how, layout, "outliers" if outliers else "", errors)
        if nan and not nan_stays_in_its_rows(case, inputs, result, layout):
            failed += 1
            print("FAILED", case, how, layout, "with NaN rows")
        short = case.causal and case.len_q <= SHORT_LEN_Q
        rows.add(forward_tiles(ARCH, case.head_dim, case.head_dim_v, short).reason)
        unseen = case.causal and case.len_q > case.len_kv
        met.update({"outliers": outliers, "NaN rows": nan, "rows that see nothing": unseen})
        met.update({how: 1, layout: 1, f"{'causal' if case.causal else 'full'}": 1})
        met.update({"negative scale": (case.scale or 0) < 0, "scale 0": case.scale == 0})
    print(
        f"{count} shapes in {len(there)} configurations of {len(rows)} of {len(FORWARD)} rows, "
        f"{failed} failed; largest error {worst:.0%} of what rounding allows"
    )
    print("among them:", ", ".join(f"{number} {what}" for what, number in sorted(met.items())))
    return not failed


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's attention, in our layout."""
    return sdpa(q, k, v, causal)().transpose(1, 2)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch warns before it raises that it has no kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def peers(device: str, length: int) -> bool:
    """Our RMS error beside that of torch's kernels, with and without outliers."""
    ok = True
    for dims in COMMON_HEAD_DIMS:
        head_dim, head_dim_v = dims if isinstance(dims, tuple) else (dims, dims)
        for i in range(8):
            outliers, causal = bool(i & 1), bool(i & 2)
            dtype = torch.float16 if i & 4 else torch.bfloat16
            case = Case(2, length, length, 4, 4, head_dim, dtype, causal, head_dim_v)
            inputs = case.inputs(device)
            inputs = with_outliers(inputs, 0) if outliers else inputs
            right, _, _ = exact(case, inputs)
            ours = rms(attend(case, inputs, "bshd")[0].double() - right)
            theirs = {}
            for name, peer in PEERS.items():
                with sdpa_kernel(peer), contextlib.suppress(RuntimeError), quiet():
                    theirs[name] = rms(torchs(*inputs, causal).double() - right)
            what = f"{case}{', outliers' if outliers else ''}: RMS error {ours:.3e}"
            if not theirs:
                print(f"{what}; torch has no kernel for this")
                continue
            best = min(theirs, key=lambda name: theirs[name])
            ratio = ours / theirs[best]
            ok &= ratio <= PEERS_RATIO
            failed = "" if ratio <= PEERS_RATIO else "FAILED "
            print(f"{failed}{what}, {ratio:.4f} of {best}'s, the best of {', '.join(theirs)}")
    return ok


def fidelity(count: int, there: list[Configuration], seed: int) -> bool:
    """`count` random problems on the GPU and on the emulator."""
    rng = random.Random(seed)
    ok = True
    for _ in range(count):
        case = draw(rng, rng.choice(there), 700)
        case = replace(case, batch=1, heads=case.heads_kv, scale=None)
        inputs = case.inputs("cpu")
        with hopwell.emulate(ARCH, exact=True):
            emulated, emulated_lse = attend(case, inputs, "bshd")
        out, lse = attend(case, tuple(t.cuda() for t in inputs), "bshd")
        out, lse = out.cpu(), lse.cpu()
        same = (out == emulated).double().mean().item()
        largest = out.double().abs().amax(-1, keepdim=True)
        apart = ((out.double() - emulated.double()).abs() / largest.clamp_min(1e-30)).max().item()
        apart_lse = (lse - emulated_lse).nan_to_num(0).abs().max().item()
        fine = same >= 0.995 and apart <= 2**-8 and apart_lse <= 1e-5
        ok &= fine
        print(
            f"{'' if fine else 'FAILED '}{case}: bitwise {same:.3%}, the rest within "
            f"{apart:.1e} of the row's largest, LSE within {apart_lse:.1e}"
        )
    return ok


@click.command()
@click.option("--cases", default=600, show_default=True, help="Random shapes.")
@click.option("--configurations", "kinds", default=42, show_default=True, help="Kernels for them.")
@click.option("--peers", "length", default=2048, show_default=True, help="Their length; 0: none.")
@click.option("--fidelity", "agreements", default=8, show_default=True, help="Shapes emulated too.")
@click.option("--jobs", default=os.cpu_count(), show_default=True, help="Compilers at once.")
@click.option("--seed", default=0, show_default=True)
@click.option("--emulated", is_flag=True, help="Without a GPU: small shapes, on the emulator.")
def main(
    cases: int, kinds: int, length: int, agreements: int, jobs: int, seed: int, emulated: bool
) -> None:
    """Sweep random problems on the current GPU."""
    there = configurations(kinds, random.Random(seed))
    build_all(there, jobs)
    device, longest = ("cpu", 400) if emulated else ("cuda", 3000)
    with hopwell.emulate(ARCH) if emulated else contextlib.nullcontext():
        ok = shapes(cases, there, seed, device, longest)
        if length:
            ok &= peers(device, length)
    if not emulated:
        ok &= fidelity(agreements, there, seed)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
