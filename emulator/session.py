"""Sessions: launches of compiled functions in this thread run on the emulator."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from . import loader
from .machine import Machine
from .memory import Extent, GlobalMemory
from .report import Finding, KernelFault, Options, Report

Tensor = torch.Tensor | np.ndarray


@dataclasses.dataclass
class Session:
    """A run of launches: `report` grows with each."""

    options: Options
    report: Report = dataclasses.field(default_factory=Report)

    def __post_init__(self) -> None:
        self._outputs: set[int] = set()
        self._arguments: tuple[Any, ...] | None = None
        self._memory = GlobalMemory([])
        self._unsettled: list[tuple[int, int]] = []  # written by kernels that may still run
        self._stopped = False  # a launch of the call in progress ended early

    def launch(self, launch: loader.Launch) -> None:
        """Runs one launch of the call in progress."""
        if self._arguments is not launch.arguments:
            self._arguments = launch.arguments
            self._memory = GlobalMemory(
                _extent(f"argument {i}", t, _address(t) in self._outputs)
                for i, t in _tensors(launch.arguments)
            )
        if not launch.programmatic:
            self._unsettled = []
        self._memory.unsettle(self._unsettled)
        machine = Machine(launch, self._memory, self.options)
        machine.run()
        self._stopped |= machine.stopped
        if self.options.check and not machine.findings and self._makes_nan(launch.arguments):
            again = Machine(launch, self._memory, self.options, trace=True)
            again.run()
            machine.findings += again.findings
        self._unsettled = [*self._unsettled, *self._memory.stored()]
        self.report.launches.append(machine.counters)
        self.report.recordings.append(machine.recordings)
        self._finish(machine.findings)

    def _makes_nan(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a written element of an output is NaN though every input is finite."""
        made, inputs = False, []
        for name, tensor in _tensors(arguments):
            if not _is_float(tensor):
                continue
            values = torch.as_tensor(tensor)
            extent = _extent(f"argument {name}", tensor, _address(tensor) in self._outputs)
            written = self._memory.written(extent) if extent.output else None
            if written is not None:
                made |= bool((values.isnan().numpy() & written).any())
            else:
                inputs.append(values)
        return made and all(bool(values.isfinite().all()) for values in inputs)

    def _finish(self, findings: list[Finding]) -> None:
        self.report.findings += findings
        if findings and self.options.raise_on_fault:
            raise KernelFault(findings)

    def call(self, function: Any, *args: Any, outputs: Iterable[Tensor] = ()) -> Any:
        """Runs `function(*args)`; every byte of `outputs` must be written by it."""
        outputs = list(outputs)
        for tensor in outputs:
            _poison(tensor)
        self._outputs = {_address(t) for t in outputs}
        self._stopped = False
        try:
            result = loader.call(function, *args)
        finally:
            self._outputs, self._arguments = set(), None
        if outputs and self.options.check and not self._stopped:
            kernel = self.report.launches[-1].kernel if self.report.launches else "no launch"
            unwritten = sorted(  # by argument, not by address
                self._memory.unwritten(), key=lambda hole: (len(hole[0].name), hole[0].name)
            )
            holes = [
                f"{size} bytes of {extent.name} are never written, the first at index {at}"
                for extent, size, at in unwritten
            ]
            self._finish([Finding("unwritten output", text, kernel, "", "", 0) for text in holes])
        return result


_active: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)


@contextlib.contextmanager
def session(options: Options | None = None) -> Iterator[Session]:
    """Within the block, compiled functions called in this thread run on the emulator."""
    made = Session(options or Options())
    token = _active.set(made)
    try:
        with loader.intercept(made.launch):
            yield made
    finally:
        _active.reset(token)


@contextlib.contextmanager
def emulate(arch: str, options: Options | None = None) -> Iterator[Session]:
    """A session in which functions are compiled for `arch`, such as "sm_100a", and see its GPU.

    Raises:
        ValueError: there is no such GPU here.
    """
    with loader.device(arch), session(options) as made:
        yield made


def call(function: Any, *args: Any, outputs: Iterable[Tensor] = ()) -> Any:
    """Calls a compiled CuTe-DSL function on CPU tensors, in the session of this thread.

    Args:
        function: made by `cute.compile`, with or without TVM-FFI, or loaded from an object.
        args: as for the function; tensors are CPU torch tensors or NumPy arrays.
        outputs: those of the tensors of which every byte must be written. They are filled with NaN
            first.

    Raises:
        KernelFault: the run had findings (unless `Options.raise_on_fault` is False).
        NotImplementedError: an instruction the emulator does not know.
    """
    current = _active.get()
    if current is None:
        raise RuntimeError("emulator.call needs `with emulator.session():` around it")
    return current.call(function, *args, outputs=outputs)


def run(
    function: Any, *args: Any, outputs: Iterable[Tensor] = (), options: Options | None = None
) -> Report:
    """One call in a session of its own; returns its report."""
    with session(options) as made:
        made.call(function, *args, outputs=outputs)
    return made.report


def _tensors(args: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    for i, value in enumerate(args):
        label = f"{name}{i}"
        if isinstance(value, (torch.Tensor, np.ndarray)):
            yield label, value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value, f"{label}.")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, f.name) for f in dataclasses.fields(value)]
            yield from _tensors(fields, f"{label}.")


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor.ctypes.data


def _extent(name: str, tensor: Tensor, output: bool) -> Extent:
    if isinstance(tensor, torch.Tensor):
        item = tensor.element_size()
        strides = tuple(s * item for s in tensor.stride())
        return Extent(name, tensor.data_ptr(), tuple(tensor.shape), strides, item, output)
    return Extent(name, tensor.ctypes.data, tensor.shape, tensor.strides, tensor.itemsize, output)


def _is_float(tensor: Tensor) -> bool:
    if isinstance(tensor, torch.Tensor):
        return tensor.dtype.is_floating_point
    return tensor.dtype.kind == "f"


def _poison(tensor: Tensor) -> None:
    """Fills with NaN (integers: all ones)."""
    value = float("nan") if _is_float(tensor) else -1
    if isinstance(tensor, torch.Tensor):
        tensor.fill_(value)
    else:
        tensor.fill(value)
