"""CURVE on real sockets. Property: with auth required, only a client with an allowed key reads the stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from kit.sockets import Eventually, OpenSocket

from scheduler_components import AllBlocksCleared, KVEventBatch
from scheduler_components.kv_events import (
    CurveClientKeys,
    CurveServerKeys,
    KVEventsConfig,
    ZmqEventPublisher,
    write_key_pair,
)
from scheduler_components.kv_events.zmq_auth import apply_curve_client_keys, read_key_pair
from scheduler_components.kv_events.zmq_sockets import open_peer_counter

pytestmark = pytest.mark.sockets

BATCH = KVEventBatch(ts=1.0, events=(AllBlocksCleared(),))
END = (-1).to_bytes(8, "big", signed=True)


class Stream:
    """A publisher with auth, and the keys of its clients."""

    def __init__(self, directory: Path, endpoint: str, replay_endpoint: str) -> None:
        self.publisher_key, secret = write_key_pair(directory / "own", "publisher")
        client_key, self.client_secret = write_key_pair(directory / "allowed", "client")
        _, self.other_secret = write_key_pair(directory / "other", "other")
        self.other_key = directory / "other" / "other.key"
        self.publisher = ZmqEventPublisher(
            0,
            endpoint,
            replay_endpoint,
            config=KVEventsConfig(
                bind=True, auth="required", secret_key_file=str(secret), client_keys_dir=str(client_key.parent)
            ),
        )

    def keys(self, *, secret: Path | None = None, publisher: Path | None = None) -> CurveClientKeys:
        return CurveClientKeys.read(str(secret or self.client_secret), str(publisher or self.publisher_key))


@pytest.fixture(params=["tcp", "ipc"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stream]:
    tcp = "tcp://*:0", "tcp://*:0"
    ipc = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay"
    threads = set(threading.enumerate())
    stream = Stream(tmp_path, *(tcp if request.param == "tcp" else ipc))
    yield stream
    stream.publisher.shutdown()
    assert set(threading.enumerate()) <= threads
    assert sorted(path.name for path in tmp_path.iterdir()) == ["allowed", "other", "own"]


def dialled(endpoint: str | None) -> str:
    assert endpoint is not None
    return endpoint.replace("0.0.0.0", "127.0.0.1")


def test_an_allowed_key_reads_live_and_replay(stream: Stream, open_socket: OpenSocket) -> None:
    publisher = stream.publisher
    assert publisher.stats().open_bind_without_auth == 0
    subscriber, client = open_socket(zmq.SUB), open_socket(zmq.DEALER)
    for socket in (subscriber, client):
        apply_curve_client_keys(socket, stream.keys())
    subscriber.subscribe(b"")
    subscriber.connect(dialled(publisher.endpoint))
    while not subscriber.poll(5):
        publisher.publish(BATCH)
    client.connect(dialled(publisher.replay_endpoint))
    client.send_multipart([b"", bytes(8)])
    assert int.from_bytes(client.recv_multipart()[-2], "big") == 0


@pytest.mark.parametrize("who", ["plain", "unknown key", "wrong publisher"])
def test_a_client_without_an_allowed_key_receives_nothing(
    stream: Stream, open_socket: OpenSocket, eventually: Eventually, who: str
) -> None:
    publisher = stream.publisher
    publisher.publish(BATCH)
    subscriber, client = open_socket(zmq.SUB), open_socket(zmq.DEALER)
    for socket in (subscriber, client):
        if who == "unknown key":
            apply_curve_client_keys(socket, stream.keys(secret=stream.other_secret))
        elif who == "wrong publisher":
            apply_curve_client_keys(socket, stream.keys(publisher=stream.other_key))
    subscriber.subscribe(b"")
    subscriber.connect(dialled(publisher.endpoint))
    client.connect(dialled(publisher.replay_endpoint))
    with suppress(zmq.Again):  # the publisher may have refused the connection already
        client.send_multipart([b"", bytes(8)], zmq.DONTWAIT)
    eventually(lambda: publisher.stats().peers_refused >= 2)
    publisher.publish(BATCH)
    assert not subscriber.poll(50)
    assert not client.poll(50)
    assert publisher.stats().subscribers_seen == 0


def test_counted_once_a_connection(stream: Stream, open_socket: OpenSocket, eventually: Eventually) -> None:
    for expected in range(1, 4):
        subscriber = open_socket(zmq.SUB)
        apply_curve_client_keys(subscriber, stream.keys())
        subscriber.connect(dialled(stream.publisher.endpoint))
        eventually(lambda expected=expected: stream.publisher.stats().subscribers_seen == expected)


def test_repr_omits_the_secret_key(tmp_path: Path) -> None:
    _, secret_file = write_key_pair(tmp_path, "a")
    pair = read_key_pair(secret_file, field="x")
    assert pair.secret.decode() not in f"{pair!r} {CurveClientKeys(keys=pair, publisher=pair.public)!r}"


def test_without_an_authenticator_no_client_is_admitted(
    stream: Stream, tmp_path: Path, open_socket: OpenSocket, eventually: Eventually
) -> None:
    access = CurveServerKeys.read(str(tmp_path / "own" / "publisher.key_secret"), str(tmp_path / "allowed"))
    guarded, client = open_socket(zmq.PUB), open_socket(zmq.SUB)
    access.apply_server_keys(guarded)
    peers = open_peer_counter(guarded)
    port = guarded.bind_to_random_port("tcp://127.0.0.1")
    apply_curve_client_keys(client, stream.keys())
    client.subscribe(b"")
    client.connect(f"tcp://127.0.0.1:{port}")
    eventually(lambda: peers.poll_events() or peers.num_refused)
    guarded.send(b"secret")
    assert not client.poll(50)
    assert peers.num_connected == 0
    peers.close()
