"""Every error a user can cause, and its text: what was got, what is needed, what to do.

Checks of one call are generators of `Problem`, so that `forward` raises the first and `supported`
lists them all. Nothing else in the package raises for a user's input.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..kernels.tiles import BLACKWELL, FORWARD, HEAD_DIMS
from .arch import ARCH_OF_CAPABILITY

LAYOUTS = {
    "bshd": "(batch, len, heads, head_dim)",
    "bhsd": "(batch, heads, len, head_dim)",
}
DTYPES = (torch.float16, torch.bfloat16)
LARGEST_SCALE = torch.finfo(torch.float32).max
ALIGN_BYTES = 16  # what the TMA unit asks of a base address and of strides
HEAD_DIM_NEEDED = f"a multiple of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a call."""

    error: type[Exception]
    text: str


def raise_first(problems: Iterator[Problem]) -> None:
    """Raise the first problem, if there is one."""
    for problem in problems:
        raise problem.error(problem.text)


def arch_of(device: torch.device) -> str | None:
    """SM version to compile for on that device; None if it is no GPU or of another family."""
    if device.type != "cuda":
        return None
    return ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability(device))


def arches() -> tuple[str, ...]:
    """SM versions there are kernels for."""
    return (*dict.fromkeys(row.arch for row in FORWARD), *BLACKWELL)


# ---- tensors of one call -------------------------------------------------------------------------


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any,
    causal: Any,
    layout: Any,
    out: Any,
    lse: Any,
    emulated: str | None,
    wanted: str | None,
    traced: bool = False,
) -> Iterator[Problem]:
    """What is wrong with a forward call; later checks rest on earlier ones, which end the list.

    Args:
        q, k, v, scale, causal, layout, out, lse: as given by the user.
        emulated: SM version of the active `emulate`, or None.
        wanted: SM version that HOPWELL_ARCH names, or None.
        traced: the tensors stand for others, which may be elsewhere when the call is run.
    """
    tensors = {"q": q, "k": k, "v": v}
    buffers = {name: t for name, t in (("out", out), ("lse", lse)) if t is not None}
    basic = [*_kinds({**tensors, **buffers}), *_layout(layout), *_ranks(tensors)]
    yield from basic
    if basic:
        return
    yield from _dtypes(tensors)
    if not traced:
        yield from _devices({**tensors, **buffers}, emulated, wanted)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = out if out is None or out.ndim != 4 else out.transpose(1, 2)
    yield from _shapes(q.shape, k.shape, v.shape, layout)
    yield from _head_dims(q.shape[3], v.shape[3])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        yield from memory(name, tensor)
    yield from _scale(scale)
    yield from _causal(causal)
    batch, len_q, heads, _ = q.shape
    if out is not None:
        yield from _buffer("out", out, (batch, len_q, heads, v.shape[3]), q.dtype, layout)
    if lse is not None:
        yield from _buffer("lse", lse, (batch, heads, len_q), torch.float32, layout)


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    scale: Any,
    causal: Any,
    layout: Any,
    deterministic: Any,
    dlse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    emulated: str | None,
    wanted: str | None,
    traced: bool = False,
) -> Iterator[Problem]:
    """What is wrong with a backward call, as `forward` does it for one."""
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    optional = {"dlse": dlse, "dq": dq, "dk": dk, "dv": dv}
    others = {"lse": lse, **{name: t for name, t in optional.items() if t is not None}}
    basic = [*_kinds({**inputs, **others}), *_layout(layout), *_ranks(inputs)]
    yield from basic
    if basic:
        return
    yield from _dtypes(inputs)
    if not traced:
        yield from _devices({**inputs, **others}, emulated, wanted)
    if layout == "bhsd":
        q, k, v, dout, out = (t.transpose(1, 2) for t in (q, k, v, dout, out))
        dq, dk, dv = (t if t is None or t.ndim != 4 else t.transpose(1, 2) for t in (dq, dk, dv))
    yield from _shapes(q.shape, k.shape, v.shape, layout)
    yield from _head_dims(q.shape[3], v.shape[3])
    batch, len_q, heads, _ = q.shape
    of_out, of_lse = (batch, len_q, heads, v.shape[3]), (batch, heads, len_q)
    returned = "what forward returned"
    gradient = f"the gradient of {returned}"
    yield from _returned("dout", dout, of_out, layout, gradient)
    yield from _returned("out", out, of_out, layout, returned)
    yield from _returned("lse", lse, of_lse, layout, returned)
    yield from _float32("lse", lse, returned)
    if not lse.is_contiguous():
        yield Problem(
            ValueError,
            f"lse has strides {lse.stride()}; needs to be contiguous, as forward returns it; "
            "call lse.contiguous(), which copies",
        )
    if dlse is not None:
        yield from _returned("dlse", dlse, of_lse, layout, gradient)
        yield from _float32("dlse", dlse, gradient)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("dout", dout), ("out", out)):
        yield from memory(name, tensor)
    yield from _scale(scale)
    yield from _causal(causal)
    yield from deterministic_or_not(deterministic)
    for name, buffer, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if buffer is not None:
            yield from _buffer(name, buffer, tuple(like.shape), q.dtype, layout)


