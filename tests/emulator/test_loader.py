"""Launch interception: what reaches the handler is what the host code launched."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream

from hopwell import emulator
from hopwell.emulator import loader
from hopwell.emulator.loader import Launch

CONVENTIONS = ["--enable-tvm-ffi", ""]


class Pair(NamedTuple):
    x: cute.Tensor
    y: cute.Tensor


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < cute.size(x):
        y[i] = x[i] * factor


@cute.kernel
def add_kernel(x: cute.Tensor, y: cute.Tensor, amount: cutlass.Constexpr[float]) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < cute.size(x):
        y[i] = x[i] + amount


@cute.jit
def scale_then_add(
    x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, amount: cutlass.Constexpr[float]
) -> None:
    """y = x * factor, then x = y + amount."""
    grid = [(cute.size(x) + 127) // 128, 1, 1]
    scale_kernel(x, y, factor).launch(grid=grid, block=[128, 1, 1])
    add_kernel(y, x, amount).launch(grid=grid, block=[128, 1, 1])


@cute.jit
def scale_on_stream(x: cute.Tensor, y: cute.Tensor, stream: CUstream) -> None:
    scale_kernel(x, y, cutlass.Float32(2.0)).launch(
        grid=[4, 2, 1], block=[32, 1, 1], cluster=[2, 1, 1], smem=1024, stream=stream
    )


@cute.jit
def scale_pair(pair: Pair) -> None:
    scale_kernel(pair.x, pair.y, cutlass.Float32(2.0)).launch(grid=[1, 1, 1], block=[128, 1, 1])


class Adder:
    """A constant that is part of the kernel and not of its name."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor) -> None:
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[128, 1, 1])

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if thread < cute.size(x):
            y[thread] = x[thread] + self.amount


def vector() -> Any:
    return make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=16)


def compile_scale_then_add(convention: str, amount: float = 3.0) -> Any:
    return loader.compile(
        *(scale_then_add, vector(), vector(), cutlass.Float32(0.0), amount),
        arch="sm_90a",
        options=convention,
    )


@pytest.fixture(scope="module", params=CONVENTIONS, ids=["tvm-ffi", "plain"])
def compiled(request: pytest.FixtureRequest) -> Any:
    return compile_scale_then_add(request.param)


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    """Every launch of this test's thread."""
    seen: list[Launch] = []
    with loader.intercept(seen.append):
        yield seen


def tensors(n: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n, dtype=torch.float32), torch.full((n,), -1.0)


def compute(launch: Launch) -> None:
    """Do in NumPy what the two kernels do, from nothing but the raw parameters."""

    def array(address: int) -> np.ndarray:
        pointer = ctypes.c_uint64.from_address(address).value
        size = ctypes.c_int32.from_address(address + 8).value
        return np.ctypeslib.as_array((ctypes.c_float * size).from_address(pointer))

    source, target = array(launch.args[0]), array(launch.args[1])
    if "scale_kernel" in launch.entry:
        target[:] = source * ctypes.c_float.from_address(launch.args[2]).value
    else:
        target[:] = source + 3.0


@pytest.mark.parametrize("run", [loader.call, lambda f, *args: f(*args)], ids=["call", "direct"])
def test_handler_does_the_work(compiled: Any, run: Callable[..., Any]) -> None:
    x, y = tensors()
    expected = x * 2.5
    with loader.intercept(compute):
        run(compiled, x, y, 2.5)
    assert torch.equal(y, expected)
    assert torch.equal(x, expected + 3.0)


def test_numpy_arrays(compiled: Any) -> None:
    x, y = (t.numpy() for t in tensors())
    with loader.intercept(compute):
        loader.call(compiled, x, y, 2.0)
    assert y[299] == 598.0


def test_launches_in_order_with_their_configuration(compiled: Any, launches: list[Launch]) -> None:
    loader.call(compiled, *tensors(), 2.0)
    first, second = launches
    assert "scale_kernel" in first.entry
    assert "add_kernel" in second.entry
    for launch, params in ((first, 3), (second, 2)):
        assert (launch.grid, launch.block, launch.cluster) == ((3, 1, 1), (128, 1, 1), (1, 1, 1))
        assert launch.smem_bytes == 0
        assert len(launch.args) == params
        assert f".entry {launch.entry}(" in launch.ptx
    assert ".target sm_90a" in first.ptx
    assert "test_loader.py" in first.ptx, "the PTX has its line marks"


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_stream_cluster_and_shared_memory(convention: str, launches: list[Launch]) -> None:
    compiled = loader.compile(
        *(scale_on_stream, vector(), vector(), make_fake_stream()),
        arch="sm_90a",
        options=convention,
    )
    loader.call(compiled, *tensors(), CUstream(0))
    (launch,) = launches
    assert (launch.grid, launch.block, launch.cluster) == ((4, 2, 1), (32, 1, 1), (2, 1, 1))
    assert launch.smem_bytes == 1024


def test_environment_stream(launches: list[Launch]) -> None:
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = loader.compile(
        *(scale_on_stream, vector(), vector(), stream), arch="sm_90a", options="--enable-tvm-ffi"
    )
    loader.call(compiled, *tensors())
    assert len(launches) == 1


def test_tensors_inside_a_tuple() -> None:
    compiled = loader.compile(
        *(scale_pair, Pair(vector(), vector())), arch="sm_90a", options="--enable-tvm-ffi"
    )
    x, y = tensors()
    seen: list[int] = []
    with loader.intercept(lambda launch: seen.append(_pointer(launch.args[1]))):
        loader.call(compiled, Pair(x, y))
    assert seen == [y.data_ptr()]


