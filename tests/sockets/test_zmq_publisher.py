"""The ZMQ publisher on real sockets: framing, order, replay, deferral, refusal, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest
import zmq

from scheduler_components import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ConfigError,
    KVCacheEvent,
    KVEventBatch,
    PublisherClosedError,
)
from scheduler_components.kv_events import BatchDecoder, KVEventsConfig, ZmqEventPublisher

Open = Callable[..., ZmqEventPublisher]
Subscribe = Callable[..., zmq.Socket[bytes]]
Ask = Callable[..., list[list[bytes]]]
Connected = Callable[..., int]
Eventually = Callable[[Callable[[], object]], None]


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(ts=1.0, events=(BlockRemoved((number,)),))


def number_of(message: list[bytes]) -> int:
    event = BatchDecoder().decode(message[-1]).events[0]
    assert isinstance(event, BlockRemoved)
    return event.block_hashes[0]


def test_live_message_is_topic_sequence_payload(opened: Open, subscribe: Subscribe, connected: Connected) -> None:
    publisher = opened(attn_dp_rank=0, topic="kv@model")
    subscriber = subscribe(publisher.endpoint, b"kv@")
    probes = connected(publisher.publish, subscriber)
    publisher.publish(batch(7))
    topic, sequence, payload = subscriber.recv_multipart()
    assert (topic, int.from_bytes(sequence, "big"), len(sequence)) == (b"kv@model", probes, 8)
    assert msgspec.msgpack.decode(payload) == [1.0, [["BlockRemoved", [7]]], 0]


def test_rank_offsets_both_ports_and_is_stamped(
    opened: Open, free_ports: Callable[[int], int], ask_replay: Ask
) -> None:
    base = free_ports(6)
    publisher = opened(
        attn_dp_rank=2, endpoint=f"tcp://127.0.0.1:{base}", replay_endpoint=f"tcp://127.0.0.1:{base + 3}"
    )
    assert publisher.endpoint == f"tcp://127.0.0.1:{base + 2}"
    assert publisher.replay_endpoint == f"tcp://127.0.0.1:{base + 5}"
    publisher.publish(batch(1))
    stored = ask_replay(publisher.replay_endpoint, bytes(8))
    assert BatchDecoder().decode(stored[0][-1]).attn_dp_rank == 2


@pytest.mark.parametrize("hook", [True, False], ids=["with idle()", "without idle()"])
def test_all_batches_arrive_in_order(opened: Open, subscribe: Subscribe, connected: Connected, hook: bool) -> None:
    publisher = opened()
    subscriber = subscribe(publisher.endpoint)
    probes = connected(publisher.publish, subscriber)
    for number in range(500):
        publisher.publish(batch(number))
        if hook and number % 3 == 0:
            publisher.idle()
    messages = [subscriber.recv_multipart() for _ in range(500)]
    assert [number_of(message) for message in messages] == list(range(500))
    assert [int.from_bytes(message[1], "big") for message in messages] == list(range(probes, probes + 500))


def test_the_tail_arrives_when_the_scheduler_stops_calling(
    opened: Open, subscribe: Subscribe, connected: Connected
) -> None:
    publisher = opened()
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    publisher.idle()
    publisher.publish(batch(42))
    assert number_of(subscriber.recv_multipart()) == 42


def test_a_burst_goes_out_in_groups_and_its_tail_on_its_own(
    opened: Open, subscribe: Subscribe, connected: Connected
) -> None:
    publisher = opened()
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    pending = []
    for number in range(500):
        publisher.publish(batch(number))
        pending.append(publisher.stats().batches_pending)
    assert pending[0] == 0  # a scheduler that publishes once a step, and never idles, has nothing held back
    assert max(pending) < 8
    assert [number_of(subscriber.recv_multipart()) for _ in range(500)] == list(range(500))


@pytest.mark.parametrize("max_queue_size", [1, 3])
def test_a_burst_is_not_held_back_until_it_overflows(opened: Open, max_queue_size: int) -> None:
    publisher = opened(max_queue_size=max_queue_size)
    for number in range(50):
        publisher.publish(batch(number))
    assert publisher.close(10.0).batches_sent == 50
    assert publisher.stats().batches_collapsed == 0


def test_a_late_joiner_catches_up_by_replay(opened: Open, ask_replay: Ask) -> None:
    publisher = opened()
    for number in range(300):
        publisher.publish(batch(number))
    messages = ask_replay(publisher.replay_endpoint, (100).to_bytes(8, "big"))
    assert [number_of(message) for message in messages[:-1]] == list(range(100, 300))
    assert messages[-1] == [b"", publisher.END_SEQ, b""]


def test_a_req_socket_is_answered_too(opened: Open, ask_replay: Ask) -> None:
    publisher = opened()
    assert ask_replay(publisher.replay_endpoint, bytes(8), kind=zmq.REQ) == [[publisher.END_SEQ, b""]]


def test_topic_framing(opened: Open, ask_replay: Ask) -> None:
    publisher = opened(replay_framing="topic", topic="t")
    publisher.publish(batch(5))
    stored, end = ask_replay(publisher.replay_endpoint, bytes(8))
    assert stored[:3] == [b"", b"t", bytes(8)]
    assert end == [b"", b"", publisher.END_SEQ, b""]


@pytest.mark.parametrize("request_bytes", [b"", b"\x00" * 7, b"\x00" * 37, b"\xff" * 8])
def test_any_odd_request_gets_the_end_marker(opened: Open, ask_replay: Ask, request_bytes: bytes) -> None:
    publisher = opened()
    publisher.publish(batch(1))
    assert ask_replay(publisher.replay_endpoint, request_bytes) == [[b"", publisher.END_SEQ, b""]]


def test_a_slow_client_gets_a_long_replay_whole(opened: Open, open_socket: Callable[[int], zmq.Socket[bytes]]) -> None:
    publisher = opened()
    blocks = KVEventBatch(1.0, (BlockStored(tuple(range(20)), None, tuple(range(320)), 16, None),))
    for _ in range(3_000):
        publisher.publish(blocks)
    client = open_socket(zmq.DEALER)
    client.setsockopt(zmq.RCVHWM, 10)
    client.connect(publisher.replay_endpoint or "")
    client.send_multipart([b"", bytes(8)])
    first = client.recv_multipart()
    # Now the client's and the publisher's queues fill while nobody reads; the publisher goes on with its work.
    for _ in range(200):
        publisher.publish(blocks)
    numbers = [int.from_bytes(first[-2], "big", signed=True)]
    while numbers[-1] != -1:
        numbers.append(int.from_bytes(client.recv_multipart()[-2], "big", signed=True))
    assert numbers == [*range(3_000), -1]


def test_replay_goes_on_while_the_scheduler_ticks(opened: Open, ask_replay: Ask) -> None:
    publisher = opened()
    for number in range(200):
        publisher.publish(batch(number))
    answered = threading.Event()
    answers: list[list[list[bytes]]] = []

    def client() -> None:
        answers.append(ask_replay(publisher.replay_endpoint, bytes(8)))
        answered.set()

    thread = threading.Thread(target=client)
    thread.start()
    ticks = 0
    while not answered.wait(0.0005) and ticks < 20_000:
        publisher.publish(batch(ticks))
        publisher.idle()
        ticks += 1
    thread.join()
    assert [number_of(message) for message in answers[0][:200]] == list(range(200))


class Poison(KVCacheEvent, frozen=True):
    """An event that no dialect knows."""

    x: int


def test_poison_takes_no_number_and_no_good_event_along(opened: Open, ask_replay: Ask) -> None:
    publisher = opened()
    publisher.publish(KVEventBatch(1.0, (Poison(1),)))
    publisher.publish(KVEventBatch(1.0, (Poison(1), BlockRemoved((9,)))))
    publisher.publish(KVEventBatch(float("nan"), (BlockRemoved((2**70,)), AllBlocksCleared())))
    stored = ask_replay(publisher.replay_endpoint, bytes(8))
    assert [int.from_bytes(message[-2], "big", signed=True) for message in stored] == [0, 1, -1]
    stats = publisher.stats()
    assert (stats.events_refused, stats.events_sent, stats.batches_sent, stats.last_sequence) == (3, 2, 2, 1)


def test_no_replay_endpoint_keeps_nothing(opened: Open) -> None:
    publisher = opened(replay_endpoint=None)
    publisher.publish(batch(1))
    stats = publisher.stats()
    assert publisher.replay_endpoint is None
    assert (stats.batches_sent, stats.batches_buffered, stats.bytes_buffered) == (1, 0, 0)


def test_counters_tell_what_happened(opened: Open, ask_replay: Ask, eventually: Eventually) -> None:
    publisher = opened(buffer_steps=3)
    for number in range(5):
        publisher.publish(batch(number))
    ask_replay(publisher.replay_endpoint, bytes(8))
    ask_replay(publisher.replay_endpoint, b"odd")
    eventually(lambda: publisher.stats().replays_served == 2)
    stats = publisher.stats()
    assert (stats.batches_sent, stats.events_sent, stats.batches_buffered) == (5, 5, 3)
    assert (stats.batches_replayed, stats.replays_refused) == (1 + 3, 1)  # the folded base, then the window
    assert (stats.last_sequence, stats.batches_pending, stats.open_bind_without_auth) == (4, 0, 0)


def test_clock_base_starts_high_and_clears_first(opened: Open, ask_replay: Ask) -> None:
    publisher = opened(seq_base="clock")
    publisher.publish(batch(1))
    cleared, stored, _ = ask_replay(publisher.replay_endpoint, bytes(8))
    assert BatchDecoder().decode(cleared[-1]).events == (AllBlocksCleared(),)
    assert int.from_bytes(stored[-2], "big") == int.from_bytes(cleared[-2], "big") + 1 > 1_700_000_000_000


def test_shutdown_sends_what_is_pending_and_lets_go(opened: Open, subscribe: Subscribe, connected: Connected) -> None:
    publisher = opened()
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    sent_before = publisher.stats().batches_sent
    publisher.idle()
    publisher.publish(batch(1))
    report = publisher.close(5.0)
    assert number_of(subscriber.recv_multipart()) == 1
    assert (report.batches_sent, report.batches_dropped) == (sent_before + 1, 0)
    assert publisher.close(5.0) == report
    publisher.shutdown()
    with pytest.raises(PublisherClosedError):
        publisher.publish(batch(2))
    # The port is free again: the same address opens.
    opened(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events-backstop-1"]


def test_shutdown_answers_an_open_replay_with_its_end(
    opened: Open, open_socket: Callable[[int], zmq.Socket[bytes]]
) -> None:
    publisher = opened()
    publisher.publish(batch(1))
    client = open_socket(zmq.DEALER)
    client.connect(publisher.replay_endpoint or "")
    client.send_multipart([b"", bytes(8)])
    client.poll(10_000)
    publisher.shutdown()
    assert [client.recv_multipart()[-2] for _ in range(2)] == [bytes(8), publisher.END_SEQ]


def test_sglangs_seven_parameters_go_before_the_config(open_socket: Callable[[int], zmq.Socket[bytes]]) -> None:
    config = KVEventsConfig(publisher="zmq", endpoint="tcp://127.0.0.1:0", bind=True, topic="config", buffer_steps=7)
    for given, topic in (({}, b"config"), ({"topic": "given"}, b"given")):
        publisher = ZmqEventPublisher(0, replay_endpoint="tcp://127.0.0.1:0", config=config, **given)
        reader = open_socket(zmq.SUB)
        reader.subscribe(topic)
        reader.connect(publisher.endpoint)
        try:
            while not reader.poll(5):
                publisher.publish(batch(1))
            assert reader.recv_multipart()[0] == topic
            for _ in range(20):
                publisher.publish(batch(1))
            assert publisher.stats().batches_buffered == 7
        finally:
            publisher.shutdown()
    with pytest.raises(ConfigError, match="hwm"):
        ZmqEventPublisher(0, hwm=True, config=KVEventsConfig(hwm=1))
