"""`attention` under torch.compile and torch.export, on the emulator."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hopwell
from hopwell.interface import ops
from hopwell.interface.emulate import Emulation

from .test_backward import alike, inputs, leaves

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def emulation() -> Iterator[Emulation]:
    torch.compiler.reset()
    with hopwell.emulate("sm_90a") as emulation:
        yield emulation


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def both(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
    """The function compiled and as it is: results and gradients have the same bits."""
    seen = []
    for run in (compiled(function, **options), function):
        given = leaves(*tensors)
        results = run(*given)
        results = results if isinstance(results, tuple) else (results,)
        weights = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in results]
        seen.append((*results, *torch.autograd.grad(results, given, weights)))
    assert alike(*seen)
    strides = [[t.stride() for t in some] for some in seen]
    assert strides[0] == strides[1]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_attention(layout: Any, return_lse: bool) -> None:
    _, *tensors = inputs(100, 150, (4, 2), batch=2)
    if layout == "bhsd":
        tensors = [t.transpose(1, 2) for t in tensors]
    options: Any = {"layout": layout, "return_lse": return_lse}
    both(lambda *t: hopwell.attention(*t, causal=True, deterministic=True, **options), *tensors)
