"""The relay: subscribers of all sources and the sinks of all streams, polled by one thread.

A source that does not answer is asked again and again, on another thread, while the others are relayed. A worker that
comes back at other addresses is dialled there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import attrs
import msgspec

from observability.kv_stream import (
    CountingView,
    FollowPolicy,
    StreamState,
    StreamStats,
    Subscriber,
    open_subscriber,
    wait_any,
)
from observability.relay.passthrough import PassthroughDecoder
from observability.relay.source import RelaySource
from observability.relay.stream import RelayedStream, RelaySink, RelaySinkFactory, SourceListener
from scheduler_components import ComponentError, PublisherStats, kv_events_server_info
from scheduler_components.kv_events import (
    BatchDecoder,
    CurveClientKeys,
    KVEventsConfig,
    ListeningStream,
    StreamAddress,
    ZmqEventPublisher,
)

__all__ = ["RelayConfig", "RelayedStreamStats", "SourceStats", "ZmqRelay", "ZmqSinkFactory", "open_relay"]

_FIND_TIMEOUT_S = 5.0
_FIND_EVERY_S = 2.0
"""A worker that starts again is found within this; one small page per so much time costs it nothing."""


@attrs.frozen(kw_only=True)
class RelayConfig:
    """What to relay.

    Attributes:
        sources: all of one worker.
        keys: for sources that ask clients for keys.
        policy: how long to wait for what.
    """

    sources: tuple[RelaySource, ...]
    keys: CurveClientKeys | None = None
    policy: FollowPolicy = attrs.field(factory=FollowPolicy)


class SourceStats(msgspec.Struct, frozen=True):
    """One source at one moment.

    Attributes:
        source: as a person gave it.
        problem: why it is not followed; empty where it is.
        streams: by rank; empty where it is not followed.
    """

    source: str
    problem: str
    streams: Mapping[int, StreamStats]


class RelayedStreamStats(msgspec.Struct, frozen=True):
    """One published stream at one moment.

    Attributes:
        rank: its number.
        state: that of the source that is known least.
        is_whole: every source is live.
        num_sources: sources that it is made of, those that do not answer included.
        block_size: tokens per block as they were last seen, None before.
        publisher: the counters of where it is published.
    """

    rank: int
    state: StreamState
    is_whole: bool
    num_sources: int
    block_size: int | None
    publisher: PublisherStats


@dataclass(slots=True)
class _Followed:
    """A source and how it is followed; ``addresses`` is empty until it was found."""

    source: RelaySource
    problem: str = ""
    addresses: tuple[StreamAddress, ...] = ()
    subscriber: Subscriber | None = None
    search: Future[tuple[StreamAddress, ...]] | None = None

    @property
    def is_settled(self) -> bool:
        """True while there is no reason to ask where its streams are."""
        if self.subscriber is None:
            return False
        positions = self.subscriber.positions().values()
        lost = (StreamState.CONNECTING, StreamState.DEAD)
        return not self.source.url or not any(position.state in lost for position in positions)


class ZmqSinkFactory:
    """Publishers of one configuration, one per rank; see ``RelaySinkFactory``."""

    def __init__(self, settings: KVEventsConfig) -> None:
        self._settings = settings
        self._publishers: dict[int, ZmqEventPublisher] = {}

    @property
    def dialect(self) -> str:
        """What the publishers write."""
        return self._settings.dialect

    def open(self, rank: int) -> RelaySink:
        """Open the publisher of one rank, at the settings' ports + rank."""
        publisher = self._publishers[rank] = ZmqEventPublisher(rank, config=self._settings)
        publisher.set_upstream_state(StreamState.CONNECTING.value)  # nobody shall take an empty stream for whole
        return publisher

    def server_info(self, block_size: int | None, num_streams: int) -> dict[str, object]:
        """Describe the streams, with the ports that the system gave."""
        bound = [
            ListeningStream.parse(rank, publisher.endpoint, replay=publisher.replay_endpoint)
            for rank, publisher in tuple(self._publishers.items())
            if publisher.endpoint.startswith("tcp://")
        ]
        # The descriptor asks for a size; where none has been seen yet, it is taken out again.
        info = kv_events_server_info(self._settings, block_size=block_size or 1, dp_size=num_streams, publishers=bound)
        described = info["kv_events"]
        return info if block_size or not isinstance(described, dict) else info | {"kv_events": _unsized(described)}


def _unsized(described: dict[str, object]) -> dict[str, object]:
    return described | {"block_size": None}


