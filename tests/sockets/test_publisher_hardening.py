"""The publisher against its surroundings: the scheduler's step goes on, and what is lost is counted."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from scheduler_components import BlockRemoved, ConfigError, ForkedPublisherError, KVCacheEvent, KVEventBatch, StartError
from scheduler_components.kv_events import BatchDecoder, ZmqEventPublisher, write_key_pair, zmq_publisher
from scheduler_components.kv_events.thread_backstop import Backstop

Open = Callable[..., ZmqEventPublisher]
ReadReplay = Callable[[str | None], list[KVCacheEvent]]
Eventually = Callable[[Callable[[], object]], None]
OpenSocket = Callable[[int], zmq.Socket[bytes]]


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(ts=1.0, events=(BlockRemoved((number,)),))


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
    ],
)
def test_a_publisher_made_directly_keeps_the_rules_of_the_configuration(
    opened: Open, options: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(**options)
    assert refused.value.field == field


def test_an_open_replay_is_an_open_bind(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    publisher = opened(replay_endpoint="tcp://*:0")
    assert publisher.stats().open_bind_without_auth == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "readable by anyone who reaches tcp://*:0" in caplog.text


def test_somebody_elses_destroy_does_not_reach_the_stream(opened: Open, read_replay: ReadReplay) -> None:
    publisher = opened()
    zmq.Context.instance().destroy(linger=0)
    publisher.publish(batch(1))
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((1,))]


def test_a_shared_context_that_is_destroyed_costs_counted_batches_and_no_step(opened: Open) -> None:
    shared: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = opened(endpoint="inproc://kv", replay_endpoint="inproc://replay", context=shared)
    publisher.publish(batch(1))
    shared.destroy(linger=0)
    for number in range(3):
        publisher.publish(batch(number))
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
        publisher.publish(batch(0))  # wakes the thread
    while subscriber.poll(100):
        subscriber.recv_multipart()
    publisher.idle()
    publisher.publish(batch(7))  # nobody but publish() could send it now
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
    publisher.publish(batch(1))
    publisher.idle()
    assert wakes  # the next batch may wait, so somebody must look


def test_lag_is_the_age_of_what_waits(opened: Open) -> None:
    publisher = opened(replay_endpoint=None)
    assert publisher.stats().lag_s == 0
    publisher.publish(batch(1))
    publisher.idle()
    assert publisher.stats().lag_s == 0


def test_ipc_is_taken_with_a_lock_and_leaves_nothing(tmp_path: Path, opened: Open) -> None:
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
    publisher.publish(batch(0))
    publisher.idle()
    publisher.publish(batch(1))  # perhaps pending at the fork: the child must not send it too
    if may_defer:
        publisher.idle()
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: publisher.publish(batch(9)), publisher.idle):
            try:
                call()
            except ForkedPublisherError as error:
                said.append(error.owner_pid == os.getppid())
        publisher.shutdown()
        publisher.shutdown()
        os._exit(0 if said == [True, True] else 1)
    assert os.waitpid(child, 0)[1] == 0
    publisher.publish(batch(2))
    assert read_replay(publisher.replay_endpoint) == [BlockRemoved((n,)) for n in range(3)]


def test_a_close_without_any_time_still_closes(opened: Open) -> None:
    publisher = opened()
    publisher.publish(batch(1))
    assert publisher.close(0.0).batches_sent == 1
    opened(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
