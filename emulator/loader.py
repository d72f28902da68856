"""Catch the kernel launches of CuTe DSL functions, without a GPU, a driver or libcuda.

A compiled function is host code that calls a few CUDA wrappers by name (`_cudaLaunchKernelEx` and
about ten more). `call` runs a *twin* of it: the same host code, exported as an ELF object, in which
those names are bound to Python callbacks of this module instead of the CUDA runtime. The function
itself is never touched, so on a machine with a GPU it still launches there, before, after and
beside an emulated call; nothing is interposed process-wide and no C compiler is needed.

    function --export--> ELF object --`_relink`--> twin --launch--> `_launch_kernel` --> handler

A launch carries the PTX text of that very object (kernel names are not unique), the entry, the
configuration and the addresses of the raw parameters. Written against CuTe DSL 4.8; the facts about
its host code are in the section comments below.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import hashlib
import math
import platform
import re
import struct
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

Handler = Callable[["Launch"], None]

# ------------------------------------------------------------------------------ public types


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch. `args` is valid until the handler returns."""

    ptx: str  # text of the whole module the kernel comes from
    entry: str
    grid: tuple[int, int, int]  # CTAs
    block: tuple[int, int, int]  # threads
    cluster: tuple[int, int, int]  # CTAs; (1, 1, 1) without clusters
    smem_bytes: int  # dynamic shared memory
    args: tuple[int, ...]  # address of each kernel parameter, in the order of the PTX `.entry`
    arguments: tuple[Any, ...] = ()  # what the host function was called with
    programmatic: bool = False  # may start before the kernel before it ends (PDL)


@dataclasses.dataclass(frozen=True)
class Device:
    """The facts about a GPU that host code asks for."""

    sms: int
    smem_optin_bytes: int  # most shared memory one CTA may opt in to


class LaunchError(RuntimeError):
    """A launch that the CUDA runtime would refuse (cudaErrorInvalidConfiguration)."""


H200 = Device(sms=132, smem_optin_bytes=227 * 1024)
B200 = Device(sms=148, smem_optin_bytes=227 * 1024)
_DEVICES = {"sm_90": H200, "sm_100": B200, "sm_103": B200}
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_THREADS = 1024
_MAX_CLUSTER = 16  # the non-portable maximum; the DSL asks for it


def device_of(arch: str) -> Device:
    """The GPU emulated for `arch`, e.g. "sm_90a". ValueError if there is none."""
    name = arch.rstrip("af")
    if name not in _DEVICES:
        raise ValueError(f"no emulated device for {arch!r}; there are {sorted(_DEVICES)}")
    return _DEVICES[name]


# ------------------------------------------------------------------------------ intercept and call


@dataclasses.dataclass
class _Kernel:
    entry: str
    num_params: int


class _Program:
    """The twin of one compiled function: its PTX, the kernels its host code has asked for, and
    `invoke`, which runs the host code."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.device = device_of(_search(r"^\.target\s+(\w+)", ptx))
        self.kernels: list[_Kernel] = []  # a kernel's handle is its index + 1
        self.loading = threading.RLock()
        self.invoke: Callable[..., Any] = lambda: None


@dataclasses.dataclass
class _Frame:
    """One call in progress on this thread."""

    program: _Program
    handler: Handler
    arguments: tuple[Any, ...]
    error: BaseException | None = None


class _Thread(threading.local):
    frame: _Frame | None = None


_thread = _Thread()
_handler: contextvars.ContextVar[Handler | None] = contextvars.ContextVar("handler", default=None)


@contextlib.contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """Within the block, in this thread, launches of compiled functions go to `handler`.

    Both `call(function, ...)` and a plain `function(...)` are caught. The handler runs inside the
    launch; what it raises stops the host function and is raised again by the call.
    """
    _install()
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the host code of `function` on CPU tensors; its launches go to the active handler.

    `function` comes from `cute.compile` (with or without TVM-FFI), from `load`, or from
    `cute.runtime.load_module` after the first use of this module. Torch tensors and NumPy arrays
    among the arguments, also inside tuples, lists and dataclasses, are passed as device tensors
    whose pointer is the CPU pointer. Raises whatever the handler raised; LaunchError for a
    configuration no GPU accepts; LookupError if the function's PTX is not known; TypeError for
    something that is not a compiled function; RuntimeError outside `intercept`.
    """
    handler = _handler.get()
    if handler is None:
        raise RuntimeError("an emulated call needs `with intercept(handler):` around it")
    program = _program_of(function)
    outer, _thread.frame = _thread.frame, _Frame(program, handler, (*args, *kwargs.values()))
    frame = _thread.frame
    result = None
    try:
        result = program.invoke(*args, **kwargs)
    except Exception:
        if frame.error is None:
            raise
    finally:
        _thread.frame = outer
    if frame.error is not None:
        raise frame.error
    return result