def dispatched(
    tensors: Mapping[str, Any], *, scale: Any, causal: Any, layout: Any
) -> Iterator[Problem]:
    """What torch's dispatcher would say in its own words, or take for something else.

    Args:
        tensors: by name; None stands for a buffer that was not given.
        scale, causal, layout: as given by the user.
    """
    yield from _kinds({name: tensor for name, tensor in tensors.items() if tensor is not None})
    yield from _layout(layout)
    yield from _scale(scale)
    yield from _causal(causal)


def _kinds(tensors: Mapping[str, Any]) -> Iterator[Problem]:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            yield Problem(
                TypeError,
                f"{name} is a {type(tensor).__name__}; needs a torch.Tensor; "
                "make one with torch.as_tensor or torch.from_dlpack",
            )
        elif tensor.layout != torch.strided:
            yield Problem(
                TypeError,
                f"{name} has layout {tensor.layout}; needs torch.strided; call {name}.to_dense()",
            )


def imported(name: str, thing: Any) -> Any:
    """A tensor on the memory of something that speaks DLPack; anything else as it is.

    Raises:
        TypeError: torch cannot take it.
    """
    if isinstance(thing, torch.Tensor) or not hasattr(thing, "__dlpack__"):
        return thing
    try:
        if any(step < 0 for step in getattr(thing, "strides", None) or ()):
            raise ValueError("it has a negative stride")  # at which torch ends the process
        return torch.from_dlpack(thing)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is a {type(thing).__name__} that torch cannot take by DLPack: {error}; "
            "needs an array of fp16 or bf16 that it can; copy it into a torch.Tensor"
        ) from error


def _layout(layout: Any) -> Iterator[Problem]:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        yield Problem(
            ValueError,
            f"layout is {layout!r}; needs 'bshd' {LAYOUTS['bshd']} or 'bhsd' {LAYOUTS['bhsd']}; "
            "pass the one your tensors have",
        )


def _ranks(tensors: Mapping[str, Any]) -> Iterator[Problem]:
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.ndim != 4:
            yield Problem(
                ValueError,
                f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}; needs 4: "
                "batch, len, heads, head_dim; add the missing ones with unsqueeze",
            )


def _dtypes(tensors: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(kinds.values())) > 1:
        got = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        *names, last = kinds
        yield Problem(
            TypeError,
            f"{_listed(names)} and {last} differ in dtype: {got}; needs one dtype; "
            "cast with .to(q.dtype)",
        )
    if kinds["q"] not in DTYPES:
        yield Problem(
            TypeError,
            f"q has dtype {kinds['q']}; needs torch.float16 or torch.bfloat16; "
            "cast with .to(torch.bfloat16)",
        )


def _devices(
    tensors: Mapping[str, torch.Tensor],
    emulated: str | None,
    wanted: str | None,
) -> Iterator[Problem]:
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        got = ", ".join(f"{name} on {device}" for name, device in devices.items())
        yield Problem(
            ValueError,
            f"tensors are on different devices: {got}; needs one device; move them to it",
        )
        return
    device = devices["q"]
    if emulated is not None:
        if device.type != "cpu":
            yield Problem(
                ValueError,
                f"tensors are on {device} inside hopwell.emulate; the emulator needs CPU tensors; "
                "move them with .cpu(), or call outside of emulate",
            )
    elif device.type == "cpu":
        yield Problem(
            ValueError,
            "tensors are on the CPU; the kernels need a GPU, or the emulator; move them with "
            '.cuda(), or call inside `with hopwell.emulate("sm_90a"):`',
        )
    elif device.type != "cuda":
        yield Problem(
            ValueError,
            f"tensors are on {device}; the kernels need a CUDA device; move them with .cuda()",
        )
    else:
        yield from gpu(device, wanted)


