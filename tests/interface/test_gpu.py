"""The same interface on a GPU; skipped, with the reason, where there is none that has kernels."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import hopwell
from hopwell.interface import checks, demo, functions
from hopwell.interface import compile as compiling
from hopwell.interface.demo import CASES, Case, measure
from hopwell.interface.link import LINKER

DEVICE = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or checks.arch_of(DEVICE) not in checks.arches(),
    reason="needs a GPU that there are kernels for",
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case) -> None:
    inputs = case.inputs("cuda")
    out, lse = hopwell.forward(*inputs, causal=case.causal)
    assert measure(case, inputs, out, lse).fine


def test_strided_and_transposed_views() -> None:
    case = CASES[2]
    q, k, v = case.inputs("cuda")
    out, lse = hopwell.forward(q, k, v, causal=case.causal)
    kv = torch.stack([k, v], dim=3)
    packed = hopwell.forward(q, kv[:, :, :, 0], kv[:, :, :, 1], causal=case.causal)
    heads_first = hopwell.forward(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=case.causal, layout="bhsd"
    )
    assert torch.equal(packed[0], out) and torch.equal(packed[1], lse)
    assert torch.equal(heads_first[0].transpose(1, 2), out) and torch.equal(heads_first[1], lse)


def test_the_current_stream_is_used() -> None:
    case = CASES[0]
    q, k, v = case.inputs("cuda")
    expected, _ = hopwell.forward(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = q * 1.0  # complete only after the sleep, on this stream
        out, _ = hopwell.forward(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_launches_go_to_the_tensors_device() -> None:
    """Whatever the current device is; and it stays that."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if checks.arch_of(torch.device("cuda", 1)) not in checks.arches():
        pytest.skip("needs a second GPU that there are kernels for")
    case = CASES[0]
    inputs = case.inputs("cuda:0")
    expected, expected_lse = hopwell.forward(*inputs)
    there = tuple(tensor.to("cuda:1") for tensor in inputs)
    stream = torch.cuda.Stream(1)
    stream.wait_stream(torch.cuda.current_stream(1))
    for current in (0, 1):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            late = there[0] * 1.0  # complete only after the sleep, on the second GPU's stream
            with torch.cuda.device(current):
                out, lse = hopwell.forward(late, *there[1:])
                assert torch.cuda.current_device() == current
        stream.synchronize()
        assert out.device == lse.device == there[0].device
        assert torch.equal(out.cpu(), expected.cpu()) and torch.equal(lse.cpu(), expected_lse.cpu())


