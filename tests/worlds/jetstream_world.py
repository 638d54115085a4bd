"""JetStreamPart: a worker's stream in JetStream with its traffic, its faults and its readers, as one part of a world.

Promises while nothing has to be recovered from (``LogTroubles``): one writer owns the stream, every reader is LIVE, no
batch waits at the writer or is missing at a reader for long. A reader that joins then is LIVE soon, and gets no more
than the snapshot and the log after it. In the end every view is the owner's cache, and every batch that the log never
had is counted.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import takewhile

import attrs

from observability.jetstream.log_writer import LogLimits
from observability.kv_stream import StreamState
from observability.kv_stream.log_records import LogHeartbeat, Snapshot, SnapshotPointer
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES, STREAM_DIGEST_BYTES
from worlds.jetstream_actor import LogReaderActor, LogWriterActor, Truth
from worlds.publisher_actor import FORGED_PAYLOAD
from worlds.simulated_broker import AGE_LIMIT_S, JOIN_LIMIT_S, BrokerQuality, LogTrouble, SimulatedBroker
from worlds.timeline import BrokenPromise, Timeline, WorldCounters

_LONGEST_FAULT_S = 4.0

_ROUNDING_S = 1e-6
"""The clock counts nanoseconds."""

_REQUEST_BYTES = 100
"""What else a reader that joins may receive: a batch that a message and the snapshot have."""


@attrs.frozen(kw_only=True)
class JetStreamShape:
    """What one history of a log draws.

    Attributes:
        limits: of the log and of the writer's buffer.
        batches_per_s: published, with one to four blocks each.
        faults: what happens at random times in a storm.
        faults_per_s: how often.
        num_readers: at the start; another one joins while the world is calm.
        num_blocks: different blocks.
        quality: of every connection while the faults last.
    """

    limits: LogLimits
    batches_per_s: float
    faults: tuple[str, ...]
    faults_per_s: float
    num_readers: int
    num_blocks: int
    quality: BrokerQuality


JETSTREAM_FAULTS = (
    "writer disconnected", "reader disconnected", "leader elected", "log tail lost", "log expired", "log deleted",
    "pointer bucket deleted", "snapshot bucket deleted", "writer restarted", "writer replaced", "epoch started",
    "reader restarted", "message forged", "heartbeats forged",
)  # fmt: skip


def draw_jetstream_shape(draw: random.Random) -> JetStreamShape:
    """Draw a log, its traffic and its faults."""
    limits = LogLimits(
        max_msgs=draw.randint(16, 64),
        max_bytes=draw.randint(4_000, 16_000),
        max_age_s=draw.choice((6.0, 30.0)),
        overhead_bytes=100,
        buffer_steps=draw.choice((4, 16, 64)),
        buffer_bytes=100_000,
    )
    return JetStreamShape(
        limits=limits,
        batches_per_s=10 ** draw.uniform(0.5, 1.6),
        faults=tuple(each for each in JETSTREAM_FAULTS if draw.random() < 0.5),
        faults_per_s=10 ** draw.uniform(-0.7, 0.3),
        num_readers=draw.randint(1, 2),
        num_blocks=draw.choice((8, 40)),
        quality=BrokerQuality(
            request_loss=draw.choice((0.0, 0.0, 0.02)),
            answer_loss=draw.choice((0.0, 0.0, 0.02, 0.1)),
            jitter_s=draw.choice((0.004, 0.004, 0.06)),
        ),
    )


class _LateReader:
    """A reader that joins while the log is whole, and what it may receive until it is LIVE.

    Attributes:
        reader: the reader.
    """

    __slots__ = ("_broker", "_most_bytes", "_num_bytes_before", "reader")

    def __init__(self, broker: SimulatedBroker, reader: LogReaderActor) -> None:
        assert broker.pointer is not None and broker.objects is not None and broker.log is not None
        self.reader = reader
        self._broker = broker
        self._num_bytes_before = broker.num_bytes
        log_seq = Snapshot.decode(broker.objects[SnapshotPointer.decode(broker.pointer).slot]).log_seq
        in_log = sum(len(each.payload) for each, _ in broker.log if each.log_seq > log_seq)
        self._most_bytes = self._snapshot_bytes + in_log + _REQUEST_BYTES

    @property
    def _snapshot_bytes(self) -> int:
        return max(map(len, (self._broker.objects or {}).values()), default=0)

    def check(self) -> None:
        """Check what it has received.

        Raises:
            BrokenPromise: it is more than one snapshot and the log after it.
        """
        published = self._broker.num_bytes - self._num_bytes_before
        most = max(self._most_bytes, self._snapshot_bytes) + published
        if self.reader.num_bytes > most:
            detail = f"{self.reader.name} has received {self.reader.num_bytes} bytes of {most}"
            raise BrokenPromise("the cost of a joining reader is bounded", detail)


class JetStreamPart:
    """Writers, broker and readers of one stream.

    Args:
        timeline, counters: of the world.
        shape: drawn by default.

    Attributes:
        truth: the state after every batch of every epoch.
        writers: in the order in which they began.
        readers: those that are connected now.
    """

    __slots__ = (
        "_is_publishing", "_joined", "_late", "_num_calms", "_quality", "_shape", "_storm_ends_s", "broker", "counters",
        "readers", "timeline", "truth", "writers",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, counters: WorldCounters, shape: JetStreamShape | None = None) -> None:
        self.timeline = timeline
        self.counters = counters
        self._shape = shape or draw_jetstream_shape(timeline.random)
        self._quality = BrokerQuality()
        self._storm_ends_s = 0.0
        self._is_publishing = True
        self._joined: list[LogReaderActor] = []
        self._late: _LateReader | None = None
        self._num_calms = 0
        self.truth: Truth = {}
        self.broker = SimulatedBroker(timeline, self._shape.limits, counters)
        self.writers: list[LogWriterActor] = []
        self.readers: list[LogReaderActor] = []
        self.replace_writer()
        for _ in range(self._shape.num_readers):
            self._add_reader()
        self._publish_later()

    @property
    def writer(self) -> LogWriterActor:
        """The process that began last."""
        return self.writers[-1]

    @property
    def owner(self) -> LogWriterActor:
        """The writer that owns the stream: of two that began together, the one that stored its first pointer last.

        Raises:
            BrokenPromise: none does, or several do.
        """
        owners = [each for each in self.writers if not each.is_closed and not each.ownership.is_superseded]
        if len(owners) != 1:
            raise BrokenPromise("one writer owns the stream", f"{len(owners)} writers go on")
        return owners[0]

    @property
    def limit_s(self) -> float:
        """How long the recovery of its readers may take, and then that of one more that joins."""
        ready_s = max(each.judge.since_s for each in self.readers) + JOIN_LIMIT_S
        now_s = self.timeline.now_s
        return max(now_s, ready_s, self.broker.troubles.settled_s) - now_s + JOIN_LIMIT_S

    # --- its traffic ---

    def _publish_later(self) -> None:
        self.timeline.after(self.timeline.random.expovariate(self._shape.batches_per_s), self._publish_next)

    def _publish_next(self) -> None:
        if not self._is_publishing:
            return
        for writer in self.writers[-2:]:
            if not writer.is_closed:
                self.counters.counts["batches published"] += 1
                writer.publish(self._draw_event(writer))
        self._publish_later()

    def _draw_event(self, writer: LogWriterActor) -> KVCacheEvent:
        draw = self.timeline.random
        choice, block = draw.random(), draw.randrange(self._shape.num_blocks)
        if choice < 0.02:
            return AllBlocksCleared()
        if choice < 0.5 and writer.held:
            return BlockRemoved((block,))
        count = 60 if choice > 0.995 else draw.randint(1, 4)  # the broker refuses a large message
        hashes = tuple(range(block, block + count))
        return BlockStored(hashes, None, hashes, 1, None)

    # --- actors ---

    def replace_writer(self) -> None:
        """Another process begins to write, with an empty cache, while the one before still runs."""
        for writer in self.writers[:-1]:
            if not writer.is_closed:
                writer.close()
        writer = LogWriterActor(self.timeline, self.broker, len(self.writers), self.truth)
        self.writers.append(writer)
        self.broker.troubles.note(LogTrouble.RESTARTED)
        writer.client.quality = self._quality
        writer.start()

    def _restart_writer(self) -> None:
        """The process dies; another one begins."""
        if not self.writer.is_closed:
            self.writer.close()
        self.replace_writer()

    def _add_reader(self) -> LogReaderActor:
        reader = LogReaderActor(self.timeline, self.broker, self.truth, f"reader {len(self.broker.clients)}")
        reader.client.quality = self._quality
        self.readers.append(reader)
        reader.start()
        return reader

    def _remove_reader(self, reader: LogReaderActor) -> None:
        reader.close()
        self.readers.remove(reader)

    # --- storms ---

    def begin_storm(self, ends_s: float) -> None:
        """Let faults happen until ``ends_s``."""
        self._storm_ends_s = ends_s
        self._set_quality(self._shape.quality)
        if self._shape.faults:
            self._break_later()

    def _set_quality(self, quality: BrokerQuality) -> None:
        self._quality = quality
        for client in self.broker.clients:
            client.quality = quality

    def _break_later(self) -> None:
        delay_s = self.timeline.random.expovariate(self._shape.faults_per_s)
        if self.timeline.now_s + delay_s < self._storm_ends_s:
            self.timeline.after(delay_s, self._break_next)

    def _break_next(self) -> None:
        fault = self.timeline.random.choice(self._shape.faults)
        self.counters.faults[fault] += 1
        self.timeline.record(fault)
        self._break(fault)
        self._break_later()

    def _draw_duration_s(self, longest_s: float) -> float:
        """Draw how long a fault lasts. It ends with the storm."""
        return min(self.timeline.random.random() * longest_s, max(0.0, self._storm_ends_s - self.timeline.now_s))

    def _break(self, fault: str) -> None:
        draw, broker = self.timeline.random, self.broker
        match fault:
            case "writer disconnected":
                self._disconnect(self.writer)
            case "reader disconnected":
                self._disconnect(draw.choice(self.readers))
            case "leader elected":
                broker.elect_leader(self._draw_duration_s(_LONGEST_FAULT_S))
            case "log tail lost":
                self._lose_tail()
            case "log expired":
                broker.troubles.note(LogTrouble.STALLED)
                broker.expire(draw.randint(1, 8))
            case "log deleted":
                broker.delete_log()
            case "pointer bucket deleted":
                broker.troubles.note(LogTrouble.REFUSED)
                broker.delete_pointer_bucket()
            case "snapshot bucket deleted":
                broker.troubles.note(LogTrouble.REFUSED)
                broker.delete_snapshot_bucket()
            case "message forged":
                broker.forge(self.writer.forge_next(FORGED_PAYLOAD))
            case "heartbeats forged":
                self._forge_heartbeats()
            case "writer restarted":
                self._restart_writer()
            case "writer replaced":
                self.replace_writer()
            case "epoch started":
                self.writer.start_epoch()
            case _:
                self._remove_reader(draw.choice(self.readers))
                self._add_reader()

    def _forge_heartbeats(self) -> None:
        """Another client sends heartbeats: of another epoch, or with a digest that the writer never had."""
        draw, core = self.timeline.random, self.writer.core
        epoch = draw.choice((core.epoch, bytes(EPOCH_BYTES)))
        self.broker.troubles.note(LogTrouble.STALLED)
        for number in range(draw.choice((1, 20, 100))):
            heartbeat = LogHeartbeat(epoch, core.stream.next_sequence, bytes(STREAM_DIGEST_BYTES), 0)
            self.timeline.after(0.01 * number, partial(self.broker.send_heartbeat, heartbeat))

    def _disconnect(self, actor: LogWriterActor | LogReaderActor) -> None:
        if actor.client.is_up:
            self._note_disconnect(actor)
            actor.on_disconnected()
            self.timeline.after(self._draw_duration_s(_LONGEST_FAULT_S), partial(self._reconnect, actor))

    def _reconnect(self, actor: LogWriterActor | LogReaderActor) -> None:
        if not actor.is_closed and not actor.client.is_up:
            self._note_disconnect(actor)
            actor.on_reconnected()

    def _note_disconnect(self, actor: LogWriterActor | LogReaderActor) -> None:
        """Note that requests may have been lost with a connection, or that the log may have passed its reader."""
        is_writer = isinstance(actor, LogWriterActor)
        self.broker.troubles.note(LogTrouble.UNANSWERED if is_writer else LogTrouble.STALLED)

    def _lose_tail(self) -> None:
        """The broker starts again after a power failure, so every connection is lost with the newest messages."""
        self.broker.lose_tail(self.timeline.random.randint(1, 6))
        actors: list[LogWriterActor | LogReaderActor] = [*self.writers, *self.readers]
        for actor in actors:
            if not actor.is_closed:
                self._disconnect(actor)

    # --- calm ---

    def begin_calm(self) -> None:
        """Stop the faults. Traffic goes on, and once the recovery must be over, one more reader joins."""
        self._set_quality(BrokerQuality())
        self.broker.troubles.note(LogTrouble.DELAYED)
        self._note_damage()
        self._num_calms += 1
        self._join_later(self._num_calms)

    def _note_damage(self) -> None:
        if self.broker.is_damaged:
            self.broker.troubles.note(LogTrouble.DAMAGED)

    def join(self) -> None:
        """Let one more reader join, in place of those that joined before."""
        for each in self._joined:
            if each in self.readers:
                self._remove_reader(each)
        self._late = None
        self._joined = [self._add_reader()]

    def _join_later(self, calm: int) -> None:
        self.timeline.at(self.broker.troubles.settled_s + _ROUNDING_S, partial(self._join_late, calm))

    def _join_late(self, calm: int) -> None:
        """Let one more reader join while the log is whole."""
        if calm != self._num_calms or not self._is_publishing:
            return
        self._note_damage()
        if not self.broker.troubles.are_over:
            self._join_later(calm)
            return
        reader = self._add_reader()
        self._joined.append(reader)
        self._late = _LateReader(self.broker, reader)

    def lose_frame(self) -> None:
        """A log loses no message without a fault."""

    def judge(self) -> None:
        """Check every promise that holds while nothing has to be recovered from.

        Raises:
            BrokenPromise: one is broken.
        """
        if not self.broker.troubles.are_over:
            self._late = None  # a recovery may cost it one more snapshot
            return
        now_s, writer = self.timeline.now_s, self.owner
        self._check_pending(writer)
        if self._late is not None:
            self._judge_late(self._late)
        for reader in self.readers:
            if now_s >= reader.judge.since_s + JOIN_LIMIT_S:
                self._judge_reader(reader, writer)

    def _check_pending(self, writer: LogWriterActor) -> None:
        """Check that only batches that were just published wait at the writer."""
        num_waiting, now_s = writer.core.num_waiting, self.timeline.now_s
        self.counters.measure("pending", num_waiting)
        times_s = reversed(writer.published_s.values())
        num_new = sum(1 for _ in takewhile(lambda published_s: now_s - published_s <= AGE_LIMIT_S, times_s))
        if num_waiting > num_new:
            raise BrokenPromise("no batch waits for long", f"{num_waiting} wait, and {num_new} are new")

    def _judge_late(self, late: _LateReader) -> None:
        late.check()
        if late.reader.state is StreamState.LIVE:
            self.counters.measure("joining_bytes", late.reader.num_bytes)
            self._late = None

    def _judge_reader(self, reader: LogReaderActor, writer: LogWriterActor) -> None:
        cursor, now_s = reader.follower.cursor, self.timeline.now_s
        if cursor.state is not StreamState.LIVE or cursor.epoch != writer.core.epoch:
            raise BrokenPromise("every reader is LIVE in time", f"{reader.name}: {cursor!r}")
        published_s = writer.published_s.get(cursor.last_seq + 1, now_s)
        self.counters.measure("age_s", now_s - published_s)
        if now_s - published_s > AGE_LIMIT_S:
            detail = f"{reader.name} is at {cursor.last_seq} and lacks a batch of {published_s:.6f}"
            raise BrokenPromise("batches arrive in time", detail)

    # --- quiet ---

    def begin_quiet(self) -> None:
        """Publish nothing any more."""
        self._is_publishing = False

    def check_converged(self) -> None:
        """Check that every view is the cache of the owner, and that the broker has all of its batches.

        Raises:
            BrokenPromise: it is not.
        """
        writer = self.owner
        if writer.core.num_waiting:
            raise BrokenPromise("every view converges", f"{writer.core.num_waiting} batches wait for the broker")
        writer.check_counted()
        for reader in self.readers:
            if reader.state is not StreamState.LIVE or reader.blocks != writer.held:
                raise BrokenPromise("every view converges", f"{reader.name}: {reader.follower.cursor!r}")
