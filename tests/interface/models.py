"""Tiny models of transformers, with random weights, and what their attention is compared by."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
Tensor = torch.Tensor
VOCABULARY = 97
LENGTH = 20
LIMIT = 1e-2  # of logits and gradients in bf16, relative to those with torch's attention

# Tokens before and behind each sequence of a batch that are padding.
PADDING = {
    "none": ((0, 0), (0, 0), (0, 0)),
    "left": ((5, 0), (5, 0), (0, 0)),
    "right": ((0, 7), (0, 0), (0, 3)),
    "both": ((2, 3), (0, 4), (1, 0)),
}


def transformers() -> Any:
    """The package; tests are skipped where there is none.

    It looks for Hugging Face's package `kernels`, and from this folder would find ours.
    """
    path = sys.path
    sys.path = [folder for folder in path if Path(folder).resolve() != ROOT]
    try:
        found = pytest.importorskip("transformers")
        importlib.import_module("transformers.modeling_utils")
    finally:
        sys.path = path
    return found


def llama(**options: Any) -> Any:
    """Causal; two query heads for each of two key heads; head_dim 64."""
    package = transformers()
    config = package.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **options})
    return made(package.LlamaForCausalLM, config)


def bert(**options: Any) -> Any:
    """Every token sees every token; as many key heads as query heads; head_dim 64."""
    package = transformers()
    return made(package.BertForMaskedLM, package.BertConfig(**{**SIZES, **options}))


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def made(kind: Any, config: Any) -> Any:
    """A model in bf16 without dropout."""
    torch.manual_seed(0)
    return kind(config).to(torch.bfloat16).eval()


def batch(
    padding: tuple[tuple[int, int], ...], length: int = LENGTH, device: Any = "cpu"
) -> tuple[Tensor, Tensor]:
    """Tokens and their mask, 0 where there is padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (len(padding), length), generator=generator)
    mask = torch.ones_like(tokens)
    for row, (before, behind) in zip(mask, padding, strict=True):
        row[:before] = 0
        row[length - behind :] = 0
    return tokens.to(device), mask.to(device)


@dataclass(frozen=True)
class Pass:
    """What one pass of a model, forward and backward, gives."""

    logits: Tensor  # of tokens that are no padding
    gradients: dict[str, Tensor]


def both_passes(model: Any, implementation: str, tokens: Tensor, mask: Tensor | None) -> Pass:
    """Of a loss of the tokens that are no padding."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    # Nor of one behind padding: a causal model foretells it from the output of padding, which
    # differs from one attention to the other.
    labels = tokens.masked_fill(~(real & real.roll(1, dims=1)), -100)
    result = model(input_ids=tokens, attention_mask=mask, labels=labels)
    result.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Pass(result.logits.detach()[real], gradients)


def generated(
    model: Any, implementation: str, tokens: Tensor, mask: Tensor, cache: str | None = None
) -> Tensor:
    """Logits of the tokens that follow, by way of a cache of keys and values."""
    model.set_attn_implementation(implementation)
    result = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(result.logits)


class Array:
    """Of another library: all that torch may ask is DLPack, which has bf16 too."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self.tensor = tensor
        self.stream = stream  # on which it is written
        self.__dlpack_device__ = tensor.__dlpack_device__

    def __dlpack__(self, **options: Any) -> Any:
        with torch.cuda.stream(self.stream):
            return self.tensor.__dlpack__(**options)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of the norm."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def worst(found: Pass, expected: Pass) -> dict[str, float]:
    """The errors beyond the limit, by name.

    A gradient that is 0 but for rounding, as of a bias that a softmax takes no notice of, counts by
    the largest gradient there is.
    """
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.double().norm().item() for gradient in expected.gradients.values())
    errors = {"logits": error(found.logits, expected.logits)}
    for name, gradient in expected.gradients.items():
        difference = (found.gradients[name].double() - gradient.double()).norm().item()
        norm = gradient.double().norm().item()
        errors[name] = difference / (norm if norm > 1e-3 * largest else largest)
    return {name: found for name, found in errors.items() if not found <= LIMIT}
