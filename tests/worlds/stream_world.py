"""StreamPart: a publisher with its traffic and its readers, as one part of a world."""

from __future__ import annotations

import random
from typing import Literal, TypeAlias, get_args

import attrs

from observability.kv_stream import FollowPolicy, StreamListener
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components.kv_events.live_sender import LARGE_PAYLOAD_BYTES
from worlds.faults import DiskFaults, FaultyDisk, LinkQuality
from worlds.publisher_actor import PublisherShape
from worlds.publisher_process import AnswersFactory, ProcessShape, PublisherProcess, SessionAnswers
from worlds.reader_judge import ReaderJudge
from worlds.stream_connection import ReaderNetwork, ReaderShape, StreamConnection, least_capacity
from worlds.subscriber_actor import SubscriberActor
from worlds.timeline import Timeline, WorldCounters

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


StreamFault: TypeAlias = Literal[
    "disconnect", "lose answer", "pause", "pause in answer", "forge", "other topic", "stall", "crash", "restart",
    "hidden restart", "poison", "truncate answers", "burst", "late thread", "lose sockets",
]  # fmt: skip
"""What happens to a stream at random times."""

STREAM_FAULTS: tuple[StreamFault, ...] = get_args(StreamFault)

_BUSY_SHARE = 0.1
"""Share of the streams whose publisher appends some batches while one answer is sent: a large snapshot in many chunks,
over a link that is a few times as fast as the publisher."""

_CHUNK_BYTES = 256 * 1024
"""As of a publisher: the snapshot of a world's cache is one chunk."""

_LONG_WINDOW = 16
"""Window of a publisher that may send many chunks: with a shorter one it would have to cut the answer."""

POLICY = FollowPolicy(
    answer_timeout_s=1.0,
    retry_min_s=0.1,
    retry_max_s=0.5,
    request_interval_s=0.2,
    probe_interval_s=1.0,
    dead_after_s=5.0,
)
"""Shorter times than the defaults, so that a world has more recoveries in a second."""


@attrs.frozen(kw_only=True)
class TrafficShape:
    """What a cache publishes.

    Attributes:
        rate_per_s: batches per second, on average.
        num_blocks: blocks that it may hold.
        clear_share: share of the batches that clear the cache.
        refused_share: share of the batches that have an event which no reader accepts.
        block_tokens: tokens of a block; with 1,024 a batch has up to 46 KB.
    """

    rate_per_s: float = 30.0
    num_blocks: int = 32
    clear_share: float = 0.0
    refused_share: float = 0.0
    block_tokens: int = 1


@attrs.frozen(kw_only=True)
class StreamShape:
    """A publisher, its readers, and their faults.

    Attributes:
        process: the publisher.
        traffic: what it publishes.
        readers: each with its network in a storm; faults on its links are part of it.
        faults: what happens at random times in a storm.
        faults_per_s: how often.
        disk: of the publisher's machine.
        set_back_s: how far its wall clock may be set back by a restart.
        has_extension: the publisher has the extension; readers may still do without.
    """

    process: ProcessShape
    traffic: TrafficShape
    readers: tuple[tuple[ReaderShape, ReaderNetwork], ...]
    faults: tuple[StreamFault, ...]
    faults_per_s: float
    disk: DiskFaults
    set_back_s: float = 0.0
    has_extension: bool = True


