"""The relay: subscribers of all sources and sinks of all streams, polled by one thread.

Another thread keeps searching for a source that does not answer, while the relay forwards the others. The relay follows
a worker that comes back at other addresses.
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
    RelayedStreamStats,
    StreamState,
    StreamStats,
    Subscriber,
    open_subscriber,
    wait_any,
)
from observability.relay.passthrough import PassthroughDecoder
from observability.relay.source import RelaySource
from observability.relay.stream import RelayedStream, SourceListener
from observability.relay.zmq_sinks import RelaySinks
from scheduler_components import ComponentError
from scheduler_components.kv_events import BatchDecoder, CurveClientKeys, StreamAddress

__all__ = ["RelayConfig", "SourceStats", "ZmqRelay", "open_relay"]

_SEARCH_TIMEOUT_S = 5.0
_SEARCH_INTERVAL_S = 2.0
"""The relay finds a restarted worker within this time. One small HTTP request per interval costs the worker nothing."""


@attrs.frozen(kw_only=True)
class RelayConfig:
    """The sources of a relay.

    Attributes:
        sources: all sources of one worker.
        keys: for sources that require CURVE keys of clients.
        policy: how long to wait.
    """

    sources: tuple[RelaySource, ...]
    keys: CurveClientKeys | None = None
    policy: FollowPolicy = attrs.field(factory=FollowPolicy)


class SourceStats(msgspec.Struct, frozen=True):
    """State of one source.

    Attributes:
        source: the text that the operator gave.
        problem: why it is not followed; empty if it is.
        streams: by rank; empty if it is not followed.
    """

    source: str
    problem: str
    streams: Mapping[int, StreamStats]


@dataclass(slots=True)
class _Followed:
    """A source and its subscriber. ``addresses`` is empty until the source is found."""

    source: RelaySource
    problem: str = ""
    addresses: tuple[StreamAddress, ...] = ()
    subscriber: Subscriber | None = None
    search: Future[tuple[StreamAddress, ...]] | None = None

    @property
    def is_settled(self) -> bool:
        """True while no search for the source's streams is needed."""
        if self.subscriber is None:
            return False
        positions = self.subscriber.positions().values()
        lost = (StreamState.CONNECTING, StreamState.DEAD)
        return not self.source.url or not any(position.state in lost for position in positions)


@dataclass(slots=True, kw_only=True)
class ZmqRelay:
    """Follows the sources and publishes their streams. ``open_relay`` creates it.

    ``poll`` belongs to one thread, which also closes. The statistics may be read from any thread.

    Attributes:
        sinks: opens the sinks of the streams.
        report: receives one sentence for the operator whenever a source is lost or found.
    """

    config: RelayConfig
    sinks: RelaySinks
    report: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    streams: dict[int, RelayedStream] = field(default_factory=dict)
    _followed: list[_Followed] = field(default_factory=list)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=4, thread_name_prefix="kv-relay-search")
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_search_s: float = 0.0

    def __enter__(self) -> ZmqRelay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Send the pending batches, close every socket and stop every thread. Safe to call twice."""
        with self._lock:
            for followed in self._followed:
                if followed.subscriber is not None:
                    followed.subscriber.close()
            for stream in self.streams.values():
                for sink in stream.sinks:
                    sink.shutdown()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- following ---

    def begin(self) -> None:
        """Search for every source once, and follow those that answer.

        Raises:
            ConfigError, StartError: a sink cannot be opened.
        """
        self._followed = [_Followed(source) for source in self.config.sources]
        for followed in self._followed:
            self._search(followed)
        for key, followed in enumerate(self._followed):
            assert followed.search is not None
            followed.search.exception()  # waits for the result
            self._finish_search(key, followed)

    def poll(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for input from any source, and relay it."""
        subscribers = [each.subscriber for each in self._followed if each.subscriber is not None]
        has_input = wait_any(subscribers, timeout_s)
        with self._lock:
            for subscriber in subscribers:
                subscriber.drain()
            for stream in self.streams.values():
                stream.flush()
            if not has_input or self.clock() >= self._next_search_s:
                self._update_sources()

    def _update_sources(self) -> None:
        """Search for missing sources, and follow those that were found."""
        now_s = self.clock()
        is_due = now_s >= self._next_search_s
        if is_due:
            self._next_search_s = now_s + _SEARCH_INTERVAL_S
        for key, followed in enumerate(self._followed):
            if followed.search is not None and followed.search.done():
                try:
                    self._finish_search(key, followed)
                except ComponentError as error:  # the sink of a new rank cannot be opened
                    self._set_problem(followed, str(error))
            if is_due and followed.search is None and not followed.is_settled:
                self._search(followed)

    def _search(self, followed: _Followed) -> None:
        followed.search = self._threads.submit(followed.source.find, timeout_s=_SEARCH_TIMEOUT_S)

    def _finish_search(self, key: int, followed: _Followed) -> None:
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
        """Follow a source at ``addresses`` instead of its previous addresses."""
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
            new_decoder=PassthroughDecoder if self.sinks.settings.dialect == "native" else BatchDecoder,
        )
        self._set_problem(followed, "")

    def _share_sources(self) -> None:
        """Add to each stream every source of its rank, and every source whose ranks are not known yet."""
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

    # --- statistics ---

    def source_stats(self) -> Sequence[SourceStats]:
        """Return the state of each source, in the given order."""
        with self._lock:
            return [
                SourceStats(followed.source.text, followed.problem, self._streams_of(key, followed))
                for key, followed in enumerate(self._followed)
            ]

    def _streams_of(self, key: int, followed: _Followed) -> dict[int, StreamStats]:
        """Add the number of blocks to the subscriber's statistics: the merger keeps the blocks, not the subscriber."""
        if followed.subscriber is None:
            return {}
        return {
            rank: msgspec.structs.replace(stats, blocks_held=self.streams[rank].merger.num_blocks(key))
            for rank, stats in followed.subscriber.stats().items()
        }

    def stream_stats(self) -> Sequence[RelayedStreamStats]:
        """Return the state of each published stream, ordered by rank."""
        with self._lock:
            return [
                RelayedStreamStats(
                    rank=rank,
                    state=stream.merger.state,
                    is_whole=stream.merger.upstream is None,
                    num_sources=stream.merger.num_sources,
                    block_size=stream.block_size,
                    publisher=stream.sinks[0].stats(),
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


def open_relay(config: RelayConfig, *, sinks: RelaySinks, report: Callable[[str], None]) -> ZmqRelay:
    """Follow every source that answers, and publish. Use the relay in a ``with`` block, or close it.

    The relay reports a source that does not answer, and searches for it again every few seconds.

    Args:
        config: the sources.
        sinks: opens the sinks of the streams.
        report: receives one sentence for the operator whenever a source is lost or found.

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
