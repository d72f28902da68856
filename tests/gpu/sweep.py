"""Random problems on a GPU against float64, and against the emulator: run by hand on the machine.

    python -m tests.gpu.sweep --cases 200 --fidelity 8
    compute-sanitizer --tool memcheck python -m tests.gpu.sweep --cases 12 --fidelity 0

Prints the failures, the largest error as a share of what rounding allows, how our error compares
with torch's attention on the same input, and the share of elements that GPU and emulator agree on
bitwise. Ends with status 1 if anything is off.
"""

from __future__ import annotations

import contextlib
import random
import sys

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hopwell
from hopwell.interface.demo import Case, measure

PEERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def draw(rng: random.Random) -> Case:
    """A random problem: lengths 1 to 3000, GQA groups up to 8, both masks, both types."""
    heads_kv = rng.choice([1, 1, 2, 3, 4])
    len_q = rng.choice([1, rng.randint(1, 300), rng.randint(1, 3000)])
    len_kv = rng.choice([len_q, rng.randint(1, 300), rng.randint(1, 3000)])
    return Case(
        batch=rng.choice([1, 1, 2, 3]),
        len_q=len_q,
        len_kv=len_kv,
        heads=heads_kv * rng.choice([1, 1, 2, 4, 7, 8]),
        heads_kv=heads_kv,
        head_dim=rng.choice([64, 128]),
        dtype=rng.choice([torch.bfloat16, torch.float16]),
        causal=rng.random() < 0.5,
    )


def place(tensors: tuple[torch.Tensor, ...], how: str) -> tuple[torch.Tensor, ...]:
    """The same values in another layout of memory, as (batch, len, heads, head_dim) views."""
    if how == "transposed":
        return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    if how == "sliced":  # out of a wider tensor, rows apart
        return tuple(torch.cat([t, t], dim=-1)[..., : t.shape[-1]] for t in tensors)
    return tensors


def rms(out: torch.Tensor, exact: torch.Tensor) -> float:
    return (out.double() - exact).square().mean().sqrt().item()


def peers_ratio(case: Case, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> float | None:
    """Our RMS error over the best peer's, where torch has the same mask."""
    if case.causal and case.len_q != case.len_kv:
        return None
    q, k, v = (t.transpose(1, 2) for t in inputs)
    group = case.heads // case.heads_kv
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        exact = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=case.causal
        )
    errors = []
    for peer in PEERS:
        with sdpa_kernel(peer), contextlib.suppress(RuntimeError):  # it has no kernel for this
            theirs = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal
            )
            errors.append(rms(theirs, exact))
    if not errors:
        return None
    return rms(out.transpose(1, 2), exact) / max(min(errors), 1e-30)


def shapes(count: int, seed: int) -> bool:
    """`count` random problems against float64."""
    rng = random.Random(seed)
    failed, worst, ratios = 0, 0.0, []
    for _ in range(count):
        case, how = draw(rng), rng.choice(["plain", "transposed", "sliced"])
        inputs = place(case.inputs("cuda"), how)
        out, lse = hopwell.forward(*inputs, causal=case.causal)
        errors = measure(case, inputs, out, lse)
        worst = max(worst, errors.share)
        ratio = peers_ratio(case, inputs, out)
        if ratio is not None and out.numel() > 1 << 16:  # a mean over few elements is noise
            ratios.append(ratio)
        if not errors.fine:
            failed += 1
            print("FAILED", case, how, errors)
    print(f"{count} shapes, {failed} failed; largest error {worst:.0%} of what rounding allows")
    if ratios:
        ratios.sort()
        print(
            f"RMS error / best of torch's flash and cuDNN over {len(ratios)} shapes: "
            f"median {ratios[len(ratios) // 2]:.4f}, largest {ratios[-1]:.4f}"
        )
    return not failed and all(r <= 1.05 for r in ratios)


def fidelity(count: int, seed: int) -> bool:
    """`count` random problems on the GPU and on the emulator."""
    rng = random.Random(seed)
    ok = True
    for _ in range(count):
        case = draw(rng)
        case = Case(
            1,
            min(case.len_q, 700),
            min(case.len_kv, 700),
            case.heads_kv,
            case.heads_kv,
            case.head_dim,
            case.dtype,
            case.causal,
        )
        inputs = case.inputs("cpu")
        with hopwell.emulate("sm_90a", exact=True):
            emulated, emulated_lse = hopwell.forward(*inputs, causal=case.causal)
        out, lse = hopwell.forward(*(t.cuda() for t in inputs), causal=case.causal)
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
@click.option("--cases", default=200, show_default=True)
@click.option("--fidelity", "agreements", default=8, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(cases: int, agreements: int, seed: int) -> None:
    """Sweep random problems on the current GPU."""
    ok = shapes(cases, seed)
    ok &= fidelity(agreements, seed)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
