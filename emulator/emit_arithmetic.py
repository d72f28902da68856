"""Instructions that only compute: one register's value from others, as tables of op and type."""

from __future__ import annotations

from .emit import Emitter, Handler, Unknown, registry
from .memory import LOCAL_TAG, LOCAL_WINDOW, PARAM_TAG, SHARED_TAG, SHARED_WINDOW
from .ptx import Operand, Pair
from .steps import BITS

HANDLERS: dict[str, Handler] = {}
op = registry(HANDLERS)

_ROUNDINGS = ("rn", "rz", "rm", "rp")
_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_FLOATS = ("f32", "f64", "f32x2", *_HALVES)
_DTYPE = {f"{t}{n}": f"{'i' if t == 's' else 'u'}{n}" for t in "bus" for n in (8, 16, 32, 64)}

# op: (its value, the modifiers that it may have).
_FLOAT_OPS = {
    "add": ("add({0}, {1})", "rounding ftz sat"),
    "sub": ("subtract({0}, {1})", "rounding ftz sat"),
    "mul": ("multiply({0}, {1})", "rounding ftz sat"),
    "fma": ("ops.fma({0}, {1}, {2})", "rounding ftz sat relu"),
    "mad": ("ops.fma({0}, {1}, {2})", "rounding ftz sat"),
    "div": ("divide({0}, {1})", "rounding ftz approx full"),
    "min": ("ops.fmin({0}, {1})", "ftz NaN abs xorsign"),
    "max": ("ops.fmax({0}, {1})", "ftz NaN abs xorsign"),
    "neg": ("negative({0})", "ftz"),
    "abs": ("absolute({0})", "ftz"),
    "rcp": ("reciprocal({0})", "rounding ftz approx"),
    "sqrt": ("sqrt({0})", "rounding ftz approx"),
    "rsqrt": ("ops.rsqrt({0})", "ftz approx"),
    "ex2": ("exp2({0})", "ftz approx"),
    "lg2": ("log2({0})", "ftz approx"),
    "sin": ("sin({0})", "ftz approx"),
    "cos": ("cos({0})", "ftz approx"),
    "tanh": ("tanh({0})", "approx"),
}
# The same to more bits, where float64 itself may have to round.
_WIDE = {
    "add": "ops.wide_add({0}, {1})",
    "sub": "ops.wide_subtract({0}, {1})",
    "fma": "ops.wide_fma({0}, {1}, {2})",
    "mad": "ops.wide_fma({0}, {1}, {2})",
}
_NAN = {"min": "ops.fmin({0}, {1}, minimum)", "max": "ops.fmax({0}, {1}, maximum)"}
# Of min and max of two and of three sources: modifiers that go together.
_SIGNS = {2: (set(), {"abs", "xorsign"}), 3: (set(), {"abs"})}
_HALF_OPS = ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh")
_INTEGER_OPS = {
    "add": "add({0}, {1})",
    "sub": "subtract({0}, {1})",
    "min": "minimum({0}, {1})",
    "max": "maximum({0}, {1})",
    "neg": "negative({0})",
    "abs": "absolute({0})",
    "div": "ops.div_int({0}, {1})",
    "rem": "ops.rem_int({0}, {1})",
}


@op("add", "sub", "min", "max", "neg", "abs", "div", "rem")
def _arithmetic(e: Emitter, dst: Operand, *args: Operand) -> None:
    type_ = e.type()
    if type_ in _FLOATS:
        _float(e, type_, dst, args)
    else:
        _integer(e, type_, dst, args)


@op(*(set(_FLOAT_OPS) - set(_INTEGER_OPS) - {"mul", "mad"}))
def _special(e: Emitter, dst: Operand, *args: Operand) -> None:
    _float(e, e.type(), dst, args)


# Floating point ----------------------------------------------------------------------------------


