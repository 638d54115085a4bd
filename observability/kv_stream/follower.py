"""Following one stream against a clock: carries out the cursor's instructions and keeps its deadlines.

Still without sockets: whoever owns them tells what came and asks ``next_deadline_s`` how long it may wait.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import attrs

from observability.kv_stream.applier import BatchApplier, Outcome
from observability.kv_stream.cursor import StreamCursor
from observability.kv_stream.instructions import (
    Apply,
    ApplyAside,
    AskReplay,
    BeginAside,
    Clear,
    Instruction,
    RetryLater,
    StreamState,
    SwapIn,
)
from scheduler_components.errors import ConfigError, DecodeError
from scheduler_components.kv_events.replay_wire import Meta

__all__ = ["FollowPolicy", "ReplayChannel", "StreamFollower"]


def _check_positive(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise ConfigError(attribute.name, value, "is not a time", "give a number above 0")


@attrs.frozen(kw_only=True)
class FollowPolicy:
    """How long to wait for what, in seconds.

    Attributes:
        answer_timeout_s: silence within a replay answer after which it counts as missing. Dynamo has no such limit
            and stays deaf after one lost end marker.
        retry_min_s, retry_max_s: the pause after an unanswered question doubles between these, with jitter. A publisher
            that comes back is asked within the longest one.
        probe_interval_s: time between two probes; it bounds how long a lost last batch stays unnoticed. A publisher
            without the extension is probed after so much silence.
        dead_after_s: time without a connection after which the publisher is taken for dead.

    Raises:
        ConfigError: a time that is not above 0.
    """

    answer_timeout_s: float = attrs.field(default=5.0, validator=_check_positive)
    retry_min_s: float = attrs.field(default=0.2, validator=_check_positive)
    retry_max_s: float = attrs.field(default=2.0, validator=_check_positive)
    probe_interval_s: float = attrs.field(default=2.0, validator=_check_positive)
    dead_after_s: float = attrs.field(default=15.0, validator=_check_positive)

    def pause_s(self, failures: int, jitter: float) -> float:
        """Give the pause after ``failures`` in a row; ``jitter`` from 0 to 1 takes off up to half of it."""
        longest = min(self.retry_max_s, self.retry_min_s * 2.0 ** min(failures - 1, 30))
        return longest * (1.0 - jitter / 2)


class ReplayChannel(Protocol):
    """Asks the publisher for past batches; at most one question is open."""

    def ask(self, question: AskReplay) -> None:
        """Send the question and forget an older one with its connection."""
        ...

    def drop(self) -> None:
        """Forget the open question, if any."""
        ...


@dataclass(slots=True)
class _Deadlines:
    """Moments on the caller's monotonic clock, in seconds; infinite when not set."""

    answer_s: float = math.inf
    retry_s: float = math.inf
    probe_s: float = math.inf
    dead_s: float = math.inf

    def next_s(self) -> float:
        return min(self.answer_s, self.retry_s, self.probe_s, self.dead_s)


@dataclass(slots=True)
class _Told:
    """What the others believe: the channel that a question is open, the listener what the state is."""

    asks: bool = False
    state: StreamState = StreamState.CONNECTING


