"""`attention`, which torch differentiates, and `backward`, which takes what `forward` returned.

Gradients by FlashAttention (arXiv 2205.14135, algorithm 4): the scores are computed again from q, k
and the log-sum-exp of each row, so that nothing quadratic is kept between the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from ..kernels import BackwardFacts, backward_workspace
from . import checks, env
from . import compile as compiling
from .emulate import active
from .functions import (
    DTYPE_NAMES,
    TRACED,
    Layout,
    arch_for,
    autocast,
    backward_spec,
    contiguous,
    described,
    forward,
    imported,
    sms_of,
)
from .plans import Plans


@dataclass(frozen=True)
class _Plan:
    """What `backward` needs to know about one signature."""

    made: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # shape and strides of dq, dk, dv
    workspace: int  # elements of float32
    scale: float  # 1/sqrt(head_dim)
    heads_first: bool  # the layout is bhsd
    sms: int
    call: Callable[..., None] | None  # None: no query, or nothing to attend


_plans: Plans[_Plan] = Plans()


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    deterministic: bool | None = None,
    return_lse: Literal[False] = False,
    layout: Layout = "bshd",
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    deterministic: bool | None = None,
    return_lse: Literal[True],
    layout: Layout = "bshd",
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v, exactly; differentiable, once, in q, k and v.

    Args:
        q: (batch, len_q, heads, head_dim), fp16 or bf16. Strides are free but for the last, which
            is 1; addresses and strides are multiples of 16 bytes.
            Head dims are multiples of 8 from 8 to 256.
        k, v: (batch, len_kv, heads_kv, head_dim); heads is a multiple of heads_kv, and query head
            h attends with key head h // (heads // heads_kv). v may have a head_dim of its own.
            All three may be arrays of another library, as for `forward`.
        scale: of the products; None is 1/sqrt(head_dim).
        causal: query i sees keys up to i + len_kv - len_q, so that the last query sees every key.
        deterministic: of the gradients, as for `backward`; the result always is.
        return_lse: also return the log-sum-exp of each row; it is differentiable too.
        layout: "bshd" as above, or "bhsd" with len and heads exchanged.

    Under torch.autocast q, k and v are cast to its dtype, unless they are all fp16 or all bf16.
    torch.compile and torch.export see one operator, `torch.ops.hopwell.forward`; compiled, errors
    that shapes, strides or dtypes cause come while it is traced, in torch's own words around ours.

    Returns:
        out, of q's shape but for v's head_dim, of its dtype, contiguous; with return_lse
        (out, lse) as from `forward`. Between the passes q, k, v, out and lse are kept. A gradient
        of out that the kernels cannot read, such as the expanded one of a sum, is copied.

    Raises:
        TypeError, ValueError, NotImplementedError: as `forward`; and from a backward pass through
            its gradients, which have none.
    """
    if deterministic is not None:
        checks.raise_first(checks.deterministic_or_not(deterministic))
    try:
        records = q.requires_grad | k.requires_grad | v.requires_grad  # asks all three
    except AttributeError:  # arrays of another library; or neither, as `forward` will say
        q, k, v = imported(q, k, v) or (q, k, v)
        records = any(getattr(t, "requires_grad", False) for t in (q, k, v))
    if not (records and torch.is_grad_enabled()):
        out, lse = forward(q, k, v, scale=scale, causal=causal, layout=layout)
    elif is_dynamo_compiling() or q.__class__ in TRACED:
        from . import ops  # which itself imports this module

        options = {"scale": scale, "causal": causal, "layout": layout}
        out, lse = ops.attention(q, k, v, deterministic=deterministic, **options)
    else:
        q, k, v = autocast(q, k, v) or (q, k, v)
        out, lse = _Attention.apply(q, k, v, scale, causal, layout, deterministic)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """`forward` and `backward` as one node of torch's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        causal: bool,
        layout: Layout,
        deterministic: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(q, k, v, scale=scale, causal=causal, layout=layout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = {
            "scale": scale,
            "causal": causal,
            "layout": layout,
            "deterministic": deterministic,
        }
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dout, dlse = grad_outputs
        others = (None,) * 4  # scale, causal, layout, deterministic
        if dout is None and dlse is None:
            return (None, None, None, *others)
        # With create_graph=True gradients are recorded here, and a loss may contain them.
        compute = _Gradients.apply if torch.is_grad_enabled() else gradients
        q, k, v, out, lse = ctx.saved_tensors
        computed = compute(ctx.options, dout, q, k, v, out, lse, dlse)
        wanted = zip(computed, ctx.needs_input_grad, strict=False)
        return (*(gradient if needed else None for gradient, needed in wanted), *others)


class _Gradients(torch.autograd.Function):
    """Gradients that know of the tensors they depend on, and that they have none of their own.

    torch's `once_differentiable` forgets of a gradient that depends on q, k and v alone where it
    came from, and a loss that contains it would go without what it contributes.
    """

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: Any) -> tuple[torch.Tensor, ...]:
        return gradients(options, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        checks.no_second_order()


def gradients(
    options: dict[str, Any],
    dout: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`backward` of what torch hands on: either gradient may be missing, or lie as it likes."""
    dout = torch.zeros_like(out) if dout is None else _readable(dout)
    dlse = None if dlse is None else dlse.resolve_neg()
    return backward(dout, q, k, v, out, lse, dlse=dlse, **options)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    layout: Layout = "bshd",
    deterministic: bool | None = None,
    dlse: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of sum(dout out) + sum(dlse lse) by q, k and v, without autograd.

    out and lse are taken as given: those of `forward`, or of more keys than k has, as in a ring,
    where they belong to the whole row and the gradients are the share of these keys.

    Takes a workspace for the time of the call: dq in float32 and two numbers a row, with head_dim
    rounded up to 64 and len_q to whole tiles of 64 to 96 rows (on Blackwell to 16 or 32, and to
    128 rows); deterministic also one a tile (4 or 8).

    Args:
        dout, out: of the shape and dtype that `forward` returns.
        q, k, v, scale, causal, layout: as they were for `forward`.
        lse: (batch, heads, len_q), fp32, contiguous. Rows with -inf have gradients 0
            where q and dout are finite.
        deterministic: the same bits in every run, for dq too, whose parts are otherwise added up in
            the order in which they are ready. None: if torch.use_deterministic_algorithms is on, or
            HOPWELL_DETERMINISTIC is 1.
        dlse: gradient of lse, of its shape, fp32; None is 0.
        dq, dk, dv: buffers of the shapes and dtype of q, k and v; must not overlap any input.

    Returns:
        (dq, dk, dv), contiguous unless given.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError, emulator.KernelFault: as
            `forward`.
    """
    if is_dynamo_compiling() or q.__class__ in TRACED:
        from . import ops  # which itself imports this module

        options = {"scale": scale, "causal": causal, "layout": layout}
        options |= {"deterministic": deterministic, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv}
        return ops.backward(dout, q, k, v, out, lse, **options)
    emulation = active()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled() or env.deterministic()
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        inputs["dlse"] = dlse
    try:
        signature = (
            *(described(t) for t in (dout, q, k, v, out, lse)),
            *(t if t is None else described(t) for t in (dlse, dq, dk, dv)),
            scale if scale is None else (type(scale), checks.holds(scale)),
            type(causal),
            causal,
            layout,
            type(deterministic),
            deterministic,
            emulation if emulation is None else emulation.arch,
        )
        records = any([t.requires_grad for t in inputs.values()])
        plan = _plans.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors and numbers: the checks will say what is what.
        plan = signature = None
        records = True

    def problems() -> Iterator[checks.Problem]:
        return _problems(
            *(dout, q, k, v, out, lse),
            scale=scale,
            causal=causal,
            layout=layout,
            deterministic=deterministic,
            **{"dlse": dlse, "dq": given[0], "dk": given[1], "dv": given[2]},
        )

    given = (dq, dk, dv)
    if plan is None:
        checks.raise_first(problems())
        plan = _make_plan(q, k, v, causal=causal, layout=layout, facts=(deterministic, dlse))
        if plan.call is not None:
            _plans.keep(signature, plan)
    if records:
        checks.gradients(inputs)
        inputs = {name: t.detach() for name, t in inputs.items()}

    device, dtype = q.device, q.dtype
    dq, dk, dv = (
        torch.empty_strided(*plan.made[i], dtype=dtype, device=device) if buffer is None else buffer
        for i, buffer in enumerate(given)
    )
    if plan.call is None:
        return dq.zero_(), dk.zero_(), dv.zero_()
    workspace = torch.empty(plan.workspace, dtype=torch.float32, device=device)
    factor = plan.scale if scale is None else float(scale)
    arguments = (*inputs.values(), dq, dk, dv, workspace, factor, plan.heads_first, plan.sms)
    try:
        if emulation is None:
            plan.call(*arguments)
        else:
            emulation.launch(plan.call, *arguments, outputs=(dq, dk, dv))
    except Exception:
        # As in `forward`: the compiled function has checked what the signature leaves out.
        problem = next(problems(), None)
        if problem is None:
            raise
        raise problem.error(problem.text) from None
    return dq, dk, dv


def _readable(dout: torch.Tensor) -> torch.Tensor:
    """dout itself, if the kernels can read it, else a copy."""
    dout = dout.resolve_neg()  # a sign that torch keeps beside the tensor
    if next(checks.memory("dout", dout), None) is None:
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


def _problems(*tensors: Any, **options: Any) -> Iterator[checks.Problem]:
    emulation = active()
    emulated = emulation and emulation.arch
    return checks.backward(*tensors, emulated=emulated, wanted=env.ARCH.value, **options)


def _make_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    layout: Layout,
    facts: tuple[bool, torch.Tensor | None],
) -> _Plan:
    sequence, heads = (1, 2) if layout == "bshd" else (2, 1)
    call, workspace, sms = None, 0, 0
    if q.numel() and k.shape[sequence]:
        arch = arch_for(q.device)
        deterministic, dlse = facts
        dims = q.shape[3], v.shape[3]
        kernel = BackwardFacts(DTYPE_NAMES[q.dtype], *dims, causal, deterministic, dlse is not None)
        workspace = backward_workspace(arch, kernel, q.shape[0], q.shape[heads], q.shape[sequence])
        sms = sms_of(q.device)
        call = compiling.launcher(backward_spec(arch, kernel), emulated=active() is not None).call
    return _Plan(
        made=tuple((tuple(t.shape), contiguous(t.shape)) for t in (q, k, v)),
        workspace=workspace,
        scale=1 / math.sqrt(q.shape[3]),
        heads_first=layout == "bhsd",
        sms=sms,
        call=call,
    )
