"""Blackwell's fifth-generation tensor core as asynchronous work: mma, cp, shift, commit, ld and st.

The numbers of an mma are the business of `mma_sm100.plan`, whose `Plan` says what an instruction
touches in each CTA and computes it; here plans are issued, ordered, and checked by what they touch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import mma_sm100, tensor_core
from .barriers import phase_of
from .checker import Conflict
from .copies import Copies
from .lanes import Mask, Pipe
from .mma_sm100 import COLUMNS, LANES, Cells, Form
from .recording import Mma, MmaCommit, TmemMove, TmemWait
from .tensor_memory import EIGHTHS, GRAIN, Party, cell_bytes, room

if TYPE_CHECKING:
    from .machine import Cta


# Lanes and columns that a shape of ld and st moves, by register and lane of the warp.
_IMAGES: dict[str, tuple[int, Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "32x32b": (1, lambda r, t: t, lambda r, t: r),
    "16x64b": (1, lambda r, t: t // 4 + 8 * (t % 2), lambda r, t: t // 2 % 2 + 2 * r),
    "16x128b": (2, lambda r, t: t // 4 + 8 * (r % 2), lambda r, t: t % 4 + 4 * (r // 2)),
    "16x256b": (
        4,
        lambda r, t: t // 4 + 8 * (r // 2 % 2),
        lambda r, t: r % 2 + 2 * (t % 4) + 8 * (r // 4),
    ),
    "16x32bx2": (1, lambda r, t: t % 16, lambda r, t: r),
}


# Of each shape of cp: columns, the lanes it fills, and which row of the matrix each gets.
_LANES = np.arange(LANES)
_COPIES: dict[tuple[str, str], tuple[int, NDArray[np.intp], NDArray[np.intp]]] = {
    ("128x256b", ""): (8, _LANES, _LANES),
    ("128x128b", ""): (4, _LANES, _LANES),
    ("64x128b", "warpx2::02_13"): (4, _LANES, _LANES % 64),
    ("64x128b", "warpx2::01_23"): (4, _LANES, _LANES % 32 + _LANES // 64 * 32),
    ("32x128b", "warpx4"): (4, _LANES, _LANES % 32),
    ("4x256b", ""): (8, _LANES[::32], np.arange(4)),
}
# Bits of an element that cp unpacks into a byte, and where in it they come to lie.
_UNPACKED = {"b6x16_p32": (6, 0), "b4x16_p64": (4, 2)}
_SHIFTED = 8  # columns that shift moves


@dataclass(frozen=True, eq=False)
class Image:
    """What of tensor memory one warp moves, from its address on: indices [registers, 32]."""

    lanes: NDArray[np.intp]
    columns: NDArray[np.intp]
    width: int  # columns of a part
    parts: tuple[int, ...]  # the first column of each
    straight: bool  # lane l to lane l, register r to column r


@lru_cache(maxsize=256)
def image(shape: str, count: int, packed: bool, split: int) -> Image:
    """Of `shape.xcount`; `packed`: halves of a register in columns that follow one another.

    split: columns to the second half of 16x32bx2.
    """
    per_count, lane_of, column_of = _IMAGES[shape]
    r, t = np.ogrid[: per_count * count, :32]
    lanes, columns, _ = np.broadcast_arrays(lane_of(r, t), column_of(r, t), r + t)
    if packed:
        columns = 2 * columns
    width = int(columns.max()) + 1 + packed
    columns = columns + split * (t // 16)
    parts = (0, split) if shape == "16x32bx2" else (0,)
    return Image(lanes, columns, width, parts, shape == "32x32b" and not packed)


@dataclass
class Batch:
    """Products of one thread into one D, taken up one after the other with nothing in between."""

    lane: int
    adds: bool
    kept: int  # lanes of D
    scale_d: int
    plans: list[mma_sm100.Plan] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)

    def takes(self, plan: mma_sm100.Plan, lane: int, kept: int) -> bool:
        """Whether one more, which adds, can be computed with the rest: f32 sums alone can."""
        first = self.plans[0]
        same = (self.lane, self.kept) == (lane, kept) and mma_sm100.joins(first, plan)
        return same and plan.desc.d_type == "f32"

    @property
    def plan(self) -> mma_sm100.Plan:
        return self.plans[0] if len(self.plans) == 1 else mma_sm100.fuse(tuple(self.plans))


class Tcgen05(Copies):
    """Tensor memory and the instructions that use it."""

    # Who may do what, and what it touches ---------------------------------------------------------

    def _pair(self, pair: bool) -> list[Cta]:
        """The CTAs that an instruction works on: this one, or this one and its peer."""
        ctas, rank = self.cta.cluster.ctas, self.cta.rank
        return [ctas[rank & ~1], ctas[rank | 1]] if pair else [self.cta]

    def _group(self, pair: bool, site: int) -> None:
        """A kernel uses one cta_group for all its instructions, and pairs need a peer."""
        if pair and self.cta.rank | 1 >= len(self.cta.cluster.ctas):
            self.report(
                "tensor memory misuse",
                f"cta_group::2 in a cluster of {len(self.cta.cluster.ctas)} CTA",
                site,
                fatal=True,
            )
        used = self.machine.cta_group
        if used is None:
            self.machine.cta_group = (pair, site)
        elif used[0] != pair:
            self.report(
                "tensor memory misuse",
                f"cta_group::{1 + pair} here and another one at {self.machine.source(used[1])}: "
                "all tcgen05 instructions of a kernel need the same",
                site,
            )

    def _usable(self, cta: Cta, columns: slice, site: int) -> None:
        tmem = cta.tensor_memory
        if columns.stop > COLUMNS:
            self.report(
                "out of bounds",
                f"columns {columns.start}..{columns.stop - 1} of {COLUMNS} of tensor memory",
                site,
                fatal=True,
            )
        if not tmem.usable[columns].all():
            self.report(
                "out of bounds",
                f"columns {columns.start}..{columns.stop - 1} of tensor memory are not allocated "
                f"in CTA {cta.index}",
                site,
                fatal=True,
            )

    def _tmem_race(self, found: Conflict | str, act: str, site: int) -> None:
        if isinstance(found, str):
            self.report(
                "uninitialised read", "tensor memory is read before anything wrote it", site
            )
            return
        column, eighth = divmod(found.granule, EIGHTHS)
        other = self.clocks.names[found.agent]
        own = {self._warp_agent(kind, w) for kind in ("ld", "st") for w in self.group.warps}
        missing = "with no synchronisation between them"
        if found.agent in own:
            missing = (
                f"without tcgen05.wait::{'st' if found.kind == 'write' else 'ld'} between them"
            )
        self.report(
            "race",
            f"{act} of tensor memory at column {column}, lanes {16 * eighth}.."
            f"{16 * eighth + 15} and the {found.kind} of {other} at "
            f"{self.machine.source(found.site)} {missing}",
            site,
        )

    # Allocation ----------------------------------------------------------------------------------

    def tmem_alloc(self, where: Any, columns: Any, pair: bool, m: Mask, site: int) -> bool:
        """Takes columns and writes their address to shared memory; waits until there are some."""
        self._group(pair, site)
        self._one_warp(m, site)
        lane = int(self._active(m)[0])
        count = self._at(columns, lane)
        tmem = self.cta.tensor_memory
        if count not in (32, 64, 128, 256, 512):
            self.report(
                "tensor memory misuse",
                f"{count} columns are asked for: needed is a power of two, {GRAIN} to {COLUMNS}",
                site,
                fatal=True,
            )
        if not tmem.permit:
            self.report("tensor memory misuse", "tcgen05.alloc after relinquish_alloc_permit", site)
        cluster, group = self.cta.cluster, self._pair(pair)
        asking, granted = cluster.tmem_asking, cluster.tmem_granted
        if self.cta.rank not in granted:
            asking[self.cta.rank] = count
            if all(cta.rank in asking for cta in group):  # a pair allocates together
                self._grant(group, count, site)
        if self.cta.rank not in granted:
            return self._stalled(self._changed(), lambda: self._lacks(group, count))
        self.st_shared(where, 4, 1, (granted.pop(self.cta.rank),), m, (site,))
        return True

    def _grant(self, group: list[Cta], count: int, site: int) -> None:
        cluster = self.cta.cluster
        counts = {cluster.tmem_asking[cta.rank] for cta in group}
        if len(counts) > 1:
            self.report(
                "tensor memory misuse", f"the CTAs of a pair allocate {counts} columns", site
            )
        taken = np.logical_or.reduce([cta.tensor_memory.usable for cta in group])
        first = room(taken, count)
        if first is not None:
            for cta in group:
                del cluster.tmem_asking[cta.rank]
                cta.tensor_memory.allocate(first, count, site)
                cluster.tmem_granted[cta.rank] = first
            cluster.version += 1

    def _lacks(self, group: list[Cta], count: int) -> str:
        missing = [c.rank for c in group if c.rank not in self.cta.cluster.tmem_asking]
        if missing:
            return f"tcgen05.alloc waits for that of CTA {missing[0]} of the cluster"
        owned = self.cta.tensor_memory.owned
        held = ", ".join(f"{n} from column {c}" for c, (n, _) in sorted(owned.items()))
        return f"tcgen05.alloc of {count} columns, while the CTA holds {held}"

    def _one_warp(self, m: Mask, site: int) -> int:
        first, *others = self._warps(m)
        if others:
            numbers = ", ".join(str(self.first // 32 + w) for w in (first, *others))
            self.report(
                "tensor memory misuse", f"one warp has to execute this, warps {numbers} do", site
            )
        return first

    def tmem_dealloc(self, address: Any, columns: Any, pair: bool, m: Mask, site: int) -> None:
        self._group(pair, site)
        warp = self._one_warp(m, site)
        lane = int(self._active(m)[0])
        first, count = self._at(address, lane), self._at(columns, lane)
        tmem = self.cta.tensor_memory
        if tmem.owned.get(first, (0, 0))[0] != count:
            owned = [f"{n} from {c}" for c, (n, _) in sorted(tmem.owned.items())]
            self.report(
                "tensor memory misuse",
                f"dealloc of {count} columns from {first}, where the CTA holds "
                f"{', '.join(owned) or 'none'}",
                site,
            )
            return
        if self.check:
            row = self.clocks.rows[self.warp0 + warp, 0]
            party = Party(np.full(EIGHTHS, -1), np.zeros(EIGHTHS, np.int32), _for_all(row))
            found = tmem.shadow.conflict(
                Cells(slice(first, first + count), slice(0, EIGHTHS)), party
            )
            if found is not None:
                self._tmem_race(found, "dealloc", site)
        tmem.free(first)
        self.cta.cluster.version += 1

    def tmem_relinquish(self, pair: bool, m: Mask, site: int) -> None:
        self._group(pair, site)
        self._one_warp(m, site)
        self.cta.tensor_memory.permit = False

    # Loads and stores ----------------------------------------------------------------------------

    def tmem_ld(
        self, address: Any, shape: str, count: int, packed: bool, split: int, m: Mask, site: int
    ) -> NDArray[np.uint32]:
        """Registers [n, lanes]."""
        what = image(shape, count, packed, split)
        places = self._places(address, what, m, site)
        cells = self.cta.tensor_memory.cells
        self._check_places(places, what, "ld", site)
        if self.counting:
            self.machine.counters.tmem_read_bytes += self._moved(what, m)
        if self.log is not None:
            self.note(TmemMove(site, "ld", 4 * what.lanes.size), m)
        if self.check:
            bits = self.program.loaded(site)
            for w in self._warps(m):
                self.loading[w].append(
                    (bits, self.clocks.issue(int(self.tmem_agents["ld"][2 * w])))
                )
            self.loads |= bits
        if places.__class__ is int:
            return cells[places : places + what.width, : self.lanes]
        out = np.zeros((len(what.lanes), self.lanes), np.uint32)
        for w, (column, lane) in places.items():
            found = cells[what.columns + column, what.lanes + lane]
            if packed:
                found = found & 0xFFFF | cells[what.columns + column + 1, what.lanes + lane] << 16
            out[:, 32 * w : 32 * w + 32] = found
        return out

    @staticmethod
    def tmem_reduce(
        values: NDArray[np.uint32], op: str, dtype: Any, magnitude: bool, nan: bool
    ) -> NDArray[Any]:
        """The least or greatest of each lane's registers [n, lanes]."""
        typed = values.view(dtype)
        if magnitude:
            typed = np.abs(typed)
        folds = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}
        return folds[op][nan].reduce(typed, axis=0)

    def tmem_st(
        self,
        address: Any,
        values: Any,
        shape: str,
        count: int,
        packed: bool,
        split: int,
        m: Mask,
        site: int,
    ) -> None:
        """values: registers [n, lanes], or a tuple if not all of them are rows."""
        what = image(shape, count, packed, split)
        places = self._places(address, what, m, site)
        cells = self.cta.tensor_memory.cells
        self._check_places(places, what, "st", site)
        if self.counting:
            self.machine.counters.tmem_write_bytes += self._moved(what, m)
        if self.log is not None:
            self.note(TmemMove(site, "st", 4 * what.lanes.size), m)
        values = self._stored(values, 4, 1, None)
        if places.__class__ is int:
            cells[places : places + what.width, : self.lanes] = values
            return
        for w, (column, lane) in places.items():
            mine = values[:, 32 * w : 32 * w + 32]
            if packed:
                cells[what.columns + column + 1, what.lanes + lane] = mine >> 16
                mine = mine & 0xFFFF
            cells[what.columns + column, what.lanes + lane] = mine

    def _moved(self, what: Image, m: Mask) -> int:
        return 4 * what.lanes.size * len(self._warps(m))

    def _places(self, address: Any, what: Image, m: Mask, site: int) -> Any:
        """The column, where all warps have it and move lane l to lane l; else of each warp the
        (column, lane) from which on it moves."""
        if m is None and what.straight and self.lanes == LANES and np.ndim(address):
            columns = address - self._quarters
            first = int(columns[0])
            if first < COLUMNS and (columns == first).all():
                self._usable(self.cta, slice(first, first + what.width), site)
                return first
        found: dict[int, tuple[int, int]] = {}
        for w in self._warps(m):
            mine = np.broadcast_to(address, (self.lanes,))[32 * w : 32 * w + 32]
            lane, column = int(mine[0]) >> 16, int(mine[0]) & 0xFFFF
            if (mine != mine[0]).any():
                self.report(
                    "tensor memory misuse", "lanes of a warp name different addresses", site
                )
            half = lane % 32 == 16 and what.lanes.max() < 16
            if lane // 32 != w % 4 or not (lane % 32 == 0 or half):
                self.report(
                    "out of bounds",
                    f"warp {self.first // 32 + w} names lane {lane} of tensor memory; it reaches "
                    f"lanes {32 * (w % 4)}..{32 * (w % 4) + 31}",
                    site,
                    fatal=True,
                )
            for part in what.parts:
                start = column + part
                self._usable(self.cta, slice(start, start + what.width), site)
            found[w] = column, lane
        return found

    def _check_places(self, places: Any, what: Image, kind: str, site: int) -> None:
        if not self.check:
            return
        party = self._warps_party(kind)
        if places.__class__ is int:
            spots = [Cells(slice(places, places + what.width), slice(0, EIGHTHS))]
        else:
            deep = int(what.lanes.max()) // 16 + 1
            spots = [
                Cells(
                    slice(column + part, column + part + what.width),
                    slice(lane // 16, lane // 16 + deep),
                )
                for column, lane in places.values()
                for part in what.parts
            ]
        shadow = self.cta.tensor_memory.shadow
        for cells in spots:
            if kind == "ld":
                found = shadow.read(cells, party, ("ld", self.first), site)
            else:
                found = shadow.write(cells, party, site)
            if found is not None:
                self._tmem_race(found, "read" if kind == "ld" else "write", site)

    def _warps_party(self, kind: str) -> Party:
        agents = self.tmem_agents[kind]
        epochs = self.clocks.issued[agents] + 1
        return Party(agents, epochs, self.clocks.rows[self._eighths, 0])

    def tmem_wait(self, kind: Literal["ld", "st"], m: Mask, site: int) -> None:
        """wait::ld, wait::st: what the warps have issued is done."""
        if self.log is not None:
            self.note(TmemWait(site, kind), m)
        for w in self._warps(m):
            agent = int(self.tmem_agents[kind][2 * w])
            if kind == "st":
                self.clocks.issue(agent)
            else:
                self.loading[w].clear()
            self.clocks.observe(self.warp0 + w, agent, int(self.clocks.issued[agent]))
        if kind == "ld":
            self._sum_loads()

    def _sum_loads(self) -> None:
        self.loads = 0
        for flying in self.loading:
            for bits, _ in flying:
                self.loads |= bits

    def _use_loads(self, used: int, site: int) -> None:
        """Ordinary instructions touch registers that loads may still write.

        The processor waits for those loads: kernels that NVIDIA and others ship rely on it.
        """
        if self.machine.options.forbids("registers"):
            for reads, writes, at in self.program.touches.get(site, [(used, 0, site)]):
                if self.loads & (reads | writes):
                    self.report(
                        "register in flight",
                        "a register is used before tcgen05.wait::ld, while a tcgen05.ld may "
                        "still write it",
                        at,
                    )
        for w in self.group.warps:
            flying = [load for load in self.loading[w] if not load[0] & used]
            if len(flying) < len(self.loading[w]):
                self.loading[w] = flying
                agent = int(self.tmem_agents["ld"][2 * w])
                done = flying[0][1] - 1 if flying else int(self.clocks.issued[agent])
                self.clocks.observe(self.warp0 + w, agent, done)
        self._sum_loads()

    # Products and copies -------------------------------------------------------------------------

    def _pipe(self, lane: int) -> Pipe:
        if lane not in self.pipes:
            warp = self.first // 32 + lane // 32
            agent = self.clocks.agent(
                ("tcgen05", self.warp0 + lane // 32, lane % 32), f"the tcgen05.mma of warp {warp}"
            )
            self.pipes[lane] = Pipe(agent)
        return self.pipes[lane]

    def _in_order(self, pipe: Pipe, work: Callable[[], None]) -> None:
        if self.machine.eager:
            work()
        else:
            pipe.waiting.append(work)
            self.cta.cluster.pending.append(pipe.advance)

    def _issuers(self, pair: bool, m: Mask, site: int) -> list[int]:
        """The threads that issue; it should be one."""
        self._group(pair, site)
        if any(not cta.live for cta in self._pair(pair)):
            self.report("tensor memory misuse", "the other CTA of the pair has exited", site)
        lanes = self._active(m).tolist()
        if len(lanes) > 1:
            self.report(
                "tensor memory misuse",
                f"{len(lanes)} threads issue what one thread has to (elect.sync)",
                site,
            )
        return lanes

    def tmem_mma(
        self,
        form: tuple,
        d: Any,
        a: Any,
        b: Any,
        idesc: Any,
        scales: tuple,
        accumulate: Any,
        disabled: tuple,
        scale_d: int,
        m: Mask,
        site: int,
    ) -> None:
        """Takes up a product; those that follow one another along K are issued as one."""
        what = _form(*form)
        for lane in self._issuers(what.pair, m, site):
            addresses = [self._at(x, lane) for x in (d, a, b, idesc, *scales)]
            try:
                plan = mma_sm100.plan(what, *addresses)
            except ValueError as error:
                self.report("tensor memory misuse", str(error), site, fatal=True)
                raise
            adds = bool(self._at(accumulate, lane))
            kept = sum(self._at(word, lane) << 32 * i for i, word in enumerate(disabled))
            batch = self.batch
            if batch is None or not (adds and not scale_d and batch.takes(plan, lane, kept)):
                self.tmem_issue()
                self.batch = batch = Batch(lane, adds, kept, scale_d)
            batch.plans.append(plan)
            batch.sites.append(site)

    def tmem_issue(self) -> None:
        """Issues the products taken up."""
        batch, self.batch = self.batch, None
        if batch is None:
            return
        plan = batch.plan
        pipe, group = self._pipe(batch.lane), self._pair(plan.form.pair)
        self._check_mma(plan, group, pipe, batch)
        if self.counting:
            self._count_mma(plan, group, batch.adds)
        if self.log is not None:
            read = 16 * sum(len(granules) for granules in plan.smem) // len(group)
            made = Mma(batch.sites[0], len(batch.plans), plan.clocks, read, plan.form.pair)
            self.note_lane(made, batch.lane)
        tmems = [cta.tensor_memory.cells for cta in group]
        smems = [cta.shared.granules for cta in group]
        site = batch.sites[0]

        def work() -> None:
            try:
                plan.run(tmems, smems, batch.adds, batch.kept, batch.scale_d)
            except ValueError as error:
                self.report("tensor memory misuse", str(error), site)

        self._in_order(pipe, work)

    def _check_mma(self, plan: mma_sm100.Plan, group: list[Cta], pipe: Pipe, batch: Batch) -> None:
        site = batch.sites[0]
        for rank, cta in enumerate(group):
            self._inside(cta, plan.smem[rank], site)
            for cells in (*plan.d[rank], *plan.a[rank], *plan.scales[rank]):
                self._usable(cta, cells.columns, site)
            if not self.check:
                continue
            if self._read_conflicts(plan, cta, rank, pipe, batch.lane, site):
                for part, at in zip(batch.plans, batch.sites, strict=True):
                    conflicts = self._read_conflicts(part, cta, rank, pipe, batch.lane, at)
                    for found, shared in conflicts:
                        if shared:
                            self._race(found, False, cta, at)
                        else:
                            self._tmem_race(found, "read", at)
            party = self._thread_party(pipe, batch.lane)
            for cells in plan.d[rank]:
                found = cta.tensor_memory.shadow.write(cells, party, site, batch.adds)
                if found is not None:
                    self._tmem_race(found, "write", site)

    def _read_conflicts(
        self, plan: mma_sm100.Plan, cta: Cta, rank: int, pipe: Pipe, lane: int, site: int
    ) -> list[tuple[Conflict | str, bool]]:
        """What reads of operands race with, and whether in shared memory."""
        party, shadow = self._thread_party(pipe, lane), cta.tensor_memory.shadow
        found = [
            (shadow.read(cells, party, pipe.agent, site), False)
            for cells in (*plan.a[rank], *plan.scales[rank])
        ]
        found.append((self._reads_shared(cta, plan.smem[rank], pipe, lane, site), True))
        return [(conflict, shared) for conflict, shared in found if conflict is not None]

    def _thread_party(self, pipe: Pipe, lane: int) -> Party:
        """A thread's tensor-core instructions come one behind the other.

        PTX promises that where they share an accumulator, and of a copy before a product; kernels
        that are shipped rely on it for all.
        """
        row = self.clocks.rows[self.warp0 + lane // 32, 0].copy()
        row[pipe.agent] = np.iinfo(np.int32).max
        epoch = self.clocks.issued[pipe.agent] + 1
        return Party(np.full(EIGHTHS, pipe.agent), np.full(EIGHTHS, epoch), _for_all(row))

    def _reads_shared(
        self, cta: Cta, granules: NDArray[np.intp], pipe: Pipe, lane: int, site: int
    ) -> Conflict | str | None:
        warp, bits = self._one(lane)
        return cta.shadow.async_read(
            self.clocks.eyes(warp, bits),
            self.clocks.seen(warp, bits),
            granules,
            ("tcgen05", pipe.agent),
            (pipe.agent,),
            int(self.clocks.issued[pipe.agent]) + 1,
            site,
        )

    def _check_cells(
        self, cta: Cta, cells: Cells, pipe: Pipe, lane: int, site: int, adds: bool
    ) -> None:
        """Cells that a copy writes; `adds` if it reads them too."""
        self._usable(cta, cells.columns, site)
        if self.check:
            party = self._thread_party(pipe, lane)
            found = cta.tensor_memory.shadow.write(cells, party, site, adds)
            if found is not None:
                self._tmem_race(found, "write", site)

    def tmem_cp(
        self,
        address: Any,
        source: Any,
        shape: str,
        multicast: str,
        packed: str,
        pair: bool,
        m: Mask,
        site: int,
    ) -> None:
        """Copies a matrix from shared memory, row by row into lanes."""
        width, lanes, rows = _COPIES[shape, multicast]
        for thread in self._issuers(pair, m, site):
            pipe, where = self._pipe(thread), self._at(address, thread)
            first = where & 0xFFFF
            granules = _matrix(self._at(source, thread), int(rows.max()) + 1, width // 4)
            into = lanes + (where >> 16)
            span = slice(first, first + width)
            eighths = slice(int(into[0]) // 16, EIGHTHS, 1 if len(lanes) == LANES else 2)
            for cta in self._pair(pair):
                self._inside(cta, granules, site)
                self._check_cells(cta, Cells(span, eighths), pipe, thread, site, False)
                if self.check:
                    found = self._reads_shared(cta, np.unique(granules), pipe, thread, site)
                    if found is not None:
                        self._race(found, False, cta, site)
                if self.counting:
                    self.machine.counters.shared_read_bytes += 16 * granules.size
                    self.machine.counters.tmem_write_bytes += 4 * width * len(lanes)

                def work(cta=cta, granules=granules, span=span, into=into) -> None:
                    data = cta.shared.granules[granules].view(np.uint8)
                    if packed:
                        data = _unpack(data, *_UNPACKED[packed])
                    cta.tensor_memory.cells[span, into] = data.view(np.uint32)[rows].T

                self._in_order(pipe, work)

    def tmem_shift(self, address: Any, pair: bool, m: Mask, site: int) -> None:
        """Every lane but the last of 32 gets what the next one has."""
        for thread in self._issuers(pair, m, site):
            pipe, first = self._pipe(thread), self._at(address, thread) & 0xFFFF
            span = slice(first, first + _SHIFTED)
            for cta in self._pair(pair):
                self._check_cells(cta, Cells(span, slice(0, EIGHTHS)), pipe, thread, site, True)

                def work(cta=cta, span=span) -> None:
                    lanes = cta.tensor_memory.cells[span].reshape(_SHIFTED, 4, 32)
                    lanes[:, :, :-1] = lanes[:, :, 1:].copy()

                self._in_order(pipe, work)

    def _inside(self, cta: Cta, granules: NDArray[np.intp], site: int) -> None:
        if granules.size and granules.max() >= cta.shared.size >> 4:
            self.report(
                "out of bounds",
                "an operand of the tensor core lies past the end of shared memory",
                site,
                fatal=True,
            )

    def _count_mma(self, plan: mma_sm100.Plan, group: list[Cta], adds: bool) -> None:
        counters, steps = self.machine.counters, len(plan.steps)
        counters.tensor_flops += plan.flops * len(group)
        counters.tensor_clocks += plan.clocks * len(group)
        counters.shared_read_bytes += 16 * sum(len(granules) for granules in plan.smem)
        counters.operand_b_bytes += 16 * np.unique(plan.smem_b.granules).size * len(group)
        written = sum(cell_bytes(cells) for part in plan.d for cells in part)
        read = sum(cell_bytes(cells) for part in (*plan.a, *plan.scales) for cells in part)
        counters.tmem_write_bytes += written * steps
        counters.tmem_read_bytes += read + written * (steps - 1 + adds)

    def tmem_commit(self, barrier: Any, mask: Any, pair: bool, m: Mask, site: int) -> None:
        """An arrival at an mbarrier, or those of several CTAs, when all before it is done."""
        strict = self.machine.options.forbids("commits")
        for lane in self._issuers(pair, m, site):
            pipe, where = self._pipe(lane), self._at(barrier, lane)
            targets = [where]
            if mask is not None:
                bits = self._at(mask, lane)
                targets = [r << 24 | where & 0xFFFFFF for r in range(16) if bits >> r & 1]
            only = self._only(lane)
            found = [self._mbarrier(target, site) for target in targets]
            barriers = [barrier for _, barrier in found]
            if self.log is not None:
                points = zip(targets, barriers, strict=True)
                self.note_lane(MmaCommit(site, tuple(phase_of(*one) for one in points)), lane)
            epoch, clock = self.clocks.issue(pipe.agent), None
            if self.check:
                for one in barriers:
                    self._sees_init(one, only, site)
                for cta, _ in found:
                    if cta is not self.cta and strict:
                        cta.reached[pipe.agent] = (epoch, "an mbarrier", "barrier misuse", site)
                clock = self._release(only, None)

            def work(found=found, epoch=epoch, clock=clock, pipe=pipe, site=site) -> None:
                for cta, one in found:
                    if strict:
                        self._alive(cta, "an mbarrier", "barrier misuse", site)
                    if one.pending <= 0:
                        self.machine.report(
                            "barrier misuse", "tcgen05.commit arrives once too often", site
                        )
                    if clock is not None:
                        one.clock = self.clocks.join(one.clock, clock)
                        one.clock = self.clocks.mark(one.clock, pipe.agent, epoch)
                    one.pending -= 1
                    self._flip(one)

            self._in_order(pipe, work)


def _for_all(row: NDArray[np.int32]) -> NDArray[np.int32]:
    """What one agent has seen, as that of all eighths."""
    return np.broadcast_to(row, (EIGHTHS, len(row)))


@lru_cache(maxsize=1 << 10)
def _matrix(desc: int, rows: int, granules: int) -> NDArray[np.int64]:
    """The granules of a K-major matrix in shared memory, [rows, granules]."""
    smem = mma_sm100.decode_descriptor(desc)
    return tensor_core.element_addresses(smem, "k", rows, 1)[:, ::16][:, :granules] >> 4


def _unpack(data: NDArray[np.uint8], bits: int, shift: int) -> NDArray[np.uint8]:
    """Sixteen bytes of each sixteen: the elements at their start, one a byte."""
    field = np.unpackbits(data.reshape(-1, 16), axis=1, bitorder="little")[:, : 16 * bits]
    weights = (1 << np.arange(bits)).astype(np.uint8) << shift
    return (field.reshape(-1, 16, bits) * weights).sum(2, dtype=np.uint8).reshape(data.shape)


_form = lru_cache(maxsize=64)(Form)
