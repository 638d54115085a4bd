"""The rules of following one stream, without socket, clock or thread: events in, instructions out.

Followers use ``StreamCursor``. It applies one of two sets of rules: ``DigestCursor`` where the publisher has the replay
extension, ``PlainCursor`` where it has not.
"""

# The theory of delivery
# ======================
#
# A publisher numbers its batches without gaps. Its state after batch n follows from its batches up to n. An epoch of a
# publisher lasts from its start to its exit. It begins with an empty state, and may begin at any number. The
# publisher's replay channel keeps the newest batches one by one (the replay buffer). With the extension it also keeps
# the state before the replay buffer (the snapshot), and can name for any position in the stream its epoch (16 random
# bytes per epoch) and its digest of all batches below that position.
#
# Messages to a subscriber can be lost, repeated, late, cut short, or of another epoch.
#
# The invariant: a view in state LIVE is never wrong. It equals the publisher's state after batch ``last_seq``.
#
# Three rules keep the invariant, whatever the publisher:
#
#   1. The cursor applies a batch only when its number follows the last applied one.
#   2. A batch from the future makes the cursor request the batches between. The batch does not move the cursor and is
#      not kept: the answer contains it again.
#   3. LIVE needs a proof that the run of batches began at a known state and still belongs to this publisher. Whatever
#      could break the proof ends LIVE immediately: a gap, a lost connection, an unreadable batch.
#
# The two sets of rules differ in the proof, and in the cost of a gap:
#
#                     DigestCursor                              PlainCursor
#   proof             same epoch, number and digest as the      the run began at batch 0 or at a clear of all blocks,
#                     publisher, at the end of every answer     and the replay has the held payload under the last
#                     and at every probe                        number
#   gap               batches from the view's position, if      batches from the last held number, whose payload is
#                     both sides agree on it; else a snapshot   compared: a restarted publisher may have passed it
#   another epoch     snapshot in a staging view, which         clear, and a request from 0
#                     replaces the view when its digest agrees
#   history is gone   cannot happen: the snapshot has it        PARTIAL until a clear of all blocks
#   no answer         LIVE becomes PARTIAL after ``patience``   PARTIAL after ``patience`` requests; a recovery starts
#                     requests; a recovery keeps requesting     again with the next live batch
#
# At most one request is open. It has a number, and an answer with another number is stale. A failed request is sent
# again after a pause that the follower measures (``RetryLater``). While a request is open, live batches stay in the
# socket (``is_accepting_live`` is False), so that the cursor can continue with them when the answer ends.
#
# The cost of recovery for the publisher is bounded in every case. A stale queue or a forger may produce a gap with
# every frame, and a request for each would cost one answer per frame. Therefore requests have a credit
# (``CursorCounters.credit``), which the follower restores by time. When a gap finds no credit, the cursor remembers it,
# reads and drops the frames behind it, and sends one request about all of them when credit is available again. A
# publisher numbers a batch before it sends it: if the publisher has not reached the number of a frame when it answers a
# request that followed the frame, the frame was a stray, from another epoch or another sender. Further gaps then leave
# a LIVE view as it is, until a request finds that something is missing.
#
# A relay may not know all of the stream that it publishes. Its META says so (``upstream``). The digest then proves that
# the view equals the relay's state, but nothing proves that this is the engine's state: the stream is PARTIAL until a
# META clears ``upstream``.
#
# The cursor first sends a request of the extension. SGLang, vLLM and others read it as one huge number and answer with
# a bare end marker. Dynamo's mocker checks the length of a request and never answers this one. The follower takes a
# second of silence for a refusal. From then on the cursor follows them by the plain rules, and probes for the extension
# by a timer, because a successor may have it, or the requests or their answers were lost. Live batches do not postpone
# that timer: the plain rules cannot make a PARTIAL view LIVE in a stream that never pauses, and they do not see every
# restart behind a proxy. A publisher gets one such request of 37 bytes per probe interval. With each refusal the pause
# doubles, up to eight probe intervals. STATE_TRANSITIONS (stream_state) has the table of states. log_cursor has the
# rules of a stream in a log.

from __future__ import annotations

from observability.kv_stream.digest_cursor import DigestCursor
from observability.kv_stream.instructions import (
    Clear,
    Instruction,
    ProbeExtensionLater,
    SendReplayRequest,
)
from observability.kv_stream.plain_cursor import PlainCursor
from observability.kv_stream.stream_state import UNCONNECTED, CursorCounters, StreamState
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayVerb

__all__ = ["StreamCursor"]

