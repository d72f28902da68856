"""Speed of the emulator: warp-instructions a second, checker on.

python -m hopwell.benchmarks.emulator_speed
"""

from __future__ import annotations

import time

import torch

from ..interface.emulate import emulate
from ..interface.functions import forward

ROUNDS = 5


def main() -> None:
    """Print the best of some rounds of forward 1 x 1024 x 1 x 128, causal, after translation."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 1024, 1, 128, dtype=torch.bfloat16) for _ in "qkv")
    for check in (True, False):
        best, instructions = float("inf"), 0
        for _ in range(1 + ROUNDS):
            with emulate("sm_90a", check=check, counters=True) as emulation:
                start = time.perf_counter()
                forward(q, k, v, causal=True)
                best = min(best, time.perf_counter() - start)
            instructions = emulation.report.counters.warp_instructions
        print(
            f"checker {'on' if check else 'off'}: {best:.2f} s, {instructions} warp-instructions, "
            f"{instructions / best:,.0f} a second"
        )


if __name__ == "__main__":
    main()
