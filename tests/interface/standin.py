"""A kernel that compiles in a tenth of a second, for tests of what surrounds kernels: b = a * s."""

import time
from typing import Any

from hopwell.interface.compile import Spec


def spec(name: str = "float32", *, seconds: float = 0.0) -> Spec:
    """The stand-in for one dtype; `seconds` makes its compilation slow."""
    return Spec("scaled", "sm_90a", (("dtype", name),), lambda: _recipe(name, seconds))


def _recipe(name: str, seconds: float) -> tuple[Any, tuple[Any, ...], str]:
    # Imported here: processes that find the kernel compiled import no compiler.
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from .standin_kernel import launch

    time.sleep(seconds)
    dtype = {"float32": cutlass.Float32, "float16": cutlass.Float16}[name]
    length = cute.sym_int()
    a, b = (make_fake_compact_tensor(dtype, (length,)) for _ in "ab")
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    args = (a, b, cutlass.Float32(1.0), stream)
    return launch, args, "--enable-tvm-ffi --gpu-arch sm_90a"
