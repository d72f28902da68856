"""Mistakes in the source of backward's kernels, each a small edit of one file; see `faults`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hopwell import emulator
from hopwell.emulator import loader
from hopwell.kernels import BackwardFacts
from hopwell.kernels.tiles import BackwardTiles

from ..kernels.backward import case, exact
from .faults import AT_BYTE, NO_FENCE, NO_ORDER, OTHER, UNSETTLED, SourceFault, edited

FILES = [  # in the order of their imports
    "pipelines/backward_sm90.py",
    "kernels/bwd_workspace.py",
    "kernels/bwd_rowsum.py",
    "kernels/bwd_sm90.py",
    "kernels/bwd_dq_cast.py",
    "kernels/backward.py",
]
FACTS = BackwardFacts("bfloat16", 32, 32, causal=False)
# Small, to compile fast; with two blocks of dQ and, split by keys, two slices of 16 queries.
BY_KEYS = BackwardTiles(
    arch="sm_90a",
    head_dim=32,
    head_dim_v=32,
    split="keys",
    tile_q=32,
    stages=2,
    dq_rows=16,
    registers_load=120,
    registers_consume=192,
    reason="small",
)
BY_COLUMNS = replace(BY_KEYS, split="columns")
LEN_Q, LEN_KV = 200, 150
THREE_TILES = 300  # of keys: the sum of two has the same bits in either order
STEP_FENCE = (
    "        cute.arch.fence_view_async_shared()  # products will read what was written here\n"
)
DS_THERE = '        cute.arch.barrier_arrive(**self.graph.numbered("ds_there", turn))\n'
DQ_WAIT = "            warpgroup.wait_group(0)\n"
ADD = "            add_quads(acc_dQ, place[None, None, block])\n"
LAST_BLOCK = "            if const_expr(block == blocks - 1):\n"
REDUCER, CONSUMERS = r"warp (0, 1, 2, 3|[0-3])", r"warp (4, 5, 6, 7|8, 9, 10, 11|[4-9]|1[01])"
PRODUCT, STMATRIX = "issue(", "cute.copy(copy, own.retile(fragment)"
LOAD = "cute.copy(atom, source, slot,"


def overwritten(reader: str, by: str) -> str:
    """The message of a write to where products may still read."""
    return (
        rf"write {AT_BYTE} read of wgmma of {reader} at {OTHER}: wgmma\.mma_async\S+ .* "
        rf"{NO_ORDER} .*{by}"
    )


def read_early(by: str, lack: str = NO_ORDER) -> str:
    """The message of a product that reads what the consumers may still write."""
    written = rf"read {AT_BYTE} write of {CONSUMERS} at {OTHER}: stmatrix"
    return rf"{written}\S+ .* {lack}.*{by}"


@dataclass(frozen=True)
class BackwardFault(SourceFault):
    """One of backward. Its kind is "numbers" where the checker is silent and gradients are wrong,
    "order" where it is and the bits of a deterministic sum change from run to run."""

    file: str = "kernels/bwd_sm90.py"
    tiles: BackwardTiles = BY_KEYS
    deterministic: bool = False
    len_kv: int = LEN_KV
    seeds: int = 1  # of random orders


FAULTS = [
    BackwardFault(
        "dS is written while dQ of two tiles ago may still read it",
        {
            'cute.arch.barrier(**self.graph.numbered("ds_free", turn))': (
                'cute.arch.barrier_arrive(**self.graph.numbered("ds_free", turn))'
            )
        },
        kind="race",
        message=overwritten(REDUCER, by=CONSUMERS),
        line=STMATRIX,
        other=PRODUCT,
    ),
    BackwardFault(
        "dS is free before the product that reads it is waited for",
        {
            DQ_WAIT + LAST_BLOCK: LAST_BLOCK,
            ADD: f"{DQ_WAIT}{ADD}",
        },
        kind="race",
        message=overwritten(REDUCER, by=CONSUMERS),
        line=STMATRIX,
        other=PRODUCT,
    ),
    BackwardFault(
        "dS is there without a fence",
        {STEP_FENCE: ""},
        kind="missing proxy fence",
        message=read_early(REDUCER, lack=NO_FENCE),
        line=PRODUCT,
        other=STMATRIX,
    ),
    BackwardFault(
        "dS is there before it is written",
        {
            STEP_FENCE + DS_THERE: "",
            "        slices = self.shape_s[1] // WGMMA_DEPTH\n": (
                f"{STEP_FENCE}{DS_THERE}        slices = self.shape_s[1] // WGMMA_DEPTH\n"
            ),
        },
        kind="race",
        message=read_early(REDUCER),
        line=PRODUCT,
        other=STMATRIX,
    ),
    BackwardFault(
        "dS of another tile is waited for",
        {
            '("ds_there", number % self.tiles.ds_stages)': (
                '("ds_there", (number + 1) % self.tiles.ds_stages)'
            )
        },
        kind="deadlock",
        message=rf"no warp can move\n  CTA \(0, 0, 0\) warp 0, 1, 2, 3 at {OTHER}: bar\.sync .*: "
        r"barrier 2 has 128 of 384 threads\n",
        line='self.graph.numbered("ds_there", (number',
    ),
    BackwardFault(
        "dQ is added while its product may still write it",
        {
            DQ_WAIT + LAST_BLOCK: LAST_BLOCK,
        },
        kind="register in flight",
        message=rf"a register is used while a wgmma .* may still write or read it .*{REDUCER}",
        line="@cute.jit",
    ),
    BackwardFault(
        "blocks of dQ change places",
        {"place[None, None, block])": "place[None, None, blocks - 1 - block])"},
        kind="numbers",
        message="dq is off",
        line="",
    ),
    BackwardFault(
        "Q and dO are released before the products that read them are over",
        {
            "            warpgroup.wait_group(0)\n            self.release(edges, number)": (
                "            self.release(edges, number)\n            warpgroup.wait_group(0)"
            )
        },
        kind="race",
        message=overwritten(CONSUMERS, by=REDUCER),
        line=LOAD,
        other=PRODUCT,
    ),
    BackwardFault(
        "split by columns, Q and dO are released before the products that read them are over",
        {
            "                self.release(edges, before)\n": "                pass\n",
            "Q, True)\n\n    def release(": (
                "Q, True)\n            self.release(edges, number)\n\n    def release("
            ),
        },
        kind="race",
        message=overwritten(CONSUMERS, by=REDUCER),
        line=LOAD,
        other=PRODUCT,
        tiles=BY_COLUMNS,
    ),
    BackwardFault(
        "a stage is loaded that was not released",
        {"edge.producer_acquire(state)": "edge.producer_acquire(state, True)"},
        kind="race",
        message=overwritten(CONSUMERS, by=REDUCER),
        line=LOAD,
        other=PRODUCT,
    ),
    BackwardFault(
        "LSE and D are not announced",
        {"q_bytes=tiles.q_bytes,": "q_bytes=tiles.q_bytes - tiles.row_bytes,"},
        kind="race",
        message=rf"read {AT_BYTE} write of the copies on mbarrier at byte 32 at {OTHER}: "
        rf"cp\.async\.bulk\S+ .* with no synchronisation between them .*{CONSUMERS}",
        line="cute.autovec_copy(part, rows)",
        other="cute.copy(",
    ),
    BackwardFault(
        "LSE, D and zeros are not waited for",
        {"        cute.arch.griddepcontrol_wait()  # for LSE, D, and the zeros in dQ\n": ""},
        kind="race",
        message=UNSETTLED,
        line="cute.copy(",
    ),
    BackwardFault(
        "P is read before both warpgroups wrote it",
        {'            cute.arch.barrier(**self.graph.numbered("p_there"))\n': ""},
        kind="race",
        message=read_early(CONSUMERS),
        line=PRODUCT,
        other=STMATRIX,
        tiles=BY_COLUMNS,
    ),
    BackwardFault(
        "dK is written where the other warpgroup may still read Q",
        {'        self.meet("place_free")\n': ""},
        kind="race",
        message=overwritten(CONSUMERS, by=CONSUMERS),
        line=STMATRIX,
        other=PRODUCT,
    ),
    BackwardFault(
        "the turn is handed on before the sum is made",
        {
            "                own.wait()\n": (
                "                own.wait()\n                own.release()\n"
            ),
            "                    last.release()\n": "                    pass\n",
            "                last.meet()\n                last.release()\n": (
                "                last.meet()\n"
            ),
        },
        kind="order",
        message="dq's sums have other bits",
        line="",
        deterministic=True,
        seeds=4,
        len_kv=THREE_TILES,
    ),
    BackwardFault(
        "the cast does not wait for the sums",
        {"        cute.arch.griddepcontrol_wait()\n": ""},
        kind="race",
        message=UNSETTLED,
        line="cute.autovec_copy(",
        file="kernels/bwd_dq_cast.py",
    ),
]
SOUND = BackwardFault(
    "none", {}, kind="", message="", line="", deterministic=True, len_kv=THREE_TILES, seeds=4
)


def verdict(
    fault: BackwardFault, folder: Path, patch: pytest.MonkeyPatch
) -> emulator.Finding | None:
    """What is wrong with the kernels with the fault in them: the checker's word, or ours."""
    facts = replace(FACTS, deterministic=fault.deterministic)
    function = edited(fault, folder, patch, FILES).Backward(facts, fault.tiles)
    compiled = loader.compile(
        function, *function.fake_arguments(), arch="sm_90a", options="--enable-tvm-ffi"
    )
    c = case(facts, LEN_Q, fault.len_kv)
    e = exact(facts, c)
    floats = fault.tiles.workspace_floats(1, 1, LEN_Q, fault.deterministic)
    sums = None
    for seed in range(fault.seeds):
        found = tuple(torch.empty_like(x) for x in (c.q, c.k, c.v))
        workspace = torch.full((floats,), torch.nan)
        order = fault.order if fault.seeds == 1 else "random"
        report = emulator.run(
            compiled,
            *(c.dout, c.q, c.k, c.v, e.out, e.lse, *found, workspace, c.scale, False, 132),
            outputs=found,
            options=emulator.Options(raise_on_fault=False, order=order, seed=seed, strict=True),
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
