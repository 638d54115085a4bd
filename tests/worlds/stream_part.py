"""StreamPart: a publisher with its traffic and its readers, as one part of a world."""

from __future__ import annotations

from observability.kv_stream import StreamListener
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from worlds.faulty_disk import FaultyDisk
from worlds.publisher_process import AnswersFactory, PublisherProcess, SessionAnswers
from worlds.reader_judge import ReaderJudge
from worlds.stream_connection import ReaderNetwork, ReaderShape, StreamConnection
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import Timeline
from worlds.world_counters import WorldCounters
from worlds.world_shape import StreamFault, StreamShape, network_of_plain_reader

__all__ = ["JudgedReader", "StreamPart"]

_MAX_BURST = 60
"""Batches published between two instants."""

_UNREADABLE_SHARE = 0.1
"""Share of the streams whose last batch is unreadable."""

_SILENT_SHARE = 0.25
"""Share of the calms in which nothing is published."""

_LONGEST_FAULT_S = 1.5
"""A pause, a stall or a time without a publisher."""

_TOKENS = tuple(range(2**31, 2**31 + 3 * 1024))
"""Tokens of large blocks, five bytes each."""

_NO_TOKEN, _NO_HASH = 2**40, 2**70
"""Numbers that are too large."""


class JudgedReader:
    """A reader, its connection and its judge.

    Attributes:
        connection: of the reader.
        judge: of the reader.
        storm, calm: the reader's network with and without faults.
    """

    __slots__ = ("calm", "connection", "judge", "storm")

    def __init__(self, part: StreamPart, shape: ReaderShape, network: ReaderNetwork, *, is_calm: bool) -> None:
        self.storm, self.calm = network, network.without_faults()

        def judge(reader: SubscriberActor) -> ReaderJudge:
            self.judge = ReaderJudge(
                part.timeline, part.counters, part.process, reader, network=self.calm, policy=shape.policy
            )
            return self.judge

        self.connection = StreamConnection(
            part.timeline,
            part.process,
            shape,
            network=self.calm if is_calm else self.storm,
            judge=judge,
            listener=part.listener,
        )
        self.connection.open()

    @property
    def reader(self) -> SubscriberActor:
        """The reader."""
        return self.connection.reader