def _float(e: Emitter, type_: str, dst: Operand, args: tuple[Operand, ...]) -> None:
    value, modifiers = _FLOAT_OPS[e.head]
    three = len(args) == 3 and type_ == "f32" and e.head in ("min", "max")
    if len(args) != value.count("{") and not three:
        raise Unknown
    if type_ == "f32x2" and e.head not in ("add", "sub", "mul", "fma"):
        raise Unknown
    if type_ in ("f64", "f32x2"):
        modifiers = modifiers.replace("sat", "")
    if type_ == "f64":
        modifiers = modifiers.replace("ftz", "")
    rounding = e.one_of(*_ROUNDINGS) if "rounding" in modifiers else ""
    flags = {name for name in modifiers.split() if e.flag(name)}
    if e.head in ("min", "max") and {"abs", "xorsign"} & flags not in _SIGNS[len(args)]:
        raise Unknown
    types = [type_] * len(args)
    holes = [f"{{{i}}}" for i in range(len(args))]
    if type_ in ("f16", "bf16") and e.head in ("add", "sub", "fma") and e.flag("f32"):
        # f32 out of narrow sources, all but the last
        widen = {"f16": "f32({})", "bf16": "ops.bf16_to_f32({})"}[type_]
        holes[:-1] = [widen.format(hole) for hole in holes[:-1]]
        types[-1] = type_ = "f32"
        if "ftz" in flags:
            raise Unknown
    if type_ in _HALVES:
        return _half(e, type_, dst, args, rounding, flags)
    directed = rounding in _ROUNDINGS[1:]
    if type_ == "f64" and (directed or e.head in ("fma", "mad")):
        if e.head not in ("add", "sub", "mul", "div", "fma", "mad"):
            raise Unknown
        code = f"ops.exact64('{e.head.replace('mad', 'fma')}', '{rounding}', {', '.join(holes)})"
        return e.pure(code, type_, dst, [(type_, a) for a in args])
    if directed and e.head in ("add", "sub"):
        name = {"add": "directed_add", "sub": "directed_subtract"}[e.head]
        value = f"ops.{name}({{0}}, {{1}}, '{rounding}')"
    elif directed:
        value = _WIDE.get(e.head) or f"{value[:-1]}, dtype=f64)"
        if rounding == "rm" and e.head in _WIDE:
            value = f"{value[:-1]}, down=True)"
        value = f"ops.directed({value}, '{rounding}')"
    ftz = "ftz" in flags
    if ftz and e.head == "ex2":  # the hot one
        code = "ops.ex2_ftz({0})"
    else:
        code = _value(e.head, value, [f"ops.ftz({h})" for h in holes] if ftz else holes, flags)
        code = f"ops.ftz({code})" if ftz else code
    e.pure(code, type_, dst, list(zip(types, args, strict=True)))


def _value(head: str, value: str, holes: list[str], flags: set[str]) -> str:
    """`value` of two or three sources, with the modifiers that do not depend on the type."""
    if "NaN" in flags:
        value = _NAN[head]
    inner = [f"absolute({hole})" for hole in holes] if "abs" in flags else holes
    code = value.format(*inner)
    if head in ("min", "max") and len(holes) == 3:
        code = value.format(code, inner[2])
    if "xorsign" in flags:
        code = f"ops.xorsign({code}, {holes[0]}, {holes[1]})"
    if "sat" in flags:
        code = f"ops.saturate({code})"
    return f"ops.relu({code})" if "relu" in flags else code


def _half(
    e: Emitter,
    type_: str,
    dst: Operand,
    args: tuple[Operand, ...],
    rounding: str,
    flags: set[str],
) -> None:
    """f16 and bf16, one or two in a word: a function of float64 values, rounded to nearest."""
    if e.head not in _HALF_OPS or rounding not in ("", "rn"):
        raise Unknown
    word = f"b{BITS[type_]}"
    sign = {"f16": 0x8000, "f16x2": 0x80008000}[type_.removeprefix("b")]
    if e.head in ("neg", "abs") and not flags:
        code = f"{{0}} ^ {sign}" if e.head == "neg" else f"{{0}} & {sign ^ (1 << BITS[type_]) - 1}"
        return e.pure(code, word, dst, [(word, args[0])])
    names = ["a", "b", "c"][: len(args)]
    value = _value(e.head, _WIDE.get(e.head) or _FLOAT_OPS[e.head][0], names, flags)
    holes = ", ".join(f"{{{i}}}" for i in range(len(args)))
    tail = ", ftz=True" if "ftz" in flags else ""
    code = f"ops.narrow('{type_}', lambda {', '.join(names)}: {value}, {holes}{tail})"
    e.pure(code, word, dst, [(word, a) for a in args])


@op("copysign")
def _copysign(e: Emitter, dst: Operand, sign: Operand, magnitude: Operand) -> None:
    type_ = e.type()
    e.pure("copysign({0}, {1})", type_, dst, [(type_, magnitude), (type_, sign)])


_TESTS = {
    "finite": "isfinite({0})",
    "infinite": "isinf({0})",
    "number": "~isnan({0})",
    "notanumber": "isnan({0})",
    "normal": "isfinite({0}) & (ops.ftz({0}, {1}) == {0})",  # zero counts as normal
    "subnormal": "(ops.ftz({0}, {1}) != {0}) & ~isnan({0})",
}


