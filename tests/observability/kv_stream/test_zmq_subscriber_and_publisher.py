"""Subscriber and publisher of the kit together: with every setting the view equals the published state."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from kit.follow_policies import FREQUENT_PROBES

from observability.kv_stream import StreamState, Subscriber, open_subscriber, static_address
from scheduler_components import BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.kv_events import KVEventsConfig, StreamAddress, ZmqEventPublisher

pytestmark = pytest.mark.sockets

DEADLINE_S = 60.0
LOOPBACK = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}


def open_publisher(stack: ExitStack, attn_dp_rank: int = 0, **options: object) -> ZmqEventPublisher:
    publisher = ZmqEventPublisher(attn_dp_rank, config=KVEventsConfig(**(LOOPBACK | options)))
    stack.callback(publisher.shutdown)
    return publisher


def address_of(publisher: ZmqEventPublisher, rank: int = 0, topic: str = "") -> StreamAddress:
    return static_address(publisher.endpoint, replay=publisher.replay_endpoint, rank=rank, topic=topic)


def publish(publisher: ZmqEventPublisher, *hashes: int) -> None:
    for block_hash in hashes:
        event = BlockStored((block_hash,), None, (1, 2), 2, None)
        publisher.publish(KVEventBatch(ts=time.time(), events=(event,)))


def wait_for(sub: Subscriber, rank: int, seq: int) -> None:
    assert sub.wait_until(rank, seq, DEADLINE_S), sub.stats()
    assert sub.stats()[rank].state is StreamState.LIVE


@pytest.mark.parametrize("replay_framing", ["seed", "topic"])
@pytest.mark.parametrize("dialect", ["array", "map", "vllm"])
def test_late_join_then_live(stack: ExitStack, dialect: str, replay_framing: str) -> None:
    publisher = open_publisher(stack, dialect=dialect, replay_framing=replay_framing, topic="kv")
    publish(publisher, *range(200))
    sub = stack.enter_context(open_subscriber([address_of(publisher, topic="kv")], policy=FREQUENT_PROBES))
    wait_for(sub, 0, 199)
    publish(publisher, *range(200, 300))
    publisher.publish(KVEventBatch(ts=time.time(), events=(BlockRemoved((5, 7)),)))
    wait_for(sub, 0, 300)
    assert sub.blocks(0) == set(range(300)) - {5, 7}
    assert (sub.stats()[0].gaps, sub.stats()[0].decode_errors) == (0, 0)


def test_history_before_the_replay_buffer_comes_as_a_snapshot(stack: ExitStack) -> None:
    publisher = open_publisher(stack, buffer_steps=10)
    publish(publisher, *range(200))
    sub = stack.enter_context(open_subscriber([address_of(publisher)], policy=FREQUENT_PROBES))
    wait_for(sub, 0, 199)
    assert sub.blocks(0) == set(range(200))
    assert sub.stats()[0].losses == 0


def test_ranks_have_separate_blocks(stack: ExitStack) -> None:
    publishers = [open_publisher(stack, attn_dp_rank=rank) for rank in range(4)]
    addresses = [address_of(publisher, rank) for rank, publisher in enumerate(publishers)]
    sub = stack.enter_context(open_subscriber(addresses, policy=FREQUENT_PROBES))
    for rank, publisher in enumerate(publishers):
        publish(publisher, 1, 2, *range(100 * rank, 100 * rank + 50))
    for rank in range(4):
        wait_for(sub, rank, 51)
        assert sub.blocks(rank) == {1, 2, *range(100 * rank, 100 * rank + 50)}
        assert sub.stats()[rank].rank_mismatches == 0
    assert sub.match_lengths([1, 2, 103]) == {0: 2, 1: 3, 2: 2, 3: 2}
    assert sub.ranks_holding(103) == (1,)


@pytest.mark.parametrize("seq_base", ["zero", "clock"])
@pytest.mark.parametrize("second_life", [range(1_000, 1_010), range(1_000, 1_300)], ids=["behind", "past"])
def test_a_restart_that_passes_the_old_number_is_detected(stack: ExitStack, seq_base: str, second_life: range) -> None:
    first = open_publisher(stack, seq_base=seq_base)
    address = address_of(first)
    publish(first, *range(100))
    sub = stack.enter_context(open_subscriber([address], policy=FREQUENT_PROBES))
    wait_for(sub, 0, first.stats().last_sequence)
    first.shutdown()
    second = open_publisher(stack, endpoint=str(address.events), replay_endpoint=str(address.replay), seq_base=seq_base)
    publish(second, *second_life)
    deadline_s = time.monotonic() + DEADLINE_S
    while sub.blocks(0) != set(second_life):
        assert time.monotonic() < deadline_s, sub.stats()
        sub.poll(0.05)
    wait_for(sub, 0, second.stats().last_sequence)
    assert sub.stats()[0].disconnects == 1


def test_a_stream_without_replay_is_followed_and_never_live(stack: ExitStack) -> None:
    publisher = open_publisher(stack, replay_endpoint=None)
    sub = stack.enter_context(open_subscriber([address_of(publisher)], policy=FREQUENT_PROBES))
    assert sub.wait_until(0, -1, DEADLINE_S)
    publish(publisher, 0)
    deadline_s = time.monotonic() + DEADLINE_S
    while 1 not in sub.blocks(0):  # the connection may come after the first batch
        assert time.monotonic() < deadline_s, sub.stats()
        publish(publisher, 1)
        sub.poll(0.01)
    assert sub.stats()[0].state is StreamState.PARTIAL


def test_all_batches_before_a_shutdown_are_read(stack: ExitStack) -> None:
    publisher = open_publisher(stack)
    sub = stack.enter_context(open_subscriber([address_of(publisher)], policy=FREQUENT_PROBES))
    publish(publisher, 0)
    wait_for(sub, 0, 0)
    publish(publisher, *range(1, 500))
    publisher.shutdown()
    deadline_s = time.monotonic() + DEADLINE_S
    while sub.stats()[0].last_seq != 499:
        assert time.monotonic() < deadline_s, sub.stats()
        sub.poll(0.05)
    assert sub.blocks(0) == set(range(500))
