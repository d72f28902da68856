"""Cluster launch control: every CTA's work is done once, and misuse is found."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hopwell import emulator

from .kernels import clc
from .kernels.launch import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="the instructions of sm_100")
build = cache(clc.build)


def run(cluster: int, options: emulator.Options, fault: str = "") -> tuple[torch.Tensor, list[str]]:
    counts = torch.zeros(*clc.GRID[::-1], clc.THREADS, dtype=torch.int32)
    report = emulator.run(build(cluster, fault), counts, options=options)
    return counts, [finding.kind for finding in report.findings]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("order", "seeds"), [("eager", 1), ("deferred", 1), ("random", 8)])
def test_work_of_clusters_that_never_start(cluster: int, order: str, seeds: int) -> None:
    for seed in range(seeds):
        counts, findings = run(cluster, emulator.Options(order=order, seed=seed))
        assert not findings
        assert (counts == 1).all()


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("fault", "kinds"),
    [("wait", {"race", "uninitialised read"}), ("barrier", {"race"}), ("end", {"undefined"})],
)
def test_faults(cluster: int, fault: str, kinds: set[str]) -> None:
    """A response read too soon, one overwritten while others read it, and a question too many."""
    _, findings = run(cluster, emulator.Options(raise_on_fault=False), fault)
    assert findings[0] in kinds
