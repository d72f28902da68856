"""Register fragments of wgmma, seen as a kernel wants them, and their way to shared memory."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp


def rows_by_columns(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator ((2, 2, n / 8), m, k) as (rows, columns) of this thread.

    Mode 0 of a wgmma accumulator is (column pair, row half, column octet): of a 64-row block a
    thread holds two rows, 8 apart, and in each of them two neighbouring columns of every eight.
    """
    (pair, half, octets), blocks_m, blocks_n = acc.layout.shape
    (pair_d, half_d, octets_d), blocks_m_d, blocks_n_d = acc.layout.stride
    layout = cute.make_layout(
        ((half, blocks_m), (pair, octets, blocks_n)),
        stride=((half_d, blocks_m_d), (pair_d, octets_d, blocks_n_d)),
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator of S as the A operand of P V: ((2, 2, 2), m, n / 16).

    The 16 columns of one product step are two neighbouring octets of the accumulator, held by the
    same threads: P never leaves its registers.
    """
    (pair, half, octets), blocks_m, blocks_n = acc.layout.shape
    (pair_d, half_d, octets_d), blocks_m_d, blocks_n_d = acc.layout.stride
    layout = cute.make_layout(
        ((pair, half, 2), blocks_m, (octets // 2, blocks_n)),
        stride=((pair_d, half_d, octets_d), blocks_m_d, (2 * octets_d, blocks_n_d)),
    )
    return cute.make_tensor(acc.iterator, layout)


def accumulator(mma: cute.TiledMma, shape: tuple[int, int], dtype: type) -> cute.Tensor:
    """Registers for this thread's part of a (rows, columns) product."""
    return cute.make_rmem_tensor(mma.partition_shape_C(shape), dtype)


def offsets(mma: cute.TiledMma, shape: tuple[int, int]) -> cute.Tensor:
    """(rows, columns) of (row, column), from a thread's first element: compile-time numbers."""
    first = mma.get_slice(0).partition_C(cute.make_identity_tensor(shape))
    return rows_by_columns(first)


def origin(mma: cute.TiledMma, shape: tuple[int, int], thread: cute.Int32) -> cute.Coord:
    """(row, column) of this thread's first element in a (rows, columns) product."""
    return mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))[0]


def write_fragment(
    mma: cute.TiledMma,
    fragment: cute.Tensor,
    smem: cute.Tensor,
    thread: cute.Int32,
    transpose: bool = False,
) -> None:
    """Store a 16-bit accumulator to smem (rows, columns), with stmatrix.

    `transpose` where it is the rows of `smem` that are contiguous.
    """
    op = warp.StMatrix8x8x16bOp(transpose, num_matrices=4)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, fragment.element_type), mma)
    own = copy.get_slice(thread)
    cute.copy(copy, own.retile(fragment), own.partition_D(smem))
