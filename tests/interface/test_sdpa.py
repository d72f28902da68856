"""Hopwell under torch's operators of flash attention, on the emulator.

torch has kernels of those for CUDA alone, so that here they are Hopwell's for CPU tensors too, by
the dispatcher and with torch's own derivatives. `test_gpu_compile` has the function itself.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import attention

import hopwell
import hopwell.torch
from hopwell.interface import sdpa

from .test_backward import alike, inputs, leaves

Tensor = torch.Tensor
aten = torch.ops.aten
NAME = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture
def override() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    override = sdpa.Override("CPU")
    with hopwell.emulate("sm_90a"):
        yield
    override.remove()
    torch.use_deterministic_algorithms(False)


def heads_first(len_q: int = 5, len_kv: int = 7) -> list[Tensor]:
    """dout, q, k, v: (batch, heads, len, head_dim), of (batch, len, heads, head_dim) in memory."""
    return [t.transpose(1, 2) for t in inputs(len_q, len_kv, batch=2)]


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product(causal: bool, override: None) -> None:
    """A causal mask ends at the last key for the last query, as that of torch's kernels does."""
    dout, *tensors = heads_first()
    given = leaves(*tensors)
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, scale=0.1)
    expected, expected_lse = hopwell.forward(*tensors, scale=0.1, causal=causal, layout="bhsd")
    assert alike((out, lse), (expected, expected_lse))
    assert out.stride() == tensors[0].stride()
    assert rest[:4] == [None, None, 5, 7] and rest[6].numel() == 0
    found = torch.autograd.grad(out, given, dout)
    options: Any = {"scale": 0.1, "causal": causal, "layout": "bhsd"}
    assert alike(found, hopwell.backward(dout, *tensors, expected, expected_lse, **options))
    assert all(a.stride() == b.stride() for a, b in zip(found, tensors, strict=True))


def test_a_gradient_that_kernels_cannot_read(override: None) -> None:
    given = leaves(*heads_first()[1:])
    out = aten._scaled_dot_product_flash_attention(*given)[0]
    found = torch.autograd.grad(out.sum(), given, retain_graph=True)
    assert alike(found, torch.autograd.grad(out, given, torch.ones_like(out)))


def test_expanded_keys(override: None) -> None:
    """Results lie as what they belong to, but not several elements at one address."""
    _, q, k, v = heads_first()
    k, v = (t.expand(-1, 2, -1, -1) for t in (k, v))
    given = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out = aten._scaled_dot_product_flash_attention(*given)[0]
    found = torch.autograd.grad(out, given, torch.ones_like(out))
    with torch.no_grad():
        results = hopwell.forward(*given, layout="bhsd")
        expected = hopwell.backward(torch.ones_like(out), *given, *results, layout="bhsd")
    assert alike(found, expected)


def test_compiled(override: None) -> None:
    """torch says of the results what they are."""

    def function(*tensors: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)[0] * 2

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    dout, *tensors = heads_first()
    seen = []
    for run in (compiled, function):
        given = leaves(*tensors)
        out = run(*given)
        seen.append([out, *torch.autograd.grad(out, given, dout)])
    assert alike(*seen)
    strides = [[t.stride() for t in some] for some in seen]
    assert strides[0] == strides[1]


def test_flash_attention(override: None) -> None:
    """(batch, len, heads, head_dim), with and without a buffer."""
    dout, *tensors = inputs(5, 7, batch=2)
    rest = None, None, 5, 7, 0.0, True, False
    window: dict[str, Any] = {"window_size_left": -1, "window_size_right": None}
    out, lse, *random, _ = aten._flash_attention_forward(*tensors, *rest, **window)
    expected = hopwell.forward(*tensors, causal=True)
    assert alike((out, lse), expected)
    found = aten._flash_attention_backward(
        *(dout, *tensors, out, lse, None, None, 5, 7, 0.0, True), *random, **window
    )
    assert alike(found, hopwell.backward(dout, *tensors, out, lse, causal=True))
    if hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):  # not in torch 2.11
        buffer = torch.empty_like(out)
        forward_into = aten._flash_attention_forward_no_dropout_inplace
        assert torch.equal(forward_into(buffer, *tensors, *rest), lse)
        assert torch.equal(buffer, out)


