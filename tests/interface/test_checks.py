"""Every error a user can cause, by its whole text: what was got, what is needed, what to do."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hopwell
from hopwell.interface import checks, functions, plans
from hopwell.interface import compile as compiling
from hopwell.kernels.tiles import SHORT_LEN_Q


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.fixture
def emulated() -> Iterator[None]:
    with hopwell.emulate("sm_90a"):
        yield


Q, K = (2, 8, 4, 64), (2, 16, 2, 64)  # (batch, len, heads, head_dim)
q, k, v = make(*Q), make(*K), make(*K)

INSIDE_EMULATE: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "not a tensor": (
        ([[1.0]], k, v),
        {},
        TypeError,
        "q is a list; needs a torch.Tensor; make one with torch.as_tensor or torch.from_dlpack",
    ),
    "sparse": (
        (q.to_sparse(), k, v),
        {},
        TypeError,
        "q has layout torch.sparse_coo; needs torch.strided; call q.to_dense()",
    ),
    "dtype mix": (
        (q, k.half(), v),
        {},
        TypeError,
        "q, k and v differ in dtype: q torch.bfloat16, k torch.float16, v torch.bfloat16; "
        "needs one dtype; cast with .to(q.dtype)",
    ),
    "dtype": (
        (q.float(), k.float(), v.float()),
        {},
        TypeError,
        "q has dtype torch.float32; needs torch.float16 or torch.bfloat16; "
        "cast with .to(torch.bfloat16)",
    ),
    "rank": (
        (q, k[0], v),
        {},
        ValueError,
        "k has 3 dimensions, shape (16, 2, 64); needs 4: batch, len, heads, head_dim; "
        "add the missing ones with unsqueeze",
    ),
    "batch": (
        (q, k[:1], v[:1]),
        {},
        ValueError,
        "q has batch 2 and k has batch 1; needs the same batch; "
        "expand the smaller one with .expand, which copies nothing",
    ),
    "k and v": (
        (q, k, v[:, :15]),
        {},
        ValueError,
        "k and v differ in batch, len or heads: (2, 16, 2, 64) and (2, 15, 2, 64); "
        "needs one value for each key; check where they were split",
    ),
    "k and v, bhsd": (
        (q, k, v[:, :, :1]),
        {"layout": "bhsd"},
        ValueError,
        "k and v differ in batch, len or heads: (2, 16, 2, 64) and (2, 16, 1, 64); "
        "needs one value for each key; check where they were split",
    ),
    "heads": (
        (q, make(2, 16, 3, 64), make(2, 16, 3, 64)),
        {},
        ValueError,
        "q has 4 heads and k has 3; needs q's heads to be a multiple of k's; "
        "check that the layout is 'bshd', (batch, len, heads, head_dim)",
    ),
    "no key heads": (
        (q, k[:, :, :0], v[:, :, :0]),
        {},
        ValueError,
        "q has 4 heads and k has 0; needs q's heads to be a multiple of k's; "
        "check that the layout is 'bshd', (batch, len, heads, head_dim)",
    ),
    "head_dim of q and k": (
        (q, make(2, 16, 2, 128), v),
        {},
        ValueError,
        "q has head_dim 64 and k has head_dim 128; needs the same; "
        "check that the layout is 'bshd', (batch, len, heads, head_dim)",
    ),
    "head_dim of v": (
        (q, k, make(2, 16, 2, 84)),
        {},
        NotImplementedError,
        "v has head_dim 84; needs a multiple of 8 from 8 to 256; pad v with zeros up to 88, and "
        "cut the output to its first 84 columns",
    ),
    "head_dim": (
        (make(2, 8, 4, 4), make(2, 16, 2, 4), v),
        {},
        NotImplementedError,
        "q and k have head_dim 4; needs a multiple of 8 from 8 to 256; pad q and k with zeros "
        "up to 8, and pass scale=1/sqrt(4)",
    ),
    "head_dim too large": (
        (make(2, 8, 4, 264), make(2, 16, 2, 264), v),
        {},
        NotImplementedError,
        "q and k have head_dim 264; needs a multiple of 8 from 8 to 256; "
        "use torch.nn.functional.scaled_dot_product_attention for it",
    ),
    "head_dim 0": (
        (q, k, make(2, 16, 2, 0)),
        {},
        NotImplementedError,
        "v has head_dim 0; needs a multiple of 8 from 8 to 256; "
        "use torch.nn.functional.scaled_dot_product_attention for it",
    ),
    "last stride": (
        (q, make(2, 16, 64, 2).transpose(2, 3), v),
        {},
        ValueError,
        "k has stride 2 in head_dim; needs 1; call k.contiguous(), which copies",
    ),
    "other strides": (
        (make(2, 8, 4, 65)[..., :64], k, v),
        {},
        ValueError,
        "q has a stride of 520 bytes in len; needs a multiple of 16; call q.contiguous(), which "
        "copies",
    ),
    "base": (
        (q, k, make(2 * 16 * 2 * 64 + 8)[1:-7].view(K)),
        {},
        ValueError,
        "v starts at an address that is 2 bytes past a multiple of 16; needs an aligned start; "
        "call v.clone(), which copies",
    ),
    "layout": (
        (q, k, v),
        {"layout": "sbhd"},
        ValueError,
        "layout is 'sbhd'; needs 'bshd' (batch, len, heads, head_dim) or "
        "'bhsd' (batch, heads, len, head_dim); pass the one your tensors have",
    ),
    "layout, a list": (
        (q, k, v),
        {"layout": ["bshd"]},
        ValueError,
        "layout is ['bshd']; needs 'bshd' (batch, len, heads, head_dim) or "
        "'bhsd' (batch, heads, len, head_dim); pass the one your tensors have",
    ),
    "scale": (
        (q, k, v),
        {"scale": torch.tensor(1.0)},
        TypeError,
        "scale is a Tensor; needs a float or None; pass float(scale)",
    ),
    "scale, not finite": (
        (q, k, v),
        {"scale": math.nan},
        ValueError,
        "scale is nan; needs a finite number that float32 holds; None means 1/sqrt(head_dim)",
    ),
    "scale, beyond float32": (
        (q, k, v),
        {"scale": -1e39},
        ValueError,
        "scale is -1e+39; needs a finite number that float32 holds; None means 1/sqrt(head_dim)",
    ),
    "scale, beyond any float": (
        (q, k, v),
        {"scale": 10**400},
        ValueError,
        f"scale is {10**400}; needs a finite number that float32 holds; "
        "None means 1/sqrt(head_dim)",
    ),
    "causal": (
        (q, k, v),
        {"causal": torch.ones(8, 16)},
        TypeError,
        "causal is a Tensor; needs True or False; arbitrary masks are not supported: "
        "use torch.nn.functional.scaled_dot_product_attention for those",
    ),
    "devices": (
        (q, make(*K, device="meta"), v),
        {},
        ValueError,
        "tensors are on different devices: q on cpu, k on meta, v on cpu; needs one device; "
        "move them to it",
    ),
    "another device": (
        tuple(make(*shape, device="meta") for shape in (Q, K, K)),
        {},
        ValueError,
        "tensors are on meta inside hopwell.emulate; the emulator needs CPU tensors; "
        "move them with .cpu(), or call outside of emulate",
    ),
    "gradients": (
        (q.clone().requires_grad_(), k, v),
        {},
        NotImplementedError,
        "q require(s) grad, which this function does not record; call hopwell.attention, which is "
        "differentiable, or this one under torch.no_grad()",
    ),
    "out, shape": (
        (q, k, v),
        {"out": make(2, 8, 4, 128)},
        ValueError,
        "out has shape (2, 8, 4, 128); needs (2, 8, 4, 64); make it with torch.empty, or leave "
        "out out",
    ),
    "out, dtype": (
        (q, k, v),
        {"out": make(*Q, dtype=torch.float32)},
        TypeError,
        "out has dtype torch.float32; needs torch.bfloat16; make it with "
        "torch.empty(..., dtype=torch.bfloat16), or leave out out",
    ),
    "out, expanded": (
        (q, k, v),
        {"out": make(1, 8, 4, 64).expand(Q)},
        ValueError,
        "out is an expanded view, with several elements at one address; needs memory for each; "
        "make it with torch.empty, or leave out out",
    ),
    "out, base": (
        (q, k, v),
        {"out": make(math.prod(Q) + 8)[4:-4].view(Q)},
        ValueError,
        "out starts at an address that is 8 bytes past a multiple of 16; needs an aligned start; "
        "call out.clone(), which copies",
    ),
    "lse, shape": (
        (q, k, v),
        {"lse": make(2, 8, 4, dtype=torch.float32)},
        ValueError,
        "lse has shape (2, 8, 4); needs (2, 4, 8); make it with torch.empty, or leave lse out",
    ),
    "lse, strides": (
        (q, k, v),
        {"lse": make(2, 8, 4, dtype=torch.float32).transpose(1, 2)},
        ValueError,
        "lse has strides (32, 1, 4); needs a contiguous buffer; "
        "make it with torch.empty, or leave lse out",
    ),
}


@pytest.mark.parametrize("case", INSIDE_EMULATE)
def test_forward(case: str, emulated: None) -> None:
    args, options, error, text = INSIDE_EMULATE[case]
    with pytest.raises(error) as raised:
        hopwell.forward(*args, **options)
    assert str(raised.value) == text


OUT, LSE = make(*Q), make(2, 4, 8, dtype=torch.float32)
ONE_PAST_16 = make(math.prod(Q) + 8)[1:-7].view(Q)

# Of backward: arguments in place of good ones, by name.
BACKWARD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not a tensor": (
        {"dout": None},
        TypeError,
        "dout is a NoneType; needs a torch.Tensor; make one with torch.as_tensor or "
        "torch.from_dlpack",
    ),
    "optional, not a tensor": (
        {"dlse": 1.0},
        TypeError,
        "dlse is a float; needs a torch.Tensor; make one with torch.as_tensor or torch.from_dlpack",
    ),
    "rank": (
        {"out": OUT[0]},
        ValueError,
        "out has 3 dimensions, shape (8, 4, 64); needs 4: batch, len, heads, head_dim; "
        "add the missing ones with unsqueeze",
    ),
    "layout": (
        {"layout": "sbhd"},
        ValueError,
        "layout is 'sbhd'; needs 'bshd' (batch, len, heads, head_dim) or "
        "'bhsd' (batch, heads, len, head_dim); pass the one your tensors have",
    ),
    "dtype mix": (
        {"dout": OUT.half()},
        TypeError,
        "q, k, v, dout and out differ in dtype: q torch.bfloat16, k torch.bfloat16, "
        "v torch.bfloat16, dout torch.float16, out torch.bfloat16; needs one dtype; "
        "cast with .to(q.dtype)",
    ),
    "devices": (
        {"lse": make(2, 4, 8, dtype=torch.float32, device="meta")},
        ValueError,
        "tensors are on different devices: q on cpu, k on cpu, v on cpu, dout on cpu, out on cpu, "
        "lse on meta; needs one device; move them to it",
    ),
    "heads": (
        {"k": make(2, 16, 3, 64), "v": make(2, 16, 3, 64)},
        ValueError,
        "q has 4 heads and k has 3; needs q's heads to be a multiple of k's; "
        "check that the layout is 'bshd', (batch, len, heads, head_dim)",
    ),
    "head_dim": (
        {"v": make(2, 16, 2, 84), "out": make(2, 8, 4, 84), "dout": make(2, 8, 4, 84)},
        NotImplementedError,
        "v has head_dim 84; needs a multiple of 8 from 8 to 256; pad v with zeros up to 88, and "
        "cut the output to its first 84 columns",
    ),
    "dout, shape": (
        {"dout": make(2, 7, 4, 64)},
        ValueError,
        "dout has shape (2, 7, 4, 64); needs (2, 8, 4, 64); pass the gradient of what forward "
        "returned for these q, k and v, in the layout 'bshd'",
    ),
    "out, shape": (
        {"out": make(2, 8, 4, 128)},
        ValueError,
        "out has shape (2, 8, 4, 128); needs (2, 8, 4, 64); pass what forward returned for these "
        "q, k and v, in the layout 'bshd'",
    ),
    "out, shape, bhsd": (
        {"q": make(2, 4, 8, 64), "k": make(2, 2, 16, 64), "v": make(2, 2, 16, 64)}
        | {"dout": make(2, 4, 8, 64), "layout": "bhsd"},
        ValueError,
        "out has shape (2, 8, 4, 64); needs (2, 4, 8, 64); pass what forward returned for these "
        "q, k and v, in the layout 'bhsd'",
    ),
    "lse, shape": (
        {"lse": make(2, 8, 4, dtype=torch.float32)},
        ValueError,
        "lse has shape (2, 8, 4); needs (2, 4, 8); pass what forward returned for these q, k and "
        "v, in the layout 'bshd'",
    ),
    "lse, dtype": (
        {"lse": make(2, 4, 8)},
        TypeError,
        "lse has dtype torch.bfloat16; needs torch.float32; pass what forward returned, or "
        ".float()",
    ),
    "lse, strides": (
        {"lse": make(2, 8, 4, dtype=torch.float32).transpose(1, 2)},
        ValueError,
        "lse has strides (32, 1, 4); needs to be contiguous, as forward returns it; "
        "call lse.contiguous(), which copies",
    ),
    "dlse, shape": (
        {"dlse": LSE[:1]},
        ValueError,
        "dlse has shape (1, 4, 8); needs (2, 4, 8); pass the gradient of what forward returned "
        "for these q, k and v, in the layout 'bshd'",
    ),
    "dlse, dtype": (
        {"dlse": LSE.double()},
        TypeError,
        "dlse has dtype torch.float64; needs torch.float32; pass the gradient of what forward "
        "returned, or .float()",
    ),
    "dout, last stride": (
        {"dout": make(2, 8, 64, 4).transpose(2, 3)},
        ValueError,
        "dout has stride 4 in head_dim; needs 1; call dout.contiguous(), which copies",
    ),
    "out, base": (
        {"out": ONE_PAST_16},
        ValueError,
        "out starts at an address that is 2 bytes past a multiple of 16; needs an aligned start; "
        "call out.clone(), which copies",
    ),
    "scale": (
        {"scale": math.inf},
        ValueError,
        "scale is inf; needs a finite number that float32 holds; None means 1/sqrt(head_dim)",
    ),
    "causal": (
        {"causal": 1},
        TypeError,
        "causal is a int; needs True or False; arbitrary masks are not supported: "
        "use torch.nn.functional.scaled_dot_product_attention for those",
    ),
    "deterministic": (
        {"deterministic": 1},
        TypeError,
        "deterministic is a int; needs True, False or None; "
        "None follows torch.use_deterministic_algorithms",
    ),
    "dq, shape": (
        {"dq": make(2, 8, 4, 128)},
        ValueError,
        "dq has shape (2, 8, 4, 128); needs (2, 8, 4, 64); make it with torch.empty, or leave dq "
        "out",
    ),
    "dk, dtype": (
        {"dk": make(*K, dtype=torch.float32)},
        TypeError,
        "dk has dtype torch.float32; needs torch.bfloat16; make it with "
        "torch.empty(..., dtype=torch.bfloat16), or leave dk out",
    ),
    "dv, expanded": (
        {"dv": make(1, 16, 2, 64).expand(K)},
        ValueError,
        "dv is an expanded view, with several elements at one address; needs memory for each; "
        "make it with torch.empty, or leave dv out",
    ),
    "dq, base": (
        {"dq": ONE_PAST_16},
        ValueError,
        "dq starts at an address that is 2 bytes past a multiple of 16; needs an aligned start; "
        "call dq.clone(), which copies",
    ),
    "gradients": (
        {"dout": OUT.clone().requires_grad_(), "lse": LSE.clone().requires_grad_()},
        NotImplementedError,
        "dout, lse require(s) grad, which this function does not record; call hopwell.attention, "
        "which is differentiable, or this one under torch.no_grad()",
    ),
}


@pytest.fixture
def no_kernel(emulated: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What passes the checks is launched into nothing."""
    launcher = compiling.Launcher(lambda *_: None, {})
    monkeypatch.setattr(compiling, "launcher", lambda *_, **__: launcher)
    plans.forget()
    yield
    plans.forget()


