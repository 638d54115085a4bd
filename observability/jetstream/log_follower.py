"""Following one stream of a log: what its cursor says is carried out on a view, and deadlines are kept.

Without socket or thread: the owner passes on what comes and calls ``tick`` by ``next_deadline_s``. Questions go out
through a ``LogChannel``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from observability.jetstream.cursor import (
    LogCursor,
    LogInstruction,
    ReadLog,
    ReadPointer,
    ReadSnapshot,
    RequestSnapshot,
)
from observability.jetstream.records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from observability.kv_stream import (
    Apply,
    ApplyStaged,
    BatchApplier,
    BatchEffect,
    Clear,
    CommitStaging,
    FollowPolicy,
    RetryLater,
    StartStaging,
    StreamState,
)

__all__ = ["LogChannel", "LogFollower"]


_UNHEARD = (StreamState.CONNECTING, StreamState.DEAD)
_BASE_ANSWER_TIMEOUTS = 12
"""A snapshot is one answer, however large: a minute, instead of the five seconds in which a pointer comes."""


class LogChannel(Protocol):
    """Reads a stream's pointer, snapshot and log; answers come back under the number of their question."""

    def read_pointer(self, ask: int) -> None:
        """Read the pointer, for ``LogFollower.on_pointer_read``."""
        ...

    def read_snapshot(self, ask: int, pointer: SnapshotPointer) -> None:
        """Read the snapshot that ``pointer`` names, for ``LogFollower.on_snapshot_read``."""
        ...

    def request_snapshot(self) -> None:
        """Tell the writer that its snapshot leads nowhere."""
        ...

    def read_log(self, read: int, log_seq: int) -> None:
        """Read the log from the place ``log_seq`` on, for ``LogFollower.on_message``; give up an earlier reading."""
        ...


@dataclass(slots=True)
class _Deadlines:
    """Moments on the caller's monotonic clock, in seconds; infinite when not set."""

    answer_s: float = math.inf
    retry_s: float = math.inf
    silent_s: float = math.inf
    dead_s: float = math.inf


