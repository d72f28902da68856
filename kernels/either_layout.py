"""One compiled function for tensors in either layout: the host's part swaps two modes.

A transposed view costs a microsecond or more in torch, four of them as much as a whole launch; here
they are a few integer selects in compiled code. The kernel is the same instruction for instruction.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.cute.runtime import make_fake_compact_tensor

from ..layouts.gmem import as_bshd


class EitherLayout:
    """A forward kernel behind a host function that has one more argument, `heads_first`.

    It is called as `(q, k, v, o, lse, scale, counter, heads_first)`: with `heads_first` q, k, v and
    o are (batch, heads, len, dim), else (batch, len, heads, dim); lse is (batch, heads_q, len_q).
    """

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel

    def fake_arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The kernel's fake arguments, but lse's extents are free: either may be the length."""
        q, k, v, o, _, scale, counter, stream = arguments
        extents = tuple(cute.sym_int() for _ in range(3))
        lse = make_fake_compact_tensor(Float32, extents, stride_order=(2, 1, 0))
        return q, k, v, o, lse, scale, counter, Boolean(False), stream

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        counter: cute.Tensor,
        heads_first: Boolean,
        stream,
    ):
        seen = [as_bshd(tensor, heads_first) for tensor in (q, k, v, o)]
        self.kernel(*seen, lse, scale, counter, stream)
