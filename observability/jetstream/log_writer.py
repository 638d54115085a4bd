"""The rules by which one stream's writer fills the log and the snapshot bucket, without socket, clock or thread.

The theory of the log is in ``observability.kv_stream.log_cursor``.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import attrs

from observability.kv_stream import LogStats
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot
from scheduler_components.kv_events import BatchEncoder, EventStream
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES

__all__ = [
    "ACK_TIMEOUT_S",
    "DUPLICATE_WINDOW_S",
    "HEARTBEAT_INTERVAL_S",
    "MAX_IN_FLIGHT",
    "REQUEST_PAUSE_S",
    "SNAPSHOT_CHECK_S",
    "LogLimits",
    "LogTraffic",
    "LogWriter",
]

HEARTBEAT_INTERVAL_S = 0.5
"""A reader detects lost messages at the end of the stream within this time. A heartbeat is one small message."""

MAX_IN_FLIGHT = 256
"""Messages sent and not acknowledged: a tenth of a second of a busy scheduler, for a network of some milliseconds."""

ACK_TIMEOUT_S = 5.0
"""After this time a message counts as failed, and the writer sends it again under the same id."""

DUPLICATE_WINDOW_S = 120.0
"""The broker keeps message ids for this time, which is many times as long as a message is retried."""

SNAPSHOT_CHECK_S = 1.0
"""Time between two checks whether a snapshot is due by its age."""

_BUFFER_STEPS = 1_024
"""Batches kept one by one for an unreachable broker: some seconds. After a longer absence it gets a snapshot."""

_BUFFER_BYTES = 16 * 1024 * 1024
"""The same limit in bytes: the memory of a writer besides the blocks held."""

REQUEST_PAUSE_S = 5.0
"""Pause between snapshots that readers request: one of 100,000 blocks has 25 MB."""


@attrs.frozen
class LogLimits:
    """The limits of the broker's log, and of the writer's buffer.

    Attributes:
        max_msgs: messages per stream.
        max_bytes: bytes per worker, over all its streams.
        max_age_s: seconds.
        overhead_bytes: upper limit of a message without its payload: subject, id, digest, the broker's own record.
        buffer_steps, buffer_bytes: batches kept for an unreachable broker, and their payload bytes.
    """

    max_msgs: int
    max_bytes: int
    max_age_s: float
    overhead_bytes: int
    buffer_steps: int = _BUFFER_STEPS
    buffer_bytes: int = _BUFFER_BYTES


@dataclass(slots=True)
class LogTraffic:
    """Bytes sent to one worker's log by all its streams: the broker drops the oldest message of any stream."""

    total_bytes: int = 0


@dataclass(slots=True)
class _StoredSnapshot:
    """The newest snapshot in the bucket.

    Attributes:
        end: it covers every batch below this number.
        traffic_bytes: the log's traffic when it was built.
        stored_s: when it was stored.
        num_late: messages below its end that were in flight when the first one after it was handed out. The log may
            have them behind that one.
    """

    end: int
    traffic_bytes: int
    stored_s: float
    num_late: int = 0


