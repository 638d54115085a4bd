"""JetStreamPart: a worker's stream in JetStream with its traffic, its faults and its readers, as one part of a world.

Promises after the faults: one writer owns the stream. Every reader, also one that joins, is LIVE within ``SETTLE_S``;
then it has each batch within ``MAX_AGE_S``; in the end its view is the owner's cache.
"""

from __future__ import annotations

import math
import random
from functools import partial

import attrs

from observability.jetstream.log_writer import LogLimits
from observability.kv_stream import StreamState
from observability.simulation.jetstream_actor import LogReaderActor, LogWriterActor, Truth
from observability.simulation.simulated_broker import BrokerQuality, SimulatedBroker
from observability.simulation.timeline import BrokenPromise, Timeline
from observability.simulation.world_counters import WorldCounters
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

__all__ = ["MAX_AGE_S", "SETTLE_S", "JetStreamPart", "JetStreamShape", "draw_jetstream_shape"]

SETTLE_S = 20.0
"""A lost acknowledgement costs five seconds, the check of the broker and a snapshot one each, a stalled reader five
heartbeats, and a reader whose snapshot is gone some failed requests more."""

_LONGEST_FAULT_S = 4.0

MAX_AGE_S = 1.5
"""A message waits while a snapshot is stored, which takes some messages between writer and broker."""


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


_FAULTS = (
    "writer disconnected", "reader disconnected", "leader elected", "log tail lost", "log expired", "log deleted",
    "pointer bucket deleted", "snapshot bucket deleted", "writer restarted", "writer replaced", "epoch started",
    "reader restarted",
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
        faults=tuple(each for each in _FAULTS if draw.random() < 0.5),
        faults_per_s=10 ** draw.uniform(-0.7, 0.3),
        num_readers=draw.randint(1, 2),
        num_blocks=draw.choice((8, 40)),
        quality=BrokerQuality(
            request_loss=draw.choice((0.0, 0.0, 0.02)), answer_loss=draw.choice((0.0, 0.0, 0.02, 0.1))
        ),
    )


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
        "_is_publishing", "_joined", "_quality", "_shape", "_storm_ends_s", "broker", "counters", "readers", "timeline",
        "truth", "writers",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, counters: WorldCounters, shape: JetStreamShape | None = None) -> None:
        self.timeline = timeline
        self.counters = counters
        self._shape = shape or draw_jetstream_shape(timeline.random)
        self._quality = BrokerQuality()
        self._storm_ends_s = 0.0
        self._is_publishing = True
        self._joined: LogReaderActor | None = None
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
        """How long the recovery of its readers may take."""
        return SETTLE_S

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
        count = 60 if choice > 0.98 else draw.randint(1, 4)  # the broker refuses a large message
        hashes = tuple(range(block, block + count))
        return BlockStored(hashes, None, hashes, 1, None)

    # --- actors ---

    def replace_writer(self) -> None:
        """Another process begins to write, with an empty cache, while the one before still runs."""
        for writer in self.writers[:-1]:
            if not writer.is_closed:
                writer.close()
        writer = LogWriterActor(self.timeline, self.broker, len(self.writers), self.truth)
        self.broker.has_one_writer = not self.writers
        self.writers.append(writer)
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
        for reader in self.readers:
            reader.due_s = math.inf
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
                broker.expire(draw.randint(1, 8))
            case "log deleted":
                broker.delete_log()
            case "pointer bucket deleted":
                broker.delete_pointer_bucket()
            case "snapshot bucket deleted":
                broker.delete_snapshot_bucket()
            case "writer restarted":
                self._restart_writer()
            case "writer replaced":
                self.replace_writer()
            case "epoch started":
                self.writer.start_epoch()
            case _:
                self._remove_reader(draw.choice(self.readers))
                self._add_reader()

    def _disconnect(self, actor: LogWriterActor | LogReaderActor) -> None:
        if actor.client.is_up:
            actor.on_disconnected()
            self.timeline.after(self._draw_duration_s(_LONGEST_FAULT_S), partial(self._reconnect, actor))

    def _reconnect(self, actor: LogWriterActor | LogReaderActor) -> None:
        if not actor.is_closed and not actor.client.is_up:
            actor.on_reconnected()

    def _lose_tail(self) -> None:
        """The broker starts again after a power failure, so every connection is lost with the newest messages."""
        self.broker.lose_tail(self.timeline.random.randint(1, 6))
        actors: list[LogWriterActor | LogReaderActor] = [*self.writers, *self.readers]
        for actor in actors:
            if not actor.is_closed:
                self._disconnect(actor)

    # --- calm ---

    def begin_calm(self) -> None:
        """Stop the faults. Traffic goes on."""
        self._set_quality(BrokerQuality())
        for reader in self.readers:
            reader.due_s = self.timeline.now_s + SETTLE_S

    def join(self) -> None:
        """Let one more reader join, in place of the one that joined before."""
        if self._joined in self.readers:
            self._remove_reader(self._joined)
        self._joined = self._add_reader()
        self._joined.due_s = self.timeline.now_s + SETTLE_S

    def judge(self) -> None:
        """Check that each reader whose recovery must be over is LIVE and has every batch in time.

        Raises:
            BrokenPromise: one is not, or lacks one.
        """
        now_s = self.timeline.now_s
        due = [each for each in self.readers if now_s >= each.due_s]
        for reader in due:
            writer = self.owner
            cursor = reader.follower.cursor
            if cursor.state is not StreamState.LIVE or cursor.epoch != writer.core.epoch:
                raise BrokenPromise("every reader is LIVE in time", f"{reader.name}: {cursor!r}")
            published_s = writer.published_s.get(cursor.last_seq + 1, now_s)
            self.counters.max_age_s = max(self.counters.max_age_s, now_s - published_s)
            if now_s - published_s > MAX_AGE_S:
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
        for reader in self.readers:
            if reader.state is not StreamState.LIVE or reader.blocks != writer.held:
                raise BrokenPromise("every view converges", f"{reader.name}: {reader.follower.cursor!r}")