# ------------------------------------------------------------------------------ tensors


class _DeviceView:
    """A CPU tensor that presents itself through DLPack as a CUDA tensor at the same address."""

    def __init__(self, tensor: torch.Tensor | np.ndarray) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DL_CUDA, 0

    def __dlpack__(self, **_: Any) -> object:
        # An unversioned capsule is understood by every consumer: DLManagedTensor begins with
        # {void* data; int32 device_type; ...}. Its owner does not read the device type back.
        capsule = self._tensor.__dlpack__()
        pointer = _capsule_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(pointer + 8).value = _DL_CUDA
        return capsule


_DL_CUDA = 2  # kDLCUDA
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def device_view(tensor: torch.Tensor | np.ndarray) -> _DeviceView:
    """A view of a CPU tensor for every consumer of DLPack that wants a CUDA tensor: arguments of
    TVM-FFI functions, `cute.runtime.from_dlpack`. ValueError if the tensor is on another device."""
    if isinstance(tensor, torch.Tensor):
        if tensor.device.type != "cpu":
            raise ValueError(f"the emulator runs on CPU tensors, got one on {tensor.device}")
        tensor = tensor.detach()
    return _DeviceView(tensor)


def _device_arguments(value: Any) -> Any:
    """`value` with every tensor in it, also in containers, replaced by its device view."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return device_view(value)
    if isinstance(value, tuple):
        items = [_device_arguments(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_device_arguments(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{k: _device_arguments(v) for k, v in fields.items()})
    return value


# ------------------------------------------------------------------------------ compile and load


@contextlib.contextmanager
def device(arch: str) -> Iterator[Device]:
    """Within the block CuTe DSL compiles for `arch` and sees that GPU, whatever the machine has.

    Objects compiled in it keep their PTX with line marks (`artifacts.PTX`). The setting is
    process-wide: do not compile for a real GPU in another thread at the same time.
    """
    dsl = _install()
    gpu = device_of(arch)
    with contextlib.ExitStack() as stack:
        keep = {"keep_ptx": True, "keep_cubin": True, "lineinfo": True, "no_cache": True}
        dump_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="hopwell-"))
        stack.enter_context(_changed(dsl.envar, _arch=arch, dump_dir=dump_dir, **keep))
        queries = {
            "__init__": lambda self, device_id=0: None,
            "get_max_active_clusters": lambda self, cluster_size, stream=None: (
                gpu.sms // cluster_size
            ),
            "get_device_multiprocessor_count": lambda self: gpu.sms,
        }
        stack.enter_context(_changed(dsl.HardwareInfo, **queries))
        yield gpu


@contextlib.contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` for the length of the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def compile(function: Any, *args: Any, arch: str, options: str = "", **kwargs: Any) -> Any:
    """`cute.compile` for `arch` without a GPU, keeping the PTX and its line marks.

    `args` are as for `cute.compile` (fake tensors, or `device_view`s of CPU tensors); `options` is
    its option string, without `--gpu-arch`. Returns the compiled function.
    """
    with device(arch):
        compiled = _install().cute.compile(
            function, *args, options=f"--gpu-arch {arch} {options}", **kwargs
        )
    if isinstance(compiled.artifacts.CUBIN, bytes):  # else there is no kernel in it
        remember(compiled.artifacts.CUBIN, compiled.artifacts.PTX)
    return compiled


class EmulatedFunction:
    """A function from an object file that runs within `intercept` alone."""

    def __init__(self, program: _Program) -> None:
        self._emulator_program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)


def load(path: str | Path, name: str) -> EmulatedFunction:
    """The TVM-FFI function `name` of the object file `path`, bound to the emulator alone.

    `path` is what `compiled.export_to_c(path, name)` wrote. The PTX is read from the file of the
    same name ending in `.ptx` if there is one (write `ptx_of(compiled)` there), else found as
    `ptx_of` says. LookupError without PTX.
    """
    return EmulatedFunction(_program_of_file(Path(path), name))


_known_ptx: dict[bytes, str] = {}  # SHA-256 of a cubin: the PTX it was assembled from


def remember(image: bytes, ptx: str) -> None:
    """Note the PTX of `image`, a cubin or the fatbin around one, for objects that contain it."""
    _known_ptx[hashlib.sha256(_cubin(image)).digest()] = ptx


def ptx_of(compiled: Any) -> str:
    """The PTX text of a compiled or loaded function.

    Looked for in its artifacts (`--keep-ptx`), among those given to `remember`, and in the debug
    section of its cubin (`--generate-line-info`; the text there has no line marks). LookupError if
    it is in none of them.
    """
    artifacts = getattr(compiled, "artifacts", None)
    # Without the dump at hand the attribute holds its path.
    if artifacts is not None and artifacts.PTX and ".entry" in artifacts.PTX:
        return artifacts.PTX
    if getattr(compiled, "_emulator_program", None) is not None:
        return compiled._emulator_program.ptx
    return _ptx_in(_install().export(compiled.ir_module))


def _ptx_in(elf: bytes) -> str:
    """The PTX belonging to the fatbin inside an exported host object."""
    start = elf.find(_FATBIN_MAGIC)
    if start >= 0:
        cubin = _cubin(elf[start:])
        known = _known_ptx.get(hashlib.sha256(cubin).digest())
        if known is not None:
            return known
        for section in _sections(cubin):
            if _section_name(cubin, section) == b".nv_debug_ptx_txt":
                lines = cubin[section.offset : section.offset + section.size].split(b"\0")
                return b"\n".join(lines).decode()
    raise LookupError(
        "the PTX of this object is not known; compile it with hopwell.emulator.loader.compile, "
        "inside loader.device(arch), or with the options --keep-ptx --generate-line-info"
    )


# ------------------------------------------------------------------------------ twins


def _program_of(function: Any) -> _Program:
    program = getattr(function, "_emulator_program", None)
    if program is not None:
        return program
    dsl = _install()
    with _dsl_lock:
        program = getattr(function, "_emulator_program", None)
        if program is None:
            if not isinstance(function, dsl.CudaDialectJitCompiledFunction):
                raise TypeError(
                    f"not a compiled CuTe DSL function: {function!r}; an object loaded before the "
                    "first use of the emulator must be loaded again"
                )
            if isinstance(function, dsl.TVMFFIJitCompiledFunctionBase):
                program = _tvm_ffi_program(function)
            else:
                program = _plain_program(function)
            function._emulator_program = program
    return program


def _tvm_ffi_program(compiled: Any) -> _Program:
    dsl = _install()
    program = _Program(ptx_of(compiled))
    native = _tvm_ffi_function(dsl.export(compiled.ir_module), compiled.function_name)
    cls: Any = type(compiled)
    twin = cls.__new__(cls)
    vars(twin).update(vars(compiled))
    if isinstance(compiled, dsl.TVMFFIJitCompiledFunction):
        twin.__move_handle_from__(native)
    elif compiled._kwargs_wrapper is not None:
        # The wrapper is generated code that calls a global of its own; give the copy the twin's.
        wrapper = compiled._kwargs_wrapper
        names = {**wrapper.__globals__, "__i_target_func": native}
        twin._kwargs_wrapper = types.FunctionType(wrapper.__code__, names)
        twin._kwargs_wrapper.__defaults__ = wrapper.__defaults__
        twin._kwargs_wrapper.__kwdefaults__ = wrapper.__kwdefaults__
    else:
        # Compiled for another GPU than this machine's: the DSL kept no signature.
        twin._kwargs_wrapper = native
    program.invoke = _on_device(functools.partial(dsl.original_call[cls], twin))
    return program


def _program_of_file(path: Path, name: str) -> _Program:
    elf = path.read_bytes()
    sidecar = path.with_suffix(".ptx")
    program = _Program(sidecar.read_text() if sidecar.exists() else _ptx_in(elf))
    program.invoke = _on_device(_tvm_ffi_function(elf, name))
    return program


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def invoke(*args: Any, **kwargs: Any) -> Any:
        return function(
            *[_device_arguments(arg) for arg in args],
            **{name: _device_arguments(arg) for name, arg in kwargs.items()},
        )

    return invoke


def _tvm_ffi_function(elf: bytes, name: str) -> Any:
    """The function exported under `name` by a host object, relinked to this module."""
    dsl = _install()
    engine = dsl.BinaryExecutionEngine(_relink(elf), [], True)
    address = engine.lookup(f"__tvm_ffi_{name}")
    return dsl.tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=engine)


def _plain_program(compiled: Any) -> _Program:
    """Twin of a function without TVM-FFI. Its argument marshalling is the DSL's own, which passes
    CPU tensors' pointers as they are; only the engine under it is another one."""
    dsl = _install()
    if compiled.ir_module is None:
        raise NotImplementedError("export the function with --enable-tvm-ffi to emulate it")
    program = _Program(ptx_of(compiled))
    engine = dsl.ExecutionEngine(compiled.ir_module, opt_level=0, shared_libs=[])
    for name in dsl.declared_functions(compiled.ir_module):
        if _is_cuda(name):
            engine.raw_register_runtime(name, ctypes.c_void_p(_address(name)))
    cls: Any = type(compiled)
    twin = cls.__new__(cls)
    vars(twin).update(vars(compiled))
    twin.engine = engine
    twin.capi_func = engine.lookup(compiled.function_name)
    twin.capi_func.restype = ctypes.c_int32
    twin._default_executor = None
    twin.num_devices = 1

    def invoke(*args: Any, **kwargs: Any) -> Any:
        with program.loading:
            if twin._default_executor is None:
                twin._load_cuda_library()
                # No library handle is given to the DSL's module: it would unload it through CUDA.
                twin.jit_module = dsl.CudaDialectJitModule(
                    engine, twin.capi_func, twin.execution_args, []
                )
                twin._default_executor = dsl.JitExecutor(twin.jit_module, None, False)
        return dsl.original_call[cls](twin, *args, **kwargs)

    program.invoke = invoke
    return program


