"""Tensor memory: the ways of a warpgroup's rows into and out of it.

An SM has 128 lanes of 512 columns of 32 bits. A warp reaches the 32 lanes that its place in the
warpgroup names, so that thread r of a warpgroup owns row r of every 128-row accumulator.

`loc` is the caller's place in the source, which findings of the emulator name.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from .hardware import UMMA_ROWS

LANE_STRIDE = 1 << 16  # of an address; a column is 1


def rows(base: cute.Pointer, column: Int32 | int, columns: int) -> cute.Tensor:
    """(lanes, columns) of 32 bits, from `column` on."""
    layout = cute.make_layout((UMMA_ROWS, columns), stride=(LANE_STRIDE, 1))
    return cute.make_tensor(base + column, layout)


@dsl_user_op
def load_row(
    base: cute.Pointer,
    column: Int32 | int,
    fragment: cute.Tensor,
    thread: Int32,
    *,
    loc=None,
    ip=None,
) -> None:
    """This thread's row of tensor memory to its registers (columns); `await_loads` before use."""
    _copy(tcgen05.Ld32x32bOp, base, column, fragment, thread, loc, ip)


@dsl_user_op
def store_row(
    base: cute.Pointer,
    column: Int32 | int,
    fragment: cute.Tensor,
    thread: Int32,
    *,
    loc=None,
    ip=None,
) -> None:
    """This thread's registers (columns) of 32 bits to its row; `await_stores` before handing on."""
    _copy(tcgen05.St32x32bOp, base, column, fragment, thread, loc, ip)


def _copy(
    op: type,
    base: cute.Pointer,
    column: Int32 | int,
    fragment: cute.Tensor,
    thread: Int32,
    loc,
    ip,
) -> None:
    columns = cute.size(fragment)
    width = max(w for w in (1, 2, 4, 8, 16, 32) if columns % w == 0)
    atom = cute.make_copy_atom(op(tcgen05.Repetition(width)), Float32)
    tmem = rows(base, column, columns)
    copy = tcgen05.make_tmem_copy(atom, tmem)
    own = copy.get_slice(thread)
    if op is tcgen05.Ld32x32bOp:
        place = own.partition_S(tmem)
        shape = own.partition_D(cute.make_identity_tensor(tmem.shape)).shape
        row = cute.make_tensor(fragment.iterator, cute.make_layout(shape))
        cute.copy(copy, place, row, loc=loc, ip=ip)
    else:
        place = own.partition_D(tmem)
        shape = own.partition_S(cute.make_identity_tensor(tmem.shape)).shape
        row = cute.make_tensor(fragment.iterator, cute.make_layout(shape))
        cute.copy(copy, row, place, loc=loc, ip=ip)


@dsl_user_op
def await_loads(*, loc=None, ip=None) -> None:
    """What this thread loaded from tensor memory is in its registers."""
    cute.arch.fence_view_async_tmem_load(loc=loc, ip=ip)


@dsl_user_op
def await_stores(*, loc=None, ip=None) -> None:
    """What this thread stored to tensor memory is there."""
    cute.arch.fence_view_async_tmem_store(loc=loc, ip=ip)


@dsl_user_op
def before_handing_over(*, loc=None, ip=None) -> None:
    """Between accesses of tensor memory and an arrival that tells another thread of them."""
    _fence("before", loc, ip)


@dsl_user_op
def after_taking_over(*, loc=None, ip=None) -> None:
    """Between a wait for another thread's accesses of tensor memory and one's own."""
    _fence("after", loc, ip)


def _fence(side: str, loc, ip) -> None:
    text = f"tcgen05.fence::{side}_thread_sync;"
    llvm.inline_asm(None, [], text, "", has_side_effects=True, loc=loc, ip=ip)
