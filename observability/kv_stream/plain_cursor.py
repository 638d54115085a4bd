"""The rules of following a publisher without the extension (SGLang, vLLM): events in, instructions out.

A view is right when it is built from an unbroken run of batches that begins where the publisher's state is known:
at batch 0 of its life, or at a batch that clears all blocks. The cursor tracks that run. It keeps one payload, the
last applied, and nothing else: a batch from the future is a reason to ask for replay, it is not kept. When it must
go on after a gap it asks from the number that it *holds* and compares that payload, because a publisher that
restarted may have passed the number. History that the publisher no longer has costs the stream its ``LIVE`` state.

Feed live batches only while ``listening`` is true: leave them in the socket during a replay, and they are there to
go on from when it ends.
"""

from __future__ import annotations

from observability.kv_stream.instructions import (
    Apply,
    AskReplay,
    Clear,
    CursorCounters,
    Instruction,
    RetryLater,
    StreamState,
)
from observability.kv_stream.run import NOTHING_APPLIED, Question, Run

__all__ = ["PlainCursor"]

_NONE: tuple[Instruction, ...] = ()
_FOLLOWING = (StreamState.LIVE, StreamState.PARTIAL)


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