# ------------------------------------------------------------------------------ the DSL


_dsl_lock = threading.RLock()


def _install() -> types.SimpleNamespace:
    """Import CuTe DSL and let its callables ask, when called, whether a handler is active.

    Costs a real launch one Python call and one context variable read. Returns the DSL's parts.
    """
    with _dsl_lock:
        return _install_once()


@functools.cache
def _install_once() -> types.SimpleNamespace:
    import cutlass
    import cutlass.cute as cute
    import tvm_ffi
    from cutlass._mlir._mlir_libs._cutlass_ir._aot_support import export_module_to_bytes
    from cutlass._mlir._mlir_libs._cutlass_ir._execution_engine import BinaryExecutionEngine
    from cutlass._mlir.execution_engine import ExecutionEngine
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    from cutlass.cutlass_dsl.cuda_jit_executor import (
        CudaDialectJitCompiledFunction,
        CudaDialectJitModule,
    )

    class Reloaded(tvm_ffi.Function):
        """A function from `cute.runtime.load_module` that knows its file."""

        def __init__(self, function: Any, path: str, name: str) -> None:
            self.__move_handle_from__(function)
            self._path, self._name = path, name

        @functools.cached_property
        def _emulator_program(self) -> _Program:
            return _program_of_file(Path(self._path), self._name)

        __call__ = _routed(tvm_ffi.Function.__call__)

    module_type: Any = ExternalBinaryModule
    init, getattr_ = module_type.__init__, module_type.__getattr__

    def __init__(module: Any, file_path: str, enable_tvm_ffi: bool = False) -> None:
        init(module, file_path, enable_tvm_ffi)
        module._emulator_path = file_path

    def __getattr__(module: Any, name: str) -> Any:
        function = getattr_(module, name)
        if module.enable_tvm_ffi and "_emulator_path" in vars(module):
            return Reloaded(function, module._emulator_path, name)
        return function

    module_type.__init__ = __init__
    module_type.__getattr__ = __getattr__
    callables = (
        provider.TVMFFIJitCompiledFunction,
        provider.TVMFFIJitCompiledFunctionWithKwargs,
        CudaDialectJitCompiledFunction,
    )
    original_call = {cls: cls.__call__ for cls in callables}
    for cls in callables:
        cls.__call__ = _routed(cls.__call__)

    def export(module: Any) -> bytes:
        return export_module_to_bytes(module, format="o", opt_level=0, enable_pic=True)

    def declared_functions(module: Any) -> list[str]:
        functions = [op for op in module.body.operations if op.operation.name == "llvm.func"]
        return [op.sym_name.value for op in functions if not op.operation.regions[0].blocks]

    return types.SimpleNamespace(
        cute=cute,
        envar=CuTeDSL._get_dsl().envar,
        HardwareInfo=cutlass.utils.HardwareInfo,
        tvm_ffi=tvm_ffi,
        export=export,
        declared_functions=declared_functions,
        original_call=original_call,
        BinaryExecutionEngine=BinaryExecutionEngine,
        ExecutionEngine=ExecutionEngine,
        JitExecutor=JitExecutor,
        CudaDialectJitModule=CudaDialectJitModule,
        CudaDialectJitCompiledFunction=CudaDialectJitCompiledFunction,
        TVMFFIJitCompiledFunction=provider.TVMFFIJitCompiledFunction,
        TVMFFIJitCompiledFunctionBase=provider.TVMFFIJitCompiledFunctionBase,
    )


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(function: Any, *args: Any, **kwargs: Any) -> Any:
        if _handler.get() is None:
            return original(function, *args, **kwargs)
        return call(function, *args, **kwargs)

    return __call__


