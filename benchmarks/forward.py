"""Forward on this machine's GPU against cuDNN's, in one timing protocol.

Every contender is timed in every round, so that a drift of the clock (the card is limited by power)
meets all alike; a round's sample is the mean over enough launches to last a few milliseconds; the
result is the median of the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..interface.functions import attention

ROUNDS = 7
SAMPLE_MS = 5.0
TOKENS = 16384  # of a batch
HIDDEN = 2048  # heads * head_dim


def main() -> None:
    """Print time, throughput and ratio for head_dim 64 and 128, 1k to 16k tokens, both masks.

    Raises:
        RuntimeError: this machine has no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "this machine has no CUDA GPU, so there is no time to measure; run it on one, or run "
            "`python -m hopwell demo` for counters from the emulator"
        )
    table = Table(title=f"forward, bf16, {torch.cuda.get_device_name()}")
    for column in (
        "head_dim",
        "len",
        "mask",
        "us",
        "TFLOP/s",
        "cuDNN us",
        "cuDNN TFLOP/s",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for head_dim in (64, 128):
        for length in (1024, 4096, 16384):
            for causal in (False, True):
                shape = (TOKENS // length, length, HIDDEN // head_dim, head_dim)
                q, k, v = (
                    torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)
                )
                us = times(
                    {
                        "hopwell": partial(attention, q, k, v, causal=causal),
                        "cudnn": cudnn(q, k, v, causal=causal),
                    }
                )
                flops = 4 * TOKENS * length * HIDDEN / (2 if causal else 1)
                ours, theirs = us["hopwell"], us["cudnn"]
                table.add_row(
                    str(head_dim),
                    str(length),
                    "causal" if causal else "full",
                    f"{ours:.0f}",
                    f"{flops / ours / 1e6:.0f}",
                    f"{theirs:.0f}",
                    f"{flops / theirs / 1e6:.0f}",
                    f"{theirs / ours:.2f}",
                )
    Console().print(table)


def cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> Callable[[], torch.Tensor]:
    """A call of cuDNN's attention on (batch, len, heads, head_dim) tensors, for `times`.

    With `causal`, len_q must be len_kv: torch aligns its mask at the top left.
    """
    seen = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]

    return partial(scaled_dot_product_attention, *seen, is_causal=causal, enable_gqa=grouped)


def times(contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median time of one call on the GPU, microseconds, for each contender."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # outside of the calls: it takes host time
        launches = {name: _launches(call) for name, call in contenders.items()}
        for _ in range(ROUNDS):
            for name, call in contenders.items():
                samples[name].append(_sample(call, launches[name]))
    return {name: statistics.median(sample) for name, sample in samples.items()}


def _launches(call: Callable[[], object]) -> int:
    """How many launches a sample takes; warms the call up."""
    _sample(call, 3)
    return max(3, round(SAMPLE_MS * 1e3 / _sample(call, 3)))


def _sample(call: Callable[[], object], launches: int) -> float:
    """Mean microseconds of a call, launched that many times in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / launches
