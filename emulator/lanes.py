"""Lanes of one warpgroup: their state, reports, convergence, and exchange between them.

The generated code of a block calls methods by name. A mask `m` selects lanes; None means all. A
method whose instruction may have to wait returns False (or STALL) after leaving the reason in
`self.wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .checker import Clock
from .memory import PARAM_WINDOW
from .recording import Effect, Entry

if TYPE_CHECKING:
    from .machine import Cta, Group, Machine, Mbarrier, Wait
    from .tcgen05 import Batch

Mask = NDArray[np.bool_] | None
FULL = 0xFFFFFFFF


@dataclass
class BulkThread:
    """The bulk groups of one thread: copies that read shared memory."""

    agent: int
    committed: int = 0
    waited: int = 0
    open: list[Callable[[], None]] = field(default_factory=list)
    groups: list[list[Callable[[], None]]] = field(default_factory=list)
    used: bool = False  # copies issued since the last commit
    site: int = -1


@dataclass
class WgmmaGroup:
    """Products in flight: registers of accumulators and A, and the work if it was held back."""

    number: int = 0  # counted from 1 as they are committed
    accumulators: int = 0
    sources: int = 0
    work: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Pipe:
    """The tensor-core instructions of one thread, which complete in the order of their issue."""

    agent: int
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def advance(self) -> None:
        self.waiting.pop(0)()


class Lanes:
    """State of a unit, and what its lanes do among themselves."""

    cta: Cta
    machine: Machine
    group: Group
    groups: list[Group]
    wait: Wait | None
    clocks: Any
    program: Any
    space: dict[str, object]
    views: dict[str, np.ndarray]
    first: int
    lanes: int
    warp0: int
    warp_count: int
    check: bool
    counting: bool
    lane_warp: NDArray[np.intp]
    lane_id: NDArray[np.uint32]
    all_warps: tuple[int, ...]
    part: Callable[..., Group]
    log: list[Entry] | None = None  # what the unit does, if somebody wants to know

    def setup(self) -> None:
        """Once, when the unit is made."""
        from .machine import STALL, Wait

        self._stall, self._wait_type = STALL, Wait
        self._everyone, self._all = np.ones(self.lanes, bool), np.arange(self.lanes)
        self._bits: dict[tuple[int, ...], tuple[int, int]] = {}
        self._shuffles: dict[tuple, NDArray[np.intp]] = {}
        self._leaders = (self.lane_id * 0, self.lane_id == 0)
        # Tensor memory: the address of each lane's quarter, and who reaches each 16 lanes of it.
        self._quarters = (np.arange(self.lanes, dtype=np.uint32) & 96) << 16
        warps = np.minimum(np.arange(8) // 2, self.warp_count - 1)
        self._eighths = self.warp0 + warps
        self.tmem_agents = {
            kind: np.array([self._warp_agent(kind, w) for w in warps]) for kind in ("ld", "st")
        }

    def begin(self, registers: int) -> None:
        """A new CTA starts on this unit."""
        self.exited = ~self._exists()
        self.some_exited = bool(self.exited.any())
        self.registers = [registers] * self.warp_count
        self.dirty = (1 << self.program.bits) - 1  # registers touched since wgmma.fence
        self.flight: list[WgmmaGroup] = []
        self.open_group = WgmmaGroup()
        self.hot_acc = self.hot_src = 0
        self.wgmma_committed = 0
        self.wgmma_waited = [0] * self.warp_count  # groups that each warp has seen end
        self.wgmma_epoch0 = 0
        self.bulk: dict[tuple[int, int], BulkThread] = {}
        # Each warp's tcgen05.ld in flight: registers and epoch; and the registers of all.
        self.loading: list[list[tuple[int, int]]] = [[] for _ in self.all_warps]
        self.loads = 0
        self.pipes: dict[int, Pipe] = {}
        self.batch: Batch | None = None  # products taken up but not issued
        self.cp_committed = 0
        self.cp_open: list[Callable[[], None]] = []
        self.cp_groups: list[list[Callable[[], None]]] = []
        self.cluster_ticket = [0] * self.warp_count
        # Lanes of each warp that have arrived at the cluster's barrier and not waited since.
        self.cluster_arrived = [0] * self.warp_count
        self.mbar_inits: list[Mbarrier] = []
        self.local = np.zeros((self.lanes, self.program.kernel.local_bytes), np.uint8)
        self.local_written = np.zeros(self.local.shape, bool)
        names = [f"wgmma of warp {self.first // 32 + w}" for w in self.all_warps]
        self.wgmma_agents = [
            self.clocks.agent(("wgmma", self.warp0 + w), names[w]) for w in self.all_warps
        ]
        self.wgmma_base = max(int(self.clocks.issued[a]) for a in self.wgmma_agents)

    def _exists(self) -> NDArray[np.bool_]:
        threads = int(np.prod(self.machine.launch.block))
        return self.first + np.arange(self.lanes) < threads

    def _warp_agent(self, kind: str, warp: int) -> int:
        """The tcgen05 loads (ld) or stores (st) of one of the unit's warps."""
        return self.clocks.agent(
            (kind, self.warp0 + warp), f"tcgen05.{kind} of warp {self.first // 32 + warp}"
        )

    # Reports and small helpers -------------------------------------------------------------------

    def log_anew(self) -> list[Entry]:
        """A log from now on."""
        self.log = []
        return self.log

    def note(self, effect: Effect, m: Mask) -> None:
        """Logs an effect of the warps with lanes in the mask."""
        if self.log is not None:
            self.log.append((self._warps(m), effect))

    def note_lane(self, effect: Effect, lane: int) -> None:
        if self.log is not None:
            self.log.append(((lane // 32,), effect))

    def report(self, kind: str, message: str, site: int, fatal: bool = False) -> None:
        cta = self.cta.index
        warps = ", ".join(str(self.first // 32 + w) for w in self.group.warps)
        self.machine.report(kind, f"{message} (CTA {cta}, warp {warps})", site, fatal)

    def unknown(self, site: int) -> None:
        ins = self.program.kernel.instructions[site]
        file, line = ins.source
        raise NotImplementedError(f"PTX instruction `{ins.text}` ({file}:{line})")

    def trap(self, m: Mask, site: int) -> None:
        self.report("trap", "the kernel executes trap", site, fatal=True)

    def words(self, mask: NDArray[np.bool_]) -> list[int]:
        """A mask, 32 lanes of a warp to a word."""
        bits = int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
        return [bits >> 32 * w & FULL for w in range(self.warp_count)]

    def _words(self, m: Mask) -> list[int]:
        if m is None or m is self.group.mask:
            return self.group.words
        return self.words(m)

    def _lane_bits(self, m: Mask, warp: int) -> int:
        return FULL if m is None else self._words(m)[warp]

    def _warps(self, m: Mask) -> tuple[int, ...]:
        if m is None or m is self.group.mask:
            return self.group.warps
        return tuple(w for w, word in enumerate(self.words(m)) if word)

    def _spans(self, warps: tuple[int, ...]) -> list[slice]:
        """Warps of this unit as runs of warps of the cluster."""
        first, last = warps[0], warps[-1]
        if last - first + 1 == len(warps):
            return [slice(self.warp0 + first, self.warp0 + last + 1)]
        return [slice(self.warp0 + w, self.warp0 + w + 1) for w in warps]

    def _release(self, m: Mask, into: Clock | None) -> Clock | None:
        for span in self._spans(self._warps(m)):
            warps = range(span.start - self.warp0, span.stop - self.warp0)
            words = self._words(m)
            lanes = [words[w] | self._gone(w) for w in warps]
            into = self.clocks.release(span, lanes, into)
        return into

    def _gone(self, warp: int) -> int:
        return self._lane_bits(self.exited, warp) if self.some_exited else 0

    def _acquire(self, m: Mask, clock: Clock | None) -> None:
        if clock is not None:
            for span in self._spans(self._warps(m)):
                self.clocks.acquire(span, clock)

    def _stalled(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        helpless: Callable[[], bool] = lambda: False,
    ) -> bool:
        self.wait = self._wait_type(ready, describe, helpless)
        return False

    def _changed(self) -> Callable[[], bool]:
        cluster = self.cta.cluster
        version = cluster.version
        return lambda: cluster.version != version

    @staticmethod
    def _at(value: Any, lane: int) -> int:
        if isinstance(value, np.ndarray) and value.ndim:
            return int(value.item(lane))
        return int(value)

    def _active(self, m: Mask) -> NDArray[np.intp]:
        return self._all if m is None else m.nonzero()[0]

    @staticmethod
    def _shared_value(value: Any, m: Mask) -> int | None:
        """What all active lanes have; None if they differ."""
        if not isinstance(value, np.ndarray) or not value.ndim:
            return int(value)
        mine = value if m is None else value[m]
        first = mine.item(0)
        return int(first) if len(mine) == 1 or (mine == first).all() else None

    def param_address(self, offset: int) -> int:
        return PARAM_WINDOW + offset

    def shared_address(self, name: str) -> int:
        return self.cta.shared_address(name)

    def read_clock(self) -> int:
        self.machine.clock += 1
        return self.machine.clock & FULL

    read_clock64 = read_globaltimer = read_globaltimer_lo = read_clock

    def read_clock_hi(self) -> int:
        return 0

    read_globaltimer_hi = read_clock_hi

    def sleep(self) -> None:
        self.machine.clock += 1

    def born(self, rows: list[int], sites: list[int], m: Mask) -> None:
        """Tracing: stops at the first NaN among the float32 registers just written."""
        new = np.isnan(self.views["f"][rows])
        if m is not None:
            new &= m
        if new.any():
            row, lane = np.argwhere(new)[0].tolist()
            thread = self.first + lane
            self.report(
                "nan",
                f"an output holds NaN though no input does; the first one is made "
                f"here, by thread {thread}",
                sites[row],
                fatal=True,
            )

    # Convergence ---------------------------------------------------------------------------------

    def converge(self, members: Any, m: Mask, site: int) -> bool:
        """Whether all lanes named by the member masks are here."""
        if m is None and members.__class__ is int and members & FULL == FULL:
            return True
        active = self._everyone if m is None else m
        if members.__class__ is int and members & FULL == FULL:
            words = self._words(m)
            if all(words[w] | self._gone(w) == FULL for w in self._warps(m)):
                return True
        bits = (np.asarray(members).astype(np.int64) & FULL) >> self.lane_id & 1
        if (active & (bits == 0)).any():
            self.report(
                "member mask",
                "a lane executes a warp-synchronous instruction whose member mask does not name it",
                site,
            )
        masks = np.broadcast_to(np.asarray(members).astype(np.int64) & FULL, active.shape)
        for w in self._warps(m):
            span = slice(32 * w, 32 * w + 32)
            lane = int(active[span].argmax())
            named = (int(masks[span][lane]) >> self.lane_id[span].astype(np.int64) & 1).astype(bool)
            missing = named & ~active[span] & ~self.exited[span]
            if missing.any():
                lanes = np.flatnonzero(missing).tolist()
                text = f"a warp-synchronous instruction waits for lanes {lanes} of its mask"
                return self._stalled(self._changed(), partial(str, text))
        return True

    def converge_all(self, m: Mask, site: int) -> bool:
        """Whether the whole warpgroup is here, as wgmma demands."""
        if m is None and self.lanes == 128:
            return True
        return self._stalled(
            self._changed(), lambda: "a warpgroup-wide instruction waits for all four warps"
        )

    def warp_sync(self, m: Mask, site: int) -> None:
        for w in self._warps(m):
            self.clocks.sync_warp(self.warp0 + w)

    def active(self, m: Mask) -> NDArray[np.uint32]:
        out = np.zeros(self.lanes, np.uint32)
        for w in range(self.warp_count):
            out[32 * w : 32 * w + 32] = self._lane_bits(m, w)
        return out

    # Warp exchange -------------------------------------------------------------------------------

    def elect(self, members: Any, m: Mask) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        if m is None and members.__class__ is int and members & FULL == FULL:
            return self._leaders
        leader = np.zeros(self.lanes, np.uint32)
        for w in self._warps(m):
            lane = self._active(m)
            lane = lane[lane // 32 == w]
            bits = self._at(members, int(lane[0])) & FULL
            leader[32 * w : 32 * w + 32] = (bits & -bits).bit_length() - 1
        return leader, leader == self.lane_id

    def shuffle(
        self, mode: str, value: Any, lane: Any, clamp: Any, members: Any, m: Mask, site: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """What each lane gets of `value` [..., lanes], and whether its source was in range."""
        value = np.asarray(value, np.uint32)
        if not value.ndim:
            value = np.broadcast_to(value, (self.lanes,))
        static = lane.__class__ is int and clamp.__class__ is int
        key = (mode, lane, clamp) if static else None
        found = self._shuffles.get(key) if key else None
        if found is None:
            here = self.lane_id.astype(np.int64)
            b, c = np.asarray(lane).astype(np.int64) & 31, np.asarray(clamp).astype(np.int64)
            segment, bound = (c >> 8) & 31, c & 31
            low, high = here & segment, (here & segment) | (bound & ~segment)
            source = {
                "up": lambda: here - b,
                "down": lambda: here + b,
                "bfly": lambda: here ^ b,
                "idx": lambda: low | (b & ~segment),
            }[mode]()
            good = source >= high if mode == "up" else source <= high
            source = np.where(good, source, here) + (np.arange(self.lanes) & ~31)
            found = (source, good)  # pyright: ignore
            if key:
                self._shuffles[key] = found  # pyright: ignore
        source, good = found
        if self.check and m is not None:
            active = m[np.asarray(source)] | ~m
            if not active.all():
                self.report("member mask", "shfl reads a lane that does not execute it", site)
        return value.take(source, -1), np.asarray(good)

    def vote(self, mode: str, value: Any, members: Any, m: Mask) -> NDArray[Any]:
        value = np.broadcast_to(np.asarray(value, bool), (self.lanes,))
        active = self._everyone if m is None else m
        v, a = (value & active).reshape(-1, 32), active.reshape(-1, 32)
        if mode == "ballot":
            bits = np.packbits(v, axis=1, bitorder="little").copy().view("<u4")[:, 0]
            return np.repeat(bits, 32)
        if mode == "all":
            out = (v | ~a).all(1)
        elif mode == "any":
            out = v.any(1)
        else:  # uni
            out = (v | ~a).all(1) | ~v.any(1)
        return np.repeat(out, 32)

    def redux(
        self, op: str, value: Any, members: Any, m: Mask, nan: bool, magnitude: bool
    ) -> NDArray[Any]:
        value = np.array(np.broadcast_to(np.asarray(value), (self.lanes,)))
        if magnitude:
            value = np.abs(value)
        out = value.copy()
        fold = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[op]
        if value.dtype.kind == "f" and not nan and op in ("min", "max"):
            fold = {"min": np.fmin, "max": np.fmax}[op]
        lanes = self._active(m)
        for w in self._warps(m):
            mine = lanes[lanes // 32 == w]
            found = fold.reduce(value[mine], dtype=value.dtype)
            if value.dtype.kind == "f" and found == 0:  # -0 is below +0, which NumPy leaves open
                signs = np.signbit(value[mine][value[mine] == 0])
                found = -0.0 if (signs.any() if op == "min" else signs.all()) else 0.0
            out[mine] = found
        return out

    def match(
        self, mode: str, value: Any, members: Any, m: Mask
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        value = np.broadcast_to(np.asarray(value), (self.lanes,))
        out, same = np.zeros(self.lanes, np.uint32), np.zeros(self.lanes, bool)
        lanes = self._active(m)
        for w in self._warps(m):
            mine = lanes[lanes // 32 == w]
            bits = np.uint32(1) << self.lane_id[mine]
            equal = value[mine][:, None] == value[mine][None, :]
            masks = (equal * bits).sum(1).astype(np.uint32)
            if mode == "any":
                out[mine] = masks
            else:
                everyone = bool(equal.all())
                out[mine] = masks if everyone else 0
                same[mine] = everyone
        return out, same
