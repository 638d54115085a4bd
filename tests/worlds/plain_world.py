"""PlainPart: a publisher by the rules of vLLM and SGLang with its traffic and its readers, as one part of a world."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import attrs

from observability.kv_stream import FollowPolicy, NullStreamListener, StreamState
from scheduler_components import BlockRemoved, BlockStored, DecodeError
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchDecoder, DecodedBatch
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest
from worlds.publisher_actor import LiveFrame, State
from worlds.publisher_process import MAX_SEND_DELAY_S, Peer, PublisherProcess
from worlds.stream_connection import ReaderNetwork, ReaderShape
from worlds.stream_world import JudgedReader, StreamFault, StreamPart, StreamShape, draw_stream_shape
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise, Timeline, WorldCounters

_NOT_OF_A_PLAIN_STREAM: tuple[StreamFault, ...] = ("forge", "hidden restart", "truncate answers")
"""Without a digest a reader cannot see the first two, and a ROUTER that answers in one go is never in the middle."""

_WATCH_EVERY_S = 0.05

_RING_BYTES = 10**9
"""A ring has no bound in bytes."""

_LEAST_CAPACITY = 3
"""Of an answer in a storm: a reader compares the first batch, and continues with the others."""


def _plain_reader(window: int, shape: ReaderShape, network: ReaderNetwork) -> tuple[ReaderShape, ReaderNetwork]:
    """Return a reader without the extension.

    In a storm its answers may be larger than the high-water mark of the ROUTER. In a calm they are not: else it would
    never get the end marker.
    """
    capacity = max(_LEAST_CAPACITY, min(network.replay.capacity or window, window))
    replay = attrs.evolve(network.replay, loss=0.0, capacity=capacity)
    network = attrs.evolve(network, replay=replay, calm_capacity=window + 2)
    return attrs.evolve(shape, has_extension=False), network


def _plain(shape: StreamShape) -> StreamShape:
    """Return the shape of a stream whose publisher has only a ring of its newest batches."""
    publisher = attrs.evolve(shape.process.publisher, seq_base="zero", max_pending=1, max_bytes=_RING_BYTES)
    return attrs.evolve(
        shape,
        process=attrs.evolve(shape.process, publisher=publisher, has_floor=False, calls_idle=True, is_inline=False),
        readers=tuple(_plain_reader(publisher.window, *each) for each in shape.readers),
        faults=tuple(each for each in shape.faults if each not in _NOT_OF_A_PLAIN_STREAM),
        has_extension=False,
    )


class PlainPart:
    """A stream whose publisher has only a ring, and the judges of its readers.

    Args:
        timeline, counters: of the world.

    Attributes:
        stream: the publisher and its readers.
        answers: of the publisher.
    """

    __slots__ = ("_counters", "_judges", "_shape", "_timeline", "answers", "stream")

    def __init__(self, timeline: Timeline, counters: WorldCounters) -> None:
        self._timeline = timeline
        self._counters = counters
        self._shape = _plain(draw_stream_shape(timeline.random))
        self.stream = StreamPart(timeline, counters, self._shape, make_answers=self._make_answers)
        self._judges = {each: self._appoint(each) for each in self.stream.readers}
        self._watch_again()

    def _make_answers(self, process: PublisherProcess, counters: WorldCounters) -> RingAnswers:
        self.answers = RingAnswers(process, counters, size=self._shape.process.publisher.window)
        return self.answers

    def _appoint(self, each: JudgedReader) -> PlainJudge:
        return PlainJudge(
            each.reader,
            self.stream.process,
            self.answers,
            timeline=self._timeline,
            counters=self._counters,
            network=each.calm,
            policy=self._shape.readers[0][0].policy,
        )

    def _watch_again(self) -> None:
        """Check what holds always, storm or calm."""
        for each in self.stream.readers:
            self._judges[each].watch()
        self._timeline.after(_WATCH_EVERY_S, self._watch_again)

    @property
    def limit_s(self) -> float:
        """How long the recovery of its readers may take."""
        return self.stream.limit_s

    def begin_storm(self, ends_s: float) -> None:
        """Let faults happen until ``ends_s``."""
        self.stream.begin_storm(ends_s)

    def begin_calm(self) -> None:
        """Stop the faults. Traffic goes on."""
        self.stream.begin_calm()

    def join(self) -> None:
        """Let one more reader join."""
        self.stream.join()
        self._judges = {each: self._judges.get(each) or self._appoint(each) for each in self.stream.readers}

    def lose_frame(self) -> None:
        """Let every reader lose one batch, and get the one after it."""
        self.stream.lose_frame()

    def judge(self) -> None:
        """Check every promise that holds while the world is calm."""
        self.stream.judge()
        for each in self.stream.readers:
            self._judges[each].watch()
            self._judges[each].judge(each.judge.due_s)

    def begin_quiet(self) -> None:
        """Publish nothing any more."""
        self.stream.begin_quiet()

    def check_converged(self) -> None:
        """Check that every view has reached the present, and that those with the whole history have all of it.

        Raises:
            BrokenPromise: one has not.
        """
        process = self.stream.process
        for each in self.stream.readers:
            reader = each.reader
            if self._judges[each].run.is_complete or process.can_prove(reader):
                reader.check_converged()
            elif not reader.blocks <= process.actor.held:
                raise BrokenPromise("every view converges", f"{reader.name} has blocks that the publisher lacks")
            elif reader.follower.cursor.last_seq != process.actor.last_sequence:
                raise BrokenPromise("every view converges", f"{reader.name}: {reader.follower.cursor!r}")


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


_NO_SUCH_NUMBER = 2**63
"""What it reads from an extended request."""


class BatchRing:
    """The newest batches of a publisher, as it sent them.

    Args:
        size: batches that it keeps.
    """

    __slots__ = ("_frames",)

    def __init__(self, size: int) -> None:
        self._frames: deque[LiveFrame] = deque(maxlen=size)

    def append(self, frame: LiveFrame) -> None:
        """Keep one more batch."""
        self._frames.append(frame)

    def clear(self) -> None:
        """Forget all batches: the publisher's process has ended."""
        self._frames.clear()

    @property
    def first(self) -> int | None:
        """The oldest number; None without a batch."""
        return self._frames[0].sequence if self._frames else None

    def answer(self, request: ReplayRequest) -> list[tuple[bytes, bytes]]:
        """Return number and payload of each batch from the requested number on, and the end marker."""
        start = request.start if request.verb is None else _NO_SUCH_NUMBER
        batches = [(frame.frames[1], frame.frames[2]) for frame in self._frames if frame.sequence >= start]
        return [*batches, (END_SEQ, b"")]


