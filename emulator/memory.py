"""Global and shared memory as NumPy arrays over the real bytes, with bounds and first-write checks.

Global addresses are raw pointers of the process. Only bytes of tensors passed to the launch may be
touched: a region is one run of overlapping tensors, with byte maps where not every byte belongs to
a tensor (strided views) or has a value yet (outputs).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .granules import GRANULE
from .tma import Strided

UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHARED_TAG = 0xA5  # bits 40.. of a generic address in the shared window
SHARED_WINDOW = SHARED_TAG << 40
PARAM_TAG = 0xB6
PARAM_WINDOW = PARAM_TAG << 40
LOCAL_TAG = 0xC7
LOCAL_WINDOW = LOCAL_TAG << 40


@dataclass(frozen=True)
class Extent:
    """One tensor of the launch: where its elements lie."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    itemsize: int
    output: bool = False

    @property
    def end(self) -> int:
        if 0 in self.shape:
            return self.address
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.address + last + self.itemsize

    def paint(self, array: NDArray[np.bool_], base: int, value: bool) -> None:
        """Sets the flags of this tensor's bytes in a byte map that starts at `base`."""
        flags = as_strided(
            array[self.address - base :], (*self.shape, self.itemsize), (*self.strides, 1)
        )
        flags[...] = value


