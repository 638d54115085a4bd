"""Every finite value is counted in the one bucket that holds it."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.metrics.request_times import Histogram

bounds = st.lists(st.floats(0, 1e6), min_size=1, max_size=20, unique=True).map(sorted)
values = st.lists(st.tuples(st.floats(), st.integers(-2, 5)))


@settings(deadline=None)
@given(bounds, values)
@example([1.0, 2.0], [(1.0, 1), (2.0, 1), (2.5, 2), (-3.0, 1), (math.nan, 1), (math.inf, 1), (1.0, 0)])
def test_each_value_is_in_its_bucket(bounds: list[float], values: list[tuple[float, int]]) -> None:
    histogram = Histogram(bounds)
    counted = []
    for value, times in values:
        histogram.observe(value, times)
        if math.isfinite(value):
            counted += [max(0.0, value)] * max(0, times)
    snapshot = histogram.snapshot()
    below = 0
    for bound, count in zip(snapshot.bounds, snapshot.counts, strict=False):
        below += count
        assert below == sum(value <= bound for value in counted)
    assert snapshot.count == len(counted)
    assert snapshot.total >= 0


def test_a_snapshot_is_immutable_and_copied_only_after_a_change() -> None:
    histogram = Histogram([1.0])
    histogram.observe(0.5)
    before = histogram.snapshot()
    assert histogram.snapshot() is before
    histogram.observe(0.5)
    assert (before.count, histogram.snapshot().count) == (1, 2)


@pytest.mark.parametrize("bounds", [[], [1.0, 1.0], [2.0, 1.0], [math.nan], [1.0, math.inf]])
def test_bounds_that_do_not_rise_are_refused(bounds: list[float]) -> None:
    with pytest.raises(ConfigError, match="bounds"):
        Histogram(bounds)
