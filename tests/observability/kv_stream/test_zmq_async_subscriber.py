"""The asyncio API: the loop receives changes, waits without polling, and always closes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from kit.follow_policies import FREQUENT_PROBES

from observability.kv_stream import (
    NullStreamListener,
    StreamPosition,
    StreamState,
    open_async_subscriber,
    static_address,
)
from scheduler_components import BlockStored, ConfigError, KVEventBatch
from scheduler_components.kv_events import DecodedBatch, KVEventsConfig, ZmqEventPublisher

pytestmark = pytest.mark.sockets

DEADLINE_S = 60.0


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=KVEventsConfig(bind=True))
    yield publisher
    publisher.shutdown()
    assert not [each for each in threading.enumerate() if each is not threading.main_thread()]


def publish(publisher: ZmqEventPublisher, *blocks: int) -> None:
    for block in blocks:
        event = BlockStored((block,), block - 1 if block else None, (block,), 1, None)
        publisher.publish(KVEventBatch(ts=time.time(), events=(event,)))


def following(publisher: ZmqEventPublisher, **options: Any) -> Any:
    address = static_address(publisher.endpoint, replay=publisher.replay_endpoint)
    return open_async_subscriber([address], policy=FREQUENT_PROBES, **options)


def run(trace: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(trace, DEADLINE_S))


def test_a_late_subscriber_follows(publisher: ZmqEventPublisher) -> None:
    async def trace() -> None:
        publish(publisher, *range(50))
        async with following(publisher) as sub:
            assert await sub.wait_until(0, 49, DEADLINE_S)
            publish(publisher, *range(50, 80))
            assert await sub.wait_until(0, 79, DEADLINE_S)
            assert sub.blocks(0) == set(range(80))
            assert sub.match_lengths([0, 1, 2, 99]) == {0: 3}
            assert sub.ranks_holding(79) == (0,)
            assert sub.stats()[0].state is StreamState.LIVE

    run(trace())


def test_one_group_of_a_hybrid_model_can_be_queried(publisher: ZmqEventPublisher) -> None:
    async def trace() -> None:
        window = BlockStored((1, 2), None, (1, 2), 1, None, group_idx=1, kv_cache_spec_kind="sliding_window")
        full = BlockStored((1,), None, (1,), 1, None, group_idx=0, kv_cache_spec_kind="full_attention")
        publisher.publish(KVEventBatch(ts=time.time(), events=(window, full)))
        async with following(publisher) as sub:
            assert await sub.wait_until(0, 0, DEADLINE_S)
            assert (sub.blocks(0), sub.blocks(0, group_idx=1)) == ({1}, {1, 2})
            assert (sub.match_lengths([1, 2]), sub.match_lengths([1, 2], group_idx=1)) == ({0: 1}, {0: 2})

    run(trace())


def test_changes_are_merged_for_a_slow_reader(publisher: ZmqEventPublisher) -> None:
    async def trace() -> None:
        publish(publisher, 0)
        async with following(publisher) as sub:
            seen: list[StreamPosition] = []
            async for position in sub:
                seen.append(position)
                if position.state is StreamState.LIVE:
                    break
            publish(publisher, *range(1, 200))
            assert await sub.wait_until(0, 199, DEADLINE_S)
            async for position in sub:
                seen.append(position)
                if position.last_seq == 199:
                    break
            assert [each.last_seq for each in seen] == sorted(each.last_seq for each in seen)
            assert len(seen) < 20

    run(trace())


def test_a_wait_returns_false_after_its_timeout(publisher: ZmqEventPublisher) -> None:
    async def trace() -> None:
        async with following(publisher) as sub:
            assert not await sub.wait_until(0, 5, 0.05)
            assert await sub.wait_until(0, -1, DEADLINE_S)

    run(trace())


def test_closing_ends_waiting_coroutines(publisher: ZmqEventPublisher) -> None:
    async def trace() -> None:
        async with following(publisher) as sub:
            assert await sub.wait_until(0, -1, DEADLINE_S)

            async def read_all() -> int:
                return len([position async for position in sub])

            readers = [asyncio.create_task(read_all()) for _ in range(3)]
            waiter = asyncio.create_task(sub.wait_until(0, 5, DEADLINE_S))
            await asyncio.sleep(0)
        assert sum(await asyncio.gather(*readers)) >= 1
        assert not await waiter

    run(trace())


def test_an_error_in_the_block_closes_too(publisher: ZmqEventPublisher) -> None:
    async def trace() -> None:
        async with following(publisher):
            raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        run(trace())


def test_an_error_of_a_listener_reaches_waiting_coroutines(publisher: ZmqEventPublisher) -> None:
    class Failing(NullStreamListener):
        def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
            raise RuntimeError("the listener fails")

    async def trace() -> None:
        publish(publisher, 0)
        async with following(publisher, listener=Failing()) as sub:
            with pytest.raises(RuntimeError, match="the listener fails"):
                await sub.wait_until(0, 0, DEADLINE_S)

    run(trace())


def test_a_wrong_argument_raises_at_the_call() -> None:
    async def trace() -> None:
        async with open_async_subscriber([]):
            raise AssertionError

    with pytest.raises(ConfigError, match="number of streams"):
        run(trace())
