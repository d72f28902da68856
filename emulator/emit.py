"""PTX instructions to steps: what each one computes or does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .ptx import Address, Instruction, Kernel, Pair
from .steps import (
    BANK,
    BITS,
    CLASS_LETTERS,
    LETTER,
    NARROW,
    SPECIAL,
    Constant,
    Effect,
    Products,
    Pure,
    literal,
)  # fmt: skip

Handler = Callable[["Emitter", Instruction], None]
HANDLERS: dict[str, Handler] = {}


def _op(*heads: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for head in heads:
            HANDLERS[head] = handler
        return handler

    return register


class Unknown(Exception):
    """The emitter met a form it does not know; it becomes NotImplementedError when executed."""


class Emitter:
    """Appends the steps of one block's instructions to `steps`; `fall` is the block behind it."""

    def __init__(self, kernel: Kernel, steps: list[Pure | Effect], fall: int) -> None:
        self.kernel, self.steps, self.fall = kernel, steps, fall
        self.registers = kernel.registers
        self.site = -1
        self.first = True  # of the block: only that instruction can find lanes missing
        self.guard: tuple[str, bool] | None = None

    def instruction(self, ins: Instruction) -> None:
        self.first, self.site = self.site < 0, ins.index
        self.guard = (ins.predicate, ins.negated) if ins.predicate else None
        before = len(self.steps)
        handler = HANDLERS.get(ins.parts[0])
        try:
            if handler is None:
                raise Unknown
            handler(self, ins)
        except (Unknown, KeyError, IndexError, ValueError, TypeError):
            del self.steps[before:]
            self.effect([f"unknown({ins.index})"])

    def pure(
        self, code: str, type_: str, dst: object, srcs: Sequence[tuple[str, object]],
        direct: bool = False, options: str = "",
    ) -> None:  # fmt: skip
        if dst == "_":
            return
        if not isinstance(dst, str) or dst not in self.registers:
            raise Unknown
        sources = tuple(self.source(t, v) for t, v in srcs)
        letter = self.destination(type_, dst)
        constant = all(isinstance(value, Constant) for _, value in sources)
        if direct and (constant or letter != LETTER.get(type_)):
            code, direct = (
                f"{code}({', '.join('{%d}' % i for i in range(len(srcs)))}{options})",
                False,
            )  # noqa: UP031
            options = ""
        self.steps.append(Pure(code, direct, letter, dst, sources, self.guard, self.site, options))

    def destination(self, type_: str, register: str) -> str:
        cls = self.registers[register]
        if type_ in LETTER and BANK[LETTER[type_]] == {"pred": "P", "b16": "H", "b32": "R",
                                                         "b64": "D"}.get(cls):  # fmt: skip
            return LETTER[type_]
        return CLASS_LETTERS[cls][1 if type_.startswith("s") else 0]

    def source(self, type_: str, value: object) -> tuple[str, object]:
        if type_ == "n":
            return ("n", value)
        if isinstance(value, (int, float)):
            return ("c", Constant(LETTER.get(type_, "u"), self.immediate(type_, value)))
        if not isinstance(value, str):
            raise Unknown
        if value in self.registers:
            cls = self.registers[value]
            letter = LETTER.get(type_)
            if letter and BANK[letter] == {"pred": "P", "b16": "H", "b32": "R", "b64": "D"}.get(
                cls
            ):
                return (letter, value)
            if cls == "b128":
                raise Unknown
            base = CLASS_LETTERS[cls][0]
            return (f"{base}:{NARROW[type_]}", value)
        if special := SPECIAL.match(value):
            return ("n", special.group(1) + (special.group(2) or "").replace(".", "_"))
        if value in self.kernel.shared:
            return ("n", f"shared_address('{value}')")
        if value in self.kernel.local:
            return ("c", Constant("U", self.kernel.local[value]))
        for param in self.kernel.params:
            if param.name == value:
                return ("n", f"param_address({param.offset})")
        if value == "WARP_SZ":
            return ("c", Constant("u", 32))
        raise Unknown

    @staticmethod
    def immediate(type_: str, value: int | float) -> int | float:
        letter = LETTER.get(type_, "")
        if letter in ("f", "F", "X", "e"):
            return float(value)
        if isinstance(value, float):  # a float's bits in an integer-typed move
            return int(np.float32(value).view(np.uint32))
        if letter == "p":
            return bool(value)
        bits = BITS[type_]
        low = value & ((1 << bits) - 1)
        signed = letter in ("j", "i", "I") or type_ == "s8"
        return low - (1 << bits) if signed and low >> (bits - 1) else low

    def effect(
        self, lines: list[str], reads: Iterable[object] = (), writes: Iterable[object] = (),
        jump: bool = False, asynchronous: bool = False,
    ) -> None:  # fmt: skip
        self.steps.append(
            Effect(
                lines, tuple(r for r in map(str, reads) if r in self.registers),
                tuple(w for w in map(str, writes) if w in self.registers),
                self.guard, self.site, jump, asynchronous,
            )
        )  # fmt: skip

    def together(self, call: str) -> list[str]:
        """The line that waits for other lanes, by a call that says whether they are here."""
        return [f"if not {call}: return STALL"] if self.first else []

    # Text of an operand inside an effect
    def text(self, type_: str, value: object) -> str:
        kind, found = self.source(type_, value)
        if isinstance(found, Constant):
            return literal(found.value)
        if kind == "n":
            return str(found)
        base, _, cast = kind.partition(":")
        return f"{{{base}:{found}}}" + (f".astype({cast})" if cast else "")

    def address(self, operand: object) -> str:
        if not isinstance(operand, Address):
            raise Unknown
        base = operand.base
        if isinstance(base, int):
            return str(base + operand.offset)
        if base in self.registers:
            letter = "U" if self.registers[base] == "b64" else "u"
            text = f"{{{letter}:{base}}}"
            if operand.offset:
                text += f" + {operand.offset}" if operand.offset > 0 else f" - {-operand.offset}"
            return text
        return f"{self.text('u64', base)} + {operand.offset}"

    def base(self, operand: object) -> list[object]:
        return [operand.base, *operand.coords] if isinstance(operand, Address) else []


def _last(ins: Instruction) -> str:
    return ins.parts[-1]


_UFUNC = {"add": "add", "sub": "subtract", "min": "minimum", "max": "maximum", "and": "bitwise_and",
          "or": "bitwise_or", "xor": "bitwise_xor"}  # fmt: skip


