"""Compiled kernels on disk: one folder an entry, written whole or not at all, verified when read.

    <root>/<kernel>-<arch>-<key>/kernel.o      host code with the cubin inside, TVM-FFI convention
                                 kernel.ptx    the text that cubin was assembled from (emulator)
                                 facts.json    what it was compiled for, and the digests of the two

A cache and an exported folder are the same thing, so an export needs no format of its own.
Nothing here knows what a kernel is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from .env import log

_OBJECT, _PTX, _FACTS = "kernel.o", "kernel.ptx", "facts.json"
_NAME = re.compile(r"[a-z0-9_]+-sm_[0-9]+[af]?-[0-9a-f]{32}")  # clear() touches nothing else


@dataclass(frozen=True)
class Entry:
    """One compiled kernel, verified."""

    folder: Path
    ptx: str
    facts: dict[str, Any]

    @property
    def object(self) -> Path:
        """Path of the object file."""
        return self.folder / _OBJECT

    @property
    def bytes(self) -> int:
        """Size on disk, bytes."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


@dataclass(frozen=True)
class Store:
    """A folder of entries."""

    root: Path

    def read(self, name: str) -> Entry | None:
        """The entry of that name, or None if there is none or it does not match its digests."""
        folder = self.root / name
        try:
            facts = json.loads((folder / _FACTS).read_bytes())
            digests = {file: _digest((folder / file).read_bytes()) for file in (_OBJECT, _PTX)}
            if facts.pop("sha256") != digests:
                raise ValueError("contents differ from their digests")
            return Entry(folder, (folder / _PTX).read_text(), facts)
        except FileNotFoundError:
            if not folder.exists():
                return None
            log.warning("cache entry %s is incomplete: compiling it again", folder)
        except (ValueError, KeyError, AttributeError) as problem:
            log.warning("cache entry %s is damaged (%s): compiling it again", folder, problem)
        return None

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the entry's lock across processes, so that a key is compiled once.

        Raises:
            OSError: the folder cannot be made or written.
        """
        locks = self.root / "locks"
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        locks.mkdir(mode=0o700, exist_ok=True)
        with FileLock(locks / f"{name}.lock"):
            yield

    def write(self, name: str, obj: bytes, ptx: str, facts: Mapping[str, Any]) -> Entry:
        """Put an entry in place of whatever stands under its name; call it with the lock held.

        Args:
            name: the entry's folder.
            obj: object file, as `export_to_c` writes it.
            ptx: its PTX.
            facts: what it was compiled for; anything JSON can hold.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = self.root / name
        for left_by_a_crash in self.root.glob(f".{name}-*"):
            shutil.rmtree(left_by_a_crash, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self.root))  # 0700, same file system
        try:
            (fresh / _OBJECT).write_bytes(obj)
            (fresh / _PTX).write_text(ptx)
            digests = {_OBJECT: _digest(obj), _PTX: _digest(ptx.encode())}
            text = json.dumps({**facts, "sha256": digests}, indent=1, sort_keys=True)
            (fresh / _FACTS).write_text(text + "\n")
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(fresh, folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        return Entry(folder, ptx, dict(facts))

    def entries(self) -> list[Entry]:
        """Every sound entry, by name."""
        return [entry for name in self._names() if (entry := self.read(name))]

    def clear(self) -> int:
        """Remove every entry, sound or not, and nothing else; returns how many there were."""
        names = self._names()
        for name in names:
            with self.locked(name):
                shutil.rmtree(self.root / name, ignore_errors=True)
        return len(names)

    def _names(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
