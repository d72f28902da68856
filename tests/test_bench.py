"""The benchmark's arithmetic, presets and tables; its GPU part with stand-ins."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import select as select_module
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend

import hopwell
from hopwell.benchmarks import accuracy, bench, contenders, host, plot, readme, results, timing
from hopwell.benchmarks.accuracy import Errors
from hopwell.benchmarks.cells import FLOP_CONVENTION, MODELS, PRESETS, TOKENS, Cell, select
from hopwell.benchmarks.contenders import DETERMINISTIC, Contender
from hopwell.benchmarks.results import Error, Speed
from hopwell.benchmarks.timing import OURS, PROTOCOL, Call, Times
from hopwell.interface import cli

from .reference import attention as exact_attention
from .reference import gradients as exact_gradients

CELL = Cell(2, 1024, 4, 2, 64, 64, causal=False)
CAUSAL = Cell(2, 4096, 4, 2, 192, 128, causal=True)


def drawn(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=150).print(table)
    return text.getvalue()


def test_flops_by_hand() -> None:
    assert CELL.flops() == 4 * 2 * 4 * 1024 * 1024 * 64
    assert CAUSAL.flops() == 2 * 2 * 4 * 4096 * 4096 * (192 + 128) / 2
    assert CAUSAL.flops("bwd") == 2.5 * CAUSAL.flops()


def test_bytes_by_hand() -> None:
    q, k, v = CAUSAL.inputs("cpu")
    out = torch.empty(2, 4096, 4, 128, dtype=q.dtype)
    assert CAUSAL.bytes() == sum(tensor.nbytes for tensor in (q, k, v, out))
    assert CAUSAL.bytes("bwd") == 2 * CAUSAL.bytes()


def test_paper_has_every_combination_of_16384_tokens_and_hidden_2048() -> None:
    grid = PRESETS["paper"]
    assert len(set(grid)) == 18
    for cell in grid:
        assert cell.batch * cell.length == TOKENS and cell.heads * cell.head_dim == 2048
        assert cell.heads == cell.heads_kv and cell.head_dim == cell.head_dim_v


def test_the_other_presets() -> None:
    assert PRESETS["models"] == tuple(cell for cells in MODELS.values() for cell in cells)
    assert len(set(PRESETS["models"])) == len(PRESETS["models"])
    assert [str(cell) for cell in PRESETS["llama3-8b"]] == [
        "8 x 2048 x 32/8 x 128 causal",
        "1 x 8192 x 32/8 x 128 causal",
        "1 x 32768 x 32/8 x 128 causal",
    ]
    causal = {name: {cell.causal for cell in cells} for name, cells in MODELS.items()}
    full = {"dit", "vit"}
    assert causal == {name: {name not in full} for name in MODELS} and full < set(MODELS)
    assert {(cell.head_dim, cell.head_dim_v) for cell in PRESETS["dsv3"]} == {(192, 128)}
    assert [str(cell) for cell in PRESETS["dims"]] == [
        f"4 x 4096 x 16 x {dims} {mask}"
        for dims in ("96", "192/128", "80")
        for mask in ("full", "causal")
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_ours_has_a_kernel_for_every_cell(preset: str) -> None:
    with hopwell.emulate("sm_90a"):
        for cell in PRESETS[preset]:
            q, k, v = replace(cell, batch=1, length=2).inputs("cpu")
            assert not hopwell.supported(q, k, v, causal=cell.causal).reasons


def test_select() -> None:
    assert select("paper", (), ()) == PRESETS["paper"]
    chosen = select("paper", (1024, 4096), (64,))
    assert [(cell.length, cell.causal) for cell in chosen] == [
        (1024, False),
        (1024, True),
        (4096, False),
        (4096, True),
    ]


def test_inputs_are_the_same_each_time_and_have_their_outliers() -> None:
    q, k, v = CELL.inputs("cpu")
    assert q.shape == (2, 1024, 4, 64) and k.shape == v.shape == (2, 1024, 2, 64)
    assert torch.equal(q, CELL.inputs("cpu")[0]) and not torch.equal(k, v)
    assert abs(q.float().std() - 1) < 0.01
    loud, _, _ = CELL.inputs("cpu", outliers=True)
    assert (q.float().abs() > 6).sum() == 0
    share = (loud.float().abs() > 6).float().mean()  # of N(0, 100), 55 % are
    assert 0.4e-3 < share < 0.7e-3


def took(**us: float) -> dict[str, Times]:
    """Medians, with quartiles 10 % off."""
    return {name: Times(time, 0.9 * time, 1.1 * time) for name, time in us.items()}


ROWS = [
    Speed(
        CELL, took(hopwell=10.0, cuDNN=20.0, FA3=5.0), cold=True, clock_mhz=1695.0, power_w=700.0
    ),
    Speed(CAUSAL, took(hopwell=10.0, cuDNN=20.0), absent={"FA3": "no such head_dim"}),
    Speed(CAUSAL, took(cuDNN=20.0)),
    Speed(CAUSAL, took(hopwell=10.0)),
]
ABOUT = {
    "device": "a card",
    "versions": {"torch": "2.11", "fa3-fwd": None},
    "commit": "abc",
    "date": "2026-11-30",
}
FACTS = {**ABOUT, "preset": "paper", "left_out": {"FA4": "no flash_attn.cute"}}


def test_ratios() -> None:
    assert [row.ratio for row in ROWS] == [0.5, 2.0, None, None]
    bitwise = replace(ROWS[1], times={**ROWS[1].times, **took(**{DETERMINISTIC: 1.0})})
    assert bitwise.ratio == 2.0  # no peer
    assert ROWS[0].tflops(OURS) == pytest.approx(CELL.flops() / 10e-6 / 1e12)
    assert ROWS[0].tflops(OURS, "low") == pytest.approx(CELL.flops() / 9e-6 / 1e12)
    assert replace(ROWS[0], which="bwd").tflops(OURS) == pytest.approx(CELL.flops() / 4e-6 / 1e12)
    assert ROWS[1].tflops("FA3") is None
    errors = [{OURS: 2.0, "cuDNN": 1.0, "FA3": 4.0}, {OURS: 2.0}, {"FA3": 1.0}]
    assert [Error(CELL, "out", "N(0,1)", rms).ratio for rms in errors] == [2.0, None, None]


def test_geometric_means() -> None:
    assert results.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(results.geometric_mean([]))
    assert results.means(ROWS) == pytest.approx(
        {"all": 1.0, "len 1024": 0.5, "len 4096": 2.0, "head_dim 64": 0.5, "head_dim 192": 2.0}
    )
    assert results.means(ROWS[2:]) == {}


def test_extremes() -> None:
    assert bench.extreme(ROWS, min) == f"smallest 0.500 at {CELL}"
    assert bench.extreme(ROWS, max) == f"largest 2.000 at {CAUSAL}"
    assert bench.extreme(ROWS[2:], min).startswith("no cell")


def test_tables_show_a_dash_where_one_cannot_run() -> None:
    names = [OURS, "cuDNN", "FA3"]
    lines = drawn(bench.speed_table(ROWS, names, "speed")).splitlines()
    row = next(line for line in lines if str(CAUSAL) in line)
    ours, cudnn = (CAUSAL.flops() / us / 1e6 for us in (10, 20))
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        str(CAUSAL),
        f"{ours:.0f} ± {ours * (1 / 0.9 - 1 / 1.1) / 2:.0f}",
        f"{cudnn:.0f} ± {cudnn * (1 / 0.9 - 1 / 1.1) / 2:.0f}",
        "-",
        "2.00",
        "-",
        "-",
    ]
    assert next(line for line in lines if f"{CELL} cold" in line).endswith(" 1695 │ 700 │")
    errors = [Error(CELL, "out", "N(0,1)", {OURS: 4.0, "cuDNN": 2.0})]
    assert "2.000" in drawn(bench.error_table(errors, names, "errors"))


def test_who_has_no_time_is_named_with_the_reason() -> None:
    assert bench.missing(ROWS) == ["FA3 has no time in 1 of 4 cells: no such head_dim"]


def test_files_hold_the_raw_numbers(tmp_path: Path) -> None:
    results.write(tmp_path, FACTS, ROWS)
    found = json.loads((tmp_path / "results.json").read_text())
    assert ABOUT.items() <= found.items() and len(found["rows"]) == 4
    assert found["rows"][0]["contestants"][OURS] == {
        "us": 10.0,
        "us_quartiles": [9.0, 11.0],
        "tflops": ROWS[0].tflops(OURS),
    }
    assert [row["ratio"] for row in found["rows"]] == [0.5, 2.0, None, None]
    assert found["geometric_means"]["fwd"]["len 4096"] == pytest.approx(2.0)
    facts, rows = results.read(tmp_path)
    assert rows == ROWS and facts["device"] == "a card"

    text = (tmp_path / "results.csv").read_text().splitlines()
    assert text[:3] == [
        "# a card, 2026-11-30, torch 2.11, commit abc",
        f"# {FLOP_CONVENTION}",
        f"# {PROTOCOL}",
    ]
    lines = list(csv.DictReader(line for line in text if not line.startswith("#")))
    assert [(line["contestant"], line["us"], line["absent"]) for line in lines[3:6]] == [
        (OURS, "10.0", ""),
        ("cuDNN", "20.0", ""),
        ("FA3", "", "no such head_dim"),
    ]
    assert lines[0]["clock_mhz"] == "1695.0" and lines[0]["l2_flushed"] == "True"


def test_a_folder_without_times_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="needs a folder of results; write one with"):
        results.read(tmp_path)
    results.write(tmp_path, FACTS, [Error(CELL, "dq", "N(0,1)", {OURS: 4.0, "FA4": 2.0})])
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["rows"][0]["of"] == "dq" and found["geometric_means"]["errors"]["all"] == 2.0
    assert not (tmp_path / "results.csv").exists()
    with pytest.raises(ValueError, match="holds no times"):
        results.read(tmp_path)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_attention_in_float64(causal: bool) -> None:
    q, k, v = Cell(1, 70, 1, 1, 64, 32, causal).inputs("cpu")
    chunked = accuracy.reference(q[0, :, 0], k[0, :, 0], v[0, :, 0], causal=causal, rows=32)
    out = exact_attention(q, k, v, causal=causal).out
    torch.testing.assert_close(chunked, out[0, :, 0], atol=1e-13, rtol=1e-12)


def refuses(*_: Any) -> Any:
    raise RuntimeError("no kernel for this\nand more")


def exactly(factor: float, by: float = 0.0) -> Any:
    """Attention in float64 that is off, as a contender's `bind`."""

    def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        return lambda: (exact_attention(q, k, v, causal=causal).out * factor + by, None)

    return bind


