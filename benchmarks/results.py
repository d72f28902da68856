"""What was measured: rows, their ratios and means, and the files that keep them.

A folder of results has `results.json`, which `read` reads again; of speed also `results.csv`, whose
lines with `#` say what the numbers depend on.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ..interface.packages import version
from .cells import FLOP_CONVENTION, FORWARD, PASSES, Cell
from .timing import OURS, PROTOCOL, Times

PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "fa3-fwd")
JSON, CSV = "results.json", "results.csv"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Speed:
    """Times of a pass over one cell.

    Attributes: `times` by name, microseconds, of those who can run it, and `absent`, why others
    cannot; `cold`, whether L2 was flushed; `clock_mhz` of the SMs and `power_w` of the GPU
    meanwhile, None if nobody knows.
    """

    cell: Cell
    times: Mapping[str, Times]
    which: str = FORWARD
    absent: Mapping[str, str] = field(default_factory=dict)
    cold: bool = False
    clock_mhz: float | None = None
    power_w: float | None = None

    def tflops(self, name: str, quantile: str = "median") -> float | None:
        """TFLOP/s of a contestant, at a field of `Times`; None if it has no time."""
        if name not in self.times:
            return None
        return self.cell.flops(self.which) / getattr(self.times[name], quantile) / 1e6

    @property
    def ratio(self) -> float | None:
        """Our speed over the best peer's, above 1 if we are faster; None where either has none."""
        ratio = _over_best({name: times.median for name, times in self.times.items()})
        return None if ratio is None else 1 / ratio

    def as_dict(self) -> dict[str, Any]:
        """What `speed` makes a row of again, with what follows from it."""
        found = {
            name: {
                "us": times.median,
                "us_quartiles": [times.low, times.high],
                "tflops": self.tflops(name),
            }
            for name, times in self.times.items()
        }
        return {
            "pass": self.which,
            **asdict(self.cell),
            "flops": self.cell.flops(self.which),
            "contestants": found,
            "absent": dict(self.absent),
            "ratio": self.ratio,
            "l2_flushed": self.cold,
            "clock_mhz": self.clock_mhz,
            "power_w": self.power_w,
        }


@dataclass(frozen=True)
class Error:
    """RMS errors in one cell, against float64, of those who can run it.

    Attributes: `of`, out, dq, dk or dv; `inputs`, a key of `accuracy.INPUTS`.
    """

    cell: Cell
    of: str
    inputs: str
    rms: Mapping[str, float]

    @property
    def ratio(self) -> float | None:
        """Our error over the best peer's, above 1 if ours is larger; None where either has none."""
        return _over_best(self.rms)

    def as_dict(self) -> dict[str, Any]:
        """For `results.json`."""
        row = {**asdict(self.cell), "of": self.of, "inputs": self.inputs, "rms_error": self.rms}
        return {**row, "ratio": self.ratio}


Rows = Sequence[Speed] | Sequence[Error]


def _over_best(values: Mapping[str, float]) -> float | None:
    """Our value over the smallest of a peer; other variants of ours are no peers."""
    peers = [value for name, value in values.items() if not name.startswith(OURS)]
    return values[OURS] / min(peers) if peers and OURS in values else None


def speed(found: Mapping[str, Any]) -> Speed:
    """The row that `Speed.as_dict` wrote down."""
    cell = Cell(**{name: found[name] for name in Cell.__dataclass_fields__ if name in found})
    times = {
        name: Times(value["us"], *value["us_quartiles"])
        for name, value in found["contestants"].items()
    }
    rest = (found[name] for name in ("absent", "l2_flushed", "clock_mhz", "power_w"))
    return Speed(cell, times, found["pass"], *rest)


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers; nan of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def means(rows: Rows) -> dict[str, float]:
    """Geometric means of the ratios of the rows that have one: all, by length, by head_dim."""
    known = [(row.cell, row.ratio) for row in rows if row.ratio is not None]
    found = {"all": geometric_mean(value for _, value in known)} if known else {}
    for length in sorted({cell.length for cell, _ in known}):
        found[f"len {length}"] = geometric_mean(v for cell, v in known if cell.length == length)
    for dim in sorted({cell.head_dim for cell, _ in known}):
        found[f"head_dim {dim}"] = geometric_mean(v for cell, v in known if cell.head_dim == dim)
    return found


