"""The greatest value of a measure counts, and what was never measured has none."""

from __future__ import annotations

from worlds.world_counters import WorldCounters


def test_the_greatest_value_counts() -> None:
    counters = WorldCounters()
    for value in (-2.0, 3.0, 1.0):
        counters.measure("age_s", value)
    assert counters.measured == {"age_s": 3.0}
