"""Reports: percentiles, fairness, and JSON that depends on the values alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_engine.simulation import (
    LeastLoaded,
    ReplicaConfig,
    RoundRobin,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TraceRequest,
    encode_report,
)
from scheduler_engine.simulation.report import Distribution, distribution_of, jain_index


def report_of(title: str, router: RoundRobin | LeastLoaded) -> SimulationReport:
    arrivals = [
        TraceRequest(index=index, arrival_s=index / 10, input_length=30, output_length=5, hash_ids=(index,))
        for index in range(6)
    ]
    config = SimulationConfig(replica=ReplicaConfig(page_size=4, kv_tokens=256), num_replicas=2, sample_s=0.1)
    simulation = Simulation(config=config, router=router, arrivals=arrivals, title=title)
    for _ in simulation.run():
        pass
    return simulation.report()


def test_percentiles_are_values_that_occurred() -> None:
    found = distribution_of([4_000_000_000, 1_000_000_000, 2_000_000_000, 3_000_000_000])
    assert (found.num_values, found.mean, found.p50, found.max) == (4, 2.5, 3.0, 4.0)
    assert (found.percentiles[0], found.percentiles[100]) == (1.0, 4.0)
    assert distribution_of([]) == Distribution()
    many = distribution_of(range(1001))
    assert (many.p99, many.max) == (990e-9, 1000e-9)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=120))
def test_a_percentile_is_the_least_value_that_its_share_of_the_ranks_does_not_exceed(values_ns: list[int]) -> None:
    found, ordered = distribution_of(values_ns), sorted(values_ns)
    assert len(found.percentiles) == 101
    for percent, value in enumerate(found.percentiles):
        value_ns, rank_percent = round(1e9 * value), percent * (len(ordered) - 1)
        assert 100 * (bisect_left(ordered, value_ns) - 1) < rank_percent <= 100 * (bisect_right(ordered, value_ns) - 1)
    assert (found.p50, found.p90, found.p99, found.max) == tuple(found.percentiles[at] for at in (50, 90, 99, 100))
    assert found.mean == pytest.approx(sum(values_ns) / len(values_ns) / 1e9)


@pytest.mark.parametrize(
    ("shares", "index"), [([1.0, 1.0], 1.0), ([1.0, 0.0], 0.5), ([3.0, 1.0], 0.8), ([], 1.0), ([0.0], 1.0)]
)
def test_jain_index(shares: list[float], index: float) -> None:
    assert jain_index(shares) == index


def test_equal_runs_give_equal_bytes() -> None:
    first, second = report_of("a", LeastLoaded()), report_of("a", LeastLoaded())
    assert encode_report(first) == encode_report(second)
    assert msgspec.json.decode(encode_report(first), type=SimulationReport) == first
