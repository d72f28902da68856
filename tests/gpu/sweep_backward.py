"""Random gradients on a GPU against float64: run by hand on the machine.

    python -m tests.gpu.sweep_backward
    compute-sanitizer --tool memcheck python -m tests.gpu.sweep_backward --cases 12

Prints the failures; for each dtype, the largest relative error of dq, dk and dv; and the largest of
our RMS errors beside those of torch's kernels. Ends with status 1 if anything is off. `--emulated`
tries the sweep itself without a GPU, on small problems.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import click
import torch
from torch.nn.attention import sdpa_kernel

import hopwell
from hopwell.benchmarks.accuracy import rms
from hopwell.interface import compile as compiling
from hopwell.interface import env
from hopwell.interface.cache import Store
from hopwell.interface.demo import Case
from hopwell.interface.functions import DTYPE_NAMES, backward_spec, forward_spec
from hopwell.kernels import BackwardFacts, ForwardFacts
from hopwell.kernels.tiles import HEAD_DIMS, forward_tiles

from ..reference import Gradients, attention, gradients
from .sweep import ARCH, PEERS, Configuration, build_all, draw, place, quiet, torchs

PAIRS = ((192, 128), (128, 96), (64, 128))  # of head_dim and head_dim_v, that models have
NAMES = ("dq", "dk", "dv")
PEERS_RATIO = 1.05  # that our RMS error may be of the best peer's
# Of a gradient's norm: rounding P or dS, and the gradient, to 16 bits gives 0.6 of this.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def configurations() -> list[Configuration]:
    """Every head_dim, and the pairs, with both masks; dtypes in turn."""
    dims = [*((head_dim, head_dim) for head_dim in HEAD_DIMS), *PAIRS]
    return [
        Configuration(*one, (torch.bfloat16, torch.float16)[(i + causal) % 2], bool(causal))
        for i, one in enumerate(dims)
        for causal in (0, 1)
    ]


def build(one: Configuration) -> None:
    """Compile into the cache on disk."""
    facts = BackwardFacts(DTYPE_NAMES[one.dtype], one.head_dim, one.head_dim_v, one.causal)
    compiling.save(backward_spec(ARCH, facts), Store(env.cache_dir()))


def build_forward(one: Configuration) -> None:
    """The same of the forward kernel that `peers` needs."""
    dims = one.head_dim, one.head_dim_v
    short = one.causal and forward_tiles(ARCH, *dims, short=True).short
    facts = ForwardFacts(DTYPE_NAMES[one.dtype], *dims, one.causal, short=short)
    compiling.save(forward_spec(ARCH, facts), Store(env.cache_dir()))


def draw_soft(rng: random.Random, one: Configuration, longest: int) -> Case:
    """`draw` by other scales: at those that forward is tried with P is 0 or 1, and dS all
    rounding."""
    case = draw(rng, one, longest)
    return replace(case, scale=rng.choice([None, None, -1 / case.head_dim**0.5, 0.01]))


def errors(case: Case, device: str, how: str, layout: str, seed: int) -> dict[str, float]:
    """Relative errors of dq, dk and dv of `backward`, inf where one holds a NaN.

    Out and LSE are those of float64, rounded: forward has a sweep of its own. Of few keys dP and D,
    the two terms of dS, may all but cancel (of one key they do), and what is left is how they were
    rounded: errors are relative to the gradients without D, where those are larger.
    """
    options: dict[str, Any] = {"scale": case.scale, "causal": case.causal}
    inputs = case.inputs(device)
    dout = torch.randn(
        (case.batch, case.len_q, case.heads, case.head_dim_v or case.head_dim),
        generator=torch.Generator().manual_seed(seed),
    ).to(device, case.dtype)
    right, forward = gradients(dout, *inputs, **options), attention(*inputs, **options)
    given = place((dout, *inputs, forward.out.to(case.dtype)), how)
    if layout == "bhsd":
        given = tuple(tensor.transpose(1, 2) for tensor in given)
    found = hopwell.backward(*given, forward.lse.float(), layout=layout, **options)
    if layout == "bhsd":
        found = tuple(tensor.transpose(1, 2) for tensor in found)
    return relative(found, right, forward.out, dout, inputs, options)


def relative(
    found: Iterable[torch.Tensor],
    right: Gradients,
    out: torch.Tensor,
    dout: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    options: dict[str, Any],
) -> dict[str, float]:
    """Relative errors of dq, dk and dv as `errors` says, `out` being float64's."""
    rowsum = (dout.double() * out).sum(-1).transpose(1, 2)
    without = gradients(dout, *inputs, **options, dlse=rowsum)  # dlse takes D out of dS
    result: dict[str, float] = {}
    for ours, name in zip(found, NAMES, strict=True):
        exact = getattr(right, name)
        norm = max(exact.norm().item(), getattr(without, name).norm().item())
        off = (ours.double() - exact).norm().item()
        error = off / norm if norm else float(ours.abs().max() > 0)
        result[name] = error if error == error else float("inf")
    return result


