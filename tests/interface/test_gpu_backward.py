"""Gradients on a GPU; skipped where `test_gpu` is. `test_backward` has more, on the emulator."""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import max_pool2d

import hopwell
from hopwell.interface import autograd
from hopwell.interface import compile as compiling
from hopwell.interface.demo import CASES, Case
from hopwell.kernels.tiles import backward_tiles

from .. import reference
from . import test_gpu
from .test_backward import alike, check_one_as_key_and_value, close, leaves, raw
from .test_gpu import differing

Tensor = torch.Tensor
pytestmark = test_gpu.pytestmark
DEVICE = test_gpu.DEVICE.type
REPEATS, REPLAYS, ROUNDS = 1000, 100, 200
WIDE = Case(1, 200, 333, 4, 2, 256, torch.bfloat16, causal=True)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def inputs(len_q: int = 333, len_kv: int = 500, batch: int = 2) -> tuple[Tensor, ...]:
    """dout, q, k, v of 4 heads, 2 of keys, and head_dim 128."""
    q, k = (batch, len_q, 4, 128), (batch, len_kv, 2, 128)
    return normal(*q), normal(*q), normal(*k), normal(*k)


def check(found: tuple[Tensor, ...], *tensors: Tensor, **options: Any) -> None:
    """Gradients against those of the float64 reference for dout, q, k, v."""
    with torch.device(DEVICE):
        exact = reference.gradients(*tensors, **options)
    for gradient, right in zip(found, (exact.dq, exact.dk, exact.dv), strict=True):
        close(gradient, right)


@pytest.mark.parametrize("case", [*CASES, WIDE], ids=str)
def test_against_float64(case: Case) -> None:
    given = case.inputs(DEVICE)
    ours = leaves(*given)
    out, lse = hopwell.attention(*ours, causal=case.causal, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), ours, (dout, dlse))
    check(found, dout, *given, causal=case.causal, dlse=dlse)


# ---- the same again ------------------------------------------------------------------------------


