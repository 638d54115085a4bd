"""Property: the descriptor describes exactly the port plan, or it is None and an error explains why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import kv_events_server_info
from scheduler_components.kv_events import KVEventsConfig, ListeningStream
from scheduler_components.server_info import describe_kv_events_publisher


def config(**given_settings: Any) -> str:
    return json.dumps({"publisher": "zmq", **given_settings})


@pytest.mark.parametrize("dp_size", [1, 8])
def test_an_enabled_publisher_is_described_as_by_sglang(dp_size: int) -> None:
    assert describe_kv_events_publisher(config(), block_size=64, dp_size=dp_size) == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 64,
        "dp_size": dp_size,
    }
    assert "kv_events_error" not in kv_events_server_info(config(), block_size=64, dp_size=dp_size)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("tcp://10.0.0.7:6000", "10.0.0.7"),
        ("tcp://worker.example:6000", "worker.example"),
        ("tcp://0.0.0.0:6000", "0.0.0.0"),
        ("tcp://[::]:6000", "::"),
        ("tcp://[2001:db8::7]:6000", "[2001:db8::7]"),
    ],
)
def test_host_port_and_topic_are_as_configured(endpoint: str, host: str) -> None:
    described = describe_kv_events_publisher(config(endpoint=endpoint, topic="kv"), block_size=1, dp_size=2)
    assert described is not None
    assert (described["endpoint_host"], described["endpoint_port_base"], described["topic"]) == (host, 6000, "kv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not set"),
        ("", "is not set"),
        ("{}", "publishes no KV events"),
        ('{"publisher": "null"}', "publishes no KV events"),
        ("{not json", "is not JSON"),
        ("[]", "not an object"),
        (config(endpiont="tcp://*:5557"), "did you mean 'endpoint'"),
        (config(hwm="1"), "not an integer"),
        ('{"publisher": "zqm"}', "did you mean 'zmq'"),
        (config(endpoint="ipc:///tmp/kv"), "no port that can be advertised"),
        (config(endpoint="inproc://kv"), "no port that can be advertised"),
        (config(endpoint="tcp://*:0"), "no port that can be advertised"),
        (config(endpoint="tcp://*:*"), "no port that can be advertised"),
        (config(endpoint="tcp://*"), "has no port"),
        (config(endpoint="tcp://*:port"), "'port' where a port"),
        (config(endpoint="tcp://*:65536"), "no port from 0 to 65535"),
        (config(endpoint="tcp://*:-1"), "'-1' where a port"),
        (config(endpoint="tcp://:::5557"), "more than one colon"),
        (config(endpoint="tcp://*:65534"), "gives rank 2 the port 65536"),
        (config(replay_endpoint="tcp://*:5558"), "overlaps endpoint"),
    ],
)
def test_an_error_explains_a_missing_description(text: str | None, said: str) -> None:
    assert describe_kv_events_publisher(text, block_size=64, dp_size=3) is None
    info = kv_events_server_info(text, block_size=64, dp_size=3)
    assert info.keys() == {"kv_events", "kv_events_error"}
    assert info["kv_events"] is None
    assert said in str(info["kv_events_error"])


@pytest.mark.parametrize("block_size", [0, -1, None, True, "64", 64.0])
def test_an_invalid_block_size_gives_no_description(block_size: Any) -> None:
    info = kv_events_server_info(config(), block_size=block_size, dp_size=1)
    assert info["kv_events"] is None
    assert "page_size" in str(info["kv_events_error"])


@pytest.mark.parametrize("dp_size", [0, -1, None, True, "1"])
def test_an_invalid_number_of_streams_gives_no_description(dp_size: Any) -> None:
    info = kv_events_server_info(config(), block_size=64, dp_size=dp_size)
    assert info["kv_events"] is None
    assert "dp_size" in str(info["kv_events_error"])


def test_configured_replay_and_load_ranges_are_described() -> None:
    text = config(replay_endpoint="tcp://*:5567", load_endpoint="tcp://0.0.0.0:5577")
    described = describe_kv_events_publisher(text, block_size=64, dp_size=2)
    assert described == {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 64,
        "dp_size": 2,
        "replay_endpoint_port_base": 5567,
        "load_endpoint_port_base": 5577,
        "load_topic": "load",
    }


def test_a_separate_replay_host_is_described() -> None:
    text = config(endpoint="tcp://*:5557", replay_endpoint="tcp://[::1]:5567", load_endpoint="tcp://*:5577")
    described = describe_kv_events_publisher(text, block_size=64, dp_size=1)
    assert described is not None
    assert described["replay_endpoint_host"] == "[::1]"
    assert "load_endpoint_host" not in described


@pytest.mark.parametrize("replay_endpoint", ["ipc:///tmp/replay", "tcp://*:0"])
def test_a_replay_that_cannot_be_advertised_is_omitted_with_a_warning(replay_endpoint: str) -> None:
    info = kv_events_server_info(config(replay_endpoint=replay_endpoint), block_size=64, dp_size=1)
    assert isinstance(info["kv_events"], dict)
    assert "replay_endpoint_port_base" not in info["kv_events"]
    assert "replay_endpoint" in str(info["kv_events_warning"])


def test_a_publisher_that_connects_is_described_with_a_warning() -> None:
    text = config(endpoint="tcp://10.0.0.7:5557")
    info = kv_events_server_info(text, block_size=64, dp_size=1)
    assert info["kv_events"] == describe_kv_events_publisher(text, block_size=64, dp_size=1)
    assert info["kv_events"] is not None
    assert "connects to tcp://10.0.0.7:5557" in str(info["kv_events_warning"])


def test_a_publisher_with_bind_true_gives_no_warning() -> None:
    info = kv_events_server_info(config(endpoint="tcp://127.0.0.1:5557", bind=True), block_size=64, dp_size=1)
    assert info.keys() == {"kv_events"}


def test_ranks_on_several_nodes_are_listed_with_their_hosts() -> None:
    """In any order, next to the base ports of current readers: SGLang's form (#38032), and the side ports."""
    text = config(replay_endpoint="tcp://*:5657")
    nodes = [
        ListeningStream.parse(rank, f"tcp://0.0.0.0:{5557 + rank}", replay=f"tcp://0.0.0.0:{5657 + rank}").with_host(
            host
        )
        for rank, host in ((1, "fd00::2"), (0, "10.0.0.1"))
    ]
    info = kv_events_server_info(text, block_size=64, dp_size=2, publishers=nodes)
    assert info == {
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5557,
            "topic": "",
            "block_size": 64,
            "dp_size": 2,
            "replay_endpoint_port_base": 5657,
            "publishers": [
                {"dp_rank": 0, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": "tcp://10.0.0.1:5657"},
                {"dp_rank": 1, "endpoint": "tcp://[fd00::2]:5558", "replay_endpoint": "tcp://[fd00::2]:5658"},
            ],
        }
    }
    assert info["kv_events"] == describe_kv_events_publisher(text, block_size=64, dp_size=2, publishers=nodes)