@op("testp")
def _testp(e: Emitter, dst: Operand, src: Operand) -> None:
    type_ = e.type()
    if type_ not in ("f32", "f64"):
        raise Unknown
    e.pure(_TESTS[e.next()].format("{0}", type_), "pred", dst, [(type_, src)])


# Integers ----------------------------------------------------------------------------------------


def _integer(e: Emitter, type_: str, dst: Operand, args: tuple[Operand, ...]) -> None:
    value = _INTEGER_OPS[e.head]
    if len(args) != value.count("{"):
        raise Unknown
    srcs = [(type_, a) for a in args]
    if e.head in ("add", "sub"):
        if e.flag("cc"):
            return _extended(e, type_, dst, ("{0}", "{1}"), args, carry_in=False, carry_out=True)
        if type_ == "s32" and e.flag("sat"):
            wide = f"{value[:-1]}, dtype=i64)"
            return e.pure(f"ops.clamp({wide}, -0x80000000, 0x7FFFFFFF)", type_, dst, srcs)
    relu = e.head in ("min", "max") and type_ in ("s32", "s16x2") and e.flag("relu")
    if type_ in ("u16x2", "s16x2"):
        if e.head not in ("add", "sub", "min", "max"):
            raise Unknown
        inner = value.format("a", "b")
        inner = f"maximum({inner}, 0)" if relu else inner
        dtype = _DTYPE[type_[:3]]
        code = f"ops.pairs({dtype}, lambda a, b: {inner}, {{0}}, {{1}})"
        return e.pure(code, "b32", dst, [("b32", a) for a in args])
    e.pure(f"maximum({value}, 0)" if relu else value, type_, dst, srcs)


# The carry flag lives in a predicate register; it is computed into a second one, because the
# instruction that sets it may still read the old one.
_CARRY, _NEXT = "%CC.CF", "%CC.CF'"


def _extended(
    e: Emitter,
    type_: str,
    dst: Operand,
    terms: tuple[str, str],
    args: tuple[Operand, ...],
    carry_in: bool,
    carry_out: bool,
) -> None:
    """terms[0] + terms[1] (- for sub) with carry in, out or both."""
    e.registers.update({_CARRY: "pred", _NEXT: "pred"})
    carried = f"{{{len(args)}}}"
    srcs = [(type_, a) for a in args]
    srcs.append(("pred", _CARRY if carry_in else 0))
    function, sign = ("borrow", "-") if e.head.startswith("sub") else ("carry", "+")
    if carry_out:
        code = f"ops.{function}(u{BITS[type_]}, {terms[0]}, {terms[1]}, {carried})"
        e.pure(code, "pred", _NEXT, srcs)
    e.pure(f"{terms[0]} {sign} {terms[1]} {sign} {carried}", type_, dst, srcs)
    if carry_out:
        e.pure("{0}", "pred", _CARRY, [("pred", _NEXT)])


@op("addc", "subc")
def _add_with_carry(e: Emitter, dst: Operand, a: Operand, b: Operand) -> None:
    _extended(e, e.type(), dst, ("{0}", "{1}"), (a, b), True, e.flag("cc"))


@op("mul", "mad", "madc")
def _multiply(e: Emitter, dst: Operand, a: Operand, b: Operand, *rest: Operand) -> None:
    type_ = e.type()
    args = (a, b, *rest)
    if type_ in _FLOATS and e.head != "madc":
        return _float(e, type_, dst, args)
    if len(rest) != (e.head != "mul"):
        raise Unknown
    part = e.need("lo", "hi", "wide")
    if part == "wide":
        return _multiply_wide(e, type_, dst, args)
    product = "multiply({0}, {1})" if part == "lo" else "ops.mul_hi({0}, {1})"
    srcs = [(type_, x) for x in args]
    if e.head == "mul":
        return e.pure(product, type_, dst, srcs)
    carry_out = e.flag("cc")
    if e.head == "madc" or carry_out:
        return _extended(e, type_, dst, (product, "{2}"), args, e.head == "madc", carry_out)
    if part == "hi" and type_ == "s32" and e.flag("sat"):
        code = f"ops.clamp({product} + i64({{2}}), -0x80000000, 0x7FFFFFFF)"
        return e.pure(code, type_, dst, srcs)
    e.pure(f"{product} + {{2}}", type_, dst, srcs)


