"""Divergent control flow: lanes that loop, branch, break and leave on their own."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from .asm import asm
from .launch import compile, fake

THREADS = 160  # a full warpgroup and a warp
CTAS = 2


def collatz(x: int) -> int:
    """Steps from `x` down to 1."""
    steps = 0
    while x != 1:
        x = 3 * x + 1 if x & 1 else x // 2
        steps += 1
    return steps


def nested(x: int) -> int:
    """Triangular loops with a `continue` and a data-dependent break out of the inner loop."""
    total = 0
    for i in range(x % 13):
        j = 0
        while j < i:
            total += 3 * i ^ j
            if total % 7 == 3:
                break
            j += 1 if total & 1 else 2
        if i % 3 == 1:
            continue
        total += i
    return total


def ladder(x: int) -> int:
    """An if/elif chain with a loop in one arm."""
    kind = x % 5
    if kind == 0:
        return x * 2
    if kind == 1:
        return x + 100
    if kind == 2:
        return sum(range(x % 11))
    return x ^ 0xFF if kind == 3 else -x & 0xFFFFFFFF


def raw_loop(x: int) -> int:
    """The inline-PTX loop: two exits, labels of its own."""
    n, total = x % 37, 0
    while n:
        total += n
        if total > 300:
            return total + 1000
        n -= 1
    return total


def leaver(x: int) -> int:
    """Lanes with x % 3 == 0 return before the second store."""
    return 1 if x % 3 == 0 else 2


RESULTS = (collatz, nested, ladder, raw_loop, leaver)


@cute.jit
def _collatz(x: Int32) -> Int32:
    steps = Int32(0)
    while x != 1:
        steps += 1
        if x & 1 == 0:  # a branch that lanes take apart, hence no conditional expression
            x = x // 2
        else:
            x = x + x
            x = x + x // 2 + 1
    return steps


@cute.jit
def _nested(x: Int32) -> Int32:
    total = Int32(0)
    for i in range(x % 13):
        j = Int32(0)
        go = j < i
        while go:
            total += (3 * i) ^ j
            go = total % 7 != 3
            if total & 1 != 0:
                j += 1
            else:
                j += 2
            go = go and j < i
        if i % 3 != 1:
            total += i
    return total


@cute.jit
def _ladder(x: Int32) -> Int32:
    kind = x % 5
    result = -x
    if kind == 0:
        result = x * 2
    elif kind == 1:
        result = x + 100
    elif kind == 2:
        result = Int32(0)
        for i in range(x % 11):
            result += i
    elif kind == 3:
        result = x ^ 0xFF
    return result


_RAW_LOOP = """{
    .reg .pred p;
    .reg .b32 n;
    rem.u32 n, $1, 37;
    mov.b32 $0, 0;
    AGAIN:
    setp.eq.u32 p, n, 0;
    @p bra DONE;
    add.u32 $0, $0, n;
    setp.gt.u32 p, $0, 300;
    @p bra OVER;
    sub.u32 n, n, 1;
    bra AGAIN;
    OVER:
    add.u32 $0, $0, 1000;
    DONE:
}"""


def build() -> Any:
    """Compile: (x (CTAS, THREADS) s32 positive, result (len(RESULTS), CTAS, THREADS) s32)."""

    @cute.kernel
    def diverge(x: cute.Tensor, result: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        value = x[cta, thread]
        result[0, cta, thread] = _collatz(value)
        result[1, cta, thread] = _nested(value)
        result[2, cta, thread] = _ladder(value)
        (raw,) = asm(_RAW_LOOP, (Uint32,), value.to(Uint32))
        result[3, cta, thread] = raw.to(Int32)
        result[4, cta, thread] = Int32(1)
        asm(
            "{ .reg .pred p; .reg .b32 n; rem.u32 n, $0, 3; setp.eq.u32 p, n, 0; @p exit; }",
            (),
            value.to(Uint32),
        )
        result[4, cta, thread] = Int32(2)

    @cute.jit
    def host(x: cute.Tensor, result: cute.Tensor) -> None:
        diverge(x, result).launch(grid=(CTAS, 1, 1), block=(THREADS, 1, 1))

    return compile(host, fake(Int32, (CTAS, THREADS)), fake(Int32, (len(RESULTS), CTAS, THREADS)))
