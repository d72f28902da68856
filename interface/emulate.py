"""`with hopwell.emulate("sm_90a"):` CPU tensors run the compiled kernel on the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import checks, env

if TYPE_CHECKING:
    from ..emulator import Report
    from ..emulator.session import Session

_active: ContextVar[Emulation | None] = ContextVar("emulation", default=None)


@dataclass(frozen=True)
class Emulation:
    """The emulator in use; its report grows with every launch."""

    arch: str
    session: Session

    @property
    def sms(self) -> int:
        """Of the GPU that is emulated."""
        from ..emulator.loader import device_of

        return device_of(self.arch).sms

    @property
    def report(self) -> Report:
        """Findings and counters of every launch so far."""
        return self.session.report

    def launch(self, compiled: Callable[..., None], *args: Any, outputs: tuple[Any, ...]) -> None:
        """Run one compiled function on CPU tensors.

        Args:
            compiled: as `cute.compile` or `load_module` returns it.
            args: its arguments.
            outputs: those of the arguments whose every byte the launch must write.

        Raises:
            emulator.KernelFault: the checker found a fault in the kernel.
            NotImplementedError: the kernel uses an instruction the emulator does not know.
        """
        self.session.call(compiled, *args, outputs=outputs)


# The innermost `emulate` of this thread, or None. Each call asks, so no function is put around it.
active: Callable[[], Emulation | None] = _active.get


@contextlib.contextmanager
def emulate(
    arch: str | None = None,
    *,
    check: bool = True,
    counters: bool = False,
    order: Literal["eager", "deferred", "random"] = "eager",
    seed: int = 0,
    exact: bool = False,
    record: bool = False,
) -> Iterator[Emulation]:
    """Run attention on CPU tensors: compiled for `arch`, executed by the emulator, and checked.

    Args:
        arch: SM version, such as "sm_90a"; by default HOPWELL_ARCH, else "sm_90a".
        check: look for races, deadlocks, out-of-bounds accesses and unwritten outputs.
        counters: count bytes, FLOPs, bank conflicts and issued instructions.
        order: when asynchronous operations complete: at once, as late as allowed, or at random.
        seed: of the random order.
        exact: cut sums off on the tensor cores where the hardware does; slower.
        record: keep what every warp does in `report.recordings`, for `emulator.cost`.

    Yields:
        An `Emulation`, whose `report` has the findings and counters.

    Raises:
        ValueError: `arch` or `order` is not one there is.
        emulator.KernelFault: from a call inside, when the checker found a fault.
    """
    from .. import emulator

    chosen = checks.arch(arch or env.ARCH.value or checks.arches()[0])
    checks.choice("order", order, ("eager", "deferred", "random"))
    options = emulator.Options(
        check, counters, order, seed, exact=exact, strict=True, record=record
    )
    with emulator.session(options) as session:
        emulation = Emulation(chosen, session)
        token = _active.set(emulation)
        try:
            yield emulation
        finally:
            _active.reset(token)