@_op("add", "sub", "min", "max")
def _arith(e: Emitter, ins: Instruction) -> None:
    head, type_ = ins.parts[0], _last(ins)
    dst, *args = ins.operands
    mods = ins.parts[1:-1]
    if "cc" in mods:
        return _with_carry(e, ins)
    if "ftz" in mods:
        name = {"min": "fmin", "max": "fmax"}.get(head, _UFUNC[head])
        return _flushed(e, ins, f"{name}({{0}}, {{1}})")
    if type_ in ("f16x2", "bf16x2"):
        op = head + (".NaN" if "NaN" in mods else "") + (".sat" if "sat" in mods else "")
        call = f"ops.packed('{type_}', '{op}', {', '.join('{%d}' % i for i in range(len(args)))})"  # noqa: UP031
        return e.pure(call, "b32", dst, [("b32", a) for a in args])
    if type_ in ("f16", "bf16"):
        op = head + (".NaN" if "NaN" in mods else "")
        if mods[-1:] and mods[0] == "rn" and ins.parts[-2] == "f32":  # add.rn.f32.f16 (mixed)
            raise Unknown
        if head in ("add", "sub") and ins.parts[1:3] == ("rn", "f32"):
            raise Unknown
        if "f32" in mods:  # mixed precision: f32 result, first source 16-bit
            wide = "ops.bf16_to_f32({0})" if type_ == "bf16" else "{0}.astype(f32)"
            sign = "+" if head == "add" else "-"
            return e.pure(f"{wide} {sign} {{1}}", "f32", dst, [(type_, args[0]), ("f32", args[1])])
        call = f"ops.scalar16('{type_}', '{op}', {{0}}, {{1}})"
        return e.pure(call, "b16", dst, [("b16", a) for a in args])
    if type_ == "f32x2":
        op = _UFUNC[head]
        rounding = next((m for m in mods if m in ("rz", "rm", "rp")), "rn")
        if rounding == "rn":
            return e.pure(f"{op}({{0}}, {{1}})", type_, dst, [(type_, a) for a in args])
        wide = f"ops.directed({op}({{0}}, {{1}}, dtype=f64), '{rounding}')"
        return e.pure(wide, type_, dst, [(type_, a) for a in args])
    if type_ in ("f32", "f64") and head in ("min", "max"):
        name = {"min": "fmin", "max": "fmax"}[head] if "NaN" not in mods else _UFUNC[head]
        if "xorsign" in mods or "abs" in mods:
            raise Unknown
        if len(args) == 3:
            return e.pure(
                f"{name}({name}({{0}}, {{1}}), {{2}})", type_, dst, [(type_, a) for a in args]
            )
        return e.pure(name, type_, dst, [(type_, a) for a in args], direct=True)
    if type_ in ("f32", "f64"):
        rounding = next((m for m in mods if m in ("rz", "rm", "rp")), "rn")
        if rounding != "rn" and type_ == "f32":
            wide = f"ops.directed({_UFUNC[head]}({{0}}, {{1}}, dtype=f64), '{rounding}')"
            return e.pure(wide, type_, dst, [(type_, a) for a in args])
        if "sat" in mods:
            call = f"ops.saturate({_UFUNC[head]}({{0}}, {{1}}))"
            return e.pure(call, type_, dst, [(type_, a) for a in args])
    elif "sat" in mods:  # add.sat.s32
        call = f"ops.saturate_int({_UFUNC[head]}({{0}}, {{1}}, dtype=i64), i32)"
        return e.pure(call, type_, dst, [(type_, a) for a in args])
    elif "relu" in mods:
        call = f"maximum({_UFUNC[head]}({{0}}, {{1}}), 0)"
        return e.pure(call, type_, dst, [(type_, a) for a in args])
    if len(args) == 3:
        raise Unknown
    e.pure(_UFUNC[head], type_, dst, [(type_, a) for a in args], direct=True)


@_op("addc", "subc", "madc")
def _with_carry(e: Emitter, ins: Instruction) -> None:
    """Arithmetic that takes the lanes' carry (addc, subc, madc), leaves one (.cc), or both."""
    head, type_ = ins.parts[0], _last(ins)
    if type_ not in ("u32", "s32", "b32"):
        raise Unknown
    dst, *args = ins.operands
    texts = ", ".join(e.text(type_, a) for a in args)
    call = f"with_carry('{head[:3]}', ({texts},), {len(head) == 4}, {'cc' in ins}, {'hi' in ins}, {{m}})"
    e.effect([f"t = {call}", f"{{u:{dst}}} <- t"], args, [dst])


def _flushed(e: Emitter, ins: Instruction, code: str) -> None:
    """A float32 operation that takes and gives zero for subnormal numbers (.ftz)."""
    dst, *args = ins.operands
    if _last(ins) != "f32" or not {*ins.parts[1:-1]} <= {"rn", "ftz"}:
        raise Unknown
    for i in range(len(args)):
        code = code.replace(f"{{{i}}}", f"ops.ftz({{{i}}})")
    e.pure(f"ops.ftz({code})", "f32", dst, [("f32", a) for a in args])


@_op("mul", "mad", "fma")
def _multiply(e: Emitter, ins: Instruction) -> None:
    head, type_ = ins.parts[0], _last(ins)
    dst, *args = ins.operands
    mods = ins.parts[1:-1]
    typed = [(type_, a) for a in args]
    if "cc" in mods:
        return _with_carry(e, ins)
    if "ftz" in mods:
        code = "multiply({0}, {1})" if head == "mul" else "ops.fma({0}, {1}, {2})"
        return _flushed(e, ins, code)
    if type_ in ("f16x2", "bf16x2"):
        op = head + (".relu" if "relu" in mods else "") + (".sat" if "sat" in mods else "")
        holes = ", ".join(f"{{{i}}}" for i in range(len(args)))
        return e.pure(
            f"ops.packed('{type_}', '{op}', {holes})", "b32", dst, [("b32", a) for a in args]
        )
    if type_ in ("f16", "bf16"):
        if "f32" in mods:  # fma.rn.f32.bf16: 16-bit factors, f32 addend
            wide = [
                f"ops.bf16_to_f32({{{i}}})" if type_ == "bf16" else f"{{{i}}}.astype(f32)"
                for i in (0, 1)
            ]
            return e.pure(
                f"ops.fma({wide[0]}, {wide[1]}, {{2}})", "f32", dst,
                [(type_, args[0]), (type_, args[1]), ("f32", args[2])],
            )  # fmt: skip
        op = head + (".relu" if "relu" in mods else "")
        holes = ", ".join(f"{{{i}}}" for i in range(len(args)))
        return e.pure(
            f"ops.scalar16('{type_}', '{op}', {holes})", "b16", dst, [("b16", a) for a in args]
        )
    rounding = next((m for m in mods if m in ("rz", "rm", "rp")), "rn")
    if type_ in ("f32", "f32x2"):
        if head == "mul":
            if rounding != "rn":
                code = f"ops.directed(multiply({{0}}, {{1}}, dtype=f64), '{rounding}')"
                return e.pure(code, type_, dst, typed)
            if "sat" in mods:
                return e.pure("ops.saturate(multiply({0}, {1}))", type_, dst, typed)
            if type_ == "f32x2":
                return e.pure("multiply({0}, {1})", type_, dst, typed)
            return e.pure("multiply", type_, dst, typed, direct=True)
        if rounding != "rn":
            return e.pure(f"ops.fma_round({{0}}, {{1}}, {{2}}, '{rounding}')", type_, dst, typed)
        code = "ops.fma({0}, {1}, {2})"
        return e.pure(f"ops.saturate({code})" if "sat" in mods else code, type_, dst, typed)
    if type_ == "f64":
        code = "multiply({0}, {1})" if head == "mul" else "{0} * {1} + {2}"
        return e.pure(code, type_, dst, typed)
    if "sat" in mods:
        raise Unknown
    if "wide" in mods:
        wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}[type_]
        dtype = {"s32": "i32", "u32": "u32", "s64": "i64", "u64": "u64"}[wide]
        if head == "mul":
            return e.pure(
                "multiply",
                wide,
                dst,
                typed,
                direct=True,
                options=f", dtype={dtype}, casting='unsafe'",
            )
        typed[2] = (wide, args[2])
        return e.pure(
            f"multiply({{0}}, {{1}}, dtype={dtype}, casting='unsafe') + {{2}}", wide, dst, typed
        )
    if "hi" in mods:
        code = "ops.mul_hi({0}, {1})"
        return e.pure(code if head == "mul" else f"{code} + {{2}}", type_, dst, typed)
    if head == "mul":
        return e.pure("multiply", type_, dst, typed, direct=True)
    e.pure("{0} * {1} + {2}", type_, dst, typed)


