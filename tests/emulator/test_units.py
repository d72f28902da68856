"""TMA and tensor core of the emulator against slow references: loops over elements and lanes."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hopwell.emulator import formats, tensor_core, tma
from hopwell.emulator.granules import GRANULE

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def any_bits() -> object:
    """Random bits hold NaN and infinities, as garbage in memory does."""
    with np.errstate(all="ignore"):
        yield


# ---------------------------------------------------------------------------------- number formats


@pytest.mark.parametrize("dtype", TORCH)
def test_every_value_of_a_narrow_format(dtype: str) -> None:
    raw = np.arange(1 << 8 * formats.RAW[dtype].itemsize).astype(formats.RAW[dtype])
    expected = torch.from_numpy(raw.copy()).view(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(formats.to_f32(raw, dtype), expected)
    number = ~np.isnan(expected)
    assert (np.signbit(formats.to_f32(raw, dtype)) == np.signbit(expected))[number].all()


def test_integers_and_tf32_to_f32() -> None:
    raw = np.arange(256, dtype=np.uint8)
    assert formats.to_f32(raw, "s8").tolist() == [*range(128), *range(-128, 0)]
    assert formats.to_f32(raw, "u8").tolist() == [*range(256)]
    word = np.array([0x3F801FFF, 0x3F802000, 0xC0490FDB], np.uint32)
    assert formats.to_f32(word, "tf32").tolist() == [1.0, 1 + 2**-10, -3.140625]


def test_conversion_of_strided_bits_is_contiguous(rng: np.random.Generator) -> None:
    for dtype, raw_dtype in formats.RAW.items():
        raw = rng.integers(0, 256, (6, 10)).astype(raw_dtype)
        out = formats.to_f32(raw.T[::3], dtype)
        assert out.flags.c_contiguous
        np.testing.assert_array_equal(out, formats.to_f32(raw, dtype).T[::3])


def test_bf16_rounding(rng: np.random.Generator) -> None:
    bits = rng.integers(0, 1 << 32, 20000, dtype=np.uint32)
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000, 0x80018000], np.uint32)
    values = np.concatenate([bits, ties]).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(formats.f32_to_bf16(values)[number], expected[number])
    assert (formats.f32_to_bf16(values)[~number] == 0x7FFF).all()


def test_tf32_rounding() -> None:
    """A tie down to even, a tie up to even, a carry into the exponent, overflow, what is kept."""
    before = [0x3F801000, 0x3F803000, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0xBF801001]
    after = [0x3F800000, 0x3F804000, 0x40000000, 0x7F800000, 0x7F800000, 0x7F800001, 0xBF802000]
    values = np.array(before, np.uint32).view(np.float32)
    assert formats.round_to_tf32(values).view(np.uint32).tolist() == after


# --------------------------------------------------------------------------------------------- TMA


class Memory:
    """Global memory for one tensor: bytes at an address, bounds checked on every view."""

    def __init__(self, data: NDArray[np.uint8], address: int) -> None:
        self.data, self.address = data, address

    def view(self, region: tma.Strided) -> np.ndarray:
        assert region.base >= self.address
        assert region.end <= self.address + self.data.nbytes
        offset = region.base - self.address
        return np.ndarray(region.shape, region.dtype, self.data.data, offset, region.strides)


def encode(
    address: int,
    code: int,
    itemsize: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    tf32: bool = False,
) -> bytes:
    """Packs a tensor map and the garbage that follows it; `strides` are of dimensions 1 on."""
    words = [0] * 14  # words 2 to 15
    words[0] = 2 | (len(sizes) - 1) << 4 | code << 7 | swizzle << 13 | tf32 << 16 | 2 << 17
    for d, stride in enumerate(strides):
        words[1 + d] = stride >> 4 & 0xFFFFFFFF
        words[5] |= (stride >> 36) << 4 * d
    for d, size in enumerate(sizes):
        words[6 + d] = size - 1
    words[11] = (box[0] - 1) << 24
    for d, extent in enumerate(box[1:]):
        words[12] |= (extent - 1) << 8 * d
    return struct.pack("<Q14I", address, *words) + bytes(range(64))


def reference_box(
    sizes: tuple[int, ...], box: tuple[int, ...], coords: tuple[int, ...]
) -> list[tuple[int, ...] | None]:
    """The tensor index of each element of a dense box, None where out of bounds."""
    elements = []
    for place in itertools.product(*(range(extent) for extent in box[::-1])):
        index = tuple(c + i for c, i in zip(coords, place[::-1], strict=True))
        elements.append(
            index if all(0 <= i < n for i, n in zip(index, sizes, strict=True)) else None
        )
    return elements


GEOMETRIES = [  # itemsize, sizes, byte strides of dimensions 1 on, box, coordinates
    (2, (64, 40), (128,), (64, 16), (0, 8)),
    (2, (64, 40), (128,), (64, 16), (0, 30)),
    (2, (64, 40), (128,), (64, 16), (0, -5)),
    (2, (61, 40), (128,), (16, 8), (53, 3)),
    (2, (61, 40), (128,), (16, 8), (-3, 35)),
    (2, (61, 40), (128,), (16, 8), (7, 0)),
    (2, (16, 40), (128,), (32, 4), (-3, 1)),
    (2, (64, 40), (128,), (64, 16), (64, 0)),
    (2, (64, 40), (128,), (64, 16), (0, -16)),
    (4, (100,), (), (64,), (-1,)),
    (4, (100,), (), (64,), (50,)),
    (1, (48, 5, 6), (64, 384), (16, 3, 2), (17, 3, -1)),
    (8, (9, 3, 2, 2), (80, 240, 512), (4, 2, 2, 2), (6, 2, 1, 1)),
    (2, (24, 3, 2, 3, 2), (48, 144, 288, 880), (8, 2, 1, 3, 2), (20, -1, 1, 1, 0)),
    (2, (24, 3, 2, 3, 2), (48, 144, 288, 880), (24, 3, 2, 3, 2), (0, 0, 0, 0, 0)),
]
CODES = {1: 0, 2: 6, 4: 7, 8: 4}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_box_against_loops(geometry: tuple, rng: np.random.Generator) -> None:
    itemsize, sizes, strides, box, coords = geometry
    address = 0x7F12_3456_7890
    data = rng.integers(1, 256, 8192, dtype=np.uint8)
    tensor = tma.decode(encode(address, CODES[itemsize], itemsize, sizes, strides, box))
    elements = reference_box(sizes, box, coords)
    offsets = [
        None if e is None else sum(i * s for i, s in zip(e, (itemsize, *strides), strict=True))
        for e in elements
    ]

    expected = bytearray()
    for offset in offsets:
        expected += (
            bytes(itemsize) if offset is None else data[offset : offset + itemsize].tobytes()
        )
    got = tma.read_box(tensor, coords, Memory(data, address).view)
    assert got.dtype == np.uint8
    assert tensor.box_bytes == len(expected)
    assert got.tobytes() == bytes(expected)

    dense = rng.integers(1, 256, tensor.box_bytes, dtype=np.uint8)
    stored, target = data.copy(), data.copy()
    for i, offset in enumerate(offsets):
        if offset is not None:
            target[offset : offset + itemsize] = dense[i * itemsize :][:itemsize]
    tma.write_box(tensor, coords, dense, Memory(stored, address).view)
    np.testing.assert_array_equal(stored, target)

    touched = {address + o + b for o in offsets if o is not None for b in range(itemsize)}
    region = tma.global_footprint(tensor, coords)
    assert tma.locate(tensor, coords).inside == (None not in offsets)
    if region is None:
        assert not touched
    else:
        assert (region.base, region.end) == (min(touched), max(touched) + 1)
        assert region.nbytes == len(touched)


def test_loaded_box_is_a_snapshot(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 4096, dtype=np.uint8)
    tensor = tma.decode(encode(0x1000, 6, 2, (64, 32), (128,), (64, 32)))
    box = tma.read_box(tensor, (0, 0), Memory(data, 0x1000).view)
    before = box.copy()
    data[:] = 0
    np.testing.assert_array_equal(box, before)


def test_tf32_box_is_rounded() -> None:
    data = np.array([0x3F801000, 0x3F803000] * 32, np.uint32).view(np.uint8)
    tensor = tma.decode(encode(0x1000, 7, 4, (64,), (), (64,), tf32=True))
    assert tensor.dtype == "tf32"
    box = tma.read_box(tensor, (0,), Memory(data, 0x1000).view)
    assert box.view(np.uint32).tolist() == [0x3F800000, 0x3F804000] * 32


def test_decode_all_fields() -> None:
    stride = (5 << 36) + 4096
    raw = encode(0x7FFF_0000_1230, 10, 2, (128, 70000, 3), (256, stride), (64, 256, 2), swizzle=3)
    tensor = tma.decode(raw)
    assert tensor == tma.TensorMap(
        address=0x7FFF_0000_1230,
        dtype="bf16",
        itemsize=2,
        sizes=(128, 70000, 3),
        strides=(2, 256, stride),
        box=(64, 256, 2),
        swizzle=3,
        bits=16,
    )
    assert (tensor.inner_bytes, tensor.box_bytes) == (128, 65536)
    assert tma.decode(raw[:64] + b"other garbage") is tensor


@pytest.mark.parametrize(
    ("word", "bits", "field"),
    [
        (2, 1, "kind"),
        (2, 1 << 11, "interleave"),
        (2, 1 << 15, "NaN fill"),
        (2, 1 << 16, "tf32"),
        (2, 1 << 19, "32 bytes"),
        (2, 1 << 20, "word 2"),
        (2, 1 << 22, "word 2"),
        (2, 5 << 4, "rank"),
        (2, 5 << 7, "element type"),
        (7, 1 << 16, "word 7"),
        (13, 1, "element strides"),
        (15, 1, "word 15"),
    ],
)
def test_decode_names_what_it_does_not_know(word: int, bits: int, field: str) -> None:
    words = list(struct.unpack("<16I", encode(0x1000, 10, 2, (64, 8), (128,), (64, 8))[:64]))
    words[word] |= bits
    with pytest.raises(NotImplementedError, match=field):
        tma.decode(struct.pack("<16I", *words))


NARROW = {11: (4, 16), 12: (4, 8), 13: (6, 12)}  # type: bits, bytes of 16 in shared memory


@pytest.mark.parametrize("code", NARROW)
def test_narrow_elements(code: int, rng: np.random.Generator) -> None:
    """Elements of 4 and 6 bits: rows of whole bytes in global memory, maybe padded in shared."""
    bits, filled = NARROW[code]
    data = rng.integers(0, 256, (8, 384 * bits // 8), dtype=np.uint8)
    shape = (384, 8), (data.shape[1],), (128, 4)
    tensor = tma.decode(encode(0x1000, code, 1, *shape, swizzle=2 if filled == 16 else 3))
    box = tma.read_box(tensor, (128, 5), Memory(data.reshape(-1), 0x1000).view)
    expected = np.zeros((4, 16 * bits), np.uint8)
    expected[:3] = data[5:, 16 * bits : 32 * bits]
    assert tensor.box_bytes == expected.size
    assert tensor.inner_bytes * 4 == tensor.smem_bytes == box.size
    granules = box.reshape(-1, 16)
    np.testing.assert_array_equal(granules[:, :filled].reshape(4, -1), expected)
    assert not granules[:, filled:].any()
    if filled < 16:
        with pytest.raises(NotImplementedError, match=f"{bits} bits"):
            tma.write_box(tensor, (0, 0), box, Memory(data.reshape(-1), 0x1000).view)


def test_decode_large_tensor_bit_is_no_obstacle() -> None:
    words = list(struct.unpack("<16I", encode(0x1000, 10, 2, (64, 8), (128,), (64, 8))[:64]))
    words[2] |= 1 << 21
    assert tma.decode(struct.pack("<16I", *words)).sizes == (64, 8)


@pytest.mark.parametrize(("address", "columns"), [(0x1008, 64), (0x1000, 60)])
def test_misaligned_tensor(address: int, columns: int) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        tma.decode(encode(address, 10, 2, (64, 8), (128,), (columns, 8)))


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_reductions(op: str, dtype: str, rng: np.random.Generator) -> None:
    """Against float64, rounded once."""
    raw = rng.integers(0, 1 << 16, (2, 4000), dtype=np.uint16)
    old, new = (torch.from_numpy(x).view(TORCH[dtype]).double() for x in raw)
    exact = {"add": torch.add, "min": torch.fmin, "max": torch.fmax}[op](old, new)
    got = torch.from_numpy(tma.combine(op, dtype, raw[0], raw[1])).view(TORCH[dtype])
    torch.testing.assert_close(
        got.double(), exact.to(TORCH[dtype]).double(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", ["u32", "s32", "u64", "s64"])
def test_integer_reductions(dtype: str, rng: np.random.Generator) -> None:
    width = int(dtype[1:])
    raw = rng.integers(0, 1 << width, (2, 200), dtype=f"uint{width}", endpoint=False)
    raw[1, :50] = raw[0, :50]
    raw[0, 50:60] = 0

    def value(x: int) -> int:
        return x - (1 << width) if dtype[0] == "s" and x >> width - 1 else x

    reference = {
        "add": lambda x, y: (x + y) % (1 << width),
        "min": lambda x, y: min(x, y, key=value),
        "max": lambda x, y: max(x, y, key=value),
        "inc": lambda x, y: 0 if x >= y else x + 1,
        "dec": lambda x, y: y if x == 0 or x > y else x - 1,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
    }
    defined = {"u32": set(reference), "s64": {"min", "max", "and", "or", "xor"}}
    for op, f in reference.items():
        if op not in defined.get(dtype, set(reference) - {"inc", "dec"}):
            with pytest.raises(NotImplementedError, match=op):
                tma.combine(op, dtype, raw[0], raw[1])
            continue
        expected = [f(int(x), int(y)) for x, y in raw.T]
        assert tma.combine(op, dtype, raw[0], raw[1]).tolist() == expected, op


def test_reduce_box_adds_inside_alone(rng: np.random.Generator) -> None:
    old = rng.standard_normal((10, 32)).astype(np.float32)
    new = rng.standard_normal((8, 16)).astype(np.float32)
    tensor = tma.decode(encode(0x1000, 7, 4, (32, 10), (128,), (16, 8)))
    memory = Memory(old.copy().reshape(-1).view(np.uint8), 0x1000)
    tma.reduce_box(tensor, (20, -2), new.reshape(-1).view(np.uint8), memory.view, "add")
    expected = old.copy()
    expected[:6, 20:] += new[2:, :12]
    np.testing.assert_array_equal(memory.data.view(np.float32).reshape(10, 32), expected)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("start", [0, 0x400, 0x12380])
def test_swizzle(mode: int, start: int) -> None:
    """Among 2^mode granules, the column is XORed with the number of the 128-byte line."""
    inner = 16 << mode
    addresses = tma.swizzled(start, 64 * inner, mode, inner).tolist()
    for i, address in enumerate(addresses):
        linear = start + 16 * i
        line, column = linear // 128, linear // 16 % (1 << mode)
        assert address == linear + ((column ^ line % (1 << mode)) - column) * 16
    assert sorted(addresses) == list(range(start, start + 64 * inner, 16))


@pytest.mark.parametrize("start", [0, 0x280])
def test_swizzle_of_wide_atoms(start: int) -> None:
    """Of 128 bytes in atoms of 32: the atom is XORed with the number of the 128-byte line."""
    for i, address in enumerate(tma.swizzled(start, 4096, 4, 128).tolist()):
        line, atom = divmod(start // 32 + i // 2, 4)
        assert address == 128 * line + 32 * (atom ^ line % 4) + 16 * (i % 2)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, (64, 1024, 0, 128)),
        (ValueError, (0, 1024, 2, 128)),
        (NotImplementedError, (0, 1024, 3, 64)),
    ],
)
def test_swizzle_refuses(error: type[Exception], arguments: tuple[int, ...]) -> None:
    with pytest.raises(error, match=r"bytes|alignment"):
        tma.swizzled(*arguments)


# ------------------------------------------------------------------------------------- tensor core


def descriptor(start: int, lbo: int, sbo: int, mode: int, base_offset: int = 0) -> int:
    field = {0: 0, 1: 3, 2: 2, 3: 1}[mode]
    assert start < 1 << 18
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | base_offset << 49 | field << 62


def natural(matrix: NDArray[np.float32], role: str) -> NDArray[np.float32]:
    """[K, rows in fragment order] to [rows, K], by the order's definition."""
    rows = matrix.shape[1]
    out = np.full((rows, matrix.shape[0]), np.nan, np.float32)
    for i in range(rows):
        if role == "a":
            h, w, g = i // 32, i // 8 % 4, i % 8
            row = 16 * w + 8 * h + g
        else:
            e, jq = divmod(i, rows // 2)
            row = 2 * jq + e
        out[row] = matrix[:, i]
    return out


def smem_of(data: NDArray[np.uint8]) -> np.ndarray:
    return data.view(GRANULE)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32", "e4m3", "e5m2", "s8", "u8"])
@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize(("role", "rows"), [("a", 64), ("b", 8), ("b", 80), ("b", 256)])
def test_k_major_operand(
    dtype: str, mode: int, role: str, rows: int, rng: np.random.Generator
) -> None:
    """A tile as TMA lays it down, rows as wide as the swizzle; every step along K inside it."""
    itemsize, pitch, start = formats.RAW[dtype].itemsize, 16 << mode, 0x2C00
    data = np.zeros(1 << 17, np.uint8)
    tile = rng.integers(0, 256, (rows, pitch), dtype=np.uint8)
    for row, granule in itertools.product(range(rows), range(1 << mode)):
        line = row * pitch // 128
        place = start + row * pitch + (granule ^ line % (1 << mode)) * 16
        data[place : place + 16] = tile[row, granule * 16 :][:16]
    expected = formats.to_f32(tile.view(formats.RAW[dtype]), dtype)
    for step in range(pitch // 32):
        desc = descriptor(start + 32 * step, 16, 8 * pitch, mode)
        plan = tensor_core.operand((desc,), role, "k", rows, itemsize)
        got = natural(tensor_core.load(plan, smem_of(data), dtype), role)
        k = 32 // itemsize
        np.testing.assert_array_equal(got, expected[:, step * k :][:, :k])


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize(("role", "rows"), [("a", 64), ("b", 64), ("b", 192)])
def test_mn_major_operand(
    dtype: str, mode: int, role: str, rows: int, rng: np.random.Generator
) -> None:
    """V as TMA lays it down: boxes of 48 keys, as many head dimensions wide as the swizzle."""
    keys, pitch, start = 48, 16 << mode, 0x1400
    wide = pitch // 2
    v = rng.integers(0, 1 << 16, (keys, rows), dtype=np.uint16)
    data = np.zeros(1 << 17, np.uint8)
    words = data.view(np.uint16)
    for key, d in itertools.product(range(keys), range(rows)):
        box, column = divmod(d, wide)
        line = key * pitch // 128
        granule = (column // 8) ^ (line % (1 << mode))
        place = start + box * keys * pitch + key * pitch + granule * 16 + column % 8 * 2
        words[place // 2] = v[key, d]
    for step in range(keys // 16):
        desc = descriptor(start + 16 * step * pitch, keys * pitch, 8 * pitch, mode)
        plan = tensor_core.operand((desc,), role, "mn", rows, 2)
        got = natural(tensor_core.load(plan, smem_of(data), dtype), role)
        np.testing.assert_array_equal(got, formats.to_f32(v[16 * step :][:16], dtype).T)


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize(("role", "rows"), [("a", 64), ("b", 40)])
def test_operand_without_swizzle(
    major: str, role: str, rows: int, rng: np.random.Generator
) -> None:
    """8x8 cores of 128 bytes: the offset across K is 128, the one across rows 256 + 32."""
    across_k, across_rows, start = 128, 288, 0x530
    matrix = rng.integers(0, 1 << 16, (rows, 16), dtype=np.uint16)
    data = np.zeros(1 << 16, np.uint8)
    words = data.view(np.uint16)
    for row, k in itertools.product(range(rows), range(16)):
        core = start + row // 8 * across_rows + k // 8 * across_k
        line, column = (row % 8, k % 8) if major == "k" else (k % 8, row % 8)
        words[(core + line * 16 + column * 2) // 2] = matrix[row, k]
    plan = tensor_core.operand((descriptor(start, across_k, across_rows, 0),), role, major, rows, 2)
    got = natural(tensor_core.load(plan, smem_of(data), "bf16"), role)
    np.testing.assert_array_equal(got, formats.to_f32(matrix, "bf16"))


def test_operand_touches_what_it_gathers() -> None:
    """K-major, 128-byte swizzle: rows are eight granules apart, a step of K takes two of each."""
    plan = tensor_core.operand((descriptor(0x400 + 64, 16, 1024, 3),), "b", "k", 16, 2)
    expected = {0x40 + 8 * row + (column ^ row % 8) for row in range(16) for column in (4, 5)}
    assert plan.touched.tolist() == sorted(expected)
    assert sorted(plan.granules.tolist()) == sorted(expected)
    assert plan.touched.dtype == np.int64


@pytest.mark.parametrize("role", ["a", "b"])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_several_steps_at_once(role: str, major: str, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 1 << 17, dtype=np.uint8)
    advance = 32 if major == "k" else 2048
    descs = tuple(descriptor(0x4000 + advance * step, 8192, 1024, 3) for step in range(4))
    fused = tensor_core.load(tensor_core.operand(descs, role, major, 64, 2), smem_of(data), "bf16")
    single = [
        tensor_core.load(tensor_core.operand((d,), role, major, 64, 2), smem_of(data), "bf16")
        for d in descs
    ]
    np.testing.assert_array_equal(fused, np.concatenate(single))


def test_operand_refusals() -> None:
    with pytest.raises(NotImplementedError, match="base offset 5"):
        tensor_core.operand((descriptor(0, 16, 1024, 3, base_offset=5),), "b", "k", 16, 2)
    with pytest.raises(NotImplementedError, match="MN-major"):
        tensor_core.operand((descriptor(0, 16, 1024, 3),), "b", "mn", 16, 1)
    plan = tensor_core.operand((descriptor(0x3F000, 16, 1024, 3),), "b", "k", 8, 2)
    with pytest.raises(IndexError):
        tensor_core.load(plan, np.zeros(0x3F00, GRANULE), "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32", "e4m3", "s8"])
def test_a_from_registers(dtype: str, rng: np.random.Generator) -> None:
    regs = rng.integers(0, 1 << 32, (4, 128), dtype=np.uint32)
    itemsize = formats.RAW[dtype].itemsize
    per_register = 4 // itemsize
    raw = np.zeros((64, 32 // itemsize), formats.RAW[dtype])
    for lane, i, part in itertools.product(range(128), range(4), range(per_register)):
        w, g, q = lane // 32, lane // 4 % 8, lane % 4
        bits = int(regs[i, lane]) >> 8 * itemsize * part & (1 << 8 * itemsize) - 1
        row, k = 16 * w + g + 8 * (i % 2), (q + 4 * (i // 2)) * per_register + part
        raw[row, k] = bits
    got = natural(tensor_core.a_from_registers(regs, dtype), "a")
    np.testing.assert_array_equal(got, formats.to_f32(raw, dtype))


@pytest.mark.parametrize("n", [8, 80, 256])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16])
def test_accumulator_layout(n: int, dtype: type) -> None:
    matrix = np.arange(64 * n).astype(np.uint16).view(np.float16).reshape(64, n)
    if dtype is not np.float16:
        matrix = np.arange(64 * n).astype(dtype).reshape(64, n)
    acc = tensor_core.matrix_to_acc(matrix)
    halves = 2 if dtype is np.float16 else 1
    assert acc.shape == (n // 2 // halves, 128 * halves)
    bits = f"u{matrix.itemsize}"
    for i, lane in itertools.product(range(n // 2), range(128)):
        w, g, q = lane // 32, lane // 4 % 8, lane % 4
        row, column = 16 * w + g + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * q + i % 2
        held = acc[i // halves, lane * halves + i % halves]
        assert held.view(bits) == matrix[row, column].view(bits)
    np.testing.assert_array_equal(
        tensor_core.acc_to_matrix(acc).view(bits), np.ascontiguousarray(matrix).view(bits)
    )


def fragment(matrix: NDArray[np.float32], role: str) -> NDArray[np.float32]:
    """[rows, K] to [K, rows in fragment order]: the inverse of `natural`."""
    numbered = np.arange(matrix.shape[0], dtype=np.float32)[None]
    place = natural(numbered, role)[:, 0].astype(int)  # where each natural row stands
    out = np.empty(matrix.T.shape, np.float32)
    out[:, place] = matrix.T
    return out


@pytest.mark.parametrize("n", [8, 24, 128, 256])
@pytest.mark.parametrize("scale_d", [False, True])
@pytest.mark.parametrize("neg_a", [False, True])
@pytest.mark.parametrize("neg_b", [False, True])
def test_mma_f32(n: int, scale_d: bool, neg_a: bool, neg_b: bool, rng: np.random.Generator) -> None:
    """Small integers, so that sums are exact in any order."""
    a, b, d = (rng.integers(-8, 9, s).astype(np.float32) for s in [(64, 16), (n, 16), (64, n)])
    acc = np.ascontiguousarray(tensor_core.matrix_to_acc(d))
    sign = -1 if neg_a != neg_b else 1
    tensor_core.mma(fragment(a, "a"), fragment(b, "b"), acc, scale_d, neg_a, neg_b)
    expected = sign * (a.astype(np.float64) @ b.T) + scale_d * d
    np.testing.assert_array_equal(tensor_core.acc_to_matrix(acc), expected)


def test_mma_ignores_garbage_it_overwrites_and_other_registers(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((64, 16)), rng.standard_normal((16, 16))
    file = np.full((20, 128), np.nan, np.float32)
    tensor_core.mma(
        fragment(a.astype(np.float32), "a"), fragment(b.astype(np.float32), "b"), file[4:12], False
    )
    assert np.isnan(file[:4]).all() and np.isnan(file[12:]).all()
    np.testing.assert_allclose(tensor_core.acc_to_matrix(file[4:12]), a @ b.T, atol=1e-5)


def test_mma_f16(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s).astype(np.float32) for s in [(64, 16), (40, 16)])
    d = rng.standard_normal((64, 40)).astype(np.float16)
    registers = np.ascontiguousarray(tensor_core.matrix_to_acc(d)).view(np.uint32)
    assert registers.shape == (10, 128)
    exact = a.astype(np.float64) @ b.T
    for scale_d in (True, False):
        acc = registers.view(np.float16)
        tensor_core.mma(fragment(a, "a"), fragment(b, "b"), acc, scale_d)
        expected = (scale_d * d + exact).astype(np.float16)
        np.testing.assert_array_max_ulp(tensor_core.acc_to_matrix(acc), expected, maxulp=1)


@pytest.mark.parametrize(("low", "high"), [(-128, 128), (0, 256)])
def test_mma_s32(low: int, high: int, rng: np.random.Generator) -> None:
    a, b = (rng.integers(low, high, s) for s in [(64, 32), (24, 32)])
    a[0], b[0] = low or high - 1, low or high - 1  # the largest sum
    d = rng.integers(-(1 << 31), 1 << 31, (64, 24))
    d[0, 0] = (1 << 31) - 1
    exact = a @ b.T + d
    for saturate in (False, True):
        acc = np.ascontiguousarray(tensor_core.matrix_to_acc(d.astype(np.int32)))
        tensor_core.mma(
            fragment(a.astype(np.float32), "a"),
            fragment(b.astype(np.float32), "b"),
            acc,
            saturate=saturate,
        )
        expected = exact.clip(-(1 << 31), (1 << 31) - 1) if saturate else exact.astype(np.int32)
        np.testing.assert_array_equal(tensor_core.acc_to_matrix(acc), expected)
    with pytest.raises(ValueError, match="K = 288"):
        tensor_core.mma(np.zeros((288, 64), np.float32), np.zeros((288, 24), np.float32), acc)


def test_attention_products_through_tma(rng: np.random.Generator) -> None:
    """S = Q K^T and O = P V on tiles moved by TMA: boxes, swizzles, operands and registers."""
    q, k, v = (
        torch.from_numpy(rng.standard_normal((rows, 64)).astype(np.float32)).bfloat16()
        for rows in (64, 96, 96)
    )
    smem = np.zeros(1 << 16, GRANULE)
    places = {"q": 0x400, "k": 0x4400, "v": 0x8400}
    for name, matrix in (("q", q), ("k", k), ("v", v)):
        rows = matrix.shape[0]
        memory = Memory(matrix.view(torch.int16).numpy().reshape(-1).view(np.uint8), 0x10000)
        tensor = tma.decode(encode(0x10000, 10, 2, (64, rows), (128,), (64, rows), swizzle=3))
        dense = tma.read_box(tensor, (0, 0), memory.view)
        addresses = tma.swizzled(places[name], tensor.box_bytes, 3, tensor.inner_bytes)
        smem[addresses >> 4] = dense.view(GRANULE)

    def load(name: str, step: int, role: str, major: str, rows: int) -> NDArray[np.float32]:
        advance = 32 * step if major == "k" else 2048 * step
        desc = descriptor(places[name] + advance, 16, 1024, 3)
        plan = tensor_core.operand((desc,), role, major, rows, 2)
        return tensor_core.load(plan, smem, "bf16")

    s = np.full((48, 128), np.nan, np.float32)
    for step in range(4):
        tensor_core.mma(
            load("q", step, "a", "k", 64), load("k", step, "b", "k", 96), s, scale_d=step > 0
        )
    expected = q.double() @ k.double().T
    np.testing.assert_allclose(tensor_core.acc_to_matrix(s), expected.numpy(), atol=1e-4)

    # P stays in registers: a pair of accumulator registers becomes one register of A
    p = formats.f32_to_bf16(s).astype(np.uint32)
    packed = p[0::2] | p[1::2] << np.uint32(16)
    o = np.full((32, 128), np.nan, np.float32)
    for step in range(6):
        a = tensor_core.a_from_registers(packed[4 * step : 4 * step + 4], "bf16")
        tensor_core.mma(a, load("v", step, "b", "mn", 64), o, scale_d=step > 0)
    p_exact = torch.from_numpy(tensor_core.acc_to_matrix(s)).bfloat16().double()
    np.testing.assert_allclose(
        tensor_core.acc_to_matrix(o), (p_exact @ v.double()).numpy(), atol=2e-3
    )


def test_rates() -> None:
    """4096 FLOP a clock in 16-bit types, twice that in 8-bit types, half in tf32."""
    for itemsize, rate in ((2, 4096), (1, 8192), (4, 2048)):
        assert tensor_core.wgmma_flops(128, itemsize) == rate * tensor_core.wgmma_clocks(128)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_matrix_addresses(warps: int, num: int, trans: bool, rng: np.random.Generator) -> None:
    row_addresses = rng.permutation(4096)[: 32 * warps] * 16
    got = tensor_core.matrix_addresses(row_addresses, num, trans)
    assert got.shape == (num, 2, 32 * warps)
    for matrix, half, lane in itertools.product(range(num), range(2), range(32 * warps)):
        warp, t = divmod(lane, 32)
        row, column = t // 4, 2 * (t % 4) + half
        if trans:
            row, column = column, row
        giver = 32 * warp + 8 * matrix + row
        assert got[matrix, half, lane] == row_addresses[giver] + 2 * column


def test_movmatrix(rng: np.random.Generator) -> None:
    regs = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
    got = tensor_core.movmatrix(regs)
    for lane, half in itertools.product(range(64), range(2)):
        warp, t = divmod(lane, 32)
        row, column = 2 * (t % 4) + half, t // 4  # of the source
        source = int(regs[32 * warp + 4 * row + column // 2]) >> 16 * (column % 2)
        assert int(got[lane]) >> 16 * half & 0xFFFF == source & 0xFFFF
