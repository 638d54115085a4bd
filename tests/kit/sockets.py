"""Sockets for tests: one context per test, always closed, with a deadline for each receive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from scheduler_components import KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, KVEventsConfig, ZmqEventPublisher
from scheduler_components.kv_events.thread_backstop import Backstop

RECEIVE_MS = 30_000
LAST_PROBE = -1.0
LOOPBACK: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}


Socket = zmq.Socket[bytes]
OpenSocket = Callable[[int], Socket]
Open = Callable[..., ZmqEventPublisher]
Subscribe = Callable[..., Socket]
Connected = Callable[..., int]
Ask = Callable[..., list[list[bytes]]]
ReadReplay = Callable[[str | None], list[KVCacheEvent]]
Eventually = Callable[..., None]


class SleepingBackstop(Backstop):
    """A backstop without a thread: the test polls."""

    def start(self) -> None:
        pass

    def watch(self) -> bool:
        return True


@pytest.fixture
def open_socket() -> Iterator[OpenSocket]:
    """Open sockets of one private context; all are closed at the end of the test."""
    context: zmq.Context[Socket] = zmq.Context()
    sockets: list[Socket] = []

    def open_one(kind: int) -> Socket:
        sockets.append(context.socket(kind))
        sockets[-1].setsockopt(zmq.RCVTIMEO, RECEIVE_MS)
        sockets[-1].setsockopt(zmq.IPV6, 1)
        sockets[-1].setsockopt(zmq.LINGER, 0)
        return sockets[-1]

    yield open_one
    for socket in sockets:
        socket.close()
    context.term()


@pytest.fixture
def subscribe(open_socket: OpenSocket) -> Callable[..., Socket]:
    """Connect a SUB socket to an address; receives fail after a deadline."""

    def connect(address: str, topic: bytes = b"") -> Socket:
        socket = open_socket(zmq.SUB)
        socket.subscribe(topic)
        socket.connect(address)
        return socket

    return connect


@pytest.fixture
def ask_replay(open_socket: OpenSocket) -> Callable[..., list[list[bytes]]]:
    """Ask a replay endpoint and return all messages of the answer up to and with its end marker."""

    def ask(address: str, request: bytes, *, kind: int = zmq.DEALER) -> list[list[bytes]]:
        socket = open_socket(kind)
        socket.connect(address)
        socket.send_multipart([b"", request] if kind == zmq.DEALER else [request])
        messages = [socket.recv_multipart()]
        while messages[-1][-2] != (-1).to_bytes(8, "big", signed=True):
            messages.append(socket.recv_multipart())
        return messages

    return ask


@pytest.fixture
def connected() -> Callable[..., int]:
    """Publish probes until ``subscriber`` receives one, because PUB drops messages before the subscription arrives."""

    def publish_until_received(publish: Callable[[KVEventBatch], None], subscriber: Socket) -> int:
        for probes in range(1, 2_000):
            publish(KVEventBatch(ts=0.0, events=()))
            if subscriber.poll(5):
                publish(KVEventBatch(ts=LAST_PROBE, events=()))
                while BatchDecoder().decode(subscriber.recv_multipart()[-1]).ts != LAST_PROBE:
                    pass
                return probes + 1
        raise AssertionError("the subscriber never received a probe")

    return publish_until_received


@pytest.fixture
def opened() -> Iterator[Callable[..., ZmqEventPublisher]]:
    """Open publishers on loopback ports that the system chooses, with replay; none outlives its test."""
    publishers: list[ZmqEventPublisher] = []
    threads = set(threading.enumerate())

    def open_publisher(
        attn_dp_rank: int = 0, *, context: zmq.Context[Socket] | None = None, **options: Any
    ) -> ZmqEventPublisher:
        config = KVEventsConfig(**(LOOPBACK | options))
        publishers.append(ZmqEventPublisher(attn_dp_rank, config=config, context=context))
        return publishers[-1]

    yield open_publisher
    for publisher in publishers:
        publisher.shutdown()
    assert set(threading.enumerate()) == threads


@pytest.fixture
def read_replay(ask_replay: Callable[..., list[list[bytes]]]) -> Callable[[str], list[KVCacheEvent]]:
    """Ask a replay endpoint for everything and return all events of the answer, each sound."""

    def read(address: str) -> list[KVCacheEvent]:
        decoder = BatchDecoder()
        batches = [decoder.decode(message[-1]) for message in ask_replay(address, bytes(8))[:-1]]
        assert not any(batch.errors for batch in batches)
        return [event for batch in batches for event in batch.events]

    return read
