"""The rules of following a stream that is kept in a log, pure: events in, instructions out."""

# The theory of the log
# =====================
#
# A writer has a stream: batches with numbers, a digest chained over them, a random epoch per life (the theory is in
# kv_events/stream). It puts three things into a broker:
#
#   log     one message per batch: epoch, number, the digest after it. Bounded: the broker drops the oldest messages.
#   snapshot    the whole state at one number, in a bucket, with the digest there. A pointer names the newest.
#   heartbeat    epoch, next number and digest, twice a second, to whoever listens. Nobody keeps it.
#
# The writer's side of the contract (writer.py):
#
#   W1. snapshot + the messages behind it = the state. No message is sent that would make the broker drop one that the
#   snapshot
#       does not have: a new snapshot is stored first. The log is bounded, and no reader comes too late.
#   W2. In each life the snapshot and its pointer come first, then messages, then beats. A pointer is written only in
#   the place
#       of the pointer that its writer knows: of two writers the older finds out, and stops.
#       A batch whose id somebody else used, or that is larger than a message, goes by a snapshot.
#   W3. A message whose acknowledgement does not come is sent again under the same id, and what followed it, too. The
#       broker drops what it has. So messages may stand in the log behind some that follow on them, and twice.
#
# The reader's rules:
#
#   R1. A message is applied when its epoch and number are the next and the digest after it is the one that it names.
#       Others cost themselves: what is below is a duplicate, what is of another epoch is fenced off, what names
#       another digest is not the writer's. What is ahead is held, up to as many as may be under way.
#   R2. LIVE needs a proof: the digest of a heartbeat, at its number. Every message since then proves itself by R1.
#   R3. A reader that stands still over some beats, although the writer is ahead, has lost something: it begins with
#       the snapshot, in a staging view, which replaces the present one when a heartbeat has proved it. Where that leads
#       nowhere
#       (somebody emptied the log), it says so, and the writer stores another snapshot.
#   R4. A heartbeat that contradicts the view does the same at once. A heartbeat of another epoch is a reason to look at
#   the pointer:
#       a new life if the pointer says so, else a writer that does not know yet that another took its place.
#   R5. Who is not heard, writer or broker, is not LIVE. The view stays until the owner gives up.
#
# Nothing but beats makes a reader ask, so questions are paced by the writer, whatever stands in the log.
#
# Honest limit: who may write to the subjects may forge a batch that fits. It is found by the next heartbeat, and read
# again
# with every snapshot, until the snapshot has passed it. The broker's permissions keep others out.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from observability.jetstream.records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from observability.kv_stream import (
    NO_EPOCH,
    STATE_TRANSITIONS,
    AbortStaging,
    Apply,
    ApplyStaged,
    Clear,
    CommitStaging,
    CursorCounters,
    Position,
    RetryLater,
    StartStaging,
    StreamState,
)
from scheduler_components.kv_events.stream_digest import digest_after

__all__ = ["MAX_REORDERED", "LogCursor", "LogInstruction", "ReadSnapshot", "ReadPointer", "ReadLog", "RequestSnapshot"]

MAX_REORDERED = 1_024
"""Messages held because one before them is missing: four times as many as a writer has under way."""

_MAX_AHEAD_BYTES = 16 * 1024 * 1024
"""The same in bytes: who fills the log with what never follows on costs no more."""

_STUCK_AFTER = 4
"""Beats without progress: two seconds, in which a reader of a loaded broker has begun to read."""

_MAX_PAST = 1_024
"""Digests remembered, for beats that come late: half a second of a busy scheduler."""


_PATIENCE = 3
"""Failed questions in a row after which the writer is asked for another snapshot: the one that there is may be
damaged.
"""


class ReadPointer(msgspec.Struct, frozen=True, gc=False):
    """Read the pointer; answer by ``on_pointer_read`` under the number ``ask``."""

    ask: int


class ReadSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Read the snapshot that ``pointer`` names; answer by ``on_snapshot_read``. Of an answer only the latest question
    counts.
    """

    ask: int
    pointer: SnapshotPointer


class ReadLog(msgspec.Struct, frozen=True, gc=False):
    """Read the log from the place ``log_seq`` on, and no more where it was read."""

    log_seq: int


class RequestSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Tell the writer that its snapshot leads nowhere: it stores another, within some seconds."""


LogInstruction = (
    Apply
    | ApplyStaged
    | StartStaging
    | CommitStaging
    | AbortStaging
    | Clear
    | RetryLater
    | ReadPointer
    | ReadSnapshot
    | ReadLog
    | RequestSnapshot
)
_NONE: tuple[LogInstruction, ...] = ()
_UNHEARD = (StreamState.CONNECTING, StreamState.DEAD)


@dataclass(slots=True)
class _Place:
    """A place in the stream and in the log.

    Attributes:
        at: number and digest.
        log_seq: of the last message that was applied.
        past: the digests before the last batches, the newest last.
        ahead: messages from the future, by number; ``num_ahead`` of them, with ``ahead_bytes`` of payload.
        damaged_at: the number behind the last batch that could not be read whole, None since the last clear.
    """

    at: Position = field(default_factory=Position)
    log_seq: int = 0
    past: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MAX_PAST))
    ahead: dict[int, list[LogMessage]] = field(default_factory=dict)
    num_ahead: int = 0
    ahead_bytes: int = 0
    damaged_at: int | None = None

    def takes(self, message: LogMessage) -> bool:
        """True when the message follows on and proves itself."""
        return digest_after(self.at.digest, message.seq, message.payload) == message.digest

    def advance(self, message: LogMessage) -> None:
        self.past.append(self.at.digest)
        self.at.digest = message.digest
        self.at.next += 1
        self.log_seq = max(self.log_seq, message.log_seq)

    def hold(self, message: LogMessage) -> None:
        """Keep a message from the future, if there is room."""
        size = len(message.payload)
        if self.num_ahead < MAX_REORDERED and self.ahead_bytes + size <= _MAX_AHEAD_BYTES:
            self.ahead.setdefault(message.seq, []).append(message)
            self.num_ahead += 1
            self.ahead_bytes += size

    def take_held(self) -> list[LogMessage]:
        """What was held for the next number."""
        held = self.ahead.pop(self.at.next, [])
        self.num_ahead -= len(held)
        self.ahead_bytes -= sum(len(message.payload) for message in held)
        return held

    def digest_at(self, number: int) -> bytes | None:
        """The digest before ``number``; None where it is not remembered."""
        back = self.at.next - number
        if not back:
            return self.at.digest
        return self.past[-back] if 0 < back <= len(self.past) else None


@dataclass(slots=True)
class _Question:
    """The one open question. ``is_forced``: the snapshot is wanted even if it is of the life that is held."""

    ask: int
    is_forced: bool
    pointer: SnapshotPointer | None = None


