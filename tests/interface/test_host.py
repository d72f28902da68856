"""What a warmed call costs the host, counted in calls: times are benchmarks/host.py's, on a GPU."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import hopwell
from hopwell.interface import checks, functions
from hopwell.interface import compile as compiling

from . import standin

Launches = list[tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """CPU tensors pass for those of a GPU, and launches are listed in place of run."""
    listed: Launches = []
    launcher = compiling.Launcher(lambda *arguments: listed.append(arguments), {})
    monkeypatch.setattr(checks, "_devices", lambda *_: iter(()))
    monkeypatch.setattr(functions, "_arch", lambda _: "sm_90a")
    monkeypatch.setattr(compiling, "launcher", lambda *_, **__: launcher)
    functions._plans.clear()
    yield listed
    functions._plans.clear()


def inputs(layout: str) -> tuple[torch.Tensor, ...]:
    shape = (2, 100, 4, 64) if layout == "bshd" else (2, 4, 100, 64)
    return tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in "qkv")


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
def test_a_warmed_call_does_little(layout: Any, launches: Launches) -> None:
    """Two allocations, one look-up, no view, no check; in either layout."""
    tensors = inputs(layout)
    hopwell.attention(*tensors, layout=layout)
    seen = calls(lambda: hopwell.attention(*tensors, layout=layout))
    assert len(launches) == 2
    assert seen["empty_strided"] == 2
    del seen["<lambda>"], seen["append"], seen["setprofile"]  # this test's own
    allowed = {"attention", "forward", "active", "get", "empty_strided"}
    assert set(seen) <= allowed, seen
    assert seen.total() <= 7, seen


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_tensors_are_launched_as_they_are(layout: Any, launches: Launches) -> None:
    tensors = inputs(layout)
    out, lse = hopwell.forward(*tensors, layout=layout)
    assert out.is_contiguous() and out.shape == tensors[0].shape
    assert lse.is_contiguous() and lse.shape == (2, 4, 100)
    expected = (*tensors, out, lse, 0.125, layout == "bhsd")
    assert all(a is b or a == b for a, b in zip(launches[0], expected, strict=True))


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


def test_warmup_launches_each_kernel_once_where_it_can_run(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "arch_of", lambda _: None)
    assert hopwell.warmup("sm_90a", head_dims=[64]) == 4
    assert not launches
    monkeypatch.setattr(checks, "arch_of", lambda _: "sm_90a")
    assert hopwell.warmup("sm_90a", head_dims=[(80, 40)]) == 4
    assert len(launches) == 4
    for *tensors, scale, heads_first in launches:
        dims = [(1, 1, 1, head_dim) for head_dim in (80, 80, 40, 40)]
        assert [tuple(tensor.shape) for tensor in tensors] == [*dims, (1, 1, 1)]
        assert scale == 80**-0.5 and not heads_first
