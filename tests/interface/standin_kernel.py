"""Device code of `standin`."""

import cutlass
import cutlass.cute as cute

THREADS = 128


@cute.kernel
def scaled(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(a):
        b[i] = (a[i] * s).to(b.element_type)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32, stream):
    blocks = cute.ceil_div(cute.size(a), THREADS)
    scaled(a, b, s).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def picked(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(256, cutlass.Float32)
    for i in cutlass.range(256, unroll_full=True):
        values[i] = a[thread + i] * s
    b[thread] = values[thread * 2 - thread % 5].to(b.element_type)


@cute.jit
def launch_with_a_stack(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32, stream):
    picked(a, b, s).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)
