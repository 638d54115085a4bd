"""The rules of following a stream that a broker keeps in a log, without socket, clock or thread."""

# The theory of the log
# =====================
#
# A writer has a stream: numbered batches with a digest over them, and a random epoch (kv_events/stream has that
# theory). It puts three things into a broker:
#
#   log         one message per batch: epoch, number, the digest after it. Bounded: the broker drops the oldest ones.
#   snapshot    the whole state at one number, in a bucket, with the digest there. A pointer names the newest one.
#   heartbeat   epoch, next number and digest, published twice per second and stored nowhere.
#
# The writer's rules (jetstream/log_writer):
#
#   W1. The snapshot and the messages after it add up to the state. Before the writer sends a message that would make
#       the broker drop one that the snapshot does not cover, it stores a new snapshot. So the log is bounded, and a
#       reader can begin at any time.
#   W2. In each epoch the snapshot and its pointer come first, then messages, then heartbeats. A writer replaces a
#       pointer only if it knows the current one: of two writers the older one notices and stops. A batch whose id
#       another writer used, or that is larger than a message, is in the snapshot alone.
#   W3. The writer sends a message that was not acknowledged again under the same id, and every message after it. The
#       broker drops what it has. So the log may have messages out of order, and twice.
#
# The reader's rules:
#
#   R1. The reader applies a message when its epoch and number are the next ones and the digest after it is the one that
#       it names. Any other message has no effect: below is a duplicate, of another epoch is fenced off, with another
#       digest is not the writer's. Messages ahead are held, up to as many as may be in flight.
#   R2. LIVE needs a proof: the digest of a heartbeat at its number. Every later message proves itself by R1.
#   R3. A reader that makes no progress over some heartbeats although the writer is ahead has lost something. It begins
#       again with the snapshot in a staging view, which replaces the current view when a heartbeat has proved it. If
#       that leads nowhere (the log was emptied), the reader asks the writer for another snapshot.
#   R4. A heartbeat that contradicts the view starts the same recovery immediately. A heartbeat of another epoch makes
#       the reader read the pointer: it names a new epoch, or the heartbeat is of a writer that was replaced and does
#       not know it yet.
#   R5. Without heartbeats no view is LIVE. The view stays until the follower reports ``ConnectionTimedOut``.
#
# Only heartbeats make a reader send requests, whatever the log contains. Any client of the broker may send heartbeats,
# so requests have a credit (``CursorCounters.credit``). What finds no credit is requested after one of the next
# heartbeats.
#
# Limit: a client with permission to write to the subjects can forge a batch that fits. The next heartbeat exposes it,
# and every snapshot leads to it again until one covers it. The broker's permissions must keep other writers out.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from observability.kv_stream.digest_cursor import NO_EPOCH, Position
from observability.kv_stream.instructions import (
    Apply,
    ApplyStaged,
    Clear,
    LogInstruction,
    ReadLog,
    ReadPointer,
    ReadSnapshot,
    RequestSnapshot,
    RetryLater,
    Staging,
)
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from observability.kv_stream.stream_state import UNCONNECTED, CursorCounters, StreamState, change_state
from scheduler_components.kv_events.stream_digest import digest_after

__all__ = ["STALLED_HEARTBEATS", "LogCursor"]

_MAX_REORDERED = 1_024
"""Messages held because one before them is missing: four times as many as a writer has in flight."""

_MAX_REORDERED_BYTES = 16 * 1024 * 1024
"""The same limit in bytes, against messages that never become contiguous."""

STALLED_HEARTBEATS = 4
"""Heartbeats without progress before a recovery: two seconds, in which even a loaded broker delivers messages."""

_MAX_PAST_DIGESTS = 1_024
"""Digests kept for late heartbeats: half a second of a busy scheduler."""

_PATIENCE = 3
"""Failed requests in a row after which the reader asks for another snapshot: the stored one may be damaged."""

_NONE: tuple[LogInstruction, ...] = ()


