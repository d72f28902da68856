"""A small transformer trained with our attention and with torch's: do the losses fall alike?

python -m hopwell.benchmarks.training --out docs/training.json
python -m hopwell.benchmarks.training --from docs/training.json --plot docs/training.svg

All contenders start from the same weights and see the same batches; they differ in attention alone.
One computes in float32, the others in bf16 (autocast; weights and optimizer stay in float32). The
gap of a contender is the root mean square, over the steps, of its loss less float32's. It cannot be
0 in bf16: torch's own kernels, which differ in nothing but the order of their sums, drift from
float32 and from each other as training amplifies rounding. So the yardstick is theirs: ours passes
if its gap is at most `ALLOWED` times the largest of theirs. That leaves room for the luck of a run,
and none for a mistake: one tile that a gradient leaves out makes the gap of a small model more than
ten times theirs (tests/test_training.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from ..interface import checks
from ..interface.autograd import attention
from ..interface.emulate import emulate
from .results import about
from .timing import OURS

EXACT = "math float32"
MATH = "math bf16"
ALLOWED = 2.0
LEARNING_RATE = 1e-3
LAG = 2  # tokens from one to the next that follows from it
NOISE = 0.2  # of the tokens follow from nothing
TURN = 100.0  # channels of a head turn by 1 to nearly 1 / 100 a token

# (q, k, v), bf16 or float32, as hopwell.attention takes them, to out: causal.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    layers: int
    width: int
    heads: int
    heads_kv: int
    length: int  # tokens of a sequence
    batch: int
    vocabulary: int


ON_GPU = Sizes(4, 512, 8, 4, length=1000, batch=8, vocabulary=64)  # head_dim 64; a ragged length
EMULATED = Sizes(1, 32, 2, 1, length=40, batch=2, vocabulary=16)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: (batch, length, heads, head_dim), turned in float32, in its own dtype."""
    half = x.shape[3] // 2
    speed = TURN ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * speed
    turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(*x.float().chunk(2, 3))
    return torch.cat([turned.real, turned.imag], 3).to(x.dtype)