@dataclass(slots=True, kw_only=True)
class LogFollower:
    """One stream's cursor, applier and deadlines. ``now_s`` is always the caller's monotonic clock.

    What comes may take long to apply (a snapshot has every block), so these methods are iterators: between two steps
    others may look at the view.
    """

    applier: BatchApplier
    channel: LogChannel
    policy: FollowPolicy
    jitter: Callable[[], float] = random.random
    cursor: LogCursor = field(default_factory=LogCursor, init=False)
    _deadlines: _Deadlines = field(default_factory=_Deadlines, init=False)
    _told: StreamState = field(default=StreamState.CONNECTING, init=False)
    _read: int = field(default=0, init=False)

    @property
    def next_deadline_s(self) -> float:
        """When ``tick`` must be called at the latest; infinite when there is nothing to wait for."""
        due = self._deadlines
        return min(due.answer_s, due.retry_s, due.silent_s, due.dead_s)

    def begin(self, now_s: float) -> None:
        """Begin to wait for the writer."""
        self._deadlines.dead_s = now_s + self.policy.dead_after_s

    def on_reconnected(self) -> None:
        """The broker can be read, again or for the first time: go on where the log was left."""
        log_seq = self.cursor.next_log_seq
        if log_seq is not None:
            self._read_log(log_seq)

    def on_disconnected(self, now_s: float) -> None:
        """The connection to the broker was lost."""
        self._deadlines.silent_s = min(self._deadlines.silent_s, now_s)
        self.tick(now_s)

    def on_heartbeat(self, heartbeat: LogHeartbeat, now_s: float) -> Iterator[None]:
        """The writer said where it stands."""
        if self.cursor.can_commit(heartbeat):
            yield from self.applier.prepare_swap()
        yield from self._follow(self.cursor.on_heartbeat(heartbeat), now_s)
        if self.cursor.state not in _UNHEARD and self._is_of_writer(heartbeat):
            self._deadlines.silent_s = now_s + self.policy.answer_timeout_s
            self._deadlines.dead_s = math.inf

    def _is_of_writer(self, heartbeat: LogHeartbeat) -> bool:
        """True for a heartbeat of the life that is followed, or read now; before there is one, any is a sign of
        life.
        """
        cursor = self.cursor
        return (
            cursor.state is StreamState.SYNCING
            or cursor.is_following(heartbeat.epoch)
            or cursor.is_fetching(heartbeat.epoch)
        )

    def on_message(self, read: int, message: LogMessage, now_s: float) -> Iterator[None]:
        """A message of the log came; ``read`` is the number that its reading was asked for by."""
        if read != self._read:
            return
        last, gaps = self.cursor.last_seq, self.cursor.counters.gaps
        yield from self._follow(self.cursor.on_message(message), now_s)
        if self.cursor.counters.gaps != gaps:
            self.applier.listener.on_gap(self.applier.rank, last + 1, message.seq)
        yield from self._prove(now_s)

    def on_pointer_read(self, ask: int, pointer: SnapshotPointer | None, now_s: float) -> Iterator[None]:
        """The pointer, as ``LogCursor.on_pointer_read``."""
        yield from self._follow(self.cursor.on_pointer_read(ask, pointer), now_s)

    def on_snapshot_read(self, ask: int, snapshot: Snapshot | None, now_s: float) -> Iterator[None]:
        """The snapshot, as ``LogCursor.on_snapshot_read``."""
        yield from self._follow(self.cursor.on_snapshot_read(ask, snapshot), now_s)
        yield from self._prove(now_s)

    def _prove(self, now_s: float) -> Iterator[None]:
        """See whether the view has come to where the writer stood. The long part of a swap goes before it."""
        if self.cursor.can_commit():
            yield from self.applier.prepare_swap()
        yield from self._follow(self.cursor.verify_position(), now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        due = self._deadlines
        instructions: tuple[LogInstruction, ...] = ()
        if now_s >= due.answer_s and self.cursor.open_request_id is not None:
            instructions += self.cursor.on_read_timeout(self.cursor.open_request_id)
        elif now_s >= due.retry_s:
            due.retry_s = math.inf
            instructions += self.cursor.on_retry_due()
        if now_s >= due.silent_s:
            due.silent_s = math.inf
            due.dead_s = min(due.dead_s, now_s + self.policy.dead_after_s)
            instructions += self.cursor.on_heartbeat_timeout()
        if now_s >= due.dead_s:
            due.dead_s = math.inf
            instructions += self.cursor.on_connection_timeout()
        for _ in self._follow(instructions, now_s):
            pass

    def _follow(
        self, instructions: tuple[LogInstruction, ...] | Iterator[LogInstruction], now_s: float
    ) -> Iterator[None]:
        """Carry out what the cursor said, then report a change of state."""
        for instruction in instructions:
            self._carry_out(instruction, now_s)
            yield None
        if self.cursor.open_request_id is None:
            self._deadlines.answer_s = math.inf
        if self.cursor.state not in _UNHEARD and self._deadlines.silent_s == math.inf:
            # It may come to be LIVE without another heartbeat, by a snapshot and the log: also then silence must end
            # that.
            self._deadlines.silent_s = now_s + self.policy.answer_timeout_s
        if self.cursor.state is not self._told:
            old, self._told = self._told, self.cursor.state
            self.applier.listener.on_state_changed(self.applier.rank, old, self._told)

    def _carry_out(self, instruction: LogInstruction, now_s: float) -> None:
        applier = self.applier
        if isinstance(instruction, Apply):
            self._report(applier.apply(instruction.seq, instruction.payload, replayed=instruction.replayed))
        elif isinstance(instruction, ApplyStaged):
            self._report(
                applier.apply_staged(
                    instruction.seq, instruction.payload, is_snapshot_chunk=instruction.is_snapshot_chunk
                )
            )
        elif isinstance(instruction, StartStaging):
            applier.start_staging()
        elif isinstance(instruction, CommitStaging):
            applier.commit_staging()
        elif isinstance(instruction, Clear):
            applier.view.clear(applier.rank)
            applier.listener.on_view_cleared(applier.rank, instruction.reason)
        elif isinstance(instruction, RetryLater):
            self._deadlines.retry_s = now_s + self.policy.pause_s(instruction.failures, self.jitter())
        elif isinstance(instruction, RequestSnapshot):
            self.channel.request_snapshot()
        elif isinstance(instruction, ReadPointer | ReadSnapshot | ReadLog):
            self._read_from(instruction, now_s)
        else:
            applier.abort_staging()

    def _read_from(self, instruction: ReadPointer | ReadSnapshot | ReadLog, now_s: float) -> None:
        if isinstance(instruction, ReadLog):
            self._read_log(instruction.log_seq)
            return
        timeout_s = self.policy.answer_timeout_s
        if isinstance(instruction, ReadPointer):
            self._deadlines.answer_s = now_s + timeout_s
            self.channel.read_pointer(instruction.ask)
        else:
            self._deadlines.answer_s = now_s + _BASE_ANSWER_TIMEOUTS * timeout_s
            self.channel.read_snapshot(instruction.ask, instruction.pointer)

    def _read_log(self, log_seq: int) -> None:
        self._read += 1
        self.channel.read_log(self._read, log_seq)

    def _report(self, effect: BatchEffect) -> None:
        if effect is BatchEffect.CLEARED:
            self.cursor.on_cleared()
        elif effect is BatchEffect.DAMAGED:
            self.cursor.on_damaged()
