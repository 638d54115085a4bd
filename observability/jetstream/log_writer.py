"""What one stream's writer puts into the log and the bucket, and when. Pure: no socket, no clock, no thread.

The theory of the log is in ``cursor``, beside its reader's rules.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import attrs
import msgspec

from observability.jetstream.records import LogHeartbeat, LogMessage, Snapshot
from scheduler_components.kv_events import BatchEncoder, EventStream
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES

__all__ = ["LogLimits", "LogStats", "LogTraffic", "LogWriter", "LogWriterCounters"]

_BUFFER_STEPS = 1_024
"""Batches that wait for a broker one by one: seconds of its restart. A longer absence costs a snapshot, and no more."""

_BUFFER_BYTES = 16 * 1024 * 1024
"""The same in bytes: what a snapshot and a writer take besides the blocks that stand."""


_WANTED_PAUSE_S = 5.0
"""Between bases that readers ask for: one of 100,000 blocks has some 25 MB."""


@attrs.frozen
class LogLimits:
    """What the broker keeps, and what is kept for it.

    Attributes:
        max_msgs: per stream.
        max_bytes: per worker, over all its streams.
        max_age_s: seconds.
        overhead_bytes: what a message takes besides its payload at most: subject, id, digest, the broker's own record.
        buffer_steps, buffer_bytes: batches kept for a broker that is away, and their payloads.
    """

    max_msgs: int
    max_bytes: int
    max_age_s: float
    overhead_bytes: int
    buffer_steps: int = _BUFFER_STEPS
    buffer_bytes: int = _BUFFER_BYTES


@dataclass(slots=True)
class LogTraffic:
    """Bytes that were put into one worker's log, whatever the stream: the broker drops the oldest of them all."""

    total_bytes: int = 0


@dataclass(slots=True)
class _StoredBase:
    """The newest snapshot in the bucket: its end, the log's traffic when it was made, and when it was stored."""

    end: int
    traffic_bytes: int
    stored_s: float


@dataclass(slots=True)
class LogWriterCounters:
    """What a writer did; each only ever grows.

    Attributes:
        stored: batches that the broker has acknowledged.
        retried: batches that were sent again, because no acknowledgement came.
        collapsed: batches that went into the log by the snapshot alone: the broker was away for too long, or they were
            larger than its messages.
        bases: bases stored.
        failures: messages and bases that the broker did not take.
    """

    stored: int = 0
    retried: int = 0
    collapsed: int = 0
    bases: int = 0
    failures: int = 0


class LogStats(msgspec.Struct, frozen=True, gc=False):
    """One written stream at one moment; counters run from when it was opened.

    Attributes:
        rank: the stream's number; subject: where it is written.
        is_connected: the broker is there. is_superseded: another writer took the stream over, and this one stopped.
        last_seq: number of the last batch, -1 before the first; waiting: batches that the broker does not have yet.
        stored, retried, collapsed, bases, failures: see ``LogWriterCounters``.
        broker_losses: times that the broker went away.
    """

    rank: int
    subject: str
    is_connected: bool = False
    is_superseded: bool = False
    last_seq: int = -1
    waiting: int = 0
    stored: int = 0
    retried: int = 0
    collapsed: int = 0
    bases: int = 0
    failures: int = 0
    broker_losses: int = 0


