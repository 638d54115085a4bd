"""The publishing end of one stream in JetStream: numbers batches for the connection's thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from observability.jetstream.addresses import LogAddress
from observability.jetstream.log_ownership import LogOwnership
from observability.jetstream.log_writer import LogWriter
from observability.kv_stream.log_records import LogMessage
from scheduler_components import EventBatch
from scheduler_components._internal.extras import naming_extras
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES
from scheduler_components.values import PublisherStats

with naming_extras:
    from nats.js.api import PubAck

__all__ = ["JetStreamSink", "WrittenStream"]

_ENCODE_ERRORS = (TypeError, ValueError, OverflowError, AttributeError, RecursionError, msgspec.MsgspecError)
"""Raised by an encoder for a batch with an event that it cannot encode."""


@dataclass(slots=True)
class WrittenStream:
    """One stream of a writer. Except for ``writer``, only the connection's thread uses it.

    Attributes:
        writer: guarded by the owner's lock.
        has_work: messages may be waiting to be sent.
        snapshot_due: a snapshot may be due.
        in_flight: messages that await their acknowledgement, with the time of sending, the oldest first.
        ownership: whether this writer still owns the stream.
        is_woken: the thread was woken and has not checked for work.
    """

    address: LogAddress
    writer: LogWriter
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    snapshot_due: asyncio.Event = field(default_factory=asyncio.Event)
    in_flight: dict[asyncio.Future[PubAck], tuple[LogMessage, float]] = field(default_factory=dict)
    ownership: LogOwnership = field(default_factory=LogOwnership)
    is_woken: bool = False


class JetStreamSink:
    """One stream's ``KvEventSink``, created by ``JetStreamWriter.sink``: numbers batches and wakes the sending thread.

    Args:
        stream: where the batches go.
        encoder: encodes them.
        lock: guards the stream's writer.
        wake: wakes the sending thread.
        close: closes the writer with all its streams.
    """

    __slots__ = ("_close", "_encoder", "_lock", "_num_refused", "_stream", "_wake")

    def __init__(
        self,
        stream: WrittenStream,
        encoder: BatchEncoder,
        lock: threading.Lock,
        *,
        wake: Callable[[WrittenStream], None],
        close: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._encoder = encoder
        self._lock = lock
        self._wake = wake
        self._close = close
        self._num_refused = 0

    def publish(self, events: EventBatch) -> None:
        """Number one batch. Events that readers would refuse are left out and counted."""
        with self._lock:
            payload = self._encode(events)
            if payload is not None:
                self._stream.writer.append(payload)
        self._wake(self._stream)

    def _encode(self, events: EventBatch) -> bytes | None:
        rank = self._stream.address.rank
        try:
            return self._encoder.encode(events, rank)
        except _ENCODE_ERRORS:
            payload, _, refused = self._encoder.encode_valid(events, rank)
            self._num_refused += len(refused)
            return payload

    def idle(self) -> None:
        """Do nothing: the thread sends."""

    def set_upstream_state(self, state: str | None) -> None:
        """Publish how far the writer knows the stream: None for all of it, else a ``StreamState``."""
        with self._lock:
            self._stream.writer.upstream = state

    def start_epoch(self) -> None:
        """Start again with an empty state, after the engine behind the stream was replaced."""
        with self._lock:
            self._stream.writer.start_epoch(os.urandom(EPOCH_BYTES))
        self._wake(self._stream)

    def stats(self) -> PublisherStats:
        """Return the counters that every publisher has; ``JetStreamWriter.stats`` has more."""
        with self._lock:
            writer = self._stream.writer
            stream = writer.stream
            return PublisherStats(
                batches_sent=writer.counters.stored,
                events_refused=self._num_refused,
                batches_collapsed=writer.counters.collapsed,
                batches_buffered=len(stream),
                bytes_buffered=stream.buffered_bytes,
                blocks_in_base=stream.num_snapshot_blocks,
                bytes_in_base=stream.num_snapshot_bytes,
                batches_pending=writer.num_waiting,
                last_sequence=stream.next_sequence - 1,
            )

    def shutdown(self) -> None:
        """Close the writer, with all its streams."""
        self._close()
