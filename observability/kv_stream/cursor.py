"""The rules of following one stream, without socket, clock or thread: events in, instructions out.

``StreamCursor``, at the end of the file, is what a follower uses. It follows by one of two sets of rules:
``DigestCursor`` where the publisher has the extension, ``PlainCursor`` where it has not.
"""

# The theory
# ==========
#
# A publisher numbers its batches without gaps. Its state after batch n follows from its batches up to n. Each life of
# a publisher (from start to exit) begins with an empty state, and may begin at any number. Its replay channel has the
# newest batches one by one (the window). With the extension it also has the state before the window (the base), and
# says for any place in the stream: my epoch (16 random bytes per life), and my digest of all batches below it.
#
# What a subscriber sees of that can be lost, repeated, late, cut short, or of another life.
#
# The invariant: LIVE is never said of a wrong view. The view is then what the publisher held after batch ``last_seq``.
#
# It holds by three rules, whatever the publisher:
#
#   1. A batch is applied to the view only when its number follows on the last one.
#   2. A batch from the future is a reason to ask for what is between. It does not move the cursor and is not kept:
#      the answer brings it again.
#   3. LIVE needs a proof that the run of batches began where the state was known, and that it is still this
#      publisher's. Whatever could break the proof ends LIVE at once: a gap, a lost connection, an unreadable batch.
#
# The two sets of rules differ in the proof, and in what a gap costs:
#
#                     DigestCursor                              PlainCursor
#   proof             same epoch, number and digest as the      run began at batch 0 or at a clear of all blocks, and
#                     publisher, at the end of every answer     replay shows the payload that is held under the last
#                     and at every probe                        number
#   gap               batches from the view's place, if both    batches from the last number that is held, which is
#                     sides agree on it; else a snapshot        compared: a restarted publisher may have passed it
#   another life      snapshot in a staging view, swapped in    clear, and ask from 0
#                     at once when its digest agrees
#   history is gone   cannot happen: the base has it            PARTIAL until a clear of all blocks
#   nobody answers    LIVE becomes PARTIAL after ``patience``   PARTIAL after ``patience`` questions; a recovery
#                     questions; a recovery goes on asking      begins anew with the next live batch
#
# At most one question is open. It has a number, and what answers another number is stale. A question that fails is
# asked again after a pause that the owner measures (``RetryLater``); while it is open, live batches belong in the
# socket (``is_accepting_live`` is false), so that they are there to go on from when the answer ends.
#
# What recovery costs the publisher is bounded, whatever comes. A stale queue or a forger may bring a gap with every
# frame, and to ask at each would cost one answer per frame. So questions have a credit (``ReplayCredit``), which the
# owner gives back by the clock. A gap that finds no credit is remembered, the frames behind it are read and dropped,
# and one question about all of them follows with the next credit (``on_credit_available``). A batch is numbered before
# it is sent:
# if the publisher, asked after a frame came, has not reached its number, that frame was a stray, of another life or of
# nobody. Further gaps then leave a LIVE view as it is, until a question finds that something is missing.
#
# A relay may not know all of what it publishes: its META says so (``upstream``). The digest then proves that the view
# is what the relay sent, and nothing proves that this is what its engine holds: PARTIAL, until a META says otherwise.
#
# Which rules? A stream is asked in the words of the extension first. SGLang, vLLM and others read such a question as
# one huge number and answer a bare end marker: they are followed plainly from then on, and are asked for the
# extension again now and then, for a successor may have it. STATE_TRANSITIONS (instructions) has the states' table.

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from observability.kv_stream.instructions import (
    STATE_TRANSITIONS,
    AbortStaging,
    Apply,
    ApplyStaged,
    Clear,
    CommitStaging,
    CursorCounters,
    Instruction,
    RetryLater,
    SendReplayRequest,
    StartStaging,
    StreamState,
    request_token,
)
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayVerb
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES, STREAM_DIGEST_BYTES, digest_after

__all__ = [
    "NO_EPOCH",
    "MAX_REPLAY_CREDIT",
    "DigestCursor",
    "PlainCursor",
    "Position",
    "ReplayCredit",
    "StreamCursor",
]

MAX_REPLAY_CREDIT = 4
"""Enough for a status, a synchronisation, a snapshot and one that was cut, without a pause."""


@dataclass(slots=True)
class ReplayCredit:
    """How many questions may be asked now. Whoever sends one takes it from here, and gives it back by the clock."""

    available: int = MAX_REPLAY_CREDIT


_NONE: tuple[Instruction, ...] = ()
_FOLLOWING = (StreamState.LIVE, StreamState.PARTIAL)
_UNCONNECTED = (StreamState.CONNECTING, StreamState.DEAD)
_UNSETTLED = (*_UNCONNECTED, StreamState.RECOVERING)