@dataclass(slots=True, kw_only=True)
class LogWriter:
    """One stream's numbers, window and snapshot, and how far the broker has them.

    The broker may keep the ``limits`` and no more. So no message goes out that would make it drop one which the
    snapshot
    in the bucket does not have: a new snapshot comes first. What the broker could not take for so long that the window
    has
    passed it goes out as a snapshot, too.

    Attributes:
        epoch: of this life; ``start_epoch`` takes another.
        rank: stamped on chunks of the snapshot.
        traffic: of the worker's log, shared by its streams.
        upstream: said with every heartbeat, see there.
        log_seq: the newest place of the log that is known: messages that were not handed out yet come behind it.
    """

    epoch: bytes
    rank: int
    limits: LogLimits
    traffic: LogTraffic
    upstream: str | None = None
    log_seq: int = 0
    counters: LogWriterCounters = field(default_factory=LogWriterCounters)
    _stream: EventStream = field(init=False)
    _encoder: BatchEncoder = field(default_factory=BatchEncoder, init=False)
    _out: int = field(default=0, init=False)  # the next number to hand out
    _highest: int = field(default=0, init=False)  # one above the highest that was ever handed out
    _acked: set[int] = field(default_factory=set, init=False)  # stored, and handed out again if one before it failed
    _base: _StoredBase | None = field(default=None, init=False)
    _under_way: set[int] = field(default_factory=set, init=False)  # handed out, and not answered
    _again: set[int] = field(default_factory=set, init=False)  # handed out more than once, and not stored yet
    _why_base: str = field(default="", init=False)  # what only a snapshot can put right, whatever the limits
    _is_wanted: bool = field(default=False, init=False)  # a reader asks for a snapshot

    def __post_init__(self) -> None:
        self.start_epoch(self.epoch)

    def start_epoch(self, epoch: bytes) -> None:
        """Begin a stream with nothing in it. What the broker has of the life before is fenced off by the epoch."""
        assert len(epoch) == EPOCH_BYTES
        self.epoch = epoch
        self._stream = EventStream(epoch=epoch, max_steps=self.limits.buffer_steps, max_bytes=self.limits.buffer_bytes)
        self._out = self._highest = 0
        self._acked.clear()
        self._again.clear()
        self._under_way.clear()
        self._base = None
        self._why_base = ""

    @property
    def stream(self) -> EventStream:
        """Its numbers, window and snapshot; to be read only."""
        return self._stream

    @property
    def num_waiting(self) -> int:
        """Batches that the broker has neither acknowledged nor in a snapshot."""
        num_under_way = sum(seq < self._out for seq in self._under_way)
        return self._stream.next_sequence - self._first_wanted - len(self._acked) + num_under_way

    @property
    def _first_wanted(self) -> int:
        return self._out if self._base is None else max(self._out, self._base.end)

    # --- batches ---

    def append(self, payload: bytes) -> int:
        """Number one batch; returns the number."""
        seq = self._stream.append(payload)
        self._stream.fold_oldest()
        return seq

    def pop_message(self, largest_bytes: int) -> LogMessage | None:
        """Hand out the next batch that may be sent; None when there is none, or a snapshot must be stored before it.

        Args:
            largest_bytes: that a payload may have.
        """
        snapshot, stream = self._base, self._stream
        if snapshot is None:
            return None
        seq = self._first_wanted
        while seq in self._acked:
            self._acked.discard(seq)
            seq += 1
        self._out = seq
        if not stream.first <= seq < stream.next_sequence or seq - snapshot.end >= self.limits.max_msgs:
            return None
        payload = stream.payload(seq)
        if len(payload) > largest_bytes:
            self._why_base = "a batch is larger than the broker's messages"
            return None
        size = len(payload) + self.limits.overhead_bytes
        if self.traffic.total_bytes - snapshot.traffic_bytes + size > self.limits.max_bytes:
            return None
        self.traffic.total_bytes += size
        if seq < self._highest:
            self.counters.retried += 1
            self._again.add(seq)
        self._out = seq + 1
        self._under_way.add(seq)
        self._highest = max(self._highest, self._out)
        return LogMessage(0, self.epoch, seq, stream.digest_before(seq + 1), payload)

    def on_stored(self, message: LogMessage, log_seq: int, *, is_duplicate: bool = False) -> None:
        """The broker has ``message``, or one of its id (``is_duplicate``), at place ``log_seq``."""
        self.log_seq = max(self.log_seq, log_seq)
        if message.epoch == self.epoch:
            self.counters.stored += 1
            if is_duplicate and message.seq not in self._again:
                self._why_base = "somebody else used the id of a batch"
            self._again.discard(message.seq)
            self._under_way.discard(message.seq)
            if message.seq >= self._out:
                self._acked.add(message.seq)

    def on_failed(self, message: LogMessage) -> None:
        """Nobody knows whether the broker has ``message``: it is handed out again, and what follows it."""
        self.counters.failures += 1
        if message.epoch == self.epoch:
            self._out = min(self._out, message.seq)
            self._under_way.discard(message.seq)

    # --- the snapshot ---

    def snapshot_reason(self, now_s: float) -> str:
        """Why a snapshot must be stored now; empty when none must."""
        snapshot, limits = self._base, self.limits
        if snapshot is None:
            return "the stream begins"
        if self._first_wanted < self._stream.first:
            return "the broker was away for longer than batches are kept"
        if self._why_base:
            return self._why_base
        if self._is_wanted and now_s - snapshot.stored_s >= _WANTED_PAUSE_S:
            return "a reader asks for one"
        if now_s - snapshot.stored_s >= limits.max_age_s / 2:
            return "half of max_age_s is over"
        if self._highest <= snapshot.end:
            return ""  # nothing in the log that could be dropped too early
        if self._highest - snapshot.end >= limits.max_msgs // 2:
            return "half of max_msgs is used up"
        if self.traffic.total_bytes - snapshot.traffic_bytes >= limits.max_bytes // 2:
            return "half of max_bytes is used up"
        return ""

    def build_snapshot(self) -> Generator[None, None, tuple[Snapshot, int]]:
        """Make the snapshot of the present state, in slices; returns it and the log's traffic then, for
        ``on_snapshot_stored``.

        Batches may be appended between two slices; they are in it.
        """
        stream = self._stream
        stream.pins += 1
        try:
            first, chain = stream.first, stream.digest_before(stream.first)
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
        snapshot = Snapshot(stream.epoch, first, chain, chunks, batches, stream.digest, self.log_seq)
        return snapshot, self.traffic.total_bytes

    def on_snapshot_stored(self, snapshot: Snapshot, traffic_bytes: int, now_s: float) -> None:
        """The bucket has ``snapshot``, which was made at ``traffic_bytes``."""
        if snapshot.epoch != self.epoch:
            return
        self.counters.bases += 1
        self.counters.collapsed += max(0, snapshot.end - self._highest)
        self._base = _StoredBase(snapshot.end, traffic_bytes, now_s)
        self._highest = max(self._highest, snapshot.end)
        self._acked = {seq for seq in self._acked if seq >= snapshot.end}
        self._again = {seq for seq in self._again if seq >= snapshot.end}
        self._under_way = {seq for seq in self._under_way if seq >= snapshot.end}
        self._why_base = ""
        self._is_wanted = False

    def on_snapshot_requested(self) -> None:
        """A reader cannot begin with the snapshot that there is."""
        self._is_wanted = True

    def on_snapshot_failed(self) -> None:
        """The broker did not take the snapshot."""
        self.counters.failures += 1

    def on_snapshot_lost(self) -> None:
        """The broker does not have the snapshot any more, nor perhaps the log: begin with a snapshot."""
        self._base = None

    def heartbeat(self) -> LogHeartbeat | None:
        """Where the stream stands; None before readers could begin to read it."""
        if self._base is None:
            return None
        stream = self._stream
        return LogHeartbeat(self.epoch, stream.next_sequence, stream.digest, self._base.end, self.upstream)
