"""RingAnswers: a publisher by the rules of vLLM and SGLang, on the time line.

It numbers its batches, keeps the newest ones in a ring, and answers a request with those from the requested number on
and an end marker. It has no epoch, digest or snapshot, reads an extended request as a very large number, and its ROUTER
drops what a client's queue cannot take, the end marker included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest
from worlds.publisher_actor import LiveFrame
from worlds.publisher_process import Peer, PublisherProcess
from worlds.subscriber_actor import SubscriberActor
from worlds.world_counters import WorldCounters

__all__ = ["BatchRing", "RingAnswers"]

_NO_SUCH_NUMBER = 2**63
"""What it reads from an extended request."""


class BatchRing:
    """The newest batches of a publisher, as it sent them.

    Args:
        size: batches that it keeps.
    """

    __slots__ = ("_frames",)

    def __init__(self, size: int) -> None:
        self._frames: deque[LiveFrame] = deque(maxlen=size)

    def append(self, frame: LiveFrame) -> None:
        """Keep one more batch."""
        self._frames.append(frame)

    def clear(self) -> None:
        """Forget all batches: the publisher's process has ended."""
        self._frames.clear()

    @property
    def first(self) -> int | None:
        """The oldest number; None without a batch."""
        return self._frames[0].sequence if self._frames else None

    def answer(self, request: ReplayRequest) -> list[tuple[bytes, bytes]]:
        """Return number and payload of each batch from the requested number on, and the end marker."""
        start = request.start if request.verb is None else _NO_SUCH_NUMBER
        batches = [(frame.frames[1], frame.frames[2]) for frame in self._frames if frame.sequence >= start]
        return [*batches, (END_SEQ, b"")]


class RingAnswers:
    """Answers from a ring of the newest batches, in one go. What a client cannot take is dropped.

    Args:
        process: the publisher.
        counters: of the world.
        size: batches of the ring.

    Attributes:
        sent: the payload of every batch ever sent, by epoch and number: what is true, for the judges.
    """

    __slots__ = ("_counters", "_process", "_ring", "sent")

    is_open = False

    def __init__(self, process: PublisherProcess, counters: WorldCounters, *, size: int) -> None:
        self._process = process
        self._counters = counters
        self._ring = BatchRing(size)
        self.sent: dict[tuple[int | None, int], bytes] = {}

    def on_frame(self, frame: LiveFrame) -> None:
        """Keep one more batch."""
        self._ring.append(frame)
        self.sent[frame.epoch, frame.sequence] = frame.frames[2]

    def on_publisher_gone(self) -> None:
        """Forget all batches."""
        self._ring.clear()

    def make_server(self, clock: Callable[[], float]) -> None:
        """Nothing stays open."""

    def cut(self) -> None:
        """Nothing stays open."""

    @property
    def first(self) -> int | None:
        """The oldest number in the ring; None without a batch."""
        return self._ring.first

    def can_prove(self, reader: SubscriberActor) -> bool:
        """Return whether ``reader`` can have the whole history: the ring still has the first batch."""
        return self._process.actor.can_be_live(has_extension=reader.has_extension) and self.first == 0

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Answer with the batches from the requested number on, and an end marker."""
        del has_extension
        for message in self._ring.answer(request):
            if not peer.can_take(client):
                self._counters.faults["answers over the high-water mark"] += 1
            else:
                self._counters.counts["messages replayed"] += 1
                peer.take(client, (client, b"", *message))
