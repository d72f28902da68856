"""What a stretch of instructions asks of an SM: clocks of each unit, and its shortest time alone.

PTX is not what runs. Moves and loads of parameters are free here, since ptxas makes operands of
them; all else counts as one instruction of the unit that executes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..ptx import Address, Instruction, Operand, Pair
from .rates import Gpu

WARP = 32
UNITS = ("issue", "fma", "alu", "mufu", "exchange")
IN_REGISTERS = 4  # the first of them, which share the registers' ports with the tensor cores
_MUFU = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"}
_FMA = {"add", "sub", "mul", "fma", "mad"}
_FREE = {"mov", "cvta", "prefetch", "pragma", "griddepcontrol"}
_EXCHANGE = {"shfl", "stmatrix", "ldmatrix", "movmatrix"}
_SYNC = {"bar", "barrier", "fence", "membar", "wgmma", "setmaxnreg", "cp", "tcgen05", "nanosleep"}


@dataclass(frozen=True)
class Work:
    """Of one warp."""

    alone: float  # clocks, with nothing else on its scheduler
    units: tuple[float, ...]  # clocks of the scheduler's part of each of `UNITS`
    added: float = 0.0  # bytes, to global memory


def measure(instructions: Iterable[Instruction], gpu: Gpu) -> Work:
    """The units' clocks, and the longer of the busiest unit's and the chain of dependences."""
    totals: dict[str, float] = dict.fromkeys(UNITS, 0.0)
    ready: dict[str, float] = {}
    added = 0.0
    begin = end = 0.0  # of what follows the last branch; of everything
    for ins in instructions:
        unit, clocks, latency = _cost(ins, gpu)
        issues = 1.0 if clocks or latency else 0.0
        totals["issue"] += issues / gpu.issue
        if ins.parts[0] == "red":
            added += WARP * _access_bytes(ins)
        if unit:
            totals[unit] += clocks
        written, read = _registers(ins)
        start = max([begin, *(ready.get(name, 0.0) for name in read)])
        done = start + latency
        for name in written:
            ready[name] = done
        if ins.parts[0] == "bra":
            begin = done
        end = max(end, start + max(issues, clocks))
    units = tuple(totals[name] for name in UNITS)
    return Work(max(end, *units), units, added)


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
    if head == "cvt":
        return "alu", of(gpu.convert_lanes), gpu.alu_latency
    if head in _EXCHANGE:
        return "exchange", of(gpu.exchange_lanes), gpu.exchange_latency
    if head in ("ld", "st", "atom", "red"):
        wide = max(1.0, _access_bytes(ins) / 4)
        clocks = wide * WARP * 4 * gpu.schedulers / gpu.shared_bytes
        shared = any("shared" in part for part in ins.parts)
        latency = gpu.exchange_latency if shared else gpu.global_latency
        return "exchange", clocks, latency if head in ("ld", "atom") else 1.0
    if head == "bra":
        return "", 0.0, gpu.branch_latency if ins.predicate else 1.0
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
