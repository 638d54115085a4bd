"""The follower keeps its deadlines by a clock that the test controls."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import stored

from observability.kv_stream import (
    BatchApplier,
    BlockView,
    FollowPolicy,
    NullStreamListener,
    StreamCursor,
    StreamFollower,
    StreamState,
)
from observability.kv_stream.instructions import SendReplayRequest
from scheduler_components import AllBlocksCleared, BlockStored, DecodeError, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, DecodedBatch

POLICY = FollowPolicy(answer_timeout_s=5.0, retry_min_s=1.0, retry_max_s=8.0, probe_interval_s=2.0, dead_after_s=15.0)


class FakeChannel:
    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []
        self.is_open = False

    def send(self, request: SendReplayRequest) -> None:
        self.requests.append((request.request_id, request.start))
        self.is_open = True

    def cancel(self) -> None:
        self.is_open = False


class Diary(NullStreamListener):
    def __init__(self) -> None:
        self.states: list[StreamState] = []
        self.batches: list[tuple[int, bool]] = []
        self.unreadable: list[int] = []
        self.cleared: list[str] = []

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        self.batches.append((seq, replayed))

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        self.unreadable.append(seq)

    def on_view_cleared(self, rank: int, reason: str) -> None:
        self.cleared.append(reason)

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        assert old is (self.states[-1] if self.states else StreamState.CONNECTING)
        self.states.append(new)


class FollowerBench:
    """A follower of rank 3 with a fake channel, a recording listener and its own view."""

    def __init__(self, *, has_replay: bool = True) -> None:
        self.channel, self.diary, self.view = FakeChannel(), Diary(), BlockView()
        self.follower = StreamFollower(
            cursor=StreamCursor(has_replay=has_replay),
            applier=BatchApplier(
                rank=3, view=self.view, decoder=BatchDecoder(), listener=self.diary, wall_clock=lambda: 110.0
            ),
            channel=self.channel,
            policy=POLICY,
            jitter=lambda: 0.0,
        )
        self.follower.begin(0.0)

    @property
    def state(self) -> StreamState:
        return self.follower.cursor.state

    def at(self, now_s: float) -> None:
        """Advance the time from deadline to deadline, as a poll loop does."""
        while self.follower.next_deadline_s <= now_s:
            self.follower.tick(self.follower.next_deadline_s)
        self.follower.tick(now_s)


def payload(*events: KVCacheEvent, rank: int = 3) -> bytes:
    return BatchEncoder("array").encode(KVEventBatch(ts=100.0, events=events), rank)


def plain_bench() -> FollowerBench:
    """Return a bench whose publisher has shown that it lacks the extension."""
    bench = FollowerBench()
    bench.follower.on_connected(0.0)
    assert bench.follower.on_replay_marker(1, b"", 0.0)
    return bench


def live_bench() -> FollowerBench:
    bench = plain_bench()
    bench.follower.on_replay_batch(2, 0, payload(stored(5)), 0.0)
    assert bench.follower.on_replay_marker(2, b"", 0.0)
    assert bench.state is StreamState.LIVE
    return bench


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


def test_a_batch_with_one_bad_event_applies_the_others() -> None:
    bench = live_bench()
    sound, bad = ("BlockStored", [6], None, [1, 2], 2, None), ("BlockStored", [1, 2], None, [1], 1, None)
    bench.follower.on_live_batch(1, msgspec.msgpack.encode((100.0, [sound, bad], 3)), 1.0)
    assert (bench.state, bench.view.blocks(3)) == (StreamState.PARTIAL, {5, 6})
    assert bench.follower.applier.counters.decode_errors == 1


def test_a_batch_of_another_rank_is_counted() -> None:
    bench = live_bench()
    bench.follower.on_live_batch(1, payload(stored(6), rank=0), 1.0)
    assert bench.follower.applier.counters.rank_mismatches == 1
    assert bench.view.blocks(3) == {5, 6}


@pytest.mark.parametrize("begins_another", [True, False])
def test_a_discarded_snapshot_leaves_no_blocks(begins_another: bool) -> None:
    bench = live_bench()
    applier, before = bench.follower.applier, bench.view.blocks(3)
    many = tuple(range(100, 20_000))
    applier.start_staging()
    applier.apply_staged(0, payload(BlockStored(many, None, many, 1, None)), is_snapshot_chunk=True)
    assert (bench.view.blocks(3), bench.view.is_swept) == (before, True)
    if begins_another:
        applier.start_staging()
    else:
        applier.abort_staging()
    assert not bench.view.is_swept  # its blocks wait for the sweep
    while bench.view.sweep():
        pass
    assert bench.view.blocks(3) == before