class StreamPart:
    """A publisher, its readers, and what happens to them.

    Args:
        timeline, counters: of the world.
        shape: of the stream.
        listener: receives every change of each reader's view; None without one.
        is_source: False for a stream whose batches come from elsewhere, as a relay's do.
        make_answers: how the publisher answers requests.

    Attributes:
        process: the publisher.
        readers: those that are connected now.
    """

    __slots__ = (
        "_blocks", "_is_publishing", "_is_source", "_joined", "_shape", "_storm_ends_s", "counters", "listener",
        "process", "readers", "timeline",
    )  # fmt: skip

    def __init__(
        self,
        timeline: Timeline,
        counters: WorldCounters,
        shape: StreamShape,
        *,
        listener: StreamListener | None = None,
        is_source: bool = True,
        make_answers: AnswersFactory = SessionAnswers,
    ) -> None:
        self.timeline = timeline
        self.counters = counters
        self.listener = listener
        self._shape = shape
        disk = FaultyDisk(random=timeline.random, faults=shape.disk, counters=counters.faults)
        self.process = PublisherProcess(
            timeline, shape.process, disk=disk, counters=counters, make_answers=make_answers
        )
        self._storm_ends_s = 0.0
        self._is_source = self._is_publishing = is_source
        self._joined: JudgedReader | None = None
        self.readers = [JudgedReader(self, each, network, is_calm=True) for each, network in shape.readers]
        if is_source:
            self._publish_later()

    # --- its traffic ---

    def _publish_later(self) -> None:
        rate = self._shape.traffic.rate_per_s
        self.timeline.after(self.timeline.random.expovariate(rate), self._publish_next)

    def _publish_next(self) -> None:
        if self._is_publishing:
            self._publish()
            self._publish_later()

    def _publish(self) -> None:
        events, share = self._draw_events(), self._shape.traffic.refused_share
        is_refused = share and self.timeline.random.random() < share
        self.process.publish(events, refused=(self._draw_refused(),) if is_refused else ())

    def _draw_events(self) -> tuple[KVCacheEvent, ...]:
        draw, traffic = self.timeline.random, self._shape.traffic
        if traffic.clear_share and draw.random() < traffic.clear_share:
            return (AllBlocksCleared(),)
        return tuple(self._draw_event() for _ in range(draw.choice((1, 1, 1, 2, 3))))

    def _draw_event(self) -> KVCacheEvent:
        draw = self.timeline.random
        first = draw.randrange(self._shape.traffic.num_blocks)
        hashes = tuple(range(first, first + draw.randint(1, 3)))
        medium = "CPU" if draw.random() < 0.2 else None
        if draw.random() < 0.4:
            return BlockRemoved(hashes, medium)
        size = self._shape.traffic.block_tokens
        tokens = hashes if size == 1 else _TOKENS[: size * len(hashes)]
        return BlockStored(hashes, first - 1 if first else None, tokens, size, None, medium)

    def _draw_refused(self) -> KVCacheEvent:
        """Draw an event that no reader accepts, about a block that may be cached."""
        block = self.timeline.random.randrange(self._shape.traffic.num_blocks)
        return self.timeline.random.choice(
            (
                BlockStored((block,), None, (_NO_TOKEN,), 1, None),
                BlockStored((block,), None, (block,), 0, None),
                BlockStored((block, block + 1), None, (block,), 1, None),
                BlockRemoved((_NO_HASH,)),
            )
        )

    # --- storms ---

    def begin_storm(self, ends_s: float) -> None:
        """Let faults happen until ``ends_s``."""
        self._storm_ends_s = ends_s
        if self._is_source and not self._is_publishing:
            self._is_publishing = True
            self._publish_later()
        for each in self.readers:
            each.connection.set_network(each.storm)
            each.judge.end()
        if self._shape.faults:
            self._break_later()

    def _break_later(self) -> None:
        delay_s = self.timeline.random.expovariate(self._shape.faults_per_s)
        if self.timeline.now_s + delay_s < self._storm_ends_s:
            self.timeline.after(delay_s, self._break_next)

    def _break_next(self) -> None:
        if self.readers:
            self._break(self.timeline.random.choice(self._shape.faults))
        self._break_later()

    def _draw_duration_s(self) -> float:
        """Draw how long a fault lasts. It ends with the storm."""
        return min(self.timeline.random.random() * _LONGEST_FAULT_S, max(0.0, self._storm_ends_s - self.timeline.now_s))

    def _break(self, fault: StreamFault) -> None:
        draw, process = self.timeline.random, self.process
        connection = draw.choice(self.readers).connection
        number = process.actor.stream.next_sequence
        match fault:
            case "disconnect":
                connection.cut()
            case "lose answer":
                connection.cut_answer()
            case "pause":
                connection.pause(self._draw_duration_s())
            case "pause in answer":
                connection.pauses_answer_until_s = self._storm_ends_s
                connection.cut()
            case "forge":
                if connection.reader.has_extension:  # others cannot distinguish a forged frame
                    for _ in range(draw.choice((1, 1, 20))):
                        connection.forge(number + draw.randint(0, 3), is_own_topic=True)
            case "other topic":
                for ahead in range(3):  # also the number that the reader expects
                    connection.forge(number + ahead, is_own_topic=False)
            case "burst":
                self._note("bursts")
                for _ in range(draw.randint(2, _MAX_BURST)):
                    self._publish()
            case "late thread":
                self.counters.faults["late threads"] += 1
                process.delay_thread(self._draw_duration_s())
            case _:
                if process.is_up:
                    self._break_process(fault)

    def _break_process(self, fault: StreamFault) -> None:
        process = self.process
        match fault:
            case "stall":
                self._note("stalls")
                process.stall(self._draw_duration_s())
            case "poison":
                self._note("unreadable batches")
                process.actor.send_poison()
            case "truncate answers":
                self._note("answers truncated")
                process.cut_answers()
            case "lose sockets":
                self._note("publisher: sockets destroyed")
                process.destroy_sockets()
            case "crash" | "restart":
                self._note(f"publisher: {fault}")
                process.crash(is_clean=fault == "restart")
                self.timeline.after(self._draw_duration_s(), self._restart)
            case _:
                self._note("publisher: hidden restart")
                for each in self.readers:
                    if each.reader.has_extension:
                        each.connection.hide_restart()
                    else:
                        each.connection.cut()
                process.crash(is_clean=False, is_hidden=True)
                self._restart()

    def _restart(self) -> None:
        self.process.restart(skew_s=-self._shape.set_back_s * self.timeline.random.random())

    def _note(self, kind: str) -> None:
        """Note a fault of the publisher, which may cost each reader a recovery."""
        self.counters.faults[kind] += 1
        self.timeline.record(kind)
        for each in self.readers:
            each.judge.excuse()

    # --- calm ---

    def begin_calm(self) -> None:
        """Stop the faults. Traffic goes on, unless the stream is silent in this calm."""
        happens = self.timeline.happens
        for each in self.readers:
            each.connection.set_network(each.calm)
            each.judge.begin()
        self._is_publishing = self._is_publishing and not happens(_SILENT_SHARE)
        is_given_up = self.process.actor.is_poisoned and happens(0.5)
        if self.process.is_running and (is_given_up or not self.process.actor.can_send):
            self.process.crash(is_clean=True)
            self._restart()

    def join(self) -> None:
        """Let one more reader join, in place of the one that joined before."""
        if self._joined is not None:
            self._joined.connection.close()
            self.readers.remove(self._joined)
        shape, network = self._shape.readers[0]
        name = f"joining {shape.name}"
        has_extension = self._shape.has_extension and self.timeline.random.random() < 0.5
        if not has_extension:
            network = network_of_plain_reader(network)
        self._joined = JudgedReader(
            self, ReaderShape(name=name, policy=shape.policy, has_extension=has_extension), network, is_calm=True
        )
        self._joined.judge.begin()
        self.readers.append(self._joined)

    def lose_frame(self) -> None:
        """Let every reader lose one batch, and get the one after it; in an empty stream, nothing is lost."""
        if not len(self.process.actor.stream):
            return
        for each in self.readers:
            each.judge.expect_repair()
            each.connection.loses_frames = True
        self.process.publish(self._draw_events())
        self.process.idle()
        for each in self.readers:
            each.connection.loses_frames = False
        self.process.publish(self._draw_events())
        self.process.idle()

    def judge(self) -> None:
        """Check every promise that holds while the world is calm."""
        self.process.check()
        for each in self.readers:
            each.judge.judge()

    # --- quiet ---

    def begin_quiet(self) -> None:
        """Publish nothing any more, after an unreadable batch in some streams."""
        self._is_publishing = False
        if self._is_source and self.timeline.happens(_UNREADABLE_SHARE):
            self.process.actor.send_poison()
        self.process.idle()

    def check_converged(self) -> None:
        """Check that every view is the publisher's state."""
        for each in self.readers:
            each.reader.check_converged()

    @property
    def limit_s(self) -> float:
        """How long the recovery of its readers may take."""
        return max((each.judge.limit_s for each in self.readers), default=0.0)
