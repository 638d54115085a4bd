"""Sending live batches: encode, number, send. The caller holds the publisher's turn."""

from __future__ import annotations

import logging

import zmq

from scheduler_components.kv_events.codec import ENCODE_ERRORS, MAX_PAYLOAD_BYTES, BatchEncoder
from scheduler_components.kv_events.event_stream import EventStream
from scheduler_components.kv_events.events import EventBatch
from scheduler_components.kv_events.zmq_sockets import Socket

__all__ = ["ZmqLiveSender"]

_log = logging.getLogger(__name__)

_LARGE_PAYLOAD_BYTES = MAX_PAYLOAD_BYTES // 2
"""A batch above this goes out as several, so that no reader refuses it for its size."""


class ZmqLiveSender:
    """Takes batches through encoder and stream to the PUB socket, and counts.

    Attributes:
        num_batches, num_events, num_bytes: sent.
        num_refused: events that could not be encoded and were left out of their batch.
    """

    __slots__ = (
        "_encoder",
        "_rank",
        "_send",
        "_stream",
        "_topic",
        "num_batches",
        "num_bytes",
        "num_events",
        "num_refused",
    )

    def __init__(self, socket: Socket, *, topic: bytes, encoder: BatchEncoder, stream: EventStream, rank: int) -> None:
        # pyzmq's Python-level send costs several times its C-level send, three times a batch.
        self._send = super(zmq.Socket, socket).send
        self._topic = topic
        self._encoder = encoder
        self._stream = stream
        self._rank = rank
        self.num_batches = self.num_events = self.num_bytes = self.num_refused = 0

    def send(self, batch: EventBatch) -> None:
        """Encode before taking a number: an event that cannot be encoded takes none, and no good event along."""
        events = batch.events
        try:
            payload: bytes | None = self._encoder.encode(batch, self._rank)
        except ENCODE_ERRORS:
            payload, events, refused = self._encoder.encode_sound(batch, self._rank)
            self.num_refused += len(refused)
            _log.error("KV events left out of their batch: %s", ", ".join(f"{r.name} ({r.reason})" for r in refused))
        if payload is None:
            return
        if len(payload) > _LARGE_PAYLOAD_BYTES and len(events) > 1:
            for half in (events[: len(events) // 2], events[len(events) // 2 :]):
                self.send(EventBatch(ts=batch.ts, events=half, attn_dp_rank=batch.attn_dp_rank))
            return
        sequence = self._stream.append(payload)
        self._send(self._topic, zmq.SNDMORE)
        self._send(sequence.to_bytes(8, "big"), zmq.SNDMORE)
        self._send(payload)
        self.num_batches += 1
        self.num_events += len(events)
        self.num_bytes += len(payload)
