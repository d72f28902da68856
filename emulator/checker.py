"""Happens-before: vector clocks over warps and asynchronous agents, and shared-memory shadows.

Whether two accesses race does not depend on the order in which the emulator ran them. Every warp is
an agent with a clock; so is every source of asynchronous work: the copies that arrive on one
mbarrier, the wgmma groups of a warpgroup, the bulk groups of a thread. A synchronising operation
hands over what the releasing agent has seen; an access is in order if its agent has seen the
conflicting one before it.

Each agent keeps two rows of clocks (PTX memory model, "proxies"): what it has seen, and what of
that is visible to the asynchronous proxy if it starts a TMA or wgmma now. A generic write passes
from the first row to the second only by a `fence.proxy.async` somewhere on the way.

Shadows hold, for each granule of shared memory, the last writer and the last read of each reader.
Clocks only grow, and a CTA starts having seen everything, so shadows are reused without clearing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Clock = NDArray[np.int32]  # [2, agents]: seen, and visible to the asynchronous proxy


@dataclass(frozen=True)
class Conflict:
    """A race found: the other access."""

    kind: str  # 'write' or 'read' that the access races with
    agent: int
    site: int
    granule: int
    missing_fence: bool  # ordered, but not by a proxy fence


class Clocks:
    """The agents of one cluster and what each has seen."""

    def __init__(self, warps: int) -> None:
        self.capacity = 128
        self.rows = np.zeros((warps, 2, self.capacity), np.int32)
        self.warps = warps
        self.count = warps
        self.asynchronous = np.zeros(self.capacity, bool)
        self.issued = np.zeros(self.capacity, np.int32)  # last epoch of each asynchronous agent
        self.ids: dict[Hashable, int] = {}
        self.names: list[str] = [f"warp {w}" for w in range(warps)]
        self.rows[np.arange(warps), 0, np.arange(warps)] = 1
        # Lanes of each warp that wrote and read shared memory since the warp last synchronised
        # itself, and the epoch before that: an arrival by other lanes does not cover it.
        self.wrote = [0] * warps
        self.read = [0] * warps
        self.touched_at = [0] * warps
        self.covered = [0] * warps
        # Of each warp, the epoch of its first write to another CTA with no fence for that since.
        self.elsewhere: dict[int, int] = {}

    def start(self, first: int, count: int) -> None:
        """A new CTA occupies warps first..first+count: it has seen all that came before."""
        latest = self.issued.copy()
        own = np.arange(self.warps)
        latest[own] = self.rows[own, 0, own]
        for warp in range(first, first + count):
            self.rows[warp, :] = latest
            self.rows[warp, 0, warp] += 1
            self.wrote[warp] = self.read[warp] = 0
            self.covered[warp] = int(self.rows[warp, 0, warp]) - 1
            self.elsewhere.pop(warp, None)

    def agent(self, key: Hashable, name: str) -> int:
        """The number of an asynchronous agent, made when first asked for."""
        found = self.ids.get(key)
        if found is None:
            found = self.count
            self.count += 1
            if self.count > self.capacity:
                grow = self.capacity
                self.capacity *= 2
                self.rows = np.concatenate(
                    [self.rows, np.zeros((self.warps, 2, grow), np.int32)], axis=2
                )
                self.asynchronous = np.concatenate([self.asynchronous, np.zeros(grow, bool)])
                self.issued = np.concatenate([self.issued, np.zeros(grow, np.int32)])
            self.ids[key] = found
            self.names.append(name)
            self.asynchronous[found] = True
        return found

    def issue(self, agent: int) -> int:
        """The epoch of a new operation of an asynchronous agent."""
        self.issued[agent] += 1
        return int(self.issued[agent])

    def touched_shared(self, warp: int, lanes: int, write: bool) -> None:
        (self.wrote if write else self.read)[warp] |= lanes
        self.touched_at[warp] = int(self.rows[warp, 0, warp])

    def _leaves_out(self, warp: int, lanes: int) -> bool:
        """Whether what a release of `lanes` hands over is other lanes' too.

        Of lanes that wrote, that is what they wrote; of others, that all have read.
        """
        wrote = self.wrote[warp]
        return bool(wrote & ~lanes or (self.read[warp] & ~lanes and not wrote))

    def _visible(self, warp: int, lanes: int) -> int:
        """The epoch up to which the warp's own writes are covered by a release of `lanes`."""
        if self.wrote[warp] & ~lanes:
            return self.covered[warp]
        return int(self.rows[warp, 0, warp])

    def _tick(self, warp: int) -> None:
        self.rows[warp, 0, warp] += 1

    def release(self, warps: slice, lanes: Sequence[int], into: Clock | None = None) -> Clock:
        """What `lanes` of each warp hand over, joined to `into`, which may be overwritten."""
        rows = self.rows[warps].copy()
        for i, warp in enumerate(range(warps.start, warps.stop)):
            if self._leaves_out(warp, lanes[i]):
                np.minimum(rows[i, :, warp], self.covered[warp], out=rows[i, :, warp])
            self._tick(warp)
        clock = rows.max(0)
        return clock if into is None else self.join(into, clock)

    def acquire(self, warps: slice, clock: Clock) -> None:
        """The warps have synchronised with agents that had seen `clock`."""
        for warp in range(warps.start, warps.stop):
            if self.wrote[warp] | self.read[warp]:
                # What comes back of the warp's own accesses, all its lanes have seen.
                self.covered[warp] = max(self.covered[warp], int(clock[0, warp]))
                if self.covered[warp] >= self.touched_at[warp]:
                    self.wrote[warp] = self.read[warp] = 0
        rows = self.rows[warps, :, : clock.shape[1]]
        np.maximum(rows, clock, out=rows)

    def observe(self, warp: int, agent: int, epoch: int) -> None:
        """The warp has waited for an asynchronous agent's operations up to `epoch`."""
        row = self.rows[warp]
        if row[0, agent] < epoch:
            row[0, agent] = row[1, agent] = epoch

    def sync_warp(self, warp: int) -> None:
        """The lanes of a warp have synchronised with one another."""
        self.covered[warp] = int(self.rows[warp, 0, warp])
        self.wrote[warp] = self.read[warp] = 0
        self._tick(warp)

    def wrote_elsewhere(self, warp: int) -> None:
        """The warp is about to write to the shared memory of another CTA."""
        if warp not in self.elsewhere:
            self._tick(warp)  # a fence for its own CTA's covers what it wrote there before
            self.elsewhere[warp] = int(self.rows[warp, 0, warp])

    def fence(self, warp: int, lanes: int, own: bool = False) -> None:
        """fence.proxy.async: what the warp has seen becomes visible to the asynchronous proxy; of
        a fence for the `own` CTA's memory, not what it wrote to another's."""
        row = self.rows[warp]
        seen = row[0].copy()
        seen[warp] = self._visible(warp, lanes)
        if warp in self.elsewhere:
            if own:
                seen[warp] = min(int(seen[warp]), self.elsewhere[warp] - 1)
            elif seen[warp] >= self.elsewhere[warp]:
                del self.elsewhere[warp]
        np.maximum(row[1], seen, out=row[1])
        self._tick(warp)

    def seen(self, warp: int, lanes: int) -> NDArray[np.int32]:
        """Per agent, the epoch up to which its writes come before what `lanes` do now."""
        row = self.rows[warp, 0]
        if self.wrote[warp] & ~lanes:
            row = row.copy()
            row[warp] = min(int(row[warp]), self.covered[warp])
        return row

    def eyes(self, warp: int, lanes: int) -> NDArray[np.int32]:
        """Per agent, the epoch up to which its writes are visible to what `lanes` start now."""
        row = self.rows[warp]
        eyes = np.where(self.asynchronous, row[0], row[1])
        if self.wrote[warp] & ~lanes:
            eyes[warp] = min(int(eyes[warp]), self.covered[warp])
        return eyes

    def join(self, into: Clock | None, clock: Clock) -> Clock:
        """The union of what two clocks have seen; `into` may be overwritten."""
        if into is None:
            return clock.copy()
        if into.shape[1] < clock.shape[1]:
            wide = np.zeros((2, clock.shape[1]), np.int32)
            wide[:, : into.shape[1]] = into
            into = wide
        width = clock.shape[1]
        np.maximum(into[:, :width], clock, out=into[:, :width])
        return into

    def mark(self, into: Clock | None, agent: int, epoch: int) -> Clock:
        """`into`, having also seen an asynchronous agent's operations up to `epoch`."""
        if into is None or into.shape[1] <= agent:
            wide = np.zeros((2, self.capacity), np.int32)
            if into is not None:
                wide[:, : into.shape[1]] = into
            into = wide
        into[:, agent] = np.maximum(into[:, agent], epoch)
        return into


