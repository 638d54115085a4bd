"""A publisher on real sockets whose every fault is an attribute: what subscribers are tested against."""

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
    """PUB and ROUTER as SGLang and vLLM have them, without a thread: replays are served by ``idle``.

    A ``BoundPublisher``; ``open`` opens one. For faults of your own, subclass it and override ``live_messages`` or
    ``answer``.

    Attributes:
        framing: of replays, ``seed`` or ``topic``.
        loses_live: live messages are numbered and kept, and not sent.
        answers, ends_answers: whether replay requests get an answer, and whether it ends.
        window: the newest batches that a replay has; None for all.
        sent: number -> payload of this life.
        asked: numbers that replays were asked from.
        num_subscribers: topics subscribed to now; counted by ``idle``. (The socket is an XPUB: a PUB that says who
            subscribes.)
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
        self._pub, self._router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)  # noqa: SCH008 listens once made
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 1000)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind("tcp://127.0.0.1:*")  # noqa: SCH008 a publisher listens once made, and so does its fake
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str | None = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    @classmethod
    def open(cls: type[P], *, topic: str = "", dialect: str = "array", framing: str = "seed") -> P:
        """Open one on loopback ports that the system chooses; close it with ``shutdown`` or a ``with`` block."""
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
        """Publish events as one batch; returns its number."""
        sequence = self.next_sequence
        self.publish(KVEventBatch(float(sequence + 1), events))
        return sequence

    def send_raw(self, *frames: bytes) -> None:
        """Send any frames on the PUB socket."""
        self._pub.send_multipart(frames)

    def restart(self) -> None:
        """Forget this life: the next number is 0, and the window is empty."""
        self.sent.clear()

    def live_messages(self, sequence: int, payload: bytes) -> list[Frames]:
        """The live messages of one batch."""
        return [(self.topic, sequence.to_bytes(8, "big"), payload)]

    def answer(self, request: bytes) -> list[Frames]:
        """The messages of one replay answer, after client and delimiter."""
        start = int.from_bytes(request, "big")
        middle = (self.topic,) if self.framing == "topic" else ()
        kept = list(self.sent.items())[-self.window if self.window else 0 :]
        messages = [(*middle, number.to_bytes(8, "big"), payload) for number, payload in kept if number >= start]
        return [*messages, (*(b"" for _ in middle), END_SEQ, b"")] if self.ends_answers else messages

    def idle(self) -> None:
        """Take in subscriptions, and answer the replay requests that have come."""
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