def gpu(device: torch.device, wanted: str | None) -> Iterator[Problem]:
    """Whether there are kernels for that CUDA device, and HOPWELL_ARCH (`wanted`) agrees."""
    found = arch_of(device)
    if found not in arches():
        major, minor = torch.cuda.get_device_capability(device)
        yield Problem(
            NotImplementedError,
            f"{device} is an {torch.cuda.get_device_name(device)} of compute capability "
            f"{major}.{minor}; needs one that there are kernels for: {_gpu_names()}; "
            "use torch.nn.functional.scaled_dot_product_attention on this GPU",
        )
    elif wanted and wanted != found:
        yield Problem(
            ValueError,
            f"HOPWELL_ARCH is {wanted} but {device} is {found}; a GPU runs code for its own "
            "SM version alone; unset HOPWELL_ARCH",
        )


def _shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int], layout: str) -> Iterator[Problem]:
    """Shapes here are (batch, len, heads, head_dim), whatever the user's layout."""
    if k[:3] != v[:3]:
        yield Problem(
            ValueError,
            f"k and v differ in batch, len or heads: {_said(k, layout)} and {_said(v, layout)}; "
            "needs one value for each key; check where they were split",
        )
    if q[0] != k[0]:
        yield Problem(
            ValueError,
            f"q has batch {q[0]} and k has batch {k[0]}; needs the same batch; "
            "expand the smaller one with .expand, which copies nothing",
        )
    if q[3] != k[3]:
        yield Problem(
            ValueError,
            f"q has head_dim {q[3]} and k has head_dim {k[3]}; needs the same; "
            f"check that the layout is {layout!r}, {LAYOUTS[layout]}",
        )
    if k[2] == 0 or q[2] % k[2]:
        yield Problem(
            ValueError,
            f"q has {q[2]} heads and k has {k[2]}; needs q's heads to be a multiple of k's; "
            f"check that the layout is {layout!r}, {LAYOUTS[layout]}",
        )


def _head_dims(head_dim: int, head_dim_v: int) -> Iterator[Problem]:
    """Those of q and k, and that of v: each one for itself, any two go together."""
    tensors = (
        ("q and k", "have", head_dim, f"pass scale=1/sqrt({head_dim})"),
        ("v", "has", head_dim_v, f"cut the output to its first {head_dim_v} columns"),
    )
    for names, have, got, then in tensors:
        if got in HEAD_DIMS:
            continue
        above = [there for there in HEAD_DIMS if there > got > 0]
        yield Problem(
            NotImplementedError,
            f"{names} {have} head_dim {got}; needs {HEAD_DIM_NEEDED}; "
            + (
                f"pad {names} with zeros up to {above[0]}, and {then}"
                if above
                else "use torch.nn.functional.scaled_dot_product_attention for it"
            ),
        )


def memory(name: str, tensor: torch.Tensor) -> Iterator[Problem]:
    """Whether the TMA unit can read a tensor as it lies."""
    size = tensor.element_size()
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        yield Problem(
            ValueError,
            f"{name} has stride {tensor.stride(-1)} in head_dim; needs 1; "
            f"call {name}.contiguous(), which copies",
        )
        return
    for dim, stride in zip(("batch", "len", "heads"), tensor.stride(), strict=False):
        if stride * size % ALIGN_BYTES:
            yield Problem(
                ValueError,
                f"{name} has a stride of {stride * size} bytes in {dim}; needs a multiple of "
                f"{ALIGN_BYTES}; call {name}.contiguous(), which copies",
            )
    yield from _base(name, tensor)


