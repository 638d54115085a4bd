"""RelayPart: engines, the relay that follows them and the relay's readers, as one part of a world.

Each engine is a stream with one reader, the relay's subscriber. The relay's own stream is another one, whose batches
come from the merger. So every promise of a stream is judged on both sides. In addition:

- what is published is always the union of what the relay knows of its sources;
- in the end every reader has the engines' blocks, and is LIVE if and only if the relay is sure of every source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol, TypeAlias, get_args

import attrs

from observability.kv_stream import BlockView, NullStreamListener, StreamListener, StreamState, Tier
from observability.relay.stream import RelayedStream, RelaySink, SourceListener
from scheduler_components import BlockRemoved, BlockStored, EventBatch
from scheduler_components.kv_events import DecodedBatch
from scheduler_components.values import PublisherStats
from worlds.publisher_actor import State
from worlds.publisher_process import PublisherProcess
from worlds.stream_connection import StreamConnection
from worlds.stream_world import JudgedReader, StreamFault, StreamPart, StreamShape, draw_stream_shape
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise, Timeline, WorldCounters

RelayFault: TypeAlias = Literal["relay restarts", "source found elsewhere", "source forgotten"]

_LONGEST_FAULT_S = 1.5

_NOT_OF_A_RELAY: tuple[StreamFault, ...] = ("crash", "restart", "hidden restart", "poison", "burst", "lose sockets")
"""Faults of a publisher's process: ``RelayFault`` has those of the relay's."""

_MAX_ENGINES = 3


class _ProcessSink:
    """The publisher of a relay's stream as its ``RelaySink``."""

    def __init__(self, part: RelayPart, process: PublisherProcess) -> None:
        self._part = part
        self._process = process

    @property
    def held(self) -> State:
        return self._process.actor.held

    def publish(self, events: EventBatch) -> None:
        self._process.publish(tuple(events.events))

    def idle(self) -> None:
        self._process.idle()

    def set_upstream_state(self, state: str | None) -> None:
        before = self._process.actor.sessions.upstream
        self._process.actor.set_upstream_state(state)
        if state != before:
            self._part.on_upstream_changed(state)

    def stats(self) -> PublisherStats:
        return self._process.actor.stats()

    def shutdown(self) -> None:
        self._process.idle()


