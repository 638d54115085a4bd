"""The sockets of one stream: a connection per SUB and per request, pauses between attempts, bad messages counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from kit.events import stored_run
from kit.follower_bench import FollowerBench, payload
from kit.waiting import wait_until

from observability.kv_stream import static_address
from observability.kv_stream.instructions import SendReplayRequest
from observability.kv_stream.thread_fair_rlock import FairRLock
from observability.kv_stream.zmq_stream import SocketFactory, ZmqReplayChannel, ZmqStream
from scheduler_components.kv_events import Endpoint
from scheduler_components.kv_events.replay_messages import ReplayRequest

pytestmark = pytest.mark.sockets

WAIT_MS = 10_000
Bind = Callable[[int], tuple[zmq.Socket[bytes], Endpoint]]


@pytest.fixture
def factory(stack: ExitStack) -> SocketFactory:
    return SocketFactory(stack.enter_context(zmq.Context()))


@pytest.fixture
def bind(factory: SocketFactory, stack: ExitStack, tmp_path: Path) -> Bind:
    """Bind a peer's socket at an ipc path."""

    def start(kind: int) -> tuple[zmq.Socket[bytes], Endpoint]:
        socket = stack.enter_context(factory.context.socket(kind))
        socket.linger, socket.rcvtimeo = 0, WAIT_MS
        endpoint = f"ipc://{tmp_path}/peer-{kind}"
        socket.bind(endpoint)
        return socket, Endpoint.parse(endpoint)

    return start


@pytest.fixture
def channel(factory: SocketFactory, bind: Bind) -> Iterator[tuple[ZmqReplayChannel, zmq.Socket[bytes]]]:
    """A channel and the ROUTER at its other end."""
    router, endpoint = bind(zmq.ROUTER)
    opened = ZmqReplayChannel(factory, endpoint)
    yield opened, router
    opened.cancel()


def read(channel: ZmqReplayChannel) -> tuple[int, list[bytes]]:
    assert channel.socket is not None
    assert channel.socket.poll(WAIT_MS)
    message = channel.read()
    assert message is not None
    return message


def test_an_answer_has_the_number_of_its_request(channel: tuple[ZmqReplayChannel, zmq.Socket[bytes]]) -> None:
    requests, router = channel
    requests.send(SendReplayRequest(4, 17))
    identity, empty, request = router.recv_multipart()
    assert (empty, ReplayRequest.parse(request).start) == (b"", 17)
    assert requests.read() is None
    router.send_multipart((identity, b"", b"answer"))
    assert read(requests) == (4, [b"", b"answer"])


def test_a_late_answer_to_the_previous_request_is_never_read(
    channel: tuple[ZmqReplayChannel, zmq.Socket[bytes]],
) -> None:
    requests, router = channel
    requests.send(SendReplayRequest(1, 0))
    first = router.recv_multipart()[0]
    requests.send(SendReplayRequest(2, 5))
    second = router.recv_multipart()[0]
    assert first != second
    router.send_multipart((first, b"", b"late"))
    router.send_multipart((second, b"", b"answer"))
    assert read(requests) == (2, [b"", b"answer"])
    assert requests.read() is None


def test_a_cancelled_request_has_no_socket_and_no_answer(
    channel: tuple[ZmqReplayChannel, zmq.Socket[bytes]],
) -> None:
    requests, _ = channel
    requests.send(SendReplayRequest(1, 0))
    requests.cancel()
    requests.cancel()
    assert (requests.socket, requests.read()) == (None, None)


def test_without_a_replay_endpoint_a_request_opens_nothing(factory: SocketFactory) -> None:
    requests = ZmqReplayChannel(factory, None)
    requests.send(SendReplayRequest(1, 0))
    assert (requests.socket, requests.read()) == (None, None)


class StreamBench:
    """A stream without replay, followed into the view of a ``FollowerBench``."""

    def __init__(self, factory: SocketFactory, endpoint: str) -> None:
        self.bench = FollowerBench(has_replay=False)
        self.stream = ZmqStream(
            factory,
            static_address(endpoint, topic="kv", rank=3),
            self.bench.follower,
            ZmqReplayChannel(factory, None),
            FairRLock(),
        )

    def drain_until(self, condition: Callable[[], object], now_s: float = 0.0) -> None:
        def step() -> object:
            self.stream.drain(now_s)
            return condition()

        wait_until(step)


@pytest.fixture
def open_stream(factory: SocketFactory, stack: ExitStack) -> Callable[[str], StreamBench]:
    def start(endpoint: str) -> StreamBench:
        opened = StreamBench(factory, endpoint)
        stack.callback(opened.stream.close)
        return opened

    return start


def frame(number: int, topic: bytes = b"kv") -> tuple[bytes, bytes, bytes]:
    return topic, number.to_bytes(8, "big"), payload(stored_run(number, 1))


def test_live_messages_reach_the_view_and_others_are_counted(
    bind: Bind, open_stream: Callable[[str], StreamBench]
) -> None:
    publisher, endpoint = bind(zmq.XPUB)
    opened = open_stream(str(endpoint))
    opened.stream.drain(0.0)
    assert publisher.recv() == b"\1kv"
    opened.drain_until(lambda: opened.bench.diary.states)
    for message in (frame(0), (b"kv", b"short"), frame(1, b"kv-other"), frame(1)):
        publisher.send_multipart(message)
    opened.drain_until(lambda: opened.bench.view.block_count(3) == 2)
    stats = opened.stream.stats()
    assert (stats.batches, stats.bad_frames, stats.other_topics, stats.last_seq) == (2, 1, 1, 1)
    assert (stats.endpoint, stats.is_extended, stats.disconnects) == (str(endpoint), False, 0)


def test_messages_before_a_loss_are_read_and_the_connection_is_opened_again(
    bind: Bind, open_stream: Callable[[str], StreamBench]
) -> None:
    publisher, endpoint = bind(zmq.XPUB)
    opened = open_stream(str(endpoint))
    opened.stream.drain(0.0)
    publisher.recv()
    opened.drain_until(lambda: opened.bench.diary.states)
    publisher.send_multipart(frame(0))
    sub = opened.stream.sockets()[-1]
    assert sub.poll(WAIT_MS), "the message is in the socket when the publisher goes"
    publisher.close(linger=0)
    opened.drain_until(lambda: opened.stream.disconnects)
    assert opened.bench.view.block_count(3) == 1
    assert opened.stream.sockets() == []
    assert opened.stream.next_deadline_s == pytest.approx(0.05)
    successor, _ = bind(zmq.XPUB)
    opened.stream.drain(0.05)
    assert successor.recv() == b"\1kv"
    assert len(opened.stream.sockets()) == 2


def test_the_pause_between_attempts_doubles_up_to_two_seconds(
    open_stream: Callable[[str], StreamBench], tmp_path: Path
) -> None:
    opened = open_stream(f"ipc://{tmp_path}/none")
    now_s, pauses = 0.0, []
    for _ in range(8):
        opened.drain_until(lambda: opened.stream.sockets() == [], now_s)
        pauses.append(opened.stream.next_deadline_s - now_s)
        now_s = opened.stream.next_deadline_s
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert opened.stream.disconnects == 0, "it was never connected"


def test_a_closed_stream_has_no_socket_and_may_be_closed_again(
    bind: Bind, open_stream: Callable[[str], StreamBench]
) -> None:
    _, endpoint = bind(zmq.XPUB)
    opened = open_stream(str(endpoint))
    opened.stream.open()
    opened.stream.close()
    opened.stream.close()
    assert opened.stream.sockets() == []