@pytest.mark.parametrize("case", BACKWARD)
def test_backward(case: str, no_kernel: None) -> None:
    replaced, error, text = BACKWARD[case]
    good: dict[str, Any] = {"dout": OUT, "q": q, "k": k, "v": v, "out": OUT, "lse": LSE}
    with pytest.raises(error) as raised:
        hopwell.backward(**good | replaced)
    assert str(raised.value) == text


def test_deterministic_of_attention(emulated: None) -> None:
    """Checked where it is given, whether or not something is recorded."""
    yes: Any = "yes"
    for tensor in (q, q.clone().requires_grad_()):
        with pytest.raises(TypeError) as raised:
            hopwell.attention(tensor, k, v, deterministic=yes)
        assert str(raised.value) == (
            "deterministic is a str; needs True, False or None; "
            "None follows torch.use_deterministic_algorithms"
        )


def test_cpu_tensors_without_emulate() -> None:
    with pytest.raises(ValueError) as raised:
        hopwell.attention(q, k, v)
    assert str(raised.value) == (
        "tensors are on the CPU; the kernels need a GPU, or the emulator; move them with .cuda(), "
        'or call inside `with hopwell.emulate("sm_90a"):`'
    )


def test_a_device_that_is_no_gpu() -> None:
    with pytest.raises(ValueError) as raised:
        hopwell.attention(*(make(*shape, device="meta") for shape in (Q, K, K)))
    assert str(raised.value) == (
        "tensors are on meta; the kernels need a CUDA device; move them with .cuda()"
    )


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_unsupported_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(NotImplementedError) as raised:
        checks.raise_first(checks.gpu(torch.device("cuda", 0), None))
    assert str(raised.value) == (
        "cuda:0 is an NVIDIA A100 of compute capability {}.{}; needs one that there are kernels "
        "for: sm_90a (compute capability 9.0), sm_100a (compute capability 10.0), sm_103a (compute "
        "capability 10.3); use "
        "torch.nn.functional.scaled_dot_product_attention on this GPU".format(*capability)
    )