class RingAnswers:
    """Answers from a ring of the newest batches, in one go. What a client cannot take is dropped.

    Args:
        process: the publisher.
        counters: of the world.
        size: batches of the ring.

    Attributes:
        sent: the payload of every batch ever sent, by epoch and number: what is true, for the judges.
    """

    __slots__ = ("_counters", "_process", "_ring", "sent")

    is_open = False

    def __init__(self, process: PublisherProcess, counters: WorldCounters, *, size: int) -> None:
        self._process = process
        self._counters = counters
        self._ring = BatchRing(size)
        self.sent: dict[tuple[int | None, int], bytes] = {}

    def on_frame(self, frame: LiveFrame) -> None:
        """Keep one more batch."""
        self._ring.append(frame)
        self.sent[frame.epoch, frame.sequence] = frame.frames[2]

    def on_publisher_gone(self) -> None:
        """Forget all batches."""
        self._ring.clear()

    def make_server(self, clock: Callable[[], float]) -> None:
        """Nothing stays open."""

    def cut(self) -> None:
        """Nothing stays open."""

    @property
    def first(self) -> int | None:
        """The oldest number in the ring; None without a batch."""
        return self._ring.first

    def can_prove(self, reader: SubscriberActor) -> bool:
        """Return whether ``reader`` can have the whole history: the ring still has the first batch."""
        return self._process.actor.can_be_live(has_extension=reader.has_extension) and self.first == 0

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Answer with the batches from the requested number on, and an end marker."""
        del has_extension
        for message in self._ring.answer(request):
            if not peer.can_take(client):
                self._counters.faults["answers over the high-water mark"] += 1
            else:
                self._counters.counts["messages replayed"] += 1
                peer.take(client, (client, b"", *message))
