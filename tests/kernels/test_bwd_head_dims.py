"""Hopper's backward for head dims of every kind, and what the compiler made of each row."""

import re
from typing import Any

import pytest

from hopwell.kernels import BackwardFacts
from hopwell.kernels.tiles import BACKWARD

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
    """One kernel each: causal in fp16 and with a gradient of LSE, or full in bf16."""
    dims, causal = OTHERS[index], index % 2 == 0
    dtype = "float16" if causal else "bfloat16"
    facts = BackwardFacts(dtype, *dims, causal, dlse=causal)
    for len_q, len_kv, heads, batch in [(200, 333, (4, 2), 1), (257, 130, (2, 1), 1)]:
        check(facts, case(facts, len_q, len_kv, heads, batch))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("row", BACKWARD, ids=lambda row: f"{row.head_dim}-{row.head_dim_v}")
def test_no_register_is_spilled_and_no_product_serialised(row: Any, causal: bool) -> None:
    facts = BackwardFacts("bfloat16", row.head_dim, row.head_dim_v, causal)
    _, resources, ptx = build(facts)
    assert len(resources) == 3
    for name, used in resources.items():
        assert used.local_bytes == used.local_instructions == 0, name
    assert ".local" not in ptx
    # Nor are products serialised, as they are when registers are short, or for worse reasons.
    waits = sum(used.product_waits for used in resources.values())
    assert waits == len(re.findall(r"wgmma\.wait_group\.", ptx)) == 12
