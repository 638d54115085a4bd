"""The follower keeps its deadlines by a clock that the test controls."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import stored
from kit.follower_bench import POLICY, FollowerBench, live_bench, payload, plain_bench

from observability.kv_stream import FollowPolicy, StreamState
from scheduler_components import AllBlocksCleared, ConfigError


def test_a_replay_fills_the_view_and_closes_its_channel() -> None:
    bench = live_bench()
    assert bench.view.blocks(3) == {5}
    assert (bench.channel.requests, bench.channel.is_open) == ([(1, 0), (2, 0)], False)
    assert bench.diary.states == [StreamState.SYNCING, StreamState.LIVE]
    assert bench.diary.batches == [(0, True)]


def test_a_live_batch_has_a_lag() -> None:
    bench = live_bench()
    assert bench.follower.applier.counters.lag_s is None
    bench.follower.on_live_batch(1, payload(stored(6)), 1.0)
    assert bench.follower.applier.counters.lag_s == 10.0


def test_only_silence_within_an_answer_times_out() -> None:
    bench = plain_bench()
    for seq in range(10):
        bench.at(4.0 * (seq + 1))
        bench.follower.on_replay_batch(2, seq, payload(stored(seq)), 4.0 * (seq + 1))
    assert bench.follower.cursor.counters.replays_unanswered == 0
    bench.at(46.0)
    assert bench.follower.cursor.counters.replays_unanswered == 1
    assert bench.channel.requests[2] == (3, 9)


def test_pauses_between_unanswered_requests_grow() -> None:
    bench = FollowerBench()
    bench.follower.on_connected(0.0)
    # Each request times out after 5 s. After the first one, for the extension, the pauses are 1, 2, 4, ... s.
    for count, moment_s in enumerate((0.0, 5.0, 11.0, 18.0, 27.0), start=1):
        bench.at(moment_s - 0.1)
        assert len(bench.channel.requests) == max(1, count - 1)
        bench.at(moment_s)
        assert len(bench.channel.requests) == count
    assert bench.state is StreamState.PARTIAL
    bench.follower.on_replay_marker(5, b"", 27.0)
    bench.follower.on_live_batch(8, payload(stored(8)), 27.0)
    assert bench.view.blocks(3) == {8}


def test_a_silent_stream_is_probed_with_the_held_number() -> None:
    bench = live_bench()
    bench.at(1.9)
    assert bench.channel.requests == [(1, 0), (2, 0)]
    bench.at(2.1)
    assert bench.channel.requests[2:] == [(3, 0)]
    assert bench.state is StreamState.LIVE


def test_duplicates_do_not_postpone_the_probe() -> None:
    bench = live_bench()
    for tenths in range(20):
        bench.follower.on_live_batch(0, payload(stored(5)), tenths / 10)
    bench.at(2.0)
    assert bench.channel.requests[2:] == [(3, 0)]


def test_a_probe_finds_lost_last_batches() -> None:
    bench = live_bench()
    bench.at(2.0)
    bench.follower.on_replay_batch(3, 0, payload(stored(5)), 2.0)
    bench.follower.on_replay_batch(3, 1, payload(AllBlocksCleared()), 2.0)
    bench.follower.on_replay_marker(3, b"", 2.0)
    assert (bench.state, bench.view.blocks(3)) == (StreamState.LIVE, frozenset())


def test_an_absent_publisher_is_dead_and_may_connect_later() -> None:
    bench = FollowerBench()
    bench.at(14.9)
    assert bench.state is StreamState.CONNECTING
    bench.at(15.0)
    assert bench.state is StreamState.DEAD
    assert bench.follower.next_deadline_s == math.inf
    bench.follower.on_connected(100.0)
    assert bench.state is StreamState.SYNCING


def test_a_lost_connection_keeps_the_view_until_dead() -> None:
    bench = live_bench()
    bench.follower.on_disconnected(10.0)
    bench.at(24.0)
    assert (bench.state, bench.view.blocks(3)) == (StreamState.CONNECTING, {5})
    bench.at(25.0)
    assert (bench.state, bench.view.blocks(3)) == (StreamState.DEAD, frozenset())
    assert bench.diary.cleared[-1] == "the publisher is unreachable"


def test_a_lost_connection_cancels_the_request() -> None:
    bench = FollowerBench()
    bench.follower.on_connected(0.0)
    assert bench.channel.is_open
    bench.follower.on_disconnected(1.0)
    assert not bench.channel.is_open


@given(junk=st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_junk_ends_the_live_state_and_changes_no_block(junk: bytes) -> None:
    bench = live_bench()
    bench.follower.on_live_batch(1, junk, 1.0)
    readable = not bench.follower.applier.counters.decode_errors
    assert bench.state is (StreamState.LIVE if readable else StreamState.PARTIAL)
    bench.follower.on_live_batch(2, payload(AllBlocksCleared(), stored(7)), 1.0)
    assert (bench.state, bench.view.blocks(3)) == (StreamState.LIVE, {7})


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
