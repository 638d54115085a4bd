"""Following one stream: carries out its cursor's instructions on a view, and keeps its deadlines by a clock.

``FollowerBase`` is the part that streams over ZeroMQ and streams in a log have in common.

The owner of a ``StreamFollower`` has the sockets and the clock. It passes on each message and calls ``tick`` no later
than ``next_deadline_s``. Requests go out through a ``ReplayChannel``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import attrs

from observability.kv_stream.batch_applier import BatchApplier
from observability.kv_stream.instructions import (
    Instruction,
    ProbeExtensionLater,
    RetryLater,
    SendReplayRequest,
    ViewInstruction,
)
from observability.kv_stream.log_cursor import LogCursor
from observability.kv_stream.stream_cursor import StreamCursor
from observability.kv_stream.stream_state import MAX_REPLAY_CREDIT, ViewFeedback
from observability.kv_stream.stream_stats import StreamPosition, StreamStats
from scheduler_components import DecodeError
from scheduler_components._internal.validators import number_validator
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind

__all__ = ["Deadlines", "FollowPolicy", "FollowerBase", "ReplayChannel", "StreamFollower"]

CursorT = TypeVar("CursorT", StreamCursor, LogCursor)


@attrs.frozen(kw_only=True)
class FollowPolicy:
    """How long a follower waits, in seconds.

    Attributes:
        answer_timeout_s: silence within a replay answer after which the answer counts as lost. Dynamo has no such limit
            and receives nothing more after one lost end marker.
        extension_timeout_s: silence after which a publisher counts as one without the extension, if it has never shown
            it. SGLang and vLLM answer immediately; Dynamo's mocker drops the request.
        retry_min_s, retry_max_s: the pause after an unanswered request doubles between these, with jitter. A publisher
            that comes back gets a request within the longest pause.
        request_interval_s: a stream sends four requests without a pause, and then one per interval: in ``t`` seconds at
            most ``4 + t / request_interval_s``.
        probe_interval_s: time between two probes. It bounds how long a lost last batch stays unnoticed. A publisher
            without the extension is probed after this time of silence. It is asked for the extension once per interval,
            whatever the traffic, because its answers may have been lost. Each bare end marker doubles that pause, up to
            eight intervals.
        dead_after_s: time without a connection after which the publisher counts as dead.

    Raises:
        ConfigError: a time is not above 0.
    """

    answer_timeout_s: float = attrs.field(default=5.0, validator=number_validator())
    extension_timeout_s: float = attrs.field(default=1.0, validator=number_validator())
    retry_min_s: float = attrs.field(default=0.2, validator=number_validator())
    retry_max_s: float = attrs.field(default=2.0, validator=number_validator())
    request_interval_s: float = attrs.field(default=0.5, validator=number_validator())
    probe_interval_s: float = attrs.field(default=2.0, validator=number_validator())
    dead_after_s: float = attrs.field(default=15.0, validator=number_validator())

    def pause_s(self, failures: int, jitter: float) -> float:
        """Return the pause after ``failures`` in a row. ``jitter`` from 0 to 1 shortens it by up to half."""
        longest = min(self.retry_max_s, self.retry_min_s * 2.0 ** min(failures - 1, 30))
        return longest * (1.0 - jitter / 2)


@dataclass(slots=True)
class Deadlines:
    """Times on the caller's monotonic clock, in seconds; infinite when not set.

    Attributes:
        answer_s: the answer to the open request is overdue.
        retry_s: a failed request may be sent again.
        credit_s: the follower restores one replay request.
        probe_s: a probe is due.
        extension_s: a probe for the extension is due.
        silent_s: the heartbeat is overdue.
        dead_s: the publisher counts as dead.
    """

    answer_s: float = math.inf
    retry_s: float = math.inf
    credit_s: float = math.inf
    probe_s: float = math.inf
    extension_s: float = math.inf
    silent_s: float = math.inf
    dead_s: float = math.inf

    def next_s(self) -> float:
        return min(
            self.answer_s, self.retry_s, self.credit_s, self.probe_s, self.extension_s, self.silent_s, self.dead_s
        )


@dataclass(slots=True, kw_only=True)
class FollowerBase(Generic[CursorT]):
    """One stream's cursor, applier and deadlines. ``now_s`` is always the caller's monotonic clock.

    ``StreamFollower`` and ``LogFollower`` inherit from this class, because the owner of either calls these methods.
    """

    cursor: CursorT
    applier: BatchApplier
    policy: FollowPolicy
    jitter: Callable[[], float] = random.random
    _deadlines: Deadlines = field(default_factory=Deadlines, init=False)

    @property
    def next_deadline_s(self) -> float:
        """The latest time for the next ``tick``; infinite without a deadline."""
        return self._deadlines.next_s()

    @property
    def position(self) -> StreamPosition:
        """The position of the view."""
        cursor = self.cursor
        return StreamPosition(self.applier.rank, cursor.state, cursor.last_seq, cursor.is_settled)

    def stats(self, endpoint: str) -> StreamStats:
        """Return the statistics of the stream except those of its transport."""
        cursor = self.cursor
        return self.applier.stats(cursor.counters, state=cursor.state, last_seq=cursor.last_seq, endpoint=endpoint)

    def begin(self, now_s: float) -> None:
        """Start to wait for the first connection."""
        self._deadlines.dead_s = now_s + self.policy.dead_after_s

    def _carry_out_locally(self, instruction: ViewInstruction | RetryLater, now_s: float) -> None:
        """Carry out an instruction that needs no channel, and report to the cursor what the batch contained."""
        if isinstance(instruction, RetryLater):
            self._deadlines.retry_s = now_s + self.policy.pause_s(instruction.failures, self.jitter())
            return
        feedback = self.applier.carry_out(instruction)
        if feedback is ViewFeedback.CLEARED:
            self.cursor.on_clear_applied()
        elif feedback is ViewFeedback.DAMAGED:
            self.cursor.on_batch_damaged()

    def _take_credit(self, now_s: float) -> None:
        """Take the credit of one request, and restore it by time."""
        counters = self.cursor.counters
        if counters.credit == MAX_REPLAY_CREDIT:
            self._deadlines.credit_s = now_s + self.policy.request_interval_s
        counters.credit -= 1

    def _restore_credit(self, now_s: float) -> None:
        """Restore the credit of one request."""
        counters = self.cursor.counters
        counters.credit += 1
        is_full = counters.credit == MAX_REPLAY_CREDIT
        self._deadlines.credit_s = math.inf if is_full else now_s + self.policy.request_interval_s

    def _report_state(self) -> None:
        state = self.cursor.state
        if state is not self.applier.state:
            self.applier.report_state(state)


class ReplayChannel(Protocol):
    """Requests past batches from the publisher; at most one request is open."""

    def send(self, request: SendReplayRequest) -> None:
        """Send the request, and close the connection of an older one."""
        ...

    def cancel(self) -> None:
        """Close the connection of the open request, if any."""
        ...


@dataclass(slots=True, kw_only=True)
class StreamFollower(FollowerBase[StreamCursor]):
    """Follows one stream over ZeroMQ. It sends requests through ``channel``, and limits them by a credit."""

    channel: ReplayChannel
    _is_sent: bool = field(default=False, init=False)  # the channel has the open request
    _held: SendReplayRequest | None = field(default=None, init=False)  # the open request, which waits for credit

    def on_connected(self, now_s: float) -> None:
        """The live connection is up."""
        self._deadlines.dead_s = math.inf
        self._postpone_probe(now_s)
        self._carry_out(self.cursor.on_connected(), now_s)

    def on_disconnected(self, now_s: float) -> None:
        """The live connection is lost."""
        # The credit stays: otherwise a flapping connection would send requests without a limit.
        self._deadlines = Deadlines(dead_s=now_s + self.policy.dead_after_s, credit_s=self._deadlines.credit_s)
        self._carry_out(self.cursor.on_disconnected(), now_s)

    def on_live_batch(self, seq: int, payload: bytes, now_s: float) -> None:
        """A live batch came; pass it on only while ``cursor.is_accepting_live``."""
        cursor = self.cursor
        last, gaps = cursor.last_seq, cursor.counters.gaps
        instructions = cursor.on_live_batch(seq, payload)
        if cursor.counters.gaps != gaps:
            self.applier.listener.on_gap(self.applier.rank, last + 1, seq)
        if instructions and not cursor.is_extended:
            self._postpone_probe(now_s)  # a batch without effect proves nothing
        self._carry_out(instructions, now_s)

    def on_replay_batch(self, request_id: int, seq: int, payload: bytes, now_s: float) -> None:
        """A batch of the answer to a request came."""
        self._postpone_answer_timeout(request_id, now_s)
        self._carry_out(self.cursor.on_replay_batch(request_id, seq, payload), now_s)

    def prepare_swap(self, payload: bytes) -> Iterator[None]:
        """Do the long part of ``on_replay_marker`` with the same payload in slices."""
        if payload and self.applier.staging is not None:
            try:
                is_end = ReplayMeta.decode(payload).kind is ReplayMetaKind.END
            except DecodeError:
                return
            if is_end:
                yield from self.applier.prepare_swap()

    def on_replay_marker(self, request_id: int, payload: bytes, now_s: float) -> bool:
        """An end marker, or a META in its place, came in answer to a request. Return False if it is neither."""
        self._postpone_answer_timeout(request_id, now_s)
        if not self.cursor.is_asking_for_extension:  # that answer proves nothing
            self._postpone_probe(now_s)
        if not payload or not self.cursor.expects_meta:
            self._carry_out(self.cursor.on_replay_end(request_id), now_s)
            return True
        try:
            meta = ReplayMeta.decode(payload)
        except DecodeError:
            self._carry_out(self.cursor.on_replay_timeout(request_id), now_s)
            return False
        self._carry_out(self.cursor.on_replay_meta(request_id, meta), now_s)
        return True

    def tick(self, now_s: float) -> None:
        """Handle every deadline up to ``now_s``."""
        due = self._deadlines
        if now_s >= due.answer_s:
            due.answer_s = math.inf
            if self.cursor.open_request_id is not None:
                self._carry_out(self.cursor.on_replay_timeout(self.cursor.open_request_id), now_s)
        if now_s >= due.retry_s:
            due.retry_s = math.inf
            self._carry_out(self.cursor.on_retry_due(), now_s)
        if now_s >= due.credit_s:
            self._on_credit_due(now_s)
        if now_s >= due.extension_s:
            due.extension_s = math.inf
            self._carry_out(self.cursor.on_extension_probe_due(), now_s)
        if now_s >= due.probe_s:
            self._postpone_probe(now_s)
            self._carry_out(self.cursor.on_probe_due(), now_s)
        if now_s >= due.dead_s:
            due.dead_s = math.inf
            self._carry_out(self.cursor.on_connection_timeout(), now_s)

    def _postpone_probe(self, now_s: float) -> None:
        self._deadlines.probe_s = now_s + self.policy.probe_interval_s

    def _postpone_answer_timeout(self, request_id: int, now_s: float) -> None:
        if request_id == self.cursor.open_request_id:
            self._deadlines.answer_s = now_s + self.policy.answer_timeout_s

    def _carry_out(self, instructions: tuple[Instruction, ...], now_s: float) -> None:
        """Carry out the instructions, cancel a request that the cursor no longer waits for, and report the state."""
        for instruction in instructions:
            if isinstance(instruction, SendReplayRequest):
                self._send(instruction, now_s)
            elif isinstance(instruction, ProbeExtensionLater):
                self._deadlines.extension_s = now_s + instruction.intervals * self.policy.probe_interval_s
            else:
                self._carry_out_locally(instruction, now_s)
        if self._is_sent and self.cursor.open_request_id is None:
            self._cancel()
        self._report_state()

    def _send(self, request: SendReplayRequest, now_s: float) -> None:
        """Send a request, or hold it until there is credit."""
        if not self.cursor.counters.credit:
            self._held = request
            self._cancel()
            return
        self._take_credit(now_s)
        self._held, self._is_sent = None, True
        self._deadlines.answer_s = now_s + self._answer_timeout_s
        self.channel.send(request)

    @property
    def _answer_timeout_s(self) -> float:
        policy = self.policy
        if self.cursor.is_asking_for_extension:
            return min(policy.extension_timeout_s, policy.answer_timeout_s)
        return policy.answer_timeout_s

    def _cancel(self) -> None:
        self._is_sent = False
        self._deadlines.answer_s = math.inf
        self.channel.cancel()

    def _on_credit_due(self, now_s: float) -> None:
        """Restore the credit of one request, and send the held request."""
        self._restore_credit(now_s)
        held = self._held
        if held is not None and held.request_id == self.cursor.open_request_id:
            self._send(held, now_s)
        else:
            self._held = None
            self._carry_out(self.cursor.on_credit_available(), now_s)
