"""PlainJudge: the promises to a reader of a publisher without the extension.

Nothing can prove such a view, so most readers are PARTIAL. Their view must still be exactly what they have received:
the effect of a run of batches, each applied once and in order. In a calm, the run begins with the oldest batch that the
publisher had when it answered, and it reaches the present.
"""

from __future__ import annotations

import math

from observability.kv_stream import FollowPolicy, NullStreamListener, StreamState
from scheduler_components import BlockRemoved, BlockStored, DecodeError
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchDecoder, DecodedBatch
from worlds.plain_publisher import RingAnswers
from worlds.publisher_actor import State
from worlds.publisher_process import MAX_SEND_DELAY_S, PublisherProcess
from worlds.stream_connection import ReaderNetwork
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise, Timeline
from worlds.world_counters import WorldCounters

__all__ = ["AppliedRun", "PlainJudge"]

_FOLLOWING = (StreamState.LIVE, StreamState.PARTIAL)

_SLACK_S = 0.1
"""Time between two judgements, slices, and rounding."""


class AppliedRun(NullStreamListener):
    """The batches that made a reader's view since it was last cleared, and their effect.

    The effect is that of the batches as they were sent, whatever the reader received.

    Args:
        reader: the reader; its follower reports to this object.
        answers: knows what was sent.
        timeline: of the world.

    Attributes:
        first: number of the first batch; None before any.
        blocks: the effect.
        is_complete: nothing before the first batch can matter.
        needless_s: when the reader last began again although the publisher still had its last batch.
    """

    def __init__(self, reader: SubscriberActor, answers: RingAnswers, timeline: Timeline) -> None:
        self._reader = reader
        self._answers = answers
        self._timeline = timeline
        self._decoder = BatchDecoder()
        self._epoch: int | None = None
        self._last = -1
        self._before: tuple[int | None, int] | None = None
        self.first: int | None = None
        self.blocks: State = frozenset()
        self.is_complete = False
        self.needless_s = -math.inf
        reader.follower.applier.listener = self

    def on_view_cleared(self, rank: int, reason: str) -> None:
        """Begin a run with the next batch."""
        if self.first is not None:
            self._before = self._epoch, self._last
        self.first, self.blocks, self.is_complete = None, frozenset(), False

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """Add one batch."""
        self._add(seq)

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        """Add one batch that changes nothing."""
        self._add(seq)

    def _add(self, seq: int) -> None:
        epoch = self._reader.truth.connected_epoch
        if self.first is None:
            self._begin(epoch, seq)
        elif (epoch, seq) != (self._epoch, self._last + 1):
            detail = f"{self._reader.name} applied {seq} of epoch {epoch} after {self._last} of epoch {self._epoch}"
            raise BrokenPromise("batches are applied in order", detail)
        self._last = seq
        try:
            batch = self._decoder.decode(self._answers.sent[epoch, seq])
        except DecodeError:
            self.is_complete = False
            return
        for event in batch.events:
            self._apply(event)
        if batch.errors:
            self.is_complete = False

    def _begin(self, epoch: int | None, seq: int) -> None:
        if self._before is not None and self._before[0] == epoch:
            first, last = self._answers.first, self._before[1]
            if first is not None and first <= last < seq:
                self.needless_s = self._timeline.now_s
        self._epoch, self.first, self.is_complete = epoch, seq, seq == 0

    def _apply(self, event: object) -> None:
        if isinstance(event, BlockStored | BlockRemoved):
            tier = Tier.DEVICE if event.medium is None else Tier.HOST
            blocks = {(each, tier) for each in event.block_hashes}
            self.blocks = self.blocks | blocks if isinstance(event, BlockStored) else self.blocks - blocks
        else:
            self.blocks, self.is_complete = frozenset(), True


class PlainJudge:
    """Judges one reader of a plain publisher, in addition to its ``ReaderJudge``.

    Args:
        reader: the reader.
        process: its publisher.
        answers: of the publisher.
        timeline, counters: of the world.
        network: the reader's network without faults.
        policy: how long its follower waits.
    """

    __slots__ = (
        "_answers", "_counters", "_left_s", "_max_age_s", "_process", "_reader", "_resync_s", "_since_s", "_timeline",
        "run",
    )  # fmt: skip

    def __init__(
        self,
        reader: SubscriberActor,
        process: PublisherProcess,
        answers: RingAnswers,
        *,
        timeline: Timeline,
        counters: WorldCounters,
        network: ReaderNetwork,
        policy: FollowPolicy,
    ) -> None:
        self._reader = reader
        self._process = process
        self._answers = answers
        self._timeline = timeline
        self._counters = counters
        self._since_s = self._left_s = timeline.now_s
        # As in ReaderJudge: while a probe is open, live batches wait in the socket.
        self._max_age_s = MAX_SEND_DELAY_S + network.live.max_latency_s + 2 * network.replay.max_latency_s + _SLACK_S
        self._resync_s = 3 * policy.request_interval_s + 8 * network.replay.max_latency_s + _SLACK_S
        self.run = AppliedRun(reader, answers, timeline)

    def watch(self) -> None:
        """Check what holds always: the view is the effect of the batches that were received.

        Raises:
            BrokenPromise: it is not.
        """
        reader = self._reader
        if reader.state in _FOLLOWING:
            self._left_s = math.inf
            if self._since_s == math.inf:
                self._since_s = self._timeline.now_s
            if reader.is_connected and reader.blocks != self.run.blocks:
                detail = f"{reader.name} at {reader.follower.cursor.last_seq}, first batch {self.run.first}"
                raise BrokenPromise("a view is the effect of the batches received", detail)
        else:
            self._since_s = math.inf
            if self._left_s == math.inf:
                self._left_s = self._timeline.now_s

    def judge(self, due_s: float) -> None:
        """Check what holds in a calm, from ``due_s`` on.

        Raises:
            BrokenPromise: the reader does not follow, is late, has dropped history, or is more or less sure than that.
        """
        now_s, reader, run, first = self._timeline.now_s, self._reader, self.run, self._answers.first
        if now_s < due_s or first is None:
            return
        if now_s - self._left_s > self._resync_s:
            raise BrokenPromise("every reader follows in time", f"{reader.name}: {reader.follower.cursor!r}")
        if run.needless_s >= due_s:
            raise BrokenPromise("no history is dropped that the publisher has", f"{reader.name} begins at {run.first}")
        if now_s < self._since_s + self._max_age_s:
            return
        self._check_age()
        if not run.is_complete and (run.first is None or run.first > first):
            detail = f"{reader.name} begins at {run.first}, and the publisher has {first}"
            raise BrokenPromise("no history is dropped that the publisher has", detail)
        if (reader.state is StreamState.LIVE) != run.is_complete:
            detail = f"{reader.name} is {reader.state}, and its run begins at {run.first}"
            raise BrokenPromise("a view is LIVE if its history is complete", detail)

    def _check_age(self) -> None:
        actor, last_seq, now_s = self._process.actor, self._reader.follower.cursor.last_seq, self._timeline.now_s
        published_s = actor.stamps.get((actor.epoch, last_seq + 1), now_s)
        self._counters.measure("age_s", now_s - published_s)
        if now_s - published_s > self._max_age_s:
            detail = f"{self._reader.name} is at {last_seq} and lacks a batch of {published_s:.6f}"
            raise BrokenPromise("batches arrive in time", detail)
