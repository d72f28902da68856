"""Models of transformers with our attention: numbers beside torch's, and everything refused."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hopwell.transformers
from hopwell.interface import checks
from hopwell.interface.transformers import Mask, Run, attend, mask

from .. import reference
from . import models

Tensor = torch.Tensor
transformers = models.transformers()
masking_utils = transformers.masking_utils
NAME = "hopwell-test"


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hopwell.transformers.register(NAME)


@pytest.fixture
def emulation() -> Iterator[None]:
    with hopwell.emulate("sm_90a"):
        yield


@pytest.fixture(scope="module")
def llama() -> Any:
    return models.llama()


@pytest.fixture(scope="module")
def bert() -> Any:
    return models.bert()


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_logits_and_gradients(
    kind: str, padding: str, emulation: None, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    tokens, mask = models.batch(models.PADDING[padding])
    given = None if padding == "none" else mask
    expected = models.both_passes(model, "sdpa", tokens, given)
    found = models.both_passes(model, NAME, tokens, given)
    assert not models.worst(found, expected)


def test_a_mask_of_ones_is_none(llama: Any, emulation: None) -> None:
    """The bits are those of the pass without one."""
    llama.set_attn_implementation(NAME)
    tokens, mask = models.batch(models.PADDING["none"])
    with torch.no_grad():
        some = llama(input_ids=tokens, attention_mask=mask).logits
        assert torch.equal(some, llama(input_ids=tokens).logits)


@pytest.mark.parametrize("cache", [None, "static"])
def test_tokens_that_follow_from_a_cache(cache: Any, llama: Any, emulation: None) -> None:
    """Of sequences with padding before them; a static cache has keys that are not there yet."""
    tokens, mask = models.batch(models.PADDING["left"])
    logits = [models.generated(llama, name, tokens, mask, cache) for name in ("sdpa", NAME)]
    assert models.error(logits[1], logits[0]) <= models.LIMIT


def test_a_part_of_the_prompt_at_a_time(llama: Any, emulation: None) -> None:
    """Queries that continue keys of a cache are aligned at the last."""
    tokens, _ = models.batch(models.PADDING["none"])
    logits = []
    for implementation in ("sdpa", NAME):
        llama.set_attn_implementation(implementation)
        with torch.no_grad():
            kept = llama(input_ids=tokens[:, :12], use_cache=True)
            name = "cache" if hasattr(kept, "cache") else "past_key_values"
            logits.append(llama(input_ids=tokens[:, 12:], **{name: getattr(kept, name)}).logits)
    assert models.error(logits[1], logits[0]) <= models.LIMIT


# ---- masks ---------------------------------------------------------------------------------------


def seen(mask: Mask | None, causal: bool, len_q: int, len_kv: int, batch: int) -> Tensor:
    """(batch, len_q, len_kv): what `attend` lets a query see."""
    every = torch.zeros(batch, len_q, len_kv, dtype=torch.bool)
    assert mask is not None or not causal or len_q in (1, len_kv)
    runs = ((0, len_kv),) * batch if mask is None else mask.runs
    for row, (first, end) in zip(every, runs, strict=True):
        row[:, first:end] = reference.visible(len_q, max(end - first, 0), causal)
    return every


@pytest.mark.parametrize("causal", [False, True])
def test_masks_say_what_torchs_say(causal: bool) -> None:
    """Of every token that is no padding: whatever the lengths, the padding and the cache."""
    rules = masking_utils.bidirectional_mask_function, masking_utils.causal_mask_function
    draw = random.Random(int(causal))
    kept = 0
    for _ in range(300):
        batch, len_q, first_q, room = (
            draw.randint(a, b) for a, b in ((1, 3), (1, 6), (0, 4), (0, 4))
        )
        padded = torch.zeros(batch, first_q + len_q, dtype=torch.bool)
        for row in padded:
            start = draw.choice([0, draw.randint(0, len(row))])
            row[start : draw.choice([len(row), draw.randint(start, len(row))])] = True
        options: dict[str, Any] = {
            "batch_size": batch,
            "q_length": len_q,
            "kv_length": first_q + len_q + room,
            "q_offset": first_q,
            "mask_function": rules[causal],
            "attention_mask": draw.choice([padded, padded | True] if room else [padded, None]),
            "allow_is_causal_skip": causal,
            "allow_is_bidirectional_skip": not causal,
        }
        found = mask(**options)
        kept += found is not None
        dense = masking_utils.sdpa_mask(
            **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
        ours = seen(found, causal, len_q, options["kv_length"], batch)
        tokens = options["attention_mask"]
        real = torch.ones(batch, len_q) if tokens is None or not causal else tokens[:, first_q:]
        assert torch.equal(ours[real.bool()], dense[:, 0][real.bool()]), options
    assert 0 < kept < 300


def test_a_window_that_has_room_for_every_key_is_none() -> None:
    options: dict[str, Any] = {"batch_size": 1, "q_length": 8, "kv_length": 8, "local_size": 8}
    rule = masking_utils.sliding_window_causal_mask_function(8)
    assert mask(**options, mask_function=rule) is None
    rule = masking_utils.sliding_window_bidirectional_mask_function(8)
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert mask(**options, mask_function=rule, **skips) is None
    skips["allow_is_bidirectional_skip"] = False  # there is more to that rule
    with pytest.raises(NotImplementedError):
        mask(**options, mask_function=rule, **skips)


def test_a_mask_made_ahead_serves_its_own_rule_alone() -> None:
    made = Mask(True, 8, 8, (Run(2, 8),))
    options: dict[str, Any] = {"batch_size": 1, "q_length": 8, "kv_length": 8}
    causal, other = (
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
    )
    assert mask(**options, mask_function=causal, attention_mask=made) is made
    with pytest.raises(NotImplementedError, match=r"^a mask made for another rule, causal or"):
        mask(**options, mask_function=other, attention_mask=made)


def test_sequences_that_begin_and_end_alike_run_together(
    emulation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys of padding, and in one call if they are neighbours."""
    shapes: list[tuple[int, ...]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        shapes.append((q.shape[0], q.shape[1], k.shape[1]))
        return q

    monkeypatch.setattr("hopwell.interface.transformers.attention", attention)
    q, k = torch.randn(3, 2, 20, 64), torch.zeros(3, 1, 20, 64)
    given = Mask(True, 20, 20, (Run(5, 20), Run(5, 20), Run(0, 19)))
    out, _ = attend(torch.nn.Module(), q, k, k, given)
    assert shapes == [(2, 20, 15), (1, 20, 19)]
    assert torch.equal(out, q.transpose(1, 2))


# ---- refused -------------------------------------------------------------------------------------

SDPA = 'load the model with attn_implementation="sdpa"'
EAGER = 'load the model with attn_implementation="eager"'
ROWS = "pass one sequence a row, padded, with an attention_mask (batch, len)"
MASKS = (
    "the kernels take no mask or a causal one, and padding at the ends of a sequence, as an "
    f"attention_mask (batch, len); {SDPA}"
)
ONE = torch.ones(1, 1)

# Arguments of one layer's attention, of 4 queries and 4 keys.
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": (
        {"dropout": 0.1},
        f"dropout is 0.1; needs 0.0; set attention_dropout of the config to 0, or {SDPA}",
    ),
    "softcap": ({"softcap": 50.0}, f"softcap is 50.0; needs None; {EAGER}"),
    "s_aux": ({"s_aux": ONE}, f"s_aux is a Tensor; needs None; {EAGER}"),
    "sinks": ({"sinks": ONE}, f"sinks is a Tensor; needs None; {EAGER}"),
    "head_mask": ({"head_mask": ONE}, f"head_mask is a Tensor; needs None; {EAGER}"),
    "position_bias": ({"position_bias": ONE}, f"position_bias is a Tensor; needs None; {SDPA}"),
    "output_attentions": (
        {"output_attentions": True},
        f"output_attentions is True; needs None; {EAGER}",
    ),
    "indices": ({"indices": ONE}, f"indices is a Tensor; needs None; {SDPA}"),
    "block_indices": ({"block_indices": ONE}, f"block_indices is a Tensor; needs None; {SDPA}"),
    "block_table": ({"block_table": ONE}, f"block_table is a Tensor; needs None; {SDPA}"),
    "seq_idx": ({"seq_idx": ONE}, f"seq_idx is a Tensor; needs None; {ROWS}"),
    "cu_seq_lens_q": ({"cu_seq_lens_q": ONE}, f"cu_seq_lens_q is a Tensor; needs None; {ROWS}"),
    "cu_seq_lens_k": ({"cu_seq_lens_k": ONE}, f"cu_seq_lens_k is a Tensor; needs None; {ROWS}"),
    "max_length_q": ({"max_length_q": 4}, f"max_length_q is 4; needs None; {ROWS}"),
    "max_length_k": ({"max_length_k": 4}, f"max_length_k is 4; needs None; {ROWS}"),
    "sliding_window": (
        {"sliding_window": 3},
        f"sliding_window is 3, and there are 4 keys; {MASKS}",
    ),
    "a mask in 4D": (
        {"attention_mask": torch.ones(1, 1, 4, 4).bool()},
        f"attention_mask is a Tensor of shape (1, 1, 4, 4); {MASKS}",
    ),
    "a mask of another batch": (
        {"attention_mask": Mask(False, 4, 4, (Run(0, 4),) * 2)},
        "q is (1, 2, 4, 64) and k (1, 1, 4, 64), but the mask is for batch, len_q and len_kv "
        f"(2, 4, 4); {MASKS}",
    ),
    "causal, aligned who knows where": (
        {"key": torch.zeros(1, 1, 5, 64), "value": torch.zeros(1, 1, 5, 64), "is_causal": True},
        f"is_causal, without a mask, for 4 queries and 5 keys; {MASKS}",
    ),
    "packed": (
        {"position_ids": torch.tensor([[0, 1, 0, 1]])},
        f"position_ids do not follow one another: sequences packed in one row; {MASKS}",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_attention_refuses(case: str) -> None:
    arguments, text = ARGUMENTS[case]
    q, k = torch.zeros(1, 2, 4, 64), torch.zeros(1, 1, 4, 64)
    good = {"query": q, "key": k, "value": k, "attention_mask": None}
    with pytest.raises(NotImplementedError) as raised:
        attend(torch.nn.Module(), **{**good, **arguments})
    assert str(raised.value) == text


# Of one pass of a model, of 4 queries and 4 keys of a causal one.
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "window": (
        {"mask_function": masking_utils.sliding_window_causal_mask_function(3), "local_size": 3},
        f"a window or chunks of 3 tokens are asked for; {MASKS}",
    ),
    "own": (
        {"mask_function": lambda *_: True, "allow_is_causal_skip": False},
        f"the model asks for a mask of its own (sequences packed, a prefix, blocks); {MASKS}",
    ),
    "gaps": (
        {"attention_mask": torch.tensor([[True, False, False, True]])},
        f"attention_mask has 2 zeros between the ones of a sequence; {MASKS}",
    ),
    "rank": (
        {"attention_mask": torch.ones(1, 4, 4).bool()},
        f"attention_mask has shape (1, 4, 4); {MASKS}",
    ),
    "beyond": (
        {"q_offset": torch.tensor(1)},
        f"4 queries from position 1 go beyond 4 keys from 0; {MASKS}",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_masks_refuse(case: str) -> None:
    arguments, text = RULES[case]
    good = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    rule = {"mask_function": masking_utils.causal_mask_function}
    with pytest.raises(NotImplementedError) as raised:
        mask(**{**good, **rule, **arguments})
    assert str(raised.value) == text


def llama_call(arguments: dict[str, Any], **options: Any) -> None:
    model = models.llama(attn_implementation=NAME, **options)
    model(input_ids=models.batch(models.PADDING["none"])[0], **arguments)


def test_models_refuse() -> None:
    """By way of transformers itself: packed with a cache and without, masks in 4D, dropout."""
    packed = torch.arange(models.LENGTH // 2).repeat(2).expand(3, -1)
    for use_cache, said in ((True, "position_ids do not follow"), (False, "a mask of its own")):
        with pytest.raises(NotImplementedError, match=said):
            llama_call({"position_ids": packed, "use_cache": use_cache})
    with pytest.raises(NotImplementedError, match=r"attention_mask is a Tensor of shape \(3, 1, "):
        dense = torch.ones(3, 1, models.LENGTH, models.LENGTH, dtype=torch.bool)
        llama_call({"attention_mask": dense})
    with pytest.raises(NotImplementedError, match=r"^dropout is 0.1; needs 0.0;"):
        model = models.bert(attn_implementation=NAME).train()
        model(input_ids=models.batch(models.PADDING["none"])[0])


def test_a_sliding_window_is_refused_only_where_it_cuts(emulation: None) -> None:
    sizes: dict[str, Any] = {**models.SIZES, "num_key_value_heads": 2}
    tokens, _ = models.batch(models.PADDING["none"][:1])
    for window in (models.LENGTH - 1, models.LENGTH):
        config = transformers.MistralConfig(**sizes, sliding_window=window)
        model = models.made(transformers.MistralForCausalLM, config)
        model.set_attn_implementation(NAME)
        if window < models.LENGTH:
            with pytest.raises(NotImplementedError, match="a window or chunks of 19 tokens"):
                model(input_ids=tokens)
        else:
            assert model(input_ids=tokens).logits.isfinite().all()


def test_positions_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each layer: reading them waits for the GPU."""
    monkeypatch.setattr("hopwell.interface.transformers.attention", lambda q, *_, **__: q)
    looked = 0
    diff = Tensor.diff

    def counted(*arguments: Any, **options: Any) -> Tensor:
        nonlocal looked
        looked += 1
        return diff(*arguments, **options)

    monkeypatch.setattr(Tensor, "diff", counted)
    q, k = torch.zeros(1, 2, 4, 64), torch.zeros(1, 1, 4, 64)
    positions = torch.arange(4)[None]
    for _ in range(3):
        attend(torch.nn.Module(), q, k, k, None, position_ids=positions)
    assert looked == 1


# Looked at under names of their own, or without influence on attention.
OTHERS = {
    *("query", "key", "value", "attention_mask", "scaling", "is_causal", "sliding_window"),
    *("position_ids", "deterministic"),
    *("num_items_in_batch", "output_hidden_states", "output_router_logits"),
}


def test_every_argument_that_a_model_hands_to_its_attention_is_known() -> None:
    """In the source of every model of this transformers, and in what its passes may be given."""
    handed = set(transformers.utils.TransformersKwargs.__annotations__)
    folder = Path(transformers.__file__).parent / "models"
    call = re.compile(r"attention_interface\(\n( +)(\S.*\n(?:\1.*\n)*)")
    for file in folder.glob("*/modeling_*.py"):
        for indent, arguments in call.findall(file.read_text()):
            handed |= set(re.findall(rf"^(?:{indent})?(\w+)=", arguments, re.MULTILINE))
    assert len(handed) > 15
    assert handed <= OTHERS | set(checks.TRANSFORMERS)


def test_transformers_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = "hopwell.interface.transformers.version"
    for found, said in ((None, "not installed"), ("5.3.1", "5.3.1"), ("4.57.0", "4.57.0")):
        monkeypatch.setattr(installed, lambda _, found=found: found)
        with pytest.raises(ImportError) as raised:
            hopwell.transformers.register(NAME)
        assert str(raised.value) == (
            f"found transformers {said}; needs 5.4 or later; run `pip install 'transformers>=5.4'`"
        )
    for found in ("5.4.0", "6.0rc1"):
        monkeypatch.setattr(installed, lambda _, found=found: found)
        hopwell.transformers.register(NAME)
