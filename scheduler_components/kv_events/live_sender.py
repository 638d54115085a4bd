"""LiveSender: the pending batches of a publisher, and how they are encoded, numbered and sent. Pure: no socket, no
thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from scheduler_components.events import EventBatch, KVCacheEvent, ValidatedEvents
from scheduler_components.kv_events.codec import (
    ENCODE_ERRORS,
    MAX_PAYLOAD_BYTES,
    BatchEncoder,
    batch_rank,
    oversize_reason,
    split_events,
)
from scheduler_components.kv_events.snapshot import merge_batches
from scheduler_components.kv_events.stream import EventStream

__all__ = ["HEAVY_BYTES", "LARGE_PAYLOAD_BYTES", "LiveSend", "LiveSender"]

_log = logging.getLogger(__name__)

LiveSend: TypeAlias = Callable[[tuple[bytes, bytes, bytes]], bool]
"""Sends topic, number and payload of one batch. Returns False if nothing can be sent any more."""

# Only ``pending.append`` may be called without owning the channel.

LARGE_PAYLOAD_BYTES = MAX_PAYLOAD_BYTES // 2
"""A larger batch is sent in several parts, so that no reader refuses it for its size."""

HEAVY_BYTES = 4 * 1024
"""Size of a payload from which batches are sent one by one: together they would only wait longer."""

_SMALL_TOGETHER = 3
"""Small batches that are sent together also if the time is over. In a loop that never waits, on a busy machine, three
took 39 to 56 us per call of ``publish()`` in the mean and 2 at the median; one took 72 to 98 and 91 to 113.
"""

_MAX_ATTEMPTS = 2
"""A batch during which an exception was raised twice is dropped, because it may be the cause."""

_MAX_REFUSALS_LOGGED = 100
"""Maximum log lines about refused events; further ones are only counted."""

_INVALID_BATCH_ERRORS = (*ENCODE_ERRORS, AttributeError, RecursionError)
"""Raised while encoding an object that is not a valid batch of events."""


class LiveSender:  # noqa: SCH003 - the six parts of a stream, and two bounds of what is sent
    """Encode, number and send batches, and count them.

    Args:
        send: sends the frames of one batch; returns False if nothing can be sent any more.
        topic: first frame of each batch.
        encoder, stream, rank: as in ``ReplaySessions``.
        max_pending: pending batches above which all are merged into one.
        clock: monotonic seconds.
        large_bytes: size of a payload above which its batch is sent in several parts.

    Attributes:
        pending: accepted batches, oldest first; any thread may append.
        num_batches, num_events, num_bytes: sent.
        num_refused: events that readers would refuse, and that were omitted from their batch.
        num_collapsed: batches that were merged with others, because more than ``max_pending`` were pending.
        num_dropped: batches that could not be sent at all.
        num_stalls: times that the sockets were found in use for too long, or left in use by an interrupted call.
        payload_bytes: size of the last payload.
    """

    __slots__ = (
        "_attempted",
        "_clock",
        "_encoder",
        "_is_overflowing",
        "_large_bytes",
        "_max_pending",
        "_num_attempts",
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
        "num_stalls",
        "payload_bytes",
        "pending",
    )

    def __init__(
        self,
        send: LiveSend,
        *,
        topic: bytes,
        encoder: BatchEncoder,
        stream: EventStream,
        rank: int,
        max_pending: int,
        clock: Callable[[], float] = time.monotonic,
        large_bytes: int = LARGE_PAYLOAD_BYTES,
    ) -> None:
        self._send = send
        self._clock = clock
        self._topic = topic
        self._encoder = encoder
        self._stream = stream
        self._rank = rank
        self._max_pending = max_pending
        self._large_bytes = large_bytes
        self._is_overflowing = False
        self._attempted: EventBatch | None = None
        self._num_attempts = 0
        self.pending: deque[EventBatch] = deque()
        self.payload_bytes = 0
        self.num_batches = self.num_events = self.num_bytes = self.num_refused = 0
        self.num_collapsed = self.num_dropped = self.num_stalls = 0

    def send_pending(self, until_s: float = math.inf) -> None:
        """Send pending batches, including those that arrive meanwhile, and fold as many.

        Start no further batch after ``until_s`` (of the clock), but send at least one, or some small ones.
        """
        num_left = _SMALL_TOGETHER
        while self.pending:
            self._send_oldest()
            self._stream.fold_oldest()
            num_left -= 1
            if (num_left <= 0 or self.payload_bytes >= HEAVY_BYTES) and self._clock() >= until_s:
                return

    def _send_oldest(self) -> None:
        """Send the oldest pending batch, or all together if they are too many.

        They stay pending meanwhile. If a signal handler raises, they are sent again, which changes nothing for readers.
        """
        oldest, is_overflowing = self.pending[0], len(self.pending) > self._max_pending
        self._num_attempts = self._num_attempts + 1 if oldest is self._attempted else 1
        self._attempted = oldest
        if is_overflowing and self._num_attempts == 1:
            self._collapse_overflow()
        elif self._num_attempts <= _MAX_ATTEMPTS:
            self._send_batch(oldest)
            self.pending.popleft()
        else:
            self.pending.popleft()
            self.num_dropped += 1
        self._is_overflowing = is_overflowing
        self._attempted = None

    def send_until(self, deadline: float, *, at_least: int) -> None:
        """Send pending batches until ``deadline`` (of the clock), but no fewer than ``at_least``."""
        num_sent = 0
        while self.pending and (num_sent < at_least or self._clock() < deadline):
            self._send_oldest()
            num_sent += 1

    def drop_pending(self) -> None:
        """Count the batches that cannot be sent any more."""
        count = len(self.pending)
        if count:
            self.num_dropped += count
            self.pending.clear()
            _log.warning("%d KV-event batches were not sent before the deadline", count)

    def _collapse_overflow(self) -> None:
        """Replace too many pending batches by one with the same effect. No information is lost."""
        batches = list(self.pending)
        if not self._is_overflowing:
            self._is_overflowing = True
            _log.warning("%d KV-event batches were pending: collapsed into one", len(batches))
        merged = self._merge(batches)
        if merged is not None:
            self._send_batch(merged)
        for _ in batches:
            self.pending.popleft()
        self.num_collapsed += len(batches)

    def _merge(self, batches: list[EventBatch]) -> EventBatch | None:
        try:
            return merge_batches(batches)
        except _INVALID_BATCH_ERRORS:
            return merge_batches([batch for batch in batches if self._is_batch(batch)])

    def _is_batch(self, batch: EventBatch) -> bool:
        """Return True for a batch, and refuse another object."""
        try:
            merge_batches((batch,))
        except _INVALID_BATCH_ERRORS as error:
            self._refuse_batch(batch, error)
            return False
        return True

    def _send_batch(self, batch: EventBatch) -> None:
        """Encode before taking a number, so that an invalid event takes none and costs no valid event."""
        try:
            payload: bytes | None
            payload, changes = self._encoder.encode_with_changes(batch, self._rank)
            events = batch.events
        except _INVALID_BATCH_ERRORS:
            payload, events = self._encode_valid_events(batch)
            changes = None
        if payload is None:
            return
        if len(payload) > self._large_bytes:
            reason = oversize_reason(events, self._encoder)
            if reason is not None:
                self._refuse(1, f"{type(events[0]).__name__} ({reason})")
                return
            parts = split_events(events)
            if parts is not None:
                for part in parts:
                    self._send_batch(
                        EventBatch(ts=batch.ts, events=ValidatedEvents(part), attn_dp_rank=batch_rank(batch))
                    )
                return
        sequence = self._stream.append(payload, changes)
        if not self._send((self._topic, sequence.to_bytes(8, "big"), payload)):
            self.num_dropped += 1
            return
        self.num_batches += 1
        self.num_events += len(events)
        self.num_bytes += len(payload)
        self.payload_bytes = len(payload)

    def _encode_valid_events(self, batch: EventBatch) -> tuple[bytes | None, tuple[KVCacheEvent, ...]]:
        try:
            payload, events, refused = self._encoder.encode_valid(batch, self._rank)
        except _INVALID_BATCH_ERRORS as error:
            self._refuse_batch(batch, error)
            return None, ()
        if refused:
            self._refuse(len(refused), ", ".join(f"{event.name} ({event.reason})" for event in refused))
        return payload, events

    def _refuse_batch(self, batch: EventBatch, error: Exception) -> None:
        self._refuse(1, f"{type(batch).__name__}, which is not a batch of events: {error}")

    def _refuse(self, count: int, what: str) -> None:
        """Count refused events, and log them until a scheduler's bug would fill its log with them."""
        if self.num_refused < _MAX_REFUSALS_LOGGED:
            _log.error("KV events that readers would refuse are omitted: %s", what)
        self.num_refused += count
