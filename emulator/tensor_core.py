"""The Hopper tensor core: wgmma operands, accumulators and products; and the 8x8 matrix moves.

One wgmma multiplies A [64, K] and B [N, K] into D [64, N], where K is 32 bytes of operand type. A
warpgroup holds D in registers, [registers, 128 lanes] here, as fragments: with lane 32w + 4g + q,
f32 register 4j + 2h + e is row 16w + 8h + g, column 8j + 2q + e.

Two choices make the emulation fast. Operands are gathered from shared memory as 16-byte granules
with cached indices. And operands come in *fragment order*, A's rows as (h, w, g) and B's as
(e, j, q), so that four neighbours of the product are one granule of the accumulator: their order is
free where they are gathered and dear where the product is added. All operands are f32 [K, rows].

Products are exact and summed in f32 by BLAS. (The hardware truncates while it aligns a sum, and
keeps fewer bits for 8-bit floats.) Garbage operands may overflow: call under
`np.errstate(all="ignore")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .formats import RAW, to_f32
from .granules import GRANULE, PITCH, WIDE, swizzle

Major = Literal["k", "mn"]
Order = Literal["a", "b", "natural"]  # of rows: as fragments of either operand, or ascending

K_BYTES = 32  # of one operand row that an instruction multiplies
_SWIZZLES = (0, 3, 2, 1)  # descriptor bits 62-63 to a mode of `swizzle`
SINGLE_THREAD = 1 << 18  # multiply-adds from which on OpenBLAS wakes threads, dear for so little


@dataclass(frozen=True)
class SmemDesc:
    """A shared-memory matrix descriptor; start and offsets in bytes."""

    start: int  # modulo 256 KB: the CTA's own window, without cluster rank
    lbo: int  # leading dimension byte offset
    sbo: int  # stride dimension byte offset
    base_offset: int  # phase of a pattern that is not aligned to its own size; 0 when it is
    swizzle: int  # a mode of `granules.swizzle`


def decode_descriptor(desc: int) -> SmemDesc:
    """Decodes the 64-bit descriptor of a wgmma operand."""
    return SmemDesc(
        start=(desc & 0x3FFF) << 4,
        lbo=(desc >> 16 & 0x3FFF) << 4,
        sbo=(desc >> 32 & 0x3FFF) << 4,
        base_offset=desc >> 49 & 7,
        swizzle=_SWIZZLES[desc >> 62 & 3],
    )


def element_addresses(desc: SmemDesc, major: Major, rows: int, itemsize: int) -> NDArray[np.int64]:
    """Byte address of each element of an operand in shared memory.

    The layout is built of cores, 8 lines at the pitch of the swizzle's width. K-major, lines are
    rows and `sbo` leads to the next 8. MN-major, lines are values of k and hold a pitch of rows;
    `lbo` leads to the next pitch of rows and `sbo` to the next 8 of k. Without swizzle the pitch is
    one granule: K-major, `lbo` leads to the next granule of k; MN-major, the offsets trade places.
    The swizzle of 32-byte atoms has cores of 4 lines, MN-major only.

    Returns:
        [rows, K_BYTES / itemsize].

    Raises:
        NotImplementedError: the descriptor has a base offset.
        ValueError: K-major, in 32-byte atoms.
    """
    if desc.base_offset:
        raise NotImplementedError(f"matrix descriptor with base offset {desc.base_offset}")
    if major == "k" and desc.swizzle == WIDE:
        raise ValueError("K-major operand with a swizzle of 32-byte atoms")
    pitch, lines = PITCH[desc.swizzle], 4 if desc.swizzle == WIDE else 8
    row = np.arange(rows)[:, None]
    k = np.arange(K_BYTES // itemsize)
    if major == "k":
        linear = desc.start + row // 8 * desc.sbo + row % 8 * pitch
        if desc.swizzle:
            linear = linear + k * itemsize
        else:
            linear = linear + k * itemsize // 16 * desc.lbo + k * itemsize % 16
    else:
        per_row, per_k = (desc.lbo, desc.sbo) if desc.swizzle else (desc.sbo, desc.lbo)
        wide = pitch // itemsize
        linear = desc.start + row // wide * per_row + row % wide * itemsize
        linear = linear + k // lines * per_k + k % lines * pitch
    return swizzle(linear, desc.swizzle)


@dataclass(frozen=True, eq=False)
class Operand:
    """How to gather one operand from shared memory; its arrays are shared and read-only."""

    granules: NDArray[np.int64]  # indices (address >> 4) in gathering order, each once
    touched: NDArray[np.int64] | slice  # the same, ascending
    last: int  # the highest of them
    rows: int
    shape: tuple[int, ...]  # of the gathered elements
    axes: tuple[int, ...]  # that make them (k, rows in their order), rows maybe as two axes


@lru_cache(maxsize=1 << 13)
def operand(
    descs: tuple[int, ...], role: Literal["a", "b"], major: Major, rows: int, itemsize: int
) -> Operand:
    """Plans the gathering of A or B for one wgmma, or for several that follow each other along K.

    Args:
        descs: 64-bit matrix descriptors, one an instruction.
        role: which operand it is, hence its fragment order.
        major: "mn" if the instruction transposes the operand.
        rows: 64 for A, N for B.
        itemsize: bytes an element.

    Raises:
        NotImplementedError: an MN-major operand that is not 16 bits wide, or a base offset.
    """
    if major == "mn" and itemsize != 2:
        raise NotImplementedError(f"MN-major wgmma operand of {itemsize}-byte elements")
    return gathering([decode_descriptor(desc) for desc in descs], role, major, rows, itemsize)


def gathering(
    descs: Sequence[SmemDesc], order: Order, major: Major, rows: int, itemsize: int
) -> Operand:
    """`operand` for decoded descriptors, of any generation of tensor core."""
    parts = [element_addresses(desc, major, rows, itemsize) for desc in descs]
    addresses = np.concatenate(parts, axis=1)
    k = addresses.shape[1]
    per_granule = 16 // itemsize
    if major == "k":
        granules = addresses[_rows_in(order, rows), ::per_granule]
        shape, axes = (rows, k), (1, 0)
    elif order == "b":  # even and odd columns share granules and part only after the gathering
        granules = addresses[::per_granule].T
        shape, axes = (k, rows // 2, 2), (0, 2, 1)
    else:  # a granule holds neighbours: A's are one (h, w) block of 8 rows
        granules = addresses[_rows_in(order, rows)[::per_granule]].T
        shape, axes = (k, rows), (0, 1)
    granules = granules.ravel() >> 4
    touched = np.unique(granules)
    granules.flags.writeable = touched.flags.writeable = False
    first, last = int(touched[0]), int(touched[-1])
    if last - first + 1 == len(touched):
        touched = slice(first, last + 1)
    return Operand(granules, touched, last, rows, shape, axes)


def _rows_in(order: Order, rows: int) -> NDArray[np.int64]:
    """The rows of an operand in their order."""
    natural = np.arange(rows)
    if order == "a":  # (w, h, g) to (h, w, g)
        return natural.reshape(4, 2, 8).transpose(1, 0, 2).ravel()
    if order == "b":
        return natural.reshape(-1, 2).T.ravel()  # (jq, e) to (e, jq)
    return natural


def load(plan: Operand, smem: np.ndarray, dtype: str) -> NDArray[np.float32]:
    """Gathers an operand.

    Args:
        plan: from `operand`, made for elements as wide as `dtype`.
        smem: the CTA's shared memory from address 0 on, viewed as `GRANULE`.
        dtype: bf16, f16, tf32, e4m3, e5m2, s8 or u8.

    Returns:
        f32 [K, rows in their order].

    Raises:
        IndexError: the operand exceeds `smem`.
    """
    raw = smem.take(plan.granules).view(RAW[dtype]).reshape(plan.shape)
    return to_f32(raw.transpose(plan.axes), dtype).reshape(-1, plan.rows)


def a_from_registers(regs: NDArray[np.uint32], dtype: str) -> NDArray[np.float32]:
    """A of wgmmas that follow each other along K from a warpgroup's registers.

    Register 2p + h of lane 32w + 4g + q holds row 16w + 8h + g; counted in registers, k is 4p + q.

    Args:
        regs: [4 * wgmmas, 128].
        dtype: as for `load`.

    Returns:
        f32 [K, 64 rows in fragment order].
    """
    pairs = len(regs) // 2  # [p, (h, w, g), q, element of a register]
    raw = regs.view(RAW[dtype]).reshape(pairs, 64, 4, -1)
    return to_f32(raw.transpose(0, 2, 3, 1), dtype).reshape(-1, 64)


def mma(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    acc: np.ndarray,
    scale_d: bool = True,
    neg_a: bool = False,
    neg_b: bool = False,
    saturate: bool = False,
) -> None:
    """D = A B^T + D in place, or D = A B^T.

    Args:
        a: [K, 64], b: [K, N], in fragment order.
        acc: D, [registers, 128 lanes] and contiguous along lanes. f32 or s32: N/2 registers. f16:
            the N/4 registers that hold two each, viewed as [N/4, 256].
        scale_d: whether to add what D holds.
        neg_a, neg_b: negate that operand.
        saturate: s32 only: clamp instead of wrapping.

    Raises:
        ValueError: an integer product with K beyond 256, where f32 sums would stop being exact.
    """
    step = max(1, SINGLE_THREAD // (64 * b.shape[1]))
    product = np.dot(a[:step].T, b[:step])  # [(h, w, g), (e, j, q)]
    for k in range(step, len(a), step):
        product += np.dot(a[k : k + step].T, b[k : k + step])
    if neg_a != neg_b:
        np.negative(product, out=product)
    j = b.shape[1] // 8
    if acc.dtype == np.float16:
        product = product.reshape(2, 32, 2, j, 4).transpose(3, 0, 1, 4, 2)  # [j, h, wg, q, e]
        d = acc.reshape(product.shape)
        d[...] = d + product if scale_d else product
        return
    product = product.view(GRANULE).reshape(2, 32, 2, j).transpose(3, 0, 2, 1)  # [j, h, e, wg]
    if acc.dtype == np.float32 and not scale_d:
        acc.view(GRANULE).reshape(product.shape)[...] = product
        return
    product = product.reshape(acc.shape[0], 32).view(np.float32)
    if acc.dtype == np.float32:
        np.add(acc, product, out=acc)
        return
    if a.shape[0] > 256:
        raise ValueError(f"integer product with K = {a.shape[0]}: at most 256 at once")
    total = product.astype(np.int64)
    if scale_d:
        total += acc
    if saturate:
        limits = np.iinfo(np.int32)
        np.clip(total, limits.min, limits.max, out=total)
    acc[...] = total.astype(np.int32)


# Bits that the tensor core keeps below the leading one of the largest addend. Found on an H200: of
# 24 to 28, this alone made fp16 attention agree bitwise in 99.6 to 99.8 % of elements.
_ALIGNED_BITS = 25
_BLOCK = 16  # products of 16-bit operands that are summed, with the accumulator, in one go


def mma_exact(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    acc: NDArray[np.float32],
    scale_d: bool = True,
    neg_a: bool = False,
    neg_b: bool = False,
) -> None:
    """`mma` for 16-bit operands and f32 accumulators, summed as the hardware does.

    Sixteen products and the accumulator are aligned to the largest of them, cut off, and summed
    exactly; the sum is cut off to f32.
    """
    columns = b.shape[1]
    j = columns // 8
    sign = -1.0 if neg_a != neg_b else 1.0
    fragments = acc.view(GRANULE).reshape(j, 2, 2, 32).transpose(1, 3, 2, 0)  # [h, wg, e, j]
    total = np.ascontiguousarray(fragments).view(np.float32).reshape(64, columns).astype(np.float64)
    if not scale_d:
        total[...] = 0
    for k in range(0, a.shape[0], _BLOCK):
        left = sign * a[k : k + _BLOCK, :, None].astype(np.float64)
        addends = np.concatenate([left * b[k : k + _BLOCK, None, :], total[None]])
        exponent = np.frexp(np.abs(addends).max(0))[1]
        unit = np.ldexp(1.0, exponent - 1 - _ALIGNED_BITS)
        total = (np.trunc(addends / unit).sum(0) * unit).astype(np.float64)
        total = _toward_zero(total).astype(np.float64)
    product = total.astype(np.float32).view(GRANULE).reshape(2, 32, 2, j).transpose(3, 0, 2, 1)
    acc.view(GRANULE).reshape(product.shape)[...] = product


def _toward_zero(exact: NDArray[np.float64]) -> NDArray[np.float32]:
    near = exact.astype(np.float32)
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)


def acc_to_matrix(acc: np.ndarray) -> np.ndarray:
    """D as a matrix in natural order, [64, N]; `acc` as for `mma`."""
    wide = 2 if acc.dtype == np.float16 else 1
    fragments = acc.reshape(-1, 2, 2 // wide, 4, 8, 4, wide)  # [j, h, e, w, g, q, e if f16]
    return fragments.transpose(3, 1, 4, 0, 5, 2, 6).reshape(64, -1)


def matrix_to_acc(matrix: np.ndarray) -> np.ndarray:
    """The registers that hold D; the inverse of `acc_to_matrix`."""
    wide = 2 if matrix.dtype == np.float16 else 1
    fragments = matrix.reshape(4, 2, 8, -1, 4, 2 // wide, wide)  # [w, h, g, j, q, e, e if f16]
    return fragments.transpose(3, 1, 5, 0, 2, 4, 6).reshape(-1, 128 * wide)


def wgmma_clocks(n: int) -> int:
    """Clocks one m64nNk wgmma keeps the tensor cores of an SM busy, for any dense operand type.

    An SM does 4096 FLOP a clock in 16-bit types, half that in tf32 and twice that in 8-bit types;
    since K is always 32 bytes, the type cancels out.
    """
    return n // 2


def wgmma_flops(n: int, itemsize: int) -> int:
    """Floating-point (or integer) operations of one dense m64nNk wgmma."""
    return 2 * 64 * n * (K_BYTES // itemsize)


@lru_cache(maxsize=8)
def _matrix_pattern(num: int, trans: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per [matrix, half, lane]: the lane that gives the row's address, and bytes into the row."""
    matrix, half, lane = np.ogrid[:num, :2, :32]
    row, column = np.broadcast_arrays(lane // 4, lane % 4 * 2 + half)
    if trans:
        row, column = column, row
    return 8 * matrix + row, np.broadcast_to(2 * column, (num, 2, 32))


def matrix_addresses(
    row_addresses: NDArray[np.integer], num: int, trans: bool
) -> NDArray[np.int64]:
    """Which 16-bit elements each lane reads or writes in ldmatrix or stmatrix.

    Args:
        row_addresses: [32 x warps], each lane's address operand. Lane 8i + r of a warp gives row r
            of matrix i; the others' are ignored.
        num: 1, 2 or 4 matrices of 8x8.
        trans: move columns where rows would be.

    Returns:
        Byte addresses [num, 2, lanes]: of the low and the high half of each lane's i-th register.
    """
    giver, offset = _matrix_pattern(num, trans)
    warps = row_addresses.reshape(-1, 32)
    addresses = warps[:, giver] + offset  # [warp, matrix, half, lane]
    return addresses.transpose(1, 2, 0, 3).reshape(num, 2, -1)


def movmatrix(regs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Transposes the 8x8 matrix of 16-bit elements that each warp holds, [32 x warps] registers."""
    matrices = regs.view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrices.swapaxes(1, 2)).reshape(-1).view(np.uint32)
