"""What `python -m hopwell info` says: versions, GPUs, kernels, cache, environment, problems.

`collect` never raises; `resources`, for `info --kernels`, compiles and may.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Any

import hopwell

from .arch import hosts
from .packages import version

if TYPE_CHECKING:
    from ..kernels.tiles import BackwardTiles, Tiles
    from .compile import Spec

PACKAGES = (
    "torch",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",  # the DSL's variants: of CUDA 12 and of CUDA 13
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
    "cuda-bindings",
    "numpy",
)
MAIN_BACKWARD = "BwdSm90"  # in the name of the one that computes, of the three of backward


def collect() -> dict[str, Any]:
    """Everything worth a line in a bug report; only what JSON can hold.

    A part that cannot be found out is the text of the error in its place: this is what people run
    when their installation is broken.
    """
    parts = {
        "hopwell": lambda: hopwell.__version__,
        "python": platform.python_version,
        "host": _host,
        "packages": lambda: {name: version(name) or "not installed" for name in PACKAGES},
        "cuda": _cuda,
        "gpus": _gpus,
        "kernels": _kernels,
        "cache": _cache,
        "environment": _environment,
        "problems": _problems,
    }
    return {name: _guarded(part) for name, part in parts.items()}


def _guarded(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as problem:  # a broken driver or package raises what it likes
        return f"unknown: {type(problem).__name__}: {problem}"


def _problems() -> list[str]:
    """What is wrong here, and what to do; empty if all is well."""
    searches: tuple[Callable[[], Iterator[str]], ...] = (_of_dsl, _of_gpus, _of_cache, _of_linking)
    found = (_guarded(lambda search=search: [*search()]) for search in searches)
    return [text for texts in found for text in ([texts] if isinstance(texts, str) else texts)]


def _host() -> dict[str, str]:
    return {"system": platform.platform(), "objects": hosts()[0]}


def _cuda() -> dict[str, str | None]:
    """CUDA versions: the one that torch was built for, and the newest that the driver knows."""
    import torch

    known = ctypes.c_int(0)
    with contextlib.suppress(OSError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(known))
    driver = f"{known.value // 1000}.{known.value % 1000 // 10}" if known.value else None
    return {"torch": torch.version.cuda, "driver": driver}


def _of_dsl() -> Iterator[str]:
    """Problems of the compiler, with what to do."""
    from . import compile as compiling

    try:
        compiling.dsl_version()
    except RuntimeError as problem:
        yield str(problem)


def _of_gpus() -> Iterator[str]:
    import torch

    from . import checks

    yield from checks.no_gpu(torch.version.cuda, torch.cuda.device_count())
    for index in range(torch.cuda.device_count()):
        for problem in checks.gpu(torch.device("cuda", index), None):
            yield problem.text


def _of_cache() -> Iterator[str]:
    from . import checks, env

    if env.cache_enabled():
        yield from checks.cache_folder(env.cache_dir())


def _of_linking() -> Iterator[str]:
    import torch

    from . import checks, link

    if torch.cuda.is_available():
        yield from checks.linking(shutil.which(link.LINKER), link.runtime(), torch.version.cuda)


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
            "backward": True,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in checks.DTYPES],
            "head_dims": f"{checks.HEAD_DIM_NEEDED}; v may have another",
        }
        for arch in checks.arches()
    ]


def resources(arch: str, head_dims: Sequence[Any]) -> list[dict[str, Any]]:
    """What the bf16 kernels take of an SM; compiles those that the cache lacks.

    Of the three kernels of a backward function the row is the main one's: its dO has the stages of
    Q, K and V have none, and the warpgroup that loads computes dQ too. What a kernel does not have
    is None.

    Args:
        arch: SM version.
        head_dims: as for `compile`; if empty, the largest that each row of the tile tables serves.
    """
    return [*_forward_resources(arch, head_dims), *_backward_resources(arch, head_dims)]


def _forward_resources(arch: str, head_dims: Sequence[Any]) -> Iterator[dict[str, Any]]:
    from ..kernels import ForwardFacts
    from ..kernels.tiles import FORWARD, forward_tiles
    from . import checks
    from .functions import forward_spec

    rows = [(row.head_dim, row.head_dim_v) for row in FORWARD if row.arch == arch]
    dims_there = dict.fromkeys(checks.head_dims(head_dims or rows))
    for dims, (causal, short) in product(dims_there, ((False, False), (True, False), (True, True))):
        tiles = forward_tiles(arch, *dims, short=short)
        if tiles.short != short:
            continue
        spec = forward_spec(arch, ForwardFacts("bfloat16", *dims, causal, short=short))
        stages = (tiles.stages_q, tiles.stages_k, tiles.stages_v)
        yield _resources(spec, tiles, short, stages, "")


def _backward_resources(arch: str, head_dims: Sequence[Any]) -> Iterator[dict[str, Any]]:
    from ..kernels import BackwardFacts
    from ..kernels.tiles import BACKWARD, backward_tiles
    from . import checks
    from .functions import backward_spec

    rows = [(row.head_dim, row.head_dim_v) for row in BACKWARD if row.arch == arch]
    for dims, causal in product(dict.fromkeys(checks.head_dims(head_dims or rows)), (False, True)):
        tiles = backward_tiles(arch, *dims)
        spec = backward_spec(arch, BackwardFacts("bfloat16", *dims, causal))
        yield _resources(spec, tiles, None, (tiles.stages, None, None), MAIN_BACKWARD)


def _resources(
    spec: Spec,
    tiles: Tiles | BackwardTiles,
    short: bool | None,
    stages: tuple[int | None, ...],
    kernel: str,
) -> dict[str, Any]:
    """One row: of the only kernel whose name has `kernel` in it."""
    from . import compile as compiling
    from . import env
    from .cache import Store

    found = compiling.save(spec, Store(env.cache_dir())).facts["resources"]
    (used,) = (usage for name, usage in found.items() if kernel in name)
    stages_q, stages_k, stages_v = stages
    return {
        "kernel": spec.kernel,
        "head_dim": tiles.head_dim,
        "head_dim_v": tiles.head_dim_v,
        "causal": dict(spec.facts)["causal"],
        "short": short,
        "tile_q": tiles.tile_q,
        "tile_kv": tiles.tile_kv,
        "stages_q": stages_q,
        "stages_k": stages_k,
        "stages_v": stages_v,
        "smem_bytes": tiles.smem_bytes,
        "threads": tiles.threads,
        "registers_entry": used["registers"],
        "registers_load": tiles.registers_load,
        "registers_consume": tiles.registers_consume,
        "local_bytes": used["local_bytes"],
        "local_instructions": used["local_instructions"],
    }


def _cache() -> dict[str, Any]:
    from .functions import cache_info

    return {**asdict(info := cache_info()), "folder": str(info.folder)}


def _environment() -> list[dict[str, str | None]]:
    from . import env

    return [{**asdict(variable), "value": variable.value} for variable in env.TABLE]
