"""Every synchronising instruction matters, and the checker notices (see mutation.py)."""

import pytest

from . import cases
from .mutation import Score, survey


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("forward-64", 3),
        ("forward-128", 10),
        ("backward-64", 15),
        ("fa4-forward", 20),
        ("fa4-backward", 20),
        ("forward-sm100-64", 60),
        ("backward-sm100-64", 80),
        ("backward-sm100-128", 80),
        ("forward-sm100-pair", 80),
        ("fa4-forward-sm100", 80),
        ("fa4-forward-pair", 80),
    ],
)
def test_mutants_are_caught_and_named_or_known_to_be_harmless(name: str, every: int) -> None:
    if name.startswith("fa4"):
        pytest.importorskip("tests.emulator.fa4", reason="the peer is not installed")
    score = Score(name, survey(cases.CASES[name](), every))
    print(score)
    assert not score.missed, str(score)
