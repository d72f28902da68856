"""Single wgmma tiles in every type, shape, swizzle and major order, from hand-laid shared memory.

One kernel evaluates all CASES: bulk copies bring in the operands' shared-memory images, made here
in NumPy; the descriptors are written by hand; each thread writes out its accumulator registers.
Operands are small integers, so every sum is exact in every accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int64, Uint32, Uint64
from cutlass.memory import SmemAllocator
from numpy.typing import NDArray

from . import numeric as nm
from .asm import asm
from .launch import compile, fake

THREADS = 128
M = 64
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
_SWIZZLE_FIELD = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


@dataclass(frozen=True)
class Operand:
    """Shared-memory layout of an operand of `extent` rows (M or N) by `depth` (K) elements.

    `mn_major`: consecutive rows, not consecutive k, lie together. The layouts are the canonical
    ones of the PTX manual ("Strides" of the matrix descriptor): atoms of 8 lines of `SPAN` bytes.
    """

    dtype: str
    extent: int
    depth: int
    swizzle: str
    mn_major: bool

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def lines(self) -> int:
        """Elements that lie together in a line of an atom."""
        return SPAN[self.swizzle] // self.element

    @property
    def strides(self) -> tuple[int, int]:
        """Leading and stride byte offsets; padded apart without a swizzle, to tell them apart."""
        atom = 8 * SPAN[self.swizzle]
        across = self.depth if self.mn_major else self.extent  # from one line to the next
        if self.swizzle == "none":
            near, far = atom + 128, (atom + 128) * (across // 8) + 256
            # From one line to the next line's atom: K-major by LBO, MN-major by SBO.
            return (near, far) if self.mn_major else (far, near)
        return atom * (across // 8), atom

    def addresses(self) -> NDArray[np.int64]:
        """Byte address of every element, shape (extent, depth)."""
        rows, ks = np.meshgrid(np.arange(self.extent), np.arange(self.depth), indexing="ij")
        line, other = (rows, ks) if self.mn_major else (ks, rows)
        lbo, sbo = self.strides
        span = SPAN[self.swizzle]
        group, inner = np.divmod(line, self.lines)
        step, row = np.divmod(other, 8)
        if self.swizzle == "none" and self.mn_major:
            base = group * sbo + step * lbo
        else:
            base = group * lbo + step * sbo
        address = base + row * span + inner * self.element
        return address ^ (address // 128 % (span // 16)) * 16

    @property
    def bytes(self) -> int:
        return int(-(-(int(self.addresses().max()) + self.element) // 128) * 128)

    def image(self, values: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Shared memory's content for `values` (extent, depth)."""
        out = np.zeros(self.bytes, np.uint8)
        raw = encode(values, self.dtype)
        at = self.addresses()
        for byte in range(self.element):
            out[at + byte] = (raw >> np.uint32(8 * byte) & np.uint32(0xFF)).astype(np.uint8)
        return out

    def descriptor(self) -> int:
        """The matrix descriptor but for the start address."""
        lbo, sbo = self.strides
        return lbo >> 4 << 16 | sbo >> 4 << 32 | _SWIZZLE_FIELD[self.swizzle] << 62

    def k_step(self) -> int:
        """Bytes from one instruction's slice of K (32 bytes of it) to the next one's."""
        per = 32 // self.element
        if self.depth == per:
            return 0
        lead = self.addresses()[0, per]
        return int(lead)


def encode(values: NDArray[np.float64], dtype: str) -> NDArray[np.uint32]:
    """Bit patterns of small integers in `dtype`."""
    if dtype in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint32) & np.uint32(0xFF)
    table = {
        "bf16": nm.bf16_bits,
        "f16": nm.f16_bits,
        "tf32": nm.f32_bits,
        "e4m3": nm.e4m3_bits,
        "e5m2": nm.e5m2_bits,
    }
    return table[dtype](values)


