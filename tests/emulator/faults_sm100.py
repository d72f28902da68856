"""Mistakes in the source of Blackwell's forward kernel, each a small edit of it; see `faults`.

Two pairs of tiles of Q for one CTA, so that every buffer is used again, by a scale at which maxima
rise by more than O may lag behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from hopwell import emulator
from hopwell.emulator import loader
from hopwell.emulator.session import Session
from hopwell.kernels import BlackwellFacts
from hopwell.kernels.tiles import BlackwellTiles
from tests import reference

from .faults import AT_BYTE, OTHER, PLACES, Access, Race, SourceFault, edited

KERNEL = "kernels/fwd_sm100.py"
FACTS = BlackwellFacts("bfloat16", 32, 32, causal=False)


@dataclass(frozen=True)
class SmallTiles(BlackwellTiles):
    """Of half as many keys, to compile faster."""

    tile_kv: int = field(default=64, init=False)
    early_keys: int = field(default=32, init=False)


TILES = SmallTiles(
    head_dim=32,
    head_dim_v=32,
    q_tiles=2,
    stages_kv=3,
    borrow_q_as_o=False,
    registers_softmax=192,
    registers_correction=72,
    registers_other=56,
    fma_pairs=0,
    reason="small",
)
ONE_TILE_OF_Q = replace(TILES, q_tiles=1)  # S is issued one K/V tile further ahead
LEN_Q, LEN_KV, SCALE = 300, 200, 2.0
BOUND = 0.05  # of what is right: bf16's P and O


@dataclass(frozen=True)
class BlackwellFault(SourceFault):
    """One of the forward kernel."""

    file: str = KERNEL
    tiles: BlackwellTiles = TILES


SOFTMAX, CORRECTION = r"warp [0-7]", r"warp ([89]|1[01])"
MMA, MMA_OF_ONE_TILE = r"the tcgen05\.mma of warp 12", r"the tcgen05\.mma of warp 8"
COPIES = r"the copies on mbarrier at byte \d+"
PRODUCT_S = "self.instruction(leader, d, a.step(k)"
PRODUCT_O = "self.instruction(leader, d, a + k"
STORE_OF_P = "            tmem.store_row(base, place, words, thread)\n"

S_WRITTEN = Access("write", MMA, PRODUCT_S)
S_READ = Access("read", rf"tcgen05\.ld of {SOFTMAX}", "tmem.load_row(base, column")
P_WRITTEN = Access("write", rf"tcgen05\.st of {SOFTMAX}", "tmem.store_row(base, place, words")
P_READ = Access("read", MMA, PRODUCT_O)
O_WRITTEN = Access("write", MMA, PRODUCT_O)
O_READ = Access("read", rf"tcgen05\.ld of {CORRECTION}", "tmem.load_row(base, self.out_column(")
O_RESCALED = Access(
    "write", rf"tcgen05\.st of {CORRECTION}", "tmem.store_row(base, self.out_column("
)
P_TOO_EARLY = (Race("tensor", P_READ, P_WRITTEN),)
S_UNDER_WAY = Race("tensor", S_READ, S_WRITTEN)
O_UNDER_WAY = (Race("tensor", O_READ, O_WRITTEN),)

TOLD = Access("write", SOFTMAX, "smem.stats[thread, t] = value")
Q_LOADED = Access("write", COPIES, "cute.copy(")
KV_LOADED = Access("write", COPIES, "cute.copy(args.load_")
OUT_WRITTEN = Access("write", CORRECTION, "cute.autovec_copy(octet, target)")
OUT_STORED = Access("read", "the bulk copies of warp 14 lane 0", "cute.copy(args.store_o")


def asked(line: str) -> Access:
    """Correction's read of what softmax tells."""
    return Access("read", CORRECTION, line)


