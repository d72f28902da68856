"""A small kernel of two products through tensor memory, and what the checker says of it broken.

S = A B^T, P = bf16(S) laid over the upper half of S, O = P B^T; 128 threads, one of which issues.
Everything a real kernel does to synchronise is there once.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from hopwell.emulator.formats import f32_to_bf16, to_f32
from hopwell.emulator.machine import Machine
from hopwell.emulator.report import Finding

from .sm100 import ALLOC, FREE, run, vector

N, K = 64, 16
A, B, BARRIER = 1024, 5120, 8  # bytes from `smem` on
IDESC = 0x490 | N >> 3 << 17 | 128 >> 4 << 24  # f32 from bf16


def descriptor(name: str, at: int, leading: int) -> str:
    """Descriptor `name` of a K-major matrix of 8-row cores that follow each other."""
    high = 1 << 14 | 128 >> 4
    return f"""
    mov.u32 %r10, smem;
    add.u32 %r10, %r10, {at};
    and.b32 %r10, %r10, 0x3FFFF;
    shr.u32 %r10, %r10, 4;
    or.b32 %r10, %r10, {leading >> 4 << 16};
    mov.b64 {name}, {{%r10, {high}}};
    """


def wait(parity: int) -> str:
    return f"""
    WAIT{parity}:
    mbarrier.try_wait.parity.shared.b64 %p3, [smem+{BARRIER}], {parity};
    @!%p3 bra WAIT{parity};
    """


INIT = f"""
    @!%p1 bra INITED;
    mbarrier.init.shared.b64 [smem+{BARRIER}], 1;
    fence.mbarrier_init.release.cluster;
INITED:
"""
# A row of A for each thread, one of B for each of the first 64.
FILL = f"""
    mad.wide.u32 %d2, %r0, 32, %d0;
    shl.b32 %r11, %r0, 4;
    mov.u32 %r12, smem;
    add.u32 %r11, %r11, %r12;
    ld.global.v4.b32 {vector(4)}, [%d2];
    st.shared.v4.b32 [%r11+{A}], {vector(4)};
    ld.global.v4.b32 {vector(4)}, [%d2+16];
    st.shared.v4.b32 [%r11+{A + 2048}], {vector(4)};
    setp.ge.u32 %p4, %r0, {N};
    @%p4 bra FILLED;
    ld.global.v4.b32 {vector(4)}, [%d2+4096];
    st.shared.v4.b32 [%r11+{B}], {vector(4)};
    ld.global.v4.b32 {vector(4)}, [%d2+4112];
    st.shared.v4.b32 [%r11+{B + 1024}], {vector(4)};
FILLED:
    fence.proxy.async.shared::cta; // filled
    bar.sync 0; // filled