@dataclass(frozen=True)
class Case:
    """D (64, n) = scale A (64, k) B (n, k)^T, added to 1 when `accumulate`."""

    a: str
    b: str
    d: str  # f32, f16 or s32
    n: int
    swizzle: str = "128B"
    a_mn: bool = False
    b_mn: bool = False
    registers: bool = False  # A from registers
    negate: tuple[bool, bool] = (False, False)
    accumulate: bool = False
    steps: int = field(default=0)  # instructions along K; 0: as many as a swizzled line holds

    @property
    def name(self) -> str:
        majors = ("mn" if self.a_mn else "k") + ("mn" if self.b_mn else "k")
        flags = "-rs" * self.registers + "-neg" * any(self.negate) + "-acc" * self.accumulate
        return f"{self.a}-{self.b}-{self.d}-n{self.n}-{self.swizzle}-{majors}{flags}"

    @property
    def k(self) -> int:
        """Depth of one instruction."""
        return 32 // ELEMENT_BYTES[self.a]

    @property
    def depth(self) -> int:
        steps = self.steps or max(1, SPAN[self.swizzle] // 32)
        return self.k * steps

    @property
    def operands(self) -> tuple[Operand, Operand]:
        a = Operand(self.a, M, self.depth, self.swizzle, self.a_mn)
        return a, Operand(self.b, self.n, self.depth, self.swizzle, self.b_mn)

    @property
    def out_registers(self) -> int:
        return self.n // 4 if self.d == "f16" else self.n // 2

    def values(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        def draw(dtype: str, rows: int) -> NDArray[np.float64]:
            low, high = {"s8": (-128, 128), "u8": (0, 256)}.get(dtype, (-4, 5))
            return rng.integers(low, high, (rows, self.depth)).astype(np.float64)

        return draw(self.a, M), draw(self.b, self.n)

    def expected(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        sign = -1 if self.negate[0] != self.negate[1] else 1
        return sign * (a @ b.T) + (1.0 if self.accumulate else 0.0)

    def decode(self, registers: NDArray[np.uint32]) -> NDArray[np.float64]:
        """(THREADS, out_registers) words to the matrix D (64, n)."""
        out = np.full((M, self.n), np.nan)
        thread = np.arange(THREADS)
        warp, group, quad = thread // 32, thread % 32 // 4, thread % 4
        for i in range(self.n // 2):
            row = 16 * warp + group + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * quad + i % 2
            if self.d == "f16":
                value = nm.f16_values(registers[:, i // 2] >> np.uint32(16 * (i % 2)))
            elif self.d == "f32":
                value = nm.f32_values(np.ascontiguousarray(registers[:, i]))
            else:
                value = registers[:, i].astype(np.int32).astype(np.float64)
            out[row, column] = value
        return out

    def fragments(self, a: NDArray[np.float64]) -> NDArray[np.uint32]:
        """A as each thread's registers, (THREADS, steps, 4)."""
        per = 4 // ELEMENT_BYTES[self.a]  # elements in a register
        raw = encode(a, self.a)
        thread = np.arange(THREADS)
        warp, group, quad = thread // 32, thread % 32 // 4, thread % 4
        steps = self.depth // self.k
        out = np.zeros((THREADS, steps, 4), np.uint32)
        for step in range(steps):
            for i in range(4):
                for j in range(per):
                    row = 16 * warp + group + 8 * (i % 2)
                    column = step * self.k + per * quad + 4 * per * (i // 2) + j
                    out[:, step, i] |= raw[row, column] << np.uint32(8 * ELEMENT_BYTES[self.a] * j)
        return out

    def ptx(self) -> str:
        """The whole tile in one block. Operands: address of the thread's results, descriptor of B,
        then the descriptor of A or 4 registers a step."""
        n_out, steps = self.out_registers, self.depth // self.k
        a_step, b_step = (o.k_step() >> 4 for o in self.operands)
        outs = ", ".join(f"d{i}" for i in range(n_out))
        lines = [f"{{ .reg .pred p; .reg .b64 da, db; .reg .b32 d<{n_out}>;", "mov.b64 db, $1;"]
        if not self.registers:
            lines.append("mov.b64 da, $2;")
        if self.accumulate:
            one = {"f32": "0x3f800000", "f16": "0x3c003c00", "s32": "1"}[self.d]
            lines += [f"mov.b32 d{i}, {one};" for i in range(n_out)]
        lines.append("wgmma.fence.sync.aligned;")
        flags = "" if self.d == "s32" else "".join(f", {-1 if s else 1}" for s in self.negate)
        if ELEMENT_BYTES[self.a] == 2:
            flags += ("" if self.registers else f", {int(self.a_mn)}") + f", {int(self.b_mn)}"
        for step in range(steps):
            registers = ", ".join(f"${2 + 4 * step + i}" for i in range(4))
            left = f"{{{registers}}}" if self.registers else "da"
            lines += [
                f"setp.ne.b32 p, {int(step > 0 or self.accumulate)}, 0;",
                f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.{self.d}.{self.a}.{self.b}"
                f" {{{outs}}}, {left}, db, p{flags};",
                f"add.s64 db, db, {b_step};",
            ]
            if not self.registers:
                lines.append(f"add.s64 da, da, {a_step};")
        lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        lines += [f"st.global.b32 [$0+{4 * i}], d{i};" for i in range(n_out)]
        return " ".join([*lines, "}"])


CASES: list[Case] = [
    # every swizzle and major order
    *(
        Case("bf16", "bf16", "f32", 64, swizzle, a_mn, b_mn)
        for swizzle in SPAN
        for a_mn in (False, True)
        for b_mn in (False, True)
    ),
    # every type
    Case("f16", "f16", "f32", 96, a_mn=True, b_mn=True),
    Case("f16", "f16", "f16", 64),
    Case("tf32", "tf32", "f32", 64),
    Case("tf32", "tf32", "f32", 24, "none", steps=2),
    Case("e4m3", "e4m3", "f32", 64),
    Case("e5m2", "e5m2", "f32", 64, "64B"),
    Case("e4m3", "e5m2", "f32", 32, "32B"),
    Case("e5m2", "e4m3", "f16", 32),
    Case("s8", "s8", "s32", 64),
    Case("u8", "u8", "s32", 32, "none", steps=3),
    Case("s8", "u8", "s32", 96, "64B"),
    # A from registers
    Case("bf16", "bf16", "f32", 64, registers=True),
    Case("f16", "f16", "f32", 64, b_mn=True, registers=True),
    Case("f16", "f16", "f16", 16, registers=True),
    Case("tf32", "tf32", "f32", 32, registers=True),
    Case("e4m3", "e4m3", "f32", 32, registers=True),
    Case("s8", "s8", "s32", 32, registers=True),
    # shapes, signs, accumulation
    Case("bf16", "bf16", "f32", 8),
    Case("f16", "f16", "f32", 24),
    Case("bf16", "bf16", "f32", 256),
    Case("f16", "f16", "f32", 40, negate=(True, False)),
    Case("bf16", "bf16", "f32", 16, negate=(True, True), accumulate=True),
    Case("f16", "f16", "f16", 32, negate=(False, True), accumulate=True),
    Case("s8", "s8", "s32", 8, accumulate=True),
    # several atoms along K
    Case("bf16", "bf16", "f32", 64, "32B", steps=3),
    Case("bf16", "bf16", "f32", 64, "none", a_mn=True, b_mn=True, steps=2),
    Case("bf16", "bf16", "f32", 128, a_mn=True, b_mn=True, steps=2),
]


@dataclass(frozen=True)
class Data:
    """All cases' operands, packed; word offsets for each case."""

    a: list[NDArray[np.float64]]
    b: list[NDArray[np.float64]]
    words: NDArray[np.uint32]
    a_at: list[int]
    b_at: list[int]
    out_at: list[int]
    out_words: int


def data() -> Data:
    rng = np.random.default_rng(6)
    chunks: list[NDArray[np.uint32]] = []
    a_all, b_all, a_at, b_at, out_at = [], [], [], [], []
    at = out = 0
    for case in CASES:
        a, b = case.values(rng)
        left, right = case.operands
        first = case.fragments(a).reshape(-1) if case.registers else left.image(a).view(np.uint32)
        second = right.image(b).view(np.uint32)
        for chunk, where in ((first, a_at), (second, b_at)):
            where.append(at)
            chunks.append(chunk)
            at += len(chunk)
        out_at.append(out)
        out += THREADS * case.out_registers
        a_all.append(a)
        b_all.append(b)
    return Data(a_all, b_all, np.concatenate(chunks), a_at, b_at, out_at, out)


def _bulk_load(target: Uint32, source: cute.Pointer, size: int, barrier: cute.Pointer) -> None:
    asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        (),
        target,
        source.toint().to(Uint64),
        Uint32(size),
        barrier.toint().to(Uint32),
    )


def build(layout: Data) -> Any:
    """Compile: (words (len(layout.words),) u32, result (layout.out_words,) u32)."""
    capacity = max(max(o.bytes for o in case.operands) for case in CASES)

    @cute.kernel
    def multiply(words: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        a_smem = smem.allocate_tensor(Uint32, cute.make_layout(capacity // 4), 1024)
        b_smem = smem.allocate_tensor(Uint32, cute.make_layout(capacity // 4), 1024)
        barrier = smem.allocate_array(Int64, 1)
        a_base = a_smem.iterator.toint().to(Uint32)
        b_base = b_smem.iterator.toint().to(Uint32)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(len(CASES)):
            case = CASES[i]
            left, right = case.operands
            if thread == 0:
                total = right.bytes + (0 if case.registers else left.bytes)
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, total)
                _bulk_load(b_base, words.iterator + layout.b_at[i], right.bytes, barrier)
                if cutlass.const_expr(not case.registers):
                    _bulk_load(a_base, words.iterator + layout.a_at[i], left.bytes, barrier)
            cute.arch.mbarrier_wait(barrier, i % 2)
            out = result.iterator + layout.out_at[i] + thread * case.out_registers
            args = [out.toint().to(Uint64), descriptor(right, b_base)]
            if cutlass.const_expr(case.registers):
                per_thread = 4 * (case.depth // case.k)
                mine = words.iterator + layout.a_at[i] + thread * per_thread
                fragment = cute.make_tensor(mine, cute.make_layout(per_thread))
                asm(case.ptx(), (), *args, *(fragment[j] for j in range(per_thread)))
            else:
                asm(case.ptx(), (), *args, descriptor(left, a_base))
            cute.arch.sync_threads()

    @cute.jit
    def host(words: cute.Tensor, result: cute.Tensor) -> None:
        multiply(words, result).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    return compile(host, fake(Uint32, (len(layout.words),)), fake(Uint32, (layout.out_words,)))


def descriptor(operand: Operand, base: Uint32) -> Uint64:
    """The operand's matrix descriptor with its start address in shared memory."""
    start = (base & 0x3FFFF) >> 4
    return start.to(Uint64) | Uint64(operand.descriptor())
