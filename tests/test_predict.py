"""From one CTA's clocks to a kernel's time; and the judged configurations."""

import pytest

from hopwell.benchmarks.cells import BACKWARD, FORWARD, Cell
from hopwell.benchmarks.configurations import CONFIGURATIONS
from hopwell.benchmarks.judge import spearman
from hopwell.benchmarks.predict import Kernel, Line, _makespan, _steps


def test_tiles_go_to_the_worker_that_is_free_first() -> None:
    assert _makespan([3, 3, 3], 2) == 6
    assert _makespan([5, 1, 1, 1, 1, 1], 2) == 5
    assert _makespan([1, 1, 1, 1, 1, 5], 2) == 7


def test_steps_of_every_tile() -> None:
    full = Cell(2, 1024, 3, 3, 128, 128, False)
    assert _steps(Kernel("sm_90a", FORWARD, 128, False), full) == [8] * (8 * 6)
    causal = Cell(1, 512, 2, 2, 128, 128, True)
    assert _steps(Kernel("sm_90a", FORWARD, 128, True), causal) == [4, 4, 3, 3, 2, 2, 1, 1]
    # Of keys: the first tile sees all of the queries, 64 at a time.
    assert _steps(Kernel("sm_90a", BACKWARD, 128, True), causal) == [8, 8, 6, 6, 4, 4, 2, 2]


def test_backward_on_blackwell_has_its_own_tiles() -> None:
    one, pair = (Kernel("sm_100a", BACKWARD, dim, True) for dim in (64, 128))
    assert (one.rows, one.step, one.ctas) == (128, 128, 1)
    assert (pair.rows, pair.step, pair.ctas) == (256, 128, 2)
    causal = Cell(1, 512, 2, 2, 128, 128, True)
    assert _steps(pair, causal) == [4, 4, 2, 2]


def test_a_line_is_one() -> None:
    line = Line(start=100, tile=10, step=2, tensor=1)
    assert line.of(3, 20) == 100 + 30 + 40


def test_ranks() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)


def test_configurations_are_what_was_asked_for() -> None:
    names = [one.name for one in CONFIGURATIONS]
    assert len(set(names)) == len(names) >= 16
    assert sum(one.fitted for one in CONFIGURATIONS) * 2 == len(names)
    assert {one.which for one in CONFIGURATIONS} == {FORWARD, BACKWARD}
    assert {one.head_dim for one in CONFIGURATIONS} == {64, 128, 256}
    assert {1024, 16384} <= {one.length for one in CONFIGURATIONS}