_NONE: tuple[Instruction, ...] = ()
_UNSETTLED = (*UNCONNECTED, StreamState.RECOVERING)

_FOLLOWING_PLAINLY = (StreamState.SYNCING, StreamState.LIVE, StreamState.PARTIAL)

_MAX_REFUSALS_COUNTED = 3
"""The pause between two probes for the extension is one probe interval. Each bare end marker in answer doubles it, so
often at most. Silence does not count, because a request may be lost. A publisher that has shown the extension before
gets a probe in every interval."""


class StreamCursor:
    """Recovers one stream (one rank of one worker) by the rules that its publisher supports.

    Args:
        has_replay: whether the publisher offers a replay channel.
        patience: failed requests in a row after which the cursor falls back to weaker rules.

    Attributes:
    """

    __slots__ = (
        "_extension_request_id", "_had_extension", "_has_replay", "_is_extension_due", "_is_probe_due",
        "_num_refusals", "_patience", "_rules", "counters",
    )  # fmt: skip

    def __init__(self, *, has_replay: bool, patience: int = 3) -> None:
        self.counters = CursorCounters()
        self._has_replay = has_replay
        self._patience = patience
        self._extension_request_id = 0
        self._had_extension = False
        self._num_refusals = 0
        self._is_extension_due = self._is_probe_due = False
        self._rules: DigestCursor | PlainCursor = self._new_digest_cursor() if has_replay else self._new_plain_cursor()

    def __repr__(self) -> str:
        return f"<StreamCursor {self._rules!r}>"

    def _new_digest_cursor(self, *, is_shown: bool = False) -> DigestCursor:
        return DigestCursor(patience=self._patience, counters=self.counters, is_shown=is_shown)

    def _new_plain_cursor(self) -> PlainCursor:
        return PlainCursor(has_replay=self._has_replay, patience=self._patience, counters=self.counters)

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted now."""
        return self._rules.state

    @property
    def is_extended(self) -> bool:
        """True once the publisher has shown the extension: its digest proves the view."""
        return isinstance(self._rules, DigestCursor) and self._rules.has_extension

    @property
    def last_seq(self) -> int:
        """Number of the last batch in the view; one below the first number for an empty view."""
        return self._rules.last_seq

    @property
    def open_request_id(self) -> int | None:
        """Number of the open replay request, None without one."""
        return self._rules.open_request_id or (self._extension_request_id if self._is_probing_extension else None)

    @property
    def _is_probing_extension(self) -> bool:
        """True while the newest request is a probe for the extension."""
        return 0 < self._extension_request_id == self.counters.replays_asked

    @property
    def is_asking_for_extension(self) -> bool:
        """True while the open request shows whether the publisher has the extension: it may never be answered."""
        if isinstance(self._rules, DigestCursor):
            return not self._rules.has_extension and not self._had_extension
        return self._is_probing_extension

    @property
    def expects_meta(self) -> bool:
        """True while the payload of an end marker may be a META."""
        return isinstance(self._rules, DigestCursor) or self._is_probing_extension

    @property
    def is_accepting_live(self) -> bool:
        """False while the cursor would drop live batches: leave them in the socket."""
        return self._rules.is_accepting_live

    @property
    def is_settled(self) -> bool:
        """True while connected without a recovery in progress: waiting will not improve the view."""
        return self._rules.is_accepting_live and self.state not in _UNSETTLED

    # --- events: each method returns the instructions to carry out, in order, before the next event ---

    def on_live_batch(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """Process one batch of the live channel."""
        return self._rules.on_live_batch(seq, payload)

    def on_connected(self) -> tuple[Instruction, ...]:
        """The live connection is up."""
        instructions = self._rules.on_connected()
        if self._has_replay and isinstance(self._rules, PlainCursor):
            return (*instructions, self._probe_extension_later())
        return instructions

    def on_disconnected(self) -> tuple[Instruction, ...]:
        """The live connection is lost."""
        self._extension_request_id = self._num_refusals = 0
        self._is_extension_due = False
        return self._rules.on_disconnected()

    def on_connection_timeout(self) -> tuple[Instruction, ...]:
        """The publisher has been unreachable for too long and counts as dead."""
        return self._rules.on_connection_timeout()

    def on_replay_batch(self, request_id: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """Process one batch, or one chunk of a snapshot, of the answer to a request."""
        return self._after_answer(self._rules.on_replay_batch(request_id, seq, payload))

    def on_replay_meta(self, request_id: int, meta: ReplayMeta) -> tuple[Instruction, ...]:
        """Process one META message of the answer to an extended request."""
        if self._is_extension_probe(request_id):
            self._rules = self._new_digest_cursor(is_shown=True)
            self._had_extension = True
            return self._rules.on_connected()
        if isinstance(self._rules, DigestCursor):
            return self._after_answer(self._rules.on_replay_meta(request_id, meta))
        self.counters.stale_replays += 1  # no plain request has such an answer
        return _NONE

    def on_replay_end(self, request_id: int) -> tuple[Instruction, ...]:
        """Process the end marker of the answer to a request, without a META."""
        if self._is_extension_probe(request_id):
            return self._end_extension_probe(is_silent=False)
        instructions = self._after_answer(self._rules.on_replay_end(request_id))
        return (*instructions, *self.on_extension_probe_due()) if self._is_extension_due else instructions

    def on_replay_timeout(self, request_id: int) -> tuple[Instruction, ...]:
        """The answer to a request did not end in time, or cannot be read."""
        if self._is_extension_probe(request_id):
            return self._end_extension_probe(is_silent=True)
        return self._after_answer(self._rules.on_replay_timeout(request_id), is_silent=True)

    def on_credit_available(self) -> tuple[Instruction, ...]:
        """The follower has restored some ``CursorCounters.credit``."""
        return self._rules.on_credit_available()

    def on_retry_due(self) -> tuple[Instruction, ...]:
        """The pause requested by ``RetryLater`` is over."""
        return self._rules.on_retry_due()

    def on_probe_due(self) -> tuple[Instruction, ...]:
        """A probe interval is over."""
        if self._is_probing_extension:
            self._is_probe_due = True
            return _NONE
        return self._rules.on_probe_due()

    def on_extension_probe_due(self) -> tuple[Instruction, ...]:
        """Send a probe for the extension, now or after the plain request that is open.

        The time requested by ``ProbeExtensionLater`` is over.
        """
        rules = self._rules
        if isinstance(rules, DigestCursor):
            return _NONE
        self._is_extension_due = (
            rules.state not in _FOLLOWING_PLAINLY or rules.open_request_id is not None or rules.has_unanswered_request
        )
        if self._is_extension_due:
            return _NONE
        self._is_probe_due = False
        self.counters.replays_asked += 1
        self._extension_request_id = self.counters.replays_asked
        # A gap replaces this request, so the next one does not wait for its end.
        return SendReplayRequest(self._extension_request_id, 0, ReplayVerb.STATUS), self._probe_extension_later()

    def on_clear_applied(self) -> tuple[Instruction, ...]:
        """The batch just applied cleared all blocks."""
        return self._rules.on_clear_applied()

    def on_batch_damaged(self) -> tuple[Instruction, ...]:
        """A part of the batch just applied could not be read, so the view may differ from the publisher's state."""
        return self._rules.on_batch_damaged()

    # --- whether the publisher has the extension ---

    def _is_extension_probe(self, request_id: int) -> bool:
        return self._is_probing_extension and request_id == self._extension_request_id

    def _probe_extension_later(self) -> ProbeExtensionLater:
        doublings = 0 if self._had_extension else min(self._num_refusals, _MAX_REFUSALS_COUNTED)
        return ProbeExtensionLater(2**doublings)

    def _end_extension_probe(self, *, is_silent: bool) -> tuple[Instruction, ...]:
        """Go on without the extension, with the plain probe that was due meanwhile."""
        self._extension_request_id = 0
        self._num_refusals += not is_silent
        plain = self._rules.on_probe_due() if self._is_probe_due else _NONE
        return (*plain, self._probe_extension_later())

    def _after_answer(
        self, instructions: tuple[Instruction, ...], *, is_silent: bool = False
    ) -> tuple[Instruction, ...]:
        """Return the instructions of the rules, or those of a switch to the plain rules."""
        rules = self._rules
        if isinstance(rules, DigestCursor) and rules.lacks_extension:
            return self._follow_plainly(rules, is_silent=is_silent)
        return instructions

    def _follow_plainly(self, digest_cursor: DigestCursor, *, is_silent: bool) -> tuple[Instruction, ...]:
        """Switch to the plain rules and begin again: the publisher turned out to have no extension."""
        self._had_extension = self._had_extension or digest_cursor.has_extension
        self._num_refusals += not is_silent
        has_blocks = self.counters.applied or self.counters.snapshots
        self._rules = self._new_plain_cursor()
        cleared = (Clear("the publisher answers no request of the extension"),) if has_blocks else _NONE
        return (*cleared, *self._rules.on_connected(), self._probe_extension_later())
