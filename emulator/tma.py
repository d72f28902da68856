"""The Tensor Memory Accelerator: tensor maps, boxes, and boxes to and from global memory.

A tensor map describes a tensor of up to five dimensions in global memory, dimension 0 contiguous;
an instruction names a box of it by the coordinates of its first element. Here a box is worked out
once, as a strided region of global memory (what the checker wants to know) and a window into the
dense box; a load, store or reduction is then a single NumPy assignment. A dense box holds dimension
0 fastest; `swizzled` says where its 16-byte granules lie in shared memory.

Arithmetic on whatever bits memory holds may overflow: call under `np.errstate(all="ignore")`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from .formats import f32_to_bf16, round_to_tf32, to_f32
from .granules import GRANULE, PITCH, WIDE, swizzle

# Element types by their code in a tensor map, with their size in bytes. Not learned: f32 whose
# subnormals are flushed (8).
_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
    11: ("u8", 1),
    12: ("u8", 1),
    13: ("u8", 1),
}
# Elements narrower than a byte, whose bytes are taken for elements: their bits, and how many bytes
# of 16 elements a load puts into each granule; the rest is padding.
_NARROW = {11: (4, 16), 12: (4, 8), 13: (6, 12)}

# Copies use the widest of these that every address and extent is a multiple of.
_UNITS = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: GRANULE,
}


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map. Tuples have one entry a dimension, dimension 0 (contiguous) first."""

    address: int  # of element 0, in global memory
    dtype: str  # a name of `_TYPES`, or "tf32": f32 that a load rounds to tf32
    itemsize: int  # bytes
    sizes: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]  # elements
    swizzle: int  # a mode of `granules.swizzle`
    bits: int  # of what the instruction's coordinates count along dimension 0
    filled: int = 16  # bytes of data in each granule of shared memory

    @property
    def inner_bytes(self) -> int:
        """Bytes in shared memory of one row of the box along dimension 0."""
        return self.box[0] * self.itemsize * 16 // self.filled

    @cached_property
    def smem_bytes(self) -> int:
        """Bytes that the whole box takes in shared memory."""
        return self.box_bytes * 16 // self.filled

    @cached_property
    def box_bytes(self) -> int:
        """Bytes of data of the whole box: what complete_tx counts, be they out of bounds or not."""
        return prod(self.box) * self.itemsize


@dataclass(frozen=True)
class Strided:
    """A strided region of global memory, outermost axis first, the last axis contiguous.

    Units are as wide as alignment allows, so they may hold several elements, or part of one.
    """

    base: int  # byte address of the first unit
    shape: tuple[int, ...]  # units
    strides: tuple[int, ...]  # bytes
    itemsize: int  # bytes a unit: 1, 2, 4, 8 or 16

    @property
    def dtype(self) -> np.dtype:
        """The NumPy type to view a unit as: an unsigned integer, or `GRANULE`."""
        return _UNITS[self.itemsize]

    @property
    def nbytes(self) -> int:
        """Bytes touched."""
        return prod(self.shape) * self.itemsize

    @property
    def end(self) -> int:
        """One past the highest byte address touched; `base` is the lowest."""
        return (
            self.base
            + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
            + self.itemsize
        )


# Given by the memory: the array, of `Strided.dtype`, that aliases a region of global memory.
View = Callable[[Strided], np.ndarray]


@dataclass(frozen=True)
class Box:
    """Where the box at some coordinates lies: axes outermost first, in units of `region`."""

    shape: tuple[int, ...]  # the whole box, dense
    window: tuple[slice, ...]  # the part of it that is inside the tensor
    region: Strided | None  # that part in global memory; None if all is out of bounds
    inside: bool  # nothing is out of bounds


def decode(raw: bytes) -> TensorMap:
    """Decodes a tensor map.

    Args:
        raw: at least 64 bytes; the 64 that follow in memory are not part of the encoding.

    Raises:
        NotImplementedError: a field holds something this emulator has not learned; names the field.
        ValueError: the tensor's address or the box's rows are not multiples of 16 bytes.
    """
    return _decode(bytes(raw[:64]))