def test_hopwell_arch_against_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    device = torch.device("cuda", 0)
    assert not [*checks.gpu(device, None)]
    assert not [*checks.gpu(device, "sm_90a")]
    with pytest.raises(ValueError) as raised:
        checks.raise_first(checks.gpu(device, "sm_100a"))
    assert str(raised.value) == (
        "HOPWELL_ARCH is sm_100a but cuda:0 is sm_90a; a GPU runs code for its own SM version "
        "alone; unset HOPWELL_ARCH"
    )


@pytest.mark.parametrize("call", [lambda arch: hopwell.emulate(arch).__enter__(), hopwell.compile])
def test_an_sm_version_without_kernels(call: Any) -> None:
    with pytest.raises(NotImplementedError) as raised:
        call("sm_80")
    assert str(raised.value) == (
        "SM version is 'sm_80'; needs one that there are kernels for: sm_90a, sm_100a, "
        "sm_103a; pass it as arch or in HOPWELL_ARCH"
    )


@pytest.mark.parametrize("groups", [[], [0], [2.0], 4, "4", [True]])
def test_gqa_groups(groups: Any) -> None:
    with pytest.raises(ValueError) as raised:
        hopwell.compile("sm_100a", gqa_groups=groups)
    assert str(raised.value) == (
        f"gqa_groups is {groups!r}; needs heads of q for each of k, whole numbers from 1 on, at "
        "least one; pass for example [1, 8]"
    )