# ---- what is refused -----------------------------------------------------------------------------

DENSE: dict[str, Any] = {"cum_seq_q": None, "cum_seq_k": None, "max_q": 5, "max_k": 7}
DENSE |= {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "cum_seq_q": (torch.tensor([0, 5]), "a tensor", "None"),
    "cum_seq_k": (torch.tensor([0, 7]), "a tensor", "None"),
    "dropout_p": (0.1, "0.1", "0.0"),
    "return_debug_mask": (True, "True", "False"),
    "window_size_left": (3, "3", "None"),
    "window_size_right": (0, "0", "None"),
    "seqused_k": (torch.tensor([7]), "a tensor", "None"),
    "alibi_slopes": (torch.ones(2), "a tensor", "None"),
    "block_table": (torch.zeros(1, 1), "a tensor", "None"),
    "num_splits": (2, "2", "None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, override: None) -> None:
    schema = aten._flash_attention_forward.default._schema
    if name not in {argument.name for argument in schema.arguments}:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    value, said, needed = REFUSED[name]
    names = ("query", "key", "value")
    tensors = dict(zip(names, inputs(5, 7)[1:], strict=True))
    with pytest.raises(NotImplementedError) as raised:
        aten._flash_attention_forward(**tensors, **DENSE | {name: value})
    assert str(raised.value) == (
        f"torch's flash attention is Hopwell, and {name} is {said}; needs {needed}; choose another "
        "backend with torch.nn.attention.sdpa_kernel, or call "
        "torch.nn.attention.restore_flash_attention_impl()"
    )


@pytest.mark.parametrize("name", ["cum_seq_q", "dropout_p", "window_size_left"])
def test_refused_backward(name: str, override: None) -> None:
    dout, q, k, v = inputs(5, 7)
    out, lse = hopwell.forward(q, k, v)
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "rng_state", "unused")
    tensors = dict(zip(names, (dout, q, k, v, out, lse, None, None), strict=True))
    options = {key: value for key, value in DENSE.items() if key != "return_debug_mask"}
    with pytest.raises(NotImplementedError, match=rf"Hopwell, and {name} is"):
        aten._flash_attention_backward(**tensors, **options | {name: REFUSED[name][0]})


@pytest.mark.parametrize("position", [3, 5])
def test_refused_of_scaled_dot_product(position: int, override: None) -> None:
    arguments: list[Any] = [*heads_first()[1:], 0.0, False, False]
    arguments[position] = 0.5 if position == 3 else True
    with pytest.raises(NotImplementedError, match=r"^torch's flash attention is Hopwell, and "):
        aten._scaled_dot_product_flash_attention(*arguments)


def test_what_our_checks_refuse(override: None) -> None:
    q, k, v = (t.float() for t in heads_first()[1:])
    with pytest.raises(TypeError, match=r"^q has dtype torch.float32; needs torch.float16 or"):
        aten._scaled_dot_product_flash_attention(q, k, v)


# ---- torch's registry ----------------------------------------------------------------------------


def overridden(device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(NAME, device)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has kernels of its own there")
def test_the_user_activates_and_restores() -> None:
    hopwell.torch.register()
    assert "hopwell" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None and not overridden("CUDA")
    for _ in range(2):
        attention.activate_flash_attention_impl("hopwell")
        assert attention.current_flash_attention_impl() == "hopwell" and overridden("CUDA")
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None and not overridden("CUDA")


def test_another_name() -> None:
    hopwell.torch.register("ours")
    assert "ours" in attention.list_flash_attention_impls()


def test_removed() -> None:
    override = sdpa.Override("CPU")
    assert overridden("CPU")
    override.remove()
    assert not overridden("CPU")
    with pytest.raises(NotImplementedError, match="Could not run"):
        aten._scaled_dot_product_flash_attention(*heads_first()[1:])