def draw_stream_shape(draw: random.Random, *, name: str = "reader", num_readers: int | None = None) -> StreamShape:
    """Draw a stream.

    Args:
        draw: of the world.
        name: of its readers, before their number.
        num_readers: None draws it.
    """
    is_busy = draw.random() < _BUSY_SHARE
    seq_base = draw.choice(("zero", "clock"))
    has_floor = seq_base == "clock" and draw.random() < 0.7
    window = draw.randint(48, 96) if is_busy else _draw_size(draw, 1, 128)
    block_tokens = 1_024 if draw.random() < 0.1 and not is_busy else 1
    max_bytes = draw.choice((10**6, 10**6, _draw_size(draw, 300, 50_000)))
    chunk_bytes = draw.choice((100 if window >= _LONG_WINDOW and max_bytes == 10**6 else 600, _CHUNK_BYTES))
    publisher = PublisherShape(
        window=window,
        max_bytes=10**6 if is_busy else max_bytes,
        max_pending=_draw_size(draw, 1, 64),
        chunk_bytes=40 if is_busy else chunk_bytes if block_tokens == 1 else _CHUNK_BYTES,
        seq_base=seq_base,
        large_bytes=draw.choice((LARGE_PAYLOAD_BYTES, LARGE_PAYLOAD_BYTES, LARGE_PAYLOAD_BYTES if is_busy else 100)),
    )
    calls = draw.choice(("publish", "publish", "publish", "idle", "inline"))
    process = ProcessShape(
        publisher=publisher,
        has_floor=has_floor,
        calls_idle=calls == "idle",
        is_inline=calls == "inline",
        repairs_floor=draw.random() < 0.5,
    )
    traffic = TrafficShape(
        rate_per_s=100.0 if is_busy else 10 ** draw.uniform(0.3, 2.0),
        num_blocks=160 if is_busy else _draw_size(draw, 4, 128),
        clear_share=draw.choice((0.0, 0.0, 0.01, 0.05)),
        refused_share=draw.choice((0.0, 0.0, 0.0, 0.1)),
        block_tokens=block_tokens,
    )
    count = draw.randint(1, 3) if num_readers is None else num_readers
    readers = tuple(_draw_reader(draw, f"{name} {number}", is_busy=is_busy) for number in range(count))
    return StreamShape(
        process=process,
        traffic=traffic,
        readers=readers,
        faults=tuple(each for each in STREAM_FAULTS if draw.random() < 0.4),
        faults_per_s=10 ** draw.uniform(0.0, 0.9),
        disk=DiskFaults(lies=draw.choice((0.0, 0.5, 0.5)), lost=0.5, torn=1.0),
        set_back_s=draw.choice((0.0, 100.0, 100.0) if has_floor else (0.0, 0.0, 100.0)),
    )


def _draw_size(draw: random.Random, least: int, most: int) -> int:
    """Draw a size, small ones as often as large ones."""
    return min(most, int(least * (most / least + 1) ** draw.random()))


def _draw_reader(draw: random.Random, name: str, *, is_busy: bool) -> tuple[ReaderShape, ReaderNetwork]:
    has_extension, network = draw.random() < 0.7, _draw_network(draw)
    if is_busy:
        capacity = least_capacity(network.replay.max_latency_s) * 3 // 2
        network = attrs.evolve(network, replay=attrs.evolve(network.replay, capacity=capacity))
    shape = ReaderShape(name=name, policy=POLICY, has_extension=has_extension)
    return shape, network if has_extension else network_of_plain_reader(network)


def network_of_plain_reader(network: ReaderNetwork) -> ReaderNetwork:
    """Return the network for a reader without the extension.

    TCP loses the rest of an answer, not a message inside it. Nothing but a digest would show such a loss.
    """
    return attrs.evolve(network, replay=attrs.evolve(network.replay, loss=0.0))


def _draw_network(draw: random.Random) -> ReaderNetwork:
    latency_s = 10 ** draw.uniform(-4, -1.3)

    def rate(share: float) -> float:
        return 10 ** draw.uniform(-3, -0.7) if draw.random() < share else 0.0

    def rate_in_answers(share: float) -> float:
        return 10 ** draw.uniform(-2, -0.5) if draw.random() < share else 0.0

    live = LinkQuality(
        latency_s=latency_s,
        jitter_s=latency_s * draw.random(),
        loss=rate(0.5),
        duplication=rate(0.3),
        reordering=rate(0.3),
        capacity=draw.choice((None, None, _draw_size(draw, 8, 256))),
    )
    replay = LinkQuality(
        latency_s=latency_s,
        jitter_s=latency_s * draw.random(),
        loss=rate_in_answers(0.4),
        duplication=rate_in_answers(0.2),
        capacity=_draw_size(draw, 1, 64),
    )
    return ReaderNetwork(
        live=live,
        replay=replay,
        garbling=rate_in_answers(0.2),
        alteration=rate_in_answers(0.2),
        lateness=draw.choice((0.0, 0.0, 0.5)),
    )