@lru_cache(maxsize=256)
def _decode(raw: bytes) -> TensorMap:
    address, *w = struct.unpack("<Q14I", raw)
    w = [0, 0, *w]  # so that w[i] is the i-th 32-bit word
    rank = (w[2] >> 4 & 7) + 1
    code = w[2] >> 7 & 15
    tf32 = w[2] >> 16 & 1
    mode, wide = w[2] >> 13 & 3, w[2] >> 19 & 1  # wide: in atoms of 32 bytes
    must_be_zero = {
        "kind": (w[2] & 15) - 2,
        "interleave": w[2] >> 11 & 3,
        "NaN fill": w[2] >> 15 & 1,
        "tf32 rounding of a type other than f32": tf32 and code != 7,
        "atoms of 32 bytes in a swizzle of less than 128": wide and mode != 3,
        "reserved bits of word 2": w[2] & 0xFFD00000,  # bit 21 only says that the tensor is large
        "reserved bits of word 7": w[7] >> 16,
        "element strides": w[13] & 0xFFFFFF,
        "word 15": w[15],
        "rank": max(rank - 5, 0),
        "element type": code not in _TYPES,
    }
    for field, value in must_be_zero.items():
        if value:
            raise NotImplementedError(f"tensor map with unsupported {field}: {raw.hex()}")
    dtype, itemsize = _TYPES[code]
    outer = [(w[3 + d] | (w[7] >> 4 * d & 15) << 32) << 4 for d in range(rank - 1)]
    boxes = [w[13] >> 24, *(w[14] >> 8 * d & 255 for d in range(4))]
    bits, filled = _NARROW.get(code, (8 * itemsize, 16))
    sizes = [size + 1 for size in w[8 : 8 + rank]]
    box = [extent + 1 for extent in boxes[:rank]]
    if (sizes[0] * bits | box[0] * bits) % (8 * itemsize):
        raise NotImplementedError(f"tensor map with rows of no whole bytes: {raw.hex()}")
    tensor = TensorMap(
        address=address,
        dtype="tf32" if tf32 else dtype,
        itemsize=itemsize,
        sizes=(sizes[0] * bits // (8 * itemsize), *sizes[1:]),
        strides=(itemsize, *outer),
        box=(box[0] * bits // (8 * itemsize), *box[1:]),
        swizzle=WIDE if wide else mode,
        bits=bits,
        filled=filled,
    )
    if address % 16 or tensor.inner_bytes % 16:
        raise ValueError(f"address and box rows must be multiples of 16 bytes: {tensor}")
    return tensor


@lru_cache(maxsize=1 << 14)
def locate(tensor: TensorMap, coords: tuple[int, ...]) -> Box:
    """Works out the box whose first element has the given coordinates (dimension 0 first).

    Coordinates may be negative or beyond the end; ValueError if their number is not the rank.
    """
    coords = (coords[0] * tensor.bits // (8 * tensor.itemsize), *coords[1:])
    low, count, skip = [], [], []  # per dimension: first element inside, how many, how many before
    for start, extent, size in zip(coords, tensor.box, tensor.sizes, strict=True):
        first = max(start, 0)
        low.append(first)
        count.append(min(start + extent, size) - first)
        skip.append(first - start)
    if min(count) <= 0:
        return Box(tensor.box[::-1], (), None, False)

    base = tensor.address + sum(i * s for i, s in zip(low, tensor.strides, strict=True))
    item, outer = tensor.itemsize, tensor.strides[1:]
    bits = base | count[0] * item | skip[0] * item  # strides and box rows are multiples of 16
    unit = min(bits & -bits, 16)

    def in_units(elements: list[int] | tuple[int, ...]) -> list[int]:
        """Outermost first, dimension 0 counted in units."""
        return [elements[0] * item // unit, *elements[1:]][::-1]

    shape = in_units(count)
    window = [slice(i, i + n) for i, n in zip(in_units(skip), shape, strict=True)]
    region = Strided(base, tuple(shape), (*outer[::-1], unit), unit)
    whole = tuple(in_units(tensor.box))
    return Box(whole, tuple(window), region, tuple(shape) == whole)


def global_footprint(tensor: TensorMap, coords: tuple[int, ...]) -> Strided | None:
    """The bytes of global memory that a copy of the box touches; None if it touches none."""
    return locate(tensor, coords).region


def read_box(tensor: TensorMap, coords: tuple[int, ...], view: View) -> NDArray[np.uint8]:
    """Loads a box.

    Returns:
        Its bytes in dense order, [smem_bytes], owned by the caller; zero where out of bounds.
    """
    box = locate(tensor, coords)
    if box.region is None:
        return np.zeros(tensor.smem_bytes, np.uint8)
    if box.inside:
        dense = view(box.region).copy(order="C")
    else:
        dense = np.zeros(box.shape, box.region.dtype)
        dense[box.window] = view(box.region)
    if tensor.dtype == "tf32":
        dense = round_to_tf32(dense.reshape(-1).view(np.float32))
    if tensor.filled < 16:
        padded = np.zeros((tensor.smem_bytes // 16, 16), np.uint8)
        padded[:, : tensor.filled] = dense.reshape(-1).view(np.uint8).reshape(-1, tensor.filled)
        return padded.reshape(-1)
    return dense.reshape(-1).view(np.uint8)


def write_box(
    tensor: TensorMap, coords: tuple[int, ...], dense: NDArray[np.uint8], view: View
) -> None:
    """Stores a box from its bytes in dense order, [box_bytes]; what is out of bounds is dropped.

    Raises:
        NotImplementedError: the box is padded in shared memory.
    """
    if tensor.filled < 16:
        raise NotImplementedError(f"TMA store of elements of {tensor.bits} bits out of padding")
    box = locate(tensor, coords)
    if box.region is not None:
        view(box.region)[...] = dense.view(box.region.dtype).reshape(box.shape)[box.window]


def reduce_box(
    tensor: TensorMap, coords: tuple[int, ...], dense: NDArray[np.uint8], view: View, op: str
) -> None:
    """Combines a box in dense order, [box_bytes], into global memory, in the tensor's type.

    Args:
        op: as for `combine`, which also says what it raises.
    """
    box = locate(tensor, coords)
    if box.region is None:
        return
    source = dense.view(box.region.dtype).reshape(box.shape)[box.window]
    raw = _UNITS[tensor.itemsize]
    target = view(box.region).view(raw)
    target[...] = combine(op, tensor.dtype, target, source.view(raw))


# What each reduction is defined for.
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
# PTX min and max return the other operand where one is NaN, as fmin and fmax do.
_ARITHMETIC = {"add": np.add, "min": np.fmin, "max": np.fmax}
_REDUCIBLE = {
    "add": {"u32", "s32", "u64", "f16", "bf16", "f32", "f64"},
    "min": {"u32", "s32", "u64", "s64", "f16", "bf16"},
    "max": {"u32", "s32", "u64", "s64", "f16", "bf16"},
    "inc": {"u32"},
    "dec": {"u32"},
    "and": {"u32", "s32", "u64", "s64"},
    "or": {"u32", "s32", "u64", "s64"},
    "xor": {"u32", "s32", "u64", "s64"},
}
_VALUES = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}


def combine(op: str, dtype: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What memory holds after a reduction of `new` into `old`; also for non-tensor bulk reductions.

    Args:
        op: add, min, max, inc, dec, and, or, xor. Float add rounds to nearest even, integer add
            wraps; inc counts up to `new` and restarts at 0, dec counts down and restarts at `new`.
        dtype: element type, as in `TensorMap.dtype`.
        old, new: raw elements (unsigned integers of the element's width), of one shape.

    Returns:
        Raw elements.

    Raises:
        NotImplementedError: the hardware defines no such reduction.
    """
    if dtype not in _REDUCIBLE.get(op, ()):
        raise NotImplementedError(f"bulk reduction .{op} of {dtype}")
    if op in _BITWISE:
        return _BITWISE[op](old, new)
    if op == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    if dtype == "bf16":  # f32 has more than twice its mantissa: rounding twice is rounding once
        return f32_to_bf16(_ARITHMETIC[op](to_f32(old, "bf16"), to_f32(new, "bf16")))
    value = _VALUES[dtype]
    return _ARITHMETIC[op](old.view(value), new.view(value)).view(old.dtype)


@lru_cache(maxsize=1 << 12)
def swizzled(smem_address: int, nbytes: int, mode: int, inner_bytes: int) -> NDArray[np.int64]:
    """Where the granules of a dense box lie in shared memory.

    Args:
        smem_address: byte address of the box, as in the instruction.
        nbytes: bytes of the box.
        mode: `TensorMap.swizzle`.
        inner_bytes: `TensorMap.inner_bytes`.

    Returns:
        The byte address of each 16-byte granule of the box, in dense order, [nbytes / 16]. Shared
        with every caller, hence read-only.

    Raises:
        ValueError: the hardware would refuse the address or the box.
        NotImplementedError: rows are narrower than the swizzle pattern (the hardware pads them).
    """
    span = PITCH[mode]
    if smem_address % 128:
        raise ValueError(f"box at shared address {smem_address:#x}: 128-byte alignment is needed")
    if mode and inner_bytes > span:
        raise ValueError(f"box rows of {inner_bytes} bytes exceed their {span}-byte swizzle")
    if mode and inner_bytes < span:
        raise NotImplementedError(f"box rows of {inner_bytes} bytes under a {span}-byte swizzle")
    addresses = swizzle(np.arange(smem_address, smem_address + nbytes, 16), mode)
    addresses.flags.writeable = False
    return addresses
