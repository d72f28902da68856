"""Speed of the emulator: warp-instructions a second, checker on.

python -m hopwell.benchmarks.emulator_speed
"""

from __future__ import annotations

import time

import torch

from ..interface.emulate import emulate
from ..interface.functions import forward

ROUNDS = 5
# SM version, (batch, len, heads, head_dim) of q, k and v, and whether causal.
PROBLEMS = (("sm_90a", (1, 1024, 1, 128), True), ("sm_100a", (1, 512, 2, 128), False))


def main() -> None:
    """Print the best of some rounds of forward, after translation."""
    torch.set_num_threads(1)
    for arch, shape, causal in PROBLEMS:
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in "qkv")
        for check in (True, False):
            best, instructions = float("inf"), 0
            for _ in range(1 + ROUNDS):
                with emulate(arch, check=check, counters=True) as emulation:
                    start = time.perf_counter()
                    forward(q, k, v, causal=causal)
                    best = min(best, time.perf_counter() - start)
                instructions = emulation.report.counters.warp_instructions
            print(
                f"{arch}, {' x '.join(map(str, shape))} {'causal' if causal else 'full'}, "
                f"checker {'on' if check else 'off'}: {best:.2f} s, "
                f"{instructions} warp-instructions, {instructions / best:,.0f} a second"
            )


if __name__ == "__main__":
    main()
