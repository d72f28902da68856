"""Tensor memory on its own: every shape of ld, st and cp, and who holds which columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from .sm100 import ALLOC, FREE, THREADS, layout, run, vector

LANES, COLUMNS = 128, 512

# CuTe's traits of the copies (copy_traits_sm100.hpp): where a warp's lane and register find their
# bits in rows of so many, for `.xn`: (registers, bits of a row, lanes' layout, registers' layout).
Layout = tuple[tuple[int, ...], tuple[int, ...]]
SHAPES: dict[str, Callable[[int], tuple[int, int, Layout, Layout]]] = {
    "32x32b": lambda n: (n, 32 * n, ((32,), (32 * n,)), ((32 * n,), (1,))),
    "16x32bx2": lambda n: (n, 64 * n, ((16, 2), (64 * n, 32 * n)), ((32 * n,), (1,))),
    "16x64b": lambda n: (n, 64 * n, ((2, 2, 8), (512 * n, 32, 64 * n)), ((32, n), (1, 64))),
    "16x128b": lambda n: (
        2 * n,
        128 * n,
        ((4, 8), (32, 128 * n)),
        ((32, 2, n), (1, 1024 * n, 128)),
    ),
    "16x256b": lambda n: (
        4 * n,
        256 * n,
        ((4, 8), (64, 256 * n)),
        ((64, 2, n), (1, 2048 * n, 256)),
    ),
}
COUNTS = {
    (shape, packed): [
        n
        for n in (1, 2, 4, 8, 16, 32, 64, 128)
        if SHAPES[shape](n)[0] <= 128 and SHAPES[shape](n)[1] * (1 + packed) <= 32 * COLUMNS
    ]
    for shape, packed in itertools.product(SHAPES, (False, True))
}


def places(shape: str, n: int, packed: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, column counted in 16 bits) of each half register, [registers, halves, lanes]."""
    registers, bits, lanes, values = SHAPES[shape](n)
    at = layout(*lanes) + layout(*values)[::16].reshape(registers, 2, 1)
    row, half = at // bits, at % bits // 16
    return row, 2 * half if packed else half  # packed: the low halves of columns


def modifiers(shape: str, n: int, packed: bool, packing: str) -> tuple[str, str]:
    """What the opcode and the operands say besides."""
    second = f", {n * (1 + packed)}" if shape == "16x32bx2" else ""
    return f"{shape}.x{n}{packing if packed else ''}.b32", second


def contents() -> NDArray[np.uint32]:
    """A word for each cell, [column, lane], no half of which stands anywhere else."""
    column, lane = np.ogrid[:COLUMNS, :LANES]
    return (lane << 25 | column << 16 | 1 << 15 | lane << 8 | column & 255).astype(np.uint32)


# Every column of every lane, from the words behind `source`; and back, to those behind `result`.
FILL = (
    """
    mad.wide.u32 %d2, %r0, 4, %d0;
    mov.u32 %r4, %r3;
    add.u32 %r5, %r3, 512;
FILL:
"""
    + "".join(f"ld.global.b32 %v{i}, [%d2+{512 * i}];\n" for i in range(32))
    + f"""
    tcgen05.st.sync.aligned.32x32b.x32.b32 [%r4], {vector(32)};
    add.u64 %d2, %d2, 16384;
    add.u32 %r4, %r4, 32;
    setp.lt.u32 %p2, %r4, %r5;
    @%p2 bra FILL;
    tcgen05.wait::st.sync.aligned;
"""
)
DRAIN = (
    f"""
    mad.wide.u32 %d3, %r0, 4, %d1;
    mov.u32 %r4, %r3;
    add.u32 %r5, %r3, 512;
DRAIN:
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {vector(32)}, [%r4];
    tcgen05.wait::ld.sync.aligned;
"""
    + "".join(f"st.global.b32 [%d3+{512 * i}], %v{i};\n" for i in range(32))
    + """
    add.u64 %d3, %d3, 16384;
    add.u32 %r4, %r4, 32;
    setp.lt.u32 %p2, %r4, %r5;
    @%p2 bra DRAIN;
"""
)


