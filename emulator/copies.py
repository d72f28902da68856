"""Asynchronous writes: TMA, bulk copies, cp.async, st.async, and answers about other clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import tma
from .barriers import Barriers, phase_of
from .lanes import FULL, BulkThread, Mask
from .memory import PARAM_TAG, UINT
from .ptx import SHARED_BASE
from .recording import Commit, Copy, Drain, Point, Store

if TYPE_CHECKING:
    from .machine import Cta, Mbarrier


class Copies(Barriers):
    """Copies that a unit starts and others, or it, wait for."""

    # Asynchronous copies -------------------------------------------------------------------------

    def _start(self, work: Callable[[], None]) -> None:
        """Runs asynchronous work now, or leaves it for later."""
        if self.machine.eager:
            work()
        else:
            self.cta.cluster.pending.append(work)

    def _tensor_map(self, address: int, site: int) -> tma.TensorMap:
        if address >> 40 == PARAM_TAG:
            at = address & ((1 << 40) - 1)
            return tma.decode(self.machine.parameter_bytes[at : at + 128].tobytes())
        region = self.machine.memory.find(address, address + 128)
        if region is None:
            self.report("out of bounds", f"no tensor map at {address:#x}", site, fatal=True)
            raise AssertionError
        at = address - region.base
        return tma.decode(region.data[at : at + 128].tobytes())

    def _view(self, site: int, write: bool) -> Callable[[tma.Strided], np.ndarray]:
        def tell(kind: str, message: str) -> None:
            self.report(kind, message, site, fatal=kind == "out of bounds")

        memory, settled = self.machine.memory, self._has_settled()

        def view(strided: tma.Strided) -> np.ndarray:
            region = memory.find(strided.base, strided.end)
            if region is not None and region.unsettled and not settled:
                self._not_settled(region, site)
            return memory.view(strided, tell, write)

        return view

    def _box_granules(self, tensor: tma.TensorMap, address: int, cta: Cta, site: int) -> Any:
        """16-byte rows of shared memory that a box covers, in dense order."""
        offset = address & 0xFFFFFF
        if offset < SHARED_BASE or offset + tensor.smem_bytes > cta.shared.size:
            self.report(
                "out of bounds",
                f"a box of {tensor.smem_bytes} bytes at byte "
                f"{offset - SHARED_BASE} of {cta.shared.size - SHARED_BASE} bytes of shared memory",
                site,
                fatal=True,
            )
        try:
            return tma.swizzled(offset, tensor.smem_bytes, tensor.swizzle, tensor.inner_bytes) >> 4
        except ValueError as error:
            self.report("misaligned", str(error), site, fatal=True)
            raise AssertionError from error

    @staticmethod
    def _as_slice(granules: NDArray[np.int64], tensor: tma.TensorMap) -> NDArray[np.int64] | slice:
        """The same rows as a slice where they fill a range (in any order)."""
        low, n = int(granules.min()), len(granules)
        return slice(low, low + n) if int(granules.max()) - low + 1 == n else granules

    def _agent_of(self, cta: Cta, barrier: Mbarrier, offset: int) -> int:
        if barrier.agent < 0:
            key = ("mbarrier", cta.rank, offset)
            barrier.agent = self.clocks.agent(
                key, f"the copies on mbarrier at byte {offset - SHARED_BASE}"
            )
        return barrier.agent

    def _issue(self, barrier: Mbarrier) -> int:
        epoch = self.clocks.issue(barrier.agent)
        barrier.issued.append(epoch)
        barrier.last = epoch
        return epoch

    def _complete(self, barrier: Mbarrier, epoch: int, nbytes: int) -> None:
        barrier.issued.remove(epoch)
        if self.check:
            frontier = min(barrier.issued) - 1 if barrier.issued else barrier.last
            barrier.clock = self.clocks.mark(barrier.clock, barrier.agent, frontier)
        barrier.tx -= nbytes
        barrier.begun = True
        self._flip(barrier)

    def _one(self, lane: int) -> tuple[int, int]:
        return self.warp0 + lane // 32, 1 << lane % 32 | self._gone(lane // 32)

    def tma_load(
        self,
        dst: Any,
        descriptor: Any,
        coords: tuple,
        barrier: Any,
        multicast: Any,
        pair: bool,
        m: Mask,
        site: int,
    ) -> None:
        for lane in self._active(m).tolist():
            where, bar = self._at(dst, lane), self._at(barrier, lane)
            tensor = self._tensor_map(self._at(descriptor, lane), site)
            at = tuple(self._at(c, lane) for c in coords)
            if multicast is None:
                targets = [(where, bar)]
            else:
                bits = self._at(multicast, lane)
                ranks = [r for r in range(16) if bits >> r & 1]
                # A pair may signal one of its two: that on the side of the given one.
                signalled = [r & ~1 | bar >> 24 & 1 if pair else r for r in ranks]
                targets = [
                    (r << 24 | where & 0xFFFFFF, to << 24 | bar & 0xFFFFFF)
                    for r, to in zip(ranks, signalled, strict=True)
                ]
            if self.counting:
                region = tma.global_footprint(tensor, at)
                self.machine.counters.tma_load_bytes += region.nbytes if region else 0
            self._load_box(tensor, at, targets, pair, lane, site)

    def _load_box(
        self,
        tensor: tma.TensorMap,
        at: tuple,
        targets: list[tuple[int, int]],
        pair: bool,
        lane: int,
        site: int,
    ) -> None:
        view = self._view(site, False)
        arrivals, points = [], []
        for where, bar in targets:
            cta = self._target("a box", where >> 24, site)
            if where >> 24 + pair != bar >> 24 + pair:
                self.report(
                    "barrier misuse",
                    f"a box goes to CTA {where >> 24} of the cluster and counts at an mbarrier of "
                    f"CTA {bar >> 24}: {'another pair' if pair else 'without .cta_group::2'}",
                    site,
                )
            granules = self._box_granules(tensor, where, cta, site)
            owner, barrier = self._mbarrier(bar, site)
            self._agent_of(owner, barrier, bar & 0xFFFFFF)
            epoch = self._issue(barrier)
            points.append(phase_of(bar, barrier))
            if self.check:
                self._sees_init(barrier, self._only(lane), site, asynchronous=True)
                self._async_write(cta, self._as_slice(granules, tensor), barrier, epoch, lane, site)
            arrivals.append((cta, granules, barrier, epoch))
        self._note_copy(tensor.box_bytes, points, lane, site)

        def work() -> None:
            data = tma.read_box(tensor, at, view)
            for cta, granules, barrier, epoch in arrivals:
                cta.shared.granules[granules] = data.view(cta.shared.granules.dtype)
                self._complete(barrier, epoch, tensor.box_bytes)

        self._start(work)

    def _note_copy(self, nbytes: int, points: list[Point], lane: int, site: int) -> None:
        if self.log is not None:
            self.note_lane(Copy(site, nbytes, tuple(points)), lane)

    def _async_write(
        self, cta: Cta, rows: Any, barrier: Mbarrier, epoch: int, lane: int, site: int
    ) -> None:
        warp, bits = self._one(lane)
        found = cta.shadow.async_write(
            self.clocks.eyes(warp, bits),
            self.clocks.rows[warp, 0],
            rows,
            barrier.agent,
            epoch,
            site,
        )
        if found is not None:
            self._race(found, True, cta, site)

    def bulk_load(
        self,
        dst: Any,
        src: Any,
        size: Any,
        barrier: Any,
        multicast: Any,
        from_shared: bool,
        op: str,
        type_: str,
        m: Mask,
        site: int,
    ) -> None:
        """cp.async.bulk into shared memory, from global memory or the own CTA's shared memory."""
        for lane in self._active(m).tolist():
            n, where, bar = self._at(size, lane), self._at(dst, lane), self._at(barrier, lane)
            source = self._at(src, lane)
            self._aligned((n, where, source), site)
            ranks = [where >> 24]
            if multicast is not None:
                bits = self._at(multicast, lane)
                ranks = [r for r in range(16) if bits >> r & 1]
            arrivals, points = [], []
            for rank in ranks:
                cta = self._target("a bulk copy", rank, site)
                spot = rank << 24 | where & 0xFFFFFF
                rows = self._bulk_rows(cta, spot, n, site)
                there = bar if multicast is None else rank << 24 | bar & 0xFFFFFF
                if there >> 24 != rank:
                    self.report(
                        "barrier misuse",
                        f"a bulk copy goes to CTA {rank} of the cluster and counts at an mbarrier "
                        f"of CTA {there >> 24}",
                        site,
                    )
                owner, object_ = self._mbarrier(there, site)
                self._agent_of(owner, object_, there & 0xFFFFFF)
                epoch = self._issue(object_)
                points.append(phase_of(there, object_))
                if self.check:
                    self._sees_init(object_, self._only(lane), site, asynchronous=True)
                    self._async_write(cta, rows, object_, epoch, lane, site)
                arrivals.append((cta, rows, object_, epoch))
            self._note_copy(n, points, lane, site)
            if from_shared and self.check:
                rows = self._bulk_rows(self.cta, source, n, site)
                _, _, object_, epoch = arrivals[0]
                key, agents = ("copy", object_.agent), (object_.agent,)
                self._async_read(rows, key, agents, epoch, *self._one(lane), site)
            if self.counting and not from_shared:
                self.machine.counters.tma_load_bytes += n
            self._start(self._bulk_work(source, n, arrivals, from_shared, op, type_, site))

    def _bulk_work(
        self, source: int, n: int, arrivals, from_shared: bool, op: str, type_: str, site: int
    ):
        view = self._view(site, False)

        def work() -> None:
            if from_shared:
                at = source & 0xFFFFFF
                data = self.cta.shared.bytes[at : at + n].copy()
            else:
                data = view(tma.Strided(source, (n // 16,), (16,), 16)).copy().view(np.uint8)
            for cta, rows, barrier, epoch in arrivals:
                target = cta.shared.bytes[rows.start * 16 : rows.stop * 16]
                if op:
                    width = UINT[{"32": 4, "64": 8}[type_[1:]]]
                    data_ = tma.combine(op, type_, target.view(width), data.view(width))
                    target[...] = data_.view(np.uint8)
                else:
                    target[...] = data
                self._complete(barrier, epoch, n)

        return work

    def _aligned(self, values: tuple[int, ...], site: int) -> None:
        if any(v % 16 for v in values):
            self.report(
                "misaligned",
                "a bulk copy needs addresses and size in multiples of 16 bytes",
                site,
                fatal=True,
            )

    def _target(self, what: str, rank: int, site: int) -> Cta:
        """The CTA of the cluster that something is copied to."""
        ctas = self.cta.cluster.ctas
        if rank >= len(ctas):
            self.report(
                "out of bounds",
                f"{what} goes to CTA {rank} of a cluster of {len(ctas)}",
                site,
                fatal=True,
            )
        return ctas[rank]

    def _bulk_rows(self, cta: Cta, address: int, n: int, site: int) -> slice:
        offset = address & 0xFFFFFF
        if offset < SHARED_BASE or offset + n > cta.shared.size:
            self.report(
                "out of bounds",
                f"a bulk copy of {n} bytes at byte {offset - SHARED_BASE} "
                f"of {cta.shared.size - SHARED_BASE} bytes of shared memory",
                site,
                fatal=True,
            )
        return slice(offset >> 4, (offset + n) >> 4)

    def _async_read(
        self,
        rows: Any,
        key: Any,
        agents: tuple[int, ...],
        epoch: int,
        warp: int,
        bits: int,
        site: int,
    ) -> None:
        eyes, seen = self.clocks.eyes(warp, bits), self.clocks.seen(warp, bits)
        found = self.cta.shadow.async_read(eyes, seen, rows, key, agents, epoch, site)
        if found is not None:
            self._race(found, False, self.cta, site)

    def _bulk_thread(self, lane: int) -> BulkThread:
        warp = self.warp0 + lane // 32
        key = (warp, lane % 32)
        if key not in self.bulk:
            agent = self.clocks.agent(
                ("bulk", *key),
                f"the bulk copies of warp {(self.first + lane) // 32} lane {lane % 32}",
            )
            thread = BulkThread(agent)
            thread.committed = thread.waited = int(self.clocks.issued[agent])
            self.bulk[key] = thread
        return self.bulk[key]

    def tma_store(
        self, descriptor: Any, coords: tuple, src: Any, op: str, m: Mask, site: int
    ) -> None:
        for (where, source, *at), lanes in self._askers(m, descriptor, src, *coords):
            tensor = self._tensor_map(where, site)
            granules = self._box_granules(tensor, source, self.cta, site)
            # The unit takes an instruction once a warp: lanes that all ask for one store (the DSL
            # elects none) make one, though it joins the bulk group of each.
            for group in [[lane] for lane in lanes] if op else [lanes]:
                if self.counting:
                    region = tma.global_footprint(tensor, tuple(at))
                    self.machine.counters.tma_store_bytes += region.nbytes if region else 0
                view = self._view(site, True)

                def work(tensor=tensor, at=tuple(at), granules=granules, view=view) -> None:
                    data = self.cta.shared.granules[granules].view(np.uint8)
                    if op:
                        tma.reduce_box(tensor, at, data, view, op)
                    else:
                        tma.write_box(tensor, at, data, view)

                self._store(self._as_slice(granules, tensor), work, group, site)
                if self.log is not None:
                    self.note_lane(Store(site, tensor.box_bytes, bool(op)), group[0])

    def _askers(self, m: Mask, *operands: Any) -> Iterable[tuple[tuple[int, ...], list[int]]]:
        """Values of operands, and the lanes of one warp that have them."""
        lanes = self._active(m)
        columns = [
            [int(o)] * len(lanes) if np.ndim(o) == 0 else o[lanes].tolist() for o in operands
        ]
        found: dict[tuple, list[int]] = {}
        for lane, *values in zip(lanes.tolist(), *columns, strict=True):
            found.setdefault((lane // 32, *values), []).append(lane)
        return [(key[1:], group) for key, group in found.items()]

    def _store(self, rows: Any, work: Callable[[], None], lanes: list[int], site: int) -> None:
        """A bulk copy out of shared memory joins the open group of each thread that asks for it."""
        threads = [self._bulk_thread(lane) for lane in lanes]
        for thread in threads:
            thread.used, thread.site = True, site
        if self.check:
            warp, bits = self._one(lanes[0])
            if len(lanes) > 1:  # a copy of any of them has to be in order
                bits = self._gone(lanes[0] // 32)
            for epoch in {thread.committed + 1 for thread in threads}:
                agents = tuple(t.agent for t in threads if t.committed + 1 == epoch)
                self._async_read(rows, ("bulk", agents), agents, epoch, warp, bits, site)
        if self.machine.eager:
            work()
        else:
            threads[0].open.append(work)

    def bulk_store(
        self, dst: Any, src: Any, size: Any, op: str, type_: str, m: Mask, site: int
    ) -> None:
        """cp[.reduce].async.bulk from shared to global memory."""
        for lane in self._active(m).tolist():
            n, target, source = self._at(size, lane), self._at(dst, lane), self._at(src, lane)
            self._aligned((n, target, source), site)
            rows = self._bulk_rows(self.cta, source, n, site)
            if self.counting:
                self.machine.counters.tma_store_bytes += n
            view = self._view(site, True)

            def work(n=n, target=target, source=source, view=view) -> None:
                at = source & 0xFFFFFF
                data = self.cta.shared.bytes[at : at + n]
                place = view(tma.Strided(target, (n // 16,), (16,), 16))
                if op:
                    dtype = type_.replace("b", "u") if type_ in ("b32", "b64") else type_
                    size_ = {"f16": 2, "bf16": 2}.get(
                        dtype, int(dtype[1:]) // 8 if dtype[1:].isdigit() else 4
                    )
                    words = UINT[size_]
                    old = place.view(words)
                    old[...] = tma.combine(op, dtype, old, data.view(words))
                else:
                    place[...] = data.view(place.dtype)

            self._store(rows, work, [lane], site)
            if self.log is not None:
                self.note_lane(Store(site, n, bool(op)), lane)

    def bulk_commit(self, m: Mask, site: int) -> None:
        self.note(Commit(site, "bulk"), m)
        for lane in self._active(m).tolist():
            key = (self.warp0 + lane // 32, lane % 32)
            thread = self.bulk.get(key)
            if thread is not None:
                thread.committed += 1
                self.clocks.issued[thread.agent] = thread.committed
                thread.groups.append(thread.open)
                thread.open, thread.used = [], False

    def bulk_wait(self, keep: int, read: bool, m: Mask, site: int) -> None:
        self.note(Drain(site, "bulk", keep, read), m)
        for lane in self._active(m).tolist():
            thread = self.bulk.get((self.warp0 + lane // 32, lane % 32))
            if thread is None:
                continue
            while len(thread.groups) > keep:
                for work in thread.groups.pop(0):
                    work()
            thread.waited = max(thread.waited, thread.committed - keep)
            self.clocks.observe(self.warp0 + lane // 32, thread.agent, thread.waited)

    def exit_checks(self) -> None:
        """At the end of the CTA: nothing may still be in flight."""
        strict = self.machine.options.forbids("copies")
        for thread in self.bulk.values():
            if self.check and thread.waited < thread.committed:
                self.machine.report(
                    "unfinished copy",
                    "the CTA ends while a bulk copy may still read its shared "
                    "memory (no wait_group covers it)",
                    thread.site,
                )
            elif self.check and strict and thread.used:
                self.machine.report(
                    "unfinished copy",
                    "a bulk copy out of shared memory was never committed to a group",
                    thread.site,
                )
            for work in [w for group in thread.groups for w in group] + thread.open:
                work()
            if thread.used:
                self.clocks.issue(thread.agent)  # the next CTA has seen its end
        if self.check and (self.hot_acc or self.open_group.accumulators):
            self.machine.report("unfinished wgmma", "the CTA ends while a wgmma is in flight", -1)
        for pipe in self.pipes.values():
            self.clocks.issue(pipe.agent)

    # Cluster launch control ----------------------------------------------------------------------

    def try_cancel(self, response: Any, barrier: Any, everywhere: bool, m: Mask, site: int) -> None:
        """Takes a cluster off the grid that has not started, and says which.

        A response is the first CTA's x, y, z and 1, or four words that are no index and 0.
        """
        cluster = self.cta.cluster
        for lane in self._active(m).tolist():
            where, bar = self._at(response, lane), self._at(barrier, lane)
            if where % 16:
                self.report("misaligned", "a response of 16 bytes needs 16-byte alignment", site)
            if everywhere and not all(cta.live for cta in cluster.ctas):
                self.report("undefined", "a CTA that is to get the response has exited", site)
            arrivals, points = [], []
            for rank in range(len(cluster.ctas)) if everywhere else [where >> 24]:
                spot, there = rank << 24 | where & 0xFFFFFF, rank << 24 | bar & 0xFFFFFF
                cta = self._target("a response", rank, site)
                rows = self._bulk_rows(cta, spot, 16, site)
                owner, object_ = self._mbarrier(there, site, everywhere)
                self._agent_of(owner, object_, there & 0xFFFFFF)
                epoch = self._issue(object_)
                points.append(phase_of(there, object_))
                if self.check:
                    self._sees_init(object_, self._only(lane), site)
                    self._async_write(cta, rows, object_, epoch, lane, site)
                arrivals.append((cta, rows, object_, epoch))
            self._note_copy(16, points, lane, site)
            if self.check:
                self._not_refused(lane, site)
            self._start(self._cancel(arrivals))

    def _not_refused(self, lane: int, site: int) -> None:
        agent, epoch = self.cta.refused
        if agent >= 0 and self.clocks.rows[self._one(lane)[0], 0, agent] >= epoch:
            self.report(
                "undefined",
                "this CTA asks for another cluster after it was told that there is none",
                site,
            )

    def _cancel(self, arrivals: list[tuple[Cta, slice, Mbarrier, int]]) -> Callable[[], None]:
        def work() -> None:
            first = self.machine.cancel()
            words = np.array([*first, 1] if first else [FULL, FULL, FULL, 0], np.uint32)
            for cta, rows, barrier, epoch in arrivals:
                cta.shared.bytes[rows.start * 16 : rows.stop * 16] = words.view(np.uint8)
                if first is None:
                    cta.refused = (barrier.agent, epoch)
                self._complete(barrier, epoch, 16)

        return work

    # cp.async ------------------------------------------------------------------------------------

    def _cp_agent(self, warp: int) -> int:
        agent = self.clocks.agent(("cp.async", warp), f"cp.async of warp {warp}")
        self.clocks.asynchronous[agent] = False  # it writes through the generic proxy
        return agent

    def cp_async(self, dst: Any, src: Any, size: int, read: Any, m: Mask, site: int) -> None:
        cta, offsets = self._shared_offsets(dst, size, m, (site,), False, True)
        addresses, lanes = self._global(src, m)[0], self._active(m)
        counts = np.broadcast_to(np.asarray(read), (self.lanes,))[lanes].astype(np.int64)
        if self.check:
            self._check_shared(cta, offsets, size, m, True, (site,))
            cells = cta.shadow.cells(offsets[0], size)
            for w in self._warps(m):
                agent = self._cp_agent(self.warp0 + w)
                epoch = int(self.clocks.issued[agent]) + 1
                cta.shadow.put(cells[lanes // 32 == w], agent, epoch)
        if self.counting:
            self.machine.counters.ld_global_bytes += int(counts.sum())
            self.machine.counters.shared_write_bytes += size * len(lanes)

        def work() -> None:
            rows = np.zeros((len(lanes), size), np.uint8)
            for n in np.unique(counts[counts > 0]).tolist():  # mostly all lanes read `size` bytes
                mine = np.flatnonzero(counts == n)
                if n in (4, 8, 16):
                    words = self._read(addresses[None, mine], 4, n // 4, (site,))
                    rows[mine, :n] = words.view(np.uint8).reshape(-1, n)
                else:
                    a = addresses[mine] + np.arange(n, dtype=np.uint64)[:, None]
                    rows[mine, :n] = self._read(a, 1, 1, (site,) * n).reshape(n, -1).T
            cta.shared.typed(1, size)[offsets[0] // size] = rows

        if self.machine.eager:
            work()
        else:
            self.cp_open.append(work)

    def cp_commit(self, m: Mask, site: int) -> None:
        self.cp_groups.append(self.cp_open)
        self.cp_open = []
        for w in self._warps(m):
            self.clocks.issue(self._cp_agent(self.warp0 + w))

    def cp_wait(self, keep: int, everything: bool, m: Mask, site: int) -> None:
        if everything:
            self.cp_commit(m, site)
            keep = 0
        while len(self.cp_groups) > keep:
            for work in self.cp_groups.pop(0):
                work()
        for w in self._warps(m):
            agent = self._cp_agent(self.warp0 + w)
            epoch = int(self.clocks.issued[agent]) - keep
            row = self.clocks.rows[self.warp0 + w, 0]
            row[agent] = max(int(row[agent]), epoch)

    def cp_mbarrier(self, address: Any, no_increment: bool, m: Mask, site: int) -> None:
        """Arrives when the cp.async issued so far have completed."""
        self.cp_wait(0, True, m, site)
        lanes = self._active(m)
        where = self._at(address, int(lanes[0]))
        if not no_increment:
            _, barrier = self._mbarrier(where, site, False)
            barrier.pending += len(lanes)
        self._arrive_one(where, 1, 0, 1, False, False, m, site)

    def st_async(
        self, addresses: Any, size: int, values: tuple, barrier: Any, m: Mask, site: int
    ) -> None:
        nbytes = size * len(values)
        for lane in self._active(m).tolist():
            only = self._only(lane)
            bar = self._at(barrier, lane)
            cta, offsets = self._shared_offsets(addresses, nbytes, only, (site,), True, True)
            owner, object_ = self._mbarrier(bar, site)
            self._agent_of(owner, object_, bar & 0xFFFFFF)
            epoch = self._issue(object_)
            if self.check:
                self._sees_init(object_, only, site)
                self._check_shared(cta, offsets, nbytes, only, True, (site,))
                cta.shadow.put(cta.shadow.cells(offsets, nbytes), object_.agent, epoch)
            words = self._stored(values, size, len(values), only)
            cta.shared.typed(size, len(values))[offsets // nbytes] = words
            self._complete(object_, epoch, nbytes)