@dataclass(slots=True, kw_only=True)
class StreamFollower:
    """One stream's cursor, applier and deadlines. ``now_s`` is always the caller's monotonic clock."""

    cursor: StreamCursor
    applier: BatchApplier
    channel: ReplayChannel
    policy: FollowPolicy
    jitter: Callable[[], float] = random.random
    _deadlines: _Deadlines = field(default_factory=_Deadlines, init=False)
    _told: _Told = field(default_factory=_Told, init=False)

    @property
    def next_deadline_s(self) -> float:
        """When ``tick`` must be called at the latest; infinite when there is nothing to wait for."""
        return self._deadlines.next_s()

    def begin(self, now_s: float) -> None:
        """Begin to wait for the first connection."""
        self._deadlines.dead_s = now_s + self.policy.dead_after_s

    def connected(self, now_s: float) -> None:
        """The live connection is up."""
        self._deadlines.dead_s = math.inf
        self._await_probe(now_s)
        self._follow(self.cursor.connected(), now_s)

    def disconnected(self, now_s: float) -> None:
        """The live connection was lost."""
        self._deadlines = _Deadlines(dead_s=now_s + self.policy.dead_after_s)
        self._follow(self.cursor.disconnected(), now_s)

    def live(self, seq: int, payload: bytes, now_s: float) -> None:
        """A batch came on the live channel; offer them only while ``cursor.listening``."""
        last, gaps = self.cursor.last_seq, self.cursor.counters.gaps
        instructions = self.cursor.live(seq, payload)
        if self.cursor.counters.gaps != gaps:
            self.applier.listener.gap_seen(self.applier.rank, last + 1, seq)
        if instructions and not self.cursor.is_extended:
            self._await_probe(now_s)  # batches that tell nothing new prove nothing
        self._follow(instructions, now_s)

    def answered(self, ask: int, seq: int, payload: bytes, now_s: float) -> None:
        """A batch of the answer to question ``ask`` came."""
        if ask == self.cursor.open_ask:
            self._deadlines.answer_s = now_s + self.policy.answer_timeout_s
        self._follow(self.cursor.answered(ask, seq, payload), now_s)

    def answer_marked(self, ask: int, payload: bytes, now_s: float) -> bool:
        """An end marker of the answer to question ``ask`` came, or a META in its place; False when it is neither."""
        if ask == self.cursor.open_ask:
            self._deadlines.answer_s = now_s + self.policy.answer_timeout_s
        self._await_probe(now_s)
        if not payload or not self.cursor.expects_meta:
            self._follow(self.cursor.answer_ended(ask), now_s)
            return True
        try:
            meta = Meta.decode(payload)
        except DecodeError:
            self._follow(self.cursor.answer_missing(ask), now_s)
            return False
        self._follow(self.cursor.answer_meta(ask, meta), now_s)
        return True

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        due = self._deadlines
        if now_s >= due.answer_s:
            due.answer_s = math.inf
            if self.cursor.open_ask is not None:
                self._follow(self.cursor.answer_missing(self.cursor.open_ask), now_s)
        if now_s >= due.retry_s:
            due.retry_s = math.inf
            self._follow(self.cursor.retry(), now_s)
        if now_s >= due.probe_s:
            self._await_probe(now_s)
            self._follow(self.cursor.probe(), now_s)
        if now_s >= due.dead_s:
            due.dead_s = math.inf
            self._follow(self.cursor.gave_up(), now_s)

    def _await_probe(self, now_s: float) -> None:
        self._deadlines.probe_s = now_s + self.policy.probe_interval_s

    def _follow(self, instructions: tuple[Instruction, ...], now_s: float) -> None:
        """Carry out what the cursor said, then close what it no longer waits for and report a change of state."""
        for instruction in instructions:
            self._carry_out(instruction, now_s)
        told, cursor = self._told, self.cursor
        if told.asks and cursor.open_ask is None:
            told.asks = False
            self._deadlines.answer_s = math.inf
            self.channel.drop()
        if cursor.state is not told.state:
            old, told.state = told.state, cursor.state
            self.applier.listener.state_changed(self.applier.rank, old, cursor.state)

    def _carry_out(self, instruction: Instruction, now_s: float) -> None:
        if isinstance(instruction, Apply):
            self._report(self.applier.apply(instruction.seq, instruction.payload, replayed=instruction.replayed))
        elif isinstance(instruction, ApplyAside):
            seq, payload, is_base = instruction.seq, instruction.payload, instruction.is_base
            self._report(self.applier.apply_aside(seq, payload, is_base=is_base))
        elif isinstance(instruction, BeginAside):
            self.applier.begin_aside()
        elif isinstance(instruction, SwapIn):
            self.applier.swap_in()
        elif isinstance(instruction, Clear):
            self.applier.view.clear(self.applier.rank)
            self.applier.listener.view_cleared(self.applier.rank, instruction.reason)
        elif isinstance(instruction, AskReplay):
            self._told.asks = True
            self._deadlines.answer_s = now_s + self.policy.answer_timeout_s
            self.channel.ask(instruction)
        elif isinstance(instruction, RetryLater):
            self._deadlines.retry_s = now_s + self.policy.pause_s(instruction.failures, self.jitter())
        else:
            self.applier.drop_aside()

    def _report(self, outcome: Outcome) -> None:
        if outcome is Outcome.CLEARED:
            self.cursor.cleared()
        elif outcome is Outcome.DAMAGED:
            self.cursor.damaged()
