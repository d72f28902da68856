"""Warp-specialised pipelines as data: roles, edges and rendezvous, and the checks on them.

A kernel states who runs where (`Role`), which payload flows from whom to whom through how many
stages (`Edge`), and how many threads meet at a named barrier (`Rendezvous`). Arrive counts,
mbarrier storage, barrier numbers and the size of a CTA are derived from that, never typed.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, pipeline

from ..layouts.hardware import (
    NAMED_BARRIERS,
    REGISTERS_PER_THREAD,
    TRANSACTION_BYTES,
    WARP_THREADS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
)
from ..layouts.opaque import lane


@dataclass(frozen=True)
class Role:
    """One job: `warps` do it, and their `warpgroups` hold `registers` a thread meanwhile."""

    name: str
    warpgroups: range
    warps: range
    registers: int


@dataclass(frozen=True)
class Edge:
    """A payload from one role to another, in `stages` of `stage_bytes`.

    TMA brings it, unless the producer's threads write it themselves.
    """

    name: str
    producer: str
    consumer: str
    stages: int
    stage_bytes: int
    by_threads: bool = False


@dataclass(frozen=True)
class Rendezvous:
    """`count` hardware barriers, numbered one after the other, at each of which `threads` meet."""

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
    rendezvous: tuple[Rendezvous, ...]

    def __post_init__(self) -> None:
        for kind in (self.roles, self.edges, self.rendezvous):
            names = [member.name for member in kind]
            if len(set(names)) < len(names):
                raise ValueError(f"names repeat: {names}")
        self._check_roles()
        self._check_edges()
        for meeting in self.rendezvous:
            if meeting.threads % WARP_THREADS or not 0 < meeting.threads <= self.threads:
                raise ValueError(f"rendezvous {meeting.name}: threads={meeting.threads}")
        wanted = sum(meeting.count for meeting in self.rendezvous)
        if wanted > len(NAMED_BARRIERS):
            raise ValueError(f"{wanted} named barriers: there are {len(NAMED_BARRIERS)}")

    def _check_roles(self) -> None:
        owned = sorted(group for role in self.roles for group in role.warpgroups)
        if owned != list(range(len(owned))):
            raise ValueError(f"warpgroups {owned}: every one needs one role")
        for role in self.roles:
            if not role.warps or {w // WARPGROUP_WARPS for w in role.warps} != {*role.warpgroups}:
                raise ValueError(f"role {role.name}: {role.warps} is not in {role.warpgroups}")
            if role.registers not in REGISTERS_PER_THREAD:
                raise ValueError(f"role {role.name}: registers={role.registers}")

    def _check_edges(self) -> None:
        names = {role.name for role in self.roles}
        for edge in self.edges:
            ends = {edge.producer, edge.consumer}
            if len(ends) < 2 or not ends <= names:
                raise ValueError(f"edge {edge.name}: needs two of the roles {sorted(names)}")
            if edge.stages < 1:
                raise ValueError(f"edge {edge.name}: stages={edge.stages}")
            if not 0 < edge.stage_bytes <= TRANSACTION_BYTES:
                raise ValueError(f"edge {edge.name}: stage_bytes={edge.stage_bytes}")

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return WARPGROUP_THREADS * sum(len(role.warpgroups) for role in self.roles)

    @property
    def mbarriers(self) -> int:
        """64-bit words of shared memory: a full and an empty barrier for each stage."""
        return sum(2 * edge.stages for edge in self.edges)

    def arrive_counts(self, edge: Edge) -> tuple[int, int]:
        """(full, empty): one elected thread announces the bytes; each consumer warp releases.

        Where threads write, each of them arrives, and each that reads.
        """
        warps = {role.name: len(role.warps) for role in self.roles}
        if edge.by_threads:
            return WARP_THREADS * warps[edge.producer], WARP_THREADS * warps[edge.consumer]
        return 1, warps[edge.consumer]

    def barrier(self, name: str) -> tuple[int, int]:
        """(first number, threads) of a rendezvous. Raises KeyError when there is none so named."""
        number = NAMED_BARRIERS[0]
        for meeting in self.rendezvous:
            if meeting.name == name:
                return number, meeting.threads
            number += meeting.count
        raise KeyError(name)

    def numbered(self, name: str, offset: Int32 | int = 0) -> dict[str, Any]:
        """Arguments of a named barrier's instructions: the one at `offset` of those of `name`."""
        first, threads = self.barrier(name)
        return {"barrier_id": first + offset, "number_of_threads": threads}

    def build(self, storage: cute.Pointer) -> SimpleNamespace:
        """Initialise every mbarrier and return the pipelines by edge name. Device code.

        All threads call it and synchronise before use; `storage` has room for `mbarriers` words.
        """
        pipelines = SimpleNamespace()
        for edge in self.edges:
            full, empty = (
                pipeline.CooperativeGroup(pipeline.Agent.Thread, count)
                for count in self.arrive_counts(edge)
            )
            ring = (
                pipeline.PipelineAsync.create(
                    barrier_storage=storage,
                    num_stages=edge.stages,
                    producer_group=full,
                    consumer_group=empty,
                    defer_sync=True,
                )
                if edge.by_threads
                else pipeline.PipelineTmaAsync.create(
                    barrier_storage=storage,
                    num_stages=edge.stages,
                    producer_group=full,
                    consumer_group=empty,
                    tx_count=edge.stage_bytes,
                    tidx=lane(),
                    defer_sync=True,
                )
            )
            setattr(pipelines, edge.name, ring)
            storage = storage + 2 * edge.stages
        return pipelines