@pytest.mark.parametrize(
    ("shape", "packed", "half"),
    [(*form, half) for form in COUNTS for half in (0, 16) if not half or form[0] != "32x32b"],
)
def test_load(shape: str, packed: bool, half: int) -> None:
    """Of every count; of both halves of a warp's lanes, where it takes one."""
    body, written = "    mad.wide.u32 %d3, %r0, 4, %d1;\n", 0
    for n in COUNTS[shape, packed]:
        registers, bits, *_ = SHAPES[shape](n)
        form, second = modifiers(shape, n, packed, ".pack::16b")
        first = COLUMNS - bits // 32 * (1 + packed)
        body += f"""
        add.u32 %r5, %r3, {half << 16 | first};
        tcgen05.ld.sync.aligned.{form} {vector(registers)}, [%r5]{second};
        tcgen05.wait::ld.sync.aligned;
        """ + "".join(
            f"st.global.b32 [%d3+{512 * (written + i)}], %v{i};\n" for i in range(registers)
        )
        written += registers
    cells, result = contents(), np.zeros((written, THREADS), np.uint32)
    made = run(ALLOC + FILL + body + FREE, cells, result)
    assert not made.findings, made.findings[0]
    halves = cells.T.copy().view(np.uint16)  # [lane, half columns]
    for n in COUNTS[shape, packed]:
        registers, bits, *_ = SHAPES[shape](n)
        row, column = places(shape, n, packed)
        column = column + 2 * (COLUMNS - bits // 32 * (1 + packed))
        for warp in range(4):
            want = halves[32 * warp + half + row, column]
            got = result[:registers, 32 * warp : 32 * warp + 32]
            np.testing.assert_array_equal(got, want[:, 0] | want[:, 1].astype(np.uint32) << 16)
        result = result[registers:]


def test_halves_lie_apart() -> None:
    """What is between the halves of 16x32bx2 is not touched."""
    body = f"""
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {{%r0, %r1}};
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3+300], {{%r1, %r0}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {vector(2)}, [%r3], 300;
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %d3, %r0, 4, %d1;
    st.global.b32 [%d3], %v0;
    st.global.b32 [%d3+512], %v1;
    """
    result = np.zeros((2, THREADS), np.uint32)
    made = run(ALLOC + body + FREE, np.zeros(1, np.uint32), result)
    assert not made.findings, made.findings[0]
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        first = [32 * warp + lane % 16, warp]
        assert result[:, thread].tolist() == (first if lane < 16 else first[::-1])


@pytest.mark.parametrize(
    ("shape", "n", "packed"),
    [
        (shape, n, packed)
        for (shape, packed), counts in COUNTS.items()
        for n in (counts[0], counts[2], counts[-1])
    ],
)
def test_store(shape: str, n: int, packed: bool) -> None:
    registers, bits, *_ = SHAPES[shape](n)
    form, second = modifiers(shape, n, packed, ".unpack::16b")
    half = 0 if shape == "32x32b" else 16
    first = min(64, COLUMNS - bits // 32 * (1 + packed))
    body = "    mad.wide.u32 %d2, %r0, 4, %d0;\n" + "".join(
        f"ld.global.b32 %v{i}, [%d2+{512 * (COLUMNS + i)}];\n" for i in range(registers)
    )
    body += f"""
    add.u32 %r5, %r3, {half << 16 | first};
    tcgen05.st.sync.aligned.{form} [%r5]{second}, {vector(registers)};
    tcgen05.wait::st.sync.aligned;
    """
    given = np.arange(registers * THREADS, dtype=np.uint32).reshape(registers, -1) * 0x10001 + 7
    cells, result = contents(), np.zeros((COLUMNS, LANES), np.uint32)
    source = np.concatenate([cells, given])
    made = run(ALLOC + FILL + body + DRAIN + FREE, source, result)
    assert not made.findings, made.findings[0]
    row, column = places(shape, n, packed)
    halves = cells.T.copy().view(np.uint16)
    if packed:  # the rest of a column that gets a half is nothing
        for warp in range(4):
            halves[32 * warp + half + row, 2 * first + column + 1] = 0
    for warp in range(4):
        mine = given[:, 32 * warp : 32 * warp + 32]
        both = np.stack([mine & 0xFFFF, mine >> 16], axis=1).astype(np.uint16)
        halves[32 * warp + half + row, 2 * first + column] = both
    np.testing.assert_array_equal(result, halves.view(np.uint32).T)


# Where each row of a copied matrix goes, by CuTe's traits of UTCCP, and bytes of a row.
COPIES: dict[str, tuple[int, Callable[[int], list[int]], int]] = {
    "128x256b": (128, lambda r: [r], 32),
    "128x128b": (128, lambda r: [r], 16),
    "64x128b.warpx2::02_13": (64, lambda r: [r, r + 64], 16),
    "64x128b.warpx2::01_23": (64, lambda r: [r + r // 32 * 32, r + r // 32 * 32 + 32], 16),
    "32x128b.warpx4": (32, lambda r: [r, r + 32, r + 64, r + 96], 16),
    "4x256b": (4, lambda r: [32 * r + 5], 32),
}
AT, FIRST = 2048, 96  # bytes in shared memory; a column
# Thread 0 alone issues what stands between them.
ISSUE = f"""
    mad.wide.u32 %d2, %r0, 32, %d0;
    add.u64 %d2, %d2, {4 * COLUMNS * LANES};
    shl.b32 %r6, %r0, 5;
    mov.u32 %r7, smem;
    add.u32 %r6, %r6, %r7;
    ld.global.v4.b32 {vector(4)}, [%d2];
    st.shared.v4.b32 [%r6+{AT}], {vector(4)};
    ld.global.v4.b32 {vector(4)}, [%d2+16];
    st.shared.v4.b32 [%r6+{AT + 16}], {vector(4)};
    @!%p1 bra INITED;
    mbarrier.init.shared.b64 [smem+8], 1;
INITED:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra ISSUED;
"""
ISSUED = """
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+8];
ISSUED:
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p3, [smem+8], 0;
    @!%p3 bra WAIT;
"""


def descriptor(leading: int, stride: int, swizzle: int = 0) -> str:
    high = swizzle << 29 | 1 << 14 | stride >> 4
    return f"""
    add.u32 %r6, %r7, {AT};
    shr.u32 %r6, %r6, 4;
    or.b32 %r6, %r6, {leading >> 4 << 16};
    mov.b64 %d4, {{%r6, {high}}};
    """


def issue(body: str, smem: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """All cells [column, lane] behind what one thread issues, `contents` before."""
    words = np.zeros(1024, np.uint32)
    words[: smem.size // 4] = smem.reshape(-1).view(np.uint32)
    source = np.concatenate([contents().ravel(), words])
    result = np.zeros((COLUMNS, LANES), np.uint32)
    made = run(ALLOC + FILL + ISSUE + body + ISSUED + DRAIN + FREE, source, result)
    assert not made.findings, made.findings[0]
    return result


@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize("swizzled", [False, True])
def test_copy(form: str, swizzled: bool) -> None:
    rows, lanes, width = COPIES[form]
    matrix = np.random.default_rng(0).integers(0, 256, (rows, width), np.uint8)
    image = np.zeros((128, 32), np.uint8)
    if swizzled:  # rows of 32 bytes whose halves trade places in every other four
        for row in range(rows):
            for half in range(width // 16):
                place = half ^ row // 4 % 2
                image[row, 16 * place : 16 * place + 16] = matrix[row, 16 * half : 16 * half + 16]
        desc = descriptor(16, 256, swizzle=6)
    else:  # cores of 8 rows of 16 bytes: along rows first
        cores = matrix.reshape(-1, min(8, rows), width // 16, 16).transpose(2, 0, 1, 3)
        image.reshape(-1)[: matrix.size] = cores.ravel()
        desc = descriptor(16 * rows, 128)
    base = 5 << 16 if form == "4x256b" else 0
    result = issue(
        f"{desc} add.u32 %r6, %r2, {base | FIRST}; tcgen05.cp.cta_group::1.{form} [%r6], %d4;",
        image,
    )
    want = contents()
    for row in range(rows):
        for lane in lanes(row):
            want[FIRST : FIRST + width // 4, lane] = matrix[row].view(np.uint32)
    np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize(("bits", "padding", "shift"), [(4, 64, 2), (6, 32, 0)])
def test_copy_unpacks(bits: int, padding: int, shift: int) -> None:
    elements = np.random.default_rng(0).integers(0, 1 << bits, (128, 16))
    image = np.zeros((128, 32), np.uint8)
    for row, values in enumerate(elements.tolist()):
        packed = sum(value << bits * i for i, value in enumerate(values))
        image.reshape(-1, 16)[row] = np.frombuffer(packed.to_bytes(16, "little"), np.uint8)
    form = f"128x128b.b8x16.b{bits}x16_p{padding}"
    result = issue(
        f"{descriptor(2048, 128)} add.u32 %r6, %r2, {FIRST}; "
        f"tcgen05.cp.cta_group::1.{form} [%r6], %d4;",
        image,
    )
    want = contents()
    want[FIRST : FIRST + 4] = (elements << shift).astype(np.uint8).view(np.uint32).T
    np.testing.assert_array_equal(result, want)


def test_shift() -> None:
    result = issue(
        f"add.u32 %r6, %r2, {FIRST}; tcgen05.shift.cta_group::1.down [%r6];",
        np.zeros(0, np.uint8),
    )
    want = contents()
    for lane in range(LANES):
        if lane % 32 < 31:
            want[FIRST : FIRST + 8, lane] = contents()[FIRST : FIRST + 8, lane + 1]
    np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize(
    ("form", "dtype", "fold"),
    [
        ("max.f32", np.float32, np.fmax),
        ("min.f32", np.float32, np.fmin),
        ("max.NaN.f32", np.float32, np.maximum),
        ("min.abs.f32", np.float32, lambda a, b: np.fmin(abs(a), abs(b))),
        ("max.u32", np.uint32, np.maximum),
        ("min.s32", np.int32, np.minimum),
    ],
)
def test_load_reduces(form: str, dtype: type, fold: Callable) -> None:
    cells = np.random.default_rng(0).integers(0, 1 << 32, (COLUMNS, LANES), np.uint32)
    cells[3, 7] = 0x7FC00000
    result = np.zeros((9, THREADS), np.uint32)
    body = f"""
    tcgen05.ld.red.sync.aligned.32x32b.x8.{form} {vector(8)}, %v8, [%r3];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %d3, %r0, 4, %d1;
    """ + "".join(f"st.global.b32 [%d3+{512 * i}], %v{i};\n" for i in range(9))
    made = run(ALLOC + FILL + body + FREE, cells, result, strict=True)
    assert not made.findings, made.findings[0]
    np.testing.assert_array_equal(result[:8], cells[:8])
    values = cells[:8].view(dtype)
    want = values[0]
    for row in values[1:]:
        want = fold(want, row)
    np.testing.assert_array_equal(result[8].view(dtype), want)
