"""The topics of publishers that send, within the time, however many they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest
import zmq

from observability.kv_stream import static_address
from observability.zmq_topic_probe import probe_topics

pytestmark = [pytest.mark.sockets, pytest.mark.threads]

Send = Callable[[str, list[bytes]], str]


@pytest.fixture
def send(stack: ExitStack, tmp_path: Path) -> Iterator[Send]:
    """Publish messages of these topics, over and over, until the test ends. Return the endpoint."""
    context = stack.enter_context(zmq.Context())
    over = Event()

    def run(socket: zmq.Socket[bytes], topics: list[bytes]) -> None:
        with socket:
            while not over.wait(0.002):
                for topic in topics:
                    socket.send_multipart((topic, bytes(8), b"payload"))

    def start(name: str, topics: list[bytes]) -> str:
        socket = context.socket(zmq.PUB)
        socket.linger = 0
        endpoint = f"ipc://{tmp_path}/{name}"
        socket.bind(endpoint)
        thread = Thread(target=run, args=(socket, topics))
        thread.start()
        stack.callback(thread.join)
        return endpoint

    yield start
    over.set()


def test_the_topic_of_each_stream_is_found_as_soon_as_it_sends(send: Send) -> None:
    addresses = [
        static_address(send("a", [b"kv"]), rank=0),
        static_address(send("b", [b""]), topic="another", rank=1),
    ]
    assert probe_topics(addresses, listen_s=60.0) == {0: {b"kv"}, 1: {b""}}


def test_a_silent_stream_has_none_when_the_time_is_up(send: Send, tmp_path: Path) -> None:
    addresses = [static_address(send("a", [b"kv"]), rank=0), static_address(f"ipc://{tmp_path}/none", rank=1)]
    found = probe_topics(addresses, listen_s=0.3)
    assert found == {0: {b"kv"}, 1: set()}


def test_a_publisher_of_many_topics_cannot_fill_the_memory(send: Send, tmp_path: Path) -> None:
    topics = [b"topic %d" % number for number in range(100)]
    addresses = [static_address(send("a", topics), rank=0), static_address(f"ipc://{tmp_path}/none", rank=1)]
    found = probe_topics(addresses, listen_s=0.3)
    assert len(found[0]) == 8
    assert found[0] <= set(topics)


def test_without_streams_nothing_is_waited_for() -> None:
    assert probe_topics([], listen_s=3_600.0) == {}


def test_a_time_that_is_over_reads_nothing(send: Send) -> None:
    assert probe_topics([static_address(send("a", [b"kv"]), rank=4)], listen_s=0.0) == {4: set()}
