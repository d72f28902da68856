"""Which version of a package is installed; imports nothing, for `info` on a broken machine."""

from __future__ import annotations

import importlib.metadata


def version(package: str) -> str | None:
    """Of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