class Block(nn.Module):
    """Attention with grouped queries, then two linear layers, each added to what came in."""

    def __init__(self, sizes: Sizes, attend: Attention) -> None:
        super().__init__()
        width, self.head_dim = sizes.width, sizes.width // sizes.heads
        self.heads = sizes.heads, sizes.heads_kv, sizes.heads_kv
        self.attend = attend
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        heads = self.qkv(self.before(x)).unflatten(2, (-1, self.head_dim))
        q, k, v = heads.split(self.heads, 2)
        x = x + self.out(self.attend(rotated(q), rotated(k), v).flatten(2))
        return x + self.down(gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Causal. The same seed gives the same weights everywhere."""

    def __init__(self, sizes: Sizes, attend: Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes, attend) for _ in range(sizes.layers)))
        self.after = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length), int64, to logits (batch, length, vocabulary)."""
        return self.head(self.after(self.blocks(self.tokens(tokens))))


def batches(sizes: Sizes, steps: int) -> Tensor:
    """(steps, batch, length + 1) tokens, int64, on the CPU, always the same.

    Most are a function of the token `LAG` before, which a model without attention does not see.
    """
    random = torch.Generator().manual_seed(1)
    rows, most = steps * sizes.batch, sizes.vocabulary
    next_one = torch.randperm(most, generator=random)
    tokens = torch.randint(most, (rows, sizes.length + 1), generator=random)
    noise = torch.rand(tokens.shape, generator=random) < NOISE
    for t in range(LAG, sizes.length + 1):
        tokens[:, t] = torch.where(noise[:, t], tokens[:, t], next_one[tokens[:, t - LAG]])
    return tokens.view(steps, sizes.batch, -1)


def train(sizes: Sizes, attend: Attention, data: Tensor, *, device: str, bf16: bool) -> list[float]:
    """Loss of each step, in nats a token, before the step is taken.

    Args:
        sizes: of the model.
        attend: its attention.
        data: as `batches` makes it.
        device: where.
        bf16: products in bf16, by autocast; else float32 throughout.
    """
    model = Transformer(sizes, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    losses = []
    for tokens in data.to(device):
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def of_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's causal attention by one of its kernels, (batch, len, heads, head_dim) as ours."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def contenders(device: str) -> dict[str, Attention]:
    """By name: float32 and the yardsticks, all of torch, and ours."""
    found: dict[str, Attention] = {
        EXACT: partial(of_torch, SDPBackend.MATH),
        MATH: partial(of_torch, SDPBackend.MATH),
        "flash bf16": partial(of_torch, SDPBackend.FLASH_ATTENTION),
    }
    if device == "cuda":
        found["cuDNN bf16"] = partial(of_torch, SDPBackend.CUDNN_ATTENTION)
    return {**found, OURS: partial(attention, causal=True)}


def curves(
    sizes: Sizes, steps: int, attentions: Mapping[str, Attention], device: str
) -> dict[str, list[float]]:
    """Losses by contender."""
    data = batches(sizes, steps)
    return {
        name: train(sizes, attend, data, device=device, bf16=name != EXACT)
        for name, attend in attentions.items()
    }


def gaps(losses: Mapping[str, list[float]]) -> dict[str, float]:
    """Root mean square of each bf16 contender's loss less float32's, nats a token."""
    exact = losses[EXACT]
    return {
        name: math.dist(curve, exact) / math.sqrt(len(exact))
        for name, curve in losses.items()
        if name != EXACT
    }


def within_noise(losses: Mapping[str, list[float]]) -> bool:
    """Whether our gap is at most `ALLOWED` times the largest of the yardsticks; NaN is not."""
    found = gaps(losses)
    return found.pop(OURS) <= ALLOWED * max(found.values())


def draw(found: Mapping[str, Any], file: Path) -> None:
    """The curves, and below them how far each is from float32's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = found["losses"]
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    for i, (name, curve) in enumerate(losses.items()):
        # Ours is wide and lies below, so that no curve hides another.
        width, order = (5, 1) if name == OURS else (1.2, 2)
        style = {"label": name, "color": f"C{i}", "linewidth": width, "zorder": order}
        above.plot(curve, **style)
        if name != EXACT:
            below.plot([a - b for a, b in zip(curve, losses[EXACT], strict=True)], **style)
    above.set(ylabel="loss, nats a token", title=f"{found['device']}, {found['date']}")
    below.set(ylabel=f"loss less that of {EXACT}", xlabel="step")
    above.legend()
    figure.savefig(file)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(path_type=Path), help="Write the losses there, as JSON.")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, exists=True),
    help="Take the losses of an earlier --out; train nothing.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curves there: a.svg.")
@click.option("--steps", default=50, show_default=True, type=click.IntRange(1))
@click.option("--commit", help="To note where git does not know it.")
@click.option("--emulated", is_flag=True, help="Without a GPU: a tiny model, on the emulator.")
def main(
    out: Path | None,
    source: Path | None,
    plot: Path | None,
    steps: int,
    commit: str | None,
    emulated: bool,
) -> None:
    """Train with our attention and torch's; status 1 if ours is off by more than bf16's noise."""
    found = json.loads(source.read_text()) if source else _found(steps, commit, emulated)
    losses = found["losses"]
    for name, gap in gaps(losses).items():
        largest = max(abs(a - b) for a, b in zip(losses[name], losses[EXACT], strict=True))
        click.echo(f"{name}: {gap:.2e} off {EXACT} (RMS), at most {largest:.2e}")
    first, last = losses[OURS][0], losses[OURS][-1]
    apart = max(abs(a - b) for a, b in zip(losses[OURS], losses[MATH], strict=True))
    click.echo(f"{OURS}: from {first:.4f} to {last:.4f}, at most {apart:.2e} from {MATH}")
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")
    if plot:
        draw(found, plot)
    sys.exit(not within_noise(losses))


def _found(steps: int, commit: str | None, emulated: bool) -> dict[str, Any]:
    """The losses, and what they depend on."""
    if not emulated:
        try:
            checks.gpu_to_measure()
        except RuntimeError as problem:
            raise click.ClickException(f"{problem}; or pass --emulated") from problem
    device, sizes = ("cpu", EMULATED) if emulated else ("cuda", ON_GPU)
    with emulate("sm_90a") if emulated else contextlib.nullcontext():
        losses = curves(sizes, steps, contenders(device), device)
    return {
        **about("emulator" if emulated else torch.cuda.get_device_name(), commit),
        "sizes": asdict(sizes),
        "learning_rate": LEARNING_RATE,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
