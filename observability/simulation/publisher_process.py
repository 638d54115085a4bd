"""PublisherProcess: runs a ``PublisherActor`` on the time line, as ``ZmqEventPublisher`` runs its sockets.

``publish()`` leaves batches to the thread by the rules of ``Backlog``; the thread polls, and serves replays in slices.
It may stall, be late, or crash and start again with its sequence floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from observability.simulation.faulty_disk import FaultyDisk, FloorOnFaultyDisk
from observability.simulation.publisher_actor import LiveFrame, PublisherActor, PublisherShape
from observability.simulation.subscriber_actor import SubscriberActor
from observability.simulation.timeline import BrokenPromise, Timeline
from observability.simulation.world_counters import WorldCounters
from scheduler_components import KVCacheEvent, StartError
from scheduler_components.kv_events.backlog import MAX_WAIT_S, MAX_WAITING, POLL_INTERVAL_S, Backlog
from scheduler_components.kv_events.replay_messages import ReplayRequest
from scheduler_components.kv_events.sequence_floor import SequenceFloor, open_floor

__all__ = ["MAX_SEND_DELAY_S", "Peer", "ProcessShape", "PublisherProcess"]

_SERVE_EVERY_S = 0.001
"""Time between two slices of the open answers."""

_MESSAGES_PER_TURN = 8
"""Messages to one client in a slice."""

_TRIM_BATCHES = 8 + MAX_WAITING
"""Batches after the last answer until the stream has dropped what only that answer needed."""

_WALL_CLOCK_US = 1_700_000_000_000_000
"""The wall clock at the start, in microseconds."""

_FLOOR = "floor"

MAX_SEND_DELAY_S = MAX_WAIT_S + 2 * POLL_INTERVAL_S
"""Age of the oldest pending batch at most, while the publisher may send."""


@attrs.frozen(kw_only=True)
class ProcessShape:
    """How a publisher runs.

    Attributes:
        publisher: settings of its stream.
        has_floor: it keeps a sequence floor; only with ``seq_base`` ``clock``.
        calls_idle: the scheduler calls ``idle()`` after each step.
    """

    publisher: PublisherShape = attrs.Factory(PublisherShape)
    has_floor: bool = False
    calls_idle: bool = False


class Peer(Protocol):
    """A reader's connections, as the publisher's side sees them."""

    def on_frame(self, frame: LiveFrame) -> None:
        """The publisher sent a live frame."""
        ...

    def can_take(self, client: bytes) -> bool | None:
        """Return whether the answer's connection can take a message; None if it is closed."""
        ...

    def take(self, client: bytes, message: tuple[bytes, ...]) -> None:
        """Take one message of an answer."""
        ...

    def on_publisher_gone(self) -> None:
        """The publisher's process has ended."""
        ...


class PublisherProcess:
    """One publisher's process, its restarts included.

    Args:
        timeline: of the world.
        shape: how it runs.
        disk: keeps its sequence floor.
        counters: of the world.

    Attributes:
        actor: the publisher.
        peers: every reader, connected or not.
        is_up: False while the process is down.
        stalled_until_s: until then nothing is sent or served.
    """

    __slots__ = (
        "_backlog", "_clients", "_counters", "_disk", "_floor", "_highest", "_is_poll_due", "_is_serving",
        "_num_since_answer", "_shape", "_skew_us", "_timeline", "actor", "is_up", "peers", "stalled_until_s",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, shape: ProcessShape, *, disk: FaultyDisk, counters: WorldCounters) -> None:
        self._timeline = timeline
        self._shape = shape
        self._disk = disk
        self._counters = counters
        self._skew_us = 0
        self._highest = -1
        self._num_since_answer = 0  # batches published since an answer was open
        self._floor = SequenceFloor(None, 0)
        self._clients: dict[bytes, Peer] = {}
        self._is_serving = self._is_poll_due = False
        self._backlog = Backlog(shape.publisher.max_pending)
        self.peers: list[Peer] = []
        self.is_up = True
        self.stalled_until_s = 0.0
        self.actor = PublisherActor(
            shape.publisher, broadcast=self._broadcast, first_sequence=self._open_floor, clock=timeline.clock
        )

    def _broadcast(self, frame: LiveFrame) -> None:
        self._highest = frame.sequence
        for peer in self.peers:
            peer.on_frame(frame)

    # --- live batches ---

    @property
    def is_stalled(self) -> bool:
        """True while nothing is sent or served."""
        return self._timeline.now_s < self.stalled_until_s

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Publish one batch, and send what ``publish()`` would send."""
        if not self.is_up:
            return
        self._counters.counts["batches published"] += 1
        self._num_since_answer = 0 if len(self.actor.sessions) else self._num_since_answer + 1
        self.actor.publish_events(events)
        if self.is_stalled:
            return
        now_s, num_pending = self._timeline.now_s, len(self.actor.sender.pending)
        if self._shape.calls_idle:
            self.actor.idle()
        elif not self._backlog.may_wait(now_s, num_pending, is_prompt=True):
            self.actor.drain()
        self._schedule_poll()
        self.check()

    def _schedule_poll(self) -> None:
        num_pending = len(self.actor.sender.pending)
        if num_pending and not self._is_poll_due:
            self._is_poll_due = True
            now_s = self._timeline.now_s
            self._timeline.after(self._backlog.next_poll_in_s(now_s, num_pending, is_heavy=False), self._poll)

    def _poll(self) -> None:
        """Send what is pending, as the publisher's thread does."""
        self._is_poll_due = False
        self.idle()

    def idle(self) -> None:
        """Send what is pending, unless nothing can be sent now."""
        if self.is_up and not self.is_stalled:
            self.actor.idle()
            self.check()

    def stall(self, duration_s: float) -> None:
        """Send and serve nothing for a while."""
        self.stalled_until_s = self._timeline.after(duration_s, self._poll)

    def check(self) -> None:
        """Check the bounds of what is pending and kept.

        Raises:
            BrokenPromise: a bound is exceeded.
        """
        if not self.is_up or self.is_stalled:
            return
        actor, window = self.actor, self._shape.publisher.window
        pending, stream = actor.sender.pending, actor.stream
        self._counters.max_pending = max(self._counters.max_pending, len(pending))
        if len(pending) >= MAX_WAITING:
            raise BrokenPromise("few batches wait", f"{len(pending)} batches are pending")
        if pending and self._timeline.now_s - pending[0].ts > MAX_SEND_DELAY_S:
            raise BrokenPromise("no batch waits for long", f"one waits since {pending[0].ts:.6f}")
        kept = stream.next_sequence - stream.oldest
        # One drain sends all that is pending before it looks at the bound.
        if kept > 2 * window + self._shape.publisher.max_pending:
            raise BrokenPromise("memory is bounded", f"the stream keeps {kept} batches of {window}")
        if stream.has_stuck_pins:
            raise BrokenPromise("memory is bounded", "an answer that cannot be completed stays open")
        if self._num_since_answer >= _TRIM_BATCHES and kept > window + len(pending):
            raise BrokenPromise("memory is bounded", f"the stream keeps {kept} batches and no answer is open")

    def can_prove(self, reader: SubscriberActor) -> bool:
        """Return whether ``reader`` can prove that it has everything."""
        return self.actor.can_be_live(has_extension=reader.has_extension)

    # --- replays ---

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Receive a request of a reader."""
        if not self.is_up:
            return
        self._counters.counts["requests"] += 1
        self._clients[client] = peer
        self._num_since_answer = 0
        self.actor.receive(client, request, has_extension=has_extension)
        if not self._is_serving:
            self._is_serving = True
            self._timeline.after(_SERVE_EVERY_S, self._serve)

    def _serve(self) -> None:
        """Serve a slice of each open answer."""
        if self.is_up and not self.is_stalled:
            self.actor.fold()
            for client in self.actor.sessions.clients:
                self._serve_turn(client)
            self.check()
        self._is_serving = self.is_up and len(self.actor.sessions) > 0
        if self._is_serving:
            self._timeline.after(_SERVE_EVERY_S, self._serve)

    def _serve_turn(self, client: bytes) -> None:
        sessions, peer = self.actor.sessions, self._clients[client]
        for _ in range(_MESSAGES_PER_TURN):
            can_take = peer.can_take(client)
            if can_take is None:
                sessions.drop(client)
                sessions.num_truncated += 1
                return
            message = sessions.message(client)
            if message is None:
                sessions.on_sent(client)
                break
            if not can_take:
                sessions.on_full(client, self._timeline.now_s)
                break
            peer.take(client, message)
            self._counters.counts["messages replayed"] += 1
            if sessions.on_sent(client):
                return
        sessions.rotate(client)

    def cut_answers(self) -> None:
        """End every open answer early."""
        self.actor.sessions.end_all()

    # --- crashes ---

    def crash(self, *, is_clean: bool, is_hidden: bool = False) -> None:
        """End the process.

        Args:
            is_clean: it sends what is pending, and returns unused numbers.
            is_hidden: its readers notice nothing, because a proxy keeps their connections.
        """
        if is_clean:
            self.actor.idle()
            self._floor.close(self.actor.stream.next_sequence)
        else:
            self._counters.counts["batches lost with the process"] += len(self.actor.sender.pending)
            self._disk.crash()
        self.is_up = False
        self._clients.clear()
        for peer in () if is_hidden else tuple(self.peers):
            peer.on_publisher_gone()

    def restart(self, *, skew_s: float) -> None:
        """Start the process again. ``skew_s`` is added to its wall clock."""
        self._skew_us += round(skew_s * 1e6)
        self.is_up = True
        self._backlog = Backlog(self._shape.publisher.max_pending)
        self.actor.start_epoch()
        self._timeline.record(f"epoch {self.actor.epoch} begins at {self.actor.stream.next_sequence}")

    def _open_floor(self, epoch: int) -> int:
        """Return the first number of an epoch."""
        if self._shape.publisher.seq_base == "zero":
            return 0
        wanted = _WALL_CLOCK_US + self._timeline.clock.now_ns // 1000 + self._skew_us
        if not self._shape.has_floor:
            return wanted
        lost = self._disk.counters["lost"]
        file = FloorOnFaultyDisk(disk=self._disk, name=_FLOOR)
        try:
            self._floor = open_floor(file, wanted=wanted)
        except StartError:
            # An operator reads the message and removes the file.
            self._counters.faults["floor refused"] += 1
            self._disk.remove(_FLOOR)
            self._floor = open_floor(file, wanted=wanted)
            return self._floor.first
        first = self._floor.first
        if epoch and first <= self._highest and not lost:
            raise BrokenPromise("an epoch starts above every earlier one", f"{first} is not above {self._highest}")
        return first
