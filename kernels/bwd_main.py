"""What backward's main kernels of all SMs have in common: which tiles of Q a K/V tile visits, in
which order, and in deterministic mode when it may add to their dQ."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..layouts.hardware import L2_BYTES, SMS
from ..pipelines.tile_order import TileOrder
from . import BackwardFacts
from .bwd_workspace import Workspace
from .forward import DTYPES
from .mask import Mask
from .tiles import ELEMENT_BYTES, BackwardTiles
from .tiles_bwd_sm100 import BlackwellBackwardTiles


@dataclass(frozen=True)
class Keys:
    """The K/V tile that a CTA is at, and the tiles of Q that see it, [begin, end) of every head."""

    first: Int32  # in its sequence
    head: Int32  # of K and V
    batch: Int32
    mask: Mask
    begin: Int32
    full: Int32  # [full, end) need no mask
    end: Int32
    start: Int32  # the tile of Q that comes first: from there to the end, then from the beginning

    def after(self, q_tile: Int32, head: Int32) -> tuple[Int32, Int32]:
        """The tile of Q that comes next, and its head."""
        following = cutlass.select_(q_tile + 1 == self.end, self.begin, q_tile + 1)
        return following, cutlass.select_(following == self.start, head + 1, head)

    def turned(self, q_tile: Int32) -> Int32:
        """That many tiles after the first as `q_tile` is after `begin`."""
        turned = q_tile - self.begin + self.start
        return cutlass.select_(turned < self.end, turned, turned - self.end + self.begin)


class BwdMain:
    """A main kernel for one set of compile-time facts and one row of a tile table.

    `args` has q, (len_q, ...), k, (len_kv, ...), and the order of tiles, and how many SMs there
    are.
    """

    def __init__(self, facts: BackwardFacts, tiles: BackwardTiles | BlackwellBackwardTiles) -> None:
        self.facts = facts
        self.dtype = DTYPES[facts.dtype]
        self.by_rows = tiles.tile_q, tiles.tile_kv, tiles.dq_columns, tiles.ctas

    def order(self, q: cute.Tensor, k: cute.Tensor) -> TileOrder:
        """Host code: the order of K/V tiles; q and k are (batch, len, heads, head_dim)."""
        _, tile_kv, _, _ = self.by_rows
        batch, len_kv, heads_kv, _ = k.shape
        tiles = cute.ceil_div(len_kv, tile_kv)
        start = None
        if const_expr(self.facts.causal):
            # In deterministic mode the shortest first: what waits for nobody (see `rank`).
            start = "last" if const_expr(self.facts.deterministic) else "first"
        return TileOrder(
            tiles=tiles,
            heads=heads_kv,
            batch=batch,
            # Two for each SM at least: the last section's long tiles need short ones beside them.
            section=cutlass.max(self.sequences_in_l2(q, k), 2 * SMS // tiles),
            start=start,
        )

    def sequences_in_l2(self, q: cute.Tensor, k: cute.Tensor) -> Int32:
        """Heads of K, over all batches, whose Q, dO and dQ fit the L2 cache; at least one."""
        _, _, dq_columns, _ = self.by_rows
        columns = self.facts.head_dim + self.facts.head_dim_v
        row_bytes = columns * ELEMENT_BYTES + 4 * dq_columns
        batch, len_q, heads_q, _ = q.shape
        heads_kv = k.shape[2]
        sequences = cutlass.max(Int32(L2_BYTES // row_bytes) // len_q, 1)
        fit = cutlass.max(sequences // (heads_q // heads_kv), 1)
        return cutlass.min(fit, batch * heads_kv)

    @cute.jit
    def keys(self, args: Any) -> Keys:
        """The tile of this CTA, or pair. Under a causal mask the first one sees most queries."""
        tile_q, tile_kv, _, ctas = self.by_rows
        number, _, _ = cute.arch.block_idx()
        tile, head, batch = args.order.locate(number // ctas)
        right = Int32(0) if const_expr(self.facts.causal) else None
        mask = Mask(args.q.shape[0], args.k.shape[0], right)
        first = tile * tile_kv
        begin, full, end = mask.q_tiles(first, tile_kv, tile_q)
        start = begin
        if const_expr(self.facts.deterministic and not self.facts.causal):
            start = cutlass.select_(self.together(args), tile * end // args.order.tiles, begin)
        return Keys(first, head, batch, mask, begin, full, end, start)

    def together(self, args: Any) -> cutlass.Boolean:
        """Whether all K/V tiles of a sequence run at the same time."""
        _, _, _, ctas = self.by_rows
        return args.order.tiles * ctas <= args.sms

    def rank(self, args: Any, keys: Keys, q_tile: Int32) -> Int32:
        """How many K/V tiles come before this one at a tile of dQ: those that arrive there before.

        Under a causal mask the last one is first: it starts first, and with the tiles of Q at its
        own diagonal, where every other one arrives later. Without, where all K/V tiles of a
        sequence run at the same time, each begins with another tile of Q: the first at one is who
        begins there, then its left neighbour, and so on around. Where they do not, by number.
        """
        tile_q, tile_kv, _, _ = self.by_rows
        tile = keys.first // tile_kv
        if const_expr(self.facts.causal):
            _, end = keys.mask.kv_tiles(q_tile * tile_q, tile_q, tile_kv)
            return end - 1 - tile
        tiles = args.order.tiles
        first = cute.ceil_div((q_tile + 1) * tiles, keys.end) - 1
        around = first - tile + cutlass.select_(tile > first, tiles, 0)
        return cutlass.select_(self.together(args), around, tile)


@cute.jit
def load_rows(
    workspace: Workspace,
    tile_q: cutlass.Constexpr[int],
    q_tile: Int32,
    head: Int32,
    batch: Int32,
    target: cute.Pointer,
    barrier: cute.Pointer,
):
    """LSE and D of a tile of Q, global -> shared memory, by one thread."""
    source = workspace.rows[None, None, head, batch]
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    rows = cute.local_tile(source, (2, tile_q), (0, q_tile))
    flat = cute.make_layout(2 * tile_q)
    with cute.arch.elect_one():
        cute.copy(
            atom,
            cute.make_tensor(rows.iterator, flat),
            cute.make_tensor(target, flat),
            mbar_ptr=barrier,
        )
