"""Views of global memory: the order of modes that kernels see, and tiles for the TMA unit."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


def sequence_first(tensor: cute.Tensor) -> cute.Tensor:
    """(batch, len, heads, dim) seen as (len, dim, heads, batch): the tile's modes come first.

    Strides travel along, so transposed and expanded views stay as they are. The sequence keeps a
    mode of its own, at whose end TMA clips every box.
    """
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


def tma_tiles(
    atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor]:
    """Both sides of a TMA copy, each indexed as [None, tile].

    Args:
        smem: (rows, columns, stages).
        gmem: (rows, columns, tiles), as `cute.local_tile` makes it.
    """
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )
