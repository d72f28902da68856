"""What is measured: presets of problems, as data, and the FLOPs of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

TOKENS = 16384  # of a batch
HIDDEN = 2048  # heads * head_dim


@dataclass(frozen=True)
class Cell:
    """One problem, and one row of a table: self-attention of one length."""

    batch: int
    length: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    def __str__(self) -> str:
        heads, dims = _pair(self.heads, self.heads_kv), _pair(self.head_dim, self.head_dim_v)
        mask = "causal" if self.causal else "full"
        return f"{self.batch} x {self.length} x {heads} x {dims} {mask}"

    @property
    def flops(self) -> float:
        """Of both products, 2 for a multiply-add; a causal mask leaves half."""
        products = 2 * self.length**2 * (self.head_dim + self.head_dim_v)
        return self.batch * self.heads * products / (2 if self.causal else 1)

    @property
    def backward_flops(self) -> float:
        """Of the five products of backward, one of which repeats forward's, counted as 2.5 times
        forward whatever the head dims: what others count."""
        return 2.5 * self.flops

    def inputs(
        self, device: str = "cuda", *, outliers: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v, always the same for a cell.

        Args:
            device: where.
            outliers: scale 1 entry in 1000, at random, by 10.
            dtype: fp16 or bf16.

        Returns:
            (batch, length, heads or heads_kv, head_dim or head_dim_v) from N(0, 1).
        """
        random = torch.Generator(device).manual_seed(0)

        def normal(heads: int, head_dim: int) -> torch.Tensor:
            shape = (self.batch, self.length, heads, head_dim)
            x = torch.randn(shape, generator=random, device=device)
            if outliers:
                x[torch.rand(shape, generator=random, device=device) < 1e-3] *= 10
            return x.to(dtype)

        return (
            normal(self.heads, self.head_dim),
            normal(self.heads_kv, self.head_dim),
            normal(self.heads_kv, self.head_dim_v),
        )


def _pair(of_q: int, of_kv: int) -> str:
    return f"{of_q}" if of_q == of_kv else f"{of_q}/{of_kv}"


def of_tokens(length: int, heads: int, head_dim: int, head_dim_v: int, causal: bool) -> Cell:
    """As many sequences of that length as 16,384 tokens are."""
    return Cell(TOKENS // length, length, heads, heads, head_dim, head_dim_v, causal)


PRESETS: dict[str, tuple[Cell, ...]] = {
    "grid": tuple(
        of_tokens(length, HIDDEN // dim, dim, dim, causal)
        for dim, length, causal in product((64, 128, 256), (1024, 4096, 16384), (False, True))
    ),
    "models": (
        Cell(1, 8192, 32, 8, 128, 128, True),
        Cell(2, 4096, 64, 8, 128, 128, True),
        Cell(8, 2048, 32, 8, 128, 128, True),
        Cell(1, 32768, 32, 8, 128, 128, True),
        Cell(1, 4680, 24, 24, 128, 128, False),
        Cell(16, 512, 16, 16, 64, 64, False),
    ),
    "dims": tuple(
        of_tokens(4096, 16, *dims, causal)
        for dims, causal in product(((96, 96), (192, 128), (80, 80)), (False, True))
    ),
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