def calls_of(
    there: list[Contender], inputs: contenders.Inputs, causal: bool, which: str
) -> dict[str, Call]:
    return timing.able({one.name: one.call(inputs, causal, which) for one in there})[0]


def test_errors_of_a_known_size() -> None:
    """Contenders that return a tuple, are off by 0.01, raise, and have heads first."""
    cell = Cell(1, 40, 6, 2, 64, 64, causal=True)
    there = [
        Contender("exact", exactly(1.0)),
        Contender("off", exactly(1.0, 0.01)),
        Contender("none", lambda *_: refuses),
        contenders.of_torch(SDPBackend.MATH, "torch"),
    ]
    inputs = cell.inputs("cpu")
    (found,) = accuracy.errors(cell, inputs, calls_of(there, inputs, True, "fwd"))
    assert found.of == "out" and list(found.rms) == ["exact", "off", "torch"]
    assert found.rms["exact"] < 1e-12 and found.rms["off"] == pytest.approx(0.01)
    assert found.rms["torch"] < 1e-2
    right = exact_attention(*inputs, causal=True).out[0, :, [0, 5]]
    assert found.size == pytest.approx(accuracy.rms(right))


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_errors_of_a_known_size(causal: bool) -> None:
    """Of a contender in float64, of one that is 10 % off, and of one without gradients."""
    cell = Cell(1, 40, 6, 2, 64, 32, causal)

    def without(*tensors: Any) -> Any:
        return lambda: (exact_attention(*(t.detach() for t in tensors[:3])).out, None)

    there = [
        Contender("none", without),
        Contender("exact", exactly(1.0)),
        Contender("off", exactly(1.1)),
    ]
    inputs = cell.inputs("cpu", outliers=True)
    found = accuracy.errors(cell, inputs, calls_of(there, inputs, causal, "bwd"), "bwd")
    assert [errors.of for errors in found] == ["dq", "dk", "dv"]
    dout = contenders.gradient_of_out(inputs)
    q, k, v = inputs
    right = exact_gradients(dout, q, k, v, causal=causal)
    ours = right.dq[0, :, 3:], right.dk[0, :, 1], right.dv[0, :, 1]
    for errors, gradient in zip(found, ours, strict=True):
        assert list(errors.rms) == ["exact", "off"]
        assert errors.size == pytest.approx(accuracy.rms(gradient))
        # Gradients arrive in bf16, whatever they were computed in.
        assert 0 < errors.rms["exact"] < 2**-8 * accuracy.rms(gradient)
        assert errors.rms["off"] == pytest.approx(0.1 * accuracy.rms(gradient), rel=0.05)
    chunked = accuracy.gradients(dout[0, :, 3:], q[0, :, 3:], k[0, :, 1], v[0, :, 1], causal, 16)
    for one, another in zip(chunked, ours, strict=True):
        torch.testing.assert_close(one, another, atol=1e-12, rtol=1e-11)


