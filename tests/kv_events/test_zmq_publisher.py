"""The ZMQ publisher on real sockets: framing, order, replay, deferral, refusal, shutdown."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from kit.events import numbered_batch
from kit.sockets import Ask, Connected, Eventually, Open, ReadReplay, Subscribe

from scheduler_components import (
    AllBlocksCleared,
    BlockRemoved,
    ConfigError,
    ForkedPublisherError,
    KVEventBatch,
    PublisherClosedError,
    StartError,
)
from scheduler_components.kv_events import (
    BatchDecoder,
    KVEventsConfig,
    ZmqEventPublisher,
    write_key_pair,
    zmq_publisher,
)
from scheduler_components.kv_events.thread_backstop import Backstop

pytestmark = pytest.mark.sockets


def number_of(message: list[bytes]) -> int:
    event = BatchDecoder().decode(message[-1]).events[0]
    assert isinstance(event, BlockRemoved)
    return event.block_hashes[0]


def test_live_message_is_topic_sequence_payload(opened: Open, subscribe: Subscribe, connected: Connected) -> None:
    publisher = opened(attn_dp_rank=0, topic="kv@model")
    subscriber = subscribe(publisher.endpoint, b"kv@")
    probes = connected(publisher.publish, subscriber)
    publisher.publish(numbered_batch(7))
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
    assert publisher.endpoint == ZmqEventPublisher.offset_endpoint_port(f"tcp://127.0.0.1:{base}", 2)
    assert ZmqEventPublisher.offset_endpoint_port(None, 2) is None
    assert publisher.replay_endpoint == f"tcp://127.0.0.1:{base + 5}"
    publisher.publish(numbered_batch(1))
    stored = ask_replay(publisher.replay_endpoint, bytes(8))
    assert BatchDecoder().decode(stored[0][-1]).attn_dp_rank == 2


@pytest.mark.parametrize("hook", [True, False], ids=["with idle()", "without idle()"])
def test_all_batches_arrive_in_order(opened: Open, subscribe: Subscribe, connected: Connected, hook: bool) -> None:
    publisher = opened()
    subscriber = subscribe(publisher.endpoint)
    probes = connected(publisher.publish, subscriber)
    for number in range(500):
        publisher.publish(numbered_batch(number))
        if hook and number % 3 == 0:
            publisher.idle()
    messages = [subscriber.recv_multipart() for _ in range(500)]
    assert [number_of(message) for message in messages] == list(range(500))
    assert [int.from_bytes(message[1], "big") for message in messages] == list(range(probes, probes + 500))


def test_the_tail_is_sent_when_the_scheduler_stops_calling(
    opened: Open, subscribe: Subscribe, connected: Connected
) -> None:
    publisher = opened()
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    publisher.idle()
    publisher.publish(numbered_batch(42))
    assert number_of(subscriber.recv_multipart()) == 42


def test_inline_every_call_sends_its_batch(opened: Open, subscribe: Subscribe, connected: Connected) -> None:
    publisher = opened(send_mode="inline")
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    for number in range(500):
        publisher.publish(numbered_batch(number))
        assert publisher.stats().batches_pending == 0
    assert [number_of(subscriber.recv_multipart()) for _ in range(500)] == list(range(500))


def test_a_late_joiner_catches_up_by_replay(opened: Open, ask_replay: Ask) -> None:
    publisher = opened()
    for number in range(300):
        publisher.publish(numbered_batch(number))
    messages = ask_replay(publisher.replay_endpoint, (100).to_bytes(8, "big"))
    assert [number_of(message) for message in messages[:-1]] == list(range(100, 300))
    assert messages[-1] == [b"", publisher.END_SEQ, b""]


def test_a_req_socket_is_answered_too(opened: Open, ask_replay: Ask) -> None:
    publisher = opened()
    assert ask_replay(publisher.replay_endpoint, bytes(8), kind=zmq.REQ) == [[publisher.END_SEQ, b""]]


def test_no_replay_endpoint_keeps_nothing(opened: Open) -> None:
    publisher = opened(replay_endpoint=None, send_mode="inline")
    publisher.publish(numbered_batch(1))
    stats = publisher.stats()
    assert publisher.replay_endpoint is None
    assert (stats.batches_sent, stats.batches_buffered, stats.bytes_buffered) == (1, 0, 0)


def test_counters_count_every_outcome(opened: Open, ask_replay: Ask, eventually: Eventually) -> None:
    publisher = opened(buffer_steps=3)
    for number in range(5):
        publisher.publish(numbered_batch(number))
    ask_replay(publisher.replay_endpoint, bytes(8))
    ask_replay(publisher.replay_endpoint, b"odd")
    eventually(lambda: publisher.stats().replays_served == 2)
    stats = publisher.stats()
    assert (stats.batches_sent, stats.events_sent, stats.batches_buffered) == (5, 5, 3)
    assert (stats.batches_replayed, stats.replays_refused) == (1 + 3, 1)  # the folded snapshot, then the replay buffer
    assert (stats.last_sequence, stats.batches_pending, stats.open_bind_without_auth) == (4, 0, 0)


def test_seq_base_clock_starts_high_and_clears_first(opened: Open, ask_replay: Ask) -> None:
    publisher = opened(seq_base="clock")
    publisher.publish(numbered_batch(1))
    cleared, stored, _ = ask_replay(publisher.replay_endpoint, bytes(8))
    assert BatchDecoder().decode(cleared[-1]).events == (AllBlocksCleared(),)
    assert int.from_bytes(stored[-2], "big") == int.from_bytes(cleared[-2], "big") + 1 > 1_700_000_000_000


def test_an_epoch_after_the_clock_is_set_back_starts_above_the_earlier_one(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor, clock_ns = str(tmp_path / "floor"), 1_800_000_000_000_000_000
    monkeypatch.setattr("time.time_ns", lambda: clock_ns)
    highest = 0
    for run in range(3):
        publisher = opened(attn_dp_rank=1, seq_base="clock", seq_floor_file=floor, send_mode="inline")
        publisher.publish(numbered_batch(run))
        first = publisher.stats().last_sequence - 1
        assert first > highest
        highest = publisher.stats().last_sequence
        publisher.shutdown()
        clock_ns -= 10**15
    assert [each.name for each in tmp_path.iterdir()] == ["floor_dp1"]


def test_a_failed_start_releases_the_floor(opened: Open, tmp_path: Path) -> None:
    taken, floor = opened(), str(tmp_path / "floor")
    with pytest.raises(StartError, match="cannot bind"):
        opened(endpoint=taken.endpoint, seq_base="clock", seq_floor_file=floor)
    opened(seq_base="clock", seq_floor_file=floor)


def test_shutdown_sends_pending_batches_and_releases_resources(
    opened: Open, subscribe: Subscribe, connected: Connected
) -> None:
    publisher = opened(send_mode="inline")
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    sent_before = publisher.stats().batches_sent
    publisher.idle()
    publisher.publish(numbered_batch(1))
    report = publisher.close(5.0)
    assert number_of(subscriber.recv_multipart()) == 1
    assert (report.batches_handed_over, report.batches_dropped) == (sent_before + 1, 0)
    assert publisher.close(5.0) == report
    publisher.shutdown()
    with pytest.raises(PublisherClosedError):
        publisher.publish(numbered_batch(2))
    # The port is free again.
    opened(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events-backstop-1"]


def test_shutdown_answers_an_open_replay_with_its_end(
    opened: Open, open_socket: Callable[[int], zmq.Socket[bytes]]
) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(1))
    client = open_socket(zmq.DEALER)
    client.connect(publisher.replay_endpoint or "")
    client.send_multipart([b"", bytes(8)])
    client.poll(10_000)
    publisher.shutdown()
    assert [client.recv_multipart()[-2] for _ in range(2)] == [bytes(8), publisher.END_SEQ]


def test_sglangs_seven_parameters_go_before_the_config(
    open_socket: Callable[[int], zmq.Socket[bytes]], eventually: Eventually
) -> None:
    config = KVEventsConfig(publisher="zmq", endpoint="tcp://127.0.0.1:0", bind=True, topic="config", buffer_steps=7)
    for given, topic in (({}, b"config"), ({"topic": "given"}, b"given")):
        publisher = ZmqEventPublisher(0, replay_endpoint="tcp://127.0.0.1:0", config=config, **given)
        reader = open_socket(zmq.SUB)
        reader.subscribe(topic)
        reader.connect(publisher.endpoint)
        try:
            while not reader.poll(5):
                publisher.publish(numbered_batch(1))
            assert reader.recv_multipart()[0] == topic
            for _ in range(20):
                publisher.publish(numbered_batch(1))
            eventually(lambda publisher=publisher: publisher.stats().batches_buffered == 7)
        finally:
            publisher.shutdown()
    with pytest.raises(ConfigError, match="hwm"):
        ZmqEventPublisher(0, hwm=True, config=KVEventsConfig(hwm=1))


# Opening the publisher: addresses of every transport, refusals, bind or connect.


def test_a_port_in_use_is_a_start_error_and_leaves_nothing_open(opened: Open) -> None:
    first = opened()
    with pytest.raises(StartError, match=r"cannot bind.*in use"):
        opened(endpoint=first.endpoint)
    with pytest.raises(StartError, match="choose a free port"):
        opened(replay_endpoint=first.replay_endpoint)
    assert threading.active_count() == 2  # the main thread and the first publisher's backstop


def test_a_concrete_host_is_connected_to_unless_bind_is_true(
    open_socket: Callable[[int], zmq.Socket[bytes]], opened: Open
) -> None:
    collector = open_socket(zmq.SUB)
    collector.subscribe(b"")
    port = collector.bind_to_random_port("tcp://127.0.0.1")
    publisher = opened(endpoint=f"tcp://127.0.0.1:{port}", bind=None, replay_endpoint=None)
    while not collector.poll(5):
        publisher.publish(KVEventBatch(ts=1.0, events=()))
    assert len(collector.recv_multipart()) == 3


@pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://0.0.0.0:0", "tcp://[::]:0"])
def test_wildcards_bind_and_log_a_warning(opened: Open, caplog: pytest.LogCaptureFixture, endpoint: str) -> None:
    publisher = opened(endpoint=endpoint, bind=None)
    assert int(publisher.endpoint.rpartition(":")[2]) > 0
    assert publisher.stats().open_bind_without_auth == 1
    assert "readable by anyone" in caplog.text


def test_ipc_and_inproc_carry_the_stream(
    tmp_path_factory: pytest.TempPathFactory, opened: Open, connected: Connected
) -> None:
    shared: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    for endpoint in (f"ipc://{tmp_path_factory.mktemp('s')}/kv", "inproc://kv"):
        publisher = opened(attn_dp_rank=1, endpoint=endpoint, replay_endpoint=None, bind=None)
        assert publisher.endpoint == endpoint + "_dp1"
        subscriber = shared.socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.connect(publisher.endpoint)
        connected(publisher.publish, subscriber)
        subscriber.close(linger=0)


# Failures around the publisher: the scheduler's step continues, and losses are counted.


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"buffer_steps": -1}, "buffer_steps"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"buffer_steps": "10"}, "buffer_steps"),
        ({"buffer_bytes": 0}, "buffer_bytes"),
        ({"hwm": 0}, "hwm"),
        ({"hwm": 2**31}, "hwm"),
        ({"max_queue_size": 0}, "max_queue_size"),
        ({"max_queue_size": True}, "max_queue_size"),
        ({"topic": "\ud800"}, "topic"),
        ({"topic": b"kv"}, "topic"),
        ({"replay_endpoint": ""}, "replay_endpoint"),
        ({"replay_endpoint": "ipc://x", "endpoint": "ipc://x"}, "replay_endpoint"),
        ({"attn_dp_rank": -1}, "attn_dp_rank"),
        ({"attn_dp_rank": "0"}, "attn_dp_rank"),
        ({"attn_dp_rank": True}, "attn_dp_rank"),
        ({"auth": "required"}, "secret_key_file"),
        ({"endpoint": "tcp://127.0.0.1"}, "endpoint"),
        ({"replay_endpoint": "nonsense"}, "replay_endpoint"),
        ({"attn_dp_rank": 1, "endpoint": "tcp://*:65535"}, "endpoint"),
        ({"dialect": "xml"}, "dialect"),
        ({"replay_framing": "xml"}, "replay_framing"),
        ({"seq_base": "one"}, "seq_base"),
    ],
)
def test_a_publisher_made_directly_keeps_the_rules_of_the_configuration(
    opened: Open, options: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(**options)
    assert refused.value.field == field
    assert threading.active_count() == 1


def test_an_open_replay_is_an_open_bind(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    publisher = opened(replay_endpoint="tcp://*:0")
    assert publisher.stats().open_bind_without_auth == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "readable by anyone who reaches tcp://*:0" in caplog.text


def test_destroying_another_context_does_not_affect_the_stream(opened: Open, read_replay: ReadReplay) -> None:
    publisher = opened()
    zmq.Context.instance().destroy(linger=0)
    publisher.publish(numbered_batch(1))
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((1,))]


def test_a_shared_context_that_is_destroyed_costs_counted_batches_and_no_step(opened: Open) -> None:
    shared: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    addresses = {"endpoint": "inproc://kv", "replay_endpoint": "inproc://replay"}
    publisher = opened(**addresses, context=shared, send_mode="inline")
    publisher.publish(numbered_batch(1))
    shared.destroy(linger=0)
    for number in range(3):
        publisher.publish(numbered_batch(number))
        publisher.idle()
    assert (publisher.stats().batches_sent, publisher.stats().batches_dropped) == (1, 3)
    assert publisher.close(5.0).batches_dropped == 3


def test_a_dead_backstop_is_noticed_by_the_next_publish(
    opened: Open, subscribe: Callable[..., zmq.Socket[bytes]], connected: Callable[..., int], eventually: Eventually
) -> None:
    publisher = opened(replay_endpoint=None)
    subscriber = subscribe(publisher.endpoint)
    connected(publisher.publish, subscriber)
    (backstop,) = (each for each in threading.enumerate() if each.name == "kv-events-backstop-0")
    assert backstop.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(backstop.ident), ctypes.py_object(RuntimeError))
    while backstop.is_alive():
        publisher.idle()
        publisher.publish(numbered_batch(0))  # wakes the thread
    publisher.idle()
    last = publisher.stats().last_sequence
    while int.from_bytes(subscriber.recv_multipart()[1], "big") != last:
        pass
    publisher.publish(numbered_batch(7))  # only publish() can send it now
    assert BatchDecoder().decode(subscriber.recv_multipart()[2]).events == (BlockRemoved((7,)),)
    assert publisher.stats().batches_pending == 0


def test_a_scheduler_that_only_idles_keeps_no_thread_awake(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[str] = []

    class NotedBackstop(Backstop):
        def watch(self) -> bool:
            wakes.append("watch")
            return super().watch()

    monkeypatch.setattr(zmq_publisher, "Backstop", NotedBackstop)
    publisher = opened()
    for _ in range(3):
        publisher.idle()
    assert not wakes
    publisher.publish(numbered_batch(1))
    publisher.idle()
    assert wakes  # the next batch may wait, so the thread must poll


def test_ipc_paths_are_locked_and_removed(tmp_path: Path, opened: Open) -> None:
    addresses = {"endpoint": f"ipc://{tmp_path}/kv", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    first = opened(**addresses)
    for taken in (addresses, {"endpoint": addresses["endpoint"]}, {"endpoint": addresses["replay_endpoint"]}):
        with pytest.raises(StartError, match="another publisher is bound there"):
            opened(**taken)
    with pytest.raises(StartError, match="another publisher"):
        opened(endpoint=f"ipc://{tmp_path}/other", replay_endpoint=addresses["endpoint"])
    assert {path.name for path in tmp_path.iterdir()} == {"kv", "kv.lock", "replay", "replay.lock"}
    first.shutdown()
    assert not list(tmp_path.iterdir())
    opened(**addresses).shutdown()
    assert not list(tmp_path.iterdir())


def test_a_start_without_threads_left_leaves_nothing(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    _, secret = write_key_pair(tmp_path / "own", "publisher")
    client, _ = write_key_pair(tmp_path / "clients", "client")
    keys = {"auth": "required", "secret_key_file": str(secret), "client_keys_dir": str(client.parent)}
    before = set(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for options in ({}, keys):
            with pytest.raises(StartError, match="can't start new thread"):
                opened(endpoint=f"ipc://{tmp_path}/kv", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"own", "clients"}
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 warns of what is tested here
@pytest.mark.parametrize("may_defer", [False, True])
def test_a_forked_child_cannot_publish_and_its_parent_does_not_notice(
    may_defer: bool, opened: Open, read_replay: ReadReplay
) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(0))
    publisher.idle()
    publisher.publish(numbered_batch(1))  # perhaps pending at the fork: the child must not send it, too
    if may_defer:
        publisher.idle()
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: publisher.publish(numbered_batch(9)), publisher.idle):
            try:
                call()
            except ForkedPublisherError as error:
                said.append(error.owner_pid == os.getppid())
        publisher.shutdown()
        publisher.shutdown()
        os._exit(0 if said == [True, True] else 1)
    assert os.waitpid(child, 0)[1] == 0
    publisher.publish(numbered_batch(2))
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((n,)) for n in range(3)]


def test_a_close_without_any_time_still_closes(opened: Open) -> None:
    publisher = opened()
    publisher.publish(numbered_batch(1))
    assert publisher.close(0.0).batches_handed_over == 1
    opened(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
