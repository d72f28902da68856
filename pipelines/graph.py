"""Warp-specialised pipelines as data: roles, edges and rendezvous, and the checks on them.

A kernel states who runs where (`Role`), which payload flows from whom to whom through how many
stages (`Edge`), and how many threads meet at a named barrier (`Rendezvous`). Arrive counts,
mbarrier storage, barrier numbers and the size of a CTA are derived from that, never typed.
"""

from dataclasses import dataclass, make_dataclass
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
from .rings import By, Ring, init


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
class Handover:
    """A payload from one role to others, in `stages`, where tensor cores take part.

    `by` and `freed_by` say who arrives: TMA, which brings `stage_bytes`; the tensor cores, when
    what was issued is done; or the warps of the role. Without `freed_by` nothing is handed back.
    With `tiles` there are as many rings, one for each of the CTA's tiles of Q; a role that is named
    by a letter too many, as softmax0 is, stands for the one of each tile. What is `in_tmem` needs
    no memory barrier to reach another CTA.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    stages: int
    by: By
    freed_by: By | None
    stage_bytes: int = 0
    tiles: int = 1
    in_tmem: bool = False


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
    handovers: tuple[Handover, ...] = ()
    pair: bool = False  # two CTAs share products: what the tensor cores wait for comes from both

    def __post_init__(self) -> None:
        for kind in (self.roles, self.edges, self.rendezvous, self.handovers):
            names = [member.name for member in kind]
            if len(set(names)) < len(names):
                raise ValueError(f"names repeat: {names}")
        self._check_roles()
        self._check_edges()
        self._check_handovers()
        for meeting in self.rendezvous:
            if meeting.threads % WARP_THREADS or not 0 < meeting.threads <= self.threads:
                raise ValueError(f"rendezvous {meeting.name}: threads={meeting.threads}")
        wanted = sum(meeting.count for meeting in self.rendezvous)
        if wanted > len(NAMED_BARRIERS):
            raise ValueError(f"{wanted} named barriers: there are {len(NAMED_BARRIERS)}")

    def _check_roles(self) -> None:
        registers = {group: role.registers for role in self.roles for group in role.warpgroups}
        if sorted(registers) != list(range(len(registers))):
            raise ValueError(f"warpgroups {sorted(registers)}: every one needs a role")
        warps = [warp for role in self.roles for warp in role.warps]
        if len(set(warps)) < len(warps):
            raise ValueError(f"warps {sorted(warps)}: a warp has one role")
        for role in self.roles:
            if any(registers[group] != role.registers for group in role.warpgroups):
                raise ValueError(f"role {role.name}: others in its warpgroup have other registers")
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

    def _check_handovers(self) -> None:
        names = {role.name for role in self.roles}
        for one in self.handovers:
            ends = {one.producer, *one.consumers}
            if len(ends) < 2 or not ends <= names:
                raise ValueError(f"handover {one.name}: needs roles of {sorted(names)}")
            if one.stages < 1:
                raise ValueError(f"handover {one.name}: stages={one.stages}")
            if (one.by == "tma") != (0 < one.stage_bytes <= TRANSACTION_BYTES):
                raise ValueError(f"handover {one.name}: stage_bytes={one.stage_bytes}")

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        groups = {group for role in self.roles for group in role.warpgroups}
        return WARPGROUP_THREADS * len(groups)

    def warps(self, name: str) -> range:
        """The warps of a role."""
        return next(role.warps for role in self.roles if role.name == name)

    @property
    def mbarriers(self) -> int:
        """64-bit words of shared memory: a full and an empty barrier for each stage."""
        both = sum(2 * edge.stages for edge in self.edges)
        return both + sum(
            one.tiles * one.stages * (2 if one.freed_by else 1) for one in self.handovers
        )

    def to_mma(self, one: Handover) -> bool:
        """Whether the tensor cores alone consume it: of a pair, those that one CTA leads."""
        return one.consumers == ("mma",)

    def arrivals(self, one: Handover) -> tuple[int, int]:
        """(full, free): one of TMA and of the tensor cores, one of each warp."""
        full = len(self.warps(one.producer)) if one.by == "warps" else 1
        if one.by == "warps" and self.pair and self.to_mma(one):
            full *= 2
        free = sum(len(self.warps(name)) for name in one.consumers)
        return full, free if one.freed_by == "warps" else 1

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

    def rings(self, storage: cute.Pointer) -> Any:
        """Initialise every mbarrier and return the rings of the handovers by name; those of one
        with `tiles` by `Ring.of`. Device code, as `build`."""
        rings: dict[str, Ring] = {}
        for one in self.handovers:
            ends = []
            for count in self.arrivals(one)[: 2 if one.freed_by else 1]:
                init(storage, one.tiles * one.stages, count)
                ends.append(storage)
                storage = storage + one.tiles * one.stages
            full, free = ends if one.freed_by else (*ends, None)
            rings[one.name] = Ring(
                full,
                free,
                one.stages,
                one.stage_bytes,
                one.by,
                one.freed_by,
                self.pair,
                self.to_mma(one),
                one.in_tmem,
            )
        # Frozen: of what can be assigned to, the DSL replaces members inside a branch.
        return make_dataclass("Rings", rings, frozen=True)(**rings)