def _base(name: str, tensor: torch.Tensor) -> Iterator[Problem]:
    """Whether a tensor starts where the TMA unit can read; one that is traced starts nowhere."""
    if isinstance(tensor, FakeTensor):
        return
    if tensor.data_ptr() % ALIGN_BYTES:
        yield Problem(
            ValueError,
            f"{name} starts at an address that is {tensor.data_ptr() % ALIGN_BYTES} bytes past a "
            f"multiple of {ALIGN_BYTES}; needs an aligned start; call {name}.clone(), which copies",
        )


def _scale(scale: Any) -> Iterator[Problem]:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        yield Problem(
            TypeError,
            f"scale is a {type(scale).__name__}; needs a float or None; pass float(scale)",
        )
    elif not holds(scale):
        yield Problem(
            ValueError,
            f"scale is {scale}; needs a finite number that float32 holds; "
            "None means 1/sqrt(head_dim)",
        )


def holds(scale: float) -> bool:
    """Whether float32, which the kernels take, has room for it; an int of any size will do."""
    return abs(scale) <= LARGEST_SCALE


def _causal(causal: Any) -> Iterator[Problem]:
    if not isinstance(causal, bool):
        yield Problem(
            TypeError,
            f"causal is a {type(causal).__name__}; needs True or False; arbitrary masks are not "
            "supported: use torch.nn.functional.scaled_dot_product_attention for those",
        )


def deterministic_or_not(deterministic: Any) -> Iterator[Problem]:
    """What is wrong with that argument; None leaves it to torch's setting."""
    if deterministic is not None and not isinstance(deterministic, bool):
        yield Problem(
            TypeError,
            f"deterministic is a {type(deterministic).__name__}; needs True, False or None; "
            "None follows torch.use_deterministic_algorithms",
        )


def _returned(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], layout: str, source: str
) -> Iterator[Problem]:
    """Whether a tensor has the shape of what `forward` returned for these inputs."""
    if tuple(tensor.shape) != shape:
        yield Problem(
            ValueError,
            f"{name} has shape {_said(tensor.shape, layout)}; needs {_said(shape, layout)}; "
            f"pass {source} for these q, k and v, in the layout {layout!r}",
        )


def _float32(name: str, tensor: torch.Tensor, source: str) -> Iterator[Problem]:
    if tensor.dtype != torch.float32:
        yield Problem(
            TypeError,
            f"{name} has dtype {tensor.dtype}; needs torch.float32; pass {source}, or .float()",
        )


