"""tcgen05.mma as functions on arrays, against loops that place every element by the manual."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hopwell.emulator import formats, mma_sm100
from hopwell.emulator.granules import GRANULE
from hopwell.emulator.mma_sm100 import Form

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
BITS |= {"e2m3": 6, "e3m2": 6, "e2m1": 4}
CODES = {  # of types in an instruction descriptor, by kind
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
    "mxf4": {"e2m1": 1},
}
CODES |= {"mxf8f6f4": CODES["f8f6f4"], "mxf4nvf4": CODES["mxf4"]}
DEPTH = {"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}
FIELD = {"none": 0, "wide": 1, "128": 2, "64": 4, "32": 6}  # of a matrix descriptor: the swizzle
PITCH = {"none": 16, "wide": 128, "128": 128, "64": 64, "32": 32}


@dataclass(frozen=True)
class Case:
    kind: str
    a: str  # type
    b: str
    m: int
    n: int
    d: str = "f32"
    pair: bool = False
    ws: bool = False
    where_a: str = "k128"  # major and swizzle, or t for tensor memory
    where_b: str = "k128"
    scale: str = ""  # type of scale factors
    block: int = 0
    lane: int = 0  # of D
    steps: int = 2

    @property
    def form(self) -> Form:
        return Form(self.kind, self.pair, self.where_a == "t", self.ws, block=self.block)

    @property
    def k(self) -> int:
        return DEPTH.get(self.kind, 32)

    @property
    def dense4(self) -> bool:
        return self.k == 64

    @property
    def parts(self) -> int:
        """Parts of D's columns, beside each other in lanes."""
        if self.pair:
            return 2 if self.m == 128 else 1
        return 128 // self.m if self.ws else 1

    @property
    def rows(self) -> int:
        """Of A in each CTA."""
        return self.m // 2 if self.pair else self.m

    def idesc(self, neg: int = 0, scale_a: int = 0, scale_b: int = 0) -> int:
        codes = CODES[self.kind]
        word = codes[self.a] << 7 | codes[self.b] << 10 | neg << 13
        word |= self.where_a.startswith("mn") << 15 | self.where_b.startswith("mn") << 16
        word |= self.n >> 3 << 17 | self.m >> 4 << 24
        if self.scale:
            return word | (self.scale == "ue8m0") << 23 | scale_a << 29 | scale_b << 4
        return word | {"f16": 0, "f32": 1, "s32": 2}[self.d] << 4


def lanes_of(case: Case, row: int, part: int) -> int:
    """The lane of a CTA's row."""
    if case.rows * case.parts == 64:
        return row // 16 * 32 + row % 16 + case.lane
    return case.rows * part + row


# Small numbers that every float format has, so that all sums are exact in f32.
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_matrix(
    dtype: str, rows: int, k: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.uint32]]:
    """Values and raw bits, [rows, k]."""
    if dtype in ("s8", "u8"):
        low, high = (-128, 128) if dtype == "s8" else (0, 256)
        values = rng.integers(low, high, (rows, k))
        return values.astype(np.float64), (values & 255).astype(np.uint32)
    values = rng.choice(NUMBERS, (rows, k))
    return values, formats.from_f64(values, dtype)


def to_bytes(raw: NDArray[np.uint32], dtype: str, dense4: bool) -> NDArray[np.uint8]:
    """Rows as shared memory holds them, K-major: [rows, bytes]."""
    bits = BITS[dtype]
    if bits >= 8:
        return raw.astype(f"<u{bits // 8}").view(np.uint8)
    out = []
    for row in raw.tolist():
        packed = bytearray()
        for first in range(0, len(row), 32 if dense4 else 16):
            group = row[first : first + (32 if dense4 else 16)]
            number = sum(element << bits * i for i, element in enumerate(group))
            packed += number.to_bytes(16, "little")
        out.append(list(packed))
    return np.array(out, np.uint8)


