"""Compiled kernels on disk: found by a second process, compiled once by four, never damaged."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hopwell.interface import compile as compiling
from hopwell.interface import functions, link
from hopwell.interface.cache import Store
from hopwell.interface.cubin import usage
from hopwell.kernels import ForwardFacts

from . import standin

ROOT = Path(__file__).parents[2]


SHARED = os.environ["HOPWELL_CACHE_DIR"]  # of this test run: a real kernel takes seconds to compile
FACTS = ForwardFacts("float16", 64, 64, causal=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A cache of the test's own, and a process that has loaded nothing."""
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "cache"))
    compiling.forget()
    return Store(tmp_path / "cache")


def start(code: str) -> "subprocess.Popen[str]":
    """A fresh Python that runs `code` from the repository's root."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> dict[str, float]:
    """What it printed, as JSON."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


def only(store: Store) -> Path:
    """The folder of the one entry there is."""
    (entry,) = store.entries()
    return entry.folder


def compiled(run) -> int:
    """How often `run` had the compiler run."""
    before = compiling.counts.compiled
    run()
    return compiling.counts.compiled - before


def test_a_second_process_compiles_nothing_and_loads_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOPWELL_CACHE_DIR", SHARED)
    compiling.launcher(functions.forward_spec("sm_90a", FACTS))
    seen = finish(
        start("""
            import json, time
            import cutlass.cute, torch
            from hopwell.interface import compile, functions
            from hopwell.kernels import ForwardFacts

            def refuse(*args, **options):
                raise AssertionError("the compiler was called")

            cutlass.cute.compile = refuse
            facts = ForwardFacts("float16", 64, 64, causal=True)
            start = time.process_time()  # what other processes do meanwhile does not count
            compile.launcher(functions.forward_spec("sm_90a", facts))
            seconds = time.process_time() - start
            print(json.dumps({"seconds": seconds, "compiled": compile.counts.compiled}))
        """)
    )
    assert seen["compiled"] == 0
    assert seen["seconds"] < 0.3


def test_four_processes_started_together_compile_once(cache: Store) -> None:
    code = """
        import json
        from hopwell.interface import compile
        from tests.interface import standin
        compile.launcher(standin.spec(seconds=3))
        print(json.dumps({"compiled": compile.counts.compiled, "loaded": compile.counts.loaded}))
    """
    seen = [finish(process) for process in [start(code) for _ in range(4)]]
    assert [process["loaded"] for process in seen] == [1, 1, 1, 1]
    assert sum(process["compiled"] for process in seen) == 1
    assert len(cache.entries()) == 1


def test_memory_then_disk_then_compiler() -> None:
    spec = standin.spec()
    assert compiled(lambda: compiling.launcher(spec)) == 1
    assert compiled(lambda: compiling.launcher(spec)) == 0
    compiling.forget()
    assert compiling.ready(spec)
    assert compiled(lambda: compiling.launcher(spec)) == 0
    assert not compiling.ready(standin.spec("float16"))
    assert compiled(lambda: compiling.launcher(standin.spec("float16"))) == 1


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, lambda f: f.write_bytes(b"")])
@pytest.mark.parametrize(
    "file", ["kernel.o", "kernel.so", "kernel.ptx", "facts.json", "SHA256SUMS"]
)
def test_a_damaged_entry_is_rebuilt(file: str, damage, cache: Store, caplog) -> None:
    compiling.launcher(standin.spec())
    folder = only(cache)
    sound = (folder / "kernel.ptx").read_bytes()
    damage(folder / file)
    compiling.forget()
    assert compiled(lambda: compiling.launcher(standin.spec())) == 1
    assert "compiling it again" in caplog.text
    assert only(cache) == folder
    assert (folder / "kernel.ptx").read_bytes() == sound
    compiling.forget()
    assert compiled(lambda: compiling.launcher(standin.spec())) == 0


