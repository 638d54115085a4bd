"""A publisher on real sockets whose faults are attributes, for tests of subscribers."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

import zmq

from scheduler_components import EventBatch, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events.replay_messages import END_SEQ
from scheduler_components.testing.interfaces import Frames

__all__ = ["ScriptedPublisher"]

P = TypeVar("P", bound="ScriptedPublisher")


class ScriptedPublisher:
    """A ``BoundPublisher`` with PUB and ROUTER as in SGLang and vLLM, without a thread: ``idle`` serves replays.

    For other faults, subclass it and override ``live_messages`` or ``answer``.

    Attributes:
        framing: of replays, ``seed`` or ``topic``.
        loses_live: number and keep live messages without sending them.
        answers, ends_answers: whether replay requests get a reply, and whether the reply ends.
        window: number of the newest batches in a replay; None for all.
        sent: payloads of this epoch by number.
        asked: start numbers of the replay requests.
        num_subscribers: current subscriptions, counted by ``idle``. (The socket is an XPUB, which reports them.)
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, topic: str, dialect: str, framing: str) -> None:
        self.topic, self.framing = topic.encode(), framing
        self.encoder = BatchEncoder(dialect)
        self.loses_live = False
        self.answers = self.ends_answers = True
        self.window: int | None = None
        self.sent: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.num_subscribers = 0
        self._context = context
        self._pub, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)  # noqa: SCH008 binds when constructed
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 1000)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind("tcp://127.0.0.1:*")  # noqa: SCH008 the fake binds when constructed, as publishers do
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str | None = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    @classmethod
    def open(cls: type[P], *, topic: str = "", dialect: str = "array", framing: str = "seed") -> P:
        """Open a publisher on free loopback ports; close it with ``shutdown`` or a ``with`` block."""
        return cls(zmq.Context(), topic=topic, dialect=dialect, framing=framing)

    def __enter__(self: P) -> P:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def next_sequence(self) -> int:
        return max(self.sent, default=-1) + 1

    def publish(self, events: EventBatch) -> None:
        """Number, keep and send one batch."""
        sequence = self.next_sequence
        payload = self.encoder.encode(events, 0)
        self.sent[sequence] = payload
        if not self.loses_live:
            for frames in self.live_messages(sequence, payload):
                self._pub.send_multipart(frames)

    def publish_events(self, *events: KVCacheEvent) -> int:
        """Publish events as one batch, and return its number."""
        sequence = self.next_sequence
        self.publish(KVEventBatch(float(sequence + 1), events))
        return sequence

    def send_raw(self, *frames: bytes) -> None:
        """Send any frames on the PUB socket."""
        self._pub.send_multipart(frames)

    def restart(self) -> None:
        """Start a new epoch at number 0 with an empty replay buffer."""
        self.sent.clear()

    def live_messages(self, sequence: int, payload: bytes) -> list[Frames]:
        """Return the live messages of one batch."""
        return [(self.topic, sequence.to_bytes(8, "big"), payload)]

    def answer(self, request: bytes) -> list[Frames]:
        """Return the messages of one reply, without client and delimiter."""
        start = int.from_bytes(request, "big")
        middle = (self.topic,) if self.framing == "topic" else ()
        kept = list(self.sent.items())[-self.window if self.window else 0 :]
        messages = [(*middle, number.to_bytes(8, "big"), payload) for number, payload in kept if number >= start]
        return [*messages, (*(b"" for _ in middle), END_SEQ, b"")] if self.ends_answers else messages

    def idle(self) -> None:
        """Read subscriptions, and reply to the received replay requests."""
        while self._pub.poll(0):
            self.num_subscribers += 1 if self._pub.recv()[:1] == b"\x01" else -1
        while self._router.poll(0):
            client, _, request = self._router.recv_multipart()
            self.asked.append(int.from_bytes(request[:8], "big"))
            for frames in self.answer(request) if self.answers else ():
                self._router.send_multipart((client, b"", *frames))

    def shutdown(self) -> None:
        """Close both sockets; safe to call twice."""
        self._pub.close()
        self._router.close()
        self._context.term()
