"""RelayActor: a relay without sockets, and what is true about the stream that it publishes.

Merger, listener and stream are the kit's. Its owner gives it a sink and a way to follow each source, and calls
``flush`` after each change: what is published is the union of what the relay knows of its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from observability.kv_stream import BlockView, NullStreamListener, StreamListener, StreamState, Tier
from observability.relay.stream import RelayedStream, RelaySink, SourceListener
from scheduler_components import BlockRemoved, BlockStored
from scheduler_components.kv_events import DecodedBatch
from worlds.publisher_actor import State
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise

__all__ = ["FollowSource", "FollowedSource", "JudgedSink", "RelayActor", "blocks_of"]

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
