"""Rates cover one window within one bucket and recover from every jump of the clock."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.metrics import RateMeter
from scheduler_components.testing import VirtualClock

WINDOW_S, BUCKETS = 8.0, 16
BUCKET_S = WINDOW_S / BUCKETS


def make_meter() -> tuple[RateMeter, VirtualClock]:
    clock = VirtualClock(1_700_000_000.0)
    return RateMeter(window_s=WINDOW_S, num_buckets=BUCKETS, clock=clock), clock


# Quarter seconds are exact in binary, so that the model and the meter agree about the edges of buckets.
steps_s = st.integers(0, 100).map(lambda quarters: quarters / 4)


@settings(deadline=None)
@given(st.lists(st.tuples(steps_s, st.integers(0, 10_000)), max_size=40))
@example([(0.0, 5), (25.0, 0)])
def test_throughput_counts_only_the_window(history: list[tuple[float, int]]) -> None:
    meter, clock = make_meter()
    start = clock.now_s
    seen: list[tuple[float, int]] = []
    for step_s, generated in history:
        clock.now_s += step_s
        meter.observe_decode(generated)
        seen.append((clock.now_s, generated))
        surely_in = sum(amount for at, amount in seen if at > clock.now_s - WINDOW_S + BUCKET_S)
        perhaps_in = sum(amount for at, amount in seen if at >= clock.now_s - WINDOW_S)
        span_s = max(BUCKET_S, min(clock.now_s - start, WINDOW_S))
        assert surely_in / span_s <= meter.gen_throughput
        assert meter.gen_throughput <= perhaps_in / max(BUCKET_S, min(clock.now_s - start, WINDOW_S - BUCKET_S))


@settings(deadline=None)
@given(rate=st.integers(1, 1000), seconds=st.integers(2, 60))
def test_a_steady_rate_reads_as_itself(rate: int, seconds: int) -> None:
    meter, clock = make_meter()
    for _ in range(seconds * 4):
        clock.now_s += 0.25
        meter.observe_decode(rate)
    assert meter.gen_throughput == pytest.approx(4 * rate, rel=0.1 if seconds >= WINDOW_S else 0.3)


def test_an_idle_scheduler_reads_zero_after_one_window() -> None:
    meter, clock = make_meter()
    meter.observe_decode(100)
    meter.observe_prefill(100, 50)
    assert meter.gen_throughput > 0
    clock.now_s += WINDOW_S
    assert meter.gen_throughput == 0.0
    assert meter.cache_hit_rate == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(-100, 100), st.integers(-100, 100)), max_size=40))
def test_rates_stay_in_range_for_any_clock_and_calls(history: list[tuple[float, int, int]]) -> None:
    meter, clock = make_meter()
    for now, first, second in history:
        clock.now_s = now
        meter.observe_decode(first)
        meter.observe_prefill(first, second)
        assert meter.gen_throughput >= 0.0
        assert 0.0 <= meter.cache_hit_rate <= 1.0


def test_a_clock_set_back_neither_freezes_nor_empties_the_window() -> None:
    meter, clock = make_meter()
    clock.now_s += 2.0
    meter.observe_decode(100)
    clock.now_s -= 500.0
    assert meter.gen_throughput == 50.0
    clock.now_s += WINDOW_S
    assert meter.gen_throughput == 0.0


def test_hit_rate_is_cached_over_input() -> None:
    meter, _ = make_meter()
    assert meter.cache_hit_rate == 0.0
    meter.observe_prefill(300, 100)
    meter.observe_prefill(100, 100)
    assert meter.cache_hit_rate == 0.5


@pytest.mark.parametrize(("field", "value"), [("window_s", 0.0), ("window_s", -1.0), ("window_s", float("nan"))])
def test_an_invalid_window_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        RateMeter(window_s=value)


def test_no_buckets_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_buckets"):
        RateMeter(num_buckets=0)


def test_preemptions_are_a_rate_that_ends_a_window_after_the_last() -> None:
    meter, clock = make_meter()
    clock.now_s += WINDOW_S
    for _ in range(16):
        meter.observe_preemption()
    assert meter.preemptions_per_s == pytest.approx(16 / WINDOW_S, rel=BUCKET_S / WINDOW_S + 0.01)
    assert (meter.gen_throughput, meter.cache_hit_rate) == (0.0, 0.0)
    clock.now_s += WINDOW_S + BUCKET_S
    assert meter.preemptions_per_s == 0.0
