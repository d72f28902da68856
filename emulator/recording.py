"""What every warp of a CTA did, in its order: for a replay in modelled time (`emulator.cost`).

A unit keeps a log. It has an entry for each block of instructions that a group of lanes went
through, and before it one for each effect in that block which others see or wait for. Both are
appended as they are, one tuple each; `streams` sorts them out by warp afterwards.

What a warp waits for is a *point*: a phase of an mbarrier or a generation of a barrier, by its
identity. A point is reached when all have arrived that the recording says arrive there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .ptx import Instruction
    from .translate import Program

# ("mbarrier", rank of its CTA, byte, phase) | ("bar", rank, number, generation) | ("cluster", 0, 0,
# generation)
Point = tuple[str, int, int, int]
Queue = Literal["wgmma", "bulk"]


@dataclass(frozen=True, slots=True)
class Effect:
    """An instruction that others see, or that may have to wait; `site` is its index."""

    site: int


@dataclass(frozen=True, slots=True)
class Arrive(Effect):
    """A warp arrives at a point."""

    point: Point


@dataclass(frozen=True, slots=True)
class Wait(Effect):
    """A warp sees that a point is reached."""

    point: Point


@dataclass(frozen=True, slots=True)
class Copy(Effect):
    """Bytes on their way into shared memory arrive at each of the points."""

    nbytes: int  # into each CTA
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Store(Effect):
    """Bytes on their way from shared to global memory."""

    nbytes: int
    adds: bool  # to what is there


@dataclass(frozen=True, slots=True)
class Commit(Effect):
    """What the warp has issued and not committed becomes a group."""

    queue: Queue


@dataclass(frozen=True, slots=True)
class Drain(Effect):
    """The warp waits until at most `keep` of its groups are in flight."""

    queue: Queue
    keep: int
    read: bool = False  # only until they have read what they take from shared memory


@dataclass(frozen=True, slots=True)
class Products(Effect):
    """wgmmas of a warpgroup into one accumulator, one behind the other."""

    count: int
    clocks: int  # of the tensor cores of one SM, for all
    shared_bytes: int  # of operands


@dataclass(frozen=True, slots=True)
class Mma(Effect):
    """tcgen05.mma of one thread into one accumulator, one behind the other."""

    count: int
    clocks: int  # of the tensor cores of each SM that takes part
    shared_bytes: int  # of operands, of each
    pair: bool  # of CTAs


@dataclass(frozen=True, slots=True)
class MmaCommit(Effect):
    """All tcgen05 work that the thread has issued arrives at the points when it is done."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class TmemMove(Effect):
    """A warp's tcgen05.ld or st."""

    kind: Literal["ld", "st"]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TmemWait(Effect):
    """The warp waits for its tcgen05.ld or st."""

    kind: Literal["ld", "st"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Instructions between two effects: parts [first, last) of blocks, in the order they ran."""

    parts: tuple[tuple[int, int, int], ...]  # (block, first, last)


Step = Stretch | Effect
Entry = tuple[tuple[int, ...], "int | Effect"]  # (warps of the unit, block or effect)


@dataclass
class Recording:
    """One CTA's run; `logs` by the first warp of each unit."""

    program: Program
    cta: tuple[int, int, int]
    rank: int  # in its cluster
    cluster: int  # counted as they start
    launch_smem: int  # bytes of dynamic shared memory
    logs: dict[int, list[Entry]] = field(default_factory=dict)

    def streams(self) -> dict[int, list[Step]]:
        """What each warp did: stretches of instructions, and effects between them."""
        found: dict[int, list[Step]] = {}
        for first, log in self.logs.items():
            warps = sorted({w for entry in log for w in entry[0]})
            for w in warps:
                found[first + w] = self._stream([what for some, what in log if w in some])
        return found

    def _stream(self, log: list[int | Effect]) -> list[Step]:
        blocks = self.program.kernel.blocks
        steps: list[Step] = []
        parts: list[tuple[int, int, int]] = []
        effects: list[Effect] = []

        for what in log:
            if isinstance(what, Effect):
                effects.append(what)
                continue
            begin, end = 0, len(blocks[what].instructions)
            base = blocks[what].instructions[0].index if end else 0
            for effect in effects:
                at = min(max(effect.site - base, begin), end)
                if at > begin:
                    parts.append((what, begin, at))
                if parts:
                    steps.append(Stretch(tuple(parts)))
                    parts = []
                steps.append(effect)
                begin = at
            effects = []
            if end > begin:
                parts.append((what, begin, end))
        if parts:
            steps.append(Stretch(tuple(parts)))
        return steps + list(effects)

    def instructions(self, stretch: Stretch) -> list[Instruction]:
        """Those of a stretch, in order."""
        blocks = self.program.kernel.blocks
        return [i for block, a, b in stretch.parts for i in blocks[block].instructions[a:b]]
