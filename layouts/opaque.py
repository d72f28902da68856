"""Values that the compiler shall compute once and keep.

It recomputes what looks cheap wherever it is used. On the path from one product to the next that is
too late: descriptors computed after the turn was handed over cost 6 to 8 % at head_dim 64 (H200).
"""

from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


def opaque(value: Int32) -> Int32:
    """`value`, of which the compiler knows nothing but the register it is in."""
    return Int32(_volatile([value.ir_value()], "mov.b32 $0, $1;", "=r,r"))


def lane() -> Int32:
    """This thread's place in its warp."""
    return Int32(_volatile([], "mov.u32 $0, %laneid;", "=r"))


def elected() -> Boolean:
    """Whether this thread is the one of its warp that acts for all."""
    text = "{ .reg .pred p; elect.sync _|p, -1; selp.b32 $0, 1, 0, p; }"
    return Int32(_volatile([], text, "=r")) != 0


def negative(value: Float32) -> Boolean:
    """Which no result of exp2 is, NaN included, but the compiler does not know.

    Not by the sign bit: PTX leaves open which NaN an instruction returns.
    """
    return value < 0.0


def _volatile(operands: list, text: str, constraints: str):
    return llvm.inline_asm(T.i32(), operands, text, constraints, has_side_effects=True)
