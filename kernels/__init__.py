"""Kernels, and the one place where the interface asks for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..layouts.hardware import UMMA_ROWS
from .tiles import (
    BLACKWELL,
    BackwardTiles,
    Tiles,
    backward_tiles,
    blackwell_tiles,
    forward_tiles,
)
from .tiles_bwd_sm100 import BlackwellBackwardTiles, blackwell_backward_tiles


@dataclass(frozen=True)
class ForwardFacts:
    """Everything that is fixed when a forward kernel is compiled; all else is run-time.

    Lengths, batch, heads, strides, the GQA group and the scale's magnitude never recompile.
    """

    dtype: str  # "float16" or "bfloat16": q, k, v and o alike
    head_dim: int  # of q and k
    head_dim_v: int  # of v and o
    causal: bool  # a right bound on the keys exists (bottom-right aligned)
    negative_scale: bool = False  # scale < 0: the largest score is at the smallest product
    short: bool = False  # causal, at most SHORT_LEN_Q queries, and a row of tiles for such


@dataclass(frozen=True)
class BlackwellFacts:
    """The same of a forward kernel on tensor memory."""

    dtype: str  # "float16" or "bfloat16": q, k, v and o alike
    head_dim: int  # of q and k
    head_dim_v: int  # of v and o
    causal: bool  # a right bound on the keys exists (bottom-right aligned)
    negative_scale: bool = False  # scale < 0: the largest score is at the smallest product
    packed_heads: int = 1  # of q, that share keys, in one tile; divides the GQA group
    pair: bool = False  # by two CTAs that share K and V; without a mask, where tiles has such a row


def packed_heads(gqa_group: int) -> int:
    """Heads of q that share a tile on Blackwell: the whole group, or of a larger one than a tile
    has rows the largest part that divides it."""
    rows = range(1, min(max(gqa_group, 1), UMMA_ROWS) + 1)
    return max(n for n in rows if gqa_group % n == 0)


def forward_kernel(
    arch: str, facts: ForwardFacts | BlackwellFacts, tiles: Tiles | None = None
) -> tuple[Callable[..., None], tuple[Any, ...], str]:
    """What `cute.compile` needs to build the forward kernel of these facts.

    Args:
        arch: target, such as "sm_90a".
        facts: the compile-time facts; for sm_100a and sm_103a `BlackwellFacts`.
        tiles: in place of the row of the table, for these head dims; sm_90a alone.

    Returns:
        (function, arguments, options) for `cute.compile(function, *arguments, options=options)`.
        The compiled object is called as `(q, k, v, o, lse, scale, counter)`, on the current stream
        of the TVM-FFI environment:
            q: (batch, len_q, heads_q, head_dim), o: (batch, len_q, heads_q, head_dim_v),
            k: (batch, len_kv, heads_kv, head_dim), v: (batch, len_kv, heads_kv, head_dim_v),
                16-byte aligned, last stride 1, the others any multiple of 8 elements, 0 too;
            lse: (batch, heads_q, len_q), float32, contiguous;
            scale: float, of the sign that the facts say; 0 counts as positive;
            counter: (1), int32, 0, and 0 again when the kernel ends: two launches that may run at
                the same time need two.
        No extent may be 0.

    Raises:
        NotImplementedError: no kernel for `arch`.
        LookupError, ValueError: no tiles for these head dims.
    """
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    if isinstance(facts, BlackwellFacts):
        from .fwd_sm100 import FwdSm100

        row = blackwell_tiles(arch, facts.head_dim, facts.head_dim_v, facts.pair)
        blackwell = FwdSm100(facts, row)
        return blackwell, blackwell.fake_arguments(), options
    if arch != "sm_90a":
        raise NotImplementedError(f"no forward kernel for {arch}; there is one for sm_90a")
    # Imported here: the compiler takes a second to import, and the facts alone need none of it.
    from .fwd_sm90 import FwdSm90

    hopper = tiles or forward_tiles(arch, facts.head_dim, facts.head_dim_v, facts.short)
    kernel = FwdSm90(facts, hopper)
    return kernel, kernel.fake_arguments(), options


def forward_function(
    arch: str, facts: ForwardFacts | BlackwellFacts, tiles: Tiles | None = None
) -> tuple[Callable[..., None], tuple[Any, ...], str]:
    """`forward_kernel` for tensors in either layout.

    Returns:
        As `forward_kernel`; the compiled object is called as `(q, k, v, o, lse, scale,
        counter, heads_first)`: with `heads_first` q, k, v and o are (batch, heads, len, head_dim).
        Before it launches it refuses, with TypeError or ValueError, what the kernel cannot run
        with, except extents of 0, heads_q that are no multiple of heads_kv, an o with several
        elements at one address, and an lse of other extents than q's.

    Raises:
        NotImplementedError, LookupError, ValueError: as `forward_kernel`.
    """
    kernel, arguments, options = forward_kernel(arch, facts, tiles)
    from .either_layout import EitherLayout

    function = EitherLayout(kernel)
    return function, function.fake_arguments(arguments), options


@dataclass(frozen=True)
class BackwardFacts:
    """Everything that is fixed when a backward function is compiled; all else is run-time."""

    dtype: str  # "float16" or "bfloat16": q, k, v, o and the gradients alike
    head_dim: int  # of q and k
    head_dim_v: int  # of v and o
    causal: bool  # a right bound on the keys exists (bottom-right aligned)
    deterministic: bool = False  # the sums of dq are added up in one order
    dlse: bool = False  # a gradient of lse comes in


def backward_function(
    arch: str, facts: BackwardFacts, tiles: BackwardTiles | BlackwellBackwardTiles | None = None
) -> tuple[Callable[..., None], tuple[Any, ...], str]:
    """What `cute.compile` needs to build backward: one function that launches its three kernels.

    Args:
        arch: target, such as "sm_90a".
        facts: the compile-time facts.
        tiles: in place of the row of the table, for these head dims; the workspace is then of
            `tiles.workspace_floats` elements.

    Returns:
        (function, arguments, options) for `cute.compile(function, *arguments, options=options)`.
        The compiled object is called as `(dout, q, k, v, out, lse, [dlse,] dq, dk, dv, workspace,
        scale, heads_first, sms)`, on the current stream of the TVM-FFI environment:
            dout, q, k, v, out, dq, dk, dv: (batch, len, heads, head_dim), or with `heads_first`
                (batch, heads, len, head_dim); 16-byte aligned, last stride 1, the others any
                multiple of 8 elements, of inputs 0 too;
            lse: (batch, heads_q, len_q), float32, contiguous, as forward returns it; -inf marks a
                row that attends nothing;
            dlse: as lse, any strides; there if and only if the facts say so;
            workspace: 1-D, float32, 16-byte aligned, of `backward_workspace` elements or more;
                neither its content before nor after matters;
            scale: float, of any sign;
            sms: the SMs that a launch can have, or fewer. With more than there are, a deterministic
                function may wait for ever.
        No extent may be 0.

    Raises:
        NotImplementedError: no kernels for `arch`.
        LookupError, ValueError: no tiles for these head dims.
    """
    from .backward import Backward

    function = Backward(facts, tiles or _backward_tiles(arch, facts))
    return function, function.fake_arguments(), f"--enable-tvm-ffi --gpu-arch {arch}"


def _backward_tiles(arch: str, facts: BackwardFacts) -> BackwardTiles | BlackwellBackwardTiles:
    if arch in BLACKWELL:
        return blackwell_backward_tiles(arch, facts.head_dim, facts.head_dim_v)
    if arch != "sm_90a":
        raise NotImplementedError(f"no backward kernels for {arch}")
    return backward_tiles(arch, facts.head_dim, facts.head_dim_v)


def backward_workspace(
    arch: str, facts: BackwardFacts, batch: int, heads_q: int, len_q: int
) -> int:
    """Elements of float32 that the function of these facts needs as its workspace."""
    tiles = _backward_tiles(arch, facts)
    return tiles.workspace_floats(batch, heads_q, len_q, facts.deterministic)
