"""Mistakes in the source of the forward kernel, each a small edit of one file.

Those of backward are in `backward_faults`.

Each edit is one that an engineer makes: a line forgotten, two lines in the wrong order, a bound off
by one. It is made in a private copy of the file, so that what the checker says can be held against
the source line it names.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch

from hopwell import emulator, kernels
from hopwell.emulator import loader
from hopwell.emulator.session import Session
from hopwell.kernels import ForwardFacts
from hopwell.kernels.tiles import Tiles

PACKAGE = Path(kernels.__file__).parents[1]
KERNEL = "kernels/fwd_sm90.py"
FACTS = ForwardFacts("bfloat16", 32, 32, causal=False)
CAUSAL = replace(FACTS, causal=True)
# Small, to compile fast; two consumer warpgroups, so that everything that synchronises is there.
TILES = Tiles(
    arch="sm_90a",
    head_dim=32,
    head_dim_v=32,
    tile_kv=32,
    consumer_warpgroups=2,
    stages_q=2,
    stages_k=2,
    stages_v=2,
    registers_load=24,
    registers_consume=240,
    ping_pong=True,
    reason="small",
)
ONE_STAGE_Q = replace(TILES, stages_q=1, reason="small, and each Q waits for the one before it")
SKIP_UNMOVED = replace(TILES, skip_unmoved=True)
FIVE_OCTETS = replace(FACTS, head_dim_v=40)
TILES_40 = replace(TILES, head_dim_v=40)
LEN_Q, LEN_KV = 200, 150
THREE_TILES, FOUR_TILES = 330, 456  # of Q: more than it has stages
ONE_TILE = 30  # of keys
FEW_KEYS = 60  # one K/V tile for each stage: no wait for a free one orders anything else
OTHER = r"(?P<file>\w+\.py):(?P<line>\d+)"
AT_BYTE = r"of shared memory at byte \d+ and the"
PLACES = dict(
    shared=r"of shared memory at byte \d+",
    tensor=r"of tensor memory at column \d+, lanes \d+\.\.\d+",
)
NO_ORDER, NO_FENCE = "with no synchronisation between them", r"without fence\.proxy\.async"
UNSETTLED = (
    "argument 9 may still be written by the kernel before, which this one has not waited for"
)


@dataclass(frozen=True)
class Access:
    """One side of a race."""

    act: Literal["read", "write"]
    by: str  # regular expression: what the other side's finding calls it
    line: str  # what stands in its source line


@dataclass(frozen=True)
class Race:
    """Two accesses with nothing between them. Which one the checker takes up last, and so reports,
    is a matter of the schedule, and no matter: a finding of either names both."""

    memory: Literal["shared", "tensor"]
    one: Access
    other: Access

    @property
    def reports(self) -> tuple[Report, ...]:
        """What a finding says, from either side."""
        place = PLACES[self.memory]
        return tuple(
            Report(
                rf"{a.act} {place} and the {b.act} of {b.by} at {OTHER}: .* {NO_ORDER}",
                a.line,
                b.line,
            )
            for a, b in ((self.one, self.other), (self.other, self.one))
        )


class Report(NamedTuple):
    """What a finding says, and where."""

    message: str  # regular expression
    line: str  # what stands in the source line that the finding names; "": it names none
    other: str = ""  # what stands in the line that `message` names by its `OTHER`


@dataclass(frozen=True)
class SourceFault:
    """Edits of a file of the package; what the first finding must say of it."""

    name: str
    edits: dict[str, str]  # a piece of text that stands there once: what takes its place
    kind: str = "race"
    message: str = ""  # this and what follows as of a `Report`
    line: str = ""
    other: str = ""
    races: tuple[Race, ...] = ()  # in their place: it is one of these
    file: str = KERNEL
    order: Literal["eager", "random"] = "eager"

    @property
    def reports(self) -> tuple[Report, ...]:
        """Any of which the finding may be."""
        if self.races:
            return tuple(report for race in self.races for report in race.reports)
        return (Report(self.message, self.line, self.other),)


@dataclass(frozen=True)
class Fault(SourceFault):
    """One of the forward kernel."""

    facts: ForwardFacts = FACTS
    tiles: Tiles = TILES
    len_q: int = LEN_Q
    len_kv: int = LEN_KV
    ctas: int | None = None  # fewer than there are tiles: each takes several
    before: tuple[int, int] | None = None  # heads and CTAs of a launch with the same counter


CONSUMERS = r"warp ([4-7]|4, 5, 6, 7)"
QUEUE = "pipelines/tile_queue.py"
SECOND_TILE_UNWRITTEN = (
    r"(4608 bytes of argument 3 are never written, the first at index \(0, 128, 0, 0\)|"
    r"288 bytes of argument 4 are never written, the first at index \(0, 0, 128\))"
)

FAULTS = [
    Fault(
        "K is released before the product that reads it is waited for",
        {
            "warpgroup.wait_group(1)  # S is there\n        k.release()": (
                "k.release()\n        warpgroup.wait_group(1)"
            )
        },
        kind="race",
        message=rf"write {AT_BYTE} read of wgmma of {CONSUMERS} at {OTHER}: wgmma\.mma_async\S+ .* "
        r"with no synchronisation between them \(CTA \(0, 0, 0\), warp 0\)",
        line="cute.copy(args.load_k,",
        other="issue(",
    ),
    Fault(
        "V is released before the product that reads it is waited for",
        {
            "share.turns.release()\n": "share.turns.release()\n        v.release()\n",
            "        v.release()\n        narrow(acc_S": "        narrow(acc_S",
        },
        kind="race",
        message=rf"write {AT_BYTE} read of wgmma of {CONSUMERS} at {OTHER}: wgmma\.mma_async\S+ .* "
        r"with no synchronisation between them \(CTA \(0, 0, 0\), warp 0\)",
        line="cute.copy(args.load_v,",
        other="issue(",
    ),
    Fault(
        "Q is released before the product that reads it is waited for",
        {
            "            q.release()  # every score is there\n": "",
            "self.first_scores(share, rows, load_k, kv_end - 1)": (
                "self.first_scores(share, rows, q, load_k, kv_end - 1)"
            ),
            "def first_scores(self, share: Share, rows: Rows, load_k,": (
                "def first_scores(self, share: Share, rows: Rows, q, load_k,"
            ),
            "        warpgroup.wait_group(0)\n        k.release()": (
                "        q.release()\n        warpgroup.wait_group(0)\n        k.release()"
            ),
        },
        kind="race",
        message=rf"write {AT_BYTE} read of wgmma of {CONSUMERS} at {OTHER}: wgmma\.mma_async\S+ .* "
        r"with no synchronisation between them \(CTA \(0, 0, 0\), warp 0\)",
        line="cute.copy(args.load_q,",
        other="issue(",
        tiles=ONE_STAGE_Q,
        len_kv=ONE_TILE,
        ctas=1,
    ),
    Fault(
        "S is used while its product may still write it",
        {"warpgroup.wait_group(1)  # S is there": "warpgroup.wait_group(2)"},
        kind="register in flight",
        message=rf"a register is used while a wgmma .* may still write or read it .*{CONSUMERS}",
        line="else cute.arch.fmax(a, b)",
    ),
    Fault(
        "O is rescaled while a product still adds to it",
        {"warpgroup.wait_group(0)  # O is there, P is read": "warpgroup.wait_group(1)"},
        kind="register in flight",
        message=rf"a register is used while a wgmma .* may still write or read it .*{CONSUMERS}",
        line="acc[r, None].store(acc[r, None].load() * factor[r])",
    ),
    Fault(
        "infinity minus infinity, where a tile hides a row wholly",
        {
            "pivot = Float32(0.0) if new == self.hidden else new\n            # Not": (
                "pivot = new\n            # Not"
            )
        },
        kind="nan",
        message=rf"an output holds NaN though no input does; .* by thread 128 .*{CONSUMERS}",
        line="(old - pivot) * self.scale_log2",
        file="kernels/online_softmax.py",
        facts=CAUSAL,
    ),
    Fault(
        "the last row is not written",
        {"if row < rows.mask.len_q:": "if row < rows.mask.len_q - 1:"},
        kind="unwritten output",
        message=r"64 bytes of argument 3 are never written, the first at index \(0, 199, 0, 0\)",
        line="",
    ),
    Fault(
        "a row too many is written",
        {"if row < rows.mask.len_q:": "if row <= rows.mask.len_q:"},
        kind="out of bounds",
        message=r"write of 16 bytes of global memory at 0x\w+: 0 bytes past the end of argument 3",
        line="target.store(",
    ),
    Fault(
        "the LSE of rows that do not exist is written",
        {
            "                if own_column == 0:  # one lane of each quad\n    ": (
                "            if own_column == 0:  # one lane of each quad\n"
            )
        },
        kind="out of bounds",
        message=r"write of 4 bytes of global memory at 0x\w+: 32 bytes past the end of argument 4",
        line="args.lse[rows.batch, rows.head, row] = lse[r]",
    ),
    Fault(
        "a column that no lane starts at writes LSE",
        {"if own_column == 0:": "if own_column == 1:"},
        kind="unwritten output",
        message=r"800 bytes of argument 4 are never written, the first at index \(0, 0, 0\)",
        line="",
    ),
    Fault(
        "the rows of O past the last 64 are not written",
        {"if row < rows.mask.len_q:": "if rows.first + WGMMA_ROWS <= rows.mask.len_q:"},
        kind="unwritten output",
        message=r"512 bytes of argument 3 are never written, the first at index \(0, 192, 0, 0\)",
        line="",
    ),
    Fault(
        "octets that do not fill a quad are not written",
        {"(octets // QUAD_THREADS, len(own))": "(0)"},
        kind="unwritten output",
        message=r"3200 bytes of argument 3 are never written, the first at index \(0, 0, 0, 32\)",
        line="",
        facts=FIVE_OCTETS,
        tiles=TILES_40,
    ),
    Fault(
        "every lane of the last quad writes an octet, whether the row has it or not",
        {"if lane < octets % QUAD_THREADS:": "if lane < QUAD_THREADS:"},
        kind="out of bounds",
        message=r"write of 16 bytes of global memory at 0x\w+: 0 bytes past the end of argument 3",
        line="target.store(",
        facts=FIVE_OCTETS,
        tiles=TILES_40,
    ),
    Fault(
        "the octets of the padded head are written",
        {"self.facts.head_dim_v // OCTET": "self.shape_o[1] // OCTET"},
        kind="out of bounds",
        message=r"write of 16 bytes of global memory at 0x\w+: 0 bytes past the end of argument 3",
        line="target.store(",
        facts=FIVE_OCTETS,
        tiles=TILES_40,
    ),
    Fault(
        "a lane's first column is taken for its place in the quad",
        {"lane, octets = own_column // 2,": "lane, octets = own_column,"},
        kind="out of bounds",
        message=r"write of 16 bytes of global memory at 0x\w+: \d+ bytes past the end of argument",
        line="target.store(",
    ),
    Fault(
        "lanes whose octet does not exist take no part in the exchange",
        {
            "                    if lane < octets % QUAD_THREADS:\n": (
                "                    if lane < octets % QUAD_THREADS:\n"
                "                        rest = [words[r, c] for c in range(4 * i, octets)]\n"
                "                        own[i] = quad_transposed(rest, lane)\n"
            ),
        },
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: "
        r"shfl\.sync\.bfly\S+ .*: a warp-synchronous instruction waits for lanes \[1, 2, 3, 5, ",
        line="cute.arch.shuffle_sync_bfly(",
        other="cute.arch.shuffle_sync_bfly(",
        facts=FIVE_OCTETS,
        tiles=TILES_40,
    ),
    Fault(
        "only lanes whose first row has no new maximum vote",
        {
            "moved = cute.arch.vote_any_sync((alpha[0] != 1.0) | (alpha[1] != 1.0))": (
                "moved = alpha[0] != 1.0\n"
                "            if not moved:\n"
                "                moved = cute.arch.vote_any_sync(alpha[1] != 1.0)"
            )
        },
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 0 at .*\n"
        rf"  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: vote\.sync\.any\S+ .*: "
        r"a warp-synchronous instruction waits for lanes ",
        line="stage = load_v.acquire_and_advance()",
        other="moved = cute.arch.vote_any_sync(",
        tiles=SKIP_UNMOVED,
    ),
    Fault(
        "shared buffers are aligned for vectors, not for TMA",
        {"byte_alignment=SWIZZLE_BYTES": "byte_alignment=16"},
        kind="misaligned",
        message=r"box at shared address 0x470: 128-byte alignment is needed",
        line="cute.copy(args.load_q,",
        file="layouts/smem.py",
        tiles=ONE_STAGE_Q,  # 14 mbarriers and the slot happen to end at a multiple of 128
    ),
    Fault(
        "one row too few is announced for K",
        {"k_bytes=tiles.k_bytes,": "k_bytes=tiles.k_bytes - tiles.k_bytes // tiles.tile_kv,"},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: mbarrier\S+ .*: "
        r"mbarrier at byte 48 of shared memory: waits for phase of parity 0, present phase has "
        r"parity 0, 0 of 1 arrivals missing and 64 bytes over those expected\n",
        line="k = load_k.wait_and_advance()",
        other="k = load_k.wait_and_advance()",
    ),
    Fault(
        "one row too many is announced for V",
        {"v_bytes=tiles.v_bytes,": "v_bytes=tiles.v_bytes + tiles.v_bytes // tiles.tile_kv,"},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: mbarrier\S+ .*: "
        r"mbarrier at byte 80 of shared memory: waits for phase of parity 0, present phase has "
        r"parity 0, 0 of 1 arrivals and 64 bytes missing\n",
        line="v = load_v.wait_and_advance(load_v.try_wait())",
        other="v = load_v.wait_and_advance(load_v.try_wait())",
    ),
    Fault(
        "nobody fills the last stage of V",
        {"cutlass.range(kv_end + 1, unroll=1)": "cutlass.range(kv_end, unroll=1)"},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: mbarrier\S+ .*: "
        r"mbarrier at byte 80 of shared memory: waits for phase of parity 0, present phase has "
        r"parity 0, 1 of 1 arrivals and 0 bytes missing\n",
        line="v = load_v.wait_and_advance()",
        other="v = load_v.wait_and_advance()",
    ),
    Fault(
        "a warpgroup's turn waits for a third one",
        {"2 * WARPGROUP_THREADS": "3 * WARPGROUP_THREADS"},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 0 at .*\n"
        rf"  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: bar\.sync .*: "
        r"barrier 1 has 256 of 384 threads",
        line="",
        other="cute.arch.barrier(barrier_id=self.first + self.own",
        file="pipelines/forward_sm90.py",
    ),
    Fault(
        "the producer keeps its registers",
        {"cute.arch.setmaxregister_decrease(tiles.registers_load)": "pass"},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: setmaxnreg.*: "
        r"setmaxnreg\.inc to 240 needs 9216 registers of the SM's file and 1024 are free",
        line="cute.arch.setmaxregister_increase(tiles.registers_consume)",
        other="cute.arch.setmaxregister_increase(tiles.registers_consume)",
    ),
    Fault(
        "the tile is read before it is there",
        {"load_tile.wait_and_advance()": "load_tile.wait_and_advance(True)"},
        kind="race",
        message=rf"read {AT_BYTE} write of warp 0 at {OTHER}: st\.shared\S+ .* "
        rf"with no synchronisation between them \(CTA \(0, 0, 0\), {CONSUMERS}\)",
        line="for i in range(TILE_WORDS))",
        other="self.slot[2] = q_tile, head, batch",
        file=QUEUE,
    ),
    Fault(
        "the next tile is posted while the last one may still be read",
        {"load_tile.acquire_and_advance()": "load_tile.acquire_and_advance(True)"},
        kind="race",
        message=rf"write {AT_BYTE} read of {CONSUMERS} at {OTHER}: ld\.shared\S+ .* "
        r"with no synchronisation between them \(CTA \(0, 0, 0\), warp 0\)",
        line="self.slot[2] = q_tile, head, batch",
        other="for i in range(TILE_WORDS))",
        file=QUEUE,
        len_kv=FEW_KEYS,
        ctas=1,
        order="random",
    ),
    Fault(
        "the tile is released before it is read",
        {
            "        stage = load_tile.wait_and_advance()\n": (
                "        stage = load_tile.wait_and_advance()\n        stage.release()\n"
            ),
            "        stage.release()\n        return": "        return",
        },
        kind="race",
        message=rf"write {AT_BYTE} read of {CONSUMERS} at {OTHER}: ld\.shared\S+ .* "
        r"with no synchronisation between them \(CTA \(0, 0, 0\), warp 0\)",
        line="self.slot[2] = q_tile, head, batch",
        other="for i in range(TILE_WORDS))",
        file=QUEUE,
        len_kv=FEW_KEYS,
        ctas=1,
    ),
    Fault(
        "nobody says that no tile is left",
        {"        queue.post(load_tile, Int32(NONE), Int32(0), Int32(0))\n": ""},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: mbarrier\S+ .*: "
        r"mbarrier at byte 0 of shared memory: waits for phase of parity 1, present phase has "
        r"parity 1, 32 of 32 arrivals and 0 bytes missing\n",
        line="stage = load_tile.wait_and_advance()",
        other="stage = load_tile.wait_and_advance()",
    ),
    Fault(
        "one lane of a warp releases the tile for all of them",
        {
            "        stage.release()\n": (
                "        if cute.arch.lane_idx() == 0:\n            stage.release()\n"
            )
        },
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 0 at {OTHER}: mbarrier\S+ .*: "
        r"mbarrier at byte 8 of shared memory: waits for phase of parity 0, present phase has "
        r"parity 0, 248 of 256 arrivals and 0 bytes missing\n",
        line="stage = load_tile.acquire_and_advance()",
        other="stage = load_tile.acquire_and_advance()",
        file=QUEUE,
        ctas=1,
    ),
    Fault(
        "a number is drawn and lost",
        {"number = queue.draw()": "queue.draw()\n            number = queue.draw()"},
        kind="unwritten output",
        message=SECOND_TILE_UNWRITTEN,
        line="",
        ctas=1,
    ),
    Fault(
        "every lane draws a number: the next launch finds no tile left",
        {
            "        drawn = Int32(0)\n        if cute.arch.lane_idx() == 0:\n    ": "",
            "    # Each tile but": "if cute.arch.lane_idx() == 0:\n            # Each tile but",
        },
        kind="unwritten output",
        message=SECOND_TILE_UNWRITTEN,
        line="",
        file=QUEUE,
        ctas=1,
        before=(1, 1),
    ),
    Fault(
        "the counter is not set back: the next launch finds no tile left",
        {"            self.counter[0] = Int32(0)": "            pass"},
        kind="unwritten output",
        message=SECOND_TILE_UNWRITTEN,
        line="",
        file=QUEUE,
        ctas=1,
        before=(1, 1),
    ),
    Fault(
        "the counter is set back one draw too early: the next launch starts from another number",
        {"drawn == self.order.count - 1": "drawn == self.order.count - 2"},
        kind="unwritten output",
        message=SECOND_TILE_UNWRITTEN,
        line="",
        file=QUEUE,
        ctas=1,
        before=(2, 3),
    ),
    Fault(
        "Q is released after the first scores",
        {
            "            q.release()  # every score is there\n": "",
            "masked = cutlass.max(": "q.release()\n            masked = cutlass.max(",
        },
        kind="race",
        message=rf"read {AT_BYTE} write of the copies on mbarrier at byte 16 at {OTHER}: "
        rf"cp\.async\.bulk\.tensor\S+ .* with no synchronisation between them .*{CONSUMERS}",
        line="issue(",
        other="cute.copy(args.load_q,",
        tiles=ONE_STAGE_Q,
        ctas=1,
    ),
    Fault(
        "Q is read from the first stage, whichever it is in",
        {
            "share.tSrQ.stage(q.index * self.tiles.consumer_warpgroups + group)": (
                "share.tSrQ.stage(group)"
            )
        },
        kind="race",
        message=rf"read {AT_BYTE} write of the copies on mbarrier at byte 16 at {OTHER}: "
        rf"cp\.async\.bulk\.tensor\S+ .* with no synchronisation between them .*{CONSUMERS}",
        line="issue(",
        other="cute.copy(args.load_q,",
        len_q=THREE_TILES,
        ctas=1,
    ),
    Fault(
        "Q is never released",
        {"            q.release()  # every score is there\n": ""},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 0 at {OTHER}: mbarrier\S+ .*: "
        r"mbarrier at byte 32 of shared memory: waits for phase of parity 0, present phase has "
        r"parity 0, 8 of 8 arrivals and 0 bytes missing\n",
        line="stage = load_q.acquire_and_advance()",
        other="stage = load_q.acquire_and_advance()",
        len_q=THREE_TILES,
        ctas=1,
    ),
    Fault(
        "Q is released only where there are keys",
        {
            "            q.release()  # every score is there\n": "",
            "            if kv_end > 0:\n                load_v =": (
                "            if kv_end > 0:\n                q.release()\n                load_v ="
            ),
        },
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 0 at {OTHER}: mbarrier\S+ .*: "
        r"mbarrier at byte 40 of shared memory: waits for phase of parity 0, present phase has "
        r"parity 0, 8 of 8 arrivals and 0 bytes missing\n",
        line="stage = load_q.acquire_and_advance()",
        other="stage = load_q.acquire_and_advance()",
        facts=CAUSAL,
        len_q=FOUR_TILES,
        len_kv=FEW_KEYS,
        ctas=1,
    ),
    Fault(
        "a K that was not seen passes for one that was",
        {"k_there = load_k.try_wait()": "k_there = Boolean(True)"},
        kind="race",
        message=rf"read {AT_BYTE} write of .* at {OTHER}: .* "
        r"with no synchronisation between them",
        line="issue(",
        other="cute.copy(args.load_k,",
    ),
    Fault(
        "the release that shall never happen happens",
        {"if negative(alpha[0]):": "if not negative(alpha[0]):"},
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 0 at .*\n"
        rf"  CTA \(0, 0, 0\) warp 4, 5, 6, 7 at {OTHER}: mbarrier\S+ .*: mbarrier at byte 56 ",
        line="stage = load_k.acquire_and_advance()",
        other="k = load_k.wait_and_advance(k_there)",
    ),
]


def findings(fault: Fault, folder: Path, patch: pytest.MonkeyPatch) -> list[emulator.Finding]:
    """What the checker says of the kernel with the fault in it."""
    module = edited(fault, folder, patch, dict.fromkeys((fault.file, KERNEL)))
    kernel = module.FwdSm90(fault.facts, fault.tiles)
    compiled = loader.compile(
        kernel, *kernel.fake_arguments(), arch="sm_90a", options="--enable-tvm-ffi"
    )
    torch.manual_seed(0)  # and a scale at which the maxima keep rising, so that O is rescaled
    counter = torch.zeros(1, dtype=torch.int32)
    session = Session(emulator.Options(raise_on_fault=False, order=fault.order, strict=True))

    def attend(heads: int, ctas: int | None) -> None:
        dims = [(fault.len_q, 32), (fault.len_kv, 32), (fault.len_kv, fault.facts.head_dim_v)]
        q, k, v = (torch.randn(1, length, heads, dim).bfloat16() for length, dim in dims)
        out = q.new_empty(1, fault.len_q, heads, fault.facts.head_dim_v)
        lse = torch.empty(1, heads, fault.len_q)

        def launch(launch: loader.Launch) -> None:
            session.launch(replace(launch, grid=(ctas, 1, 1)) if ctas else launch)

        with loader.intercept(launch):
            session.call(compiled, q, k, v, out, lse, 2.0, counter, outputs=(out, lse))

    if fault.before:
        attend(*fault.before)
        assert not session.report.findings
    attend(1, fault.ctas)
    return session.report.findings


def edited(
    fault: SourceFault, folder: Path, patch: pytest.MonkeyPatch, files: Iterable[str]
) -> Any:
    """The last module of `files`, loaded in their order, with the fault in the one that has it."""
    source = PACKAGE / fault.file
    text = source.read_text()
    for old, new in fault.edits.items():
        assert text.count(old) == 1, f"{fault.file} holds no single {old!r}"
        text = text.replace(old, new)
    copy = folder / source.name
    copy.write_text(text)
    module = None
    for file in files:
        module = _load(file, copy if file == fault.file else PACKAGE / file, patch)
    return module


def _load(file: str, path: Path, patch: pytest.MonkeyPatch) -> Any:
    """`path` as the package's module `file`, until `patch` is undone."""
    name = f"hopwell.{file.removesuffix('.py').replace('/', '.')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def line_of(finding: emulator.Finding) -> str:
    """The source line that a finding points at."""
    return linecache.getline(finding.file, finding.line).strip()


def other_line(found: re.Match[str], folder: Path) -> str:
    """The source line that `OTHER` matched, in the edited file or in one of the package's."""
    name, line = found["file"], int(found["line"])
    copy = folder / name
    path = copy if copy.exists() else next(PACKAGE.glob(f"*/{name}"))
    return linecache.getline(str(path), line).strip()