def _pointer(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def test_keyword_arguments(launches: list[Launch]) -> None:
    x, y = tensors()
    loader.call(compile_scale_then_add("--enable-tvm-ffi"), y=y, x=x, factor=2.0)
    assert len(launches) == 2


def test_real_tensors_at_compile_time(launches: list[Launch]) -> None:
    """A device view compiles to global memory accesses; the CPU tensor itself would not."""
    x, y = tensors()
    views = [from_dlpack(loader.device_view(t)).mark_layout_dynamic() for t in (x, y)]
    compiled = loader.compile(scale_then_add, *views, cutlass.Float32(0.0), 3.0, arch="sm_90a")
    loader.call(compiled, x, y, 2.0)
    assert "st.global" in launches[0].ptx


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_object_has_its_own_ptx(convention: str, launches: list[Launch]) -> None:
    for amount in (5.0, 7.0):
        compiled = loader.compile(
            *(Adder(amount), vector(), vector()), arch="sm_90a", options=convention
        )
        loader.call(compiled, *tensors())
    five, seven = launches
    assert five.entry == seven.entry
    assert "0f40A00000" in five.ptx and "0f40E00000" not in five.ptx
    assert "0f40E00000" in seven.ptx and "0f40A00000" not in seven.ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_compiled_by_others(convention: str, arch: str, launches: list[Launch]) -> None:
    """Not by our compile, whichever GPU this machine has: the PTX comes from the cubin."""
    compiled = cute.compile(
        *(scale_then_add, vector(), vector(), cutlass.Float32(0.0), 3.0),
        options=f"{convention} --gpu-arch {arch} --generate-line-info",
    )
    loader.call(compiled, *tensors(), 2.0)
    assert len(launches) == 2
    assert f".target {arch}" in launches[0].ptx


def test_debug_section_has_the_same_instructions() -> None:
    """What the cubin carries differs from the PTX file in comments and line marks alone."""

    def instructions(ptx: str) -> list[str]:
        marks = ("//", ".loc", ".file", ".section", "{", "}")
        lines = (line.strip() for line in ptx.splitlines())
        return [line for line in lines if line and not line.startswith(marks)]

    compiled = compile_scale_then_add("")
    kept = loader.ptx_of(compiled)
    compiled.artifacts = None
    loader._known_ptx.clear()
    found = loader.ptx_of(compiled)
    assert ".loc" in kept and ".loc" not in found
    assert instructions(found) == instructions(kept)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_unknown_ptx_is_refused(convention: str, launches: list[Launch]) -> None:
    compiled = cute.compile(
        *(scale_then_add, vector(), vector(), cutlass.Float32(0.0), 11.0),
        options=f"{convention} --gpu-arch sm_90a",
    )
    with pytest.raises(LookupError, match="PTX of this object is not known"):
        loader.call(compiled, *tensors(), 2.0)


RELOAD = """
import sys
import torch
import cutlass.cute as cute
from hopwell.emulator import loader

path = sys.argv[1]
seen = []
x, y = torch.zeros(300), torch.zeros(300)
with loader.intercept(seen.append):
    function = getattr(cute.runtime.load_module(path, enable_tvm_ffi=True), "scaled")
    function(x, y, 2.0)
    loader.call(function, x, y, 2.0)
    loader.load(path, "scaled")(x, y, 2.0)
for launch in seen:
    print(launch.entry, *launch.grid, ".loc" in launch.ptx)
"""


@pytest.mark.parametrize("sidecar", [True, False])
def test_reloaded_in_another_process(sidecar: bool, tmp_path: Any) -> None:
    compiled = compile_scale_then_add("--enable-tvm-ffi")
    path = tmp_path / "object.o"
    compiled.export_to_c(str(path), "scaled")
    if sidecar:
        path.with_suffix(".ptx").write_text(loader.ptx_of(compiled))
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(path)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 6, "three calls of two kernels"
    assert ["scale_kernel" in line for line in lines] == [True, False] * 3
    assert all(line.endswith(f"3 1 1 {sidecar}") for line in lines)


def test_reloaded_in_this_process_without_sidecar(tmp_path: Any, launches: list[Launch]) -> None:
    path = tmp_path / "object.o"
    compile_scale_then_add("--enable-tvm-ffi").export_to_c(str(path), "scaled")
    loader.load(path, "scaled")(*tensors(), 2.0)
    assert ".loc" in launches[0].ptx, "our compile remembers the PTX"


class Boom(BaseException):
    pass


def test_exception_of_the_handler(compiled: Any) -> None:
    seen: list[Launch] = []

    def handler(launch: Launch) -> None:
        seen.append(launch)
        raise Boom

    with loader.intercept(handler):
        for calls in (1, 2):
            with pytest.raises(Boom):
                loader.call(compiled, *tensors(), 2.0)
            assert len(seen) == calls, "the launch after the failed one does not happen"
    with loader.intercept(compute):
        loader.call(compiled, *tensors(), 2.0)


def test_wrong_argument_is_the_host_codes_own_error(launches: list[Launch]) -> None:
    x, y = tensors()
    with pytest.raises(ValueError, match="expected dtype"):
        loader.call(compile_scale_then_add("--enable-tvm-ffi"), x.int(), y, 2.0)
    assert not launches


def test_empty_tensor_and_empty_grid(compiled: Any, launches: list[Launch]) -> None:
    """An empty tensor is a valid argument; a grid of no CTAs is not a valid launch."""
    x, _ = tensors()
    with pytest.raises(loader.LaunchError, match=r"grid \(0, 1, 1\).*needed: grid from 1"):
        loader.call(compiled, x[:0], x[:0], 2.0)
    assert not launches
    pair = loader.compile(
        *(scale_pair, Pair(vector(), vector())), arch="sm_90a", options="--enable-tvm-ffi"
    )
    loader.call(pair, Pair(x[:0], torch.empty(0)))
    assert launches[0].grid == (1, 1, 1)


def test_unsupported_cuda_function(compiled: Any) -> None:
    allocate = ctypes.CFUNCTYPE(ctypes.c_int32)(loader._address("_cudaMallocAsync"))
    with (
        loader.intercept(lambda launch: assert_failed(allocate())),
        pytest.raises(NotImplementedError, match="cudaMallocAsync is not emulated"),
    ):
        loader.call(compiled, *tensors(), 2.0)


def assert_failed(status: int) -> None:
    assert status != 0


def test_handlers_are_per_thread(compiled: Any, launches: list[Launch]) -> None:
    counts: list[int] = []

    def other() -> None:
        seen: list[Launch] = []
        with loader.intercept(seen.append):
            for _ in range(20):
                loader.call(compiled, *tensors(), 2.0)
        counts.append(len(seen))

    threads = [threading.Thread(target=other) for _ in range(3)]
    for thread in threads:
        thread.start()
    loader.call(compiled, *tensors(), 2.0)
    for thread in threads:
        thread.join()
    assert counts == [40, 40, 40]
    assert len(launches) == 2


def test_handler_that_calls_another_function(compiled: Any) -> None:
    inner = compile_scale_then_add("--enable-tvm-ffi", 9.0)
    names: list[str] = []

    def handler(launch: Launch) -> None:
        names.append("outer")
        with loader.intercept(lambda launch: names.append("inner")):
            loader.call(inner, *tensors(), 2.0)

    with loader.intercept(handler):
        loader.call(compiled, *tensors(), 2.0)
    assert names == ["outer", "inner", "inner"] * 2


def test_outside_intercept(compiled: Any) -> None:
    with pytest.raises(RuntimeError, match="intercept"):
        loader.call(compiled, *tensors(), 2.0)


def test_not_a_compiled_function(launches: list[Launch]) -> None:
    with pytest.raises(TypeError, match="not a compiled CuTe DSL function"):
        loader.call(print)


@pytest.mark.parametrize(("arch", "sms"), [("sm_90a", 132), ("sm_100a", 148), ("sm_103a", 148)])
def test_device_answers_for_the_emulated_gpu(arch: str, sms: int) -> None:
    from cutlass.utils import HardwareInfo

    before = HardwareInfo.__init__
    with loader.device(arch) as gpu:
        assert gpu.sms == sms
        assert HardwareInfo().get_device_multiprocessor_count() == sms
        assert HardwareInfo().get_max_active_clusters(2) == sms // 2
        compiled = cute.compile(scale_then_add, vector(), vector(), cutlass.Float32(0.0), 3.0)
    assert f".target {arch}" in loader.ptx_of(compiled)
    assert HardwareInfo.__init__ is before


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="no emulated device for 'sm_80'"):
        loader.device_of("sm_80")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_is_left_alone(compiled: Any) -> None:
    """One object, on the GPU and on the emulator by turns."""
    for _ in range(2):
        x, y = (t.cuda() for t in tensors())
        compiled(x, y, 2.5)
        torch.cuda.synchronize()
        assert y[299].item() == 747.5
        assert x[299].item() == 750.5
        host_x, host_y = tensors()
        with loader.intercept(compute):
            loader.call(compiled, host_x, host_y, 2.5)
        assert torch.equal(host_x, x.cpu())
        assert torch.equal(host_y, y.cpu())


