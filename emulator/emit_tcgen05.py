"""Blackwell's tensor cores and tensor memory: each instruction calls a method of `Tcgen05`."""

from __future__ import annotations

import re

from .emit import Emitter, Handler, Unknown, registry, vector
from .ptx import Address, Operand

HANDLERS: dict[str, Handler] = {}
op = registry(HANDLERS)

_SCALED = {"mxf8f6f4": 32, "mxf4": 32, "mxf4nvf4": 16}  # kind: elements that share a factor
_BLOCKS = {"scale_vec::1X": 32, "scale_vec::2X": 32, "scale_vec::4X": 16}
_DTYPES = {"f32": "f32", "u32": "u32", "s32": "i32"}
_BLOCKS |= {"block16": 16, "block32": 32}


@op("tcgen05")
def _tcgen05(e: Emitter, *operands: Operand) -> None:
    act = e.next()
    if act.startswith("fence::"):
        # Proven kernels lack it: what it orders, barriers order here.
        return None
    {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "ld": _ld,
        "st": _st,
        "wait::ld": _wait_ld,
        "wait::st": _wait_st,
        "mma": _mma,
        "commit": _commit,
        "cp": _cp,
        "shift": _shift,
    }[act](e, *operands)


def _pair(e: Emitter) -> bool:
    return e.need("cta_group::1", "cta_group::2") == "cta_group::2"


def _warp(e: Emitter) -> list[str]:
    """Takes .sync.aligned; the line that waits for the lanes of the warp."""
    e.need("sync")
    e.need("aligned")
    return e.together(f"converge(-1, {{m}}, {e.site})")


def _alloc(e: Emitter, where: Operand, columns: Operand) -> None:
    pair, here, space = _pair(e), _warp(e), e.space()
    e.need("b32")
    e.effect(
        *here,
        f"if not tmem_alloc({e.shared_address(where, space)}, {e.text('u32', columns)}, {pair}, "
        f"{{m}}, {e.site}): return STALL",
    )


def _dealloc(e: Emitter, where: Operand, columns: Operand) -> None:
    pair, here = _pair(e), _warp(e)
    e.need("b32")
    address, count = e.text("u32", where), e.text("u32", columns)
    e.effect(*here, f"tmem_dealloc({address}, {count}, {pair}, {{m}}, {e.site})")


def _relinquish(e: Emitter) -> None:
    pair, here = _pair(e), _warp(e)
    e.effect(*here, f"tmem_relinquish({pair}, {{m}}, {e.site})")


def _wait_ld(e: Emitter) -> None:
    e.effect(*_warp(e), f"tmem_wait('ld', {{m}}, {e.site})")


def _wait_st(e: Emitter) -> None:
    e.effect(*_warp(e), f"tmem_wait('st', {{m}}, {e.site})")


def _shape(e: Emitter, half: str, split: tuple[Operand, ...]) -> tuple[list[str], str]:
    """Takes the parts of ld and st: the line that waits, and the arguments that say the shape."""
    here = _warp(e)
    shape = e.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    count = next(part for part in e.parts if re.fullmatch(r"x\d+", part))
    e.need(count)
    packed = e.flag(half)
    if (len(split) == 1) != (shape == "16x32bx2"):
        raise Unknown
    return here, f"'{shape}', {count[1:]}, {packed}, {split[0] if split else 0}"


def _registers(e: Emitter, operand: Operand) -> tuple[Operand, ...]:
    """The b32 registers that are loaded or stored."""
    registers = vector(operand)
    if any(e.registers.get(str(r)) != "b32" for r in registers):
        raise Unknown
    return registers


def _rows(registers: tuple[Operand, ...]) -> str:
    return f"{{u*:{' '.join(map(str, registers))}}}"


