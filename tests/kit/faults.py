"""Processes, a lossy network and a watched subscriber for the fault tests. Each ends with its test."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from kit.waiting import wait_until
from observability.kv_stream import FollowPolicy, StreamState, Subscriber, open_subscriber, static_address

DEADLINE_S = 40.0


class ChildProcess:
    """A child that answers one JSON line to each line it is sent."""

    def __init__(self, script: str, *arguments: str) -> None:
        path = Path(__file__).parent / script
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, str(path), *arguments], text=True, bufsize=1, **pipes)

    def read(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, "the child did not answer"
        return json.loads(self.process.stdout.readline())

    def send(self, text: str) -> None:
        self.process.stdin.write(text)  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def exit(self) -> int:
        """Close its standard input, wait for its end and return its exit code."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class PublisherProcess(ChildProcess):
    """See ``publisher_process.py``."""

    def __init__(self, **options: object) -> None:
        loopback = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}
        super().__init__("publisher_process.py", json.dumps(loopback | options))
        addresses = self.read()
        self.endpoint: str = addresses["endpoint"]
        self.replay_endpoint: str = addresses["replay_endpoint"]

    def ask(self, *command: object) -> Any:
        self.begin(*command)
        return self.read()

    def begin(self, *command: object) -> None:
        """Send a command without waiting for its answer."""
        self.send(json.dumps(command) + "\n")


class TcpProxy:
    """Forwards TCP connections of loopback to ``target``; can cut them all, and hold what they carry."""

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._forward, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                self._flowing.wait()
                sink.sendall(data)
        for end in (source, sink):
            _hang_up(end)

    def lead_to(self, target: str) -> None:
        """Forward new connections to another address: a restarted peer then needs no port that it had before."""
        self._target = ("127.0.0.1", int(target.rpartition(":")[2]))

    def hold(self) -> None:
        """Deliver nothing more until ``go_on``; connections stay open."""
        self._flowing.clear()

    def go_on(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Break every connection, wherever in a message it is."""
        with self._lock:
            ends = [end for pair in self._pairs for end in pair]
        for end in ends:
            _hang_up(end)

    def close(self) -> None:
        _hang_up(self._listener)
        self._listener.close()
        self.go_on()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for pair in self._pairs:
            for end in pair:
                end.close()


def _hang_up(end: socket.socket) -> None:
    """Wake the thread that reads from ``end``, which closes it."""
    with suppress(OSError):  # the other side closed it first
        end.shutdown(socket.SHUT_RDWR)


class Watched:
    """The kit's subscriber of one stream, polled until a condition holds."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber

    @property
    def state(self) -> StreamState:
        return self.subscriber.stats()[0].state

    def poll_until(self, condition: Callable[[], object]) -> None:
        stats = self.subscriber.stats
        wait_until(condition, poll=lambda: self.subscriber.poll(0.02), describe=stats, deadline_s=DEADLINE_S)

    def converge(self, blocks: set[int]) -> None:
        """Poll until the view is live and right; it may be wrong before, but then it must not say live for good."""
        self.poll_until(lambda: self.state is StreamState.LIVE and self.subscriber.blocks(0) == blocks)


@pytest.fixture
def start_publisher(stack: ExitStack) -> Callable[..., PublisherProcess]:
    """Start a publisher in a process of its own."""

    def start(**options: object) -> PublisherProcess:
        publisher = PublisherProcess(**options)
        stack.callback(publisher.end)
        return publisher

    return start


@pytest.fixture
def start_subscriber(stack: ExitStack) -> Callable[[str, str], ChildProcess]:
    """Start a subscriber in a process of its own."""

    def start(events: str, replay: str) -> ChildProcess:
        subscriber = ChildProcess("subscriber_process.py", events, replay)
        stack.callback(subscriber.end)
        return subscriber

    return start


@pytest.fixture
def dial(stack: ExitStack) -> Callable[..., zmq.Socket[bytes]]:
    """Connect a bare SUB or DEALER socket: ``dial(kind, endpoint, hwm=1_000)``. It waits at most ``DEADLINE_S``."""

    def start(kind: int, endpoint: str, *, hwm: int = 1_000) -> zmq.Socket[bytes]:
        context = stack.enter_context(zmq.Context())
        socket: zmq.Socket[bytes] = stack.enter_context(context.socket(kind))
        socket.setsockopt(zmq.RCVTIMEO, int(1_000 * DEADLINE_S))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, hwm)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        return socket

    return start


@pytest.fixture
def open_proxy(stack: ExitStack) -> Callable[[str], TcpProxy]:
    """Put a proxy in front of an address."""

    def start(target: str) -> TcpProxy:
        proxy = TcpProxy(target)
        stack.callback(proxy.close)
        return proxy

    return start


@pytest.fixture
def watch(stack: ExitStack) -> Callable[[str, str], Watched]:
    """Follow a stream in this process."""

    def start(events: str, replay: str) -> Watched:
        policy = FollowPolicy(probe_interval_s=0.1, answer_timeout_s=1.0)
        address = static_address(events, replay=replay)
        return Watched(stack.enter_context(open_subscriber([address], policy=policy)))

    return start
