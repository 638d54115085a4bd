"""PlainPart: a publisher by the rules of vLLM and SGLang with its traffic and its readers, as one part of a world."""

from __future__ import annotations

import attrs

from worlds.plain_judge import PlainJudge
from worlds.plain_publisher import RingAnswers
from worlds.publisher_process import PublisherProcess
from worlds.stream_connection import ReaderNetwork, ReaderShape
from worlds.stream_part import JudgedReader, StreamPart
from worlds.timeline import BrokenPromise, Timeline
from worlds.world_counters import WorldCounters
from worlds.world_shape import StreamFault, StreamShape, draw_stream_shape

__all__ = ["PlainPart"]

_NOT_OF_A_PLAIN_STREAM: tuple[StreamFault, ...] = ("forge", "hidden restart", "truncate answers")
"""Without a digest a reader cannot see the first two, and a ROUTER that answers in one go is never in the middle."""

_WATCH_EVERY_S = 0.05

_RING_BYTES = 10**9
"""A ring has no bound in bytes."""

_LEAST_CAPACITY = 3
"""Of an answer in a storm: a reader compares the first batch, and continues with the others."""


def _plain_reader(window: int, shape: ReaderShape, network: ReaderNetwork) -> tuple[ReaderShape, ReaderNetwork]:
    """Return a reader without the extension.

    In a storm its answers may be larger than the high-water mark of the ROUTER. In a calm they are not: else it would
    never get the end marker.
    """
    capacity = max(_LEAST_CAPACITY, min(network.replay.capacity or window, window))
    replay = attrs.evolve(network.replay, loss=0.0, capacity=capacity)
    network = attrs.evolve(network, replay=replay, calm_capacity=window + 2)
    return attrs.evolve(shape, has_extension=False), network


def _plain(shape: StreamShape) -> StreamShape:
    """Return the shape of a stream whose publisher has only a ring of its newest batches."""
    publisher = attrs.evolve(shape.process.publisher, seq_base="zero", max_pending=1, max_bytes=_RING_BYTES)
    return attrs.evolve(
        shape,
        process=attrs.evolve(shape.process, publisher=publisher, has_floor=False, calls_idle=True, is_inline=False),
        readers=tuple(_plain_reader(publisher.window, *each) for each in shape.readers),
        faults=tuple(each for each in shape.faults if each not in _NOT_OF_A_PLAIN_STREAM),
        has_extension=False,
    )


class PlainPart:
    """A stream whose publisher has only a ring, and the judges of its readers.

    Args:
        timeline, counters: of the world.

    Attributes:
        stream: the publisher and its readers.
        answers: of the publisher.
    """

    __slots__ = ("_counters", "_judges", "_shape", "_timeline", "answers", "stream")

    def __init__(self, timeline: Timeline, counters: WorldCounters) -> None:
        self._timeline = timeline
        self._counters = counters
        self._shape = _plain(draw_stream_shape(timeline.random))
        self.stream = StreamPart(timeline, counters, self._shape, make_answers=self._make_answers)
        self._judges = {each: self._appoint(each) for each in self.stream.readers}
        self._watch_again()

    def _make_answers(self, process: PublisherProcess, counters: WorldCounters) -> RingAnswers:
        self.answers = RingAnswers(process, counters, size=self._shape.process.publisher.window)
        return self.answers

    def _appoint(self, each: JudgedReader) -> PlainJudge:
        return PlainJudge(
            each.reader,
            self.stream.process,
            self.answers,
            timeline=self._timeline,
            counters=self._counters,
            network=each.calm,
            policy=self._shape.readers[0][0].policy,
        )

    def _watch_again(self) -> None:
        """Check what holds always, storm or calm."""
        for each in self.stream.readers:
            self._judges[each].watch()
        self._timeline.after(_WATCH_EVERY_S, self._watch_again)

    @property
    def limit_s(self) -> float:
        """How long the recovery of its readers may take."""
        return self.stream.limit_s

    def begin_storm(self, ends_s: float) -> None:
        """Let faults happen until ``ends_s``."""
        self.stream.begin_storm(ends_s)

    def begin_calm(self) -> None:
        """Stop the faults. Traffic goes on."""
        self.stream.begin_calm()

    def join(self) -> None:
        """Let one more reader join."""
        self.stream.join()
        self._judges = {each: self._judges.get(each) or self._appoint(each) for each in self.stream.readers}

    def lose_frame(self) -> None:
        """Let every reader lose one batch, and get the one after it."""
        self.stream.lose_frame()

    def judge(self) -> None:
        """Check every promise that holds while the world is calm."""
        self.stream.judge()
        for each in self.stream.readers:
            self._judges[each].watch()
            self._judges[each].judge(each.judge.due_s)

    def begin_quiet(self) -> None:
        """Publish nothing any more."""
        self.stream.begin_quiet()

    def check_converged(self) -> None:
        """Check that every view has reached the present, and that those with the whole history have all of it.

        Raises:
            BrokenPromise: one has not.
        """
        process = self.stream.process
        for each in self.stream.readers:
            reader = each.reader
            if self._judges[each].run.is_complete or process.can_prove(reader):
                reader.check_converged()
            elif not reader.blocks <= process.actor.held:
                raise BrokenPromise("every view converges", f"{reader.name} has blocks that the publisher lacks")
            elif reader.follower.cursor.last_seq != process.actor.last_sequence:
                raise BrokenPromise("every view converges", f"{reader.name}: {reader.follower.cursor!r}")
