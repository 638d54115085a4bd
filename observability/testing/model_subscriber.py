"""A subscriber's cores at the end of a faulty network, without sockets, clock or thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from observability.kv_stream.applier import BatchApplier
from observability.kv_stream.cursor import StreamCursor
from observability.kv_stream.follower import FollowPolicy, StreamFollower
from observability.kv_stream.instructions import AskReplay, StreamState
from observability.kv_stream.listener import NullListener
from observability.kv_stream.view import BlockView, Tier
from observability.testing.model_publisher import ModelPublisher, State
from scheduler_components.kv_events.codec import BatchDecoder
from scheduler_components.kv_events.replay_wire import END_SEQ, plain_request

__all__ = ["POLICY", "Connection", "ModelSubscriber"]

POLICY = FollowPolicy(answer_timeout_s=1.0, retry_min_s=0.1, retry_max_s=0.5, probe_interval_s=2.0, dead_after_s=5.0)


@dataclass
class Connection:
    """A live connection: the life at its other end when it came about, and the frames under way, each of a life."""

    life: int
    frames: deque[tuple[int, int, bytes]] = field(default_factory=deque)
    is_broken: bool = False
    was_restarted: bool = False


class ModelSubscriber:
    """A follower, its view, its live connection and the one question that it has under way."""

    def __init__(self, publisher: ModelPublisher, name: str, *, has_extension: bool, cursor: StreamCursor) -> None:
        self.publisher, self.name, self.has_extension = publisher, name, has_extension
        self.view = BlockView()
        self.follower = StreamFollower(
            cursor=cursor,
            applier=BatchApplier(
                rank=0, view=self.view, decoder=BatchDecoder(), listener=NullListener(), wall_clock=lambda: 0.0
            ),
            channel=self,
            policy=POLICY,
            jitter=lambda: 0.0,
        )
        self.connection: Connection | None = None
        self.question: AskReplay | None = None
        self.client: bytes | None = None
        self.answering_life = -1
        self.proved_life = -1
        self.is_spliced = False
        self.late: list[tuple[int, int, bytes]] = []
        self.follower.begin(0.0)

    # --- the replay channel ---

    def ask(self, question: AskReplay) -> None:
        self.drop()
        self.question = question

    def drop(self) -> None:
        """The connection of a question ends with it; what it still brings is late."""
        if self.question is not None and self.client in self.publisher.cursors.clients:
            message = self.publisher.cursors.message(self.client)
            if message is not None:
                self.late.append((self.question.ask, int.from_bytes(message[-2], "big", signed=True), message[-1]))
            self.publisher.cursors.drop(self.client)
        self.question = self.client = None

    @property
    def is_cut_off(self) -> bool:
        """A plain subscriber's network takes both its connections or none; an extended one's may take either."""
        return not self.has_extension and (self.connection is None or self.connection.is_broken)

    def serve(self, count: int, fault: str, now_s: float) -> None:
        """Take some messages of the open answer; a question reaches the publisher when its answer is first wanted."""
        for _ in range(count):
            question = self.question
            if question is None or self.is_cut_off:
                return
            if self.client is None:
                if fault == "lose":
                    self.client = b"lost"  # the question itself
                    return
                self.client = f"{self.name}{question.ask}".encode()
                self.answering_life = self.publisher.life
                is_read = self.has_extension or question.verb is None
                self.publisher.cursors.ask(
                    [self.client, b"", question.request.encode() if is_read else plain_request(2**63)]
                )
            self.publisher.fold()
            if self.client not in self.publisher.cursors.clients:
                return  # the publisher of that answer is gone, or a message was lost
            if fault == "cut":
                self.publisher.cursors.cut_short()
            self.take(question, self.client, fault, now_s)

    def take(self, question: AskReplay, client: bytes, fault: str, now_s: float) -> None:
        message = self.publisher.cursors.message(client)
        self.publisher.cursors.sent(client)
        if message is None or fault == "lose":
            return
        sequence, payload = int.from_bytes(message[-2], "big", signed=True), message[-1]
        if fault == "garble" and message[-2] == END_SEQ:
            payload = b"junk"
        for _ in range(2 if fault == "repeat" else 1):
            self.receive(question.ask, sequence, payload, now_s)

    def receive(self, ask: int, sequence: int, payload: bytes, now_s: float) -> None:
        verified = self.follower.cursor.counters.verified
        if sequence == int.from_bytes(END_SEQ, "big", signed=True):
            self.follower.answer_marked(ask, payload, now_s)
        else:
            self.follower.answered(ask, sequence, payload, now_s)
        if self.follower.cursor.counters.verified > verified:
            self.proved_life = self.answering_life
            self.is_spliced = False

    def receive_late(self, now_s: float) -> None:
        while self.late:
            self.receive(*self.late.pop(), now_s)

    # --- the live channel ---

    def connect(self, now_s: float) -> None:
        if self.connection is None:
            self.connection = Connection(self.publisher.life)
            self.follower.connected(now_s)

    def disconnect(self, now_s: float) -> None:
        if self.connection is not None:
            self.connection = None
            self.follower.disconnected(now_s)

    def deliver(self, count: int, fault: str, now_s: float) -> None:
        """Hand over live frames; without a fault they stay in the socket while nobody listens."""
        frames = self.connection.frames if self.connection is not None else deque()
        for _ in range(min(count, len(frames))):
            if fault == "none" and not self.follower.cursor.listening:
                return
            if fault == "reorder" and len(frames) > 1:
                frames[0], frames[1] = frames[1], frames[0]
            frame = frames.popleft()
            if fault == "repeat":
                frames.appendleft(frame)
            if fault != "lose":
                life, sequence, payload = frame
                self.is_spliced = self.is_spliced or life != self.proved_life
                self.follower.live(sequence, payload, now_s)

    # --- what it believes ---

    @property
    def state(self) -> StreamState:
        return self.follower.cursor.state

    @property
    def blocks(self) -> State:
        return frozenset((each, tier) for tier in Tier for each in self.view.blocks(0, tier))

    def check(self) -> None:
        """LIVE is not said of a wrong view.

        Unless a frame of another life came on its connection, behind a proxy: then for no longer than to the next
        proof. A publisher without the extension gives no proof: its proxies must hang up.
        """
        is_extended = self.follower.cursor.is_extended
        if self.state is not StreamState.LIVE or self.connection is None:
            return
        if self.is_spliced if is_extended else self.connection.was_restarted:
            return
        assert self.publisher.life or not self.follower.cursor.counters.splices, "an honest publisher is distrusted"
        life = self.proved_life if is_extended else self.connection.life
        last = self.follower.cursor.last_seq
        assert self.blocks == self.publisher.states[life, last], f"{self.name} is live at {last} and wrong"
