"""FlashAttention's functions: what they compute, and every argument they refuse."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hopwell
from hopwell import compat

from .. import reference
from . import test_backward
from .test_backward import close, leaves

Tensor = torch.Tensor


@pytest.fixture
def emulation() -> Iterator[None]:
    with hopwell.emulate("sm_90a"):
        yield


def inputs(len_q: int = 70, len_kv: int = 130, heads: int = 4, heads_kv: int = 2) -> list[Tensor]:
    """dout, q, k, v: fp16, head_dim 64."""
    return [*test_backward.inputs(len_q, len_kv, (heads, heads_kv), batch=2)]


def test_numbers_and_gradients(emulation: None) -> None:
    """Causal is aligned at the last query; softmax_scale is the fifth argument."""
    dout, *given = inputs()
    q, k, v = leaves(*given)
    out = compat.flash_attn_func(q, k, v, 0.0, 0.2, True, deterministic=True)
    assert isinstance(out, Tensor)
    out.backward(dout)
    close(out.detach(), reference.attention(*given, scale=0.2, causal=True).out)
    true = reference.gradients(dout, *given, scale=0.2, causal=True)
    for leaf, gradient in ((q, true.dq), (k, true.dk), (v, true.dv)):
        close(leaf.grad, gradient)


def test_packed_tensors_have_the_bits_of_their_parts(emulation: None) -> None:
    dout, q, _, _ = inputs(70, 70)
    _, _, k, v = inputs(70, 70, heads_kv=4)
    parts = leaves(q, k, v)
    out = compat.flash_attn_func(*parts, deterministic=True)
    expected = [out, *torch.autograd.grad(out, parts, dout)]

    (qkv,) = leaves(torch.stack([q, k, v], 2))
    out = compat.flash_attn_qkvpacked_func(qkv, deterministic=True)
    (gradient,) = torch.autograd.grad(out, qkv, dout)
    assert all(map(torch.equal, [out, *gradient.unbind(2)], expected))

    (q,), (kv,) = leaves(q), leaves(torch.stack([k, v], 2))
    out = compat.flash_attn_kvpacked_func(q, kv, deterministic=True)
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    assert all(map(torch.equal, [out, dq, *dkv.unbind(2)], expected))


def test_what_is_returned_with_probabilities(emulation: None) -> None:
    """FlashAttention 2 returns three, the last one empty where there is no dropout."""
    _, q, k, v = inputs()
    out, lse, probabilities = compat.flash_attn_func(q, k, v, return_attn_probs=True)
    expected = hopwell.forward(q, k, v)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert probabilities.shape == (0,) and probabilities.dtype == q.dtype


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_kvpacked_func"])
def test_neutral_values_ask_for_nothing(function: str, emulation: None) -> None:
    _, q, k, v = inputs()
    tensors = (q, k, v) if function == "flash_attn_func" else (q, torch.stack([k, v], 2))
    call: Callable[..., Any] = getattr(compat, function)
    neutral = {
        "dropout_p": 0,
        "window_size": [-1, None],
        "softcap": 0,
        "alibi_slopes": None,
        "qv": None,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "attention_chunk": 0,
        "num_splits": 1,
        "pack_gqa": None,
        "sm_margin": 0,
    }
    assert torch.equal(call(*tensors, **neutral), hopwell.forward(q, k, v)[0])


@pytest.mark.parametrize("torchs", [False, True])
def test_deterministic_false_leaves_it_to_torch(
    torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []

    def attention(q: Tensor, *_: Tensor, deterministic: bool | None, **__: Any) -> Any:
        passed.append(deterministic)
        return q, q

    monkeypatch.setattr("hopwell.interface.compat.attention", attention)
    compat.flash_attn_func(*inputs()[1:], deterministic=torchs)
    assert passed == [True if torchs else None]


COMMON = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (compat.flash_attn_func, ["q", "k", "v"]),
        (compat.flash_attn_qkvpacked_func, ["qkv"]),
        (compat.flash_attn_kvpacked_func, ["q", "kv"]),
    ],
)
def test_arguments_stand_where_they_stand_in_version_2(function: Any, tensors: list[str]) -> None:
    found = [
        (p.name, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert found == [(name, inspect.Parameter.empty) for name in tensors] + COMMON


# ---- refused -------------------------------------------------------------------------------------

SDPA = "use torch.nn.functional.scaled_dot_product_attention for it"
FLEX = "use torch.nn.attention.flex_attention for it"
FP8 = "fp8 is not supported; pass q, k and v in fp16 or bf16"
TUNED = "the kernels choose by themselves; leave it out"

REFUSED: dict[str, tuple[Any, str]] = {
    "dropout_p": (0.1, f"dropout_p is 0.1; needs 0.0; {SDPA}"),
    "window_size": (
        (128, 0),
        f"window_size is (128, 0); needs (-1, -1); pass causal=True for (-1, 0), or {FLEX}",
    ),
    "softcap": (30.0, f"softcap is 30.0; needs 0.0; {FLEX}"),
    "alibi_slopes": (torch.ones(4), f"alibi_slopes is a Tensor; needs None; {FLEX}"),
    "qv": (
        torch.ones(1),
        "qv is a Tensor; needs None; concatenate q with qv, and k with v, along head_dim",
    ),
    "q_descale": (torch.ones(1), f"q_descale is a Tensor; needs None; {FP8}"),
    "k_descale": (torch.ones(1), f"k_descale is a Tensor; needs None; {FP8}"),
    "v_descale": (torch.ones(1), f"v_descale is a Tensor; needs None; {FP8}"),
    "attention_chunk": (64, f"attention_chunk is 64; needs 0; {FLEX}"),
    "num_splits": (4, f"num_splits is 4; needs 1; {TUNED}"),
    "pack_gqa": (True, f"pack_gqa is True; needs None; {TUNED}"),
    "sm_margin": (8, f"sm_margin is 8; needs 0; {TUNED}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """By each function, before it looks at tensors' devices."""
    value, text = REFUSED[name]
    _, q, k, v = inputs(70, 70, heads_kv=4)
    calls: list[tuple[Callable[..., Any], list[Tensor]]] = [
        (compat.flash_attn_func, [q, k, v]),
        (compat.flash_attn_qkvpacked_func, [torch.stack([q, k, v], 2)]),
        (compat.flash_attn_kvpacked_func, [q, torch.stack([k, v], 2)]),
    ]
    for function, tensors in calls:
        with pytest.raises(NotImplementedError) as raised:
            function(*tensors, **{name: value})
        assert str(raised.value) == text


