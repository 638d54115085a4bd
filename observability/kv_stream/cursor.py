"""The rules of following one stream, without socket, clock or thread: events in, instructions out.

A publisher is asked in the words of the extension first. One that has it is followed by its digest
(``digest_cursor``); SGLang, vLLM and others answer a bare end marker, and are followed by numbers and payloads
(``plain_cursor``). A publisher that was taken for one of those is asked again now and then.

Feed live batches only while ``listening`` is true: leave them in the socket during a replay, and they are there to
go on from when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from observability.kv_stream.instructions import (
    Apply,
    ApplyAside,
    AskReplay,
    BeginAside,
    Clear,
    CursorCounters,
    DropAside,
    Instruction,
    RetryLater,
    StreamState,
    SwapIn,
    token_of,
)
from scheduler_components.kv_events import CHAIN_BYTES, EPOCH_BYTES, Kind, Meta, Verb, chain_after

__all__ = [
    "NOTHING_APPLIED",
    "Question",
    "Run",
    "NO_EPOCH",
    "Position",
    "SyncQuestion",
    "Verdict",
    "DigestCursor",
    "PlainCursor",
    "StreamCursor",
]

# What a stream cursor remembers: the run of batches that it is on, and the replay question that it has open.

NOTHING_APPLIED = -1
"""``last_seq`` before the first batch: one below the number of a publisher's first."""


@dataclass(slots=True)
class Run:
    """The unbroken run of batches that the view is built from.

    ``complete`` means that it began where the publisher's state was known. ``adopting`` means that it may begin at
    any number: there is no history to be had. ``hole_after`` is the number after which one answer had a hole; the
    same hole twice means that the batches are lost.
    """

    last: int = NOTHING_APPLIED
    payload: bytes = b""
    complete: bool = False
    adopting: bool = False
    hole_after: int | None = None


@dataclass(slots=True)
class Question:
    """One open replay question.

    ``full`` asks for all history; otherwise it continues the run. ``has_batches`` means that the stream is known not
    to be empty, ``newer_seen`` that a live batch was dropped since.
    """

    ask: int
    full: bool
    has_batches: bool
    answers: int = 0
    applied: int = 0
    has_hole: bool = False
    newer_seen: bool = False


# Places in a stream, proved by their digest, and answers that lead from one to the next.

NO_EPOCH = bytes(EPOCH_BYTES)
"""The epoch of no life: what is asked with while nothing is held."""


@dataclass(slots=True)
class Position:
    """A place in one life of a publisher: ``chain`` is the digest of everything below ``next``.

    As it is made, it is no place in any life.
    """

    epoch: bytes = NO_EPOCH
    next: int = 0
    chain: bytes = bytes(CHAIN_BYTES)

    def advance(self, payload: bytes) -> None:
        """Go on by one batch."""
        self.chain = chain_after(self.chain, self.next, payload)
        self.next += 1

    def is_at(self, meta: Meta) -> bool:
        """True when the publisher, too, has this digest at this number of this life."""
        return (self.epoch, self.next, self.chain) == (meta.epoch, meta.start, meta.chain)

    def copy(self) -> Position:
        return Position(self.epoch, self.next, self.chain)


class Verdict(Enum):
    """What a message of an answer is worth.

    SPLICED: the publisher does not have what was applied under these numbers.
    """

    GOOD = "good"
    REPEATED = "repeated"
    BROKEN = "broken"
    SPLICED = "spliced"


class _Part(Enum):
    """What of an answer has begun."""

    NOTHING = "nothing"
    BASE = "base"
    BATCHES = "batches"


