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

# An address, or an integer array of addresses.
Address = TypeVar("Address", int, np.ndarray)


def swizzle(address: Address, mode: int) -> Address:
    """Where the granule at a linear shared-memory address really lies.

    Args:
        address: byte address(es) before swizzling. The pattern belongs to the address space, not to
            the tile: a tile that starts inside a pattern continues it.
        mode: 0 none, 1/2/3 for patterns of 32/64/128 bytes (the number of address bits permuted).

    Returns:
        Byte address(es): bits 4.. are XORed with the `mode` bits from bit 7 on.
    """
    return address ^ (((address >> 7) & ((1 << mode) - 1)) << 4)
