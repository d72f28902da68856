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


def negative(value: Float32) -> Boolean:
    """Which no result of exp2 is, NaN included, but the compiler does not know.

    Not by the sign bit: PTX leaves open which NaN an instruction returns.
    """
    return value < 0.0


def settle(word: Int32) -> None:
    """A line that arithmetic does not cross: `word` is known before it, and what follows, after.

    A fence that the sign of `word` decides about, harmless if it happens. Waits and products stay
    on their side of it; else arithmetic sinks below waits, and rises up between products.
    """
    text = "{ .reg .pred p; setp.lt.s32 p, $0, 0; @p fence.proxy.async.shared::cta; }"
    llvm.inline_asm(None, [word.ir_value()], text, "r", has_side_effects=True)


def _volatile(operands: list, text: str, constraints: str):
    return llvm.inline_asm(T.i32(), operands, text, constraints, has_side_effects=True)
