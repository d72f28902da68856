"""Kernels proven on hardware that we did not write run right, and the checker is silent.

FlashAttention-4's own kernels, forward and backward, pre- and postprocessing included.
"""

import pytest
import torch

from hopwell import emulator
from tests import reference

peer = pytest.importorskip("tests.emulator.fa4", reason="the peer is not installed")

# Errors of bf16 inputs near 1: a few units in the last place of the largest gradients.
FORWARD, BACKWARD = 0.02, 0.04


def attend(
    arch: str, head_dim: int, causal: bool, heads: int, heads_kv: int, length: int, order: str
) -> list[emulator.Finding]:
    """Findings of a forward and a backward pass whose results are right."""
    torch.manual_seed(head_dim)
    shapes = [(heads, length), (heads_kv, length), (heads_kv, length), (heads, length)]
    q, k, v, dout = (torch.randn(1, n, h, head_dim, dtype=torch.bfloat16) for h, n in shapes)
    options = emulator.Options(order=order, raise_on_fault=False)
    with emulator.session(options) as session:
        out, lse = peer.fa4_forward(q, k, v, causal, arch)
        assert not session.report.findings, session.report.findings[0]
        gradients = peer.fa4_backward(dout, q, k, v, out, lse, causal, arch)
    exact = reference.attention(q, k, v, causal=causal)
    assert (out.double() - exact.out).abs().max() < FORWARD
    # On sm_100 some of the exponentials are polynomials, right to 9e-5.
    assert (lse.double() - exact.lse).abs().max() < (1e-5 if arch == "sm_90a" else 1e-4)
    exact_gradients = reference.gradients(dout, q, k, v, causal=causal)
    for name, ours in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert (ours.double() - getattr(exact_gradients, name)).abs().max() < BACKWARD, name
    return session.report.findings


@pytest.mark.parametrize(
    ("head_dim", "causal", "heads", "heads_kv"),
    [(64, False, 2, 2), (64, True, 4, 2), (128, True, 1, 1), (128, False, 2, 1)],
)
@pytest.mark.parametrize("order", ["eager", "random"])
def test_flash_attention_4(
    head_dim: int, causal: bool, heads: int, heads_kv: int, order: str
) -> None:
    found = attend("sm_90a", head_dim, causal, heads, heads_kv, 200, order)
    assert not found, found[0]


@pytest.mark.parametrize(
    ("arch", "head_dim", "causal", "heads", "heads_kv", "length"),
    [
        ("sm_100a", 64, True, 2, 1, 300),
        ("sm_100a", 64, False, 1, 1, 200),
        ("sm_100a", 128, True, 1, 1, 300),  # forward by one CTA, backward by a pair
        ("sm_100a", 128, False, 2, 1, 400),  # both by pairs
        ("sm_103a", 64, False, 1, 1, 200),  # ld.red
    ],
)
def test_flash_attention_4_on_blackwell(
    arch: str, head_dim: int, causal: bool, heads: int, heads_kv: int, length: int
) -> None:
    for order in ("eager", "deferred", "random"):
        found = attend(arch, head_dim, causal, heads, heads_kv, length, order)
        assert not found, (order, found[0])