FAULTS = [
    BlackwellFault(
        "S is issued before softmax has read the one before",
        {'for product in "os"]': 'for product in "so"]'},
        races=(S_UNDER_WAY, Race("tensor", P_WRITTEN, S_WRITTEN)),
        order="random",
    ),
    BlackwellFault(
        "P is handed over before it has arrived in tensor memory",
        {
            "                tmem.await_stores()\n                tmem.before_handing_over()\n": (
                "                tmem.before_handing_over()\n"
            )
        },
        races=P_TOO_EARLY,
    ),
    BlackwellFault(
        "P is handed over before it is stored",
        {
            STORE_OF_P: "",
            "                ring.of(t).commit(step)\n": (
                f"                ring.of(t).commit(step)\n{STORE_OF_P}"
            ),
        },
        races=P_TOO_EARLY,
    ),
    BlackwellFault(
        "the last part of P is not waited for",
        {"        rings.softmax_rest.of(t).wait(step)\n": ""},
        races=P_TOO_EARLY,
    ),
    BlackwellFault(
        "S is read before its product is done",
        {"        rings.mma_s.of(t).wait(step)\n": ""},
        races=(S_UNDER_WAY,),
    ),
    BlackwellFault(
        "S is used before it is in registers",
        {
            "column, low, thread)\n        tmem.await_loads()\n": "column, low, thread)\n",
        },
        kind="register in flight",
        message=r"a register is used before tcgen05\.wait::ld, while a tcgen05\.ld may",
        line="",
    ),
    BlackwellFault(
        "a warp reads the rows of the next one",
        {"base, column, low, thread)": ("base, column, low, (thread + 32) % WARPGROUP_THREADS)")},
        kind="out of bounds",
        message=r"warp [0-7] names lane \d+ of tensor memory; it reaches lanes \d+\.\.\d+",
        line=S_READ.line,
    ),
    BlackwellFault(
        "O lies where S does",
        {'self.tiles.tmem.first("o")': 'self.tiles.tmem.first("s")'},
        races=(Race("tensor", S_READ, O_WRITTEN), Race("tensor", P_WRITTEN, O_WRITTEN)),
    ),
    BlackwellFault(
        "O is rescaled only where a maximum rose by more than sixteen",
        {"vote_any_sync(alpha != 1.0)": "vote_any_sync(alpha < 2.0**-16)"},
        kind="numbers",
        message=r"O is off by \d+",
        line="",
    ),
    BlackwellFault(
        "the next tile of Q adds to O of the last",
        {"done + step, v, step > 0)": "done + step, v, done + step > 0)"},
        kind="numbers",
        message=r"O is off by \d+",
        line="",
    ),
    BlackwellFault(
        "O takes in P V while it is rescaled",
        {"        rings.correction_o.of(t).wait(step)\n": ""},
        races=(Race("tensor", O_WRITTEN, O_RESCALED),),
    ),
    BlackwellFault(
        "O is rescaled while a product adds to it",  # with two tiles, S stands for O: see harmless
        {"                        rings.mma_o.of(t).wait(done + step - 1)\n": ""},
        races=(Race("tensor", O_READ, replace(O_WRITTEN, by=MMA_OF_ONE_TILE)),),
        tiles=ONE_TILE_OF_Q,
    ),
    BlackwellFault(
        "O is read before its last product is done",
        {"                rings.mma_o.of(t).wait(done - 1)\n": ""},
        races=O_UNDER_WAY,
    ),
    BlackwellFault(
        "alpha of the other tile of Q is taken",
        {"value = smem.stats[thread, t]": "value = smem.stats[thread, 0]"},
        races=(Race("shared", TOLD, asked("value = smem.stats[thread, 0]")),),
    ),
    BlackwellFault(
        "alpha is read before it is told",
        {"        rings.softmax_stats.of(t).wait(number)\n": ""},
        races=(Race("shared", TOLD, asked("value = smem.stats[thread, t]")),),
    ),
    BlackwellFault(
        "V is released after the product of the first tile of Q",
        {
            "                        if const_expr(t == q_tiles - 1):\n"
            "                            load_kv.release(v, operands.leader)\n": (
                "                        if const_expr(t == 0):\n"
                "                            load_kv.release(v, operands.leader)\n"
            )
        },
        races=(Race("shared", KV_LOADED, P_READ),),
    ),
    BlackwellFault(
        "Q is released after its first product",
        {
            "                for t in cutlass.range_constexpr(q_tiles):\n"
            "                    rings.load_q.of(t).release(work, operands.leader)\n": (
                "                pass\n"
            ),
            "            for step in cutlass.range(end, unroll=1):\n"
            "                v, k = kv, kv + 1\n": (
                "            for t in cutlass.range_constexpr(q_tiles):\n"
                "                rings.load_q.of(t).release(work, operands.leader)\n"
                "            for step in cutlass.range(end, unroll=1):\n"
                "                v, k = kv, kv + 1\n"
            ),
        },
        races=(Race("shared", Q_LOADED, Access("read", MMA, PRODUCT_S)),),
    ),
    BlackwellFault(
        "no fence between O and the store that reads it",
        {
            "                cute.arch.fence_view_async_shared()\n"
            "                rings.store_o": "                rings.store_o"
        },
        kind="missing proxy fence",
        message=rf"read {AT_BYTE} write of {CORRECTION} at {OTHER}: .* without fence\.proxy\.async",
        line="cute.copy(args.store_o",
        other="cute.autovec_copy(octet, target)",
    ),
    BlackwellFault(
        "O is written where the last one may still be stored from",
        {"                rings.store_o.of(t).acquire(work)\n": ""},
        races=(Race("shared", OUT_WRITTEN, OUT_STORED),),
    ),
    BlackwellFault(
        "O's place is released before the store has read it",
        {"                cute.arch.cp_async_bulk_wait_group(0, read=True)\n": ""},
        races=(Race("shared", OUT_WRITTEN, OUT_STORED),),
    ),
    BlackwellFault(
        "tensor memory is not given back",
        {"        cute.arch.dealloc_tmem(base, TMEM_COLUMNS, is_two_cta=self.tiles.pair)\n": ""},
        kind="tensor memory leak",
        message=r"ends and still holds 512 columns of tensor memory from 0 on",
        line="cute.arch.alloc_tmem(",
    ),
    BlackwellFault(
        "tensor memory is given back while O is read",
        {
            '        cute.arch.barrier(**self.graph.numbered("tmem_done"))\n'
            "        cute.arch.dealloc": "        cute.arch.dealloc",
            "        tmem.before_handing_over()\n"
            '        cute.arch.barrier(**self.graph.numbered("tmem_done"))\n'
            "\n": "\n",
        },
        kind="race",
        message=rf"dealloc {PLACES['tensor']} and the write of {MMA} at {OTHER}",
        line="cute.arch.dealloc_tmem(",
        other=PRODUCT_O,
    ),
]
SOUND = BlackwellFault("none", {}, kind="", message="", line="")