@dataclass
class Region:
    """A run of overlapping tensors."""

    base: int  # 32-byte aligned start of `data`
    low: int
    high: int
    names: str
    data: NDArray[np.uint8]
    valid: NDArray[np.bool_] | None = None  # None: every byte belongs to a tensor
    written: NDArray[np.bool_] | None = None  # None: every byte has a value
    outputs: list[Extent] = field(default_factory=list)
    stored: bool = False  # a launch has written here
    unsettled: bool = False  # written by a kernel that this launch may overlap
    views: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def typed(self, size: int, count: int) -> np.ndarray:
        """[n] or [n, count] array of `size`-byte words over the region."""
        key = (size, count)
        if key not in self.views:
            whole = self.data[: len(self.data) // (size * count) * size * count].view(UINT[size])
            self.views[key] = whole.reshape(-1, count) if count > 1 else whole
        return self.views[key]


# Called with kind and message; raises when the launch has to stop.
Report = Callable[[str, str], None]


class GlobalMemory:
    """The tensors of a launch, by raw address."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.regions: list[Region] = []
        for extent in sorted((e for e in extents if e.end > e.address), key=lambda e: e.address):
            self._add(extent)
        self._last: Region | None = None

    def _add(self, extent: Extent) -> None:
        if self.regions and extent.address < self.regions[-1].high:
            old = self.regions.pop()
            region = _region(old.low, max(old.high, extent.end), f"{old.names}, {extent.name}")
            shift = old.base - region.base
            for attribute in ("valid", "written"):
                before = getattr(old, attribute)
                merged = np.full(len(region.data), attribute == "written")
                span = slice(old.low - old.base, old.high - old.base)
                target = slice(span.start + shift, span.stop + shift)
                merged[target] = True if before is None else before[span]
                setattr(region, attribute, merged)
            region.outputs = old.outputs
        else:
            region = _region(extent.address, extent.end, extent.name)
        elements = int(np.prod([n for n, s in zip(extent.shape, extent.strides, strict=True) if s]))
        dense = elements * extent.itemsize == region.high - region.low
        if not dense and region.valid is None:
            region.valid = np.zeros(len(region.data), bool)
        if region.valid is not None:
            extent.paint(region.valid, region.base, True)
        if extent.output:
            if region.written is None:
                region.written = np.ones(len(region.data), bool)
            extent.paint(region.written, region.base, False)
            region.outputs.append(extent)
        self.regions.append(region)

    def find(self, low: int, high: int) -> Region | None:
        """The region that holds [low, high), if one does."""
        last = self._last
        if last is not None and last.low <= low and high <= last.high:
            return last
        for region in self.regions:
            if region.low <= low and high <= region.high:
                self._last = region
                return region
        return None

    def stored(self) -> list[tuple[int, int]]:
        """The ranges that have been written."""
        return [(region.low, region.high) for region in self.regions if region.stored]

    def unsettle(self, ranges: Iterable[tuple[int, int]]) -> None:
        """These ranges may still be written by an earlier kernel until the CTA waits for it."""
        for low, high in ranges:
            for region in self.regions:
                region.unsettled |= region.low < high and low < region.high

    def describe(self, address: int) -> str:
        """Where an address lies relative to the tensors."""
        best = min(
            self.regions, key=lambda r: max(r.low - address, address - r.high, 0), default=None
        )
        if best is None:
            return "no tensor was passed to this launch"
        if address >= best.high:
            return f"{address - best.high} bytes past the end of {best.names}"
        if address < best.low:
            return f"{best.low - address} bytes before {best.names}"
        return f"at byte {address - best.low} of {best.names}"

    def written(self, extent: Extent) -> NDArray[np.bool_] | None:
        """Which elements of an output have been written; None for what is no output."""
        for region in self.regions:
            if extent in region.outputs and region.written is not None:
                start = region.written[extent.address - region.base :]
                axes = ((*extent.shape, extent.itemsize), (*extent.strides, 1))
                return np.asarray(as_strided(start, *axes).all(-1))
        return None

    def unwritten(self) -> list[tuple[Extent, int, tuple[int, ...]]]:
        """(output, bytes never written, index of the first such element)."""
        missing = []
        for extent in (e for region in self.regions for e in region.outputs):
            written = self.written(extent)
            if written is not None and not written.all():
                first = tuple(np.argwhere(~written)[0].tolist())
                missing.append((extent, int((~written).sum()) * extent.itemsize, first))
        return missing

    def view(self, strided: Strided, report: Report, write: bool) -> np.ndarray:
        """The array that aliases a strided region, after checking every byte of it."""
        region = self.find(strided.base, strided.end)
        if region is None:
            report(
                "out of bounds",
                f"{'write' if write else 'read'} of global memory [{strided.base:#x}, "
                f"{strided.end:#x}): {self.describe(strided.end - 1)}",
            )
            raise AssertionError("an out-of-bounds access stops the launch")
        region.stored |= write
        start = strided.base - region.base
        axes = ((*strided.shape, strided.itemsize), (*strided.strides, 1))
        if region.valid is not None:
            flags = np.ndarray(axes[0], bool, region.valid, start, axes[1])
            if not flags.all():
                report("out of bounds", f"bytes between the elements of {region.names} are touched")
        if region.written is not None:
            flags = np.ndarray(axes[0], bool, region.written, start, axes[1])
            if write:
                flags[...] = True
            elif not flags.all():
                report("uninitialised read", f"{region.names} is read before it is written")
        return np.ndarray(strided.shape, strided.dtype, region.data, start, strided.strides)

    def access(
        self, addresses: NDArray[np.uint64], size: int, count: int, write: bool, report: Report
    ) -> tuple[Region, NDArray[np.int64]] | None:
        """(region, word index of each lane), or None if the lanes touch several regions."""
        low, high = int(addresses.min()), int(addresses.max()) + size * count
        region = self.find(low, high)
        if region is None:
            return None
        region.stored |= write
        offsets = (addresses - np.uint64(region.base)).astype(np.int64)
        if region.valid is not None or region.written is not None:
            span = offsets[:, None] + np.arange(size * count)
            if region.valid is not None and not region.valid[span].all():
                report("out of bounds", f"bytes between the elements of {region.names} are touched")
            if region.written is not None:
                if write:
                    region.written[span] = True
                elif not region.written[span].all():
                    report("uninitialised read", f"{region.names} is read before it is written")
        return region, offsets // (size * count)


def _region(low: int, high: int, names: str) -> Region:
    base = low & ~31
    length = -(-(high - base) // 32) * 32
    data = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(base))
    return Region(base, low, high, names, data)


class SharedMemory:
    """One CTA's shared memory from address 0; the system's first KiB is never handed out."""

    def __init__(self, size: int) -> None:
        self.size = size
        padded = -(-size // 32) * 32
        self.bytes = np.zeros(padded + 32, np.uint8)
        shift = -self.bytes.ctypes.data % 32
        self.bytes = self.bytes[shift : shift + padded]
        self.granules = self.bytes.view(GRANULE)
        self._views: dict[tuple[int, int], np.ndarray] = {}

    def typed(self, size: int, count: int = 1) -> np.ndarray:
        key = (size, count)
        if key not in self._views:
            words = self.bytes.view(UINT[size])
            self._views[key] = words.reshape(-1, count) if count > 1 else words
        return self._views[key]