class RelayPart:
    """Engines of one worker, a relay, and its readers.

    Args:
        timeline, counters: of the world.

    Attributes:
        engines: each with the relay's subscriber as its reader, or none while it is not followed.
        own: the relay's stream with its readers.
        relay: between them.
    """

    __slots__ = (
        "_fault_in_snapshot", "_faults", "_faults_per_s", "_is_calm", "_is_flush_due", "_num_followed", "_shapes",
        "_storm_ends_s", "counters", "engines", "own", "relay", "timeline",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, counters: WorldCounters) -> None:
        self.timeline = timeline
        self.counters = counters
        draw = timeline.random
        self._shapes = [
            draw_stream_shape(draw, name=f"relay of engine {key}", num_readers=1)
            for key in range(draw.randint(1, _MAX_ENGINES))
        ]
        self._faults: tuple[RelayFault, ...] = tuple(each for each in get_args(RelayFault) if draw.random() < 0.6)
        self._faults_per_s = 10 ** draw.uniform(-0.3, 0.6)
        self._storm_ends_s = 0.0
        self._fault_in_snapshot: tuple[int, RelayFault] | None = None
        self._is_calm, self._is_flush_due = True, False
        self._num_followed = 0
        self.engines: list[StreamPart] = []
        self.own = StreamPart(timeline, counters, _of_a_relay(draw_stream_shape(draw)), is_source=False)
        self.relay = RelayActor(
            [partial(self._follow, key) for key in range(len(self._shapes))],
            _ProcessSink(self, self.own.process),
            clock=timeline.clock,
            changed=self._flush_soon,
        )
        self.relay.begin()

    def _follow(self, key: int, listener: StreamListener) -> StreamConnection:
        """Follow an engine with an empty view. The first time, the engine begins."""
        if key == len(self.engines):
            self.engines.append(StreamPart(self.timeline, self.counters, self._shapes[key], listener=listener))
            return self.engines[key].readers[0].connection
        engine = self.engines[key]
        engine.listener = listener
        self._num_followed += 1
        shape, network = self._shapes[key].readers[0]
        # Two connections never have the same name, as two sockets never have the same identity.
        shape = attrs.evolve(shape, name=f"{shape.name}, time {self._num_followed}")
        reader = JudgedReader(engine, shape, network, is_calm=self._is_calm)
        if self._is_calm:
            reader.judge.begin()
        engine.readers = [reader]
        return reader.connection

    # --- the relay's thread ---

    def _flush_soon(self) -> None:
        """Flush after what is being read now, as the relay's loop does."""
        if self._fault_in_snapshot is not None and self._is_staging(self._fault_in_snapshot[0]):
            (key, fault), self._fault_in_snapshot = self._fault_in_snapshot, None
            self.timeline.after(0.0, partial(self._break, fault, key))
        if not self._is_flush_due:
            self._is_flush_due = True
            self.timeline.after(0.0, self._flush)

    def _is_staging(self, key: int) -> bool:
        source = self.relay.sources[key]
        return source is not None and source.reader.follower.applier.staging is not None

    def _flush(self) -> None:
        self._is_flush_due = False
        if self.own.process.is_up:
            self.relay.flush()

    def on_upstream_changed(self, state: str | None) -> None:
        """The relay is less or more sure of its stream: its readers learn it by their next probe."""
        self.timeline.record(f"the relay is {state or 'sure'}")
        for each in self.own.readers:
            each.judge.excuse()

    # --- storms ---

    @property
    def limit_s(self) -> float:
        """How long recovery may take: that of the relay, then that of its readers."""
        return self.own.limit_s + max(each.limit_s for each in self.engines)

    def begin_storm(self, ends_s: float) -> None:
        """Let faults happen until ``ends_s``."""
        self._storm_ends_s, self._is_calm = ends_s, False
        for each in (*self.engines, self.own):
            each.begin_storm(ends_s)
        if self._faults:
            self._break_later()

    def _break_later(self) -> None:
        delay_s = self.timeline.random.expovariate(self._faults_per_s)
        if self.timeline.now_s + delay_s < self._storm_ends_s:
            self.timeline.after(delay_s, self._break_next)

    def _break_next(self) -> None:
        self._break(self.timeline.random.choice(self._faults), self.timeline.random.randrange(len(self.engines)))
        self._break_later()

    def _break(self, fault: RelayFault, key: int) -> None:
        if not self.own.process.is_up:
            return
        self.counters.faults[fault] += 1
        self.timeline.record(fault)
        match fault:
            case "relay restarts":
                self._restart()
            case "source found elsewhere":
                self.relay.follow_again(key)
                if self.timeline.happens(0.5):
                    self._fault_in_snapshot = key, self.timeline.random.choice(self._faults)
            case _:
                self.relay.forget(key)
                self.engines[key].readers = []
                self.timeline.after(self._draw_duration_s(), partial(self._remember, key))

    def _draw_duration_s(self) -> float:
        """Draw how long a fault lasts. It ends with the storm."""
        left_s = max(0.0, self._storm_ends_s - self.timeline.now_s)
        return min(self.timeline.random.random() * _LONGEST_FAULT_S, left_s)

    def _remember(self, key: int) -> None:
        if self.own.process.is_up and self.relay.sources[key] is None:
            self.relay.follow_again(key)

    def _restart(self) -> None:
        """The relay's process dies, and begins again with an empty state."""
        self.relay.end()
        for engine in self.engines:
            engine.readers = []
        self.own.process.crash(is_clean=self.timeline.random.random() < 0.5)
        self.timeline.after(self._draw_duration_s(), self._begin_again)

    def _begin_again(self) -> None:
        self.own.process.restart(skew_s=0.0)
        self.relay.begin()

    # --- calm and quiet ---

    def begin_calm(self) -> None:
        """Stop the faults. Traffic goes on."""
        self._is_calm, self._fault_in_snapshot = True, None
        for each in (*self.engines, self.own):
            each.begin_calm()

    def join(self) -> None:
        """Let one more reader join."""
        self.own.join()

    def lose_frame(self) -> None:
        """Let the relay lose one batch of each engine."""
        for each in self.engines:
            each.lose_frame()

    def judge(self) -> None:
        """Check what must hold on both sides while the world is calm."""
        for each in (*self.engines, self.own):
            each.judge()

    def begin_quiet(self) -> None:
        """Publish nothing any more."""
        for each in self.engines:
            each.begin_quiet()

    def check_converged(self) -> None:
        """Check that the relay has every engine's blocks, and each reader the relay's, as sure as the relay is.

        Raises:
            BrokenPromise: it has not.
        """
        for engine in self.engines:
            engine.check_converged()
        self.relay.flush()
        self.own.check_converged()
        is_whole = self.relay.is_whole
        for each in self.own.readers:
            reader = each.reader
            if reader.follower.cursor.is_extended and (reader.state is StreamState.LIVE) != is_whole:
                detail = f"{reader.name} is {reader.state}, and the relay is {'sure' if is_whole else 'not sure'}"
                raise BrokenPromise("readers are as sure as the relay", detail)


