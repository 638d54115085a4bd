"""A gauge that is offered often enough is never outdated, never sent too often, and not repeated before it is due."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, GaugePacer

offers = st.lists(st.tuples(st.floats(0, 0.4), st.integers(0, 2)), max_size=60)


def send_log(pacer: GaugePacer, times_and_values: list[tuple[float, int]]) -> list[tuple[float, int]]:
    sent = []
    for now, value in times_and_values:
        if pacer.is_due(now) and pacer.should_send(value, now):
            pacer.on_sent(value, now)
            sent.append((now, value))
    return sent


@settings(deadline=None)
@given(offers)
def test_throttle_dedupe_and_heartbeat(steps: list[tuple[float, int]]) -> None:
    pacer, now, timed = GaugePacer(min_interval_s=0.5, heartbeat_s=1.0), 0.0, []
    for step_s, value in steps:
        now += step_s
        timed.append((now, value))
    sent = send_log(pacer, timed)
    if timed:
        assert sent[0] == timed[0]
    for (before, old), (after, new) in pairwise(sent):
        assert after - before > 0.5 - 1e-9
        assert new != old or after - before > 1.0 - 1e-9
    for now, value in timed:  # at any offer, the last sample is the present value, or was sent or looked at just now
        last = max(entry for entry in sent if entry[0] <= now)
        assert now - last[0] < 1.0 + 0.5 + 0.4
        assert value == last[1] or now - last[0] < 1.0 + 0.5
    assert pacer.sent + pacer.throttled + pacer.unchanged == len(timed)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
@example([0.0, -1e6, -1e6 + 2])
def test_a_clock_that_jumps_neither_silences_nor_floods(times: list[float]) -> None:
    pacer = GaugePacer(min_interval_s=0.5, heartbeat_s=1.0)
    forward = sum(max(0.0, after - before) for before, after in pairwise(times))
    assert len(send_log(pacer, [(now, index) for index, now in enumerate(times)])) <= 1 + forward / 0.5 + 1e-6
    if times:
        assert send_log(pacer, [(times[-1] + 2.0, -1)])


def test_an_unsent_load_is_offered_again() -> None:
    pacer = GaugePacer(min_interval_s=0.5, heartbeat_s=1.0)
    assert pacer.should_send("a", 0.0)
    assert pacer.should_send("a", 0.0)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"min_interval_s": -0.1}, "min_interval_s"),
        ({"min_interval_s": math.nan}, "min_interval_s"),
        ({"heartbeat_s": 0.0}, "heartbeat_s"),
        ({"heartbeat_s": math.inf}, "heartbeat_s"),
        ({"min_interval_s": 2.0, "heartbeat_s": 1.0}, "heartbeat_s"),
    ],
)
def test_invalid_intervals_are_refused(settings: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        GaugePacer(**settings)
    assert error.value.field == field
