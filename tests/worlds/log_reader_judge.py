"""LogReaderJudge: the promises to one reader of a log in JetStream that hold at any time.

Those that hold in a calm are judged by ``JetStreamPart``.
"""

from __future__ import annotations

from observability.kv_stream import FollowPolicy, StreamState
from observability.kv_stream.log_cursor import LogCursor
from observability.kv_stream.stream_state import MAX_REPLAY_CREDIT
from worlds.log_troubles import LogTroubles
from worlds.timeline import BrokenPromise, Timeline
from worlds.world_counters import WorldCounters

__all__ = ["LogReaderJudge", "LogState", "Truth"]

LogState = frozenset[int]
Truth = dict[tuple[bytes, int], LogState]
"""The blocks after a batch, by epoch and number."""

_ROUNDING_S = 1e-6


class LogReaderJudge:
    """Judges one reader.

    Args:
        name: in messages.
        timeline, counters: of the world.
        truth: the state after every batch.
        troubles: of the log.
        policy: how long the reader waits.

    Attributes:
        since_s: when the reader joined, or connected again.
    """

    __slots__ = (
        "_counters", "_heard_s", "_last_live", "_live_since_s", "_name", "_policy", "_requested_s", "_timeline",
        "_troubles", "_truth", "since_s",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        counters: WorldCounters,
        *,
        truth: Truth,
        troubles: LogTroubles,
        policy: FollowPolicy,
    ) -> None:
        self._name = name
        self._timeline = timeline
        self._counters = counters
        self._truth = truth
        self._troubles = troubles
        self._policy = policy
        self.since_s = timeline.now_s
        self._heard_s = 0.0
        self._live_since_s: float | None = None
        self._last_live: tuple[bytes, int, int, int, int] | None = None
        self._requested_s: list[float] = []

    def on_connected(self) -> None:
        """The reader has connected again."""
        self.since_s = self._timeline.now_s

    def on_heartbeat(self) -> None:
        """The reader gets a heartbeat."""
        self._heard_s = self._timeline.now_s

    def on_request(self) -> None:
        """Check that the credit allows the request that the reader sends now.

        Raises:
            BrokenPromise: it does not.
        """
        now_s = self._timeline.now_s
        self._requested_s.append(now_s)
        for number, sent_s in enumerate(reversed(self._requested_s), 1):
            if number > MAX_REPLAY_CREDIT + (now_s - sent_s) / self._policy.request_interval_s + _ROUNDING_S:
                raise BrokenPromise("bounded requests", f"{self._name} has sent {number} requests since {sent_s:.6f}")

    def on_change(self, cursor: LogCursor, blocks: LogState) -> None:
        """Check the reader's view after a message, a heartbeat or a deadline.

        Raises:
            BrokenPromise: it is LIVE and wrong, without heartbeats, or beyond a loss that it has not counted.
        """
        now_s = self._timeline.now_s
        if cursor.state is not StreamState.LIVE:
            self._live_since_s = None
            if cursor.state is StreamState.DEAD:
                self._last_live = None
            return
        if self._live_since_s is None:
            self._live_since_s = now_s
            self._counters.counts["recoveries"] += 1
            self._counters.measure("until_live_s", now_s - max(self.since_s, self._troubles.noted_s))
        if blocks != self._truth.get((cursor.epoch, cursor.last_seq)):
            raise BrokenPromise("a LIVE view is never wrong", f"{self._name} is LIVE at {cursor.last_seq} and wrong")
        if now_s - max(self._heard_s, self._live_since_s) > self._policy.answer_timeout_s + _ROUNDING_S:
            detail = f"{self._name} is LIVE and last heard the writer at {self._heard_s:.3f} s"
            raise BrokenPromise("LIVE needs heartbeats", detail)
        self._check_reported(cursor)

    def _check_reported(self, cursor: LogCursor) -> None:
        counters = cursor.counters
        live = cursor.epoch, cursor.last_seq, counters.applied, counters.snapshots, counters.restarts
        last, self._last_live = self._last_live, live
        if last is None:
            return
        epoch, last_seq, applied, snapshots, restarts = last
        if epoch != cursor.epoch:
            is_reported = counters.restarts > restarts
        else:
            is_reported = counters.snapshots > snapshots or cursor.last_seq - last_seq <= counters.applied - applied
        if not is_reported:
            raise BrokenPromise("every loss is reported", f"{self._name} is LIVE at {cursor.last_seq} without a report")