@dataclass(slots=True)
class _LogPosition:
    """A position in the stream and in the log.

    Attributes:
        at: epoch, number and digest.
        log_seq: of the last applied message.
        past_digests: the digests before the last batches, the newest last.
        held: messages from the future, by number; ``num_held`` of them with ``held_bytes`` of payload.
        damaged_at: the number after the last batch that could not be read fully, None since the last clear.
    """

    at: Position = field(default_factory=Position)
    log_seq: int = 0
    past_digests: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MAX_PAST_DIGESTS))
    held: dict[int, list[LogMessage]] = field(default_factory=dict)
    num_held: int = 0
    held_bytes: int = 0
    damaged_at: int | None = None

    def is_next(self, message: LogMessage) -> bool:
        """Return True when the digest of ``message`` follows from the current one."""
        return digest_after(self.at.digest, message.seq, message.payload) == message.digest

    def advance(self, message: LogMessage) -> None:
        self.past_digests.append(self.at.digest)
        self.at.digest = message.digest
        self.at.next += 1
        self.log_seq = max(self.log_seq, message.log_seq)

    def hold(self, message: LogMessage) -> None:
        """Keep a message from the future, if there is room."""
        size = len(message.payload)
        if self.num_held < _MAX_REORDERED and self.held_bytes + size <= _MAX_REORDERED_BYTES:
            self.held.setdefault(message.seq, []).append(message)
            self.num_held += 1
            self.held_bytes += size

    def pop_held(self) -> list[LogMessage]:
        """Remove and return the messages held for the next number."""
        held = self.held.pop(self.at.next, [])
        self.num_held -= len(held)
        self.held_bytes -= sum(len(message.payload) for message in held)
        return held

    def digest_at(self, number: int) -> bytes | None:
        """Return the digest before ``number``; None where it was not kept."""
        back = self.at.next - number
        if not back:
            return self.at.digest
        return self.past_digests[-back] if 0 < back <= len(self.past_digests) else None


@dataclass(slots=True)
class _LogRequest:
    """The one open request. ``is_forced``: the snapshot is wanted even if it is of the view's epoch."""

    request_id: int
    is_forced: bool
    pointer: SnapshotPointer | None = None


