"""Recovery of a stream whose publisher has no replay extension: by numbers and the last payload.

The theory is at the top of ``stream_cursor``.
"""

from __future__ import annotations

from dataclasses import dataclass

from observability.kv_stream.instructions import Apply, Clear, Instruction, RetryLater, SendReplayRequest
from observability.kv_stream.stream_state import UNCONNECTED, CursorCounters, StreamState, change_state

__all__ = ["NO_SEQUENCE", "PlainCursor"]

_NONE: tuple[Instruction, ...] = ()
_FOLLOWING = (StreamState.LIVE, StreamState.PARTIAL)

NO_SEQUENCE = -1
"""``last_seq`` before the first batch: one below the lowest number of a publisher."""


@dataclass(slots=True)
class _Run:
    """The contiguous run of batches that built the view. It keeps one payload, that of the last batch.

    ``complete`` means that the run began where the publisher's state was known. ``adopting`` means that it may begin at
    any number, because no history is available. ``hole_after`` is the number after which one answer had a hole. The
    same hole in two answers means that the batches are lost.
    """

    last: int = NO_SEQUENCE
    payload: bytes = b""
    complete: bool = False
    adopting: bool = False
    hole_after: int | None = None


@dataclass(slots=True)
class _PlainRequest:
    """The open replay request.

    ``full`` requests all history; otherwise the request continues the run. ``has_batches`` means that the stream is
    known not to be empty. ``newer_seen`` means that a live batch was dropped since the request was sent.
    """

    request_id: int
    full: bool
    has_batches: bool
    num_batches: int = 0
    num_applied: int = 0
    has_hole: bool = False
    newer_seen: bool = False