@dataclass
class _AsyncReader:
    """Last reads by asynchronous agents that read together (a warpgroup's wgmma)."""

    agents: NDArray[np.intp]
    epochs: NDArray[np.int32]  # of each 16-byte row
    sites: NDArray[np.int32]
    top: int = 0  # the highest epoch


class Shadow:
    """Last accesses to each cell of one CTA's shared memory; 16-byte rows of equal cells.

    Cells are as small as the kernel's smallest shared access, so that neighbours never share one.
    Most checks end early: where the accessing warps have seen a reader's last read of anything, or
    all of a tile has one writer.
    """

    def __init__(self, size: int, cell_bytes: int, warps: int) -> None:
        self.cell_bytes = cell_bytes
        shape = (-(-size // 16), 16 // cell_bytes)
        self.writer = np.full(shape, -1, np.int16)
        self.written_at = np.zeros(shape, np.int32)
        self.write_site = np.zeros(shape, np.int32)
        self.read_site = np.zeros(shape, np.int32)  # of lanes' reads
        self.reads = np.zeros((warps, *shape), np.int32)  # by lanes of each warp
        self.last_read = np.zeros(warps, np.int32)  # the highest epoch in `reads`
        self.async_readers: dict[Hashable, _AsyncReader] = {}

    def clear(self) -> None:
        """A new CTA: nothing has been written."""
        self.writer.fill(-1)

    def forget(self, row: int, cells: slice) -> None:
        """Memory that holds a barrier is no data."""
        self.writer[row, cells] = -1

    def cells(self, offsets: NDArray[np.int64], nbytes: int) -> NDArray[np.int64]:
        """Flat numbers of the cells that accesses of `nbytes` at byte offsets cover, [..., n]."""
        span = np.arange(max(1, nbytes // self.cell_bytes))
        return (offsets // self.cell_bytes)[..., None] + span

    def put(self, cells: NDArray[np.int64], agents: NDArray | int, epochs: NDArray | int) -> None:
        """Makes agents the last writers of cells."""
        self.writer.reshape(-1)[cells] = agents
        self.written_at.reshape(-1)[cells] = epochs

    def generic(
        self,
        clocks: Clocks,
        present: slice,
        warps: NDArray[np.intp],
        cells: NDArray[np.int64],
        write: bool,
        site: int,
    ) -> Conflict | str | None:
        """Checks and records accesses of lanes.

        Args:
            present: warps that take part.
            warps: of each lane, [lanes].
            cells: of each lane, [..., lanes, n].
        """
        found = self._generic_conflict(clocks, present, warps[:, None], cells, write)
        if not isinstance(found, str):
            self._record(clocks, present, warps[:, None], cells, write, site)
        if found is None and write and present.stop - present.start > 1:
            writer = self.writer.take(cells)
            wrong = writer != warps[:, None]
            if wrong.any():  # several warps write the same cells by one instruction
                sites = self.write_site.take(cells)
                return self._conflict("write", writer, sites, self._rows(cells), wrong)
        return found

    def together(
        self,
        clocks: Clocks,
        present: slice,
        warps: NDArray[np.intp],
        cells: NDArray[np.int64],
        write: bool,
        sites: tuple[int, ...],
    ) -> bool:
        """Checks and records several instructions, [instructions, lanes, n] cells, as one.

        False, with nothing recorded, if they have to be looked at one by one.
        """
        if self._generic_conflict(clocks, present, warps[:, None], cells, write) is not None:
            return False
        before = self.writer.take(cells), self.written_at.take(cells)
        self._record(clocks, present, warps[:, None], cells, write, np.array(sites)[:, None, None])
        if write and (self.writer.take(cells) != warps[:, None]).any():
            self.put(cells, *before)  # some write where others do
            return False
        return True

    def _generic_conflict(
        self, clocks: Clocks, present: slice, warps, cells, write: bool
    ) -> Conflict | str | None:
        writer, at = self.writer.take(cells), self.written_at.take(cells)
        if not write and writer.min() < 0:
            return "uninitialised"
        seen = clocks.rows[present, 0].min(0)  # by all that take part
        wrong = seen.take(writer) < at
        if wrong.any():
            wrong = clocks.rows[warps, 0, writer] < at
            if write:
                wrong &= writer >= 0
            if wrong.any():
                sites = self.write_site.take(cells)
                return self._conflict("write", writer, sites, self._rows(cells), wrong)
        return self._read_conflict(clocks, seen, warps, cells) if write else None

    def _record(
        self, clocks: Clocks, present: slice, warps, cells, write: bool, sites: NDArray | int
    ) -> None:
        own = clocks.rows[warps, 0, warps]
        if write:
            self.put(cells, warps, own)
            self.write_site.reshape(-1)[cells] = sites
        else:
            self.reads.reshape(-1)[warps * self.writer.size + cells] = own
            self.read_site.reshape(-1)[cells] = sites
            for warp in range(present.start, present.stop):
                self.last_read[warp] = clocks.rows[warp, 0, warp]

    def _rows(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        return cells // (16 // self.cell_bytes)

    def _late(self, seen: NDArray[np.int32]) -> list[int]:
        """Warps that have read what `seen` does not include."""
        return np.flatnonzero(self.last_read > seen[: len(self.last_read)]).tolist()

    def _read_conflict(self, clocks, seen, warps, cells) -> Conflict | None:
        for reader in self._late(seen):
            wrong = self.reads[reader].take(cells) > clocks.rows[warps, 0, reader]
            if wrong.any():
                sites = self.read_site.take(cells)
                return self._conflict("read", reader, sites, self._rows(cells), wrong)
        for reader in self.async_readers.values():
            if reader.top > seen[reader.agents].min():
                rows = self._rows(cells)
                limit = clocks.rows[warps, 0, reader.agents].min(1, keepdims=True)
                wrong = reader.epochs.take(rows) > limit
                if wrong.any():
                    agent, sites = reader.agents[0], reader.sites.take(rows)
                    return self._conflict("read", agent, sites, rows, wrong)
        return None

    @staticmethod
    def _conflict(kind, agents, sites, rows, wrong, fence: bool = False) -> Conflict:
        """The first of the wrong accesses; arrays broadcast to their shape."""
        where = tuple(np.argwhere(wrong)[0])
        agent, site, row = (
            int(np.broadcast_to(x, wrong.shape)[where]) for x in (agents, sites, rows)
        )
        return Conflict(kind, agent, site, row, fence)

    def async_read(
        self,
        eyes: NDArray[np.int32],
        seen: NDArray[np.int32],
        rows: NDArray[np.intp] | slice,
        key: Hashable,
        agents: Sequence[int],
        epoch: int,
        site: int,
    ) -> Conflict | str | None:
        """Checks and records reads of whole 16-byte rows by the asynchronous proxy."""
        reader = self.async_readers.get(key)
        if reader is None:
            count = len(self.writer)
            reader = _AsyncReader(
                np.array(agents), np.zeros(count, np.int32), np.zeros(count, np.int32)
            )
            self.async_readers[key] = reader
        writer, at = self.writer[rows], self.written_at[rows]
        if writer.min(initial=0) < 0:
            return "uninitialised"
        reader.epochs[rows] = epoch
        reader.sites[rows] = site
        reader.top = epoch
        return self._write_conflict(rows, writer, at, eyes, seen)

    def _write_conflict(self, rows, writer, at, eyes, seen) -> Conflict | None:
        agent = int(writer.max(initial=-1))
        if agent == writer.min(initial=agent) and (agent < 0 or at.max() <= eyes[agent]):
            return None
        wrong = (eyes.take(writer) < at) & (writer >= 0)
        if not wrong.any():
            return None
        where = tuple(np.argwhere(wrong)[0])
        fence = bool(seen[writer[where]] >= at[where])
        return self._conflict(
            "write", writer, self.write_site[rows], _row_numbers(rows), wrong, fence
        )

    def async_write(
        self,
        eyes: NDArray[np.int32],
        seen: NDArray[np.int32],
        rows: NDArray[np.intp] | slice,
        agent: int,
        epoch: int,
        site: int,
    ) -> Conflict | None:
        """Checks and records writes of whole 16-byte rows by the asynchronous proxy."""
        found = self._write_conflict(rows, self.writer[rows], self.written_at[rows], eyes, seen)
        if found is None:
            found = self._read_conflict_async(seen, rows)
        self.writer[rows] = agent
        self.written_at[rows] = epoch
        self.write_site[rows] = site
        return found

    def _read_conflict_async(self, seen, rows) -> Conflict | None:
        for reader in self._late(seen):
            wrong = self.reads[reader][rows] > seen[reader]
            if wrong.any():
                sites = self.read_site[rows]
                return self._conflict("read", reader, sites, _row_numbers(rows), wrong)
        for reader in self.async_readers.values():
            limit = int(seen[reader.agents].min())
            if reader.top > limit:
                wrong = (reader.epochs[rows] > limit)[:, None]
                if wrong.any():
                    agent, sites = reader.agents[0], reader.sites[rows][:, None]
                    return self._conflict("read", agent, sites, _row_numbers(rows), wrong)
        return None


def _row_numbers(rows: NDArray[np.intp] | slice) -> NDArray[np.intp]:
    numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
    return numbers[:, None]