@dataclass(slots=True)
class SyncQuestion:
    """One open extended question, and its answer so far.

    Attributes:
        ask, verb: as asked.
        at: where the view stands; an incremental answer moves it.
        asked_at: where it stood when this was asked: a status is compared with that, not with what has come since.
        aside: where the view stands that a snapshot builds aside; None in an incremental answer.
        is_damaged: something in the snapshot could not be read.
        newest_seen: highest live number that came, and could not be used, while this was open.
    """

    ask: int
    verb: Verb
    at: Position
    asked_at: Position = field(init=False)
    aside: Position | None = None
    is_damaged: bool = False
    newest_seen: int = -1
    _part: _Part = _Part.NOTHING
    _num_chunks: int = 0
    _num_batches: int = 0

    def __post_init__(self) -> None:
        self.asked_at = self.at.copy()

    @property
    def is_base_open(self) -> bool:
        """True while chunks of the base come, not batches."""
        return self._part is _Part.BASE

    @property
    def has_advanced(self) -> bool:
        """True when a part of it is in the view for good."""
        return self.aside is None and self._num_batches > 0

    def take(self, seq: int, payload: bytes) -> Verdict:
        """Take a batch or a chunk of the base; GOOD when it is the next one."""
        place = self.aside or self.at
        if self._part is _Part.NOTHING:
            return Verdict.BROKEN
        wanted = self._num_chunks if self.is_base_open else place.next
        if seq != wanted:
            return Verdict.REPEATED if seq < wanted else Verdict.BROKEN
        if self.is_base_open:
            self._num_chunks += 1
        else:
            place.advance(payload)
            self._num_batches += 1
        return Verdict.GOOD

    def begin(self, meta: Meta) -> Verdict:
        """Open a snapshot, or a run of batches from a place on which both sides must agree."""
        if meta.snap:
            if self._part is not _Part.NOTHING:
                return Verdict.BROKEN
            self._part = _Part.BASE
            self.aside = Position(meta.epoch, meta.start, meta.chain)
            return Verdict.GOOD
        if self.is_base_open:
            is_whole = meta.chunks is None or meta.chunks == self._num_chunks
            if self.aside is None or not self.aside.is_at(meta) or not is_whole:
                return Verdict.BROKEN
        elif self._part is not _Part.NOTHING or self.verb is not Verb.SYNC:
            return Verdict.BROKEN
        elif not self.at.is_at(meta):
            return Verdict.SPLICED
        self._part = _Part.BATCHES
        return Verdict.GOOD

    def end(self, meta: Meta) -> Verdict:
        """Close the answer; GOOD when what came has the publisher's digest."""
        if self._part is not _Part.BATCHES:
            return Verdict.BROKEN
        if (self.aside or self.at).is_at(meta):
            return Verdict.GOOD
        return Verdict.SPLICED if self.aside is None else Verdict.BROKEN


# The rules of following a publisher that has the extension: by its epoch and its digest, events in, instructions out.
#
# A view is right when the publisher has the same digest at the same number of the same life. The digest is followed
# batch by batch and compared with the publisher's at the end of every answer and at every probe, so that loss,
# restart
# and splice are seen. A gap is closed from where the view stands when the publisher agrees on that place; otherwise a
# snapshot is built aside and swapped in once its own digest agrees. A batch from the future is a hint to ask: it
# never
# moves the place, and it is not kept.

_NONE: tuple[Instruction, ...] = ()
_FOLLOWING = (StreamState.LIVE, StreamState.PARTIAL)


