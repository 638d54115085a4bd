"""PublisherProcess: runs a ``PublisherActor`` on the time line, as ``ZmqEventPublisher`` runs its sockets.

``Handover`` decides what ``publish()`` leaves to the thread and when that polls, ``StreamDrain`` what a drain does, and
``open_floor`` the first number after a restart. The process brings them the time: its thread may be late, it may stall,
lose its sockets, or crash and start again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import attrs

from scheduler_components import KVCacheEvent, StartError
from scheduler_components.kv_events.backlog import MAX_WAIT_S, MAX_WAITING, POLL_INTERVAL_S
from scheduler_components.kv_events.handover import IDLE_REPLAY_S, PUBLISH_S, REQUESTS_EVERY_S, Handover
from scheduler_components.kv_events.replay_messages import ReplayRequest
from scheduler_components.kv_events.sequence_floor import SequenceFloor, open_floor
from scheduler_components.kv_events.stream_drain import ReplayServer, StreamDrain
from worlds.faults import FaultyDisk, FloorOnFaultyDisk, WriteFate
from worlds.publisher_actor import LiveFrame, PublisherActor, PublisherShape
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import BrokenPromise, Timeline, WorldCounters

_WAKE_S = 0.001
"""Time in which the replay socket wakes the thread: for a request, or for a client that takes messages again."""

_LOOK_S = 40e-6
"""What a drain has done between two looks at the clock takes so long: one or some batches, or a client's turn."""

_MEAN_LATENESS_S = 0.03
"""How late each poll of a late thread is, on average."""

_CATCH_UP_S = 0.05
"""Time until a thread that was late has sent what waited."""

_TRIM_BATCHES = 8 + MAX_WAITING
"""Batches after the last answer until the stream has dropped what only that answer needed."""

_WALL_CLOCK_US = 1_700_000_000_000_000
"""The wall clock at the start, in microseconds."""

_MOST_SENT = 256
"""Batches of which the time is known: more than are sent in a round trip."""

_FLOOR = "floor"

MAX_SEND_DELAY_S = MAX_WAIT_S + 2 * POLL_INTERVAL_S
"""Age of the oldest pending batch at most, while the publisher may send and its thread is on time."""


@attrs.frozen(kw_only=True)
class ProcessShape:
    """How a publisher runs.

    Attributes:
        publisher: settings of its stream.
        has_floor: it keeps a sequence floor; only with ``seq_base`` ``clock``.
        calls_idle: the scheduler calls ``idle()`` after each step.
        is_inline: each call of ``publish()`` sends its batch.
        repairs_floor: an operator writes a sufficient number into a damaged floor, and does not remove the file.
    """

    publisher: PublisherShape = attrs.Factory(PublisherShape)
    has_floor: bool = False
    calls_idle: bool = False
    is_inline: bool = False
    repairs_floor: bool = False


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


