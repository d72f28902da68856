"""Kernels proven on hardware that we did not write run right, and the checker is silent.

FlashAttention-4's own sm_90 kernels, forward and backward, pre- and postprocessing included.
"""

import pytest
import torch

from hopwell import emulator
from tests import reference

peer = pytest.importorskip("tests.emulator.fa4", reason="the peer is not installed")

# Errors of bf16 inputs near 1: a few units in the last place of the largest gradients.
FORWARD, BACKWARD = 0.02, 0.04


@pytest.mark.parametrize(
    ("head_dim", "causal", "heads", "heads_kv"),
    [(64, False, 2, 2), (64, True, 4, 2), (128, True, 1, 1), (128, False, 2, 1)],
)
@pytest.mark.parametrize("order", ["eager", "random"])
def test_flash_attention_4(
    head_dim: int, causal: bool, heads: int, heads_kv: int, order: str
) -> None:
    torch.manual_seed(head_dim)
    shapes = [(heads, 200), (heads_kv, 200), (heads_kv, 200), (heads, 200)]
    q, k, v, dout = (
        torch.randn(1, length, h, head_dim, dtype=torch.bfloat16) for h, length in shapes
    )
    with emulator.session(emulator.Options(order=order)):  # a finding would raise
        out, lse = peer.fa4_forward(q, k, v, causal)
        gradients = peer.fa4_backward(dout, q, k, v, out, lse, causal)
    exact = reference.attention(q, k, v, causal=causal)
    assert (out.double() - exact.out).abs().max() < FORWARD
    assert (lse.double() - exact.lse).abs().max() < 1e-5
    exact_gradients = reference.gradients(dout, q, k, v, causal=causal)
    for name, ours in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert (ours.double() - getattr(exact_gradients, name)).abs().max() < BACKWARD, name
