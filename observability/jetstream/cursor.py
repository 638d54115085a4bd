"""The rules of following a stream that is kept in a log, pure: events in, instructions out."""

# The theory of the log
# =====================
#
# A writer has a stream: batches with numbers, a digest chained over them, a random epoch per life (the theory is in
# kv_events/stream). It puts three things into a broker:
#
#   log     one message per batch: epoch, number, the digest after it. Bounded: the broker drops the oldest messages.
#   base    the whole state at one number, in a bucket, with the digest there. A head names the newest.
#   beat    epoch, next number and digest, twice a second, to whoever listens. Nobody keeps it.
#
# The writer's side of the contract (writer.py):
#
#   W1. base + the messages behind it = the state. No message is sent that would make the broker drop one that the base
#       does not have: a new base is stored first. The log is bounded, and no reader comes too late.
#   W2. In each life the base and its head come first, then messages, then beats. A head is written only in the place
#       of the head that its writer knows: of two writers the older finds out, and stops.
#       A batch whose id somebody else used, or that is larger than a message, goes by a base.
#   W3. A message whose acknowledgement does not come is sent again under the same id, and what followed it, too. The
#       broker drops what it has. So messages may stand in the log behind some that follow on them, and twice.
#
# The reader's rules:
#
#   R1. A message is applied when its epoch and number are the next and the digest after it is the one that it names.
#       Others cost themselves: what is below is a duplicate, what is of another epoch is fenced off, what names
#       another digest is not the writer's. What is ahead is held, up to as many as may be under way.
#   R2. LIVE needs a proof: the digest of a beat, at its number. Every message since then proves itself by R1.
#   R3. A reader that stands still over some beats, although the writer is ahead, has lost something: it begins with
#       the base, in a staging view, which replaces the present one when a beat has proved it. Where that leads nowhere
#       (somebody emptied the log), it says so, and the writer stores another base.
#   R4. A beat that contradicts the view does the same at once. A beat of another epoch is a reason to look at the head:
#       a new life if the head says so, else a writer that does not know yet that another took its place.
#   R5. Who is not heard, writer or broker, is not LIVE. The view stays until the owner gives up.
#
# Nothing but beats makes a reader ask, so questions are paced by the writer, whatever stands in the log.
#
# Honest limit: who may write to the subjects may forge a batch that fits. It is found by the next beat, and read again
# with every base, until the base has passed it. The broker's permissions keep others out.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from observability.jetstream.records import Base, Beat, Head, LogMessage
from observability.kv_stream import (
    NO_EPOCH,
    STATE_CHANGES,
    Apply,
    ApplyStaged,
    BeginStaging,
    Clear,
    CursorCounters,
    DropStaging,
    Position,
    RetryLater,
    StreamState,
    SwapInStaged,
)
from scheduler_components.kv_events import chain_after

__all__ = ["MAX_AHEAD", "LogCursor", "LogInstruction", "ReadBase", "ReadHead", "ReadLog", "WantBase"]

MAX_AHEAD = 1_024
"""Messages held because one before them is missing: four times as many as a writer has under way."""

_MAX_AHEAD_BYTES = 16 * 1024 * 1024
"""The same in bytes: who fills the log with what never follows on costs no more."""

_STUCK_AFTER = 4
"""Beats without progress: two seconds, in which a reader of a loaded broker has begun to read."""

_MAX_PAST = 1_024
"""Digests remembered, for beats that come late: half a second of a busy scheduler."""


_PATIENCE = 3
"""Failed questions in a row after which the writer is asked for another base: the one that there is may be damaged."""


class ReadHead(msgspec.Struct, frozen=True, gc=False):
    """Read the head; answer by ``head_read`` under the number ``ask``."""

    ask: int


class ReadBase(msgspec.Struct, frozen=True, gc=False):
    """Read the base that ``head`` names; answer by ``base_read``. Of an answer only the latest question counts."""

    ask: int
    head: Head


class ReadLog(msgspec.Struct, frozen=True, gc=False):
    """Read the log from the place ``log_seq`` on, and no more where it was read."""

    log_seq: int


class WantBase(msgspec.Struct, frozen=True, gc=False):
    """Tell the writer that its base leads nowhere: it stores another, within some seconds."""


