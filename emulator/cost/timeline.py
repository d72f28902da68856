"""A replay as a picture's data: lanes of named spans, as a Chrome trace and as a page of its own.

A span is named by the edge it belongs to, as the kernel's source has it (`load_k.wait(...)`,
`issue(mma_s, ...)`), and by how often the lane came by there before; one of ordinary instructions
by the function that most of them are from.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..ptx import Instruction
from ..recording import Recording
from .replay import Kind, Replay, Span
from .work import UNITS

_VERBS = "wait|acquire|commit|release|drain|arrive|take|hand_out|post|read|open"
_NAMES = (
    re.compile(rf"(\w+)(?:\.of\([^)]*\))?\.(?:{_VERBS})(?:_and_advance)?\("),
    re.compile(r"\b(?:issue|copy)\(\s*(?:\w+\.)*(\w+)\s*[,)]"),
    re.compile(r"\b(?:self|share|args)\.(\w+)\("),
)
# Of waits for what the warp itself has begun.
_WAITS = {
    "wgmma.wait_group": "products",
    "cp.async.bulk.wait_group": "stores",
    "tcgen05.wait": "registers",
}
MUFU = UNITS.index("mufu")
KINDS: tuple[Kind, ...] = ("work", "wait", "busy")


@dataclass(frozen=True)
class Mark:
    """A span as it is drawn. Clocks."""

    lane: str
    start: float
    end: float
    kind: Kind
    name: str
    visit: int
    source: str  # file:line
    detail: str


@lru_cache(maxsize=64)
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, name) of the functions of a file, the inner ones last."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError):
        return ()
    found = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    return tuple(sorted(found))


def _function(file: str, line: int) -> str:
    inside = [name for first, last, name in _functions(file) if first <= line <= last]
    return inside[-1] if inside else Path(file).stem


def _frames(ins: Instruction) -> Iterator[tuple[str, int]]:
    for file, line in ins.frames:
        if "nvidia_cutlass_dsl" not in file and "/cutlass/" not in file:
            yield file, line


@lru_cache(maxsize=4096)
def _edge(frames: tuple[tuple[str, int], ...]) -> str:
    """What the innermost line names that names an edge."""
    for file, line in frames:
        text = linecache.getline(file, line)
        for pattern in _NAMES:
            found = pattern.search(text)
            if found and found[1] not in ("self", "cute", "arch", "pipeline", "warpgroup"):
                return found[1]
    if not frames:
        return "?"
    function = _function(*frames[0])
    return Path(frames[0][0]).stem if re.fullmatch(_VERBS, function) else function


def edge_of(ins: Instruction) -> str:
    """What an instruction is about."""
    return _edge(tuple(_frames(ins)))


def name_of(recording: Recording, span: Span) -> str:
    """The edge, or the function of most instructions of a stretch."""
    instructions = recording.program.kernel.instructions
    if span.stretch is None:
        for head, name in _WAITS.items():
            if instructions[span.site].opcode.startswith(head):
                return name
        return edge_of(instructions[span.site])
    return _busiest(recording, span.stretch.parts)


_names: dict[tuple[int, Any], str] = {}


def _busiest(recording: Recording, parts: tuple[tuple[int, int, int], ...]) -> str:
    key = id(recording.program), parts
    if key not in _names:
        blocks = recording.program.kernel.blocks
        counts: Counter[str] = Counter()
        for block, first, last in parts:
            for ins in blocks[block].instructions[first:last]:
                if ins.parts[0] != "mov" and any(True for _ in _frames(ins)):
                    counts[_function(*next(_frames(ins)))] += 1
        _names[key] = counts.most_common(1)[0][0] if counts else "?"
    return _names[key]


def marks(found: Replay, recordings: Sequence[Recording], roles: Mapping[int, str]) -> list[Mark]:
    """The spans of one warp of each warpgroup and role, of the engines, and of scheduler 0's MUFU.

    roles: of each warp that has one, its name.
    """
    recording = recordings[0]
    lanes: dict[str, str] = {}
    seen: set[tuple[str, int]] = set()
    for warp, role in sorted(roles.items()):
        if (role, warp // 4) not in seen:
            seen.add((role, warp // 4))
            several = len({w // 4 for w, r in roles.items() if r == role}) > 1
            lanes[f"warp {warp}"] = f"{role} {warp // 4}" if several else role
    prefix = f"cta {recording.rank} " if len(recordings) > 1 else ""
    made: list[Mark] = []
    for span in found.spans:
        lane = span.lane.removeprefix(prefix)
        if lane.startswith("cta "):
            continue
        name = name_of(recording, span)
        file, line = recording.program.kernel.instructions[span.site].source
        where = f"{Path(file).name}:{line}"
        clocks = f"{span.end - span.start:.0f} clocks"
        common = span.start, span.end
        if span.kind == "busy":
            detail = f"{clocks}, asked by warp {span.warp}"
            detail += f", {span.nbytes} bytes" if span.nbytes else ""
            made.append(Mark(lane, *common, "busy", name, span.visit, where, detail))
        elif lane in lanes:
            made.append(Mark(lanes[lane], *common, span.kind, name, span.visit, where, clocks))
        if span.units and span.units[MUFU] and span.warp % 4 == 0:
            share = span.units[MUFU] / (span.end - span.start)
            detail = f"{clocks}, busy for {share:.0%}, by warp {span.warp}"
            made.append(Mark("mufu", *common, "busy", name, span.visit, where, detail))
    order = [*lanes.values(), "tensor", "mufu", "tma", "adds"]
    return sorted(made, key=lambda m: (order.index(m.lane), m.start))


def chrome(made: Sequence[Mark], mhz: float, title: str) -> dict[str, Any]:
    """A trace for Perfetto or chrome://tracing; times in microseconds at that clock."""
    lanes = list(dict.fromkeys(mark.lane for mark in made))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    ]
    for i, lane in enumerate(lanes):
        common = {"ph": "M", "pid": 0, "tid": i}
        events.append({**common, "name": "thread_name", "args": {"name": lane}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": i}})
    for mark in made:
        name = f"{mark.name} {mark.visit}" if mark.kind != "wait" else f"wait: {mark.name}"
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": mark.kind,
                "pid": 0,
                "tid": lanes.index(mark.lane),
                "ts": mark.start / mhz,
                "dur": (mark.end - mark.start) / mhz,
                "args": {"clocks": mark.end - mark.start, "at": mark.source, "visit": mark.visit},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def page(made: Sequence[Mark], title: str) -> str:
    """One self-contained HTML page: drag to pan, wheel to zoom, hover for details."""
    data = json.dumps([asdict(mark) for mark in made]).replace("</", "<\\/")
    text = (Path(__file__).parent / "timeline.html").read_text()
    return text.replace("TITLE", title).replace("/*MARKS*/[]", data)