def test_who_is_wrong() -> None:
    found = [
        Errors("dq", 2.0, {OURS: 0.019, "FA4": 0.1, "nan": math.nan}),
        Errors("dk", 0.0, {OURS: 0.0, "FA4": 0.1, "FA2": 0.1}),
    ]
    assert accuracy.wrong(found) == {
        "FA4": "wrong: dq is 5.0% off float64's (RMS)",
        "nan": "wrong: dq is nan% off float64's (RMS)",
        "FA2": "wrong: dk is 1.0e-01 off float64's (RMS)",
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_is_attention(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled: that it is compiled is a matter of speed."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs = tuple(t.float() for t in Cell(2, 130, 4, 2, 32, 32, causal).inputs("cpu"))
    (out,) = contenders.of_flex("flex").call(inputs, causal).once()
    right = exact_attention(*inputs, causal=causal).out
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)


class FakeCudnn:
    """Stands in for cuDNN's frontend: graphs of one node, computed in float64 by definition.

    It cannot show that cuDNN understands the graph, only that what goes in and comes out is right.
    """

    data_type = SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32")
    heur_mode = SimpleNamespace(A=0, FALLBACK=1)
    create_handle = staticmethod(lambda: "handle")
    set_stream = staticmethod(lambda handle, stream: None)

    class Tensor:
        def set_output(self, *_: Any) -> Any:
            return self

        set_dim = set_stride = set_data_type = set_output

    class pygraph:
        def __init__(self, **_: Any) -> None:
            for name in ("validate", "build_operation_graph", "check_support", "build_plans"):
                setattr(self, name, lambda: None)

        def create_execution_plans(self, modes: list[int]) -> None:
            assert modes == [0, 1]

        def get_workspace_size(self) -> int:
            return 8

        def tensor(self, **_: Any) -> Any:
            return FakeCudnn.Tensor()

        def _node(self, kind: str, outputs: int, options: dict[str, Any]) -> list[Any]:
            self.kind, self.options = kind, options
            self.outputs = [FakeCudnn.Tensor() for _ in range(outputs)]
            return self.outputs

        def sdpa(self, **options: Any) -> Any:
            assert options["generate_stats"]
            return self._node("forward", 2, options)

        def sdpa_backward(self, **options: Any) -> Any:
            return self._node("backward", 3, options)

        def execute(self, pack: Any, workspace: torch.Tensor, *, handle: str) -> None:
            assert workspace.numel() == 8 and handle == "handle"
            given = {name: pack.get(tensor) for name, tensor in self.options.items()}
            q, k, v = (given[name].transpose(1, 2) for name in "qkv")
            options = {"scale": self.options["attn_scale"]}
            options["causal"] = self.options["use_causal_mask"]
            if self.kind == "forward":
                forward = exact_attention(q, k, v, **options)
                results = forward.out.transpose(1, 2), forward.lse.unsqueeze(-1)
            else:
                dout, stats = given["dO"].transpose(1, 2), given["stats"].squeeze(-1)
                forward = exact_attention(q, k, v, **options)
                torch.testing.assert_close(stats, forward.lse.float())
                torch.testing.assert_close(given["o"].transpose(1, 2), forward.out.to(q.dtype))
                right = exact_gradients(dout, q, k, v, **options)
                results = [g.transpose(1, 2) for g in (right.dq, right.dk, right.dv)]
            for tensor, result in zip(self.outputs, results, strict=True):
                pack[tensor].copy_(result)


@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_cudnn_by_its_frontend(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    cell = Cell(2, 40, 6, 2, 64, 32, True)
    inputs = cell.inputs("cpu")
    there = [contenders.of_cudnn("cuDNN frontend")]
    for errors in accuracy.errors(cell, inputs, calls_of(there, inputs, True, which), which):
        assert errors.rms["cuDNN frontend"] < 2**-8 * errors.size


def test_decoding_reads_all_keys_for_one_query() -> None:
    cell = PRESETS["decode"][0]
    assert str(cell) == "64 x 1/4096 x 32/8 x 128 full"
    assert cell.flops() == 64 * 32 * 4 * 4096 * 128
    assert cell.bytes() == 64 * 2 * 2 * 128 * (32 + 8 * 4096)
    shapes = [t.shape for t in replace(cell, batch=1, length=7).inputs("cpu")]
    assert shapes == [(1, 1, 32, 128), (1, 7, 8, 128), (1, 7, 8, 128)]


def test_a_sample_flushes_and_times_each_launch_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.006

    @contextmanager
    def context() -> Iterator[None]:
        log.append("in")
        yield
        log.append("out")

    class Flush(torch.Tensor):
        def zero_(self) -> Any:
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    call = Call(lambda: log.append("launch"), context)
    assert timing._sample(call, 2, None) == pytest.approx(3.0)
    assert log == ["in", "event", "launch", "launch", "event", "out", "wait"]
    log.clear()
    assert timing._sample(call, 2, Flush()) == pytest.approx(6.0)
    assert log == ["in", *["flush", "event", "launch", "event"] * 2, "out", "wait"]


def test_times_are_of_interleaved_rounds_in_changing_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    # Of "a" 1 to 7 after its warm-up, of "b" ten times as much.
    us = {"a": iter([1.0, 1.0, *range(1, 8)]), "b": iter([10.0, 10.0, *range(10, 80, 10)])}

    def sample(call: Call, launches: int, flush: Any) -> float:
        assert flush is None
        call.launch()
        return next(us[order[-1]])

    monkeypatch.setattr(timing, "_sample", sample)
    found = timing.times({name: Call(lambda name=name: order.append(name)) for name in "ab"})
    assert order[:4] == list("aabb")
    rounds = ["".join(order[i : i + 2]) for i in range(4, len(order), 2)]
    assert len(rounds) == timing.ROUNDS and set(rounds) == {"ab", "ba"}
    assert found == {"a": Times(4.0, 2.5, 5.5), "b": Times(40.0, 25.0, 55.0)}


def test_ours_may_refuse_only_what_it_has_no_kernel_for() -> None:
    def absent() -> None:
        raise NotImplementedError("q and k have head_dim 264")

    call = Call(lambda: None)
    found, reasons = timing.able({"FA3": Call(refuses), OURS: Call(absent), "cuDNN": call})
    assert found == {"cuDNN": call}
    assert reasons == {"FA3": "no kernel for this", OURS: "q and k have head_dim 264"}
    for name in (OURS, DETERMINISTIC):
        with pytest.raises(RuntimeError, match="no kernel for this"):
            timing.able({name: Call(refuses)})


def test_absent_peers_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(contenders, "importlib", SimpleNamespace(import_module=absent))
    there, reasons = contenders.contenders()
    assert [contender.name for contender in there] == [OURS, "cuDNN", "FA2"]
    assert reasons == {
        "cuDNN frontend": "no cudnn; install nvidia-cudnn-frontend to have it",
        "FA3": "no fa3_fwd_interface; install fa3-fwd to have it",
        "FA4": "no flash_attn.cute; install flash-attn-4 to have it",
    }
    twice, reasons = contenders.contenders("bwd", ["cudnn", "flex"])
    assert [one.name for one in twice] == [OURS, DETERMINISTIC, "cuDNN", "flex"] and not reasons


class Card:
    """Properties of a made-up GPU."""

    uuid = "01234567"
    L2_cache_size = 50 << 20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", Card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")


def test_the_monitor_takes_medians(
    card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tool that notes its arguments and says three lines, one of them without power."""
    tool = tmp_path / "nvidia-smi"
    lines = "1700, 690.5\\n1600, 700.5\\n1650, [N/A]\\n"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nprintf "{lines}"\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with timing.Monitor() as monitor:
        process = monitor._process
        assert process and process.stdout
        select_module.select([process.stdout], [], [], 10)
        assert monitor.take() == (1650.0, 695.5) and monitor.take() == (None, None)
        assert not monitor.absent
    assert process.returncode is not None  # it has ended
    assert "-i GPU-01234567 --query-gpu=clocks.sm,power.draw" in (tmp_path / "said").read_text()


def test_without_the_tool_the_monitor_says_so(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with timing.Monitor() as monitor:
        assert monitor.take() == (None, None)
        assert monitor.absent.startswith("clock and power are not noted: ")
        assert "nvidia-smi" in monitor.absent


def test_l2_is_flushed_for_what_fits(card: None) -> None:
    assert timing.fits_in_l2(50 << 20) and not timing.fits_in_l2((50 << 20) + 1)


def test_host_time_is_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock) * 1e-3)
    assert host.host_us(Call(lambda: None)) == pytest.approx(1e3 / host.CALLS)
    assert "20.0" in drawn(host.table({"hopwell": 20.0, "FA4": 134.0}))


@pytest.fixture
def stand_ins(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock, tiny cells on the CPU, and contenders: right, wrong and refusing."""
    tiny = tuple(Cell(1, 32, 4, 2, 64, dim, causal) for dim in (32, 64) for causal in (False, True))
    on_the_cpu = Cell.inputs
    there = [
        Contender(OURS, exactly(1.0)),
        Contender("cuDNN", exactly(1.0)),
        Contender("FA2", exactly(1.1)),
        Contender("FA3", lambda *_: refuses),
    ]

    def times(calls: dict[str, Call], *, cold: bool) -> dict[str, Times]:
        assert list(calls) == [OURS, "cuDNN"] and cold
        return took(hopwell=2.0, cuDNN=3.0)

    def contenders_(which: str, peers: list[str]) -> Any:
        return there, {"FA4": "no flash_attn.cute"}

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(bench.checks, "gpu_to_measure", lambda: None)
    monkeypatch.setattr(bench, "PRESETS", {"paper": tiny})
    monkeypatch.setattr(bench, "select", lambda *_: tiny)
    monkeypatch.setattr(bench, "contenders", contenders_)
    monkeypatch.setattr(bench, "times", times)
    monkeypatch.setattr(bench.host, "measure", lambda _: {"hopwell": 12.0})
    monkeypatch.setattr(Cell, "inputs", lambda self, **how: on_the_cpu(self, "cpu", **how))


def ran(*arguments: str) -> str:
    run = CliRunner().invoke(bench.main, arguments)
    assert run.exit_code == 0, run.output
    return run.output


def test_the_command_from_end_to_end(stand_ins: None, tmp_path: Path) -> None:
    said = ran("--pass", "both", "--out", str(tmp_path), "--commit", "abc")
    for line in (
        "FA4 is left out: no flash_attn.cute",
        "a card, ",
        FLOP_CONVENTION[:80],
        PROTOCOL[:80],
        "clock and power are not noted",
        "forward, bf16, TFLOP/s",
        "backward, bf16, TFLOP/s",
        "FA2 has no time in 4 of 4 cells: wrong: out is 10.0% off float64's (RMS)",
        "FA3 has no time in 4 of 4 cells: no kernel for this",
        "all 1.500",
        "smallest 1.500 at 1 x 32 x 4/2 x 64",
        "32 x 4/2 x 64 causal cold",
    ):
        assert line in said, line
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "paper-bwd.png",
        "paper-fwd.png",
        "results.csv",
        "results.json",
    ]
    facts, rows = results.read(tmp_path)
    assert [row.which for row in rows] == ["fwd"] * 4 + ["bwd"] * 4
    assert facts["commit"] == "abc" and facts["left_out"] == {"FA4": "no flash_attn.cute"}
    assert facts["protocol"] == PROTOCOL and facts["flop_convention"] == FLOP_CONVENTION
    assert rows[4].absent["FA2"].startswith("wrong: dq is ") and rows[4].cold


def test_the_command_measures_errors_and_host_time(stand_ins: None, tmp_path: Path) -> None:
    said = ran("--accuracy", "--pass", "bwd", "--out", str(tmp_path))
    assert "largest" in said and "backward, bf16, RMS error" in said
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["rows"]) == 4 * 2 * 3 and found["rows"][2]["of"] == "dv"
    assert found["rows"][3]["inputs"] == "outliers" and "protocol" not in found
    assert "12.0" in ran("--host", "--out", str(tmp_path))
    assert json.loads((tmp_path / "results.json").read_text())["host_us"] == {"hopwell": 12.0}


