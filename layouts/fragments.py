"""Register fragments of wgmma, seen as a kernel wants them; no data moves."""

import cutlass.cute as cute


def rows_by_columns(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator ((2, 2, n / 8), m, k) as (rows, columns) of this thread.

    Mode 0 of a wgmma accumulator is (column pair, row half, column octet): a thread holds two rows
    of each 64-row block, 8 apart, and two neighbouring columns of every eight.
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
