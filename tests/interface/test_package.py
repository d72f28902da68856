"""What importing costs, what the face hands on, and the command line."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import hopwell
from hopwell.interface import checks, env
from hopwell.interface import compile as compiling
from hopwell.interface.cache import Store
from hopwell.interface.cli import main

from . import standin

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    """What a fresh Python prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_import_loads_neither_torch_nor_the_compiler() -> None:
    heavy = "('torch', 'numpy', 'cutlass', 'tvm_ffi', 'rich', 'click', 'jax', 'transformers')"
    code = f"import sys, hopwell; print([name for name in {heavy} if name in sys.modules])"
    assert python(code) == "[]\n"


def test_adapters_load_no_other_library_before_they_are_asked_to() -> None:
    code = """
import sys, hopwell.compat, hopwell.transformers
hopwell.compat.flash_attn_func, hopwell.transformers.register
print([name for name in ("transformers", "flash_attn", "cutlass") if name in sys.modules])
"""
    assert python(code) == "[]\n"


def test_a_source_tree_runs_without_being_installed() -> None:
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
import hopwell
print(hopwell.forward.__module__, hopwell.emulator.__name__)
"""
    assert python(code) == "hopwell.interface.functions hopwell.emulator\n"


def test_the_functions_load_neither_compiler_nor_emulator_nor_command_line() -> None:
    others = "('cutlass', 'tvm_ffi', 'hopwell.emulator', 'hopwell.benchmarks', 'rich', 'click')"
    code = f"""
import sys, hopwell
hopwell.forward, hopwell.emulate, hopwell.supported
print([name for name in {others} if name in sys.modules])
"""
    assert python(code) == "[]\n"


def test_hopwell_in_torch_loads_neither_dynamo_nor_compiler() -> None:
    """Operators and registry are there, and what takes seconds is not yet."""
    others = "('torch._dynamo', 'cutlass', 'tvm_ffi', 'hopwell.emulator')"
    code = f"""
import sys, hopwell.torch
hopwell.torch.register()
print([name for name in {others} if name in sys.modules], hopwell.torch.operators.forward.default)
"""
    assert python(code) == "[] hopwell.forward.default\n"


def test_a_kernel_from_disk_loads_no_more_than_it_needs() -> None:
    """The DSL's loader, but no kernel's source, no emulator and nothing that draws."""
    hopwell.compile("sm_90a", dtypes=[torch.float16], head_dims=[64], causal=[False])
    others = "('hopwell.kernels.fwd_sm90', 'hopwell.emulator', 'rich', 'click')"
    code = f"""
import sys, torch, hopwell
from hopwell.interface import compile, functions
from hopwell.kernels import ForwardFacts
compile.launcher(functions.forward_spec("sm_90a", ForwardFacts("float16", 64, 64, False)))
print([name for name in {others} if name in sys.modules], compile.counts.compiled)
"""
    assert python(code) == "[] 0\n"


def test_import_adds_little_to_torch_and_the_dsl() -> None:
    code = """