def _multiply_wide(e: Emitter, type_: str, dst: Operand, args: tuple[Operand, ...]) -> None:
    wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}[type_]
    product = f"multiply({{0}}, {{1}}, dtype={_DTYPE[wide]}, casting='unsafe')"
    srcs = [(type_, args[0]), (type_, args[1])]
    if len(args) == 2:
        return e.pure(product, wide, dst, srcs)
    e.pure(f"{product} + {{2}}", wide, dst, [*srcs, (wide, args[2])])


@op("mul24", "mad24")
def _multiply24(e: Emitter, dst: Operand, a: Operand, b: Operand, *rest: Operand) -> None:
    type_ = e.type()
    if type_ not in ("u32", "s32") or len(rest) != (e.head == "mad24"):
        raise Unknown
    high = e.need("lo", "hi") == "hi"
    code = f"ops.mul24({{0}}, {{1}}, {_DTYPE[type_]}, {high})"
    if high and type_ == "s32" and rest and e.flag("sat"):
        code = f"ops.clamp({code} + i64({{2}}), -0x80000000, 0x7FFFFFFF)"
    elif rest:
        code += " + {2}"
    e.pure(code, type_, dst, [(type_, x) for x in (a, b, *rest)])


@op("sad")
def _sad(e: Emitter, dst: Operand, *args: Operand) -> None:
    type_ = e.type()
    code = "{2} + where({0} > {1}, {0} - {1}, {1} - {0})"
    e.pure(code, type_, dst, [(type_, a) for a in args])


@op("dp4a", "dp2a")
def _dot(e: Emitter, dst: Operand, a: Operand, b: Operand, c: Operand) -> None:
    second, first = e.type(), e.type()
    bytes_ = "i8" if second == "s32" else "u8"
    parts = bytes_ if e.head == "dp4a" else "i16" if first == "s32" else "u16"
    if e.head == "dp4a":
        parts = "i8" if first == "s32" else "u8"
    skip = 2 if e.head == "dp2a" and e.need("lo", "hi") == "hi" else 0
    out = "s32" if "s32" in (first, second) else "u32"
    code = f"ops.dot({{0}}, {{1}}, {{2}}, ({parts}, {bytes_}), {skip})"
    e.pure(code, out, dst, [("b32", a), ("b32", b), (out, c)])


# Bits --------------------------------------------------------------------------------------------


@op("and", "or", "xor")
def _logic(e: Emitter, dst: Operand, a: Operand, b: Operand) -> None:
    type_ = e.type()
    kind = "logical" if type_ == "pred" else "bitwise"
    e.pure(f"{kind}_{e.head}({{0}}, {{1}})", type_, dst, [(type_, a), (type_, b)])


_BIT_OPS = {
    "cnot": "{0} == 0",
    "popc": "ops.popc({0})",
    "clz": "ops.clz({0})",
    "brev": "ops.brev({0})",
}


@op("not", *_BIT_OPS)
def _bits(e: Emitter, dst: Operand, src: Operand) -> None:
    type_ = e.type()
    if e.head == "not":
        code = "logical_not({0})" if type_ == "pred" else "invert({0})"
    else:
        code = _BIT_OPS[e.head]
    e.pure(code, "u32" if e.head in ("popc", "clz") else type_, dst, [(type_, src)])


@op("bfind")
def _bfind(e: Emitter, dst: Operand, src: Operand) -> None:
    e.pure(f"ops.bfind({{0}}, {e.flag('shiftamt')})", "u32", dst, [(e.type(), src)])


@op("bfe")
def _bfe(e: Emitter, dst: Operand, a: Operand, start: Operand, length: Operand) -> None:
    type_ = e.type()
    srcs = [(type_, a), ("u32", start), ("u32", length)]
    e.pure("ops.bfe({0}, {1}, {2})", type_, dst, srcs)


@op("bfi")
def _bfi(e: Emitter, dst: Operand, a: Operand, b: Operand, start: Operand, length: Operand) -> None:
    type_ = e.type()
    code = f"ops.bfi({{0}}, {{1}}, {{2}}, {{3}}, {_DTYPE[type_]})"
    e.pure(code, type_, dst, [(type_, a), (type_, b), ("u32", start), ("u32", length)])


@op("bmsk", "szext")
def _mask(e: Emitter, dst: Operand, a: Operand, b: Operand) -> None:
    type_ = e.type()
    clamped = e.need("clamp", "wrap") == "clamp"
    e.pure(f"ops.{e.head}({{0}}, {{1}}, {clamped})", "b32", dst, [(type_, a), ("u32", b)])


