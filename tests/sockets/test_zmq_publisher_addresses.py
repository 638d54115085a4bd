"""Where the publisher opens: addresses of every transport, refusal, bind or connect."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import zmq

from scheduler_components import ConfigError, KVEventBatch, StartError
from scheduler_components.kv_events import ZmqEventPublisher

Open = Callable[..., ZmqEventPublisher]
Connected = Callable[..., int]


def test_a_port_in_use_is_a_start_error_and_leaves_nothing_open(opened: Open) -> None:
    first = opened()
    with pytest.raises(StartError, match=r"cannot bind.*in use"):
        opened(endpoint=first.endpoint)
    with pytest.raises(StartError, match="choose a free port"):
        opened(replay_endpoint=first.replay_endpoint)
    assert threading.active_count() == 2  # this one, and the first publisher's backstop


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"endpoint": "tcp://127.0.0.1"}, "endpoint"),
        ({"replay_endpoint": "nonsense"}, "replay_endpoint"),
        ({"attn_dp_rank": 1, "endpoint": "tcp://*:65535"}, "endpoint"),
        ({"dialect": "xml"}, "dialect"),
        ({"replay_framing": "xml"}, "replay_framing"),
        ({"seq_base": "one"}, "seq_base"),
    ],
)
def test_bad_settings_name_their_field_before_anything_opens(
    opened: Open, options: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        opened(**options)
    assert raised.value.field == field
    assert threading.active_count() == 1


def test_concrete_host_connects_unless_told_to_bind(
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
def test_wildcards_bind_and_say_that_the_world_can_read(
    opened: Open, caplog: pytest.LogCaptureFixture, endpoint: str
) -> None:
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


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 3, "tcp://[::1]:5560"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        (None, 2, None),
    ],
)
def test_offset_endpoint_port_is_the_originals(endpoint: str | None, rank: int, expected: str | None) -> None:
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == expected