class Answers(Protocol):
    """How a publisher answers requests."""

    def on_frame(self, frame: LiveFrame) -> None:
        """The publisher sent a live frame."""
        ...

    def on_publisher_gone(self) -> None:
        """The publisher's process has ended, and with it every open answer."""
        ...

    def make_server(self, clock: Callable[[], float]) -> ReplayServer | None:
        """Return what sends the answers of the epoch that has just begun; None if ``receive`` does."""
        ...

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Receive a request of a reader."""
        ...

    def cut(self) -> None:
        """End every open answer early."""
        ...

    @property
    def is_open(self) -> bool:
        """True while a request or an answer is open."""
        ...

    def can_prove(self, reader: SubscriberActor) -> bool:
        """Return whether ``reader`` can prove that it has everything."""
        ...


class SessionAnswers:
    """The kit's answers: ``ReplaySessions``, sent in the turns of each drain. Its server's ``ReplayServerChannel``.

    Args:
        process: the publisher.
        counters: of the world.
    """

    __slots__ = ("_counters", "_peers", "_process", "_requests")

    def __init__(self, process: PublisherProcess, counters: WorldCounters) -> None:
        self._process = process
        self._counters = counters
        self._peers: dict[bytes, Peer] = {}
        self._requests: list[Callable[[], None]] = []  # in the socket

    def on_frame(self, frame: LiveFrame) -> None:
        """Keep nothing: the stream does."""

    def on_publisher_gone(self) -> None:
        """Forget the clients of the process that has ended."""
        self._peers.clear()
        self._requests.clear()

    def make_server(self, clock: Callable[[], float]) -> ReplayServer:
        """Return the server of the present epoch."""
        return ReplayServer(self._process.actor.sessions, self, clock=clock)

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Keep the request in the socket until a drain receives it."""
        self._peers[client] = peer
        self._requests.append(partial(self._process.actor.receive, client, request, has_extension=has_extension))

    def cut(self) -> None:
        """End every open answer early."""
        self._process.actor.sessions.end_all()

    @property
    def is_open(self) -> bool:
        """True while a request or an answer is open."""
        return bool(self._requests) or len(self._process.actor.sessions) > 0

    def can_prove(self, reader: SubscriberActor) -> bool:
        """Return whether ``reader`` can prove that it has everything."""
        return self._process.actor.can_be_live(has_extension=reader.has_extension)

    # --- ReplayServerChannel ---

    @property
    def has_failed(self) -> bool:
        """True if other code has destroyed the sockets."""
        return not self._process.actor.can_send

    def receive_requests(self) -> bool:
        """Pass the requests in the socket to the sessions."""
        requests, self._requests = self._requests, []
        for receive in requests:
            receive()
        return False

    def send(self, message: tuple[bytes, ...]) -> bool | None:
        """Send one message of an answer. Return False if its client takes no more now, None if the client is gone."""
        client = message[0]
        peer = self._peers[client]
        can_take = peer.can_take(client)
        if can_take:
            peer.take(client, message)
            self._counters.counts["messages replayed"] += 1
        return can_take


class _WorkClock:
    """The clock inside a drain: virtual time stops there, so what the drain does is counted instead."""

    __slots__ = ("_timeline", "spent_s")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.spent_s = 0.0

    def __call__(self) -> float:
        self.spent_s += _LOOK_S
        return self._timeline.now_s + self.spent_s


AnswersFactory = Callable[["PublisherProcess", WorldCounters], Answers]


