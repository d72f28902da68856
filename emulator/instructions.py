"""What instructions do beyond registers: memory, barriers, copies, tensor cores, warp exchange.

The generated code of a block calls these by name. A mask `m` selects lanes; None means all. A method
whose instruction may have to wait returns False (or STALL) after leaving the reason in `self.wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import ops, tensor_core, tma
from .checker import Clock, Conflict
from .memory import LOCAL_TAG, PARAM_TAG, PARAM_WINDOW, SHARED_TAG, UINT, Region
from .ptx import SHARED_BASE

if TYPE_CHECKING:
    from .machine import Cta, Group, Machine, Mbarrier, NamedBarrier, Wait

Mask = NDArray[np.bool_] | None
FULL = 0xFFFFFFFF
_ITEM = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


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


class Instructions:
    """Effects of one unit's instructions; `machine.Unit` is the only subclass."""

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

    def setup(self) -> None:
        """Once, when the unit is made."""
        from .machine import STALL, Wait

        self._stall, self._wait_type = STALL, Wait
        self._everyone = np.ones(self.lanes, bool)
        self._bits: dict[int, tuple[int, int]] = {}
        self._shuffles: dict[tuple, NDArray[np.intp]] = {}
        self._leaders = (self.lane_id * 0, self.lane_id == 0)
        self.space["branch"] = self.branch

    def begin(self, registers: int) -> None:
        """A new CTA starts on this unit."""
        self.exited = ~self._exists()
        self.registers = [registers] * self.warp_count
        self.dirty = (1 << len(self.program.tracked)) - 1  # registers touched since wgmma.fence
        self.flight: list[WgmmaGroup] = []
        self.open_group = WgmmaGroup()
        self.hot_acc = self.hot_src = 0
        self.wgmma_committed = 0
        self.wgmma_waited = [0] * self.warp_count  # groups that each warp has seen end
        self.wgmma_epoch0 = 0
        self.bulk: dict[tuple[int, int], BulkThread] = {}
        self.cp_committed = 0
        self.cp_open: list[Callable[[], None]] = []
        self.cp_groups: list[list[Callable[[], None]]] = []
        self.cluster_ticket = [0] * self.warp_count
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

    # Reports and small helpers -------------------------------------------------------------------

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

    def _lane_bits(self, m: Mask, warp: int) -> int:
        if m is None:
            return FULL
        return int(np.packbits(m[32 * warp : 32 * warp + 32], bitorder="little").view("<u4")[0])

    def _warps(self, m: Mask) -> tuple[int, ...]:
        if m is None or m is self.group.mask:
            return self.group.warps
        return tuple(np.flatnonzero(m.reshape(-1, 32).any(1)).tolist())

    def _spans(self, warps: tuple[int, ...]) -> list[slice]:
        """Warps of this unit as runs of warps of the cluster."""
        first, last = warps[0], warps[-1]
        if last - first + 1 == len(warps):
            return [slice(self.warp0 + first, self.warp0 + last + 1)]
        return [slice(self.warp0 + w, self.warp0 + w + 1) for w in warps]

    def _release(self, m: Mask, into: Clock | None) -> Clock | None:
        for span in self._spans(self._warps(m)):
            warps = range(span.start - self.warp0, span.stop - self.warp0)
            lanes = [self._lane_bits(m, w) | self._gone(w) for w in warps]
            into = self.clocks.release(span, lanes, into)
        return into

    def _gone(self, warp: int) -> int:
        return self._lane_bits(self.exited, warp) if self.exited.any() else 0

    def _acquire(self, m: Mask, clock: Clock | None) -> None:
        if clock is not None:
            for span in self._spans(self._warps(m)):
                self.clocks.acquire(span, clock)

    def _stalled(
        self, ready: Callable[[], bool], describe: Callable[[], str],
        helpless: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        self.wait = self._wait_type(ready, describe, helpless)
        return False

    def _changed(self) -> Callable[[], bool]:
        cluster = self.cta.cluster
        version = cluster.version
        return lambda: cluster.version != version

    @staticmethod
    def _at(value: Any, lane: int) -> int:
        return int(value) if np.ndim(value) == 0 else int(value[lane])

    def _active(self, m: Mask) -> NDArray[np.intp]:
        return np.flatnonzero(self._everyone if m is None else m)

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
        bits = (np.asarray(members).astype(np.int64) & FULL) >> self.lane_id & 1
        if (active & (bits == 0)).any():
            self.report(
                "member mask", "a lane executes a warp-synchronous instruction whose member mask "
                "does not name it", site,
            )  # fmt: skip
        masks = np.broadcast_to(np.asarray(members).astype(np.int64) & FULL, active.shape)
        for w in self._warps(m):
            span = slice(32 * w, 32 * w + 32)
            lane = int(active[span].argmax())
            named = (int(masks[span][lane]) >> self.lane_id[span].astype(np.int64) & 1).astype(bool)
            missing = named & ~active[span] & ~self.exited[span]
            if missing.any():
                lanes = np.flatnonzero(missing).tolist()
                return self._stalled(
                    self._changed(),
                    lambda: f"a warp-synchronous instruction waits for lanes {lanes} of its mask",
                )
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
                "up": lambda: here - b, "down": lambda: here + b, "bfly": lambda: here ^ b,
                "idx": lambda: low | (b & ~segment),
            }[mode]()  # fmt: skip
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
        fold = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                "or": np.bitwise_or, "xor": np.bitwise_xor}[op]  # fmt: skip
        if value.dtype.kind == "f" and not nan and op in ("min", "max"):
            fold = {"min": np.fmin, "max": np.fmax}[op]
        lanes = self._active(m)
        for w in self._warps(m):
            mine = lanes[lanes // 32 == w]
            out[mine] = fold.reduce(value[mine], dtype=value.dtype)
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

    # Ordinary memory -----------------------------------------------------------------------------

    def _shared_offsets(
        self, addresses: Any, nbytes: int, m: Mask, site: int, cluster: bool, write: bool
    ) -> tuple[Cta, NDArray[np.int64], NDArray[np.intp]]:
        """(the CTA whose memory it is, offsets of the active lanes, those lanes)."""
        lanes = self._active(m)
        a = np.broadcast_to(np.asarray(addresses), (self.lanes,))[lanes].astype(np.int64)
        rank = int(a[0]) >> 24
        offsets = a - (rank << 24)
        if not cluster and rank != self.cta.rank or rank >= len(self.cta.cluster.ctas):
            self.report(
                "out of bounds", f"shared address {int(a[0]):#x} is not in this CTA's window", site,
                fatal=True,
            )  # fmt: skip
        cta = self.cta.cluster.ctas[rank]
        low, high = int(offsets.min()), int(offsets.max())
        if low < SHARED_BASE or high + nbytes > cta.shared.size:
            end = cta.shared.size - SHARED_BASE
            where = low if low < SHARED_BASE else high
            self.report(
                "out of bounds", f"{'write' if write else 'read'} of {nbytes} bytes at byte "
                f"{where - SHARED_BASE} of a CTA's {end} bytes of shared memory", site, fatal=True,
            )  # fmt: skip
        if (offsets & (nbytes - 1)).any():
            self.report("misaligned", f"shared address of a {nbytes}-byte access is not a "
                        f"multiple of {nbytes}", site, fatal=True)  # fmt: skip
        return cta, offsets, lanes

    def _check_shared(
        self, cta: Cta, offsets: NDArray[np.int64], nbytes: int, lanes: NDArray[np.intp],
        m: Mask, write: bool, site: int,
    ) -> None:  # fmt: skip
        warps = self._warps(m)
        found = cta.shadow.generic(
            self.clocks, slice(self.warp0 + warps[0], self.warp0 + warps[-1] + 1),
            self.lane_warp[lanes][:, None], cta.shadow.cells(offsets, nbytes), write, site,
        )  # fmt: skip
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
            "without fence.proxy.async between them" if found.missing_fence
            else "with no synchronisation between them"
        )  # fmt: skip
        kind = "missing proxy fence" if found.missing_fence else "race"
        self.report(
            kind, f"{act} of shared memory at byte {16 * found.granule - SHARED_BASE} and the "
            f"{found.kind} of {other} at {self.machine.source(found.site)} {cause}", site,
        )  # fmt: skip

    def _count_shared(self, offsets: NDArray[np.int64], nbytes: int, lanes, write: bool) -> None:
        counters = self.machine.counters
        if write:
            counters.shared_write_bytes += nbytes * len(offsets)
        else:
            counters.shared_read_bytes += nbytes * len(offsets)
        counters.bank_conflicts += _bank_conflicts(offsets, lanes // 32, nbytes)

    def ld_shared(self, addresses: Any, size: int, count: int, m: Mask, site: int,
                  cluster: bool = False) -> NDArray[Any]:  # fmt: skip
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

    def st_shared(self, addresses: Any, size: int, values: tuple, m: Mask, site: int,
                  cluster: bool = False) -> None:  # fmt: skip
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
            self.report("misaligned", f"global address of a {nbytes}-byte access is not a multiple "
                        f"of {nbytes}", site, fatal=True)  # fmt: skip
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
                tell("out of bounds", f"{'write' if write else 'read'} of {nbytes} bytes of global "
                     f"memory at {address:#x}: {memory.describe(address)}")  # fmt: skip
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
            self.report("out of bounds", f"local address {int(at.max())} of a thread's "
                        f"{self.local.shape[1]} bytes of local memory", site, fatal=True)  # fmt: skip
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
        self, space: str, op: str, type_: str, addresses: Any, values: tuple, count: int,
        order: str, m: Mask, site: int,
    ) -> NDArray[Any]:  # fmt: skip
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

    # Fences and barriers -------------------------------------------------------------------------

    def fence(self, kind: str, m: Mask, site: int) -> None:
        if kind in ("proxy_async", "mbarrier_init"):
            if kind == "proxy_async":
                for w in self._warps(m):
                    bits = self._lane_bits(m, w) | self._gone(w)
                    self.clocks.fence(self.warp0 + w, bits)
            for barrier in self.mbar_inits:
                barrier.fenced = True
            self.mbar_inits.clear()
            self.fenced_clock = self._release(m, None)

    fenced_clock: Clock | None = None

    def _named(self, barrier: Any, m: Mask, site: int) -> NamedBarrier | None:
        """The barrier all active lanes name; None after splitting the group if they differ."""
        if np.ndim(barrier) == 0:
            return self.cta.named[int(barrier) & 15]
        lanes = self._active(m)
        ids = np.unique(barrier[lanes])
        if len(ids) == 1:
            return self.cta.named[int(ids[0]) & 15]
        return None

    def _arrive_named(self, named: NamedBarrier, count: Any, m: Mask, site: int) -> bool:
        """Counts the active lanes; True if that completes the barrier."""
        lanes = self.lanes - int(self.exited.sum()) if m is None else int(np.count_nonzero(m))
        expected = self._at(count, 0 if m is None else int(m.argmax()))
        if expected % 32:
            self.report("barrier misuse", f"a barrier of {expected} threads: a multiple of 32 is "
                        "needed", site)  # fmt: skip
        if named.arrived and expected != named.expected:
            self.report(
                "barrier misuse", f"a barrier is used for {expected} threads and, at "
                f"{self.machine.source(named.first_site)}, for {named.expected}", site,
            )  # fmt: skip
        if not named.arrived:
            named.first_site = site
        named.expected = expected
        named.arrived += lanes
        if self.check:
            named.clock = self._release(m, named.clock)
        return self._complete_named(named, site)

    def _complete_named(self, named: NamedBarrier, site: int) -> bool:
        need = named.expected or self.cta.live
        if named.arrived < need:
            return False
        if named.arrived > need:
            self.report("barrier misuse", f"{named.arrived} threads arrive at a barrier of {need}",
                        site)  # fmt: skip
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
            if not self._arrive_named(named, count, m, site):
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
        from .machine import Group

        group, active = self.group, self._everyone if m is None else m
        self.groups.remove(group)
        for one in np.unique(barrier[active]):
            mask = (barrier == one) & active
            part = Group(
                group.pc, mask, tuple(np.flatnonzero(mask.reshape(-1, 32).any(1)).tolist())
            )
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
            self.cluster_ticket[w] = barrier.generation
        barrier.arrived += lanes
        if self.check:
            if not relaxed:
                barrier.clock = self._release(m, barrier.clock)
            elif self.fenced_clock is not None:
                barrier.clock = self.clocks.join(barrier.clock, self.fenced_clock)
        if barrier.arrived >= sum(cta.live for cta in self.cta.cluster.ctas):
            barrier.arrived = 0
            barrier.done, barrier.clock = barrier.clock, None
            barrier.generation += 1
            self.cta.cluster.version += 1

    def cluster_wait(self, m: Mask, site: int) -> bool:
        barrier = self.cta.cluster.barrier
        ticket = min(self.cluster_ticket[w] for w in self._warps(m))
        if barrier.generation == ticket:
            need = sum(cta.live for cta in self.cta.cluster.ctas)
            return self._stalled(
                lambda: barrier.generation != ticket,
                lambda: f"the cluster barrier has {barrier.arrived} of {need} threads",
            )
        if self.check:
            self._acquire(m, barrier.done)
        return True

    # mbarriers -----------------------------------------------------------------------------------

    def _mbarrier(self, address: int, site: int, cluster: bool = True) -> tuple[Cta, Mbarrier]:
        rank = address >> 24
        if rank >= len(self.cta.cluster.ctas) or (not cluster and rank != self.cta.rank):
            self.report("out of bounds", f"mbarrier address {address:#x} is not in this CTA's "
                        "window", site, fatal=True)  # fmt: skip
        cta = self.cta.cluster.ctas[rank]
        barrier = cta.mbarriers.get(address & 0xFFFFFF)
        if barrier is None:
            self.report("barrier misuse", f"no mbarrier was initialised at {address:#x}", site,
                        fatal=True)  # fmt: skip
            raise AssertionError
        return cta, barrier

    def _sees_init(self, barrier: Mbarrier, m: Mask, site: int, asynchronous: bool = False) -> None:
        warp, epoch = barrier.init
        for w in self._warps(m):
            if self.clocks.rows[self.warp0 + w, 0, warp] < epoch:
                self.report("race", "an mbarrier is used with no synchronisation after its "
                            "initialisation", site)  # fmt: skip
        if asynchronous and not barrier.fenced:
            self.report("missing proxy fence", "an asynchronous copy uses an mbarrier whose "
                        "initialisation no fence (mbarrier_init or proxy.async) made visible", site)  # fmt: skip

    def mbar_init(self, address: Any, count: Any, m: Mask, site: int) -> None:
        from .machine import Mbarrier

        for lane in self._active(m).tolist():
            a, n = self._at(address, lane), self._at(count, lane)
            cta, offsets, _ = self._shared_offsets(a, 8, self._only(lane), site, False, True)
            offset = int(offsets[0])
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
        """What each lane sees that arrives with `count`: the phase, and above it the pending count."""
        states = np.zeros(self.lanes, np.uint64)
        taken: dict[int, int] = {}  # by the lanes before
        for lane in self._active(m).tolist():
            where = self._at(address, lane)
            _, barrier = self._mbarrier(where, site, False)
            before = taken.get(where, 0)
            states[lane] = (barrier.pending - before) << 32 | barrier.phase & FULL
            taken[where] = before + self._at(count, lane)
        return states

    def mbar_arrive(
        self, address: Any, count: Any, nbytes: Any, kind: int, relaxed: bool, cluster: bool,
        no_complete: bool, m: Mask, site: int,
    ) -> None:  # fmt: skip
        """kind: 0 counts bytes only, 1 arrives, 2 arrives and drops. Negative bytes have come."""
        active = self._everyone if m is None else m
        if np.ndim(address) == 0:
            parts = {int(address): m}
        else:
            several = np.unique(address[active]).tolist()
            parts = {a: active & (address == a) if len(several) > 1 else m for a in several}
        for one, part in parts.items():
            self._arrive_one(one, count, nbytes, kind, relaxed, cluster, part, site, no_complete)

    def _arrive_one(
        self, address: int, count: Any, nbytes: Any, kind: int, relaxed: bool, cluster: bool,
        m: Mask, site: int, no_complete: bool = False,
    ) -> None:  # fmt: skip
        _, barrier = self._mbarrier(address, site, cluster)
        lanes = self._active(m)
        if self.check:
            self._sees_init(barrier, m, site)
        total = self._sum(count, lanes) if kind else 0
        barrier.tx += self._sum(nbytes, lanes)
        if total:
            if total > barrier.pending or (no_complete and total == barrier.pending):
                self.report(
                    "barrier misuse", f"{total} arrivals at mbarrier {address:#x} that waits for "
                    f"{barrier.pending} of {barrier.count}", site,
                )  # fmt: skip
            if self.check and not relaxed:
                barrier.clock = self._release(m, barrier.clock)
            barrier.pending -= total
            if kind == 2:
                barrier.drop += total
        self._flip(barrier)

    @staticmethod
    def _sum(value: Any, lanes: NDArray) -> int:
        return int(value) * len(lanes) if np.ndim(value) == 0 else int(value[lanes].sum())

    def _flip(self, barrier: Mbarrier) -> None:
        if barrier.pending <= 0 and barrier.tx == 0:
            barrier.phase += 1
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
        lanes = self._active(m)
        if np.ndim(address) and len(np.unique(address[lanes])) > 1:
            out = np.zeros(self.lanes, bool)
            for one in np.unique(address[lanes]):
                part = (address == one) & (self._everyone if m is None else m)
                out[part] = self._completed(int(one), phase, parity, relaxed, part, site)
            return out if out[lanes].any() else self._spin(int(address[lanes[0]]), phase, lanes)
        where = self._at(address, int(lanes[0]))
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
                    f"{barrier.pending} of {barrier.count} arrivals missing and {-barrier.tx} bytes "
                    "over those expected"
                )
            return (
                f"mbarrier at byte {number - SHARED_BASE} of shared memory: waits for phase of parity "
                f"{wanted & 1}, present phase has parity {barrier.phase & 1}, {missing}"
            )

        cluster = self.cta.cluster
        self._stalled(lambda: cluster.version != version, describe, lambda: barrier.pending == 0)
        return self._stall

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

        memory = self.machine.memory

        def view(strided: tma.Strided) -> np.ndarray:
            region = memory.find(strided.base, strided.end)
            if region is not None:
                self._settled(region, site)
            return memory.view(strided, tell, write)

        return view

    def _box_granules(self, tensor: tma.TensorMap, address: int, cta: Cta, site: int) -> Any:
        """16-byte rows of shared memory that a box covers, in dense order."""
        offset = address & 0xFFFFFF
        if offset < SHARED_BASE or offset + tensor.box_bytes > cta.shared.size:
            self.report(
                "out of bounds", f"a box of {tensor.box_bytes} bytes at byte "
                f"{offset - SHARED_BASE} of {cta.shared.size - SHARED_BASE} bytes of shared memory",
                site, fatal=True,
            )  # fmt: skip
        try:
            return tma.swizzled(offset, tensor.box_bytes, tensor.swizzle, tensor.inner_bytes) >> 4
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
        self._flip(barrier)

    def _one(self, lane: int) -> tuple[int, int]:
        return self.warp0 + lane // 32, 1 << lane % 32 | self._gone(lane // 32)

    def tma_load(
        self, dst: Any, descriptor: Any, coords: tuple, barrier: Any, multicast: Any, pair: bool,
        m: Mask, site: int,
    ) -> None:  # fmt: skip
        for lane in self._active(m).tolist():
            where, bar = self._at(dst, lane), self._at(barrier, lane)
            tensor = self._tensor_map(self._at(descriptor, lane), site)
            at = tuple(self._at(c, lane) for c in coords)
            if multicast is None:
                targets = [(where, bar)]
            else:
                bits = self._at(multicast, lane)
                targets = [
                    (r << 24 | where & 0xFFFFFF, r << 24 | bar & 0xFFFFFF)
                    for r in range(16)
                    if bits >> r & 1
                ]
            if self.counting:
                region = tma.global_footprint(tensor, at)
                self.machine.counters.tma_load_bytes += region.nbytes if region else 0
            self._load_box(tensor, at, targets, lane, site)

    def _load_box(
        self, tensor: tma.TensorMap, at: tuple, targets: list[tuple[int, int]], lane: int, site: int
    ) -> None:
        view = self._view(site, False)
        arrivals = []
        for where, bar in targets:
            if where >> 24 >= len(self.cta.cluster.ctas):
                self.report("out of bounds", f"a box goes to CTA {where >> 24} of a cluster of "
                            f"{len(self.cta.cluster.ctas)}", site, fatal=True)  # fmt: skip
            cta = self.cta.cluster.ctas[where >> 24]
            granules = self._box_granules(tensor, where, cta, site)
            owner, barrier = self._mbarrier(bar, site)
            self._agent_of(owner, barrier, bar & 0xFFFFFF)
            epoch = self._issue(barrier)
            if self.check:
                self._sees_init(barrier, self._only(lane), site, asynchronous=True)
                self._async_write(cta, self._as_slice(granules, tensor), barrier, epoch, lane, site)
            arrivals.append((cta, granules, barrier, epoch))

        def work() -> None:
            data = tma.read_box(tensor, at, view)
            for cta, granules, barrier, epoch in arrivals:
                cta.shared.granules[granules] = data.view(cta.shared.granules.dtype)
                self._complete(barrier, epoch, tensor.box_bytes)

        self._start(work)

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
        self, dst: Any, src: Any, size: Any, barrier: Any, multicast: Any, from_shared: bool,
        op: str, type_: str, m: Mask, site: int,
    ) -> None:  # fmt: skip
        """cp.async.bulk into shared memory, from global memory or the own CTA's shared memory."""
        for lane in self._active(m).tolist():
            n, where, bar = self._at(size, lane), self._at(dst, lane), self._at(barrier, lane)
            source = self._at(src, lane)
            self._aligned((n, where, source), site)
            ranks = [where >> 24]
            if multicast is not None:
                bits = self._at(multicast, lane)
                ranks = [r for r in range(16) if bits >> r & 1]
            arrivals = []
            for rank in ranks:
                cta = self.cta.cluster.ctas[rank]
                spot = rank << 24 | where & 0xFFFFFF
                rows = self._bulk_rows(cta, spot, n, site)
                there = bar if multicast is None else rank << 24 | bar & 0xFFFFFF
                owner, object_ = self._mbarrier(there, site)
                self._agent_of(owner, object_, there & 0xFFFFFF)
                epoch = self._issue(object_)
                if self.check:
                    self._sees_init(object_, self._only(lane), site, asynchronous=True)
                    self._async_write(cta, rows, object_, epoch, lane, site)
                arrivals.append((cta, rows, object_, epoch))
            if from_shared and self.check:
                rows = self._bulk_rows(self.cta, source, n, site)
                first = arrivals[0]
                self._async_read(self.cta, rows, ("copy", first[2].agent), first[2].agent, first[3],
                                 lane, site)  # fmt: skip
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
            self.report("misaligned", "a bulk copy needs addresses and size in multiples of 16 "
                        "bytes", site, fatal=True)  # fmt: skip

    def _bulk_rows(self, cta: Cta, address: int, n: int, site: int) -> slice:
        offset = address & 0xFFFFFF
        if offset < SHARED_BASE or offset + n > cta.shared.size:
            self.report("out of bounds", f"a bulk copy of {n} bytes at byte {offset - SHARED_BASE} "
                        f"of {cta.shared.size - SHARED_BASE} bytes of shared memory", site, fatal=True)  # fmt: skip
        return slice(offset >> 4, (offset + n) >> 4)

    def _async_read(
        self, cta: Cta, rows: Any, key: Any, agent: int, epoch: int, lane: int, site: int
    ) -> None:
        warp, bits = self._one(lane)
        found = cta.shadow.async_read(
            self.clocks.eyes(warp, bits),
            self.clocks.rows[warp, 0],
            rows,
            key,
            (agent,),
            epoch,
            site,
        )
        if found is not None:
            self._race(found, False, cta, site)

    def _bulk_thread(self, lane: int) -> BulkThread:
        warp = self.warp0 + lane // 32
        key = (warp, lane % 32)
        if key not in self.bulk:
            agent = self.clocks.agent(
                ("bulk", *key), f"the bulk copies of warp {warp} lane {lane % 32}"
            )
            thread = BulkThread(agent)
            thread.committed = thread.waited = int(self.clocks.issued[agent])
            self.bulk[key] = thread
        return self.bulk[key]

    def tma_store(
        self, descriptor: Any, coords: tuple, src: Any, op: str, m: Mask, site: int
    ) -> None:
        stored: set[tuple] = set()
        for lane in self._active(m).tolist():
            where = self._at(descriptor, lane)
            tensor = self._tensor_map(where, site)
            at = tuple(self._at(c, lane) for c in coords)
            source = self._at(src, lane)
            granules = self._box_granules(tensor, source, self.cta, site)
            # The unit takes an instruction once a warp: lanes that all ask for one store (the DSL
            # elects none) make one, though it joins the bulk group of each.
            key = (lane // 32, where, at, source)
            repeated = not op and key in stored
            stored.add(key)
            if self.counting and not repeated:
                region = tma.global_footprint(tensor, at)
                self.machine.counters.tma_store_bytes += region.nbytes if region else 0
            view = self._view(site, True)

            def work(tensor=tensor, at=at, granules=granules, view=view, repeated=repeated) -> None:
                if repeated:
                    return
                data = self.cta.shared.granules[granules].view(np.uint8)
                if op:
                    tma.reduce_box(tensor, at, data, view, op)
                else:
                    tma.write_box(tensor, at, data, view)

            self._store(self._as_slice(granules, tensor), work, lane, site)

    def _store(self, rows: Any, work: Callable[[], None], lane: int, site: int) -> None:
        """A bulk copy out of shared memory joins the thread's open group."""
        thread = self._bulk_thread(lane)
        thread.used, thread.site = True, site
        if self.check:
            key = ("bulk", thread.agent)
            self._async_read(self.cta, rows, key, thread.agent, thread.committed + 1, lane, site)
        if self.machine.eager:
            work()
        else:
            thread.open.append(work)

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

            self._store(rows, work, lane, site)

    def bulk_commit(self, m: Mask, site: int) -> None:
        for lane in self._active(m).tolist():
            key = (self.warp0 + lane // 32, lane % 32)
            thread = self.bulk.get(key)
            if thread is not None:
                thread.committed += 1
                self.clocks.issued[thread.agent] = thread.committed
                thread.groups.append(thread.open)
                thread.open, thread.used = [], False

    def bulk_wait(self, keep: int, read: bool, m: Mask, site: int) -> None:
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
        for thread in self.bulk.values():
            if self.check and thread.used:
                self.machine.report("unfinished copy", "a bulk copy out of shared memory was never "
                                    "committed to a group", thread.site)  # fmt: skip
            elif self.check and thread.waited < thread.committed:
                self.machine.report(
                    "unfinished copy", "the CTA ends while a bulk copy may still read its shared "
                    "memory (no wait_group covers it)", thread.site,
                )  # fmt: skip
            for work in [w for group in thread.groups for w in group] + thread.open:
                work()
        if self.check and (self.hot_acc or self.open_group.accumulators):
            self.machine.report("unfinished wgmma", "the CTA ends while a wgmma is in flight", -1)

    # cp.async ------------------------------------------------------------------------------------

    def _cp_agent(self, warp: int) -> int:
        agent = self.clocks.agent(("cp.async", warp), f"cp.async of warp {warp}")
        self.clocks.asynchronous[agent] = False  # it writes through the generic proxy
        return agent

    def cp_async(self, dst: Any, src: Any, size: int, read: Any, m: Mask, site: int) -> None:
        cta, offsets, lanes = self._shared_offsets(dst, size, m, site, False, True)
        addresses, _ = self._global(src, m)
        counts = np.broadcast_to(np.asarray(read), (self.lanes,))[lanes].astype(np.int64)
        if self.check:
            self._check_shared(cta, offsets, size, lanes, m, True, site)
            cells = cta.shadow.cells(offsets, size)
            for w in self._warps(m):
                agent = self._cp_agent(self.warp0 + w)
                epoch = int(self.clocks.issued[agent]) + 1
                cta.shadow.put(cells[lanes // 32 == w], agent, epoch)
        if self.counting:
            self.machine.counters.ld_global_bytes += int(counts.sum())
            self.machine.counters.shared_write_bytes += size * len(lanes)

        def work() -> None:
            for offset, address, n in zip(
                offsets.tolist(), addresses.tolist(), counts.tolist(), strict=True
            ):
                target = cta.shared.bytes[offset : offset + size]
                target[...] = 0
                if n:
                    view = self._view(site, False)
                    target[:n] = view(tma.Strided(int(address), (n,), (1,), 1))

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
        for lane in self._active(m).tolist():
            only = self._only(lane)
            bar = self._at(barrier, lane)
            nbytes = size * len(values)
            cta, offsets, _ = self._shared_offsets(addresses, nbytes, only, site, True, True)
            owner, object_ = self._mbarrier(bar, site)
            self._agent_of(owner, object_, bar & 0xFFFFFF)
            epoch = self._issue(object_)
            if self.check:
                self._sees_init(object_, only, site)
                self._check_shared(cta, offsets, nbytes, np.array([lane]), only, True, site)
                cta.shadow.put(cta.shadow.cells(offsets, nbytes), object_.agent, epoch)

            def work(cta=cta, offsets=offsets, lane=lane, object_=object_, epoch=epoch) -> None:
                target = cta.shared.typed(size, len(values))
                self._put(target, offsets // nbytes, values, np.array([lane]), size)
                self._complete(object_, epoch, nbytes)

            work()

    # Tensor cores --------------------------------------------------------------------------------

    def touch(self, reads: int, writes: int, site: int) -> None:
        """Ordinary instructions touch registers that wgmma also uses."""
        self.dirty |= reads | writes
        if (self.hot_acc & (reads | writes)) or (self.hot_src & writes):
            hot_acc, hot_src = self._in_flight(min(self.wgmma_waited[w] for w in self.group.warps))
            steps = self.program.touches.get(site, [(reads, writes, site)])
            sites = [at for read, written, at in steps if hot_acc & (read | written)]
            for at in sites or [at for _, written, at in steps if hot_src & written]:
                self.report(
                    "register in flight", "a register is used while a wgmma that has not been "
                    "waited for may still write or read it", at,
                )  # fmt: skip

    def wgmma_fence(self) -> None:
        self.dirty = 0

    def wgmma(
        self, acc: Any, a: Any, b: tuple, scales: tuple, sites: tuple[int, ...], columns: int,
        dtype: str, atype: str, btype: str, neg_a: bool, neg_b: bool, trans_a: bool, trans_b: bool,
        saturate: bool,
    ) -> None:  # fmt: skip
        """wgmmas into one accumulator that follow one another, as one over a longer K.

        Args:
            acc: registers [n, 128].
            a: descriptors, one a wgmma; or the registers of all, [4 * wgmmas, 128].
            b, scales, sites: one a wgmma.
        """
        major_a, major_b = "mn" if trans_a else "k", "mn" if trans_b else "k"
        item, item_b = _ITEM[atype], _ITEM[btype]
        b = tuple(self._at(d, 0) for d in b)
        a_descs = tuple(self._at(d, 0) for d in a) if isinstance(a, tuple) else None

        def plans(part: slice) -> list[tensor_core.Operand]:
            found = [tensor_core.operand(b[part], "b", major_b, columns, item_b)]
            if a_descs is not None:
                found.append(tensor_core.operand(a_descs[part], "a", major_a, 64, item))
            return found

        used = plans(slice(None))
        if max(plan.last for plan in used) >= self.cta.shared.size >> 4:
            self.report("out of bounds", "a wgmma operand lies past the end of shared memory",
                        sites[0], fatal=True)  # fmt: skip
        if self.check:
            self._check_wgmma(used, plans, sites)
        if self.counting:
            counters = self.machine.counters
            counters.tensor_flops += len(b) * tensor_core.wgmma_flops(columns, item)
            counters.tensor_clocks += len(b) * tensor_core.wgmma_clocks(columns)
            counters.shared_read_bytes += 16 * sum(len(plan.granules) for plan in used)
        view = acc.view(np.float16) if dtype == "f16" else acc
        # What stands before one that does not add to the accumulator is lost.
        keep = [self._at(scale, 0) for scale in scales]
        start = max((i for i, kept in enumerate(keep) if not kept), default=0)
        if start:
            used = plans(slice(start, None))

        exact = self.machine.options.exact and dtype == "f32" and atype in ("bf16", "f16")

        def work() -> None:
            granules = self.cta.shared.granules
            left = (
                tensor_core.a_from_registers(np.ascontiguousarray(a[4 * start :]), atype)
                if a_descs is None else tensor_core.load(used[1], granules, atype)
            )  # fmt: skip
            right = tensor_core.load(used[0], granules, btype)
            if exact:
                tensor_core.mma_exact(left, right, view, bool(keep[start]), neg_a, neg_b)
            else:
                tensor_core.mma(left, right, view, bool(keep[start]), neg_a, neg_b, saturate)

        if self.machine.eager:
            work()
        else:
            self.open_group.work.append(work)

    def _check_wgmma(
        self, used: list[tensor_core.Operand], plans: Callable[[slice], list], sites: tuple
    ) -> None:
        for site in sites:
            self._check_wgmma_registers(site)
        if self._operand_race(used, sites[0]) is not None:
            for i, site in enumerate(sites):
                found = self._operand_race(plans(slice(i, i + 1)), site)
                if found is not None:
                    self._race(found, False, self.cta, site)

    def _check_wgmma_registers(self, site: int) -> None:
        if site not in self._bits:
            ins = self.program.kernel.instructions[site]
            acc, source = ins.operands[0], ins.operands[1]
            self._bits[site] = (
                self.program.mask_of(acc),
                self.program.mask_of(source) if isinstance(source, tuple) else 0,
            )
        acc, source = self._bits[site]
        if self.dirty & (acc | source):
            self.report("missing wgmma.fence", "registers of a wgmma were touched since the last "
                        "wgmma.fence", site)  # fmt: skip
        if self.hot_acc & source:
            self.report("register in flight", "a wgmma reads as A what another one in flight "
                        "writes", site)  # fmt: skip
        if self.hot_src & acc:
            self.report("register in flight", "a wgmma writes registers that another one in flight "
                        "reads", site)  # fmt: skip
        self.open_group.accumulators |= acc
        self.open_group.sources |= source
        self.hot_acc |= acc
        self.hot_src |= source

    def _operand_race(self, plans: list[tensor_core.Operand], site: int) -> Conflict | str | None:
        epoch = self.wgmma_base + self.wgmma_committed + 1
        rows = self.clocks.rows[self.warp0 : self.warp0 + 4].min(0)
        eyes = np.where(self.clocks.asynchronous, rows[0], rows[1])
        shadow, key = self.cta.shadow, ("wgmma", self.first)
        for i, plan in enumerate(plans):
            found = shadow.async_read(
                eyes, rows[0], plan.touched, key, self.wgmma_agents, epoch, site
            )
            if i and isinstance(found, Conflict):  # a warp reads only its own sixteen rows of A
                found = self._check_rows_of_a(plan, key, epoch, site)
            if found is not None:
                return found
        return None

    def _check_rows_of_a(self, plan: Any, key: Any, epoch: int, site: int) -> Any:
        if plan.axes != (1, 0):
            rows = self.clocks.rows[self.warp0 : self.warp0 + 4].min(0)
            eyes = np.where(self.clocks.asynchronous, rows[0], rows[1])
            return self.cta.shadow.async_read(
                eyes, rows[0], plan.touched, key, self.wgmma_agents, epoch, site
            )
        by_row = plan.granules.reshape(2, 4, 8, -1)  # fragment order: h, w, g
        for w in range(4):
            eyes = self.clocks.eyes(self.warp0 + w, FULL)
            found = self.cta.shadow.async_read(
                eyes, self.clocks.rows[self.warp0 + w, 0], by_row[:, w].ravel(), key,
                self.wgmma_agents, epoch, site,
            )  # fmt: skip
            if found is not None:
                return found
        return None

    def wgmma_commit(self, site: int) -> None:
        self.wgmma_committed += 1
        self.open_group.number = self.wgmma_committed
        self.flight.append(self.open_group)
        self.open_group = WgmmaGroup()
        if self.check:
            for agent in self.wgmma_agents:
                self.clocks.issued[agent] = self.wgmma_base + self.wgmma_committed

    def wgmma_wait(self, keep: int, m: Mask, site: int) -> None:
        ended = self.wgmma_committed - keep
        for group in self.flight:
            if group.number <= ended:
                for work in group.work:
                    work()
                group.work.clear()
        for w in self._warps(m):
            self.wgmma_waited[w] = max(self.wgmma_waited[w], ended)
            if self.check:
                self.clocks.observe(
                    self.warp0 + w, self.wgmma_agents[w], self.wgmma_base + self.wgmma_waited[w]
                )
        everywhere = min(self.wgmma_waited)
        self.flight = [group for group in self.flight if group.number > everywhere]
        self.hot_acc, self.hot_src = self._in_flight(everywhere)

    def _in_flight(self, ended: int) -> tuple[int, int]:
        """Registers (accumulators, sources of A) of the groups after number `ended`."""
        accumulators, sources = self.open_group.accumulators, self.open_group.sources
        for group in self.flight:
            if group.number > ended:
                accumulators |= group.accumulators
                sources |= group.sources
        return accumulators, sources

    def setmaxnreg(self, count: int, increase: bool, m: Mask, site: int) -> bool:
        """Gives registers back to the SM's pool, or takes them once they are there."""
        cta = self.cta
        need = sum((count - self.registers[w]) * 32 for w in self._warps(m))
        if increase and need > cta.pool:
            return self._stalled(
                lambda: cta.pool >= need,
                lambda: (
                    f"setmaxnreg.inc to {count} needs {need} registers of the SM's file and "
                    f"{cta.pool} are free"
                ),
                lambda: True,
            )
        if count % 8 or not 24 <= count <= 256 or (need < 0) == increase and need:
            self.report("resources", f"setmaxnreg.{'inc' if increase else 'dec'} to {count} from "
                        f"{self.registers[self._warps(m)[0]]}", site)  # fmt: skip
        for w in self._warps(m):
            self.registers[w] = count
        cta.pool -= need
        cta.cluster.version += 1
        return True

    def branch(self, predicate: Any, m: Mask, taken: int, fall: int) -> Any:
        raise NotImplementedError


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
    view = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
            "f16": np.float16, "f32": np.float32, "f64": np.float64}[dtype]  # fmt: skip
    x, y = np.array([old]).view(view), np.array([args[0]]).view(view)
    out = {"add": np.add, "min": np.fmin if dtype[0] == "f" else np.minimum,
           "max": np.fmax if dtype[0] == "f" else np.maximum}[op](x, y)  # fmt: skip
    return out.view(old.dtype)[0]
