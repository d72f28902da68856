"""Hopper's backward for head dims of every kind, and what the compiler made of each row."""

import re

import pytest

from hopwell.kernels import BackwardFacts
from hopwell.kernels.tiles import BACKWARD, BackwardTiles, backward_tiles

from .backward import build, case, check

OTHERS = [  # (head_dim, head_dim_v): both splits, every kind of padding, and the row of each table
    (8, 8),
    (40, 40),
    (64, 128),
    (80, 80),
    (128, 96),
    (192, 128),
    (136, 136),
    (8, 256),
    (256, 256),
]


@pytest.mark.parametrize("index", range(len(OTHERS)), ids=[f"{d}-{dv}" for d, dv in OTHERS])
def test_head_dims(index: int) -> None:
    """One kernel each: causal in fp16 and with a gradient of LSE, or full in bf16.

    No length is a multiple of the tile's.
    """
    dims, causal = OTHERS[index], index % 2 == 0
    dtype = "float16" if causal else "bfloat16"
    facts = BackwardFacts(dtype, *dims, causal, dlse=causal)
    for len_q, len_kv, heads, batch in [(200, 333, (4, 2), 1), (257, 130, (2, 1), 1)]:
        check(facts, case(facts, len_q, len_kv, heads, batch))
    check_registers(facts)


def check_registers(facts: BackwardFacts) -> None:
    """Nothing is spilled, and no product serialised."""
    _, resources, ptx, _ = build(facts)
    assert len(resources) == 3
    for name, used in resources.items():
        assert used.local_bytes == used.local_instructions == 0, name
    assert ".local" not in ptx
    tiles = backward_tiles("sm_90a", facts.head_dim, facts.head_dim_v)
    # One before dK and dV are stored, one for each block of dQ, and for a tile, with a mask and
    # without: one for S and dP, and one where the operands of dK and dV are registers.
    expected = 1 + tiles.dq_blocks + 2 * (2 if tiles.split == "keys" else 1)
    # More, when registers are short, or for worse reasons.
    waits = sum(used.product_waits for used in resources.values())
    assert waits == len(re.findall(r"wgmma\.wait_group\.", ptx)) == expected


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("row", BACKWARD, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_no_register_is_spilled_and_no_product_serialised(row: BackwardTiles, causal: bool) -> None:
    check_registers(BackwardFacts("bfloat16", row.head_dim, row.head_dim_v, causal))