def test_emulate_order() -> None:
    with pytest.raises(ValueError) as raised:
        hopwell.emulate("sm_90a", **{"order": "lazy"}).__enter__()
    assert str(raised.value) == (
        "order is 'lazy'; needs one of eager, deferred, random; pass one of those"
    )


@pytest.mark.parametrize("found", [None, "4.7.2", "4.9.0", "4.80.0"])
def test_dsl_version(found: str | None) -> None:
    with pytest.raises(RuntimeError) as raised:
        checks.dsl_version("nvidia-cutlass-dsl", found, (4, 8))
    assert str(raised.value) == (
        f"found nvidia-cutlass-dsl {found or 'not installed'}; needs 4.8; "
        "run `pip install 'nvidia-cutlass-dsl>=4.8,<4.9'`"
    )


# What a signature leaves to the compiled function, with the part of the error's text that matters.
WARM: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "sparse": ((q.to_sparse(), k, v), {}, "q has layout torch.sparse_coo"),
    "dtype": ((q, k, v.half()), {}, "q, k and v differ in dtype"),
    "last stride": ((q, make(2, 16, 2, 128)[..., ::2], v), {}, "k has stride 2 in head_dim"),
    "strides": ((make(2, 8, 4, 68)[..., :64], k, v), {}, "q has a stride of 136 bytes in heads"),
    "base": ((q, make(math.prod(K) + 8)[1:-7].view(K), v), {}, "k starts at an address"),
    "device": ((q, k, make(*K, device="meta")), {}, "tensors are on different devices"),
    "out": ((q, k, v), {"out": make(math.prod(Q) + 8)[4:-4].view(Q)}, "out starts at an address"),
    "gradients": ((q, k, v.clone().requires_grad_()), {}, "v require(s) grad"),
}


