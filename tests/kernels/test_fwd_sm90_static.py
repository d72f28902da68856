"""What the compiler made of the Hopper forward kernel, from its PTX and cubin: nothing runs."""

import re
from dataclasses import replace

import pytest

from hopwell.kernels import ForwardFacts
from hopwell.kernels.tiles import forward_tiles

from .built import CAUSAL, build, check_registers

FACTS = [
    CAUSAL,
    replace(CAUSAL, causal=False),
    replace(CAUSAL, head_dim=64, head_dim_v=64),
    replace(CAUSAL, head_dim=64, head_dim_v=64, short=True),
    replace(CAUSAL, head_dim=64, head_dim_v=64, causal=False),
    replace(CAUSAL, head_dim=192),
    replace(CAUSAL, head_dim=256, head_dim_v=256),
    replace(CAUSAL, head_dim=256, head_dim_v=256, short=True),
    replace(CAUSAL, dtype="float16"),
    replace(CAUSAL, negative_scale=True),
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_no_register_is_spilled(facts: ForwardFacts) -> None:
    check_registers(build(facts))


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_the_tile_row_is_what_was_compiled(facts: ForwardFacts) -> None:
    compiled = build(facts)
    tiles = forward_tiles("sm_90a", facts.head_dim, facts.head_dim_v, facts.short)
    assert compiled.kernel.tiles == tiles
    assert f".reqntid {tiles.threads}" in compiled.ptx
    assert re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", compiled.ptx) == [
        ("dec", str(tiles.registers_load)),
        ("inc", str(tiles.registers_consume)),
    ]
    # Each mbarrier of the graph is initialised, once.
    assert compiled.count(r"mbarrier\.init\.") == compiled.kernel.graph.mbarriers


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_products_are_issued_in_groups_and_waited_for(facts: ForwardFacts) -> None:
    """The first S, then S with O in each loop (two under a mask), then the last O."""
    compiled = build(facts)
    loops = 2 if facts.causal else 1
    products_s, products_o = facts.head_dim // 16, compiled.kernel.tiles.tile_kv // 16
    kind = {"bfloat16": "bf16", "float16": "f16"}[facts.dtype]
    assert compiled.count(rf"wgmma\.mma_async\.\S+\.f32\.{kind}\.{kind}") == (1 + loops) * (
        products_s + products_o
    )
    assert compiled.count(r"wgmma\.fence\.") == 2 + 2 * loops
    assert compiled.count(r"wgmma\.commit_group\.") == 2 + 2 * loops
    # S is waited for while O is still in flight.
    assert compiled.count(r"wgmma\.wait_group\.sync\.aligned\s+1") == loops
    assert compiled.count(r"wgmma\.wait_group\.sync\.aligned\s+0") == 2 + loops


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_the_loop_over_whole_tiles_has_no_mask(facts: ForwardFacts) -> None:
    """From the wait for S to the wait for O, only the two pivots are selected."""
    in_softmax = re.findall(
        r"wgmma\.wait_group\.sync\.aligned\s+1(.*?)wgmma\.wait_group\.sync\.aligned\s+0",
        build(facts).ptx,
        re.DOTALL,
    )
    selects = sorted(len(re.findall(r"selp\.f32", text)) for text in in_softmax)
    tile_kv = build(facts).kernel.tiles.tile_kv
    assert selects == ([2, tile_kv // 2 + 2] if facts.causal else [2])


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_the_wait_for_o_comes_after_the_scale_of_o_is_known(facts: ForwardFacts) -> None:
    """Between the waits for S and for O stands a second release of K, which never happens.

    It needs the factor of the first row, and keeps its place between them.
    """
    compiled = build(facts)
    between = re.findall(
        r"wgmma\.wait_group\.sync\.aligned\s+1(.*?)wgmma\.wait_group\.sync\.aligned\s+0",
        compiled.ptx,
        re.DOTALL,
    )
    assert len(between) == (2 if facts.causal else 1)
    for text in between:
        _, released, after = re.split(r"mbarrier\.arrive\.shared\.b64", text)
        (factor,) = re.findall(r"setp\.geu\.f32\s+%p\d+, (%r\d+), 0f00000000", released)
        assert re.search(rf"ex2\.approx\.ftz\.f32\s+{factor},", released)
        assert "mbarrier.try_wait" in after  # is the next K there?


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_lanes_write_o_and_lse_and_read_nothing_of_global_memory(facts: ForwardFacts) -> None:
    """Of O 16 bytes at once, from registers: shared memory is written for the queue alone."""
    compiled = build(facts)
    ptx = compiled.ptx
    assert compiled.count(r"ld\.global") == 0
    assert compiled.count(r"st\.global\.v4\.b32") == 2 * -(-facts.head_dim_v // 32)
    stored = re.findall(r"st\.global\.b32\s+\[\S+\], (\S+);", ptx)
    assert len(stored) == 3 and stored.count("0") == 1  # the counter; LSE: two rows a thread
    assert compiled.count(r"\b(atom|red)\.") == compiled.count(r"atom\.global\.add\.u32") == 1
    assert compiled.count(r"st\.global") == compiled.count(r"st\.global\.(v4\.)?b32")
    assert compiled.count(r"stmatrix|cp\.async\.bulk\.tensor\.4d\.global") == 0


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_o_is_scaled_behind_a_vote_where_the_row_says_so(facts: ForwardFacts) -> None:
    compiled = build(facts)
    assert compiled.kernel.tiles.skip_unmoved == (facts.head_dim > 128 and not facts.short)
    loops = 2 if facts.causal else 1
    votes = loops if compiled.kernel.tiles.skip_unmoved else 0
    assert compiled.count(r"vote\.sync\.any") == votes
