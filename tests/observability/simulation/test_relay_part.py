"""Worlds with a relay keep every promise on both of its sides."""

from __future__ import annotations

import pytest

from observability.simulation.delivery_world import run_world


@pytest.mark.parametrize("seed", range(3))
def test_every_promise_holds(seed: int) -> None:
    report = run_world(seed, kind="relay")
    assert report.violation is None, report.violation


@pytest.mark.soak_only
@pytest.mark.timeout(900)
def test_every_promise_holds_in_many_histories() -> None:
    faults: set[str] = set()
    for seed in range(300):
        report = run_world(seed, kind="relay")
        assert report.violation is None, (seed, report.violation)
        faults |= set(report.faults)
    assert {"relay restarts", "source found elsewhere", "source forgotten"} <= faults
