"""From compile-time facts to a function that launches the kernel: memory, disk, or the compiler.

`cute.compile` runs on fake tensors with symbolic shapes, so one object serves every length, and
with the TVM-FFI convention, so a call takes torch tensors and their stream as they are. Every
object is compiled with line info: it changes no instruction, and one object then serves the GPU,
where a profiler shows Python lines, and the emulator, whose findings name them.

One path for all: whatever was compiled is exported, written to the store and loaded from there, so
the first process runs what the second one will. Loading needs neither linker nor compiler, and
where there was a linker to compile with not even an import of the DSL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from . import checks, env, link, packages
from .arch import hosts
from .cache import Entry, Store
from .cubin import usage

DSL = "nvidia-cutlass-dsl"
DSL_NEEDED = (4, 8)  # the exported objects' runtime interface may change with the minor version

_SYMBOL = "hopwell"  # the function's name inside every object
_SOURCES = ("kernels", "pipelines", "layouts")
# The DSL's own variables that change what it emits.
_DSL_VARIABLES = tuple(
    f"CUTE_DSL_{name}"
    for name in ("COMPILER_BACKEND", "COMPILER_OPT", "DEBUG", "ENABLE_ASSERTIONS", "ENABLE_PYIR")
)


@dataclass(frozen=True)
class Spec:
    """A kernel by every compile-time fact it has.

    `recipe` is called only to compile it, and returns what `cute.compile` needs: the function, its
    fake arguments, and options that name the SM version and the TVM-FFI convention.
    """

    kernel: str
    arch: str
    facts: tuple[tuple[str, str | int | bool], ...]
    recipe: Callable[[], tuple[Callable[..., None], tuple[Any, ...], str]] = field(
        compare=False, repr=False
    )

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts)
        return f"{self.kernel} for {self.arch} ({facts})"


@dataclass(frozen=True)
class Launcher:
    """A loaded kernel."""

    call: Callable[..., None]  # tensors and scalars by position; on the tensors' current stream
    facts: dict[str, Any]  # as in facts.json: kernel, arch, facts, resources, ...


@dataclass
class Counts:
    """What this process did to get its launchers."""

    compiled: int = 0
    loaded: int = 0  # from disk, compiled by this process or an earlier one


counts = Counts()
_launchers: dict[tuple[Spec, bool], Launcher] = {}
_exports: list[Store] = []
_lock = threading.Lock()  # the DSL keeps its compiler state in a singleton


def launcher(spec: Spec, *, emulated: bool = False) -> Launcher:
    """The kernel, ready to call: from memory, else from disk, else compiled.

    Args:
        spec: which kernel.
        emulated: load it into the emulator, to be called on CPU tensors within `emulate`, in place
            of the CUDA runtime; the object is the same.

    Raises:
        RuntimeError: it is not in memory, and the current stream captures a CUDA graph.
    """
    found = _launchers.get((spec, emulated))
    if found is None:
        if not emulated:
            checks.no_capture(spec, ", backward=True" if spec.kernel == "backward" else "")
        with _lock:
            found = _launchers.get((spec, emulated))
            if found is None:
                found = _launchers[spec, emulated] = _obtain(spec, emulated)
    return found


def ready(spec: Spec) -> bool:
    """Whether `launcher(spec)` would do without the compiler."""
    return (spec, False) in _launchers or _on_disk(spec) is not None


def save(spec: Spec, store: Store) -> Entry:
    """Compile a kernel into a store unless it is there; nothing is loaded."""
    name = entry_name(spec, hosts()[0])
    with store.locked(name):
        return store.read(name) or store.write(name, *_compile(spec))


def load(folder: str | os.PathLike[str]) -> int:
    """Use the kernels that `python -m hopwell compile --out FOLDER` wrote.

    Kernels found there are taken before the cache and the compiler; what the folder lacks is
    compiled as usual.

    Returns:
        How many kernels the folder holds for this host and this version of Hopwell.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder holds no kernel that this version of Hopwell can use.
    """
    store = Store(Path(folder))
    checks.export_folder(store.root)
    there = store.entries()
    usable = [
        entry
        for entry in there
        if entry.facts["build"] == _build_facts() and entry.facts["host"] in hosts()
    ]
    checks.export_usable(store.root, len(usable), [entry.facts for entry in there])
    _exports.append(store)
    if any(entry.library for entry in usable):
        link.runtime()  # now, not in the first call
    return len(usable)


def forget() -> None:
    """Drop the launchers held in memory and the folders given to `load`."""
    with _lock:
        _launchers.clear()
        _exports.clear()


def entry_name(spec: Spec, host: str) -> str:
    """Folder name in a store: readable in front, derived from everything that matters behind."""
    everything = json.dumps(
        {**_identity(spec), "host": host, "build": _build_facts()}, sort_keys=True
    )
    return f"{spec.kernel}-{spec.arch}-{hashlib.sha256(everything.encode()).hexdigest()[:32]}"


def dsl_version() -> str:
    """Version of the installed CuTe DSL.

    Raises:
        RuntimeError: it is absent, or not one the kernels were tested with.
    """
    return checks.dsl_version(DSL, packages.version(DSL), DSL_NEEDED)


def _identity(spec: Spec) -> dict[str, Any]:
    return {"kernel": spec.kernel, "arch": spec.arch, "facts": dict(spec.facts)}


@cache
def _source_fingerprint() -> str:
    """Digest of the sources a kernel is traced from, and of those that compile and link it."""
    package = Path(__file__).parent.parent
    files = [Path(__file__), Path(link.__file__)]
    files += [file for part in _SOURCES for file in (package / part).rglob("*.py")]
    digest = hashlib.sha256()
    for name, file in sorted((f.relative_to(package).as_posix(), f) for f in files):
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _build_facts() -> dict[str, Any]:
    return {
        "dsl": dsl_version(),
        "source": _source_fingerprint(),
        "environment": {name: os.environ[name] for name in _DSL_VARIABLES if name in os.environ},
    }


def _on_disk(spec: Spec) -> Entry | None:
    cached = [Store(env.cache_dir())] if env.cache_enabled() else []
    for store in (*_exports, *cached):
        for host in hosts():
            if entry := store.read(entry_name(spec, host)):
                return entry
    return None


def _obtain(spec: Spec, emulated: bool) -> Launcher:
    env.configure_log()
    if entry := _on_disk(spec):
        return _load(entry, emulated)
    name = entry_name(spec, hosts()[0])
    built = None
    if env.cache_enabled():
        store = Store(env.cache_dir())
        try:
            with store.locked(name):
                entry = store.read(name)  # another process may have been first
                if entry is None:
                    built = _compile(spec)
                    entry = store.write(name, *built)
            return _load(entry, emulated)
        except OSError as problem:
            env.log.warning("cannot keep compiled kernels in %s: %s", store.root, problem)
    with tempfile.TemporaryDirectory() as folder:
        return _load(Store(Path(folder)).write(name, *(built or _compile(spec))), emulated)


def _load(entry: Entry, emulated: bool) -> Launcher:
    dsl_version()
    start = time.perf_counter()
    if emulated:
        from ..emulator import loader

        call = loader.load(entry.object, _SYMBOL)
    elif entry.library is None or (call := link.load(entry.library, _SYMBOL)) is None:
        from cutlass.cute.runtime import load_module

        call = load_module(str(entry.object), enable_tvm_ffi=True)[_SYMBOL]
    counts.loaded += 1
    env.log.info("loaded %s in %.0f ms", entry.folder.name, 1e3 * (time.perf_counter() - start))
    return Launcher(call, entry.facts)


def _compile(spec: Spec) -> tuple[bytes, bytes | None, str, dict[str, Any]]:
    """Run the compiler; returns what `Store.write` keeps."""
    dsl_version()
    import cutlass.cute as cute

    start = time.perf_counter()
    counts.compiled += 1
    function, args, options = spec.recipe()
    with tempfile.TemporaryDirectory() as folder, _shown(f"compiling {spec}"):
        # A folder of its own: kernel names, and so the compiler's file names, are not unique.
        options += f" --generate-line-info --keep-ptx --keep-cubin --dump-dir {folder}"
        compiled: Any = cute.compile(function, *args, options=options)
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=_SYMBOL)
        obj, ptx, cubin = path.read_bytes(), compiled.artifacts.PTX, compiled.artifacts.CUBIN
    seconds = time.perf_counter() - start
    env.log.info("compiled %s in %.1f s", spec, seconds)
    facts = {
        **_identity(spec),
        "host": hosts()[0],
        "build": _build_facts(),
        "resources": {name: asdict(used) for name, used in usage(cubin).items()},
        "compile_seconds": round(seconds, 2),
    }
    return obj, link.linked(obj), ptx, facts


@contextlib.contextmanager
def _shown(what: str) -> Iterator[None]:
    """Say on stderr what the block does, if someone is looking: a spinner, in a log a line."""
    if not env.progress():
        yield
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(what, markup=False)
    with console.status(what):
        yield