def rms_errors(
    attend: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    right: Gradients,
) -> dict[str, float]:
    """Of dq, dk and dv by autograd."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    found = torch.autograd.grad(attend(*leaves), leaves, dout)
    return {
        name: rms(ours.double() - getattr(right, name))
        for name, ours in zip(NAMES, found, strict=True)
    }


def peers(there: list[Configuration], device: str, length: int) -> bool:
    """Our RMS errors, after both passes, beside those of torch's kernels."""
    worst = {(dtype, name): (0.0, "") for dtype in LIMITS for name in NAMES}
    alone, ok = 0, True
    for i, one in enumerate(there):
        case = Case(4, length, length, 4, 2, one.head_dim, one.dtype, one.causal, one.head_dim_v)
        inputs = case.inputs(device)
        shape = (4, length, 4, one.head_dim_v)
        dout = torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device, one.dtype)
        right = gradients(dout, *inputs, causal=one.causal)
        attend, theirs = partial(hopwell.attention, causal=one.causal), list[dict[str, float]]()
        ours = rms_errors(attend, inputs, dout, right)
        for peer in PEERS.values():
            with sdpa_kernel(peer), contextlib.suppress(RuntimeError), quiet():
                theirs.append(rms_errors(partial(torchs, causal=one.causal), inputs, dout, right))
        alone += not theirs
        for name in NAMES if theirs else ():
            ratio = ours[name] / min(errors[name] for errors in theirs)
            worst[one.dtype, name] = max(worst[one.dtype, name], (ratio, str(case)))
            if ratio > PEERS_RATIO:
                ok = False
                print(f"FAILED {case}: RMS error of {name} {ratio:.4f} of the best peer's")
    for (dtype, name), (ratio, where) in worst.items():
        print(f"{dtype} {name}: RMS error at most {ratio:.4f} of the best of torch's, at {where}")
    print(f"torch has no kernel for {alone} of {len(there)} configurations")
    return ok


@click.command()
@click.option("--cases", default=400, show_default=True, help="Shapes against float64.")
@click.option("--peers", "length", default=1024, show_default=True, help="Their length; 0: none.")
@click.option("--jobs", default=os.cpu_count(), show_default=True, help="Compilers at once.")
@click.option("--seed", default=0, show_default=True)
@click.option("--longest", default=1000, show_default=True, help="Length of q and of k.")
@click.option("--emulated", is_flag=True, help="Without a GPU: small shapes, on the emulator.")
def main(cases: int, length: int, jobs: int, seed: int, longest: int, emulated: bool) -> None:
    """Sweep random gradients on the current GPU."""
    rng, there = random.Random(seed), configurations()
    if emulated:
        there, longest = rng.sample(there, min(3, cases)), 200
    build_all(there, jobs, build)
    worst: dict[torch.dtype, Counter[str]] = {dtype: Counter() for dtype in LIMITS}
    failed, met = 0, Counter[str]()
    with hopwell.emulate(ARCH) if emulated else contextlib.nullcontext():
        for i in range(cases):
            case = draw_soft(rng, there[i % len(there)], longest)
            how = rng.choice(["plain", "transposed", "sliced"])
            layout = rng.choice(["bshd", "bhsd"])
            found = errors(case, "cpu" if emulated else "cuda", how, layout, i)
            for name, error in found.items():
                worst[case.dtype][name] = max(worst[case.dtype][name], error)
            if max(found.values()) > LIMITS[case.dtype]:
                failed += 1
                print("FAILED", case, how, layout, found)
            met.update({how: 1, layout: 1, f"group {case.heads // case.heads_kv}": 1})
    print(f"{cases} shapes in {len(there)} configurations, {failed} failed")
    for dtype, largest in worst.items():
        print(dtype, ", ".join(f"{name} {error:.2e}" for name, error in largest.items()))
    print("among them:", ", ".join(f"{number} {what}" for what, number in sorted(met.items())))
    ok = not failed
    if length and not emulated:
        build_all(there, jobs, build_forward)
        ok &= peers(there, "cuda", length)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
