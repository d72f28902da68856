"""The functions a user calls: `forward`, `supported`, `compile`, `warmup`, `export`.

The first call of a signature checks everything, finds the kernel and keeps a plan; later calls look
the plan up and launch. The signature holds what chooses a kernel, and what the compiled function
does not check for itself: it refuses dtypes, strides, addresses and devices that do not go
together, and then the checks run again to say which and what to do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling

from ..kernels import (
    BackwardFacts,
    BlackwellFacts,
    ForwardFacts,
    backward_function,
    forward_function,
    packed_heads,
)
from ..kernels.tiles import BLACKWELL, SHORT_LEN_Q, SINGLE_ROWS, forward_tiles, has_pair
from . import checks, env, plans
from . import compile as compiling
from .cache import Entry, Store
from .emulate import active
from .plans import Plans

Layout = Literal["bshd", "bhsd"]
DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Tensors without memory, which stand for others where torch traces a call without Dynamo. What is
# traced goes to `ops`. Each call asks, so the question costs no more than a look at a class.
TRACED = FakeTensor, FunctionalTensor
CAST = (*checks.DTYPES, torch.float32)  # what `autocast` casts
AUTOCAST = ("cuda", "cpu")  # devices that have it, of those there are kernels for
HeadDims = Sequence[int | tuple[int, int]]  # of q, k and v alike; or of q and k, and of v
# Those that most models have: what is compiled ahead of time unless others are named.
COMMON_HEAD_DIMS: HeadDims = (64, 96, 128, 192, 256, (192, 128))
COMMON_GQA_GROUPS = (1, 4, 8)  # for Blackwell, where heads that share keys share a tile


@dataclass(frozen=True)
class _Plan:
    """What `forward` needs to know about one signature."""

    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    scale: float  # 1/sqrt(head_dim)
    heads_first: bool  # the layout is bhsd
    call: Callable[..., None] | None  # None: nothing to compute, or nothing to attend


@dataclass(frozen=True)
class Support:
    """Answer of `supported`; true where it is ok."""

    ok: bool
    reasons: tuple[str, ...]  # why not: every one of them
    kernel: str  # what would run; empty if nothing would
    compiled: bool  # whether that is at hand without running the compiler

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class CacheInfo:
    """Answer of `cache_info`."""

    folder: Path
    enabled: bool
    entries: int
    bytes: int
    compiled: int  # by this process
    loaded: int  # by this process, from disk


_plans: Plans[_Plan] = Plans()
in_operator: ContextVar[bool] = ContextVar("in_operator", default=False)
_counters: dict[tuple[int, int], torch.Tensor] = {}  # of (device, stream): one launch at a time


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    layout: Layout = "bshd",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` without autograd: always returns (out, lse), and writes to given buffers.

    Args:
        q, k, v, scale, causal, layout: as for `attention`, under torch.autocast too. q, k and v may
            be arrays of another library that have `__dlpack__`, as CuPy's and JAX's; their memory
            is used as it is, so on a GPU keep them until it is done.
        out: buffer of q's dtype, and shape but for v's head_dim; must not overlap q, k or v.
        lse: contiguous fp32 buffer, (batch, heads, len_q) in either layout.

    Returns:
        Tensors: out, and lse, the natural logarithm of the sum of exp(scale q k^T) over the keys
        that a query sees. A query that sees none has out 0 and lse -inf.

    Raises:
        TypeError: dtypes differ or are not fp16 or bf16; an argument is not what it should be.
        ValueError: shapes, strides, addresses or devices do not fit; CPU tensors without `emulate`.
        NotImplementedError: no kernel for this head_dim or GPU; or an input requires grad.
        RuntimeError: the current stream captures a CUDA graph, and the kernel is not loaded yet.
        emulator.KernelFault: inside `emulate`, when the checker found a fault in the kernel.
    """
    if is_dynamo_compiling() or q.__class__ in TRACED:
        from . import ops  # which itself imports this module

        options = {"scale": scale, "causal": causal, "layout": layout}
        return ops.forward(q, k, v, out=out, lse=lse, **options)
    emulation = active()
    try:
        dtype, device = q.dtype, q.device
        records = q.requires_grad | k.requires_grad | v.requires_grad  # asks all three
        signature = (
            dtype,
            device,
            q.shape,
            k.shape,
            v.shape,
            scale if scale is None else (type(scale), scale < 0, checks.holds(scale)),
            type(causal),
            causal,
            layout,
            out if out is None else described(out),
            lse if lse is None else described(lse),
            emulation if emulation is None else emulation.arch,
        )
        plan = _plans.get(signature)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors and numbers: arrays of another library, or the checks will say what is what.
        arrays = imported(q, k, v)
        if arrays is not None:
            options: Any = {"scale": scale, "causal": causal, "layout": layout}
            return forward(*arrays, **options, out=out, lse=lse)
        plan = signature = dtype = device = None
        records = False
    if plan is None:
        if cast := autocast(q, k, v):
            return forward(*cast, scale=scale, causal=causal, layout=layout, out=out, lse=lse)
        plan = _make_plan(q, k, v, scale=scale, causal=causal, layout=layout, out=out, lse=lse)
        if plan.call is not None:
            _plans.keep(signature, plan)
    elif records:
        checks.gradients({"q": q, "k": k, "v": v})

    if out is None:
        out = torch.empty_strided(plan.out_shape, plan.out_strides, dtype=dtype, device=device)
    if lse is None:
        shape, strides = plan.lse_shape, plan.lse_strides
        lse = torch.empty_strided(shape, strides, dtype=torch.float32, device=device)
    if plan.call is None:
        return out.zero_(), lse.fill_(-math.inf)
    if records:
        q, k, v = q.detach(), k.detach(), v.detach()
    factor = plan.scale if scale is None else float(scale)  # an int may be too large for 64 bits
    arguments = (q, k, v, out, lse, factor, _counter(out.device), plan.heads_first)
    try:
        if emulation is None:
            plan.call(*arguments)
        else:
            emulation.launch(plan.call, *arguments, outputs=(out, lse))
    except Exception:
        # Before it launches, the compiled function checks what the signature leaves out, in its
        # own words; ours say what to do. The dtypes of k and v are left out, too.
        if cast := autocast(q, k, v):
            return forward(*cast, scale=scale, causal=causal, layout=layout, out=out, lse=lse)
        problem = next(
            _problems(q, k, v, scale=scale, causal=causal, layout=layout, out=out, lse=lse), None
        )
        if problem is None:
            raise
        raise problem.error(problem.text) from None
    return out, lse


def supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    layout: Layout = "bshd",
) -> Support:
    """Whether `forward` would take these arguments, or every reason why not; no side effects."""
    try:
        q, k, v = imported(q, k, v) or (q, k, v)
    except TypeError as error:
        return Support(False, (str(error),), "", False)
    problems = tuple(
        _problems(q, k, v, scale=scale, causal=causal, layout=layout, out=None, lse=None)
    )
    if problems:
        return Support(False, tuple(problem.text for problem in problems), "", False)
    arch = arch_for(q.device)
    spec = forward_spec(arch, _facts(arch, q, k, v, scale=scale, causal=causal, layout=layout))
    return Support(True, (), str(spec), compiling.ready(spec))


def compile(
    arch: str | Sequence[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    dtypes: Sequence[torch.dtype] = checks.DTYPES,
    head_dims: HeadDims = COMMON_HEAD_DIMS,
    causal: Sequence[bool] = (False, True),
    gqa_groups: Sequence[int] = COMMON_GQA_GROUPS,
    backward: bool = False,
) -> list[Entry]:
    """Compile kernels ahead of time into the cache; needs no GPU and loads nothing.

    Args:
        arch: SM version or versions; by default HOPWELL_ARCH, else the GPU's, else "sm_90a".
        out: folder to write to in place of the cache; `load` it where the kernels shall run.
        dtypes, head_dims, causal: which variants; by default every one with a common head_dim.
            A head_dim is one for q, k and v, or a pair (of q and k, of v).
        gqa_groups: heads of q for each of k; on Hopper one kernel serves all.
        backward: also what computes the gradients of those; what sums them up in one order, or
            takes a gradient of lse, is left to its first call.

    Returns:
        The kernels, compiled now or found there, with their folders and facts.

    Raises:
        NotImplementedError: no kernels for that SM version.
        ValueError: no kernels for a head_dim.
        OSError: the folder cannot be written.
    """
    arches = [arch] if isinstance(arch, str) else arch or [arch_for(None)]
    specs = [
        spec
        for name in arches
        for spec in _variants(
            checks.arch(name), dtypes, head_dims, causal, (False, True), gqa_groups, backward
        )
    ]
    store = Store(env.cache_dir()) if out is None else Store(Path(out), mode=0o755)
    return [compiling.save(spec, store) for spec in specs]


def warmup(
    arch: str | None = None,
    *,
    dtypes: Sequence[torch.dtype] = checks.DTYPES,
    head_dims: HeadDims = COMMON_HEAD_DIMS,
    causal: Sequence[bool] = (False, True),
    gqa_groups: Sequence[int] = COMMON_GQA_GROUPS,
    backward: bool = False,
) -> int:
    """Have kernels compiled and loaded in this process, so that no later call waits for it.

    On a GPU each is launched once, on little: CUDA loads its code then, and from then on calls may
    be captured in a CUDA graph.

    Args:
        arch: SM version; by default HOPWELL_ARCH, else the GPU's, else "sm_90a".
        dtypes, head_dims, causal, gqa_groups, backward: which variants, as for `compile`; those for
            a negative scale are left to their first call.

    Returns:
        How many kernels are ready.

    Raises:
        NotImplementedError: no kernels for that SM version.
        ValueError: no kernels for a head_dim.
    """
    name = checks.arch(arch or arch_for(None))
    specs = _variants(name, dtypes, head_dims, causal, (False,), gqa_groups, backward)
    emulated = active() is not None
    here = not emulated and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if here else torch.device("cpu")
    for spec in specs:
        compiling.launcher(spec, emulated=emulated)
        if checks.arch_of(device) == name:
            _launch(spec, device)
    return len(specs)


def export(
    folder: str | os.PathLike[str],
    arch: str | Sequence[str] | None = None,
    *,
    head_dims: HeadDims = COMMON_HEAD_DIMS,
    backward: bool = False,
) -> list[Entry]:
    """`compile` the variants of `head_dims` into `folder`, to be `load`ed on another machine."""
    return compile(arch, out=folder, head_dims=head_dims, backward=backward)


def load(folder: str | os.PathLike[str]) -> int:
    """Take kernels from a folder that `export` wrote, before the cache and the compiler.

    Returns:
        How many kernels the folder holds for this host and this version of Hopwell.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no kernel that this version of Hopwell can use here.
    """
    return compiling.load(folder)


def cache_info() -> CacheInfo:
    """Where compiled kernels are kept, what is there, and what this process compiled and loaded."""
    folder = env.cache_dir()
    entries = Store(folder).entries()
    return CacheInfo(
        folder=folder,
        enabled=env.cache_enabled(),
        entries=len(entries),
        bytes=sum(entry.bytes for entry in entries),
        compiled=compiling.counts.compiled,
        loaded=compiling.counts.loaded,
    )


def clear_cache() -> int:
    """Remove compiled kernels from disk and from this process; returns how many were on disk."""
    plans.forget()
    compiling.forget()
    return Store(env.cache_dir()).clear()


def _counter(device: torch.device) -> torch.Tensor:
    """An int32 that is 0 and stays untouched by others while a kernel on this stream runs.

    A kernel leaves it at 0 again. A CUDA graph has memory of its own, cleared by each replay, which
    may run beside other launches. An operator keeps none: it may run in torch's rehearsal of such a
    graph, whose memory must not outlive it.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    counter = _counters.get(key)
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        if not in_operator.get():
            _counters[key] = counter
    return counter


def imported(*things: Any) -> tuple[Any, ...] | None:
    """q, k and v with arrays of other libraries taken as tensors; None if there are none."""
    tensors = tuple(checks.imported(name, t) for name, t in zip("qkv", things, strict=True))
    return None if all(a is b for a, b in zip(tensors, things, strict=True)) else tensors


def autocast(q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """q, k and v in the dtype of the active torch.autocast; None if they stay what they are.

    As for torch's own attention, float64 is left alone. What the kernels take as it is, too: there
    a call would have to ask first.
    """
    tensors = q, k, v
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return None
    if q.dtype == k.dtype == v.dtype and q.dtype in checks.DTYPES:
        return None
    kind = q.device.type
    if kind not in AUTOCAST or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    if dtype not in checks.DTYPES or not all(t.dtype in CAST for t in tensors):
        return None
    return q.to(dtype), k.to(dtype), v.to(dtype)


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides for `torch.empty_strided`, which takes half as long as `torch.empty`."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _problems(q: Any, k: Any, v: Any, **options: Any) -> Iterator[checks.Problem]:
    emulation = active()
    emulated = emulation and emulation.arch
    return checks.forward(q, k, v, emulated=emulated, wanted=env.ARCH.value, **options)


def _make_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    causal: bool,
    layout: Layout,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> _Plan:
    checks.raise_first(
        _problems(q, k, v, scale=scale, causal=causal, layout=layout, out=out, lse=lse)
    )
    checks.gradients({"q": q, "k": k, "v": v})
    sequence, heads = (1, 2) if layout == "bshd" else (2, 1)
    out_shape = (*q.shape[:3], v.shape[3])
    lse_shape = (q.shape[0], q.shape[heads], q.shape[sequence])
    call = None
    if math.prod(out_shape) and k.shape[sequence]:
        arch = arch_for(q.device)
        facts = _facts(arch, q, k, v, scale=scale, causal=causal, layout=layout)
        spec = forward_spec(arch, facts)
        call = compiling.launcher(spec, emulated=active() is not None).call
    return _Plan(
        out_shape=out_shape,
        out_strides=contiguous(out_shape),
        lse_shape=lse_shape,
        lse_strides=contiguous(lse_shape),
        scale=1 / math.sqrt(q.shape[3]),
        heads_first=layout == "bhsd",
        call=call,
    )


def _launch(spec: compiling.Spec, device: torch.device) -> None:
    """Run one kernel on one head: as few queries as it serves, and one key."""
    facts: dict[str, Any] = dict(spec.facts)
    causal, long = facts["causal"], facts["causal"] and not facts.get("short", True)
    len_q = SHORT_LEN_Q + 1 if long or facts.get("pair") else 1
    heads = facts.get("packed_heads", 1)
    dtype = getattr(torch, facts["dtype"])
    q, k, v, out = (
        torch.zeros(1, length, many, facts[name], dtype=dtype, device=device)
        for length, many, name in (
            *((len_q, heads, "head_dim"), (1, 1, "head_dim")),
            *((1, 1, "head_dim_v"), (len_q, heads, "head_dim_v")),
        )
    )
    if spec.kernel == "forward":
        forward(q, k, v, causal=causal)
    else:
        from .autograd import backward  # which itself imports this module

        lse = torch.zeros(1, 1, len_q, device=device)
        backward(out, q, k, v, out, lse, causal=causal, deterministic=facts["deterministic"])


def arch_for(device: torch.device | None) -> str:
    """SM version to compile for: of the active `emulate`, else of the device, else as set."""
    if emulation := active():
        return emulation.arch
    if device is None:
        if env.ARCH.value or not torch.cuda.is_available():
            return env.ARCH.value or checks.arches()[0]
        device = torch.device("cuda", torch.cuda.current_device())
    checks.raise_first(checks.gpu(device, env.ARCH.value))
    return checks.arch(checks.arch_of(device))


def sms_of(device: torch.device) -> int:
    """SMs that a launch can have: of the active `emulate`, else of the device or its part (MIG)."""
    if emulation := active():
        return emulation.sms
    return torch.cuda.get_device_properties(device).multi_processor_count


def _facts(
    arch: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    causal: bool,
    layout: Layout,
) -> ForwardFacts | BlackwellFacts:
    sequence, heads = (1, 2) if layout == "bshd" else (2, 1)
    dims = q.shape[3], v.shape[3]
    negative = scale is not None and scale < 0
    fixed = DTYPE_NAMES[q.dtype], *dims, causal, negative
    len_q = q.shape[sequence]
    if arch in BLACKWELL:
        packed = packed_heads(q.shape[heads] // k.shape[heads])
        pair = not causal and has_pair(*dims) and len_q * packed > SINGLE_ROWS
        return BlackwellFacts(*fixed, packed, pair)
    short = causal and len_q <= SHORT_LEN_Q and forward_tiles(arch, *dims, short=True).short
    return ForwardFacts(*fixed, short)


def forward_spec(arch: str, facts: ForwardFacts | BlackwellFacts) -> compiling.Spec:
    return _spec("forward", arch, facts, forward_function)


def backward_spec(arch: str, facts: BackwardFacts) -> compiling.Spec:
    return _spec("backward", arch, facts, backward_function)


def _spec(kernel: str, arch: str, facts: Any, function: Callable[..., Any]) -> compiling.Spec:
    fixed = tuple(sorted(asdict(facts).items()))
    return compiling.Spec(kernel, arch, fixed, lambda: function(arch, facts))


def _variants(
    arch: str,
    dtypes: Sequence[torch.dtype],
    head_dims: HeadDims,
    causal: Sequence[bool],
    negative_scale: Sequence[bool],
    gqa_groups: Sequence[int],
    backward: bool,
) -> list[compiling.Spec]:
    shapes, groups = checks.head_dims(head_dims), checks.gqa_groups(gqa_groups)
    found = [
        forward_spec(arch, facts)
        for dtype, dims, masked, negative in product(dtypes, shapes, causal, negative_scale)
        for facts in _forward_variants(arch, DTYPE_NAMES[dtype], dims, masked, negative, groups)
    ]
    if backward:
        found += [
            backward_spec(arch, BackwardFacts(DTYPE_NAMES[dtype], *dims, masked))
            for dtype, dims, masked in product(dtypes, shapes, causal)
        ]
    return found


def _forward_variants(
    arch: str,
    dtype: str,
    dims: tuple[int, int],
    causal: bool,
    negative: bool,
    gqa_groups: Sequence[int],
) -> Iterator[ForwardFacts | BlackwellFacts]:
    """What one signature may need, depending on lengths and heads."""
    if arch in BLACKWELL:
        pairs = (False, True) if not causal and has_pair(*dims) else (False,)
        packed = {packed_heads(group): None for group in gqa_groups}
        for heads, pair in product(packed, pairs):
            yield BlackwellFacts(dtype, *dims, causal, negative, heads, pair)
        return
    for short in {False, causal and forward_tiles(arch, *dims, short=True).short}:
        yield ForwardFacts(dtype, *dims, causal, negative, short)
