"""Scalar instructions by the table: one kernel evaluates each of a list of them on SAMPLES inputs.

An `Op` is an opcode, the kinds of its operands and what it computes. Kinds, result first, then a
colon, then sources: h, r, d are 16, 32 and 64 bit words; p is a predicate (result only, stored as
0 or 1). `expect` receives one array of Python integers (dtype object) a source, so that it can
compute with any width, and returns integers, or float64 values when `result` names a float
format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Uint16, Uint32, Uint64
from numpy.typing import NDArray

from . import numeric as nm
from .asm import asm
from .launch import compile, fake

SAMPLES = 128
Array = NDArray[Any]
_WORD = {"h": Uint16, "r": Uint32, "d": Uint64}
WIDTH = {"h": 16, "r": 32, "d": 64, "p": 1}


@dataclass(frozen=True)
class Op:
    """One instruction; see the module's text. `rtol`, `atol` apply to approximations alone."""

    opcode: str
    kinds: str
    expect: Callable[..., Any]
    inputs: tuple[str, ...]
    result: str = "bits"  # bits, f32, f16, bf16, f16x2, bf16x2, f64
    rtol: float = 0.0
    atol: float = 0.0
    tail: str = ""  # immediate operands after the sources
    text: str = ""  # the PTX, where it is not simply `opcode result, sources`

    @property
    def name(self) -> str:
        return self.opcode + self.tail.replace(", ", "_")

    def ptx(self) -> str:
        if self.text:
            return self.text
        sources = [f"${i + 1}" for i in range(len(self.inputs))]
        if self.kinds[0] == "p":
            operands = ", ".join(["p", *sources]) + self.tail
            return f"{{ .reg .pred p; {self.opcode} {operands}; selp.b32 $0, 1, 0, p; }}"
        return f"{self.opcode} " + ", ".join(["$0", *sources]) + self.tail + ";"


# ---- inputs ------------------------------------------------------------------------------------

_EDGES = [0, 1, 2, 3, 31, 32, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF]
_EDGES += [0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]
_EDGES_64 = [*_EDGES, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_F32_EDGES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 2.0**-126, 65504.0]
_F32_EDGES += [65520.0, 448.0, 449.0, 480.0, 57344.0, 61440.0, 3.4e38, -3.4e38, 2.0**-10, 2.0**-17]
_F32_EDGES += [2.0**-24, 2.0**-25, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]


_HALVES = {"f16": (nm.F16, nm.f16_bits), "bf16": (nm.BF16, nm.bf16_bits)}


