"""Warp-wide instructions: shuffles, votes, reductions, matches, elections, matrix loads and stores.

The first kernel is a table like that of scalar.py: each `WarpOp` is evaluated by WARPS warps, by
the lanes of its mask alone (the others branch around it). Its expectation sees one warp at a time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Uint32
from cutlass.memory import SmemAllocator
from numpy.typing import NDArray

from .asm import asm
from .launch import compile, fake

WARPS = 4
THREADS = 32 * WARPS
FULL = 0xFFFFFFFF
EVEN = 0x55555555
MIDDLE = 0x0000FFF0
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class WarpOp:
    """`text` is PTX: $0 the result, $1 and $2 the lane's inputs a and b (all u32).

    `expect(a, b, lanes)` gets one warp's inputs as lists of 32 integers and the active lanes; it
    returns one integer for each active lane.
    """

    name: str
    text: str
    expect: Callable[[list[int], list[int], list[int]], Sequence[int]]
    mask: int = FULL


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def _shuffle(kind: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and in-range predicate of shfl.sync, as the PTX manual's pseudo-code has it."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    low = lane & segment
    limit = low | clamp & ~segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | b & ~segment}[kind]
    inside = source >= limit if kind == "up" else source <= limit
    return (source, True) if inside else (lane, False)


def _shuffles() -> list[WarpOp]:
    """Values and predicates together: value xor (predicate << 31)."""
    ops: list[WarpOp] = []
    # c: whole warp, segments of 8, segments of 16 with a lower clamp
    for kind, c in itertools.product(("idx", "down", "bfly"), (0x1F, 0x181F, 0x1007)):
        ops += _shuffle_op(kind, c, FULL)
    for c in (0x0, 0x1800, 0x1003):
        ops += _shuffle_op("up", c, FULL)
    # From lanes that take part alone: an even distance stays among the even lanes.
    ops.append(
        WarpOp(
            "shfl.bfly.even",
            f"shfl.sync.bfly.b32 $0, $1, 2, 31, {EVEN:#x};",
            lambda a, b, lanes: [a[i ^ 2] for i in lanes],
            EVEN,
        )
    )
    return ops


def _shuffle_op(kind: str, c: int, mask: int) -> list[WarpOp]:
    def expect(a: list[int], b: list[int], lanes: list[int]) -> list[int]:
        picks = [_shuffle(kind, i, b[i], c) for i in lanes]
        return [a[source] ^ inside << 31 for source, inside in picks]

    text = (
        "{ .reg .pred p; .reg .b32 v, x;"
        f" shfl.sync.{kind}.b32 v|p, $1, $2, {c:#x}, {mask:#x};"
        " selp.b32 x, 0x80000000, 0, p; xor.b32 $0, v, x; }"
    )
    return [WarpOp(f"shfl.{kind}.{c:#x}", text, expect, mask)]


def _votes(mask: int) -> list[WarpOp]:
    def op(kind: str, test: Callable[[list[bool]], bool], threshold: int) -> WarpOp:
        """The predicate is `b > threshold` (unsigned)."""
        return WarpOp(
            f"vote.{kind}.{threshold}.{mask:#x}",
            f"{{ .reg .pred p, q; setp.gt.u32 p, $2, {threshold};"
            f" vote.sync.{kind}.pred q, p, {mask:#x};"
            " selp.b32 $0, 1, 0, q; }",
            lambda a, b, lanes: [int(test([b[i] > threshold for i in lanes]))] * len(lanes),
            mask,
        )

    ops = [
        op(kind, test, threshold)
        for kind, test in (("all", all), ("any", any), ("uni", lambda p: len(set(p)) == 1))
        for threshold in (0, 7, 40)  # true in many lanes, in some, in none
    ]
    ops.append(
        WarpOp(
            f"vote.ballot.{mask:#x}",
            f"{{ .reg .pred p; setp.gt.u32 p, $2, 15; vote.sync.ballot.b32 $0, p, {mask:#x}; }}",
            lambda a, b, lanes: [sum(1 << i for i in lanes if b[i] > 15)] * len(lanes),
            mask,
        )
    )
    return ops


def _reductions(mask: int) -> list[WarpOp]:
    table: dict[str, Callable[[list[int]], int]] = {
        "add.s32": sum,
        "add.u32": sum,
        "min.s32": lambda x: min(map(_signed, x)),
        "max.s32": lambda x: max(map(_signed, x)),
        "min.u32": min,
        "max.u32": max,
        "and.b32": lambda x: reduce(int.__and__, x),
        "or.b32": lambda x: reduce(int.__or__, x),
        "xor.b32": lambda x: reduce(int.__xor__, x),
    }
    return [
        WarpOp(
            f"redux.{name}.{mask:#x}",
            f"redux.sync.{name} $0, $1, {mask:#x};",
            lambda a, b, lanes, f=f: [f([a[i] for i in lanes])] * len(lanes),
            mask,
        )
        for name, f in table.items()
    ]


def _matches(mask: int) -> list[WarpOp]:
    def any_of(a: list[int], b: list[int], lanes: list[int]) -> list[int]:
        return [sum(1 << j for j in lanes if b[j] & 3 == b[i] & 3) for i in lanes]

    def all_of(key: int) -> Callable[[list[int], list[int], list[int]], list[int]]:
        def expect(a: list[int], b: list[int], lanes: list[int]) -> list[int]:
            alike = len({b[i] & key for i in lanes}) == 1
            return [(sum(1 << i for i in lanes) if alike else 0) ^ alike] * len(lanes)

        return expect

    ops = [
        WarpOp(
            f"match.any.b32.{mask:#x}",
            f"{{ .reg .b32 k; and.b32 k, $2, 3; match.any.sync.b32 $0, k, {mask:#x}; }}",
            any_of,
            mask,
        ),
        WarpOp(
            f"match.any.b64.{mask:#x}",
            "{ .reg .b64 k; .reg .b32 x; and.b32 x, $2, 3; mov.b64 k, {x, x};"
            f" match.any.sync.b64 $0, k, {mask:#x}; }}",
            any_of,
            mask,
        ),
    ]
    ops += [
        WarpOp(
            f"match.all.{key}.{mask:#x}",
            "{ .reg .pred p; .reg .b32 k, v, x;"
            f" and.b32 k, $2, {key}; match.all.sync.b32 v|p, k, {mask:#x};"
            " selp.b32 x, 1, 0, p; xor.b32 $0, v, x; }",
            all_of(key),
            mask,
        )
        for key in (0, 3)
    ]
    return ops


def _lanes(mask: int) -> list[WarpOp]:
    def constant(value: int) -> Callable[[list[int], list[int], list[int]], list[int]]:
        return lambda a, b, lanes: [value] * len(lanes)

    first = (mask & -mask).bit_length() - 1
    return [
        WarpOp(
            f"elect.{mask:#x}",
            "{ .reg .pred p; .reg .b32 leader, x;"
            f" elect.sync leader|p, {mask:#x}; selp.b32 x, 0x100, 0, p; or.b32 $0, leader, x; }}",
            lambda a, b, lanes: [first | (i == first) << 8 for i in lanes],
            mask,
        ),
        WarpOp(f"activemask.{mask:#x}", "activemask.b32 $0;", constant(mask), mask),
        WarpOp(f"laneid.{mask:#x}", "mov.u32 $0, %laneid;", lambda a, b, lanes: lanes, mask),
        WarpOp(
            f"lanemask.{mask:#x}",
            "{ .reg .b32 x, y; mov.u32 x, %lanemask_lt; mov.u32 y, %lanemask_ge; xor.b32 $0, x, y;"
            " mov.u32 x, %lanemask_eq; add.u32 $0, $0, x;"
            " mov.u32 x, %lanemask_gt; xor.b32 $0, $0, x;"
            " mov.u32 x, %lanemask_le; xor.b32 $0, $0, x; }",
            # lt ^ ge is all ones; adding eq leaves eq - 1, which is lt; gt ^ le is all ones again
            lambda a, b, lanes: [((1 << i) - 1) ^ FULL for i in lanes],
            mask,
        ),
        WarpOp(
            f"bar.warp.{mask:#x}",
            f"bar.warp.sync {mask:#x}; mov.b32 $0, $1;",
            lambda a, b, lanes: [a[i] for i in lanes],
            mask,
        ),
    ]


OPS: list[WarpOp] = _shuffles()
for _mask in (FULL, EVEN, MIDDLE):
    OPS += _votes(_mask) + _reductions(_mask) + _matches(_mask) + _lanes(_mask)
assert max(Counter(op.name for op in OPS).values()) == 1


def expected(op: WarpOp, a: Words, b: Words) -> Words:
    """Results of `op` for inputs of shape (WARPS, 32); lanes outside its mask stay 0."""
    lanes = [i for i in range(32) if op.mask >> i & 1]
    out = np.zeros((WARPS, 32), np.uint32)
    for warp in range(WARPS):
        values = op.expect(a[warp].tolist(), b[warp].tolist(), lanes)
        out[warp, lanes] = [v & FULL for v in values]
    return out


def build_table() -> Any:
    """Compile: (a (THREADS,) u32, b (THREADS,) u32, result (len(OPS), THREADS) u32)."""

    @cute.kernel
    def evaluate(a: cute.Tensor, b: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        lane_bit = Uint32(1) << (thread % 32).to(Uint32)
        x, y = a[thread], b[thread]
        for i in cutlass.range_constexpr(len(OPS)):
            op = OPS[i]
            if cutlass.const_expr(op.mask == FULL):
                (result[i, thread],) = asm(op.text, (Uint32,), x, y)
            else:
                out = Uint32(0)
                if lane_bit & Uint32(op.mask) != 0:
                    (out,) = asm(op.text, (Uint32,), x, y)
                result[i, thread] = out

    @cute.jit
    def host(a: cute.Tensor, b: cute.Tensor, result: cute.Tensor) -> None:
        evaluate(a, b, result).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    return compile(
        host, fake(Uint32, (THREADS,)), fake(Uint32, (THREADS,)), fake(Uint32, (len(OPS), THREADS))
    )


# ---- the DSL's own functions ---------------------------------------------------------------------

DSL_OPS: list[tuple[str, Callable[..., Any], Callable[[list[int], list[int], int], int]]] = [
    ("shuffle_sync", lambda a, b: cute.arch.shuffle_sync(a, b), lambda a, b, i: a[b[i] & 31]),
    (
        "shuffle_sync_up",
        lambda a, b: cute.arch.shuffle_sync_up(a, 3, mask_and_clamp=0),
        lambda a, b, i: a[i - 3] if i >= 3 else a[i],
    ),
    (
        "shuffle_sync_down",
        lambda a, b: cute.arch.shuffle_sync_down(a, 5),
        lambda a, b, i: a[i + 5] if i < 27 else a[i],
    ),
    (
        "shuffle_sync_bfly",
        lambda a, b: cute.arch.shuffle_sync_bfly(a, 16),
        lambda a, b, i: a[i ^ 16],
    ),
    (
        "vote_ballot_sync",
        lambda a, b: cute.arch.vote_ballot_sync(b > 15).to(Uint32),
        lambda a, b, i: sum((x > 15) << j for j, x in enumerate(b)),
    ),
    (
        "vote_any_sync",
        lambda a, b: cute.arch.vote_any_sync(b > 40).to(Uint32),
        lambda a, b, i: int(any(x > 40 for x in b)),
    ),
    (
        "warp_redux_sync",
        lambda a, b: cute.arch.warp_redux_sync(a, "max"),
        lambda a, b, i: max(a),
    ),
    ("popc", lambda a, b: cute.arch.popc(a).to(Uint32), lambda a, b, i: a[i].bit_count()),
]


def build_dsl() -> Any:
    """Compile: (a (THREADS,) u32, b (THREADS,) u32, result (len(DSL_OPS), THREADS) u32)."""

    @cute.kernel
    def evaluate(a: cute.Tensor, b: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(len(DSL_OPS)):
            result[i, thread] = DSL_OPS[i][1](a[thread], b[thread])

    @cute.jit
    def host(a: cute.Tensor, b: cute.Tensor, result: cute.Tensor) -> None:
        evaluate(a, b, result).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    out = fake(Uint32, (len(DSL_OPS), THREADS))
    return compile(host, fake(Uint32, (THREADS,)), fake(Uint32, (THREADS,)), out)


# ---- matrix loads and stores ---------------------------------------------------------------------

MATRIX_FORMS = [(count, trans) for count in (1, 2, 4) for trans in (False, True)]


def build_matrix() -> Any:
    """Compile ldmatrix and stmatrix in each count, plain and transposed, by one warp.

    (tiles (4, 8, 4) u32: four 8x8 matrices of 16-bit elements, row by row;
     loaded (6, 4, 32) u32: what each form's ldmatrix gives, [form, register, lane];
     stored (6, 4, 8, 4) u32: what each form's stmatrix leaves of register r = lane + 256 * r * 257)
    """

    @cute.kernel
    def exchange(tiles: cute.Tensor, loaded: cute.Tensor, stored: cute.Tensor) -> None:
        lane, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        source = smem.allocate_tensor(Uint32, cute.make_layout(128), byte_alignment=128)
        target = smem.allocate_tensor(Uint32, cute.make_layout(128), byte_alignment=128)
        flat = cute.make_tensor(tiles.iterator, cute.make_layout(128))
        for i in cutlass.range_constexpr(4):
            source[lane + 32 * i] = flat[lane + 32 * i]
        cute.arch.sync_warp()
        for form in cutlass.range_constexpr(len(MATRIX_FORMS)):
            count, trans = MATRIX_FORMS[form]
            regs = ", ".join(f"${i}" for i in range(count))
            suffix = f"x{count}" + (".trans" if trans else "")
            row = source.iterator.toint().to(Uint32) + (lane.to(Uint32) % (8 * count)) * 16
            values = asm(
                f"ldmatrix.sync.aligned.m8n8.{suffix}.shared.b16 {{{regs}}}, [${count}];",
                (Uint32,) * count,
                row,
            )
            for i in cutlass.range_constexpr(4):
                loaded[form, i, lane] = values[i] if i < count else Uint32(0)
                target[lane + 32 * i] = Uint32(0)
            cute.arch.sync_warp()
            regs = ", ".join(f"${i + 1}" for i in range(count))
            asm(
                f"stmatrix.sync.aligned.m8n8.{suffix}.shared.b16 [$0], {{{regs}}};",
                (),
                target.iterator.toint().to(Uint32) + (lane.to(Uint32) % (8 * count)) * 16,
                *(store_word(lane.to(Uint32), i) for i in range(count)),
            )
            cute.arch.sync_warp()
            flat_stored = cute.make_tensor(stored.iterator + form * 128, cute.make_layout(128))
            for i in cutlass.range_constexpr(4):
                flat_stored[lane + 32 * i] = target[lane + 32 * i]
            cute.arch.sync_warp()

    @cute.jit
    def host(tiles: cute.Tensor, loaded: cute.Tensor, stored: cute.Tensor) -> None:
        exchange(tiles, loaded, stored).launch(grid=(1, 1, 1), block=(32, 1, 1))

    forms = len(MATRIX_FORMS)
    return compile(
        host,
        fake(Uint32, (4, 8, 4)),
        fake(Uint32, (forms, 4, 32)),
        fake(Uint32, (forms, 4, 8, 4)),
    )


def store_word(lane: Any, register: int) -> Any:
    """What lane `lane` stores from its register: two different 16-bit halves."""
    return lane * 2 + 256 * register + (lane * 2 + 1 + 256 * register) * 65536


def expected_load(tiles: Words, count: int, trans: bool) -> Words:
    """Registers of ldmatrix, (4, 32): lane t gets row t/4 (or column), elements 2(t%4), +1."""
    matrices = tiles.view(np.uint16).reshape(4, 8, 8).copy()
    if trans:
        matrices = matrices.transpose(0, 2, 1)
    words = np.ascontiguousarray(matrices).view(np.uint32).reshape(4, 32)
    return np.where(np.arange(4)[:, None] < count, words, 0).astype(np.uint32)


def expected_store(count: int, trans: bool) -> Words:
    """Shared memory after stmatrix, (4, 8, 4) words."""
    lanes = np.arange(32, dtype=np.uint32)
    words = np.stack([store_word(lanes, i) for i in range(4)]).astype(np.uint32)
    matrices = words.view(np.uint16).reshape(4, 8, 8)
    if trans:
        matrices = matrices.transpose(0, 2, 1)
    out = np.ascontiguousarray(matrices).view(np.uint32).reshape(4, 8, 4)
    return np.where(np.arange(4)[:, None, None] < count, out, 0).astype(np.uint32)
