"""The replay's stamps are those of the trace, and what they cut is named."""

import json

import pytest

from hopwell.benchmarks import overlay


@pytest.fixture(scope="module")
def made() -> overlay.Overlay:
    return overlay.overlay(json.loads(overlay.TRACE.read_text()), 2)


def test_both_runs_have_the_same_stamps_in_the_same_order(made: overlay.Overlay) -> None:
    assert made.same
    assert len(made.spans) == 2 * (3 * overlay.STEPS)
    assert {span.name for span in made.spans} == set(overlay.NAMES.values())


def test_spans_are_the_pieces_put_together(made: overlay.Overlay) -> None:
    for warp in overlay.WARPS:
        totals = [
            [
                sum(one.predicted for one in parts if one.warp == warp),
                sum(one.measured for one in parts if one.warp == warp),
            ]
            for parts in (made.spans, made.pieces)
        ]
        assert totals[0] == pytest.approx(totals[1])


def test_every_span_is_predicted(made: overlay.Overlay) -> None:
    assert all(span.close for span in made.spans)