def swizzled(address: int, swizzle: str) -> int:
    line = address // 128
    if swizzle == "wide":
        return address ^ line % 4 << 5
    return address ^ line % (PITCH[swizzle] // 16) << 4


def descriptor(start: int, lbo: int, sbo: int, swizzle: str) -> int:
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | FIELD[swizzle] << 61


def place(
    data: NDArray[np.uint8], at: int, matrix: NDArray[np.uint8], where: str, itemsize: int
) -> tuple[list[int], set[int]]:
    """Writes a matrix [rows, bytes of K] to shared memory.

    Returns:
        A descriptor for each 32 bytes of K (an instruction), and the granules they lie in.
    """
    major, swizzle = ("mn", where[2:]) if where.startswith("mn") else ("k", where[1:])
    rows, length = matrix.shape
    depth, step_k, pitch = length // itemsize, 32 // itemsize, PITCH[swizzle]
    descs, used = [], set()
    if major == "k":
        # Without swizzle, cores of 8 rows by 16 bytes; with it, tiles a pitch wide.
        lbo, sbo = (144, 144 * (length // 16)) if swizzle == "none" else (16, 8 * pitch)
        for row, byte in itertools.product(range(rows), range(length)):
            if swizzle == "none":
                address = at + row // 8 * sbo + byte // 16 * lbo + row % 8 * 16 + byte % 16
            else:
                tile, column = divmod(byte, pitch)
                address = at + tile * rows * pitch + row * pitch + column
            data[swizzled(address, swizzle)] = matrix[row, byte]
            used.add(swizzled(address, swizzle) // 16)
        for first in range(0, length, 32):
            tile, column = divmod(first, pitch)
            start = first // 16 * lbo if swizzle == "none" else tile * rows * pitch + column
            descs.append(descriptor(at + start, lbo, sbo, swizzle))
        return descs, used
    lines, wide = 4 if swizzle == "wide" else 8, pitch // itemsize
    per_k = lines * pitch + 1024
    per_rows = depth // lines * per_k + 2048
    for row, k in itertools.product(range(rows), range(depth)):
        address = at + row // wide * per_rows + row % wide * itemsize
        address += k // lines * per_k + k % lines * pitch
        address = swizzled(address, swizzle)
        data[address : address + itemsize] = matrix[row, k * itemsize : (k + 1) * itemsize]
        used.add(address // 16)
    lbo, sbo = (per_k, per_rows) if swizzle == "none" else (per_rows, per_k)
    for first in range(0, depth, step_k):
        descs.append(descriptor(at + first // lines * per_k, lbo, sbo, swizzle))
    return descs, used


def place_a_in_tmem(
    tmem: NDArray[np.uint32], column: int, raw: NDArray[np.uint32], case: Case
) -> None:
    bits = BITS[case.a]
    container = bits if bits >= 8 or case.dense4 else 8
    shift = 2 if bits == 4 and not case.dense4 else 0
    per_word = 32 // container
    for row, part in itertools.product(range(case.rows), range(case.parts)):
        for k, element in enumerate(raw[row].tolist()):
            word, inside = divmod(k, per_word)
            lane = lanes_of(case, row, part)
            if inside == 0:
                tmem[column + word, lane] = 0
            tmem[column + word, lane] |= element << inside * container + shift


def place_scales(
    tmem: NDArray[np.uint32], column: int, raw: NDArray[np.uint8], parts: int, first: int
) -> None:
    """[rows, factors] from a byte of each word on; repeated in the 32 lanes of each part."""
    words = tmem.view(np.uint8).reshape(512, 128, 4)
    rows = len(raw) // parts
    for row, quarter in itertools.product(range(rows), range(4)):
        part = quarter * parts // 4
        word = words[column + row // 32, 32 * quarter + row % 32]
        word[first : first + raw.shape[1]] = raw[part * rows + row]


SCALES = {"ue8m0": np.arange(125, 130), "ue4m3": np.array([0x30, 0x38, 0x3C, 0x40])}
D, A, SCALE_A, SCALE_B = 32, 300, 400, 440  # columns


@dataclass
class Setup:
    case: Case
    tmems: list[NDArray[np.uint32]]
    smems: list[np.ndarray]
    steps: list[tuple[int, int, int, int, int]]  # a, b, idesc and addresses of scale factors
    product: NDArray[np.float64]  # [M, N]
    granules: set[int]

    def plans(self) -> list[mma_sm100.Plan]:
        d = self.case.lane << 16 | D
        return [mma_sm100.plan(self.case.form, d, *step) for step in self.steps]

    def d(self) -> NDArray[np.uint32]:
        """D's words as a matrix."""
        case = self.case
        out = np.empty((case.m, case.n), np.uint32)
        wide = case.n // case.parts
        for row, part in itertools.product(range(case.m), range(case.parts)):
            cta, own = divmod(row, case.rows)
            lane = lanes_of(case, own, part)
            out[row, part * wide :][:wide] = self.tmems[cta][D : D + wide, lane]
        return out


def values(words: NDArray[np.uint32], dtype: str) -> NDArray:
    if dtype == "f16":
        return words.astype(np.uint16).view(np.float16)
    return words.view(np.int32 if dtype == "s32" else np.float32)


def held(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint32]:
    """Words of a D to add to."""
    numbers = rng.integers(-100, 100, shape)
    if dtype == "f16":
        return numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    return numbers.astype(np.int32 if dtype == "s32" else np.float32).view(np.uint32)


def build(case: Case, rng: np.random.Generator, neg: int = 0) -> Setup:
    ctas = 2 if case.pair else 1
    depth = case.k * case.steps
    itemsize = max(1, 32 // case.k)
    a, raw_a = random_matrix(case.a, case.m, depth, rng)
    b, raw_b = random_matrix(case.b, case.n, depth, rng)
    smems = [rng.integers(0, 256, 1 << 18, dtype=np.uint8) for _ in range(ctas)]
    tmems = [held(case.d, (512, 128), rng) for _ in range(ctas)]
    descs: list[list[int]] = [[], []]
    granules: set[int] = set()
    for cta in range(ctas):
        own = raw_a[cta * case.rows :][: case.rows]
        if case.where_a == "t":
            place_a_in_tmem(tmems[cta], A, own, case)
            descs[0] = [case.lane << 16 | A + 8 * i for i in range(case.steps)]
        else:
            packed = to_bytes(own, case.a, case.dense4)
            descs[0], used = place(smems[cta], 0x1000, packed, case.where_a, itemsize)
            granules |= used
        share = case.n // ctas
        packed = to_bytes(raw_b[cta * share :][:share], case.b, case.dense4)
        descs[1], used = place(smems[cta], 0x20000, packed, case.where_b, itemsize)
        granules |= used
    idescs = [(case.idesc(neg), 0, 0)] * case.steps
    if case.scale:
        count = case.k // case.block
        factors = count * case.steps
        scale_a = rng.choice(SCALES[case.scale], (case.m, factors)).astype(np.uint8)
        scale_b = rng.choice(SCALES[case.scale], (case.n, factors)).astype(np.uint8)
        idescs = []
        for step in range(case.steps):
            word, byte = divmod(step * count, 4)
            columns = SCALE_A + 16 * word, SCALE_B + 16 * word
            idescs.append((case.idesc(neg, byte, byte), *columns))
            part = slice(step * count, (step + 1) * count)
            for cta, tmem in enumerate(tmems):
                own = scale_a[cta * case.rows :][: case.rows, part]
                place_scales(tmem, columns[0], own, 1, byte)
                place_scales(tmem, columns[1], scale_b[:, part], case.parts, byte)
        a *= scale_values(scale_a, case.scale).repeat(case.block, axis=1)
        b *= scale_values(scale_b, case.scale).repeat(case.block, axis=1)
    sign = -1 if neg in (1, 2) else 1
    return Setup(
        case,
        tmems,
        [smem.view(GRANULE) for smem in smems],
        [(x, y, *rest) for x, y, rest in zip(*descs, idescs, strict=True)],
        sign * (a @ b.T),
        granules,
    )


def scale_values(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    if dtype == "ue8m0":
        return np.ldexp(1.0, raw.astype(int) - 127)
    exponent, mantissa = np.divmod(raw.astype(int), 8)
    return np.ldexp(1 + mantissa / 8, exponent - 7)


MAJORS = [f"{major}{swizzle}" for major in ("k", "mn") for swizzle in ("none", "32", "64", "128")]
LAYOUTS = [  # every place of D, with A in either memory
    Case("f16", "bf16", "bf16", 128, 128),
    Case("f16", "f16", "bf16", 128, 256),
    Case("f16", "bf16", "bf16", 64, 72),
    Case("f16", "bf16", "bf16", 64, 64, lane=16),
    Case("f16", "bf16", "bf16", 128, 64, ws=True),
    Case("f16", "bf16", "bf16", 64, 128, ws=True),
    Case("f16", "bf16", "bf16", 32, 128, ws=True),
    Case("f16", "bf16", "bf16", 256, 128, pair=True),
    Case("f16", "bf16", "bf16", 128, 64, pair=True),
]
TYPES = [
    Case("f16", "f16", "f16", 128, 32, d="f16"),
    Case("tf32", "tf32", "tf32", 128, 32),
    Case("i8", "s8", "u8", 128, 32, d="s32", steps=4),
    Case("i8", "u8", "s8", 64, 24, d="s32", steps=10),
    *(
        Case("f8f6f4", a, b, 128, 32, d=d)
        for a, b, d in [
            ("e4m3", "e5m2", "f32"),
            ("e5m2", "e4m3", "f16"),
            ("e2m3", "e2m1", "f32"),
            ("e2m1", "e3m2", "f32"),
            ("e3m2", "e4m3", "f16"),
        ]
    ),
]
SCALED = [
    Case("mxf8f6f4", "e4m3", "e5m2", 128, 96, scale="ue8m0", block=32, steps=5),
    Case("mxf8f6f4", "e2m3", "e2m1", 128, 32, scale="ue8m0", block=32),
    Case("mxf8f6f4", "e4m3", "e4m3", 256, 160, scale="ue8m0", block=32, pair=True),
    Case("mxf4", "e2m1", "e2m1", 128, 104, scale="ue8m0", block=32, steps=3),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 64, scale="ue8m0", block=32),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 256, scale="ue8m0", block=16),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 128, scale="ue4m3", block=16),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 96, scale="ue4m3", block=16, pair=True),
    Case("mxf4nvf4", "e2m1", "e2m1", 256, 192, scale="ue4m3", block=16, pair=True),
]
SOURCES = [
    *(
        Case("f16", "bf16", "bf16", 128, 128, pair=True, where_a=a, where_b=b)
        for a, b in zip(MAJORS, MAJORS[::-1], strict=True)
    ),
    *(
        Case("f8f6f4", "e4m3", "e4m3", 64, 128, where_a=a, where_b=b)
        for a, b in zip(MAJORS, MAJORS[::-1], strict=True)
    ),
    Case("tf32", "tf32", "tf32", 128, 64, where_a="mnwide", where_b="mnwide"),
    Case("i8", "s8", "s8", 128, 64, d="s32", where_a="mn128", where_b="mn64"),
]
CASES = [
    *LAYOUTS,
    *TYPES,
    *SCALED,
    *SOURCES,
    *(replace(case, where_a="t") for case in (*LAYOUTS, *TYPES, *SCALED)),
]


def name(case: Case) -> str:
    words = [case.kind, case.a, case.b, case.d, f"{case.m}x{case.n}", case.where_a, case.where_b]
    flags = {
        "pair": case.pair,
        "ws": case.ws,
        f"lane{case.lane}": case.lane,
        case.scale: case.block,
    }
    return "-".join([*words, *(word for word, on in flags.items() if on)])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_mma(case: Case, rng: np.random.Generator) -> None:
    """One after the other; D written, then added to; nothing else written."""
    setup = build(case, rng)
    before = [tmem.copy() for tmem in setup.tmems]
    plans = setup.plans()
    for i, plan in enumerate(plans):
        plan.run(setup.tmems, setup.smems, accumulate=i > 0)
    np.testing.assert_array_equal(values(setup.d(), case.d), setup.product.astype(case_dtype(case)))
    for tmem, old in zip(setup.tmems, before, strict=True):
        outside = np.ones((512, 8, 16), bool)
        for cells in plans[0].d[0]:
            outside[cells] = False
        outside = outside.reshape(512, 128)
        np.testing.assert_array_equal(tmem[outside], old[outside])
        assert (~outside).sum() == case.n * case.rows
    assert set(np.concatenate([plan.smem[0] for plan in plans]).tolist()) == setup.granules


def case_dtype(case: Case) -> str:
    return {"f32": "float32", "f16": "float16", "s32": "int32"}[case.d]


@pytest.mark.parametrize("case", [LAYOUTS[3], LAYOUTS[5], *TYPES[:4], *SCALED[2:4]], ids=name)
def test_fused(case: Case, rng: np.random.Generator) -> None:
    """All steps as one product, added to what D holds."""
    setup = build(case, rng)
    want = values(setup.d(), case.d) + setup.product
    plans = setup.plans()
    assert all(mma_sm100.joins(plans[0], plan) for plan in plans)
    fused = mma_sm100.fuse(tuple(plans))
    fused.run(setup.tmems, setup.smems, accumulate=True)
    np.testing.assert_array_equal(values(setup.d(), case.d), want.astype(case_dtype(case)))
    assert set(fused.smem[0].tolist()) == setup.granules
    assert (fused.flops, fused.clocks) == (
        sum(plan.flops for plan in plans),
        sum(plan.clocks for plan in plans),
    )


@pytest.mark.parametrize("neg", [1, 2, 3])
def test_negation(neg: int, rng: np.random.Generator) -> None:
    setup = build(LAYOUTS[0], rng, neg)
    setup.plans()[0].run(setup.tmems, setup.smems, accumulate=False)
    setup.plans()[1].run(setup.tmems, setup.smems, accumulate=True)
    np.testing.assert_array_equal(values(setup.d(), "f32"), setup.product)


@pytest.mark.parametrize(
    "case", [replace(LAYOUTS[0], steps=1), replace(TYPES[0], steps=1)], ids=name
)
@pytest.mark.parametrize("scale_d", [1, 15])
def test_scale_of_d(case: Case, scale_d: int, rng: np.random.Generator) -> None:
    setup = build(case, rng)
    before = values(setup.d(), case.d).astype(np.float64)
    setup.plans()[0].run(setup.tmems, setup.smems, True, scale_d=scale_d)
    want = (setup.product + before * 2.0**-scale_d).astype(case_dtype(case))
    np.testing.assert_array_equal(values(setup.d(), case.d), want)


@pytest.mark.parametrize("case", [LAYOUTS[0], LAYOUTS[3], *LAYOUTS[7:]], ids=name)
def test_disabled_lanes(case: Case, rng: np.random.Generator) -> None:
    """Lanes are TMEM's, whatever rows they hold."""
    setup = build(case, rng)
    before = [tmem.copy() for tmem in setup.tmems]
    bits = int.from_bytes(rng.bytes(32), "little")
    (plan, *_) = setup.plans()
    plan.run(setup.tmems, setup.smems, False, disabled=bits)
    kept = [np.array([bits >> 128 * r + lane & 1 for lane in range(128)], bool) for r in range(2)]
    disabled = [tmem.copy() for tmem in setup.tmems]
    plan.run(setup.tmems, setup.smems, False)
    for rank, tmem in enumerate(setup.tmems):
        want = np.where(kept[rank], before[rank], tmem)
        np.testing.assert_array_equal(disabled[rank], want)


@pytest.mark.parametrize("saturate", [False, True])
def test_integers_wrap_or_saturate(saturate: bool, rng: np.random.Generator) -> None:
    case = replace(TYPES[2], steps=1)
    setup = build(case, rng)
    a, b, idesc, *_ = setup.steps[0]
    setup.steps[0] = a, b, idesc | saturate << 3, 0, 0
    for tmem in setup.tmems:
        tmem[...] = rng.choice([0x7FFFFFFF, 0x80000000, 5], tmem.shape).astype(np.uint32)
    total = values(setup.d(), "s32").astype(np.int64) + setup.product.astype(np.int64)
    setup.plans()[0].run(setup.tmems, setup.smems, True)
    want = total.clip(-(1 << 31), (1 << 31) - 1) if saturate else total.astype(np.int32)
    np.testing.assert_array_equal(values(setup.d(), "s32"), want)


@pytest.mark.parametrize(
    ("word", "m", "n", "a_type", "mn_major_b"),
    [  # as the DSL emits them
        (0x08200490, 128, 128, "bf16", False),
        (0x08210490, 128, 128, "bf16", True),
        (0x10200490, 256, 128, "bf16", False),
        (0x08400010, 128, 256, "f16", False),
    ],
)
def test_instruction_descriptors(word: int, m: int, n: int, a_type: str, mn_major_b: bool) -> None:
    desc = mma_sm100.decode_instruction(word, Form("f16"))
    assert (desc.m, desc.n, desc.a_type, desc.b_type) == (m, n, a_type, a_type)
    assert (desc.d_type, desc.mn_major_a, desc.mn_major_b) == ("f32", False, mn_major_b)
    assert not (desc.neg_a or desc.neg_b or desc.saturate)


def test_matrix_descriptor() -> None:
    desc = mma_sm100.decode_descriptor(0x4000404000010000 | 0x12340 >> 4)
    assert (desc.start, desc.lbo, desc.sbo, desc.swizzle) == (0x12340, 16, 1024, 3)


def test_scale_factors_must_be_repeated(rng: np.random.Generator) -> None:
    setup = build(SCALED[0], rng)
    setup.tmems[0][SCALE_B, 70] ^= 1
    with pytest.raises(ValueError, match="each 32 lanes"):
        setup.plans()[0].run(setup.tmems, setup.smems, False)


GOOD = Case("f16", "bf16", "bf16", 128, 128)
K_DESC, N_DESC = descriptor(0x1000, 16, 1024, "128"), descriptor(0x8000, 16, 1024, "128")


@pytest.mark.parametrize(
    ("error", "match", "form", "d", "a", "b", "idesc"),
    [
        (NotImplementedError, "sparse", Form("f16"), 0, K_DESC, N_DESC, GOOD.idesc() | 4),
        (NotImplementedError, "sparse", Form("f16", sparse=True), 0, K_DESC, N_DESC, GOOD.idesc()),
        (NotImplementedError, "shifted A", Form("f16", ashift=True), 0, K_DESC, N_DESC, 0),
        (NotImplementedError, "shifted B", Form("f16", ws=True), 0, K_DESC, N_DESC, 1 << 30),
        (NotImplementedError, "K = 96", Form("mxf4"), 0, K_DESC, N_DESC, 1 << 31),
        (NotImplementedError, "absolute", Form("f16"), 0, K_DESC | 1 << 52, N_DESC, GOOD.idesc()),
        (NotImplementedError, "offset 3", Form("f16"), 0, K_DESC | 3 << 49, N_DESC, GOOD.idesc()),
        (ValueError, "A type 5", Form("f16"), 0, K_DESC, N_DESC, GOOD.idesc() | 4 << 7),
        (ValueError, "D type 2", Form("f16"), 0, K_DESC, N_DESC, GOOD.idesc() ^ 3 << 4),
        (ValueError, "M = 256", Form("f16"), 0, K_DESC, N_DESC, replace(GOOD, m=256).idesc()),
        (ValueError, "N = 0", Form("f16"), 0, K_DESC, N_DESC, replace(GOOD, n=0).idesc()),
        (
            ValueError,
            "N = 72",
            Form("f16", ws=True),
            0,
            K_DESC,
            N_DESC,
            replace(GOOD, n=72).idesc(),
        ),
        (ValueError, "not a matrix", Form("f16"), 0, K_DESC ^ 1 << 46, N_DESC, GOOD.idesc()),
        (ValueError, "not a matrix", Form("f16"), 0, K_DESC | 1 << 61, N_DESC, GOOD.idesc()),
        (ValueError, "128 columns", Form("f16"), 385, K_DESC, N_DESC, GOOD.idesc()),
        (ValueError, "lane 16", Form("f16"), 16 << 16, K_DESC, N_DESC, GOOD.idesc()),
        (ValueError, "K-major", Form("f16", a_tmem=True), 0, 256, N_DESC, GOOD.idesc() | 1 << 15),
        (ValueError, "lanes of D", Form("f16", a_tmem=True), 16 << 16, 256, N_DESC, 0x04200490),
        (ValueError, "32-byte", Form("f16"), 0, K_DESC ^ 3 << 61, N_DESC, GOOD.idesc()),
        (ValueError, "scale factor", Form("mxf4", block=16), 0, K_DESC, N_DESC, 0x08A00480),
    ],
)
def test_refusals(
    error: type[Exception], match: str, form: Form, d: int, a: int, b: int, idesc: int
) -> None:
    with pytest.raises(error, match=match):
        mma_sm100.plan(form, d, a, b, idesc)


@pytest.mark.parametrize("kind", DEPTH | {"i8": 32, "f8f6f4": 32})
def test_rates(kind: str) -> None:
    """8192 FLOP a clock and SM in 16-bit types; half in tf32, twice in 8 bits, four times in 4."""
    types = CODES[kind]
    scale, block = ("ue8m0", 32) if kind.startswith("mx") else ("", 0)
    case = Case(kind, *[min(types)] * 2, 256, 128, pair=True, scale=scale, block=block)
    case = replace(case, d="s32" if kind == "i8" else "f32")
    plan = mma_sm100.plan(case.form, 0, K_DESC, N_DESC, case.idesc(), 256, 260)
    assert plan.flops == 512 * case.k * plan.clocks
    assert plan.flops * 2 == 2 * 256 * 128 * case.k