def test_heads_of_one_packed_tensor_are_refused() -> None:
    with pytest.raises(NotImplementedError) as raised:
        compat.flash_attn_qkvpacked_func(torch.ones(1, 8, 3, 2, 64).half(), num_heads_q=2)
    assert str(raised.value) == (
        "num_heads_q is 2; needs None; split the tensor, and call flash_attn_func"
    )


def test_no_such_argument() -> None:
    with pytest.raises(TypeError) as raised:
        compat.flash_attn_func(*inputs()[1:], soft_cap=0.0)
    assert str(raised.value) == (
        "flash_attn_func got soft_cap; needs an argument of FlashAttention 2 or 3; leave it out"
    )


def test_scale_where_version_3_has_it_is_refused() -> None:
    """There it is the fourth argument, where version 2 has dropout_p."""
    with pytest.raises(NotImplementedError, match=r"^dropout_p is 0.125; needs 0.0;"):
        compat.flash_attn_func(*inputs()[1:], 0.125)


PACKED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rank": (
        lambda: compat.flash_attn_qkvpacked_func(torch.ones(1, 8, 6, 64).half()),
        ValueError,
        "qkv has shape (1, 8, 6, 64); needs (batch, len, 3, heads, head_dim); "
        "pass torch.stack([q, k, v], 2), or call flash_attn_func with the parts",
    ),
    "parts": (
        lambda: compat.flash_attn_kvpacked_func(inputs()[1], torch.ones(2, 8, 3, 2, 64).half()),
        ValueError,
        "kv has shape (2, 8, 3, 2, 64); needs (batch, len, 2, heads, head_dim); "
        "pass torch.stack([k, v], 2), or call flash_attn_func with the parts",
    ),
    "no tensor": (
        lambda: compat.flash_attn_qkvpacked_func([1.0]),
        TypeError,
        "qkv is a list; needs a torch.Tensor; make one with torch.as_tensor or torch.from_dlpack",
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_tensors_that_are_none(case: str) -> None:
    call, error, text = PACKED[case]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_functions_without_a_kernel() -> None:
    dense = "call flash_attn_func with tensors (batch, len, heads, head_dim)"
    q, k, v = (tensor.flatten(0, 1) for tensor in inputs()[1:])
    lengths = torch.tensor([0, 70, 140])
    with pytest.raises(NotImplementedError) as raised:
        compat.flash_attn_varlen_func(q, k, v, lengths, lengths, 70, 70, causal=True)
    assert str(raised.value) == (
        "flash_attn_varlen_func was called; there is no kernel for packed sequences (cu_seqlens) "
        f"yet; {dense}"
    )
    with pytest.raises(NotImplementedError) as raised:
        compat.flash_attn_with_kvcache(*inputs()[1:], cache_seqlens=3)
    assert str(raised.value) == (
        "flash_attn_with_kvcache was called; there is no kernel for a cache of k and v "
        f"(cache_seqlens, block_table) yet; {dense}"
    )