# ------------------------------------------------------------------------------ CUDA, as Python
#
# Host code of one object, in order: `cuda_dialect_init_library_once` (TVM-FFI; without it the DSL
# calls the two functions itself) -> cuda_init: _cudaLibraryLoadData -> cuda_load_to_device:
# _cudaDeviceGetAttribute(97), _cudaLibraryGetKernel, _cuKernelGetAttribute(1),
# _cudaKernelSetAttributeForDevice; then _cudaLaunchKernelEx at every call. All return a cudaError.

_FAILED = 719  # cudaErrorLaunchFailure: stops the host function; the real cause is in the frame
_callbacks: dict[str, Any] = {}  # name: the ctypes function, alive as long as the process
_I32, _PTR, _STR = ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p
_STATUS_OF_PTR = ctypes.CFUNCTYPE(_I32, _PTR)
_STATUS_OF_PTR_I32 = ctypes.CFUNCTYPE(_I32, _PTR, _I32)
_SET_ERROR = ctypes.CFUNCTYPE(None, _STR, _STR)
_SET_ERROR_PARTS = ctypes.CFUNCTYPE(None, _STR, ctypes.POINTER(_STR), _I32)


def _callback(name: str, *types_: Any) -> Callable[[Callable[..., Any]], None]:
    """Bind the CUDA function `name` to a Python function of (frame, *arguments)."""

    def register(body: Callable[..., int | None]) -> None:
        def guarded(*args: Any) -> int:
            frame = _thread.frame
            assert frame is not None, "a twin runs only inside `call`"
            try:
                return body(frame, *args) or 0
            except BaseException as error:
                frame.error = error
                return _FAILED

        _callbacks[name] = ctypes.CFUNCTYPE(_I32, *types_)(guarded)

    return register


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    )


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", _PTR),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    )


