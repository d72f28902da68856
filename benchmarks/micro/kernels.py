"""The kernels, as PTX text for sm_90a.

All have the parameters (results, data, bytes of data): a thread that measures writes clocks, each
as a u64, to its place in `results`. Loops are unrolled by `UNROLL` instructions, over `CHAINS`
registers that do not depend on one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNROLL = 64
CHAINS = 16
SUMS = 4
FROM_REGISTERS = "{a0, a1, a2, a3}"
PRODUCT_LOOPS = 2  # groups of 16 products for each loop that is measured: they last longer
WARPGROUP = 128
STAGE_BYTES = 16384  # of the copies that fill a ring
STAGES = 8
SMEM = 160 * 1024  # bytes; operands of wgmma may lie anywhere in it


@dataclass(frozen=True)
class Kernel:
    """Text, threads of a CTA and how many u64 each CTA writes."""

    ptx: str
    threads: int
    results: int
    smem: int = SMEM


def _kernel(
    body: str, threads: int, results: int, registers: str = "", directives: str = ""
) -> Kernel:
    text = f"""
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry micro(.param .u64 results, .param .u64 data, .param .u64 size)
.reqntid {threads}, 1, 1
.minnctapersm 1
{directives}
{{
.reg .pred go, lead, done, never;
.reg .b32 tid, warp, group, i, at, phase, stage, base, other, cta, own;
.reg .b64 out, from, limit, t0, t1, t2, t3, d0, d1, span, place;
.reg .f32 f<{CHAINS}>, one, tiny;
.reg .b32 x<{CHAINS}>, p<{CHAINS}>, q<{CHAINS}>, r<{CHAINS}>, s<{CHAINS}>;
.reg .f32 sum<{SUMS}>;
{registers}
ld.param.u64 out, [results];
ld.param.u64 from, [data];
ld.param.u64 limit, [size];
mov.u32 tid, %tid.x;
mov.u32 cta, %ctaid.x;
shr.u32 warp, tid, 5;
shr.u32 group, tid, 7;
mov.u32 base, smem;
shl.b32 own, tid, 4;
add.s32 own, own, base;
mul.wide.u32 d0, cta, {8 * results};
add.s64 out, out, d0;
mov.u64 t0, 0;
mov.u64 t1, 0;
mov.u64 t2, 0;
mov.u64 t3, 0;
mov.f32 one, 0f3F800000;
mov.f32 tiny, 0f33800000;
cvt.rn.f32.u32 f0, tid;
mov.u32 x0, tid;
{chr(10).join(f"add.f32 f{i}, f0, one; add.s32 x{i}, tid, {i};" for i in range(1, CHAINS))}
{chr(10).join(f"mov.f32 sum{i}, f{i};" for i in range(SUMS))}
{body}
ret;
}}
"""
    return Kernel(text, threads, results)


OPS = {
    "ex2": "ex2.approx.ftz.f32 f{i}, f{i};",
    "fma": "fma.rn.f32 f{i}, f{i}, one, tiny;",
    "max": "max.f32 f{i}, f{i}, f{j};",
    "integer": "add.s32 x{i}, x{i}, x{j};",
    "convert": "cvt.rn.bf16x2.f32 x{i}, f{i}, one; mov.b32 f{i}, x{i};",
    "shuffle": "shfl.sync.bfly.b32 x{i}, x{i}, 1, 31, -1;",
    # 16 bytes a lane of shared memory: each its own, or all the same.
    "read": "ld.volatile.shared.v4.b32 {{p{i}, q{i}, r{i}, s{i}}}, [own];",
    "broadcast": "ld.volatile.shared.v4.b32 {{p{i}, q{i}, r{i}, s{i}}}, [base];",
    "write": "st.volatile.shared.v4.b32 [own], {{x{i}, x{i}, x{i}, x{i}}};",
}
# As the kernel sums them: of the last exponential but one.
SUMMED = (OPS["ex2"], "add.f32 sum{sum}, sum{sum}, f{earlier};")
# As a softmax mixes them: of eight scores a maximum, FMA, exponential and sum each.
SOFTMAX = tuple(OPS[name] for name in ("max", "fma", "ex2", "fma"))


def rate(
    ops: Sequence[str],
    groups: int,
    beside: int,
    loops: int = 32,
    chains: int = CHAINS,
    registers: bool = False,
) -> Kernel:
    """Clocks of UNROLL instructions `loops` times, by `groups` warpgroups at once.

    beside: columns of the products that one more warpgroup computes meanwhile; 0 for none.
    registers: those products take A from there.
    Results: (begin, end) of warpgroup 0, then of each further one, of the products last.
    """
    places = [k // len(ops) % chains for k in range(UNROLL)]
    text = " ".join(
        ops[k % len(ops)].format(
            i=i, j=(i + chains // 2) % chains, earlier=(i - 2) % chains, sum=i % SUMS
        )
        for k, i in enumerate(places)
    )
    total = groups + bool(beside)
    n = beside or 8
    products = f"""
{" ".join(f"mov.f32 acc{i}, 0f00000000;" for i in range(n // 2))}
{" ".join(f"add.s32 a{i}, tid, {i};" for i in range(4))}
setp.ge.u32 go, group, {groups};
@!go bra MEASURE;
mov.u32 i, 0;
mov.u64 t0, %clock64;
PRODUCTS:
.pragma "nounroll";
{_products(n, 16, FROM_REGISTERS if registers else "desc")}
wgmma.wait_group.sync.aligned 0;
add.s32 i, i, 1;
setp.lt.u32 go, i, {PRODUCT_LOOPS * loops};
@go bra PRODUCTS;
mov.u64 t1, %clock64;
{_used(n)}
bra WRITE;
MEASURE:
"""
    body = f"""
{_descriptors() if beside else ""}
bar.sync 0;
{products if beside else ""}
mov.u32 i, 0;
mov.u64 t0, %clock64;
LOOP:
.pragma "nounroll";
{text}
add.s32 i, i, 1;
setp.lt.u32 go, i, {loops};
@go bra LOOP;
mov.u64 t1, %clock64;
WRITE:
{_keep()}
and.b32 at, tid, {WARPGROUP - 1};
setp.eq.u32 lead, at, 0;
mul.wide.u32 d0, group, 16;
add.s64 d0, out, d0;
@lead st.global.u64 [d0], t0;
@lead st.global.u64 [d0+8], t1;
"""
    declared = _product_registers(n) if beside else ""
    return _kernel(body, WARPGROUP * total, 2 * total, declared)


def _keep() -> str:
    """Makes the compiler believe that every chain is used."""
    sums = " ".join(f"add.f32 f0, f0, f{i}; xor.b32 x0, x0, x{i};" for i in range(1, CHAINS))
    sums += " ".join(f"add.f32 f0, f0, sum{i};" for i in range(SUMS))
    return f"""{sums}
cvt.rn.f32.u32 f1, x0;
add.f32 f0, f0, f1;
setp.eq.f32 never, f0, 0fC2F6E979;
@never st.global.f32 [out], f0;"""


def _descriptors() -> str:
    """desc: of a K-major operand of 128-byte rows, swizzled, at the start of shared memory."""
    return """
and.b32 at, base, 0x3FFFF;
shr.u32 at, at, 4;
cvt.u64.u32 desc, at;
or.b64 desc, desc, 0x4000004000010000;
"""


def _product_registers(n: int) -> str:
    return f".reg .b64 desc; .reg .f32 acc<{n // 2}>; .reg .b32 a<4>;"


def _used(n: int) -> str:
    """Makes the compiler believe that every accumulator is used."""
    return " ".join(f"add.f32 f0, f0, acc{i};" for i in range(n // 2))


def _products(n: int, count: int, a: str) -> str:
    """`count` wgmmas m64nNk16 of bf16 into one accumulator, as one group; A from `a`."""
    acc = ", ".join(f"acc{i}" for i in range(n // 2))
    shape = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
    signs = "1, 1, 0" if a.startswith("{") else "1, 1, 0, 0"
    one = f"{shape} {{{acc}}}, {a}, desc, 1, {signs};"
    lines = "\n".join([one] * count)
    return f"wgmma.fence.sync.aligned;\n{lines}\nwgmma.commit_group.sync.aligned;"


def products(n: int, count: int, from_registers: bool, groups: int = 1) -> Kernel:
    """A group of `count` products: clocks at its begin, when all are issued, when they are done.

    Results: three of each of `groups` warpgroups, which begin together.
    """
    a = FROM_REGISTERS if from_registers else "desc"
    zero = " ".join(f"mov.f32 acc{i}, 0f00000000;" for i in range(n // 2))
    body = f"""
{_descriptors()}
{" ".join(f"add.s32 a{i}, tid, {i};" for i in range(4))}
{zero}
{_products(n, 2, a)}
wgmma.wait_group.sync.aligned 0;
bar.sync 0;
mov.u64 t0, %clock64;
{_products(n, count, a)}
mov.u64 t1, %clock64;
wgmma.wait_group.sync.aligned 0;
mov.u64 t2, %clock64;
{_used(n)}
{_keep()}
and.b32 at, tid, {WARPGROUP - 1};
setp.eq.u32 lead, at, 0;
mul.wide.u32 d0, group, 24;
add.s64 d0, out, d0;
@lead st.global.u64 [d0], t0;
@lead st.global.u64 [d0+8], t1;
@lead st.global.u64 [d0+16], t2;
"""
    return _kernel(body, WARPGROUP * groups, 3 * groups, _product_registers(n))


def _begin_barriers(count: int, arrivals: int) -> str:
    lines = " ".join(
        f"@lead mbarrier.init.shared::cta.b64 [base+{8 * i}], {arrivals};" for i in range(count)
    )
    return f"""
setp.eq.u32 lead, tid, 0;
{lines}
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
"""


def _wait(name: str, barrier: str, phase: str) -> str:
    return f"""
{name}:
mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {phase};
@!done bra {name};
"""


def handover(named: bool, loops: int = 64) -> Kernel:
    """Two warps hand a turn to and fro, by mbarriers or by named barriers. Results: begin, end."""
    if named:
        first = "bar.arrive 1, 64;\nbar.sync 2, 64;"
        second = "bar.sync 1, 64;\nbar.arrive 2, 64;"
    else:
        arrive = "@lead mbarrier.arrive.shared::cta.b64 _, [base+{}];"
        first = arrive.format(0) + _wait("WAIT1", "base+8", "phase")
        second = _wait("WAIT0", "base", "phase") + arrive.format(8)
    body = f"""
{_begin_barriers(2, 1)}
and.b32 at, tid, 31;
setp.eq.u32 lead, at, 0;
mov.u32 i, 0;
mov.u64 t0, %clock64;
setp.ne.u32 go, warp, 0;
@go bra SECOND;
FIRST:
and.b32 phase, i, 1;
{first}
add.s32 i, i, 1;
setp.lt.u32 go, i, {loops};
@go bra FIRST;
bra WRITE;
SECOND:
and.b32 phase, i, 1;
{second}
add.s32 i, i, 1;
setp.lt.u32 go, i, {loops};
@go bra SECOND;
WRITE:
mov.u64 t1, %clock64;
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
"""
    return _kernel(body, 64, 2)


def copies(rounds: int, stages: int, nbytes: int = STAGE_BYTES) -> Kernel:
    """One thread keeps `stages` bulk copies in flight, `rounds` times; CTA c begins `data` at its
    share. Results: begin, end, and the latency of the very first copy.
    """
    copy = f"""
@lead mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {nbytes};
add.s64 place, from, span;
@lead cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [other], [place], {nbytes}, [at];
add.s64 span, span, {nbytes};
setp.ge.u64 go, span, limit;
@go mov.u64 span, 0;
"""
    fill = "\n".join(
        f"add.s32 at, base, {8 * s};\nadd.s32 other, base, {1024 + s * nbytes};\n{copy}"
        for s in range(stages)
    )
    again = "\n".join(
        f"add.s32 at, base, {8 * s};\nadd.s32 other, base, {1024 + s * nbytes};\n"
        f"{_wait(f'WAIT{s}', 'at', 'phase')}\n{copy}"
        for s in range(stages)
    )
    drain = "\n".join(
        f"add.s32 at, base, {8 * s};\n{_wait(f'END{s}', 'at', 'phase')}" for s in range(stages)
    )
    body = f"""
{_begin_barriers(stages + 1, 1)}
mov.u32 x1, %nctaid.x;
cvt.u64.u32 d1, x1;
div.u64 span, limit, d1;
cvt.u64.u32 d1, cta;
mul.lo.u64 span, span, d1;
and.b64 span, span, {-nbytes & (1 << 64) - 1};
setp.eq.u32 lead, tid, 0;
mov.u32 phase, 0;
mov.u64 t0, %clock64;
add.s32 at, base, {8 * stages};
add.s32 other, base, 1024;
{copy}
{_wait("ALONE", "at", "phase")}
mov.u64 t1, %clock64;
sub.s64 t2, t1, t0;
mov.u64 t0, %clock64;
{fill}
mov.u32 i, 1;
LOOP:
{again}
and.b32 phase, i, 1;
add.s32 i, i, 1;
setp.lt.u32 go, i, {rounds};
@go bra LOOP;
{drain}
mov.u64 t1, %clock64;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
@lead st.global.u64 [out+16], t2;
"""
    return _kernel(body, 32, 3)


def chase(atomic: bool, loops: int = 32) -> Kernel:
    """Loads, or atomic additions of 0, of which each needs the one before. Results: begin, end.

    `data` holds zeros.
    """
    load = "atom.global.add.u32" if atomic else "ld.global.cg.u32"
    tail = ", 0" if atomic else ""
    step = f"{load} x0, [d0]{tail}; cvt.u64.u32 d1, x0; add.s64 d0, d0, d1;"
    body = f"""
mov.u64 d0, from;
{load} x0, [d0]{tail};
cvt.u64.u32 d1, x0;
add.s64 d0, d0, d1;
mov.u64 t0, %clock64;
{chr(10).join([step] * loops)}
add.s64 t2, d0, 0;
mov.u64 t1, %clock64;
sub.s64 t2, t2, from;
add.s64 t1, t1, t2;
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
"""
    return _kernel(body, 32, 2)


def _fmas(count: int) -> str:
    """So many, each chain in turn."""
    return "\n".join(OPS["fma"].format(i=k % CHAINS) for k in range(count))


def straight(count: int, groups: int, loops: int = 8) -> Kernel:
    """`count` FMAs without a jump, by `groups` warpgroups at once, `loops` times.

    Results: (begin, end) of the first time, then of the others together.
    """
    body = f"""
bar.sync 0;
mov.u32 i, 0;
mov.u64 t0, %clock64;
LOOP:
.pragma "nounroll";
{_fmas(count)}
setp.eq.u32 done, i, 0;
@done mov.u64 t1, %clock64;
add.s32 i, i, 1;
setp.lt.u32 go, i, {loops};
@go bra LOOP;
mov.u64 t2, %clock64;
{_keep()}
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
@lead st.global.u64 [out+16], t1;
@lead st.global.u64 [out+24], t2;
"""
    return _kernel(body, WARPGROUP * groups, 4)


BRANCHES = 32
SKIPPED = 24  # FMAs, by a branch that is taken
BRANCH = {
    # Not taken; over some instructions, by all; around what one lane does.
    "passed": "@never bra AWAY{i};",
    "taken": "@go bra OVER{i};\n{fmas}\nOVER{i}:",
    "one lane": "@!lead bra OVER{i};\nst.volatile.shared.b32 [own], x0;\nOVER{i}:",
}


def branches(kind: str, apart: int, loops: int = 8) -> Kernel:
    """A branch of BRANCH behind every `apart` FMAs, BRANCHES of them, `loops` times.

    Results: begin, end.
    """
    text = "\n".join(
        f"{_fmas(apart)}\n{BRANCH[kind].format(i=i, fmas=_fmas(SKIPPED))}" for i in range(BRANCHES)
    )
    away = "\n".join(f"AWAY{i}:\nst.global.u32 [out+{4 * i}], x0;" for i in range(BRANCHES))
    body = f"""
and.b32 at, tid, 31;
setp.eq.u32 lead, at, 0;
setp.eq.u64 never, limit, 1;
bar.sync 0;
mov.u32 i, 0;
mov.u64 t0, %clock64;
LOOP:
.pragma "nounroll";
setp.ne.u64 go, limit, 1;
{text}
add.s32 i, i, 1;
setp.lt.u32 done, i, {loops};
@done bra LOOP;
mov.u64 t1, %clock64;
bra WRITE;
{away}
WRITE:
{_keep()}
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
"""
    return _kernel(body, WARPGROUP, 2)


TESTS = 32


def tests() -> Kernel:
    """Tests of an mbarrier whose phase is over, one behind the other. Results: begin, end."""
    waits = "\n".join(_wait(f"WAIT{i}", "base", "phase") for i in range(TESTS))
    body = f"""
{_begin_barriers(1, 1)}
mov.u32 phase, 1;
mov.u64 t0, %clock64;
{waits}
mov.u64 t1, %clock64;
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
"""
    return _kernel(body, WARPGROUP, 2)


ROW_BYTES = 4096  # from one row that is stored to, to the next


def stores(count: int, groups: int) -> Kernel:
    """`count` stores of 16 bytes a lane, 64 a quad, to rows of `data`; a read of shared memory.

    Results: clocks at the begin, with all stores issued, with the word read.
    """
    text = "\n".join(
        f"st.global.v4.b32 [place+{64 * k}], {{x{k}, x{k}, x{k}, x{k}}};" for k in range(count)
    )
    body = f"""
shr.u32 at, tid, 2;
mad.lo.u32 at, cta, {WARPGROUP * groups // 4}, at;
mul.wide.u32 span, at, {ROW_BYTES};
and.b32 at, tid, 3;
mul.wide.u32 d0, at, 16;
add.s64 place, from, span;
add.s64 place, place, d0;
mov.u32 i, 0;
bar.sync 0;
ROUND:
.pragma "nounroll";
bar.sync 0;
mov.u64 t0, %clock64;
{text}
mov.u64 t1, %clock64;
ld.volatile.shared.b32 at, [own];
setp.eq.u32 never, at, -559038737;
@never bra ROUND;
mov.u64 t2, %clock64;
add.s32 i, i, 1;
setp.lt.u32 go, i, 4;
@go bra ROUND;
{_keep()}
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
@lead st.global.u64 [out+16], t2;
"""
    return _kernel(body, WARPGROUP * groups, 3)


PEER_STORES = 16  # of a thread, before it waits for them


def peer_stores(groups: int, loops: int = 16) -> Kernel:
    """PEER_STORES of 16 bytes a lane into the other CTA of a pair, then a fence; `loops` times.

    Results: begin, end.
    """
    store = "st.shared::cluster.v4.b32 [other+{at}], {{x{i}, x{i}, x{i}, x{i}}};"
    apart = WARPGROUP * groups * 16
    text = "\n".join(store.format(at=k % 4 * apart, i=k) for k in range(PEER_STORES))
    body = f"""
mov.u32 at, %cluster_ctarank;
xor.b32 at, at, 1;
mapa.shared::cluster.u32 other, own, at;
barrier.cluster.arrive;
barrier.cluster.wait;
mov.u32 i, 0;
mov.u64 t0, %clock64;
LOOP:
.pragma "nounroll";
{text}
fence.acq_rel.cluster;
add.s32 i, i, 1;
setp.lt.u32 go, i, {loops};
@go bra LOOP;
mov.u64 t1, %clock64;
barrier.cluster.arrive;
barrier.cluster.wait;
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
"""
    pair = ".explicitcluster\n.reqnctapercluster 2, 1, 1"
    return _kernel(body, WARPGROUP * groups, 2, directives=pair)


def bulk_adds(rounds: int, nbytes: int) -> Kernel:
    """A thread of each of four warps adds float32 of shared memory to `data`, two copies under way;
    CTA c to its share of it. Results: begin, end.
    """
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    body = f"""
mov.u32 x1, %nctaid.x;
mul.lo.u32 x1, x1, 4;
cvt.u64.u32 d1, x1;
div.u64 span, limit, d1;
and.b64 span, span, {-nbytes & (1 << 64) - 1};
mad.lo.u32 x1, cta, 4, warp;
cvt.u64.u32 d1, x1;
mul.lo.u64 d1, span, d1;
add.s64 place, from, d1;
add.s64 limit, place, span;
mov.u64 d0, place;
mad.lo.u32 other, warp, {nbytes}, base;
and.b32 at, tid, 31;
setp.eq.u32 lead, at, 0;
bar.sync 0;
mov.u32 i, 0;
mov.u64 t0, %clock64;
@!lead bra END;
LOOP:
.pragma "nounroll";
{add} [place], [other], {nbytes};
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 1;
add.s64 place, place, {nbytes};
setp.ge.u64 done, place, limit;
@done mov.u64 place, d0;
add.s32 i, i, 1;
setp.lt.u32 go, i, {rounds};
@go bra LOOP;
cp.async.bulk.wait_group 0;
END:
bar.sync 0;
mov.u64 t1, %clock64;
setp.eq.u32 lead, tid, 0;
@lead st.global.u64 [out], t0;
@lead st.global.u64 [out+8], t1;
"""
    return _kernel(body, WARPGROUP, 2)


def nothing() -> Kernel:
    """Ends at once."""
    return _kernel("", 384, 0)
