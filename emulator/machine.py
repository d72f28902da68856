"""Warpgroups, CTAs and clusters: runs a translated kernel, and stops it with a report when it errs.

A `Unit` is one warpgroup: its registers, and groups of lanes that share a program counter. The
group with the lowest counter runs first and groups merge where they meet, so divergent lanes
reconverge as early as they can. An instruction that has to wait stalls its group; units take turns,
and when nothing can move, asynchronous work that was held back completes, then another cluster
starts, and then it is a deadlock.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from . import mufu, ops
from .checker import Clock, Clocks, Shadow
from .instructions import Instructions
from .loader import Launch, device_of
from .memory import GlobalMemory, SharedMemory
from .ptx import SHARED_BASE, Instruction, Param
from .recording import Recording
from .report import Counters, Finding, Options, Stop
from .steps import BANK, DTYPE
from .tensor_memory import TensorMemory
from .translate import Program, program

STALL = object()
TURN = 400  # blocks a unit runs before the next one gets its turn
SLOW_WARPS = 0.5  # share of a cluster's, in order "random"
SPINS = 30  # rounds in which units moved and nothing changed: then the slow ones may move, too
SHARED_LIMIT = 227 * 1024  # bytes of shared memory one CTA can have on sm_90 and sm_100
REGISTER_FILE = 65536  # 32-bit registers of an SM


@dataclass(slots=True)
class Wait:
    """Why a group cannot move, and when to try again."""

    ready: Callable[[], bool]
    describe: Callable[[], str]
    helpless: Callable[[], bool] = lambda: False  # no warp can end it: bytes or registers lack


@dataclass(slots=True, eq=False)
class Group:
    """Lanes of a unit at one program counter; `mask` None means all lanes."""

    pc: int
    mask: NDArray[np.bool_] | None
    words: list[int]  # the mask, 32 lanes of a warp to a word
    warps: tuple[int, ...]  # that have lanes in it, within the unit
    wait: Wait | None = None
    ticket: object = None  # arrival at a barrier that the group waits for
    spun: tuple[int, int] = (-1, -1)  # (program counter, version) of a wait that failed


@dataclass(slots=True)
class Mbarrier:
    """A shared-memory barrier object (PTX mbarrier)."""

    count: int
    pending: int
    tx: int = 0
    phase: int = 0
    fenced: bool = False  # its initialisation is visible to the asynchronous proxy
    init: tuple[int, int] = (0, 0)  # (warp, epoch) that initialised it
    clock: Clock | None = None  # what has arrived so far
    done: Clock | None = None  # what the completed phases hand over
    drop: int = 0
    agent: int = -1  # of the copies that arrive here
    issued: list[int] = field(default_factory=list)  # epochs of copies still to complete
    last: int = 0  # epoch of the last copy issued
    begun: bool = False  # some bytes of this phase have come


@dataclass(slots=True)
class NamedBarrier:
    """One of a CTA's sixteen barriers (bar.sync and bar.arrive)."""

    arrived: int = 0
    expected: int = 0
    generation: int = 0
    clock: Clock | None = None
    done: Clock | None = None
    votes: list[NDArray[np.bool_]] = field(default_factory=list)
    result: int = 0
    first_site: int = -1


@dataclass(slots=True)
class ClusterBarrier:
    arrived: int = 0
    generation: int = 0
    clock: Clock | None = None
    done: Clock | None = None
    before: dict[int, int] = field(default_factory=dict)  # what came before: agents and epochs
    came: dict[int, int] = field(default_factory=dict)  # the same of the last generation done