def test_without_matplotlib_the_numbers_remain(
    stand_ins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "no bars are drawn: " in ran("--out", str(tmp_path))
    assert len(results.read(tmp_path)[1]) == 4


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--lengths", "1k"], 2, "'1k' needs to be whole numbers with commas between"),
        (
            ["--peers", "fa3,fa5"],
            2,
            "'fa5' needs to be some of cudnn, cudnn-frontend, fa2, fa3, fa4, flex",
        ),
        (["--lengths", "7"], 1, "preset paper has no cell of these --lengths and --head-dims"),
    ],
)
def test_arguments_that_select_nothing(
    arguments: list[str], status: int, said: str, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.checks, "gpu_to_measure", lambda: None)
    run = CliRunner().invoke(bench.main, arguments)
    assert run.exit_code == status and said in " ".join(run.output.split())


def paper(which: str, ours: float = 1.1) -> list[Speed]:
    """Times by which cuDNN has 500 TFLOP/s everywhere, FA2 half, and ours `ours` times as much."""
    rows = []
    for cell in PRESETS["paper"]:
        us = cell.flops(which) / 500e6
        times = took(hopwell=us / ours, cuDNN=us, FA2=2 * us)
        rows.append(Speed(cell, times, which, {"FA3": "no backward"}))
    return rows


