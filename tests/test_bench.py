"""The benchmark's arithmetic, presets and tables; its GPU part with stand-ins."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

import hopwell
from hopwell.benchmarks import accuracy, contenders, forward, host
from hopwell.benchmarks.cells import PRESETS, TOKENS, Cell, select
from hopwell.benchmarks.contenders import DETERMINISTIC, OURS, Contender
from hopwell.benchmarks.forward import Row, relative_error, speedup

from .reference import attention as exact_attention
from .reference import gradients as exact_gradients

CELL = Cell(2, 1024, 4, 2, 64, 64, causal=False)
CAUSAL = Cell(2, 4096, 4, 2, 192, 128, causal=True)


def drawn(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=150).print(table)
    return text.getvalue()


def test_flops_by_hand() -> None:
    assert CELL.flops == 4 * 2 * 4 * 1024 * 1024 * 64
    assert CAUSAL.flops == 2 * 2 * 4 * 4096 * 4096 * (192 + 128) / 2


def test_grid_has_every_combination_of_16384_tokens_and_hidden_2048() -> None:
    grid = PRESETS["grid"]
    assert len(set(grid)) == 18
    for cell in grid:
        assert cell.batch * cell.length == TOKENS and cell.heads * cell.head_dim == 2048
        assert cell.heads == cell.heads_kv and cell.head_dim == cell.head_dim_v


def test_the_other_presets() -> None:
    assert [str(cell) for cell in PRESETS["models"]] == [
        "1 x 8192 x 32/8 x 128 causal",
        "2 x 4096 x 64/8 x 128 causal",
        "8 x 2048 x 32/8 x 128 causal",
        "1 x 32768 x 32/8 x 128 causal",
        "1 x 4680 x 24 x 128 full",
        "16 x 512 x 16 x 64 full",
    ]
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
    assert select("grid", (), ()) == PRESETS["grid"]
    chosen = select("grid", (1024, 4096), (64,))
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


ROWS = [
    Row(CELL, "N(0,1)", {OURS: 10.0, "cuDNN": 20.0, "FA3": 5.0}),
    Row(CAUSAL, "N(0,1)", {OURS: 10.0, "cuDNN": 20.0}),
    Row(CAUSAL, "N(0,1)", {"cuDNN": 20.0}),
    Row(CAUSAL, "N(0,1)", {OURS: 10.0}),
]


def test_ratios() -> None:
    assert [speedup(row) for row in ROWS] == [0.5, 2.0, None, None]
    bitwise = replace(ROWS[1], values={**ROWS[1].values, DETERMINISTIC: 1.0})
    assert speedup(bitwise) == 2.0  # no peer
    assert [relative_error(row) for row in ROWS] == [2.0, 0.5, None, None]
    assert ROWS[0].tflops(OURS) == pytest.approx(CELL.flops / 10e-6 / 1e12)
    assert ROWS[1].tflops("FA3") is None


def test_geometric_means() -> None:
    assert forward.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(forward.geometric_mean([]))
    assert forward.means(ROWS, speedup) == pytest.approx(
        {"all": 1.0, "len 1024": 0.5, "len 4096": 2.0, "head_dim 64": 0.5, "head_dim 192": 2.0}
    )


def test_extremes() -> None:
    assert forward.extreme(ROWS, speedup, min) == f"smallest 0.500 at {CELL}"
    assert forward.extreme(ROWS, speedup, max) == f"largest 2.000 at {CAUSAL}"
    assert forward.extreme(ROWS[2:], speedup, min).startswith("no cell")


def test_tables_show_a_dash_where_one_cannot_run() -> None:
    names = [OURS, "cuDNN", "FA3"]
    lines = drawn(forward.speed_table(ROWS, names, "speed")).splitlines()
    row = next(line for line in lines if str(CAUSAL) in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        str(CAUSAL),
        f"{CAUSAL.flops / 10e-6 / 1e12:.0f}",
        f"{CAUSAL.flops / 20e-6 / 1e12:.0f}",
        "-",
        "2.00",
    ]
    assert "2.000" in drawn(forward.error_table(ROWS, names, "errors"))


def test_json_holds_the_raw_numbers() -> None:
    found = json.loads(forward.as_json(ROWS, speedup, {"device": "a card"}))
    assert found["device"] == "a card" and len(found["rows"]) == 4
    assert found["rows"][0]["values"] == {OURS: 10.0, "cuDNN": 20.0, "FA3": 5.0}
    assert [row["ratio"] for row in found["rows"]] == [0.5, 2.0, None, None]
    assert found["rows"][1]["head_dim_v"] == 128 and found["rows"][1]["flops"] == CAUSAL.flops
    assert found["geometric_means"]["len 4096"] == pytest.approx(2.0)
    assert json.loads(forward.as_json([], speedup, {}))["geometric_means"] == {}


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_attention_in_float64(causal: bool) -> None:
    q, k, v = Cell(1, 70, 1, 1, 64, 32, causal).inputs("cpu")
    chunked = accuracy.reference(q[0, :, 0], k[0, :, 0], v[0, :, 0], causal=causal, rows=32)
    out = exact_attention(q, k, v, causal=causal).out
    torch.testing.assert_close(chunked, out[0, :, 0], atol=1e-13, rtol=1e-12)


def refuses(*_: Any) -> Any:
    raise RuntimeError("no kernel for this")


def test_errors_of_a_known_size() -> None:
    """Contenders that return a tuple, are off by 0.01, raise, and have heads first."""
    cell = Cell(1, 40, 6, 2, 64, 64, causal=True)

    def off(by: float) -> Any:
        def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
            return lambda: (exact_attention(q, k, v, causal=causal).out + by, None)

        return bind

    there = [
        Contender("exact", off(0.0), contenders._first),
        Contender("off", off(0.01), contenders._first),
        Contender("none", lambda *_: refuses, contenders._first),
        Contender("cuDNN", _on_the_cpu, lambda out: out.transpose(1, 2)),
    ]
    found = accuracy.errors(cell, there, outliers=False, device="cpu")["out"]
    assert list(found) == ["exact", "off", "cuDNN"]
    assert found["exact"] < 1e-12 and found["off"] == pytest.approx(0.01)
    assert found["cuDNN"] < 1e-2


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_errors_of_a_known_size(causal: bool) -> None:
    """Of a contender in float64, of one that is 10 % off, and of one without gradients."""
    cell = Cell(1, 40, 6, 2, 64, 32, causal)

    def times(factor: float) -> Any:
        def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
            return lambda: (exact_attention(q, k, v, causal=causal).out * factor, None)

        return bind

    def without(*tensors: Any) -> Any:
        return lambda: (exact_attention(*(t.detach() for t in tensors[:3])).out, None)

    there = [
        Contender("none", without, contenders._first),
        Contender("exact", times(1.0), contenders._first),
        Contender("off", times(1.1), contenders._first),
    ]
    found = accuracy.gradient_errors(cell, there, outliers=True, device="cpu")
    assert list(found) == ["dq", "dk", "dv"]
    q, k, v = cell.inputs("cpu", outliers=True)
    dout = contenders.Backward(there[1], (q, k, v), causal).dout
    right = exact_gradients(dout, q, k, v, causal=causal)
    ours = right.dq[0, :, 3:], right.dk[0, :, 1], right.dv[0, :, 1]
    for errors, gradient in zip(found.values(), ours, strict=True):
        assert list(errors) == ["exact", "off"]
        # Gradients arrive in bf16, whatever they were computed in.
        assert 0 < errors["exact"] < 2**-8 * accuracy.rms(gradient)
        assert errors["off"] == pytest.approx(0.1 * accuracy.rms(gradient), rel=0.05)
    chunked = accuracy.gradients(dout[0, :, 3:], q[0, :, 3:], k[0, :, 1], v[0, :, 1], causal, 16)
    for one, another in zip(chunked, ours, strict=True):
        torch.testing.assert_close(one, another, atol=1e-12, rtol=1e-11)


def _on_the_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    def call() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return contenders.cudnn(q, k, v, causal)()

    return call


def test_times_leave_out_who_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """And interleave the others, in every round."""
    order: list[str] = []
    samples = iter(range(1000))

    def sample(call: Any, launches: int) -> float:
        call()
        return 100.0 + next(samples)

    monkeypatch.setattr(contenders, "_sample", sample)
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = contenders.times({**calls, "none": refuses})
    assert order == [*"aaabbb", *"ab" * contenders.ROUNDS]
    first = 104.0 + contenders.ROUNDS - 1  # the middle of every second number from 104
    assert found == {"a": first, "b": first + 1}


def test_ours_may_refuse_only_what_it_has_no_kernel_for() -> None:
    def absent() -> None:
        raise NotImplementedError("q and k have head_dim 264")

    assert not contenders.runs("FA3", refuses) and not contenders.runs(OURS, absent)
    with pytest.raises(RuntimeError, match="no kernel for this"):
        contenders.runs(OURS, refuses)


def test_absent_peers_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(contenders.importlib, "import_module", absent)
    there, lines = contenders.contenders()
    assert [contender.name for contender in there] == [OURS, "cuDNN"]
    twice, _ = contenders.contenders(backward=True)
    assert [contender.name for contender in twice] == [OURS, DETERMINISTIC, "cuDNN"]
    assert lines == [
        "FA3 is left out: no fa3_fwd_interface; install fa3-fwd to have it",
        "FA4 is left out: no flash_attn.cute; install flash-attn-4 to have it",
    ]


def test_host_time_is_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock) * 1e-3)
    assert host.host_us(lambda: None) == pytest.approx(1e3 / host.CALLS)
    assert "20.0" in drawn(host.table({"hopwell": 20.0, "FA4": 134.0}))


def test_the_command_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock, a card and contenders of the test's making."""
    monkeypatch.setattr(forward.checks, "gpu_to_measure", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    there = [Contender(name, lambda *_: None, contenders._first) for name in (OURS, "cuDNN")]
    monkeypatch.setattr(forward, "contenders", lambda backward: (there, ["FA3 is left out"]))
    monkeypatch.setattr(forward, "times", lambda _: {OURS: 2.0, "cuDNN": 3.0})
    error = {OURS: 2.0, "cuDNN": 1.0}
    monkeypatch.setattr(forward.accuracy, "errors", lambda *_, **__: {"out": error})
    gradients = dict.fromkeys(("dq", "dk", "dv"), error)
    monkeypatch.setattr(forward.accuracy, "gradient_errors", lambda *_, **__: gradients)
    monkeypatch.setattr(forward, "Backward", lambda *_: None)
    monkeypatch.setattr(forward.host, "measure", lambda _: {"hopwell": 12.0})
    monkeypatch.setattr(Cell, "inputs", lambda _: (None, None, None))

    def run(*arguments: str) -> tuple[str, Any]:
        file = tmp_path / "found.json"
        ran = CliRunner().invoke(forward.main, [*arguments, "--json", str(file)])
        assert ran.exit_code == 0, ran.output
        return ran.output, json.loads(file.read_text())

    said, found = run("--lengths", "1024", "--head-dims", "64,128")
    assert "FA3 is left out" in said and "all 1.500" in said and "smallest 1.500 at 16" in said
    assert len(found["rows"]) == 4 and found["values"] == "us" and found["preset"] == "grid"
    said, found = run("--preset", "models", "--accuracy")
    assert "largest 2.000" in said and len(found["rows"]) == 12 and found["values"] == "rms_error"
    said, found = run("--backward", "--lengths", "1024")
    assert "backward, bf16" in said and "all 1.500" in said and found["which"] == "backward"
    assert {row["flops"] / row["length"] ** 2 for row in found["rows"] if row["causal"]} == {
        5.0 * 16 * 2048
    }
    said, found = run("--backward", "--accuracy", "--lengths", "1024")
    assert len(found["rows"]) == 6 * 2 * 3 and found["rows"][2]["of"] == "dv"
    said, found = run("--host")
    assert found["host_us"] == {"hopwell": 12.0}


def test_numbers_that_are_none() -> None:
    run = CliRunner().invoke(forward.main, ["--lengths", "1k"])
    assert run.exit_code == 2 and "'1k' needs to be whole numbers with commas between" in run.output
