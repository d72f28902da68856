"""The comparison of training runs: that it can tell right from wrong, and that it runs."""

import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import cross_entropy

import hopwell
from hopwell.benchmarks import training
from hopwell.benchmarks.contenders import OURS
from hopwell.benchmarks.training import EXACT, MATH, Sizes

SMALL, STEPS = Sizes(2, 64, 2, 1, length=64, batch=16, vocabulary=16), 30
right = partial(training.of_torch, SDPBackend.MATH)


def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right, with sums in another order: of head_dim twice as large, the second half 0."""
    pad = partial(torch.nn.functional.pad, pad=(q.shape[3], 0))
    return right(pad(q) * math.sqrt(2), pad(k), v)


class Spoiled(torch.autograd.Function):
    """A tensor whose gradient is 0 in the last quarter of rows, as of a tile left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        gradient[:, gradient.shape[1] * 3 // 4 :] = 0
        return gradient


def spoiled(which: int, *tensors: Tensor) -> Tensor:
    return right(*(Spoiled.apply(t) if i == which else t for i, t in enumerate(tensors)))


def other_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(1.1 * q, k, v)


@cache
def torchs() -> dict[str, list[float]]:
    there = training.contenders("cpu")
    del there[OURS]
    return training.curves(SMALL, STEPS, there, "cpu")


def verdict(attend: training.Attention) -> bool:
    ours = training.curves(SMALL, STEPS, {OURS: attend}, "cpu")
    return training.within_noise({**torchs(), **ours})


def test_another_order_of_sums_is_noise_and_the_task_is_learned() -> None:
    assert verdict(doubled)
    without = math.log(SMALL.vocabulary)  # what a model reaches that looks at no other token
    assert all(curve[-1] < without - 0.1 for curve in torchs().values())
    assert min(training.gaps(torchs()).values()) > 0


@pytest.mark.parametrize("which", [0, 1, 2], ids=["dq", "dk", "dv"])
def test_a_lost_tile_of_a_gradient_is_none(which: int) -> None:
    assert not verdict(partial(spoiled, which))


def test_another_scale_is_none() -> None:
    assert not verdict(other_scale)


def test_gaps_by_hand() -> None:
    losses = {EXACT: [3.0, 2.0], MATH: [3.0, 2.2], OURS: [3.1, 1.9]}
    assert training.gaps(losses) == pytest.approx({MATH: math.sqrt(0.02), OURS: 0.1})
    assert training.within_noise(losses)
    assert training.within_noise({**losses, OURS: [3.2, 2.2]})
    assert not training.within_noise({**losses, OURS: [3.3, 2.3]})
    assert not training.within_noise({**losses, OURS: [3.0, math.nan]})


def command(*arguments: Any) -> Result:
    return CliRunner().invoke(training.main, [str(argument) for argument in arguments])


def test_it_runs_on_the_emulator(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    run = command("--emulated", "--steps", 3, "--commit", "abc", "--out", file)
    found = json.loads(file.read_text())
    # So few tokens and steps are no yardstick: either verdict may come, as long as it is told.
    assert run.exit_code == (not training.within_noise(found["losses"])), run.output
    assert training.gaps(found["losses"])[OURS] < 2e-3
    assert set(found["losses"]) == {EXACT, MATH, "flash bf16", OURS}
    assert all(len(curve) == 3 for curve in found["losses"].values())
    assert found["commit"] == "abc" and found["device"] == "emulator" and found["versions"]["torch"]
    assert run.output.count("off math float32") == 3


def test_curves_are_drawn_and_judged_again(tmp_path: Path) -> None:
    file, drawing = tmp_path / "curves.json", tmp_path / "curves.svg"
    losses = {EXACT: [3.0, 2.0], MATH: [3.0, 2.2], OURS: [3.5, 1.9]}
    file.write_text(json.dumps({"device": "a card", "date": "a day", "losses": losses}))
    assert command("--from", file).exit_code == 1
    pytest.importorskip("matplotlib")
    assert command("--from", file, "--plot", drawing).exit_code == 1
    assert "a card, a day" in drawing.read_text()


def test_it_needs_a_gpu_or_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = command()
    assert run.exit_code == 1 and "no CUDA GPU" in run.output and "--emulated" in run.output


def in_fp16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hopwell.attention(q.half(), k.half(), v.half(), causal=True).double()


def gradients(model: training.Transformer, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    logits = model(tokens[:, :-1])
    cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_three_steps_have_the_gradients_of_float64(arch: str) -> None:
    """Of every weight in every step, all but attention in float64: what differs is fp16's."""
    sizes = Sizes(2, 128, 2, 1, length=150, batch=2, vocabulary=16)
    ours, exact = (training.Transformer(sizes, attend).double() for attend in (in_fp16, right))
    optimizer = torch.optim.AdamW(ours.parameters(), training.LEARNING_RATE)
    for tokens in training.batches(sizes, 3):
        exact.load_state_dict(ours.state_dict())
        with hopwell.emulate(arch):
            found = gradients(ours, tokens)
        for mine, true in zip(found, gradients(exact, tokens), strict=True):
            assert (mine - true).norm() <= 2e-3 * true.norm()
        optimizer.step()
