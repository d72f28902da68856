"""Views of global memory: the order of modes that kernels see, and tiles for the TMA unit."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.cutlass_dsl import Numeric

from .hardware import TMA_ALIGNMENT_BYTES


@cute.jit
def as_bshd(tensor: cute.Tensor, heads_first: Boolean) -> cute.Tensor:
    """(batch, len, heads, dim), or with `heads_first` (batch, heads, len, dim), seen as the former.

    Host code, decided at run time; strides of len and heads are multiples of what TMA asks.
    """
    batch, second, third, dim = tensor.shape
    batch_stride, second_stride, third_stride, dim_stride = tensor.stride
    divisor = TMA_ALIGNMENT_BYTES * 8 // tensor.element_type.width
    length, heads = second, third
    len_stride, heads_stride = second_stride, third_stride
    if heads_first:
        length, heads = third, second
        len_stride, heads_stride = third_stride, second_stride
    len_stride = cute.assume(len_stride, divby=divisor)
    heads_stride = cute.assume(heads_stride, divby=divisor)
    layout = cute.make_layout(
        (batch, length, heads, dim), stride=(batch_stride, len_stride, heads_stride, dim_stride)
    )
    return cute.make_tensor(tensor.iterator, layout)


def sequence_first(tensor: cute.Tensor) -> cute.Tensor:
    """(batch, len, heads, dim) seen as (len, dim, heads, batch): the tile's modes come first.

    Strides travel along, so transposed and expanded views stay as they are. The sequence keeps a
    mode of its own, at whose end TMA clips every box.
    """
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


def grouped_heads(tensor: cute.Tensor, group: int) -> cute.Tensor:
    """(batch, len, heads, dim) seen as (group, len, dim, heads / group, batch): heads that share
    their keys are rows of one tile."""
    batch, length, heads, dim = tensor.shape
    batch_stride, len_stride, heads_stride, dim_stride = tensor.stride
    layout = cute.make_layout(
        (group, length, dim, heads // group, batch),
        stride=(heads_stride, len_stride, dim_stride, heads_stride * group, batch_stride),
    )
    return cute.make_tensor(tensor.iterator, layout)


def grouped_tma_atom(
    op: Any, tensor: cute.Tensor, stages: cute.ComposedLayout, group: int
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """`tma_atom` for tiles of `grouped_heads`.

    Args:
        op, tensor: as there.
        stages: (group, positions, columns, stages) in shared memory.
        group: heads of a tile.
    """
    stage = cute.select(stages, mode=[0, 1, 2])
    shape = tuple(cute.size(stages.outer, mode=[i]) for i in range(3))
    return cpasync.make_tiled_tma_atom(op, grouped_heads(tensor, group), stage, shape)


def fake_heads(
    dtype: type[Numeric], batch: Any, second: Any, third: Any, columns: int
) -> cute.Tensor:
    """(batch, second, third, columns) for `cute.compile`: as TMA takes it, strides have 64 bits."""
    divisibility = TMA_ALIGNMENT_BYTES * 8 // dtype.width
    strides = (cute.sym_int64(divisibility=divisibility) for _ in range(3))
    shape = (batch, second, third, columns)
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=TMA_ALIGNMENT_BYTES)


def tma_atom(
    op: Any, tensor: cute.Tensor, stages: cute.ComposedLayout, shape: tuple[int, int]
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """(atom, coordinates) to copy boxes of `shape`, clipped at the ends of sequence and head.

    Args:
        op: which way.
        tensor: (batch, len, heads, dim), global.
        stages: (rows, columns, stages) in shared memory, of boxes or of several side by side.
        shape: (rows, columns) of a box.
    """
    stage = cute.select(stages, mode=[0, 1])
    return cpasync.make_tiled_tma_atom(op, sequence_first(tensor), stage, shape)


def tma_tiles(
    atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """Both sides of a TMA copy, each indexed as [None, tile].

    Args:
        smem: (rows, columns, stages), or (group, positions, columns, stages).
        gmem: the same of a tile, and tiles, as `cute.local_tile` makes it.
    """
    tile = cute.rank(smem) - 1
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, tile),
        cute.group_modes(gmem, 0, tile),
    )
