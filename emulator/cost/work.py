"""What a stretch of instructions asks of an SM: clocks of each unit, and its shortest time alone.

PTX is not what runs. Moves and loads of parameters are free here, since ptxas makes operands of
them; all else counts as one instruction of the unit that executes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..ptx import Address, Instruction, Operand, Pair
from .rates import Gpu

WARP = 32
Units = tuple[float, ...]  # clocks of each of `UNITS`
# The last are the register file's: they bind beside the tensor cores alone.
UNITS: tuple[str, ...] = ("issue", "fma", "alu", "mufu", "exchange", "stores", "ports")
EXCHANGE = UNITS.index("exchange")
PHASE = 25.0  # clocks, about, of a phase; twice as fine moves a tile of forward by less than 1 %
_MUFU = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"}
_FMA = {"add", "sub", "mul", "fma", "mad"}
_FREE = {"mov", "cvta", "prefetch", "pragma", "griddepcontrol"}
_EXCHANGE = {"shfl", "stmatrix", "ldmatrix", "movmatrix"}
_DIVISION = 20  # instructions that ptxas makes of one of integers, about
_LONG_PRODUCT = 4  # and of a product of 64-bit integers
LOOKAHEAD = 64  # instructions, of which the next is chosen: ptxas has not registers for more
_SKIPPED = 8  # instructions that ptxas predicates, rather than jump over them
_SYNC = {"bar", "barrier", "fence", "membar", "wgmma", "setmaxnreg", "cp", "tcgen05", "nanosleep"}


@dataclass(frozen=True)
class Phase:
    """A part of a stretch, in which it asks for its units evenly."""

    share: float  # of the stretch's time
    units: Units


@dataclass(frozen=True)
class Work:
    """Of one warp."""

    alone: float  # clocks, with nothing else on its scheduler
    beside: float  # the same while the tensor cores run
    units: Units  # of the scheduler's part
    phases: tuple[Phase, ...] = ()  # the same, by time
    added: float = 0.0  # bytes, to global memory
    peer: float = 0.0  # bytes, into the shared memory of another CTA

    def parts(self) -> list[Work]:
        """The phases, each by itself."""
        return [
            Work(self.alone * phase.share, self.beside * phase.share, phase.units)
            for phase in self.phases or (Phase(1.0, self.units),)
        ]

    def during(self, begin: float, end: float, of: Work) -> Work:
        """`of`, as the part from `begin` to `end` of this one, which it is scheduled in: both as
        shares of its time."""
        found: list[Phase] = []
        at = 0.0
        for phase in self.phases:
            inside = min(at + phase.share, end) - max(at, begin)
            if inside > 0:
                units = tuple(unit * inside / phase.share for unit in phase.units)
                found.append(Phase(inside / (end - begin), units))
            at += phase.share
        times = self.alone * (end - begin), self.beside * (end - begin)
        return replace(of, alone=times[0], beside=times[1], phases=tuple(found))


@dataclass(slots=True)
class _Node:
    """An instruction that costs something, and what waits for its result."""

    unit: str
    clocks: float
    latency: float
    ports: float = 0.0  # clocks of the register file's, beside the tensor cores
    missing: int = 0  # results that it waits for
    ready: float = 0.0
    height: float = 0.0  # of the longest way from here to the end
    after: list[int] = field(default_factory=list)


def measure(instructions: Iterable[Instruction], gpu: Gpu) -> Work:
    """Clocks of the units; and of the whole alone, if at any time that instruction is issued of
    those that may be on which most depends, between two branches."""
    totals: dict[str, float] = dict.fromkeys(UNITS, 0.0)
    added = peer = 0.0
    runs: list[list[_Node]] = []  # between two branches
    nodes: list[_Node] = []
    writer: dict[
        str, tuple[int, ...]
    ] = {}  # of a register: the node, or those that it is moved from
    instructions = list(instructions)
    joined = _joined(instructions) if gpu.max_inputs > 2 else set[int]()
    for at, ins in enumerate(instructions):
        unit, clocks, latency = _cost(ins, gpu)
        written, read = _registers(ins)
        sources = tuple({i for name in read for i in writer.get(name, ())})
        if at in joined or (not clocks and not latency):
            writer.update(dict.fromkeys(written, sources))
            continue
        if ins.parts[0] == "red":
            added += WARP * _access_bytes(ins)
        elif ins.parts[:2] == ("st", "shared::cluster"):
            peer += WARP * _access_bytes(ins) / 2  # one CTA of a pair is the warp's own
        totals["issue"] += 1 / gpu.issue
        if unit:
            totals[unit] += clocks
        ports = clocks * getattr(gpu, f"ports_{unit}", 0.0)
        totals["ports"] += ports
        made = _Node(unit, clocks, latency, ports, len(sources))
        for i in sources:
            nodes[i].after.append(len(nodes))
        writer.update(dict.fromkeys(written, (len(nodes),)))
        nodes.append(made)
        if ins.parts[0] == "bra":
            runs.append(nodes)
            nodes, writer = [], {}
    runs.append(nodes)
    jumps = gpu.jump_latency * sum(
        not 0 < after.index - before.index <= _SKIPPED + 1
        for before, after in pairwise(instructions)
    )
    beside = sum(_schedule(nodes, beside_tensor(gpu), gpu.beside_latency)[0] for nodes in runs)
    alone, placed = 0.0, list[tuple[float, _Node]]()
    for nodes in runs:
        clocks, times = _schedule(nodes, alone_shares())
        placed += [(alone + at, node) for at, node in zip(times, nodes, strict=True)]
        alone += clocks
    units = tuple(totals[name] for name in UNITS)
    phases = _phases(placed, alone, 1 / gpu.issue)
    alone += jumps
    return Work(alone, max(alone, beside + jumps), units, phases, added, peer)


def _phases(placed: list[tuple[float, _Node]], clocks: float, issue: float) -> tuple[Phase, ...]:
    """Equal parts of a schedule; placed: (time of issue, instruction)."""
    count = max(1, round(clocks / PHASE))
    length = clocks / count
    found = [dict.fromkeys(UNITS, 0.0) for _ in range(count)]

    def spread(name: str, begin: float, used: float) -> None:
        """Over the parts that they fall into; what lasts beyond the end belongs to the last."""
        while used > 0:
            part = min(count - 1, int(begin / length))
            here = used if part == count - 1 else min(used, (part + 1) * length - begin)
            found[part][name] += here
            begin, used = begin + max(here, 1e-9), used - here

    for at, node in placed:
        spread("issue", at, issue)
        if node.unit:
            spread(node.unit, at, node.clocks)
        spread("ports", at, node.ports)
    return tuple(Phase(1 / count, tuple(part[name] for name in UNITS)) for part in found)


def alone_shares() -> dict[str, float]:
    """Of its rate that each unit has while the tensor cores do nothing."""
    return dict.fromkeys(UNITS, 1.0) | {"ports": math.inf}


def beside_tensor(gpu: Gpu) -> dict[str, float]:
    """Share of its rate that each unit keeps while the tensor cores run."""
    kept = {unit: float(getattr(gpu, f"beside_{unit}", 1.0)) for unit in UNITS}
    return kept | {"ports": 1.0}


def _joined(instructions: list[Instruction]) -> set[int]:
    """Maxima that the next one, which takes their result, does too: ptxas makes one of the two."""
    joined: set[int] = set()
    last: dict[str, int] = {}  # of a register: the maximum in it, if of two inputs and not yet used
    for at, ins in enumerate(instructions):
        written, read = _registers(ins)
        found = [last.pop(name) for name in read if name in last]
        if ins.parts[0] in ("max", "min") and "f32" in ins:
            alike = [one for one in found if instructions[one].parts == ins.parts]
            if alike:
                joined.add(alike[0])
            else:
                last.update(dict.fromkeys(written, at))
    return joined


def _schedule(
    run: list[_Node], shares: dict[str, float], later: float = 0.0
) -> tuple[float, list[float]]:
    """Clocks until the last is issued and what it takes of its unit is over; when each is issued.

    shares: of its rate that each unit has; later: clocks that a unit's result comes later.
    """
    nodes = [
        replace(
            node,
            clocks=node.clocks / shares.get(node.unit, 1.0),
            latency=node.latency + (later if node.unit else 0.0),
            ports=node.ports / shares["ports"],
            ready=0.0,
        )
        for node in run
    ]
    step = 1 / shares["issue"]
    for node in reversed(nodes):
        node.height = node.latency + max((nodes[i].height for i in node.after), default=0.0)
    heights = [node.height for node in nodes]
    free = dict.fromkeys(UNITS, 0.0)
    issued = [0.0] * len(nodes)
    left = list(range(len(nodes)))
    now = end = 0.0
    while left:
        near = [i for i in left[:LOOKAHEAD] if not nodes[i].missing]
        begins = [_begin(nodes[i], free) for i in near]
        able = [i for i, begin in zip(near, begins, strict=True) if begin <= now]
        if not able:
            now = min(begins)
            continue
        chosen = max(able, key=heights.__getitem__)
        left.remove(chosen)
        node, issued[chosen] = nodes[chosen], now
        if node.unit:
            free[node.unit] = now + node.clocks
            free["ports"] = max(free["ports"], now + node.ports)
            if node.unit == "stores":  # one queue: what asks for shared memory behind it waits
                free["exchange"] = max(free["exchange"], free["stores"])
        end = max(
            end, now + max(step, node.clocks), now + (0.0 if node.after else node.latency / 2)
        )
        for i in node.after:
            nodes[i].ready = max(nodes[i].ready, now + node.latency)
            nodes[i].missing -= 1
        now += step
    return end, issued


def _begin(node: _Node, free: dict[str, float]) -> float:
    """When an instruction may be issued, whose sources are known."""
    if not node.unit:
        return node.ready
    return max(node.ready, free[node.unit], free["ports"] if node.ports else 0.0)


def _cost(ins: Instruction, gpu: Gpu) -> tuple[str, float, float]:
    """(unit, its clocks on one scheduler, latency)."""
    head = ins.parts[0]

    def of(lanes: float) -> float:
        return WARP * gpu.schedulers / lanes

    if head in _FREE or (head == "ld" and "param" in ins.text[:12]):
        return "", 0.0, 0.0
    if head in _MUFU:
        return "mufu", of(gpu.mufu_lanes), gpu.mufu_latency
    if head in _FMA and "f32x2" in ins:
        return "fma", 2 * of(gpu.packed_fma_lanes), gpu.alu_latency
    if head in _FMA and "f32" in ins:
        return "fma", of(gpu.fma_lanes), gpu.alu_latency
    if head == "cvt" and not any("f" in part for part in ins.parts[1:]):
        return "", 0.0, 0.0  # between integers: the register, or half of the pair, as it is
    if head == "or" and "b64" in ins:
        return "", 0.0, 0.0  # a descriptor's constant half
    if head in ("div", "rem"):
        return "alu", _DIVISION * of(gpu.alu_lanes), _DIVISION * gpu.alu_latency
    if head in ("mul", "mad") and ins.parts[-1] in ("s64", "u64"):
        return "alu", _LONG_PRODUCT * of(gpu.alu_lanes), _LONG_PRODUCT * gpu.alu_latency
    if head == "cvt":
        return "alu", of(gpu.convert_lanes), gpu.alu_latency
    if head in _EXCHANGE:
        return "exchange", of(gpu.exchange_lanes), gpu.exchange_latency
    if head == "st" and "global" in ins:
        return "stores", WARP * _access_bytes(ins) * gpu.schedulers / gpu.store_bytes, 1.0
    if head in ("ld", "st", "atom", "red"):
        wide = max(1.0, _access_bytes(ins) / 4)
        clocks = wide * WARP * 4 * gpu.schedulers / gpu.shared_bytes
        shared = any("shared" in part for part in ins.parts)
        latency = gpu.exchange_latency if shared else gpu.global_latency
        return "exchange", clocks, latency if head in ("ld", "atom") else 1.0
    if head == "bra":
        return "", 0.0, gpu.branch_latency if ins.predicate else 1.0
    if head == "mbarrier" and ins.parts[1] == "try_wait":
        return "alu", of(gpu.alu_lanes), gpu.test_latency
    if head == "mbarrier" or head in ("elect", "vote", "redux", "match", "activemask"):
        return "alu", of(gpu.alu_lanes), 2 * gpu.alu_latency
    if head in _SYNC:
        return "", 1.0, 1.0
    return "alu", of(gpu.alu_lanes), gpu.alu_latency


def _access_bytes(ins: Instruction) -> float:
    """Bytes of a lane."""
    bits = ins.parts[-1].lstrip("busf")
    count = next((int(p[1:]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)
    return count * int(bits) / 8 if bits.isdigit() else 4.0


_SINKS = {"st", "red", "bra", "ret", "bar", "barrier", "fence", "cp", "prefetch", "tcgen05", "exit"}


def _registers(ins: Instruction) -> tuple[list[str], list[str]]:
    """(written, read)."""
    head, operands = ins.parts[0], ins.operands
    sinks = head in _SINKS or (head in ("wgmma", "stmatrix"))
    written = [] if sinks or not operands else list(_names(operands[0]))
    if isinstance(operands[0] if operands else None, Address):
        written = []
    read = [name for operand in operands[1 if written else 0 :] for name in _names(operand)]
    if ins.predicate:
        read.append(ins.predicate)
    return written, read


def _names(operand: Operand) -> Iterator[str]:
    if isinstance(operand, str):
        yield operand.lstrip("!")
    elif isinstance(operand, tuple):
        for one in operand:
            yield from _names(one)
    elif isinstance(operand, Pair):
        yield from (operand.first, operand.second)
    elif isinstance(operand, Address):
        yield from _names(operand.base)
        yield from _names(operand.coords)
