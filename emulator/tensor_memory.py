"""Tensor memory of one CTA: its cells, who owns which columns, and the shadow of every access.

128 lanes x 512 columns of 32 bits. Cells are held as [column, lane], so that a column of all lanes
is contiguous: `tcgen05.ld.32x32b.xN` by a warpgroup is one slice, registers by lanes.

The shadow has one entry for each column and 16 lanes, the smallest part that any instruction
touches; it works as the one of shared memory (checker.py) but knows no proxies: the tensor memory
has but one way in.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .checker import Conflict
from .mma_sm100 import COLUMNS, LANES, Cells

EIGHTHS = 8  # groups of 16 lanes
GRAIN = 32  # columns: the least that can be allocated
POISON = 0xFFFFFFFF  # what nobody has written: NaN in every float format of 16 and 32 bits


def cell_bytes(cells: Cells) -> int:
    lanes = 16 * len(range(*cells.eighths.indices(EIGHTHS)))
    return 4 * lanes * len(range(*cells.columns.indices(COLUMNS)))


@dataclass(frozen=True)
class Party:
    """Who accesses, by eighth [8]: the agents, their epochs, and rows of what each has seen."""

    agents: NDArray[np.intp]
    epochs: NDArray[np.int32]
    seen: NDArray[np.int32]  # [8, agents]


@dataclass
class _Reads:
    """Last reads by agents that read together."""

    agents: NDArray[np.intp]
    epochs: NDArray[np.int32]
    sites: NDArray[np.int32]
    top: NDArray[np.int32]  # the highest epoch of each agent


class CellShadow:
    """Last accesses to each part of a CTA's tensor memory."""

    def __init__(self) -> None:
        shape = (COLUMNS, EIGHTHS)
        self.writer = np.full(shape, -1, np.int16)
        self.written_at = np.zeros(shape, np.int32)
        self.write_site = np.zeros(shape, np.int32)
        self.readers: dict[Hashable, _Reads] = {}

    def forget(self, columns: slice) -> None:
        self.writer[columns] = -1

    def read(self, cells: Cells, party: Party, key: Hashable, site: int) -> Conflict | str | None:
        """Checks and records reads."""
        writer = self.writer[cells]
        if writer.min() < 0:
            return "uninitialised"
        reader = self.readers.get(key)
        if reader is None:
            shape = (COLUMNS, EIGHTHS)
            zeros = np.zeros(shape, np.int32)
            reader = _Reads(party.agents, zeros, zeros.copy(), np.zeros(EIGHTHS, np.int32))
            self.readers[key] = reader
        reader.epochs[cells] = party.epochs[cells.eighths]
        reader.sites[cells] = site
        reader.top[cells.eighths] = party.epochs[cells.eighths]
        return self._unseen_write(cells, writer, party)

    def write(
        self, cells: Cells, party: Party, site: int, adds: bool = False
    ) -> Conflict | str | None:
        """Checks and records writes, which add to what there is if `adds`."""
        found = self.conflict(cells, party)
        if adds and self.writer[cells].min() < 0:
            found = "uninitialised"
        self.writer[cells] = party.agents[cells.eighths]
        self.written_at[cells] = party.epochs[cells.eighths]
        self.write_site[cells] = site
        return found

    def conflict(self, cells: Cells, party: Party) -> Conflict | None:
        """What a write would race with."""
        found = self._unseen_write(cells, self.writer[cells], party)
        return found or self._unseen_read(cells, party)

    def _unseen_write(
        self, cells: Cells, writer: NDArray[np.int16], party: Party
    ) -> Conflict | None:
        at, seen = self.written_at[cells], party.seen[cells.eighths]
        one = int(writer.max())
        if one == writer.min() and (one < 0 or at.max() <= seen[:, one].min()):
            return None
        wrong = (seen[np.arange(len(seen)), writer] < at) & (writer >= 0)
        return self._conflict("write", writer, self.write_site[cells], cells, wrong)

    def _unseen_read(self, cells: Cells, party: Party) -> Conflict | None:
        seen = party.seen[cells.eighths]
        for reader in self.readers.values():
            agents = reader.agents[cells.eighths]
            limit = seen[np.arange(len(seen)), agents]
            if (reader.top[cells.eighths] > limit).any():
                wrong = reader.epochs[cells] > limit
                found = self._conflict("read", agents, reader.sites[cells], cells, wrong)
                if found is not None:
                    return found
        return None

    @staticmethod
    def _conflict(
        kind: str, agents: NDArray, sites: NDArray, cells: Cells, wrong: NDArray[np.bool_]
    ) -> Conflict | None:
        if not wrong.any():
            return None
        column, eighth = np.argwhere(wrong)[0].tolist()
        agent = int(np.broadcast_to(agents, wrong.shape)[column, eighth])
        first = range(*cells.eighths.indices(EIGHTHS))[eighth]
        granule = ((cells.columns.start or 0) + column) * EIGHTHS + first
        return Conflict(kind, agent, int(sites[column, eighth]), granule, False)


def room(taken: NDArray[np.bool_], columns: int) -> int | None:
    """The first column from which on so many are free."""
    free = np.lib.stride_tricks.sliding_window_view(~taken, columns)[::GRAIN].all(1)
    return int(free.argmax()) * GRAIN if free.any() else None


@dataclass
class TensorMemory:
    """Tensor memory of one CTA."""

    cells: NDArray[np.uint32] = field(
        default_factory=lambda: np.full((COLUMNS, LANES), POISON, np.uint32)
    )
    shadow: CellShadow = field(default_factory=CellShadow)
    owned: dict[int, tuple[int, int]] = field(default_factory=dict)  # column: (columns, site)
    usable: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(COLUMNS, bool))
    permit: bool = True  # to allocate

    def start(self) -> None:
        """A new CTA."""
        if self.shadow.readers or self.owned:
            self.shadow = CellShadow()
        self.owned.clear()
        self.usable[:] = False
        self.permit = True

    def allocate(self, first: int, columns: int, site: int) -> None:
        span = slice(first, first + columns)
        self.owned[first] = columns, site
        self.usable[span] = True
        self.cells[span] = POISON
        self.shadow.forget(span)

    def free(self, first: int) -> None:
        columns, _ = self.owned.pop(first)
        span = slice(first, first + columns)
        self.usable[span] = False
        self.shadow.forget(span)
