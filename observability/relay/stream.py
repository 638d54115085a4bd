"""One published stream of a relay: events of its sources pass through the merger to the sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from observability.kv_stream import NullStreamListener, StreamState
from observability.relay.passthrough import SourceEncoding
from observability.relay.source_merger import Events, SourceMerger
from scheduler_components import BlockStored, KVEventBatch
from scheduler_components.events import ValidatedEvents
from scheduler_components.kv_events import DecodedBatch
from scheduler_components.ports import KvEventSink

__all__ = ["RelaySink", "RelayedStream", "SourceListener"]


class RelaySink(KvEventSink, Protocol):
    """A ``KvEventSink`` that also publishes how far the relay itself knows the stream, such as ``ZmqEventPublisher``.

    ``RelayedStream`` calls it on one thread.
    """

    def set_upstream_state(self, state: str | None) -> None:
        """Publish the relay's own state of the stream from now on: None for LIVE, else a ``StreamState``."""
        ...


@dataclass(slots=True)
class RelayedStream:
    """The published stream of one rank.

    Attributes:
        rank: stamped on its batches.
        sinks: publish it; the counters are those of the first.
        wall_clock: seconds since the epoch, for batches that the relay itself creates.
        merger: of its sources.
        block_size: tokens per block of the last stored event; None before the first.
        has_pending: True from a batch to ``flush``.
        encoding: of events that came as bytes.
    """

    rank: int
    sinks: Sequence[RelaySink]
    wall_clock: Callable[[], float] = time.time
    merger: SourceMerger = field(default_factory=SourceMerger)
    block_size: int | None = None
    has_pending: bool = False
    encoding: SourceEncoding = field(default_factory=SourceEncoding)

    def publish(self, events: Events, ts: float) -> None:
        """Publish the merger's events, if there are any.

        ``ts`` is the source's time stamp. A chunk of a snapshot has 0, which becomes the current time, because live
        readers compute the lag from it.
        """
        if not events:
            return
        self.has_pending = True
        first = events[0]
        if isinstance(first, BlockStored) and first.block_size:  # an offload tier may not know it
            self.block_size = first.block_size
        rows = ValidatedEvents(self.encoding.rows(events))
        batch = KVEventBatch(ts or self.wall_clock(), rows, self.rank)
        for sink in self.sinks:
            sink.publish(batch)

    def send_upstream_state(self) -> None:
        """Publish how far the relay knows the stream."""
        for sink in self.sinks:
            sink.set_upstream_state(self.merger.upstream)

    def flush(self) -> None:
        """Send the pending batches."""
        if self.has_pending:
            self.has_pending = False
            for sink in self.sinks:
                sink.idle()


class SourceListener(NullStreamListener):
    """Passes the changes of one source to the streams of its ranks.

    Args:
        key: of the source, in every merger.
        streams: by rank, including every rank of the source.
    """

    def __init__(self, key: int, streams: Mapping[int, RelayedStream]) -> None:
        self._key = key
        self._streams = streams

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        stream = self._streams[rank]
        stream.publish(stream.merger.on_batch_applied(self._key, batch.events), batch.ts)

    def on_view_cleared(self, rank: int, reason: str) -> None:
        stream = self._streams[rank]
        stream.publish(stream.merger.on_view_cleared(self._key), stream.wall_clock())

    def on_snapshot_begin(self, rank: int) -> None:
        self._streams[rank].merger.on_snapshot_begin(self._key)

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        stream = self._streams[rank]
        stream.publish(stream.merger.on_snapshot_end(self._key, was_used=was_used), stream.wall_clock())

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        stream = self._streams[rank]
        stream.merger.on_state_changed(self._key, new)
        stream.send_upstream_state()
