"""tcgen05.mma by one thread: what a product's instructions are told, and issuing them.

The DSL's own way elects a thread anew before each instruction, and branches around it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu.tcgen05 import smem_descriptor_to_int
from cutlass.cutlass_dsl import Numeric, dsl_user_op

# PTX ISA, tcgen05 instruction descriptor of .kind::f16.
F32_OUT = 1 << 4
TYPES = {cutlass.Float16: 0, cutlass.BFloat16: 1}
A_TYPE, B_TYPE, COLUMNS, ROWS = (1 << at for at in (7, 10, 17, 24))
A_TRANSPOSED, B_TRANSPOSED = 1 << 15, 1 << 16
STEP_COLUMNS = 8  # of tensor memory that 16 elements of A take
UNROLL = 4
HIGH = 32  # of a descriptor's bits lie above its address


@dataclass(frozen=True)
class UmmaOperand:
    """An operand in shared memory, (mma, rows, k) or (mma, rows, k, stage), by its descriptors.

    Of a descriptor the lower half has the address, the upper one what is alike in all.
    """

    low: Int32
    high: Int32
    layout: cute.Layout  # of the address, in units of 16 bytes

    @staticmethod
    def of(fragment: cute.Tensor) -> "UmmaOperand":
        """`fragment` as make_fragment_A and make_fragment_B return it."""
        whole = smem_descriptor_to_int(fragment.iterator)
        return UmmaOperand(Int32(whole), Int32(whole >> HIGH), fragment.layout)

    def stage(self, index: Int32 | int) -> "UmmaOperand":
        """One stage of it."""
        low = self.low + index * self.layout.stride[3]
        return UmmaOperand(low, self.high, cute.select(self.layout, mode=[0, 1, 2]))

    def step(self, k: Int32) -> Int32:
        """The lower half for one instruction."""
        return self.low + cute.crd2idx((0, 0, k), self.layout)


@dataclass(frozen=True)
class Product:
    """D (rows, columns) in float32, from operands of one 16-bit type, whose k runs fastest.

    A pair of CTAs computes D of 256 or 128 rows, half of them each, and each has half of B.
    """

    dtype: type[Numeric]
    shape: tuple[int, int]  # of D
    pair: bool
    a_transposed: bool = False  # its rows run fastest
    b_transposed: bool = False

    @property
    def descriptor(self) -> int:
        """The instruction descriptor."""
        kind, (rows, columns) = TYPES[self.dtype], self.shape
        shape = (columns // 8) * COLUMNS + (rows // 16) * ROWS
        transposed = self.a_transposed * A_TRANSPOSED + self.b_transposed * B_TRANSPOSED
        return F32_OUT + kind * (A_TYPE + B_TYPE) + transposed + shape

    @cute.jit
    def issue(
        self,
        leader: Boolean,
        d: cute.Pointer,
        a: UmmaOperand | Int32,
        b: UmmaOperand,
        accumulate: Boolean,
        begin: cutlass.Constexpr[int],
        end: cutlass.Constexpr[int],
    ):
        """One instruction for each 16 of k, by the thread that leads: D (+)= A B^T.

        Args:
            d: in tensor memory.
            a: in shared memory; or its address in tensor memory.
            b: in shared memory.
            accumulate: of the first step; the others do.
            begin, end: which steps.
        """
        # A loop: unrolled, ptxas computes the descriptors of all steps beforehand and spills them.
        for k in cutlass.range(begin, end, unroll=UNROLL):
            adds = Boolean(accumulate) | (k > begin)
            if const_expr(isinstance(a, UmmaOperand)):
                self.instruction(leader, d, a.step(k), a.high, b.step(k), b.high, adds)
            else:
                self.instruction(leader, d, a + k * STEP_COLUMNS, None, b.step(k), b.high, adds)

    @dsl_user_op
    def instruction(
        self,
        leader: Boolean,
        d: cute.Pointer,
        a: Int32,
        a_high: Int32 | None,
        b: Int32,
        b_high: Int32,
        accumulate: Boolean,
        *,
        loc=None,
        ip=None,
    ) -> None:
        """A by its descriptor, or without an upper half by its address in tensor memory."""
        source = "[$1]" if a_high is None else "da"
        text = (
            "{ .reg .pred leads, adds; .reg .b64 da, db; setp.ne.b32 leads, $6, 0; "
            "setp.ne.b32 adds, $5, 0; mov.b64 da, {$1, $2}; mov.b64 db, {$3, $4}; "
            f"@leads tcgen05.mma.cta_group::{2 if self.pair else 1}.kind::f16 [$0], {source}, db, "
            f"{self.descriptor}, adds; }}"
        )
        values = (
            Int32(d.toint()),
            a,
            Int32(0) if a_high is None else a_high,
            b,
            b_high,
            Int32(accumulate),
            Int32(leader),
        )
        operands = [value.ir_value() for value in values]
        llvm.inline_asm(
            None, operands, text, "r,r,r,r,r,r,r", has_side_effects=True, loc=loc, ip=ip
        )
