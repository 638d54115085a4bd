"""Following streams in JetStream: the same view, states and counters as over ZeroMQ.

A thread owns the connection and puts every received item into an inbox. ``poll`` applies the items on the caller's
thread. The inbox is bounded: the thread waits for a slow caller, and the broker keeps the unread messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from observability.jetstream.addresses import LogAddress
from observability.jetstream.config import JetStreamConfig
from observability.jetstream.log_follower import LogFollower
from observability.jetstream.nats_connection import NatsThread
from observability.jetstream.nats_log_reader import Inbox, LogStream
from observability.kv_stream import (
    BatchApplier,
    BlockView,
    FairRLock,
    FollowPolicy,
    NullStreamListener,
    StreamListener,
)
from observability.kv_stream.subscriber_base import SubscriberBase, check_ranks
from scheduler_components._internal.extras import naming_extras
from scheduler_components.kv_events import BatchDecoder

with naming_extras:
    from nats.aio.client import Client

__all__ = ["JetStreamSubscriber", "open_jetstream_subscriber"]

_SLICE = 256
"""Items applied per ``poll``."""


class JetStreamSubscriber(SubscriberBase):
    """Follows streams in JetStream and keeps one view of them. ``open_jetstream_subscriber`` creates it."""

    def __init__(self, config: JetStreamConfig, view: BlockView, clock: Callable[[], float]) -> None:
        self._streams: dict[int, LogStream] = {}
        self._fair_lock = FairRLock()
        super().__init__(self._streams, view, self._fair_lock, clock)
        self._inbox = Inbox()
        self._is_closed = asyncio.Event()
        self.thread = NatsThread(config, self, name="kv-events reader")

    def __enter__(self) -> JetStreamSubscriber:
        return self

    def open(self, address: LogAddress, applier: BatchApplier, policy: FollowPolicy) -> None:
        """Add one stream; call it before the thread starts."""
        stream = LogStream(address, self.thread, self._inbox)
        stream.follower = LogFollower(applier=applier, channel=stream, policy=policy)
        stream.follower.begin(self._clock())
        self._streams[address.rank] = stream

    def close(self) -> None:
        """Close the connection; the view and the counters stay readable. Safe to call twice."""
        self.thread.stop()

    # --- the connection's thread ---

    async def run(self, client: Client) -> None:
        """Receive until cancelled."""
        for stream in self._streams.values():
            stream.begin(client)
        try:
            await self._is_closed.wait()
        finally:
            for stream in self._streams.values():
                await stream.close()

    def on_disconnected(self) -> None:
        """Handle the loss of the broker."""
        for stream in self._streams.values():
            stream.disconnects += 1
            stream.stop_reading()
            self._inbox.put_now(partial(_report_disconnected, stream.follower))

    def on_reconnected(self) -> None:
        """Continue reading."""
        for stream in self._streams.values():
            self._inbox.put_now(partial(_report_reconnected, stream.follower))

    # --- the polling thread ---

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` for input, then apply it. Return True if there was any."""
        inbox, streams = self._inbox, self._streams.values()
        due_in_s = min(stream.follower.next_deadline_s for stream in streams) - self._clock()
        had_items = inbox.has_items.wait(max(0.0, min(timeout_s, self._until_sweep_s(due_in_s))))
        inbox.has_items.clear()
        for _ in range(_SLICE):
            if not inbox.items:
                break
            with self._lock:
                for _ in inbox.items.popleft()(self._clock()):
                    self._fair_lock.yield_to_waiters()
        if inbox.items:
            inbox.has_items.set()
        elif had_items:
            self.thread.call(inbox.has_room.set)
        now_s = self._clock()
        for stream in streams:
            with self._lock:
                stream.follower.tick(now_s)
        self._sweep()
        return had_items


def _report_disconnected(follower: LogFollower, now_s: float) -> Iterator[None]:
    follower.on_disconnected(now_s)
    yield None


def _report_reconnected(follower: LogFollower, now_s: float) -> Iterator[None]:
    follower.on_reconnected()
    yield None


def open_jetstream_subscriber(
    config: JetStreamConfig,
    addresses: Iterable[LogAddress],
    *,
    policy: FollowPolicy | None = None,
    listener: StreamListener | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> JetStreamSubscriber:
    """Follow streams in JetStream. Use the subscriber in a ``with`` block, or close it.

    Return without waiting for the connection: ``poll`` waits for a broker or a writer that is not there yet.

    Args:
        config: where the broker is.
        addresses: the streams; each needs its own rank, which is its number in the view.
        policy: how long to wait.
        listener: receives every batch and change of state. It may query the subscriber, but must not wait for another
            thread that does.
        clock: monotonic seconds, for deadlines.
        wall_clock: seconds since the epoch, for the lag.

    Raises:
        ConfigError: no address, too many, or two with one rank.
    """
    checked = tuple(addresses)
    check_ranks([address.rank for address in checked])
    view = BlockView()
    subscriber = JetStreamSubscriber(config, view, clock)
    for address in checked:
        applier = BatchApplier(
            rank=address.rank,
            view=view,
            decoder=BatchDecoder(),
            listener=NullStreamListener() if listener is None else listener,
            wall_clock=wall_clock,
        )
        subscriber.open(address, applier, FollowPolicy() if policy is None else policy)
    subscriber.thread.start()
    return subscriber
