"""Following one stream of a log: carries out its cursor's instructions on a view, and keeps its deadlines by a clock.

The owner of a ``LogFollower`` has the connection and the clock. It passes on each message and calls ``tick`` no later
than ``next_deadline_s``. Requests go out through a ``LogChannel``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from observability.kv_stream import StreamState
from observability.kv_stream.follower import FollowerBase
from observability.kv_stream.instructions import (
    LogInstruction,
    ReadLog,
    ReadPointer,
    ReadSnapshot,
    RequestSnapshot,
)
from observability.kv_stream.log_cursor import LogCursor
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from observability.kv_stream.stream_state import UNCONNECTED

__all__ = ["LogChannel", "LogFollower"]

_SNAPSHOT_ANSWER_TIMEOUTS = 12
"""A snapshot is one answer of any size: it may take a minute, a pointer the five seconds of ``answer_timeout_s``."""


class LogChannel(Protocol):
    """Reads a stream's pointer, snapshot and log. Each answer carries the number of its request."""

    def read_pointer(self, request_id: int) -> None:
        """Read the pointer, for ``LogFollower.on_pointer_read``."""
        ...

    def read_snapshot(self, request_id: int, pointer: SnapshotPointer) -> None:
        """Read the snapshot that ``pointer`` names, for ``LogFollower.on_snapshot_read``."""
        ...

    def request_snapshot(self) -> None:
        """Ask the writer for another snapshot."""
        ...

    def read_log(self, reading_id: int, log_seq: int) -> None:
        """Read the log from ``log_seq`` on, for ``LogFollower.on_message``, and end an earlier reading."""
        ...


@dataclass(slots=True, kw_only=True)
class LogFollower(FollowerBase[LogCursor]):
    """Follows one stream of a log.

    Applying a snapshot of every block takes long, so these methods are iterators: between two steps other threads may
    query the view.
    """

    channel: LogChannel
    cursor: LogCursor = field(default_factory=LogCursor, init=False)
    _reading_id: int = field(default=0, init=False)

    def on_reconnected(self) -> None:
        """The broker is reachable, again or for the first time: continue reading the log."""
        log_seq = self.cursor.next_log_seq
        if log_seq is not None:
            self._read_log(log_seq)

    def on_disconnected(self, now_s: float) -> None:
        """The connection to the broker is lost."""
        self._deadlines.silent_s = min(self._deadlines.silent_s, now_s)
        self.tick(now_s)

    def on_heartbeat(self, heartbeat: LogHeartbeat, now_s: float) -> Iterator[None]:
        """A heartbeat of the writer came."""
        if self.cursor.can_commit(heartbeat):
            yield from self.applier.prepare_swap()
        yield from self._carry_out(self.cursor.on_heartbeat(heartbeat), now_s)
        if self.cursor.state not in UNCONNECTED and self._is_of_writer(heartbeat):
            self._deadlines.silent_s = now_s + self.policy.answer_timeout_s
            self._deadlines.dead_s = math.inf

    def _is_of_writer(self, heartbeat: LogHeartbeat) -> bool:
        """Return True for a heartbeat of the epoch that is followed or being read. Before the first, any one counts."""
        cursor = self.cursor
        return (
            cursor.state is StreamState.SYNCING
            or cursor.is_following(heartbeat.epoch)
            or cursor.is_fetching(heartbeat.epoch)
        )

    def on_message(self, reading_id: int, message: LogMessage, now_s: float) -> Iterator[None]:
        """A message of the log came, from the reading that ``LogChannel.read_log`` started under ``reading_id``."""
        if reading_id != self._reading_id:
            return
        last, gaps = self.cursor.last_seq, self.cursor.counters.gaps
        yield from self._carry_out(self.cursor.on_message(message), now_s)
        if self.cursor.counters.gaps != gaps:
            self.applier.listener.on_gap(self.applier.rank, last + 1, message.seq)
        yield from self._verify(now_s)

    def on_pointer_read(self, request_id: int, pointer: SnapshotPointer | None, now_s: float) -> Iterator[None]:
        """The pointer came; None when there is none or it could not be read."""
        yield from self._carry_out(self.cursor.on_pointer_read(request_id, pointer), now_s)

    def on_snapshot_read(self, request_id: int, snapshot: Snapshot | None, now_s: float) -> Iterator[None]:
        """The snapshot came; None when it could not be read."""
        yield from self._carry_out(self.cursor.on_snapshot_read(request_id, snapshot), now_s)
        yield from self._verify(now_s)

    def _verify(self, now_s: float) -> Iterator[None]:
        """Verify the view against the last heartbeat. The long part of a swap comes first, in slices."""
        if self.cursor.can_commit():
            yield from self.applier.prepare_swap()
        yield from self._carry_out(self.cursor.on_batches_applied(), now_s)

    def tick(self, now_s: float) -> None:
        """Handle every deadline up to ``now_s``."""
        due = self._deadlines
        instructions: list[LogInstruction] = []
        if now_s >= due.answer_s and self.cursor.open_request_id is not None:
            instructions += self.cursor.on_read_timeout(self.cursor.open_request_id)
        elif now_s >= due.retry_s:
            due.retry_s = math.inf
            instructions += self.cursor.on_retry_due()
        if now_s >= due.credit_s:
            self._restore_credit(now_s)
        if now_s >= due.silent_s:
            due.silent_s = math.inf
            due.dead_s = min(due.dead_s, now_s + self.policy.dead_after_s)
            instructions += self.cursor.on_heartbeat_timeout()
        if now_s >= due.dead_s:
            due.dead_s = math.inf
            instructions += self.cursor.on_connection_timeout()
        for _ in self._carry_out(instructions, now_s):
            pass

    def _carry_out(self, instructions: Iterable[LogInstruction], now_s: float) -> Iterator[None]:
        """Carry out the instructions one by one, then report a change of state."""
        for instruction in instructions:
            match instruction:
                case ReadPointer(request_id):
                    self._take_credit(now_s)
                    self._deadlines.answer_s = now_s + self.policy.answer_timeout_s
                    self.channel.read_pointer(request_id)
                case ReadSnapshot(request_id, pointer):
                    self._deadlines.answer_s = now_s + _SNAPSHOT_ANSWER_TIMEOUTS * self.policy.answer_timeout_s
                    self.channel.read_snapshot(request_id, pointer)
                case ReadLog(log_seq):
                    self._read_log(log_seq)
                case RequestSnapshot():
                    self.channel.request_snapshot()
                case _:
                    self._carry_out_locally(instruction, now_s)
            yield None
        if self.cursor.open_request_id is None:
            self._deadlines.answer_s = math.inf
        if self.cursor.state not in UNCONNECTED and self._deadlines.silent_s == math.inf:
            # A snapshot and the log can make the view LIVE without another heartbeat. Silence must end that state too.
            self._deadlines.silent_s = now_s + self.policy.answer_timeout_s
        self._report_state()

    def _read_log(self, log_seq: int) -> None:
        self._reading_id += 1
        self.channel.read_log(self._reading_id, log_seq)