LogInstruction = (
    Apply
    | ApplyStaged
    | BeginStaging
    | SwapInStaged
    | DropStaging
    | Clear
    | RetryLater
    | ReadHead
    | ReadBase
    | ReadLog
    | WantBase
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
        return chain_after(self.at.chain, message.seq, message.payload) == message.chain

    def advance(self, message: LogMessage) -> None:
        self.past.append(self.at.chain)
        self.at.chain = message.chain
        self.at.next += 1
        self.log_seq = max(self.log_seq, message.log_seq)

    def hold(self, message: LogMessage) -> None:
        """Keep a message from the future, if there is room."""
        size = len(message.payload)
        if self.num_ahead < MAX_AHEAD and self.ahead_bytes + size <= _MAX_AHEAD_BYTES:
            self.ahead.setdefault(message.seq, []).append(message)
            self.num_ahead += 1
            self.ahead_bytes += size

    def take_held(self) -> list[LogMessage]:
        """What was held for the next number."""
        held = self.ahead.pop(self.at.next, [])
        self.num_ahead -= len(held)
        self.ahead_bytes -= sum(len(message.payload) for message in held)
        return held

    def chain_at(self, number: int) -> bytes | None:
        """The digest before ``number``; None where it is not remembered."""
        back = self.at.next - number
        if not back:
            return self.at.chain
        return self.past[-back] if 0 < back <= len(self.past) else None


@dataclass(slots=True)
class _Question:
    """The one open question. ``is_forced``: the base is wanted even if it is of the life that is held."""

    ask: int
    is_forced: bool
    head: Head | None = None


class LogCursor:
    """Where one stream's view stands, and what is to be done next.

    A method that returns instructions expects them to be carried out in order, before the next call.

    Attributes:
        fenced: messages of another life.
        forged: messages that name another digest than the one after them.
        upstream: what the last beat said of it, see ``Beat``.
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
        self._beat: Beat | None = None
        self._stuck_at = self._num_stuck = 0
        self._failures = 0

    def __repr__(self) -> str:
        return f"<LogCursor {self._state} at {self.last_seq}, asks #{self.open_ask}>"

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
        """True while the base of this life is read."""
        question = self._question
        return question is not None and question.head is not None and question.head.epoch == epoch

    @property
    def open_ask(self) -> int | None:
        """Number of the question whose answer is awaited, None without one."""
        return self._question.ask if self._question else None

    @property
    def settled(self) -> bool:
        """True while the writer is heard and no recovery is under way: the view will not get better by waiting."""
        return self._state in (StreamState.LIVE, StreamState.PARTIAL) and self._staging is None

    @property
    def next_log_seq(self) -> int | None:
        """Where to go on reading the log; None before a base has said where to begin."""
        return None if self._place.at.epoch == NO_EPOCH else self._place.log_seq + 1

    @property
    def _place(self) -> _Place:
        """What messages are applied to."""
        return self._view if self._staging is None else self._staging

    # --- what is heard ---

    def beat(self, beat: Beat) -> tuple[LogInstruction, ...]:
        """The writer said where it stands."""
        before, self._beat = self._beat, beat
        place = self._place
        if beat.epoch != place.at.epoch:
            return self._foreign()
        if self._state in _UNHEARD:
            self._become(StreamState.RECOVERING if self.epoch != NO_EPOCH else StreamState.SYNCING)
        self._hear_upstream(beat)
        if beat.next > place.at.next:
            return self._behind()
        self._num_stuck = 0
        stands_still = before is not None and (before.epoch, before.next) == (beat.epoch, beat.next)
        if beat.next < place.at.next and stands_still:
            return self._splice()  # the writer has no such batch: what it has sent came before this beat
        chain = place.chain_at(beat.next)
        if chain is None:
            return _NONE  # an old beat
        return self._prove() if chain == beat.chain else self._splice()

    def _foreign(self) -> tuple[LogInstruction, ...]:
        """A beat of another life: look which one the head names."""
        if self.epoch == NO_EPOCH and self._state in _UNHEARD:
            self._become(StreamState.SYNCING)
        return self._ask(is_forced=False)

    def _hear_upstream(self, beat: Beat) -> None:
        self.upstream = beat.upstream
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
        # The base that was read did not lead to where the writer is: what should follow on it is not in the log.
        wanted = (WantBase(),) if self._staging is not None and self._question is None else _NONE
        return (*wanted, *self._ask(is_forced=True))

    def _prove(self) -> tuple[LogInstruction, ...]:
        """The digest agrees at the writer's number."""
        self.counters.verified += 1
        place, swap = self._place, _NONE
        if self._staging is not None:
            self.counters.snapshots += 1
            self.counters.restarts += self.epoch not in (NO_EPOCH, place.at.epoch)
            self._view, self._staging = place, None
            swap = (SwapInStaged(),)
        self._settle()
        beat = self._beat
        if place.damaged_at is not None and beat is not None and beat.base_end > place.damaged_at:
            return (*swap, *self._ask(is_forced=True))  # what could not be read may be folded by now
        return swap

    def _splice(self) -> tuple[LogInstruction, ...]:
        """What was applied is not what the writer sent."""
        self.counters.splices += 1
        self._recover()
        return self._ask(is_forced=True)

    def silent(self) -> tuple[LogInstruction, ...]:
        """The writer or the broker is not heard. The view stays until the owner gives up."""
        self._question, self._beat = None, None
        self._failures = self._num_stuck = 0
        if self._state is not StreamState.DEAD:
            self._become(StreamState.CONNECTING)
        return _NONE

    def gave_up(self) -> tuple[LogInstruction, ...]:
        """The writer is taken for dead: its blocks are no longer worth routing to."""
        self.silent()
        dropped = self._drop_staging()
        self._view = _Place()
        self._become(StreamState.DEAD)
        return (*dropped, Clear("the writer is not heard"))

    # --- what the log has ---

    def message(self, message: LogMessage) -> Iterator[LogInstruction]:
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

    def would_swap(self, beat: Beat | None = None) -> bool:
        """True when ``beat``, or the last one, proves what is to replace the view."""
        beat, staging = beat or self._beat, self._staging
        if beat is None or staging is None or beat.epoch != staging.at.epoch:
            return False
        return staging.chain_at(beat.next) == beat.chain

    def reached(self) -> tuple[LogInstruction, ...]:
        """After messages were applied, or a base: prove the view if it stands where the last beat said."""
        beat, place = self._beat, self._place
        if beat is None or self._is_proved or beat.epoch != place.at.epoch:
            return _NONE
        chain = place.chain_at(beat.next)
        if chain is None:
            return _NONE
        return self._prove() if chain == beat.chain else self._splice()

    @property
    def _is_proved(self) -> bool:
        return self._staging is None and self._state in (StreamState.LIVE, StreamState.PARTIAL, *_UNHEARD)

    # --- head and base ---

    def head_read(self, ask: int, head: Head | None) -> tuple[LogInstruction, ...]:
        """The head, None when there is none or it could not be read."""
        question = self._question
        if question is None or question.ask != ask:
            self.counters.stale_answers += 1
            return _NONE
        if head is None:
            return self._failed()
        if head.epoch == self._place.at.epoch and not question.is_forced:
            self._question = None  # the beat is of a writer that lost its place
            self._failures = 0
            return _NONE
        self._recover()
        question.head = head
        return (ReadBase(ask, head),)

    def base_read(self, ask: int, base: Base | None) -> Iterator[LogInstruction]:
        """Yield instructions that build the base in a staging view; None when it could not be read."""
        question = self._question
        if question is None or question.ask != ask or question.head is None:
            self.counters.stale_answers += 1
            return
        if base is None or (base.epoch, base.end) != (question.head.epoch, question.head.end):
            yield from self._failed()
            return
        place = _Place(Position(base.epoch, base.first, base.chain), base.log_seq)
        for payload in base.batches:
            place.past.append(place.at.chain)
            place.at.advance(payload)
        if place.at.chain != base.end_chain:
            self.counters.cut += 1
            yield from self._failed()
            return
        self._question = None
        self._failures = self._num_stuck = 0
        self._recover()
        yield from self._drop_staging()
        self._staging = place
        yield BeginStaging()
        for chunk in base.chunks:
            yield ApplyStaged(base.first - 1, chunk, True)
        for seq, payload in enumerate(base.batches, base.first):
            self.counters.recovered += 1
            self.counters.applied += 1
            yield ApplyStaged(seq, payload, False)
        yield ReadLog(base.log_seq + 1)

    def answer_missing(self, ask: int) -> tuple[LogInstruction, ...]:
        """The answer to question ``ask`` did not come in time."""
        if ask != self.open_ask:
            return _NONE
        self.counters.unanswered += 1
        return self._failed()

    def retry(self) -> tuple[LogInstruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        return self._open_question(is_forced=True) if self._failures and self._question is None else _NONE

    def _ask(self, *, is_forced: bool) -> tuple[LogInstruction, ...]:
        """Ask, unless a question is open or waits for its pause."""
        return _NONE if self._question is not None or self._failures else self._open_question(is_forced=is_forced)

    def _open_question(self, *, is_forced: bool) -> tuple[LogInstruction, ...]:
        self.counters.asks += 1
        self._question = _Question(self.counters.asks, is_forced)
        return (ReadHead(self._question.ask),)

    def _failed(self) -> tuple[LogInstruction, ...]:
        self._question = None
        self._failures += 1
        wanted = (WantBase(),) if self._failures >= _PATIENCE else _NONE
        return (*wanted, RetryLater(self._failures))

    def _drop_staging(self) -> tuple[LogInstruction, ...]:
        staging, self._staging = self._staging, None
        return _NONE if staging is None else (DropStaging(),)

    # --- what the owner found in a batch ---

    def cleared(self) -> None:
        """The batch just applied cleared all blocks: what could not be read before it does not matter any more."""
        self._place.damaged_at = None
        if self._state is StreamState.PARTIAL and self._staging is None:
            self._settle()

    def damaged(self) -> None:
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
            assert state in STATE_CHANGES[self._state], f"{self._state} may not become {state}"
            self.counters.losses += state is StreamState.PARTIAL
            self._state = state