import time, torch, cutlass.cute
start = time.process_time()  # what other processes do meanwhile does not count
import hopwell
hopwell.forward, hopwell.emulate, hopwell.supported
print(time.process_time() - start)
"""
    assert float(python(code)) < 0.5


def test_every_public_name_is_there() -> None:
    for name in hopwell.__all__:
        assert getattr(hopwell, name) is not None
    assert dir(hopwell) == hopwell.__all__


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'hopwell' has no attribute 'atention'"):
        _ = hopwell.atention


def test_info_as_json() -> None:
    found = json.loads(command("info", "--json").output)
    assert found["hopwell"] == hopwell.__version__
    assert found["kernels"][0]["forward"] is found["kernels"][0]["backward"] is True
    assert found["kernels"][0]["head_dims"] == "a multiple of 8 from 8 to 256; v may have another"
    assert [variable["name"] for variable in found["environment"]] == [v.name for v in env.TABLE]


def test_info_lists_what_kernels_take_of_an_sm() -> None:
    found = json.loads(command("info", "--kernels", "--json", "--head-dims", "64").output)
    named = ("kernel", "head_dim", "head_dim_v", "causal", "short", "tile_q", "stages_q")
    assert [tuple(row[name] for name in named) for row in found] == [
        ("forward", 64, 64, False, False, 192, 2),
        ("forward", 64, 64, True, False, 192, 2),
        ("forward", 64, 64, True, True, 128, 2),
        ("backward", 64, 64, False, None, 96, 3),
        ("backward", 64, 64, True, None, 96, 3),
    ]
    for row in found:
        entry, load, consume = (row[f"registers_{role}"] for role in ("entry", "load", "consume"))
        assert load < entry < consume
        assert row["local_bytes"] == row["local_instructions"] == 0
        assert (row["stages_k"] is None) == (row["kernel"] == "backward")
    said = command("info", "--kernels", "--head-dims", "64").output.splitlines()
    assert said[0].split() == list(found[0])
    for line, row in zip(said[1:], found, strict=True):
        assert line.split() == [str(value) for value in row.values() if value is not None]
    ends = [[match.end() for match in re.finditer(r"\S+", line)] for line in said]
    assert ends[1] == ends[0] and set(ends[-1]) < set(ends[0])


@pytest.mark.parametrize("option", ["82", "264", "x", "64/", "64/64/64"])
def test_head_dims_that_are_none(option: str) -> None:
    for arguments in (("info", "--kernels"), ("compile",)):
        run = command(*arguments, "--head-dims", option)
        assert run.exit_code == 1
        assert re.match(r"Error: head_dims has .*; needs a multiple of 8 from 8 to 256", run.output)


def test_info_prints_every_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_PROGRESS", "0")
    said = command("info").output
    for variable in env.TABLE:
        assert variable.name in said and variable.meaning in said
    assert "value: 0" in said


def test_info_says_what_is_broken_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr("torch.cuda.device_count", broken)
    found = json.loads(command("info", "--json").output)
    assert found["gpus"] == "unknown: RuntimeError: no driver"
    assert found["kernels"]


def test_info_lists_problems_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(compiling, "DSL_NEEDED", (3, 1))
    found = json.loads(command("info", "--json").output)["problems"]
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    assert found == [
        f"found nvidia-cutlass-dsl {version}; needs 3.1; run `pip install "
        "'nvidia-cutlass-dsl>=3.1,<3.2'`",
        "torch sees no GPU; needs one and its driver (nvidia-smi lists both); or call inside "
        "hopwell.emulate",
        f"cannot write to {tmp_path / 'file'}; needs a folder for compiled kernels, which every "
        "process compiles anew otherwise; set HOPWELL_CACHE_DIR to one",
    ]
    assert [*checks.linking(None, None, "12.6")] == [
        "no ld here; needs one to load kernels in milliseconds, not seconds; install binutils, "
        "then run `python -m hopwell cache clear`",
        "no runtime of the DSL for CUDA up to 12.6; needs one to load kernels in milliseconds, not "
        "seconds; install hopwell, or hopwell[cu13] for CUDA 13",
    ]
    assert [*checks.no_gpu(None, 0)] == [
        "torch is built without CUDA; needs a build for CUDA to use a GPU; see pytorch.org, or "
        "call inside hopwell.emulate"
    ]


def test_cache_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    assert command("cache", "path").output == f"{tmp_path}\n"
    assert command("cache", "list").output == ""
    entry = compiling.save(standin.spec(), Store(tmp_path))
    said = command("cache", "list").output
    assert said.startswith(f"{entry.folder.name}  ")
    assert "dtype=float32" in said and "registers, 0 B local" in said
    assert command("cache", "clear").output == "removed 1 kernels\n"
    assert command("cache", "list").output == ""


def test_compile_for_an_sm_version_without_kernels() -> None:
    run = command("compile", "--arch", "sm_80")
    assert run.exit_code == 1
    assert run.output.startswith("Error: SM version is 'sm_80'; needs one that there are kernels")


def test_compile_takes_backward_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[compiling.Spec] = []
    entry = compiling.save(standin.spec(), Store(tmp_path))
    monkeypatch.setattr(compiling, "save", lambda spec, store: compiled.append(spec) or entry)
    for options, kernels in (((), {"forward"}), (("--backward",), {"forward", "backward"})):
        assert command("compile", "--arch", "sm_90a", "--head-dims", "80", *options).exit_code == 0
        assert {spec.kernel for spec in compiled} == kernels
        compiled.clear()


def test_compile_writes_what_load_takes(tmp_path: Path) -> None:
    entries = hopwell.compile(
        "sm_90a", out=tmp_path, dtypes=[torch.float16], head_dims=[64], causal=[True], backward=True
    )
    made = [entry.facts["facts"] for entry in entries]
    assert [(facts["negative_scale"], facts["short"]) for facts in made[:4]] == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert [entry.facts["kernel"] for entry in entries] == ["forward"] * 4 + ["backward"]
    assert len(entries[4].facts["resources"]) == 3  # what forward left, gradients, dq's dtype
    assert hopwell.load(tmp_path) == 5
    compiling.forget()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to time")
def test_bench_without_a_gpu_says_so() -> None:
    run = command("bench")
    assert run.exit_code == 1
    assert run.output.startswith("Error: this machine has no CUDA GPU")


def test_io_hands_its_arguments_on() -> None:
    run = command("io", "--help")
    assert run.exit_code == 0 and run.output.startswith("Usage: python -m hopwell io [OPTIONS]")
    run = command("io", "-n", "256", "-d", "64", "--no-emulate")
    assert run.exit_code == 0 and "256" in run.output


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_LOG", "loud")
    with pytest.raises(ValueError) as raised:
        env.configure_log()
    assert str(raised.value) == (
        "HOPWELL_LOG is 'loud'; needs one of debug, info, warning; pass one of those"
    )


def test_log_says_what_is_compiled() -> None:
    code = """
import os, tempfile
os.environ |= {"HOPWELL_LOG": "info", "HOPWELL_CACHE": "0"}
from hopwell.interface import compile
from tests.interface import standin
compile.launcher(standin.spec())
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "hopwell: compiled scaled for sm_90a (dtype float32) in " in run.stderr


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), (None, False)])
def test_progress(value: str | None, shown: bool, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """Drawn when asked for, and otherwise only on a terminal, which a test has none of."""
    if value is None:
        monkeypatch.delenv("HOPWELL_PROGRESS", raising=False)
    else:
        monkeypatch.setenv("HOPWELL_PROGRESS", value)
    with compiling._shown("compiling something"):
        pass
    assert ("compiling something" in capfd.readouterr().err) is shown