def versions() -> dict[str, Any]:
    """Of what numbers depend on; None where it is not installed."""
    return {
        "cuDNN": torch.backends.cudnn.version(),
        **{package: version(package) for package in PACKAGES},
    }


def commit() -> str:
    """Of the source, with "-dirty" if it was changed since; "unknown" where git does not know."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(
            command, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL
        ).strip()
    return UNKNOWN


def about(device: str, known_commit: str | None = None) -> dict[str, Any]:
    """What numbers depend on.

    Args:
        device: its name.
        known_commit: where git does not know it.
    """
    return {
        "device": device,
        "versions": versions(),
        "commit": known_commit or commit(),
        "date": date.today().isoformat(),
    }


def said(facts: Mapping[str, Any]) -> str:
    """What `about` found, in one line."""
    there = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    return ", ".join([facts["device"], facts["date"], *there, f"commit {facts['commit']}"])


def number(value: float | None, form: str) -> str:
    """In a table; "-" where there is none."""
    return "-" if value is None else format(value, form)


def write(folder: Path, facts: Mapping[str, Any], rows: Rows) -> None:
    """Write the files of results, over what is there.

    Args:
        folder: made if it is not there.
        facts: what `about` found, the `preset`, `left_out` (why, by name), and more if wanted.
        rows: of speed, or of errors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = {which: [row for row in speeds(rows) if row.which == which] for which in PASSES}
    by_group: Mapping[str, Rows] = groups if speeds(rows) else {"errors": rows}
    found = {
        **facts,
        "rows": [row.as_dict() for row in rows],
        "geometric_means": {name: means(group) for name, group in by_group.items() if group},
    }
    (folder / JSON).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    if speeds(rows):
        _write_csv(folder / CSV, facts, speeds(rows))


def speeds(rows: Rows) -> list[Speed]:
    """Those of speed."""
    return [row for row in rows if isinstance(row, Speed)]


def _write_csv(file: Path, facts: Mapping[str, Any], rows: Sequence[Speed]) -> None:
    """One line for each contestant in each cell, those without a time too."""
    lines = []
    for row in rows:
        for name in (*row.times, *row.absent):
            times = row.times.get(name)
            lines.append(
                {
                    "pass": row.which,
                    **asdict(row.cell),
                    "contestant": name,
                    "us": times and times.median,
                    "us_low_quartile": times and times.low,
                    "us_high_quartile": times and times.high,
                    "tflops": row.tflops(name),
                    "l2_flushed": row.cold,
                    "clock_mhz": row.clock_mhz,
                    "power_w": row.power_w,
                    "absent": row.absent.get(name),
                }
            )
    with file.open("w", newline="") as out:
        for line in (said(facts), FLOP_CONVENTION, PROTOCOL):
            out.write(f"# {line}\n")
        table = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(lines)


def read(folder: Path) -> tuple[dict[str, Any], list[Speed]]:
    """What a folder's results depend on, and its rows.

    Raises:
        FileNotFoundError: if it has no results.
        ValueError: if they are not of speed.
    """
    file = folder / JSON
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not there; needs a folder of results; "
            f"write one with `python -m hopwell bench --out {folder}`"
        )
    facts = json.loads(file.read_text())
    rows = facts.pop("rows", [])
    if not rows or "contestants" not in rows[0]:
        raise ValueError(
            f"{file} holds no times; needs those of `python -m hopwell bench --out {folder}` "
            "without --accuracy and --host"
        )
    return facts, [speed(row) for row in rows]