def test_generations_have_a_panel_for_each_head_dim_and_mask(tmp_path: Path) -> None:
    results.write(tmp_path / "old", FACTS, paper("fwd", 1.0))
    results.write(tmp_path / "new", FACTS, paper("fwd", 1.2)[6:])
    figure = plot.generations([tmp_path / "old", tmp_path / "new"], "fwd")
    speeds = {}
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines) == ["FA2", "cuDNN", OURS]
        assert list(lines[OURS].get_xdata()) == [1024, 4096, 16384]
        speeds[axes.get_title()] = list(lines[OURS].get_ydata())
        low, high = axes.get_ylim()
        assert low == 0 and high > 600  # nothing is cut off
    assert speeds == {
        f"head_dim {dim}, {mask}": pytest.approx([500.0 if dim == 64 else 600.0] * 3)
        for dim in (64, 128, 256)
        for mask in ("full", "causal")
    }
    file = tmp_path / "generations.png"
    drawn = ["generations", str(tmp_path / "old"), "--out", str(file)]
    assert CliRunner().invoke(plot.main, drawn).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    run = CliRunner().invoke(plot.main, [*drawn, "--pass", "bwd"])
    assert run.exit_code == 1 and "no cell of the preset paper was measured" in run.output
    results.write(tmp_path / "other", {**FACTS, "device": "another"}, paper("fwd"))
    with pytest.raises(ValueError, match="results of a card and another; needs those of one"):
        plot.generations([tmp_path / "old", tmp_path / "other"], "fwd")


