"""Head dims all over the tile table: no kernel spills a register, and each computes attention."""

import pytest

from hopwell.kernels import ForwardFacts
from hopwell.kernels.tiles import FORWARD, forward_tiles

from .built import build, check_registers
from .test_fwd_sm90 import case, check, run

# The largest and the smallest that each row serves, columns that no wide swizzle divides, and the
# most unlike of q's and v's.
DIMS = [
    *((row.head_dim, row.head_dim_v, "bfloat16") for row in FORWARD if not row.short),
    (8, 8, "float16"),
    (56, 24, "bfloat16"),
    (72, 72, "float16"),
    (40, 72, "bfloat16"),
    (64, 40, "float16"),
    (96, 8, "bfloat16"),
    (104, 104, "bfloat16"),
    (8, 104, "float16"),
    (120, 120, "float16"),
    (8, 128, "bfloat16"),
    (136, 8, "float16"),
    (168, 168, "float16"),
    (8, 136, "bfloat16"),
    (200, 200, "bfloat16"),
    (8, 256, "float16"),
    (256, 8, "bfloat16"),
]


SHORT = [
    *((row.head_dim, row.head_dim_v, "bfloat16") for row in FORWARD if row.short),
    (8, 8, "float16"),
    (56, 24, "bfloat16"),
    (8, 64, "float16"),
    (64, 8, "bfloat16"),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("head_dim", "head_dim_v", "dtype"), DIMS)
def test_no_spill_and_right(head_dim: int, head_dim_v: int, dtype: str, causal: bool) -> None:
    check_kernel(ForwardFacts(dtype, head_dim, head_dim_v, causal))


@pytest.mark.parametrize(("head_dim", "head_dim_v", "dtype"), SHORT)
def test_no_spill_and_right_for_short_queries(head_dim: int, head_dim_v: int, dtype: str) -> None:
    check_kernel(ForwardFacts(dtype, head_dim, head_dim_v, causal=True, short=True))


def check_kernel(facts: ForwardFacts) -> None:
    compiled = build(facts)
    tiles = forward_tiles("sm_90a", facts.head_dim, facts.head_dim_v, facts.short)
    assert compiled.kernel.tiles == tiles and tiles.short == facts.short
    check_registers(compiled)
    # Two tiles of Q and up to five of K and V, ragged; causal: rows with nothing to attend.
    for len_q, len_kv, order in ((200, 333, "eager"), (270, 75, "random")):
        c = case(facts, len_q, len_kv, heads=(2, 1))
        run(facts, c, order=order, seed=len_q)
        check(facts, c)
