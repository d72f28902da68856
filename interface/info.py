"""What `python -m hopwell info` says: versions, GPUs, kernels, cache, environment. Never raises."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import hopwell

from .arch import hosts

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "numpy")


def collect() -> dict[str, Any]:
    """Everything worth a line in a bug report; only what JSON can hold.

    A part that cannot be found out is the text of the error in its place: this is what people run
    when their installation is broken.
    """
    parts = {
        "hopwell": lambda: hopwell.__version__,
        "python": platform.python_version,
        "host": _host,
        "packages": lambda: {name: _version(name) for name in PACKAGES},
        "gpus": _gpus,
        "kernels": _kernels,
        "cache": _cache,
        "environment": _environment,
    }
    return {name: _guarded(part) for name, part in parts.items()}


def _guarded(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as problem:  # a broken driver or package raises what it likes
        return f"unknown: {type(problem).__name__}: {problem}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _host() -> dict[str, str]:
    return {"system": platform.platform(), "objects": hosts()[0]}


def _gpus() -> list[dict[str, Any]]:
    import torch

    from . import checks

    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        problems = [problem.text for problem in checks.gpu(device, None)]
        found.append(
            {
                "name": torch.cuda.get_device_name(device),
                "arch": checks.arch_of(device) or "none of ours",
                "supported": not problems,
            }
        )
    return found


def _kernels() -> list[dict[str, Any]]:
    from . import checks

    return [
        {
            "arch": arch,
            "forward": True,
            "backward": False,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in checks.DTYPES],
            "head_dims": [head_dim for head_dim, _ in checks.head_dims(arch)],
        }
        for arch in checks.arches()
    ]


def _cache() -> dict[str, Any]:
    from .functions import cache_info

    return {**asdict(info := cache_info()), "folder": str(info.folder)}


def _environment() -> list[dict[str, str | None]]:
    from . import env

    return [{**asdict(variable), "value": variable.value} for variable in env.TABLE]
