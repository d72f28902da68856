"""Gradients as a user gets them, on the emulator: of `attention`, and by `backward`."""

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import hopwell
from hopwell.interface import autograd
from hopwell.interface import compile as compiling
from hopwell.interface.emulate import Emulation

from .. import reference

Tensor = torch.Tensor
ALLOWED = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of an RMS error, relative


@pytest.fixture
def emulation() -> Iterator[Emulation]:
    with hopwell.emulate("sm_90a") as emulation:
        yield emulation


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def inputs(
    len_q: int = 100, len_kv: int = 150, heads: tuple[int, int] = (2, 1), batch: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout, q, k, v: fp16, head_dim 64."""
    torch.manual_seed(len_q + len_kv)
    shape_q, shape_kv = (batch, len_q, heads[0], 64), (batch, len_kv, heads[1], 64)
    return normal(*shape_q), normal(*shape_q), normal(*shape_kv), normal(*shape_kv)


def raw(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = True, **options: Any
) -> tuple[Tensor, ...]:
    """`backward` after `forward`."""
    out, lse = hopwell.forward(q, k, v, **options)
    return hopwell.backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)


def close(found: Tensor | None, true: Tensor, within: float | None = None) -> None:
    assert found is not None and found.shape == true.shape
    error = (found.double() - true).norm() / true.norm()
    assert error <= (within or ALLOWED[found.dtype]), error.item()


def alike(some: Any, others: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# ---- attention -----------------------------------------------------------------------------------


def test_gradients_of_out_and_lse_in_bf16(emulation: Emulation) -> None:
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    q, k, v = leaves(
        normal(2, 130, 4, 128, dtype=bf16),
        normal(2, 200, 2, 128, dtype=bf16),
        normal(2, 200, 2, 128, dtype=bf16),
    )
    dout, dlse = normal(2, 130, 4, 128, dtype=bf16), torch.randn(2, 4, 130)
    out, lse = hopwell.attention(q, k, v, causal=True, return_lse=True)
    torch.autograd.backward((out, lse), (dout, dlse))
    with torch.no_grad():
        true = reference.gradients(dout, q, k, v, causal=True, dlse=dlse)
    close(q.grad, true.dq)
    close(k.grad, true.dk)
    close(v.grad, true.dv)


def test_gradients_in_fp16_and_bhsd(emulation: Emulation) -> None:
    given = [t.transpose(1, 2).contiguous() for t in inputs(130, 200, (4, 2), batch=2)]
    dout, q, k, v = given[0], *leaves(*given[1:])
    hopwell.attention(q, k, v, layout="bhsd").backward(dout)
    true = reference.gradients(*(t.detach().transpose(1, 2) for t in (dout, q, k, v)))
    for tensor, gradient in ((q, true.dq), (k, true.dk), (v, true.dv)):
        close(tensor.grad, gradient.transpose(1, 2))
        assert tensor.grad is not None and tensor.grad.is_contiguous()


def test_autograd_has_the_bits_of_backward(emulation: Emulation) -> None:
    dout, *given = inputs(200, 300)
    q, k, v = leaves(*given)
    for causal in (False, True):
        expected = raw(dout, *given, causal=causal)
        out = hopwell.attention(q, k, v, causal=causal, deterministic=True)
        assert alike(torch.autograd.grad(out, (q, k, v), dout), expected)


def test_only_lse_has_a_gradient(emulation: Emulation) -> None:
    _, *given = inputs()
    q, k, v = leaves(*given)
    _, lse = hopwell.attention(q, k, v, return_lse=True)
    lse.sum().backward()  # expanded from one number
    dlse = torch.ones_like(lse)
    true = reference.gradients(torch.zeros_like(q), *given, dlse=dlse)
    close(q.grad, true.dq)
    close(k.grad, true.dk)
    assert v.grad is not None and not v.grad.any()


def test_one_tensor_as_key_and_value(emulation: Emulation) -> None:
    dout, q, k, _ = inputs()
    check_one_as_key_and_value(dout, q, k)


def check_one_as_key_and_value(dout: Tensor, q: Tensor, k: Tensor) -> None:
    """The gradient of a k that is v too is the sum of both."""
    dq, dk, dv = raw(dout, q, k, k)
    q, k = leaves(q, k)
    hopwell.attention(q, k, k, deterministic=True).backward(dout)
    assert q.grad is not None and k.grad is not None
    assert torch.equal(q.grad, dq) and torch.equal(k.grad, dk + dv)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_only_some_inputs_require_grad(wanted: str, emulation: Emulation) -> None:
    dout, *given = inputs()
    expected = dict(zip("qkv", raw(dout, *given), strict=True))
    tensors = dict(zip("qkv", (t.clone() for t in given), strict=True))
    for name in wanted:
        tensors[name].requires_grad_()
    hopwell.attention(*tensors.values(), deterministic=True).backward(dout)
    for name, tensor in tensors.items():
        grad = tensor.grad
        assert grad is None if name not in wanted else torch.equal(grad, expected[name])


def test_gradients_of_out_that_kernels_cannot_read(emulation: Emulation) -> None:
    """Of a sum, expanded from one number; with another last stride; at any address, as of a cat."""
    dout, *given = inputs()
    odd = torch.empty(dout.numel() + 3, dtype=dout.dtype)[3:].view(dout.shape).copy_(dout)
    assert odd.data_ptr() % 16 and odd.is_contiguous()
    turned = torch.empty(1, 64, 2, 100, dtype=torch.float16).permute(0, 3, 2, 1).copy_(dout)
    assert turned.stride(-1) != 1
    for gradient in (torch.ones_like(dout), turned, odd):
        q, k, v = leaves(*given)
        out = hopwell.attention(q, k, v, deterministic=True)
        if gradient is turned or gradient is odd:
            out.backward(gradient)
        else:
            out.sum().backward()
        expected = raw(gradient.clone(memory_format=torch.contiguous_format), *given)
        assert alike((q.grad, k.grad, v.grad), expected)


def test_a_sign_that_torch_keeps_beside_a_gradient_counts(emulation: Emulation) -> None:
    """As the imaginary part of a conjugate has one."""
    dout, *given = inputs(100, 100)
    q, k, v = leaves(*given)
    out, lse = hopwell.attention(q, k, v, return_lse=True, deterministic=True)
    negative = torch._neg_view(torch.ones_like(lse))
    assert negative.is_neg() and (negative == -1).all()
    found = torch.autograd.grad((out, lse), (q, k, v), (torch._neg_view(dout), negative))
    out, lse = hopwell.forward(*given)
    expected = hopwell.backward(
        -dout, *given, out, lse, dlse=-torch.ones_like(lse), deterministic=True
    )
    assert alike(found, expected)


def test_a_scale_may_be_an_int_of_any_size(emulation: Emulation) -> None:
    _, q, k, v = inputs()
    for scale in (10**19, -(10**19)):
        some = hopwell.forward(torch.zeros_like(q), k, v, scale=scale)
        assert alike(some, hopwell.forward(torch.zeros_like(q), k, v, scale=float(scale)))


def test_a_view_of_a_projection_gets_its_gradient(emulation: Emulation) -> None:
    dout, *_ = inputs(100, 100)
    packed = normal(1, 100, 2, 3, 64).requires_grad_()
    out = hopwell.attention(*packed.unbind(3), deterministic=True)
    out.backward(dout)
    expected = raw(dout, *(t.detach() for t in packed.unbind(3)))
    assert packed.grad is not None and torch.equal(packed.grad, torch.stack(expected, 3))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale(scale: float, emulation: Emulation) -> None:
    dout, *given = inputs()
    q, k, v = leaves(*given)
    hopwell.attention(q, k, v, scale=scale).backward(dout)
    true = reference.gradients(dout, *given, scale=scale)
    close(v.grad, true.dv)
    assert q.grad is not None and k.grad is not None
    if scale:
        close(q.grad, true.dq)
        close(k.grad, true.dk)
    else:
        assert not q.grad.any() and not k.grad.any()


def test_twice_is_refused(emulation: Emulation) -> None:
    """Where a gradient is differentiated, be it in a loss that contains more; not where it is made.

    Also if dout depends on nothing, and the gradient on q, k and v alone.
    """
    dout, *given = inputs(1, 3)
    for gradient in leaves(dout)[0], dout:
        q, k, v = leaves(*given)
        out = hopwell.attention(q, k, v)
        (dq,) = torch.autograd.grad(out, q, gradient, create_graph=True)
        loss = dq.square().sum() + q.square().sum()
        with pytest.raises(NotImplementedError) as raised:
            loss.backward()
        assert str(raised.value) == (
            "a gradient of hopwell.attention is to be differentiated in turn; it is differentiable "
            "once; use torch.nn.functional.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for second derivatives"
        )
        expected = raw(dout, *given)
        assert torch.equal(dq, expected[0])


def test_nothing_to_record_goes_straight_to_forward(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *given = inputs()
    expected = hopwell.forward(*given)
    monkeypatch.setattr(autograd, "_Attention", None)
    assert alike(hopwell.attention(*given, return_lse=True), expected)
    with torch.no_grad():
        out, lse = hopwell.attention(*leaves(*given), return_lse=True)
    assert alike((out, lse), expected) and not out.requires_grad and not lse.requires_grad


# ---- deterministic or not ------------------------------------------------------------------------


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def deterministic_kernel(monkeypatch: pytest.MonkeyPatch, **options: Any) -> bool:
    """Whether the kernel that `attention` takes for its gradients is the deterministic one."""
    chosen: list[Any] = []
    launcher = compiling.launcher

    def noted(spec: compiling.Spec, *, emulated: bool) -> compiling.Launcher:
        if spec.kernel == "backward":
            chosen.append(dict(spec.facts)["deterministic"])
        return launcher(spec, emulated=emulated)

    autograd._plans.clear()
    dout, *given = inputs(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "launcher", noted)
        hopwell.attention(*leaves(*given), **options).backward(dout)
    (only,) = chosen
    return only


def test_who_chooses_the_deterministic_kernel(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOPWELL_DETERMINISTIC", raising=False)
    assert not deterministic_kernel(monkeypatch)
    assert deterministic_kernel(monkeypatch, deterministic=True)
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("HOPWELL_DETERMINISTIC", value)
        assert deterministic_kernel(monkeypatch) is expected
    monkeypatch.setenv("HOPWELL_DETERMINISTIC", "1")
    assert not deterministic_kernel(monkeypatch, deterministic=False)
    monkeypatch.setenv("HOPWELL_DETERMINISTIC", "true")
    with pytest.raises(ValueError, match=r"HOPWELL_DETERMINISTIC is 'true'; needs one of 0, 1"):
        deterministic_kernel(monkeypatch)


def test_torch_chooses_the_deterministic_kernel(
    deterministic_algorithms: None, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOPWELL_DETERMINISTIC", raising=False)
    assert deterministic_kernel(monkeypatch)
    assert not deterministic_kernel(monkeypatch, deterministic=False)


def test_a_setting_that_changes_between_calls_counts(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of one is none of the other."""
    monkeypatch.delenv("HOPWELL_DETERMINISTIC", raising=False)
    dout, *given = inputs(1, 1)
    out, lse = hopwell.forward(*given)
    autograd._plans.clear()
    hopwell.backward(dout, *given, out, lse)
    monkeypatch.setenv("HOPWELL_DETERMINISTIC", "1")
    hopwell.backward(dout, *given, out, lse)
    assert len({id(plan.call) for plan in autograd._plans.values()}) == 2


def test_deterministic_gradients_have_the_same_bits_in_any_order() -> None:
    dout, *given = inputs(200, 500)
    results = []
    for order, seed in product(("eager", "random"), (1, 2)):
        with hopwell.emulate("sm_90a", **{"order": order, "seed": seed}):
            results.append(raw(dout, *given))
    assert all(alike(result, results[0]) for result in results)


# ---- backward ------------------------------------------------------------------------------------


def test_given_gradients_are_written(emulation: Emulation) -> None:
    dout, *given = inputs(100, 150, (4, 2), batch=2)
    expected = raw(dout, *given)
    wide = [torch.full((*t.shape[:3], 3, 64), 7.0, dtype=t.dtype) for t in given]
    buffers = [t[:, :, :, 1] for t in wide]
    out, lse = hopwell.forward(*given)
    named = dict(zip(("dq", "dk", "dv"), buffers, strict=True))
    found = hopwell.backward(dout, *given, out, lse, deterministic=True, **named)
    assert all(a is b for a, b in zip(found, buffers, strict=True))
    assert alike(found, expected)
    assert all((t[:, :, :, [0, 2]] == 7).all() for t in wide)


def test_layouts_have_the_same_bits(emulation: Emulation) -> None:
    tensors = inputs(100, 150, (4, 2), batch=2)
    expected = raw(*tensors)
    turned = [t.transpose(1, 2) for t in tensors]
    for seen in (turned, [t.contiguous() for t in turned]):
        found = raw(seen[0], *seen[1:], layout="bhsd")
        assert all(t.is_contiguous() for t in found)
        assert alike((t.transpose(1, 2) for t in found), expected)


def test_out_and_lse_of_more_keys(emulation: Emulation) -> None:
    """As in a ring: each half of the keys, with out and lse of all of them."""
    dout, q, k, v = inputs(130, 256, (4, 2))
    out, lse = hopwell.forward(q, k, v)
    whole = hopwell.backward(dout, q, k, v, out, lse)
    halves = [
        hopwell.backward(dout, q, k[:, part], v[:, part], out, lse)
        for part in (slice(0, 128), slice(128, 256))
    ]
    true = reference.gradients(dout, q, k, v)
    for index, gradient in ((1, true.dk), (2, true.dv)):
        joined = torch.cat([half[index] for half in halves], 1)
        close(joined, gradient)
        assert torch.equal(joined, whole[index])
    close((halves[0][0].double() + halves[1][0].double()).half(), true.dq)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("batch", "len_q", "len_kv", "heads"),
    [(0, 5, 7, 2), (2, 0, 7, 2), (2, 5, 0, 2), (2, 5, 7, 0)],
    ids=["batch", "len_q", "len_kv", "heads"],
)
def test_nothing_to_attend(
    layout: Any, batch: int, len_q: int, len_kv: int, heads: int, emulation: Emulation
) -> None:
    shape_q, shape_kv = (batch, len_q, heads, 64), (batch, len_kv, max(heads // 2, 1), 64)
    dout, *given = (torch.ones(shape).half() for shape in (shape_q, shape_q, shape_kv, shape_kv))
    if layout == "bhsd":
        dout, *given = (t.transpose(1, 2).contiguous() for t in (dout, *given))
    q, k, v = leaves(*given)
    out, lse = hopwell.attention(q, k, v, layout=layout, return_lse=True)
    torch.autograd.backward((out, lse), (dout, torch.zeros_like(lse)))
    buffers = {name: torch.ones_like(t) for name, t in zip(("dq", "dk", "dv"), given, strict=True)}
    with torch.no_grad():
        hopwell.backward(dout, q, k, v, out, lse, layout=layout, **buffers)
    for tensor, buffer in zip((q, k, v), buffers.values(), strict=True):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape
        assert not tensor.grad.any() and not buffer.any()
    assert not emulation.report.launches


def test_rows_with_nothing_to_attend(emulation: Emulation) -> None:
    dout, *given = inputs(200, 70)
    dq, dk, dv = raw(dout, *given, causal=True)
    true = reference.gradients(dout, *given, causal=True)
    assert (dq[:, :130] == 0).all() and dq[:, 130:].any()
    for found, exact in ((dq, true.dq), (dk, true.dk), (dv, true.dv)):
        close(found, exact)


def test_nan_stays_in_its_batch_and_heads(emulation: Emulation) -> None:
    """That of a query goes to the gradients of its key head, and no further."""
    dout, q, k, v = inputs(100, 150, (4, 2), batch=2)
    expected = raw(dout, q, k, v)
    q[1, 30, 3, 5] = math.nan
    dq, dk, dv = raw(dout, q, k, v)
    assert dq[1, 30, 3].isnan().all() and dk[1, :, 1].isnan().any() and dv[1, :, 1].isnan().any()
    own_head = torch.zeros(2, 4, dtype=torch.bool)
    own_head[1, 3] = True
    own_key_head = torch.zeros(2, 2, dtype=torch.bool)
    own_key_head[1, 1] = True
    for found, before, own in zip(
        (dq, dk, dv), expected, (own_head, own_key_head, own_key_head), strict=True
    ):
        others = ~own[:, None, :, None].expand_as(found)
        assert torch.equal(found[others], before[others])


def test_a_new_length_batch_or_head_count_never_compiles(emulation: Emulation) -> None:
    raw(*inputs())
    before = compiling.counts.compiled
    for shapes in ((1, 1, (1, 1), 1), (97, 129, (6, 2), 2), (192, 64, (3, 3), 1)):
        dout, *given = inputs(*shapes)
        found, true = raw(dout, *given), reference.gradients(dout, *given)
        for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
            exact = getattr(true, name)
            if exact.norm() > 1e-9:  # with a single key the scores do not matter
                close(gradient, exact)
    assert compiling.counts.compiled == before


def test_a_cleared_cache_is_cleared_of_backward(
    emulation: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw(*inputs(1, 1))
    assert autograd._plans and any(spec.kernel == "backward" for spec, _ in compiling._launchers)
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    assert hopwell.clear_cache() == 0
    assert not autograd._plans and not compiling._launchers


MISPLACED = torch.zeros(100 * 2 * 64 + 8, dtype=torch.float16)[1:-7].view(1, 100, 2, 64)
WARM: dict[str, tuple[dict[str, Any], str]] = {
    "dout": ({"dout": MISPLACED}, "dout starts at an address"),
    "q": ({"q": MISPLACED}, "q starts at an address"),
    "dq": ({"dq": MISPLACED}, "dq starts at an address"),
    "gradients": ({"q": inputs()[1].requires_grad_()}, "q require(s) grad"),
    "sparse": ({"k": inputs()[2].to_sparse()}, "k has layout torch.sparse_coo"),
    "truth": ({"deterministic": 1}, "deterministic is a int"),
    "scale": ({"scale": math.inf}, "scale is inf"),
}


@pytest.mark.parametrize("case", WARM)
def test_what_is_wrong_in_a_signature_seen_before(
    case: str, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced, text = WARM[case]
    dout, q, k, v = inputs()
    out, lse = hopwell.forward(q, k, v)
    good: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    good["deterministic"] = True
    hopwell.backward(**good)
    hopwell.backward(**good, dq=torch.empty_like(q))
    launches = len(emulation.report.launches)
    monkeypatch.setattr(autograd, "_make_plan", None)
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        hopwell.backward(**good | replaced)
    assert str(raised.value).startswith(text)
    assert len(emulation.report.launches) == launches


# ---- the measure ---------------------------------------------------------------------------------


def test_finite_differences(emulation: Emulation) -> None:
    """Of the float64 definition of attention; the reference's formulas and ours beside them."""
    dout, *given = inputs(5, 7, (2, 1))
    dlse = torch.randn(1, 2, 5)
    q, k, v = (t.double() for t in given)

    def loss(*tensors: Tensor) -> float:
        result = reference.attention(*tensors, causal=True)
        return ((dout.double() * result.out).sum() + (dlse.double() * result.lse).sum()).item()

    true = reference.gradients(dout, q, k, v, causal=True, dlse=dlse)
    ours = leaves(*given)
    out, lse = hopwell.attention(*ours, causal=True, return_lse=True)
    torch.autograd.backward((out, lse), (dout, dlse))
    step = 1e-5
    for index, exact in enumerate((true.dq, true.dk, true.dv)):
        for _ in range(3):
            direction = torch.randn(exact.shape, dtype=torch.float64)
            ahead, behind = [q, k, v], [q, k, v]
            ahead[index] = ahead[index] + step * direction
            behind[index] = behind[index] - step * direction
            difference = (loss(*ahead) - loss(*behind)) / (2 * step)
            # A random direction changes the loss by about the gradient's norm.
            size = exact.norm()
            assert abs(difference - (exact * direction).sum()) <= 1e-8 * size
            gradient = ours[index].grad
            assert gradient is not None
            assert abs(difference - (gradient.double() * direction).sum()) <= 2e-3 * size


def test_finite_differences_of_our_own_forward(emulation: Emulation) -> None:
    """Where 16 bits allow it: of the log-sum-exp, in float32, by q and k, and of out by v.

    Inputs are multiples of 1/8 and move by such, so that fp16 holds them all. The log-sum-exp
    bends: central differences of two steps, combined so that the terms in step^2 cancel, leave
    those in step^4. By v out is linear, and a step may be large; what is off is its rounding to
    2^-11. Either way some 4e-4 of a gradient is left, fp16's share in the gradient included.
    """
    torch.manual_seed(1)
    given = [normal(1, n, h, 64).mul(8).round().div(8) for n, h in ((5, 2), (7, 1), (7, 1))]
    weights = normal(1, 5, 2, 64), torch.randn(1, 2, 5)

    for index in range(3):
        which = int(index != 2)  # out or the log-sum-exp

        def loss(moved: Tensor, index: int = index, which: int = which) -> float:
            tensors = [*given[:index], moved, *given[index + 1 :]]
            found = hopwell.forward(*tensors, causal=True)[which].double()
            return (weights[which].double() * found).sum().item()

        ours = leaves(*given)
        result = hopwell.attention(*ours, causal=True, return_lse=True)
        (gradient,) = torch.autograd.grad(result[which], ours[index], weights[which])
        for _ in range(3):
            direction = torch.randint(0, 2, gradient.shape).mul(2).sub(1).half()
            near, far = (
                (loss(given[index] + step * direction) - loss(given[index] - step * direction))
                / (2 * step)
                for step in ((1, 2) if index == 2 else (1 / 8, 1 / 4))
            )
            # A direction of signs changes the loss by about the gradient's norm.
            error = (4 * near - far) / 3 - (gradient.double() * direction).sum()
            assert abs(error) <= 1e-3 * gradient.double().norm()