@pytest.fixture(params=["bshd", "bhsd"])
def warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A layout whose signatures of `WARM` are known, so that none of them makes a plan."""
    with hopwell.emulate("sm_90a") as emulation:
        hopwell.forward(*_seen((q, k, v), request.param), layout=request.param)
        out = _seen((q.clone(),), request.param)[0]
        hopwell.forward(*_seen((q, k, v), request.param), layout=request.param, out=out)
        launches = len(emulation.report.launches)
        monkeypatch.setattr(functions, "_make_plan", None)
        yield request.param
        assert len(emulation.report.launches) == launches


def _seen(tensors: tuple[Any, ...], layout: str) -> tuple[Any, ...]:
    """The same (batch, len, heads, head_dim) tensors in a layout."""
    if layout == "bshd":
        return tensors
    return tuple(t.swapaxes(-3, -2) for t in tensors)


@pytest.mark.parametrize("case", WARM)
def test_forward_in_a_signature_seen_before(case: str, warm: Any) -> None:
    args, options, text = WARM[case]
    if case == "sparse" and warm == "bhsd":
        pytest.skip("sparse tensors have no strides to transpose")
    options = {name: _seen((t,), warm)[0] for name, t in options.items()}
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        hopwell.forward(*_seen(args, warm), layout=warm, **options)
    assert str(raised.value).startswith(text)


def test_truth_is_not_enough_for_causal_in_a_signature_seen_before(emulated: None) -> None:
    hopwell.forward(q, k, v, causal=True)
    one: Any = 1
    with pytest.raises(TypeError, match=r"^causal is a int; needs True or False"):
        hopwell.forward(q, k, v, causal=one)


def test_gradients_count_only_where_they_are_recorded(emulated: None) -> None:
    hopwell.forward(q, k, v)
    with pytest.raises(NotImplementedError, match=r"^k, v require"):
        hopwell.forward(q, k.clone().requires_grad_(), v.clone().requires_grad_())
    with torch.no_grad():
        hopwell.forward(q, k.clone().requires_grad_(), v)


def test_supported_lists_every_reason(emulated: None) -> None:
    answer = hopwell.supported(q, k.half(), make(2, 16, 2, 64)[..., 1::3], scale=math.inf)
    assert not answer.ok
    assert [reason.split(";")[0] for reason in answer.reasons] == [
        "q, k and v differ in dtype: q torch.bfloat16, k torch.float16, v torch.bfloat16",
        "v has head_dim 21",
        "v has stride 3 in head_dim",
        "scale is inf",
    ]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (80, 40), (192, 128), (8, 256)])
def test_head_dims_need_not_be_alike(emulated: None, head_dim: int, head_dim_v: int) -> None:
    q, k, v = make(1, 2, 1, head_dim), make(1, 3, 1, head_dim), make(1, 3, 1, head_dim_v)
    assert hopwell.supported(q, k, v).ok


def test_supported_names_the_kernel(emulated: None) -> None:
    answer = hopwell.supported(q, k, v, causal=True)
    assert answer.ok and not answer.reasons
    assert answer.kernel == (
        "forward for sm_90a (causal True, dtype bfloat16, head_dim 64, head_dim_v 64, "
        "negative_scale False, short True)"
    )


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("len_q", "causal", "dims", "short"),
    [
        (SHORT_LEN_Q, True, (64, 64), True),
        (SHORT_LEN_Q + 1, True, (64, 64), False),
        (1, True, (8, 56), True),
        (1, True, (64, 72), False),
        (1, True, (72, 64), False),
        (1, True, (192, 192), False),
        (SHORT_LEN_Q, True, (8, 200), True),
        (SHORT_LEN_Q + 1, True, (256, 256), False),
        (SHORT_LEN_Q, False, (64, 64), False),
    ],
)
def test_short_causal_queries_have_a_kernel_of_their_own(
    emulated: None, layout: Any, len_q: int, causal: bool, dims: tuple[int, int], short: bool
) -> None:
    q, k, v = (
        make(1, length, heads, dim)
        for length, heads, dim in ((len_q, 2, dims[0]), (1100, 1, dims[0]), (1100, 1, dims[1]))
    )
    answer = hopwell.supported(*_seen((q, k, v), layout), causal=causal, layout=layout)
    assert answer.ok and answer.kernel.endswith(f", short {short})")
