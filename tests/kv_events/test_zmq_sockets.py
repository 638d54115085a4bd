"""The ipc lock, and sending.

Property: one contender gets a path, a dead owner's path is free, and no file is left behind. A message is sent
completely or not at all, and while it is sent no other thread runs.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from kit.contention import count_most_holders
from kit.sockets import OpenSocket, Socket

from scheduler_components import StartError
from scheduler_components.kv_events.zmq_sockets import MessageSender, lock_ipc_path, receive_message, receive_queued

pytestmark = [pytest.mark.sockets, pytest.mark.processes]


def test_a_path_is_locked_once_and_free_after_release(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    for _ in range(3):
        lock = lock_ipc_path(path)
        assert lock is not None
        with pytest.raises(StartError, match="another publisher"):
            lock_ipc_path(path)
        lock.release()
        lock.release()
        assert not list(tmp_path.iterdir())


def test_the_abstract_namespace_needs_no_lock() -> None:
    assert lock_ipc_path("@kv") is None


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a person's notes")
    with pytest.raises(StartError, match="not a socket"):
        lock_ipc_path(str(tmp_path / "kv"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["a person's notes"]


def test_a_listener_without_a_lock_is_left_alone_and_its_remains_are_not(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(StartError, match="another publisher"):
            lock_ipc_path(path)
    lock = lock_ipc_path(path)
    assert lock is not None
    lock.release()


def test_a_directory_that_is_not_there_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot lock"):
        lock_ipc_path(str(tmp_path / "none" / "kv"))


def test_the_lock_file_is_not_followed_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "kv.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StartError, match="cannot lock"):
        lock_ipc_path(str(tmp_path / "kv"))
    assert not (tmp_path / "victim").exists()


def test_a_killed_owner_releases_the_path(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    script = (
        "import os, signal, sys; from scheduler_components.kv_events.zmq_sockets import lock_ipc_path\n"
        "lock = lock_ipc_path(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, path], check=False)
    assert Path(f"{path}.lock").exists()
    lock = lock_ipc_path(path)
    assert lock is not None
    lock.release()


def test_a_forked_child_keeps_no_lock_alive(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    # The owner forks a child that outlives it, as engines do with their workers.
    script = (
        "import os, sys; from scheduler_components.kv_events.zmq_sockets import lock_ipc_path\n"
        "lock = lock_ipc_path(sys.argv[1])\n"
        "if os.fork() == 0:\n"
        "    print('ready', flush=True); sys.stdin.read(); os._exit(0)\n"
        "os._exit(0)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdin is not None
    assert owner.stdout.readline() == b"ready\n"
    assert owner.wait(30) == 0
    lock = lock_ipc_path(path)
    assert lock is not None
    lock.release()
    owner.stdin.close()
    assert owner.stdout.read() == b""  # the child has ended
    owner.stdout.close()


def test_many_contenders_get_one_path_in_turn(tmp_path: Path) -> None:
    def acquire() -> Callable[[], object] | None:
        try:
            lock = lock_ipc_path(str(tmp_path / "kv"))
        except StartError:
            return None
        assert lock is not None
        return lock.release

    assert count_most_holders(acquire) == 1
    assert not list(tmp_path.iterdir())


# Sending a message in one call.


@pytest.fixture
def pair(open_socket: OpenSocket) -> tuple[Socket, Socket]:
    """A ROUTER and a DEALER called ``reader`` that is connected to it."""
    router, dealer = open_socket(zmq.ROUTER), open_socket(zmq.DEALER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    dealer.setsockopt(zmq.ROUTING_ID, b"reader")
    router.bind("inproc://pair")
    dealer.connect("inproc://pair")
    dealer.send(b"here")
    router.recv_multipart()
    return router, dealer


def test_frames_of_all_lengths_arrive_as_they_are(pair: tuple[Socket, Socket]) -> None:
    sender = MessageSender(pair[0])
    for body in (
        (b"",),
        (b"a\0b", b""),
        (b"", b"ab" * 50_000, b"\0"),
        (b"a",),
        (b"a", b"b", b"c", b"d"),
        (b"abc", b""),
    ):
        sender.send((b"reader", *body))
        assert pair[1].recv_multipart() == list(body)


def test_messages_are_received_one_by_one_with_all_their_frames(pair: tuple[Socket, Socket]) -> None:
    bodies = [[b""], [b"", b"ab" * 50_000, b"\0"], [b"a"], [b"", b"", b""]]
    for body in bodies:
        pair[0].send_multipart([b"reader", *body])
    assert [receive_message(pair[1]), *receive_queued(pair[1], 2)] == bodies[:3]
    assert list(receive_queued(pair[1], 5)) == bodies[3:]
    with pytest.raises(zmq.Again):
        receive_message(pair[1])


def test_a_message_to_a_full_or_absent_peer_is_not_sent_at_all(pair: tuple[Socket, Socket]) -> None:
    sender, num_sent = MessageSender(pair[0]), 0
    with pytest.raises(zmq.Again):
        while True:
            sender.send((b"reader", b"", str(num_sent).encode(), b"payload"))
            num_sent += 1
    with pytest.raises(zmq.ZMQError) as raised:
        sender.send((b"absent", b"", b"number", b"payload"))
    assert raised.value.errno == zmq.EHOSTUNREACH
    for number in range(num_sent):
        assert pair[1].recv_multipart() == [b"", str(number).encode(), b"payload"]
    assert not pair[1].poll(0)
    sender.send((b"reader", b"next"))
    assert pair[1].recv_multipart() == [b"next"]


def test_a_closed_socket_is_an_error(pair: tuple[Socket, Socket]) -> None:
    sender = MessageSender(pair[0])
    pair[0].close()
    with pytest.raises(zmq.ZMQError) as raised:
        sender.send((b"reader", b""))
    assert raised.value.errno == zmq.ENOTSOCK


def test_no_other_thread_runs_while_messages_are_sent(open_socket: OpenSocket) -> None:
    """pyzmq's own sends would let it run."""
    publisher = open_socket(zmq.PUB)
    publisher.bind("tcp://127.0.0.1:0")
    sender = MessageSender(publisher)
    go, has_run = threading.Event(), threading.Event()

    def run() -> None:
        go.wait()
        has_run.set()

    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(10.0)
    try:
        go.set()  # from now on the thread waits for the GIL
        for number in range(2_000):
            sender.send((b"", number.to_bytes(8, "big"), b"payload"))
        assert not has_run.is_set()
    finally:
        sys.setswitchinterval(interval_s)
        thread.join()