def _buffer(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> Iterator[Problem]:
    if tuple(tensor.shape) != shape:
        yield Problem(
            ValueError,
            f"{name} has shape {_said(tensor.shape, layout)}; needs {_said(shape, layout)}; "
            f"make it with torch.empty, or leave {name} out",
        )
        return
    if tensor.dtype != dtype:
        yield Problem(
            TypeError,
            f"{name} has dtype {tensor.dtype}; needs {dtype}; "
            f"make it with torch.empty(..., dtype={dtype}), or leave {name} out",
        )
        return
    if any(extent > 1 and not step for extent, step in zip(shape, tensor.stride(), strict=True)):
        yield Problem(
            ValueError,
            f"{name} is an expanded view, with several elements at one address; needs memory for "
            f"each; make it with torch.empty, or leave {name} out",
        )
    elif name == "lse" and not tensor.is_contiguous():
        yield Problem(
            ValueError,
            f"lse has strides {tensor.stride()}; needs a contiguous buffer; "
            "make it with torch.empty, or leave lse out",
        )
    elif name != "lse":
        yield from memory(name, tensor)


def gradients(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse to cut a graph in silence.

    Raises:
        NotImplementedError: a tensor requires grad and gradients are being recorded.
    """
    named = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if named and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{_listed(named)} require(s) grad, which this function does not record; "
            "call hopwell.attention, which is differentiable, or this one under torch.no_grad()"
        )


def no_second_order() -> NoReturn:
    """Raises NotImplementedError: gradients of gradients were asked for."""
    raise NotImplementedError(
        "a gradient of hopwell.attention is to be differentiated in turn; it is differentiable "
        "once; use torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for second derivatives"
    )


def no_capture(kernel: object, also: str = "") -> None:
    """Refuse to compile or load a kernel while the current stream captures a CUDA graph.

    Args:
        kernel: as the user is to read of it.
        also: what `warmup` has to be told to load it.

    Raises:
        RuntimeError: it does; the capture goes on, unharmed.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the current stream captures a CUDA graph, and this process has not loaded {kernel}; "
            "needs that before the capture; make the same call once, or "
            f"hopwell.warmup(head_dims=[...]{also}), ahead of torch.cuda.graph"
        )


# ---- arguments of other libraries ----------------------------------------------------------------


@dataclass(frozen=True)
class Neutral:
    """An argument that asks for nothing as long as it has one of these values."""

    values: tuple[Any, ...]
    instead: str  # what to do if it has another


_SDPA = "use torch.nn.functional.scaled_dot_product_attention for it"
_FLEX = "use torch.nn.attention.flex_attention for it"
_SCALED = "fp8 is not supported; pass q, k and v in fp16 or bf16"
_MLA = "concatenate q with qv, and k with v, along head_dim"
_DENSE = "call flash_attn_func with tensors (batch, len, heads, head_dim)"
_TUNED = "the kernels choose by themselves; leave it out"

# Of FlashAttention 2, and what 3 added.
FLASH_ATTENTION: Mapping[str, Neutral] = {
    "dropout_p": Neutral((0.0,), _SDPA),
    "window_size": Neutral(
        tuple(product((-1, None), repeat=2)), f"pass causal=True for (-1, 0), or {_FLEX}"
    ),
    "softcap": Neutral((0.0,), _FLEX),
    "alibi_slopes": Neutral((None,), _FLEX),
    "qv": Neutral((None,), _MLA),
    "q_descale": Neutral((None,), _SCALED),
    "k_descale": Neutral((None,), _SCALED),
    "v_descale": Neutral((None,), _SCALED),
    "attention_chunk": Neutral((0,), _FLEX),
    "num_splits": Neutral((1, 0), _TUNED),
    "pack_gqa": Neutral((None,), _TUNED),
    "sm_margin": Neutral((0,), _TUNED),
    "num_heads_q": Neutral((None,), "split the tensor, and call flash_attn_func"),
}

_OTHER = 'load the model with attn_implementation="sdpa"'
_EAGER = 'load the model with attn_implementation="eager"'
_PACKED = "pass one sequence a row, padded, with an attention_mask (batch, len)"

# What models of transformers hand to their attention.
TRANSFORMERS: Mapping[str, Neutral] = {
    "dropout": Neutral((0.0,), f"set attention_dropout of the config to 0, or {_OTHER}"),
    "softcap": Neutral((None, 0.0), _EAGER),
    "s_aux": Neutral((None,), _EAGER),
    "sinks": Neutral((None,), _EAGER),
    "head_mask": Neutral((None,), _EAGER),
    "position_bias": Neutral((None,), _OTHER),
    "output_attentions": Neutral((None, False), _EAGER),
    "indices": Neutral((None,), _OTHER),
    "block_indices": Neutral((None,), _OTHER),
    "block_table": Neutral((None,), _OTHER),
    "seq_idx": Neutral((None,), _PACKED),
    "cu_seq_lens_q": Neutral((None,), _PACKED),
    "cu_seq_lens_k": Neutral((None,), _PACKED),
    "max_length_q": Neutral((None,), _PACKED),
    "max_length_k": Neutral((None,), _PACKED),
}


# Arguments of torch's flash attention when they ask for nothing, where that is not None alone.
TORCHS_FLASH: Mapping[str, tuple[Any, ...]] = {
    "dropout_p": (0.0,),
    "return_debug_mask": (False,),
    "window_size_left": (None, -1),
    "window_size_right": (None, -1),
    "num_splits": (None, 0, 1),
}


def _asks_nothing(got: Any, values: tuple[Any, ...]) -> bool:
    """Whether an argument has one of these values; a tensor has none of them."""
    value = tuple(got) if isinstance(got, list) else got
    return not isinstance(got, torch.Tensor) and value in values


def flash(arguments: Mapping[str, Any]) -> None:
    """Refuse what torch's flash attention may be asked for and Hopwell has no equal of.

    Raises:
        NotImplementedError: an argument is not what it is when it asks for nothing.
    """
    for name, got in arguments.items():
        neutral = TORCHS_FLASH.get(name, (None,))
        if not _asks_nothing(got, neutral):
            said = "a tensor" if isinstance(got, torch.Tensor) else got
            raise NotImplementedError(
                f"torch's flash attention is Hopwell, and {name} is {said}; needs {neutral[0]}; "
                "choose another backend with torch.nn.attention.sdpa_kernel, or call "
                "torch.nn.attention.restore_flash_attention_impl()"
            )


def neutral(table: Mapping[str, Neutral], arguments: Mapping[str, Any]) -> None:
    """Refuse what the kernels cannot do, where it is asked for; names not in the table pass.

    Raises:
        NotImplementedError: an argument has another value than those of the table.
    """
    for name, got in arguments.items():
        if name in table and not _asks_nothing(got, table[name].values):
            shown = f"a {type(got).__name__}" if isinstance(got, torch.Tensor) else repr(got)
            raise NotImplementedError(
                f"{name} is {shown}; needs {table[name].values[0]!r}; {table[name].instead}"
            )


def known(function: str, names: Iterable[str]) -> None:
    """Raises TypeError: a keyword is none of FlashAttention's."""
    for name in names:
        if name not in FLASH_ATTENTION:
            raise TypeError(
                f"{function} got {name}; needs an argument of FlashAttention 2 or 3; leave it out"
            )


def packed(name: str, got: Any, count: int, parts: str) -> None:
    """Raises TypeError or ValueError: `got` is no tensor that holds `count` others in dim 2."""
    raise_first(_kinds({name: got}))
    if got.ndim != 5 or got.shape[2] != count:
        raise ValueError(
            f"{name} has shape {tuple(got.shape)}; needs (batch, len, {count}, heads, head_dim); "
            f"pass torch.stack({parts}, 2), or call flash_attn_func with the parts"
        )


def no_lengths(function: str, asks: str) -> NoReturn:
    """Raises NotImplementedError: a function of FlashAttention that there is no kernel for."""
    raise NotImplementedError(f"{function} was called; there is no kernel for {asks} yet; {_DENSE}")


def transformers_version(found: str | None, needed: tuple[int, int]) -> None:
    """Raises ImportError if transformers is missing or too old."""
    numbers = re.match(r"(\d+)\.(\d+)", found or "0.0")
    if numbers is None or tuple(map(int, numbers.groups())) < needed:
        wanted = ".".join(map(str, needed))
        raise ImportError(
            f"found transformers {found or 'not installed'}; needs {wanted} or later; "
            f"run `pip install 'transformers>={wanted}'`"
        )


def model_mask(got: str) -> NoReturn:
    """Raises NotImplementedError: a model asks for a mask that the kernels have not."""
    raise NotImplementedError(
        f"{got}; the kernels take no mask or a causal one, and padding at the ends of a sequence, "
        f"as an attention_mask (batch, len); {_OTHER}"
    )


def model_window(window: int | None, len_kv: int) -> None:
    """Raises NotImplementedError: a sliding window is narrower than the keys are many."""
    if window is not None and window < len_kv:
        model_mask(f"sliding_window is {window}, and there are {len_kv} keys")


# ---- settings, folders, versions -----------------------------------------------------------------


def choice(name: str, got: Any, there: Sequence[str]) -> str:
    """Return `got` if it is one of the choices.

    Raises:
        ValueError: it is not.
    """
    if got not in there:
        raise ValueError(f"{name} is {got!r}; needs one of {_listed(there)}; pass one of those")
    return got


def arch(got: str | None) -> str:
    """Return an SM version that there are kernels for.

    Raises:
        NotImplementedError: there are none.
    """
    if got not in arches():
        raise NotImplementedError(
            f"SM version is {got!r}; needs one that there are kernels for: {_listed(arches())}; "
            "pass it as arch or in HOPWELL_ARCH"
        )
    return got


def head_dims(got: Sequence[Any]) -> list[tuple[int, int]]:
    """Return head dims given one by one as pairs (head_dim, head_dim_v).

    Raises:
        ValueError: there are no kernels for one of them.
    """
    pairs = [tuple(one) if isinstance(one, (tuple, list)) else (one, one) for one in got]
    for one, pair in zip(got, pairs, strict=True):
        if len(pair) != 2 or not all(head_dim in HEAD_DIMS for head_dim in pair):
            raise ValueError(
                f"head_dims has {one!r}; needs {HEAD_DIM_NEEDED}, or a pair of those for q and k "
                "and for v; pass for example 64 or (192, 128)"
            )
    return [(head_dim, head_dim_v) for head_dim, head_dim_v in pairs]


def gqa_groups(got: Any) -> list[int]:
    """Return the numbers of heads of q for each of k.

    Raises:
        ValueError: they are not numbers from 1 on, or there is none.
    """
    there = list(got) if isinstance(got, (list, tuple, range)) else []
    if not there or not all(type(group) is int and group > 0 for group in there):
        raise ValueError(
            f"gqa_groups is {got!r}; needs heads of q for each of k, whole numbers from 1 on, at "
            "least one; pass for example [1, 8]"
        )
    return there


def gpu_to_measure() -> None:
    """Raises RuntimeError if this machine has no GPU to take times on."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "this machine has no CUDA GPU; a benchmark needs one, for the emulator knows no time; "
            "run it on another machine, or `python -m hopwell demo` for counters from the emulator"
        )


def export_folder(folder: Path) -> None:
    """Raises FileNotFoundError if there is no such folder."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder; needs one of compiled kernels; "
            f"write it with `python -m hopwell compile --arch {arches()[0]} --out {folder}`"
        )


