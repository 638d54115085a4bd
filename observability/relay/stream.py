"""One published stream of a relay: what its sources' subscribers say goes through the merger to the sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from observability.kv_stream import NullListener, StreamState
from observability.relay.merge import Events, SourceMerger
from observability.relay.raw_events import SourceForm
from scheduler_components import BlockStored, KVEventBatch, KvEventSink
from scheduler_components.events import CheckedEvents
from scheduler_components.kv_events import DecodedBatch

__all__ = ["RelaySink", "RelaySinks", "RelayedStream", "SourceListener"]


class RelaySink(KvEventSink, Protocol):
    """Where a relay publishes: a ``KvEventSink`` that can tell its readers how far the relay itself knows the stream.

    ``ZmqEventPublisher``. Called by ``RelayedStream``, on one thread.
    """

    def say_upstream(self, state: str | None) -> None:
        """Tell readers from now on that the stream is known so far: None for whole, else a ``StreamState``."""
        ...


class RelaySinks(Protocol):
    """Where the streams of all ranks go: ``ZmqSinks``."""

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
        form: how events are written that came as bytes.
    """

    rank: int
    sink: RelaySink
    wall_clock: Callable[[], float] = time.time
    merger: SourceMerger = field(default_factory=SourceMerger)
    block_size: int | None = None
    has_pending: bool = False
    form: SourceForm = field(default_factory=SourceForm)

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
        rows = CheckedEvents(self.form.rows(events))
        self.sink.publish(KVEventBatch(ts or self.wall_clock(), rows, self.rank))

    def tell(self) -> None:
        """Tell readers how far the stream is known."""
        self.sink.say_upstream(self.merger.upstream)

    def flush(self) -> None:
        """Let what was published go out."""
        if self.has_pending:
            self.has_pending = False
            self.sink.idle()


class SourceListener(NullListener):
    """Takes what one source's subscriber says to the streams of its ranks.

    Args:
        key: the source's, in every merger.
        streams: by rank; those of the source's ranks are there.
    """

    def __init__(self, key: int, streams: Mapping[int, RelayedStream]) -> None:
        self._key = key
        self._streams = streams

    def batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:  # noqa: ARG002
        """Publish the batch, or what it changes."""
        stream = self._streams[rank]
        stream.publish(stream.merger.applied(self._key, batch.events), batch.ts)

    def view_cleared(self, rank: int, reason: str) -> None:  # noqa: ARG002
        """Take back what was known of the source."""
        stream = self._streams[rank]
        stream.publish(stream.merger.cleared(self._key), stream.wall_clock())

    def snapshot_begun(self, rank: int) -> None:
        """What follows is the source's whole state."""
        self._streams[rank].merger.snapshot_begun(self._key)

    def snapshot_ended(self, rank: int, *, was_used: bool) -> None:
        """Take back what the source does not hold any more."""
        stream = self._streams[rank]
        stream.publish(stream.merger.snapshot_ended(self._key, was_used=was_used), stream.wall_clock())

    def state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:  # noqa: ARG002
        """Tell readers how far the source is known."""
        stream = self._streams[rank]
        stream.merger.state_changed(self._key, new)
        stream.tell()
