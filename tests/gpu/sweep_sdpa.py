"""Random problems through torch's scaled_dot_product_attention with Hopwell registered: by hand.

    python -m tests.gpu.sweep_sdpa

O and the gradients of every problem against float64, with the limits of `sweep` and
`sweep_backward`; and that it was Hopwell that ran. Ends with status 1 if anything is off.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from dataclasses import replace

import click
import torch
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import hopwell.torch
from hopwell.interface import sdpa
from hopwell.interface.demo import Case, measure

from ..reference import attention, gradients
from .sweep import build_all, place
from .sweep_backward import (
    LIMITS,
    build,
    build_forward,
    configurations,
    draw_soft,
    relative,
)


def through_torch(case: Case, how: str, seed: int) -> tuple[float, dict[str, float]]:
    """O's error as a share of what rounding allows, and the gradients' relative errors."""
    options = {"scale": case.scale, "causal": case.causal}
    inputs = place(case.inputs("cuda"), how)
    shape = (case.batch, case.len_q, case.heads, case.head_dim)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", case.dtype)
    leaves = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in inputs]
    out = scaled_dot_product_attention(
        *leaves, scale=case.scale, is_causal=case.causal, enable_gqa=case.heads != case.heads_kv
    )
    found = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    right, forward = gradients(dout, *inputs, **options), attention(*inputs, **options)
    share = measure(case, inputs, out.transpose(1, 2), forward.lse.float()).share
    back = (gradient.transpose(1, 2) for gradient in found)
    return share, relative(back, right, forward.out, dout, inputs, options)


@click.command()
@click.option("--cases", default=300, show_default=True, help="Shapes against float64.")
@click.option("--jobs", default=os.cpu_count(), show_default=True, help="Compilers at once.")
@click.option("--seed", default=0, show_default=True)
@click.option("--longest", default=1000, show_default=True, help="Length of q and of k.")
def main(cases: int, jobs: int, seed: int, longest: int) -> None:
    """Sweep random problems through torch on the current GPU."""
    rng = random.Random(seed)
    # torch's flash attention has one head_dim for all, and no causal mask where lengths differ.
    there = [one for one in configurations() if one.head_dim == one.head_dim_v]
    build_all(there, jobs, build)
    build_all(there, jobs, build_forward)
    calls, met = Counter[str](), Counter[str]()

    def counted(name: str) -> None:
        run = sdpa.OPERATORS[name]

        def call(*arguments: object, **options: object) -> object:
            calls[name] += 1
            return run(*arguments, **options)

        sdpa.OPERATORS[name] = call

    for name in list(sdpa.OPERATORS):
        counted(name)
    hopwell.torch.register()
    registry.activate_flash_attention_impl("hopwell")
    failed, worst_out, worst = 0, 0.0, Counter[str]()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for i in range(cases):
            case = draw_soft(rng, there[i % len(there)], longest)
            if case.causal:
                case = replace(case, len_kv=case.len_q)
            how = rng.choice(["plain", "transposed", "sliced"])
            share, errors = through_torch(case, how, i)
            worst_out = max(worst_out, share)
            for name, error in errors.items():
                key = f"{name} {case.dtype}"
                worst[key] = max(worst[key], error)
            if not share <= 1 or max(errors.values()) > LIMITS[case.dtype]:
                failed += 1
                print("FAILED", case, how, f"{share:.0%}", errors)
            met.update({how: 1, f"group {case.heads // case.heads_kv}": 1})
    print(f"{cases} shapes in {len(there)} configurations, {failed} failed; O {worst_out:.0%}")
    print(", ".join(f"{name} {error:.2e}" for name, error in sorted(worst.items())))
    print("among them:", ", ".join(f"{number} {what}" for what, number in sorted(met.items())))
    print("operators called:", dict(calls))
    passes = (
        calls["_scaled_dot_product_flash_attention"],
        sum(n for name, n in calls.items() if name.endswith("backward")),
    )
    if passes != (cases, cases):
        print(f"FAILED: Hopwell ran {passes} times forward and backward, of {cases}")
    sys.exit(bool(failed) or passes != (cases, cases))


if __name__ == "__main__":
    main()