def test_the_port_of_a_single_stream_that_the_system_chose_is_its_base() -> None:
    text = config(endpoint="tcp://*:0", replay_endpoint="tcp://*:0", load_endpoint="tcp://*:0")
    bound = [ListeningStream.parse(0, "tcp://0.0.0.0:41001", replay="tcp://0.0.0.0:41002", load="tcp://0.0.0.0:41003")]
    info = kv_events_server_info(text, block_size=64, dp_size=1, publishers=bound)
    assert info == {
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 41001,
            "topic": "",
            "block_size": 64,
            "dp_size": 1,
            "replay_endpoint_port_base": 41002,
            "load_endpoint_port_base": 41003,
            "load_topic": "load",
        }
    }


def test_ports_that_are_not_consecutive_are_listed_without_a_base() -> None:
    """A reader that knows bases alone finds none, and does not follow a stranger's port."""
    text = config(endpoint="tcp://*:0", load_endpoint="tcp://*:0")
    bound = [
        ListeningStream.parse(rank, f"tcp://0.0.0.0:{41001 + 7 * rank}", load="tcp://0.0.0.0:5") for rank in range(2)
    ]
    described = describe_kv_events_publisher(text, block_size=64, dp_size=2, publishers=bound)
    assert described is not None
    assert not {"endpoint_port_base", "load_endpoint_port_base"} & described.keys()
    assert described["load_topic"] == "load"
    assert described["publishers"] == [
        {"dp_rank": 0, "endpoint": "tcp://0.0.0.0:41001", "load_endpoint": "tcp://0.0.0.0:5"},
        {"dp_rank": 1, "endpoint": "tcp://0.0.0.0:41008", "load_endpoint": "tcp://0.0.0.0:5"},
    ]


@pytest.mark.parametrize("ranks", [(0,), (0, 0), (0, 2), (1, 2)])
def test_a_list_that_does_not_name_each_stream_once_is_rejected(ranks: tuple[int, ...]) -> None:
    bound = [ListeningStream.parse(rank, f"tcp://10.0.0.1:{5557 + rank}") for rank in ranks]
    info = kv_events_server_info(config(), block_size=64, dp_size=2, publishers=bound)
    assert info["kv_events"] is None
    assert "are not ranks 0 to 1, each once" in str(info["kv_events_error"])


PORTS = st.integers(0, 65_540)


@settings(deadline=None)
@given(st.sampled_from(["*", "0.0.0.0", "[::]", "10.0.0.7"]), PORTS, st.none() | PORTS, st.integers(1, 16))
def test_the_descriptor_is_the_port_plan(host: str, port: int, replay_port: int | None, dp_size: int) -> None:
    replay = None if replay_port is None else f"tcp://{host}:{replay_port}"
    text = config(endpoint=f"tcp://{host}:{port}", replay_endpoint=replay)
    info = kv_events_server_info(text, block_size=16, dp_size=dp_size)
    described = info["kv_events"]
    if described is None:
        assert info["kv_events_error"]
        return
    assert isinstance(described, dict)
    plan = KVEventsConfig.from_cli(text).port_plan(dp_size)
    for rank in range(dp_size):
        assert described["endpoint_port_base"] + rank == plan.event_endpoint(rank).port
        replay_at = plan.replay_endpoint(rank)
        if replay_at is not None and replay_at.port != 0:
            assert described["replay_endpoint_port_base"] + rank == replay_at.port


@settings(deadline=None)
@given(st.text())
def test_server_info_never_raises(text: str) -> None:
    assert kv_events_server_info(text, block_size=64, dp_size=1)["kv_events"] is None