"""
FIRST = f"""
    @!%p1 bra FIRST;
    tcgen05.mma.cta_group::1.kind::f16 [%r2], %d4, %d5, {IDESC}, 0; // S
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+{BARRIER}]; // S
FIRST:
"""
SOFTMAX = (
    wait(0)
    + f"""
    tcgen05.ld.sync.aligned.32x32b.x64.b32 {vector(64)}, [%r3]; // S
    tcgen05.wait::ld.sync.aligned; // S
    """
    + "".join(f"cvt.rn.bf16x2.f32 %v{200 + i}, %v{2 * i + 1}, %v{2 * i};\n" for i in range(8))
    + f"""
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3+32], {vector(8, 200)}; // P
    tcgen05.wait::st.sync.aligned; // P
    bar.sync 0; // P
    """
)
SECOND = f"""
    @!%p1 bra SECOND;
    tcgen05.mma.cta_group::1.kind::f16 [%r2+64], [%r2+32], %d5, {IDESC}, 0; // O
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+{BARRIER}]; // O
SECOND:
"""
EPILOGUE = (
    wait(1)
    + f"""
    tcgen05.ld.sync.aligned.32x32b.x64.b32 {vector(64, 64)}, [%r3+64]; // O
    tcgen05.wait::ld.sync.aligned; // O
    mad.wide.u32 %d3, %r0, 4, %d1;
    """
    + "".join(f"st.global.b32 [%d3+{512 * i}], %v{64 + i};\n" for i in range(64))
)
SOUND = (
    INIT
    + ALLOC
    + FILL
    + descriptor("%d4", A, 2048)
    + descriptor("%d5", B, 1024)
    + FIRST
    + SOFTMAX
    + SECOND
    + EPILOGUE
    + FREE
)


def inputs() -> NDArray[np.uint16]:
    rng = np.random.default_rng(0)
    return f32_to_bf16(rng.standard_normal((128 + N, K)).astype(np.float32))


def edited(body: str, edits: dict[str, str]) -> str:
    for old, new in edits.items():
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    return body


def execute(
    edits: dict[str, str] | None = None, order: str = "eager", seed: int = 0, **options: Any
) -> tuple[Machine, NDArray[np.float32]]:
    result = np.full((N, 128), np.nan, np.float32)
    return run(
        edited(SOUND, edits or {}), inputs(), result, order=order, seed=seed, **options
    ), result


@pytest.mark.parametrize(
    ("order", "seed"), [("eager", 0), ("deferred", 0), *(("random", i) for i in range(4))]
)
def test_sound(order: str, seed: int) -> None:
    made, result = execute(order=order, seed=seed, strict=True)
    assert not made.findings, made.findings[0]
    a, b = np.split(to_f32(inputs(), "bf16"), [128])
    p = to_f32(f32_to_bf16((a @ b.T)[:, :K]), "bf16")
    np.testing.assert_allclose(result, (p @ b.T).T, rtol=1e-5, atol=1e-5)


def test_counters() -> None:
    made, _ = execute()
    counters = made.counters
    assert counters.tensor_flops == 2 * 2 * 128 * N * K
    assert counters.tensor_clocks == 2 * 32  # of 64 for N = 128
    words = 128 * 4
    assert counters.tmem_write_bytes == words * (64 + 8 + 64)
    assert counters.tmem_read_bytes == words * (64 + 8 + 64)
    assert counters.total("tensor") == 2


class Fault(NamedTuple):
    name: str
    edits: dict[str, str]
    kind: str
    message: str  # regular expression
    instruction: str  # that the first finding names
    options: dict[str, Any] = {}  # noqa: RUF012


def lines(text: str, *names: str) -> dict[str, str]:
    """Edits that drop lines of a text by their endings."""
    dropped = [line for line in text.splitlines() if line.endswith(names)]
    assert len(dropped) == len(names), dropped
    return dict.fromkeys(dropped, "")


WAIT_LOOP = wait(0), wait(1)
MMA_S = next(line for line in FIRST.splitlines() if "mma" in line)
MMA_O = next(line for line in SECOND.splitlines() if "mma" in line)
FREE_LINE = next(line for line in FREE.splitlines() if "dealloc" in line)
ALLOC_LINE = next(line for line in ALLOC.splitlines() if ".alloc" in line)
OF_TMEM = r"of tensor memory at column \d+, lanes \d+\.\.\d+ and the"
UNSYNCED = "with no synchronisation between them"
FAULTS = [
    Fault(
        "S is read before it is committed",
        {WAIT_LOOP[0]: ""},
        "race",
        rf"read {OF_TMEM} write of the tcgen05\.mma of warp 0 at tcgen05\.mma.* {UNSYNCED}",
        "tcgen05.ld",
    ),
    Fault(
        "O is committed before it is issued",
        {
            MMA_O: "",
            "// O\nSECOND:": MMA_O + "\nSECOND:",
        },
        "race",
        rf"read {OF_TMEM} write of the tcgen05\.mma of warp 0 at tcgen05\.mma.* {UNSYNCED}",
        "tcgen05.ld",
    ),
    Fault(
        "P is handed over before it is stored",
        lines(SOFTMAX, "st.sync.aligned; // P"),
        "race",
        rf"read {OF_TMEM} write of tcgen05\.st of warp 0 at tcgen05\.st.* "
        r"without tcgen05\.wait::st between them",
        "tcgen05.mma",
    ),
    Fault(
        "P is not handed over",
        lines(SOFTMAX, "bar.sync 0; // P"),
        "race",
        rf"read {OF_TMEM} write of tcgen05\.st of warp 1 at tcgen05\.st.* {UNSYNCED}",
        "tcgen05.mma",
    ),
    Fault(
        "operands are not fenced",
        lines(FILL, "fence.proxy.async.shared::cta; // filled"),
        "missing proxy fence",
        r"read of shared memory at byte \d+ and the write of warp 0 at st\.shared.* without "
        r"fence\.proxy\.async between them",
        "tcgen05.mma",
    ),
    Fault(
        "operands are not waited for",
        {"bar.sync 0; // filled": "bar.warp.sync -1;"},
        "race",
        rf"read of shared memory at byte \d+ and the write of warp 1 at st\.shared.* {UNSYNCED}",
        "tcgen05.mma",
    ),
    Fault(
        "A is overwritten while it is read",
        {WAIT_LOOP[0]: f"st.shared.b32 [%r11+{A}], %r0;" + WAIT_LOOP[0]},
        "race",
        r"write of shared memory at byte \d+ and the read of the tcgen05\.mma of warp 0 at "
        rf"tcgen05\.mma.* {UNSYNCED}",
        "st.shared",
    ),
    Fault(
        "registers are used before the load is waited for",
        lines(SOFTMAX, "tcgen05.wait::ld.sync.aligned; // S"),
        "register in flight",
        r"a register is used before tcgen05\.wait::ld",
        "cvt.rn.bf16x2.f32",
        {"strict": True},
    ),
    Fault(
        "S is overwritten while it may still be loaded",
        {
            **lines(SOFTMAX, "tcgen05.wait::ld.sync.aligned; // S"),
            "tcgen05.wait::st.sync.aligned; // P": (
                f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {vector(8, 240)}, [%r3];"
                "tcgen05.wait::st.sync.aligned;"
            ),
            "[%r2+64], [%r2+32]": "[%r2], [%r2+32]",
        },
        "race",
        rf"write {OF_TMEM} read of tcgen05\.ld of warp 0 at tcgen05\.ld.* "
        r"without tcgen05\.wait::ld between them",
        "tcgen05.mma",
    ),
    Fault(
        "a product of another thread writes what this one reads",
        {
            "SECOND:\n": f"""
            SECOND:
            setp.ne.u32 %p5, %r0, 32;
            @%p5 bra THIRD;
            tcgen05.mma.cta_group::1.kind::f16 [%r2], %d4, %d5, {IDESC}, 0;
            THIRD:
            """,
        },
        "race",
        rf"write {OF_TMEM} read of the tcgen05\.mma of warp 0 at tcgen05\.mma.* {UNSYNCED}",
        "tcgen05.mma",
    ),
    Fault(
        "tensor memory is freed before all have read it",
        {FREE.splitlines()[1]: ""},
        "race",
        rf"dealloc {OF_TMEM} read of tcgen05\.ld of warp 1 at tcgen05\.ld.* {UNSYNCED}",
        "tcgen05.dealloc",
    ),
    Fault(
        "tensor memory is freed while a product is in flight",
        {WAIT_LOOP[1]: "", EPILOGUE[len(WAIT_LOOP[1]) :]: ""},
        "race",
        rf"dealloc {OF_TMEM} write of the tcgen05\.mma of warp 0 at tcgen05\.mma.* {UNSYNCED}",
        "tcgen05.dealloc",
    ),
    Fault(
        "tensor memory is kept",
        {FREE_LINE: ""},
        "tensor memory leak",
        r"CTA \(0, 0, 0\) ends and still holds 512 columns of tensor memory from 0 on",
        "tcgen05.alloc",
    ),
    Fault(
        "tensor memory is freed twice",
        {FREE_LINE: FREE_LINE + FREE_LINE},
        "tensor memory misuse",
        r"dealloc of 512 columns from 0, where the CTA holds none",
        "tcgen05.dealloc",
    ),
    Fault(
        "not all of the columns are freed",
        {FREE_LINE: FREE_LINE.replace("512", "256")},
        "tensor memory misuse",
        r"dealloc of 256 columns from 0, where the CTA holds 512 from 0",
        "tcgen05.dealloc",
    ),
    Fault(
        "columns are used that nobody allocated",
        {
            ALLOC_LINE: ALLOC_LINE.replace("512", "64"),
            FREE_LINE: FREE_LINE.replace("512", "64"),
        },
        "out of bounds",
        r"columns 64\.\.127 of tensor memory are not allocated in CTA \(0, 0, 0\)",
        "tcgen05.mma",
    ),
    Fault(
        "columns end at 512",
        {"[%r3+64]; // O": "[%r3+480]; // O"},
        "out of bounds",
        r"columns 480\.\.543 of 512 of tensor memory",
        "tcgen05.ld",
    ),
    Fault(
        "a warp reaches for lanes of another",
        {"[%r3]; // S": "[%r2]; // S"},
        "out of bounds",
        r"warp 1 names lane 0 of tensor memory; it reaches lanes 32\.\.63",
        "tcgen05.ld",
    ),
    Fault(
        "lanes of a warp name different columns",
        {"[%r3]; // S": "[%r5]; // S", WAIT_LOOP[0]: WAIT_LOOP[0] + "add.u32 %r5, %r3, %r0;"},
        "tensor memory misuse",
        r"lanes of a warp name different addresses",
        "tcgen05.ld",
    ),
    Fault(
        "what is loaded was never written",
        {"[%r3+64]; // O": "[%r3+128]; // O"},
        "uninitialised read",
        r"tensor memory is read before anything wrote it",
        "tcgen05.ld",
    ),
    Fault(
        "the first product adds to nothing",
        {MMA_S: MMA_S.replace(", 0;", ", 1;")},
        "uninitialised read",
        r"tensor memory is read before anything wrote it",
        "tcgen05.mma",
    ),
    Fault(
        "the number of columns is no power of two",
        {ALLOC_LINE: ALLOC_LINE.replace("512", "96")},
        "tensor memory misuse",
        r"96 columns are asked for: needed is a power of two, 32 to 512",
        "tcgen05.alloc",
    ),
    Fault(
        "allocation without a permit",
        {
            ALLOC_LINE: "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n" + ALLOC_LINE,
        },
        "tensor memory misuse",
        r"tcgen05\.alloc after relinquish_alloc_permit",
        "tcgen05.alloc",
    ),
    Fault(
        "every warp allocates",
        {"@!%p0 bra ALLOCATED;": ""},
        "tensor memory misuse",
        r"one warp has to execute this, warps 0, 1, 2, 3 do",
        "tcgen05.alloc",
    ),
    Fault(
        "columns are lacking",
        {ALLOC_LINE: ALLOC_LINE + ALLOC_LINE.replace("512", "32")},
        "deadlock",
        r"warp 0 at tcgen05\.alloc.*: tcgen05\.alloc of 32 columns, while the CTA holds 512 from "
        r"column 0",
        "tcgen05.alloc",
    ),
    Fault(
        "a pair in a cluster of one",
        {ALLOC_LINE: ALLOC_LINE.replace("cta_group::1", "cta_group::2")},
        "tensor memory misuse",
        r"cta_group::2 in a cluster of 1 CTA",
        "tcgen05.alloc",
    ),
    Fault(
        "a warp issues a product",
        {"@!%p1 bra FIRST;": "@!%p0 bra FIRST;"},
        "tensor memory misuse",
        r"32 threads issue what one thread has to",
        "tcgen05.mma",
    ),
    Fault(
        "a commit to a barrier that waits for bytes alone",
        {MMA_S: f"{MMA_S}\nmbarrier.arrive.expect_tx.shared.b64 _, [smem+{BARRIER}], 64;"},
        "barrier misuse",
        r"tcgen05\.commit arrives once too often",
        "tcgen05.commit",
    ),
    Fault(
        "an operand past the end of shared memory",
        {f"add.u32 %r10, %r10, {A};": "add.u32 %r10, %r10, 16000;"},
        "out of bounds",
        r"an operand of the tensor core lies past the end of shared memory",
        "tcgen05.mma",
    ),
    Fault(
        "a shape that does not exist",
        {MMA_S: MMA_S.replace(str(IDESC), str(IDESC & ~(31 << 24)))},
        "tensor memory misuse",
        r"has no shape M = 0",
        "tcgen05.mma",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("order", ["eager", "deferred"])
def test_fault(fault: Fault, order: str) -> None:
    made, _ = execute(fault.edits, order=order, **fault.options)
    assert made.findings, "nothing was found"
    check(made.findings, fault)


def check(findings: list[Finding], fault: Fault) -> None:
    found = findings[0]
    assert found.kind == fault.kind, found
    assert re.search(fault.message, found.message), found
    assert fault.instruction in found.instruction, found


# Two CTAs of one warp: the first copies from the shared memory of either to its tensor memory.
COPY = "tcgen05.cp.cta_group::2.128x256b [%r2], %d4;"
PAIR = (
    """
    mov.u32 %r4, %cluster_ctarank;
    setp.eq.u32 %p2, %r4, 0;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [smem], 128;
    ld.shared.b32 %r2, [smem];
    shl.b32 %r5, %r4, 7;
    add.u32 %r5, %r5, %r0;
    mad.wide.u32 %d2, %r5, 32, %d0;
    shl.b32 %r11, %r0, 4;
    mov.u32 %r12, smem;
    add.u32 %r11, %r11, %r12;
    """
    + "".join(
        f"""
        ld.global.v4.b32 {vector(4)}, [%d2+{1024 * i}];
        st.shared.v4.b32 [%r11+{1024 + 512 * i}], {vector(4)};
        ld.global.v4.b32 {vector(4)}, [%d2+{1024 * i + 16}];
        st.shared.v4.b32 [%r11+{3072 + 512 * i}], {vector(4)};
        """
        for i in range(4)
    )
    + descriptor("%d4", 1024, 2048)
    + INIT
    + f"""
    fence.proxy.async.shared::cta;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    and.pred %p3, %p1, %p2;
    @!%p3 bra ISSUED;
    {COPY}
    mov.u16 %h0, 3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 \