def _of_a_relay(shape: StreamShape) -> StreamShape:
    """Return the shape of a stream that a relay publishes: its epochs begin above each other."""
    publisher = attrs.evolve(shape.process.publisher, seq_base="clock")
    return attrs.evolve(
        shape,
        process=attrs.evolve(shape.process, publisher=publisher),
        faults=tuple(each for each in shape.faults if each not in _NOT_OF_A_RELAY),
    )


_NO_BLOCKS: State = frozenset()


class FollowedSource(Protocol):
    """A subscriber of one source, with its connections."""

    @property
    def reader(self) -> SubscriberActor:
        """Follows the source."""
        ...

    def close(self) -> None:
        """Close the connections for good."""
        ...


FollowSource: TypeAlias = Callable[[StreamListener], FollowedSource]
"""Begins to follow a source with an empty view; the listener receives every change of it."""


def blocks_of(view: BlockView | None) -> State:
    """Return the blocks of a view, none without one."""
    return frozenset((each, tier) for tier in Tier for each in view.blocks(0, tier)) if view else _NO_BLOCKS


class JudgedSink(RelaySink, Protocol):
    """A sink that knows what it has published."""

    @property
    def held(self) -> State:
        """The blocks after every published batch."""
        ...


class _KeptBlocks(NullStreamListener):
    """Passes on what a source's subscriber reports, and knows which blocks the relay keeps from an earlier subscriber.

    They stay published until the source is known again.
    """

    def __init__(self, source: SourceListener, kept: State, changed: Callable[[], None]) -> None:
        self._source = source
        self.kept = kept
        self._changed = changed
        self._is_staging = False

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        self._source.on_batch_applied(rank, seq, batch, replayed=replayed)
        self._changed()
        if self._is_staging or not self.kept:
            return
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                tier = Tier.DEVICE if event.medium is None else Tier.HOST
                self.kept -= {(each, tier) for each in event.block_hashes}
            elif not isinstance(event, BlockStored):
                self.kept = _NO_BLOCKS

    def on_view_cleared(self, rank: int, reason: str) -> None:
        self._source.on_view_cleared(rank, reason)
        self._changed()
        self.kept = _NO_BLOCKS

    def on_snapshot_begin(self, rank: int) -> None:
        self._source.on_snapshot_begin(rank)
        self._is_staging = True

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        self._source.on_snapshot_end(rank, was_used=was_used)
        self._changed()
        self._is_staging = False
        if was_used:
            self.kept = _NO_BLOCKS

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        self._source.on_state_changed(rank, old, new)


