"""The time until LIVE that a benchmark's late reader reports."""

from __future__ import annotations

import math
import time

import pytest

from benchmarks.bench_late_readers import LateReaders, join
from benchmarks.processes import free_endpoints
from scheduler_components import BlockStored, KVEventBatch
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher

pytestmark = pytest.mark.sockets


def test_a_reader_that_finds_no_publisher_never_arrives() -> None:
    endpoint, replay_endpoint = free_endpoints(2)
    live_s, age_s = join(LateReaders(endpoint=endpoint, replay_endpoint=replay_endpoint, joins=1, timeout_s=0.0))
    assert live_s == math.inf
    assert math.isnan(age_s)


def test_a_reader_of_batches_that_left_the_replay_buffer_arrives() -> None:
    loopback = KVEventsConfig(bind=True)
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", 2, config=loopback)
    try:
        for block_hash in range(6):
            event = BlockStored((block_hash,), None, (1, 2), 2, None)
            publisher.publish(KVEventBatch(time.time(), (event,)))
        addresses = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        live_s, age_s = join(LateReaders(**addresses, joins=1, timeout_s=40.0))
    finally:
        publisher.close(5.0)
    assert 0.0 < live_s < 40.0
    assert age_s < 40.0