class DigestCursor:
    """Recovery of one stream by status, incremental synchronisation and snapshot.

    Args:
        patience: failed questions in a row after which a view that is followed counts as unproved. So many bare end
            markers, on a connection on which the extension never showed, mean that a successor does not have it;
            before it ever showed, the first failed question does.
        counters: to count in.

    A method that returns instructions expects them to be carried out in order, before the next call. ``live`` is for
    batches of one connection: what comes on another follows ``disconnected`` and ``connected``.

    Attributes:
        is_known: the publisher has shown the extension.
        is_foreign: it has not, or not any more: follow it by the plain rules.
    """

    __slots__ = (
        "_at", "_damaged_at", "_failures", "_is_shown", "_num_unproved", "_patience", "_question", "_state",
        "counters", "is_foreign", "is_known",
    )  # fmt: skip

    def __init__(self, *, patience: int = 3, counters: CursorCounters | None = None) -> None:
        self.counters = counters or CursorCounters()
        self.is_known = self.is_foreign = False
        self._state = StreamState.CONNECTING
        self._at = Position()
        self._question: SyncQuestion | None = None
        self._patience = patience
        self._failures = self._num_unproved = 0
        self._is_shown = False
        self._damaged_at: int | None = None

    def __repr__(self) -> str:
        return f"<DigestCursor {self._state} at {self.last_seq}, asks #{self.open_ask}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted, now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last batch that the view has; one below the publisher's first when it has none."""
        return self._at.next - 1

    @property
    def open_ask(self) -> int | None:
        """Number of the replay question whose answer is awaited, None without one."""
        return self._question.ask if self._question else None

    @property
    def listening(self) -> bool:
        """False while live batches would have to be dropped: leave them in the socket."""
        return self._state in _FOLLOWING and (self._question is None or self._question.verb is Verb.STATUS)

    def connected(self) -> tuple[Instruction, ...]:
        """The live connection is up: anything may have happened while it was not."""
        if self._state not in (StreamState.CONNECTING, StreamState.DEAD):
            return _NONE
        return self._sync()

    def disconnected(self) -> tuple[Instruction, ...]:
        """The live connection is gone. The view stays until the cursor is told to give up."""
        if self._state is StreamState.DEAD:
            return _NONE
        self._failures = 0
        self._is_shown = False
        self._become(StreamState.CONNECTING)
        return self._drop_question()

    def gave_up(self) -> tuple[Instruction, ...]:
        """The publisher is taken for dead: its blocks are no longer worth routing to."""
        self._failures = 0
        self._at = Position()
        self._damaged_at = None
        self._become(StreamState.DEAD)
        return (*self._drop_question(), Clear("the publisher is unreachable"))

    def live(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """A batch came on the live channel."""
        before = self.connected()
        if not self.listening:
            if self._question is not None:
                self._question.newest_seen = max(seq, self._question.newest_seen)
            return before
        if seq == self._at.next:
            self._at.advance(payload)
            self.counters.applied += 1
            return (Apply(seq, payload, False),)
        if seq < self._at.next:
            # Repeated, late, or of another life: the next probe tells which.
            self.counters.duplicates += 1
            return _NONE
        self.counters.gaps += 1
        return self._sync()

    def answered(self, ask: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """One batch, or chunk of the base, of the answer to question ``ask``."""
        question = self._question
        if question is None or question.ask != ask:
            self.counters.stale_answers += 1
            return _NONE
        is_base = question.is_base_open
        verdict = question.take(seq, payload)
        if verdict is Verdict.REPEATED:
            self.counters.duplicates += 1
            return _NONE
        if verdict is not Verdict.GOOD:
            return self._cut()
        if is_base and question.aside is not None:
            return (ApplyAside(question.aside.next - 1, payload, True),)
        self.counters.applied += 1
        self.counters.recovered += 1
        return (Apply(seq, payload, True) if question.aside is None else ApplyAside(seq, payload, False),)

    def answer_meta(self, ask: int, meta: Meta) -> tuple[Instruction, ...]:
        """A META of the answer to question ``ask`` came."""
        question = self._question
        if question is None or question.ask != ask or meta.token != token_of(ask):
            self.counters.stale_answers += 1
            return _NONE
        self.is_known = self._is_shown = True
        if (meta.kind is Kind.STATUS) is not (question.verb is Verb.STATUS):
            return self._cut()
        if meta.kind is Kind.STATUS:
            self._question = None
            return self._judge_status(question.asked_at, meta)
        is_end = meta.kind is Kind.END
        verdict = question.end(meta) if is_end else question.begin(meta)
        if verdict is Verdict.SPLICED:
            return self._distrust()
        if verdict is not Verdict.GOOD:
            return self._cut()
        if is_end:
            return self._close(question)
        return (BeginAside(),) if meta.snap else _NONE

    def _judge_status(self, asked_at: Position, meta: Meta) -> tuple[Instruction, ...]:
        """Compare with where the view stood when the question was asked: it may have moved on since."""
        self._failures = 0
        if meta.epoch != asked_at.epoch:
            return self._sync()
        is_flowing = self._at.next > asked_at.next
        if meta.start != asked_at.next:
            # The publisher's window has passed the place. In a busy stream what is missing may be on its way.
            self._num_unproved += 1
            return _NONE if is_flowing and self._num_unproved == 1 else self._sync()
        if not asked_at.is_at(meta):
            return self._distrust()
        self.counters.verified += 1
        self._num_unproved = 0
        if self._damaged_at is not None and meta.first > self._damaged_at:
            return self._sync(Verb.SNAPSHOT)  # what could not be read is folded, and readable now
        if meta.next > self._at.next and not is_flowing:
            return self._sync()
        self._settle()
        return _NONE

    def _close(self, question: SyncQuestion) -> tuple[Instruction, ...]:
        """The digest of all that came is the publisher's: believe it."""
        self._question = None
        self._failures = self._num_unproved = 0
        self.counters.verified += 1
        swap = _NONE if question.aside is None else self._swap_in(question, question.aside)
        if question.newest_seen >= self._at.next:
            return (*swap, *self._sync())
        self._settle()
        return swap

    def _swap_in(self, question: SyncQuestion, aside: Position) -> tuple[Instruction, ...]:
        self.counters.snapshots += 1
        self.counters.restarts += self._at.epoch not in (NO_EPOCH, aside.epoch)
        self._at = aside
        # What is damaged in a snapshot may be anywhere in it: it is new when all of the window is.
        self._damaged_at = aside.next if question.is_damaged else None
        return (SwapIn(),)

    def answer_ended(self, ask: int) -> tuple[Instruction, ...]:
        """A bare end marker: the publisher has no extension, or had to cut its answer to question ``ask``."""
        if ask != self.open_ask:
            return _NONE
        instructions = self._cut()
        if self._failures >= self._patience and not self._is_shown:
            self.is_foreign = True
        return instructions

    def answer_missing(self, ask: int) -> tuple[Instruction, ...]:
        """The answer to question ``ask`` did not come to its end in time, or cannot be read."""
        if ask != self.open_ask:
            return _NONE
        self.counters.unanswered += 1
        return self._cut()

    def retry(self) -> tuple[Instruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        if self._question is not None or not self._failures:
            return _NONE
        return self._ask(Verb.STATUS) if self._state in _FOLLOWING else self._sync()

    def probe(self) -> tuple[Instruction, ...]:
        """A probe interval is over: see whether the publisher is still where the view is."""
        if self._state not in _FOLLOWING or self._question is not None or self._failures:
            return _NONE
        return self._ask(Verb.STATUS)

    def cleared(self) -> None:
        """The batch just applied cleared all blocks: what could not be read before it does not matter any more."""
        if self._question is not None and self._question.aside is not None:
            self._question.is_damaged = False
            return
        self._damaged_at = None
        if self._state is StreamState.PARTIAL and self._failures < self._patience:
            self._settle()

    def damaged(self) -> None:
        """The batch just applied could not be read whole: the view may differ by what it said."""
        if self._question is not None and self._question.aside is not None:
            self._question.is_damaged = True
            return
        self._damaged_at = self.last_seq
        if self._state is StreamState.LIVE:
            self._settle()

    def _sync(self, verb: Verb = Verb.SYNC) -> tuple[Instruction, ...]:
        self._become(StreamState.SYNCING if self._at.epoch == NO_EPOCH else StreamState.RECOVERING)
        return self._ask(verb)

    def _ask(self, verb: Verb) -> tuple[Instruction, ...]:
        self.counters.asks += 1
        self._question = SyncQuestion(self.counters.asks, verb, self._at)
        return (AskReplay(self._question.ask, self._at.next, verb, self._at.epoch),)

    def _distrust(self) -> tuple[Instruction, ...]:
        """What was applied is not what the publisher sent under these numbers: begin anew."""
        self.counters.splices += 1
        return self._sync(Verb.SNAPSHOT)

    def _cut(self) -> tuple[Instruction, ...]:
        """The open answer leads no further. What it brought stays if it was applied, for it was proved to follow."""
        question = self._question
        assert question is not None
        self.counters.cut += int(self.is_known)
        if question.has_advanced:
            self._failures = 0
            return self._sync()
        dropped = self._drop_question()
        self._failures += 1
        if not self.is_known:
            self.is_foreign = True
        elif self._failures >= self._patience and self._state in _FOLLOWING:
            self._become(StreamState.PARTIAL)
        return (*dropped, RetryLater(self._failures))

    def _drop_question(self) -> tuple[Instruction, ...]:
        question, self._question = self._question, None
        return _NONE if question is None or question.aside is None else (DropAside(),)

    def _settle(self) -> None:
        self._become(StreamState.LIVE if self._damaged_at is None else StreamState.PARTIAL)

    def _become(self, state: StreamState) -> None:
        if state is StreamState.PARTIAL and self._state is not state:
            self.counters.losses += 1
        self._state = state


# The rules of following a publisher without the extension (SGLang, vLLM): events in, instructions out.
#
# A view is right when it is built from an unbroken run of batches that begins where the publisher's state is known:
# at batch 0 of its life, or at a batch that clears all blocks. The cursor tracks that run. It keeps one payload, the
# last applied, and nothing else: a batch from the future is a reason to ask for replay, it is not kept. When it must
# go on after a gap it asks from the number that it *holds* and compares that payload, because a publisher that
# restarted may have passed the number. History that the publisher no longer has costs the stream its ``LIVE`` state.
#
# Feed live batches only while ``listening`` is true: leave them in the socket during a replay, and they are there to
# go on from when it ends.


class PlainCursor:
    """Sequence tracking and recovery of one stream by numbers and the last payload.

    Nothing proves such a stream without a replay channel, or while that is silent: it is never ``LIVE`` then.

    Args:
        has_replay: whether the publisher offers a replay channel.
        patience: unanswered questions in a row after which the stream is followed without history.
        counters: to count in; shared with the rules for publishers with the extension.

    A method that returns instructions expects them to be carried out in order, before the next call.
    """

    __slots__ = ("_failures", "_has_replay", "_last_heard", "_patience", "_question", "_run", "_state", "counters")

    def __init__(self, *, has_replay: bool, patience: int = 3, counters: CursorCounters | None = None) -> None:
        self.counters = counters or CursorCounters()
        self._state = StreamState.CONNECTING
        self._has_replay = has_replay
        self._patience = patience
        self._run = Run()
        self._question: Question | None = None
        self._failures = 0
        self._last_heard = NOTHING_APPLIED

    def __repr__(self) -> str:
        asking = f", asks #{self._question.ask}" if self._question else ""
        return f"<PlainCursor {self._state} at {self._run.last}{asking}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted, now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last batch applied in the present run; ``NOTHING_APPLIED`` before the first."""
        return self._run.last

    @property
    def open_ask(self) -> int | None:
        """Number of the replay question whose answer is awaited, None without one."""
        return self._question.ask if self._question else None

    @property
    def listening(self) -> bool:
        """False while live batches would have to be dropped: leave them in the socket."""
        if self._question is not None or self._state is StreamState.RECOVERING:
            return False
        return self._state is not StreamState.SYNCING or not self._failures

    @property
    def _replay_is_silent(self) -> bool:
        return self._failures >= self._patience

    # --- the connection ---

    def connected(self) -> tuple[Instruction, ...]:
        """The live connection is up: anything may have happened while it was not."""
        if self._state not in (StreamState.CONNECTING, StreamState.DEAD):
            return _NONE
        if self._has_replay:
            return self._ask()
        self._run = Run(adopting=True)
        self._become(StreamState.PARTIAL)
        return (Clear("no replay channel tells what was published before"),)

    def disconnected(self) -> tuple[Instruction, ...]:
        """The live connection is gone. The view stays until the cursor is told to give up."""
        if self._state is not StreamState.DEAD:
            self._question = None
            self._failures = 0
            self._last_heard = NOTHING_APPLIED
            self._become(StreamState.CONNECTING)
        return _NONE

    def gave_up(self) -> tuple[Instruction, ...]:
        """The publisher is taken for dead: its blocks are no longer worth routing to."""
        self._question = None
        self._failures = 0
        self._run = Run()
        self._become(StreamState.DEAD)
        return (Clear("the publisher is unreachable"),)

    # --- live batches ---

    def live(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """A batch came on the live channel."""
        before = self.connected()
        run = self._run
        advances = seq > self._last_heard
        self._last_heard = seq
        if not self.listening:
            if self._question is not None and seq != run.last:
                self._question.newer_seen = True
            return before
        if run.adopting:
            return (*before, *self._begin_run(seq, payload))
        if seq == run.last + 1:
            return self._continue_run(seq, payload)
        if seq < run.last and advances:
            return _NONE  # it waited in the socket during the replay that brought it
        if seq <= run.last:
            self.counters.duplicates += 1
            if seq == run.last and payload == run.payload:
                return _NONE
        elif run.last != NOTHING_APPLIED:
            self.counters.gaps += 1
        if self._has_replay and not self._replay_is_silent:
            return self._ask(has_batches=True)
        return self._begin_run(seq, payload)

    # --- answers of the replay channel ---

    def answered(self, ask: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """One batch of the answer to question ``ask``."""
        question = self._question
        if question is None or question.ask != ask:
            self.counters.stale_answers += 1
            return _NONE
        question.answers += 1
        if question.answers == 1:
            return self._first_answer(question, seq, payload)
        run = self._run
        if seq <= run.last:
            self.counters.duplicates += 1
            return _NONE
        if seq == run.last + 1:
            return self._continue_run(seq, payload)
        if run.hole_after == run.last:
            return self._begin_run(seq, payload)
        question.has_hole = True
        return _NONE

    def _first_answer(self, question: Question, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """Begin, or compare what is held with what the publisher has under the same number."""
        run = self._run
        if question.full or seq != run.last:
            return self._begin_run(seq, payload)
        if payload == run.payload:
            return _NONE
        return self._resync("the publisher restarted and passed the number that was held")

    def answer_ended(self, ask: int) -> tuple[Instruction, ...]:
        """The end marker of question ``ask`` came."""
        question = self._question
        if question is None or question.ask != ask:
            return _NONE
        self._question = None
        self._failures = 0
        if not question.full and not question.answers:
            return self._resync("the publisher does not have the number that was held")
        if question.has_hole:
            self._run.hole_after = self._run.last
            return self._ask()
        if question.newer_seen:
            return self._ask(has_batches=True)
        if not question.answers:
            return self._no_history(question)
        self._settle()
        return _NONE

    def _no_history(self, question: Question) -> tuple[Instruction, ...]:
        """Nothing was ever published, or nothing is kept: which, the next live batch tells."""
        run = self._run
        self._run = Run(adopting=run.adopting or question.has_batches)
        self._become(StreamState.PARTIAL if self._run.adopting else StreamState.SYNCING)
        return _NONE if run.last == NOTHING_APPLIED else (Clear("the publisher has no history"),)

    def answer_missing(self, ask: int) -> tuple[Instruction, ...]:
        """The answer to question ``ask`` did not come to its end in time."""
        question = self._question
        if question is None or question.ask != ask:
            return _NONE
        self._question = None
        self.counters.unanswered += 1
        if question.applied:
            self._failures = 0
            return self._ask()
        self._failures += 1
        retry = RetryLater(self._failures)
        if not self._replay_is_silent:
            return (retry,)
        if self._state in _FOLLOWING:
            self._become(StreamState.PARTIAL)  # nothing proves any more that the last batch was the last
            return (retry,)
        self._run = Run(adopting=True)
        self._become(StreamState.PARTIAL)
        return (Clear("the replay channel does not answer"), retry)

    # --- time, told by the owner ---

    def retry(self) -> tuple[Instruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        if self._question is not None or not self._failures:
            return _NONE
        return self._ask(
            full=self._replay_is_silent and not self._run.complete,
            probing=self._state in _FOLLOWING,
        )

    def probe(self) -> tuple[Instruction, ...]:
        """The stream has been silent for a while: see whether its last batches were lost, or its life is another."""
        if not self._has_replay or self._failures or not self.listening:
            return _NONE
        if self._state in (StreamState.CONNECTING, StreamState.DEAD):
            return _NONE
        return self._ask(probing=True)

    # --- what the owner found in a batch ---

    def cleared(self) -> None:
        """The batch just applied cleared all blocks: from there on the publisher's state is known."""
        self._run.complete = True
        if self._state is StreamState.PARTIAL:
            self._settle()

    def damaged(self) -> None:
        """The batch just applied could not be read whole: the view may differ by what it said."""
        self._run.complete = False
        if self._state is StreamState.LIVE:
            self._become(StreamState.PARTIAL)

    # --- the run ---

    def _ask(self, *, full: bool = False, probing: bool = False, has_batches: bool = False) -> tuple[Instruction, ...]:
        fresh = self._run.last == NOTHING_APPLIED
        self.counters.asks += 1
        question = Question(ask=self.counters.asks, full=full or fresh, has_batches=has_batches)
        self._question = question
        if not probing:
            self._become(StreamState.SYNCING if fresh else StreamState.RECOVERING)
        return (AskReplay(question.ask, 0 if question.full else self._run.last),)

    def _resync(self, reason: str) -> tuple[Instruction, ...]:
        """Another life of the publisher: nothing that is held is true of it."""
        self.counters.restarts += 1
        self._run = Run()
        return (Clear(reason), *self._ask())

    def _begin_run(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        reason = "history begins here" if seq == 0 else f"history before batch {seq} is not known"
        self._run = Run(last=seq - 1, complete=seq == 0)
        return (Clear(reason), *self._continue_run(seq, payload))

    def _continue_run(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        run = self._run
        run.last = seq
        run.payload = payload
        self.counters.applied += 1
        if self._question is None:
            run.complete = run.complete or seq == 0
            self._settle()
            return (Apply(seq, payload, False),)
        self._question.applied += 1
        self.counters.recovered += 1
        if self._state is not StreamState.SYNCING:
            self._become(StreamState.RECOVERING)
        return (Apply(seq, payload, True),)

    def _settle(self) -> None:
        is_proved = self._has_replay and not self._replay_is_silent
        self._become(StreamState.LIVE if self._run.complete and is_proved else StreamState.PARTIAL)

    def _become(self, state: StreamState) -> None:
        if state is StreamState.PARTIAL and self._state is not state:
            self.counters.losses += 1
        self._state = state


_PROBES_A_KNOCK = 8
"""A plain publisher is asked for the extension at every eighth probe, and at the first of a connection. One that has
shown it before is asked at every probe."""


class StreamCursor:
    """Sequence tracking and recovery of one stream (one rank of one worker).

    Args:
        has_replay: whether the publisher offers a replay channel.
        patience: failed questions in a row after which the stream is followed by lesser means.

    A method that returns instructions expects them to be carried out in order, before the next call.
    """

    __slots__ = ("_has_replay", "_knock", "_mode", "_patience", "_probes_to_knock", "_was_extended", "counters")

    def __init__(self, *, has_replay: bool, patience: int = 3) -> None:
        self.counters = CursorCounters()
        self._has_replay = has_replay
        self._patience = patience
        self._knock = 0
        self._was_extended = False
        self._probes_to_knock = _PROBES_A_KNOCK
        self._mode: DigestCursor | PlainCursor = self._new_digest_cursor() if has_replay else self._new_plain_cursor()

    def __repr__(self) -> str:
        return f"<StreamCursor {self._mode!r}>"

    def _new_digest_cursor(self) -> DigestCursor:
        return DigestCursor(patience=self._patience, counters=self.counters)

    def _new_plain_cursor(self) -> PlainCursor:
        return PlainCursor(has_replay=self._has_replay, patience=self._patience, counters=self.counters)

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted, now."""
        return self._mode.state

    @property
    def is_extended(self) -> bool:
        """True once the publisher has shown the extension: the view is proved by its digest."""
        return isinstance(self._mode, DigestCursor) and self._mode.is_known

    @property
    def last_seq(self) -> int:
        """Number of the last batch that the view has; one below the first before there is any."""
        return self._mode.last_seq

    @property
    def open_ask(self) -> int | None:
        """Number of the replay question whose answer is awaited, None without one."""
        return self._mode.open_ask or (self._knock if self._is_knocking else None)

    @property
    def _is_knocking(self) -> bool:
        return self._knock > 0 and self._knock == self.counters.asks  # a later question has replaced it

    @property
    def expects_meta(self) -> bool:
        """True while the payload of an end marker means something."""
        return isinstance(self._mode, DigestCursor) or self._is_knocking

    @property
    def listening(self) -> bool:
        """False while live batches would have to be dropped: leave them in the socket."""
        return self._mode.listening

    @property
    def settled(self) -> bool:
        """True while connected with no recovery under way: the view will not get better by waiting."""
        return self._mode.listening and self.state not in (StreamState.CONNECTING, StreamState.DEAD)

    # --- the connection ---

    def connected(self) -> tuple[Instruction, ...]:
        """The live connection is up: anything may have happened while it was not."""
        return self._mode.connected()

    def disconnected(self) -> tuple[Instruction, ...]:
        """The live connection is gone. The view stays until the cursor is told to give up."""
        self._knock = 0
        self._probes_to_knock = 1
        return self._mode.disconnected()

    def gave_up(self) -> tuple[Instruction, ...]:
        """The publisher is taken for dead: its blocks are no longer worth routing to."""
        return self._mode.gave_up()

    # --- what comes ---

    def live(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """A batch came on the live channel."""
        return self._mode.live(seq, payload)

    def answered(self, ask: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """One batch of the answer to question ``ask``."""
        return self._or_plainly(self._mode.answered(ask, seq, payload))

    def answer_meta(self, ask: int, meta: Meta) -> tuple[Instruction, ...]:
        """A META of the answer to question ``ask``."""
        if isinstance(self._mode, DigestCursor):
            return self._or_plainly(self._mode.answer_meta(ask, meta))
        if not self._is_knocking or ask != self._knock:
            self.counters.stale_answers += 1
            return _NONE
        self._mode = self._new_digest_cursor()
        return self._mode.connected()

    def answer_ended(self, ask: int) -> tuple[Instruction, ...]:
        """The end marker of the answer to question ``ask``, without a META."""
        if self._is_knocking and ask == self._knock:
            self._knock = 0
            return self._mode.probe()
        return self._or_plainly(self._mode.answer_ended(ask))

    def answer_missing(self, ask: int) -> tuple[Instruction, ...]:
        """The answer to question ``ask`` did not come to its end in time, or cannot be read."""
        if self._is_knocking and ask == self._knock:
            self._knock = 0
            return self._mode.probe()
        return self._or_plainly(self._mode.answer_missing(ask))

    def _or_plainly(self, instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        """``instructions``, or those of the plain rules when the publisher turned out to have no extension."""
        if not isinstance(self._mode, DigestCursor) or not self._mode.is_foreign:
            return instructions
        self._was_extended = self._was_extended or self._mode.is_known
        holds_blocks = self.counters.applied or self.counters.snapshots
        self._mode = self._new_plain_cursor()
        self._probes_to_knock = 1 if self._was_extended else _PROBES_A_KNOCK
        cleared = (Clear("the publisher answers no question of the extension"),) if holds_blocks else _NONE
        return (*cleared, *self._mode.connected())

    # --- time, told by the owner ---

    def retry(self) -> tuple[Instruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        return self._mode.retry()

    def probe(self) -> tuple[Instruction, ...]:
        """A probe interval is over: see whether batches were lost, or the publisher's life is another."""
        if isinstance(self._mode, DigestCursor) or not self._has_replay:
            return self._mode.probe()
        if self.settled and self.open_ask is None:
            self._probes_to_knock -= 1
            if self._probes_to_knock <= 0:
                self._probes_to_knock = 1 if self._was_extended else _PROBES_A_KNOCK
                self.counters.asks += 1
                self._knock = self.counters.asks
                return (AskReplay(self._knock, 0, Verb.STATUS),)
        return self._mode.probe()

    # --- what the owner found in a batch ---

    def cleared(self) -> None:
        """The batch just applied cleared all blocks."""
        self._mode.cleared()

    def damaged(self) -> None:
        """The batch just applied could not be read whole: the view may differ by what it said."""
        self._mode.damaged()
