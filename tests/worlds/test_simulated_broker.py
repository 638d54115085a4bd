"""The broker keeps, drops, numbers and refuses as JetStream does, and each request gets exactly one result."""

from __future__ import annotations

from functools import partial

import attrs
import pytest

from observability.jetstream.log_writer import LogLimits
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, SnapshotPointer
from worlds.simulated_broker import (
    BrokerClient,
    BrokerQuality,
    BrokerRefusedError,
    SimulatedBroker,
)
from worlds.timeline import Timeline

EPOCH, OTHER = b"e" * 16, b"o" * 16
LIMITS = LogLimits(max_msgs=3, max_bytes=1_000, max_age_s=10.0, overhead_bytes=100)


def message(seq: int, payload: bytes = b"x", *, epoch: bytes = EPOCH) -> LogMessage:
    return LogMessage(0, epoch, seq, b"d" * 8, payload)


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(seed=1)


@pytest.fixture
def broker(timeline: Timeline) -> SimulatedBroker:
    broker = SimulatedBroker(timeline, LIMITS)
    broker.open_log()
    broker.open_pointer_bucket()
    broker.open_snapshot_bucket()
    return broker


class User:
    """Keeps what the broker sends."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.heard: list[LogHeartbeat] = []

    def on_message(self, reading_id: int, message: LogMessage) -> None:
        assert reading_id == 1
        self.received.append(message.seq)

    def on_heartbeat(self, heartbeat: LogHeartbeat) -> None:
        self.heard.append(heartbeat)

    def on_snapshot_requested(self) -> None: ...


def stored(broker: SimulatedBroker) -> list[int]:
    return [each.seq for each, _ in broker.log or ()]


def test_drops_the_oldest_messages_by_number_bytes_and_age(timeline: Timeline, broker: SimulatedBroker) -> None:
    for seq in range(5):
        assert broker.store(message(seq)) == (seq + 1, False)
    assert stored(broker) == [2, 3, 4]
    broker.store(message(5, b"x" * 700))
    assert stored(broker) == [4, 5]
    timeline.run_until(10.5)
    broker.store(message(6))
    assert stored(broker) == [6]
    assert broker.message_from(3) == broker.message_from(7)


def test_knows_the_id_of_a_message_for_a_while(timeline: Timeline) -> None:
    broker = SimulatedBroker(timeline, attrs.evolve(LIMITS, max_age_s=2.0))
    broker.open_log()
    assert broker.store(message(0)) == (1, False)
    assert broker.store(message(0)) == (1, True)
    timeline.run_until(2.5)
    assert broker.store(message(0)) == (2, False)


def test_replaces_a_pointer_only_at_its_revision(broker: SimulatedBroker) -> None:
    pointer = SnapshotPointer(EPOCH, 4, 0)
    assert broker.read_pointer() == (None, 0)
    assert broker.update_pointer(pointer.encode(), 0) == 1
    assert broker.update_pointer(pointer.encode(), 0) is None
    assert broker.read_pointer() == (pointer, 1)
    broker.delete_pointer_bucket()
    broker.open_pointer_bucket()
    assert broker.read_pointer() == (None, 0)


def test_refuses_what_needs_something_deleted(broker: SimulatedBroker) -> None:
    broker.delete_log()
    broker.delete_pointer_bucket()
    broker.delete_snapshot_bucket()
    for request in (
        partial(broker.store, message(0)),
        broker.read_pointer,
        partial(broker.update_pointer, b"", 0),
        partial(broker.put_object, 0, b""),
        partial(broker.read_object, 0),
    ):
        with pytest.raises(BrokerRefusedError):
            request()
    assert broker.open_log() == 0


def test_a_request_gets_exactly_one_result(timeline: Timeline, broker: SimulatedBroker) -> None:
    client = BrokerClient(timeline, broker, User())
    results: list[str] = []

    def call(name: str, *, timeout_s: float = 1.0) -> None:
        client.call(broker.open_log, lambda _: results.append(f"{name} answered"), results.append, timeout_s=timeout_s)

    call("first")
    timeline.run_until(2.0)
    client.quality = BrokerQuality(answer_loss=1.0)
    call("lost answer")
    timeline.run_until(4.0)
    client.quality = BrokerQuality(request_loss=1.0)
    call("lost request")
    timeline.run_until(6.0)
    client.quality = BrokerQuality()
    call("late", timeout_s=0.0)
    timeline.run_until(8.0)
    assert results == ["first answered", "no answer", "no answer", "no answer"]
