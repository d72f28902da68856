"""Tile configurations: one table per SM, keyed by named fields, with the reason beside each row.

A row serves every pair of head dims up to its own; what a smaller pair needs is part of what its
row has. A row is checked when it is made: shared memory, the register file, and the shapes that the
tensor cores take. Nothing here imports the compiler, so tables can be read and printed anywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from ..layouts.hardware import (
    REGISTER_FILE,
    REGISTERS_PER_THREAD,
    SMEM_BYTES,
    SWIZZLE_BYTES,
    UMMA_ROWS,
    WARPGROUP_THREADS,
    WGMMA_DEPTH,
    WGMMA_ROWS,
    registers_at_entry,
)
from ..layouts.tmem_map import TmemMap

HEAD_DIMS = range(8, 257, 8)  # 16 bytes are what TMA's strides count in; 256, what registers hold
SHORT_LEN_Q = 1024  # queries of up to so many rows are short
ELEMENT_BYTES = 2  # fp16 and bf16
BARRIER_BYTES = SWIZZLE_BYTES  # mbarriers, and the gap up to the first swizzled buffer


def padded_head_dim(head_dim: int) -> int:
    """Columns that a head takes in shared memory: the next multiple of the product's depth.

    The one rounding rule for loads and products. Columns past `head_dim` are zero-filled by TMA;
    those of O are not stored.
    """
    return -(-head_dim // WGMMA_DEPTH) * WGMMA_DEPTH


def check_head_dims(head_dim: int, head_dim_v: int) -> None:
    """Raises ValueError, naming it, for one that TMA or the registers do not take."""
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if value not in HEAD_DIMS:
            raise ValueError(
                f"{name}={value}: needs a multiple of {HEAD_DIMS.step} "
                f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
            )


@dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """What a kernel of one producer warpgroup and some consumers takes of an SM.

    Raises ValueError, naming the field and its value, for a row that the SM cannot run.
    """

    arch: str
    head_dim: int  # of Q and K
    head_dim_v: int  # of V and O
    consumer_warpgroups: int
    registers_load: int  # per thread of the producer warpgroup
    registers_consume: int  # per thread of a consumer warpgroup
    reason: str

    def __post_init__(self) -> None:
        if self.arch not in SMEM_BYTES:
            raise ValueError(f"arch={self.arch!r}: needs one of {sorted(SMEM_BYTES)}")
        check_head_dims(self.head_dim, self.head_dim_v)
        self.check_shape()
        for name in ("registers_load", "registers_consume"):
            if getattr(self, name) not in REGISTERS_PER_THREAD:
                raise ValueError(f"{name}={getattr(self, name)}: needs a multiple of 8, 24 to 256")
        entry = registers_at_entry(self.threads)
        if not self.registers_load <= entry <= self.registers_consume:
            raise ValueError(
                f"registers_load={self.registers_load}, registers_consume={self.registers_consume}:"
                f" setmaxnreg takes from and gives to {entry}"
            )
        if self.registers > entry * self.threads:
            raise ValueError(f"registers={self.registers}: a CTA gets {entry * self.threads}")
        if self.smem_bytes > SMEM_BYTES[self.arch]:
            raise ValueError(f"smem_bytes={self.smem_bytes}: a CTA has {SMEM_BYTES[self.arch]}")

    @abstractmethod
    def check_shape(self) -> None:
        """Raises ValueError for tiles that the tensor cores or the kernel do not take."""

    @property
    def threads(self) -> int:
        """Threads of one CTA: a producer warpgroup, then the consumers."""
        return WARPGROUP_THREADS * (1 + self.consumer_warpgroups)

    @property
    def registers(self) -> int:
        """Registers of one CTA once setmaxnreg has moved them to the consumers."""
        consume = self.consumer_warpgroups * self.registers_consume
        return WARPGROUP_THREADS * (self.registers_load + consume)

    @property
    @abstractmethod
    def smem_bytes(self) -> int:
        """Shared memory of one CTA."""


@dataclass(frozen=True, kw_only=True)
class Tiles(Row):
    """Shape and resources of one forward kernel; each consumer warpgroup owns 64 rows of Q."""

    tile_kv: int  # keys of one K/V stage
    stages_q: int
    stages_k: int
    stages_v: int
    ping_pong: bool  # consumer warpgroups take turns on the tensor cores
    ping_pong_full: bool | None = None  # the same where there is no mask; None: as with one
    short: bool = False  # serves short queries under a causal mask, and no others
    skip_unmoved: bool = False  # O is not multiplied where no row of the warp has a new maximum

    def check_shape(self) -> None:
        if self.tile_kv % WGMMA_DEPTH or not WGMMA_DEPTH <= self.tile_kv <= 256:
            raise ValueError(f"tile_kv={self.tile_kv}: needs a multiple of {WGMMA_DEPTH} up to 256")
        if self.consumer_warpgroups not in (1, 2, 3):
            raise ValueError(f"consumer_warpgroups={self.consumer_warpgroups}: needs 1, 2 or 3")
        for name in ("ping_pong", "ping_pong_full"):
            if getattr(self, name) and self.consumer_warpgroups == 1:
                raise ValueError(f"{name}=True: needs two consumer warpgroups to take turns")
        for name in ("stages_q", "stages_k", "stages_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: needs at least one stage")

    def turn_takers(self, causal: bool) -> int:
        """Consumer warpgroups that take turns with each other; 1: none waits."""
        masked = causal or self.ping_pong_full is None
        takes = self.ping_pong if masked else self.ping_pong_full
        return self.consumer_warpgroups if takes else 1

    @property
    def tile_q(self) -> int:
        """Query rows of a tile, which one CTA computes."""
        return WGMMA_ROWS * self.consumer_warpgroups

    @property
    def q_bytes(self) -> int:
        """One stage of Q, the tile."""
        return self.tile_q * padded_head_dim(self.head_dim) * ELEMENT_BYTES

    @property
    def k_bytes(self) -> int:
        """One stage of K."""
        return self.tile_kv * padded_head_dim(self.head_dim) * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """One stage of V."""
        return self.tile_kv * padded_head_dim(self.head_dim_v) * ELEMENT_BYTES

    @property
    def q_slabs(self) -> int:
        """Blocks of 64 rows of Q: one for each warpgroup in each stage."""
        return self.stages_q * self.consumer_warpgroups

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA."""
        k_and_v = self.stages_k * self.k_bytes + self.stages_v * self.v_bytes
        return BARRIER_BYTES + self.stages_q * self.q_bytes + k_and_v