def _changed(old: StreamState, new: StreamState, counters: CursorCounters) -> StreamState:
    """``new``, checked by the table, and counted where it is a loss."""
    assert new in STATE_TRANSITIONS[old], f"{old} may not become {new}"
    counters.losses += new is StreamState.PARTIAL
    return new


# --- by the digest: places, and answers that lead from one to the next ---

NO_EPOCH = bytes(EPOCH_BYTES)
"""The epoch of no life: what is asked with while nothing is held."""


@dataclass(slots=True)
class Position:
    """A place in one life of a publisher: ``digest`` is the digest of everything below ``next``.

    As it is made, it is no place in any life.
    """

    epoch: bytes = NO_EPOCH
    next: int = 0
    digest: bytes = bytes(STREAM_DIGEST_BYTES)

    def advance(self, payload: bytes) -> None:
        """Go on by one batch."""
        self.digest = digest_after(self.digest, self.next, payload)
        self.next += 1

    def is_at(self, meta: ReplayMeta) -> bool:
        """True when the publisher, too, has this digest at this number of this life."""
        return (self.epoch, self.next, self.digest) == (meta.epoch, meta.start, meta.chain)

    def copy(self) -> Position:
        return Position(self.epoch, self.next, self.digest)


class _Part(Enum):
    """How far the answer to an extended question has come."""

    STATUS_ASKED = auto()
    SYNC_ASKED = auto()
    SNAPSHOT_ASKED = auto()
    BASE = auto()
    BATCHES = auto()
    OVER = auto()


class _Said(Enum):
    """What a META says, as the grammar of answers tells them apart."""

    STATUS = auto()
    SNAPSHOT_BEGINS = auto()
    BATCHES_BEGIN = auto()
    END = auto()


_ASKED = {
    ReplayVerb.STATUS: _Part.STATUS_ASKED,
    ReplayVerb.SYNC: _Part.SYNC_ASKED,
    ReplayVerb.SNAPSHOT: _Part.SNAPSHOT_ASKED,
}

_ANSWER_GRAMMAR = {
    (_Part.STATUS_ASKED, _Said.STATUS): _Part.OVER,
    (_Part.SYNC_ASKED, _Said.BATCHES_BEGIN): _Part.BATCHES,  # the publisher agrees on the place that was asked from
    (_Part.SYNC_ASKED, _Said.SNAPSHOT_BEGINS): _Part.BASE,  # it does not, or its window has passed the place
    (_Part.SNAPSHOT_ASKED, _Said.SNAPSHOT_BEGINS): _Part.BASE,
    (_Part.BASE, _Said.BATCHES_BEGIN): _Part.BATCHES,
    (_Part.BATCHES, _Said.END): _Part.OVER,
}
"""What may be said in which part, and the part after it; anything else breaks the answer. Chunks come in BASE, numbered
from 0, batches in BATCHES. Each META but a status and the first of a snapshot names a place, and both sides must have
the same digest there."""


def _said(meta: ReplayMeta) -> _Said:
    if meta.kind is ReplayMetaKind.BEGIN:
        return _Said.SNAPSHOT_BEGINS if meta.snap else _Said.BATCHES_BEGIN
    return _Said.END if meta.kind is ReplayMetaKind.END else _Said.STATUS


class _Fit(Enum):
    """How a message of an answer fits to what came before it.

    SPLICED: the publisher does not have what was applied under these numbers.
    """

    NEXT = auto()
    REPEATED = auto()
    BROKEN = auto()
    SPLICED = auto()


@dataclass(slots=True)
class _SyncQuestion:
    """One open extended question, and its answer so far.

    Attributes:
        ask: its number.
        at: where the view stands; an incremental answer moves it.
        gap_seen: highest live number beyond a gap that had come when this was asked, -1 for none.
        asked_at: where it stood when this was asked: a status is compared with that, not with what has come since.
        staging: where the staging view of a snapshot stands; None in an incremental answer.
        is_damaged: something in the snapshot could not be read.
    """

    ask: int
    at: Position
    part: _Part
    gap_seen: int
    asked_at: Position = field(init=False)
    staging: Position | None = None
    is_damaged: bool = False
    num_chunks: int = 0

    def __post_init__(self) -> None:
        self.asked_at = self.at.copy()

    @property
    def is_status(self) -> bool:
        return self.part is _Part.STATUS_ASKED

    @property
    def has_advanced(self) -> bool:
        """True when a part of the answer is in the view for good."""
        return self.staging is None and self.part is _Part.BATCHES and self.at.next > self.asked_at.next

    def take(self, seq: int, payload: bytes) -> _Fit:
        """Take a chunk of the base or a batch."""
        place = self.staging or self.at
        if self.part is _Part.BASE:
            wanted = self.num_chunks
        elif self.part is _Part.BATCHES:
            wanted = place.next
        else:
            return _Fit.BROKEN
        if seq != wanted:
            return _Fit.REPEATED if seq < wanted else _Fit.BROKEN
        if self.part is _Part.BASE:
            self.num_chunks += 1
        else:
            place.advance(payload)
        return _Fit.NEXT

    def hear(self, meta: ReplayMeta) -> _Fit:
        """Take a META: the answer goes on as the grammar says, and both sides agree on the place that it names."""
        said = _said(meta)
        part = _ANSWER_GRAMMAR.get((self.part, said))
        if part is None:
            return _Fit.BROKEN
        if said is _Said.SNAPSHOT_BEGINS:
            self.staging = Position(meta.epoch, meta.start, meta.chain)
        elif said is not _Said.STATUS:
            if not (self.staging or self.at).is_at(meta):
                return _Fit.SPLICED if self.staging is None else _Fit.BROKEN
            if self.part is _Part.BASE and meta.chunks not in (None, self.num_chunks):
                return _Fit.BROKEN
        self.part = part
        return _Fit.NEXT


