"""What the forward kernels of all SMs have in common on the host."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from ..layouts.gmem import fake_heads
from ..layouts.hardware import L2_BYTES
from . import BlackwellFacts, ForwardFacts
from .tiles import ELEMENT_BYTES

DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


class Forward:
    """A forward kernel for one set of compile-time facts; `group` heads of Q share a tile."""

    def __init__(self, facts: ForwardFacts | BlackwellFacts, group: int = 1) -> None:
        self.facts = facts
        self.group = group
        self.dtype = DTYPES[facts.dtype]

    def fake_arguments(self) -> tuple[Any, ...]:
        """Arguments for `cute.compile`: every extent and stride is free, strides have 64 bits."""
        batch, len_q, len_kv, heads_q, heads_kv = (cute.sym_int() for _ in range(5))

        return (
            fake_heads(self.dtype, batch, len_q, heads_q, self.facts.head_dim),
            fake_heads(self.dtype, batch, len_kv, heads_kv, self.facts.head_dim),
            fake_heads(self.dtype, batch, len_kv, heads_kv, self.facts.head_dim_v),
            fake_heads(self.dtype, batch, len_q, heads_q, self.facts.head_dim_v),
            make_fake_compact_tensor(Float32, (batch, heads_q, len_q), stride_order=(2, 1, 0)),
            Float32(1.0),
            make_fake_compact_tensor(Int32, (1,)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    def sequences_in_l2(self, q: cute.Tensor, k: cute.Tensor) -> Int32:
        """Groups of heads of Q, over all batches, whose K and V fit the L2 cache together; at
        least one."""
        key_bytes = (self.facts.head_dim + self.facts.head_dim_v) * ELEMENT_BYTES
        batch, len_kv, heads_kv, _ = k.shape
        fit = cutlass.max(Int32(L2_BYTES // key_bytes) // len_kv, 1)
        # No more than there are: times the group, it would not fit an Int32 for very short keys.
        return cutlass.min(fit, batch * heads_kv) * (q.shape[2] // self.group // heads_kv)