_ATTRIBUTE_CLUSTER = 4  # cudaLaunchAttributeClusterDimension
_ATTRIBUTE_PROGRAMMATIC = 6  # cudaLaunchAttributeProgrammaticStreamSerialization


@_callback(
    "_cudaLaunchKernelEx", ctypes.POINTER(_LaunchConfig), ctypes.c_size_t, ctypes.POINTER(_PTR)
)
def _launch_kernel(frame: _Frame, config_at: Any, handle: int, args: Any) -> None:
    config = config_at.contents
    kernel = frame.program.kernels[handle - 1]
    cluster, programmatic = (1, 1, 1), False
    for attribute in config.attributes[: config.num_attributes]:
        if attribute.id == _ATTRIBUTE_CLUSTER:
            cluster = tuple(attribute.value[:3])
        elif attribute.id == _ATTRIBUTE_PROGRAMMATIC:
            programmatic = bool(attribute.value[0])
    launch = Launch(
        ptx=frame.program.ptx,
        entry=kernel.entry,
        grid=tuple(config.grid),
        block=tuple(config.block),
        cluster=cluster,
        smem_bytes=config.smem_bytes,
        args=tuple(args[: kernel.num_params]),
        arguments=frame.arguments,
        programmatic=programmatic,
    )
    _check_launch(launch, frame.program.device)
    frame.handler(launch)


