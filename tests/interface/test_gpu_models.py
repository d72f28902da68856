"""Models of transformers, and tensors that are another library's, on a GPU; skipped without one."""

from typing import Any

import pytest
import torch

import hopwell
import hopwell.transformers
from hopwell import compat

from .. import reference
from . import models, test_gpu

DEVICE = test_gpu.DEVICE
pytestmark = test_gpu.pytestmark

KINDS = {"llama": models.llama, "bert": models.bert}
# Of head_dim 64 with 20 tokens, as on the emulator; and of 128 with several tiles of queries.
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "small": (models.LENGTH, {}),
    "large": (
        700,
        {"hidden_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 1024},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    models.transformers()
    hopwell.transformers.register()


@pytest.mark.parametrize("padding", models.PADDING)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients(kind: str, size: str, padding: str) -> None:
    length, options = SIZES[size]
    model = KINDS[kind](**options).to(DEVICE)
    tokens, mask = models.batch(models.PADDING[padding], length, DEVICE)
    given = None if padding == "none" else mask
    expected = models.both_passes(model, "sdpa", tokens, given)
    found = models.both_passes(model, "hopwell", tokens, given)
    assert not models.worst(found, expected)


def test_tokens_that_follow_from_a_cache() -> None:
    model = models.llama().to(DEVICE)
    tokens, mask = models.batch(models.PADDING["left"], models.LENGTH, DEVICE)
    logits = [models.generated(model, name, tokens, mask) for name in ("sdpa", "hopwell")]
    assert models.error(logits[1], logits[0]) <= models.LIMIT


def test_reading_where_padding_is_waits_once_for_all_layers() -> None:
    """And a mask of ones, or none, waits no more often in a model of more layers."""
    tokens, mask = models.batch(models.PADDING["both"], models.LENGTH, DEVICE)
    for given in (mask, torch.ones_like(mask), None):
        waits = []
        for layers in (1, 3):
            model = models.llama(num_hidden_layers=layers, attn_implementation="hopwell")
            model.to(DEVICE)
            with torch.no_grad():
                model(input_ids=tokens, attention_mask=given)  # compiles
                with torch.profiler.profile() as profile:
                    model(input_ids=tokens, attention_mask=given)
            waits.append(sum(e.name == "cudaStreamSynchronize" for e in profile.events()))
        assert waits[0] == waits[1] > 0


def test_flash_attn_func() -> None:
    torch.manual_seed(0)
    shapes = (2, 300, 4, 128), (2, 500, 2, 128), (2, 500, 2, 128)
    leaves = [torch.randn(s, device=DEVICE).half().requires_grad_() for s in shapes]
    dout = torch.randn(shapes[0], device=DEVICE).half()
    out = compat.flash_attn_func(*leaves, causal=True)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    with torch.no_grad():
        true = reference.gradients(dout, *leaves, causal=True)
        expected = [reference.attention(*leaves, causal=True).out, true.dq, true.dk, true.dv]
    assert all(models.error(a, b) <= 5e-4 for a, b in zip(found, expected, strict=True))


def test_arrays_of_other_libraries_wait_for_their_stream() -> None:
    """What another stream has yet to write is awaited, as DLPack asks of its producer."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64, device=DEVICE).half() for _ in range(3))
    expected = hopwell.forward(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = q * 1.0
    found: Any = hopwell.forward
    found = found(models.Array(late, stream), k, v)
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
