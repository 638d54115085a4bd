"""The follower keeps its deadlines by a clock that the test controls."""

from __future__ import annotations

import math
from itertools import pairwise

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
    assert bench.follower.applier.lag_s is None
    bench.follower.on_live_batch(1, payload(stored(6)), 1.0)
    assert bench.follower.applier.lag_s == 10.0


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
    # The first request, for the extension, times out after 1 s, and each other after 5 s. Pauses are 1, 2, 4, ... s.
    for count, moment_s in enumerate((0.0, 1.0, 7.0, 14.0, 23.0), start=1):
        bench.at(moment_s - 0.1)
        assert len(bench.channel.requests) == max(1, count - 1)
        bench.at(moment_s)
        assert len(bench.channel.requests) == count
    assert bench.state is StreamState.PARTIAL
    bench.follower.on_replay_marker(5, b"", 23.0)
    bench.follower.on_live_batch(8, payload(stored(8)), 23.0)
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
    readable = not bench.follower.applier.decode_errors
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


class IgnoringPublisher:
    """A publisher that answers plain requests, and ignores those of the extension as Dynamo's mocker does.

    Batch n stores block n. All batches stay in its replay buffer.
    """

    def __init__(self) -> None:
        self.bench = FollowerBench()
        self.num_batches = 0
        self.now_s = 0.0
        self.is_connected = False
        self._answered = 0

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.bench.follower.on_connected(self.now_s)
            self._serve()

    def disconnect(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.bench.follower.on_disconnected(self.now_s)

    def publish(self, *, arrives: bool) -> None:
        seq = self.num_batches
        self.num_batches += 1
        if arrives and self.is_connected and self.bench.follower.cursor.is_accepting_live:
            self.bench.follower.on_live_batch(seq, payload(stored(seq)), self.now_s)
            self._serve()

    def wait(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        follower = self.bench.follower
        while follower.next_deadline_s <= end_s:
            self.now_s = follower.next_deadline_s
            follower.tick(self.now_s)
            self._serve()
        self.now_s = end_s

    def _serve(self) -> None:
        channel, follower = self.bench.channel, self.bench.follower
        while channel.is_open and self.is_connected and channel.newest is not None:
            request = channel.newest
            if request.verb is not None or request.request_id == self._answered:
                return
            self._answered = request.request_id
            for seq in range(request.start, self.num_batches):
                follower.on_replay_batch(request.request_id, seq, payload(stored(seq)), self.now_s)
            follower.on_replay_marker(request.request_id, b"", self.now_s)

    @property
    def is_followed(self) -> bool:
        """Whether the stream is live with all blocks, or syncing if there is nothing to prove it by."""
        expected = StreamState.LIVE if self.num_batches else StreamState.SYNCING
        return self.bench.state is expected and self.bench.view.blocks(3) == set(range(self.num_batches))


def test_a_publisher_that_ignores_the_extension_is_live_after_a_second() -> None:
    publisher = IgnoringPublisher()
    publisher.publish(arrives=False)
    publisher.connect()
    publisher.wait(0.9)
    assert publisher.bench.state is StreamState.SYNCING
    publisher.wait(0.2)
    assert publisher.is_followed
    publisher.wait(60.0)
    counters = publisher.bench.follower.cursor.counters
    assert (counters.replays_unanswered, counters.losses) == (0, 0)
    assert publisher.bench.diary.states == [StreamState.SYNCING, StreamState.LIVE]


def test_an_ignoring_publisher_without_batches_is_live_with_its_first_one() -> None:
    """An empty answer proves nothing: the publisher may keep no batches."""
    publisher = IgnoringPublisher()
    publisher.connect()
    publisher.wait(45.0)
    assert publisher.bench.state is StreamState.SYNCING
    publisher.publish(arrives=True)
    publisher.wait(3.0)
    assert publisher.is_followed


@settings(max_examples=20, deadline=None)
@given(is_silent=st.booleans(), gaps_s=st.lists(st.floats(0.05, 3.0), min_size=1, max_size=8))
def test_probes_for_the_extension_go_on_in_any_traffic_and_their_cost_is_bounded(
    is_silent: bool, gaps_s: list[float]
) -> None:
    """A publisher without the extension sends batches with these pauses, again and again."""
    bench, asked_s = FollowerBench(), dict[int, float]()
    follower, channel, cursor = bench.follower, bench.channel, bench.follower.cursor
    follower.on_connected(0.0)
    now_s, due_s, seq = 0.0, 1.0, 0
    while now_s < 150.0:
        request = channel.newest
        if channel.is_open and request is not None and request.verb is not None:
            asked_s.setdefault(request.request_id, now_s)
            if not is_silent:
                follower.on_replay_marker(request.request_id, b"", now_s)
                continue
        elif channel.is_open and request is not None:
            for number in range(request.start, seq):
                follower.on_replay_batch(request.request_id, number, payload(stored(number)), now_s)
            follower.on_replay_marker(request.request_id, b"", now_s)
            continue
        now_s = min(due_s, follower.next_deadline_s)
        follower.tick(now_s)
        if now_s == due_s and cursor.is_accepting_live:
            follower.on_live_batch(seq, payload(stored(seq)), now_s)
            seq += 1
            due_s = now_s + gaps_s[seq % len(gaps_s)]
    times_s = list(asked_s.values())
    most_intervals = 1 if is_silent else 8
    longest_s = most_intervals * POLICY.probe_interval_s + POLICY.extension_timeout_s
    assert max(later - earlier for earlier, later in pairwise([*times_s, now_s])) <= longest_s + 3.0
    assert len(times_s) <= 5 + 150.0 / (most_intervals * POLICY.probe_interval_s)


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["connect", "disconnect", "publish", "lose"]), st.just(0.0)),
    st.tuples(st.just("wait"), st.floats(0.1, 20.0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_whatever_happened_an_ignoring_publisher_is_followed_soon_and_live_is_never_wrong(
    events: list[tuple[str, float]],
) -> None:
    publisher = IgnoringPublisher()
    for kind, duration_s in [*events, ("connect", 0.0), ("wait", 6.0)]:
        match kind:
            case "connect":
                publisher.connect()
            case "disconnect":
                publisher.disconnect()
            case "wait":
                publisher.wait(duration_s)
            case _:
                publisher.publish(arrives=kind == "publish")
        if publisher.bench.state is StreamState.LIVE:
            assert publisher.bench.view.blocks(3) == set(range(publisher.bench.follower.cursor.last_seq + 1))
    assert publisher.is_followed
    assert publisher.bench.follower.cursor.counters.replays_unanswered == 0
