"""`attention` under torch.compile, torch.export and torch.autocast, on the emulator."""

import contextvars
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

import hopwell
from hopwell.interface import autograd, ops
from hopwell.interface.emulate import Emulation

from .test_backward import alike, inputs, leaves

Tensor = torch.Tensor
ONCE: dict[str, Any] = {"deterministic": True}
FIXED: dict[str, Any] = {"causal": True, **ONCE}
OPTIONS: dict[str, Any] = {"scale": None, "causal": True, "layout": "bshd"}


@pytest.fixture(autouse=True)
def emulation() -> Iterator[Emulation]:
    torch.compiler.reset()
    with hopwell.emulate("sm_90a") as emulation:
        yield emulation


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def small(layout: str = "bshd", len_q: int = 5, len_kv: int = 7) -> list[Tensor]:
    """q, k, v."""
    tensors = list(inputs(len_q, len_kv, batch=2)[1:])
    return [t.transpose(1, 2) for t in tensors] if layout == "bhsd" else tensors


def differentiated(run: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
    """Results, and gradients of all of them."""
    given = leaves(*tensors)
    results = run(*given)
    results = results if isinstance(results, tuple) else (results,)
    weights = [
        torch.linspace(-1, 1, r.numel(), dtype=r.dtype, device=r.device).view(r.shape)
        for r in results
    ]
    return [*results, *torch.autograd.grad(results, given, weights)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Bits, and how they lie."""
    return alike(found, expected) and all(
        a.stride() == b.stride() and a.dtype == b.dtype
        for a, b in zip(found, expected, strict=True)
    )


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_attention(layout: Any, return_lse: bool) -> None:
    def function(*tensors: Tensor) -> Any:
        return hopwell.attention(*tensors, layout=layout, return_lse=return_lse, **FIXED)

    tensors = small(layout)
    found = differentiated(compiled(function), *tensors)
    assert same(found, differentiated(function, *tensors))


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
def test_between_operations_that_inductor_compiles() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hopwell.attention(q * 2, k + 1, v, **FIXED).transpose(1, 2).relu()

    tensors = small()
    found = differentiated(compiled(function, "inductor"), *tensors)
    assert same(found, differentiated(function, *tensors))


def test_attention_itself() -> None:
    tensors = small()
    found = differentiated(compiled(hopwell.attention), *tensors)
    assert same(found[:1], [hopwell.attention(*tensors)])


def test_a_sum_has_an_expanded_gradient() -> None:
    """Which the kernels cannot read."""

    def function(*tensors: Tensor) -> Tensor:
        return hopwell.attention(*tensors, **FIXED).sum()

    tensors = small()
    found = differentiated(compiled(function), *tensors)
    assert same(found, differentiated(function, *tensors))


def test_one_tensor_as_key_and_value() -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        return hopwell.attention(q, k, k, **FIXED)

    q, k, _ = small()
    assert same(differentiated(compiled(function), q, k), differentiated(function, q, k))


def test_another_length_does_not_compile_again() -> None:
    counter = CompileCounter()
    run = compiled(lambda *t: hopwell.attention(*t, **FIXED), counter, dynamic=True)
    for lengths in ((5, 7), (6, 9), (130, 3)):
        tensors = small("bshd", *lengths)
        assert same([run(*tensors)], [hopwell.attention(*tensors, **FIXED)])
    assert counter.frame_count == 1
    torch.compiler.reset()
    run = compiled(lambda *t: hopwell.attention(*t, **FIXED), dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((5, 7), (6, 9)):
            tensors = small("bshd", *lengths)
            expected = differentiated(lambda *t: hopwell.attention(*t, **FIXED), *tensors)
            assert same(differentiated(run, *tensors), expected)


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_that_is_missing_is_not_made(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither zeros in place of that of out, nor the kernel that takes one of lse."""
    given: list[tuple[Any, ...]] = []
    compute = autograd.gradients

    def noted(options: Any, *tensors: Any) -> Any:
        given.append(tensors)
        return compute(options, *tensors)

    monkeypatch.setattr(autograd, "gradients", noted)
    differentiated(compiled(lambda *t: ops.attention(*t, **OPTIONS, **ONCE)[which]), *small())
    ((dout, *_, dlse),) = given
    assert (dout is None, dlse is None) == (which == 1, which == 0)


def test_nothing_is_recorded_where_nothing_requires_grad() -> None:
    run = compiled(lambda *t: hopwell.attention(*t, return_lse=True))
    tensors = small()
    assert same(run(*tensors), hopwell.forward(*tensors))
    with torch.no_grad():
        assert not any(t.requires_grad for t in run(*leaves(*tensors)))


def test_only_some_inputs_require_grad() -> None:
    q, k, v = small()
    q.requires_grad_()
    run = compiled(lambda *t: hopwell.attention(*t, **FIXED))
    found, expected = (
        torch.autograd.grad(function(q, k, v).sum(), q)
        for function in (run, lambda *t: hopwell.attention(*t, **FIXED))
    )
    assert alike(found, expected)


def test_forward_and_backward() -> None:
    def function(dout: Tensor, *tensors: Tensor) -> Any:
        out, lse = hopwell.forward(*tensors, causal=True)
        return (out, lse, *hopwell.backward(dout, *tensors, out, lse, dlse=lse, **FIXED))

    tensors = small()
    expected = function(tensors[0], *tensors)
    assert same(compiled(function)(tensors[0], *tensors), expected)


def test_buffers_are_written() -> None:
    """All of them, or one, beside which the others are made."""

    def function(out: Tensor, lse: Tensor, dk: Tensor, *tensors: Tensor) -> Any:
        hopwell.forward(*tensors, causal=True, out=out, lse=lse)
        seen, _ = hopwell.forward(*tensors, causal=True, lse=lse)
        grads = hopwell.backward(seen, *tensors, out, lse, dk=dk, **FIXED)
        return seen, grads[0], grads[2]

    tensors = small()
    seen = []
    for run in (compiled(function), function):
        buffers = torch.empty_like(tensors[0]), torch.empty(2, 2, 5), torch.empty_like(tensors[1])
        seen.append([*run(*buffers, *tensors), *buffers])
    assert same(*seen)


def test_the_eager_path_has_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "hopwell", None)
    differentiated(hopwell.attention, *small())


# ---- the operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_opcheck_of_forward(layout: str) -> None:
    options = {**OPTIONS, "layout": layout}
    for tensors in (small(layout), leaves(*small(layout))):
        torch.library.opcheck(torch.ops.hopwell.forward, tuple(tensors), {**options, **ONCE})
    q, k, v = small(layout)
    out, lse = hopwell.forward(q, k, v, layout="bhsd" if layout == "bhsd" else "bshd")
    torch.library.opcheck(
        torch.ops.hopwell.forward_into, (q, k, v), {**options, "out": out, "lse": lse}
    )


@pytest.mark.parametrize("dout", [False, True])
def test_opcheck_of_backward(dout: bool) -> None:
    q, k, v = small()
    out, lse = hopwell.forward(q, k, v, causal=True)
    tensors = (out if dout else None, q, k, v, out, lse, None if dout else lse)
    options = {**OPTIONS, **ONCE}
    torch.library.opcheck(torch.ops.hopwell.backward, tensors, options)
    buffers = {name: torch.empty_like(t) for name, t in (("dq", q), ("dk", k), ("dv", v))}
    torch.library.opcheck(torch.ops.hopwell.backward_into, tensors, {**options, **buffers})


def test_an_operator_is_differentiated_once() -> None:
    q, k, v = leaves(*small())
    out, _ = ops.attention(q, k, v, **OPTIONS, **ONCE)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^a gradient of hopwell.attention is to be"):
        dq.sum().backward()


def test_tensors_without_memory() -> None:
    tensors = small()
    expected = differentiated(hopwell.attention, *tensors)
    with FakeTensorMode() as mode:
        found = differentiated(hopwell.attention, *(mode.from_tensor(t) for t in tensors))
    for fake, real in zip(found, expected, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# ---- torch.export --------------------------------------------------------------------------------


def test_operators_come_with_the_first_call_that_is_traced_or_with_a_module(tmp_path: Path) -> None:
    """In processes of their own: one traces and saves, without emulator; another loads and runs."""
    trace = """
import torch, hopwell
class Module(torch.nn.Module):
    def forward(self, q):
        return hopwell.attention(q, q, q)
q = torch.zeros(1, 5, 2, 64).half().requires_grad_()
torch.export.save(torch.export.export(Module(), (q,)), "program.pt2")
with hopwell.emulate("sm_90a"):
    torch.compile(Module(), fullgraph=True, backend="aot_eager")(q).sum().backward()
print(q.grad.shape)
"""
    run = """
import torch, hopwell.torch
with hopwell.emulate("sm_90a"):
    print(torch.export.load("program.pt2").module()(torch.zeros(1, 5, 2, 64).half()).shape)
"""
    for code in (trace, run):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.stdout == "torch.Size([1, 5, 2, 64])\n", done.stderr


class Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hopwell.attention(q, k, v, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    length = torch.export.Dim("length", max=4096)
    shapes = ({1: length}, {1: length}, {1: length})
    tensors = tuple(small("bshd", 5, 5))
    program = torch.export.export(Module(), tensors, dynamic_shapes=shapes, strict=strict)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.hopwell.forward.default in called
    tensors = small("bshd", 9, 9)
    found = program.module()(*tensors)
    assert same([found], [Module()(*tensors)])


# ---- what is wrong -------------------------------------------------------------------------------

q, k, v = small()
# Arguments; the error, and what it says.
TRACED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "head_dim": (
        (q[..., :60], k[..., :60], v),
        {},
        NotImplementedError,
        "q and k have head_dim 60; needs a multiple of 8 from 8 to 256; pad q and k with zeros up "
        "to 64, and pass scale=1/sqrt(60)",
    ),
    "dtype": (
        (q.float(), k.float(), v.float()),
        {},
        TypeError,
        "q has dtype torch.float32; needs torch.float16 or torch.bfloat16; "
        "cast with .to(torch.bfloat16)",
    ),
    "stride": (
        (q.mT.contiguous().mT, k, v),
        {},
        ValueError,
        "q has stride 2 in head_dim; needs 1; call q.contiguous(), which copies",
    ),
    "layout": (
        (q, k, v),
        {"layout": "sbhd"},
        ValueError,
        "layout is 'sbhd'; needs 'bshd' (batch, len, heads, head_dim) or 'bhsd' (batch, heads, "
        "len, head_dim); pass the one your tensors have",
    ),
    "causal": (
        (q, k, v),
        {"causal": 1},
        TypeError,
        "causal is a int; needs True or False; arbitrary masks are not supported: "
        "use torch.nn.functional.scaled_dot_product_attention for those",
    ),
    "scale": (
        (q, k, v),
        {"scale": True},
        TypeError,
        "scale is a bool; needs a float or None; pass float(scale)",
    ),
    "deterministic": (
        (q, k, v),
        {"deterministic": 1},
        TypeError,
        "deterministic is a int; needs True, False or None; "
        "None follows torch.use_deterministic_algorithms",
    ),
}


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("case", TRACED)
def test_what_is_wrong_where_it_is_traced(case: str, records: bool) -> None:
    """In torch's words around ours."""
    args, options, _, text = TRACED[case]
    args = tuple(t.detach().requires_grad_(records) for t in args)
    with pytest.raises(Exception) as raised:
        compiled(lambda *t: hopwell.attention(*t, **options))(*args)
    assert text in str(raised.value).replace("\\'", "'")


@pytest.mark.parametrize("case", ["head_dim", "layout", "causal", "scale", "deterministic"])
def test_what_is_wrong_where_a_graph_may_break(case: str) -> None:
    args, options, error, text = TRACED[case]
    with pytest.raises(error) as raised:
        torch.compile(lambda *t: hopwell.attention(*t, **options), backend="aot_eager")(*args)
    assert str(raised.value) == text


def test_what_is_wrong_where_it_runs() -> None:
    """Addresses are not traced."""
    run = compiled(lambda *t: hopwell.attention(*t))
    run(q, k, v)
    odd = torch.empty(q.numel() + 3, dtype=q.dtype)[3:].view(q.shape)
    with pytest.raises(ValueError, match=r"^q starts at an address that is \d+ bytes past"):
        run(odd, k, v)


def test_cpu_tensors_without_emulate() -> None:
    """Traced they may be; run they are inside it."""
    run = compiled(lambda *t: hopwell.attention(*t))
    with pytest.raises(ValueError, match=r"^tensors are on the CPU; the kernels need a GPU, or"):
        contextvars.Context().run(run, q, k, v)
    assert same([run(q, k, v)], [hopwell.attention(q, k, v)])


def test_gradients_are_refused_where_they_are_not_recorded() -> None:
    tensors = leaves(q, k, v)
    for run in (hopwell.forward, lambda *t: hopwell.backward(t[0], *t, t[0], t[0])):
        with pytest.raises(Exception, match=r"require\(s\) grad, which this function does not"):
            compiled(run)(*tensors)


# ---- torch.autocast ------------------------------------------------------------------------------


def test_autocast() -> None:
    """What is not all fp16 or all bf16 is cast; eager and compiled are alike."""

    def function(*tensors: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return hopwell.attention(*tensors, return_lse=True, **FIXED)

    single, half = torch.float32, torch.bfloat16
    # A call of the last kind follows others of q's dtype and these shapes.
    for kinds in ((single,) * 3, (single, single, half), (half, single, single)):
        tensors = [t.to(kind) for t, kind in zip(small(), kinds, strict=True)]
        found = differentiated(function, *tensors)
        assert found[0].dtype == torch.bfloat16
        assert [t.dtype for t in found[2:]] == [*kinds]
        true = differentiated(
            lambda *t: hopwell.attention(*(x.bfloat16() for x in t), return_lse=True, **FIXED),
            *tensors,
        )
        assert same(found, true)
        assert same(differentiated(compiled(function), *tensors), found)
        for _ in range(2):  # not recorded, by `forward`
            assert same([*function(*tensors)], found[:2])
        assert same([*compiled(function)(*tensors)], found[:2])


def test_autocast_leaves_what_the_kernels_take() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert hopwell.attention(q, k, v).dtype == torch.float16
        assert compiled(lambda *t: hopwell.attention(*t))(q, k, v).dtype == torch.float16


@pytest.mark.parametrize("compiles", [False, True])
def test_autocast_leaves_float64(compiles: bool) -> None:
    run = compiled(hopwell.forward) if compiles else hopwell.forward
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(Exception, match=r"q has dtype torch.float64; needs torch.float16 or"),
    ):
        run(q.double(), k.double(), v.double())


def test_autocast_that_is_off() -> None:
    with pytest.raises(TypeError, match=r"^q has dtype torch.float32"):
        hopwell.attention(*leaves(q.float(), k.float(), v.float()))
