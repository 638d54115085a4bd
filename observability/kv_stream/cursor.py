"""The rules of following one stream, without socket, clock or thread: events in, instructions out.

A publisher is asked in the words of the extension first. One that has it is followed by its digest
(``digest_cursor``); SGLang, vLLM and others answer a bare end marker, and are followed by numbers and payloads
(``plain_cursor``). A publisher that was taken for one of those is asked again now and then.

Feed live batches only while ``listening`` is true: leave them in the socket during a replay, and they are there to
go on from when it ends.
"""

from __future__ import annotations

from observability.kv_stream.digest_cursor import DigestCursor
from observability.kv_stream.instructions import AskReplay, Clear, CursorCounters, Instruction, StreamState
from observability.kv_stream.plain_cursor import PlainCursor
from scheduler_components.kv_events.replay_wire import Meta, Verb

__all__ = ["StreamCursor"]

_NONE: tuple[Instruction, ...] = ()
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
