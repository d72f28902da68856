"""Warpgroup products: issuing them, and turning a result into an operand."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    accumulate: cutlass.Constexpr[bool],
) -> None:
    """Start acc (+)= a b as one group: the operands stay untouched until it is waited for.

    a: (mma, m, k) in registers or as shared-memory descriptors, b: (mma, n, k) as descriptors.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


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