[smem+{BARRIER}], %h0;
    ISSUED:
    {wait(0)}
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {vector(8)}, [%r2];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %d3, %r5, 32, %d1;
    st.global.v4.b32 [%d3], {vector(4)};
    st.global.v4.b32 [%d3+16], {vector(4, 4)};
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 128;
    """
)
PAIR_FAULTS = [
    Fault(
        "one CTA does not allocate",
        {
            "tcgen05.alloc": "@!%p2 bra ALONE;\ntcgen05.alloc",
            "ld.shared.b32 %r2, [smem];": "ld.shared.b32 %r2, [smem];\nALONE:",
        },
        "deadlock",
        r"tcgen05\.alloc waits for that of CTA 1 of the cluster",
        "tcgen05.alloc",
    ),
    Fault(
        "the peer reads before the copy is over",
        {wait(0): ""},
        "race",
        rf"read {OF_TMEM} write of the tcgen05\.mma of warp 0 at tcgen05\.cp.* {UNSYNCED}",
        "tcgen05.ld",
    ),
    Fault(
        "the peer exits",
        {
            COPY: f"""
            mov.u32 %r7, 0;
            SPIN:
            add.u32 %r7, %r7, 1;
            setp.lt.u32 %p5, %r7, 2000;
            @%p5 bra SPIN;
            {COPY}
            """,
            "ISSUED:": "ISSUED: @!%p2 bra OUT;",
            "%r2, 128;\n    ": "%r2, 128; OUT:\n",
        },
        "tensor memory misuse",
        r"the other CTA of the pair has exited",
        "tcgen05.cp",
    ),
    Fault(
        "nobody arrives at the cluster's barrier",
        {"barrier.cluster.arrive;": ""},
        "barrier misuse",
        r"wait at the cluster's barrier that have not arrived there",
        "barrier.cluster.wait",
    ),
    Fault(
        "arrives at the cluster's barrier twice",
        {"barrier.cluster.wait;": "barrier.cluster.arrive;\nbarrier.cluster.wait;"},
        "barrier misuse",
        r"not waited since arrive at the cluster's barrier again",
        "barrier.cluster.arrive",
    ),
    Fault(
        "another cta_group",
        {COPY: COPY.replace("::2", "::1")},
        "tensor memory misuse",
        r"cta_group::1 here and another one at tcgen05\.alloc.*: all tcgen05 instructions of a "
        r"kernel need the same",
        "tcgen05.cp",
    ),
]


def execute_pair(edits: dict[str, str], order: str) -> tuple[Machine, list[NDArray[np.uint32]]]:
    source = np.arange(2 * 128 * 8, dtype=np.uint32).reshape(256, 8)
    result = np.zeros_like(source)
    made = run(edited(PAIR, edits), source, result, cluster=2, threads=32, order=order)
    return made, [source, result]


@pytest.mark.parametrize("order", ["eager", "deferred", "random"])
def test_pair(order: str) -> None:
    made, (source, result) = execute_pair({}, order)
    assert not made.findings, made.findings[0]
    for rank in range(2):  # the warp of each reaches 32 of the 128 rows
        rows = slice(128 * rank, 128 * rank + 32)
        np.testing.assert_array_equal(result[rows], source[rows])


@pytest.mark.parametrize("fault", PAIR_FAULTS, ids=lambda fault: fault.name)
def test_fault_in_a_pair(fault: Fault) -> None:
    made, _ = execute_pair(fault.edits, "eager")
    assert made.findings, "nothing was found"
    check(made.findings, fault)
