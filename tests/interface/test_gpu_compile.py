"""torch.compile and torch's scaled_dot_product_attention on a GPU; skipped where `test_gpu` is.

`test_compile` and `test_sdpa` have more, on the emulator.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import hopwell
import hopwell.torch

from .. import reference
from . import test_gpu
from .test_backward import alike, close, leaves
from .test_compile import differentiated, same

Tensor = torch.Tensor
pytestmark = test_gpu.pytestmark
DEVICE = test_gpu.DEVICE.type
FIXED: dict[str, Any] = {"causal": True, "deterministic": True}


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def inputs(
    len_q: int = 333, len_kv: int = 500, head_dim: int = 128, heads_kv: int = 2
) -> list[Tensor]:
    """q, k, v: 2 sequences, 4 heads of queries, bf16."""
    shapes = (2, len_q, 4, head_dim), (2, len_kv, heads_kv, head_dim)
    q, k = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    return [q, k, torch.randn_like(k)]


def heads_first(*sizes: int, **options: int) -> list[Tensor]:
    return [t.transpose(1, 2) for t in inputs(*sizes, **options)]


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_compiled(layout: Any, mode: str) -> None:
    """With Inductor's kernels around it; in a CUDA graph from the second call on."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        options: Any = {"layout": layout, "return_lse": True, **FIXED}
        out, lse = hopwell.attention(q * 2, k + 1, v, **options)
        return out.transpose(1, 2).relu(), lse * 2

    tensors = inputs() if layout == "bshd" else heads_first()
    expected = differentiated(function, *tensors)
    run = torch.compile(function, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert same([t.clone() for t in differentiated(run, *tensors)], expected)


def test_one_tensor_as_key_and_value() -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        return hopwell.attention(q, k, k, **FIXED)

    q, k, _ = inputs()
    run = torch.compile(function, fullgraph=True)
    assert same(differentiated(run, q, k), differentiated(function, q, k))


def test_another_length_does_not_compile_again() -> None:
    def function(*tensors: Tensor) -> Tensor:
        return hopwell.attention(*tensors, **FIXED)

    run = torch.compile(function, fullgraph=True, dynamic=True)
    differentiated(run, *inputs(100, 120))
    for lengths in ((333, 500), (64, 129)):
        tensors = inputs(*lengths)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = differentiated(run, *tensors)
        assert same(found, differentiated(function, *tensors))


def test_forward_with_buffers() -> None:
    def function(out: Tensor, lse: Tensor, *tensors: Tensor) -> Tensor:
        hopwell.forward(*tensors, causal=True, out=out, lse=lse)
        return out.float() + 1

    tensors = inputs()
    seen = []
    for run in (torch.compile(function, fullgraph=True), function):
        buffers = torch.empty_like(tensors[0]), torch.empty(2, 4, 333, device=DEVICE)
        seen.append([run(*buffers, *tensors), *buffers])
    assert same(*seen)


def test_opcheck() -> None:
    tensors = leaves(*inputs(33, 65))
    options = {"scale": None, "causal": True, "layout": "bshd", "deterministic": True}
    torch.library.opcheck(hopwell.torch.operators.forward, tuple(tensors), options)
    q, k, v = (t.detach() for t in tensors)
    out, lse = hopwell.forward(q, k, v, causal=True)
    arguments = (out, q, k, v, out, lse, lse)
    torch.library.opcheck(hopwell.torch.operators.backward, arguments, options)


def test_a_block_in_autocast() -> None:
    """float32 parameters: as in eager mode but for what Inductor rounds otherwise."""
    qkv = torch.nn.Linear(256, 768, device=DEVICE)
    x = torch.randn(2, 200, 256, device=DEVICE)

    def function(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            q, k, v = qkv(x).view(2, 200, 3, 4, 64).unbind(2)
            q = torch.nn.functional.rms_norm(q.float(), (64,))  # float32, as a norm leaves it
            return hopwell.attention(q, k, v, causal=True)

    seen = []
    for run in (function, torch.compile(function, fullgraph=True)):
        out = run(x)
        assert out.dtype == torch.bfloat16
        seen.append((out, *torch.autograd.grad(out.float().square().mean(), [*qkv.parameters()])))
    for found, expected in zip(*seen, strict=True):
        close(found, expected.double(), 2e-2)


# ---- scaled_dot_product_attention ----------------------------------------------------------------


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hopwell is torch's flash attention, the only one allowed, and deterministic."""
    monkeypatch.setenv("HOPWELL_DETERMINISTIC", "1")
    hopwell.torch.register()
    registry.activate_flash_attention_impl("hopwell")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    registry.restore_flash_attention_impl()


def ours(**options: Any) -> Callable[..., Tensor]:
    return lambda *t: hopwell.attention(*t, layout="bhsd", deterministic=True, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal: bool, active: None) -> None:
    tensors = heads_first(333, 333, heads_kv=4)
    found = differentiated(lambda *t: scaled_dot_product_attention(*t, is_causal=causal), *tensors)
    assert alike(found, differentiated(ours(causal=causal), *tensors))
    assert found[0].stride() == tensors[0].stride()


def test_grouped_queries(active: None) -> None:
    tensors = heads_first(333, 500, heads_kv=2)
    found = differentiated(lambda *t: scaled_dot_product_attention(*t, enable_gqa=True), *tensors)
    assert alike(found, differentiated(ours(), *tensors))


def test_a_causal_mask_that_ends_at_the_last_key(active: None) -> None:
    tensors = heads_first(100, 333, heads_kv=4)
    mask = causal_lower_right(100, 333)
    found = differentiated(lambda *t: scaled_dot_product_attention(*t, attn_mask=mask), *tensors)
    assert alike(found, differentiated(ours(causal=True), *tensors))


def test_a_causal_mask_that_ends_elsewhere_never_arrives(active: None) -> None:
    """torch's is aligned at the first query there: it chooses something else, or nothing."""
    with pytest.raises(RuntimeError, match="No available kernel"):
        scaled_dot_product_attention(*heads_first(100, 333, heads_kv=4), is_causal=True)


def test_a_head_dim_that_torch_pads(active: None) -> None:
    tensors = heads_first(100, 100, head_dim=60, heads_kv=4)
    found = differentiated(scaled_dot_product_attention, *tensors)
    dout = torch.linspace(-1, 1, found[0].numel(), dtype=found[0].dtype, device=DEVICE)
    turned = [t.transpose(1, 2) for t in (dout.view(found[0].shape), *tensors)]
    with torch.device(DEVICE):
        exact = reference.gradients(*turned)
    for gradient, right in zip(found[1:], (exact.dq, exact.dk, exact.dv), strict=True):
        close(gradient.transpose(1, 2), right)


def test_views_of_a_projection(active: None) -> None:
    packed = torch.randn(2, 200, 3, 4, 64, device=DEVICE).half().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    (found,) = torch.autograd.grad(out.sum(), packed, retain_graph=True)
    expected = ours(causal=True)(q, k, v)
    assert torch.equal(out, expected)
    assert torch.equal(found, torch.autograd.grad(expected.sum(), packed)[0])


def test_scaled_dot_product_attention_compiled(active: None) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * 2, k, v, is_causal=True).relu()

    tensors = heads_first(333, 333, heads_kv=4)
    found = differentiated(torch.compile(function, fullgraph=True), *tensors)
    assert same(found, differentiated(function, *tensors))


def test_dropout_is_refused(active: None) -> None:
    with pytest.raises(NotImplementedError, match=r"Hopwell, and dropout_p is 0\.5; needs 0\.0"):
        scaled_dot_product_attention(*heads_first(100, 100, heads_kv=4), dropout_p=0.5)


def test_nested_tensors_are_refused(active: None) -> None:
    ragged = torch.nested.nested_tensor(
        [torch.randn(n, 4, 64, device=DEVICE).half() for n in (30, 70)], layout=torch.jagged
    ).transpose(1, 2)
    # By us, or by torch itself: to 2.11 it has no such operator for them.
    with pytest.raises(NotImplementedError, match=r"cum_seq_q is a tensor; needs|flash_attention"):
        scaled_dot_product_attention(ragged, ragged, ragged)


def test_restored() -> None:
    tensors = heads_first(100, 100, heads_kv=4)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = scaled_dot_product_attention(*tensors)
        hopwell.torch.register()
        registry.activate_flash_attention_impl("hopwell")
        assert torch.equal(scaled_dot_product_attention(*tensors), ours()(*tensors))
        registry.restore_flash_attention_impl()
        assert registry.current_flash_attention_impl() is None
        assert torch.equal(scaled_dot_product_attention(*tensors), before)
        scaled_dot_product_attention(*tensors, dropout_p=0.5)
