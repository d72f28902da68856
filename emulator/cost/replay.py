"""One SM's run in modelled time: a discrete-event replay of what the emulator recorded.

Warps go through their streams. A stretch of instructions shares its scheduler's units with those of
other warps, as a fluid: each advances at the rate that the busiest unit leaves it. Tensor cores and
TMA are engines that serve one request after the other. A wait ends when the point that it waits
for has had every arrival that was recorded, and the latency of the hand-over has passed; who waits
for whom is thus the emulator's, and only how long anything takes is the model's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..recording import (
    Arrive,
    Commit,
    Copy,
    Drain,
    Effect,
    Mma,
    MmaCommit,
    Point,
    Products,
    Recording,
    Step,
    Store,
    Stretch,
    TmemMove,
    TmemWait,
    Wait,
)
from .rates import Gpu
from .work import EXCHANGE, Work, alone_shares, beside_tensor, measure

Kind = Literal["work", "wait", "busy"]
WARPGROUP = 4  # warps
Parts = tuple[tuple[int, int, int], ...]
Pauses = Callable[[Recording, Effect], tuple[Work | None, Work | None]]
_FLOWING = (TmemMove, Arrive, Commit, Copy, Store, MmaCommit)  # nothing waits there


@dataclass(frozen=True)
class Span:
    """Clocks [start, end) of a lane: a warp's work or wait, or an engine's being busy."""

    lane: str  # "warp 4", "tensor", "tma", with the CTA's rank before it in a cluster
    start: float
    end: float
    kind: Kind
    site: int  # of the instruction that it is about; of a stretch, its first
    visit: int = 0  # how often the lane came by there before
    nbytes: int = 0
    warp: int = -1  # whose it is; of an engine's, who asked
    stretch: Stretch | None = None
    units: tuple[float, ...] = ()  # of a stretch: clocks of its scheduler's `UNITS`


@dataclass
class Replay:
    """What came out: clocks, and spans of every lane in order."""

    gpu: Gpu
    clocks: float
    spans: list[Span]
    # Of each warp's lane: (instruction, clock when it came there, when it went on) of its effects.
    stamps: dict[str, list[tuple[int, float, float]]]

    def busy(self, lane: str, kind: Kind = "busy") -> float:
        """Clocks that a lane spent so."""
        return sum(s.end - s.start for s in self.spans if s.lane == lane and s.kind == kind)


class Signal:
    """Something that happens once."""

    def __init__(self, expected: int = 1) -> None:
        self.expected = expected
        self.time: float | None = None
        self.waiting: list[Callable[[], None]] = []


@dataclass(eq=False)
class _Running:
    """A stretch on a scheduler."""

    work: Work
    then: Callable[[], None]
    left: float = 1.0  # share of it
    rate: float = 1.0  # share of its speed alone


class _Scheduler:
    """The units of a quarter of an SM, shared by the stretches that run on it."""

    def __init__(self, sim: _Sim) -> None:
        self.sim = sim
        self.running: list[_Running] = []
        self.beside = False  # do the tensor cores run?
        self.alone = list(alone_shares().values())
        self.shares = list(beside_tensor(sim.gpu).values())
        self.since = 0.0
        self.version = 0

    def add(self, work: Work, then: Callable[[], None]) -> None:
        self._advance()
        self.running.append(_Running(work, then))
        self._plan()

    def run_beside(self, beside: bool) -> None:
        """From now on the tensor cores run, or do not."""
        self._advance()
        self.beside = beside
        self._plan()

    def exchanging(self) -> float:
        """The share of its part of shared memory's rate that the stretches take now."""
        each = (one.rate * one.work.units[EXCHANGE] / one.work.alone for one in self.running)
        return sum(each)

    def _advance(self) -> None:
        passed, self.since = self.sim.now - self.since, self.sim.now
        for one in self.running:
            one.left -= passed * one.rate / one.work.alone

    def _plan(self) -> None:
        """Rates from now on, and when the next stretch ends."""
        limits = self.shares if self.beside else self.alone
        for one in self.running:
            one.rate = one.work.alone / one.work.beside if self.beside else 1.0
        for unit, limit in enumerate(limits):
            asked = [one.work.units[unit] / one.work.alone for one in self.running]
            if sum(asked) > limit:
                level = _level(asked, limit)
                for one, wanted in zip(self.running, asked, strict=True):
                    if wanted > level:
                        one.rate = min(one.rate, level / wanted)
        self.version += 1
        if self.running:
            soonest = min(one.left * one.work.alone / one.rate for one in self.running)
            version = self.version
            self.sim.at(self.sim.now + max(soonest, 0.0), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self.version:
            return
        self._advance()
        ended = [one for one in self.running if one.left < 1e-9]
        self.running = [one for one in self.running if one.left >= 1e-9]
        self._plan()
        for one in ended:
            one.then()


def _level(asked: list[float], limit: float) -> float:
    """What each may have at most, so that all together get the limit."""
    left = sorted(asked)
    for i, one in enumerate(left):
        share = limit / (len(left) - i)
        if one >= share:
            return share
        limit -= one
    return left[-1]


@dataclass(eq=False)
class _Job:
    """Products one behind the other: of one warpgroup, or of a thread."""

    queue: object  # whose
    count: int
    clocks: float  # of one
    shared: float  # clocks of shared memory that its operands take, of one
    done: Signal
    issued: Signal  # all of them: who asked may go on
    site: int
    visit: int
    warp: int
    waiting: int = field(init=False)  # to be issued
    left: int = field(init=False)  # to be done

    def __post_init__(self) -> None:
        self.waiting = self.left = self.count


class _Tensor:
    """The tensor cores of one SM, or of a pair of them.

    They do products in the order of issue and hold `mma_depth`; of those that wait to be issued,
    each warpgroup has one in turn.
    """

    def __init__(self, sim: _Sim) -> None:
        self.sim = sim
        self.lanes: list[str] = []
        self.schedulers: list[_Scheduler] = []
        self.asking: dict[object, deque[_Job]] = {}
        self.held: deque[_Job] = deque()  # an entry a product, the first one runs
        self.begun = 0.0  # since when products of the same job run

    def ask(self, job: _Job) -> None:
        self.asking.setdefault(job.queue, deque()).append(job)
        idle = not self.held
        self._issue()
        if idle:
            for scheduler in self.schedulers:
                scheduler.run_beside(True)
            self.begun = self.sim.now
            self._begin()

    def _issue(self) -> None:
        while len(self.held) < self.sim.gpu.mma_depth:
            queue = next((q for q, jobs in self.asking.items() if jobs), None)
            if queue is None:
                return
            jobs = self.asking.pop(queue)
            job = jobs[0]
            job.waiting -= 1
            self.held.append(job)
            if not job.waiting:
                jobs.popleft()
                self.sim.reach(job.issued, self.sim.now)
            self.asking[queue] = jobs  # behind all others

    def _begin(self) -> None:
        job, using = self.held[0], [one.exchanging() for one in self.schedulers]
        clocks = max(job.clocks, job.shared / (1 - sum(using) / len(using)))
        self.sim.at(self.sim.now + clocks, self._end)

    def _end(self) -> None:
        job = self.held.popleft()
        job.left -= 1
        if not job.left:
            self.sim.reach(job.done, self.sim.now + self.sim.gpu.mma_latency)
        self._issue()
        if not self.held or self.held[0] is not job:
            self._draw(job)
            self.begun = self.sim.now
        if self.held:
            return self._begin()
        for scheduler in self.schedulers:
            scheduler.run_beside(False)
        return None

    def _draw(self, job: _Job) -> None:
        for lane in self.lanes:
            span = lane, self.begun, self.sim.now, "busy", job.site, job.visit, 0, job.warp
            self.sim.spans.append(Span(*span))


@dataclass(eq=False)
class _Cta:
    schedulers: list[_Scheduler]
    tensor: _Tensor
    tma_free: float = 0.0
    adds_free: float = 0.0
    peer_free: float = 0.0
    prefix: str = ""


def _queues() -> dict[str, list[Signal]]:
    """Products, bulk stores, and of these the reading of shared memory."""
    return {"wgmma": [], "bulk": [], "read": []}


@dataclass(eq=False)
class _Warp:
    """One warp's way through its stream."""

    number: int
    cta: _Cta
    lane: str
    steps: list[Step]
    recording: Recording
    open: dict[str, list[Signal]] = field(default_factory=_queues)
    groups: dict[str, list[Signal]] = field(default_factory=_queues)
    moves: dict[str, list[Signal]] = field(default_factory=lambda: {"ld": [], "st": []})
    tmem_free: float = 0.0
    mmas: list[Signal] = field(default_factory=list)
    peeked: list[Point] = field(default_factory=list)
    products: int = 0
    visits: Counter[tuple[int, Kind]] = field(default_factory=Counter)
    at: Effect | None = None
    issued: Signal | None = None  # of the products it has just asked for


class _Sim:
    def __init__(
        self, recordings: Sequence[Recording], gpu: Gpu, pauses: Pauses | None = None
    ) -> None:
        self.gpu, self.now, self.pauses = gpu, 0.0, pauses
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.spans: list[Span] = []
        self.stamps: dict[str, list[tuple[int, float, float]]] = {}
        self.points: dict[Point, Signal] = {}
        self.jobs: dict[tuple[int, int, int], tuple[_Job, Counter[str]]] = {}
        self.works: dict[Parts, Work] = {}
        self.slices: dict[tuple[Parts, ...], list[Work]] = {}
        self.spins: dict[int, bool] = {}
        self.warps: list[_Warp] = []
        expected: Counter[Point] = Counter()
        tensor = _Tensor(self)
        pair = any(
            isinstance(step, Mma) and step.pair
            for recording in recordings
            for steps in recording.streams().values()
            for step in steps
        )
        for recording in recordings:
            prefix = f"cta {recording.rank} " if len(recordings) > 1 else ""
            if not pair:
                tensor = _Tensor(self)
            schedulers = [_Scheduler(self) for _ in range(gpu.schedulers)]
            tensor.lanes.append(f"{prefix}tensor")
            tensor.schedulers += schedulers
            cta = _Cta(schedulers, tensor, prefix=prefix)
            for number, steps in sorted(recording.streams().items()):
                self.warps.append(_Warp(number, cta, f"{prefix}warp {number}", steps, recording))
                for step in steps:
                    if isinstance(step, Arrive):
                        expected[step.point] += 1
                    elif isinstance(step, (Copy, MmaCommit)):
                        expected.update(step.points)
        self.points = {point: Signal(count) for point, count in expected.items()}

    # Time ----------------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (max(time, self.now), next(self.count), act))

    def reach(self, signal: Signal, time: float) -> None:
        """One arrival at a signal, at a time from now on; the last of them is what counts."""
        signal.expected -= 1
        if signal.expected <= 0:

            def happen() -> None:
                signal.time = self.now
                for act in signal.waiting:
                    act()

            self.at(time, happen)

    def arrive(self, point: Point, time: float) -> None:
        signal = self.points[point]
        mbarrier = point[0] != "bar"
        latency = self.gpu.mbarrier_latency if mbarrier else self.gpu.barrier_latency
        # The latest arrival ends the phase, whichever was asked for last.
        self.at(time, lambda: self.reach(signal, self.now + latency))

    def span(
        self,
        warp: _Warp,
        start: float,
        kind: Kind,
        site: int,
        stretch: Stretch | None = None,
        units: tuple[float, ...] = (),
    ) -> None:
        if self.now > start:
            where = warp.lane, start, self.now, kind, site, warp.visits[site, kind], 0, warp.number
            self.spans.append(Span(*where, stretch, units))

    # Warps ---------------------------------------------------------------------------------------

    def run(self) -> float:
        for warp in self.warps:
            self._resume(self._life(warp))
        while self.queue:
            self.now, _, act = heapq.heappop(self.queue)
            act()
        stuck = [f"{w.lane} at {w.at}" for w in self.warps if w.steps]
        if stuck:
            raise RuntimeError("\n".join(["the replay stands still", *stuck]))
        return max(span.end for span in self.spans)

    def _resume(self, life: Generator[Callable[[Callable[[], None]], None], None, None]) -> None:
        """Goes on until the warp has to wait: it yields what calls back when it is over."""
        ask = next(life, None)
        if ask is not None:
            ask(lambda: self._resume(life))

    def _life(self, warp: _Warp) -> Generator[Callable[[Callable[[], None]], None], None, None]:
        yield lambda then: self.at(self.gpu.start, then)
        works = self._together(warp)
        for at, step in enumerate(warp.steps):
            start = self.now
            if isinstance(step, Stretch):
                work = works[at] if at in works else self._work(warp.recording, step.parts)
                if work.alone:
                    for part in work.parts():
                        yield lambda then, w=part: self._scheduler(warp).add(w, then)
                    if work.added:
                        yield lambda then, w=work: self.at(self._add(warp.cta, w.added), then)
                    if work.peer:
                        yield lambda then, w=work: self.at(self._peer(warp.cta, w.peer), then)
                    first = warp.recording.instructions(step)[0].index
                    self.span(warp, start, "work", first, step, work.units)
                    warp.visits[first, "work"] += 1
                continue
            warp.at = step
            before, behind = self.pauses(warp.recording, step) if self.pauses else (None, None)
            if before:
                yield lambda then, w=before: self._scheduler(warp).add(w, then)
            for signal in self._before(warp, step):
                if signal.time is None:
                    yield signal.waiting.append
            self.span(warp, start, "wait", step.site)
            self.stamps.setdefault(warp.lane, []).append((step.site, start, self.now))
            self._act(warp, step)
            if warp.issued is not None and warp.issued.time is None:
                start = self.now
                yield warp.issued.waiting.append
                self.span(warp, start, "wait", step.site)
            warp.issued = None
            warp.visits[step.site, "wait"] += 1
            if behind:
                yield lambda then, w=behind: self._scheduler(warp).add(w, then)
        warp.steps = []

    def _scheduler(self, warp: _Warp) -> _Scheduler:
        return warp.cta.schedulers[warp.number % self.gpu.schedulers]

    def _work(self, recording: Recording, parts: Parts) -> Work:
        if parts not in self.works:
            self.works[parts] = measure(recording.instructions(Stretch(parts)), self.gpu)
        return self.works[parts]

    def _together(self, warp: _Warp) -> dict[int, Work]:
        """Stretches with nothing that waits between them, by index: each a part of the schedule of
        all, as the next one's instructions are issued before the last one's results are there."""
        works: dict[int, Work] = {}
        together: list[int] = []
        for at, step in enumerate([*warp.steps, Drain(-1, "bulk", 0)]):
            if isinstance(step, Stretch):
                together.append(at)
            elif not isinstance(step, _FLOWING):
                if len(together) > 1:
                    parts = tuple(warp.steps[i].parts for i in together)  # pyright: ignore
                    works.update(zip(together, self._slices(warp.recording, parts), strict=True))
                together = []
        return works

    def _slices(self, recording: Recording, stretches: tuple[Parts, ...]) -> list[Work]:
        """The schedule of all, cut where each one's share of the time that they take alone ends."""
        if stretches not in self.slices:
            each = [self._work(recording, parts) for parts in stretches]
            whole = self._work(recording, tuple(itertools.chain(*stretches)))
            clocks, begin = sum(one.alone for one in each), 0.0
            self.slices[stretches] = made = []
            for one in each:
                end = begin + one.alone / clocks if clocks else 1.0
                made.append(whole.during(begin, end, one) if end > begin else one)
                begin = end
        return self.slices[stretches]

    def _before(self, warp: _Warp, effect: Effect) -> list[Signal]:
        """What has to have happened for a warp to go on."""
        if isinstance(effect, Wait):
            if not self._spins(warp.recording, effect.site):
                warp.peeked.append(effect.point)
                return []
            return self._reached([effect.point])
        if isinstance(effect, Drain):
            groups = warp.groups["read" if effect.read else effect.queue]
            return groups[: len(groups) - effect.keep]
        if isinstance(effect, TmemWait):
            return warp.moves[effect.kind]
        if isinstance(effect, (Products, Mma, Copy)):
            points, warp.peeked = warp.peeked, []
            return self._reached(points)
        return []

    def _reached(self, points: list[Point]) -> list[Signal]:
        """What nobody is recorded to arrive at was reached before."""
        return [self.points[point] for point in points if point in self.points]

    def _spins(self, recording: Recording, site: int) -> bool:
        """Whether a wait is tried again until it succeeds; else it is a glance ahead."""
        if site not in self.spins:
            kernel = recording.program.kernel
            block = next(
                b for b in kernel.blocks if b.instructions and b.instructions[-1].index >= site
            )
            near = kernel.blocks[block.index : block.index + 3]
            targets = {
                kernel.labels.get(str(i.operands[0]))
                for b in near
                for i in b.instructions
                if i.parts[0] == "bra"
            }
            other = kernel.instructions[site].parts[0] != "mbarrier"
            self.spins[site] = other or block.index in targets
        return self.spins[site]

    # What effects do -----------------------------------------------------------------------------

    def _act(self, warp: _Warp, effect: Effect) -> None:
        gpu = self.gpu
        if isinstance(effect, Arrive):
            self.arrive(effect.point, self.now)
        elif isinstance(effect, Copy):
            done = self._transfer(warp, effect) + gpu.tma_latency
            for point in effect.points:
                self.arrive(point, done)
        elif isinstance(effect, Store):
            for queue, time in zip(("read", "bulk"), self._store(warp, effect), strict=True):
                warp.open[queue].append(Signal())
                self.reach(warp.open[queue][-1], time)
        elif isinstance(effect, Commit):
            for queue in ("read", "bulk") if effect.queue == "bulk" else (effect.queue,):
                opened, warp.open[queue] = warp.open[queue], []
                warp.groups[queue].append(self._all(opened))
        elif isinstance(effect, Products):
            self._products(warp, effect)
        elif isinstance(effect, Mma):
            job = self._job(warp, effect, warp)
            warp.mmas.append(job.done)
            self.at(self.now + gpu.mma_start, lambda: warp.cta.tensor.ask(job))
        elif isinstance(effect, MmaCommit):
            last = self._all(warp.mmas[-1:])
            for point in effect.points:
                self._when(last, lambda point=point: self.arrive(point, self.now))
        elif isinstance(effect, TmemMove):
            signal = Signal()
            begin = max(self.now, warp.tmem_free)
            warp.tmem_free = begin + effect.nbytes / gpu.tmem_bytes
            self.reach(signal, warp.tmem_free + gpu.tmem_latency)
            warp.moves[effect.kind].append(signal)
        elif isinstance(effect, TmemWait):
            warp.moves[effect.kind] = []

    def _when(self, signal: Signal, act: Callable[[], None]) -> None:
        if signal.time is None:
            signal.waiting.append(act)
        else:
            act()

    def _all(self, signals: list[Signal]) -> Signal:
        """When all have happened; at once if there are none."""
        made = Signal(max(1, len(signals)))
        if not signals:
            self.reach(made, self.now)
            made.time = self.now
        for signal in signals:
            self._when(signal, lambda: self.reach(made, self.now))
        return made

    def _transfer(self, warp: _Warp, effect: Copy | Store) -> float:
        """When the last byte of a copy by TMA is on its way."""
        cta, gpu = warp.cta, self.gpu
        begin = max(self.now, cta.tma_free)
        cta.tma_free = begin + max(effect.nbytes / gpu.l2_bytes, gpu.tma_issue)
        self._engine(f"{cta.prefix}tma", warp, effect.site, begin, cta.tma_free, effect.nbytes)
        return cta.tma_free

    def _store(self, warp: _Warp, effect: Store) -> tuple[float, float]:
        """When a store by TMA has read shared memory, and when it is done."""
        cta, gpu = warp.cta, self.gpu
        if not effect.adds:
            sent = self._transfer(warp, effect)
            return sent, sent + gpu.tma_latency
        begin = max(self.now, cta.adds_free)
        left = self._add(cta, effect.nbytes)
        self._engine(f"{cta.prefix}adds", warp, effect.site, begin, cta.adds_free, effect.nbytes)
        read = max(left, self.now + effect.nbytes / gpu.shared_bytes)
        return read, cta.adds_free + gpu.tma_latency

    def _add(self, cta: _Cta, nbytes: float) -> float:
        """When a warp that adds to global memory goes on: what it added may still be on its way."""
        gpu = self.gpu
        cta.adds_free = max(self.now, cta.adds_free) + nbytes / gpu.l2_add_bytes
        return cta.adds_free - gpu.l2_add_queue / gpu.l2_add_bytes

    def _peer(self, cta: _Cta, nbytes: float) -> float:
        """When what a warp stores into another CTA is there: a fence behind it waits for that."""
        cta.peer_free = max(self.now, cta.peer_free) + nbytes / self.gpu.peer_bytes
        return cta.peer_free + self.gpu.peer_latency

    def _engine(
        self, lane: str, warp: _Warp, site: int, begin: float, end: float, nbytes: int
    ) -> None:
        visit = warp.visits[site, "wait"]
        self.spans.append(Span(lane, begin, end, "busy", site, visit, nbytes, warp.number))

    def _products(self, warp: _Warp, effect: Products) -> None:
        """Products begin when the last of the four warps asks."""
        group = warp.recording.rank, warp.number // WARPGROUP
        key = (*group, warp.products)
        warp.products += 1
        if key not in self.jobs:
            self.jobs[key] = self._job(warp, effect, group), Counter()
        job, met = self.jobs[key]
        met["warps"] += 1
        warp.open["wgmma"].append(job.done)
        warp.issued = job.issued
        if met["warps"] == WARPGROUP:
            self.at(self.now + self.gpu.mma_start, lambda: warp.cta.tensor.ask(job))

    def _job(self, warp: _Warp, effect: Products | Mma, queue: object) -> _Job:
        gpu = self.gpu
        count, clocks = effect.count, effect.clocks / gpu.tensor / effect.count
        shared = effect.shared_bytes / gpu.shared_bytes / count
        where = effect.site, warp.visits[effect.site, "wait"], warp.number
        return _Job(queue, count, clocks, shared, Signal(), Signal(), *where)


def replay(recordings: Sequence[Recording], gpu: Gpu, pauses: Pauses | None = None) -> Replay:
    """The run of the CTAs of one cluster, each on an SM of its own.

    pauses: what a warp does before and behind an effect that was not recorded: reading a clock.

    Raises:
        RuntimeError: some warp waits for what no recorded one does.
    """
    sim = _Sim(recordings, gpu, pauses)
    clocks = sim.run()
    return Replay(gpu, clocks, sorted(sim.spans, key=lambda s: (s.start, s.lane)), sim.stamps)