# Head dims of a row are the largest that it serves. S, P and O take tile_kv / 2 + tile_kv / 4 +
# head_dim_v / 2 registers of a consumer thread; what is left of its registers holds all the rest.
FORWARD: tuple[Tiles, ...] = (
    Tiles(
        arch="sm_90a",
        head_dim=64,
        head_dim_v=64,
        tile_kv=128,
        consumer_warpgroups=3,
        stages_q=2,
        stages_k=2,
        stages_v=2,
        registers_load=32,
        registers_consume=160,
        ping_pong=True,
        reason="S, P and O take 128 registers a thread: a third warpgroup fits, 4 to 27 % faster "
        "than two at 4k and 16k; ping-pong is worth 3 to 5 % (H200, benchmarks/NOTES.md)",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=64,
        head_dim_v=64,
        tile_kv=128,
        consumer_warpgroups=2,
        stages_q=2,
        stages_k=2,
        stages_v=2,
        registers_load=40,
        registers_consume=232,
        ping_pong=True,
        short=True,
        reason="of short queries 192 rows waste more on the diagonal and at the end than 128: "
        "17 % faster at 512 and 1k, the same at 2k (H200)",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=96,
        head_dim_v=96,
        tile_kv=112,
        consumer_warpgroups=3,
        stages_q=2,
        stages_k=2,
        stages_v=2,
        registers_load=32,
        registers_consume=160,
        ping_pong=True,
        reason="S, P and O take 132 registers: a third warpgroup fits as at 64; "
        "at tile_kv 128 it spills 48 to 96 bytes, from head_dim 72 on. 158 KiB",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=112,
        head_dim_v=112,
        tile_kv=128,
        consumer_warpgroups=2,
        stages_q=2,
        stages_k=3,
        stages_v=3,
        registers_load=40,
        registers_consume=232,
        ping_pong=True,
        reason="as 128 but for the producer: with 24 registers it spills 8 bytes (CUDA 13.4, "
        "causal), because a tile of 112 columns is seven boxes; a third stage of K and "
        "V, for which 128 has no room, gains 1 to 5 % under a causal mask, else up to 1 % (H200)",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=128,
        head_dim_v=128,
        tile_kv=128,
        consumer_warpgroups=2,
        stages_q=2,
        stages_k=2,
        stages_v=2,
        registers_load=24,
        registers_consume=240,
        ping_pong=True,
        ping_pong_full=False,
        reason="193 KiB; S, P and O take 160 registers: a third warpgroup (160 each) would spill; "
        "turns gain 3 to 5 % under a causal mask and lose 1 to 2 % without (H200)",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=192,
        head_dim_v=128,
        tile_kv=128,
        consumer_warpgroups=2,
        stages_q=1,
        stages_k=2,
        stages_v=2,
        registers_load=40,
        registers_consume=232,
        ping_pong=True,
        skip_unmoved=True,
        reason="209 KiB: the tiles of 128 fit, a second stage of Q (48 KiB) does not; "
        "the producer is given what the consumers leave",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=192,
        head_dim_v=192,
        tile_kv=112,
        consumer_warpgroups=2,
        stages_q=1,
        stages_k=2,
        stages_v=2,
        registers_load=40,
        registers_consume=232,
        ping_pong=False,
        skip_unmoved=True,
        reason="217 KiB, the longest K/V tile of which two stages fit; S, P and O take 180; 1 % "
        "faster without turns (H200)",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=256,
        head_dim_v=256,
        tile_kv=80,
        consumer_warpgroups=2,
        stages_q=1,
        stages_k=2,
        stages_v=2,
        registers_load=40,
        registers_consume=232,
        ping_pong=True,
        skip_unmoved=True,
        reason="225 KiB, the longest K/V tile of which two stages fit; S, P and O take 188; with "
        "registers 24 and 240 the producer spills 16 bytes (CUDA 13.4, causal); to multiply O only "
        "where a maximum moved is worth 2 to 4 % (at head_dim 128 it costs 3 to 7 %: the branch "
        "keeps the multiplications from hiding under the exponentials)",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=256,
        head_dim_v=256,
        tile_kv=80,
        consumer_warpgroups=2,
        stages_q=1,
        stages_k=2,
        stages_v=2,
        registers_load=40,
        registers_consume=232,
        ping_pong=True,
        short=True,
        reason="of few keys the maximum moves in nearly every tile: 4 % faster without the branch "
        "at 1k",
    ),
)