class PublisherProcess:
    """One publisher's process, its restarts included.

    Args:
        timeline: of the world.
        shape: how it runs.
        disk: keeps its sequence floor.
        counters: of the world.
        make_answers: how it answers requests.

    Attributes:
        actor: the publisher.
        answers: to requests.
        peers: every reader, connected or not.
        is_running: False while the process is down.
        stalled_until_s: until then nothing is sent or served.
    """

    __slots__ = (
        "_counters", "_disk", "_due_s", "_floor", "_handover", "_highest", "_largest_bytes", "_late_until_s",
        "_num_bytes", "_num_since_answer", "_sent", "_shape", "_skew_us", "_timeline", "_work", "_work_clock",
        "actor", "answers", "is_running", "peers", "stalled_until_s",
    )  # fmt: skip

    def __init__(
        self,
        timeline: Timeline,
        shape: ProcessShape,
        *,
        disk: FaultyDisk,
        counters: WorldCounters,
        make_answers: AnswersFactory = SessionAnswers,
    ) -> None:
        self._timeline = timeline
        self._shape = shape
        self._disk = disk
        self._counters = counters
        self._skew_us = 0
        self._highest = -1
        self._largest_bytes = 0
        self._sent: deque[tuple[float, int]] = deque(maxlen=_MOST_SENT)  # time and size of the newest batches
        self._late_until_s = 0.0
        self._floor: SequenceFloor | None = None
        self._work_clock = _WorkClock(timeline)
        self.peers: list[Peer] = []
        self.is_running = True
        self.stalled_until_s = 0.0
        self.answers = make_answers(self, counters)
        self.actor = PublisherActor(
            shape.publisher,
            broadcast=self._broadcast,
            first_sequence=self._open_floor,
            clock=timeline.clock,
            work_clock=self._work_clock,
        )
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        actor, shape = self.actor, self._shape
        self._due_s = math.inf  # time of the thread's next poll
        self._num_since_answer = self._num_bytes = 0  # batches since an answer was open, bytes of the last drain
        self._handover = Handover(
            actor.sender, actor.sessions, max_waiting=shape.publisher.max_pending, is_inline=shape.is_inline
        )
        self._work = StreamDrain(
            actor.sender,
            actor.stream,
            actor.sessions,
            floor=self._floor,
            server=self.answers.make_server(self._work_clock),
            count_peers=lambda: None,
            clock=self._work_clock,
        )

    def _broadcast(self, frame: LiveFrame) -> None:
        self._highest = max(self._highest, frame.sequence)
        num_bytes = len(frame.frames[2])
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        self._sent.append((self._timeline.now_s, num_bytes))
        self.answers.on_frame(frame)
        for peer in self.peers:
            peer.on_frame(frame)

    # --- live batches ---

    @property
    def is_up(self) -> bool:
        """True while readers can connect."""
        return self.is_running and self.actor.can_send

    @property
    def is_stalled(self) -> bool:
        """True while nothing is sent or served."""
        return self._timeline.now_s < self.stalled_until_s

    @property
    def is_late(self) -> bool:
        """True while the thread is late, or catches up."""
        return self._timeline.now_s < self._late_until_s + _CATCH_UP_S

    def publish(self, events: Sequence[KVCacheEvent], *, refused: Sequence[KVCacheEvent] = ()) -> None:
        """Publish one batch, and send what ``publish()`` would send. No reader accepts the ``refused`` events."""
        if not self.is_running:
            return
        self._counters.counts["batches published"] += 1
        self._counters.counts["events refused"] += len(refused)
        self._num_since_answer = 0 if self.answers.is_open else self._num_since_answer + 1
        self.actor.publish_events(events, refused=refused)
        if self.is_stalled:
            self._handover.may_wait(self._timeline.now_s, self._due_s)
        elif self._shape.calls_idle:
            self.idle()
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        """Leave the new batch to the thread, or send, as ``ZmqEventPublisher.publish`` does."""
        now_s, handover, pending = self._timeline.now_s, self._handover, self.actor.sender.pending
        oldest = pending[0]
        handover.is_active = not self._shape.is_inline
        replay_s = handover.replay_s(now_s, self._due_s)
        if not handover.may_wait(now_s, self._due_s) or replay_s:
            self._drain(math.inf if self._shape.is_inline else PUBLISH_S, replay_s)
            if pending and pending[0] is oldest:
                raise BrokenPromise("no batch waits for long", "publish() has not sent the oldest batch")
        elif now_s - oldest.ts >= MAX_WAIT_S:
            raise BrokenPromise("no batch waits for long", f"publish() leaves a batch of {oldest.ts:.6f} to the thread")
        self._watch()
        self.check()

    def idle(self) -> None:
        """Send what is pending and serve replays, unless nothing can be sent now: the scheduler waits."""
        if self.is_running and not self.is_stalled:
            self._handover.is_active = False
            self._drain(math.inf, IDLE_REPLAY_S)
            self._handover.drained_at_s = self._timeline.now_s
            self._watch()
            self.check()

    def _drain(self, send_s: float, replay_s: float, *, requests_every_s: float = REQUESTS_EVERY_S) -> bool:
        self._work_clock.spent_s = 0.0
        num_before = self.actor.sender.num_bytes
        unfinished = self._work.drain(send_s, replay_s, requests_every_s=requests_every_s)
        self._num_bytes = self.actor.sender.num_bytes - num_before
        self.actor.check_sent()
        return unfinished

    # --- its thread ---

    def _watch(self) -> None:
        """Let the thread poll in time. Polls that would find nothing to do are left out."""
        num_pending, now_s = len(self.actor.sender.pending), self._timeline.now_s
        if num_pending:
            self._poll_in(self._handover.backlog.next_poll_in_s(now_s, num_pending, is_heavy=False))
        if self.answers.is_open:
            self._poll_in(_WAKE_S)

    def _poll_in(self, pause_s: float) -> None:
        """Let the thread poll in ``pause_s`` seconds, or later if it is late. An earlier poll stays."""
        timeline = self._timeline
        due_s = timeline.now_s + pause_s
        if due_s >= self._due_s:
            return
        self._due_s = due_s
        late_s = 0.0
        if due_s < self._late_until_s:
            late_s = min(timeline.random.expovariate(1 / _MEAN_LATENESS_S), self._late_until_s - due_s)
        timeline.after(pause_s + late_s, partial(self._poll, due_s))

    def _poll(self, due_s: float) -> None:
        """Drain a slice, as ``ZmqEventPublisher.poll`` does."""
        if due_s != self._due_s:
            return
        self._due_s = math.inf
        if not self.is_running or self.is_stalled:
            return
        timeline, handover = self._timeline, self._handover
        now_s, late_s = timeline.now_s, max(0.0, timeline.now_s - due_s)
        pause_s = handover.pause_s(now_s, late_s, self._work.requests_at_s)
        if not pause_s:
            num_before = self._num_sent
            slice_s = handover.slice_s(late_s)
            unfinished = self._drain(slice_s, slice_s, requests_every_s=0.0)
            was_busy_at_s = now_s if self._num_sent > num_before else None
            pause_s = handover.next_poll_s(now_s, was_busy_at_s=was_busy_at_s, unfinished=unfinished)
        if self.actor.sender.pending or self.answers.is_open:
            self._poll_in(min(pause_s, _WAKE_S) if self.answers.is_open else pause_s)
        self.check()

    @property
    def _num_sent(self) -> int:
        return self.actor.sender.num_batches + self.actor.sessions.num_batches

    # --- what it must keep ---

    def check(self) -> None:
        """Check the bounds of what is pending and kept.

        Raises:
            BrokenPromise: a bound is exceeded.
        """
        if not self.is_running or self.is_stalled:
            return
        actor, shape = self.actor, self._shape.publisher
        pending, stream = actor.sender.pending, actor.stream
        self._counters.measure("pending", len(pending))
        if len(pending) >= MAX_WAITING:
            raise BrokenPromise("few batches wait", f"{len(pending)} batches are pending")
        if pending and not self.is_late and self._timeline.now_s - pending[0].ts > MAX_SEND_DELAY_S:
            raise BrokenPromise("no batch waits for long", f"one waits since {pending[0].ts:.6f}")
        kept, window = stream.next_sequence - stream.oldest, shape.window
        # One drain sends several batches before it looks at the bounds.
        if kept > 2 * window + shape.max_pending:
            raise BrokenPromise("memory is bounded", f"the stream keeps {kept} batches of {window}")
        # A batch that is larger than the buffer stays until the drain after the next one.
        if kept > 1 and stream.kept_bytes > 2 * shape.max_bytes + self._num_bytes + self._largest_bytes:
            raise BrokenPromise("memory is bounded", f"the stream keeps {stream.kept_bytes} bytes of {shape.max_bytes}")
        if stream.has_stuck_pins:
            raise BrokenPromise("memory is bounded", "an answer that cannot be completed stays open")
        if self._num_since_answer >= _TRIM_BATCHES and kept > window + len(pending):
            raise BrokenPromise("memory is bounded", f"the stream keeps {kept} batches and no answer is open")

    def can_prove(self, reader: SubscriberActor) -> bool:
        """Return whether ``reader`` can prove that it has everything."""
        return self.answers.can_prove(reader)

    def keeps_answers(self, round_trip_s: float) -> bool:
        """Return whether the replay buffer has room, in bytes, for what is sent while an answer travels.

        Otherwise the publisher cuts answers, again and again, because its clients are too slow for it.
        """
        if _MOST_SENT * self._largest_bytes <= self._shape.publisher.max_bytes:
            return True
        since_s = self._timeline.now_s - round_trip_s
        return sum(size for sent_s, size in self._sent if sent_s >= since_s) <= self._shape.publisher.max_bytes

    # --- replays ---

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Receive a request of a reader."""
        if not self.is_up:
            return
        self._counters.counts["requests"] += 1
        self._num_since_answer = 0
        self.answers.receive(client, request, peer, has_extension=has_extension)
        if not self.is_stalled:
            self._watch()

    def cut_answers(self) -> None:
        """End every open answer early."""
        self.answers.cut()

    # --- faults ---

    def stall(self, duration_s: float) -> None:
        """Send and serve nothing for a while."""
        self.stalled_until_s = self._timeline.after(duration_s, self._go_on)

    def _go_on(self) -> None:
        """After a stall, the call that held the sockets sends what others have left to it."""
        if self.is_running and not self.is_stalled:
            self._drain(math.inf, 0.0)
            self._watch()
            self.check()

    def delay_thread(self, duration_s: float) -> None:
        """Let every poll of the thread be late for a while, as with a scheduler that keeps the GIL."""
        self._late_until_s = self._timeline.now_s + duration_s

    def destroy_sockets(self) -> None:
        """Let other code destroy the sockets: nothing is sent, received or served until a restart."""
        self.actor.can_send = False
        for peer in tuple(self.peers):
            peer.on_publisher_gone()

    def crash(self, *, is_clean: bool, is_hidden: bool = False) -> None:
        """End the process.

        Args:
            is_clean: it sends what is pending, and returns unused numbers.
            is_hidden: its readers notice nothing, because a proxy keeps their connections.
        """
        if is_clean:
            self.actor.idle()
            if self._floor is not None:
                self._floor.close(self.actor.stream.next_sequence)
        else:
            self._counters.counts["batches lost with the process"] += len(self.actor.sender.pending)
            self._disk.crash()
        self._counters.counts["batches not sent"] += self.actor.sender.num_dropped
        self.is_running = False
        self.answers.on_publisher_gone()
        for peer in () if is_hidden else tuple(self.peers):
            peer.on_publisher_gone()

    def restart(self, *, skew_s: float) -> None:
        """Start the process again. ``skew_s`` is added to its wall clock."""
        self._skew_us += round(skew_s * 1e6)
        self.is_running = True
        self.actor.start_epoch()
        self._begin_epoch()
        self._timeline.record(f"epoch {self.actor.epoch} begins at {self.actor.stream.next_sequence}")

    # --- its sequence floor ---

    def _open_floor(self, epoch: int) -> int:
        """Return the first number of an epoch.

        Raises:
            BrokenPromise: a damaged floor was believed, or the number is not above an earlier one although the floor or
                the clock is.
        """
        if self._shape.publisher.seq_base == "zero":
            return 0
        wanted = _WALL_CLOCK_US + self._timeline.clock.now_ns // 1000 + self._skew_us
        if not self._shape.has_floor:
            return wanted
        fate = self._disk.fate(_FLOOR)
        try:
            self._floor = self._read_floor(wanted)
        except StartError:
            self._counters.faults["floor refused"] += 1
            self._repair_floor()
            fate = self._disk.fate(_FLOOR)
            self._floor = self._read_floor(wanted)
        first = self._floor.first
        if fate is WriteFate.TORN:
            raise BrokenPromise("a damaged floor is refused", f"epoch {epoch} begins at {first}")
        if first <= self._highest:
            if fate is WriteFate.KEPT or wanted > self._highest:
                detail = f"{first} is not above {self._highest}"
                raise BrokenPromise("an epoch starts above every earlier one", detail)
            self._counters.faults["numbers repeated after a lost floor"] += 1
            self._highest = first - 1  # the floor knows nothing of earlier epochs any more
        return first

    def _read_floor(self, wanted: int) -> SequenceFloor:
        return open_floor(FloorOnFaultyDisk(disk=self._disk, name=_FLOOR), wanted=wanted)

    def _repair_floor(self) -> None:
        """An operator follows the message, or removes the file."""
        if self._shape.repairs_floor:
            self._disk.write(_FLOOR, b"%d\n" % (self._highest + 1))
        else:
            self._disk.lose(_FLOOR)