@dataclass(slots=True, kw_only=True)
class LogWriter:
    """One stream's numbers, replay buffer and snapshot, and how much of it the broker has.

    The broker keeps no more than ``limits``. Before the writer sends a message that would make the broker drop one that
    the stored snapshot does not cover, it stores a new snapshot. Batches that left the replay buffer before the broker
    accepted them are sent in a snapshot too.

    Attributes:
        epoch: of the stream; ``start_epoch`` changes it.
        rank: stamped on the chunks of the snapshot.
        traffic: of the worker's log, shared by its streams.
        upstream: sent with every heartbeat, see ``LogHeartbeat``.
        log_seq: the newest known number of the log: messages not handed out yet come after it.
    """

    epoch: bytes
    rank: int
    limits: LogLimits
    traffic: LogTraffic
    upstream: str | None = None
    log_seq: int = 0
    counters: LogStats = field(init=False)
    _stream: EventStream = field(init=False)
    _encoder: BatchEncoder = field(default_factory=BatchEncoder, init=False)
    _next_out: int = field(default=0, init=False)  # the next number to hand out to the sender
    _highest_out: int = field(default=0, init=False)  # one above the highest number ever handed out
    _acked: set[int] = field(default_factory=set, init=False)  # stored, although a lower number failed
    _stored: _StoredSnapshot | None = field(default=None, init=False)
    _in_flight: set[int] = field(default_factory=set, init=False)  # handed out and not acknowledged
    _retried: set[int] = field(default_factory=set, init=False)  # handed out more than once, not stored yet
    _snapshot_cause: str = field(default="", init=False)  # why a snapshot is due whatever the limits
    _is_requested: bool = field(default=False, init=False)  # a reader requests a snapshot
    _built_end: int = field(default=0, init=False)  # of the newest snapshot that was built
    _num_late: int = field(default=0, init=False)  # its ``_StoredSnapshot.num_late``

    def __post_init__(self) -> None:
        self.counters = LogStats(self.rank)
        self.start_epoch(self.epoch)

    def start_epoch(self, epoch: bytes) -> None:
        """Start an empty stream. Readers skip messages of the previous epoch."""
        assert len(epoch) == EPOCH_BYTES
        self.epoch = epoch
        self._stream = EventStream(epoch=epoch, max_steps=self.limits.buffer_steps, max_bytes=self.limits.buffer_bytes)
        self._next_out = self._highest_out = self._built_end = self._num_late = 0
        self._acked.clear()
        self._retried.clear()
        self._in_flight.clear()
        self._stored = None
        self._snapshot_cause = ""

    @property
    def stream(self) -> EventStream:
        """The numbers, replay buffer and snapshot; read only."""
        return self._stream

    @property
    def num_waiting(self) -> int:
        """Batches that the broker has neither as a message nor in a snapshot."""
        end = 0 if self._stored is None else self._stored.end
        num_in_flight = sum(end <= seq < self._next_out for seq in self._in_flight)
        return self._stream.next_sequence - self._first_unstored - len(self._acked) + num_in_flight

    @property
    def _first_unstored(self) -> int:
        return self._next_out if self._stored is None else max(self._next_out, self._stored.end)

    # --- batches ---

    def append(self, payload: bytes) -> int:
        """Number one batch and return its number."""
        seq = self._stream.append(payload)
        self._stream.fold_oldest()
        return seq

    def pop_message(self, max_payload_bytes: int) -> LogMessage | None:
        """Return the next batch to send; None if there is none, or if a snapshot must be stored first.

        Args:
            max_payload_bytes: upper limit of the payload.
        """
        snapshot, stream = self._stored, self._stream
        if snapshot is None:
            return None
        seq = self._first_unstored
        while seq in self._acked:
            self._acked.discard(seq)
            seq += 1
        self._next_out = seq
        if not stream.first <= seq < stream.next_sequence or seq - snapshot.end >= self.limits.max_msgs:
            return None
        if self._highest_out <= self._built_end <= seq:
            self._num_late = sum(each < self._built_end for each in self._in_flight)
            if snapshot.end == self._built_end:
                snapshot.num_late = self._num_late
        if seq - snapshot.end + snapshot.num_late >= self.limits.max_msgs:
            self._snapshot_cause = "messages in flight may use up max_msgs"
            return None
        payload = stream.payload(seq)
        if len(payload) > max_payload_bytes:
            self._snapshot_cause = "a batch is larger than the broker's messages"
            return None
        size = len(payload) + self.limits.overhead_bytes
        if self.traffic.total_bytes - snapshot.traffic_bytes + size > self.limits.max_bytes:
            return None
        self.traffic.total_bytes += size
        if seq < self._highest_out:
            self.counters.retried += 1
            self._retried.add(seq)
        self._next_out = seq + 1
        self._in_flight.add(seq)
        self._highest_out = max(self._highest_out, self._next_out)
        return LogMessage(0, self.epoch, seq, stream.digest_before(seq + 1), payload)

    def on_stored(self, message: LogMessage, log_seq: int, *, is_duplicate: bool = False) -> None:
        """The broker stored ``message`` at ``log_seq``, or already had its id (``is_duplicate``)."""
        self.log_seq = max(self.log_seq, log_seq)
        if message.epoch == self.epoch:
            if is_duplicate and message.seq not in self._retried:
                self._snapshot_cause = "another writer used the id of a batch"
                self.counters.collapsed += 1
            else:
                self.counters.stored += 1
            self._retried.discard(message.seq)
            self._in_flight.discard(message.seq)
            if message.seq >= self._next_out:
                self._acked.add(message.seq)

    def on_failed(self, message: LogMessage) -> None:
        """Hand out ``message`` and every batch after it again: the broker may or may not have it."""
        self.counters.failures += 1
        if message.epoch == self.epoch:
            self._next_out = min(self._next_out, message.seq)
            self._in_flight.discard(message.seq)

    # --- the snapshot ---

    def snapshot_reason(self, now_s: float) -> str:
        """Return why a snapshot must be stored now; empty if none must."""
        snapshot, limits = self._stored, self.limits
        if snapshot is None:
            return "the stream begins"
        if self._first_unstored < self._stream.first:
            return "the broker was unreachable for longer than batches are kept"
        if self._snapshot_cause:
            return self._snapshot_cause
        if self._is_requested and now_s - snapshot.stored_s >= REQUEST_PAUSE_S:
            return "a reader requests one"
        if now_s - snapshot.stored_s >= limits.max_age_s / 2:
            return "half of max_age_s is over"
        if self._highest_out <= snapshot.end:
            return ""  # the log has no message that could be dropped too early
        if self._highest_out - snapshot.end >= (limits.max_msgs - snapshot.num_late) // 2:
            return "half of max_msgs is used up"
        if self.traffic.total_bytes - snapshot.traffic_bytes >= limits.max_bytes // 2:
            return "half of max_bytes is used up"
        return ""

    def build_snapshot(self) -> Generator[None, None, tuple[Snapshot, int]]:
        """Build a snapshot of the current state in slices. Return it and the log's traffic for ``on_snapshot_stored``.

        The snapshot includes batches appended between two slices.
        """
        stream = self._stream
        stream.pins += 1
        try:
            first, digest = stream.first, stream.digest_before(stream.first)
            chunks: list[bytes] = []
            for planned in stream.plan_snapshot():
                yield None
                for number, segments in enumerate(planned or ()):
                    for chunk in stream.encode_chunk(segments, self._encoder, self.rank, clear=number == 0):
                        yield None
                        if chunk is not None:
                            chunks.append(chunk)
            batches = [stream.payload(seq) for seq in range(first, stream.next_sequence)]
        finally:
            stream.pins -= 1
        snapshot = Snapshot(stream.epoch, first, digest, chunks, batches, stream.digest, self.log_seq)
        if stream is self._stream:
            self._built_end, self._num_late = snapshot.end, 0
        return snapshot, self.traffic.total_bytes

    def on_snapshot_stored(self, snapshot: Snapshot, traffic_bytes: int, now_s: float) -> None:
        """The bucket has ``snapshot``, which was built at ``traffic_bytes``."""
        if snapshot.epoch != self.epoch:
            return
        self.counters.bases += 1
        self.counters.collapsed += max(0, snapshot.end - self._highest_out)
        self._stored = _StoredSnapshot(snapshot.end, traffic_bytes, now_s, self._num_late)
        self._highest_out = max(self._highest_out, snapshot.end)
        self._acked = {seq for seq in self._acked if seq >= snapshot.end}
        self._retried = {seq for seq in self._retried if seq >= snapshot.end}
        self._snapshot_cause = ""
        self._is_requested = False

    def on_snapshot_requested(self) -> None:
        """A reader cannot continue from the stored snapshot."""
        self._is_requested = True

    def on_snapshot_failed(self) -> None:
        """The broker did not accept the snapshot."""
        self.counters.failures += 1

    def on_snapshot_lost(self) -> None:
        """The broker lost the snapshot and perhaps the log: store a snapshot before anything else."""
        self._stored = None

    def heartbeat(self) -> LogHeartbeat | None:
        """Return the current heartbeat; None before the first snapshot is stored."""
        if self._stored is None:
            return None
        stream = self._stream
        return LogHeartbeat(self.epoch, stream.next_sequence, stream.digest, self._stored.end, self.upstream)
