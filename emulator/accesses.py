"""Ordinary accesses to global and shared memory: loads, stores, atomics, ldmatrix and stmatrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import ops, tensor_core, tma
from .checker import Conflict
from .lanes import FULL, Lanes, Mask
from .memory import LOCAL_TAG, PARAM_TAG, SHARED_TAG, UINT, Region
from .ptx import SHARED_BASE

if TYPE_CHECKING:
    from .machine import Cta


class Accesses(Lanes):
    """Loads and stores of a unit's lanes, each checked."""

    # Ordinary memory -----------------------------------------------------------------------------

    def _shared_offsets(
        self, addresses: Any, nbytes: int, m: Mask, site: int, cluster: bool, write: bool
    ) -> tuple[Cta, NDArray[np.int64], NDArray[np.intp]]:
        """(the CTA whose memory it is, offsets of the active lanes, those lanes)."""
        lanes = self._active(m)
        a = np.broadcast_to(np.asarray(addresses), (self.lanes,))[lanes].astype(np.int64)
        rank = int(a[0]) >> 24
        offsets = a - (rank << 24)
        if (not cluster and rank != self.cta.rank) or rank >= len(self.cta.cluster.ctas):
            self.report(
                "out of bounds",
                f"shared address {int(a[0]):#x} is not in this CTA's window",
                site,
                fatal=True,
            )
        cta = self.cta.cluster.ctas[rank]
        low, high = int(offsets.min()), int(offsets.max())
        if low < SHARED_BASE or high + nbytes > cta.shared.size:
            end = cta.shared.size - SHARED_BASE
            where = low if low < SHARED_BASE else high
            self.report(
                "out of bounds",
                f"{'write' if write else 'read'} of {nbytes} bytes at byte "
                f"{where - SHARED_BASE} of a CTA's {end} bytes of shared memory",
                site,
                fatal=True,
            )
        if (offsets & (nbytes - 1)).any():
            self.report(
                "misaligned",
                f"shared address of a {nbytes}-byte access is not a multiple of {nbytes}",
                site,
                fatal=True,
            )
        return cta, offsets, lanes

    def _check_shared(
        self,
        cta: Cta,
        offsets: NDArray[np.int64],
        nbytes: int,
        lanes: NDArray[np.intp],
        m: Mask,
        write: bool,
        site: int,
    ) -> None:
        warps = self._warps(m)
        found = cta.shadow.generic(
            self.clocks,
            slice(self.warp0 + warps[0], self.warp0 + warps[-1] + 1),
            self.lane_warp[lanes][:, None],
            cta.shadow.cells(offsets, nbytes),
            write,
            site,
        )
        if write:
            for w in warps:
                self.clocks.wrote_shared(self.warp0 + w, self._lane_bits(m, w))
        if found is not None:
            self._race(found, write, cta, site)

    def _race(self, found: Conflict | str, write: bool, cta: Cta, site: int) -> None:
        if isinstance(found, str):
            self.report(
                "uninitialised read", "shared memory is read before anything wrote it", site
            )
            return
        act = "write" if write else "read"
        other = self.clocks.names[found.agent]
        if found.agent < self.clocks.warps:
            other = f"warp {found.agent % self.cta.cluster.warps_per_cta}"
        cause = (
            "without fence.proxy.async between them"
            if found.missing_fence
            else "with no synchronisation between them"
        )
        kind = "missing proxy fence" if found.missing_fence else "race"
        self.report(
            kind,
            f"{act} of shared memory at byte {16 * found.granule - SHARED_BASE} and the "
            f"{found.kind} of {other} at {self.machine.source(found.site)} {cause}",
            site,
        )

    def _count_shared(self, offsets: NDArray[np.int64], nbytes: int, lanes, write: bool) -> None:
        counters = self.machine.counters
        if write:
            counters.shared_write_bytes += nbytes * len(offsets)
        else:
            counters.shared_read_bytes += nbytes * len(offsets)
        counters.bank_conflicts += _bank_conflicts(offsets, lanes // 32, nbytes)

    def ld_shared(
        self, addresses: Any, size: int, count: int, m: Mask, site: int, cluster: bool = False
    ) -> NDArray[Any]:
        nbytes = size * count
        cta, offsets, lanes = self._shared_offsets(addresses, nbytes, m, site, cluster, False)
        if self.check:
            self._check_shared(cta, offsets, nbytes, lanes, m, False, site)
        if self.counting:
            self._count_shared(offsets, nbytes, lanes, False)
        words = cta.shared.typed(size, count)[offsets // nbytes].reshape(len(lanes), count).T
        if m is None:
            return words
        out = np.zeros((count, self.lanes), words.dtype)
        out[:, lanes] = words
        return out

    def ld_cluster(self, addresses: Any, size: int, count: int, m: Mask, site: int) -> NDArray[Any]:
        return self._by_rank(
            addresses, m, lambda part: self.ld_shared(addresses, size, count, part, site, True)
        )

    def _by_rank(self, addresses: Any, m: Mask, act: Callable[[Mask], Any]) -> Any:
        """Runs `act` for the lanes of each CTA that the addresses name."""
        ranks = np.broadcast_to(np.asarray(addresses), (self.lanes,)).astype(np.int64) >> 24
        active = self._everyone if m is None else m
        several = np.unique(ranks[active])
        if len(several) == 1:
            return act(m)
        out = None
        for rank in several:
            part = act(active & (ranks == rank))
            if part is not None:
                out = part if out is None else out | part
        return out

    def st_shared(
        self, addresses: Any, size: int, values: tuple, m: Mask, site: int, cluster: bool = False
    ) -> None:
        nbytes = size * len(values)
        cta, offsets, lanes = self._shared_offsets(addresses, nbytes, m, site, cluster, True)
        if self.check:
            self._check_shared(cta, offsets, nbytes, lanes, m, True, site)
        if self.counting:
            self._count_shared(offsets, nbytes, lanes, True)
        self._put(cta.shared.typed(size, len(values)), offsets // nbytes, values, lanes, size)

    def _put(self, target: np.ndarray, index: NDArray, values: tuple, lanes, size: int) -> None:
        dtype = UINT[size]
        columns = [
            np.broadcast_to(np.asarray(v).astype(dtype, copy=False), (self.lanes,))[lanes]
            for v in values
        ]
        target[index] = columns[0] if len(columns) == 1 else np.stack(columns, 1)

    def st_cluster(self, addresses: Any, size: int, values: tuple, m: Mask, site: int) -> None:
        self._by_rank(
            addresses, m, lambda part: self.st_shared(addresses, size, values, part, site, True)
        )

    def _global(self, addresses: Any, m: Mask) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        lanes = self._active(m)
        a = np.broadcast_to(np.asarray(addresses, np.uint64), (self.lanes,))
        return a[lanes] if m is not None else a, lanes

    def _located(
        self, addresses: NDArray[np.uint64], size: int, count: int, write: bool, site: int
    ) -> Iterable[tuple[np.ndarray, NDArray[np.int64], Any]]:
        """(words, index of each lane, which lanes) for each region the addresses fall in."""
        nbytes = size * count
        if (addresses & np.uint64(nbytes - 1)).any():
            self.report(
                "misaligned",
                f"global address of a {nbytes}-byte access is not a multiple of {nbytes}",
                site,
                fatal=True,
            )
        memory = self.machine.memory

        def tell(kind: str, message: str) -> None:
            self.report(kind, message, site, fatal=kind == "out of bounds")

        found = memory.access(addresses, size, count, write, tell)
        if found is not None:
            self._settled(found[0], site)
            yield found[0].typed(size, count), found[1], slice(None)
            return
        left = np.ones(len(addresses), bool)
        while left.any():
            address = int(addresses[left.argmax()])
            region = memory.find(address, address + nbytes)
            if region is None:
                tell(
                    "out of bounds",
                    f"{'write' if write else 'read'} of {nbytes} bytes of global "
                    f"memory at {address:#x}: {memory.describe(address)}",
                )
                return
            part = left & (addresses >= region.low) & (addresses <= region.high - nbytes)
            found = memory.access(addresses[part], size, count, write, tell)
            assert found is not None
            yield found[0].typed(size, count), found[1], np.flatnonzero(part)
            left &= ~part

    def _settled(self, region: Region, site: int) -> None:
        if region.unsettled and not self.cta.settled:
            self.report(
                "race",
                f"{region.names} may still be written by the kernel before, which this one "
                "has not waited for (griddepcontrol.wait)",
                site,
            )

    def grid_wait(self) -> None:
        self.cta.settled = True

    def ld_global(self, addresses: Any, size: int, count: int, m: Mask, site: int) -> NDArray[Any]:
        a, lanes = self._global(addresses, m)
        words = np.zeros((len(lanes), count), UINT[size])
        for source, index, part in self._located(a, size, count, False, site):
            words[part] = source[index].reshape(-1, count)
        if self.counting:
            self.machine.counters.ld_global_bytes += size * count * len(lanes)
        if m is None:
            return words.T
        out = np.zeros((count, self.lanes), words.dtype)
        out[:, lanes] = words.T
        return out

    def st_global(self, addresses: Any, size: int, values: tuple, m: Mask, site: int) -> None:
        a, lanes = self._global(addresses, m)
        for target, index, part in self._located(a, size, len(values), True, site):
            self._put(target, index, values, lanes[part], size)
        if self.counting:
            self.machine.counters.st_global_bytes += size * len(values) * len(lanes)
        self.cta.cluster.version += 1

    def _window(self, addresses: Any, m: Mask) -> int:
        lane = 0 if m is None else int(m.argmax())
        return self._at(addresses, lane) >> 40

    def ld_generic(self, addresses: Any, size: int, count: int, m: Mask, site: int) -> NDArray[Any]:
        tag = self._window(addresses, m)
        if tag == SHARED_TAG:
            return self.ld_cluster(np.asarray(addresses) & FULL, size, count, m, site)
        if tag == PARAM_TAG:
            return self.ld_param(addresses, size, count)
        if tag == LOCAL_TAG:
            return self.ld_local(np.asarray(addresses) & FULL, size, count, m, site)
        return self.ld_global(addresses, size, count, m, site)

    def st_generic(self, addresses: Any, size: int, values: tuple, m: Mask, site: int) -> None:
        tag = self._window(addresses, m)
        if tag == SHARED_TAG:
            return self.st_cluster(np.asarray(addresses) & FULL, size, values, m, site)
        if tag == LOCAL_TAG:
            return self.st_local(np.asarray(addresses) & FULL, size, values, m, site)
        return self.st_global(addresses, size, values, m, site)

    ld_const = ld_generic

    def _local_bytes(self, addresses: Any, n: int, m: Mask, site: int) -> tuple[Any, Any]:
        """(active lanes, the n bytes that each of them names), to index local memory with."""
        lanes = self._active(m)
        at = np.broadcast_to(np.asarray(addresses), (self.lanes,))[lanes].astype(np.int64)
        if int(at.min()) < 0 or int(at.max()) + n > self.local.shape[1]:
            self.report(
                "out of bounds",
                f"local address {int(at.max())} of a thread's "
                f"{self.local.shape[1]} bytes of local memory",
                site,
                fatal=True,
            )
        return lanes[:, None], at[:, None] + np.arange(n)

    def ld_local(self, addresses: Any, size: int, count: int, m: Mask, site: int) -> NDArray[Any]:
        lanes, at = self._local_bytes(addresses, size * count, m, site)
        if self.check and not self.local_written[lanes, at].all():
            self.report("uninitialised read", "local memory is read before it is written", site)
        out = np.zeros((self.lanes, count), UINT[size])
        out[lanes[:, 0]] = self.local[lanes, at].view(UINT[size])
        return out.T

    def st_local(self, addresses: Any, size: int, values: tuple, m: Mask, site: int) -> None:
        lanes, at = self._local_bytes(addresses, size * len(values), m, site)
        words = np.empty((self.lanes, len(values)), UINT[size])
        for i, value in enumerate(values):
            words[:, i] = np.asarray(value).astype(UINT[size], copy=False)
        self.local[lanes, at] = words[lanes[:, 0]].view(np.uint8)
        self.local_written[lanes, at] = True

    def ld_param(self, address: Any, size: int, count: int) -> NDArray[Any]:
        raw = self.machine.parameter_bytes
        offsets = np.asarray(address)
        if offsets.ndim:
            offsets = (offsets & np.uint64((1 << 40) - 1)).astype(np.int64)
            span = offsets[:, None] + np.arange(size * count)
            return np.ascontiguousarray(raw[span]).view(UINT[size]).T
        at = int(offsets) & ((1 << 40) - 1)
        return raw[at : at + size * count].copy().view(UINT[size])

    def atomic(
        self,
        space: str,
        op: str,
        type_: str,
        addresses: Any,
        values: tuple,
        count: int,
        order: str,
        m: Mask,
        site: int,
    ) -> NDArray[Any]:
        size = {"16": 2, "32": 4, "64": 8}.get(type_.lstrip("busf"), 4 if "x2" in type_ else 2)
        if space == "generic":
            shared = self._window(addresses, m) == SHARED_TAG
            space = "shared" if shared else "global"
            if shared:
                addresses = np.asarray(addresses) & FULL
        lanes = self._active(m)
        operands = [
            [
                np.broadcast_to(np.asarray(v).astype(UINT[size], copy=False), (self.lanes,))
                for v in part
            ]
            for part in values
        ]
        out = np.zeros((count, self.lanes), UINT[size])
        if space in ("shared", "cluster"):
            cta, offsets, lanes = self._shared_offsets(
                addresses, size * count, m, site, space == "cluster", True
            )
            self._mark_atomic(cta, offsets, size * count, lanes)
            places = [(cta.shared.typed(size), offsets // size, slice(None))]
        else:
            a, lanes = self._global(addresses, m)
            places = []
            for target, index, part in self._located(a, size, count, True, site):
                flat = target.reshape(-1)
                places.append((flat, index * count, part))
            if self.counting:
                self.machine.counters.st_global_bytes += size * count * len(lanes)
        for target, index, part in places:
            for lane, at in zip(lanes[part].tolist(), index.tolist(), strict=True):
                for i in range(count):
                    old = target[at + i]
                    out[i, lane] = old
                    args = [o[i][lane] for o in operands]
                    target[at + i] = _atomic(op, type_, old, args)
        self.cta.cluster.version += 1
        return out

    def _mark_atomic(self, cta: Cta, offsets, nbytes: int, lanes) -> None:
        """Atomics do not race with one another; they count as writes for what follows."""
        warps = self.lane_warp[lanes][:, None]
        cells = cta.shadow.cells(offsets, nbytes)
        cta.shadow.put(cells, warps, self.clocks.rows[warps, 0, warps])

    def ldmatrix(self, addresses: Any, count: int, trans: bool, m: Mask, site: int) -> list:
        spots, lanes = self._matrix(addresses, count, trans, m, site, False)
        words = self.cta.shared.typed(2)[spots >> 1].astype(np.uint32)
        out = np.zeros((count, self.lanes), np.uint32)
        out[:, lanes] = words[:, 0] | words[:, 1] << np.uint32(16)
        return list(out)

    def stmatrix(self, addresses: Any, values: tuple, trans: bool, m: Mask, site: int) -> None:
        spots, lanes = self._matrix(addresses, len(values), trans, m, site, True)
        words = np.stack([np.broadcast_to(v, (self.lanes,))[lanes] for v in values])
        halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], 1)
        self.cta.shared.typed(2)[spots >> 1] = halves.astype(np.uint16)

    def _matrix(self, addresses: Any, count: int, trans: bool, m: Mask, site: int, write: bool):
        """Element offsets [count, 2, lanes] after bounds, race and bank checks of the rows."""
        a = np.broadcast_to(np.asarray(addresses), (self.lanes,))
        givers = self.lane_id < 8 * count if m is None else (self.lane_id < 8 * count) & m
        cta, rows, lanes = self._shared_offsets(a, 16, givers, site, False, write)
        if self.check:
            self._check_shared(cta, rows, 16, lanes, givers, write, site)
            if write:
                for w in self._warps(m):
                    self.clocks.wrote_shared(self.warp0 + w, FULL)
        if self.counting:
            self._count_shared(rows, 16, lanes, write)
        active = self._active(m)
        offsets = a[active].astype(np.int64) & 0xFFFFFF
        return tensor_core.matrix_addresses(offsets, count, trans), active

    def movmatrix(self, value: Any) -> NDArray[np.uint32]:
        return tensor_core.movmatrix(np.ascontiguousarray(value))


_CONFLICTS: dict[bytes, int] = {}


def _bank_conflicts(offsets: NDArray[np.int64], warps: NDArray[np.intp], nbytes: int) -> int:
    """Passes beyond the fewest: 32 banks of 4 bytes; wide accesses go by parts of a warp."""
    key = (offsets - (offsets[0] & ~127)).tobytes() + warps.tobytes() + bytes([nbytes & 255])
    found = _CONFLICTS.get(key)
    if found is not None:
        return found
    per_pass = max(1, min(32, 128 // nbytes))
    extra = 0
    for warp in np.unique(warps):
        mine = offsets[warps == warp]
        for i in range(0, len(mine), per_pass):
            part = mine[i : i + per_pass]
            words = np.unique((part[:, None] + np.arange(0, max(nbytes, 4), 4)) // 4)
            extra += int(np.bincount(words % 32).max()) - 1
    if len(_CONFLICTS) > 1 << 16:
        _CONFLICTS.clear()
    _CONFLICTS[key] = extra
    return extra


def _atomic(op: str, type_: str, old: Any, args: list) -> Any:
    """The new value of one memory word."""
    if op == "exch":
        return args[0]
    if op == "cas":
        return args[1] if old == args[0] else old
    if op in ("and", "or", "xor"):
        return {"and": old & args[0], "or": old | args[0], "xor": old ^ args[0]}[op]
    if type_ in ("f16x2", "bf16x2"):
        function = {"add": np.add, "min": ops.fmin, "max": ops.fmax}[op]
        return ops.narrow(type_, function, old, args[0])
    dtype = type_.replace("b", "u") if type_ in ("b32", "b64") else type_
    if op == "inc":
        return old.dtype.type(0) if old >= args[0] else old + old.dtype.type(1)
    if op == "dec":
        return args[0] if old == 0 or old > args[0] else old - old.dtype.type(1)
    if dtype == "bf16":
        return tma.combine(op, dtype, np.array([old]), np.array([args[0]]))[0]
    view = {
        "u32": np.uint32,
        "s32": np.int32,
        "u64": np.uint64,
        "s64": np.int64,
        "f16": np.float16,
        "f32": np.float32,
        "f64": np.float64,
    }[dtype]
    x, y = np.array([old]).view(view), np.array([args[0]]).view(view)
    out = {
        "add": np.add,
        "min": np.fmin if dtype[0] == "f" else np.minimum,
        "max": np.fmax if dtype[0] == "f" else np.maximum,
    }[op](x, y)
    return out.view(old.dtype)[0]