class RelayActor:
    """Follows the sources of one worker and publishes their union.

    Args:
        follow: begins to follow each source, by its key.
        sink: publishes the stream.
        clock: seconds.
        changed: called after each change of a source, before ``flush`` can be called.

    Attributes:
        stream: the published stream of the present run.
        sources: the followed source of each key, None while it is not followed.
    """

    __slots__ = ("_changed", "_clock", "_follow", "_listeners", "_sink", "sources", "stream")

    def __init__(
        self,
        follow: Sequence[FollowSource],
        sink: JudgedSink,
        *,
        clock: Callable[[], float] = lambda: 0.0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._follow = tuple(follow)
        self._sink = sink
        self._clock = clock
        self._changed = changed
        self.sources: list[FollowedSource | None] = [None] * len(self._follow)
        self._listeners: list[_KeptBlocks | None] = [None] * len(self._follow)
        self.stream = RelayedStream(0, (sink,), wall_clock=clock)

    def end(self) -> None:
        """The relay's process has ended: it follows nothing, and its state is lost."""
        for source in self.sources:
            if source is not None:
                source.close()
        self.sources = [None] * len(self._follow)
        self._listeners = [None] * len(self._follow)

    def begin(self) -> None:
        """Begin a run with an empty state, after ``end``. The sink is in a new epoch."""
        self.stream = RelayedStream(0, (self._sink,), wall_clock=self._clock)
        for key in range(len(self._follow)):
            self.stream.merger.add_source(key)
        self.stream.send_upstream_state()
        for key in range(len(self._follow)):
            self._begin_source(key, _NO_BLOCKS)

    def _begin_source(self, key: int, kept: State) -> None:
        listener = self._listeners[key] = _KeptBlocks(SourceListener(key, {0: self.stream}), kept, self._changed)
        self.sources[key] = self._follow[key](listener)

    def follow_again(self, key: int) -> None:
        """The source is found at other addresses: follow it there. Its blocks stay until it is known again."""
        source = self.sources[key]
        kept = _NO_BLOCKS
        if source is not None:
            kept = blocks_of(source.reader.view) | self._kept_of(key)
            source.close()
        self.stream.publish(self.stream.merger.on_source_lost(key), self._clock())
        self.stream.send_upstream_state()
        self._begin_source(key, kept)
        self.flush()

    def forget(self, key: int) -> None:
        """The source no longer has this stream."""
        source, self.sources[key] = self.sources[key], None
        self._listeners[key] = None
        if source is not None:
            source.close()
        self.stream.publish(self.stream.merger.remove_source(key), self._clock())
        self.stream.send_upstream_state()
        self.flush()

    def flush(self) -> None:
        """Send the pending batches, and check what is published."""
        self.stream.flush()
        self.check()

    # --- what is true ---

    def _kept_of(self, key: int) -> State:
        listener = self._listeners[key]
        return _NO_BLOCKS if listener is None else listener.kept

    @property
    def known(self) -> State:
        """The blocks of every source, of its unfinished snapshot, and those kept until it is known again."""
        known: set[tuple[int, Tier]] = set()
        for key, source in enumerate(self.sources):
            if source is not None:
                applier = source.reader.follower.applier
                known |= blocks_of(applier.view) | blocks_of(applier.staging) | self._kept_of(key)
        return frozenset(known)

    @property
    def is_whole(self) -> bool:
        """True while every source is followed and LIVE."""
        return all(each is not None and each.reader.state is StreamState.LIVE for each in self.sources)

    def check(self) -> None:
        """Check that what is published is what the relay knows.

        Raises:
            BrokenPromise: it is not.
        """
        published, known = self._sink.held, self.known
        if published != known:
            detail = f"{len(published - known)} blocks too many, {len(known - published)} missing"
            raise BrokenPromise("a relay publishes the union of its sources", detail)