class Cta:
    """One CTA: shared memory, barriers and units."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        launch, kernel = cluster.machine.launch, cluster.machine.program.kernel
        self.cluster, self.rank = cluster, rank
        static = -(-kernel.shared_static // 16) * 16
        # Dynamic shared memory follows the static part, both behind the system's KiB.
        self.dynamic = -(-(SHARED_BASE + static) // 1024) * 1024 if static else SHARED_BASE
        size = (self.dynamic if launch.smem_bytes else SHARED_BASE + static) + launch.smem_bytes
        self.shared = SharedMemory(max(size, SHARED_BASE + 16))
        self.shadow = Shadow(self.shared.size, cluster.machine.cell_bytes, cluster.warps)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named = [NamedBarrier() for _ in range(16)]
        threads = int(np.prod(launch.block))
        self.units = [
            Unit(self, first, min(128, threads - first)) for first in range(0, threads, 128)
        ]
        self.tensor_memory = TensorMemory()
        self.index = (0, 0, 0)
        # What agents did here last from other CTAs: (epoch, what they used, kind, site).
        self.reached: dict[int, tuple[int, str, str, int]] = {}
        self.pool = 0  # registers of the SM's file that setmaxnreg can hand out
        self.live = threads
        # Agent and epoch of the answer that there is no cluster left to cancel.
        self.refused: tuple[int, int] = (-1, 0)

    def start(self, index: tuple[int, int, int]) -> None:
        self.index = index
        self.shadow.clear()
        self.tensor_memory.start()
        self.mbarriers.clear()
        self.named = [NamedBarrier() for _ in range(16)]
        threads = int(np.prod(self.cluster.machine.launch.block))
        self.live = threads
        self.refused = (-1, 0)
        self.reached.clear()
        entry = min(255, REGISTER_FILE // threads // 8 * 8)
        self.pool = REGISTER_FILE - entry * threads
        for unit in self.units:
            unit.start(entry)
        if self.cluster.machine.options.record:
            self.cluster.machine.record(self)

    def shared_address(self, name: str) -> int:
        offset = self.cluster.machine.program.kernel.shared[name]
        where = self.dynamic if offset < 0 else SHARED_BASE + offset
        return self.rank << 24 | where


class Cluster:
    """CTAs that run together; a slot that is used again for later clusters."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        size = int(np.prod(machine.launch.cluster))
        self.warps_per_cta = -(-int(np.prod(machine.launch.block)) // 32)
        self.warps = size * self.warps_per_cta
        self.clocks = Clocks(self.warps)
        self.version = 0  # counts changes that a waiting group may be waiting for
        self.pending: list[Callable[[], None]] = []  # asynchronous work held back
        self.barrier = ClusterBarrier()
        # Of each CTA by rank: columns that tcgen05.alloc asks for, and where it gets them.
        self.tmem_asking: dict[int, int] = {}
        self.tmem_granted: dict[int, int] = {}
        self.ctas = [Cta(self, rank) for rank in range(size)]
        self.running = False
        # Who has waited for the kernels before to end has seen this agent, at this epoch.
        self.kernels_before = self.clocks.agent("kernels before", "the kernels before"), 0
        # In order "random", warps that move only while nothing else can: who waits for something
        # that ends too soon, and comes in time by luck, comes too late then.
        self.slow: set[int] = set()
        self.woken = -1  # the one of them that may move now

    def start(self, first: tuple[int, int, int]) -> None:
        """Starts the cluster whose first CTA has the given index."""
        cx, cy, _ = self.machine.launch.cluster
        self.barrier = ClusterBarrier()
        self.pending.clear()
        self.tmem_asking.clear()
        self.tmem_granted.clear()
        self.clocks.start(0, self.warps)
        if self.machine.launch.programmatic:
            agent, _ = self.kernels_before
            self.kernels_before = agent, self.clocks.issue(agent)
        for rank, cta in enumerate(self.ctas):
            at = (rank % cx, rank // cx % cy, rank // (cx * cy))
            cta.start((first[0] + at[0], first[1] + at[1], first[2] + at[2]))
        if self.machine.random:
            chance = random.Random(self.machine.random.random())
            self.slow = {w for w in range(self.warps) if chance.random() < SLOW_WARPS}
        self.machine.started += 1
        self.running = True

    def step(self) -> bool:
        """Gives every unit a turn; True if anything moved."""
        units = [unit for cta in self.ctas for unit in cta.units if unit.groups]
        rng = self.machine.random
        if rng:
            rng.shuffle(units)
            while self.pending and rng.random() < 0.3:
                self.pending.pop(rng.randrange(len(self.pending)))()
        moved = False
        for unit in units:
            moved |= unit.run(TURN if not rng else rng.randrange(1, 60))
        if not moved and self.pending:
            at = rng.randrange(len(self.pending)) if rng else 0
            self.pending.pop(at)()
            moved = True
        if rng and (not moved or self.machine.spins > SPINS):
            for warp in rng.sample(sorted(self.slow), len(self.slow)):
                self.woken = warp
                for unit in units:
                    moved |= unit.run(rng.randrange(1, 20))
                if moved:
                    break
            self.woken = -1
        if not any(unit.groups for unit in units):
            self.finish()
            return True
        return moved

    def finish(self) -> None:
        """All lanes have exited: checks what must not be left behind."""
        self.running = False
        while self.pending:
            self.pending.pop(0)()
        if not self.machine.options.check:
            return
        for cta in self.ctas:
            for unit in cta.units:
                unit.exit_checks()
            for column, (count, site) in cta.tensor_memory.owned.items():
                self.machine.report(
                    "tensor memory leak",
                    f"CTA {cta.index} ends and still holds {count} columns of tensor memory from "
                    f"{column} on",
                    site,
                )
            for address, barrier in cta.mbarriers.items():
                # Proven pipelines end with an acquire that announces a load nobody makes.
                if barrier.tx < 0 or (barrier.tx and barrier.begun):
                    self.machine.report(
                        "barrier misuse",
                        f"mbarrier {address:#x} of CTA {cta.index} ends with {barrier.tx} bytes "
                        + ("expected that never came" if barrier.tx > 0 else "over those expected"),
                        self.machine.barrier_sites.get(address, -1),
                    )


class Machine:
    """Runs one launch."""

    def __init__(
        self, launch: Launch, memory: GlobalMemory, options: Options, trace: bool = False
    ) -> None:
        self.launch, self.memory, self.options = launch, memory, options
        self.trace = trace  # look for the first NaN that an instruction makes
        self.program: Program = program(launch.ptx, launch.entry)
        kernel = self.program.kernel
        self.findings: list[Finding] = []
        self.counters = Counters(kernel.name)
        self.random = random.Random(options.seed) if options.order == "random" else None
        self.eager = options.order == "eager"
        self.cell_bytes = _smallest_shared_access(kernel.instructions)
        self.barrier_sites: dict[int, int] = {}
        self.cta_group: tuple[bool, int] | None = None  # whether tcgen05 works on pairs; first site
        self.parameters = b"".join(
            _padded(ctypes.string_at(address, param.size), kernel.params, i)
            for i, (address, param) in enumerate(zip(launch.args, kernel.params, strict=True))
        )
        self.parameter_bytes = np.frombuffer(self.parameters + bytes(64), np.uint8)
        self.clock = 0
        self.started = 0  # clusters
        self.recordings: list[Recording] = []
        self.spins = 0  # rounds in which units moved and nothing changed
        self.slots: list[Cluster] = []
        self.waiting: list[tuple[int, int, int]] = []  # first CTAs of clusters, the next one last
        self.stopped = False  # at a finding after which nothing more can be said

    def report(self, kind: str, message: str, site: int, fatal: bool = False) -> None:
        """Records a finding, but not the same one of the same line again; stops if `fatal`."""
        instructions = self.program.kernel.instructions
        text, (file, line) = "", ("", 0)
        if 0 <= site < len(instructions):
            text, (file, line) = instructions[site].text, instructions[site].source
        finding = Finding(kind, message, self.program.kernel.name, text, file, line)
        known = any(
            (f.kind, f.file, f.line) == (kind, file, line)
            and (f.instruction == text or f.message == message)
            for f in self.findings
        )
        if not known:
            self.findings.append(finding)
        if fatal or len(self.findings) >= self.options.max_findings:
            raise Stop

    def record(self, cta: Cta) -> None:
        """Keeps what the units of a CTA do from now on."""
        logs = {unit.first // 32: unit.log_anew() for unit in cta.units}
        smem = self.launch.smem_bytes
        made = Recording(self.program, cta.index, cta.rank, self.started, smem, logs)
        self.recordings.append(made)

    def source(self, site: int) -> str:
        """`file:line: instruction` of a site."""
        instructions = self.program.kernel.instructions
        if not 0 <= site < len(instructions):
            return "unknown"
        file, line = instructions[site].source
        where = f"{file.rsplit('/', 1)[-1]}:{line}: " if file else ""
        return where + _short(instructions[site].text)

    def run(self) -> None:
        """Runs every CTA of the grid. Raises nothing for findings: see `findings`."""
        try:
            with np.errstate(all="ignore"):
                self._run()
        except Stop:
            self.stopped = True
        if self.options.counters:
            self._count()

    def _run(self) -> None:
        shared = self.launch.smem_bytes + self.program.kernel.shared_static
        if shared > SHARED_LIMIT:
            self.report(
                "resources",
                f"{shared} bytes of shared memory a CTA; an SM gives at most {SHARED_LIMIT}",
                -1,
                fatal=True,
            )
        grid, size = self.launch.grid, self.launch.cluster
        self.waiting = waiting = [
            (x, y, z)
            for z in range(0, grid[2], size[2])
            for y in range(0, grid[1], size[1])
            for x in range(0, grid[0], size[0])
        ]
        if self.random:
            self.random.shuffle(waiting)
        waiting.reverse()
        slots = self.slots
        idle = 0
        while True:
            running = [slot for slot in slots if slot.running]
            if waiting and (not running or idle):
                running.append(self._start_cluster())
            elif not running:
                return
            elif idle > 3:
                self._deadlock(running)
            before = sum(slot.version for slot in slots), len(running)
            moved = False
            for slot in running:
                moved |= slot.step()
            ended = sum(1 for slot in running if not slot.running)
            after = sum(slot.version for slot in slots), len(running) - ended
            # Units that spin on memory move without progress: let others in after a while.
            self.spins = 0 if (before != after or not moved) else self.spins + 1
            idle = idle + 1 if not moved else (1 if self.spins > 8 and waiting else 0)
            if self.spins > 5000:
                self._deadlock(running)

    def _start_cluster(self) -> Cluster:
        slot = next((s for s in self.slots if not s.running), None)
        if slot is None:
            slot = Cluster(self)
            self.slots.append(slot)
        slot.start(self.waiting.pop())
        return slot

    def cancel(self) -> tuple[int, int, int] | None:
        """Takes the next cluster off the grid: its first CTA, or None if all have started.

        In random order some start before they can be cancelled, and some requests fail, as they do
        where a kernel of higher priority waits for the SM.
        """
        chance = self.random.random() if self.random else 1.0
        if self.waiting and chance < 0.2:
            self._start_cluster()
        return self.waiting.pop() if self.waiting and chance >= 0.1 else None

    def _deadlock(self, running: list[Cluster]) -> None:
        stood: list[tuple[bool, int, str]] = []  # (someone may help, site, description)
        for slot in running:
            for cta in slot.ctas:
                for unit in cta.units:
                    for group in unit.groups:
                        block = self.program.kernel.blocks[group.pc]
                        where = block.instructions[0].index
                        warps = ", ".join(str(unit.first // 32 + w) for w in group.warps)
                        why = group.wait.describe() if group.wait else "spinning"
                        text = f"CTA {cta.index} warp {warps} at {self.source(where)}: {why}"
                        stood.append((not (group.wait and group.wait.helpless()), where, text))
        stood.sort(key=lambda entry: entry[0])  # the cause first: others wait for those warps
        self.report(
            "deadlock",
            "\n  ".join(["no warp can move", *(text for _, _, text in stood)]),
            stood[0][1],
            fatal=True,
        )

    def _count(self) -> None:
        counters = self.counters
        static = self.program.static
        for slot in self.slots:
            for cta in slot.ctas:
                for unit in cta.units:
                    counts = unit.block_counts()  # [warps, blocks]
                    for warp, row in enumerate(counts):
                        counters.add_warp(unit.first // 32 + warp, row @ static)


def _padded(raw: bytes, params: list[Param], i: int) -> bytes:
    """A parameter's bytes with the gap before the next one."""
    following = params[i + 1].offset if i + 1 < len(params) else params[i].offset + len(raw)
    return raw.ljust(following - params[i].offset, b"\0")


def _smallest_shared_access(instructions: list[Instruction]) -> int:
    """Bytes of a shadow cell: 4, or less if the kernel touches shared memory in smaller words."""
    smallest = 4
    for ins in instructions:
        if ins.parts[0] in ("ld", "st", "atom", "red") and any("shared" in p for p in ins.parts):
            bits = ins.parts[-1].lstrip("busf")
            if bits.isdigit() and "x" not in ins.parts[-1]:
                smallest = min(smallest, max(1, int(bits) // 8))
    return smallest


def _short(text: str, width: int = 160) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


# Arithmetic for `Options.exact`.
_EXACT_OPS = SimpleNamespace(**(vars(ops) | {"ex2_ftz": mufu.ex2}))


class Unit(Instructions):
    """One warpgroup: registers, groups of lanes, and the instructions' effects (its base class)."""

    def __init__(self, cta: Cta, first: int, lanes: int) -> None:
        self.cta, self.first, self.lanes = cta, first, lanes
        self.machine = cta.cluster.machine
        self.clocks = cta.cluster.clocks
        self.check = self.machine.options.check
        self.counting = self.machine.options.counters
        self.program = self.machine.program
        self.warp_count = -(-lanes // 32)
        self.warp0 = cta.rank * cta.cluster.warps_per_cta + first // 32  # within the cluster
        self.lane_warp = self.warp0 + np.arange(lanes) // 32
        self.lane_id = np.arange(lanes, dtype=np.uint32) % 32
        self.all_warps = tuple(range(self.warp_count))
        self.groups: list[Group] = []
        self.everyone = self.words(np.ones(lanes, bool))
        self.group = self.part(0, None)
        self.wait: Wait | None = None
        blocks = len(self.program.blocks)
        self.full_counts = [0] * blocks
        self.masked_counts: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self.full: list[FunctionType | None] = [None] * blocks
        self.masked: list[FunctionType | None] = [None] * blocks
        self._registers()
        self.setup()

    def _registers(self) -> None:
        size = {bank: max(1, n) for bank, n in self.program.size.items()}
        banks = {
            "P": np.zeros((size["P"], self.lanes), np.bool_),
            "H": np.zeros((size["H"], self.lanes), np.uint16),
            "R": np.zeros((size["R"], self.lanes), np.uint32),
            "D": np.zeros((size["D"], self.lanes), np.uint64),
        }
        self.views = {letter: banks[BANK[letter]].view(dtype) for letter, dtype in DTYPE.items()}
        words = banks["D"].view(np.uint32).reshape(size["D"], self.lanes, 2)
        self.views |= {"X": words.view(np.float32), "L": words[..., 0], "T": words[..., 1]}
        space = dict(ops.NAMES)
        space |= {f"{letter}_all": view for letter, view in self.views.items()}
        arithmetic = _EXACT_OPS if self.machine.options.exact else ops
        space |= {"ops": arithmetic, "STALL": STALL, "live": np.ones(self.lanes, bool)}
        self.space = space
        self._known: int = 0
        launch = self.machine.launch
        threads = np.arange(self.first, self.first + self.lanes, dtype=np.uint32)
        bx, by, _ = launch.block
        space["tid_x"], space["tid_y"], space["tid_z"] = (
            threads % bx,
            threads // bx % by,
            threads // (bx * by),
        )
        space["laneid"] = self.lane_id
        space["warpid"] = threads // 32
        for axis, a in enumerate("xyz"):
            space[f"ntid_{a}"] = launch.block[axis]
            space[f"nctaid_{a}"] = launch.grid[axis]
            space[f"cluster_nctaid_{a}"] = launch.cluster[axis]
            space[f"nclusterid_{a}"] = launch.grid[axis] // launch.cluster[axis]
        space["cluster_nctarank"] = int(np.prod(launch.cluster))
        space["is_explicit_cluster"] = launch.cluster != (1, 1, 1)
        space |= {
            "nwarpid": self.cta.cluster.warps_per_cta,
            "smid": 0,
            "nsmid": device_of(self.program.kernel.arch).sms,
            "gridid": 0,
        }
        space |= {"dynamic_smem_size": launch.smem_bytes, "total_smem_size": launch.smem_bytes}
        one = np.uint32(1)
        below = (one << self.lane_id) - one
        space |= {
            "lanemask_lt": below,
            "lanemask_le": below | (one << self.lane_id),
            "lanemask_eq": one << self.lane_id,
            "lanemask_gt": ~(below | (one << self.lane_id)),
            "lanemask_ge": ~below,
        }
        space["branch"] = self.branch
        for name in dir(Instructions):
            if not name.startswith("_"):
                space[name] = getattr(self, name)

    def start(self, registers: int) -> None:
        """A new CTA begins: all lanes at the entry."""
        self.groups = [self.part(0, None)]
        index, cluster = self.cta.index, self.machine.launch.cluster
        for axis, a in enumerate("xyz"):
            self.space[f"ctaid_{a}"] = index[axis]
            self.space[f"clusterid_{a}"] = index[axis] // cluster[axis]
            self.space[f"cluster_ctaid_{a}"] = index[axis] % cluster[axis]
        self.space["cluster_ctarank"] = self.cta.rank
        self.begin(registers)

    def block_counts(self) -> NDArray[np.int64]:
        """Executions [warps, blocks] so far."""
        counts = np.tile(np.array(self.full_counts, np.int64), (self.warp_count, 1))
        for (pc, warps), count in self.masked_counts.items():
            counts[list(warps), pc] += count
        return counts

    # Running -------------------------------------------------------------------------------------

    def _function(self, pc: int, masked: bool) -> FunctionType:
        program, space = self.program, self.space
        code = program.code(pc, masked, self.check, self.machine.trace)
        for name, value in itertools.islice(program.names.items(), self._known, None):
            letter, rows = value if isinstance(value, tuple) else ("", value)
            space[name] = self.views[letter][rows] if letter else rows
        self._known = len(program.names)
        function = FunctionType(code, space)
        (self.masked if masked else self.full)[pc] = function
        return function

    def run(self, budget: int) -> bool:
        """Runs up to `budget` blocks; False if no group can move."""
        moved = False
        while budget > 0:
            group = self._pick()
            if group is None:
                break
            moved = True
            budget = self._advance(group, budget)
        return moved

    def _pick(self) -> Group | None:
        """The group with the lowest counter that can move; merges groups that have met."""
        groups = self.groups
        if len(groups) == 1:
            group = groups[0]
            if self._held_back(group):
                return None
            if group.wait is not None:
                if not group.wait.ready():
                    return None
                group.wait = None
            return group
        best: Group | None = None
        groups.sort(key=lambda g: g.pc)
        i = 1
        while i < len(groups):
            a, b = groups[i - 1], groups[i]
            if a.pc == b.pc and a.ticket is None and b.ticket is None:
                self._merge(a, b)
                del groups[i]
            else:
                i += 1
        for group in groups:
            if self._held_back(group):
                continue
            if group.wait is not None:
                if not group.wait.ready():
                    continue
                group.wait = None
            best = group
            break
        return best

    def _held_back(self, group: Group) -> bool:
        """Whether all of its warps are slow ones, not divided, and others may still move."""
        slow, woken = self.cta.cluster.slow, self.cta.cluster.woken
        return bool(slow) and all(
            woken != self.warp0 + w in slow and group.words[w] == self.everyone[w]
            for w in group.warps
        )

    def _merge(self, a: Group, b: Group) -> None:
        assert a.mask is not None and b.mask is not None
        a.words = [x | y for x, y in zip(a.words, b.words, strict=True)]
        a.mask = None if a.words == self.everyone else a.mask | b.mask
        a.warps = tuple(w for w, word in enumerate(a.words) if word)
        a.wait, a.spun = None, (-1, -1)

    def part(self, pc: int, mask: NDArray[np.bool_] | None) -> Group:
        """A group of the lanes of a mask."""
        words = self.everyone if mask is None else self.words(mask)
        return Group(pc, mask, words, tuple(w for w, word in enumerate(words) if word))

    def _advance(self, group: Group, budget: int) -> int:
        """Runs one group until it stalls, splits, exits, meets another or spends the budget."""
        self.group = group
        pc, mask = group.pc, group.mask
        masked = mask is not None
        functions = self.masked if masked else self.full
        full_counts, masked_counts = self.full_counts, self.masked_counts
        others = min((g.pc for g in self.groups if g is not group), default=1 << 30)
        warps, log = group.warps, self.log
        while budget > 0:
            function = functions[pc] or self._function(pc, masked)
            group.pc = pc
            result = function(mask)
            budget -= 1
            if result is STALL:
                if group.wait is None:
                    group.wait = self.wait
                return budget
            if masked:
                masked_counts[pc, warps] += 1
            else:
                full_counts[pc] += 1
            if log is not None:
                log.append((warps, pc))
            if result.__class__ is int:
                if result < 0:
                    self._exit(group)
                    return budget
                pc = group.pc = result
                if pc >= others:
                    return budget
            else:
                self._split(group, result)
                return budget
        return budget

    def _split(self, group: Group, result: tuple) -> None:
        taken, taken_mask, fall, fall_mask = result
        self.groups.remove(group)
        for pc, mask in ((taken, taken_mask), (fall, fall_mask)):
            if pc < 0:
                self._exit(self.part(pc, mask))
            else:
                self.groups.append(self.part(pc, mask))

    def _exit(self, group: Group) -> None:
        if group in self.groups:
            self.groups.remove(group)
        lanes = sum(word.bit_count() for word in group.words)
        self.cta.live -= lanes
        self.exited |= np.ones(self.lanes, bool) if group.mask is None else group.mask
        self.some_exited = True
        self.cta.cluster.version += 1
        self.lanes_left(lanes)
        if not self.cta.live:
            self.outlived()

    def branch(self, predicate, m, taken: int, fall: int):
        """Where a conditional branch leads: one counter, or a split."""
        if m is None:
            yes = np.count_nonzero(predicate)
            if yes == 0:
                return fall
            if yes == self.lanes:
                return taken
            return taken, predicate.copy(), fall, ~predicate
        go = predicate & m
        yes = np.count_nonzero(go)
        if yes == 0:
            return fall
        if yes == np.count_nonzero(m):
            return taken
        return taken, go, fall, m & ~predicate
