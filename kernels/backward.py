"""Backward as one compiled function: three kernels, each of which begins as the last one ends.

With programmatic dependent launch, a kernel's set-up runs under the one before; what it takes from
that one it waits for on the device.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ..layouts.gmem import as_bshd, fake_heads
from ..layouts.hardware import TMA_ALIGNMENT_BYTES
from . import BackwardFacts
from .bwd_dq_cast import BwdDqCast
from .bwd_rowsum import BwdRowsum
from .bwd_sm90 import BwdSm90
from .bwd_sm100 import BwdSm100
from .bwd_workspace import Workspace
from .tiles import BackwardTiles
from .tiles_bwd_sm100 import BlackwellBackwardTiles


class Backward:
    """Rowsum, main kernel and cast, for tensors in either layout.

    Called as `backward_function` says, and with the stream last.
    """

    def __init__(self, facts: BackwardFacts, tiles: BackwardTiles | BlackwellBackwardTiles) -> None:
        self.facts = facts
        self.tiles = tiles
        self.rowsum = BwdRowsum(facts, tiles)
        on_hopper = isinstance(tiles, BackwardTiles)
        self.main = BwdSm90(facts, tiles) if on_hopper else BwdSm100(facts, tiles)
        self.cast = BwdDqCast(self.main)

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments for `cute.compile`: every extent and stride is free, strides have 64 bits."""
        batch, second_q, third_q, second_kv, third_kv = (cute.sym_int() for _ in range(5))
        head_dim, head_dim_v = self.facts.head_dim, self.facts.head_dim_v

        dtype, of_q, of_kv = (
            self.main.dtype,
            (batch, second_q, third_q),
            (batch, second_kv, third_kv),
        )
        q, dq = (fake_heads(dtype, *of_q, head_dim) for _ in range(2))
        k, dk = (fake_heads(dtype, *of_kv, head_dim) for _ in range(2))
        v, dv = (fake_heads(dtype, *of_kv, head_dim_v) for _ in range(2))
        out, dout = (fake_heads(dtype, *of_q, head_dim_v) for _ in range(2))
        rows = tuple(cute.sym_int() for _ in range(3))
        lse = make_fake_compact_tensor(Float32, rows, stride_order=(2, 1, 0))
        dlse = make_fake_tensor(Float32, rows, tuple(cute.sym_int64() for _ in range(3)))
        workspace = make_fake_compact_tensor(
            Float32, (cute.sym_int64(),), assumed_align=TMA_ALIGNMENT_BYTES
        )
        return (
            *(dout, q, k, v, out, lse),
            *((dlse,) if self.facts.dlse else ()),
            *(dq, dk, dv, workspace, Float32(1.0), Boolean(False), Int32(1)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(self, dout, q, k, v, out, lse, *rest):
        dlse = None
        if const_expr(self.facts.dlse):
            dlse, *rest = rest
        dq, dk, dv, workspace, scale, heads_first, sms, stream = rest
        q, k, v, out, dout, dq, dk, dv = (
            as_bshd(tensor, heads_first) for tensor in (q, k, v, out, dout, dq, dk, dv)
        )
        batch, len_q, heads_q, _ = q.shape
        views = Workspace.of(self.tiles, workspace, batch, heads_q, len_q)
        self.rowsum(out, dout, lse, dlse, views, stream)
        self.main(q, k, v, dout, dk, dv, views, scale, sms, stream)
        self.cast(dq, views.dq, scale, stream)
