"""Tensor cores and registers: wgmma, its groups and hazards, and setmaxnreg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import tensor_core
from .checker import Conflict
from .lanes import FULL, Mask, WgmmaGroup
from .recording import Commit, Drain, Products
from .tcgen05 import Tcgen05

_ITEM = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


class Instructions(Tcgen05):
    """Every effect of one unit's instructions; `machine.Unit` is the only subclass."""

    # Tensor cores --------------------------------------------------------------------------------

    def touch(self, reads: int, writes: int, site: int) -> None:
        """Ordinary instructions touch registers that wgmma or tcgen05.ld also use."""
        self.dirty |= reads | writes
        if self.loads & (reads | writes):
            self._use_loads(reads | writes, site)
        if (self.hot_acc & (reads | writes)) or (self.hot_src & writes):
            hot_acc, hot_src = self._in_flight(min(self.wgmma_waited[w] for w in self.group.warps))
            steps = self.program.touches.get(site, [(reads, writes, site)])
            sites = [at for read, written, at in steps if hot_acc & (read | written)]
            for at in sites or [at for _, written, at in steps if hot_src & written]:
                self.report(
                    "register in flight",
                    "a register is used while a wgmma that has not been "
                    "waited for may still write or read it",
                    at,
                )

    def wgmma_fence(self) -> None:
        self.dirty = 0

    def wgmma(
        self,
        acc: Any,
        a: Any,
        b: Any,
        scales: Any,
        sites: tuple[int, ...],
        from_registers: bool,
        columns: int,
        dtype: str,
        atype: str,
        btype: str,
        neg_a: bool,
        neg_b: bool,
        trans_a: bool,
        trans_b: bool,
        saturate: bool,
    ) -> None:
        """wgmmas into one accumulator that follow one another, as one over a longer K.

        Args:
            acc: registers [n, 128].
            a: descriptors; or the registers of all, [4 * wgmmas, 128].
            b: descriptors. These and scales: one a wgmma, as rows [wgmmas, 128] or as a tuple.
        """
        major_a, major_b = "mn" if trans_a else "k", "mn" if trans_b else "k"
        item, item_b = _ITEM[atype], _ITEM[btype]
        b = self._firsts(b)
        a_descs = None if from_registers else self._firsts(a)

        def plans(part: slice) -> list[tensor_core.Operand]:
            found = [tensor_core.operand(b[part], "b", major_b, columns, item_b)]
            if a_descs is not None:
                found.append(tensor_core.operand(a_descs[part], "a", major_a, 64, item))
            return found

        used = plans(slice(None))
        if max(plan.last for plan in used) >= self.cta.shared.size >> 4:
            self.report(
                "out of bounds",
                "a wgmma operand lies past the end of shared memory",
                sites[0],
                fatal=True,
            )
        if self.check:
            self._check_wgmma(used, plans, sites)
            if from_registers:
                # What all lanes read from shared memory is in registers: the product takes them.
                for w in self.group.warps:
                    self.clocks.read[self.warp0 + w] = 0
        if self.counting:
            counters = self.machine.counters
            counters.tensor_flops += len(b) * tensor_core.wgmma_flops(columns, item)
            counters.tensor_clocks += len(b) * tensor_core.wgmma_clocks(columns)
            counters.shared_read_bytes += 16 * sum(len(plan.granules) for plan in used)
            counters.operand_b_bytes += 16 * len(used[0].granules)
        if self.log is not None:
            clocks = len(b) * tensor_core.wgmma_clocks(columns)
            read = 16 * sum(len(plan.granules) for plan in used)
            self.note(Products(sites[0], len(b), clocks, read), None)
        view = acc.view(np.float16) if dtype == "f16" else acc
        # What stands before one that does not add to the accumulator is lost.
        keep = self._firsts(scales)
        start = max((i for i, kept in enumerate(keep) if not kept), default=0)
        if start:
            used = plans(slice(start, None))

        exact = self.machine.options.exact and dtype == "f32" and atype in ("bf16", "f16")

        def work() -> None:
            granules = self.cta.shared.granules
            left = (
                tensor_core.a_from_registers(np.ascontiguousarray(a[4 * start :]), atype)
                if a_descs is None
                else tensor_core.load(used[1], granules, atype)
            )
            right = tensor_core.load(used[0], granules, btype)
            if exact:
                tensor_core.mma_exact(left, right, view, bool(keep[start]), neg_a, neg_b)
            else:
                tensor_core.mma(left, right, view, bool(keep[start]), neg_a, neg_b, saturate)

        if self.machine.eager:
            work()
        else:
            self.open_group.work.append(work)

    def _firsts(self, values: Any) -> tuple[int, ...]:
        """What lane 0 has of each."""
        if isinstance(values, np.ndarray):
            return tuple(values[:, 0].tolist())
        return tuple(self._at(value, 0) for value in values)

    def _check_wgmma(
        self,
        used: list[tensor_core.Operand],
        plans: Callable[[slice], list],
        sites: tuple[int, ...],
    ) -> None:
        acc, source = self._operand_bits(sites)
        written = self.hot_acc | (acc if sites[1:] else 0)
        if self.dirty & (acc | source) or written & source or self.hot_src & acc:
            for site in sites:
                self._check_wgmma_registers(site)
        self._fly(acc, source)
        if self._operand_race(used, sites[0]) is not None:
            for i, site in enumerate(sites):
                found = self._operand_race(plans(slice(i, i + 1)), site)
                if found is not None:
                    self._race(found, False, self.cta, site)

    def _operand_bits(self, sites: tuple[int, ...]) -> tuple[int, int]:
        """Registers (accumulators, sources of A) of wgmmas."""
        if sites not in self._bits:
            acc = source = 0
            for site in sites:
                registers, a, *_ = self.program.kernel.instructions[site].operands
                acc |= self.program.mask_of(registers)
                source |= self.program.mask_of(a) if isinstance(a, tuple) else 0
            self._bits[sites] = acc, source
        return self._bits[sites]

    def _fly(self, acc: int, source: int) -> None:
        """Registers are in flight from now on."""
        self.open_group.accumulators |= acc
        self.open_group.sources |= source
        self.hot_acc |= acc
        self.hot_src |= source

    def _check_wgmma_registers(self, site: int) -> None:
        acc, source = self._operand_bits((site,))
        if self.dirty & (acc | source):
            self.report(
                "missing wgmma.fence",
                "registers of a wgmma were touched since the last wgmma.fence",
                site,
            )
        if self.hot_acc & source:
            self.report(
                "register in flight", "a wgmma reads as A what another one in flight writes", site
            )
        if self.hot_src & acc:
            self.report(
                "register in flight",
                "a wgmma writes registers that another one in flight reads",
                site,
            )
        self._fly(acc, source)

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
                eyes,
                self.clocks.rows[self.warp0 + w, 0],
                by_row[:, w].ravel(),
                key,
                self.wgmma_agents,
                epoch,
                site,
            )
            if found is not None:
                return found
        return None

    def wgmma_commit(self, site: int) -> None:
        self.note(Commit(site, "wgmma"), None)
        self.wgmma_committed += 1
        self.open_group.number = self.wgmma_committed
        self.flight.append(self.open_group)
        self.open_group = WgmmaGroup()
        if self.check:
            for agent in self.wgmma_agents:
                self.clocks.issued[agent] = self.wgmma_base + self.wgmma_committed

    def wgmma_wait(self, keep: int, m: Mask, site: int) -> None:
        self.note(Drain(site, "wgmma", keep), m)
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
        if count % 8 or not 24 <= count <= 256 or ((need < 0) == increase and need):
            self.report(
                "resources",
                f"setmaxnreg.{'inc' if increase else 'dec'} to {count} from "
                f"{self.registers[self._warps(m)[0]]}",
                site,
            )
        for w in self._warps(m):
            self.registers[w] = count
        cta.pool -= need
        cta.cluster.version += 1
        return True
