"""Fences, named barriers, cluster barriers and mbarriers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .accesses import Accesses
from .checker import Clock
from .lanes import FULL, Mask
from .ptx import SHARED_BASE
from .recording import Arrive, Point, Wait

if TYPE_CHECKING:
    from .machine import Cta, Mbarrier, NamedBarrier


class Barriers(Accesses):
    """How a unit waits and is waited for."""

    # Fences and barriers -------------------------------------------------------------------------

    def fence(self, kind: str, m: Mask, site: int) -> None:
        own = kind == "proxy_async_own"  # for the CTA's own shared memory alone
        if own or kind in ("proxy_async", "mbarrier_init"):
            if kind != "mbarrier_init":
                for w in self._warps(m):
                    bits = self._lane_bits(m, w) | self._gone(w)
                    self.clocks.fence(self.warp0 + w, bits, own)
            for barrier in self.mbar_inits:
                barrier.fenced = True
            self.mbar_inits.clear()
        if own or kind in ("proxy_async", "mbarrier_init", "proxy_release"):
            self.fenced_clock = self._release(m, None)

    fenced_clock: Clock | None = None

    def _named(self, barrier: Any, m: Mask, site: int) -> NamedBarrier | None:
        """The barrier all active lanes name; None after splitting the group if they differ."""
        one = self._shared_value(barrier, m)
        return None if one is None else self.cta.named[one & 15]

    def _arrive_named(self, named: NamedBarrier, count: Any, m: Mask, site: int) -> bool:
        """Counts the active lanes; True if that completes the barrier."""
        lanes = self.lanes - int(self.exited.sum()) if m is None else int(np.count_nonzero(m))
        expected = self._at(count, 0 if m is None else int(m.argmax()))
        if expected % 32:
            self.report(
                "barrier misuse",
                f"a barrier of {expected} threads: a multiple of 32 is needed",
                site,
            )
        if named.arrived and expected != named.expected:
            self.report(
                "barrier misuse",
                f"a barrier is used for {expected} threads and, at "
                f"{self.machine.source(named.first_site)}, for {named.expected}",
                site,
            )
        if self.log is not None:
            self.note(Arrive(site, self._meeting(named)), m)
        if not named.arrived:
            named.first_site = site
        named.expected = expected
        named.arrived += lanes
        if self.check:
            named.clock = self._release(m, named.clock)
        return self._complete_named(named, site)

    def _meeting(self, named: NamedBarrier) -> Point:
        number = next(i for i, one in enumerate(self.cta.named) if one is named)
        return "bar", self.cta.rank, number, named.generation

    def _complete_named(self, named: NamedBarrier, site: int) -> bool:
        need = named.expected or self.cta.live
        if named.arrived < need:
            return False
        if named.arrived > need:
            self.report(
                "barrier misuse", f"{named.arrived} threads arrive at a barrier of {need}", site
            )
        named.arrived = 0
        named.done, named.clock = named.clock, None
        named.generation += 1
        self.cta.cluster.version += 1
        return True

    def lanes_left(self, lanes: int) -> None:
        """Lanes exited: barriers of all threads need them no longer."""
        for named in self.cta.named:
            if named.arrived and named.expected == 0 and self.cta.live:
                self._complete_named(named, named.first_site)

    def bar_arrive(self, barrier: Any, count: Any, m: Mask, site: int) -> None:
        named = self._named(barrier, m, site)
        if named is not None:
            self._arrive_named(named, count, m, site)
            return
        lanes = self._active(m)
        for one in np.unique(barrier[lanes]):
            part = (barrier == one) & (self._everyone if m is None else m)
            self._arrive_named(self.cta.named[int(one) & 15], count, part, site)

    def bar_sync(self, barrier: Any, count: Any, m: Mask, site: int) -> bool:
        group = self.group
        if isinstance(group.ticket, tuple):
            named, generation = group.ticket
            if named.generation == generation:
                return self._hold(named, barrier, m)
        else:
            named = self._named(barrier, m, site)
            if named is None:
                return self._split_by_barrier(barrier, m)
            generation = named.generation
            point = self._meeting(named) if self.log is not None else None
            arrived = self._arrive_named(named, count, m, site)
            if point:
                self.note(Wait(site, point), m)
            if not arrived:
                group.ticket = (named, generation)
                return self._hold(named, barrier, m)
        group.ticket = None
        if self.check:
            self._acquire(m, named.done)
            for w in self._warps(m):
                self.clocks.sync_warp(self.warp0 + w)
        return True

    def _hold(self, named: NamedBarrier, barrier: Any, m: Mask) -> bool:
        number = self._at(barrier, 0 if m is None else int(m.argmax()))
        generation = named.generation
        return self._stalled(
            lambda: named.generation != generation,
            lambda: (
                f"barrier {number} has {named.arrived} of {named.expected or self.cta.live} threads"
            ),
        )

    def _split_by_barrier(self, barrier: NDArray, m: Mask) -> bool:
        """Warps of one group name different barriers: each becomes a group that waits alone."""
        group, active = self.group, self._everyone if m is None else m
        self.groups.remove(group)
        for one in np.unique(barrier[active]):
            part = self.part(group.pc, (barrier == one) & active)
            part.ticket = "alone"
            self.groups.append(part)
        return self._stalled(lambda: True, lambda: "")

    def bar_red(self, barrier: Any, count: Any, value: Any, op: str, m: Mask, site: int) -> bool:
        group = self.group
        active = self._everyone if m is None else m
        if not isinstance(group.ticket, tuple):
            named = self._named(barrier, m, site)
            if named is None:
                return self._split_by_barrier(barrier, m)
            if not named.arrived:
                named.votes = []
            named.votes.append(np.broadcast_to(value, (self.lanes,))[active])
        else:
            named = group.ticket[0]
        if not self.bar_sync(barrier, count, m, site):
            return False
        votes = np.concatenate(named.votes)
        results = {"popc": int(votes.sum()), "and": votes.all(), "or": votes.any()}
        self._reduced = results[op]
        return True

    def bar_result(self) -> Any:
        return self._reduced

    def cluster_arrive(self, m: Mask, relaxed: bool, site: int) -> None:
        barrier = self.cta.cluster.barrier
        lanes = self.lanes - int(self.exited.sum()) if m is None else int(np.count_nonzero(m))
        for w in self._warps(m):
            bits = self._lane_bits(m, w)
            if self.cluster_arrived[w] & bits:
                self.report(
                    "barrier misuse",
                    "threads that have not waited since arrive at the cluster's barrier again",
                    site,
                )
            self.cluster_arrived[w] |= bits
            self.cluster_ticket[w] = barrier.generation
        if self.log is not None:
            self.note(Arrive(site, ("cluster", 0, 0, barrier.generation)), m)
        barrier.arrived += lanes
        if self.check:
            for w in self._warps(m):
                agent = self._reaching(self.warp0 + w)
                barrier.before[agent] = int(self.clocks.issued[agent])
            if not relaxed:
                barrier.clock = self._release(m, barrier.clock)
            elif self.fenced_clock is not None:
                barrier.clock = self.clocks.join(barrier.clock, self.fenced_clock)
        if barrier.arrived >= sum(cta.live for cta in self.cta.cluster.ctas):
            barrier.arrived = 0
            barrier.done, barrier.clock = barrier.clock, None
            barrier.generation += 1
            self.cta.cluster.version += 1
            barrier.came = dict(barrier.before)

    def cluster_wait(self, m: Mask, site: int) -> bool:
        barrier = self.cta.cluster.barrier
        ticket = min(self.cluster_ticket[w] for w in self._warps(m))
        for w in self._warps(m):
            if self._lane_bits(m, w) & ~(self.cluster_arrived[w] | self._gone(w)):
                self.report(
                    "barrier misuse",
                    "threads wait at the cluster's barrier that have not arrived there",
                    site,
                    fatal=True,
                )
        if barrier.generation == ticket:
            need = sum(cta.live for cta in self.cta.cluster.ctas)
            return self._stalled(
                lambda: barrier.generation != ticket,
                lambda: f"the cluster barrier has {barrier.arrived} of {need} threads",
            )
        for w in self._warps(m):
            self.cluster_arrived[w] &= ~self._lane_bits(m, w)
        if self.check:
            self._acquire(m, barrier.done)
            reached = self.cta.reached  # the CTA did not end before what came before
            for agent, epoch in barrier.came.items():
                if agent in reached and reached[agent][0] <= epoch:
                    del reached[agent]
        if self.log is not None:
            self.note(Wait(site, ("cluster", 0, 0, ticket)), m)
        return True

    # mbarriers -----------------------------------------------------------------------------------

    def _mbarrier(self, address: int, site: int, cluster: bool = True) -> tuple[Cta, Mbarrier]:
        rank = address >> 24
        if rank >= len(self.cta.cluster.ctas) or (not cluster and rank != self.cta.rank):
            self.report(
                "out of bounds",
                f"mbarrier address {address:#x} is not in this CTA's window",
                site,
                fatal=True,
            )
        cta = self.cta.cluster.ctas[rank]
        barrier = cta.mbarriers.get(address & 0xFFFFFF)
        if barrier is None:
            self.report(
                "barrier misuse", f"no mbarrier was initialised at {address:#x}", site, fatal=True
            )
            raise AssertionError
        self._alive(cta, "an mbarrier", "barrier misuse", site)
        return cta, barrier

    def _sees_init(self, barrier: Mbarrier, m: Mask, site: int, asynchronous: bool = False) -> None:
        warp, epoch = barrier.init
        for w in self._warps(m):
            if self.clocks.rows[self.warp0 + w, 0, warp] < epoch:
                self.report(
                    "race",
                    "an mbarrier is used with no synchronisation after its initialisation",
                    site,
                )
        if asynchronous and not barrier.fenced:
            self.report(
                "missing proxy fence",
                "an asynchronous copy uses an mbarrier whose "
                "initialisation no fence (mbarrier_init or proxy.async) made visible",
                site,
            )

    def mbar_init(self, address: Any, count: Any, m: Mask, site: int) -> None:
        from .machine import Mbarrier

        for lane in self._active(m).tolist():
            a, n = self._at(address, lane), self._at(count, lane)
            cta, offsets = self._shared_offsets(a, 8, self._only(lane), (site,), False, True)
            offset = int(offsets[0, 0])
            barrier = Mbarrier(n, n)
            warp = self.warp0 + lane // 32
            barrier.init = (warp, int(self.clocks.rows[warp, 0, warp]))
            if not 0 < n < 1 << 20:
                self.report("barrier misuse", f"an mbarrier of {n} arrivals", site)
            cta.mbarriers[offset] = barrier
            self.mbar_inits.append(barrier)
            self.machine.barrier_sites[offset] = site

    def _only(self, lane: int) -> NDArray[np.bool_]:
        mask = np.zeros(self.lanes, bool)
        mask[lane] = True
        return mask

    def mbar_inval(self, address: Any, m: Mask, site: int) -> None:
        for lane in self._active(m).tolist():
            a = self._at(address, lane)
            self._mbarrier(a, site, False)
            del self.cta.mbarriers[a & 0xFFFFFF]

    def mbar_state(self, address: Any, count: Any, m: Mask, site: int) -> NDArray[np.uint64]:
        """What each lane sees that arrives with `count`: the phase, above it the pending count."""
        states = np.zeros(self.lanes, np.uint64)
        taken: dict[int, int] = {}  # by the lanes before
        for lane in self._active(m).tolist():
            where = self._at(address, lane)
            _, barrier = self._mbarrier(where, site, False)
            before = taken.get(where, 0)
            states[lane] = max(0, barrier.pending - before) << 32 | barrier.phase & FULL
            taken[where] = before + self._at(count, lane)
        return states

    def mbar_arrive(
        self,
        address: Any,
        count: Any,
        nbytes: Any,
        kind: int,
        relaxed: bool,
        cluster: bool,
        no_complete: bool,
        m: Mask,
        site: int,
    ) -> None:
        """kind: 0 counts bytes only, 1 arrives, 2 arrives and drops. Negative bytes have come."""
        one = self._shared_value(address, m)
        if one is not None:
            parts = {one: m}
        else:
            active = self._everyone if m is None else m
            parts = {a: active & (address == a) for a in np.unique(address[active]).tolist()}
        for one, part in parts.items():
            self._arrive_one(one, count, nbytes, kind, relaxed, cluster, part, site, no_complete)

    def _arrive_one(
        self,
        address: int,
        count: Any,
        nbytes: Any,
        kind: int,
        relaxed: bool,
        cluster: bool,
        m: Mask,
        site: int,
        no_complete: bool = False,
    ) -> None:
        cta, barrier = self._mbarrier(address, site, cluster)
        lanes = self._active(m)
        if not relaxed and cta is not self.cta:
            self._reach(cta, m, "an mbarrier", "barrier misuse", site)
        if self.check:
            self._sees_init(barrier, m, site)
        total = self._sum(count, lanes) if kind else 0
        barrier.tx += self._sum(nbytes, lanes)
        if total:
            if total > barrier.pending or (no_complete and total == barrier.pending):
                self.report(
                    "barrier misuse",
                    f"{total} arrivals at mbarrier {address:#x} that waits for "
                    f"{barrier.pending} of {barrier.count}",
                    site,
                )
            if self.check and not relaxed:
                barrier.clock = self._release(m, barrier.clock)
            if self.log is not None:
                self.note(Arrive(site, phase_of(address, barrier)), m)
            barrier.pending -= total
            if kind == 2:
                barrier.drop += total
        self._flip(barrier)

    @staticmethod
    def _sum(value: Any, lanes: NDArray) -> int:
        if isinstance(value, np.ndarray) and value.ndim:
            return int(value[lanes].sum())
        return int(value) * len(lanes)

    def _flip(self, barrier: Mbarrier) -> None:
        if barrier.pending <= 0 and barrier.tx == 0:
            barrier.phase += 1
            barrier.begun = False
            barrier.count -= barrier.drop
            barrier.drop = 0
            barrier.pending = barrier.count
            if barrier.clock is not None:
                barrier.done = barrier.clock.copy()
            self.cta.cluster.version += 1

    def mbar_wait(
        self, address: Any, phase: Any, parity: bool, relaxed: bool, m: Mask, site: int
    ) -> Any:
        """True where the phase has completed; STALL for a wait that failed before."""
        lanes, where = self._active(m), self._shared_value(address, m)
        if where is None or self._shared_value(phase, m) is None:  # warps in other turns of a loop
            out = np.zeros(self.lanes, bool)
            wheres, phases = (np.broadcast_to(value, self.lanes) for value in (address, phase))
            for one, wanted in sorted({(int(wheres[i]), int(phases[i])) for i in lanes}):
                part = (wheres == one) & (phases == wanted) & (self._everyone if m is None else m)
                out[part] = self._completed(one, wanted, parity, relaxed, part, site)
            return out if out[lanes].any() else self._spin(int(wheres[lanes[0]]), phase, lanes)
        if self._completed(where, phase, parity, relaxed, m, site):
            return True
        return self._spin(where, phase, lanes)

    def _completed(
        self, address: int, phase: Any, parity: bool, relaxed: bool, m: Mask, site: int
    ) -> bool:
        _, barrier = self._mbarrier(address, site, False)
        wanted = self._at(phase, int(self._active(m)[0]))
        if self.check:
            self._sees_init(barrier, m, site)
        done = (barrier.phase ^ wanted) & 1 if parity else barrier.phase != wanted & FULL
        if not done:
            return False
        if self.check and not relaxed:
            self._acquire(m, barrier.done)
        if self.log is not None:
            self.note(Wait(site, phase_of(address, barrier, 1)), m)
        return True

    def _spin(self, address: int, phase: Any, lanes: NDArray) -> Any:
        """A wait fails: false the first time, and the group sleeps if it comes back unchanged."""
        _, barrier = self._mbarrier(address, -1)
        group, version = self.group, self.cta.cluster.version
        before, group.spun = group.spun, (group.pc, barrier.phase)
        if before != group.spun:
            return False
        wanted = self._at(phase, int(lanes[0]))

        def describe() -> str:
            number = address & 0xFFFFFF
            missing = (
                f"{barrier.pending} of {barrier.count} arrivals and {barrier.tx} bytes missing"
            )
            if barrier.tx < 0:
                missing = (
                    f"{barrier.pending} of {barrier.count} arrivals missing and "
                    f"{-barrier.tx} bytes over those expected"
                )
            return (
                f"mbarrier at byte {number - SHARED_BASE} of shared memory: waits for phase of "
                f"parity {wanted & 1}, present phase has parity {barrier.phase & 1}, {missing}"
            )

        cluster = self.cta.cluster
        self._stalled(lambda: cluster.version != version, describe, lambda: barrier.pending == 0)
        return self._stall


def phase_of(address: int, barrier: Mbarrier, before: int = 0) -> Point:
    """The present phase of an mbarrier, or one `before` it."""
    return "mbarrier", address >> 24, address & 0xFFFFFF, barrier.phase - before
