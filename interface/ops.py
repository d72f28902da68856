"""Attention as operators of torch's dispatcher: what torch.compile and torch.export see of it.

A traced program calls them where a user's calls the functions. Run, they call these functions on
its tensors; traced, they say of which shape, dtype and strides the results will be. Eager calls do
without: the dispatcher's way to a Python function takes half as long as a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from . import autograd, checks, functions
from .functions import Layout, autocast, contiguous

Tensor = torch.Tensor
Result = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


# ---- in place of the functions, where they are traced --------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, *, deterministic: Any, **options: Any) -> Result:
    """Out and lse, and torch will find the gradients."""
    checks.raise_first(checks.dispatched({"q": q, "k": k, "v": v}, **options))
    q, k, v = autocast(q, k, v) or (q, k, v)
    return torch.ops.hopwell.forward(q, k, v, deterministic=deterministic, **options)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None, lse: Tensor | None, **options: Any
) -> Result:
    """As `functions.forward`; where one buffer is given the other is made."""
    tensors = {"q": q, "k": k, "v": v}
    checks.raise_first(checks.dispatched({**tensors, "out": out, "lse": lse}, **options))
    checks.gradients(tensors)
    q, k, v = autocast(q, k, v) or (q, k, v)
    if out is None and lse is None:
        return torch.ops.hopwell.forward(q, k, v, deterministic=None, **options)
    made_out, made_lse = _results(q, v, options["layout"])
    out = made_out if out is None else out
    lse = made_lse if lse is None else lse
    torch.ops.hopwell.forward_into(q, k, v, out=out, lse=lse, **options)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    deterministic: Any,
    **options: Any,
) -> Gradients:
    """As `autograd.backward`; where one buffer is given the others are made."""
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    checks.raise_first(checks.dispatched({**tensors, "dq": dq, "dk": dk, "dv": dv}, **options))
    checks.raise_first(checks.deterministic_or_not(deterministic))
    checks.gradients({name: t for name, t in tensors.items() if t is not None})
    options["deterministic"] = deterministic
    if dq is None and dk is None and dv is None:
        return torch.ops.hopwell.backward(*tensors.values(), **options)
    dq = _like(q) if dq is None else dq
    dk = _like(k) if dk is None else dk
    dv = _like(v) if dv is None else dv
    torch.ops.hopwell.backward_into(*tensors.values(), dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv


# ---- run -----------------------------------------------------------------------------------------


@cache
def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function out of Dynamo's sight, which beside a break in a graph would compile it too.

    Not before one runs: it imports Dynamo, which takes seconds.
    """
    return torch.compiler.disable(function)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, deterministic: Any, **options: Any) -> Result:
    # How gradients are to be summed up is for `_differentiate`.
    token = functions.in_operator.set(True)
    try:
        return _as_it_is(functions.forward)(q, k, v, **options)
    finally:
        functions.in_operator.reset(token)


def _forward_into(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    _forward(q, k, v, deterministic=None, **options)


def _backward(*tensors: Any, **options: Any) -> Gradients:
    return _as_it_is(autograd.gradients)(options, *tensors)


def _backward_into(*tensors: Any, **options: Any) -> None:
    _as_it_is(autograd.gradients)(options, *tensors)


# ---- traced --------------------------------------------------------------------------------------


def _traced_forward(
    q: Tensor, k: Tensor, v: Tensor, *, deterministic: Any, **options: Any
) -> Result:
    checks.raise_first(checks.deterministic_or_not(deterministic))
    _traced_forward_into(q, k, v, out=None, lse=None, **options)
    return _results(q, v, options["layout"])


def _traced_forward_into(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    problems = checks.forward(q, k, v, emulated=None, wanted=None, traced=True, **options)
    checks.raise_first(problems)


def _traced_backward(*tensors: Any, **options: Any) -> Gradients:
    _traced_backward_into(*tensors, dq=None, dk=None, dv=None, **options)
    _, q, k, v, *_ = tensors
    return _like(q), _like(k), _like(v)


def _traced_backward_into(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    **options: Any,
) -> None:
    # Of dout any strides will do: `autograd.gradients` copies what the kernels cannot read.
    dout = out if dout is None else _like(dout)
    tensors = dout, q, k, v, out, lse
    problems = checks.backward(
        *tensors, dlse=dlse, emulated=None, wanted=None, traced=True, **options
    )
    checks.raise_first(problems)


def _results(q: Tensor, v: Tensor, layout: Layout) -> Result:
    """Out and lse, unwritten, as `functions.forward` makes them."""
    batch, *others, _ = q.shape
    len_q, heads = others if layout == "bshd" else reversed(others)
    of_out, of_lse = (*q.shape[:3], v.shape[3]), (batch, heads, len_q)
    out = q.new_empty_strided(of_out, contiguous(of_out))
    return out, q.new_empty_strided(of_lse, contiguous(of_lse), dtype=torch.float32)


def _like(tensor: Tensor) -> Tensor:
    """Unwritten, of that shape and dtype, as `autograd.backward` makes its gradients."""
    return tensor.new_empty_strided(tensor.shape, contiguous(tensor.shape))


# ---- differentiated ------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Result) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)
    ctx.options = keyword_only_inputs


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return None, None, None
    computed = torch.ops.hopwell.backward(dout, *ctx.saved_tensors, dlse, **ctx.options)
    wanted = zip(computed, ctx.needs_input_grad, strict=True)
    return tuple(gradient if needed else None for gradient, needed in wanted)


def _differentiate_again(ctx: Any, *gradients: Tensor | None) -> Any:
    checks.no_second_order()


# ---- the operators -------------------------------------------------------------------------------

_INPUTS = "Tensor q, Tensor k, Tensor v"
_RETURNED = f"Tensor? dout, {_INPUTS}, Tensor out, Tensor lse, Tensor? dlse"
_OPTIONS = "float? scale, bool causal, str layout"
_BUFFERS = "Tensor(a!) out, Tensor(b!) lse"
_GRADIENTS = "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv"
# Name, arguments, results; what runs it, and what traces it.
_OPERATORS: tuple[tuple[str, str, str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        *("forward", f"{_INPUTS}, *, {_OPTIONS}, bool? deterministic", "(Tensor, Tensor)"),
        *(_forward, _traced_forward),
    ),
    (
        *("forward_into", f"{_INPUTS}, *, {_OPTIONS}, {_BUFFERS}", "()"),
        *(_forward_into, _traced_forward_into),
    ),
    (
        *("backward", f"{_RETURNED}, *, {_OPTIONS}, bool? deterministic"),
        *("(Tensor, Tensor, Tensor)", _backward, _traced_backward),
    ),
    (
        *("backward_into", f"{_RETURNED}, *, {_OPTIONS}, bool? deterministic, {_GRADIENTS}"),
        *("()", _backward_into, _traced_backward_into),
    ),
)
_library = torch.library.Library("hopwell", "DEF")
for _name, _arguments, _results_of, _run, _trace in _OPERATORS:
    _library.define(
        f"{_name}({_arguments}) -> {_results_of}",
        # The strides that were checked while traced are those to run with.
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"hopwell::{_name}", _trace, lib=_library)
torch.library.register_autograd(
    "hopwell::forward", _differentiate, setup_context=_keep, lib=_library
)
torch.library.register_autograd("hopwell::backward", _differentiate_again, lib=_library)
operators = torch.ops.hopwell  # with their overloads: `operators.forward.default`
