"""The rules of following a publisher that has the extension: by its epoch and its digest, events in, instructions out.

A view is right when the publisher has the same digest at the same number of the same life. The digest is followed
batch by batch and compared with the publisher's at the end of every answer and at every probe, so that loss, restart
and splice are seen. A gap is closed from where the view stands when the publisher agrees on that place; otherwise a
snapshot is built aside and swapped in once its own digest agrees. A batch from the future is a hint to ask: it never
moves the place, and it is not kept.
"""

from __future__ import annotations

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
from observability.kv_stream.sync import NO_EPOCH, Position, SyncQuestion, Verdict
from scheduler_components.kv_events.replay_wire import Kind, Meta, Verb

__all__ = ["DigestCursor"]

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