def forward_tiles(arch: str, head_dim: int, head_dim_v: int, short: bool = False) -> Tiles:
    """The smallest forward row that holds these head dims, as the tiles of exactly these.

    With `short`, the one for short queries under a causal mask, if there is one of that size.

    Raises LookupError, listing the rows there are, when none of them does; ValueError when one
    holds them but they are no multiples of 8.
    """
    rows = sorted((row for row in FORWARD if row.short <= short), key=lambda row: not row.short)
    return _smallest("forward", rows, arch, head_dim, head_dim_v)


BLACKWELL = ("sm_100a", "sm_103a")
SINGLE_ROWS = 2 * UMMA_ROWS  # of queries, up to which a pair of CTAs would be one and an idle one
STATS_BYTES = 4  # of a row: alpha


@dataclass(frozen=True, kw_only=True)
class BlackwellTiles:
    """Shape and resources of one forward kernel on tensor memory; a tile of Q has 128 rows.

    Raises ValueError, naming the field and its value, for a row that the SM cannot run.
    """

    head_dim: int  # of Q and K
    head_dim_v: int  # of V and O
    q_tiles: int  # of a CTA, with a softmax warpgroup each
    stages_kv: int  # K and V take turns in one ring
    borrow_q_as_o: bool  # O leaves through the shared memory of Q
    registers_softmax: int
    registers_correction: int
    registers_other: int  # of the warps that load, issue products and store
    fma_pairs: int  # of 8 pairs of exponentials, on the FMA units
    reason: str
    pair: bool = False  # two CTAs, half of K and of V each, which the products of both read
    launch_queue: bool = False  # tiles of Q come from cluster launch control, not from a counter
    tile_kv: int = field(default=128, init=False)
    early_keys: int = field(default=96, init=False)  # of P, before it is handed over
    rescale_log2: float = 8.0  # the maximum lags by so much at most: P up to 256 fits 16 bits
    flat: float = 16.0  # it lags only where l is so many times the largest P: docs/blackwell.md

    def __post_init__(self) -> None:
        check_head_dims(self.head_dim, self.head_dim_v)
        if self.q_tiles not in (1, 2):
            raise ValueError(f"q_tiles={self.q_tiles}: needs 1 or 2")
        if self.stages_kv < 2:
            raise ValueError(f"stages_kv={self.stages_kv}: needs one of K and one of V")
        if self.pair and self.launch_queue:
            raise ValueError("launch_queue=True: pairs take their tiles in fixed turns")
        held = self.q_tiles * self.registers_softmax + self.registers_correction
        total = WARPGROUP_THREADS * (held + self.registers_other)
        if total > REGISTER_FILE:
            raise ValueError(f"registers={total}: an SM has {REGISTER_FILE}")
        if self.smem_bytes > SMEM_BYTES["sm_100a"]:
            raise ValueError(f"smem_bytes={self.smem_bytes}: a CTA has {SMEM_BYTES['sm_100a']}")
        _ = self.tmem

    @property
    def ctas(self) -> int:
        """That share a tile of K and of V."""
        return 2 if self.pair else 1

    @property
    def tmem(self) -> TmemMap:
        """Columns of tensor memory."""
        out = self.q_tiles * padded_head_dim(self.head_dim_v)
        return TmemMap({"s": (0, 2 * self.tile_kv), "o": (2 * self.tile_kv, out)})

    @property
    def q_bytes(self) -> int:
        """One tile of Q; where O borrows it, large enough for either."""
        columns = padded_head_dim(self.head_dim)
        if self.borrow_q_as_o:
            columns = max(columns, padded_head_dim(self.head_dim_v))
        return UMMA_ROWS * columns * ELEMENT_BYTES

    @property
    def o_bytes(self) -> int:
        """One tile of O; as far apart as those of Q where it borrows them."""
        if self.borrow_q_as_o:
            return self.q_bytes
        return UMMA_ROWS * padded_head_dim(self.head_dim_v) * ELEMENT_BYTES

    @property
    def k_bytes(self) -> int:
        """One tile of K, or this CTA's half: of its keys."""
        return self.tile_kv * padded_head_dim(self.head_dim) * ELEMENT_BYTES // self.ctas

    @property
    def v_bytes(self) -> int:
        """One tile of V, or this CTA's half: of its columns."""
        return self.tile_kv * padded_head_dim(self.head_dim_v) * ELEMENT_BYTES // self.ctas

    @property
    def kv_bytes(self) -> int:
        """One stage of the ring."""
        return max(self.k_bytes, self.v_bytes)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA."""
        stats = self.q_tiles * UMMA_ROWS * STATS_BYTES
        out = 0 if self.borrow_q_as_o else self.o_bytes
        small = -(-(BARRIER_BYTES + stats) // SWIZZLE_BYTES) * SWIZZLE_BYTES
        return small + self.q_tiles * (self.q_bytes + out) + self.stages_kv * self.kv_bytes


FORWARD_BLACKWELL: tuple[BlackwellTiles, ...] = (
    BlackwellTiles(
        head_dim=64,
        head_dim_v=64,
        q_tiles=2,
        stages_kv=10,
        borrow_q_as_o=False,
        registers_softmax=192,
        registers_correction=72,
        registers_other=56,
        fma_pairs=3,
        reason="226 KiB",
    ),
    BlackwellTiles(
        head_dim=96,
        head_dim_v=96,
        q_tiles=2,
        stages_kv=5,
        borrow_q_as_o=False,
        registers_softmax=192,
        registers_correction=72,
        registers_other=56,
        fma_pairs=3,
        reason="218 KiB",
    ),
    BlackwellTiles(
        head_dim=128,
        head_dim_v=128,
        q_tiles=2,
        stages_kv=3,
        borrow_q_as_o=False,
        registers_softmax=192,
        registers_correction=72,
        registers_other=56,
        fma_pairs=3,
        reason="226 KiB",
    ),
    BlackwellTiles(
        head_dim=128,
        head_dim_v=128,
        q_tiles=2,
        stages_kv=6,
        borrow_q_as_o=False,
        registers_softmax=192,
        registers_correction=72,
        registers_other=56,
        fma_pairs=2,
        pair=True,
        reason="226 KiB; each CTA loads and reads half of K and V: half of the traffic",
    ),
    BlackwellTiles(
        head_dim=192,
        head_dim_v=128,
        q_tiles=2,
        stages_kv=2,
        borrow_q_as_o=True,
        registers_softmax=192,
        registers_correction=72,
        registers_other=56,
        fma_pairs=2,
        reason="194 KiB; a third stage, or smem for O, does not fit",
    ),
    BlackwellTiles(
        head_dim=256,
        head_dim_v=256,
        q_tiles=1,
        stages_kv=2,
        borrow_q_as_o=True,
        registers_softmax=240,
        registers_correction=160,
        registers_other=80,
        fma_pairs=2,
        reason="194 KiB; O takes 256 columns of TMEM, which leaves two buffers of S for one tile",
    ),
)


def has_pair(head_dim: int, head_dim_v: int) -> bool:
    """Whether there is a row for a pair of CTAs of these head dims."""
    return any(
        (row.head_dim, row.head_dim_v, row.pair) == (head_dim, head_dim_v, True)
        for row in FORWARD_BLACKWELL
    )


def blackwell_tiles(
    arch: str, head_dim: int, head_dim_v: int, pair: bool = False
) -> BlackwellTiles:
    """The smallest row of the table that holds these head dims, as the tiles of exactly these.

    One for a pair of CTAs serves its own head dims alone.

    On sm_103a, whose MUFU does twice as many exponentials a clock, none goes to the FMA units.

    Raises LookupError when no row does; ValueError when they are no multiples of 8.
    """
    holds = [
        row
        for row in FORWARD_BLACKWELL
        if row.head_dim >= head_dim and row.head_dim_v >= head_dim_v and row.pair == pair
        if not pair or (row.head_dim, row.head_dim_v) == (head_dim, head_dim_v)
    ]
    if arch not in BLACKWELL or not holds:
        raise LookupError(f"no forward tiles for {arch} at head_dim={head_dim}/{head_dim_v}")
    row = min(holds, key=lambda row: row.head_dim + row.head_dim_v)
    pairs = 0 if arch == "sm_103a" else row.fma_pairs
    return replace(row, head_dim=head_dim, head_dim_v=head_dim_v, fma_pairs=pairs)


SPLIT_COLUMNS = 64  # and multiples of them are split between two warpgroups


@dataclass(frozen=True, kw_only=True)
class BackwardTiles(Row):
    """Shape and resources of the main kernel of Hopper's backward.

    Warpgroup 0 loads and computes dQ; the two consumers split the K/V tile by `keys`: each has dK
    and dV of 64 keys, and P and dS stay in its registers. Or, where registers do not hold so much,
    by `columns`: each has half of the columns of dK and dV, computes half of the scores, and hands
    them over in shared memory.
    """

    split: Literal["keys", "columns"]
    tile_q: int  # queries of one stage
    stages: int  # of Q and of dO
    dq_rows: int  # of dQ, computed at once
    consumer_warpgroups: int = field(default=2, init=False)

    ctas = 1  # that share a tile
    turns = 1  # who takes turns at a tile of dQ
    dq_by_warps = False  # in the workspace: a block's quads run over all of the warpgroup
    rows_apart = False  # there: LSE and D of a row side by side

    def check_shape(self) -> None:
        if self.split not in ("keys", "columns"):
            raise ValueError(f"split={self.split!r}: needs 'keys' or 'columns'")
        parts = 1 if self.split == "keys" else self.consumer_warpgroups
        slices = WGMMA_DEPTH * parts  # a warpgroup computes its part of the scores by these
        if self.tile_q % slices or not 0 < self.tile_q <= 256:
            raise ValueError(f"tile_q={self.tile_q}: needs a multiple of {slices} up to 256")
        if self.dq_rows <= 0 or self.dq_rows % WGMMA_DEPTH or self.tile_q % self.dq_rows:
            raise ValueError(
                f"dq_rows={self.dq_rows}: needs a multiple of {WGMMA_DEPTH} that divides "
                f"tile_q={self.tile_q}"
            )
        if self.stages < 2:
            raise ValueError(f"stages={self.stages}: needs one to read while another is loaded")

    ds_stages = 2  # of dS and P: one is read while the other is written

    @property
    def tile_kv(self) -> int:
        """Keys of a tile, which one CTA computes."""
        return WGMMA_ROWS * (self.consumer_warpgroups if self.split == "keys" else 1)

    def _split_columns(self, head_dim: int) -> int:
        """Columns whose halves are whole swizzle patterns, of 64 bytes at least."""
        return -(-head_dim // SPLIT_COLUMNS) * SPLIT_COLUMNS

    @property
    def dq_columns(self) -> int:
        """Columns of K's tile and of the dQ accumulator: the one rule for all three kernels."""
        return self._split_columns(self.head_dim)

    @property
    def q_columns(self) -> int:
        """Columns of Q's tile and of dK."""
        if self.split == "columns":
            return self.dq_columns
        return padded_head_dim(self.head_dim)

    @property
    def v_columns(self) -> int:
        """Columns of V's and dO's tile and of dV."""
        if self.split == "columns":
            return self._split_columns(self.head_dim_v)
        return padded_head_dim(self.head_dim_v)

    @property
    def k_bytes(self) -> int:
        """The tile of K."""
        return self.tile_kv * self.dq_columns * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """The tile of V."""
        return self.tile_kv * self.v_columns * ELEMENT_BYTES

    @property
    def row_bytes(self) -> int:
        """LSE and D of a tile of Q, in float32."""
        return 8 * self.tile_q

    @property
    def q_bytes(self) -> int:
        """One stage of Q, with its LSE and D."""
        return self.tile_q * self.q_columns * ELEMENT_BYTES + self.row_bytes

    @property
    def do_bytes(self) -> int:
        """One stage of dO."""
        return self.tile_q * self.v_columns * ELEMENT_BYTES

    @property
    def exchange_bytes(self) -> int:
        """dS, and where it is not in registers P, of a tile: what the warpgroups hand over."""
        tiles = self.ds_stages * (1 if self.split == "keys" else 2)
        return tiles * self.tile_kv * self.tile_q * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA."""
        rings = self.stages * (self.q_bytes + self.do_bytes)
        return BARRIER_BYTES + self.k_bytes + self.v_bytes + rings + self.exchange_bytes

    @property
    def dq_block(self) -> tuple[int, int]:
        """(columns, rows) of the blocks that dQ is computed in, one after the other, transposed."""
        return WGMMA_ROWS, self.dq_rows

    @property
    def dq_blocks(self) -> int:
        """Blocks of the dQ of a tile of Q."""
        return self.dq_columns // WGMMA_ROWS * (self.tile_q // self.dq_rows)

    def workspace_floats(self, batch: int, heads_q: int, len_q: int, turns: bool) -> int:
        """The dQ accumulator, LSE and D, in float32, and with `turns` one for each tile of Q."""
        q_tiles = batch * heads_q * -(-len_q // self.tile_q)
        return q_tiles * (self.tile_q * (self.dq_columns + 2) + turns * self.turns)


# Head dims of a row are the largest that it serves. Of a consumer thread, S and dP take tile_q
# registers, or half of them where the split is by columns, dK and dV (head_dim + head_dim_v) / 2;
# of a reducing one, a block of dQ takes dq_rows / 2. ptxas wants 32 more for all else: with 24 it
# waits for each product before the next.
BACKWARD: tuple[BackwardTiles, ...] = (
    BackwardTiles(
        arch="sm_90a",
        head_dim=64,
        head_dim_v=64,
        split="keys",
        tile_q=96,
        stages=3,
        dq_rows=48,
        registers_load=120,
        registers_consume=192,
        reason="S, dP, dK and dV take 160 registers; 64, 80 and 112 rows are 10, 6 and 4 % slower, "
        "128 with dQ by 32 rows 2 %; dQ by 32 rows 4 % (H200)",
    ),
    BackwardTiles(
        arch="sm_90a",
        head_dim=96,
        head_dim_v=96,
        split="keys",
        tile_q=80,
        stages=3,
        dq_rows=80,
        registers_load=88,
        registers_consume=208,
        reason="S, dP, dK and dV take 176 registers",
    ),
    BackwardTiles(
        arch="sm_90a",
        head_dim=128,
        head_dim_v=128,
        split="keys",
        tile_q=64,
        stages=3,
        dq_rows=32,
        registers_load=56,
        registers_consume=224,
        reason="S, dP, dK and dV take 192 registers, which leaves the reducing warpgroup 16 for "
        "dQ; 48 rows, with dQ in one piece, are 5 % slower (H200)",
    ),
    BackwardTiles(
        arch="sm_90a",
        head_dim=256,
        head_dim_v=256,
        split="columns",
        tile_q=64,
        stages=2,
        dq_rows=64,
        registers_load=104,
        registers_consume=200,
        reason="226 KiB; of 64 keys dK and dV take 256 registers, so that a warpgroup holds half",
    ),
)


def backward_tiles(arch: str, head_dim: int, head_dim_v: int) -> BackwardTiles:
    """The smallest backward row that holds these head dims, as the tiles of exactly these.

    Raises LookupError, listing the rows there are, when none of them does; ValueError when one
    holds them but they are no multiples of 8.
    """
    return _smallest("backward", BACKWARD, arch, head_dim, head_dim_v)


AnyTiles = TypeVar("AnyTiles", Tiles, BackwardTiles)


def _smallest(
    which: str, table: Sequence[AnyTiles], arch: str, head_dim: int, head_dim_v: int
) -> AnyTiles:
    """The smallest row that holds these head dims, the first of two, as the tiles of exactly these.

    Raises as the functions that call it say.
    """
    rows = [row for row in table if row.arch == arch]
    holds = [row for row in rows if row.head_dim >= head_dim and row.head_dim_v >= head_dim_v]
    if not holds:
        raise LookupError(
            f"no {which} tiles for {arch} at head_dim={head_dim}, head_dim_v={head_dim_v}; "
            f"its rows go up to {[(row.head_dim, row.head_dim_v) for row in rows]}"
        )
    smallest = min(holds, key=lambda row: row.head_dim + row.head_dim_v)
    return replace(smallest, head_dim=head_dim, head_dim_v=head_dim_v)
