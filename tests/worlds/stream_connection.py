"""StreamConnection: the connections of one reader to one publisher, on the time line.

As in ``zmq_stream``: a live connection that is opened again after it was lost, and one connection per replay request.
Messages wait in the reader's socket until it reads them. A paused reader reads nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs

from observability.kv_stream import FollowPolicy, StreamListener
from observability.kv_stream.instructions import SendReplayRequest
from observability.kv_stream.reopen_pauses import ReopenPauses
from scheduler_components._internal.validators import number_validator
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest
from worlds.faults import LinkFault, LinkQuality, TimedLink
from worlds.publisher_actor import FORGED_PAYLOAD, OTHER_TOPIC, TOPIC, LiveFrame
from worlds.publisher_process import Peer
from worlds.subscriber_actor import Answer, FollowedPublisher, SubscriberActor, begins_chunks
from worlds.timeline import Timeline

_ROUNDING_S = 2e-9
"""The clock counts nanoseconds, and a deadline may be between two of them."""

_is_probability = number_validator("is not a probability", or_zero=True)


_ANSWERS_PER_S = 600.0
"""Messages of an answer that a network without faults carries at least: twice the batches of a relay with the three
fastest engines. On a slower one the publisher cuts the answers, again and again."""

_LATEST_ANSWER_S = 1.0
"""The rest of an answer comes so late at most, after its request was given up."""

_PAUSE_IN_ANSWER_S = 1.0
"""A reader that pauses in the middle of an answer does so for this long, or until the storm ends."""

_SERVE_EVERY_S = 0.001
"""A message waits for so long until the next one takes its place in the link."""


def least_capacity(latency_s: float) -> int:
    """Return how many messages of an answer must be in transit so that the publisher is not faster than the link."""
    return math.ceil(_ANSWERS_PER_S * (latency_s + _SERVE_EVERY_S))


@attrs.frozen(kw_only=True)
class ReaderNetwork:
    """The network of one reader.

    Attributes:
        live: of live frames. Its capacity is the high-water mark, for frames in transit and unread ones.
        replay: of requests and answers. Its capacity is that of one answer.
        garbling: probability that a META is unreadable.
        alteration: probability that a batch of an answer is another readable one; only with the extension.
        lateness: probability that the rest of an answer still comes after its request was given up.
        calm_capacity: messages of an answer that fit into a network without faults, at least.
    """

    live: LinkQuality = attrs.Factory(LinkQuality)
    replay: LinkQuality = attrs.Factory(LinkQuality)
    garbling: float = attrs.field(default=0.0, validator=_is_probability)
    alteration: float = attrs.field(default=0.0, validator=_is_probability)
    lateness: float = attrs.field(default=0.0, validator=_is_probability)
    calm_capacity: int = 0

    def without_faults(self) -> ReaderNetwork:
        """Return the same network without faults, and with answers that are faster than the publisher.

        Latency, jitter and the high-water mark stay.
        """
        replay = _without_faults(self.replay)
        if replay.capacity is not None:
            least = max(self.calm_capacity, least_capacity(replay.max_latency_s))
            replay = attrs.evolve(replay, capacity=max(replay.capacity, least))
        return ReaderNetwork(live=_without_faults(self.live), replay=replay)


def _without_faults(quality: LinkQuality) -> LinkQuality:
    return attrs.evolve(quality, loss=0.0, duplication=0.0, reordering=0.0)


@attrs.frozen(kw_only=True)
class ReaderShape:
    """One reader.

    Attributes:
        name: in messages.
        policy: how long its follower waits.
        has_extension: False if the publisher acts for it as one without the extension.
    """

    name: str
    policy: FollowPolicy
    has_extension: bool = True


class PublisherHost(Protocol):
    """A publisher's process, as a reader's network sees it; ``PublisherProcess`` for example."""

    @property
    def actor(self) -> FollowedPublisher:
        """The truth about its publisher."""
        ...

    @property
    def is_up(self) -> bool:
        """False while the process is down."""
        ...

    @property
    def peers(self) -> list[Peer]:
        """Every reader, connected or not."""
        ...

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Receive a request of a reader."""
        ...


