"""The broker keeps, drops, numbers and refuses as JetStream does, and each request gets exactly one result."""

from __future__ import annotations

from functools import partial

import attrs
import pytest

from observability.jetstream.log_writer import SNAPSHOT_CHECK_S, LogLimits
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, SnapshotPointer
from worlds.log_troubles import LogTrouble
from worlds.simulated_broker import (
    BrokerClient,
    BrokerQuality,
    BrokerRefusedError,
    SimulatedBroker,
)
from worlds.timeline import BrokenPromise, Timeline

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


def test_a_power_failure_forgets_messages_and_their_ids(broker: SimulatedBroker) -> None:
    for seq in range(3):
        broker.store(message(seq))
    broker.lose_tail(2)
    assert stored(broker) == [0] and broker.last_seq == 1
    assert broker.store(message(1)) == (2, False)


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


def test_judges_that_the_snapshot_covers_what_is_dropped(broker: SimulatedBroker) -> None:
    broker.update_pointer(SnapshotPointer(EPOCH, 1, 0).encode(), 0)
    for seq in range(4):
        broker.store(message(seq))
    with pytest.raises(BrokenPromise, match="batch 1 was dropped"):
        broker.store(message(4))


def test_messages_of_another_sender_excuse_only_what_is_dropped_before_them(broker: SimulatedBroker) -> None:
    broker.update_pointer(SnapshotPointer(EPOCH, 1, 0).encode(), 0)
    broker.store(message(0))
    broker.store(message(1))
    broker.store(message(0, epoch=OTHER))
    broker.forge(message(9))
    broker.store(message(2))  # drops batch 1, which is excused
    broker.store(message(3))
    broker.store(message(4))
    with pytest.raises(BrokenPromise, match="batch 2 was dropped"):
        broker.store(message(5))


def test_judges_what_is_dropped_by_its_age_unless_a_trouble_excuses_it(
    timeline: Timeline, broker: SimulatedBroker
) -> None:
    broker.update_pointer(SnapshotPointer(EPOCH, 1, 0).encode(), 0)
    broker.store(message(0))
    broker.store(message(1))
    timeline.run_until(5.0)
    broker.store(message(2))
    timeline.run_until(9.0)
    broker.troubles.note(LogTrouble.STALLED)
    timeline.run_until(11.0)
    assert stored(broker) == [2]
    assert broker.troubles.settled_s + SNAPSHOT_CHECK_S < 14.0
    with pytest.raises(BrokenPromise, match="batch 2 was dropped"):
        timeline.run_until(16.0)


def test_is_damaged_while_a_part_of_snapshot_and_log_is_missing(broker: SimulatedBroker) -> None:
    assert broker.is_damaged
    broker.put_object(0, b"snapshot")
    broker.update_pointer(SnapshotPointer(EPOCH, 1, 0).encode(), 0)
    for seq in range(3):
        broker.store(message(seq))
    assert not broker.is_damaged
    broker.expire(2)
    assert broker.is_damaged
    broker.update_pointer(SnapshotPointer(EPOCH, 2, 0).encode(), 1)
    assert not broker.is_damaged
    broker.delete_snapshot_bucket()
    broker.open_snapshot_bucket()
    assert broker.is_damaged


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


def test_a_broker_without_a_leader_answers_nothing(timeline: Timeline, broker: SimulatedBroker) -> None:
    client, results = BrokerClient(timeline, broker, User()), []
    broker.elect_leader(3.0)
    client.call(broker.open_log, lambda _: results.append("answered"), results.append, timeout_s=1.0)
    timeline.run_until(2.0)
    assert results == ["no answer"]
    timeline.run_until(4.0)
    client.call(broker.open_log, lambda _: results.append("answered"), results.append, timeout_s=1.0)
    timeline.run_until(6.0)
    assert results == ["no answer", "answered"]


def test_messages_come_in_order_and_end_with_the_connection(timeline: Timeline, broker: SimulatedBroker) -> None:
    user = User()
    client = BrokerClient(timeline, broker, user)
    client.read_from(1, 1)
    for seq in range(3):
        broker.store(message(seq))
    timeline.run_until(1.0)
    assert user.received == [0, 1, 2]
    broker.store(message(3))
    broker.send_heartbeat(LogHeartbeat(EPOCH, 0, b"d" * 8, 0))
    client.disconnect()
    timeline.run_until(2.0)
    assert user.received == [0, 1, 2] and not user.heard
    client.reconnect()
    client.read_from(1, 4)
    timeline.run_until(3.0)
    assert user.received == [0, 1, 2, 3]