@op("shl", "shr")
def _shift(e: Emitter, dst: Operand, value: Operand, amount: Operand) -> None:
    """NumPy shifts by the width and more as PTX does; an amount that large is cut to what fits."""
    type_ = e.type()
    name = "left_shift" if e.head == "shl" else "right_shift"
    amount = min(amount, 64) if isinstance(amount, int) else amount
    e.pure(f"{name}({{0}}, {{1}})", type_, dst, [(type_, value), ("u32", amount)])


@op("shf")
def _funnel(e: Emitter, dst: Operand, low: Operand, high: Operand, amount: Operand) -> None:
    left, clamped = e.need("l", "r") == "l", e.need("clamp", "wrap") == "clamp"
    code = f"ops.funnel({{0}}, {{1}}, {{2}}, {left}, {clamped})"
    e.pure(code, e.type(), dst, [("b32", low), ("b32", high), ("u32", amount)])


@op("prmt")
def _prmt(e: Emitter, dst: Operand, a: Operand, b: Operand, selector: Operand) -> None:
    type_ = e.next()
    mode = e.one_of("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    code = f"ops.prmt({{0}}, {{1}}, {{2}}, '{mode}')"
    e.pure(code, type_, dst, [("b32", a), ("b32", b), ("b32", selector)])


@op("lop3")
def _lop3(
    e: Emitter, dst: Operand, a: Operand, b: Operand, c: Operand, table: Operand, *rest: Operand
) -> None:
    e.need("b32")
    if not isinstance(table, int):
        raise Unknown
    code = f"ops.lop3({{0}}, {{1}}, {{2}}, {table})"
    srcs = [("b32", x) for x in (a, b, c)]
    if rest:  # d|p: p tells whether d is not 0, combined with another predicate
        value, predicate = e.pair(dst)
        hole, other = e.condition(*rest, hole="{3}")
        mark = _COMBINE[e.need("and", "or")]
        # First: d may be one of the sources.
        e.pure(f"({code} != 0) {mark} {hole}", "pred", predicate, [*srcs, ("pred", other)])
        dst = value
    e.pure(code, "b32", dst, srcs)


# Comparison and selection ------------------------------------------------------------------------

_COMBINE = {"and": "&", "or": "|", "xor": "^"}
_COMPARE = {
    "eq": "equal({0}, {1})",
    "ne": "not_equal({0}, {1})",
    "lt": "less({0}, {1})",
    "le": "less_equal({0}, {1})",
    "gt": "greater({0}, {1})",
    "ge": "greater_equal({0}, {1})",
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_NEGATION = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _relation(e: Emitter, type_: str) -> str:
    """Takes the comparison; its value over two sources {0} and {1}."""
    name = e.next()
    if type_ not in _FLOATS:
        return _COMPARE[_UNSIGNED.get(name, name)]
    if name == "ne":  # PTX: false for a NaN
        return "({0} < {1}) | ({0} > {1})"
    if name == "equ":
        return "~(({0} < {1}) | ({0} > {1}))"
    if name == "neu":
        return _COMPARE["ne"]
    if name in ("num", "nan"):
        return ("~" if name == "num" else "") + "(isnan({0}) | isnan({1}))"
    if name in _COMPARE:
        return _COMPARE[name]
    return f"~{_COMPARE[_NEGATION[name.removesuffix('u')]]}"


def _compared(e: Emitter, type_: str, ftz: bool) -> list[str]:
    """The values of a comparison: one, or that of the low and that of the high half."""
    relation = _relation(e, type_)
    holes = [["{0}", "{1}"]]
    if type_ == "bf16":
        holes = [[f"ops.bf16_to_f32({h})" for h in holes[0]]]
    elif type_ in ("f16x2", "bf16x2"):
        holes = [[f"ops.half({h}, '{type_}', {i})" for h in ("{0}", "{1}")] for i in (0, 1)]
    if ftz:
        dtype = {"f32": "f32", "f16": "f16", "f16x2": "f16"}[type_]
        holes = [[f"ops.ftz({h}, {dtype})" for h in part] for part in holes]
    return [relation.format(*part) for part in holes]


def _combined(
    e: Emitter, values: list[str], srcs: list[tuple[str, Operand]], rest: tuple[Operand, ...]
) -> list[str]:
    """Values of a comparison, combined with the predicate `rest` if there is one."""
    if not rest:
        return values
    hole, other = e.condition(*rest, hole="{2}")
    srcs.append(("pred", other))
    mark = _COMBINE[e.need("and", "or", "xor")]
    return [f"({v}) {mark} {hole}" for v in values]


@op("setp")
def _setp(e: Emitter, dst: Operand, a: Operand, b: Operand, *rest: Operand) -> None:
    type_ = e.type()
    ftz = e.flag("ftz")
    values = _compared(e, type_, ftz)
    srcs: list[tuple[str, Operand]] = [(type_, a), (type_, b)]
    targets = [dst.first, dst.second] if isinstance(dst, Pair) else [dst]
    if len(values) == 1 and len(targets) == 2:
        values.append(f"~({values[0]})")
    if len(values) != len(targets):
        raise Unknown
    values = _combined(e, values, srcs, rest)
    results = list(zip(targets, values, strict=True))
    if targets[0] in [register for _, register in srcs]:  # which the second still reads
        results.reverse()
    for target, value in results:
        e.pure(value, "pred", target, srcs)


_TRUE = {
    "f32": "1.0",
    "f16": "0x3C00",
    "bf16": "0x3F80",
    "u16": "0xFFFF",
    "s16": "-1",
    "u32": "0xFFFFFFFF",
    "s32": "-1",
}


@op("set")
def _set(e: Emitter, dst: Operand, a: Operand, b: Operand, *rest: Operand) -> None:
    type_, to = e.type(), e.type()
    ftz = e.flag("ftz")
    values = _compared(e, type_, ftz)
    srcs: list[tuple[str, Operand]] = [(type_, a), (type_, b)]
    values = _combined(e, values, srcs, rest)
    if len(values) == 1:
        word = "b16" if to in ("f16", "bf16") else to
        return e.pure(f"where({values[0]}, {_TRUE[to]}, 0)", word, dst, srcs)
    true = _TRUE[to.removesuffix("x2")] if to.endswith("x2") else "0xFFFF"
    low, high = (f"where({v}, {true}, 0)" for v in values)
    e.pure(f"{low} | {high} << 16", "b32", dst, srcs)


@op("selp")
def _selp(e: Emitter, dst: Operand, a: Operand, b: Operand, p: Operand) -> None:
    type_ = e.type()
    e.pure("where({2}, {0}, {1})", type_, dst, [(type_, a), (type_, b), ("pred", p)])


@op("slct")
def _slct(e: Emitter, dst: Operand, a: Operand, b: Operand, c: Operand) -> None:
    test, type_ = e.type(), e.type()
    value = "ops.ftz({2})" if test == "f32" and e.flag("ftz") else "{2}"
    code = f"where({value} >= 0, {{0}}, {{1}})"
    e.pure(code, type_, dst, [(type_, a), (type_, b), (test, c)])


# Moves and addresses -----------------------------------------------------------------------------


@op("mov")
def _mov(e: Emitter, dst: Operand, src: Operand) -> None:
    type_ = e.type()
    if type_ == "b128":
        return _mov128(e, dst, src)
    if isinstance(dst, tuple):
        return _unpack(e, type_, dst, src)
    if isinstance(src, tuple):
        return _pack(e, type_, dst, src)
    kind, value = e.source(type_, src)
    if kind == "n" and str(value).startswith(("clock", "globaltimer")):
        place = f"{e.destination(type_, str(dst))}:{dst}"
        return e.effect(*e.results({place: f"read_{value}()"}))
    e.pure("{0}", type_, dst, [(type_, src)])


def _unpack(e: Emitter, type_: str, dst: tuple[Operand, ...], src: Operand) -> None:
    if BITS[type_] == 64 and len(dst) == 2 and e.registers.get(str(src)) == "b64":
        for part, half in zip(dst, ("b64.lo", "b64.hi"), strict=True):
            e.pure("{0}", "b32", part, [(half, src)])
        return
    bits = BITS[type_] // len(dst)
    for i, part in enumerate(dst):
        code = f"({{0}} >> {bits * i}) & {(1 << bits) - 1}" if i else f"{{0}} & {(1 << bits) - 1}"
        e.pure(code, f"b{bits}", part, [(type_, src)])


def _pack(e: Emitter, type_: str, dst: Operand, src: tuple[Operand, ...]) -> None:
    bits = BITS[type_] // len(src)
    if all(isinstance(s, int) for s in src):
        parts = [s & ((1 << bits) - 1) for s in src if isinstance(s, int)]
        value = sum(part << (bits * i) for i, part in enumerate(parts))
        return e.pure("{0}", type_, dst, [(type_, value)])
    if BITS[type_] == 64 and len(src) == 2:
        for part, half in zip(src, ("b64.lo", "b64.hi"), strict=True):
            e.pure("{0}", half, dst, [("b32", part)])
        return None
    terms = []
    for i in range(len(src)):
        hole = f"u{BITS[type_]}({{{i}}})"
        terms.append(f"({hole} << {bits * i})" if i else hole)
    e.pure(" | ".join(terms), type_, dst, [(f"b{bits}", s) for s in src])


def _mov128(e: Emitter, dst: Operand, src: Operand) -> None:
    """b128 registers are pairs of b64 registers."""
    for target, source in zip(e.halves(dst), e.halves(src), strict=True):
        e.pure("{0}", "b64", target, [("b64", source)])


@op("cvta")
def _cvta(e: Emitter, dst: Operand, src: Operand) -> None:
    """Generic addresses: those of shared and local memory carry a tag, others are as they are."""
    type_, space, back = e.type(), e.space(), e.flag("to")
    windows = {
        "shared": (f"{{0}} | {SHARED_WINDOW}", "{0} & 0xFFFFFFFF"),
        "local": (f"{{0}} | {LOCAL_WINDOW}", "{0} & 0xFFFFFFFF"),
    }
    windows["cluster"] = windows["shared"]
    if space == "generic" and not e.flag("const"):
        raise Unknown
    code = windows[space][back] if space in windows else "{0}"
    if type_ != "u64" and code != "{0}":
        raise Unknown
    e.pure(code, type_, dst, [(type_, src)])


@op("isspacep")
def _isspacep(e: Emitter, dst: Operand, src: Operand) -> None:
    space = e.space()
    if space == "generic":
        e.need("const")  # no constant memory here
        return e.pure("{0} != {0}", "pred", dst, [("u64", src)])
    tag = "({0} >> 40)"
    code = {
        "cluster": f"{tag} == {SHARED_TAG}",
        "shared": f"({tag} == {SHARED_TAG}) & (({{0}} >> 24 & 0xFF) == {{1}})",
        "local": f"{tag} == {LOCAL_TAG}",
        "param": f"{tag} == {PARAM_TAG}",
        "global": " & ".join(f"({tag} != {t})" for t in (SHARED_TAG, LOCAL_TAG, PARAM_TAG)),
    }[space]
    srcs: list[tuple[str, Operand]] = [("u64", src)]
    if space == "shared":
        srcs.append(("u32", "%cluster_ctarank"))
    e.pure(code, "pred", dst, srcs)


@op("mapa")
def _mapa(e: Emitter, dst: Operand, address: Operand, rank: Operand) -> None:
    type_ = e.type()
    e.one_of("shared::cluster")
    keep = f"{0xFFFFFF:#x}" if type_ == "u32" else f"{0xFFFFFFFF00FFFFFF:#x}"
    e.pure(
        f"({{0}} & {keep}) | (u{BITS[type_]}({{1}}) << 24)",
        type_,
        dst,
        [(type_, address), ("u32", rank)],
    )


@op("getctarank")
def _getctarank(e: Emitter, dst: Operand, address: Operand) -> None:
    type_ = e.type()
    e.one_of("shared::cluster")
    e.pure("({0} >> 24) & 0xFF", "u32", dst, [(type_, address)])


@op("createpolicy")
def _createpolicy(e: Emitter, dst: Operand, *args: Operand) -> None:
    e.parts.clear()  # cache hints carry no semantics here, whatever they say
    e.pure("{0}", "b64", dst, [("b64", 0)])


# Conversion --------------------------------------------------------------------------------------

# Bits of one of the two elements.
_PACKED = {
    "f16x2": 16,
    "bf16x2": 16,
    "e4m3x2": 8,
    "e5m2x2": 8,
    "e2m3x2": 8,
    "e3m2x2": 8,
    "e2m1x2": 4,
    "ue8m0x2": 8,
}
# How two floats are rounded to them, where not to nearest alone.
_PACKED_ROUNDINGS = {
    "f16x2": ("rn", "rz", "rs"),
    "bf16x2": ("rn", "rz", "rs"),
    "ue8m0x2": ("rz", "rp"),
}


def _limits(signed: bool, bits: int) -> str:
    low = -(1 << (bits - 1)) if signed else 0
    return f"{low}, {low + (1 << bits) - 1}"


@op("cvt")
def _cvt(e: Emitter, dst: Operand, *args: Operand) -> None:
    if e.flag("pack"):
        return _cvt_pack(e, dst, args)
    from_, to = e.type(), e.type()
    if to in _PACKED:
        return _cvt_packed(e, dst, to, from_, args)
    if len(args) != 1:
        raise Unknown
    if from_ not in _DTYPE:
        value, word = _cvt_float(e, to, from_)
    elif to in _DTYPE:
        limits = _limits(to[0] == "s", BITS[to])
        value = f"ops.clamp({{0}}, {limits})" if e.flag("sat") else f"{_DTYPE[to]}({{0}})"
        word = to
    else:
        value, word = _cvt_from_int(e, to, from_)
    e.pure(value, word, dst, [(from_, args[0])])


def _cvt_from_int(e: Emitter, to: str, from_: str) -> tuple[str, str]:
    """The value, and the type of the register that takes it."""
    rounding = e.one_of(*_ROUNDINGS) or "rn"
    if to in ("f16", "bf16"):
        return f"ops.encode(ops.wide_int({{0}}), '{to}', '{rounding}', False)", "b16"
    if to == "f32" and rounding != "rn":
        return f"ops.directed(ops.wide_int({{0}}), '{rounding}')", to
    if to == "f64" and rounding != "rn":
        return f"ops.exact64('add', '{rounding}', {{0}}, 0)", to
    if to not in ("f32", "f64"):
        raise Unknown
    return f"{to}({{0}})", to


def _cvt_float(e: Emitter, to: str, from_: str) -> tuple[str, str]:
    """The value, and the type of the register that takes it."""
    value = {"bf16": "ops.bf16_to_f32({0})", "f16": "{0}", "f32": "{0}", "f64": "{0}"}[from_]
    ftz = "f32" in (from_, to) and e.flag("ftz")
    if ftz and from_ == "f32":
        value = f"ops.ftz({value})"
    integral, sat = e.one_of(*_INTEGRAL), e.flag("sat")
    if to in _DTYPE:  # always limited to the range of the type
        if not integral:
            raise Unknown
        return f"ops.float_to_int({value}, {_DTYPE[to]}, '{integral}')", to
    if integral:
        value = f"ops.round_float({value}, '{integral}')"
    rounding = e.one_of(*_ROUNDINGS, "rna") or "rn"
    if sat:
        value = f"ops.saturate({value})"
    if to in ("f16", "bf16", "tf32"):
        if e.flag("relu"):
            value = f"ops.relu({value})"
        value = f"ops.encode({value}, '{to}', '{rounding}', {e.flag('satfinite')})"
        return value, "b32" if to == "tf32" else "b16"
    if to not in ("f32", "f64"):
        raise Unknown
    if (from_, to) == ("f64", "f32"):
        value = f"ops.directed({value}, '{rounding}')"
    elif from_ != to:
        value = f"{to}({value})"
    return f"ops.ftz({value})" if ftz and to == "f32" else value, to


def _cvt_packed(e: Emitter, dst: Operand, to: str, from_: str, args: tuple[Operand, ...]) -> None:
    """Two floats into one word: the first one on top, or both from another such word.

    To round stochastically (rs) takes random bits: 16 a half, of which f16 takes the lower 13.
    """
    rounding = e.need(*_PACKED_ROUNDINGS.get(to, ("rn",)))
    relu, saturated = to != "ue8m0x2" and e.flag("relu"), e.flag("satfinite")
    if _PACKED[to] < 16 and to != "ue8m0x2" and not saturated:
        raise Unknown
    if from_ in _PACKED:
        words = [f"b{2 * _PACKED[from_]}"]
        values = [f"ops.half({{0}}, '{from_}', {i})" for i in (1, 0)]
    else:
        words = {"f32": ["f32", "f32"]}[from_]
        values = ["{0}", "{1}"]
    if rounding == "rs":
        if from_ != "f32":
            raise Unknown
        words.append("b32")
    if len(args) != len(words):
        raise Unknown
    if relu:
        values = [f"ops.relu({v})" for v in values]
    high, low = values
    random = ", {2}" if rounding == "rs" else ""
    code = f"ops.encode_pair({high}, {low}, '{to[:-2]}', '{rounding}', {saturated}{random})"
    e.pure(code, f"b{2 * _PACKED[to]}", dst, list(zip(words, args, strict=True)))


def _cvt_pack(e: Emitter, dst: Operand, args: tuple[Operand, ...]) -> None:
    """Two limited integers into one word, on top of what a third holds."""
    e.need("sat")
    if len(args) == 3:
        e.need("b32")
    e.need("s32")
    kind = e.type()
    bits = int(kind[1:])
    if len(args) != (2 if bits == 16 else 3):
        raise Unknown
    rest = "{2}" if len(args) == 3 else "0"
    code = f"ops.pack_clamped({{0}}, {{1}}, {rest}, {bits}, {_limits(kind[0] == 's', bits)})"
    types = ("s32", "s32", "b32")
    e.pure(code, "b32", dst, [(t, a) for t, a in zip(types, args, strict=False)])
