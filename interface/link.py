"""Kernels as shared libraries: they load in milliseconds, without the DSL's Python packages.

An object that `export_to_c` wrote needs the DSL to load it. Linked, it needs the DSL's runtime
library alone (one file, found without an import) and TVM-FFI.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from . import env

LINKER = "ld"


def linked(obj: bytes) -> bytes | None:
    """The shared library of an object file; None, said in the log, where there is no linker."""
    linker = shutil.which(LINKER)
    if linker is None:
        env.log.info("no %s here: kernels are kept as objects, which only the DSL loads", LINKER)
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        source.write_bytes(obj)
        run = subprocess.run(
            [linker, "-shared", "-o", str(target), str(source)], capture_output=True, text=True
        )
        if run.returncode:
            env.log.warning("a kernel is kept as an object, since %s says: %s", LINKER, run.stderr)
            return None
        return target.read_bytes()


def load(library: Path, symbol: str) -> Callable[..., None] | None:
    """The function of that name in a shared library.

    None where the DSL's runtime is not found, or, with a warning, where the system does not take
    the library: its folder is mounted noexec, or it was linked for a newer libc.
    """
    try:
        ffi = runtime()
        return None if ffi is None else ffi.load_module(str(library))[symbol]
    except (OSError, RuntimeError) as problem:
        env.log.warning("the DSL loads %s, since it does not load linked: %s", library, problem)
        return None


@cache
def runtime() -> ModuleType | None:
    """TVM-FFI, with the DSL's runtime library open for all libraries to come.

    There is one for each CUDA version that the DSL is installed for; torch's runs on this driver,
    and so do those up to it. The first call takes some 50 ms.
    """
    root = Path(str(importlib.metadata.distribution("nvidia-cutlass-dsl").locate_file("")))
    newest = int((torch.version.cuda or "0").split(".")[0])
    for version in range(newest, 0, -1):
        library = root / "nvidia_cutlass_dsl" / f"cu{version}" / "lib" / "libcute_dsl_runtime.so"
        if library.exists():
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            return importlib.import_module("tvm_ffi")
    return None
