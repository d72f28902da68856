"""Shared memory in 16-byte granules, and the XOR swizzle that TMA and the tensor cores share.

Neither unit ever splits an aligned 16-byte granule of shared memory: swizzles permute granules,
boxes and operands are made of them. So the emulator moves granules, not elements, and the checker
tracks them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

# Sixteen opaque bytes. complex128 is the only plain NumPy type of that size; nobody computes in it.
GRANULE = np.dtype(np.complex128)

# Bytes of a line that each mode of `swizzle` permutes.
PITCH = (16, 32, 64, 128, 128)
WIDE = 4  # the mode that keeps 32 bytes together
_PERMUTED = ((0, 4), (1, 4), (3, 4), (7, 4), (3, 5))  # by mode: a mask of lines, the lowest bit

# An address, or an integer array of addresses.
Address = TypeVar("Address", int, np.ndarray)


def swizzle(address: Address, mode: int) -> Address:
    """Where the granule at a linear shared-memory address really lies.

    Args:
        address: byte address(es) before swizzling. The pattern belongs to the address space, not to
            the tile: a tile that starts inside a pattern continues it.
        mode: 0 none, 1/2/3 for patterns of 32/64/128 bytes (the number of address bits permuted),
            4 for one of 128 bytes that keeps pairs of granules together.

    Returns:
        Byte address(es): bits 4.. are XORed with the `mode` bits from bit 7 on; in mode 4, bits
        5.. with two bits.
    """
    mask, lowest = _PERMUTED[mode]
    return address ^ (((address >> 7) & mask) << lowest)