def sample(kind: str, width: int, rng: np.random.Generator) -> NDArray[np.uint64]:
    """SAMPLES inputs of `kind` as words of `width` bits (zero-extended to 64)."""

    def of_floats(x: Any, edges: Sequence[float] = ()) -> NDArray[np.uint64]:
        x = np.asarray(x, np.float64).copy()
        x[: len(edges)] = rng.permutation(np.asarray(edges))
        return nm.f32_bits(nm.rounded(x, nm.F32)).astype(np.uint64)

    def normal(low: float, high: float) -> nm.Floats:
        """Random signs and mantissas, exponents uniform in [low, high)."""
        return rng.choice([-1, 1], SAMPLES) * np.exp2(rng.uniform(low, high, SAMPLES))

    if kind in ("int", "divisor"):
        bits = rng.integers(0, 1 << 63, SAMPLES, dtype=np.uint64) << np.uint64(1)
        bits >>= rng.integers(0, 64, SAMPLES, dtype=np.uint64)
        edges = rng.permutation(np.array(_EDGES_64, dtype=np.uint64))
        bits[: len(edges)] = edges
        bits &= np.uint64((1 << width) - 1)
        return np.maximum(bits, np.uint64(1)) if kind == "divisor" else bits
    if kind == "int48":  # exactly representable in float64
        return rng.integers(0, 1 << 48, SAMPLES, dtype=np.uint64)
    if kind == "shift":
        return rng.integers(0, 70, SAMPLES, dtype=np.uint64)
    if kind == "small":
        return rng.integers(0, 3, SAMPLES, dtype=np.uint64)
    if kind == "medium":
        return rng.integers(-600, 600, SAMPLES).astype(np.uint64) & np.uint64((1 << width) - 1)
    if kind == "f32":
        return of_floats(normal(-24, 24), _F32_EDGES)
    if kind == "normal":
        return of_floats(normal(-100, 100))
    if kind == "near1":
        return of_floats(normal(-6, 4))
    if kind == "short":  # few bits and like sizes: a product plus a sum is exact in float64
        return of_floats(nm.rounded(normal(-1, 2), nm.Format(20, -126, 1e38)))
    if kind == "positive":
        return of_floats(abs(normal(-100, 100)), [1.0, 2.0, 0.5, 1 + 2.0**-23, np.inf])
    if kind == "exponent":
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -126.0, -126.5, -140.0, -150.0, 128.0]
        return of_floats(rng.uniform(-30, 30, SAMPLES), edges)
    if kind == "angle":
        return of_floats(rng.uniform(-np.pi, np.pi, SAMPLES))
    if kind == "integral":
        ties = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, np.nan, np.inf, -np.inf, 3e9, -3e9, 5e9, 0.0, -0.0]
        return of_floats(normal(-2, 10), ties)
    if kind == "f64":
        return normal(-60, 60).view(np.uint64)
    if kind in ("f16", "bf16"):
        fmt, encode = _HALVES[kind]
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, fmt.largest, 2.0**fmt.min_exponent]
        values = normal(-8, 8)
        values[: len(edges)] = rng.permutation(np.asarray(edges))
        return encode(nm.rounded(values, fmt)).astype(np.uint64)
    if kind in ("f16small", "bf16small"):
        fmt, encode = _HALVES[kind.removesuffix("small")]
        low, high = (encode(nm.rounded(rng.uniform(-8, 8, SAMPLES), fmt)) for _ in range(2))
        return (low | high << np.uint32(16)).astype(np.uint64)
    if kind in ("f16x2", "bf16x2"):
        low, high = (sample(kind[:-2], 16, rng) for _ in range(2))
        return low | high << np.uint64(16)
    raise ValueError(f"unknown kind of input {kind!r}")


def inputs(ops: Sequence[Op]) -> NDArray[np.uint64]:
    """Inputs of a table, shape (ops, 4, SAMPLES); unused sources are zero."""
    rng = np.random.default_rng(2)
    out = np.zeros((len(ops), 4, SAMPLES), np.uint64)
    for i, op in enumerate(ops):
        for j, kind in enumerate(op.inputs):
            out[i, j] = sample(kind, WIDTH[op.kinds[2 + j]], rng)
    return out


# ---- the kernel --------------------------------------------------------------------------------


def build(ops: Sequence[Op]) -> Any:
    """Compile the kernel: (inputs (ops, 4, SAMPLES) u64, results (ops, SAMPLES) u64)."""

    @cute.kernel
    def evaluate(source: cute.Tensor, result: cute.Tensor) -> None:
        lane, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(len(ops)):
            op = ops[i]
            kind = "r" if op.kinds[0] == "p" else op.kinds[0]
            args = [source[i, j, lane].to(_WORD[op.kinds[2 + j]]) for j in range(len(op.inputs))]
            (word,) = asm(op.ptx(), (_WORD[kind],), *args)
            result[i, lane] = word.to(Uint64)

    @cute.jit
    def host(source: cute.Tensor, result: cute.Tensor) -> None:
        evaluate(source, result).launch(grid=(1, 1, 1), block=(SAMPLES, 1, 1))

    return compile(host, fake(Uint64, (len(ops), 4, SAMPLES)), fake(Uint64, (len(ops), SAMPLES)))
