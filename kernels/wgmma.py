"""Warpgroup products: their operands, issuing them, and turning a result into an operand."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.tcgen05 import int_to_smem_descriptor, smem_descriptor_to_int
from cutlass.cutlass_dsl import dsl_user_op

from ..layouts.opaque import opaque

LOW_HALF = 0xFFFFFFFF


@dataclass(frozen=True)
class InSmem:
    """An operand in shared memory, (mma, rows, k) or (mma, rows, k, stage), by its descriptors.

    A descriptor has 64 bits, the address in the lower half. Left to the compiler, each product is
    preceded by four or five additions and moves for it; here by one 32-bit addition.
    """

    low: Int32
    high: Int64
    layout: cute.Layout  # of the address, in units of 16 bytes

    @staticmethod
    def of(fragment: cute.Tensor, keep: bool = True) -> "InSmem":
        """`fragment` as make_fragment_A and make_fragment_B return it.

        `keep` it in a register. With more operands than uniform registers hold, it is in others,
        and each product is preceded by a move; then better computed anew for every use.
        """
        whole = smem_descriptor_to_int(fragment.iterator)
        low = Int32(whole & LOW_HALF)
        return InSmem(opaque(low) if keep else low, whole & ~LOW_HALF, fragment.layout)

    def stage(self, index: Int32) -> "InSmem":
        """One stage of it."""
        low = self.low + index * self.layout.stride[3]
        return InSmem(low, self.high, cute.select(self.layout, mode=[0, 1, 2]))

    def steps(self) -> list[cute.Tensor]:
        """What each instruction of a product reads, (mma, rows)."""
        # Not hoisted out of a loop: there are not registers enough for every step.
        low, part = opaque(self.low), cute.select(self.layout, mode=[0, 1])
        steps = range(cute.size(self.layout, mode=[2]))
        addresses = [low + cute.crd2idx((0, 0, k), self.layout) for k in steps]
        descriptors = [self.high | Int64(address.to(Uint32)) for address in addresses]
        return [cute.make_tensor(int_to_smem_descriptor(whole), part) for whole in descriptors]


def in_registers(fragment: cute.Tensor) -> list[cute.Tensor]:
    """The steps of an operand A in registers, (mma, rows, k)."""
    return [fragment[None, None, k] for k in range(cute.size(fragment, mode=[2]))]


@dsl_user_op
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: list[cute.Tensor],
    b: list[cute.Tensor],
    accumulate: bool,
    *,
    loc=None,
    ip=None,
) -> None:
    """Start acc (+)= a b, step by step, as one group: hands off the operands until it is over."""
    warpgroup.fence(loc=loc, ip=ip)
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for a_step, b_step in zip(a, b, strict=True):
        cute.gemm(atom, acc, a_step, b_step, acc, loc=loc, ip=ip)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group(loc=loc, ip=ip)


@cute.jit
def narrow(source: cute.Tensor, target: cute.Tensor) -> None:
    """Convert float32 registers to a 16-bit type; both fragments compact, in the same order.

    Pair by pair, because a pair is one instruction and one register: converted as one vector, some
    sizes come out as single halves, packed only between the products that read them.
    """
    pair = cute.make_layout(2)
    flat = cute.make_layout(cute.size(source))
    wide = cute.logical_divide(cute.make_tensor(source.iterator, flat), pair)
    half = cute.logical_divide(cute.make_tensor(target.iterator, flat), pair)
    for i in cutlass.range_constexpr(cute.size(wide, mode=[1])):
        half[None, i].store(wide[None, i].load().to(target.element_type))
