"""RingAnswers: a publisher by the rules of vLLM and SGLang, on the time line.

It numbers its batches, keeps the newest ones in a ring, and answers a request with those from the requested number on
and an end marker. It has no epoch, digest or snapshot, reads an extended request as a very large number, and its ROUTER
drops what a client's queue cannot take, the end marker included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import attrs

from observability.simulation.publisher_actor import LiveFrame
from observability.simulation.publisher_process import Peer, PublisherProcess
from observability.simulation.stream_connection import ReaderNetwork, ReaderShape
from observability.simulation.stream_part import StreamPart
from observability.simulation.subscriber_actor import SubscriberActor
from observability.simulation.timeline import BrokenPromise, Timeline
from observability.simulation.world_counters import WorldCounters
from observability.simulation.world_shape import StreamFault, draw_stream_shape
from scheduler_components.kv_events.replay_messages import END_SEQ, ReplayRequest

__all__ = ["PlainPart", "RingAnswers"]

_NO_SUCH_NUMBER = 2**63
"""What it reads from an extended request."""

_NOT_OF_A_PLAIN_STREAM: tuple[StreamFault, ...] = ("forge", "hidden restart", "truncate answers")
"""Without a digest a reader cannot see the first two, and a ROUTER that answers in one go is never in the middle."""


class RingAnswers:
    """Answers from a ring of the newest batches, in one go. What a client cannot take is dropped.

    Args:
        process: the publisher.
        counters: of the world.
    """

    __slots__ = ("_counters", "_frames", "_process")

    is_open = False

    def __init__(self, process: PublisherProcess, counters: WorldCounters, *, size: int) -> None:
        self._process = process
        self._counters = counters
        self._frames: deque[LiveFrame] = deque(maxlen=size)

    def on_frame(self, frame: LiveFrame) -> None:
        """Keep one more batch."""
        self._frames.append(frame)

    def on_publisher_gone(self) -> None:
        """Forget all batches."""
        self._frames.clear()

    def make_server(self, clock: Callable[[], float]) -> None:
        """Nothing stays open."""

    def cut(self) -> None:
        """Nothing stays open."""

    @property
    def has_whole_history(self) -> bool:
        """True while the first batch is still there."""
        return bool(self._frames) and self._frames[0].sequence == 0

    def can_prove(self, reader: SubscriberActor) -> bool:
        """Return whether ``reader`` can have the whole history: the ring still has the first batch."""
        return self._process.actor.can_be_live(has_extension=reader.has_extension) and self.has_whole_history

    def receive(self, client: bytes, request: ReplayRequest, peer: Peer, *, has_extension: bool) -> None:
        """Answer with the batches from the requested number on, and an end marker."""
        del has_extension
        start = request.start if request.verb is None else _NO_SUCH_NUMBER
        batches = [(frame.frames[1], frame.frames[2]) for frame in self._frames if frame.sequence >= start]
        for message in (*batches, (END_SEQ, b"")):
            if not peer.can_take(client):
                self._counters.faults["answers over the high-water mark"] += 1
            else:
                self._counters.counts["messages replayed"] += 1
                peer.take(client, (client, b"", *message))


def _plain_reader(window: int, shape: ReaderShape, network: ReaderNetwork) -> tuple[ReaderShape, ReaderNetwork]:
    """Return a reader without the extension, whose queue takes a whole answer: else it never gets the end marker."""
    replay = attrs.evolve(network.replay, loss=0.0, capacity=window + 2)
    return attrs.evolve(shape, has_extension=False), attrs.evolve(network, replay=replay)


class PlainPart(StreamPart):
    """A plain publisher, its traffic and its readers.

    A view without the whole history is PARTIAL. It has no block that the publisher does not hold.
    """

    __slots__ = ()

    def __init__(self, timeline: Timeline, counters: WorldCounters) -> None:
        shape = draw_stream_shape(timeline.random)
        publisher = attrs.evolve(shape.process.publisher, seq_base="zero", max_pending=1)
        shape = attrs.evolve(
            shape,
            process=attrs.evolve(shape.process, publisher=publisher, has_floor=False, calls_idle=True, is_inline=False),
            readers=tuple(_plain_reader(publisher.window, *each) for each in shape.readers),
            faults=tuple(each for each in shape.faults if each not in _NOT_OF_A_PLAIN_STREAM),
            has_extension=False,
        )
        super().__init__(timeline, counters, shape, make_answers=partial(RingAnswers, size=publisher.window))

    def join(self) -> None:
        """Let one more reader join. Nothing bounds what it receives: each request may get the whole ring."""
        super().join()
        self.readers[-1].judge.excuse()

    def judge(self) -> None:
        """Check every promise that holds while the world is calm."""
        super().judge()
        for each in self.readers:
            self._check_no_stale_blocks(each.reader)

    def _check_no_stale_blocks(self, reader: SubscriberActor) -> None:
        actor = self.process.actor
        if reader.state == "partial" and reader.is_connected and reader.epoch == actor.epoch:
            true = actor.states.get((actor.epoch, reader.follower.cursor.last_seq), frozenset())
            if not reader.blocks <= true:
                raise BrokenPromise("a PARTIAL view has no stale block", f"{reader.name}: {reader.blocks - true}")

    def check_converged(self) -> None:
        """Check that every view with the whole history is the publisher's state, and others are a part of it."""
        actor = self.process.actor
        for each in self.readers:
            reader = each.reader
            if self.process.can_prove(reader) or reader.state == "live":
                reader.check_converged()
            elif not reader.blocks <= actor.held or reader.follower.cursor.last_seq != actor.stream.next_sequence - 1:
                raise BrokenPromise("every view converges", f"{reader.name}: {reader.follower.cursor!r}")
