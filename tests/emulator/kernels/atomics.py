"""Atomics and reductions on global and shared memory, one table.

Each `AtomOp` is performed by THREADS threads on CELLS cells of 16 bytes, so 32 threads contend for
a cell, in an order nobody knows. What holds in any order: the values seen before and after all
the steps on a cell form a chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Uint16, Uint32, Uint64
from cutlass.memory import SmemAllocator
from numpy.typing import NDArray

from . import numeric as nm
from .asm import asm
from .launch import compile, fake

THREADS = 128
CELLS = 4
_WORD = {"h": Uint16, "r": Uint32, "d": Uint64}
_BYTES = {"h": 2, "r": 4, "d": 8}


@dataclass(frozen=True)
class AtomOp:
    """`opcode` applied to a cell and the thread's `operands`.

    `step(old, *operands)` is the new value of the cell. `lanes`: with more than one, the cell is
    that many words, each treated alike with the same operand (vector forms, red only).
    """

    opcode: str
    kind: str  # h, r or d: 16, 32 or 64 bits
    step: Callable[..., int]
    values: str = "int"  # what the operands are drawn from: int, f32, f16x2, bf16x2, f64
    operands: int = 1
    lanes: int = 1

    @property
    def returns(self) -> bool:
        return self.opcode.startswith("atom")

    @property
    def shared(self) -> bool:
        return ".shared" in self.opcode

    def ptx(self) -> str:
        """Operands: result (atom only), address, then the values."""
        base = int(self.returns)
        values = [f"${base + 1 + i}" for i in range(self.operands)]
        if self.lanes > 1:
            values = ["{" + ", ".join(values * self.lanes) + "}"]
        operands = ["$0"] * self.returns + [f"[${base}]", *values]
        return f"{self.opcode} " + ", ".join(operands) + ";"


def _signed(x: int, width: int = 32) -> int:
    return x - (1 << width) if x >> (width - 1) else x


def _float_add(old: int, value: int, fmt: str) -> int:
    """Sum in float32, float64 or in the two halves of a word; the inputs make it exact."""
    if fmt == "f64":
        pair = np.array([old, value], np.uint64).view(np.float64)
        return int(np.float64(pair.sum()).view(np.uint64))
    x, y = np.array([old], np.uint32), np.array([value], np.uint32)
    if fmt == "f32":
        return int(nm.f32_bits(nm.f32_values(x) + nm.f32_values(y))[0])
    decode, encode, spec = {
        "f16": (nm.f16_values, nm.f16_bits, nm.F16),
        "bf16": (nm.bf16_values, nm.bf16_bits, nm.BF16),
    }[fmt[:-2]]
    halves = [encode(nm.rounded(decode(x >> s) + decode(y >> s), spec)) for s in (0, 16)]
    return int((halves[0] | halves[1] << np.uint32(16))[0])


_ADD_F16X2 = partial(_float_add, fmt="f16x2")
_ADD_BF16X2 = partial(_float_add, fmt="bf16x2")
_ADD_F32 = partial(_float_add, fmt="f32")
_MASK = {"r": 0xFFFFFFFF, "d": (1 << 64) - 1}


def _integer_ops(space: str) -> list[AtomOp]:
    ops: list[AtomOp] = []
    for kind, width in (("r", 32), ("d", 64)):
        signed = partial(_signed, width=width)
        mask = _MASK[kind]
        table: dict[str, Callable[[int, int], int]] = {
            f"add.u{width}": lambda a, b, m=mask: (a + b) & m,
            f"min.s{width}": lambda a, b, s=signed: min(a, b, key=s),
            f"max.s{width}": lambda a, b, s=signed: max(a, b, key=s),
            f"min.u{width}": min,
            f"max.u{width}": max,
            f"and.b{width}": lambda a, b: a & b,
            f"or.b{width}": lambda a, b: a | b,
            f"xor.b{width}": lambda a, b: a ^ b,
        }
        if width == 32:
            table["add.s32"] = table["add.u32"]
            table["inc.u32"] = lambda a, b: 0 if a >= b else a + 1
            table["dec.u32"] = lambda a, b: b if a == 0 or a > b else a - 1
        for name, step in table.items():
            ops.append(AtomOp(f"atom.{space}.{name}", kind, step))
            if not name.startswith(("inc", "dec")):  # their end depends on the order
                ops.append(AtomOp(f"red.{space}.{name}", kind, step))
        ops += [
            AtomOp(f"atom.{space}.exch.b{width}", kind, lambda a, b: b),
            AtomOp(
                f"atom.{space}.cas.b{width}", kind, lambda a, b, c: c if a == b else a, "cas", 2
            ),
        ]
    return ops


OPS: list[AtomOp] = [
    *_integer_ops("global"),
    *_integer_ops("shared"),
    AtomOp("atom.global.add.f32", "r", _ADD_F32, "f32"),
    AtomOp("red.global.add.f32", "r", _ADD_F32, "f32"),
    AtomOp("atom.shared.add.f32", "r", _ADD_F32, "f32"),
    AtomOp("red.shared.add.f32", "r", _ADD_F32, "f32"),
    AtomOp("atom.global.add.f64", "d", partial(_float_add, fmt="f64"), "f64"),
    AtomOp("atom.global.add.noftz.f16x2", "r", _ADD_F16X2, "f16x2"),
    AtomOp("red.global.add.noftz.f16x2", "r", _ADD_F16X2, "f16x2"),
    AtomOp("atom.global.add.noftz.bf16x2", "r", _ADD_BF16X2, "bf16x2"),
    AtomOp("red.global.add.noftz.bf16x2", "r", _ADD_BF16X2, "bf16x2"),
    AtomOp("red.shared.add.noftz.f16x2", "r", _ADD_F16X2, "f16x2"),
    AtomOp("red.global.add.v2.f32", "r", _ADD_F32, "f32", lanes=2),
    AtomOp("red.global.add.v4.f32", "r", _ADD_F32, "f32", lanes=4),
    AtomOp("red.global.add.noftz.v4.bf16x2", "r", _ADD_BF16X2, "bf16x2", lanes=4),
    AtomOp("atom.relaxed.gpu.global.add.u32", "r", lambda a, b: (a + b) & _MASK["r"]),
    AtomOp("atom.acq_rel.gpu.global.cas.b32", "r", lambda a, b, c: c if a == b else a, "cas", 2),
    AtomOp("atom.global.cas.b16", "h", lambda a, b, c: c if a == b else a, "cas", 2),
    AtomOp("red.release.gpu.global.add.u32", "r", lambda a, b: (a + b) & _MASK["r"]),
]


def _small_floats(fmt: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint64]:
    """Small integers as floats, so that every order of addition is exact."""
    if fmt == "f64":
        return rng.integers(-99, 99, shape).astype(np.float64).view(np.uint64)
    if fmt == "f32":
        return nm.f32_bits(rng.integers(-99, 99, shape)).astype(np.uint64)
    encode = {"f16x2": nm.f16_bits, "bf16x2": nm.bf16_bits}[fmt]
    low, high = (encode(rng.integers(-3, 4, shape)) for _ in range(2))
    return (low | high << np.uint32(16)).astype(np.uint64)


def inputs() -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Cells (ops, CELLS, 4) u32 before, and operands (ops, 2, THREADS) u64."""
    rng = np.random.default_rng(3)
    cells = rng.integers(0, 1 << 32, (len(OPS), CELLS, 4), dtype=np.uint32)
    operands = np.zeros((len(OPS), 2, THREADS), np.uint64)
    for i, op in enumerate(OPS):
        mask = np.uint64((1 << 8 * _BYTES[op.kind]) - 1)
        if op.values == "int":
            operands[i] = rng.integers(0, 1 << 63, (2, THREADS), dtype=np.uint64) * 2 & mask
        elif op.values == "cas":  # every thread expects the initial value; just one finds it
            first = np.ascontiguousarray(cells[i, :, :2]).view(np.uint64)[:, 0]
            operands[i, 0] = first[np.arange(THREADS) % CELLS] & mask
            operands[i, 1] = np.arange(1, THREADS + 1, dtype=np.uint64)
        else:
            operands[i] = _small_floats(op.values, (2, THREADS), rng)
            if op.values == "f64":
                start = _small_floats("f64", (CELLS, 2), rng)
                cells[i] = start.view(np.uint32)
            else:
                cells[i] = _small_floats(op.values, (CELLS, 4), rng).astype(np.uint32)
    return cells, operands


