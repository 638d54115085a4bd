"""One published stream of a relay: what its sources' subscribers say goes through the merger to the sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from observability.kv_stream import NullStreamListener, StreamState
from observability.relay.passthrough import SourceEncoding
from observability.relay.source_merger import Events, SourceMerger
from scheduler_components import BlockStored, KVEventBatch, KvEventSink
from scheduler_components.events import ValidatedEvents
from scheduler_components.kv_events import DecodedBatch

__all__ = ["RelaySink", "RelaySinkFactory", "RelayedStream", "SourceListener"]


class RelaySink(KvEventSink, Protocol):
    """Where a relay publishes: a ``KvEventSink`` that can tell its readers how far the relay itself knows the stream.

    ``ZmqEventPublisher``. Called by ``RelayedStream``, on one thread.
    """

    def set_upstream_state(self, state: str | None) -> None:
        """Tell readers from now on that the stream is known so far: None for whole, else a ``StreamState``."""
        ...


class RelaySinkFactory(Protocol):
    """Where the streams of all ranks go: ``ZmqSinkFactory``."""

    @property
    def dialect(self) -> str:
        """What the streams are written in; in ``native`` an event goes on as the bytes that came."""
        ...

    def open(self, rank: int) -> RelaySink:
        """Open the sink of one rank's stream; called once per rank.

        Raises:
            ConfigError, StartError: it cannot be opened; nothing stays open.
        """
        ...

    def server_info(self, block_size: int | None, num_streams: int) -> dict[str, object]:
        """Give the keys by which ``/server_info`` leads readers to the streams."""
        ...


@dataclass(slots=True)
class RelayedStream:
    """The stream of one rank.

    Attributes:
        rank: its number, stamped on its batches.
        sink: where it is published.
        wall_clock: seconds since the epoch, for batches that the relay itself makes.
        merger: its sources.
        block_size: tokens per block as the last stored event had it; None before the first.
        has_pending: True from a batch to ``flush``.
        encoding: how events are written that came as bytes.
    """

    rank: int
    sink: RelaySink
    wall_clock: Callable[[], float] = time.time
    merger: SourceMerger = field(default_factory=SourceMerger)
    block_size: int | None = None
    has_pending: bool = False
    encoding: SourceEncoding = field(default_factory=SourceEncoding)

    def publish(self, events: Events, ts: float) -> None:
        """Publish what the merger said; nothing where that is nothing.

        ``ts`` is the source's; 0, as in a base, is replaced by the time of now: who reads it live counts its age.
        """
        if not events:
            return
        self.has_pending = True
        first = events[0]
        if isinstance(first, BlockStored) and first.block_size:  # an offload tier may not know it
            self.block_size = first.block_size
        rows = ValidatedEvents(self.encoding.rows(events))
        self.sink.publish(KVEventBatch(ts or self.wall_clock(), rows, self.rank))

    def send_upstream_state(self) -> None:
        """Tell readers how far the stream is known."""
        self.sink.set_upstream_state(self.merger.upstream)

    def flush(self) -> None:
        """Let what was published go out."""
        if self.has_pending:
            self.has_pending = False
            self.sink.idle()


class SourceListener(NullStreamListener):
    """Takes what one source's subscriber says to the streams of its ranks.

    Args:
        key: the source's, in every merger.
        streams: by rank; those of the source's ranks are there.
    """

    def __init__(self, key: int, streams: Mapping[int, RelayedStream]) -> None:
        self._key = key
        self._streams = streams

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:  # noqa: ARG002
        """Publish the batch, or what it changes."""
        stream = self._streams[rank]
        stream.publish(stream.merger.on_batch_applied(self._key, batch.events), batch.ts)

    def on_view_cleared(self, rank: int, reason: str) -> None:  # noqa: ARG002
        """Take back what was known of the source."""
        stream = self._streams[rank]
        stream.publish(stream.merger.on_view_cleared(self._key), stream.wall_clock())

    def on_snapshot_begin(self, rank: int) -> None:
        """What follows is the source's whole state."""
        self._streams[rank].merger.on_snapshot_begin(self._key)

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        """Take back what the source does not hold any more."""
        stream = self._streams[rank]
        stream.publish(stream.merger.on_snapshot_end(self._key, was_used=was_used), stream.wall_clock())

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:  # noqa: ARG002
        """Tell readers how far the source is known."""
        stream = self._streams[rank]
        stream.merger.on_state_changed(self._key, new)
        stream.send_upstream_state()
