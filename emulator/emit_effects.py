"""Instructions with an effect beyond registers: memory, synchronisation, copies, warp exchange.

Each becomes lines that call a method of `instructions.Instructions`. Cache hints, and the orders
and scopes of memory accesses, change nothing here: every access happens in program order.
"""

from __future__ import annotations

import re

from .emit import Emitter, Handler, Unknown, registry, vector
from .ptx import Address, Operand
from .steps import CLASS_LETTERS, LETTER, Products

HANDLERS: dict[str, Handler] = {}
op = registry(HANDLERS)

_ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_CACHES = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
_HINTS = ("L1::", "L2::")
_BYTES = {f"{t}{n}": n // 8 for t in "busf" for n in (8, 16, 32, 64)}
_BYTES |= {"bf16": 2, "f16x2": 4, "bf16x2": 4, "b128": 8}  # b128: pairs of b64


# Control flow ------------------------------------------------------------------------------------


def _jump(e: Emitter, target: int) -> None:
    if e.guard is None:
        return e.effect(f"return {target}", jump=True)
    register, negated = e.guard
    yes, no = (e.fall, target) if negated else (target, e.fall)
    e.effect(f"return branch({{p:{register}}}, {{m}}, {yes}, {no})", jump=True)


@op("bra")
def _bra(e: Emitter, label: Operand) -> None:
    e.one_of("uni")
    target = e.kernel.labels[str(label)]
    _jump(e, target if target < len(e.kernel.blocks) else -1)


@op("ret", "exit")
def _ret(e: Emitter) -> None:
    e.one_of("uni")
    _jump(e, -1)


@op("trap", "brkpt")
def _trap(e: Emitter) -> None:
    e.effect(f"trap({{m}}, {e.site})")


@op("griddepcontrol")
def _griddepcontrol(e: Emitter) -> None:
    """Kernels run one after another: a wait is met at once, but the checker wants to see it."""
    if e.need("launch_dependents", "wait") == "wait":
        e.effect("grid_wait({m})")


@op("nanosleep")
def _nanosleep(e: Emitter, time: Operand) -> None:
    e.need("u32")
    e.effect("sleep()")


@op("setmaxnreg")
def _setmaxnreg(e: Emitter, count: Operand) -> None:
    _aligned(e)
    e.need("u32")
    increase = e.need("inc", "dec") == "inc"
    e.effect(f"if not setmaxnreg({count}, {increase}, {{m}}, {e.site}): return STALL")


@op("prefetch", "prefetchu", "applypriority")
def _hint(e: Emitter, *operands: Operand) -> None:
    e.parts.clear()  # a hint, whatever it says


# Memory ------------------------------------------------------------------------------------------


def _access(e: Emitter) -> tuple[str, str, int, bool]:
    """Takes the parts of a load or store: (type, space, elements, is there a cache policy)."""
    type_, space = e.type(), e.space()
    policy = e.flag("L2::cache_hint")
    e.ignore((*_ORDERS, *_SCOPES, *_CACHES), _HINTS)
    width = e.one_of("v2", "v4", "v8")
    return type_, space, int(width[1:]) if width else 1, policy


def _elements(e: Emitter, type_: str, value: Operand, count: int) -> tuple[Operand, ...]:
    """The registers of a vector operand; b128 ones as pairs of b64."""
    values = vector(value)
    if len(values) != count:
        raise Unknown
    if type_ == "b128":
        return tuple(half for v in values for half in e.halves(v))
    return values


@op("ld", "ldu")
def _ld(e: Emitter, dst: Operand, where: Operand, *rest: Operand) -> None:
    type_, space, count, policy = _access(e)
    if len(rest) != policy:
        raise Unknown
    registers = _elements(e, type_, dst, count)
    size = _BYTES[type_]
    signed = type_[0] == "s"
    site = str(e.site)
    if space in ("shared", "global"):  # several may run as one
        view = f".view(i{8 * size})" if signed else ""
        shape = f"{size}, {len(registers)}"
        if e.access(f"ld_{space}", where, shape, 8 * size, registers, view, signed):
            return
        site = f"({e.site},)"
    if space == "param":
        call = f"ld_param({_parameter(e, where)}, {size}, {len(registers)})"
    else:
        call = f"ld_{space}({e.address(where)}, {size}, {len(registers)}, {{m}}, {site})"
    values: dict[str, str] = {}
    for i, register in enumerate(registers):
        if register != "_":
            letters = CLASS_LETTERS[e.registers[str(register)]]
            view = f".view(i{8 * size})" if signed else ""
            values[f"{letters[signed]}:{register}"] = f"t[{i}]{view}"
    e.effect(f"t = {call}", *e.results(values))


def _parameter(e: Emitter, where: Operand) -> str:
    if isinstance(where, Address):
        for param in e.kernel.params:
            if param.name == where.base:
                return str(param.offset + where.offset)
    return e.address(where)


@op("st")
def _st(e: Emitter, where: Operand, value: Operand, *rest: Operand) -> None:
    if e.flag("async"):
        return _st_async(e, where, value, *rest)
    type_, space, count, policy = _access(e)
    if len(rest) != policy or space == "param":
        raise Unknown
    size = _BYTES[type_]
    registers = _elements(e, type_, value, count)
    site = str(e.site)
    if space in ("shared", "global"):
        if e.access(f"st_{space}", where, f"{size}, {len(registers)}", 8 * size, registers):
            return
        site = f"({e.site},)"
    values = e.words(8 * size, registers)
    e.effect(f"st_{space}({e.address(where)}, {size}, {len(registers)}, {values}, {{m}}, {site})")


def _st_async(e: Emitter, where: Operand, value: Operand, barrier: Operand) -> None:
    e.need("shared::cluster")
    e.need("mbarrier::complete_tx::bytes")
    type_, _, count, policy = _access(e)
    size = _BYTES[type_]
    if size not in (4, 8) or policy:
        raise Unknown
    values = e.words(8 * size, _elements(e, type_, value, count))
    e.effect(
        f"st_async({e.address(where)}, {size}, {values}, {e.address(barrier)}, {{m}}, {e.site})"
    )


_ATOMS = ("add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas")


@op("atom", "red")
def _atom(e: Emitter, *operands: Operand) -> None:
    dst, where, *values = operands if e.head == "atom" else ("_", *operands)
    order = "acq_rel" if e.one_of("acq_rel", "acquire", "release") else "relaxed"
    kind = e.need(*_ATOMS)
    e.ignore(("noftz",))  # subnormal values are kept
    type_, space, count, policy = _access(e)
    if policy:
        values.pop()
    size = _BYTES[type_]
    if len(values) != (2 if kind == "cas" else 1) or type_ == "b128":
        raise Unknown
    lists = "".join(f"{e.words(8 * size, _elements(e, type_, v, count))}, " for v in values)
    call = (
        f"atomic('{space}', '{kind}', '{type_}', {e.address(where)}, ({lists}), {count}, "
        f"'{order}', {{m}}, {e.site})"
    )
    registers = () if dst == "_" else _elements(e, type_, dst, count)
    raw = f"b{8 * size}"
    results = {
        f"{e.destination(raw, str(r))}:{r}": f"t[{i}]" for i, r in enumerate(registers) if r != "_"
    }
    e.effect(f"t = {call}", *e.results(results))


# Fences and barriers -----------------------------------------------------------------------------


@op("fence")
def _fence(e: Emitter, *tensor_map: Operand) -> None:
    if e.flag("proxy"):
        return _fence_proxy(e, tensor_map)
    kind = "mbarrier_init" if e.flag("mbarrier_init") else "generic"
    if not e.one_of("sc", "acq_rel", "acquire", "release") and kind != "generic":
        raise Unknown
    e.need(*_SCOPES)
    e.effect(f"fence('{kind}', {{m}}, {e.site})")


def _fence_proxy(e: Emitter, tensor_map: tuple[Operand, ...]) -> None:
    if tensor_map and "tensormap::generic" not in e.parts:
        raise Unknown
    proxy = e.need("async", "async::generic", "tensormap::generic", "alias")
    if proxy == "async::generic":  # one before a relaxed arrival, one behind its wait
        kind, space = {"release": ("proxy_release", "cta"), "acquire": ("proxy_async", "cluster")}[
            e.need("acquire", "release")
        ]
        e.need(f"sync_restrict::shared::{space}")
        e.need("cluster")
        return e.effect(f"fence('{kind}', {{m}}, {e.site})")
    if proxy == "tensormap::generic":  # a kernel cannot change a tensor map here
        e.need("acquire", "release")
        e.need(*_SCOPES)
    kind = proxy
    if proxy == "async":
        space = e.one_of("global", "shared::cta", "shared::cluster")
        kind = {"global": "async", "shared::cta": "proxy_async_own"}.get(space, "proxy_async")
    e.effect(f"fence('{kind}', {{m}}, {e.site})")


@op("membar")
def _membar(e: Emitter) -> None:
    if e.flag("proxy"):
        return _fence_proxy(e, ())
    e.need("cta", "gl", "sys")
    e.effect(f"fence('generic', {{m}}, {e.site})")


def _aligned(e: Emitter) -> None:
    """Takes .sync and .aligned: whether all lanes come is checked for either."""
    e.one_of("sync")
    e.one_of("aligned")


@op("bar", "barrier")
def _bar(e: Emitter, *operands: Operand) -> None:
    e.one_of("cta")
    act = e.next()
    if act == "warp":
        e.need("sync")
        return _warp_sync(e, *operands)
    if act == "cluster":
        return _cluster(e)
    e.one_of("aligned")
    if act == "red":
        return _bar_red(e, *operands)
    if act not in ("sync", "arrive"):
        raise Unknown
    barrier, count = _barrier(e, *operands)
    call = f"bar_{act}({barrier}, {count}, {{m}}, {e.site})"
    e.effect(call if act == "arrive" else f"if not {call}: return STALL")


def _barrier(e: Emitter, barrier: Operand, count: Operand = 0) -> tuple[str, str]:
    return e.text("u32", barrier), e.text("u32", count)


def _bar_red(e: Emitter, dst: Operand, *operands: Operand) -> None:
    reduction, type_ = e.need("popc", "and", "or"), e.type()
    if type_ != ("u32" if reduction == "popc" else "pred"):
        raise Unknown
    *named, predicate = operands
    barrier, count = _barrier(e, *named)
    e.effect(
        f"if not bar_red({barrier}, {count}, {e.predicate(predicate)}, '{reduction}', {{m}}, "
        f"{e.site}): return STALL",
        *e.results({f"{LETTER[type_]}:{dst}": "bar_result()"}),
    )


def _warp_sync(e: Emitter, members: Operand) -> None:
    e.effect(*_converge(e, members), f"warp_sync({{m}}, {e.site})")


def _cluster(e: Emitter) -> None:
    e.one_of("aligned")
    if e.need("arrive", "wait") == "wait":
        e.one_of("acquire")
        return e.effect(f"if not cluster_wait({{m}}, {e.site}): return STALL")
    relaxed = e.one_of("release", "relaxed") == "relaxed"
    e.effect(f"cluster_arrive({{m}}, {relaxed}, {e.site})")


@op("mbarrier")
def _mbarrier(e: Emitter, *operands: Operand) -> None:
    e.need("b64")
    act = e.next()
    if act == "pending_count":
        return _pending_count(e, *operands)
    space = e.space()
    relaxed = e.one_of("relaxed", "release", "acquire") == "relaxed"
    e.one_of("cta", "cluster")
    {
        "init": _mbarrier_init,
        "inval": _mbarrier_inval,
        "arrive": _mbarrier_arrive,
        "arrive_drop": _mbarrier_arrive,
        "expect_tx": _mbarrier_bytes,
        "complete_tx": _mbarrier_bytes,
        "try_wait": _mbarrier_wait,
        "test_wait": _mbarrier_wait,
    }[act](e, act, space, relaxed, *operands)


def _pending_count(e: Emitter, dst: Operand, state: Operand) -> None:
    e.pure("{0} >> 32", "u32", dst, [("b64", state)])


def _mbarrier_init(
    e: Emitter, act: str, space: str, relaxed: bool, where: Operand, count: Operand
) -> None:
    e.effect(
        f"mbar_init({e.shared_address(where, space)}, {e.text('u32', count)}, {{m}}, {e.site})"
    )


def _mbarrier_inval(e: Emitter, act: str, space: str, relaxed: bool, where: Operand) -> None:
    e.effect(f"mbar_inval({e.shared_address(where, space)}, {{m}}, {e.site})")


def _mbarrier_arrive(e: Emitter, act: str, space: str, relaxed: bool, *operands: Operand) -> None:
    state, *rest = ("_", *operands) if isinstance(operands[0], Address) else operands
    state = "_" if state in e.unread else state
    where, value = (*rest, 1) if len(rest) == 1 else rest
    amount = e.text("u32", value)
    count, nbytes = ("1", amount) if e.flag("expect_tx") else (amount, "0")
    at, kind = e.shared_address(where, space), 2 if act == "arrive_drop" else 1
    before = [] if state == "_" else [f"t = mbar_state({at}, {count}, {{m}}, {e.site})"]
    e.effect(
        *before,
        f"mbar_arrive({at}, {count}, {nbytes}, {kind}, {relaxed}, {space == 'cluster'}, "
        f"{e.flag('noComplete')}, {{m}}, {e.site})",
        *e.results({f"U:{state}": "t"}),
    )


def _mbarrier_bytes(
    e: Emitter, act: str, space: str, relaxed: bool, where: Operand, count: Operand
) -> None:
    """Bytes to come, or some that have come."""
    sign = "-" if act == "complete_tx" else ""
    e.effect(
        f"mbar_arrive({e.shared_address(where, space)}, 0, {sign}{e.text('s32', count)}, 0, "
        f"{relaxed}, {space == 'cluster'}, False, {{m}}, {e.site})"
    )


def _mbarrier_wait(
    e: Emitter,
    act: str,
    space: str,
    relaxed: bool,
    dst: Operand,
    where: Operand,
    phase: Operand,
    *limit: Operand,
) -> None:
    """A time limit only says when to give up and ask again."""
    parity = e.flag("parity")
    if len(limit) > (act == "try_wait"):
        raise Unknown
    wanted = e.text("u32" if parity else "u64", phase)
    e.effect(
        f"t = mbar_wait({e.shared_address(where, space)}, {wanted}, {parity}, {relaxed}, {{m}}, "
        f"{e.site})",
        "if t is STALL: return STALL",
        *e.results({f"p:{dst}": "t"}),
    )


# Asynchronous copies -----------------------------------------------------------------------------


@op("cp")
def _cp(e: Emitter, *operands: Operand) -> None:
    reduction = e.flag("reduce")
    e.need("async")
    if e.flag("bulk"):
        return _cp_bulk(e, reduction, operands)
    if e.flag("commit_group"):
        e.effect(f"cp_commit({{m}}, {e.site})")
    elif e.flag("wait_all"):
        e.effect(f"cp_wait(0, True, {{m}}, {e.site})")
    elif e.flag("wait_group"):
        (count,) = operands
        e.effect(f"cp_wait({count}, False, {{m}}, {e.site})")
    elif e.flag("mbarrier"):
        e.need("arrive")
        e.need("b64")
        (where,) = operands
        alone, space = e.flag("noinc"), e.space()
        e.effect(f"cp_mbarrier({e.shared_address(where, space)}, {alone}, {{m}}, {e.site})")
    else:
        _cp_async(e, *operands)


def _cp_async(e: Emitter, dst: Operand, src: Operand, size: Operand, *rest: Operand) -> None:
    e.need("ca", "cg")
    e.need("global")
    space = e.space()
    tail = list(rest)
    if e.flag("L2::cache_hint"):
        tail.pop()
    e.ignore(prefixes=("L2::",))
    read = str(size)
    if tail:  # bytes to read, or a predicate that says to read none
        (limit,) = tail
        if isinstance(limit, str) and e.registers.get(limit.lstrip("!")) == "pred":
            read = f"where({e.predicate(limit)}, 0, {size})"
        else:
            read = e.text("u32", limit)
    copy = f"{e.shared_address(dst, space)}, {e.address(src)}, {size}, {read}"
    e.effect(f"cp_async({copy}, {{m}}, {e.site})")


def _cp_bulk(e: Emitter, reduction: bool, operands: tuple[Operand, ...]) -> None:
    if e.flag("commit_group"):
        return e.effect(f"bulk_commit({{m}}, {e.site})")
    if e.flag("wait_group"):
        (count,) = operands
        return e.effect(f"bulk_wait({count}, {e.flag('read')}, {{m}}, {e.site})")
    if e.flag("prefetch"):
        e.parts.clear()
        return None
    if e.flag("L2::cache_hint"):
        operands = operands[:-1]
    kind = e.need(*_ATOMS[:8]) if reduction else ""
    if e.flag("tensor"):
        return _cp_tensor(e, kind, operands)
    type_ = e.type() if reduction else ""
    if reduction:
        e.ignore(("noftz",))
    target, source = e.space(), e.space()
    to_shared = target in ("shared", "cluster")
    e.need("mbarrier::complete_tx::bytes" if to_shared else "bulk_group")
    multicast = e.flag("multicast::cluster")
    dst, src, size, *rest = operands
    if len(rest) != to_shared + multicast:
        raise Unknown
    copy = f"{e.address(dst)}, {e.address(src)}, {e.text('u32', size)}"
    if not to_shared:
        if source != "shared" or target != "global":
            raise Unknown
        return e.effect(f"bulk_store({copy}, '{kind}', '{type_}', {{m}}, {e.site})")
    if source not in ("shared", "global"):
        raise Unknown
    mask = e.text("u16", rest[1]) if multicast else "None"
    e.effect(
        f"bulk_load({copy}, {e.address(rest[0])}, {mask}, {source == 'shared'}, '{kind}', "
        f"'{type_}', {{m}}, {e.site})"
    )


def _tensor(e: Emitter, where: Operand) -> str:
    """`[map, {coordinates}]` as two arguments."""
    if not isinstance(where, Address) or len(where.coords) != 1:
        raise Unknown
    coords = "".join(f"{e.text('s32', c)}, " for c in vector(where.coords[0]))
    return f"{e.address(Address(where.base, where.offset))}, ({coords})"


def _cp_tensor(e: Emitter, kind: str, operands: tuple[Operand, ...]) -> None:
    e.need("1d", "2d", "3d", "4d", "5d")
    e.one_of("tile")
    target, source = e.space(), e.space()
    if target == "global" and source == "shared":
        e.need("bulk_group")
        tensor, src = operands
        return e.effect(
            f"tma_store({_tensor(e, tensor)}, {e.address(src)}, '{kind}', {{m}}, {e.site})"
        )
    if kind or target not in ("shared", "cluster") or source != "global":
        raise Unknown
    e.need("mbarrier::complete_tx::bytes")
    multicast = e.flag("multicast::cluster")
    pair = e.one_of("cta_group::1", "cta_group::2") == "cta_group::2"
    dst, tensor, barrier, *rest = operands
    if len(rest) != multicast:
        raise Unknown
    mask = e.text("u16", rest[0]) if multicast else "None"
    e.effect(
        f"tma_load({e.address(dst)}, {_tensor(e, tensor)}, {e.address(barrier)}, {mask}, {pair}, "
        f"{{m}}, {e.site})"
    )


# Cluster launch control --------------------------------------------------------------------------


@op("clusterlaunchcontrol")
def _clusterlaunchcontrol(e: Emitter, *operands: Operand) -> None:
    e.need("b128")
    if e.need("try_cancel", "query_cancel") == "query_cancel":
        return _query_cancel(e, *operands)
    e.need("async")
    e.need("mbarrier::complete_tx::bytes")
    everywhere, space = e.flag("multicast::cluster::all"), e.space()
    where, barrier = (e.shared_address(operand, space) for operand in operands)
    e.effect(f"try_cancel({where}, {barrier}, {everywhere}, {{m}}, {e.site})")


def _query_cancel(e: Emitter, dst: Operand, response: Operand) -> None:
    """What `Copies.try_cancel` has written: x, y, z, and whether they are a cancelled cluster's."""
    low, high = e.halves(response)
    words = [("b64.lo", low), ("b64.hi", low), ("b64.lo", high)]
    if e.flag("is_canceled"):
        e.need("pred")
        return e.pure("{0} != 0", "pred", dst, [("b64.hi", high)])
    e.need("b32")
    axis = e.one_of(*(f"get_first_ctaid::{a}" for a in "xyz"))
    if axis:
        return e.pure("{0}", "b32", dst, [words["xyz".index(axis[-1])]])
    e.need("get_first_ctaid")
    e.need("v4")
    *targets, _ = vector(dst)
    for target, word in zip(targets, words, strict=True):
        e.pure("{0}", "b32", target, [word])


# Tensor cores ------------------------------------------------------------------------------------


@op("wgmma")
def _wgmma(e: Emitter, *operands: Operand) -> None:
    act = e.next()
    _aligned(e)
    here = e.together(f"converge_all({{m}}, {e.site})")
    if act == "fence":
        return e.effect(*here, "wgmma_fence()")
    if act == "commit_group":
        return e.effect(*here, f"wgmma_commit({e.site})")
    if act == "wait_group":
        (count,) = operands
        # A warp may wait alone: only the products themselves need the whole warpgroup.
        warp = _converge(e, 0xFFFFFFFF)
        return e.effect(*warp, f"wgmma_wait({count}, {{m}}, {e.site})")
    if act != "mma_async":
        raise Unknown
    if here:
        e.effect(*here)
    _products(e, *operands)


def _products(
    e: Emitter, acc: Operand, a: Operand, b: Operand, scale: Operand = 1, *rest: Operand
) -> None:
    """rest: signs of A and B, then which of those in shared memory are transposed, for 16 bits."""
    saturate = e.flag("satfinite")
    btype, atype, dtype = e.type(), e.type(), e.type()
    shape = re.fullmatch(r"m64n(\d+)k\d+", e.next())
    if not isinstance(acc, tuple) or shape is None:
        raise Unknown
    signs, transposed = rest[:2], rest[2:]
    negative = [sign == -1 for sign in signs] or [False, False]
    in_registers = isinstance(a, tuple)
    trans_a, trans_b = (0, *transposed) if in_registers and transposed else transposed or (0, 0)
    arguments = (
        f"{shape[1]}, '{dtype}', '{atype}', '{btype}', {', '.join(map(str, negative))}, "
        f"{bool(trans_a)}, {bool(trans_b)}, {saturate}"
    )
    accumulator = tuple(map(str, acc))
    registers = tuple(map(str, a)) if isinstance(a, tuple) else ()
    reads = (*registers, *(str(x) for x in (a, b, scale)), *accumulator)
    e.steps.append(
        Products(
            [],
            reads,
            accumulator,
            e.guard,
            e.site,
            asynchronous=True,
            # Only float32 sums may be taken together: others wrap, or round at each product.
            kind=(accumulator, in_registers, arguments) if dtype == "f32" else (),
            parts=[(reads, accumulator, e.site)],
            columns=(
                list(registers) if in_registers else [e.text("u64", a)],
                [e.text("u64", b)],
                [e.text("pred", scale)],
            ),
            accumulator=accumulator,
            arguments=arguments,
            from_registers=in_registers,
        )
    )


# Between the lanes of a warp ---------------------------------------------------------------------


def _converge(e: Emitter, members: Operand) -> list[str]:
    return e.together(f"converge({e.text('u32', members)}, {{m}}, {e.site})")


@op("elect")
def _elect(e: Emitter, dst: Operand, members: Operand) -> None:
    e.need("sync")
    leader, elected = e.pair(dst)
    e.effect(
        *_converge(e, members),
        f"t = elect({e.text('u32', members)}, {{m}})",
        *e.results({f"u:{leader}": "t[0]", f"p:{elected}": "t[1]"}),
    )


@op("shfl")
def _shfl(
    e: Emitter, dst: Operand, value: Operand, lane: Operand, clamp: Operand, members: Operand
) -> None:
    e.need("sync")
    e.need("b32")
    mode = e.need("up", "down", "bfly", "idx")
    first, second = e.pair(dst)
    here = _converge(e, members)
    static = isinstance(lane, int) and isinstance(clamp, int) and members in (-1, 0xFFFFFFFF)
    if static and second == "_" and e.guard is None:  # whole warps: as good as arithmetic
        if here:
            e.effect(*here)
        code = f"shuffle('{mode}', {{0}}, {lane}, {clamp}, -1, {{m}}, {{site}})[0]"
        return e.pure(code, "b32", first, [("b32", value)])
    arguments = ", ".join(e.text("u32", x) for x in (value, lane, clamp, members))
    e.effect(
        *here,
        f"t = shuffle('{mode}', {arguments}, {{m}}, {e.site})",
        *e.results({f"u:{first}": "t[0]", f"p:{second}": "t[1]"}),
    )


@op("vote")
def _vote(e: Emitter, dst: Operand, predicate: Operand, members: Operand) -> None:
    e.need("sync")
    mode = e.need("all", "any", "uni", "ballot")
    type_ = e.need("b32") if mode == "ballot" else e.need("pred")
    call = f"vote('{mode}', {e.predicate(predicate)}, {e.text('u32', members)}, {{m}})"
    e.effect(*_converge(e, members), *e.results({f"{LETTER[type_]}:{dst}": call}))


_REDUCTIONS = {
    "u32": ("add", "min", "max"),
    "s32": ("add", "min", "max"),
    "b32": ("and", "or", "xor"),
    "f32": ("min", "max"),
}


@op("redux")
def _redux(e: Emitter, dst: Operand, value: Operand, members: Operand) -> None:
    e.need("sync")
    type_ = e.type()
    kind = e.need(*_REDUCTIONS[type_])
    magnitude, nan = (type_ == "f32" and e.flag(name) for name in ("abs", "NaN"))
    call = (
        f"redux('{kind}', {e.text(type_, value)}, {e.text('u32', members)}, {{m}}, {nan}, "
        f"{magnitude})"
    )
    e.effect(*_converge(e, members), *e.results({f"{LETTER[type_]}:{dst}": call}))


@op("match")
def _match(e: Emitter, dst: Operand, value: Operand, members: Operand) -> None:
    type_, mode = e.type(), e.need("any", "all")
    e.need("sync")
    found, same = e.pair(dst)
    e.effect(
        *_converge(e, members),
        f"t = match('{mode}', {e.text(type_, value)}, {e.text('u32', members)}, {{m}})",
        *e.results({f"u:{found}": "t[0]", f"p:{same}": "t[1]"}),
    )


@op("activemask")
def _activemask(e: Emitter, dst: Operand) -> None:
    e.need("b32")
    e.effect(*e.results({f"u:{dst}": "active({m})"}))


def _matrices(e: Emitter, registers: tuple[Operand, ...]) -> tuple[list[str], str, bool]:
    """Takes the parts of ldmatrix and stmatrix: (waiting line, space, transposed)."""
    _aligned(e)
    e.need("m8n8")
    e.need("b16")
    if int(e.need("x1", "x2", "x4")[1:]) != len(registers):
        raise Unknown
    return _converge(e, 0xFFFFFFFF), e.space(), e.flag("trans")


@op("ldmatrix")
def _ldmatrix(e: Emitter, dst: Operand, where: Operand) -> None:
    registers = vector(dst)
    here, space, trans = _matrices(e, registers)
    if here:
        e.effect(*here)
    shape = f"{len(registers)}, {trans}"
    if space == "shared" and e.access("ldmatrix", where, shape, 32, registers, ""):
        return
    address = e.shared_address(where, space)
    e.effect(
        f"t = ldmatrix({address}, {shape}, {{m}}, ({e.site},))",
        *e.results({f"u:{r}": f"t[{i}]" for i, r in enumerate(registers)}),
    )


@op("stmatrix")
def _stmatrix(e: Emitter, where: Operand, src: Operand) -> None:
    registers = vector(src)
    here, space, trans = _matrices(e, registers)
    if here:
        e.effect(*here)
    shape = f"{len(registers)}, {trans}"
    if space == "shared" and e.access("stmatrix", where, shape, 32, registers):
        return
    address = e.shared_address(where, space)
    e.effect(f"stmatrix({address}, {shape}, {e.words(32, registers)}, {{m}}, ({e.site},))")


@op("movmatrix")
def _movmatrix(e: Emitter, dst: Operand, src: Operand) -> None:
    _aligned(e)
    e.need("m8n8")
    e.need("trans")
    e.need("b16")
    moved = e.results({f"u:{dst}": f"movmatrix({e.text('b32', src)})"})
    e.effect(*_converge(e, 0xFFFFFFFF), *moved)
