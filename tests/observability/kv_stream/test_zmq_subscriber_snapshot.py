"""Queries during a snapshot: other threads are answered between two messages, a listener always."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from observability.kv_stream import (
    FollowPolicy,
    NullStreamListener,
    StreamState,
    Subscriber,
    open_async_subscriber,
    open_subscriber,
    static_address,
)
from scheduler_components import BlockStored, KVEventBatch
from scheduler_components.kv_events import DecodedBatch, KVEventsConfig, StreamAddress, ZmqEventPublisher

pytestmark = pytest.mark.sockets

DEADLINE_S = 60.0
NUM_BLOCKS = 60_000
PAUSE_S = 0.002
"""Long enough for a new thread to reach its query."""


@pytest.fixture(scope="module")
def address() -> Iterator[StreamAddress]:
    """A publisher with nearly all blocks in its snapshot, so that a subscriber receives many chunks."""
    config = KVEventsConfig(
        endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", bind=True, buffer_steps=4
    )
    publisher = ZmqEventPublisher(0, config=config)
    for first in range(0, NUM_BLOCKS, 100):
        hashes = tuple(range(first, first + 100))
        event = BlockStored(hashes, first - 1 if first else None, hashes, 1, None)
        publisher.publish(KVEventBatch(ts=time.time(), events=(event,)))
    yield static_address(publisher.endpoint, replay=publisher.replay_endpoint)
    publisher.shutdown()


class SlowQueryListener(NullStreamListener):
    """Starts one query on another thread at the first chunk, and records the chunk at which it was answered."""

    def __init__(self) -> None:
        self.query: Callable[[], object] = lambda: None
        self.num_chunks = 0
        self.answered_at: int | None = None
        self.thread: threading.Thread | None = None
        self.is_over = False

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        if self.is_over:
            return
        self.num_chunks += 1
        if self.thread is None:
            self.thread = threading.Thread(target=self.query)
            self.thread.start()
        if self.answered_at is None:
            self.thread.join(PAUSE_S)  # the lock is held here, so it cannot be answered yet
            if not self.thread.is_alive():
                self.answered_at = self.num_chunks

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        self.is_over = True


def test_a_query_of_another_thread_is_answered_between_two_messages(address: StreamAddress) -> None:
    listener = SlowQueryListener()
    with open_subscriber([address], listener=listener, policy=FollowPolicy(probe_interval_s=0.1)) as sub:
        listener.query = lambda: sub.blocks(0)
        deadline_s = time.monotonic() + DEADLINE_S
        while len(sub.blocks(0)) < NUM_BLOCKS:
            assert time.monotonic() < deadline_s, sub.stats()
            sub.poll(0.05)
        assert sub.stats()[0].state is StreamState.LIVE
    assert listener.thread is not None
    listener.thread.join()
    assert listener.num_chunks > 4
    assert listener.answered_at is not None, f"not answered during {listener.num_chunks} messages"


class QueryingListener(NullStreamListener):
    """Runs every query at each change."""

    def __init__(self) -> None:
        self.subscriber: Subscriber | None = None
        self.seen: list[int] = []

    def query(self) -> None:
        if self.subscriber is not None:
            self.subscriber.stats()
            self.subscriber.match_lengths(range(10))
            self.subscriber.ranks_holding(0)
            self.seen.append(len(self.subscriber.blocks(0)))

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        self.query()

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        self.query()

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        self.query()


@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_listener_may_query(address: StreamAddress) -> None:
    listener = QueryingListener()

    async def trace() -> None:
        async with open_async_subscriber([address], listener=listener) as sub:
            listener.subscriber = sub  # type: ignore[assignment]  # it has the same queries
            assert await sub.wait_until(0, NUM_BLOCKS // 100 - 1, DEADLINE_S)

    asyncio.run(trace())
    assert set(listener.seen) == {0, NUM_BLOCKS}  # before the snapshot replaced the view, and after
