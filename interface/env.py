"""Every environment variable Hopwell reads, in one table; `python -m hopwell info` prints it."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from . import checks

log = logging.getLogger("hopwell")


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it does, and what holds when it is unset."""

    name: str
    meaning: str
    default: str

    @property
    def value(self) -> str | None:
        """The text set in this process, or None; an empty text counts as unset."""
        return os.environ.get(self.name) or None


CACHE_DIR = Variable("HOPWELL_CACHE_DIR", "folder of compiled kernels", "the user's cache folder")
CACHE = Variable("HOPWELL_CACHE", "0: neither read nor write compiled kernels on disk", "1")
ARCH = Variable(
    "HOPWELL_ARCH",
    "SM version for compile, warmup and emulate when they name none; on a GPU it must be the GPU's",
    "sm_90a without a GPU",
)
DETERMINISTIC = Variable(
    "HOPWELL_DETERMINISTIC",
    "1: gradients have the same bits in every run",
    "0",
)
LOG = Variable("HOPWELL_LOG", "debug, info or warning: say on stderr what is compiled", "warning")
PROGRESS = Variable(
    "HOPWELL_PROGRESS", "1 or 0: show progress while compiling", "only on a terminal"
)

TABLE = (CACHE_DIR, CACHE, ARCH, DETERMINISTIC, LOG, PROGRESS)


def cache_dir() -> Path:
    """Folder of the disk cache; not created here."""
    return Path(CACHE_DIR.value or platformdirs.user_cache_dir("hopwell", appauthor=False))


def cache_enabled() -> bool:
    """Whether compiled kernels are kept on disk."""
    return CACHE.value != "0"


def deterministic() -> bool:
    """Whether gradients shall have the same bits in every run.

    Raises:
        ValueError: HOPWELL_DETERMINISTIC is neither 0 nor 1.
    """
    value = DETERMINISTIC.value
    return value is not None and checks.choice(DETERMINISTIC.name, value, ("0", "1")) == "1"


def progress() -> bool:
    """Whether to draw progress on stderr."""
    return PROGRESS.value == "1" if PROGRESS.value else sys.stderr.isatty()


def configure_log() -> None:
    """Send the package's log to stderr at the level HOPWELL_LOG names; nothing if it is unset.

    Raises:
        ValueError: the level is not one the table lists.
    """
    if LOG.value is None or log.handlers:
        return
    level = checks.choice(LOG.name, LOG.value.lower(), ("debug", "info", "warning"))
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hopwell: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