@_op("mul24", "mad24")
def _mul24(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, *args = ins.operands
    if "lo" not in ins:
        raise Unknown
    low = "(({%d} << 8) >> 8)"
    code = f"{low % 0} * {low % 1}" + (" + {2}" if len(args) > 2 else "")
    e.pure(code, type_, dst, [(type_, a) for a in args])


@_op("and", "or", "xor")
def _logic(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, *args = ins.operands
    name = _UFUNC[ins.parts[0]]
    if type_ == "pred":
        name = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor"}[ins.parts[0]]
    e.pure(name, type_, dst, [(type_, a) for a in args], direct=True)


@_op("not")
def _not(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    name = "logical_not" if type_ == "pred" else "invert"
    e.pure(name, type_, ins.operands[0], [(type_, ins.operands[1])], direct=True)


@_op("neg", "abs")
def _unary(e: Emitter, ins: Instruction) -> None:
    head, type_ = ins.parts[0], _last(ins)
    dst, src = ins.operands
    if type_ in ("f16x2", "bf16x2"):
        return e.pure(f"ops.packed('{type_}', '{head}', {{0}})", "b32", dst, [("b32", src)])
    if type_ == "bf16":
        return e.pure(f"ops.scalar16('bf16', '{head}', {{0}})", "b16", dst, [("b16", src)])
    name = {"neg": "negative", "abs": "absolute"}[head]
    e.pure(name, type_, dst, [(type_, src)], direct=True)


@_op("cnot")
def _cnot(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    e.pure("({0} == 0)", type_, ins.operands[0], [(type_, ins.operands[1])])


@_op("copysign")
def _copysign(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, sign, magnitude = ins.operands
    e.pure("copysign", type_, dst, [(type_, magnitude), (type_, sign)], direct=True)


@_op("shl", "shr")
def _shift(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, value, amount = ins.operands
    name = "left_shift" if ins.parts[0] == "shl" else "right_shift"
    dtype = {16: "16", 32: "32", 64: "64"}[BITS[type_]]
    kind = "i" if type_.startswith("s") else "u"
    if isinstance(amount, int):
        if amount >= BITS[type_]:
            amount = BITS[type_] - 1 if kind == "i" else amount
            if kind == "u":
                return e.pure("zeros_like({0})", type_, dst, [(type_, value)])
        return e.pure(name, type_, dst, [(type_, value), (type_, amount)], direct=True)
    if kind == "i":  # an arithmetic shift by too much leaves the sign
        code = f"{name}({{0}}, minimum({{1}}, {BITS[type_] - 1}).astype({kind}{dtype}))"
    else:
        code = f"where({{1}} < {BITS[type_]}, {name}({{0}}, ({{1}} & {BITS[type_] - 1}).astype(u{dtype})), 0)"
    e.pure(code, type_, dst, [(type_, value), ("u32", amount)])


@_op("shf")
def _funnel(e: Emitter, ins: Instruction) -> None:
    dst, low, high, amount = ins.operands
    code = f"ops.funnel({{0}}, {{1}}, {{2}}, {ins.parts[1] == 'l'}, {'clamp' in ins})"
    e.pure(code, "b32", dst, [("b32", low), ("b32", high), ("u32", amount)])


@_op("setp")
def _setp(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    compare = ins.parts[1]
    dst, a, b, *rest = ins.operands
    combine = ins.parts[2] if ins.parts[2] in ("and", "or", "xor") else None
    typed = "f32" if type_ in ("f16", "bf16") and False else type_
    srcs: list[tuple[str, object]] = [(typed, a), (typed, b)]
    if type_ in ("f16x2", "bf16x2"):
        raise Unknown
    wide = "{0}", "{1}"
    if type_ == "bf16":
        wide = "ops.bf16_to_f32({0})", "ops.bf16_to_f32({1})"
    code, direct = _comparison(compare, type_, wide)
    dst_q = None
    if isinstance(dst, Pair):
        dst, dst_q = dst.first, dst.second
    negated = "!" if rest and isinstance(rest[0], str) and rest[0].startswith("!") else ""
    if combine:
        c = str(rest[0]).lstrip("!")
        mark = {"and": "&", "or": "|", "xor": "^"}[combine]
        tail = f" {mark} {'~' if negated else ''}{{2}}"
        expression = code if not direct else f"{code}({wide[0]}, {wide[1]})"
        e.pure(f"({expression}){tail}", "pred", dst, [*srcs, ("pred", c)])
        if dst_q:
            e.pure(f"~({expression}){tail}", "pred", dst_q, [*srcs, ("pred", c)])
        return
    e.pure(code, "pred", dst, srcs, direct=direct)
    if dst_q:
        expression = code if not direct else f"{code}({wide[0]}, {wide[1]})"
        e.pure(f"~({expression})", "pred", dst_q, srcs)


_COMPARE = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
            "ge": "greater_equal", "lo": "less", "ls": "less_equal", "hi": "greater",
            "hs": "greater_equal"}  # fmt: skip


def _comparison(compare: str, type_: str, wide: tuple[str, str]) -> tuple[str, bool]:
    a, b = wide
    floating = type_ in ("f16", "bf16", "f32", "f64")
    if floating and compare in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        negation = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
        if compare == "equ":
            return f"({a} == {b}) | isnan({a}) | isnan({b})", False
        if compare == "neu":
            return f"{a} != {b}", False
        return f"~({a} {negation[compare]} {b})", False
    if floating and compare == "ne":
        return f"({a} != {b}) & ~isnan({a}) & ~isnan({b})", False
    if compare == "num":
        return f"~(isnan({a}) | isnan({b}))", False
    if compare == "nan":
        return f"isnan({a}) | isnan({b})", False
    if type_ == "bf16":
        return f"{_COMPARE[compare]}({a}, {b})", False
    return _COMPARE[compare], True


@_op("set")
def _set(e: Emitter, ins: Instruction) -> None:
    compare, dtype, type_ = ins.parts[1], ins.parts[-2], _last(ins)
    dst, a, b = ins.operands
    code, direct = _comparison(compare, type_, ("{0}", "{1}"))
    expression = f"{code}({{0}}, {{1}})" if direct else code
    yes = "1.0" if dtype == "f32" else "-1" if dtype == "s32" else "0xFFFFFFFF"
    e.pure(f"where({expression}, {yes}, 0)", dtype, dst, [(type_, a), (type_, b)])


@_op("selp")
def _selp(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, a, b, p = ins.operands
    e.pure("where({2}, {0}, {1})", type_, dst, [(type_, a), (type_, b), ("pred", p)])


@_op("slct")
def _slct(e: Emitter, ins: Instruction) -> None:
    type_, test = ins.parts[-2], ins.parts[-1]
    dst, a, b, c = ins.operands
    e.pure("where({2} >= 0, {0}, {1})", type_, dst, [(type_, a), (type_, b), (test, c)])


@_op("mov")
def _mov(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, src = ins.operands
    if isinstance(dst, tuple):  # unpack
        return _unpack(e, type_, dst, src)
    if isinstance(src, tuple):  # pack
        return _pack(e, type_, dst, src)
    if type_ == "b128":
        raise Unknown
    if isinstance(src, Address):
        raise Unknown
    kind, value = e.source(type_, src)
    if kind == "n" and "clock" in str(value) or kind == "n" and "timer" in str(value):
        return e.effect(
            [f"{{{e.destination(type_, str(dst))}:{dst}}} <- read_{value}()"], (), [dst]
        )
    e.pure("{0}", type_, dst, [(type_, src)])


def _part_type(bits: int) -> str:
    return f"b{bits}"


def _unpack(e: Emitter, type_: str, dst: tuple, src: object) -> None:
    bits = BITS[type_] // len(dst)
    for i, part in enumerate(dst):
        if part == "_":
            continue
        mask = (1 << bits) - 1
        code = f"({{0}} >> {bits * i}) & {mask}" if i else f"{{0}} & {mask}"
        e.pure(code, _part_type(bits), part, [(type_, src)])


def _pack(e: Emitter, type_: str, dst: object, src: tuple) -> None:
    bits = BITS[type_] // len(src)
    dtype = f"u{BITS[type_]}"
    terms = [
        f"({{{i}}}.astype({dtype}) << {bits * i})"
        if not isinstance(s, int)
        else f"({{{i}}} << {bits * i})"
        for i, s in enumerate(src)
    ]
    terms[0] = terms[0].replace(" << 0", "")
    if all(isinstance(s, int) for s in src):
        value = sum((s & ((1 << bits) - 1)) << (bits * i) for i, s in enumerate(src))
        return e.pure("{0}", type_, dst, [(type_, value)])
    e.pure(" | ".join(terms), type_, dst, [(_part_type(bits), s) for s in src])


@_op("cvta")
def _cvta(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, src = ins.operands
    space = next(
        (
            p.split("::")[0]
            for p in ins.parts
            if p.startswith(("shared", "global", "param", "const", "local"))
        ),
        "",
    )
    if space in ("global", "param", "const"):  # these windows keep their addresses
        return e.pure("{0}", type_, dst, [(type_, src)])
    if space == "shared":
        code = "{0} & 0xFFFFFFFF" if "to" in ins else "{0} | SHARED_WINDOW"
        return e.pure(code, type_, dst, [(type_, src)])
    raise Unknown


@_op("isspacep")
def _isspacep(e: Emitter, ins: Instruction) -> None:
    dst, src = ins.operands
    space = ins.parts[1].split("::")[0]
    test = {"shared": "({0} >> 40) == SHARED_TAG", "global": "({0} >> 40) != SHARED_TAG"}[space]
    e.pure(test, "pred", dst, [("u64", src)])


@_op("mapa")
def _mapa(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    dst, address, rank = ins.operands
    keep = "0xFFFFFF" if type_ == "u32" else f"{0xFFFFFFFF00FFFFFF}"
    cast = "u32" if type_ == "u32" else "u64"
    high = f"({{1}}.astype({cast}) << 24)" if isinstance(rank, str) else "({1} << 24)"
    e.pure(f"({{0}} & {keep}) | {high}", type_, dst, [(type_, address), ("u32", rank)])


@_op("getctarank")
def _getctarank(e: Emitter, ins: Instruction) -> None:
    dst, address = ins.operands
    e.pure("({0} >> 24) & 0xFF", "u32", dst, [(_last(ins), address)])


@_op("prmt")
def _prmt(e: Emitter, ins: Instruction) -> None:
    dst, a, b, selector = ins.operands
    mode = ins.parts[2] if len(ins.parts) > 2 else ""
    e.pure(
        f"ops.prmt({{0}}, {{1}}, {{2}}, '{mode}')",
        "b32",
        dst,
        [("b32", a), ("b32", b), ("b32", selector)],
    )


@_op("lop3")
def _lop3(e: Emitter, ins: Instruction) -> None:
    if len(ins.operands) != 5 or isinstance(ins.operands[0], Pair):
        raise Unknown
    dst, a, b, c, table = ins.operands
    e.pure(
        f"ops.lop3({{0}}, {{1}}, {{2}}, {table})", "b32", dst, [("b32", a), ("b32", b), ("b32", c)]
    )


@_op("bfe", "bfi", "popc", "clz", "brev", "bfind", "dp4a", "szext", "sad", "fns")
def _bits(e: Emitter, ins: Instruction) -> None:
    head, type_ = ins.parts[0], _last(ins)
    dst, *args = ins.operands
    if head == "bfe":
        return e.pure(
            "ops.bfe({0}, {1}, {2})",
            type_,
            dst,
            [(type_, args[0]), ("u32", args[1]), ("u32", args[2])],
        )
    if head == "bfi":
        return e.pure(
            "ops.bfi({0}, {1}, {2}, {3})",
            type_,
            dst,
            [(type_, args[0]), (type_, args[1]), ("u32", args[2]), ("u32", args[3])],
        )
    if head in ("popc", "clz"):
        return e.pure(f"ops.{head}({{0}})", "u32", dst, [(type_, args[0])])
    if head == "brev":
        return e.pure("ops.brev({0})", type_, dst, [(type_, args[0])])
    if head == "bfind":
        return e.pure(f"ops.bfind({{0}}, {'shiftamt' in ins})", "u32", dst, [(type_, args[0])])
    if head == "dp4a":
        signs = f"{ins.parts[1] == 's32'}, {ins.parts[2] == 's32'}"
        out = "s32" if "s32" in ins.parts[1:] else "u32"
        return e.pure(
            f"ops.dot4({{0}}, {{1}}, {{2}}, {signs})",
            out,
            dst,
            [("b32", args[0]), ("b32", args[1]), (out, args[2])],
        )
    if head == "sad":
        return e.pure(
            "{2} + where({0} > {1}, {0} - {1}, {1} - {0})", type_, dst, [(type_, a) for a in args]
        )
    raise Unknown


@_op("rcp", "ex2", "lg2", "sqrt", "rsqrt", "sin", "cos", "tanh")
def _special(e: Emitter, ins: Instruction) -> None:
    head, type_ = ins.parts[0], _last(ins)
    dst, src = ins.operands
    if type_ in ("f16x2", "bf16x2"):
        return e.pure(f"ops.packed('{type_}', '{head}', {{0}})", "b32", dst, [("b32", src)])
    if type_ in ("f16", "bf16"):
        return e.pure(f"ops.scalar16('{type_}', '{head}', {{0}})", "b16", dst, [("b16", src)])
    if type_ not in ("f32", "f64"):
        raise Unknown
    code = {"rcp": "ops.rcp({0})", "ex2": "exp2({0})", "lg2": "log2({0})", "sqrt": "sqrt({0})",
            "rsqrt": "ops.rsqrt({0})", "sin": "sin({0})", "cos": "cos({0})", "tanh": "tanh({0})"}[head]  # fmt: skip
    if type_ == "f64":
        code = code.replace("ops.rcp({0})", "1.0 / {0}")
    elif head == "ex2" and "ftz" in ins:
        code = "ops.ex2_ftz({0})"
    e.pure(code, type_, dst, [(type_, src)])


@_op("div", "rem")
def _divide(e: Emitter, ins: Instruction) -> None:
    head, type_ = ins.parts[0], _last(ins)
    dst, a, b = ins.operands
    if type_ in ("f32", "f64"):
        return e.pure("{0} / {1}", type_, dst, [(type_, a), (type_, b)])
    e.pure(f"ops.{head}_int({{0}}, {{1}})", type_, dst, [(type_, a), (type_, b)])


@_op("testp")
def _testp(e: Emitter, ins: Instruction) -> None:
    type_ = _last(ins)
    code = {"finite": "isfinite({0})", "infinite": "isinf({0})", "number": "~isnan({0})",
            "notanumber": "isnan({0})"}[ins.parts[1]]  # fmt: skip
    e.pure(code, "pred", ins.operands[0], [(type_, ins.operands[1])])


_INT = {"u8": "u8", "s8": "i8", "u16": "u16", "s16": "i16", "u32": "u32", "s32": "i32",
        "u64": "u64", "s64": "i64", "b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}  # fmt: skip


@_op("cvt", "cvt.pack")
def _cvt(e: Emitter, ins: Instruction) -> None:
    mods = ins.parts[1:]
    if "pack" in mods:
        raise Unknown
    to, from_ = ins.parts[-2], ins.parts[-1]
    dst, *args = ins.operands
    flags = ins.parts[1:-2]
    rounding = next((f for f in flags if f in ("rn", "rz", "rm", "rp", "rna")), "rn")
    integer_rounding = next((f for f in flags if f in ("rni", "rzi", "rmi", "rpi")), "rzi")
    sat = "sat" in flags
    if "rs" in flags:
        raise Unknown
    pair = "maximum({0}, f32(0)), maximum({1}, f32(0))" if "relu" in flags else "{0}, {1}"
    if to in ("bf16x2", "f16x2") and from_ == "f32":
        if rounding not in ("rn", "rz"):
            raise Unknown
        code = f"ops.pack_{to[:-2]}({pair}, '{rounding}')"
        return e.pure(code, "b32", dst, [("f32", args[0]), ("f32", args[1])])
    if to in ("e4m3x2", "e5m2x2") and from_ == "f32":
        code = f"ops.fp8_pair({pair}, '{to[:4]}')"
        return e.pure(code, "b16", dst, [("f32", args[0]), ("f32", args[1])])
    if "relu" in flags:
        raise Unknown
    if to in ("e4m3x2", "e5m2x2"):
        code = f"ops.fp8_pair(*ops.halves({{0}}, '{from_}'), '{to[:4]}')"
        return e.pure(code, "b16", dst, [("b32", args[0])])
    if from_ in ("e4m3x2", "e5m2x2"):
        return e.pure(
            f"ops.fp8_pair_to_f16x2({{0}}, '{from_[:4]}')", "b32", dst, [("b16", args[0])]
        )
    (src,) = args
    if to == "tf32":
        return e.pure(f"ops.to_tf32({{0}}, '{rounding}')", "b32", dst, [("f32", src)])
    wide = {"bf16": "ops.bf16_to_f32({0})"}.get(from_, "{0}")
    if "ftz" in flags:
        if from_ != "f32":
            raise Unknown
        wide = "ops.ftz({0})"
    floats = ("f16", "bf16", "f32", "f64")
    if to in _INT and from_ in _INT:
        if sat:
            return e.pure(f"ops.saturate_int({{0}}, {_INT[to]})", to, dst, [(from_, src)])
        narrow = f"{{0}}.astype({_INT[to]})" if isinstance(src, str) else "{0}"
        return e.pure(narrow, to, dst, [(from_, src)])
    if to in _INT and from_ in floats:
        return e.pure(
            f"ops.float_to_int({wide}, {_INT[to]}, '{integer_rounding}')", to, dst, [(from_, src)]
        )
    if to in floats and from_ in _INT:
        exact = "{0}.astype(f64)"
        code = {"f64": exact, "f32": f"ops.directed({exact}, '{rounding}')",
                "f16": f"{exact}.astype(f16)", "bf16": f"ops.f32_to_bf16({exact}.astype(f32))"}[to]  # fmt: skip
        if to == "f32" and rounding == "rn":
            code = "{0}.astype(f32)"
        return e.pure(code, to, dst, [(from_, src)])
    if any(f in ("rni", "rzi", "rmi", "rpi") for f in flags):
        wide = f"ops.round_float({wide}, '{integer_rounding}')"
    if sat:
        wide = f"ops.saturate({wide})"
    if to == "f32":
        code = f"{wide}.astype(f32)" if from_ != "f64" else f"ops.directed({wide}, '{rounding}')"
        return e.pure(code, to, dst, [(from_, src)])
    if to == "f64":
        return e.pure(f"{wide}.astype(f64)", to, dst, [(from_, src)])
    if to == "f16":
        return e.pure(
            f"ops.f32_to_f16({wide}.astype(f32), '{rounding}')", "b16", dst, [(from_, src)]
        )
    if to == "bf16":
        return e.pure(
            f"ops.f32_to_bf16({wide}.astype(f32), '{rounding}')", "b16", dst, [(from_, src)]
        )
    raise Unknown


@_op("createpolicy")
def _createpolicy(e: Emitter, ins: Instruction) -> None:
    e.pure("{0}", "b64", ins.operands[0], [("b64", 0)])


# Effects -----------------------------------------------------------------------------------------


@_op("bra")
def _bra(e: Emitter, ins: Instruction) -> None:
    target = e.kernel.labels[str(ins.operands[0])]
    target = target if target < len(e.kernel.blocks) else -1
    if e.guard is None:
        return e.effect([f"return {target}"], jump=True)
    register, negated = e.guard
    fall = e.fall if e.fall < len(e.kernel.blocks) else -1
    yes, no = (fall, target) if negated else (target, fall)
    e.effect([f"return branch({{p:{register}}}, {{m}}, {yes}, {no})"], [register], jump=True)


@_op("ret", "exit")
def _ret(e: Emitter, ins: Instruction) -> None:
    if e.guard is None:
        return e.effect(["return -1"], jump=True)
    register, negated = e.guard
    yes, no = (e.fall, -1) if negated else (-1, e.fall)
    e.effect([f"return branch({{p:{register}}}, {{m}}, {yes}, {no})"], [register], jump=True)


@_op("trap", "brkpt")
def _trap(e: Emitter, ins: Instruction) -> None:
    e.effect([f"trap({{m}}, {ins.index})"])


@_op("prefetch", "prefetchu", "applypriority", "discard")
def _hint(e: Emitter, ins: Instruction) -> None:
    """Cache hints carry no semantics here."""


def _space(ins: Instruction) -> str:
    for part in ins.parts[1:]:
        space, _, scope = part.partition("::")
        if space in ("shared", "global", "param", "local", "const"):
            return "cluster" if part == "shared::cluster" else space
    return "generic"


def _vector(ins: Instruction) -> int:
    return next((int(p[1:]) for p in ins.parts if re.fullmatch(r"v[248]", p)), 1)


_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4,
          "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f16": 2, "bf16": 2, "f16x2": 4,
          "bf16x2": 4}  # fmt: skip


@_op("ld", "ldu")
def _ld(e: Emitter, ins: Instruction) -> None:
    type_, space, count = _last(ins), _space(ins), _vector(ins)
    dst, where = ins.operands
    registers = dst if isinstance(dst, tuple) else (dst,)
    size = _BYTES[type_]
    if space == "param":
        if not isinstance(where, Address):
            raise Unknown
        param = next((p for p in e.kernel.params if p.name == where.base), None)
        address = str(param.offset + where.offset) if param else e.address(where)
        call = f"ld_param({address}, {size}, {count})"
    else:
        call = f"ld_{space}({e.address(where)}, {size}, {count}, {{m}}, {ins.index})"
    lines = [f"t = {call}"]
    signed = f".view(i{size * 8})" if type_.startswith("s") else ""
    for i, register in enumerate(registers):
        if register != "_":
            lines.append(f"{{{e.destination(type_, str(register))}:{register}}} <- t[{i}]{signed}")
            if e.destination(type_, str(register)) == "f":
                lines[-1] = f"{{u:{register}}} <- t[{i}]"
            elif e.destination(type_, str(register)) in ("F", "e"):
                letter = "U" if e.destination(type_, str(register)) == "F" else "h"
                lines[-1] = f"{{{letter}:{register}}} <- t[{i}]"
    e.effect(lines, e.base(where), registers)


@_op("st")
def _st(e: Emitter, ins: Instruction) -> None:
    type_, space, count = _last(ins), _space(ins), _vector(ins)
    if "async" in ins:
        return _st_async(e, ins)
    where, src = ins.operands
    registers = src if isinstance(src, tuple) else (src,)
    size = _BYTES[type_]
    if len(registers) != count:
        raise Unknown
    raw = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}[size]
    values = ", ".join(e.text(raw, r) for r in registers)
    e.effect(
        [f"st_{space}({e.address(where)}, {size}, ({values},), {{m}}, {ins.index})"],
        [*e.base(where), *registers],
    )


def _st_async(e: Emitter, ins: Instruction) -> None:
    where, src, barrier = ins.operands
    registers = src if isinstance(src, tuple) else (src,)
    size = _BYTES[_last(ins)]
    raw = {4: "b32", 8: "b64"}[size]
    values = ", ".join(e.text(raw, r) for r in registers)
    e.effect(
        [
            f"st_async({e.address(where)}, {size}, ({values},), {e.address(barrier)}, {{m}}, {ins.index})"
        ],
        [*e.base(where), *registers, *e.base(barrier)],
    )


@_op("atom", "red")
def _atom(e: Emitter, ins: Instruction) -> None:
    if "async" in ins:
        raise Unknown
    type_, space, count = _last(ins), _space(ins), _vector(ins)
    operands = list(ins.operands)
    dst = operands.pop(0) if ins.parts[0] == "atom" else "_"
    where, *args = operands
    op = next(
        p
        for p in ins.parts
        if p in ("add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas")
    )
    lists = [a if isinstance(a, tuple) else (a,) for a in args]
    raw = {2: "b16", 4: "b32", 8: "b64"}[_BYTES[type_]]
    values = ", ".join("(" + ", ".join(e.text(raw, r) for r in a) + ",)" for a in lists)
    order = "acq_rel" if any(p in ins for p in ("acq_rel", "acquire", "release")) else "relaxed"
    lines = [
        f"t = atomic('{space}', '{op}', '{type_}', {e.address(where)}, ({values},), {count}, '{order}', {{m}}, {ins.index})"
    ]
    registers = dst if isinstance(dst, tuple) else (dst,)
    for i, register in enumerate(registers):
        if register != "_":
            lines.append(f"{{{e.destination(raw, str(register))}:{register}}} <- t[{i}]")
    e.effect(lines, [*e.base(where), *(r for a in lists for r in a)], registers)


@_op("multimem")
def _unsupported(e: Emitter, ins: Instruction) -> None:
    raise Unknown


@_op("fence", "membar")
def _fence(e: Emitter, ins: Instruction) -> None:
    rest = ".".join(ins.parts[1:])
    if ins.operands:
        return e.effect([f"fence('tensormap', {{m}}, {ins.index})"])
    kind = (
        "proxy_async"
        if rest.startswith("proxy.async")
        else ("mbarrier_init" if rest.startswith("mbarrier_init") else "generic")
    )
    if rest.startswith("proxy.") and kind != "proxy_async":
        kind = "tensormap"
    e.effect([f"fence('{kind}', {{m}}, {ins.index})"])


@_op("bar", "barrier")
def _bar(e: Emitter, ins: Instruction) -> None:
    op = ins.parts[1] if ins.parts[1] != "cta" else ins.parts[2]
    if op == "warp":
        mask = e.text("u32", ins.operands[0])
        return e.effect(
            [
                *e.together(f"converge({mask}, {{m}}, {ins.index})"),
                f"warp_sync({{m}}, {ins.index})",
            ],
            [ins.operands[0]],
        )
    if op == "cluster":
        act = ins.parts[2]
        if act == "arrive":
            return e.effect([f"cluster_arrive({{m}}, {'relaxed' in ins}, {ins.index})"])
        return e.effect([f"if not cluster_wait({{m}}, {ins.index}): return STALL"])
    if op == "red":
        reduce = ins.parts[ins.parts.index("red") + 1]
        dst, barrier, *rest = ins.operands
        negated = isinstance(rest[-1], str) and rest[-1].startswith("!")
        predicate = str(rest[-1]).lstrip("!")
        count = e.text("u32", rest[0]) if len(rest) > 1 else "0"
        kind = "p" if _last(ins) == "pred" else "u"
        mark = "~" if negated else ""
        return e.effect(
            [f"if not bar_red({e.text('u32', barrier)}, {count}, {mark}{{p:{predicate}}}, '{reduce}', {{m}}, {ins.index}): return STALL",
             f"{{{kind}:{dst}}} <- bar_result()"],
            [barrier, predicate, *rest[:-1]], [dst],
        )  # fmt: skip
    barrier, *rest = ins.operands
    count = e.text("u32", rest[0]) if rest else "0"
    if op == "arrive":
        return e.effect(
            [f"bar_arrive({e.text('u32', barrier)}, {count}, {{m}}, {ins.index})"], ins.operands
        )
    if op == "sync":
        return e.effect(
            [
                f"if not bar_sync({e.text('u32', barrier)}, {count}, {{m}}, {ins.index}): return STALL"
            ],
            ins.operands,
        )
    raise Unknown


@_op("mbarrier")
def _mbarrier(e: Emitter, ins: Instruction) -> None:
    op = ins.parts[1]
    n = ins.index
    cluster = "shared::cluster" in ins
    if op == "init":
        where, count = ins.operands
        return e.effect(
            [f"mbar_init({e.address(where)}, {e.text('u32', count)}, {{m}}, {n})"],
            [*e.base(where), count],
        )
    if op == "inval":
        return e.effect(
            [f"mbar_inval({e.address(ins.operands[0])}, {{m}}, {n})"], e.base(ins.operands[0])
        )
    relaxed = "relaxed" in ins
    if op in ("arrive", "arrive_drop", "expect_tx", "complete_tx"):
        operands = list(ins.operands)
        dst = operands.pop(0) if not isinstance(operands[0], Address) else "_"
        where = operands.pop(0)
        value = e.text("u32", operands[0]) if operands else "1"
        expect = "expect_tx" in ins
        count = "1" if expect else value
        bytes_ = value if expect else "0"
        if op == "complete_tx":
            raise Unknown
        kind = {"arrive": 1, "arrive_drop": 2, "expect_tx": 0}[op]
        lines = [
            f"t = mbar_arrive({e.address(where)}, {count}, {bytes_}, {kind}, {relaxed}, {cluster}, {'noComplete' in ins}, {{m}}, {n})"
        ]
        if dst != "_":
            lines.append(f"{{U:{dst}}} <- t")
        return e.effect(lines, [*e.base(where), *operands], [dst])
    if op in ("try_wait", "test_wait"):
        dst, where, phase, *_ = ins.operands
        if "parity" in ins:
            call = f"mbar_wait({e.address(where)}, {e.text('u32', phase)}, True, {relaxed}, {{m}}, {n})"
        else:
            call = f"mbar_wait({e.address(where)}, {e.text('u64', phase)}, False, {relaxed}, {{m}}, {n})"
        return e.effect(
            [f"t = {call}", "if t is STALL: return STALL", f"{{p:{dst}}} <- t"],
            [*e.base(where), phase],
            [dst],
        )
    if op == "pending_count":
        raise Unknown
    raise Unknown


@_op("cp")
def _cp(e: Emitter, ins: Instruction) -> None:
    n = ins.index
    rest = ins.parts[1:]
    if rest[0] == "reduce":
        return _bulk(e, ins, reduce=True)
    if rest[:2] == ("async", "bulk"):
        if "commit_group" in ins:
            return e.effect([f"bulk_commit({{m}}, {n})"])
        if "wait_group" in ins:
            return e.effect([f"bulk_wait({ins.operands[0]}, {'read' in ins}, {{m}}, {n})"])
        if "prefetch" in ins:
            return None
        return _bulk(e, ins, reduce=False)
    if "commit_group" in ins:
        return e.effect([f"cp_commit({{m}}, {n})"])
    if "wait_group" in ins or "wait_all" in ins:
        count = ins.operands[0] if ins.operands else 0
        return e.effect([f"cp_wait({count}, {'wait_all' in ins}, {{m}}, {n})"])
    if "mbarrier" in ins:
        return e.effect(
            [f"cp_mbarrier({e.address(ins.operands[0])}, {'noinc' in ins}, {{m}}, {n})"],
            e.base(ins.operands[0]),
        )
    dst, src, size, *tail = ins.operands
    read = (
        e.text("u32", tail[0])
        if tail and not (isinstance(tail[0], str) and e.registers.get(tail[0]) == "b64")
        else str(size)
    )
    return e.effect(
        [f"cp_async({e.address(dst)}, {e.address(src)}, {size}, {read}, {{m}}, {n})"],
        [*e.base(dst), *e.base(src), *tail],
    )


def _bulk(e: Emitter, ins: Instruction, reduce: bool) -> None:
    """cp[.reduce].async.bulk[.tensor] between global and shared memory."""
    n, parts = ins.index, ins.parts
    op = (
        next((p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
        if reduce
        else ""
    )
    type_ = parts[-1] if reduce and "tensor" not in ins else ""
    if reduce and type_ not in _BYTES:
        type_ = next((p for p in parts if p in _BYTES), "")
    spaces = [p for p in parts if p.startswith(("shared", "global"))]
    to_shared = spaces[0].startswith("shared")
    hint = "L2::cache_hint" in ins
    operands = list(ins.operands)
    if hint:
        operands.pop()
    if "tensor" in ins:
        if "im2col" in parts or "tile::gather4" in parts or "tile::scatter4" in parts:
            raise Unknown
        if to_shared:
            dst, src, barrier, *tail = operands
            if not isinstance(src, Address):
                raise Unknown
            coords = ", ".join(e.text("s32", c) for c in _flat(src.coords))
            multicast = (
                e.text("u16", tail[0]) if any(p.startswith("multicast") for p in parts) else "None"
            )
            pair = "cta_group::2" in ins
            e.effect(
                [
                    f"tma_load({e.address(dst)}, {e.address(Address(src.base, src.offset))}, ({coords},), {e.address(barrier)}, {multicast}, {pair}, {{m}}, {n})"
                ],
                [*e.base(dst), src.base, *_flat(src.coords), *e.base(barrier), *tail],
            )
            return
        dst, src = operands[:2]
        if not isinstance(dst, Address):
            raise Unknown
        coords = ", ".join(e.text("s32", c) for c in _flat(dst.coords))
        e.effect(
            [
                f"tma_store({e.address(Address(dst.base, dst.offset))}, ({coords},), {e.address(src)}, '{op}', {{m}}, {n})"
            ],
            [dst.base, *_flat(dst.coords), *e.base(src)],
        )
        return
    dst, src, size, *tail = operands
    if to_shared:
        multicast = (
            e.text("u16", tail[1]) if any(p.startswith("multicast") for p in parts) else "None"
        )
        from_shared = len(spaces) > 1 and spaces[1].startswith("shared")
        e.effect(
            [
                f"bulk_load({e.address(dst)}, {e.address(src)}, {e.text('u32', size)}, {e.address(tail[0])}, {multicast}, {from_shared}, '{op}', '{type_}', {{m}}, {n})"
            ],
            [*e.base(dst), *e.base(src), size, *e.base(tail[0])],
        )
        return
    e.effect(
        [
            f"bulk_store({e.address(dst)}, {e.address(src)}, {e.text('u32', size)}, '{op}', '{type_}', {{m}}, {n})"
        ],
        [*e.base(dst), *e.base(src), size],
    )


def _flat(coords: tuple) -> list:
    out: list = []
    for c in coords:
        out.extend(c if isinstance(c, tuple) else (c,))
    return out


@_op("wgmma")
def _wgmma(e: Emitter, ins: Instruction) -> None:
    n = ins.index
    here = e.together(f"converge_all({{m}}, {n})")
    if "fence" in ins:
        return e.effect([*here, "wgmma_fence()"])
    if "commit_group" in ins:
        return e.effect([*here, f"wgmma_commit({n})"])
    if "wait_group" in ins:
        # A warp may wait alone: only the products themselves need the whole warpgroup.
        warp = e.together(f"converge(0xFFFFFFFF, {{m}}, {n})")
        return e.effect([*warp, f"wgmma_wait({ins.operands[0]}, {{m}}, {n})"])
    if "sp" in ins:
        raise Unknown
    shape = next(p for p in ins.parts if re.fullmatch(r"m64n\d+k\d+", p))
    columns = int(re.findall(r"n(\d+)k", shape)[0])
    dtype, atype, btype = ins.parts[-3:]
    if "satfinite" in ins:
        dtype, atype, btype = [p for p in ins.parts if p in ("s32", "s8", "u8")][:3]
    acc, a, b, *rest = ins.operands
    if not isinstance(acc, tuple):
        raise Unknown
    scale_d = rest[0] if rest else 1
    flags = [int(r) for r in rest[1:] if isinstance(r, int)]
    neg_a, neg_b = (flags[0] == -1, flags[1] == -1) if len(flags) > 1 else (False, False)
    trans = flags[2:]
    in_registers = isinstance(a, tuple)
    if in_registers:
        trans_a, trans_b = 0, trans[0] if trans else 0
    else:
        trans_a, trans_b = trans if len(trans) == 2 else (0, 0)
    scale = f"{{p:{scale_d}}}" if isinstance(scale_d, str) else str(bool(scale_d))
    if here:
        e.effect(here)
    e.steps.append(
        Products(
            [], tuple(map(str, (*(a if in_registers else (a,)), b, scale_d, *acc))), acc, e.guard,
            n, asynchronous=True, accumulator=acc,
            kind=f"{columns}, '{dtype}', '{atype}', '{btype}', {neg_a}, {neg_b}, "
            f"{bool(trans_a)}, {bool(trans_b)}",
            registers=a if in_registers else (), a=[] if in_registers else [e.text("u64", a)],
            b=[e.text("u64", b)], scales=[scale], sites=[n],
        )
    )  # fmt: skip


@_op("mma", "wmma", "tcgen05", "tensormap", "clusterlaunchcontrol", "call", "brx", "st.async")
def _later(e: Emitter, ins: Instruction) -> None:
    raise Unknown


@_op("setmaxnreg")
def _setmaxnreg(e: Emitter, ins: Instruction) -> None:
    e.effect(
        [f"if not setmaxnreg({ins.operands[0]}, {'inc' in ins}, {{m}}, {ins.index}): return STALL"]
    )


@_op("griddepcontrol")
def _griddep(e: Emitter, ins: Instruction) -> None:
    """Kernels run one after another: a wait is met at once, but the checker wants to see it."""
    if "wait" in ins:
        e.effect(["grid_wait()"])


@_op("nanosleep")
def _nanosleep(e: Emitter, ins: Instruction) -> None:
    e.effect(["sleep()"])


@_op("elect")
def _elect(e: Emitter, ins: Instruction) -> None:
    dst, mask = ins.operands
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else ("_", dst)
    text = e.text("u32", mask)
    lines = [
        *e.together(f"converge({text}, {{m}}, {ins.index})"),
        f"t = elect({text}, {{m}})",
    ]
    if first != "_":
        lines.append(f"{{u:{first}}} <- t[0]")
    if second != "_":
        lines.append(f"{{p:{second}}} <- t[1]")
    e.effect(lines, [mask], [first, second])


@_op("shfl")
def _shfl(e: Emitter, ins: Instruction) -> None:
    dst, value, lane, clamp, mask = ins.operands
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, "_")
    mode = ins.parts[2] if ins.parts[1] == "sync" else ins.parts[1]
    text = e.text("u32", mask)
    here = e.together(f"converge({text}, {{m}}, {ins.index})")
    static = isinstance(lane, int) and isinstance(clamp, int) and mask in (-1, 0xFFFFFFFF)
    if static and second == "_" and e.guard is None:  # whole warps: as good as arithmetic
        if here:
            e.effect(here)
        code = f"shuffle('{mode}', {{0}}, {lane}, {clamp}, -1, {{m}}, {{site}})[0]"
        return e.pure(code, "b32", first, [("b32", value)])
    lines = [
        *here,
        f"t = shuffle('{mode}', {e.text('b32', value)}, {e.text('u32', lane)}, {e.text('u32', clamp)}, {text}, {{m}}, {ins.index})",
    ]
    if first != "_":
        lines.append(f"{{u:{first}}} <- t[0]")
    if second != "_":
        lines.append(f"{{p:{second}}} <- t[1]")
    e.effect(lines, [value, lane, clamp, mask], [first, second])


@_op("vote")
def _vote(e: Emitter, ins: Instruction) -> None:
    dst, predicate, mask = ins.operands
    negated = isinstance(predicate, str) and predicate.startswith("!")
    predicate = str(predicate).lstrip("!") if isinstance(predicate, str) else predicate
    value = e.text("pred", predicate)
    kind = "u" if "ballot" in ins else "p"
    text = e.text("u32", mask)
    e.effect(
        [*e.together(f"converge({text}, {{m}}, {ins.index})"),
         f"{{{kind}:{dst}}} <- vote('{ins.parts[2]}', {'~' if negated else ''}{value}, {text}, {{m}})"],
        [predicate, mask], [dst],
    )  # fmt: skip


@_op("redux")
def _redux(e: Emitter, ins: Instruction) -> None:
    dst, value, mask = ins.operands
    type_ = _last(ins)
    text = e.text("u32", mask)
    e.effect(
        [*e.together(f"converge({text}, {{m}}, {ins.index})"),
         f"{{{LETTER[type_]}:{dst}}} <- redux('{ins.parts[2]}', {e.text(type_, value)}, {text}, {{m}}, {'NaN' in ins}, {'abs' in ins})"],
        [value, mask], [dst],
    )  # fmt: skip


@_op("match")
def _match(e: Emitter, ins: Instruction) -> None:
    dst, value, mask = ins.operands
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, "_")
    text = e.text("u32", mask)
    lines = [
        *e.together(f"converge({text}, {{m}}, {ins.index})"),
        f"t = match('{ins.parts[1]}', {e.text(_last(ins), value)}, {text}, {{m}})",
        f"{{u:{first}}} <- t[0]",
    ]
    if second != "_":
        lines.append(f"{{p:{second}}} <- t[1]")
    e.effect(lines, [value, mask], [first, second])


@_op("activemask")
def _activemask(e: Emitter, ins: Instruction) -> None:
    e.effect([f"{{u:{ins.operands[0]}}} <- active({{m}})"], (), ins.operands)


@_op("ldmatrix", "stmatrix")
def _matrix(e: Emitter, ins: Instruction) -> None:
    n = ins.index
    load = ins.parts[0] == "ldmatrix"
    if "m8n8" not in ins or _last(ins) != "b16":
        raise Unknown
    regs, where = ins.operands if load else (ins.operands[1], ins.operands[0])
    registers = regs if isinstance(regs, tuple) else (regs,)
    count, trans = len(registers), "trans" in ins
    lines = e.together(f"converge(0xFFFFFFFF, {{m}}, {n})")
    if load:
        lines.append(f"t = ldmatrix({e.address(where)}, {count}, {trans}, {{m}}, {n})")
        lines += [f"{{u:{r}}} <- t[{i}]" for i, r in enumerate(registers)]
        return e.effect(lines, e.base(where), registers)
    values = ", ".join(e.text("b32", r) for r in registers)
    lines.append(f"stmatrix({e.address(where)}, ({values},), {trans}, {{m}}, {n})")
    return e.effect(lines, [*e.base(where), *registers])


@_op("movmatrix")
def _movmatrix(e: Emitter, ins: Instruction) -> None:
    dst, src = ins.operands
    e.effect(
        [
            *e.together(f"converge(0xFFFFFFFF, {{m}}, {ins.index})"),
            f"{{u:{dst}}} <- movmatrix({e.text('b32', src)})",
        ],
        [src],
        [dst],
    )
