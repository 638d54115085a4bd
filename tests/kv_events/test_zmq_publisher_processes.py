"""Killed, stopped and restarted publishers and subscribers. Property: the view is live and correct at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from scheduler_components.kv_events import write_key_pair

pytestmark = [pytest.mark.faults, pytest.mark.sockets, pytest.mark.processes]

Start = Callable[..., Any]


@pytest.mark.parametrize("seq_base", ["zero", "clock"])
@pytest.mark.parametrize("second_life", [10, 5_000], ids=["behind", "past the old number"])
def test_killed_in_mid_stream_and_started_again(
    start_publisher: Start, open_proxy: Start, watch: Start, seq_base: str, second_life: int
) -> None:
    first = start_publisher(seq_base=seq_base)
    # Another process may use a port of the system's choice before the successor binds it.
    events, replay = open_proxy(first.endpoint), open_proxy(first.replay_endpoint)
    view = watch(events.address, replay.address)
    first.ask("publish", 0, 1_000, 10)
    view.converge(set(range(1_000)))
    first.begin("publish", 1_000, 10_000_000, 10)
    view.poll_until(lambda: 1_500 in view.subscriber.blocks(0))
    first.process.kill()
    first.process.wait()
    second = start_publisher(seq_base=seq_base, buffer_steps=100)
    events.lead_to(second.endpoint)
    replay.lead_to(second.replay_endpoint)
    second.ask("publish", -second_life, 0, 10)
    view.converge(set(range(-second_life, 0)))


def test_the_ipc_path_of_a_killed_publisher_is_reused(start_publisher: Start, watch: Start, tmp_path: Path) -> None:
    addresses = {"endpoint": f"ipc://{tmp_path}/kv", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    first = start_publisher(**addresses)
    view = watch(first.endpoint, first.replay_endpoint)
    first.ask("publish", 0, 10, 10)
    view.converge(set(range(10)))
    first.process.kill()
    first.process.wait()
    assert (tmp_path / "kv.lock").exists()
    second = start_publisher(**addresses)
    second.ask("publish", 100, 110, 10)
    view.converge(set(range(100, 110)))
    assert second.exit() == 0
    assert not list(tmp_path.iterdir())


def test_a_stopped_subscriber_catches_up_and_delays_no_other(start_publisher: Start, start_subscriber: Start) -> None:
    # The socket's queue and the replay buffer are both far smaller than the number of missed batches.
    publisher = start_publisher(hwm=100, buffer_steps=500)
    subscriber = start_subscriber(publisher.endpoint, publisher.replay_endpoint)
    publisher.ask("publish", 0, 100, 1_000)
    wait_for_blocks(subscriber, list(range(100)))
    os.kill(subscriber.process.pid, signal.SIGSTOP)
    publisher.ask("publish", 100, 10_000, 1_000)
    os.kill(subscriber.process.pid, signal.SIGCONT)
    wait_for_blocks(subscriber, list(range(10_000)))
    assert subscriber.exit() == 0


def wait_for_blocks(subscriber: Any, blocks: list[int]) -> None:
    for _ in range(2_000):
        subscriber.send("?")
        answer = subscriber.read()
        if answer["blocks"] == blocks and answer["state"] == "live":
            return
    raise AssertionError(f"{len(answer['blocks'])} blocks, {answer['state']}")


def test_interpreter_exit_sends_the_tail(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher()
    subscriber = dial(zmq.SUB, publisher.endpoint, hwm=0)
    while not subscriber.poll(5):
        publisher.ask("publish", 0, 1, 10)
    publisher.ask("publish", 1, 5_000, 100)
    last = publisher.ask("stats")["last_sequence"]
    assert publisher.exit() == 0
    while int.from_bytes(subscriber.recv_multipart()[1], "big") != last:
        pass


def test_interpreter_exit_does_not_wait_for_readers_that_never_read(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher()
    dial(zmq.SUB, publisher.endpoint, hwm=1)
    reader = dial(zmq.DEALER, publisher.replay_endpoint, hwm=1)
    reader.send_multipart([b"", bytes(8)])
    assert reader.poll(20_000)
    publisher.ask("publish", 0, 3_000, 10_000)
    assert publisher.exit() == 0


FORKING = """
import os, sys, warnings
from scheduler_components import AllBlocksCleared, ForkedPublisherError, KVEventBatch
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher

batch = KVEventBatch(1.0, (AllBlocksCleared(),))
config = KVEventsConfig(bind=True, **eval(sys.argv[1]))
publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=config)
publisher.SHUTDOWN_TIMEOUT = 3_600.0  # a child that waited would never end
publisher.publish(batch)
publisher.idle()
publisher.publish(batch)
child = os.fork()
if child == 0:
    try:
        publisher.publish(batch)
    except ForkedPublisherError:
        # Copies of the parent's sockets, which pyzmq lets no child close.
        warnings.filterwarnings("ignore", "Unclosed socket", ResourceWarning)
        sys.exit(7)  # the regular exit: atexit, garbage collection, everything
    sys.exit(1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
publisher.publish(batch)
report = publisher.close(10.0)
print(code, report.batches_handed_over, report.batches_dropped)
"""


@pytest.mark.parametrize("guarded", [False, True])
def test_a_forked_child_leaves_by_the_ordinary_way_out(guarded: bool, tmp_path: Path) -> None:
    options: dict[str, str] = {}
    if guarded:
        _, secret = write_key_pair(tmp_path / "own", "publisher")
        client, _ = write_key_pair(tmp_path / "clients", "client")
        options = {"auth": "required", "secret_key_file": str(secret), "client_keys_dir": str(client.parent)}
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore:.*multi-threaded:DeprecationWarning", "-c", FORKING, repr(options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("7 3 0\n", "")