class LogCursor:
    """Recovers one stream of a log by heartbeats, pointer and snapshot.

    Attributes:
        fenced: messages of another epoch.
        forged: messages with another digest than the one that follows.
        upstream: from the last heartbeat, see ``LogHeartbeat``.
    """

    __slots__ = (
        "_failures", "_heartbeat", "_num_stalled", "_request", "_staging", "_stalled_at", "_state", "_view", "counters",
        "fenced", "forged", "upstream",
    )  # fmt: skip

    def __init__(self) -> None:
        self.counters = CursorCounters()
        self.fenced = self.forged = 0
        self.upstream: str | None = None
        self._state = StreamState.CONNECTING
        self._view = _LogPosition()
        self._staging: _LogPosition | None = None
        self._request: _LogRequest | None = None
        self._heartbeat: LogHeartbeat | None = None
        self._stalled_at = self._num_stalled = 0
        self._failures = 0

    def __repr__(self) -> str:
        return f"<LogCursor {self._state} at {self.last_seq}, open request {self.open_request_id}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last batch in the view; -1 for an empty view."""
        return self._view.at.next - 1

    @property
    def epoch(self) -> bytes:
        """Epoch of the view; ``NO_EPOCH`` before the first snapshot."""
        return self._view.at.epoch

    def is_following(self, epoch: bytes) -> bool:
        """Return True when messages of ``epoch`` are applied to the view or the staging view."""
        return epoch == self._target.at.epoch != NO_EPOCH  # a forged record may have that epoch

    def is_fetching(self, epoch: bytes) -> bool:
        """Return True while the snapshot of ``epoch`` is being read."""
        request = self._request
        return request is not None and request.pointer is not None and request.pointer.epoch == epoch

    @property
    def open_request_id(self) -> int | None:
        """Number of the open request, None without one."""
        return self._request.request_id if self._request else None

    @property
    def is_settled(self) -> bool:
        """True while heartbeats come and no recovery is in progress: waiting will not improve the view."""
        return self._state in (StreamState.LIVE, StreamState.PARTIAL) and self._staging is None

    @property
    def next_log_seq(self) -> int | None:
        """Where to continue reading the log; None before the first snapshot."""
        return None if self._target.at.epoch == NO_EPOCH else self._target.log_seq + 1

    @property
    def _target(self) -> _LogPosition:
        """The position that messages advance."""
        return self._view if self._staging is None else self._staging

    def can_commit(self, heartbeat: LogHeartbeat | None = None) -> bool:
        """Return True when ``heartbeat``, by default the last one, proves the staging view."""
        heartbeat, staging = heartbeat or self._heartbeat, self._staging
        if heartbeat is None or staging is None or heartbeat.epoch != staging.at.epoch:
            return False
        return staging.digest_at(heartbeat.next) == heartbeat.digest

    # --- heartbeats ---

    def on_heartbeat(self, heartbeat: LogHeartbeat) -> tuple[LogInstruction, ...]:
        before, self._heartbeat = self._heartbeat, heartbeat
        target = self._target
        if not self.is_following(heartbeat.epoch):
            return self._on_other_epoch()
        if self._state in UNCONNECTED:
            self._change_state(StreamState.RECOVERING if self.epoch != NO_EPOCH else StreamState.SYNCING)
        self._set_upstream(heartbeat)
        if heartbeat.next > target.at.next:
            return self._on_writer_ahead()
        self._num_stalled = 0
        is_repeated = before is not None and (before.epoch, before.next) == (heartbeat.epoch, heartbeat.next)
        if heartbeat.next < target.at.next and is_repeated:
            # The writer sent its messages before this heartbeat, so it does not have the batches above.
            return self._on_digest_mismatch()
        digest = target.digest_at(heartbeat.next)
        if digest is None:
            return _NONE  # an old heartbeat
        return self._on_verified() if digest == heartbeat.digest else self._on_digest_mismatch()

    def _on_other_epoch(self) -> tuple[LogInstruction, ...]:
        """Read the pointer, which names the epoch to follow."""
        if self.epoch == NO_EPOCH and self._state in UNCONNECTED:
            self._change_state(StreamState.SYNCING)
        return self._read_pointer(is_forced=False)

    def _set_upstream(self, heartbeat: LogHeartbeat) -> None:
        self.upstream = heartbeat.upstream
        if self.upstream is not None and self._state is StreamState.LIVE:
            self._change_state(StreamState.PARTIAL)

    def _on_writer_ahead(self) -> tuple[LogInstruction, ...]:
        """Wait for the writer's messages, and recover after some heartbeats without progress."""
        target = self._target
        if self._stalled_at != target.at.next:
            self._stalled_at, self._num_stalled = target.at.next, 0
        self._num_stalled += 1
        if self._num_stalled <= STALLED_HEARTBEATS:
            return _NONE
        self._recover()
        read = self._read_pointer(is_forced=True)
        # A snapshot was read and did not lead to the writer's position: the log lacks the messages after it.
        return (RequestSnapshot(), *read) if read and self._staging is not None else read

    def _on_verified(self) -> tuple[LogInstruction, ...]:
        """Commit the staging view, if any: the digest matches at the writer's number."""
        self.counters.verified += 1
        target, commit = self._target, _NONE
        if self._staging is not None:
            self.counters.snapshots += 1
            self.counters.restarts += self.epoch not in (NO_EPOCH, target.at.epoch)
            self._view, self._staging = target, None
            commit = (Staging.COMMIT,)
        self._settle()
        heartbeat = self._heartbeat
        if target.damaged_at is not None and heartbeat is not None and heartbeat.snapshot_end > target.damaged_at:
            return (*commit, *self._read_pointer(is_forced=True))  # the snapshot has folded the damaged batch
        return commit

    def _on_digest_mismatch(self) -> tuple[LogInstruction, ...]:
        """Recover: the applied batches are not what the writer sent."""
        self.counters.splices += 1
        self._recover()
        return self._read_pointer(is_forced=True)

    def on_heartbeat_timeout(self) -> tuple[LogInstruction, ...]:
        self._request, self._heartbeat = None, None
        self._failures = self._num_stalled = 0
        if self._state is not StreamState.DEAD:
            self._change_state(StreamState.CONNECTING)
        return _NONE

    def on_connection_timeout(self) -> tuple[LogInstruction, ...]:
        self.on_heartbeat_timeout()
        dropped = self._drop_staging()
        self._view = _LogPosition()
        self._change_state(StreamState.DEAD)
        return (*dropped, Clear("the writer sends no heartbeats"))

    # --- the log ---

    def on_message(self, message: LogMessage) -> Iterator[LogInstruction]:
        """Yield an instruction for ``message`` if it is the next one, and for each held message that follows."""
        target = self._target
        if not self.is_following(message.epoch):
            self.fenced += 1
        elif message.seq < target.at.next:
            self.counters.duplicates += 1
        elif message.seq > target.at.next:
            self.counters.gaps += 1
            target.hold(message)
        else:
            candidates = [message]
            while candidates:
                accepted = next((each for each in candidates if target.is_next(each)), None)
                self.forged += len(candidates) - (accepted is not None)
                if accepted is None:
                    return
                yield self._advance(target, accepted)
                candidates = target.pop_held()

    def _advance(self, target: _LogPosition, message: LogMessage) -> LogInstruction:
        target.advance(message)
        self.counters.applied += 1
        if target is not self._view:
            self.counters.recovered += 1
            return ApplyStaged(message.seq, message.payload, False)
        is_late = self._state is not StreamState.LIVE
        self.counters.recovered += is_late
        return Apply(message.seq, message.payload, is_late)

    def on_batches_applied(self) -> tuple[LogInstruction, ...]:
        """Verify the view if it has reached the position of the last heartbeat."""
        heartbeat, target = self._heartbeat, self._target
        if heartbeat is None or self._is_proved or not self.is_following(heartbeat.epoch):
            return _NONE
        digest = target.digest_at(heartbeat.next)
        if digest is None:
            return _NONE
        return self._on_verified() if digest == heartbeat.digest else self._on_digest_mismatch()

    @property
    def _is_proved(self) -> bool:
        return self._staging is None and self._state in (StreamState.LIVE, StreamState.PARTIAL, *UNCONNECTED)

    # --- pointer and snapshot ---

    def on_pointer_read(self, request_id: int, pointer: SnapshotPointer | None) -> tuple[LogInstruction, ...]:
        request = self._request
        if request is None or request.request_id != request_id:
            self.counters.stale_replays += 1
            return _NONE
        if pointer is None:
            return self._on_request_failed()
        if pointer.epoch == self._target.at.epoch and not request.is_forced:
            self._request = None  # the heartbeat came from a writer that was replaced
            self._failures = 0
            return _NONE
        self._recover()
        request.pointer = pointer
        return (ReadSnapshot(request_id, pointer),)

    def on_snapshot_read(self, request_id: int, snapshot: Snapshot | None) -> Iterator[LogInstruction]:
        """Yield instructions that build the snapshot in a staging view."""
        request = self._request
        if request is None or request.request_id != request_id or request.pointer is None:
            self.counters.stale_replays += 1
            return
        if snapshot is None or (snapshot.epoch, snapshot.end) != (request.pointer.epoch, request.pointer.end):
            yield from self._on_request_failed()
            return
        position = _LogPosition(Position(snapshot.epoch, snapshot.first, snapshot.digest), snapshot.log_seq)
        for payload in snapshot.batches:
            position.past_digests.append(position.at.digest)
            position.at.advance(payload)
        if position.at.digest != snapshot.end_digest:
            self.counters.replays_cut += 1
            yield from self._on_request_failed()
            return
        self._request = None
        self._failures = self._num_stalled = 0
        self._recover()
        yield from self._drop_staging()
        self._staging = position
        yield Staging.START
        for chunk in snapshot.chunks:
            yield ApplyStaged(snapshot.first - 1, chunk, True)
        for seq, payload in enumerate(snapshot.batches, snapshot.first):
            self.counters.recovered += 1
            self.counters.applied += 1
            yield ApplyStaged(seq, payload, False)
        yield ReadLog(snapshot.log_seq + 1)

    def on_read_timeout(self, request_id: int) -> tuple[LogInstruction, ...]:
        if request_id != self.open_request_id:
            return _NONE
        self.counters.replays_unanswered += 1
        return self._on_request_failed()

    def on_retry_due(self) -> tuple[LogInstruction, ...]:
        if not self._failures or self._request is not None:
            return _NONE
        return self._send(is_forced=True) if self.counters.credit else (RetryLater(self._failures),)

    def _read_pointer(self, *, is_forced: bool) -> tuple[LogInstruction, ...]:
        """Read the pointer, unless a request is open or waits for its pause, or there is no credit."""
        is_waiting = self._request is not None or self._failures or not self.counters.credit
        return _NONE if is_waiting else self._send(is_forced=is_forced)

    def _send(self, *, is_forced: bool) -> tuple[LogInstruction, ...]:
        self.counters.replays_asked += 1
        self._request = _LogRequest(self.counters.replays_asked, is_forced)
        return (ReadPointer(self._request.request_id),)

    def _on_request_failed(self) -> tuple[LogInstruction, ...]:
        self._request = None
        self._failures += 1
        requested = (RequestSnapshot(),) if self._failures >= _PATIENCE else _NONE
        return (*requested, RetryLater(self._failures))

    def _drop_staging(self) -> tuple[LogInstruction, ...]:
        staging, self._staging = self._staging, None
        return _NONE if staging is None else (Staging.ABORT,)

    # --- what the follower found in a batch ---

    def on_clear_applied(self) -> tuple[LogInstruction, ...]:
        """Forget earlier damage: a clear removes whatever an unreadable batch would have changed."""
        self._target.damaged_at = None
        if self._state is StreamState.PARTIAL and self._staging is None:
            self._settle()
        return _NONE

    def on_batch_damaged(self) -> tuple[LogInstruction, ...]:
        self._target.damaged_at = self._target.at.next
        if self._state is StreamState.LIVE and self._staging is None:
            self._settle()
        return _NONE

    # --- the state ---

    def _settle(self) -> None:
        is_whole = self._view.damaged_at is None and self.upstream is None
        self._change_state(StreamState.LIVE if is_whole else StreamState.PARTIAL)

    def _recover(self) -> None:
        """Mark a recovery as in progress, unless no heartbeat has come."""
        if self._heartbeat is not None:
            self._change_state(StreamState.SYNCING if self.epoch == NO_EPOCH else StreamState.RECOVERING)

    def _change_state(self, state: StreamState) -> None:
        self._state = change_state(self._state, state, self.counters)