def test_without_a_linker_the_dsl_loads_the_object(
    cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LINKER", "no-such-linker")
    assert callable(compiling.launcher(standin.spec()).call)
    (entry,) = cache.entries()
    assert entry.library is None and not (entry.folder / "kernel.so").exists()


def test_what_the_linker_refuses_is_kept_as_an_object(caplog) -> None:
    assert link.linked(b"no object") is None
    assert "a kernel is kept as an object, since ld says" in caplog.text


def test_a_linked_kernel_loads_where_the_dsl_cannot_be_imported(cache: Store) -> None:
    """The function is there; launching it takes a GPU (test_gpu)."""
    entry = compiling.save(standin.spec(), cache)
    code = f"""
        import json, sys, time

        sys.modules |= dict.fromkeys(("cutlass", "nvidia_cutlass_dsl"))  # no import finds them
        import torch
        from pathlib import Path
        import hopwell
        from hopwell.interface import link

        torch.version.cuda = "99.0"  # a build for CUDA, new enough for any runtime of the DSL
        found = callable(link.load(Path({str(entry.library)!r}), "hopwell"))
        try:
            link.load(Path({str(entry.library)!r}), "another")
        except AttributeError:
            missing = True
        # Nothing that a system loads: the DSL will, from the object.
        damaged = link.load(Path({str(entry.object)!r}), "hopwell") is None
        print(json.dumps({{"found": found, "missing": missing, "damaged": damaged}}))
    """
    assert finish(start(code)) == {"found": True, "missing": True, "damaged": True}


def test_folders_are_the_users_alone(cache: Store) -> None:
    compiling.launcher(standin.spec())
    for folder in (cache.root, only(cache)):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_what_a_crash_left_is_removed_by_the_next_writer(cache: Store) -> None:
    compiling.launcher(standin.spec())
    folder = only(cache)
    left = cache.root / f".{folder.name}-abc"
    left.mkdir()
    truncate(folder / "kernel.o")
    compiling.forget()
    compiling.launcher(standin.spec())
    assert not left.exists()


def test_switched_off(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_CACHE", "0")
    assert compiled(lambda: compiling.launcher(standin.spec())) == 1
    assert not cache.root.exists()
    compiling.forget()
    assert compiled(lambda: compiling.launcher(standin.spec())) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch, caplog) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compiled(lambda: compiling.launcher(standin.spec())) == 1
    assert "cannot keep compiled kernels" in caplog.text


def test_every_fact_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> str:
        return compiling.entry_name(standin.spec(), "x86-64")

    names = {
        name(),
        compiling.entry_name(standin.spec("float16"), "x86-64"),
        compiling.entry_name(standin.spec(), "x86-64-v4"),
        compiling.entry_name(
            functions.forward_spec("sm_90a", ForwardFacts("float16", 64, 64, False)), "x86-64"
        ),
    }
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
        names.add(name())
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "dsl_version", lambda: "4.8.2")
        names.add(name())
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_source_fingerprint", lambda: "another")
        names.add(name())
    assert len(names) == 7
    assert name() == name()


def test_an_export_is_used_without_the_compiler(tmp_path: Path, cache: Store) -> None:
    compiling.save(standin.spec(), Store(tmp_path / "export"))
    assert compiling.load(tmp_path / "export") == 1
    assert compiled(lambda: compiling.launcher(standin.spec())) == 0
    assert not cache.root.exists()


def test_an_export_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        compiling.load(tmp_path / "nowhere")
    assert str(missing.value) == (
        f"{tmp_path}/nowhere is no folder; needs one of compiled kernels; write it with "
        f"`python -m hopwell compile --arch sm_90a --out {tmp_path}/nowhere`"
    )
    compiling.save(standin.spec(), Store(tmp_path / "old"))
    installed = compiling.dsl_version()
    monkeypatch.setattr(compiling, "dsl_version", lambda: "4.8.99")
    with pytest.raises(ValueError) as unusable:
        compiling.load(tmp_path / "old")
    assert str(unusable.value).startswith(f"{tmp_path}/old holds 1 kernels (DSL {installed}, ")


def test_clear_removes_entries_and_nothing_else(cache: Store) -> None:
    compiling.launcher(standin.spec())
    compiling.launcher(standin.spec("float16"))
    truncate(cache.entries()[0].folder / "kernel.o")
    (cache.root / "mine").mkdir()
    (cache.root / "mine" / "facts.json").touch()
    assert functions.clear_cache() == 2
    assert sorted(os.listdir(cache.root)) == ["locks", "mine"]
    assert compiled(lambda: compiling.launcher(standin.spec())) == 1


def test_an_entry_tells_registers_and_local_memory() -> None:
    spec = functions.forward_spec("sm_90a", FACTS)
    (used,) = compiling.save(spec, Store(Path(SHARED))).facts["resources"].values()
    # 512 threads share 64 Ki registers.
    assert used.pop("product_waits") > 0
    assert used == {"registers": 128, "local_bytes": 0, "local_instructions": 0}


def test_usage_says_what_ptxas_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For a kernel with an array that registers cannot hold, since it is indexed at run time."""
    import cutlass.cute as cute

    from .standin_kernel import launch_with_a_stack

    _, args, options = standin.spec().recipe()
    options += f" --keep-cubin --dump-dir {tmp_path} --remark-filter=ptxas --ptxas-options=-v"
    found = cute.compile(launch_with_a_stack, *args, options=options)
    (used,) = usage(found.artifacts.CUBIN).values()
    said = capfd.readouterr().err
    assert used.local_bytes > 0 and used.local_instructions > 0
    assert f"{used.local_bytes} bytes stack frame" in said
    assert f"Used {used.registers} registers" in said


def test_usage_of_something_else() -> None:
    with pytest.raises(ValueError, match="needs a 64-bit ELF image"):
        usage(b"not a cubin")


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_to_hand_on_can_be_read_by_others(tmp_path: Path, mode: int) -> None:
    store = Store(tmp_path / "there", mode)
    with store.locked("name"):
        entry = store.write("name", b"object", None, "ptx", {})
    for folder in (store.root, entry.folder):
        assert folder.stat().st_mode & 0o777 == mode