def _check_launch(launch: Launch, gpu: Device) -> None:
    """Refuse what the CUDA runtime refuses."""
    checks = {
        f"grid from 1 to {_MAX_GRID}": all(
            1 <= n <= limit for n, limit in zip(launch.grid, _MAX_GRID, strict=True)
        ),
        f"block from 1 to {_MAX_BLOCK}": all(
            1 <= n <= limit for n, limit in zip(launch.block, _MAX_BLOCK, strict=True)
        ),
        f"at most {_MAX_THREADS} threads": math.prod(launch.block) <= _MAX_THREADS,
        "grid a multiple of cluster": all(
            c >= 1 and g % c == 0 for g, c in zip(launch.grid, launch.cluster, strict=True)
        ),
        f"at most {_MAX_CLUSTER} CTAs in a cluster": math.prod(launch.cluster) <= _MAX_CLUSTER,
        f"at most {gpu.smem_optin_bytes} bytes of shared memory": (
            launch.smem_bytes <= gpu.smem_optin_bytes
        ),
    }
    broken = [rule for rule, holds in checks.items() if not holds]
    if broken:
        raise LaunchError(
            f"{launch.entry}: got grid {launch.grid}, block {launch.block}, cluster "
            f"{launch.cluster}, {launch.smem_bytes} bytes of dynamic shared memory; needed: "
            + "; ".join(broken)
        )


