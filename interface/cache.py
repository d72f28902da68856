"""Compiled kernels on disk: one folder an entry, written whole or not at all, verified when read.

    <root>/<kernel>-<arch>-<key>/kernel.o      host code with the cubin inside, TVM-FFI convention
                                 kernel.so     the same, linked: loads without the DSL's Python;
                                               where there was a linker
                                 kernel.ptx    the text that cubin was assembled from (emulator)
                                 facts.json    what it was compiled for and what it takes of an SM
                                 SHA256SUMS    digests of the others, as sha256sum prints them

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

from . import env

_OBJECT, _LIBRARY, _PTX, _FACTS = "kernel.o", "kernel.so", "kernel.ptx", "facts.json"
_SUMS = "SHA256SUMS"
_NAME = re.compile(r"[a-z0-9_]+-sm_[0-9]+[af]?-[0-9a-f]{32}")  # clear() touches nothing else


@dataclass(frozen=True)
class Entry:
    """One compiled kernel, verified."""

    folder: Path
    facts: dict[str, Any]

    @property
    def object(self) -> Path:
        """Path of the object file."""
        return self.folder / _OBJECT

    @property
    def library(self) -> Path | None:
        """Path of the shared library, if there is one."""
        path = self.folder / _LIBRARY
        return path if path.exists() else None

    @property
    def bytes(self) -> int:
        """Size on disk, bytes."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


@dataclass(frozen=True)
class Store:
    """A folder of entries, which others may read only if `mode` says so: what is loaded is run."""

    root: Path
    mode: int = 0o700

    def read(self, name: str) -> Entry | None:
        """The entry of that name, or None if there is none or it does not match its digests."""
        folder = self.root / name
        if not folder.is_dir():
            return None
        try:
            linked = (_LIBRARY,) if (folder / _LIBRARY).exists() else ()
            names = (_OBJECT, *linked, _PTX, _FACTS)
            files = {file: (folder / file).read_bytes() for file in names}
            if (folder / _SUMS).read_text() == _sums(files):
                return Entry(folder, json.loads(files[_FACTS]))
            problem: object = "it does not match its digests"
        except OSError as error:
            problem = error
        env.log.warning("compiling it again, since %s is damaged: %s", folder, problem)
        return None

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the entry's lock across processes, so that a key is compiled once.

        Raises:
            OSError: the folder cannot be made or written.
        """
        locks = self.root / "locks"
        self.root.mkdir(mode=self.mode, parents=True, exist_ok=True)
        locks.mkdir(mode=0o700, exist_ok=True)
        with FileLock(locks / f"{name}.lock"):
            yield

    def write(
        self, name: str, obj: bytes, library: bytes | None, ptx: str, facts: Mapping[str, Any]
    ) -> Entry:
        """Put an entry in place of whatever stands under its name; call it with the lock held.

        Args:
            name: the entry's folder.
            obj: object file, as `export_to_c` writes it.
            library: the same, linked; None where there is no linker.
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
            text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
            linked = {} if library is None else {_LIBRARY: library}
            files = {_OBJECT: obj, **linked, _PTX: ptx.encode(), _FACTS: text.encode()}
            for file, data in files.items():
                (fresh / file).write_bytes(data)
            (fresh / _SUMS).write_text(_sums(files))
            fresh.chmod(self.mode)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(fresh, folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        return Entry(folder, dict(facts))

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


def _sums(files: Mapping[str, bytes]) -> str:
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {file}\n" for file, data in files.items())
