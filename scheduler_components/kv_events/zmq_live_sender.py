"""Sending live batches: encode, number, send. The caller of all but ``pending.append`` holds the publisher's turn."""

from __future__ import annotations

import logging
import time
from collections import deque

import zmq

from scheduler_components.kv_events.codec import ENCODE_ERRORS, MAX_PAYLOAD_BYTES, BatchEncoder
from scheduler_components.kv_events.event_stream import EventStream
from scheduler_components.kv_events.events import EventBatch, KVCacheEvent
from scheduler_components.kv_events.folding import collapse
from scheduler_components.kv_events.splitting import halves
from scheduler_components.kv_events.zmq_sockets import Socket

__all__ = ["ZmqLiveSender"]

_log = logging.getLogger(__name__)

_LARGE_PAYLOAD_BYTES = MAX_PAYLOAD_BYTES // 2
"""A batch above this goes out as several, so that no reader refuses it for its size."""

_MAX_REFUSALS_TOLD = 100
"""Further ones are only counted."""

_SNDMORE = int(zmq.SNDMORE)
"""A plain integer: the C-level send makes one of an enum three times a batch."""

_UNSOUND = (*ENCODE_ERRORS, AttributeError, RecursionError)
"""What something raises that was published and is no batch of events."""


class ZmqLiveSender:
    """Takes batches through encoder and stream to the PUB socket, and counts.

    Attributes:
        pending: accepted batches, oldest first; any thread may append.
        num_batches, num_events, num_bytes: sent.
        num_refused: events that could not be encoded and were left out of their batch.
        num_collapsed: batches that were merged with others, because more than ``max_pending`` were pending.
        num_dropped: batches that could not be sent at all.
    """

    __slots__ = (
        "_encoder",
        "_is_failing",
        "_is_overflowing",
        "_max_pending",
        "_rank",
        "_send",
        "_stream",
        "_topic",
        "num_batches",
        "num_bytes",
        "num_collapsed",
        "num_dropped",
        "num_events",
        "num_refused",
        "pending",
    )

    def __init__(
        self,
        socket: Socket,
        *,
        topic: bytes,
        encoder: BatchEncoder,
        stream: EventStream,
        rank: int,
        max_pending: int,
    ) -> None:
        # pyzmq's Python-level send costs several times its C-level send, three times a batch.
        self._send = super(zmq.Socket, socket).send
        self._topic = topic
        self._encoder = encoder
        self._stream = stream
        self._rank = rank
        self._max_pending = max_pending
        self._is_overflowing = self._is_failing = False
        self.pending: deque[EventBatch] = deque()
        self.num_batches = self.num_events = self.num_bytes = self.num_refused = 0
        self.num_collapsed = self.num_dropped = 0

    def send_pending(self) -> None:
        """Send all that is pending, also what comes meanwhile."""
        while self.pending:
            if len(self.pending) > self._max_pending:
                self._collapse_overflow()
            else:
                self._is_overflowing = False
                self._send_batch(self.pending.popleft())

    def drain(self, deadline: float) -> None:
        """Send what is pending until ``deadline`` (``time.monotonic``)."""
        while self.pending and time.monotonic() < deadline:
            self._send_batch(self.pending.popleft())

    def drop_pending(self) -> None:
        """Count what could not be sent any more."""
        count = len(self.pending)
        if count:
            self.num_dropped += count
            self.pending.clear()
            _log.warning("%d KV-event batches were not sent before the deadline", count)

    def _collapse_overflow(self) -> None:
        """More is pending than may be kept: send the one batch that it amounts to instead. Nothing is lost by it."""
        count = len(self.pending)
        if not self._is_overflowing:
            self._is_overflowing = True
            _log.warning("%d KV-event batches were pending: collapsed into one", count)
        batches = [self.pending.popleft() for _ in range(count)]
        try:
            merged = collapse(batches)
        except _UNSOUND:
            # Something among them is no batch: one by one, it alone is refused.
            for batch in batches:
                self._send_batch(batch)
            return
        self.num_collapsed += count
        if merged is not None:
            self._send_batch(merged)

    def _send_batch(self, batch: EventBatch) -> None:
        """Encode before taking a number: an event that cannot be encoded takes none, and no good event along."""
        try:
            payload: bytes | None = self._encoder.encode(batch, self._rank)
            events = batch.events
        except _UNSOUND:
            payload, events = self._encode_sound(batch)
        if payload is None:
            return
        if len(payload) > _LARGE_PAYLOAD_BYTES and (parts := halves(events)) is not None:
            for part in parts:
                self._send_batch(EventBatch(ts=batch.ts, events=part, attn_dp_rank=batch.attn_dp_rank))
            return
        sequence = self._stream.append(payload)
        try:
            self._send(self._topic, _SNDMORE)
            self._send(sequence.to_bytes(8, "big"), _SNDMORE)
            self._send(payload)
        except zmq.ZMQError as error:
            # Only somebody who closed a shared context can have done this. A scheduler does not stop for it.
            self.num_dropped += 1
            if not self._is_failing:
                self._is_failing = True
                _log.error("KV events cannot be sent any more: %s", error)
            return
        self.num_batches += 1
        self.num_events += len(events)
        self.num_bytes += len(payload)

    def _encode_sound(self, batch: EventBatch) -> tuple[bytes | None, tuple[KVCacheEvent, ...]]:
        try:
            payload, events, refused = self._encoder.encode_sound(batch, self._rank)
        except _UNSOUND as error:
            self._refuse(1, f"{type(batch).__name__}, which is no batch of them: {error}")
            return None, ()
        if refused:
            self._refuse(len(refused), ", ".join(f"{event.name} ({event.reason})" for event in refused))
        return payload, events

    def _refuse(self, count: int, what: str) -> None:
        """Count always; say it for as long as a scheduler's bug has not filled its log with it."""
        if self.num_refused < _MAX_REFUSALS_TOLD:
            _log.error("KV events that cannot be encoded are left out: %s", what)
        self.num_refused += count
