"""The same interface on a GPU; skipped, with the reason, where there is none that has kernels."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import hopwell
from hopwell.interface import checks, demo
from hopwell.interface.demo import CASES, Case, measure

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


def test_cpu_tensors_still_run_on_the_emulator() -> None:
    case = CASES[3]
    q, k, v = case.inputs("cpu")
    with hopwell.emulate("sm_90a"):
        emulated, _ = hopwell.forward(q, k, v, causal=case.causal)
    out, _ = hopwell.forward(*(t.cuda() for t in (q, k, v)), causal=case.causal)
    assert (emulated == out.cpu()).float().mean() >= 0.995
    with pytest.raises(ValueError, match=r"inside hopwell\.emulate"), hopwell.emulate("sm_90a"):
        hopwell.forward(q.cuda(), k.cuda(), v.cuda())


def test_an_exported_kernel_runs_without_the_compiler(tmp_path: Path) -> None:
    hopwell.compile("sm_90a", out=tmp_path, dtypes=[torch.bfloat16], head_dims=[128])
    code = f"""
        import cutlass.cute, torch, hopwell
        from hopwell.interface import compile

        def refuse(*args, **options):
            raise AssertionError("the compiler was called")

        cutlass.cute.compile = refuse
        hopwell.load({str(tmp_path)!r})
        q, k, v = (torch.randn(1, 200, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
        for causal in (False, True):
            assert hopwell.attention(q, k, v, causal=causal).isfinite().all()
        assert compile.counts.compiled == 0
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_demo() -> None:
    assert demo.run()
