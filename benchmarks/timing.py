"""How time is taken on the GPU: one protocol for all.

Every contestant is timed in every round, so that a drift of the clock (the card is limited by
power) meets all alike, and in an order drawn anew for each, since what ran before leaves the card
hotter or colder. A round's sample is the mean over enough launches to last a few milliseconds; the
result is the median of the rounds and their quartiles.

Launches follow each other without a pause, which is how a model calls attention; but where all
tensors of a problem fit in L2, each would find them there. Then a buffer larger than L2 is written
before each launch, and each is timed by events of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, NamedTuple

import torch

from ..interface import env

OURS = "hopwell"  # what the names of all ours begin with
ROUNDS = 7
SAMPLE_MS = 5.0
# Far larger than any L2, so that writing it also takes longer than the host takes to launch the
# slowest contestant (some 250 us on an H200): no event waits for the host.
FLUSH_BYTES = 1 << 30
MONITOR_MS = 100
SAID_CHARACTERS = 160  # of why a contestant cannot run
PROTOCOL = (
    f"Times: {ROUNDS} rounds, in each every contestant once, in an order drawn anew; samples of "
    f"{SAMPLE_MS:.0f} ms after a warm-up; median and quartiles of the rounds. Where all tensors "
    "fit in L2 it is flushed before each launch (marked cold), else launches follow each other"
)


@dataclass(frozen=True)
class Call:
    """A launch that takes no time but its own.

    Attributes: `context` needs to be around it; entering takes host time, so once around many
    launches. `results` finds O, or dq, dk and dv, in what a launch returns, as (batch, len, heads,
    head_dim).
    """

    launch: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    results: Callable[[Any], tuple[torch.Tensor, ...]] = tuple

    def once(self) -> tuple[torch.Tensor, ...]:
        """Results of one launch."""
        with self.context():
            return self.results(self.launch())


class Times(NamedTuple):
    """Microseconds of a call on the GPU: median and quartiles of the rounds."""

    median: float
    low: float
    high: float


def able(calls: Mapping[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """Call each once: those that can run the problem, and why the others cannot, by name.

    Raises:
        Exception: from ours, for any reason but that there is no kernel.
    """
    found: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for name, call in calls.items():
        try:
            with call.context():
                call.launch()
        except Exception as problem:  # each peer refuses in its own way
            if name.startswith(OURS) and not isinstance(problem, NotImplementedError):
                raise
            env.log.info("%s cannot run this: %s", name, problem)
            said = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            reasons[name] = said[:SAID_CHARACTERS]
        else:
            found[name] = call
    return found, reasons


def times(calls: Mapping[str, Call], *, cold: bool = False) -> dict[str, Times]:
    """Time of one call on the GPU, by name.

    Args:
        calls: those that are `able` to run.
        cold: flush L2 before each launch.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if cold else None
    launches = {name: _launches(call, flush) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, names = random.Random(0), list(calls)
    for _ in range(ROUNDS):
        order.shuffle(names)
        for name in names:
            samples[name].append(_sample(calls[name], launches[name], flush))
    found: dict[str, Times] = {}
    for name, sample in samples.items():
        low, median, high = statistics.quantiles(sample, n=4, method="inclusive")
        found[name] = Times(median, low, high)
    return found


def fits_in_l2(size: int) -> bool:
    """Whether so many bytes fit in the L2 of this machine's GPU."""
    return size <= torch.cuda.get_device_properties().L2_cache_size


def _launches(call: Call, flush: torch.Tensor | None) -> int:
    """How many launches a sample takes; warms the call up."""
    _sample(call, 3, flush)
    return max(3, round(SAMPLE_MS * 1e3 / _sample(call, 3, flush)))


def _sample(call: Call, launches: int, flush: torch.Tensor | None) -> float:
    """Mean microseconds of a call, launched that many times: in a row, or each after a flush."""
    spans, each = (1, launches) if flush is None else (launches, 1)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(spans)]
    with call.context():
        for start, end in events:
            if flush is not None:
                flush.zero_()
            start.record()
            for _ in range(each):
                call.launch()
            end.record()
    torch.cuda.synchronize()
    return 1e3 * sum(start.elapsed_time(end) for start, end in events) / launches


class Monitor:
    """Context in which `nvidia-smi` notes the clock of the SMs and the power of the GPU.

    Attributes: `absent` says why nothing is noted; empty while something is.
    """

    absent = ""

    def __enter__(self) -> Monitor:
        uuid = torch.cuda.get_device_properties().uuid
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", *query, "-lms", str(MONITOR_MS)]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as problem:
            self.absent = f"clock and power are not noted: {problem}"
        else:
            os.set_blocking(self._noted.fileno(), False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._noted.close()

    @property
    def _noted(self) -> IO[bytes]:
        assert self._process and self._process.stdout
        return self._process.stdout

    def take(self) -> tuple[float | None, float | None]:
        """Median MHz and W of what was noted since the last call; None of nothing."""
        noted = self._noted.read() if self._process else None  # None also of an empty pipe
        return medians((noted or b"").decode())


def medians(noted: str) -> tuple[float | None, float | None]:
    """Median MHz and W of lines as `nvidia-smi` prints them; what is no pair of numbers, such as
    what a card does not tell, is left out."""
    pairs: list[tuple[float, float]] = []
    for line in noted.splitlines():
        with contextlib.suppress(ValueError):
            clock, power = map(float, line.split(","))
            pairs.append((clock, power))
    if not pairs:
        return None, None
    clocks, powers = zip(*pairs, strict=True)
    return statistics.median(clocks), statistics.median(powers)
