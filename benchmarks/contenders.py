"""Who is measured, and how time is taken on the GPU: one protocol for all.

Every contender is timed in every round, so that a drift of the clock (the card is limited by power)
meets all alike, and in an order drawn anew for each, since what ran before leaves the card hotter
or colder; a round's sample is the mean over enough launches to last a few milliseconds; the result
is the median of the rounds.
"""

from __future__ import annotations

import importlib
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..interface import env
from ..interface.autograd import attention

OURS = "hopwell"
DETERMINISTIC = f"{OURS}, deterministic"  # no peer of ours
ROUNDS = 7
SAMPLE_MS = 5.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One implementation of attention.

    Attributes: `bind` (q, k, v, causal) to a call that takes no time but its own; `out` finds O,
    (batch, len, heads, head_dim_v), in what the call returns.
    """

    name: str
    bind: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Call]
    out: Callable[[Any], torch.Tensor]


def contenders(backward: bool = False) -> tuple[list[Contender], list[str]]:
    """Ours, cuDNN, and FA3 and FA4 where they are installed; and a line for each that is not.

    With `backward` ours is there twice: also deterministic.
    """
    found = [
        Contender(OURS, _flash(attention), _first),
        Contender("cuDNN", cudnn, lambda out: out.transpose(1, 2)),
    ]
    if backward:
        bitwise = partial(attention, deterministic=True)
        found.insert(1, Contender(DETERMINISTIC, _flash(bitwise), _first))
    absent = []
    for name, module, package in (
        ("FA3", "fa3_fwd_interface", "fa3-fwd"),
        ("FA4", "flash_attn.cute", "flash-attn-4"),
    ):
        try:
            call = importlib.import_module(module).flash_attn_func
        except ImportError as problem:
            absent.append(f"{name} is left out: {problem}; install {package} to have it")
        else:
            found.append(Contender(name, _flash(call), _first))
    return found, absent


@dataclass
class Backward:
    """A call of one contender's backward alone: (dq, dk, dv) for a normal dO, like O contiguous.

    Forward runs in the first call, so that a contender without gradients fails there.
    """

    contender: Contender
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v
    causal: bool
    dout: torch.Tensor = field(init=False)
    _leaves: tuple[torch.Tensor, ...] = field(init=False)
    _out: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        q, k, v = self.inputs
        self._leaves = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
        seeded = torch.Generator(q.device).manual_seed(1)
        shape = (*q.shape[:3], v.shape[3])
        dout = torch.randn(shape, generator=seeded, device=q.device)
        self.dout = dout.to(q.dtype)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self._out is None:
            q, k, v = self._leaves
            self._out = self.contender.out(self.contender.bind(q, k, v, self.causal)())
        return torch.autograd.grad(self._out, self._leaves, self.dout, retain_graph=True)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """A call of cuDNN's attention, within `cudnn_alone`; it returns (batch, heads, len, head_dim).

    With `causal`, len_q must be len_kv: torch aligns its mask at the top left.
    """
    seen = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    return partial(scaled_dot_product_attention, *seen, is_causal=causal, enable_gqa=grouped)


def cudnn_alone() -> Any:
    """Context in which torch's attention is cuDNN's; around calls, since it takes host time."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def times(calls: Mapping[str, Call]) -> dict[str, float]:
    """Median time of one call on the GPU, microseconds, by name; of those that `run`."""
    with cudnn_alone():
        launches = {name: _launches(call) for name, call in calls.items() if runs(name, call)}
        samples: dict[str, list[float]] = {name: [] for name in launches}
        order, names = random.Random(0), list(launches)
        for _ in range(ROUNDS):
            order.shuffle(names)
            for name in names:
                samples[name].append(_sample(calls[name], launches[name]))
    return {name: statistics.median(sample) for name, sample in samples.items()}


def runs(name: str, call: Call) -> bool:
    """Call once: whether a contender can run a problem; why not is logged at level info.

    Raises:
        Exception: from ours, for any reason but that there is no kernel.
    """
    try:
        call()
    except Exception as problem:  # each peer refuses in its own way
        if name.startswith(OURS) and not isinstance(problem, NotImplementedError):
            raise
        env.log.info("%s cannot run this: %s", name, problem)
        return False
    return True


def _launches(call: Call) -> int:
    """How many launches a sample takes; warms the call up."""
    _sample(call, 3)
    return max(3, round(SAMPLE_MS * 1e3 / _sample(call, 3)))


def _sample(call: Call, launches: int) -> float:
    """Mean microseconds of a call, launched that many times in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / launches


def _flash(function: Callable[..., Any]) -> Callable[..., Call]:
    """Bind as (q, k, v, causal=...), the way every FlashAttention is called."""
    return lambda q, k, v, causal: partial(function, q, k, v, causal=causal)


def _first(result: Any) -> torch.Tensor:
    """O alone: some versions return a tuple whose first element it is."""
    return result[0] if isinstance(result, (tuple, list)) else result