@dataclass(slots=True, kw_only=True)
class ZmqRelay:
    """Made by ``open_relay``. ``poll`` belongs to one thread, which also closes; the rest may be asked from any.

    Attributes:
        sinks: where the streams go.
        report: called with one sentence for people, whenever a source is lost or found.
    """

    config: RelayConfig
    sinks: RelaySinkFactory
    report: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    streams: dict[int, RelayedStream] = field(default_factory=dict)
    _followed: list[_Followed] = field(default_factory=list)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=4, thread_name_prefix="kv-relay-search")
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _look_at_s: float = 0.0

    def __enter__(self) -> ZmqRelay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send what is pending, close every socket and stop every thread. Safe to call twice."""
        with self._lock:
            for followed in self._followed:
                if followed.subscriber is not None:
                    followed.subscriber.close()
            for stream in self.streams.values():
                stream.sink.shutdown()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- following ---

    def begin(self) -> None:
        """Look for every source once, and follow those that answer.

        Raises:
            ConfigError, StartError: a sink cannot be opened.
        """
        self._followed = [_Followed(source) for source in self.config.sources]
        for followed in self._followed:
            self._search(followed)
        for key, followed in enumerate(self._followed):
            assert followed.search is not None
            followed.search.exception()  # waits for it
            self._take_search(key, followed)

    def poll(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for news of any source, and relay what has come."""
        subscribers = [each.subscriber for each in self._followed if each.subscriber is not None]
        has_input = wait_any(subscribers, timeout_s)
        with self._lock:
            for subscriber in subscribers:
                subscriber.drain()
            for stream in self.streams.values():
                stream.flush()
            if not has_input or self.clock() >= self._look_at_s:
                self._look()

    def _look(self) -> None:
        """Ask after sources that are not there, and follow those that answered."""
        now_s = self.clock()
        is_due = now_s >= self._look_at_s
        if is_due:
            self._look_at_s = now_s + _FIND_EVERY_S
        for key, followed in enumerate(self._followed):
            if followed.search is not None and followed.search.done():
                try:
                    self._take_search(key, followed)
                except ComponentError as error:  # no sink for a rank that was not there before
                    self._set_problem(followed, str(error))
            if is_due and followed.search is None and not followed.is_settled:
                self._search(followed)

    def _search(self, followed: _Followed) -> None:
        followed.search = self._threads.submit(followed.source.find, timeout_s=_FIND_TIMEOUT_S)

    def _take_search(self, key: int, followed: _Followed) -> None:
        search, followed.search = followed.search, None
        assert search is not None
        try:
            addresses = search.result()
        except ComponentError as error:
            if followed.subscriber is None:
                self._set_problem(followed, str(error))
            return
        if followed.subscriber is None or addresses != followed.addresses:
            self._follow(key, followed, addresses)

    def _follow(self, key: int, followed: _Followed, addresses: tuple[StreamAddress, ...]) -> None:
        """Follow a source at ``addresses``, and no more where it was."""
        ranks = sorted(address.rank for address in addresses)
        for rank in ranks:
            if rank not in self.streams:
                self.streams[rank] = RelayedStream(rank, self.sinks.open(rank))
        if followed.subscriber is not None:
            followed.subscriber.close()
            followed.subscriber = None
        followed.addresses = addresses
        self._share_sources()
        for rank in ranks:
            stream = self.streams[rank]
            stream.publish(stream.merger.on_source_lost(key), stream.wall_clock())
        for stream in self.streams.values():
            stream.send_upstream_state()
        followed.subscriber = open_subscriber(
            addresses,
            policy=self.config.policy,
            listener=SourceListener(key, self.streams),
            keys=self.config.keys,
            view=CountingView(),
            new_decoder=PassthroughDecoder if self.sinks.dialect == "native" else BatchDecoder,
        )
        self._set_problem(followed, "")

    def _share_sources(self) -> None:
        """Each stream waits for every source of its rank, and for those of which nobody knows the ranks yet."""
        for rank, stream in self.streams.items():
            for key, followed in enumerate(self._followed):
                if not followed.addresses or any(address.rank == rank for address in followed.addresses):
                    stream.merger.add_source(key)
                else:
                    stream.publish(stream.merger.remove_source(key), stream.wall_clock())

    def _set_problem(self, followed: _Followed, problem: str) -> None:
        if problem == followed.problem:
            return
        followed.problem = problem
        self.report(
            f"{followed.source.text} is not relayed: {problem}" if problem else f"{followed.source.text} is found"
        )

    # --- what others see ---

    def source_stats(self) -> Sequence[SourceStats]:
        """Each source, in the order in which they were given."""
        with self._lock:
            return [
                SourceStats(followed.source.text, followed.problem, self._streams_of(key, followed))
                for key, followed in enumerate(self._followed)
            ]

    def _streams_of(self, key: int, followed: _Followed) -> dict[int, StreamStats]:
        """The subscriber keeps no block: how many its source holds, the merger knows."""
        if followed.subscriber is None:
            return {}
        return {
            rank: msgspec.structs.replace(stats, blocks_held=self.streams[rank].merger.num_blocks(key))
            for rank, stats in followed.subscriber.stats().items()
        }

    def stream_stats(self) -> Sequence[RelayedStreamStats]:
        """Each published stream, by rank."""
        with self._lock:
            return [
                RelayedStreamStats(
                    rank=rank,
                    state=stream.merger.state,
                    is_whole=stream.merger.upstream is None,
                    num_sources=stream.merger.num_sources,
                    block_size=stream.block_size,
                    publisher=stream.sink.stats(),
                )
                for rank, stream in sorted(self.streams.items())
            ]

    def followed(self) -> Iterator[tuple[str, StreamStats]]:
        """Each stream that is followed, with the name of its source; for ``RelayCollector``."""
        for source in self.source_stats():
            yield from ((source.source, stats) for stats in source.streams.values())

    def relayed(self) -> Iterator[tuple[int, RelayedStreamStats]]:
        """Each published stream, by its rank; for ``RelayCollector``."""
        yield from ((stats.rank, stats) for stats in self.stream_stats())


def open_relay(config: RelayConfig, *, sinks: RelaySinkFactory, report: Callable[[str], None]) -> ZmqRelay:
    """Follow every source that answers, and publish; use it in a ``with`` block, or close it.

    A source that does not answer is said, and asked again every few seconds.

    Args:
        config: what to relay.
        sinks: where the streams go.
        report: called with one sentence for people.

    Raises:
        ConfigError, StartError: a sink cannot be opened.
    """
    relay = ZmqRelay(config=config, sinks=sinks, report=report)
    try:
        relay.begin()
    except BaseException:
        relay.close()
        raise
    return relay
