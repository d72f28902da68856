"""The exponentials of Blackwell's softmax: their polynomials, values and instructions."""

import os
import re
from collections.abc import Iterator
from functools import cache

import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor
from numpy.typing import NDArray

from hopwell import emulator
from hopwell.benchmarks.exp2_coefficients import DEGREES, minimax
from hopwell.emulator import loader, ops
from hopwell.kernels.exp2 import COEFFICIENTS, GROUP, exp2

THREADS = 128
GROUPS = 2  # of a thread's elements
BOUND = {3: 8.57e-5, 4: 2.97e-6, 5: 1.45e-7}  # relative, of p(f) with its roundings
FRACTION = 2.0**-24  # that f loses of a small negative x
PER_PAIR = {  # 0: by the degree
    "max.NaN.f32": 2,
    "add.rm.f32x2": 1,
    "sub.rn.f32x2": 2,
    "fma.rn.f32x2": 0,
    "shl.b32": 2,
    "mul.rn.f32x2": 1,
}
MUFU_BOUND = 2.0**-22
Floats = NDArray[np.float32]


def compile(share: int, degree: int):
    """A kernel: (x (THREADS, GROUPS * GROUP), y of the same shape)."""

    @cute.kernel
    def kernel(x: cute.Tensor, y: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        fragment = cute.make_rmem_tensor(GROUPS * GROUP, Float32)
        cute.autovec_copy(x[thread, None], fragment)
        exp2(fragment, share, degree)
        cute.autovec_copy(fragment, y[thread, None])

    @cute.jit
    def host(x: cute.Tensor, y: cute.Tensor) -> None:
        kernel(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    shape = (THREADS, GROUPS * GROUP)
    fakes = [
        make_fake_compact_tensor(Float32, shape, stride_order=(1, 0), assumed_align=16)
        for _ in range(2)
    ]
    return loader.compile(host, *fakes, arch="sm_100a", options="--enable-tvm-ffi")


compiled = cache(compile)


def evaluate(x: Floats, share: int = GROUP // 2, degree: int = 3) -> Floats:
    """2**x by the compiled function, of any number of values."""
    out: list[Floats] = []
    shape = (THREADS, GROUPS * GROUP)
    for part in np.array_split(x, -(-x.size // (shape[0] * shape[1]))):
        source = torch.from_numpy(np.resize(part, shape))
        result = torch.empty_like(source)
        report = emulator.run(compiled(share, degree), source, result, outputs=(result,))
        assert not report.findings
        out.append(result.numpy().ravel()[: part.size])
    return np.concatenate(out)


def polynomial(f: Floats, degree: int) -> Floats:
    """p(f) as the FMA units compute it, each step rounded once."""
    first, *rest = reversed(COEFFICIENTS[degree])
    power = np.full_like(f, first)
    for c in rest:
        power = ops.wide_fma(power, f, np.float32(c)).astype(np.float32)
    return power


def fractions() -> Iterator[Floats]:
    """float32 numbers in [0, 1), in parts: of each power of two some, or all."""
    everyone = os.environ.get("HOPWELL_TEST_EVERY_FRACTION") == "1"
    mantissas = np.arange(0, 1 << 23, 1 if everyone else 1777, dtype=np.uint32)
    for exponent in range(127):
        for part in np.array_split(mantissas, -(-mantissas.size >> 20)):
            yield (part | np.uint32(exponent << 23)).view(np.float32)


@pytest.mark.parametrize("degree", DEGREES)
def test_the_script_gives_the_table(degree: int) -> None:
    ours, theirs = np.float32(COEFFICIENTS[degree]), np.float32(minimax(degree))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("degree", DEGREES)
def test_bound_of_the_polynomial(degree: int) -> None:
    """At every fraction, where HOPWELL_TEST_EVERY_FRACTION=1 says so (minutes)."""
    worst = 0.0
    for f in fractions():
        want = np.exp2(f.astype(np.float64))
        worst = max(worst, float(np.abs(polynomial(f, degree) / want - 1).max()))
    assert 0.9 * BOUND[degree] < worst < BOUND[degree]


@pytest.mark.parametrize("degree", DEGREES)
def test_powers_of_the_fma_units(degree: int) -> None:
    rng = np.random.default_rng(0)
    whole = np.arange(-126, 128)
    x = np.concatenate(
        [rng.uniform(-126, 127, 3000), rng.uniform(-1, 1, 1000), whole, whole[1:] - 2.0**-15]
    ).astype(np.float32)
    got, want = evaluate(x, degree=degree), np.exp2(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < BOUND[degree] + FRACTION
    np.testing.assert_array_equal(got[x == np.rint(x)], want[x == np.rint(x)])


@pytest.mark.parametrize("share", [0, GROUP // 2])
def test_special_values(share: int) -> None:
    """The same on either unit: -inf hides a score, NaN stays, nothing is subnormal."""
    x = [-np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40, 127.0, -126.0, -126.5, -127.0, -149.5, -1e30]
    want = [0.0, np.nan, 1.0, 1.0, 1.0, 1.0, 2.0**127, 2.0**-126, 0.0, 0.0, 0.0, 0.0]
    got = evaluate(np.float32(x), share)
    np.testing.assert_allclose(got, want, rtol=BOUND[3], atol=0)
    assert not np.signbit(got[np.array(want) == 0]).any()


def test_each_group_has_its_share() -> None:
    """Told apart by their errors, which at this x are 2**-14 on the FMA units."""
    x = np.full(THREADS * GROUPS * GROUP, 0.2, np.float32)
    for share in range(GROUP // 2 + 1):
        off = np.abs(evaluate(x, share).reshape(-1, GROUP) / np.exp2(0.2) - 1) > MUFU_BOUND
        assert (off == (np.arange(GROUP) >= GROUP - 2 * share)).all()


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("share", [0, 2, GROUP // 2])
def test_instructions(share: int, degree: int) -> None:
    """No share, no FMA; else what the module's text says of a pair."""
    text = loader.ptx_of(compiled(share, degree))
    count = {op: len(re.findall(rf"^\s*{op}\b", text, re.M)) for op in PER_PAIR}
    pairs = GROUPS * share
    wanted = {op: pairs * (n or degree) for op, n in PER_PAIR.items()}
    wanted["shl.b32"] += 1  # of the thread's address
    assert count == wanted
    assert text.count("ex2.approx.ftz.f32") == GROUPS * GROUP - 2 * pairs
    assert text.count("f32x2") == pairs * (degree + 4)
