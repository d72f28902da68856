"""Swizzled shared-memory stages, as TMA writes them and wgmma reads them."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import Numeric, dsl_user_op
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.hopper_helpers import get_smem_layout_atom

from .hardware import OCTET, SWIZZLE_BYTES

LINE_BYTES = 128  # of a row of the widest swizzle
OCTET_BYTES = 16  # which it moves in one piece


def row_major_stages(
    dtype: type[Numeric], shape: tuple[int, int], stages: int, part: int = 0, apart: int = 0
) -> cute.ComposedLayout:
    """(rows, columns, stages), columns contiguous, in the widest swizzle that they fill.

    `part` columns (0: all of them) hold whole patterns of the swizzle: what a product may read
    across, as its columns. Stages are `apart` elements apart (0: as close as they can be).
    """
    rows, columns = shape
    kind = get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, part or columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    one = cute.tile_to_shape(atom, shape, order=(0, 1))
    stage = cute.make_layout(stages, stride=apart or rows * columns)
    return cute.make_composed_layout(one.inner, 0, cute.append(one.outer, stage))


def allocate(allocator: SmemAllocator, dtype: type[Numeric], elements: int) -> cute.Pointer:
    """Room for swizzled stages."""
    return allocator.allocate_array(dtype, elements, byte_alignment=SWIZZLE_BYTES)


def view(memory: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    """`memory` as the stages of `layout`; the swizzle moves into the pointer."""
    return cute.make_tensor(cute.recast_ptr(memory, layout.inner), layout.outer)


@dsl_user_op
def store_to_cta(octet: cute.Tensor, place: cute.Tensor, cta: Int32, *, loc=None, ip=None) -> None:
    """16 bytes, registers -> the place in the shared memory of a CTA of the cluster that `place`
    has in this one's."""
    pointer = cute.arch.map_dsmem_ptr(place.iterator, cta, loc=loc, ip=ip)
    there = cute.make_tensor(pointer, place.layout)
    cute.autovec_copy(octet, there, loc=loc, ip=ip)


@dsl_user_op
def store_line_to_cta(
    values: cute.Tensor, line: cute.Tensor, cta: Int32, *, loc=None, ip=None
) -> None:
    """A line of the swizzle (128 bytes), registers -> where `line` is, in a CTA of the cluster.

    Its address is mapped and swizzled once, its octets' are one bitwise operation more each: from a
    CTA that changes `store_to_cta` computes all of it for each octet. The swizzle exchanges octets
    by bits above those of a line, which mapping leaves as they are.
    """
    assert cute.size(values) * values.element_type.width == 8 * LINE_BYTES
    at = cute.arch.map_dsmem_ptr(line.iterator, cta, loc=loc, ip=ip).toint(loc=loc, ip=ip)
    first = at ^ ((at >> 3) & (LINE_BYTES - OCTET_BYTES))
    for c in range(cute.size(values) // OCTET):
        octet = cute.make_tensor(values.iterator + c * OCTET, cute.make_layout(OCTET))
        pointer = cute.make_ptr(
            values.element_type,
            first ^ (c * OCTET_BYTES),
            cute.AddressSpace.dsmem,
            assumed_align=OCTET_BYTES,
            loc=loc,
            ip=ip,
        )
        there = cute.make_tensor(pointer, octet.layout)
        cute.autovec_copy(octet, there, loc=loc, ip=ip)


def transposed(stages: cute.Tensor) -> cute.Tensor:
    """(rows, columns, stages) seen as (columns, rows, stages): V as the B operand of P V."""
    return cute.make_tensor(stages.iterator, cute.select(stages.layout, mode=[1, 0, 2]))


def grouped_rows(stages: cute.ComposedLayout, group: int) -> cute.ComposedLayout:
    """(rows, columns, stages) seen as (group, rows // group, columns, stages).

    A row is a head of a group at a position, heads first; rows past the last whole group are left
    out. Of K-major stages alone, whose rows are one pitch apart.
    """
    (eight, eights), columns, stage = stages.outer.shape
    (pitch, _), columns_stride, stage_stride = stages.outer.stride
    positions = eight * eights // group
    outer = cute.make_layout(
        (group, positions, columns, stage),
        stride=(pitch, pitch * group, columns_stride, stage_stride),
    )
    return cute.make_composed_layout(stages.inner, 0, outer)