class DigestCursor:
    """Recovery of one stream by status, incremental synchronisation and snapshot.

    Args:
        patience: failed questions in a row after which a view that is followed counts as not proved. So many bare end
            markers, on a connection on which the extension never showed, mean that a successor does not have it;
            before it ever showed, the first failed question does.
        counters: to count in.
        credit: for questions about gaps; shared with the rules for publishers without the extension.

    A method that returns instructions expects them to be carried out in order, before the next call. ``live`` is for
    batches of one connection: what comes on another follows ``disconnected`` and ``connected``.

    Attributes:
        is_known: the publisher has shown the extension.
        is_foreign: it has not, or not any more: follow it by the plain rules.
        upstream: what its last status or end said of it, see ``ReplayMeta``.
    """

    __slots__ = (
        "_at", "_credit", "_damaged_at", "_failures", "_gap_seen", "_has_strays", "_is_shown", "_num_unproved",
        "_patience", "_question", "_state", "counters", "is_foreign", "is_known", "upstream",
    )  # fmt: skip

    def __init__(
        self, *, patience: int = 3, counters: CursorCounters | None = None, credit: ReplayCredit | None = None
    ) -> None:
        self.counters = counters or CursorCounters()
        self._credit = credit or ReplayCredit()
        self._gap_seen = -1
        self._has_strays = False
        self.is_known = self.is_foreign = False
        self._state = StreamState.CONNECTING
        self._at = Position()
        self._question: _SyncQuestion | None = None
        self._patience = patience
        self._failures = self._num_unproved = 0
        self._is_shown = False
        self._damaged_at: int | None = None
        self.upstream: str | None = None

    def __repr__(self) -> str:
        return f"<DigestCursor {self._state} at {self.last_seq}, asks #{self.open_request_id}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted, now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last batch that the view has; one below the publisher's first when it has none."""
        return self._at.next - 1

    @property
    def open_request_id(self) -> int | None:
        """Number of the replay question whose answer is awaited, None without one."""
        return self._question.ask if self._question else None

    @property
    def is_accepting_live(self) -> bool:
        """False while live batches would have to be dropped: leave them in the socket."""
        if self._question is not None and not self._question.is_status:
            return False
        return self._state in _FOLLOWING or self._has_gap or self._waits_for_credit

    @property
    def _has_gap(self) -> bool:
        """True while a live batch was dropped that no question has asked about."""
        return self._gap_seen >= self._at.next and self._state not in _UNCONNECTED

    @property
    def _waits_for_credit(self) -> bool:
        """True while a gap has ended LIVE and no question is open: also when what was missing has come late since."""
        return self._state is StreamState.RECOVERING and self._question is None and not self._failures

    def on_connected(self) -> tuple[Instruction, ...]:
        """The live connection is up: anything may have happened while it was not."""
        if self._state not in _UNCONNECTED:
            return _NONE
        return self._sync()

    def on_disconnected(self) -> tuple[Instruction, ...]:
        """The live connection is gone. The view stays until the cursor is told to give up."""
        if self._state is StreamState.DEAD:
            return _NONE
        self._failures = 0
        self._is_shown = False
        self._become(StreamState.CONNECTING)
        return self._drop_question()

    def on_connection_timeout(self) -> tuple[Instruction, ...]:
        """The publisher is taken for dead: its blocks are no longer worth routing to."""
        self._failures = 0
        self._at = Position()
        self._damaged_at = None
        self._become(StreamState.DEAD)
        return (*self._drop_question(), Clear("the publisher is unreachable"))

    def on_live_batch(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """A batch came on the live channel."""
        before = self.on_connected()
        if not self.is_accepting_live:
            if self._question is not None:
                self._gap_seen = max(seq, self._gap_seen)
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
        self._gap_seen = max(seq, self._gap_seen)
        return self._ask_about_gap()

    def on_credit_available(self) -> tuple[Instruction, ...]:
        """There is credit again: ask about the gap that had to wait for it."""
        is_due = self._waits_for_credit or (self._has_gap and not self._failures)
        return self._ask_about_gap() if is_due else _NONE

    def _ask_about_gap(self) -> tuple[Instruction, ...]:
        """Ask what is missing, now or when that may be. Strays cost a LIVE view nothing but a look at the status."""
        if self._question is None and self._credit.available and self._has_strays and self._state in _FOLLOWING:
            return self._ask(ReplayVerb.STATUS)
        if self._question is None and self._credit.available:
            return self._sync()
        if not self._has_strays:
            self._become(StreamState.RECOVERING)
        return _NONE

    def on_replay_batch(self, ask: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """One batch, or chunk of the base, of the answer to question ``ask``."""
        question = self._question
        if question is None or question.ask != ask:
            self.counters.stale_replays += 1
            return _NONE
        fit = question.take(seq, payload)
        if fit is _Fit.REPEATED:
            self.counters.duplicates += 1
            return _NONE
        if fit is not _Fit.NEXT:
            return self._cut()
        staging = question.staging
        if staging is not None and question.part is _Part.BASE:
            return (ApplyStaged(staging.next - 1, payload, True),)
        self.counters.applied += 1
        self.counters.recovered += 1
        return (Apply(seq, payload, True) if staging is None else ApplyStaged(seq, payload, False),)

    def on_replay_meta(self, ask: int, meta: ReplayMeta) -> tuple[Instruction, ...]:
        """A META of the answer to question ``ask`` came."""
        question = self._question
        if question is None or question.ask != ask or meta.token != request_token(ask):
            self.counters.stale_replays += 1
            return _NONE
        self.is_known = self._is_shown = True
        fit = question.hear(meta)
        if fit is _Fit.SPLICED:
            return self._distrust()
        if fit is not _Fit.NEXT:
            return self._cut()
        if meta.kind is ReplayMetaKind.STATUS:
            self._question = None
            return self._compare(question, meta)
        if meta.kind is ReplayMetaKind.END:
            return self._close(question, meta)
        return (StartStaging(),) if meta.snap else _NONE

    def _compare(self, question: _SyncQuestion, meta: ReplayMeta) -> tuple[Instruction, ...]:
        """Compare a status with where the view stood when it was asked for: the view may have moved on since."""
        asked_at = question.asked_at
        self._failures = 0
        if meta.epoch != asked_at.epoch:
            return self._sync()
        self._hear_upstream(meta)
        is_flowing = self._at.next > asked_at.next
        if meta.start != asked_at.next:
            # The publisher's window has passed the place. In a busy stream what is missing may be on its way: a view
            # that is followed waits for the next probe. No probe comes for one that a gap has made doubtful.
            self._num_unproved += 1
            may_wait = is_flowing and self._num_unproved == 1 and self._state in _FOLLOWING
            return _NONE if may_wait else self._sync()
        if not asked_at.is_at(meta):
            return self._distrust()
        self.counters.verified += 1
        self._num_unproved = 0
        if self._damaged_at is not None and meta.first > self._damaged_at:
            return self._sync(ReplayVerb.SNAPSHOT)  # what could not be read is folded, and readable now
        self._has_strays = question.gap_seen >= meta.next
        if meta.next > self._at.next and (not is_flowing or self._at.next <= question.gap_seen < meta.next):
            return self._sync()
        if self._has_gap:
            return self._ask_about_gap()
        self._settle()
        return _NONE

    def _close(self, question: _SyncQuestion, meta: ReplayMeta) -> tuple[Instruction, ...]:
        """The answer is over, and the digest of all that came is the publisher's."""
        self._question = None
        self._failures = self._num_unproved = 0
        self._hear_upstream(meta)
        self.counters.verified += 1
        self._has_strays = question.gap_seen >= meta.next
        swap = _NONE if question.staging is None else self._swap_in(question, question.staging)
        if self._has_gap:
            return (*swap, *self._sync())
        self._settle()
        return swap

    def _swap_in(self, question: _SyncQuestion, staging: Position) -> tuple[Instruction, ...]:
        self.counters.snapshots += 1
        self.counters.restarts += self._at.epoch not in (NO_EPOCH, staging.epoch)
        self._at = staging
        # What is damaged may be anywhere in the snapshot: it can be read again when the window has passed all of it.
        self._damaged_at = staging.next if question.is_damaged else None
        return (CommitStaging(),)

    def on_replay_end(self, ask: int) -> tuple[Instruction, ...]:
        """A bare end marker: the publisher has no extension, or had to cut its answer to question ``ask``."""
        if ask != self.open_request_id:
            return _NONE
        instructions = self._cut()
        if self._failures >= self._patience and not self._is_shown:
            self.is_foreign = True
        return instructions

    def on_replay_timeout(self, ask: int) -> tuple[Instruction, ...]:
        """The answer to question ``ask`` did not come to its end in time, or cannot be read."""
        if ask != self.open_request_id:
            return _NONE
        self.counters.replays_unanswered += 1
        return self._cut()

    def on_retry_due(self) -> tuple[Instruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        if self._question is not None or not self._failures:
            return _NONE
        return self._ask(ReplayVerb.STATUS) if self._state in _FOLLOWING else self._sync()

    def on_probe_due(self) -> tuple[Instruction, ...]:
        """A probe interval is over: see whether the publisher is still where the view is."""
        if self._state not in _FOLLOWING or self._question is not None or self._failures:
            return _NONE
        return self._ask(ReplayVerb.STATUS)

    def on_cleared(self) -> None:
        """The batch just applied cleared all blocks: what could not be read before it does not matter any more."""
        if self._question is not None and self._question.staging is not None:
            self._question.is_damaged = False
            return
        self._damaged_at = None
        if self._state is StreamState.PARTIAL and self._failures < self._patience:
            self._settle()

    def on_damaged(self) -> None:
        """The batch just applied could not be read whole: the view may differ by what it said."""
        if self._question is not None and self._question.staging is not None:
            self._question.is_damaged = True
            return
        self._damaged_at = self.last_seq
        if self._state is StreamState.LIVE:
            self._settle()

    def _sync(self, verb: ReplayVerb = ReplayVerb.SYNC) -> tuple[Instruction, ...]:
        self._become(StreamState.SYNCING if self._at.epoch == NO_EPOCH else StreamState.RECOVERING)
        return self._ask(verb)

    def _ask(self, verb: ReplayVerb) -> tuple[Instruction, ...]:
        self.counters.replays_asked += 1
        self._question = _SyncQuestion(self.counters.replays_asked, self._at, _ASKED[verb], self._gap_seen)
        self._gap_seen = -1
        return (SendReplayRequest(self._question.ask, self._at.next, verb, self._at.epoch),)

    def _distrust(self) -> tuple[Instruction, ...]:
        """What was applied is not what the publisher sent under these numbers: begin anew."""
        self.counters.splices += 1
        return self._sync(ReplayVerb.SNAPSHOT)

    def _cut(self) -> tuple[Instruction, ...]:
        """The open answer cannot be used further. What of it was applied stays: it was proved to follow."""
        question = self._question
        assert question is not None
        self.counters.replays_cut += int(self.is_known)
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
        if question is not None:
            self._gap_seen = max(question.gap_seen, self._gap_seen)
        return _NONE if question is None or question.staging is None else (AbortStaging(),)

    def _hear_upstream(self, meta: ReplayMeta) -> None:
        """A relay that doubts its own stream ends LIVE, whatever else its answer proves."""
        self.upstream = meta.upstream
        if self.upstream is not None and self._state is StreamState.LIVE:
            self._become(StreamState.PARTIAL)

    def _settle(self) -> None:
        is_whole = self._damaged_at is None and self.upstream is None
        self._become(StreamState.LIVE if is_whole else StreamState.PARTIAL)

    def _become(self, state: StreamState) -> None:
        if state is not self._state:
            self._state = _changed(self._state, state, self.counters)


# --- by numbers and payloads: the unbroken run of batches ---

NO_SEQUENCE = -1
"""``last_seq`` before the first batch: one below the number of a publisher's first."""


@dataclass(slots=True)
class _Run:
    """The unbroken run of batches that the view is built from. It keeps one payload, the last applied.

    ``complete`` means that it began where the publisher's state was known. ``adopting`` means that it may begin at
    any number: there is no history to be had. ``hole_after`` is the number after which one answer had a hole; the
    same hole twice means that the batches are lost.
    """

    last: int = NO_SEQUENCE
    payload: bytes = b""
    complete: bool = False
    adopting: bool = False
    hole_after: int | None = None


@dataclass(slots=True)
class _PlainQuestion:
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


class PlainCursor:
    """Recovery of one stream by numbers and the last payload.

    Without a replay channel, or while that is silent, nothing proves the stream: it is never ``LIVE`` then.

    Args:
        has_replay: whether the publisher offers a replay channel.
        patience: unanswered questions in a row after which the stream is followed without history.
        counters, credit: shared with the rules for publishers with the extension.

    A method that returns instructions expects them to be carried out in order, before the next call.
    """

    __slots__ = (
        "_credit", "_failures", "_has_gap", "_has_replay", "_last_heard", "_patience", "_question", "_run", "_state",
        "counters",
    )  # fmt: skip

    def __init__(
        self,
        *,
        has_replay: bool,
        patience: int = 3,
        counters: CursorCounters | None = None,
        credit: ReplayCredit | None = None,
    ) -> None:
        self.counters = counters or CursorCounters()
        self._credit = credit or ReplayCredit()
        self._has_gap = False
        self._state = StreamState.CONNECTING
        self._has_replay = has_replay
        self._patience = patience
        self._run = _Run()
        self._question: _PlainQuestion | None = None
        self._failures = 0
        self._last_heard = NO_SEQUENCE

    def __repr__(self) -> str:
        asking = f", asks #{self._question.ask}" if self._question else ""
        return f"<PlainCursor {self._state} at {self._run.last}{asking}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted, now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last batch applied in the present run; ``NO_SEQUENCE`` before the first."""
        return self._run.last

    @property
    def open_request_id(self) -> int | None:
        """Number of the replay question whose answer is awaited, None without one."""
        return self._question.ask if self._question else None

    @property
    def is_accepting_live(self) -> bool:
        """False while live batches would have to be dropped: leave them in the socket."""
        if self._question is not None or (self._state is StreamState.RECOVERING and not self._has_gap):
            return False
        return self._state is not StreamState.SYNCING or not self._failures

    @property
    def _replay_is_silent(self) -> bool:
        return self._failures >= self._patience

    # --- the connection ---

    def on_connected(self) -> tuple[Instruction, ...]:
        """The live connection is up: anything may have happened while it was not."""
        if self._state not in _UNCONNECTED:
            return _NONE
        if self._has_replay:
            return self._ask()
        self._run = _Run(adopting=True)
        self._become(StreamState.PARTIAL)
        return (Clear("nothing is replayed: what was published before is unknown"),)

    def on_disconnected(self) -> tuple[Instruction, ...]:
        """The live connection is gone. The view stays until the cursor is told to give up."""
        if self._state is not StreamState.DEAD:
            self._question = None
            self._has_gap = False
            self._failures = 0
            self._last_heard = NO_SEQUENCE
            self._become(StreamState.CONNECTING)
        return _NONE

    def on_connection_timeout(self) -> tuple[Instruction, ...]:
        """The publisher is taken for dead: its blocks are no longer worth routing to."""
        self._question = None
        self._has_gap = False
        self._failures = 0
        self._run = _Run()
        self._become(StreamState.DEAD)
        return (Clear("the publisher is unreachable"),)

    # --- live batches ---

    def on_live_batch(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """A batch came on the live channel."""
        before = self.on_connected()
        run = self._run
        advances = seq > self._last_heard
        self._last_heard = seq
        if not self.is_accepting_live:
            if self._question is not None and seq != run.last:
                self._question.newer_seen = True
            return before
        if self._has_gap:
            return _NONE  # the answer brings it again
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
        elif run.last != NO_SEQUENCE:
            self.counters.gaps += 1
        if self._has_replay and not self._replay_is_silent:
            return self._ask_about_gap()
        return self._begin_run(seq, payload)

    def on_credit_available(self) -> tuple[Instruction, ...]:
        """There is credit again: ask about the gap that had to wait for it."""
        return self._ask_about_gap() if self._has_gap and not self._failures else _NONE

    def _ask_about_gap(self) -> tuple[Instruction, ...]:
        if self._credit.available:
            return self._ask(has_batches=True)
        self._has_gap = True
        if self._state is not StreamState.SYNCING:
            self._become(StreamState.RECOVERING)
        return _NONE

    # --- answers of the replay channel ---

    def on_replay_batch(self, ask: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """One batch of the answer to question ``ask``."""
        question = self._question
        if question is None or question.ask != ask:
            self.counters.stale_replays += 1
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

    def _first_answer(self, question: _PlainQuestion, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """Begin, or compare what is held with what the publisher has under the same number."""
        run = self._run
        if question.full or seq != run.last:
            return self._begin_run(seq, payload)
        if payload == run.payload:
            return _NONE
        return self._resync("the publisher restarted and passed the number that was held")

    def on_replay_end(self, ask: int) -> tuple[Instruction, ...]:
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

    def _no_history(self, question: _PlainQuestion) -> tuple[Instruction, ...]:
        """Nothing was ever published, or nothing is kept: which, the next live batch tells."""
        run = self._run
        self._run = _Run(adopting=run.adopting or question.has_batches)
        self._become(StreamState.PARTIAL if self._run.adopting else StreamState.SYNCING)
        return _NONE if run.last == NO_SEQUENCE else (Clear("the publisher has no history"),)

    def on_replay_timeout(self, ask: int) -> tuple[Instruction, ...]:
        """The answer to question ``ask`` did not come to its end in time."""
        question = self._question
        if question is None or question.ask != ask:
            return _NONE
        self._question = None
        self.counters.replays_unanswered += 1
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
        self._run = _Run(adopting=True)
        self._become(StreamState.PARTIAL)
        return (Clear("the replay channel does not answer"), retry)

    # --- time, which the owner measures ---

    def on_retry_due(self) -> tuple[Instruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        if self._question is not None or not self._failures:
            return _NONE
        return self._ask(
            full=self._replay_is_silent and not self._run.complete,
            probing=self._state in _FOLLOWING,
        )

    def on_probe_due(self) -> tuple[Instruction, ...]:
        """The stream has been silent for a while: see whether its last batches were lost, or its life is another."""
        if not self._has_replay or self._failures or not self.is_accepting_live:
            return _NONE
        return _NONE if self._state in _UNCONNECTED else self._ask(probing=True)

    # --- what the owner found in a batch ---

    def on_cleared(self) -> None:
        """The batch just applied cleared all blocks: from there on the publisher's state is known."""
        self._run.complete = True
        if self._state is StreamState.PARTIAL:
            self._settle()

    def on_damaged(self) -> None:
        """The batch just applied could not be read whole: the view may differ by what it said."""
        self._run.complete = False
        if self._state is StreamState.LIVE:
            self._become(StreamState.PARTIAL)

    # --- the run ---

    def _ask(self, *, full: bool = False, probing: bool = False, has_batches: bool = False) -> tuple[Instruction, ...]:
        fresh = self._run.last == NO_SEQUENCE
        self._has_gap = False
        self.counters.replays_asked += 1
        question = _PlainQuestion(ask=self.counters.replays_asked, full=full or fresh, has_batches=has_batches)
        self._question = question
        if not probing:
            self._become(StreamState.SYNCING if fresh else StreamState.RECOVERING)
        return (SendReplayRequest(question.ask, 0 if question.full else self._run.last),)

    def _resync(self, reason: str) -> tuple[Instruction, ...]:
        """Another life of the publisher: nothing that is held is true of it."""
        self.counters.restarts += 1
        self._run = _Run()
        return (Clear(reason), *self._ask())

    def _begin_run(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        reason = "history begins here" if seq == 0 else f"history before batch {seq} is not known"
        self._run = _Run(last=seq - 1, complete=seq == 0)
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
        if state is not self._state:
            self._state = _changed(self._state, state, self.counters)


# --- which rules? ---

_PROBES_PER_EXTENSION_PROBE = 8
"""A plain publisher is asked for the extension at every eighth probe, and at the first of a connection. One that has
shown it before is asked at every probe."""


class StreamCursor:
    """Recovery of one stream (one rank of one worker), by the rules that its publisher allows.

    Args:
        has_replay: whether the publisher offers a replay channel.
        patience: failed questions in a row after which the stream is followed by lesser means.

    A method that returns instructions expects them to be carried out in order, before the next call.

    Attributes:
        credit: questions that may be asked now. The owner takes one for each that it sends, holds one back while there
            is none, and calls ``on_credit_available`` when it has given some back.
    """

    __slots__ = (
        "_extension_ask", "_has_replay", "_mode", "_patience", "_probes_left", "_was_extended", "counters", "credit",
    )  # fmt: skip

    def __init__(self, *, has_replay: bool, patience: int = 3) -> None:
        self.counters = CursorCounters()
        self.credit = ReplayCredit()
        self._has_replay = has_replay
        self._patience = patience
        self._extension_ask = 0
        self._was_extended = False
        self._probes_left = _PROBES_PER_EXTENSION_PROBE
        self._mode: DigestCursor | PlainCursor = self._new_digest_cursor() if has_replay else self._new_plain_cursor()

    def __repr__(self) -> str:
        return f"<StreamCursor {self._mode!r}>"

    def _new_digest_cursor(self) -> DigestCursor:
        return DigestCursor(patience=self._patience, counters=self.counters, credit=self.credit)

    def _new_plain_cursor(self) -> PlainCursor:
        return PlainCursor(
            has_replay=self._has_replay, patience=self._patience, counters=self.counters, credit=self.credit
        )

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
    def open_request_id(self) -> int | None:
        """Number of the replay question whose answer is awaited, None without one."""
        return self._mode.open_request_id or (self._extension_ask if self._is_probing_extension else None)

    @property
    def _is_probing_extension(self) -> bool:
        return (
            self._extension_ask > 0 and self._extension_ask == self.counters.replays_asked
        )  # no later question replaced it

    @property
    def expects_meta(self) -> bool:
        """True while the payload of an end marker means something."""
        return isinstance(self._mode, DigestCursor) or self._is_probing_extension

    @property
    def is_accepting_live(self) -> bool:
        """False while live batches would have to be dropped: leave them in the socket."""
        return self._mode.is_accepting_live

    @property
    def is_settled(self) -> bool:
        """True while connected with no recovery under way: the view will not get better by waiting."""
        return self._mode.is_accepting_live and self.state not in _UNSETTLED

    # --- the connection ---

    def on_connected(self) -> tuple[Instruction, ...]:
        """The live connection is up: anything may have happened while it was not."""
        return self._mode.on_connected()

    def on_disconnected(self) -> tuple[Instruction, ...]:
        """The live connection is gone. The view stays until the cursor is told to give up."""
        self._extension_ask = 0
        self._probes_left = 1
        return self._mode.on_disconnected()

    def on_connection_timeout(self) -> tuple[Instruction, ...]:
        """The publisher is taken for dead: its blocks are no longer worth routing to."""
        return self._mode.on_connection_timeout()

    # --- what comes ---

    def on_live_batch(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """A batch came on the live channel."""
        return self._mode.on_live_batch(seq, payload)

    def on_replay_batch(self, ask: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """One batch of the answer to question ``ask``."""
        return self._or_plainly(self._mode.on_replay_batch(ask, seq, payload))

    def on_replay_meta(self, ask: int, meta: ReplayMeta) -> tuple[Instruction, ...]:
        """A META of the answer to question ``ask``."""
        if isinstance(self._mode, DigestCursor):
            return self._or_plainly(self._mode.on_replay_meta(ask, meta))
        if not self._is_probing_extension or ask != self._extension_ask:
            self.counters.stale_replays += 1
            return _NONE
        self._mode = self._new_digest_cursor()
        return self._mode.on_connected()

    def on_replay_end(self, ask: int) -> tuple[Instruction, ...]:
        """The end marker of the answer to question ``ask``, without a META."""
        if self._is_probing_extension and ask == self._extension_ask:
            return self._no_extension()
        return self._or_plainly(self._mode.on_replay_end(ask))

    def on_replay_timeout(self, ask: int) -> tuple[Instruction, ...]:
        """The answer to question ``ask`` did not come to its end in time, or cannot be read."""
        if self._is_probing_extension and ask == self._extension_ask:
            return self._no_extension()
        return self._or_plainly(self._mode.on_replay_timeout(ask))

    def _no_extension(self) -> tuple[Instruction, ...]:
        """The probe for the extension found none: probe by the plain rules, as was due."""
        self._extension_ask = 0
        return self._mode.on_probe_due()

    def _or_plainly(self, instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        """``instructions``, or those of the plain rules when the publisher turned out to have no extension."""
        if not isinstance(self._mode, DigestCursor) or not self._mode.is_foreign:
            return instructions
        self._was_extended = self._was_extended or self._mode.is_known
        holds_blocks = self.counters.applied or self.counters.snapshots
        self._mode = self._new_plain_cursor()
        self._probes_left = 1 if self._was_extended else _PROBES_PER_EXTENSION_PROBE
        cleared = (Clear("the publisher answers no question of the extension"),) if holds_blocks else _NONE
        return (*cleared, *self._mode.on_connected())

    # --- time, which the owner measures ---

    def on_credit_available(self) -> tuple[Instruction, ...]:
        """The owner has given back some ``credit``: ask about a gap that had to wait for it."""
        return self._mode.on_credit_available()

    def on_retry_due(self) -> tuple[Instruction, ...]:
        """The pause asked for by ``RetryLater`` is over."""
        return self._mode.on_retry_due()

    def on_probe_due(self) -> tuple[Instruction, ...]:
        """A probe interval is over: see whether batches were lost, or the publisher's life is another."""
        if isinstance(self._mode, DigestCursor) or not self._has_replay:
            return self._mode.on_probe_due()
        if self.is_settled and self.open_request_id is None:
            self._probes_left -= 1
            if self._probes_left <= 0:
                self._probes_left = 1 if self._was_extended else _PROBES_PER_EXTENSION_PROBE
                self.counters.replays_asked += 1
                self._extension_ask = self.counters.replays_asked
                return (SendReplayRequest(self._extension_ask, 0, ReplayVerb.STATUS),)
        return self._mode.on_probe_due()

    # --- what the owner found in a batch ---

    def on_cleared(self) -> None:
        """The batch just applied cleared all blocks."""
        self._mode.on_cleared()

    def on_damaged(self) -> None:
        """The batch just applied could not be read whole: the view may differ by what it said."""
        self._mode.on_damaged()
