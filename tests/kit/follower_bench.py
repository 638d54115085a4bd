"""A follower of one stream with a fake channel."""

from __future__ import annotations

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
from scheduler_components import DecodeError, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, DecodedBatch

POLICY = FollowPolicy(answer_timeout_s=5.0, retry_min_s=1.0, retry_max_s=8.0, probe_interval_s=2.0, dead_after_s=15.0)


class FakeChannel:
    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []
        self.newest: SendReplayRequest | None = None
        self.is_open = False

    def send(self, request: SendReplayRequest) -> None:
        self.requests.append((request.request_id, request.start))
        self.newest = request
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