class ConnectionListener(Protocol):
    """Receives what happens to a reader, to judge it."""

    def on_fault(self, kind: str) -> None:
        """A fault hit the reader or its network."""
        ...

    def on_frame_sent(self, frame: LiveFrame) -> None:
        """The publisher sent a live frame, also if the reader is not connected."""
        ...

    def on_frame_lost(self, frame: LiveFrame) -> None:
        """The network lost a live frame."""
        ...

    def on_change(self) -> None:
        """The reader has handled one message or deadline."""
        ...


class StreamConnection:
    """One reader and its connections. It is the channel of the reader's follower, and a peer of the publisher.

    Args:
        timeline: of the world.
        process: the publisher.
        shape: the reader.
        network: between them; it may be replaced at any time.
        judge: receives what happens.
        listener: receives every change of the view.

    Attributes:
        reader: follows the stream.
        paused_until_s: until then the reader reads nothing.
        pauses_answer_until_s: until then the next message of an answer that arrives makes the reader pause.
        loses_frames: the network loses every live frame.
    """

    __slots__ = (
        "_answer", "_answers", "_client", "_frames", "_has_connected", "_is_closed", "_is_in_chunks", "_is_lost",
        "_judge", "_live", "_network", "_process", "_reopen_pauses", "_repeated", "_request", "_timeline", "_wake_s",
        "loses_frames", "paused_until_s", "pauses_answer_until_s", "reader",
    )  # fmt: skip

    def __init__(
        self,
        timeline: Timeline,
        process: PublisherHost,
        shape: ReaderShape,
        *,
        network: ReaderNetwork,
        judge: Callable[[SubscriberActor], ConnectionListener],
        listener: StreamListener | None = None,
    ) -> None:
        self._timeline = timeline
        self._process = process
        self._network = network
        self.reader = SubscriberActor(
            shape.name,
            process.actor,
            channel=self,
            policy=shape.policy,
            has_extension=shape.has_extension,
            listener=listener,
            now_s=timeline.now_s,
        )
        self._judge = judge(self.reader)
        self.paused_until_s = self.pauses_answer_until_s = 0.0
        self.loses_frames = False
        self._live: TimedLink[LiveFrame] | None = None
        self._frames: deque[LiveFrame] = deque()
        self._has_connected: int | None = None  # the epoch of a connection that the reader has not noticed
        self._is_lost = self._is_closed = False
        self._reopen_pauses = ReopenPauses()
        self._repeated: set[LiveFrame] = set()
        self._request: SendReplayRequest | None = None
        self._client = b""
        self._answer: TimedLink[Answer] | None = None
        self._answers: deque[Answer] = deque()
        self._is_in_chunks = False
        self._wake_s = float("inf")
        process.peers.append(self)

    # --- the live connection ---

    def open(self) -> None:
        """Connect, or try again later."""
        if self._is_closed or self._live is not None:
            return
        self._timeline.after(self._network.live.latency_s, self._connect)
        self._wake_later()

    def _connect(self) -> None:
        if self._is_closed or self._live is not None:
            return
        if not self._process.is_up:
            self._reopen_later()
            return
        self._live = TimedLink(self._timeline, self._network.live, self._on_arrival, on_fault=self._on_live_fault)
        self._has_connected = self._process.actor.epoch
        self._timeline.record(f"{self.reader.name} connects")
        self._run()

    def _reopen_later(self) -> None:
        self._timeline.after(self._reopen_pauses.take(), self.open)

    def cut(self) -> None:
        """Cut the live connection; without the extension also that of the open answer."""
        if self._live is None:
            return
        for frame in self._live.link.in_transit:
            self._note_lost(frame)
        self._live.cut()
        self._live = None
        self._is_lost = True
        if not self.reader.has_extension:
            self.cut_answer()
        self._judge.on_fault("disconnects")
        self._run()

    def cut_answer(self) -> None:
        """Lose the rest of the open answer."""
        if self._answer is not None:
            self._answer.cut()
            self._answer = None
            self._judge.on_fault("answers cut")

    def close(self) -> None:
        """Close every connection: the reader leaves."""
        self._is_closed = True
        self.cancel()
        if self._live is not None:
            self._live.cut()
            self._live = None
        self._process.peers.remove(self)

    def on_frame(self, frame: LiveFrame) -> None:
        """Send a live frame to the reader, unless its queue is full."""
        self._judge.on_frame_sent(frame)
        live = self._live
        if live is None:
            return
        if self.loses_frames:
            self._note_lost(frame)
            return
        capacity = self._network.live.capacity
        if capacity is not None and len(live.link.in_transit) + len(self._frames) >= capacity:
            self._judge.on_fault("frames over the high-water mark")
            self._note_lost(frame)
        else:
            live.send(frame)

    def forge(self, sequence: int, *, is_own_topic: bool) -> None:
        """Send a forged frame, with the number ``sequence``."""
        if self._live is not None:
            topic = TOPIC if is_own_topic else OTHER_TOPIC
            self._judge.on_fault("forged frames" if is_own_topic else "frames of another topic")
            self._live.send(LiveFrame(None, (topic, sequence.to_bytes(8, "big"), FORGED_PAYLOAD)))

    def _on_live_fault(self, fault: LinkFault, frame: LiveFrame) -> None:
        self._judge.on_fault(f"live frames: {fault}")
        if fault is LinkFault.REPEAT:
            self._repeated.add(frame)
        elif fault is LinkFault.LOSE:
            self._note_lost(frame)

    def _note_lost(self, frame: LiveFrame) -> None:
        if frame.epoch is not None and frame not in self._repeated:
            self._judge.on_frame_lost(frame)

    def _on_arrival(self, frame: LiveFrame) -> None:
        self._frames.append(frame)
        self._run()

    # --- the replay channel ---

    def send(self, request: SendReplayRequest) -> None:
        """Send a request over a connection of its own."""
        self.cancel()
        name, network = self.reader.name, self._network
        self._request = request
        self._client = client = f"{name}/{request.request_id}".encode()
        self._is_in_chunks = False
        answer: TimedLink[Answer] = TimedLink(
            self._timeline, network.replay, self._on_answer, on_fault=self._on_answer_fault
        )
        self._answer = answer
        if not self.reader.has_extension and self._live is None:
            return
        if self._timeline.happens(network.replay.loss):
            self._judge.on_fault("requests lost")
            return

        def arrive() -> None:
            if self._answer is answer:
                self._process.receive(client, request.request, self, has_extension=self.reader.has_extension)

        self._timeline.after(network.replay.latency_s, arrive)

    def cancel(self) -> None:
        """Close the connection of the open request. The rest of its answer may come late."""
        if self._answer is not None:
            late = (*self._answers, *self._answer.link.in_transit)
            if late and self._timeline.happens(self._network.lateness):
                self._hold_back(late)
            self._answer.cut()
        self._answer = self._request = None
        self._answers.clear()

    def _hold_back(self, answers: tuple[Answer, ...]) -> None:
        """Let the rest of an answer come late, between the messages of the next answer."""
        self._judge.on_fault("late answers")

        def arrive() -> None:
            self._answers.extend(answers)
            self._run()

        self._timeline.after(self._timeline.random.random() * _LATEST_ANSWER_S, arrive)

    def can_take(self, client: bytes) -> bool | None:
        """Return whether the answer's connection can take a message; None if it is closed."""
        if self._answer is None or client != self._client:
            return None
        capacity = self._network.replay.capacity
        return capacity is None or len(self._answer.link.in_transit) + len(self._answers) < capacity

    def take(self, client: bytes, message: tuple[bytes, ...]) -> None:
        """Send one message of an answer to the reader."""
        request, answer_link = self._request, self._answer
        if request is None or answer_link is None or client != self._client:
            return
        answer = Answer(
            request_id=request.request_id,
            sequence=int.from_bytes(message[-2], "big", signed=True),
            payload=message[-1],
            epoch=self._process.actor.epoch,
        )
        is_marker = message[-2] == END_SEQ
        if is_marker and message[-1]:
            self._is_in_chunks = begins_chunks(message[-1])
            if self._timeline.happens(self._network.garbling):
                self._judge.on_fault("META garbled")
                answer.payload = b"junk"
        can_alter = not is_marker and request.verb is not None and not self._is_in_chunks
        if can_alter and self._timeline.happens(self._network.alteration):
            self._judge.on_fault("batches altered")
            answer.payload, answer.is_altered = FORGED_PAYLOAD, True
        answer_link.send(answer)

    def _on_answer_fault(self, fault: LinkFault, _: Answer) -> None:
        self._judge.on_fault(f"answers: {fault}")

    def _on_answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        left_s = self.pauses_answer_until_s - self._timeline.now_s
        if left_s > 0.0:
            self.pauses_answer_until_s = 0.0
            self.pause(min(left_s, _PAUSE_IN_ANSWER_S))
        self._run()

    # --- the publisher ---

    def on_publisher_gone(self) -> None:
        """Lose every connection."""
        if self._answer is not None:
            self._answer.cut()
        self.cut()

    def hide_restart(self) -> None:
        """Keep the live connection over a restart, as a proxy does. Answers are lost."""
        if self._answer is not None:
            self._answer.cut()
        self.reader.truth.was_restarted = True
        self._judge.on_fault("hidden restarts")

    # --- the reader ---

    def set_network(self, network: ReaderNetwork) -> None:
        """Change the network, also of open connections."""
        self._network = network
        if self._live is not None:
            self._live.quality = network.live
        if self._answer is not None:
            self._answer.quality = network.replay
            self._answer.link.capacity = network.replay.capacity

    def pause(self, duration_s: float) -> None:
        """Read nothing for a while."""
        self.paused_until_s = self._timeline.after(duration_s, self._run)
        self._judge.on_fault("pauses")

    def _run(self) -> None:
        """Read what has come, in the order of ``ZmqStream.drain``, and handle the deadlines."""
        now_s = self._timeline.now_s
        if self._is_closed or now_s < self.paused_until_s:
            return
        reader, cursor = self.reader, self.reader.follower.cursor
        if self._has_connected is not None:
            epoch, self._has_connected = self._has_connected, None
            reader.on_connected(epoch, now_s)
            self._judge.on_change()
        while self._answers:
            reader.on_answer(self._answers.popleft(), now_s)
            self._judge.on_change()
        while self._frames and (cursor.is_accepting_live or self._is_lost):
            if not cursor.is_accepting_live:
                self._note_lost(self._frames.popleft())
                continue
            self._reopen_pauses.reset()
            reader.on_live(self._frames.popleft(), now_s)
            self._judge.on_change()
        if self._is_lost:
            self._is_lost = False
            reader.on_disconnected(now_s)
            self._judge.on_change()
            self._reopen_later()
        if reader.follower.next_deadline_s <= now_s:
            reader.tick(now_s)
            self._judge.on_change()
        self._wake_later()

    def _wake_later(self) -> None:
        """Wake the reader at its next deadline."""
        due_s = self.reader.follower.next_deadline_s
        if due_s < self._wake_s:
            self._wake_s = due_s
            self._timeline.at(due_s + _ROUNDING_S, self._wake)

    def _wake(self) -> None:
        self._wake_s = float("inf")
        self._run()