@_callback("cuda_dialect_init_library_once", _PTR, _PTR, _PTR, _PTR)
def _init_library_once(
    frame: _Frame, state: int, init: int, load_to_device: int, set_error: int
) -> int:
    library = ctypes.c_void_p.from_address(state)
    with frame.program.loading:
        if library.value:
            return 0
        handle = ctypes.c_void_p()
        if _STATUS_OF_PTR(init)(ctypes.addressof(handle)) or _STATUS_OF_PTR_I32(load_to_device)(
            ctypes.addressof(handle), 0
        ):
            _SET_ERROR(set_error)(b"RuntimeError", b"the emulator could not load the kernels")
            return -1
        library.value = handle.value
    return 0


@_callback("_cudaLibraryLoadData", _PTR, _PTR)
def _load_library(frame: _Frame, library: int, image: int) -> None:
    ctypes.c_void_p.from_address(library).value = image


@_callback("_cudaLibraryGetKernel", _PTR, _PTR, _STR)
def _get_kernel(frame: _Frame, kernel: int, library: int, name: bytes) -> None:
    entry = name.decode()
    params = _search(rf"\.entry\s+{re.escape(entry)}\s*\(([^)]*)\)", frame.program.ptx)
    frame.program.kernels.append(_Kernel(entry, params.count(".param")))
    ctypes.c_void_p.from_address(kernel).value = len(frame.program.kernels)


@_callback("_cudaGetDevice", _PTR)
def _get_device(frame: _Frame, device: int) -> None:
    _I32.from_address(device).value = 0


@_callback("_cudaDeviceGetAttribute", _PTR, _I32, _I32)
def _get_device_attribute(frame: _Frame, value: int, attribute: int, device: int) -> None:
    gpu = frame.program.device
    known = {16: gpu.sms, 97: gpu.smem_optin_bytes}
    if attribute not in known:
        raise NotImplementedError(f"cudaDeviceGetAttribute({attribute}) is not emulated")
    _I32.from_address(value).value = known[attribute]


@_callback("_cuKernelGetAttribute", _PTR, _I32, _PTR, _I32)
def _get_kernel_attribute(
    frame: _Frame, value: int, attribute: int, kernel: int, device: int
) -> None:
    # Asked for static shared memory (1), which only lowers the dynamic maximum set on the kernel.
    if attribute != 1:
        raise NotImplementedError(f"cuKernelGetAttribute({attribute}) is not emulated")
    _I32.from_address(value).value = 0


@_callback("CuteDSLRT_TVMFFISetRaisedCudaError", _PTR, _I32)
def _set_raised_cuda_error(frame: _Frame, set_error_parts: int, status: int) -> None:
    parts = (_STR * 1)(f"CUDA status {status} in an emulated call".encode())
    _SET_ERROR_PARTS(set_error_parts)(b"RuntimeError", parts, 1)


_NO_EFFECT = {
    # Called from a destructor, perhaps after the interpreter has gone: must not be Python.
    "cuda_dialect_unload_library_once",
    "_cudaSetDevice",
    "_cudaFuncSetAttribute",
    "_cudaKernelSetAttributeForDevice",
    "_cudaDeviceSynchronize",
    "_cudaStreamSynchronize",
}


def _is_cuda(name: str) -> bool:
    return name.startswith(("_cu", "cuda_dialect_", "CuteDSLRT_"))


def _address(name: str) -> int:
    """Address of the function that stands for the CUDA function `name`."""
    if name not in _callbacks:

        @_callback(name)
        def _(frame: _Frame) -> None:
            if name not in _NO_EFFECT:
                raise NotImplementedError(f"{name[1:]} is not emulated")

    return ctypes.cast(_callbacks[name], ctypes.c_void_p).value or 0


# ------------------------------------------------------------------------------ ELF and fatbin
#
# The DSL links host objects with LLVM's JITLink, which takes neither absolute symbols nor, for an
# object file, symbols made by hand. But it takes any well-formed object, so each CUDA function gets
# a definition in a new code section: a jump to the Python callback.