def _ld(e: Emitter, dst: Operand, *rest: Operand) -> None:
    reduction = e.flag("red")
    type_ = e.need("f32", "u32", "s32") if reduction else e.need("b32")
    fold = e.need("min", "max") if reduction else ""
    magnitude, nan = e.flag("abs"), e.flag("NaN")
    best = rest[:reduction]
    where, *split = rest[reduction:]
    here, shape = _shape(e, "pack::16b", tuple(split))
    if here:
        e.effect(*here)
    rows = _rows(_registers(e, dst))
    lines = [f"t = tmem_ld({e.address(where)}, {shape}, {{m}}, {e.site})", f"{rows} <- t"]
    for register in best:
        letter = e.destination(type_, str(register))
        folded = f"tmem_reduce(t, '{fold}', {_DTYPES[type_]}, {magnitude}, {nan})"
        lines.append(f"{{{letter}:{register}}} <- {folded}")
    e.effect(*lines, asynchronous=True)


def _st(e: Emitter, where: Operand, *rest: Operand) -> None:
    e.need("b32")
    *split, src = rest
    here, shape = _shape(e, "unpack::16b", tuple(split))
    if here:
        e.effect(*here)
    rows = _rows(_registers(e, src))
    e.effect(f"tmem_st({e.address(where)}, {rows}, {shape}, {{m}}, {e.site})")


def _mma(e: Emitter, d: Operand, a: Operand, b: Operand, idesc: Operand, *rest: Operand) -> None:
    ws, pair = e.flag("ws"), _pair(e)
    (kind,) = [part for part in e.parts if part.startswith("kind::")]
    e.parts.remove(kind)
    kind = kind.removeprefix("kind::")
    e.ignore(prefixes=("collector::",))  # hints: what to keep for the next one
    block = _SCALED.get(kind, 0)
    if block:
        e.need("block_scale")
        block = _BLOCKS.get(e.one_of(*_BLOCKS), block)
    ashift = e.flag("ashift")
    in_tmem = isinstance(a, Address)
    tail = list(rest)
    scales = [e.address(tail.pop(0)) for _ in range(2 if block else 0)]
    disabled = tail.pop(0) if tail and isinstance(tail[0], tuple) else ()
    enable, *scale_d = tail
    if len(scale_d) > 1 or (ws and scale_d):
        raise Unknown
    left = e.address(a) if in_tmem else e.text("u64", a)
    form = f"('{kind}', {pair}, {in_tmem}, {ws}, False, {block}, {ashift})"
    e.effect(
        f"tmem_mma({form}, {e.address(d)}, {left}, {e.text('u64', b)}, {e.text('u32', idesc)}, "
        f"({''.join(f'{s}, ' for s in scales)}), {_enable(e, enable)}, "
        f"{e.words(32, vector(disabled)) if disabled else '()'}, "
        f"{scale_d[0] if scale_d else 0}, {{m}}, {e.site})"
    )


def _enable(e: Emitter, operand: Operand) -> str:
    return str(bool(operand)) if isinstance(operand, int) else e.predicate(operand)


def _commit(e: Emitter, where: Operand, *rest: Operand) -> None:
    pair = _pair(e)
    e.need("mbarrier::arrive::one")
    e.need("b64")
    space, multicast = e.space(), e.flag("multicast::cluster")
    if len(rest) != multicast:
        raise Unknown
    mask = e.text("u16", rest[0]) if multicast else "None"
    e.effect(f"tmem_commit({e.shared_address(where, space)}, {mask}, {pair}, {{m}}, {e.site})")


def _cp(e: Emitter, where: Operand, source: Operand) -> None:
    pair = _pair(e)
    shape = e.need("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = e.one_of("warpx2::02_13", "warpx2::01_23", "warpx4")
    packed = e.one_of("b6x16_p32", "b4x16_p64")
    if packed:
        e.need("b8x16")
    e.effect(
        f"tmem_cp({e.address(where)}, {e.text('u64', source)}, '{shape}', '{multicast}', "
        f"'{packed}', {pair}, {{m}}, {e.site})"
    )


def _shift(e: Emitter, where: Operand) -> None:
    pair = _pair(e)
    e.need("down")
    e.effect(f"tmem_shift({e.address(where)}, {pair}, {{m}}, {e.site})")