class LogCursor:
    """Where one stream's view stands, and what is to be done next.

    A method that returns instructions expects them to be carried out in order, before the next call.

    Attributes:
        fenced: messages of another life.
        forged: messages that name another digest than the one after them.
        upstream: what the last heartbeat said of it, see ``LogHeartbeat``.
    """

    __slots__ = (
        "_beat", "_failures", "_num_stuck", "_question", "_staging", "_state", "_stuck_at", "_view", "counters",
        "fenced", "forged", "upstream",
    )  # fmt: skip

    def __init__(self) -> None:
        self.counters = CursorCounters()
        self.fenced = self.forged = 0
        self.upstream: str | None = None
        self._state = StreamState.CONNECTING
        self._view = _Place()
        self._staging: _Place | None = None
        self._question: _Question | None = None
        self._beat: LogHeartbeat | None = None
        self._stuck_at = self._num_stuck = 0
        self._failures = 0

    def __repr__(self) -> str:
        return f"<LogCursor {self._state} at {self.last_seq}, asks #{self.open_request_id}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted, now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last batch that the view has; -1 when it has none."""
        return self._view.at.next - 1

    @property
    def epoch(self) -> bytes:
        """The life that the view is of; ``NO_EPOCH`` before there is any."""
        return self._view.at.epoch

    def is_following(self, epoch: bytes) -> bool:
        """True when messages of this life are applied, to the view or to what is to replace it."""
        return epoch == self._place.at.epoch

    def is_fetching(self, epoch: bytes) -> bool:
        """True while the snapshot of this life is read."""
        question = self._question
        return question is not None and question.pointer is not None and question.pointer.epoch == epoch

    @property
    def open_request_id(self) -> int | None:
        """Number of the question whose answer is awaited, None without one."""
        return self._question.ask if self._question else None

    @property
    def is_settled(self) -> bool:
        """True while the writer is heard and no recovery is under way: the view will not get better by waiting."""
        return self._state in (StreamState.LIVE, StreamState.PARTIAL) and self._staging is None

    @property
    def next_log_seq(self) -> int | None:
        """Where to go on reading the log; None before a snapshot has said where to begin."""
        return None if self._place.at.epoch == NO_EPOCH else self._place.log_seq + 1

    @property
    def _place(self) -> _Place:
        """What messages are applied to."""
        return self._view if self._staging is None else self._staging

    # --- what is heard ---

    def on_heartbeat(self, heartbeat: LogHeartbeat) -> tuple[LogInstruction, ...]:
        """The writer said where it stands."""
        before, self._beat = self._beat, heartbeat
        place = self._place
        if heartbeat.epoch != place.at.epoch:
            return self._foreign()
        if self._state in _UNHEARD:
            self._become(StreamState.RECOVERING if self.epoch != NO_EPOCH else StreamState.SYNCING)
        self._hear_upstream(heartbeat)
        if heartbeat.next > place.at.next:
            return self._behind()
        self._num_stuck = 0
        stands_still = before is not None and (before.epoch, before.next) == (heartbeat.epoch, heartbeat.next)
        if heartbeat.next < place.at.next and stands_still:
            return self._splice()  # the writer has no such batch: what it has sent came before this heartbeat
        digest = place.digest_at(heartbeat.next)
        if digest is None:
            return _NONE  # an old heartbeat
        return self._prove() if digest == heartbeat.digest else self._splice()

    def _foreign(self) -> tuple[LogInstruction, ...]:
        """A heartbeat of another life: look which one the pointer names."""
        if self.epoch == NO_EPOCH and self._state in _UNHEARD:
            self._become(StreamState.SYNCING)
        return self._ask(is_forced=False)

    def _hear_upstream(self, heartbeat: LogHeartbeat) -> None:
        self.upstream = heartbeat.upstream
        if self.upstream is not None and self._state is StreamState.LIVE:
            self._become(StreamState.PARTIAL)

    def _behind(self) -> tuple[LogInstruction, ...]:
        """The writer is ahead: its messages are on their way, unless nothing comes."""
        place = self._place
        if self._stuck_at != place.at.next:
            self._stuck_at, self._num_stuck = place.at.next, 0
        self._num_stuck += 1
        if self._num_stuck <= _STUCK_AFTER:
            return _NONE
        self._recover()
        # The snapshot that was read did not lead to where the writer is: what should follow on it is not in the log.
        wanted = (RequestSnapshot(),) if self._staging is not None and self._question is None else _NONE
        return (*wanted, *self._ask(is_forced=True))

    def _prove(self) -> tuple[LogInstruction, ...]:
        """The digest agrees at the writer's number."""
        self.counters.verified += 1
        place, swap = self._place, _NONE
        if self._staging is not None:
            self.counters.snapshots += 1
            self.counters.restarts += self.epoch not in (NO_EPOCH, place.at.epoch)
            self._view, self._staging = place, None
            swap = (CommitStaging(),)
        self._settle()
        heartbeat = self._beat
        if place.damaged_at is not None and heartbeat is not None and heartbeat.snapshot_end > place.damaged_at:
            return (*swap, *self._ask(is_forced=True))  # what could not be read may be folded by now
        return swap

    def _splice(self) -> tuple[LogInstruction, ...]:
        """What was applied is not what the writer sent."""
        self.counters.splices += 1
        self._recover()
        return self._ask(is_forced=True)

    def on_heartbeat_timeout(self) -> tuple[LogInstruction, ...]:
        """The writer or the broker is not heard. The view stays until the owner gives up."""
        self._question, self._beat = None, None
        self._failures = self._num_stuck = 0
        if self._state is not StreamState.DEAD:
            self._become(StreamState.CONNECTING)
        return _NONE

    def on_connection_timeout(self) -> tuple[LogInstruction, ...]:
        """The writer is taken for dead: its blocks are no longer worth routing to."""
        self.on_heartbeat_timeout()
        dropped = self._drop_staging()
        self._view = _Place()
        self._become(StreamState.DEAD)
        return (*dropped, Clear("the writer is not heard"))

    # --- what the log has ---

    def on_message(self, message: LogMessage) -> Iterator[LogInstruction]:
        """Yield an instruction for ``message`` if it follows on, and for each that was held for it."""
        place = self._place
        if message.epoch != place.at.epoch:
            self.fenced += 1
        elif message.seq < place.at.next:
            self.counters.duplicates += 1
        elif message.seq > place.at.next:
            self.counters.gaps += 1
            place.hold(message)
        else:
            candidates = [message]
            while candidates:
                taken = next((each for each in candidates if place.takes(each)), None)
                self.forged += len(candidates) - (taken is not None)
                if taken is None:
                    return
                yield self._advance(place, taken)
                candidates = place.take_held()

    def _advance(self, place: _Place, message: LogMessage) -> LogInstruction:
        place.advance(message)
        self.counters.applied += 1
        if place is not self._view:
            self.counters.recovered += 1
            return ApplyStaged(message.seq, message.payload, False)
        is_late = self._state is not StreamState.LIVE
        self.counters.recovered += is_late
        return Apply(message.seq, message.payload, is_late)

    def can_commit(self, heartbeat: LogHeartbeat | None = None) -> bool:
        """True when ``heartbeat``, or the last one, proves what is to replace the view."""
        heartbeat, staging = heartbeat or self._beat, self._staging
        if heartbeat is None or staging is None or heartbeat.epoch != staging.at.epoch:
            return False
        return staging.digest_at(heartbeat.next) == heartbeat.digest

    def verify_position(self) -> tuple[LogInstruction, ...]:
        """After messages were applied, or a snapshot: prove the view if it stands where the last heartbeat said."""
        heartbeat, place = self._beat, self._place
        if heartbeat is None or self._is_proved or heartbeat.epoch != place.at.epoch:
            return _NONE
        digest = place.digest_at(heartbeat.next)
        if digest is None:
            return _NONE
        return self._prove() if digest == heartbeat.digest else self._splice()

    @property
    def _is_proved(self) -> bool:
        return self._staging is None and self._state in (StreamState.LIVE, StreamState.PARTIAL, *_UNHEARD)

    # --- pointer and snapshot ---

    def on_pointer_read(self, ask: int, pointer: SnapshotPointer | None) -> tuple[LogInstruction, ...]:
        """The pointer, None when there is none or it could not be read."""
        question = self._question
        if question is None or question.ask != ask:
            self.counters.stale_replays += 1
            return _NONE
        if pointer is None:
            return self._failed()
        if pointer.epoch == self._place.at.epoch and not question.is_forced:
            self._question = None  # the heartbeat is of a writer that lost its place
            self._failures = 0
            return _NONE
        self._recover()
        question.pointer = pointer
        return (ReadSnapshot(ask, pointer),)

    def on_snapshot_read(self, ask: int, snapshot: Snapshot | None) -> Iterator[LogInstruction]:
        """Yield instructions that build the snapshot in a staging view; None when it could not be read."""
        question = self._question
        if question is None or question.ask != ask or question.pointer is None:
            self.counters.stale_replays += 1
            return
        if snapshot is None or (snapshot.epoch, snapshot.end) != (question.pointer.epoch, question.pointer.end):
            yield from self._failed()
            return
        place = _Place(Position(snapshot.epoch, snapshot.first, snapshot.digest), snapshot.log_seq)
        for payload in snapshot.batches:
            place.past.append(place.at.digest)
            place.at.advance(payload)
        if place.at.digest != snapshot.end_digest:
            self.counters.replays_cut += 1
            yield from self._failed()
            return
        self._question = None
        self._failures = self._num_stuck = 0
        self._recover()
        yield from self._drop_staging()
        self._staging = place
        yield StartStaging()
        for chunk in snapshot.chunks:
            yield ApplyStaged(snapshot.first - 1, chunk, True)
        for seq, payload in enumerate(snapshot.batches, snapshot.first):
            self.counters.recovered += 1
            self.counters.applied += 1
            yield ApplyStaged(seq, payload, False)
        yield ReadLog(snapshot.log_seq + 1)

    def on_read_timeout(self, ask: int) -> tuple[LogInstruction, ...]:
        """The answer to question ``ask`` did not come in time."""
        if ask != self.open_request_id:
            return _NONE
        self.counters.replays_unanswered += 1
        return self._failed()

    def on_retry_due(self) -> tuple[LogInstruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        return self._open_question(is_forced=True) if self._failures and self._question is None else _NONE

    def _ask(self, *, is_forced: bool) -> tuple[LogInstruction, ...]:
        """Ask, unless a question is open or waits for its pause."""
        return _NONE if self._question is not None or self._failures else self._open_question(is_forced=is_forced)

    def _open_question(self, *, is_forced: bool) -> tuple[LogInstruction, ...]:
        self.counters.replays_asked += 1
        self._question = _Question(self.counters.replays_asked, is_forced)
        return (ReadPointer(self._question.ask),)

    def _failed(self) -> tuple[LogInstruction, ...]:
        self._question = None
        self._failures += 1
        wanted = (RequestSnapshot(),) if self._failures >= _PATIENCE else _NONE
        return (*wanted, RetryLater(self._failures))

    def _drop_staging(self) -> tuple[LogInstruction, ...]:
        staging, self._staging = self._staging, None
        return _NONE if staging is None else (AbortStaging(),)

    # --- what the owner found in a batch ---

    def on_cleared(self) -> None:
        """The batch just applied cleared all blocks: what could not be read before it does not matter any more."""
        self._place.damaged_at = None
        if self._state is StreamState.PARTIAL and self._staging is None:
            self._settle()

    def on_damaged(self) -> None:
        """The batch just applied could not be read whole: the view may differ by what it said."""
        self._place.damaged_at = self._place.at.next
        if self._state is StreamState.LIVE and self._staging is None:
            self._settle()

    # --- the state ---

    def _settle(self) -> None:
        is_whole = self._view.damaged_at is None and self.upstream is None
        self._become(StreamState.LIVE if is_whole else StreamState.PARTIAL)

    def _recover(self) -> None:
        """A recovery is under way, unless nobody is heard."""
        if self._beat is not None:
            self._become(StreamState.SYNCING if self.epoch == NO_EPOCH else StreamState.RECOVERING)

    def _become(self, state: StreamState) -> None:
        if state is not self._state:
            assert state in STATE_TRANSITIONS[self._state], f"{self._state} may not become {state}"
            self.counters.losses += state is StreamState.PARTIAL
            self._state = state
