"""Configuration, publishers, subscriber and view as a type checker sees them."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, assert_type

import pytest

from observability.kv_stream import BlockView, StreamStats, Tier, open_subscriber, static_address
from scheduler_components import ConfigError, ParallelState
from scheduler_components.kv_events import (
    BatchDecoder,
    BatchEncoder,
    BlockStored,
    DecodedBatch,
    Endpoint,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
    KVEventsConfig,
    PortPlan,
    StreamAddress,
    ZmqEventPublisher,
    open_event_publisher,
)
from scheduler_components.server_info import describe_kv_events_publisher
from scheduler_components.values import PublisherStats

if TYPE_CHECKING:
    from observability.kv_stream import Subscriber


def check_configuration() -> None:
    config = KVEventsConfig.from_cli('{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}')
    assert_type(config, KVEventsConfig)
    assert_type(config.replay_endpoint, str | None)
    plan = config.port_plan(2)
    assert_type(plan, PortPlan)
    assert_type(plan.events, Endpoint)
    assert_type(plan.replay, Endpoint | None)
    assert_type(plan.event_endpoint(1), Endpoint)
    with pytest.raises(ConfigError) as raised:
        KVEventsConfig.from_cli('{"publishr": "zmq"}')
    assert_type(raised.value.field, str)


def check_descriptor() -> None:
    described = describe_kv_events_publisher(None, block_size=16, dp_size=1)
    assert_type(described, dict[str, object] | None)


def check_publishers() -> None:
    assert_type(EventPublisherFactory.create(None), EventPublisher)
    opened = open_event_publisher(None, parallel=ParallelState.trivial())
    assert_type(opened, EventPublisher)
    assert_type(opened.stats(), PublisherStats)
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", config=KVEventsConfig(bind=True))
    try:
        assert_type(publisher.endpoint, str)
        assert_type(publisher.replay_endpoint, str | None)
    finally:
        publisher.shutdown()


def check_the_codec() -> None:
    event = BlockStored((1,), None, (5, 6), 2, None)
    assert_type(event.parent_block_hash, int | None)
    payload = BatchEncoder("array").encode(EventBatch(1.0, (event,)), 0)
    assert_type(payload, bytes)
    assert_type(BatchDecoder().decode(payload), DecodedBatch)


def check_the_view() -> None:
    view = BlockView()
    view.apply(3, [BlockStored((1, 2), None, (5, 6, 7, 8), 2, None)])
    assert_type(view.match_lengths([1, 2]), dict[int, int])
    assert_type(view.ranks_holding(1, Tier.DEVICE), tuple[int, ...])
    assert_type(view.blocks(3), Set[int])
    assert view.match_lengths([1, 2, 9]) == {3: 2}


def check_a_subscriber() -> None:
    address = static_address("tcp://127.0.0.1:9")
    assert_type(address, StreamAddress)
    with open_subscriber([address]) as subscriber:
        assert_type(subscriber.stats(), dict[int, StreamStats])
        assert_type(subscriber.poll(), bool)


if TYPE_CHECKING:

    def what_a_subscriber_answers(subscriber: Subscriber) -> None:
        assert_type(subscriber.blocks(0, Tier.HOST), Set[int])
        assert_type(subscriber.match_lengths([1]), dict[int, int])
        assert_type(subscriber.wait_until(0, 10, timeout_s=1.0), bool)
