"""Tile configurations of Blackwell's backward. Nothing here imports the compiler."""

from dataclasses import dataclass, replace
from typing import Literal

from ..layouts.hardware import (
    REGISTER_FILE,
    REGISTERS_PER_THREAD,
    SMEM_BYTES,
    SWIZZLE_BYTES,
    UMMA_ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    registers_at_entry,
)
from ..layouts.tmem_map import TmemMap
from .tiles import BARRIER_BYTES, BLACKWELL, ELEMENT_BYTES, check_head_dims

PAIR_COLUMNS = 32  # that the halves of a product by a pair are whole multiples of, both together
COLUMNS = 16
THREADS = 4 * WARPGROUP_THREADS
DQ_COLUMNS = 16  # of dQ, which a thread hands to the bulk reduction at once
DQ_STAGES = 2  # of such
ROWS_STAGES = 2  # of LSE and D


@dataclass(frozen=True, kw_only=True)
class BlackwellBackwardTiles:
    """Shape and resources of the main kernel of Blackwell's backward; a tile of Q has 128 rows.

    A CTA has 128 keys, and P and dS are operands in tensor memory. Of a pair of CTAs each loads
    half of what its products read as B; they exchange halves of dS, and each adds half of dQ: of
    two tiles of Q one each, or, where shared or tensor memory has no room for that (`dq_tiles`),
    half of the rows of each. Where tensor memory has no room for dK and dV of 128 keys a CTA of a
    pair has 64 (`folded`): the columns of its accumulators are in two halves, one in the lanes
    behind the other, and P and dS are operands in shared memory.

    Raises ValueError, naming the field and its value, for a row that the SM cannot run.
    """

    head_dim: int  # of Q and K
    head_dim_v: int  # of V and dO
    stages: int  # of the ring of Q and dO
    borrow_as_dq: Literal["s", "dp"] | None  # what dQ takes the place of; None: it has its own
    fma_pairs: int  # of 8 pairs of exponentials, on the FMA units
    reason: str
    score_buffers: int = 1  # of S
    pair: bool = False
    folded: bool = False
    dq_tiles: int = 1  # of Q, whose dQ is one product: of two, each CTA of a pair has one
    registers_reduce: int = 88
    registers_compute: int = 168  # of two warpgroups; with 152, 80 bytes are spilled at 128
    registers_other: int = 88  # of the warps that load and issue products

    tile_q = 128
    dq_by_warps = True  # in the workspace: a warp's part of a block is in one piece
    rows_apart = True  # there: LSE of a tile, then its D, each read on its own

    def __post_init__(self) -> None:
        check_head_dims(self.head_dim, self.head_dim_v)
        if self.borrow_as_dq not in ("s", "dp", None):
            raise ValueError(f"borrow_as_dq={self.borrow_as_dq!r}: needs 's', 'dp' or None")
        if self.borrow_as_dq == "s" and self.score_buffers < 2:
            raise ValueError("borrow_as_dq='s': needs score_buffers=2, or S comes too late")
        if self.folded and not self.pair:
            raise ValueError("folded=True: the accumulators of a pair alone")
        if self.dq_tiles not in (1, self.ctas):
            raise ValueError(f"dq_tiles={self.dq_tiles}: needs 1, or of a pair 2")
        if self.dq_tiles == 2 and self.borrow_as_dq == "s":
            raise ValueError("dq_tiles=2: dQ of two tiles takes the place of dP, or has its own")
        if self.score_buffers not in (1, 2):
            raise ValueError(f"score_buffers={self.score_buffers}: needs 1 or 2")
        # All that comes before Q of the second tile, where S is computed that early, and stays.
        least = 2 if self.score_buffers == 1 else 4 if self.pair else 3
        if self.stages < least:
            raise ValueError(f"stages={self.stages}: needs {least} or more")
        if self.fma_pairs not in range(9):
            raise ValueError(f"fma_pairs={self.fma_pairs}: needs 0 to 8, of 8 pairs")
        entry = registers_at_entry(THREADS)
        for name in ("registers_reduce", "registers_compute", "registers_other"):
            value = getattr(self, name)
            if value not in REGISTERS_PER_THREAD:
                raise ValueError(f"{name}={value}: needs a multiple of 8, 24 to 256")
            if (value < entry) if name == "registers_compute" else (value > entry):
                raise ValueError(f"{name}={value}: setmaxnreg takes from and gives to {entry}")
        held = self.registers_reduce + 2 * self.registers_compute + self.registers_other
        if WARPGROUP_THREADS * held > REGISTER_FILE:
            total = WARPGROUP_THREADS * held
            raise ValueError(f"registers={total}: an SM has {REGISTER_FILE}")
        if self.smem_bytes > SMEM_BYTES["sm_100a"]:
            raise ValueError(f"smem_bytes={self.smem_bytes}: a CTA has {SMEM_BYTES['sm_100a']}")
        if self.borrow_as_dq and self.dq_tmem_columns > self.score_columns:
            raise ValueError(f"borrow_as_dq={self.borrow_as_dq!r}: dQ has more columns")
        _ = self.tmem

    @property
    def ctas(self) -> int:
        """That share a tile of K and of V."""
        return 2 if self.pair else 1

    @property
    def tile_kv(self) -> int:
        """Keys of a tile, which one CTA, or a pair, computes."""
        return UMMA_ROWS if self.folded else UMMA_ROWS * self.ctas

    @property
    def keys(self) -> int:
        """Of them, of one CTA."""
        return self.tile_kv // self.ctas

    def _columns(self, head_dim: int) -> int:
        granule = PAIR_COLUMNS if self.pair else COLUMNS
        return -(-head_dim // granule) * granule

    @property
    def columns(self) -> int:
        """Columns of Q, K, dQ and dK, in shared and in tensor memory; those past the head are 0."""
        return self._columns(self.head_dim)

    @property
    def columns_v(self) -> int:
        """Columns of V, dO and dV."""
        return self._columns(self.head_dim_v)

    @property
    def score_columns(self) -> int:
        """Columns of tensor memory that S takes, and dP."""
        return self.tile_q // 2 if self.folded else self.tile_q

    @property
    def dq_tmem_columns(self) -> int:
        """Columns of tensor memory that dQ takes: a pair's of one tile is folded."""
        return self.columns * self.dq_rows // UMMA_ROWS

    @property
    def tmem(self) -> TmemMap:
        """Columns of tensor memory."""
        folds = 2 if self.folded else 1
        sizes = {
            "s": self.score_buffers * self.score_columns,
            "dp": self.score_columns,
            "dv": self.columns_v // folds,
            "dk": self.columns // folds,
        }
        if self.borrow_as_dq is None:
            sizes["dq"] = self.dq_tmem_columns
        plan, first = {}, 0
        for name, size in sizes.items():
            plan[name] = (first, size)
            first += size
        return TmemMap(plan)

    @property
    def slot_bytes(self) -> int:
        """One stage of the ring: a tile of Q or dO, of a pair half of it."""
        return max(self.q_bytes, self.do_bytes)

    @property
    def q_bytes(self) -> int:
        """What a load of Q brings."""
        return self.tile_q * self.columns * ELEMENT_BYTES // self.ctas

    @property
    def do_bytes(self) -> int:
        """What a load of dO brings."""
        return self.tile_q * self.columns_v * ELEMENT_BYTES // self.ctas

    @property
    def k_bytes(self) -> int:
        """This CTA's keys of K; and, of a pair, its half of the columns of all keys."""
        return self.keys * self.columns * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """This CTA's keys of V."""
        return self.keys * self.columns_v * ELEMENT_BYTES

    @property
    def ds_bytes(self) -> int:
        """dS as the operand of dQ: all keys."""
        return self.tile_kv * self.dq_rows * ELEMENT_BYTES

    @property
    def row_bytes(self) -> int:
        """LSE and D of a tile of Q, in float32."""
        return 8 * self.tile_q

    @property
    def scores_bytes(self) -> int:
        """P and dS as operands of dV and dK, where they are in shared memory."""
        return 2 * self.keys * self.tile_q * ELEMENT_BYTES if self.folded else 0

    @property
    def dq_bytes(self) -> int:
        """On the way from tensor memory to global memory."""
        return DQ_STAGES * WARPGROUP_THREADS * DQ_COLUMNS * 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA."""
        small = BARRIER_BYTES + ROWS_STAGES * self.row_bytes
        small = -(-small // SWIZZLE_BYTES) * SWIZZLE_BYTES
        keys = self.k_bytes * (2 if self.pair else 1) + self.v_bytes
        ring = self.stages * self.slot_bytes
        return small + keys + ring + self.ds_bytes + self.scores_bytes + self.dq_bytes

    @property
    def dq_columns(self) -> int:
        """Columns of the dQ accumulator in global memory."""
        return self.columns

    @property
    def dq_block(self) -> tuple[int, int]:
        """(columns, rows) of the blocks of dQ: what one CTA adds."""
        return self.columns, self.dq_rows

    @property
    def dq_rows(self) -> int:
        """Rows of a block."""
        return self.tile_q * self.dq_tiles // self.ctas

    @property
    def dq_blocks(self) -> int:
        """Blocks of the dQ of a tile of Q."""
        return self.tile_q // self.dq_rows

    @property
    def turns(self) -> int:
        """Who takes turns at a tile of dQ, each for itself: the warps that add its blocks."""
        return WARPGROUP_WARPS * self.dq_blocks

    def workspace_floats(self, batch: int, heads_q: int, len_q: int, turns: bool) -> int:
        """The dQ accumulator, LSE and D, in float32, and with `turns` its counters."""
        q_tiles = batch * heads_q * -(-len_q // self.tile_q)
        return q_tiles * (self.tile_q * (self.dq_columns + 2) + turns * self.turns)


BACKWARD_BLACKWELL: tuple[BlackwellBackwardTiles, ...] = (
    BlackwellBackwardTiles(
        head_dim=64,
        head_dim_v=64,
        stages=8,
        score_buffers=2,
        borrow_as_dq="s",
        fma_pairs=2,
        reason="211 KiB; products take 1,280 clocks a tile, exponentials 1,024 and dS after them: "
        "S of the next tile must be there when dS is done, and tensor memory has room for it",
    ),
    BlackwellBackwardTiles(
        head_dim=96,
        head_dim_v=96,
        stages=5,
        borrow_as_dq="dp",
        fma_pairs=0,
        reason="219 KiB; S of the next tile takes the place of P and dS as soon as dK is computed",
    ),
    BlackwellBackwardTiles(
        head_dim=120,
        head_dim_v=120,
        stages=3,
        borrow_as_dq="dp",
        fma_pairs=0,
        reason="211 KiB",
    ),
    BlackwellBackwardTiles(
        head_dim=128,
        head_dim_v=128,
        stages=3,
        borrow_as_dq="dp",
        pair=True,
        dq_tiles=2,
        fma_pairs=0,
        reason="227 KiB; a load for each product, half of its B; instead of a fourth stage dS of "
        "two tiles, whose dQ, computed at once, reads half of the bytes of K",
    ),
    BlackwellBackwardTiles(
        head_dim=192,
        head_dim_v=128,
        stages=3,
        borrow_as_dq=None,
        pair=True,
        folded=True,
        fma_pairs=0,
        reason="203 KiB; of 128 keys dK and dV would leave 192 columns to S, dP and dQ",
    ),
    BlackwellBackwardTiles(
        head_dim=256,
        head_dim_v=256,
        stages=2,
        borrow_as_dq=None,
        pair=True,
        folded=True,
        fma_pairs=0,
        reason="227 KiB; of 128 keys dK and dV would take all of tensor memory",
    ),
)


def blackwell_backward_tiles(arch: str, head_dim: int, head_dim_v: int) -> BlackwellBackwardTiles:
    """The smallest row that holds these head dims, as the tiles of exactly these.

    On sm_103a, whose MUFU does twice as many exponentials a clock, none goes to the FMA units.

    Raises LookupError when no row does; ValueError when they are no multiples of 8.
    """
    holds = [
        row
        for row in BACKWARD_BLACKWELL
        if row.head_dim >= head_dim and row.head_dim_v >= head_dim_v
    ]
    if arch not in BLACKWELL or not holds:
        raise LookupError(f"no backward tiles for {arch} at head_dim={head_dim}/{head_dim_v}")
    row = min(holds, key=lambda row: row.head_dim + row.head_dim_v)
    pairs = 0 if arch == "sm_103a" else row.fma_pairs
    return replace(row, head_dim=head_dim, head_dim_v=head_dim_v, fma_pairs=pairs)
