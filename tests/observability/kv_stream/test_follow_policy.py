"""Pauses stay within their bounds, and invalid times are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.kv_stream import (
    FollowPolicy,
)
from scheduler_components import ConfigError

POLICY = FollowPolicy(answer_timeout_s=5.0, retry_min_s=1.0, retry_max_s=8.0, probe_interval_s=2.0, dead_after_s=15.0)


@given(failures=st.integers(1, 10_000), jitter=st.floats(0, 1))
@settings(deadline=None)
def test_pauses_grow_and_stay_within_their_bounds(failures: int, jitter: float) -> None:
    pause_s = POLICY.pause_s(failures, jitter)
    assert POLICY.retry_min_s / 2 <= pause_s <= POLICY.retry_max_s
    assert pause_s <= POLICY.pause_s(failures + 1, jitter)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_an_invalid_time_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="dead_after_s"):
        FollowPolicy(dead_after_s=value)
