"""From a cache's events to the wire: one call opens the sinks of each rank, and only stream owners publish."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from observability.kv_stream import open_subscriber, static_address
from scheduler_components import BlockRemoved, KVCacheEvent, ParallelState, RadixCache, SchedulerKvEventsPublisher
from scheduler_components.kv_events import BatchDecoder, NullEventPublisher, ZmqEventPublisher

pytestmark = pytest.mark.sockets

Ask = Callable[..., list[list[bytes]]]

CONFIG = msgspec.json.encode(
    {
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:0",
        "replay_endpoint": "tcp://127.0.0.1:0",
        "bind": True,
    }
).decode()
STEPS = 3


class Cache:
    """Record one removal per step, with the rank's number as its hash."""

    def __init__(self, tp_rank: int) -> None:
        self.tp_rank = tp_rank

    def take_events(self) -> Sequence[KVCacheEvent]:
        return [BlockRemoved((self.tp_rank,))]


@pytest.mark.parametrize(
    ("attn_dp_size", "attn_cp_size", "owners"),
    [(1, 2, [0]), (2, 1, [0, 2]), (4, 1, [0, 1, 2, 3]), (2, 2, [0, 2])],
)
def test_each_independent_cache_is_one_stream(
    attn_dp_size: int, attn_cp_size: int, owners: list[int], ask_replay: Ask
) -> None:
    streams: dict[int, ZmqEventPublisher] = {}
    publishers: list[SchedulerKvEventsPublisher] = []
    try:
        for tp_rank in range(4):
            parallel = ParallelState.from_tp_rank(
                tp_rank, tp_size=4, attn_dp_size=attn_dp_size, attn_cp_size=attn_cp_size
            )
            publishers.append(SchedulerKvEventsPublisher.open(CONFIG, parallel=parallel, source=Cache(tp_rank)))
            if isinstance(publishers[-1].sink, ZmqEventPublisher):
                streams[tp_rank] = publishers[-1].sink
            else:
                assert isinstance(publishers[-1].sink, NullEventPublisher)
        for _ in range(STEPS):
            for publisher in publishers:
                publisher.publish_kv_events()
                publisher.idle()
        assert list(streams) == owners
        for index, tp_rank in enumerate(owners):
            messages = ask_replay(streams[tp_rank].replay_endpoint, bytes(8))
            batches = [BatchDecoder().decode(message[-1]) for message in messages[:-1]]
            assert [batch.events for batch in batches] == [(BlockRemoved((tp_rank,)),)] * STEPS
            assert {batch.attn_dp_rank for batch in batches} == {index}
    finally:
        for publisher in publishers:
            publisher.shutdown()
    assert [publisher.failures.total for publisher in publishers] == [0] * 4


@pytest.mark.parametrize("waits_for_device", [True, False])
def test_a_flush_reaches_readers_without_a_further_step(waits_for_device: bool) -> None:
    """The cache is cleared after the last step. The scheduler flushes before it waits for requests."""
    cache = RadixCache(page_size=2, capacity_tokens=16, record=True)
    publisher = SchedulerKvEventsPublisher.open(CONFIG, parallel=ParallelState.trivial(), source=cache)
    try:
        assert isinstance(publisher.sink, ZmqEventPublisher)
        address = static_address(publisher.sink.endpoint, replay=publisher.sink.replay_endpoint)
        with open_subscriber([address]) as reader:
            cache.insert([1, 2, 3, 4], cache.allocate(2))
            publisher.publish_kv_events()
            if waits_for_device:
                publisher.idle()  # now the next batch may wait for the next idle()
            assert reader.wait_until(0, 0, 20)
            assert reader.blocks(0) == frozenset(cache.block_hashes())
            cache.clear()
            publisher.flush()  # flush() sends it, or the backstop, if it owns the sockets
            assert reader.wait_until(0, 1, 20)
            assert reader.blocks(0) == frozenset()
    finally:
        publisher.shutdown()