@pytest.mark.parametrize("causal", [False, True])
def test_a_warmed_call_is_captured_and_replayed(causal: bool) -> None:
    """Also in a shape and a layout that come first in the capture; 100 replays agree bitwise."""
    q, k, v = (torch.randn(2, 333, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    expected, expected_lse = hopwell.forward(q, k, v, causal=causal)
    short = hopwell.forward(q[:, :100], k, v, causal=causal)[0]
    functions._plans.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = hopwell.forward(q, k, v, causal=causal)
        heads_first = (t.transpose(1, 2) for t in (q[:, :100], k, v))
        short_out = hopwell.attention(*heads_first, causal=causal, layout="bhsd")
    for _ in range(100):
        for tensor in (out, lse, short_out):
            tensor.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert torch.equal(short_out.transpose(1, 2), short)
    q.copy_(q.flip(1))  # a replay reads what the inputs hold then
    graph.replay()
    assert torch.equal(out, hopwell.forward(q, k, v, causal=causal)[0])


def many_tiles() -> tuple[torch.Tensor, ...]:
    """More tiles of Q than a GPU has SMs: those beyond are drawn from the queue."""
    heads = (24, 4, 4)
    q, k, v = (torch.randn(2, 900, n, 64, dtype=torch.bfloat16, device="cuda") for n in heads)
    return q, k, v


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def differing(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> Any:
    """How many elements differ in a bit: a tensor, so that the host waits for nothing."""
    return sum((bits(a) != bits(b)).sum() for a, b in zip(results, expected, strict=True))


def check_counters() -> None:
    """Between launches every counter is 0."""
    torch.cuda.synchronize()
    assert functions._counters
    assert all(counter.item() == 0 for counter in functions._counters.values())


@pytest.mark.parametrize("causal", [False, True])
def test_10_000_replays_of_a_graph_give_the_same_bits(causal: bool) -> None:
    """Whichever SM takes which tile: no result depends on it."""
    q, k, v = many_tiles()
    expected = hopwell.forward(q, k, v, causal=causal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = hopwell.forward(q, k, v, causal=causal)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        wrong += differing((out, lse), expected)
    assert wrong.item() == 0
    check_counters()


@pytest.mark.parametrize("causal", [False, True])
def test_two_streams_and_a_graph_at_once_give_the_same_bits(causal: bool) -> None:
    """Each has a counter of its own. Lengths change from launch to launch, and tile counts too."""
    q, k, v = many_tiles()
    lengths = [900, 192, 1, 555]
    expected = [hopwell.forward(q[:, :n], k, v, causal=causal) for n in lengths]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [hopwell.forward(q[:, :n], k, v, causal=causal) for n in lengths]
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for _ in range(200):
        for i, stream in enumerate(streams[:2]):
            with torch.cuda.stream(stream):
                for n, right in zip(lengths, expected, strict=True):
                    wrong[i] += differing(hopwell.forward(q[:, :n], k, v, causal=causal), right)
        with torch.cuda.stream(streams[2]):
            graph.replay()
            for result, right in zip(captured, expected, strict=True):
                wrong[2] += differing(result, right)
    torch.cuda.synchronize()
    assert [count.item() for count in wrong] == [0, 0, 0]
    counters = [functions._counters[0, stream.cuda_stream] for stream in streams[:2]]
    assert counters[0].data_ptr() != counters[1].data_ptr()
    check_counters()


@pytest.mark.parametrize("causal", [False, True])
def test_infinite_scores_stay_in_their_rows(causal: bool) -> None:
    """And the kernel ends: the factors that they make NaN release nothing."""
    q, k, v = many_tiles()
    k[..., 0].abs_()
    right, _ = hopwell.forward(q, k, v, causal=causal)
    q[:, ::5, :, 0] = torch.inf
    out, _ = hopwell.forward(q, k, v, causal=causal)
    clean = torch.arange(q.shape[1], device="cuda") % 5 != 0
    assert out[:, ~clean].isnan().all()
    assert torch.equal(out[:, clean], right[:, clean])
    check_counters()


def test_warmup_is_enough_for_a_capture() -> None:
    compiling.forget()
    functions._plans.clear()
    hopwell.warmup(dtypes=[torch.float16], head_dims=[64], causal=[True])
    q, k, v = (torch.randn(1, 200, 2, 64, dtype=torch.float16, device="cuda") for _ in "qkv")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hopwell.attention(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, hopwell.attention(q, k, v, causal=True))


def test_an_unwarmed_call_leaves_the_capture_whole() -> None:
    q, k, v = (torch.randn(1, 200, 2, 64, dtype=torch.float16, device="cuda") for _ in "qkv")
    compiling.forget()
    functions._plans.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = q * 2
        with pytest.raises(RuntimeError, match="captures a CUDA graph"):
            hopwell.attention(q, k, v)
    graph.replay()
    assert torch.equal(doubled, q * 2)


def test_cpu_tensors_still_run_on_the_emulator() -> None:
    case = CASES[3]
    q, k, v = case.inputs("cpu")
    with hopwell.emulate("sm_90a"):
        emulated, _ = hopwell.forward(q, k, v, causal=case.causal)
    out, _ = hopwell.forward(*(t.cuda() for t in (q, k, v)), causal=case.causal)
    assert (emulated == out.cpu()).float().mean() >= 0.995
    with pytest.raises(ValueError, match=r"inside hopwell\.emulate"), hopwell.emulate("sm_90a"):
        hopwell.forward(q.cuda(), k.cuda(), v.cuda())


@pytest.mark.skipif(shutil.which(LINKER) is None, reason="kernels are linked where there is ld")
def test_an_exported_kernel_runs_without_the_compiler(tmp_path: Path) -> None:
    hopwell.compile("sm_90a", out=tmp_path, dtypes=[torch.bfloat16], head_dims=[128])
    code = f"""
        import sys, time

        sys.modules |= dict.fromkeys(("cutlass", "nvidia_cutlass_dsl"))  # no import finds them
        import torch, hopwell

        q, k, v = (torch.randn(1, 200, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
        for causal in (False, True):
            right = torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal
            ).transpose(1, 2)
            torch.cuda.synchronize()
            hopwell.load({str(tmp_path)!r})
            start = time.perf_counter()
            out = hopwell.attention(q, k, v, causal=causal)
            torch.cuda.synchronize()
            ms = 1e3 * (time.perf_counter() - start)
            print(f"first call of causal={{causal}}: {{ms:.1f}} ms")
            assert ms < 50
            assert (out - right).abs().max() < 0.02
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    print(run.stdout)


def test_demo() -> None:
    assert demo.run()