def test_plot_and_bench_hand_their_arguments_on() -> None:
    for command, option in (("bench", "--preset"), ("plot", "generations")):
        run = CliRunner().invoke(cli.main, [command, "--help"])
        assert run.exit_code == 0 and option in run.output
        assert run.output.startswith(f"Usage: python -m hopwell {command} [OPTIONS]")


README = f"before\n{readme.MARKERS[0]}\nold\n{readme.MARKERS[1]}\nafter\n"


def test_the_readme_gets_its_tables_once(tmp_path: Path) -> None:
    results.write(tmp_path / "results/fwd", FACTS, paper("fwd"))
    results.write(tmp_path / "results/bwd", FACTS, paper("bwd", 0.9)[:-1])
    file = tmp_path / "README.md"
    file.write_text(README)

    def run(*options: str) -> Any:
        return CliRunner().invoke(readme.main, [*options, str(tmp_path / "results"), str(file)])

    assert run("--check").exit_code == 1 and file.read_text() == README
    assert run().exit_code == 0
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert (
        "Forward: a card, 2026-11-30, torch 2.11, commit abc; bf16, 16,384 tokens, hidden size "
        "2048, TFLOP/s (causal counts half), medians of 7 rounds in one process with FA2, cuDNN. "
        "FA4 has no time: no flash_attn.cute. FA3 has no time: no backward.\n" in text
    )
    forward, backward = (
        [[cell.strip() for cell in line.split("|")] for line in part.splitlines() if "|" in line]
        for part in text.split("Backward: ")
    )
    head = ["1k full", "1k causal", "4k full", "4k causal", "16k full", "16k causal"]
    assert forward[0] == backward[0] == ["", "", *head, ""]
    assert forward[2] == ["", "head_dim 64, Hopwell", *["550"] * 6, ""]
    assert backward[3] == ["", "over the best peer", *["0.90"] * 6, ""]
    assert backward[6] == ["", "head_dim 256, Hopwell", *["450"] * 5, "-", ""]
    assert len(forward) == len(backward) == 8 and "mean of the ratios is 0.90" in text
    assert run("--check").exit_code == 0 and run().exit_code == 0
    assert file.read_text() == text  # nothing to do on its own output


def test_a_readme_without_markers_says_so(tmp_path: Path) -> None:
    for text in ("", README + README, README.replace(readme.MARKERS[1], "")):
        with pytest.raises(ValueError, match="once each and in this order"):
            readme.rewritten(text, "new")
    results.write(tmp_path / "a", FACTS, paper("fwd"))
    results.write(tmp_path / "b", FACTS, paper("fwd"))
    with pytest.raises(ValueError, match="two results of forward"):
        readme.tables(tmp_path)
    results.write(tmp_path / "c", FACTS, ROWS)
    with pytest.raises(ValueError, match="no cell of the preset paper"):
        readme.tables(tmp_path / "c")