_FATBIN_MAGIC = b"\x50\xed\x55\xba"
_SHT_PROGBITS, _SHT_SYMTAB = 1, 2
_SHF_ALLOC_EXEC = 0x6
_GLOBAL_FUNC = 0x12
_STUB_BYTES = 16
_STUBS: dict[str, tuple[Callable[[int], bytes], bytes]] = {
    # jump to a 64-bit address; return 0
    "x86_64": (
        lambda address: b"\x48\xb8" + struct.pack("<Q", address) + b"\xff\xe0",
        b"\x31\xc0\xc3",
    ),
    "aarch64": (
        lambda address: struct.pack("<IIQ", 0x58000050, 0xD61F0200, address),
        struct.pack("<II", 0x52800000, 0xD65F03C0),
    ),
}


@dataclasses.dataclass
class _Section:
    name_at: int  # in the section name table
    kind: int
    offset: int
    size: int
    link: int


def _section_table(elf: bytes) -> tuple[int, int, int]:
    """File offset, number of entries, index of the name table."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    _, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    return offset, count, names


def _sections(elf: bytes) -> list[_Section]:
    offset, count, _ = _section_table(elf)
    headers = (struct.unpack_from("<IIQQQQI", elf, offset + 64 * i) for i in range(count))
    return [_Section(h[0], h[1], h[4], h[5], h[6]) for h in headers]


def _section_name(elf: bytes, section: _Section) -> bytes:
    names = _sections(elf)[_section_table(elf)[2]]
    return elf[names.offset + section.name_at :].split(b"\0", 1)[0]


def _relink(elf: bytes) -> bytes:
    """`elf`, a relocatable host object, with every undefined CUDA function defined as a stub."""
    jump, return_zero = _STUBS[platform.machine()]
    offset, count, _ = _section_table(elf)
    out, stubs, name_at = bytearray(elf), bytearray(), 0
    for section in _sections(elf):
        if section.kind != _SHT_SYMTAB:
            continue
        # A section name that is unique and needs no new string: the tail of ".symtab".
        name_at = section.name_at + 1
        strings = _sections(elf)[section.link].offset
        for symbol in range(section.offset, section.offset + section.size, 24):
            string_at, _, _, section_index = struct.unpack_from("<IBBH", elf, symbol)
            end = elf.index(b"\0", strings + string_at)
            name = elf[strings + string_at : end].decode()
            if section_index == 0 and _is_cuda(name):
                struct.pack_into("<BBHQ", out, symbol + 4, _GLOBAL_FUNC, 0, count, len(stubs))
                code = return_zero if name in _NO_EFFECT else jump(_address(name))
                stubs += code.ljust(_STUB_BYTES, b"\0")
    out += b"\0" * (-len(out) % _STUB_BYTES)
    stubs_at = len(out)
    out += stubs
    struct.pack_into("<Q", out, 0x28, len(out))
    struct.pack_into("<H", out, 0x3C, count + 1)
    out += elf[offset : offset + 64 * count]
    out += struct.pack(
        "<IIQQQQIIQQ",
        *(name_at, _SHT_PROGBITS, _SHF_ALLOC_EXEC, 0, stubs_at, len(stubs)),
        *(0, 0, _STUB_BYTES, 0),
    )
    return bytes(out)


def _cubin(image: bytes) -> bytes:
    """The cubin in `image`, a cubin or an uncompressed fatbin, without what follows it."""
    start = image.find(b"\x7fELF")
    if start < 0:
        raise LookupError("no cubin found; is the fatbin compressed?")
    elf = image[start:]
    program_table, section_table = struct.unpack_from("<QQ", elf, 0x20)
    entry, programs, _, sections = struct.unpack_from("<HHHH", elf, 0x36)
    return elf[: max(program_table + entry * programs, section_table + 64 * sections)]


def _search(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise LookupError(f"the PTX does not have {pattern!r}")
    return found[1]
