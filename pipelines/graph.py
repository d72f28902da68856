"""Warp-specialised pipelines as data: roles, edges and rendezvous, and the checks on them.

A kernel states who runs where (`Role`), which payload flows from whom to whom through how many
stages (`Edge`), and which warps meet at a named barrier (`Rendezvous`). Arrive counts, mbarrier
storage, barrier numbers and the launch size are derived from that, never typed.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import pipeline

WARP_THREADS = 32
WARPGROUP_WARPS = 4
REGISTER_FILE = 65536
NAMED_BARRIERS = range(1, 16)  # 0 belongs to __syncthreads
MAX_TRANSACTION_BYTES = 2**20 - 1


@dataclass(frozen=True)
class Role:
    """Warps with one job: `warps` do it, in whole warpgroups that hold `registers` a thread."""

    name: str
    warps: range
    warpgroups: range
    registers: int

    @property
    def threads(self) -> int:
        """Threads that share the register budget."""
        return len(self.warpgroups) * WARPGROUP_WARPS * WARP_THREADS


@dataclass(frozen=True)
class Edge:
    """A payload that TMA brings in `stages` of `stage_bytes`, from one role to another."""

    name: str
    producer: str
    consumer: str
    stages: int
    stage_bytes: int


@dataclass(frozen=True)
class Rendezvous:
    """`count` hardware barriers, numbered one after the other, that `threads` threads meet at."""

    name: str
    count: int
    threads: int


@dataclass(frozen=True)
class Graph:
    """Roles, edges and rendezvous of one kernel.

    Raises ValueError, naming what is wrong, for a graph that could not run.
    """

    roles: tuple[Role, ...]
    edges: tuple[Edge, ...]
    rendezvous: tuple[Rendezvous, ...] = ()

    def __post_init__(self) -> None:
        self._check_roles()
        self._check_edges()
        if self.named_barriers > len(NAMED_BARRIERS):
            raise ValueError(f"{self.named_barriers} named barriers: there are 15")

    def _check_roles(self) -> None:
        owned = sorted(group for role in self.roles for group in role.warpgroups)
        if owned != list(range(len(owned))):
            raise ValueError(f"warpgroups {owned}: roles must own 0..n-1, each once")
        for role in self.roles:
            own = {w // WARPGROUP_WARPS for w in role.warps}
            if not own or not own <= set(role.warpgroups):
                raise ValueError(f"role {role.name}: warps {role.warps} outside its warpgroups")
        registers = sum(role.threads * role.registers for role in self.roles)
        if registers > REGISTER_FILE:
            raise ValueError(f"roles hold {registers} registers: an SM has {REGISTER_FILE}")

    def _check_edges(self) -> None:
        names = [role.name for role in self.roles]
        for edge in self.edges:
            for end in (edge.producer, edge.consumer):
                if end not in names:
                    raise ValueError(f"edge {edge.name}: no role {end!r} among {names}")
            if edge.producer == edge.consumer:
                raise ValueError(f"edge {edge.name}: producer and consumer are both {end!r}")
            if edge.stages < 1:
                raise ValueError(f"edge {edge.name}: stages={edge.stages}")
            if not 0 < edge.stage_bytes <= MAX_TRANSACTION_BYTES:
                raise ValueError(f"edge {edge.name}: stage_bytes={edge.stage_bytes}")
        if len({edge.name for edge in self.edges}) < len(self.edges):
            raise ValueError(f"edge names repeat: {[edge.name for edge in self.edges]}")

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return sum(role.threads for role in self.roles)

    @property
    def mbarriers(self) -> int:
        """64-bit words of shared memory: a full and an empty barrier for each stage."""
        return sum(2 * edge.stages for edge in self.edges)

    @property
    def named_barriers(self) -> int:
        """Hardware barriers in use besides number 0."""
        return sum(meeting.count for meeting in self.rendezvous)

    def role(self, name: str) -> Role:
        """The role of that name."""
        return next(role for role in self.roles if role.name == name)

    def arrive_counts(self, edge: Edge) -> tuple[int, int]:
        """(full, empty): one elected thread announces the bytes; each consumer warp releases."""
        return 1, len(self.role(edge.consumer).warps)

    def barrier(self, name: str) -> tuple[int, int]:
        """(first number, threads) of a rendezvous."""
        number = NAMED_BARRIERS[0]
        for meeting in self.rendezvous:
            if meeting.name == name:
                return number, meeting.threads
            number += meeting.count
        raise ValueError(f"no rendezvous {name!r}")

    def build(self, storage: cute.Pointer) -> SimpleNamespace:
        """Initialise every mbarrier (device code, all threads) and return pipelines by edge name.

        `storage` has room for `mbarriers` words. The caller synchronises the CTA before use.
        """
        pipelines = SimpleNamespace()
        for edge in self.edges:
            full, empty = self.arrive_counts(edge)
            ring = pipeline.PipelineTmaAsync.create(
                barrier_storage=storage,
                num_stages=edge.stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, full),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, empty),
                tx_count=edge.stage_bytes,
                defer_sync=True,
            )
            setattr(pipelines, edge.name, ring)
            storage = storage + 2 * edge.stages
        return pipelines