class PlainCursor:
    """Recovers one stream by numbers and the last payload. ``StreamCursor`` calls its methods.

    Without a replay channel, or while it does not answer, nothing proves the stream, and it is never ``LIVE``.

    Args:
        has_replay: whether the publisher offers a replay channel.
        patience: unanswered requests in a row after which the stream is followed without history.
        counters: shared with the other cursor of the stream.
    """

    __slots__ = (
        "_failures", "_has_gap", "_has_replay", "_last_live_seq", "_patience", "_request", "_run", "_state",
        "counters",
    )  # fmt: skip

    def __init__(
        self,
        *,
        has_replay: bool,
        patience: int = 3,
        counters: CursorCounters | None = None,
    ) -> None:
        self.counters = counters or CursorCounters()
        self._has_replay = has_replay
        self._patience = patience
        self._state = StreamState.CONNECTING
        self._run = _Run()
        self._request: _PlainRequest | None = None
        self._has_gap = False
        self._failures = 0
        self._last_live_seq = NO_SEQUENCE

    def __repr__(self) -> str:
        return f"<PlainCursor {self._state} at {self._run.last}, open request {self.open_request_id}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last applied batch of the current run; ``NO_SEQUENCE`` before the first."""
        return self._run.last

    @property
    def open_request_id(self) -> int | None:
        """Number of the open replay request, None without one."""
        return self._request.request_id if self._request else None

    @property
    def is_accepting_live(self) -> bool:
        """False while the cursor would drop live batches: leave them in the socket."""
        if self._request is not None or (self._state is StreamState.RECOVERING and not self._has_gap):
            return False
        return self._state is not StreamState.SYNCING or not self._failures

    @property
    def has_unanswered_request(self) -> bool:
        """True while the newest request was not answered: it is sent again after a pause."""
        return self._failures > 0

    @property
    def _is_replay_silent(self) -> bool:
        return self._failures >= self._patience

    def on_live_batch(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """Process one batch of the live channel; see ``StreamCursor.on_live_batch``."""
        before = self.on_connected()
        run = self._run
        is_advance = seq > self._last_live_seq
        self._last_live_seq = seq
        if not self.is_accepting_live:
            if self._request is not None and seq != run.last:
                self._request.newer_seen = True
            return before
        if self._has_gap:
            return _NONE  # the replay will contain it
        if run.adopting:
            return (*before, *self._begin_run(seq, payload))
        if seq == run.last + 1:
            return self._continue_run(seq, payload)
        if seq < run.last and is_advance:
            return _NONE  # it waited in the socket while a replay delivered it
        if seq <= run.last:
            self.counters.duplicates += 1
            if seq == run.last and payload == run.payload:
                return _NONE
        elif run.last != NO_SEQUENCE:
            self.counters.gaps += 1
        if self._has_replay and not self._is_replay_silent:
            return self._recover_gap()
        return self._begin_run(seq, payload)

    # --- the connection ---

    def on_connected(self) -> tuple[Instruction, ...]:
        if self._state not in UNCONNECTED:
            return _NONE
        if self._has_replay:
            return self._send()
        self._run = _Run(adopting=True)
        self._change_state(StreamState.PARTIAL)
        return (Clear("nothing is replayed: earlier batches are unknown"),)

    def on_disconnected(self) -> tuple[Instruction, ...]:
        if self._state is not StreamState.DEAD:
            self._request = None
            self._has_gap = False
            self._failures = 0
            self._last_live_seq = NO_SEQUENCE
            self._change_state(StreamState.CONNECTING)
        return _NONE

    def on_connection_timeout(self) -> tuple[Instruction, ...]:
        self._request = None
        self._has_gap = False
        self._failures = 0
        self._run = _Run()
        self._change_state(StreamState.DEAD)
        return (Clear("the publisher is unreachable"),)

    # --- gaps ---

    def on_credit_available(self) -> tuple[Instruction, ...]:
        return self._recover_gap() if self._has_gap and not self._failures else _NONE

    def _recover_gap(self) -> tuple[Instruction, ...]:
        if self.counters.credit:
            return self._send(has_batches=True)
        self._has_gap = True
        if self._state is not StreamState.SYNCING:
            self._change_state(StreamState.RECOVERING)
        return _NONE

    # --- answers ---

    def on_replay_batch(self, request_id: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        request = self._request
        if request is None or request.request_id != request_id:
            self.counters.stale_replays += 1
            return _NONE
        request.num_batches += 1
        if request.num_batches == 1:
            return self._on_first_batch(request, seq, payload)
        run = self._run
        if seq <= run.last:
            self.counters.duplicates += 1
            return _NONE
        if seq == run.last + 1:
            return self._continue_run(seq, payload)
        if run.hole_after == run.last:
            return self._begin_run(seq, payload)
        request.has_hole = True
        return _NONE

    def _on_first_batch(self, request: _PlainRequest, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """Begin a run, or compare the held payload with the publisher's payload under the same number."""
        run = self._run
        if request.full or seq != run.last:
            return self._begin_run(seq, payload)
        if payload == run.payload:
            return _NONE
        return self._resync("the publisher restarted and passed the held number")

    def on_replay_end(self, request_id: int) -> tuple[Instruction, ...]:
        request = self._request
        if request is None or request.request_id != request_id:
            return _NONE
        self._request = None
        self._failures = 0
        if not request.full and not request.num_batches:
            return self._resync("the publisher does not have the held number")
        if request.has_hole:
            self._run.hole_after = self._run.last
            return self._send()
        if request.newer_seen:
            return self._send(has_batches=True)
        if not request.num_batches:
            return self._on_no_history(request)
        self._settle()
        return _NONE

    def _on_no_history(self, request: _PlainRequest) -> tuple[Instruction, ...]:
        """Wait for the next live batch, which shows whether nothing was ever published or nothing is kept."""
        run = self._run
        self._run = _Run(adopting=run.adopting or request.has_batches)
        self._change_state(StreamState.PARTIAL if self._run.adopting else StreamState.SYNCING)
        return _NONE if run.last == NO_SEQUENCE else (Clear("the publisher has no history"),)

    def on_replay_timeout(self, request_id: int) -> tuple[Instruction, ...]:
        request = self._request
        if request is None or request.request_id != request_id:
            return _NONE
        self._request = None
        self.counters.replays_unanswered += 1
        if request.num_applied:
            self._failures = 0
            return self._send()
        self._failures += 1
        retry = RetryLater(self._failures)
        if not self._is_replay_silent:
            return (retry,)
        if self._state in _FOLLOWING:
            self._change_state(StreamState.PARTIAL)  # nothing proves any longer that the last batch was the last
            return (retry,)
        self._run = _Run(adopting=True)
        self._change_state(StreamState.PARTIAL)
        return (Clear("the replay channel does not answer"), retry)

    # --- time, which the follower measures ---

    def on_retry_due(self) -> tuple[Instruction, ...]:
        if self._request is not None or not self._failures:
            return _NONE
        return self._send(
            full=self._is_replay_silent and not self._run.complete,
            probing=self._state in _FOLLOWING,
        )

    def on_probe_due(self) -> tuple[Instruction, ...]:
        """Check whether the last batches were lost, or the publisher restarted."""
        if not self._has_replay or self._failures or not self.is_accepting_live:
            return _NONE
        return _NONE if self._state in UNCONNECTED else self._send(probing=True)

    # --- what the follower found in a batch ---

    def on_clear_applied(self) -> tuple[Instruction, ...]:
        """Mark the run as complete: after a clear of all blocks the publisher's state is known."""
        self._run.complete = True
        if self._state is StreamState.PARTIAL:
            self._settle()
        return _NONE

    def on_batch_damaged(self) -> tuple[Instruction, ...]:
        self._run.complete = False
        if self._state is StreamState.LIVE:
            self._change_state(StreamState.PARTIAL)
        return _NONE

    # --- requests, the run and the state ---

    def _send(self, *, full: bool = False, probing: bool = False, has_batches: bool = False) -> tuple[Instruction, ...]:
        is_empty = self._run.last == NO_SEQUENCE
        self._has_gap = False
        self.counters.replays_asked += 1
        request = _PlainRequest(self.counters.replays_asked, full=full or is_empty, has_batches=has_batches)
        self._request = request
        if not probing:
            self._change_state(StreamState.SYNCING if is_empty else StreamState.RECOVERING)
        return (SendReplayRequest(request.request_id, 0 if request.full else self._run.last),)

    def _resync(self, reason: str) -> tuple[Instruction, ...]:
        """Clear the view and request all history: the publisher is in another epoch."""
        self.counters.restarts += 1
        self._run = _Run()
        return (Clear(reason), *self._send())

    def _begin_run(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        reason = "history begins here" if seq == 0 else f"history before batch {seq} is not known"
        self._run = _Run(last=seq - 1, complete=seq == 0)
        return (Clear(reason), *self._continue_run(seq, payload))

    def _continue_run(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        run = self._run
        run.last = seq
        run.payload = payload
        self.counters.applied += 1
        if self._request is None:
            run.complete = run.complete or seq == 0
            self._settle()
            return (Apply(seq, payload, False),)
        self._request.num_applied += 1
        self.counters.recovered += 1
        if self._state is not StreamState.SYNCING:
            self._change_state(StreamState.RECOVERING)
        return (Apply(seq, payload, True),)

    def _settle(self) -> None:
        is_proved = self._has_replay and not self._is_replay_silent
        self._change_state(StreamState.LIVE if self._run.complete and is_proved else StreamState.PARTIAL)

    def _change_state(self, state: StreamState) -> None:
        self._state = change_state(self._state, state, self.counters)
