"""Mistakes in the source of Blackwell's backward, each a small edit of one file; see `faults`.

Three tiles of Q at two or three of K and V, so that every buffer is used again, by CTAs on their
own, by pairs, and by pairs with folded accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hopwell import emulator
from hopwell.emulator import loader
from hopwell.kernels import BackwardFacts
from hopwell.kernels.backward import Backward
from hopwell.kernels.tiles_bwd_sm100 import BlackwellBackwardTiles

from ..kernels.backward import case, exact
from .faults import NO_FENCE, OTHER, PLACES, UNSETTLED, Access, Race, SourceFault, edited

FILES = [  # in the order of their imports
    "layouts/smem.py",
    "pipelines/rings.py",
    "pipelines/graph.py",
    "pipelines/backward_sm100.py",
    "kernels/bwd_workspace.py",
    "kernels/bwd_main.py",
    "kernels/bwd_sm100.py",
    "kernels/backward.py",
]
FACTS = BackwardFacts("bfloat16", 32, 32, causal=False)
ALONE = BlackwellBackwardTiles(
    head_dim=32,
    head_dim_v=32,
    stages=3,
    borrow_as_dq="dp",
    fma_pairs=0,
    reason="small",
)
TWO_S = replace(ALONE, stages=4, score_buffers=2, borrow_as_dq="s")
PAIR_TWO_S = replace(TWO_S, pair=True)
DQ_OF_TWO = replace(ALONE, pair=True, dq_tiles=2)
FOLDED = replace(ALONE, pair=True, folded=True, borrow_as_dq=None)
MANY_STAGES = replace(FOLDED, stages=9)  # LSE and D are alone in waiting for their place
LEN_Q, LEN_KV = 300, 200
REDUCE, COMPUTE = r"warp [0-3]", r"warp (?:[4-9]|1[01])"
MMA, COPIES = r"the tcgen05\.mma of warp 12", r"the copies on mbarrier at byte \d+"
STUCK_MMA = rf"no warp can move\n(.*\n)+  CTA \(0, 0, 0\) warp 12 at {OTHER}: mbarrier"
UNFENCED_DS = (
    rf"read {PLACES['shared']} and the write of {COMPUTE} at {OTHER}: "
    rf"st\.shared::cluster.* {NO_FENCE}"
)
BY_SMEM = "self.instruction(leader, d, a.step(k)"  # A in shared memory
BY_TMEM = "self.instruction(leader, d, a + k"
WRITE = "cute.autovec_copy(octet, target)"
HAND_OUT = "store_to_cta(octet, target, cta)"
DS_FREE = "            rings.mma_dq.wait(number - 1)\n"
NEXT_S = (
    "                if number + ahead < total:\n"
    "                    self.issue_s(rings, operands, number + ahead)\n"
)
BEHIND_DK = "            else:\n" + NEXT_S
AWAIT_DQ = "            tmem.await_loads()\n"
LAST_OF_DQ = "            if const_expr(first + width == columns):\n"
TELL_DQ_READ = (
    "                tmem.before_handing_over()\n                rings.reduce_dq.commit(number)\n"
)
STAGE_DQ = (
    "                "
    "cute.autovec_copy(cute.make_tensor(part.iterator + (c - first), quads), target)\n"
)
STORE_P = 'tmem.store_row(base, self.borrow_s_as("p", number, part.half), words, part.thread)\n'
SUMS_MADE = "            cute.arch.cp_async_bulk_wait_group(0)\n"
TELL_DKV = "        rings.mma_dkv.commit(0, operands.leader)\n"
TMEM_DONE = '        cute.arch.barrier_arrive(**self.graph.numbered("tmem_done"))\n'

PRODUCT_READS = Access("read", MMA, BY_SMEM)
DS_HANDED_OUT = Access("write", COMPUTE, HAND_OUT)
WRITTEN = Access("write", COMPUTE, WRITE)  # P, dS or a gradient, in shared memory
P_STORED = Access("write", rf"tcgen05\.st of {COMPUTE}", STORE_P.strip())
DS_STORED = Access(
    "write", rf"tcgen05\.st of {COMPUTE}", 'tmem.store_row(base, self.borrow_s_as("ds", number'
)
P_READ = Access("read", MMA, BY_TMEM)
SCORES_WRITTEN = Access("write", MMA, BY_SMEM)  # S or dP, or dQ
DP_READ = Access("read", rf"tcgen05\.ld of {COMPUTE}", "tmem.load_row(base, column, dP,")
DQ_READ = Access("read", rf"tcgen05\.ld of {REDUCE}", "tmem.load_row(base, self.dq_column(")
ROWS_READ = Access("read", COMPUTE, "cute.autovec_copy(cute.local_tile(row, (QUAD,)")
LOADED = Access("write", COPIES, "cute.copy(")
DQ_STAGED = Access("write", REDUCE, STAGE_DQ.strip())
DQ_ADDED = Access("read", r"the bulk copies of warp [0-3] lane 0", "reduce_bulk(there")


@dataclass(frozen=True)
class BlackwellBackwardFault(SourceFault):
    """One of backward. Its kind is "numbers" where the checker is silent and gradients are wrong,
    "order" where it is and the bits of a deterministic sum change from run to run."""

    file: str = "kernels/bwd_sm100.py"
    tiles: BlackwellBackwardTiles = FOLDED
    facts: BackwardFacts = FACTS
    len_kv: int = LEN_KV
    seeds: int = 1  # of random orders
    together: bool = False  # with the kernels before and behind, which costs compiling them again


FAULTS = [
    BlackwellBackwardFault(
        "dS is written to the other CTA where dQ of the tile before may still read it",
        {DS_FREE: "            pass\n"},
        races=(Race("shared", DS_HANDED_OUT, PRODUCT_READS),),
        tiles=PAIR_TWO_S,
    ),
    BlackwellBackwardFault(
        "halves of dS go to the wrong CTAs",
        {"cta = part.first // self.tiles.dq_rows": "cta = 1 - part.first // self.tiles.dq_rows"},
        kind="numbers",
        message="dq is off",
    ),
    BlackwellBackwardFault(
        "both halves of dS stay",
        {"cta = part.first // self.tiles.dq_rows": "cta = part.rank"},
        races=(Race("shared", DS_HANDED_OUT, DS_HANDED_OUT),),
    ),
    BlackwellBackwardFault(
        "the fence between dS and dQ's product is for the CTA's own shared memory",
        {'("async.shared", space="cluster")': '("async.shared", space="cta")'},
        kind="missing proxy fence",
        message=UNFENCED_DS,
        line=BY_SMEM,
        other=HAND_OUT,
    ),
    BlackwellBackwardFault(
        "what compute hands over is told to the CTA's own barriers",
        {"at = LEADING_CTA if self.pair and self.to_mma else None": "at = None"},
        kind="deadlock",
        message=rf"{STUCK_MMA}\S+ .*: "
        r"mbarrier at byte \d+ of shared memory: waits for phase of parity 0, present phase has "
        r"parity 0, 8 of 16 arrivals and 0 bytes missing\n",
        line="rings.mma_dq.wait(number)",
        other="rings.compute_p.wait(number)",
        file="pipelines/rings.py",
    ),
    BlackwellBackwardFault(
        "a pair does not wait for each other at the end",
        {
            "            cute.arch.cluster_arrive()\n            cute.arch.cluster_wait()\n": (
                "            pass\n"
            )
        },
        kind="barrier misuse",
        message=r"an mbarrier of CTA 0 of the cluster is used, which (has|may have) ended",
        line="rings.reduce_dq.commit(number)",
    ),
    BlackwellBackwardFault(
        "dQ of two tiles is computed when the first of them is there",
        {"(number % tiles == tiles - 1)": "(number % tiles == 0)"},
        kind="uninitialised read",
        message="shared memory is read before anything wrote it",
        line=BY_SMEM,
        tiles=DQ_OF_TWO,
    ),
    BlackwellBackwardFault(
        "dS of a tile goes to the CTA of the next",
        {"place, number % self.tiles.dq_tiles": "place, (number + 1) % self.tiles.dq_tiles"},
        kind="numbers",
        message="dq is off",
        tiles=DQ_OF_TWO,
    ),
    BlackwellBackwardFault(
        "dS of a tile is stored without the swizzle",
        {"first = at ^ ((at >> 3) & (LINE_BYTES - OCTET_BYTES))": "first = at"},
        kind="numbers",
        message="dq is off",
        file="layouts/smem.py",
        tiles=DQ_OF_TWO,
    ),
    BlackwellBackwardFault(
        "of two tiles of dQ both CTAs add to the first",
        {
            "            if rank == 1:\n"
            "                q_tile, head = keys.after(q_tile, head)\n": "            pass\n"
        },
        kind="numbers",
        message="dq is off",
        tiles=DQ_OF_TWO,
    ),
    BlackwellBackwardFault(
        "of a pair each tells the other that it is done, and none waits",
        {
            "            cute.arch.cluster_arrive()\n            cute.arch.cluster_wait()\n": (
                "            cute.arch.cluster_arrive()\n"
            )
        },
        kind="barrier misuse",
        message=r"an mbarrier of CTA 0 of the cluster is used, which (has|may have) ended",
        line="rings.reduce_dq.commit(number)",
    ),
    BlackwellBackwardFault(
        "folded accumulators: the halves of queries change places",
        {"first = folds *": "first = (1 - folds) *"},
        kind="numbers",
        message="d[qkv] is off",
    ),
    BlackwellBackwardFault(
        "tensor memory is given back while dQ is read",
        {
            f"{SUMS_MADE}        tmem.before_handing_over()\n{TMEM_DONE}": SUMS_MADE,
            "        cute.arch.griddepcontrol_wait()  # for the zeros in dQ\n": (
                f"        cute.arch.griddepcontrol_wait()\n{TMEM_DONE}"
            ),
        },
        message=rf"dealloc {PLACES['tensor']} and the (read|write) of .* at {OTHER}",
        line="cute.arch.dealloc_tmem(",
        other="",
    ),
    BlackwellBackwardFault(
        "S of the next tile is issued before dK has read dS",
        {
            BEHIND_DK: "            else:\n",
            "            rings.compute_ds.wait(number)\n": (
                "            if number + ahead < total:\n"
                "                self.issue_s(rings, operands, number + ahead)\n"
                "            rings.compute_ds.wait(number)\n"
            ),
        },
        races=(Race("tensor", DS_STORED, SCORES_WRITTEN),),
        tiles=ALONE,
    ),
    BlackwellBackwardFault(
        "dP of the next tile is issued before dQ is read",
        {
            '                    if const_expr(self.tiles.borrow_as_dq == "dp"):\n'
            "                        rings.reduce_dq.wait((number + 1) // tiles - 1)\n": ""
        },
        races=(Race("tensor", DQ_READ, SCORES_WRITTEN),),
        tiles=ALONE,
    ),
    BlackwellBackwardFault(
        "dQ is free before it is in registers",
        {AWAIT_DQ + LAST_OF_DQ + TELL_DQ_READ: LAST_OF_DQ + TELL_DQ_READ + AWAIT_DQ},
        races=(Race("tensor", DQ_READ, SCORES_WRITTEN),),
        tiles=ALONE,
    ),
    BlackwellBackwardFault(
        "P is handed over before it has arrived in tensor memory",
        {f"            {STORE_P}            tmem.await_stores()\n": f"            {STORE_P}"},
        races=(Race("tensor", P_READ, P_STORED),),
        tiles=ALONE,
    ),
    BlackwellBackwardFault(
        "Q is released after the first of its two products",
        {'else ("dv", "dk")': 'else ("dv", "s")'},
        kind="deadlock",  # the second waits for a turn of its stage that has passed
        message=STUCK_MMA,
        line="rings.mma_dq.wait(number)",
        other="rings.load_qdo.wait(use)",
        tiles=ALONE,
    ),
    BlackwellBackwardFault(
        "dK is written over K before the last product has read it",
        {
            TELL_DKV: "",
            "            self.issue_dk(rings, operands, number)\n": (
                "            self.issue_dk(rings, operands, number)\n"
                "            if number + 1 == total:\n"
                "                rings.mma_dkv.commit(0, operands.leader)\n"
            ),
        },
        races=(Race("shared", WRITTEN, PRODUCT_READS),),
        tiles=ALONE,
    ),
    BlackwellBackwardFault(
        "LSE and D are free before D is read",
        {
            "        rings.load_rows.release(number)\n": "",
            "        rings.mma_dp.wait(number)\n": (
                "        rings.load_rows.release(number)\n        rings.mma_dp.wait(number)\n"
            ),
        },
        races=(Race("shared", LOADED, ROWS_READ),),
        tiles=MANY_STAGES,
    ),
    BlackwellBackwardFault(
        "dQ is added before it is stored",
        {
            STAGE_DQ: "",
            "                    cute.arch.cp_async_bulk_commit_group()\n\n": (
                f"                    cute.arch.cp_async_bulk_commit_group()\n{STAGE_DQ}\n"
            ),
        },
        kind="uninitialised read",
        message="shared memory is read before anything wrote it",
        line="reduce_bulk(there",
    ),
    BlackwellBackwardFault(
        "dQ is stored where the reduction before may still read",
        {
            "                if lane() == 0:\n"
            "                    cute.arch.cp_async_bulk_wait_group(DQ_STAGES - 1, read=True)\n": ""
        },
        races=(Race("shared", DQ_STAGED, DQ_ADDED),),
    ),
    BlackwellBackwardFault(
        "LSE and D are not waited for",
        {"        cute.arch.griddepcontrol_wait()  # for LSE and D\n": ""},
        message=UNSETTLED,
        line="cute.copy(",
        together=True,
    ),
    BlackwellBackwardFault(
        "the turn is handed on before the sums are made",
        {
            "            cute.arch.cp_async_bulk_wait_group(0)\n"
            '            cute.arch.fence_proxy("async.global")\n            cute.arch.red': (
                '            cute.arch.fence_proxy("async.global")\n            cute.arch.red'
            )
        },
        kind="order",
        message="dq's sums have other bits",
        file="kernels/bwd_workspace.py",
        facts=replace(FACTS, deterministic=True),
        len_kv=300,
        seeds=6,
    ),
    BlackwellBackwardFault(
        "a key is hidden from the query at its own place",
        {"if first + c >= hidden": "if first + c > hidden"},
        kind="numbers",
        message="d[qkv] is off",
        facts=replace(FACTS, causal=True),
    ),
]
SOUND = [
    BlackwellBackwardFault(name, {}, kind="", tiles=tiles)
    for name, tiles in (
        ("alone", ALONE),
        ("pair", PAIR_TWO_S),
        ("dQ of two tiles", DQ_OF_TWO),
        ("folded", FOLDED),
    )
]


def built(function: Any, *kernels: str) -> Any:
    """Backward with these kernels alone."""
    arguments = function.fake_arguments()
    for other in {"rowsum", "main", "cast"}.difference(kernels):
        setattr(function, other, lambda *_: None)
    return loader.compile(function, *arguments, arch="sm_100a", options="--enable-tvm-ffi")


@cache
def sound(facts: BackwardFacts, tiles: BlackwellBackwardTiles, kernel: str) -> Any:
    return built(Backward(facts, tiles), kernel)


def verdict(
    fault: BlackwellBackwardFault, folder: Path, patch: pytest.MonkeyPatch
) -> emulator.Finding | None:
    """What is wrong with the kernels with the fault in them: the checker's word, or ours."""
    facts, tiles = fault.facts, fault.tiles
    function = edited(fault, folder, patch, FILES).Backward(facts, tiles)
    before = behind = None
    if fault.together:
        faulty = built(function, "rowsum", "main", "cast")
    else:
        faulty = built(function, "main")
        before, behind = (sound(facts, tiles, kernel) for kernel in ("rowsum", "cast"))
    c = case(facts, LEN_Q, fault.len_kv)
    e = exact(facts, c)
    sums = None
    for seed in range(fault.seeds):
        found = dq, dk, dv = tuple(torch.empty_like(x) for x in (c.q, c.k, c.v))
        workspace = torch.full(
            (tiles.workspace_floats(1, 1, LEN_Q, facts.deterministic),), torch.nan
        )
        options = emulator.Options(
            raise_on_fault=False,
            order=fault.order if fault.seeds == 1 else "random",
            seed=seed,
            strict=True,
            max_findings=1,
        )
        for call, outputs in ((before, ()), (faulty, (dk, dv)), (behind, (dq,))):
            if call is None:
                continue
            report = emulator.run(
                call,
                *(c.dout, c.q, c.k, c.v, e.out, e.lse, *found, workspace, c.scale, False, 132),
                outputs=outputs,
                options=options,
            )
            if report.findings:
                return report.findings[0]
        for name, gradient, true, bound in zip("qkv", found, e.gradients, e.bounds, strict=True):
            share = ((gradient.double() - true).abs() / bound.clamp(min=1e-30)).max().item()
            if not share <= 1:
                return emulator.Finding("numbers", f"d{name} is off", "", "", "", 0)
        sums = workspace if sums is None else sums
        if not torch.equal(workspace, sums):
            return emulator.Finding("order", "dq's sums have other bits", "", "", "", 0)
    return None
