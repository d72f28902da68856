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

    def _lanes(self, m: Mask) -> NDArray[np.intp] | slice:
        """The active lanes, to index with."""
        return slice(None) if m is None else np.flatnonzero(m)

    def _shared_offsets(
        self,
        addresses: Any,
        nbytes: int,
        m: Mask,
        sites: tuple[int, ...],
        cluster: bool,
        write: bool,
    ) -> tuple[Cta, NDArray[np.int64]]:
        """The CTA whose memory it is, and offsets [accesses, active lanes]."""
        a = np.asarray(addresses)
        if a.ndim < 2:
            a = np.full((1, self.lanes), a) if a.ndim == 0 else a[None]
        offsets = a.astype(np.int64) if m is None else a[:, m].astype(np.int64)
        rank = int(offsets[0, 0]) >> 24
        if (not cluster and rank != self.cta.rank) or rank >= len(self.cta.cluster.ctas):
            self.report(
                "out of bounds",
                f"shared address {int(offsets[0, 0]):#x} is not in this CTA's window",
                sites[0],
                fatal=True,
            )
        offsets -= rank << 24
        cta = self.cta.cluster.ctas[rank]
        if cta is not self.cta:
            self._reach(cta, m, "shared memory", "race", sites[0])
        inside = (
            int(offsets.min()) >= SHARED_BASE and int(offsets.max()) + nbytes <= cta.shared.size
        )
        if not inside:
            wrong = (offsets < SHARED_BASE) | (offsets + nbytes > cta.shared.size)
            access, lane = np.argwhere(wrong)[0].tolist()
            self.report(
                "out of bounds",
                f"{'write' if write else 'read'} of {nbytes} bytes at byte "
                f"{int(offsets[access, lane]) - SHARED_BASE} of a CTA's "
                f"{cta.shared.size - SHARED_BASE} bytes of shared memory",
                sites[access],
                fatal=True,
            )
        if np.bitwise_or.reduce(offsets, axis=None) & (nbytes - 1):
            access = int((offsets & (nbytes - 1)).any(1).argmax())
            self.report(
                "misaligned",
                f"shared address of a {nbytes}-byte access is not a multiple of {nbytes}",
                sites[access],
                fatal=True,
            )
        return cta, offsets

    def _check_shared(
        self,
        cta: Cta,
        offsets: NDArray[np.int64],
        nbytes: int,
        m: Mask,
        write: bool,
        sites: tuple[int, ...],
    ) -> None:
        present = self._warps(m)
        if write and cta is not self.cta:
            for w in present:
                self.clocks.wrote_elsewhere(self.warp0 + w)
        span = slice(self.warp0 + present[0], self.warp0 + present[-1] + 1)
        warps = self.lane_warp[self._lanes(m)]
        cells = cta.shadow.cells(offsets, nbytes)  # [accesses, lanes, n]
        shadow, clocks = cta.shadow, self.clocks
        if len(sites) == 1 or not shadow.together(clocks, span, warps, cells, write, sites):
            for i, site in enumerate(sites):
                found = shadow.generic(clocks, span, warps, cells[i : i + 1], write, site)
                if found is not None:
                    self._race(found, write, cta, site)
        for w in present:
            self.clocks.touched_shared(self.warp0 + w, self._lane_bits(m, w), write)

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

    def _count_shared(self, offsets: NDArray[np.int64], nbytes: int, m: Mask, write: bool) -> None:
        counters = self.machine.counters
        if write:
            counters.shared_write_bytes += nbytes * offsets.size
        else:
            counters.shared_read_bytes += nbytes * offsets.size
        counters.bank_conflicts += _bank_conflicts(offsets, m, nbytes)

    def ld_shared(
        self,
        addresses: Any,
        size: int,
        count: int,
        m: Mask,
        sites: tuple[int, ...],
        cluster: bool = False,
    ) -> NDArray[Any]:
        """Words [accesses * count, lanes]."""
        nbytes = size * count
        cta, offsets = self._shared_offsets(addresses, nbytes, m, sites, cluster, False)
        if self.check:
            self._check_shared(cta, offsets, nbytes, m, False, sites)
        if self.counting:
            self._count_shared(offsets, nbytes, m, False)
        return self._loaded(cta.shared.typed(size, count)[offsets // nbytes], count, m)

    def _loaded(self, words: NDArray[Any], count: int, m: Mask) -> NDArray[Any]:
        """Words of the active lanes, [accesses, lanes(, count)], as rows of all lanes."""
        if count > 1:
            words = words.swapaxes(1, 2).reshape(-1, words.shape[1])
        if m is None:
            return words
        out = np.zeros((len(words), self.lanes), words.dtype)
        out[:, m] = words
        return out

    def ld_cluster(self, addresses: Any, size: int, count: int, m: Mask, site: int) -> NDArray[Any]:
        return self._by_rank(
            addresses, m, lambda part: self.ld_shared(addresses, size, count, part, (site,), True)
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
        self,
        addresses: Any,
        size: int,
        count: int,
        values: Any,
        m: Mask,
        sites: tuple[int, ...],
        cluster: bool = False,
    ) -> None:
        nbytes = size * count
        cta, offsets = self._shared_offsets(addresses, nbytes, m, sites, cluster, True)
        if self.check:
            self._check_shared(cta, offsets, nbytes, m, True, sites)
        if self.counting:
            self._count_shared(offsets, nbytes, m, True)
        words = self._stored(values, size, count, m)
        cta.shared.typed(size, count)[offsets // nbytes] = words

    def _stored(self, values: Any, size: int, count: int, m: Mask) -> NDArray[Any]:
        """What rows [accesses * count, lanes] store: [accesses, active lanes(, count)]."""
        if isinstance(values, tuple):  # not all of them are rows
            rows = np.empty((len(values), self.lanes), UINT[size])
            for row, value in zip(rows, values, strict=True):
                row[...] = np.asarray(value).astype(UINT[size], copy=False)
            values = rows
        if m is not None:
            values = values[:, m]
        if count == 1:
            return values
        return values.reshape(-1, count, values.shape[1]).swapaxes(1, 2)

    def st_cluster(
        self, addresses: Any, size: int, count: int, values: tuple, m: Mask, site: int
    ) -> None:
        self._by_rank(
            addresses,
            m,
            lambda part: self.st_shared(addresses, size, count, values, part, (site,), True),
        )

    def _global(self, addresses: Any, m: Mask) -> NDArray[np.uint64]:
        """Addresses [accesses, active lanes]."""
        a = np.asarray(addresses, np.uint64)
        if a.ndim < 2:
            a = np.full((1, self.lanes), a) if a.ndim == 0 else a[None]
        return a if m is None else a[:, m]

    def _located(
        self,
        addresses: NDArray[np.uint64],
        size: int,
        count: int,
        write: bool,
        sites: tuple[int, ...],
    ) -> Iterable[tuple[np.ndarray, NDArray[np.int64], Any]]:
        """(words, index of each access, which accesses) for each region that addresses fall in."""
        memory, complaints = self.machine.memory, []
        if not np.bitwise_or.reduce(addresses, axis=None) & np.uint64(size * count - 1):
            found = memory.access(
                addresses.ravel(), size, count, write, lambda *what: complaints.append(what)
            )
            if found is not None and not complaints:
                self._settled(found[0], sites[0])
                yield found[0].typed(size, count), found[1], slice(None)
                return
        lanes = addresses.shape[1]
        for i, site in enumerate(sites):
            for words, index, part in self._located_one(addresses[i], size, count, write, site):
                yield words, index, part + i * lanes

    def _located_one(
        self, addresses: NDArray[np.uint64], size: int, count: int, write: bool, site: int
    ) -> Iterable[tuple[np.ndarray, NDArray[np.int64], Any]]:
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
            self._settled(region, site)
            part = left & (addresses >= region.low) & (addresses <= region.high - nbytes)
            found = memory.access(addresses[part], size, count, write, tell)
            assert found is not None
            yield found[0].typed(size, count), found[1], np.flatnonzero(part)
            left &= ~part

    def _settled(self, region: Region, site: int) -> None:
        if region.unsettled and not self._has_settled():
            self._not_settled(region, site)

    def _not_settled(self, region: Region, site: int) -> None:
        self.report(
            "race",
            f"{region.names} may still be written by the kernel before, which this one "
            "has not waited for (griddepcontrol.wait)",
            site,
        )

    def _has_settled(self) -> bool:
        """Whether the kernels before have ended: who waited for that comes before."""
        agent, epoch = self.cta.cluster.kernels_before
        return not self.check or all(
            self.clocks.rows[self.warp0 + w, 0, agent] >= epoch for w in self.group.warps
        )

    def grid_wait(self, m: Mask) -> None:
        for w in self._warps(m):
            self.clocks.observe(self.warp0 + w, *self.cta.cluster.kernels_before)

    # Other CTAs of the cluster -------------------------------------------------------------------

    def _reach(self, cta: Cta, m: Mask, what: str, kind: str, site: int) -> None:
        """Uses something of another CTA, which must not end before."""
        self._alive(cta, what, kind, site)
        if self.check and cta is not self.cta:
            for w in self._warps(m):
                # An agent of its own: a release by some lanes hands on what all have reached.
                agent = self._reaching(self.warp0 + w)
                epoch = self.clocks.issue(agent)
                self.clocks.observe(self.warp0 + w, agent, epoch)
                cta.reached[agent] = (epoch, what, kind, site)

    def _reaching(self, warp: int) -> int:
        return self.clocks.agent(("reach", warp), f"what warp {warp} does in other CTAs")

    def _alive(self, cta: Cta, what: str, kind: str, site: int) -> None:
        if cta is not self.cta and not cta.live:
            self.report(
                kind, f"{what} of CTA {cta.rank} of the cluster is used, which has ended", site
            )

    def outlived(self) -> None:
        """The CTA has ended: what others did in it must have come before."""
        cta = self.cta
        first = cta.rank * cta.cluster.warps_per_cta
        seen = self.clocks.rows[first : first + cta.cluster.warps_per_cta, 0].max(0)
        for agent, (epoch, what, kind, site) in cta.reached.items():
            if seen[agent] < epoch:
                self.machine.report(
                    kind,
                    f"{what} of CTA {cta.rank} of the cluster is used, which may have ended: "
                    f"nothing there waits for that (CTA {cta.index})",
                    site,
                )

    def ld_global(
        self, addresses: Any, size: int, count: int, m: Mask, sites: tuple[int, ...]
    ) -> NDArray[Any]:
        """Words [accesses * count, lanes]."""
        a = self._global(addresses, m)
        words = self._read(a, size, count, sites)
        if self.counting:
            self.machine.counters.ld_global_bytes += size * count * a.size
        return self._loaded(words.reshape(*a.shape, *words.shape[1:]), count, m)

    def _read(
        self, addresses: NDArray[np.uint64], size: int, count: int, sites: tuple[int, ...]
    ) -> NDArray[Any]:
        """Words [addresses(, count)] of global memory; zero where there is none."""
        words = np.zeros((addresses.size, count) if count > 1 else addresses.size, UINT[size])
        for source, index, part in self._located(addresses, size, count, False, sites):
            words[part] = source[index]
        return words

    def st_global(
        self, addresses: Any, size: int, count: int, values: Any, m: Mask, sites: tuple[int, ...]
    ) -> None:
        a = self._global(addresses, m)
        words = self._stored(values, size, count, m).reshape(a.size, -1)
        for target, index, part in self._located(a, size, count, True, sites):
            target[index] = words[part] if count > 1 else words[part, 0]
        if self.counting:
            self.machine.counters.st_global_bytes += size * count * a.size
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
        return self.ld_global(addresses, size, count, m, (site,))

    def st_generic(
        self, addresses: Any, size: int, count: int, values: tuple, m: Mask, site: int
    ) -> None:
        tag = self._window(addresses, m)
        if tag == SHARED_TAG:
            return self.st_cluster(np.asarray(addresses) & FULL, size, count, values, m, site)
        if tag == LOCAL_TAG:
            return self.st_local(np.asarray(addresses) & FULL, size, count, values, m, site)
        return self.st_global(addresses, size, count, values, m, (site,))

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

    def st_local(
        self, addresses: Any, size: int, count: int, values: tuple, m: Mask, site: int
    ) -> None:
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
        operands = [self._stored(part, size, 1, m) for part in values]  # [count, active lanes]
        out = np.zeros((count, self.lanes), UINT[size])
        lanes = self._active(m)
        places: list[tuple[np.ndarray, NDArray[np.int64], NDArray[np.intp]]] = []
        if space in ("shared", "cluster"):
            cta, offsets = self._shared_offsets(
                addresses, size * count, m, (site,), space == "cluster", True
            )
            self._mark_atomic(cta, offsets[0], size * count, m)
            places.append((cta.shared.typed(size), offsets[0] // size, np.arange(len(lanes))))
        else:
            a = self._global(addresses, m)
            for target, index, part in self._located(a, size, count, True, (site,)):
                which = np.arange(len(lanes))[part]
                places.append((target.reshape(-1), index * count, which))
            if self.counting:
                self.machine.counters.st_global_bytes += size * count * len(lanes)
        for target, index, which in places:
            spots = index + np.arange(count)[:, None]  # [count, lanes]
            turns = [slice(None)]
            if len(np.unique(spots)) < spots.size:  # lanes that meet take turns
                turns = [slice(i, i + 1) for i in range(len(which))]
            for turn in turns:
                old, part = target[spots[:, turn]], which[turn]
                out[:, lanes[part]] = old
                target[spots[:, turn]] = _atomic(op, type_, old, [o[:, part] for o in operands])
        self.cta.cluster.version += 1
        return out

    def _mark_atomic(self, cta: Cta, offsets: NDArray[np.int64], nbytes: int, m: Mask) -> None:
        """Atomics do not race with one another; they count as writes for what follows."""
        warps = self.lane_warp[self._lanes(m)][:, None]
        cells = cta.shadow.cells(offsets, nbytes)
        cta.shadow.put(cells, warps, self.clocks.rows[warps, 0, warps])

    def ldmatrix(
        self, addresses: Any, count: int, trans: bool, m: Mask, sites: tuple[int, ...]
    ) -> NDArray[np.uint32]:
        """Words [accesses * count, lanes]."""
        words = self._matrices(addresses, count, trans, m, sites, False)
        words = words.reshape(-1, words.shape[-1])
        if m is None:
            return words
        out = np.zeros((len(words), self.lanes), np.uint32)
        out[:, m] = words
        return out

    def stmatrix(
        self,
        addresses: Any,
        count: int,
        trans: bool,
        values: Any,
        m: Mask,
        sites: tuple[int, ...],
    ) -> None:
        words = self._stored(values, 4, 1, m).reshape(len(sites), count, -1)
        self._matrices(addresses, count, trans, m, sites, True, words)

    def _matrices(
        self,
        addresses: Any,
        count: int,
        trans: bool,
        m: Mask,
        sites: tuple[int, ...],
        write: bool,
        words: Any = None,
    ) -> Any:
        """Moves words [accesses, count, active lanes] after all checks of the matrices' rows."""
        givers = m
        if count < 4:
            givers = self.lane_id < 8 * count if m is None else (self.lane_id < 8 * count) & m
        cta, rows = self._shared_offsets(addresses, 16, givers, sites, False, write)
        if self.check:
            self._check_shared(cta, rows, 16, givers, write, sites)
            if write:
                for w in self._warps(m):
                    self.clocks.touched_shared(self.warp0 + w, FULL, True)
        if self.counting:
            self._count_shared(rows, 16, givers, write)
        given = np.zeros((len(sites), rows.shape[1] // (8 * count), 32), np.int64)
        given[:, :, : 8 * count] = rows.reshape(len(sites), -1, 8 * count)
        spots = tensor_core.matrix_addresses(given.reshape(-1), count, trans)
        spots = spots.reshape(count, 2, len(sites), -1).transpose(2, 0, 3, 1)  # [.., half]
        if trans:
            index, memory = spots >> 1, cta.shared.typed(2)
        else:  # both halves of a word are neighbours
            index, memory = spots[..., 0] >> 2, cta.shared.typed(4)
        if write:
            words = np.ascontiguousarray(words)
            memory[index] = words.view(np.uint16).reshape(index.shape) if trans else words
            return None
        found = memory[index]
        return np.ascontiguousarray(found).view(np.uint32)[..., 0] if trans else found

    def movmatrix(self, value: Any) -> NDArray[np.uint32]:
        return tensor_core.movmatrix(np.ascontiguousarray(value))


_CONFLICTS: dict[tuple, int] = {}


def _bank_conflicts(offsets: NDArray[np.int64], m: Mask, nbytes: int) -> int:
    """Passes beyond the fewest of accesses [accesses, active lanes].

    32 banks of 4 bytes; wide accesses go by parts of a warp.
    """
    near = offsets - (offsets[0, 0] & ~127)
    key = (nbytes, None if m is None else m.tobytes(), len(offsets), near.tobytes())
    found = _CONFLICTS.get(key)
    if found is not None:
        return found
    warps = np.arange(offsets.shape[1]) // 32 if m is None else np.flatnonzero(m) // 32
    per_pass = max(1, min(32, 128 // nbytes))
    extra = 0
    for access in offsets:
        for warp in np.unique(warps):
            mine = access[warps == warp]
            for i in range(0, len(mine), per_pass):
                part = mine[i : i + per_pass]
                words = np.unique((part[:, None] + np.arange(0, max(nbytes, 4), 4)) // 4)
                extra += int(np.bincount(words % 32).max()) - 1
    if len(_CONFLICTS) > 1 << 12:
        _CONFLICTS.clear()
    _CONFLICTS[key] = extra
    return extra


def _atomic(op: str, type_: str, old: NDArray[Any], args: list[NDArray[Any]]) -> NDArray[Any]:
    """The new values of memory words."""
    new = np.ascontiguousarray(args[0])
    if op == "exch":
        return new
    if op == "cas":
        return np.where(old == new, args[1], old)
    if type_ in ("f16x2", "bf16x2") and op in ("add", "min", "max"):
        function = {"add": np.add, "min": ops.fmin, "max": ops.fmax}[op]
        return ops.narrow(type_, function, old, new)
    return tma.combine(op, {"b32": "u32", "b64": "u64"}.get(type_, type_), old, new)
