"""Hopwell: exact attention for NVIDIA Hopper and Blackwell, and an emulator to run it without one.

Every name here is imported when it is first used (PEP 562): `import hopwell` itself loads neither
torch nor the compiler.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import emulator
    from .interface.autograd import attention, backward
    from .interface.emulate import emulate
    from .interface.functions import (
        cache_info,
        clear_cache,
        compile,
        export,
        forward,
        load,
        supported,
        warmup,
    )

__version__ = "0.1.0"

if not (Path(__file__).parent / "interface").is_dir():
    # A source tree, where the other folders stand beside this one: it runs without being installed.
    __path__.append(str(Path(__file__).parent.parent))

__all__ = [
    "__version__",
    "attention",
    "backward",
    "cache_info",
    "clear_cache",
    "compile",
    "emulate",
    "emulator",
    "export",
    "forward",
    "load",
    "supported",
    "warmup",
]

_MODULES = {"attention": "autograd", "backward": "autograd", "emulate": "emulate"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "emulator":
        value = importlib.import_module(".emulator", __name__)
    else:
        module = _MODULES.get(name, "functions")
        value = getattr(importlib.import_module(f".interface.{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
