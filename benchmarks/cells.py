"""What is measured: presets of problems, as data, and the FLOPs of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, product

import torch

TOKENS = 16384  # of a batch
HIDDEN = 2048  # heads * head_dim
BYTES = 2  # of an element: bf16

FORWARD, BACKWARD = "fwd", "bwd"
PASSES = {FORWARD: "forward", BACKWARD: "backward"}
FLOP_CONVENTION = (
    "FLOPs: 2 a multiply-add, in the two products of forward; backward counts 2.5 times forward; "
    "a causal mask leaves half of either"
)


@dataclass(frozen=True)
class Cell:
    """One problem, and one row of a table: self-attention of one length, or `queries` that see all
    of its keys."""

    batch: int
    length: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    queries: int | None = None  # of a sequence, without a mask; None: as many as keys

    @property
    def len_q(self) -> int:
        """Queries of a sequence."""
        return self.length if self.queries is None else self.queries

    def __str__(self) -> str:
        heads, dims = _pair(self.heads, self.heads_kv), _pair(self.head_dim, self.head_dim_v)
        mask = "causal" if self.causal else "full"
        length = self.length if self.queries is None else f"{self.queries}/{self.length}"
        return f"{self.batch} x {length} x {heads} x {dims} {mask}"

    def flops(self, which: str = FORWARD) -> float:
        """Of a pass, by `FLOP_CONVENTION`.

        Backward has five products, one of which repeats forward's, and counts as 2.5 times forward
        whatever the head dims: what others count.
        """
        products = 2 * self.len_q * self.length * (self.head_dim + self.head_dim_v)
        forward = self.batch * self.heads * products / (2 if self.causal else 1)
        return 2.5 * forward if which == BACKWARD else forward

    def bytes(self, which: str = FORWARD) -> int:
        """Of the tensors that a pass must read and write: q, k, v, out, and for backward those of
        their gradients."""
        rows = self.heads * self.len_q + self.heads_kv * self.length
        forward = BYTES * self.batch * rows * (self.head_dim + self.head_dim_v)
        return 2 * forward if which == BACKWARD else forward

    def inputs(
        self, device: str = "cuda", *, outliers: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v, always the same for a cell.

        Args:
            device: where.
            outliers: scale 1 entry in 1000, at random, by 10.
            dtype: fp16 or bf16.

        Returns:
            (batch, len_q or length, heads or heads_kv, head_dim or head_dim_v) from N(0, 1).
        """
        random = torch.Generator(device).manual_seed(0)

        def normal(length: int, heads: int, head_dim: int) -> torch.Tensor:
            shape = (self.batch, length, heads, head_dim)
            x = torch.randn(shape, generator=random, device=device)
            if outliers:
                x[torch.rand(shape, generator=random, device=device) < 1e-3] *= 10
            return x.to(dtype)

        return (
            normal(self.len_q, self.heads, self.head_dim),
            normal(self.length, self.heads_kv, self.head_dim),
            normal(self.length, self.heads_kv, self.head_dim_v),
        )


def _pair(of_q: int, of_kv: int) -> str:
    return f"{of_q}" if of_q == of_kv else f"{of_q}/{of_kv}"


def of_tokens(length: int, heads: int, head_dim: int, head_dim_v: int, causal: bool) -> Cell:
    """As many sequences of that length as 16,384 tokens are."""
    return Cell(TOKENS // length, length, heads, heads, head_dim, head_dim_v, causal)


# Shapes that models train and prefill with; causal where the model is.
MODELS: dict[str, tuple[Cell, ...]] = {
    # The Llama 3 Herd of Models, arXiv 2407.21783, table 3; trained at 8k, later at up to 128k.
    "llama3-8b": (
        Cell(8, 2048, 32, 8, 128, 128, True),
        Cell(1, 8192, 32, 8, 128, 128, True),
        Cell(1, 32768, 32, 8, 128, 128, True),
    ),
    "llama3-70b": (
        Cell(2, 4096, 64, 8, 128, 128, True),
        Cell(1, 8192, 64, 8, 128, 128, True),
    ),
    # DeepSeek-V3, arXiv 2412.19437, section 4.2; MLA with its latents multiplied out, as training
    # and prefill have it: 128 + 64 rotary of q and k, 128 of v. Trained at 4k, then at 32k.
    "dsv3": (
        Cell(1, 4096, 128, 128, 192, 128, True),
        Cell(4, 4096, 128, 128, 192, 128, True),
        Cell(1, 32768, 128, 128, 192, 128, True),
    ),
    # Qwen3, arXiv 2505.09388, tables 1 and 2: 32B, 30B-A3B, 235B-A22B. Trained at 4k, then at 32k.
    "qwen3": (
        Cell(4, 4096, 64, 8, 128, 128, True),
        Cell(4, 4096, 32, 4, 128, 128, True),
        Cell(1, 32768, 64, 4, 128, 128, True),
    ),
    # FLUX.1 at 1024 x 1024 pixels: 64 * 64 of the picture and 512 of the text. CogVideoX-5B
    # (arXiv 2408.06072), 13 * 30 * 45 and 226, twice for guidance. Wan2.1 1.3B (arXiv 2503.20314),
    # 81 frames at 480p: 21 * 30 * 52.
    "dit": (
        Cell(1, 4608, 24, 24, 128, 128, False),
        Cell(2, 17776, 48, 48, 64, 64, False),
        Cell(1, 32760, 12, 12, 128, 128, False),
    ),
    # CLIP ViT-L/14 (arXiv 2103.00020) at 336 pixels: 24 * 24 and the class. SigLIP 2 L/16
    # (arXiv 2502.14786) at 512: 32 * 32.
    "vit": (
        Cell(64, 577, 16, 16, 64, 64, False),
        Cell(32, 1024, 16, 16, 64, 64, False),
    ),
}

# One token more for each of many sequences: Llama 3 8B and 70B. Bound by reading K and V, for which
# a kernel with one CTA a tile of queries has too few CTAs at small batches.
DECODE = tuple(
    Cell(batch, length, heads, 8, 128, 128, causal=False, queries=1)
    for heads, batch, length in ((32, 64, 4096), (32, 8, 32768), (64, 64, 4096), (64, 8, 32768))
)

PRESETS: dict[str, tuple[Cell, ...]] = {
    # What the papers on FlashAttention-2, 3 and 4 draw.
    "paper": tuple(
        of_tokens(length, HIDDEN // dim, dim, dim, causal)
        for dim, length, causal in product((64, 128, 256), (1024, 4096, 16384), (False, True))
    ),
    "models": tuple(chain.from_iterable(MODELS.values())),
    "dims": tuple(
        of_tokens(4096, 16, *dims, causal)
        for dims, causal in product(((96, 96), (192, 128), (80, 80)), (False, True))
    ),
    "decode": DECODE,
    **MODELS,
}


def select(preset: str, lengths: tuple[int, ...], head_dims: tuple[int, ...]) -> tuple[Cell, ...]:
    """Cells of a preset, of those lengths and head dims; of all of them where none is given.

    Args:
        preset: a key of `PRESETS`.
        lengths: `Cell.length` to keep.
        head_dims: `Cell.head_dim` to keep.
    """
    return tuple(
        cell
        for cell in PRESETS[preset]
        if (not lengths or cell.length in lengths) and (not head_dims or cell.head_dim in head_dims)
    )