def verdict(
    fault: BlackwellFault, folder: Path, patch: pytest.MonkeyPatch
) -> emulator.Finding | None:
    """What is wrong with the kernel with the fault in it: the checker's word, or ours."""
    module = edited(fault, folder, patch, dict.fromkeys((fault.file, KERNEL)))
    kernel = module.FwdSm100(FACTS, fault.tiles)
    compiled = loader.compile(
        kernel, *kernel.fake_arguments(), arch="sm_100a", options="--enable-tvm-ffi"
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 32).bfloat16() for n in (LEN_Q, LEN_KV, LEN_KV))
    out, lse = torch.empty_like(q), torch.empty(1, 1, LEN_Q)
    counter = torch.zeros(1, dtype=torch.int32)
    session = Session(
        emulator.Options(raise_on_fault=False, order=fault.order, strict=True, max_findings=1)
    )
    with loader.intercept(lambda launch: session.launch(replace(launch, grid=(1, 1, 1)))):
        session.call(compiled, q, k, v, out, lse, SCALE, counter, outputs=(out, lse))
    if session.report.findings:
        return session.report.findings[0]
    exact = reference.attention(q, k, v, causal=False, scale=SCALE)
    off = (out.double() - exact.out).abs().max().item()
    return None if off < BOUND else emulator.Finding("numbers", f"O is off by {off}", "", "", "", 0)
