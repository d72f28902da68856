"""`attention` and `forward` as a user calls them, on the emulator."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hopwell
from hopwell.interface import compile as compiling
from hopwell.interface import functions, plans
from hopwell.interface.demo import Case, Errors, exact, measure
from hopwell.interface.emulate import Emulation, active

from .models import Array


@pytest.fixture
def emulation() -> Iterator[Emulation]:
    with hopwell.emulate("sm_90a", counters=True) as emulation:
        yield emulation


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.inputs("cpu")


SMALL = Case(1, 100, 150, 2, 1, 64, torch.float16, causal=True)


def errors(case: Case, out: torch.Tensor, lse: torch.Tensor) -> Errors:
    return measure(case, inputs(case), out, lse)


def test_a_new_length_batch_head_count_or_stride_never_compiles(emulation: Emulation) -> None:
    hopwell.forward(*inputs(SMALL), causal=True)
    before = compiling.counts.compiled
    for case in (
        Case(1, 1, 1, 1, 1, 64, torch.float16, causal=True),
        Case(2, 129, 64, 4, 4, 64, torch.float16, causal=True),
        Case(1, 64, 257, 6, 2, 64, torch.float16, causal=True),
    ):
        q, k, v = inputs(case)
        assert errors(case, *hopwell.forward(q, k, v, causal=True)).fine
        kv = torch.stack([k, v], dim=3)  # strides of a packed projection
        out, lse = hopwell.forward(q, kv[:, :, :, 0], kv[:, :, :, 1], causal=True)
        assert errors(case, out, lse).fine
    assert compiling.counts.compiled == before
    assert len(emulation.report.launches) == 7


def test_a_warm_call_makes_no_plan(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(SMALL)
    first = hopwell.forward(q, k, v, causal=True)
    monkeypatch.setattr(functions, "_make_plan", None)
    again = hopwell.forward(q.clone(), k.clone(), v.clone(), causal=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_v_with_another_head_dim_is_another_signature(emulation: Emulation) -> None:
    for head_dim_v in (64, 8):
        case = replace(SMALL, head_dim_v=head_dim_v)
        q, k, v = inputs(case)
        out, lse = hopwell.forward(q, k, v, causal=True)
        assert out.shape == (1, 100, 2, head_dim_v) and out.is_contiguous()
        assert errors(case, out, lse).fine


def test_common_head_dims_are_compiled_unless_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[compiling.Spec] = []
    monkeypatch.setattr(compiling, "save", lambda spec, store: compiled.append(spec))

    def dims() -> set[tuple[Any, Any]]:
        facts = [dict(spec.facts) for spec in compiled]
        compiled.clear()
        return {(fact["head_dim"], fact["head_dim_v"]) for fact in facts}

    hopwell.compile("sm_90a", out=tmp_path)
    assert dims() == {(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)}
    hopwell.export(tmp_path, "sm_90a", head_dims=[80, (8, 256)])
    assert dims() == {(80, 80), (8, 256)}
    hopwell.export(tmp_path, "sm_90a", head_dims=[80, (8, 256)], backward=True)
    made = [(spec.kernel, dict(spec.facts)) for spec in compiled]
    assert dims() == {(80, 80), (8, 256)}
    gradients = [facts for kernel, facts in made if kernel == "backward"]
    assert len(gradients) == 2 * 2 * 2  # dtypes, head dims, masks
    assert not any(facts["deterministic"] or facts["dlse"] for facts in gradients)
    with pytest.raises(ValueError, match=r"^head_dims has \(8, 12\); needs a multiple of 8"):
        hopwell.warmup("sm_90a", head_dims=[(8, 12)])


def test_plans_are_forgotten_when_there_are_many(
    emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "KEPT", 3)
    plans.forget()
    for length in range(5):
        hopwell.forward(*(torch.zeros(1, 1 + length, 1, 64, dtype=torch.float16) for _ in "qkv"))
    assert len(functions._plans) == 3


def test_attention_returns_what_forward_does(emulation: Emulation) -> None:
    q, k, v = inputs(SMALL)
    out, lse = hopwell.forward(q, k, v, causal=True)
    alone = hopwell.attention(q, k, v, causal=True)
    both = hopwell.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(alone, out) and torch.equal(both[0], out) and torch.equal(both[1], lse)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (1, 2, 100) and lse.dtype == torch.float32


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (40, 72), (192, 128), (256, 256)])
def test_layout_bhsd(dims: tuple[int, int], emulation: Emulation) -> None:
    case = replace(SMALL, head_dim=dims[0], head_dim_v=dims[1])
    q, k, v = inputs(case)
    out, lse = hopwell.forward(q, k, v, causal=True)
    assert errors(case, out, lse).fine
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    for seen in (heads_first, [tensor.contiguous() for tensor in heads_first]):
        seen_out, seen_lse = hopwell.forward(*seen, causal=True, layout="bhsd")
        assert seen_out.shape == (1, 2, 100, dims[1]) and seen_out.is_contiguous()
        assert torch.equal(seen_out.transpose(1, 2), out) and torch.equal(seen_lse, lse)


def test_given_buffers_are_used(emulation: Emulation) -> None:
    q, k, v = inputs(SMALL)
    expected, expected_lse = hopwell.forward(q, k, v, causal=True)
    whole = torch.full((1, 100, 2, 3, 64), 7.0, dtype=torch.float16)
    out, lse = whole[:, :, :, 1], torch.empty(1, 2, 100)
    results = hopwell.forward(q, k, v, causal=True, out=out, lse=lse)
    assert results[0] is out and results[1] is lse
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert (whole[:, :, :, [0, 2]] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_arrays_of_other_libraries(dtype: torch.dtype, emulation: Emulation) -> None:
    """Beside tensors, where they lie, and with buffers."""
    q, k, v = inputs(replace(SMALL, dtype=dtype))
    out, lse = hopwell.forward(q, k, v, causal=True)
    kv = torch.stack([k, v], dim=3)
    views = [Array(kv[:, :, :, 0]), Array(kv[:, :, :, 1])]
    buffers = torch.empty_like(out), torch.empty_like(lse)
    anything: Any = hopwell.forward  # its types name tensors
    found = anything(q, *views, causal=True, out=buffers[0], lse=buffers[1])
    assert found[0] is buffers[0] and found[1] is buffers[1]
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    anything = hopwell.attention
    assert torch.equal(anything(*map(Array, (q, k, v)), causal=True), out)


def test_numpy_arrays(emulation: Emulation) -> None:
    tensors = inputs(SMALL)
    arrays: list[Any] = [tensor.numpy() for tensor in tensors]
    expected = hopwell.forward(*tensors)
    assert all(map(torch.equal, hopwell.forward(*arrays), expected))
    assert hopwell.supported(*arrays) == hopwell.supported(*tensors)


def test_a_tensor_beside_arrays_gets_its_gradient(emulation: Emulation) -> None:
    q, k, v = inputs(SMALL)
    gradients = []
    arrays: Any = (k.numpy(), v.numpy())
    for others in ((k, v), arrays):
        leaf = q.clone().requires_grad_()
        hopwell.attention(leaf, *others, deterministic=True).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    with pytest.raises(NotImplementedError, match=r"^q require\(s\) grad, which this function"):
        hopwell.forward(q.requires_grad_(), *arrays)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (
            np.array(["a"]),
            "DLPack only supports signed/unsigned integers, float and complex dtypes.",
        ),
        (np.ones((1, 150, 1, 64), np.float16)[:, ::-1], "it has a negative stride"),
    ],
)
def test_arrays_that_torch_cannot_take(array: Any, reason: str, emulation: Emulation) -> None:
    q, _, v = inputs(SMALL)
    with pytest.raises(TypeError) as raised:
        hopwell.forward(q, array, v)
    assert str(raised.value) == (
        f"k is a ndarray that torch cannot take by DLPack: {reason}; "
        "needs an array of fp16 or bf16 that it can; copy it into a torch.Tensor"
    )
    assert hopwell.supported(q, array, v).reasons == (str(raised.value),)


def test_an_expanded_batch_is_not_copied(emulation: Emulation) -> None:
    q, k, v = inputs(SMALL)
    out, lse = hopwell.forward(q, k, v, causal=True)
    wide = hopwell.forward(
        q.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), causal=True
    )
    for b in range(3):
        assert torch.equal(wide[0][b], out[0]) and torch.equal(wide[1][b], lse[0])


@pytest.mark.parametrize(
    ("q", "kv"),
    [
        ((0, 5, 2, 64), (0, 7, 1, 64)),
        ((2, 0, 2, 64), (2, 7, 1, 64)),
        ((2, 5, 0, 64), (2, 7, 1, 64)),
    ],
    ids=["batch", "len_q", "heads"],
)
def test_nothing_to_compute(q: Any, kv: Any, emulation: Emulation) -> None:
    out, lse = hopwell.forward(*(torch.zeros(shape, dtype=torch.float16) for shape in (q, kv, kv)))
    assert out.shape == q and lse.shape == (q[0], q[2], q[1])
    assert not emulation.report.launches


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_no_keys(causal: bool, layout: Any, emulation: Emulation) -> None:
    q = torch.ones(2, 5, 3, 64, dtype=torch.float16)
    k = torch.ones((2, 0, 3, 64) if layout == "bshd" else (2, 5, 0, 64), dtype=torch.float16)
    buffers = {"out": torch.ones_like(q), "lse": torch.ones(2, *(q.shape[1:3]))}
    if layout == "bshd":
        buffers["lse"] = torch.ones(2, 3, 5)
    for given in ({}, buffers):
        out, lse = hopwell.forward(q, k, k, causal=causal, layout=layout, **given)
        assert (out == 0).all() and lse.isneginf().all()


def test_rows_with_nothing_to_attend(emulation: Emulation) -> None:
    case = Case(1, 200, 70, 2, 1, 64, torch.float16, causal=True)
    out, lse = hopwell.forward(*inputs(case), causal=True)
    assert (out[:, :130] == 0).all() and lse[:, :, :130].isneginf().all()
    assert errors(case, out, lse).fine


def test_more_heads_a_key_than_an_int32_of_the_l2_cache() -> None:
    # Heads whose K and V fit the cache, counted in queries: 2**20 of one key each, times 2048.
    q, k = (torch.randn(shape).half() for shape in ((1, 129, 2048, 8), (1, 1, 1, 8)))
    with hopwell.emulate("sm_90a", check=False):
        out = hopwell.attention(q, k, k, causal=True)
    assert torch.equal(out[:, -1], k[:, 0].expand_as(out[:, -1]))
    assert not out[:, :-1].any()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2, 1e-4])
def test_scale(scale: float, emulation: Emulation) -> None:
    q, k, v = inputs(SMALL)
    out, lse = hopwell.forward(q, k, v, scale=scale, causal=False)
    scores = scale * torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double())
    exact = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), v[:, :, 0].double())
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(out.double(), exact, atol=2**-10, rtol=2**-10)


def test_tensors_that_require_grad_outside_of_grad_mode(emulation: Emulation) -> None:
    q, k, v = inputs(SMALL)
    expected = hopwell.attention(q, k, v, causal=True)
    with torch.no_grad():
        out = hopwell.attention(q.requires_grad_(), k, v.requires_grad_(), causal=True)
    assert torch.equal(out, expected) and not out.requires_grad


def test_emulate_reports_each_launch_and_ends() -> None:
    assert active() is None
    with hopwell.emulate("sm_90a", counters=True) as emulation:
        assert active() is emulation
        hopwell.attention(*inputs(SMALL))
        hopwell.attention(*inputs(SMALL))
        assert len(emulation.report.launches) == 2 and not emulation.report.findings
        q_bytes, kv_bytes = 100 * 2 * 64 * 2, 150 * 1 * 64 * 2
        read = emulation.report.launches[0].global_read_bytes
        assert read >= q_bytes + 2 * kv_bytes
        with hopwell.emulate("sm_90a") as inner:
            assert active() is inner
        assert active() is emulation
    assert active() is None
    with pytest.raises(ValueError, match="tensors are on the CPU"):
        hopwell.attention(*inputs(SMALL))


def test_emulate_takes_hopwell_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_ARCH", "sm_90a")
    with hopwell.emulate() as emulation:
        assert emulation.arch == "sm_90a"
    monkeypatch.setenv("HOPWELL_ARCH", "sm_75")
    with pytest.raises(NotImplementedError, match="SM version is 'sm_75'"):
        hopwell.emulate().__enter__()


def test_supported_says_whether_the_compiler_would_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, emulation: Emulation
) -> None:
    args = inputs(SMALL)
    hopwell.forward(*args, causal=True)
    assert hopwell.supported(*args, causal=True).compiled
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    compiling.forget()
    assert not hopwell.supported(*args, causal=True).compiled


def test_the_measure_of_the_demo_fails_what_is_wrong(emulation: Emulation) -> None:
    """One element off by two roundings, a row of LSE off, a finite LSE where there is nothing."""
    case = Case(1, 80, 70, 1, 1, 64, torch.bfloat16, causal=True)
    out, lse = hopwell.forward(*inputs(case), causal=True)
    assert errors(case, out, lse).fine
    wrong = out.clone()
    wrong[0, 79, 0, 3] += 0.05
    assert not errors(case, wrong, lse).fine
    assert not errors(case, out, lse + 1e-3).fine
    assert not errors(case, out, lse.nan_to_num(neginf=0.0)).fine
    assert not errors(case, out.masked_fill(out == 0, 0.01), lse).fine
    assert not errors(case, out, lse.masked_fill(lse.isfinite(), math.nan)).fine


@pytest.mark.parametrize(
    ("size", "right", "wrong"),
    [(1, 0.9e-4, 2e-4), (100, 0.9e-4, 2e-4), (120, 1.1e-4, 2e-4), (1000, 0.9e-3, 2e-3)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_measure_takes_errors_of_a_large_lse_relative_to_it(
    size: float, right: float, wrong: float, sign: int
) -> None:
    """float32 cannot do better; one key, so that the LSE is its score."""
    case = Case(1, 1, 1, 1, 1, 8, torch.bfloat16, causal=False, scale=1.0)
    _, score, _ = exact(case, inputs(case))
    case = replace(case, scale=sign * size / score.item())
    out, lse, _ = exact(case, inputs(case))
    assert lse.item() == pytest.approx(sign * size)
    for error in (right, -right):
        assert errors(case, out, lse + error).fine
    for error in (wrong, -wrong, math.inf, math.nan):
        assert not errors(case, out, lse + error).fine


# ---- Blackwell -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "heads_kv", "causal", "expected"),
    [
        ((1, 300, 1, 128), 1, False, "packed_heads 1, pair True"),
        ((1, 256, 1, 128), 1, False, "packed_heads 1, pair False"),
        ((1, 43, 6, 128), 1, False, "packed_heads 6, pair True"),
        ((1, 300, 8, 128), 2, True, "packed_heads 4, pair False"),
        ((1, 300, 150, 64), 1, False, "packed_heads 75, pair False"),
    ],
)
def test_what_chooses_a_kernel_on_blackwell(
    shape: tuple[int, ...], heads_kv: int, causal: bool, expected: str
) -> None:
    q = torch.zeros(shape, dtype=torch.bfloat16)
    k = q[:, :, :heads_kv]
    with hopwell.emulate("sm_100a"):
        found = hopwell.supported(q, k, k, causal=causal)
        at_the_back = hopwell.supported(*(t.transpose(1, 2) for t in (q, k, k)), layout="bhsd")
    assert found.ok and found.kernel.startswith("forward for sm_100a") and expected in found.kernel
    assert causal or at_the_back.kernel == found.kernel


def test_zero_lengths_on_blackwell() -> None:
    """No launch."""
    with hopwell.emulate("sm_100a"):
        for len_q, len_kv, batch, heads in ((3, 0, 1, 2), (0, 3, 1, 2), (3, 3, 0, 2), (3, 3, 1, 0)):
            q = torch.ones(batch, len_q, heads, 64).half()
            k = torch.ones(batch, len_kv, 2, 64).half()
            assert hopwell.supported(q, k, k) and not hopwell.supported(q.float(), k, k)
            out, lse = hopwell.forward(q, k, k)
            assert out.shape == q.shape and not out.any() and lse.shape == (batch, heads, len_q)
            assert lse.isneginf().all()


def test_variants_for_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions.compiling, "save", lambda spec, _: dict(spec.facts))
    options: Any = {"dtypes": [torch.float16], "head_dims": [128], "gqa_groups": [1, 150, 150]}
    found: Any = hopwell.compile(["sm_100a", "sm_90a"], **options)
    seen = [(f["packed_heads"], f["causal"], f["pair"]) for f in found if "pair" in f]
    assert sorted(seen) == sorted(
        2 * [(n, c, p) for n in (1, 75) for c, p in ((False, False), (False, True), (True, False))]
    )
    assert len(found) - len(seen) == 4  # on Hopper one kernel serves all groups