def cell_values(op: AtomOp, cell: NDArray[np.uint32]) -> list[int]:
    """The values, one for each of the op's lanes, that a cell (4 words) holds."""
    if op.kind == "d":
        return [int(cell[0]) | int(cell[1]) << 32]
    if op.kind == "h":
        return [int(cell[0]) & 0xFFFF]
    return [int(cell[lane]) for lane in range(op.lanes)]


def consistent(
    op: AtomOp,
    before: NDArray[np.uint32],
    after: NDArray[np.uint32],
    operands: NDArray[np.uint64],
    olds: NDArray[np.uint64],
) -> bool:
    """Whether one cell's outcome is that of some order. operands (2, n), olds (n,)."""
    first, last = cell_values(op, before), cell_values(op, after)
    steps = [tuple(int(x) for x in operands[: op.operands, t]) for t in range(operands.shape[1])]
    if op.returns:
        news = [op.step(int(old), *step) for old, step in zip(olds, steps, strict=True)]
        return Counter([first[0], *news]) == Counter([*map(int, olds), last[0]])
    for lane in range(op.lanes):
        value = first[lane]
        for step in steps:
            value = op.step(value, *step)
        if value != last[lane]:
            return False
    return True


def build() -> Any:
    """Compile: (cells (ops, CELLS, 4) u32 in and out, operands (ops, 2, THREADS) u64,
    olds (ops, THREADS) u64: what each atom returned, 0 for a red)."""

    @cute.kernel
    def contend(cells: cute.Tensor, operands: cute.Tensor, olds: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        words = CELLS * 4
        staged = smem.allocate_tensor(Uint32, cute.make_layout(words), byte_alignment=16)
        for i in cutlass.range_constexpr(len(OPS)):
            op = OPS[i]
            row = cells.iterator + i * words
            mine = (thread % CELLS) * 4
            address = (row + mine).toint().to(Uint64)
            if cutlass.const_expr(op.shared):
                if thread < words:
                    staged[thread] = cute.make_tensor(row, cute.make_layout(words))[thread]
                cute.arch.sync_threads()
                address = (staged.iterator + mine).toint().to(Uint32)
            args = [operands[i, j, thread].to(_WORD[op.kind]) for j in range(op.operands)]
            old = Uint64(0)
            if cutlass.const_expr(op.returns):
                (result,) = asm(op.ptx(), (_WORD[op.kind],), address, *args)
                old = result.to(Uint64)
            else:
                asm(op.ptx(), (), address, *args)
            olds[i, thread] = old
            if cutlass.const_expr(op.shared):
                cute.arch.sync_threads()
                if thread < words:
                    cute.make_tensor(row, cute.make_layout(words))[thread] = staged[thread]

    @cute.jit
    def host(cells: cute.Tensor, operands: cute.Tensor, olds: cute.Tensor) -> None:
        contend(cells, operands, olds).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    n = len(OPS)
    return compile(
        host,
        fake(Uint32, (n, CELLS, 4)),
        fake(Uint64, (n, 2, THREADS)),
        fake(Uint64, (n, THREADS)),
    )
