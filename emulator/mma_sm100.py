"""The Blackwell tensor core: tcgen05.mma's descriptors, layouts in tensor memory, and products.

One tcgen05.mma multiplies A [M, K] and B [N, K] into D [M, N] in tensor memory (TMEM), K being 32
bytes of operand type. A lies in shared memory or in TMEM, B in shared memory. In a pair of CTAs
each multiplies M / 2 rows of A, its own, by all N rows of B, of which each holds half; descriptors
and addresses are one and mean every CTA's own memory.

TMEM is [512 columns, 128 lanes] here, transposed, so that a column is contiguous. Where D lies
depends on M. As many rows as lanes: row r is lane r. Sixty-four rows of one CTA take the lower or
the upper 16 lanes of each 32; with `.ws`, and in pairs, all lanes in two parts: the left half of
D's columns in the lower 64 lanes, the right half beside it in the upper ones. (Thirty-two rows:
four parts.) Each part multiplies an A of its own, if that lies in TMEM.

Kinds with block scaling multiply runs of K by scale factors, which lie in TMEM: row r's are bytes
of one word, in lane r % 32 and the column r // 32 from the first on; and all that in each 32 lanes
anew, or, of B where D has two parts, its rows of either half in 64 lanes.

Products are exact and summed in f32 by BLAS, as in `tensor_core`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import tensor_core
from .formats import FORMATS, RAW, to_f32
from .granules import WIDE
from .tensor_core import K_BYTES, Operand, SmemDesc

LANES, COLUMNS = 128, 512
_EXACT_DEPTH = 256  # of products of 8-bit integers that f32 sums exactly
_EIGHTHS = (8, 16)  # how lanes part
_STEP_COLUMNS = K_BYTES // 4  # of A for one instruction

_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_TYPES: dict[str, dict[int, str]] = {  # of A and B, by a field of the descriptor
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_D_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
_SCALE_TYPES: dict[tuple[str, int], dict[int, str]] = {  # by kind and elements that share one
    ("mxf8f6f4", 32): {1: "ue8m0"},
    ("mxf4", 32): {1: "ue8m0"},
    ("mxf4nvf4", 32): {1: "ue8m0"},
    ("mxf4nvf4", 16): {0: "ue4m3", 1: "ue8m0"},
}
_SWIZZLES = {0: 0, 1: WIDE, 2: 3, 4: 2, 6: 1}  # descriptor bits 61-63 to a mode of `swizzle`


class _Datapath(NamedTuple):
    rows: int  # of A that a CTA multiplies
    parts: int  # of D's columns, each in its own lanes


_DATAPATHS = {  # by (pair, ws, M)
    (False, False, 128): _Datapath(128, 1),
    (False, False, 64): _Datapath(64, 1),
    (False, True, 128): _Datapath(128, 1),
    (False, True, 64): _Datapath(64, 2),
    (False, True, 32): _Datapath(32, 4),
    (True, False, 256): _Datapath(128, 1),
    (True, False, 128): _Datapath(64, 2),
}


@dataclass(frozen=True, slots=True)
class Form:
    """What the opcode of a tcgen05.mma says."""

    kind: str  # a key of `_K`
    pair: bool = False  # cta_group::2
    a_tmem: bool = False  # A comes from tensor memory
    ws: bool = False  # weight-stationary
    sparse: bool = False
    block: int = 0  # elements that share a scale factor (block_scale): 32 or 16; 0: as by default
    ashift: bool = False

    def __str__(self) -> str:
        ws = ".ws" * self.ws
        block = f".block_scale.block{self.block}" * bool(self.block)
        return f"tcgen05.mma{ws}.cta_group::{1 + self.pair}.kind::{self.kind}{block}"


class Cells(NamedTuple):
    """A part of tensor memory; `eighths` counts groups of 16 lanes. Indexes a [512, 8] array."""

    columns: slice
    eighths: slice


@dataclass(frozen=True)
class InstructionDesc:
    """The 32-bit instruction descriptor, but for the place of scale factors in their words."""

    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    scale_type: str | None
    neg_a: bool
    neg_b: bool
    mn_major_a: bool
    mn_major_b: bool
    saturate: bool  # s32 only: clamp instead of wrapping


@lru_cache(maxsize=1 << 10)
def decode_instruction(idesc: int, form: Form) -> InstructionDesc:
    """Decodes an instruction descriptor.

    Raises:
        NotImplementedError: a sparse A, the shifted A or B of convolutions, or K = 96 (sm_103).
        ValueError: a kind, or a type that it has not.
    """
    if form.sparse or idesc & 4:
        raise NotImplementedError(f"{form} with a sparse A")
    if form.ashift:
        raise NotImplementedError(f"{form} with a shifted A")
    scaled = form.kind not in _D_TYPES
    if scaled and idesc >> 31:
        raise NotImplementedError(f"{form} with K = 96")
    if not scaled and idesc >> 30:
        raise NotImplementedError(f"{form} that reuses a shifted B")

    def of(table: dict[int, str], what: str, low: int, bits: int) -> str:
        code = idesc >> low & ((1 << bits) - 1)
        if code not in table:
            raise ValueError(f"{form} has no {what} type {code} (descriptor {idesc:#010x})")
        return table[code]

    if scaled:
        types = _SCALE_TYPES.get((form.kind, form.block or 32), {})
        d_type, scale_type = "f32", of(types, "scale factor", 23, 1)
    else:
        d_type, scale_type = of(_D_TYPES[form.kind], "D", 4, 2), None
    return InstructionDesc(
        m=(idesc >> 24 & 0x1F) << 4,
        n=(idesc >> 17 & 0x3F) << 3,
        a_type=of(_TYPES[form.kind], "A", 7, 3),
        b_type=of(_TYPES[form.kind], "B", 10, 3),
        d_type=d_type,
        scale_type=scale_type,
        neg_a=bool(idesc >> 13 & 1),
        neg_b=bool(idesc >> 14 & 1),
        mn_major_a=bool(idesc >> 15 & 1),
        mn_major_b=bool(idesc >> 16 & 1),
        saturate=bool(idesc >> 3 & 1),
    )


def decode_descriptor(desc: int) -> SmemDesc:
    """Decodes the 64-bit descriptor of an operand in shared memory.

    Raises:
        NotImplementedError: the leading offset is an absolute address (sm_103 only).
        ValueError: not a descriptor of this generation, or an unknown swizzle.
    """
    if desc >> 52 & 1:
        raise NotImplementedError("matrix descriptor with an absolute leading dimension")
    if desc >> 46 & 7 != 1 or desc >> 61 not in _SWIZZLES:
        raise ValueError(f"not a matrix descriptor of sm_100: {desc:#018x}")
    return SmemDesc(
        start=(desc & 0x3FFF) << 4,
        lbo=(desc >> 16 & 0x3FFF) << 4,
        sbo=(desc >> 32 & 0x3FFF) << 4,
        base_offset=desc >> 49 & 7,
        swizzle=_SWIZZLES[desc >> 61],
    )


class Step(NamedTuple):
    """The operands of one instruction, as `plan` takes them."""

    a: int
    b: int
    idesc: int
    scale_a: int
    scale_b: int


class _Scales(NamedTuple):
    """Scale factors of an instruction."""

    cells: Cells
    rows: int  # in each part
    parts: int
    bytes_: slice  # of each word


@dataclass(frozen=True, eq=False)
class Plan:
    """One instruction, or several into one D that follow each other along K.

    What it touches stands once for each CTA, though all are alike.

    Attributes:
        smem: granules that A and B are read from, ascending, each once.
        d: cells that are written, and read to accumulate.
        a: cells that are read as A.
        scales: cells that are read as scale factors.
    """

    form: Form
    desc: InstructionDesc
    at: int  # address of D
    steps: tuple[Step, ...]
    smem: tuple[NDArray[np.int64], ...]
    d: tuple[tuple[Cells, ...], ...]
    a: tuple[tuple[Cells, ...], ...]
    scales: tuple[tuple[Cells, ...], ...]
    smem_a: Operand | None
    smem_b: Operand
    factors: tuple[tuple[_Scales, _Scales], ...]  # of A and of B, by step
    parts: int

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations on one SM."""
        return 2 * self.desc.m * self.desc.n * self._depth // len(self.d)

    @property
    def clocks(self) -> int:
        """Clocks that an SM's tensor core is busy.

        It does 8192 FLOP a clock in 16-bit types on all 128 lanes, half that in tf32 and twice that
        in 8-bit types; since K is always 32 bytes, the type cancels out.
        """
        return len(self.steps) * self.desc.n // self.parts // 2

    @property
    def _depth(self) -> int:
        return len(self.steps) * _K[self.form.kind]

    def run(
        self,
        tmems: Sequence[NDArray[np.uint32]],
        smems: Sequence[np.ndarray],
        accumulate: bool,
        disabled: int = 0,
        scale_d: int = 0,
    ) -> None:
        """D = A B^T + D * 2^-scale_d in place, or D = A B^T.

        Args:
            tmems: each CTA's tensor memory, [512 columns, 128 lanes].
            smems: each CTA's shared memory from address 0 on, viewed as `GRANULE`.
            accumulate: whether to add what D holds.
            disabled: bit 128 * r + l: lane l of CTA r keeps its D.
            scale_d: 0 to 15, for 16-bit and tf32 operands.

        Raises:
            IndexError: an operand exceeds shared memory.
            ValueError: scale factors that differ where they should be repeated.
        """
        shares = [self._from_smem(self.smem_b, smem, self.desc.b_type) for smem in smems]
        b = shares[0] if len(shares) == 1 else np.concatenate(shares, axis=1)
        cells = self.d[0][0]
        for rank, (tmem, smem) in enumerate(zip(tmems, smems, strict=True)):
            a = self._load_a(tmem, smem)
            if self.factors:
                a, right = self._scaled(a, b, tmem)
            else:
                right = b
            product = self._product(a, right)
            d = tmem.reshape(COLUMNS, *_EIGHTHS)[cells]
            new = self._update(d, product.reshape(d.shape), accumulate, scale_d)
            kept = disabled >> LANES * rank & ((1 << LANES) - 1)
            if kept:
                new = np.where(_lane_bits(kept)[cells.eighths], d, new)
            d[...] = new

    def _from_smem(self, operand: Operand, smem: np.ndarray, dtype: str) -> NDArray[np.float32]:
        """A or B, [K, rows]."""
        if dtype in RAW:
            return tensor_core.load(operand, smem, dtype)
        raw = smem.take(operand.granules).view(np.uint8).reshape(-1, 16)
        if _K[self.form.kind] == 64:
            elements = np.stack([raw & 15, raw >> 4], axis=2)
        else:
            elements = _unpadded(raw, dtype)
        return to_f32(elements.reshape(operand.rows, -1).T, dtype)

    def _load_a(self, tmem: NDArray[np.uint32], smem: np.ndarray) -> NDArray[np.float32]:
        """[K, rows], or [K, lanes of all parts] from TMEM."""
        dtype = self.desc.a_type
        if self.smem_a is not None:
            return self._from_smem(self.smem_a, smem, dtype)
        lanes = tmem.reshape(COLUMNS, *_EIGHTHS)
        words = np.concatenate([lanes[cells] for cells in self.a[0]])  # [columns, eighths, 16]
        raw = words.view(RAW.get(dtype, np.uint8))
        if dtype not in RAW:
            if _K[self.form.kind] == 64:
                raw = np.stack([raw & 15, raw >> 4], axis=-1)
            else:  # in the middle of a byte, or its lower bits
                raw = raw >> 2 & 15 if dtype == "e2m1" else raw & 63
        by_lane = raw.reshape(len(words), words[0].size, -1)
        return to_f32(by_lane.swapaxes(1, 2), dtype).reshape(self._depth, -1)

    def _scaled(
        self, a: NDArray[np.float32], b: NDArray[np.float32], tmem: NDArray[np.uint32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A and B multiplied by their scale factors."""
        dtype = self.desc.scale_type
        assert dtype is not None
        of_a = np.concatenate([_load_scales(scales, tmem, dtype) for scales, _ in self.factors])
        of_b = np.concatenate([_load_scales(scales, tmem, dtype) for _, scales in self.factors])
        if self.smem_a is None:  # the lanes of each part
            of_a = np.tile(of_a, self.parts)
        block = self._depth // len(of_a)
        return a * of_a.repeat(block, axis=0), b * of_b.repeat(block, axis=0)

    def _product(self, a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
        """[columns of D, lanes of D]."""
        if self.desc.d_type == "s32" and len(a) > _EXACT_DEPTH:
            a, b = a.astype(np.float64), b.astype(np.float64)
        if self.parts == 1:
            product = _dot(b, a)
        else:
            own = np.split(a, self.parts, axis=1) if self.smem_a is None else [a] * self.parts
            pairs = zip(np.split(b, self.parts, axis=1), own, strict=True)
            product = np.concatenate([_dot(*pair) for pair in pairs], axis=1)
        if self.desc.neg_a != self.desc.neg_b:
            np.negative(product, out=product)
        return product

    def _update(
        self,
        old: NDArray[np.uint32],
        product: NDArray[np.floating],
        accumulate: bool,
        scale_d: int,
    ) -> NDArray[np.uint32]:
        """The words of D: all of one f32 or s32, the lower half for f16."""
        if self.desc.d_type == "s32":
            total = product.astype(np.int64)
            if accumulate:
                total += old.view(np.int32)
            if self.desc.saturate:
                limits = np.iinfo(np.int32)
                np.clip(total, limits.min, limits.max, out=total)
            return total.astype(np.int32).view(np.uint32)
        half = self.desc.d_type == "f16"
        if accumulate:
            held = old.astype(np.uint16).view(np.float16) if half else old.view(np.float32)
            product += held * np.float32(2.0**-scale_d) if scale_d else held
        if half:
            return product.astype(np.float16).view(np.uint16).astype(np.uint32)
        return product.view(np.uint32)


@lru_cache(maxsize=1 << 12)
def plan(
    form: Form, d: int, a: int, b: int, idesc: int, scale_a: int = 0, scale_b: int = 0
) -> Plan:
    """Plans one tcgen05.mma.

    Args:
        form: what its opcode says.
        d: address in tensor memory (lane << 16 | column).
        a, b: 64-bit matrix descriptors; of `a`, if `form.a_tmem`, an address in tensor memory.
        idesc: the 32-bit instruction descriptor.
        scale_a, scale_b: addresses of scale factors in tensor memory.

    Raises:
        NotImplementedError: what is not modelled: see the decoders; and a base offset.
        ValueError: a shape or a layout that the form has not, or an address outside TMEM.
    """
    return _plan(form, d, (Step(a, b, idesc, scale_a, scale_b),))


def joins(first: Plan, second: Plan) -> bool:
    """Whether `fuse` takes both together."""
    return (first.at, first.form, first.desc) == (second.at, second.form, second.desc)


@lru_cache(maxsize=1 << 10)
def fuse(plans: tuple[Plan, ...]) -> Plan:
    """Instructions into one D that follow each other along K, as one; see `joins`.

    All but the first must accumulate, without `scale_d`, and disable the same lanes.
    """
    return _plan(plans[0].form, plans[0].at, tuple(step for p in plans for step in p.steps))


def _plan(form: Form, at: int, steps: tuple[Step, ...]) -> Plan:
    desc = decode_instruction(steps[0].idesc, form)
    rows, parts = _datapath(form, desc)
    d = _cells(at, desc.n // parts, rows * parts)
    smem_a, tmem_a = None, ()
    if form.a_tmem:
        tmem_a = tuple(_cells(step.a, _STEP_COLUMNS, rows * parts) for step in steps)
        if desc.mn_major_a or any(cells.eighths != d.eighths for cells in tmem_a):
            raise ValueError("A in tensor memory is K-major and in the lanes of D")
    else:
        smem_a = _gathering(form, [step.a for step in steps], desc.a_type, desc.mn_major_a, rows)
    ctas = 2 if form.pair else 1
    own = desc.n // ctas
    smem_b = _gathering(form, [step.b for step in steps], desc.b_type, desc.mn_major_b, own)
    granules = [operand.granules for operand in (smem_a, smem_b) if operand is not None]
    smem = np.unique(np.concatenate(granules))
    smem.flags.writeable = False
    factors = tuple(_factors(form, desc, step, rows, parts) for step in steps if desc.scale_type)
    scales = tuple(scales.cells for both in factors for scales in both)
    return Plan(
        form,
        desc,
        at,
        steps,
        (smem,) * ctas,
        ((d,),) * ctas,
        (tmem_a,) * ctas,
        (scales,) * ctas,
        smem_a,
        smem_b,
        factors,
        parts,
    )


def _datapath(form: Form, desc: InstructionDesc) -> _Datapath:
    """Rows and parts of a CTA's share.

    Raises:
        ValueError: the form has no such shape.
    """
    found = _DATAPATHS.get((form.pair, form.ws, desc.m))
    step = 8 if not form.pair else 32 if form.kind == "i8" else 16
    widths = (64, 128, 256) if form.ws else range(step, 257, step)
    scaled = desc.scale_type is not None
    if found is None or desc.n not in widths or (scaled and (form.ws or desc.m < 128)):
        raise ValueError(f"{form} has no shape M = {desc.m}, N = {desc.n}")
    return found


def _gathering(form: Form, descs: Sequence[int], dtype: str, mn_major: bool, rows: int) -> Operand:
    """Plans the gathering of an operand from shared memory.

    Raises:
        ValueError: a type that cannot be MN-major, or cannot with that swizzle.
    """
    decoded = [decode_descriptor(desc) for desc in descs]
    itemsize = max(1, K_BYTES // _K[form.kind])
    what = f"{dtype} operand of {rows} rows, {'MN' if mn_major else 'K'}-major"
    if any((desc.swizzle == WIDE) != (mn_major and dtype == "tf32") for desc in decoded):
        raise ValueError(f"{what}: a swizzle of 32-byte atoms is for MN-major tf32 and it alone")
    if mn_major and (dtype not in RAW or rows % (16 // itemsize)):
        raise ValueError(f"{what}: only elements of 8 bits and more, in whole granules")
    return tensor_core.gathering(decoded, "natural", "mn" if mn_major else "k", rows, itemsize)


def _cells(address: int, columns: int, lanes: int) -> Cells:
    """The cells of a matrix that takes so many lanes: all, or 16 of each 32.

    Raises:
        ValueError: they exceed tensor memory, or start at another lane than these can.
    """
    first, lane = address & 0xFFFF, address >> 16
    if first + columns > COLUMNS or lane not in ((0,) if lanes == LANES else (0, 16)):
        raise ValueError(
            f"{lanes} lanes x {columns} columns from lane {lane}, column {first} of TMEM on"
        )
    half = slice(None) if lanes == LANES else slice(lane // 16, None, 2)
    return Cells(slice(first, first + columns), half)


def _factors(
    form: Form, desc: InstructionDesc, step: Step, rows: int, parts: int
) -> tuple[_Scales, _Scales]:
    """Where the scale factors of A and B are."""
    count = _K[form.kind] // (form.block or 32)

    def at(address: int, first: int, rows: int, parts: int) -> _Scales:
        if first % count:
            raise ValueError(f"{count} scale factors a row from byte {first} of a word on")
        # The two highest bits repeat which byte of the word is the first.
        cells = _cells(address & 0x3FFFFFFF, -(-rows // 32), LANES)
        return _Scales(cells, rows, parts, slice(first, first + count))

    return (
        at(step.scale_a, step.idesc >> 29 & 3, rows, 1),
        at(step.scale_b, step.idesc >> 4 & 3, desc.n // parts, parts),
    )


def _load_scales(scales: _Scales, tmem: NDArray[np.uint32], dtype: str) -> NDArray[np.float32]:
    """[factors a row, rows].

    Raises:
        ValueError: they differ where they should be repeated.
    """
    words = np.ascontiguousarray(tmem[scales.cells.columns]).view(np.uint8)
    by_row = words.reshape(-1, LANES, 4)[:, :, scales.bytes_].reshape(len(words), 4, 32, -1)
    every = by_row.swapaxes(0, 1).reshape(scales.parts, 4 // scales.parts, 32 * len(words), -1)
    every = every[:, :, : scales.rows]
    if (every != every[:, :1]).any():
        raise ValueError("scale factors are not the same in each 32 lanes of tensor memory")
    return to_f32(every[:, 0].reshape(scales.parts * scales.rows, -1).T, dtype)


def _unpadded(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.uint8]:
    """The 16 elements of fewer than 8 bits in each granule, [granules, 16]; the rest is padding."""
    bits = 1 + FORMATS[dtype].exponent + FORMATS[dtype].mantissa
    byte, shift = np.divmod(np.arange(16) * bits, 8)
    both = raw[:, byte] | raw[:, byte + 1].astype(np.uint16) << 8
    return (both >> shift & ((1 << bits) - 1)).astype(np.uint8)


def _dot(b: NDArray[np.floating], a: NDArray[np.floating]) -> NDArray[np.floating]:
    """B A^T, [columns, rows], of [K, columns] and [K, rows]."""
    out = np.empty((b.shape[1], a.shape[1]), a.dtype)
    some = max(8, tensor_core.SINGLE_THREAD // a.size)
    for first in range(0, len(out), some):
        np.dot(b[:, first : first + some].T, a, out=out[first : first + some])
    return out


def _lane_bits(bits: int) -> NDArray[np.bool_]:
    """Which lanes a mask holds, [8, 16]."""
    raw = np.frombuffer(bits.to_bytes(LANES // 8, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little").astype(bool).reshape(_EIGHTHS)