def many_tiles() -> tuple[Tensor, ...]:
    """dout, q, k, v with far more tiles of keys, a CTA each, than a GPU has SMs."""
    batch, len_q, len_kv, heads, heads_kv = 4, 700, 1300, 16, 8
    ctas = batch * heads_kv * -(-len_kv // backward_tiles("sm_90a", 64, 64).tile_kv)
    assert ctas >= 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    q, k = (batch, len_q, heads, 64), (batch, len_kv, heads_kv, 64)
    return normal(*q), normal(*q), normal(*k), normal(*k)


def count() -> Tensor:
    """0, to be added to on the device."""
    return torch.zeros((), dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("causal", [False, True])
def test_1_000_repeats_are_close(causal: bool) -> None:
    """No NaN, and of dq only the last bits move: its parts are added up in any order, in float32.

    A sum that moves by a few units of float32 may round to the next number of 8 bits, no further.
    dk and dv are sums of one CTA each, and have the same bits.
    """
    dout, q, k, v = many_tiles()
    out, lse = hopwell.forward(q, k, v, causal=causal)

    def gradients() -> tuple[Tensor, ...]:
        return hopwell.backward(dout, q, k, v, out, lse, causal=causal, deterministic=False)

    first = gradients()
    check(first, dout, q, k, v, causal=causal)
    right = first[0].float()
    allowed = right.abs() * 2.0**-7 + 1e-5 * right.abs().max()
    wrong = count()
    for _ in range(REPEATS):
        dq, dk, dv = gradients()
        wrong += (~((dq.float() - right).abs() <= allowed)).sum()  # NaN counts
        wrong += differing((dk, dv), first[1:])
    assert wrong.item() == 0


@pytest.mark.parametrize("causal", [False, True])
def test_1_000_deterministic_repeats_have_the_same_bits(causal: bool) -> None:
    dout, q, k, v = many_tiles()
    first = raw(dout, q, k, v, causal=causal)
    check(first, dout, q, k, v, causal=causal)
    out, lse = hopwell.forward(q, k, v, causal=causal)
    wrong = count()
    for _ in range(REPEATS):
        again = hopwell.backward(dout, q, k, v, out, lse, causal=causal, deterministic=True)
        wrong += differing(again, first)
    assert wrong.item() == 0


@pytest.mark.parametrize("causal", [False, True])
def test_two_streams_at_once_give_the_same_bits(causal: bool) -> None:
    """Each launch has a workspace of its own; lengths, and with them the tiles, change."""
    dout, q, k, v = many_tiles()
    lengths = [700, 96, 1, 333]
    problems = [(dout[:, :n].contiguous(), q[:, :n].contiguous(), k, v) for n in lengths]
    expected = [raw(*problem, causal=causal) for problem in problems]
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = [count() for _ in streams]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for problem, right in zip(problems, expected, strict=True):
                    wrong[i] += differing(raw(*problem, causal=causal), right)
    torch.cuda.synchronize()
    assert [number.item() for number in wrong] == [0, 0]


# ---- in a graph ----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_warmed_backward_is_captured_and_replayed(causal: bool) -> None:
    """Raw, and by autograd. A replay reads what the inputs hold then."""
    dout, *given = inputs()
    expected = raw(dout, *given, causal=causal)
    autograd._plans.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = raw(dout, *given, causal=causal)
        ours = [tensor.detach().requires_grad_() for tensor in given]
        out = hopwell.attention(*ours, causal=causal, deterministic=True)
        recorded = torch.autograd.grad(out, ours, dout)
    for _ in range(REPLAYS):
        for tensor in (*found, *recorded):
            tensor.fill_(math.nan)
        graph.replay()
        assert alike(found, expected) and alike(recorded, expected)
    dout.copy_(dout.flip(1))
    graph.replay()
    assert alike(found, raw(dout, *given, causal=causal)) and not alike(found, expected)


def test_an_unwarmed_backward_leaves_the_capture_whole() -> None:
    dout, q, k, v = inputs()
    compiling.forget()
    autograd._plans.clear()
    out, lse = hopwell.forward(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = q * 2
        with pytest.raises(RuntimeError, match="captures a CUDA graph"):
            hopwell.backward(dout, q, k, v, out, lse)
    graph.replay()
    assert torch.equal(doubled, q * 2)


# ---- what is special about the inputs ------------------------------------------------------------


def test_one_tensor_as_key_and_value() -> None:
    dout, q, k, _ = inputs()
    check_one_as_key_and_value(dout, q, k)


def into_nan(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Gradients, of LSE too, written to buffers full of NaN; by `attention` they are the same."""
    ours = leaves(q, k, v)
    out, lse = hopwell.attention(*ours, return_lse=True, deterministic=True, **options)
    dlse = torch.randn_like(lse)
    recorded = torch.autograd.grad((out, lse), ours, (dout, dlse))
    buffers = {
        name: torch.full_like(t, math.nan) for name, t in {"dq": q, "dk": k, "dv": v}.items()
    }
    out, lse = out.detach(), lse.detach()
    options = {"dlse": dlse, "deterministic": True, **options}
    found = hopwell.backward(dout, q, k, v, out, lse, **buffers, **options)
    assert alike(found, recorded)  # also says that the launches went well
    return found


@pytest.mark.parametrize(("batch", "len_q", "len_kv"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
def test_gradients_of_nothing_are_0(batch: int, len_q: int, len_kv: int) -> None:
    found = into_nan(*inputs(len_q, len_kv, batch))
    assert all((gradient == 0).all() for gradient in found)


@pytest.mark.parametrize(("len_q", "len_kv"), [(300, 100), (129, 1), (65, 64)])
def test_rows_with_nothing_to_attend_get_no_gradient(len_q: int, len_kv: int) -> None:
    dq, dk, dv = into_nan(*inputs(len_q, len_kv), causal=True)
    assert (dq[:, : len_q - len_kv] == 0).all()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in (dq, dk, dv))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spoiled", ["q", "k", "v", "dout"])
def test_nan_stays_with_those_who_see_it(spoiled: str, causal: bool) -> None:
    """In its head of its batch, and there in the tiles that are visited for it.

    Nothing times NaN is NaN: where a tile of 128 queries or keys has one that sees it, the others
    of the tile may get it too. All else has the bits that it had.
    """
    len_q, len_kv, tile = 400, 500, 128
    tensors = dict(zip(("dout", "q", "k", "v"), inputs(len_q, len_kv), strict=True))
    before = raw(*tensors.values(), causal=causal)
    of_query = spoiled in ("q", "dout")
    head, place = (3, 70) if of_query else (1, 450)
    tensors[spoiled][1, place, head, 5] = math.nan
    found = raw(*tensors.values(), causal=causal)

    seen = reference.visible(len_q, len_kv, causal)
    tiles = max_pool2d(seen[None].float(), tile, ceil_mode=True)[0] > 0
    visited = tiles.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[:len_q, :len_kv]
    own = torch.arange(len_q) == place
    see, rows = (own, own) if of_query else (seen[:, place], visited[:, place])
    see_it, may_dq = torch.zeros(2, 2, len_q, 4, dtype=torch.bool)
    heads = slice(head, head + 1) if of_query else slice(2, 4)
    see_it[1, see, heads], may_dq[1, rows, heads] = True, True
    may_dkv = torch.zeros(2, len_kv, 2, dtype=torch.bool)
    may_dkv[1, visited[rows].any(0), 1] = True
    for gradient, was, may in zip(found, before, (may_dq, may_dkv, may_dkv), strict=True):
        clean = ~may.to(gradient.device)
        assert clean[1].any(0).any() and torch.equal(gradient[clean], was[clean])
    assert found[0].isnan().any(-1).cpu()[see_it].all()


# ---- memory --------------------------------------------------------------------------------------


def taken(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Bytes that a call asks of torch's allocator: at most at once, and at the end, while its
    result lives; and at most at once as `max_memory_allocated` counts them, in blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    asked = torch.cuda.memory_stats()["requested_bytes.all.current"]
    blocks = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    del result
    return (
        after["requested_bytes.all.peak"] - asked,
        after["requested_bytes.all.current"] - asked,
        torch.cuda.max_memory_allocated() - blocks,
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (80, 80), (128, 128), (192, 128)])
def test_memory(head_dim: int, head_dim_v: int, deterministic: bool) -> None:
    """What docs/memory.md says, to the byte."""
    batch, len_q, len_kv, heads, heads_kv = 2, 4000, 3000, 16, 4
    q, k = normal(batch, len_q, heads, head_dim), normal(batch, len_kv, heads_kv, head_dim)
    v, dout = normal(batch, len_kv, heads_kv, head_dim_v), normal(batch, len_q, heads, head_dim_v)

    of_out = 2 * batch * heads * len_q * head_dim_v + 4 * batch * heads * len_q
    of_gradients = 2 * (q.numel() + k.numel() + v.numel())
    tile = {64: 96, 80: 80}.get(head_dim, 64)
    q_tiles = batch * heads * -(-len_q // tile)
    of_workspace = 4 * q_tiles * (tile * (-(-head_dim // 64) * 64 + 2) + deterministic)

    out, lse = hopwell.forward(q, k, v)  # makes the counter of this stream

    def backward() -> Any:
        return hopwell.backward(dout, q, k, v, out, lse, deterministic=deterministic)

    backward()
    slack = 4 * 2**20  # a block may be up to 1 MiB larger than what was asked for
    at_most, kept, in_blocks = taken(lambda: hopwell.forward(q, k, v))
    assert (at_most, kept) == (of_out, of_out) and in_blocks <= of_out + slack
    ours = leaves(q, k, v)
    assert taken(lambda: hopwell.attention(*ours))[:2] == (of_out, of_out)  # lse for backward
    at_most, kept, in_blocks = taken(backward)
    assert (at_most, kept) == (of_gradients + of_workspace, of_gradients)
    assert in_blocks <= at_most + slack