def export_usable(folder: Path, usable: int, there: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a folder has no kernel that this installation can use."""
    if usable:
        return
    found = sorted({f"DSL {facts['build']['dsl']}, {facts['host']} host" for facts in there})
    raise ValueError(
        f"{folder} holds {len(there)} kernels ({'; '.join(found) or 'none'}), but none compiled "
        "from these sources, with this DSL version, for this host; needs the same version of "
        "hopwell and nvidia-cutlass-dsl on both machines; write the folder again with "
        f"`python -m hopwell compile --arch {arches()[0]} --out {folder}`"
    )


def no_gpu(built_for: str | None, there: int) -> Iterator[str]:
    """Why torch has no GPU to compute on: `built_for` is its CUDA version."""
    if built_for is None:
        yield (
            "torch is built without CUDA; needs a build for CUDA to use a GPU; see pytorch.org, or "
            "call inside hopwell.emulate"
        )
    elif not there:
        yield (
            "torch sees no GPU; needs one and its driver (nvidia-smi lists both); or call inside "
            "hopwell.emulate"
        )


def cache_folder(folder: Path) -> Iterator[str]:
    """Whether compiled kernels can be kept there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        yield (
            f"cannot write to {there}; needs a folder for compiled kernels, which every process "
            "compiles anew otherwise; set HOPWELL_CACHE_DIR to one"
        )


def linking(linker: str | None, runtime: object, built_for: str | None) -> Iterator[str]:
    """Whether compiled kernels load without an import of the DSL."""
    if linker is None:
        yield (
            "no ld here; needs one to load kernels in milliseconds, not seconds; install binutils, "
            "then run `python -m hopwell cache clear`"
        )
    if runtime is None:
        yield (
            f"no runtime of the DSL for CUDA up to {built_for}; needs one to load kernels in "
            "milliseconds, not seconds; install hopwell, or hopwell[cu13] for CUDA 13"
        )


def dsl_version(package: str, found: str | None, needed: tuple[int, int]) -> str:
    """Return the DSL's version.

    Raises:
        RuntimeError: it is not the minor version needed.
    """
    major, minor = needed
    if found is None or not found.startswith(f"{major}.{minor}."):
        raise RuntimeError(
            f"found {package} {found or 'not installed'}; needs {major}.{minor}; "
            f"run `pip install '{package}>={major}.{minor},<{major}.{minor + 1}'`"
        )
    return found


def _said(shape: Sequence[int], layout: str) -> str:
    """A shape as the user would write it; one of rank 4 is (batch, len, heads, head_dim) here."""
    if layout == "bhsd" and len(shape) == 4:
        batch, length, heads, dim = shape
        shape = (batch, heads, length, dim)
    return str(tuple(shape))


def _listed(things: Sequence[Any]) -> str:
    return ", ".join(str(thing) for thing in things)


def _gpu_names() -> str:
    capability = {arch: of for of, arch in ARCH_OF_CAPABILITY.items()}
    return _listed(
        [f"{arch} (compute capability {'.'.join(map(str, capability[arch]))})" for arch in arches()]
    )
