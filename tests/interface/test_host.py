"""What a warmed call costs the host, counted in calls: times are benchmarks/host.py's, on a GPU."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch

import hopwell
from hopwell.interface import autograd, checks, functions, plans
from hopwell.interface import compile as compiling
from hopwell.kernels import BackwardFacts, backward_workspace
from hopwell.kernels.tiles import SHORT_LEN_Q

from . import standin

Launches = list[tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """CPU tensors pass for those of a GPU, and launches are listed in place of run."""
    listed: Launches = []
    launcher = compiling.Launcher(lambda *arguments: listed.append(arguments), {})
    monkeypatch.setattr(checks, "_devices", lambda *_: iter(()))
    for module in (functions, autograd):
        monkeypatch.setattr(module, "arch_for", lambda _: "sm_90a")
    monkeypatch.setattr(autograd, "sms_of", lambda _: 114)
    monkeypatch.setattr(compiling, "launcher", lambda *_, **__: launcher)
    plans.forget()
    yield listed
    plans.forget()


@dataclass
class Cuda:
    """What `_counter` asks torch."""

    streams: list[int] = field(default_factory=lambda: [7, 7])  # the current one of each device
    capturing: bool = False
    made: list[torch.device] = field(default_factory=list)  # for each counter, where

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_raw_stream(self, index: int) -> int:
        return self.streams[index]

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.made.append(device)
        return torch.empty(*shape, dtype=dtype).fill_(0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    capturing, stream = cuda.is_current_stream_capturing, cuda.current_raw_stream
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    monkeypatch.setattr(torch, "zeros", cuda.zeros)
    monkeypatch.setattr(functions, "_counters", {})
    return cuda


def inputs(layout: str) -> tuple[torch.Tensor, ...]:
    shape = (2, 100, 4, 64) if layout == "bshd" else (2, 4, 100, 64)
    return tuple(torch.ones(shape, dtype=torch.bfloat16) for _ in "qkv")


def calls(function: Callable[[], Any]) -> Counter[str]:
    """Python and C functions that one call runs, by name."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_name] += 1
        elif event == "c_call":
            seen[argument.__name__] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_warmed_call_does_little(
    layout: Any, launches: Launches, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two allocations, two look-ups, no view, no check; in either layout."""
    tensors, counter, device = inputs(layout), functions._counter, torch.device("cuda", 0)
    monkeypatch.setattr(functions, "_counter", lambda _: counter(device))
    hopwell.attention(*tensors, layout=layout)
    seen = calls(lambda: hopwell.attention(*tensors, layout=layout))
    assert len(launches) == 2
    assert seen["empty_strided"] == 2
    del seen["<lambda>"], seen["append"], seen["setprofile"]  # this test's own
    allowed = {"attention", "forward", "is_dynamo_compiling", "get", "empty_strided"}
    allowed |= {"_counter", "is_current_stream_capturing", "current_raw_stream"}
    assert set(seen) <= allowed, seen
    assert seen.total() <= 7 + 4, seen
    assert launches[0][6] is launches[1][6] and cuda.made == [device]


def test_a_warmed_backward_does_little(launches: Launches) -> None:
    """Four allocations, of the gradients and the workspace, and no check."""
    q, k, v = inputs("bshd")
    arguments = torch.ones_like(q), q, k, v, torch.ones_like(q), torch.ones(2, 4, 100)
    hopwell.backward(*arguments)
    seen = calls(lambda: hopwell.backward(*arguments))
    assert len(launches) == 2
    assert seen["empty_strided"] == 3 and seen["empty"] == 1
    unwanted = {"_problems", "backward_workspace", "launcher", "contiguous", "detach", "gradients"}
    assert not unwanted & set(seen), seen


def test_backward_launches_tensors_as_they_are(launches: Launches) -> None:
    q, k, v, dout, out = (torch.ones(2, 4, 100, 64).half() for _ in range(5))
    lse, dlse = torch.ones(2, 4, 100), torch.ones(2, 4, 100)
    for deterministic, more in ((False, ()), (True, (dlse,))):
        dq, dk, dv = hopwell.backward(
            *(dout, q, k, v, out, lse),
            layout="bhsd",
            deterministic=deterministic,
            dlse=more[0] if more else None,
        )
        *launched, workspace, scale, heads_first, sms = launches.pop()
        expected = (dout, q, k, v, out, lse, *more, dq, dk, dv)
        pairs = zip(launched, expected, strict=True)
        assert all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)
        facts = BackwardFacts("float16", 64, 64, False, deterministic, bool(more))
        assert workspace.shape == (backward_workspace("sm_90a", facts, 2, 4, 100),)
        assert workspace.dtype == torch.float32 and scale == 0.125 and heads_first
        assert sms == 114
        assert all(gradient.is_contiguous() for gradient in (dq, dk, dv))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_tensors_are_launched_as_they_are(layout: Any, launches: Launches) -> None:
    tensors = inputs(layout)
    out, lse = hopwell.forward(*tensors, layout=layout)
    assert out.is_contiguous() and out.shape == tensors[0].shape
    assert lse.is_contiguous() and lse.shape == (2, 4, 100)
    *launched, counter, heads_first = launches[0]
    expected = (*tensors, out, lse, 0.125)
    assert all(a is b or a == b for a, b in zip(launched, expected, strict=True))
    assert counter.dtype == torch.int32 and counter.tolist() == [0]
    assert heads_first == (layout == "bhsd")


def test_an_operator_keeps_no_counter(cuda: Cuda) -> None:
    """Its first run may be in memory of a CUDA graph to come, which must not outlive that."""
    device = torch.device("cuda", 0)
    token = functions.in_operator.set(True)
    try:
        assert functions._counter(device) is not functions._counter(device)
    finally:
        functions.in_operator.reset(token)
    kept = functions._counter(device)
    assert functions._counter(device) is kept and len(cuda.made) == 3


def test_each_stream_of_each_device_has_a_counter(cuda: Cuda) -> None:
    devices = [torch.device("cuda", index) for index in (0, 1)]
    first = functions._counter(devices[0])
    assert first.shape == (1,) and first.dtype == torch.int32 and first.item() == 0
    assert functions._counter(devices[0]) is first
    other_device = functions._counter(devices[1])
    cuda.streams[0] = 8
    other_stream = functions._counter(devices[0])
    assert len({tensor.data_ptr() for tensor in (first, other_device, other_stream)}) == 3
    cuda.streams[0] = 7
    assert functions._counter(devices[0]) is first
    assert functions._counter(devices[1]) is other_device
    assert cuda.made == [devices[0], devices[1], devices[0]]


def test_each_captured_launch_has_a_counter_that_its_graph_clears(cuda: Cuda) -> None:
    """A graph may be replayed beside launches on the stream it was captured on."""
    device = torch.device("cuda", 0)
    before = functions._counter(device)
    cuda.capturing = True
    captured = [functions._counter(device) for _ in range(2)]
    cuda.capturing = False
    assert functions._counter(device) is before
    assert len({tensor.data_ptr() for tensor in (before, *captured)}) == 3
    assert cuda.made == [device] * 3  # made under capture, the zeros are the graph's to write
    assert len(functions._counters) == 1


def test_a_capture_leaves_no_counter_for_later_launches(cuda: Cuda) -> None:
    """Its zeros are only written when the graph is replayed."""
    device = torch.device("cuda", 0)
    cuda.capturing = True
    captured = functions._counter(device)
    cuda.capturing = False
    assert functions._counter(device) is not captured


def test_each_emulated_launch_has_a_counter(cuda: Cuda) -> None:
    cpu = torch.device("cpu")
    assert functions._counter(cpu) is not functions._counter(cpu)
    assert not functions._counters


def test_a_capture_takes_a_loaded_kernel_and_refuses_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "_launchers", {})
    compiling.launcher(standin.spec())
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(compiling, "_obtain", None)
    compiling.launcher(standin.spec())
    with pytest.raises(RuntimeError) as raised:
        compiling.launcher(standin.spec("float16"))
    assert str(raised.value) == (
        "the current stream captures a CUDA graph, and this process has not loaded scaled for "
        "sm_90a (dtype float16); needs that before the capture; make the same call once, or "
        "hopwell.warmup(head_dims=[...]), ahead of torch.cuda.graph"
    )
    with pytest.raises(RuntimeError) as raised:
        compiling.launcher(
            functions.backward_spec("sm_90a", BackwardFacts("float16", 64, 64, False))
        )
    assert str(raised.value) == (
        "the current stream captures a CUDA graph, and this process has not loaded backward for "
        "sm_90a (causal False, deterministic False, dlse False, dtype float16, head_dim 64, "
        "head_dim_v 64); needs that before the capture; make the same call once, or "
        "hopwell.warmup(head_dims=[...], backward=True), ahead of torch.cuda.graph"
    )


def test_warmup_launches_each_kernel_once_where_it_can_run(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "arch_of", lambda _: None)
    assert hopwell.warmup("sm_90a", head_dims=[64]) == 6
    assert not launches
    monkeypatch.setattr(checks, "arch_of", lambda _: "sm_90a")
    assert hopwell.warmup("sm_90a", head_dims=[(80, 40)]) == 4
    assert len(launches) == 4
    for *tensors, scale, counter, heads_first in launches:
        len_q = tensors[0].shape[1]
        sizes = ((len_q, 80), (1, 80), (1, 40), (len_q, 40))
        shapes = [(1, length, 1, head_dim) for length, head_dim in sizes]
        assert [tuple(tensor.shape) for tensor in tensors] == [*shapes, (1, 1, len_q)]
        assert scale == 80**-0.5 and counter.tolist() == [0] and not heads_first


@pytest.mark.parametrize(("backward", "kernels"), [(False, 3), (True, 5)])
@pytest.mark.parametrize("wanted", [False, True])
def test_warmup_launches_the_kernels_that_it_compiled(
    backward: bool,
    kernels: int,
    wanted: bool,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those for short queries and for others of one head_dim: on as many queries as each needs.

    Whether deterministic gradients are wanted changes nothing.
    """
    compiled, launched = [], []

    def launcher(spec: compiling.Spec, *, emulated: bool) -> compiling.Launcher:
        compiled.append(spec)
        return compiling.Launcher(lambda q, *_: launched.append((spec, q.shape[1])), {})

    monkeypatch.setenv("HOPWELL_DETERMINISTIC", str(int(wanted)))
    monkeypatch.setattr(compiling, "launcher", launcher)
    monkeypatch.setattr(checks, "arch_of", lambda _: "sm_90a")
    options: Any = {"head_dims": [(64, 40)], "dtypes": [torch.float16], "backward": backward}
    assert hopwell.warmup("sm_90a", **options) == kernels
    assert {(spec, 1) for spec in compiled if not long(spec)} | {
        (spec, SHORT_LEN_Q + 1) for spec in compiled if long(spec)
    } == set(launched)
    assert len(launched) == len(set(compiled)) == kernels


def long(spec: compiling.Spec) -> bool:
    facts = dict(spec.facts)
    return bool(facts["causal"] and not facts.get("short", True))
