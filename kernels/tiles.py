"""Tile configurations: one table per SM, keyed by named fields, with the reason beside each row.

A row is checked when it is made: shared memory, the register file, and the shapes that the tensor
cores take. Nothing here imports the compiler, so tables can be read and printed anywhere.
"""

from dataclasses import dataclass

ELEMENT_BYTES = 2  # fp16 and bf16
MMA_ROWS = 64  # rows of one wgmma, hence of one consumer warpgroup
MMA_K = 16  # depth of one wgmma for 16-bit operands
WARPGROUP_THREADS = 128
SMEM_BYTES = {"sm_90a": 227 * 1024}
SMEM_RESERVED_BYTES = 1024  # mbarriers, and the gap before the first swizzle atom
REGISTER_FILE = 65536
REGISTERS_PER_THREAD = range(24, 257, 8)  # what setmaxnreg accepts


def padded_head_dim(head_dim: int) -> int:
    """Columns that a head takes in shared memory: the next multiple of the product's depth.

    The one rounding rule for loads, products and stores. Columns past `head_dim` are zero-filled by
    TMA when loaded and clipped by it when stored.
    """
    return -(-head_dim // MMA_K) * MMA_K


@dataclass(frozen=True)
class Tiles:
    """Shape and resources of one kernel on one SM.

    Raises ValueError, naming the field and its value, for a row that the SM cannot run.
    """

    arch: str
    head_dim: int  # of Q and K
    head_dim_v: int  # of V and O
    tile_kv: int  # keys per K/V stage
    consumer_warpgroups: int  # each owns 64 rows of Q
    stages_k: int
    stages_v: int
    registers_load: int  # per thread of the producer warpgroup
    registers_consume: int  # per thread of a consumer warpgroup
    ping_pong: bool  # consumer warpgroups take turns on the tensor cores
    reason: str

    def __post_init__(self) -> None:
        if self.arch not in SMEM_BYTES:
            raise ValueError(f"arch={self.arch!r}: expected one of {sorted(SMEM_BYTES)}")
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value % 8 or not 8 <= value <= 256:
                raise ValueError(f"{name}={value}: needs a multiple of 8 from 8 to 256")
        if self.tile_kv % MMA_K or not MMA_K <= self.tile_kv <= 256:
            raise ValueError(f"tile_kv={self.tile_kv}: needs a multiple of {MMA_K} up to 256")
        if self.consumer_warpgroups not in (1, 2, 3):
            raise ValueError(f"consumer_warpgroups={self.consumer_warpgroups}: needs 1, 2 or 3")
        if self.ping_pong and self.consumer_warpgroups == 1:
            raise ValueError("ping_pong=True: needs two consumer warpgroups to take turns")
        for name in ("stages_k", "stages_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: needs at least one stage")
        for name in ("registers_load", "registers_consume"):
            if getattr(self, name) not in REGISTERS_PER_THREAD:
                raise ValueError(f"{name}={getattr(self, name)}: needs a multiple of 8, 24 to 256")
        if self.registers > REGISTER_FILE:
            raise ValueError(f"registers={self.registers}: an SM has {REGISTER_FILE}")
        if self.smem_bytes > SMEM_BYTES[self.arch]:
            raise ValueError(f"smem_bytes={self.smem_bytes}: {self.arch} has {SMEM_BYTES[self.arch]}")

    @property
    def tile_q(self) -> int:
        """Query rows of one CTA."""
        return MMA_ROWS * self.consumer_warpgroups

    @property
    def q_bytes(self) -> int:
        """The tile of Q."""
        return self.tile_q * padded_head_dim(self.head_dim) * ELEMENT_BYTES

    @property
    def slab_elements(self) -> int:
        """One warpgroup's rows of Q, or of O, which borrows their place in the epilogue."""
        return MMA_ROWS * max(padded_head_dim(self.head_dim), padded_head_dim(self.head_dim_v))

    @property
    def k_bytes(self) -> int:
        """One stage of K."""
        return self.tile_kv * padded_head_dim(self.head_dim) * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """One stage of V."""
        return self.tile_kv * padded_head_dim(self.head_dim_v) * ELEMENT_BYTES

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA, at most."""
        slabs = self.consumer_warpgroups * self.slab_elements * ELEMENT_BYTES
        rings = self.stages_k * self.k_bytes + self.stages_v * self.v_bytes
        return slabs + rings + SMEM_RESERVED_BYTES

    @property
    def registers(self) -> int:
        """Registers of one CTA once setmaxnreg has moved them to the consumers."""
        per_column = self.registers_load + self.consumer_warpgroups * self.registers_consume
        return WARPGROUP_THREADS * per_column


FORWARD: tuple[Tiles, ...] = (
    Tiles(
        arch="sm_90a",
        head_dim=64,
        head_dim_v=64,
        tile_kv=128,
        consumer_warpgroups=2,
        stages_k=2,
        stages_v=2,
        registers_load=24,
        registers_consume=240,
        ping_pong=True,
        reason="80 KiB; S, P and O take 128 registers a thread: room for both products in flight",
    ),
    Tiles(
        arch="sm_90a",
        head_dim=128,
        head_dim_v=128,
        tile_kv=128,
        consumer_warpgroups=2,
        stages_k=2,
        stages_v=2,
        registers_load=24,
        registers_consume=240,
        ping_pong=True,
        reason="161 KiB; wider tiles (160, 176) lost up to 5 %, a third warpgroup spills",
    ),
)


def forward_tiles(arch: str, head_dim: int, head_dim_v: int) -> Tiles:
    """The forward row for these head dims.

    Raises LookupError, listing the head dims there are, when the table has no such row.
    """
    rows = {(row.head_dim, row.head_dim_v): row for row in FORWARD if row.arch == arch}
    if (head_dim, head_dim_v) not in rows:
        raise LookupError(
            f"no forward tiles for {arch} at head_dim={head_dim}, head_dim_v={head_dim_v}; "
            f"there are {sorted(rows)}"
        )
    return rows[head_dim, head_dim_v]