def test_flash_attention_4_reaches_the_handler(launches: list[Launch]) -> None:
    from .fa4 import fa4_backward, fa4_forward

    q = torch.randn(1, 256, 4, 128, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 256, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    out, lse = fa4_forward(q, k, v, causal=True)
    assert ["flash_fwd_sm90" in launch.entry for launch in launches] == [True]
    assert launches[0].block == (384, 1, 1)
    assert (out.shape, lse.shape) == (q.shape, (1, 4, 256))
    launches.clear()
    gradients = fa4_backward(torch.randn_like(out), q, k, v, out, lse, causal=True)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    kinds = ["preprocess", "flash_bwd_sm90", *["postprocess"] * 3]
    assert len(launches) == len(kinds)
    for launch, kind in zip(launches, kinds, strict=True):
        assert kind in launch.entry
        assert f".entry {launch.entry}(" in launch.ptx
    assert not torch.zeros(1).is_cuda


@pytest.mark.parametrize(("arch", "sms"), [("sm_90a", 132), ("sm_100a", 148), ("sm_103a", 148)])
def test_emulated_gpus(arch: str, sms: int) -> None:
    """What is compiled and called within the block is compiled for that GPU, and runs."""
    x, y = tensors()
    with emulator.emulate(arch) as session:
        assert cutlass.utils.HardwareInfo().get_device_multiprocessor_count() == sms
        assert loader.device_of(arch).smem_optin_bytes == 232448
        arguments = vector(), vector(), cutlass.Float32(0.0), 3.0
        function = cute.compile(scale_then_add, *arguments, options="--enable-tvm-ffi")
        assert f".target {arch}" in loader.ptx_of(function)
        expected = x * 2 + 3
        function(x, y, 2.0)
    assert torch.equal(x, expected)
    assert len(session.report.launches) == 2
