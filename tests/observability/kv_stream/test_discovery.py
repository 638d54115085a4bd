"""Every answer of a worker yields dialable addresses or a documented error."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.kv_stream import NoStreamsError, discover, parse_addresses, parse_worker_url, static_address
from scheduler_components import ConfigError, DecodeError, StartError, kv_events_server_info
from scheduler_components.kv_events import ListeningStream

pytestmark = pytest.mark.sockets

WORKER = httpx.URL("http://worker.example:30000")
DESCRIPTOR = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 16,
    "dp_size": 2,
    "replay_endpoint_port_base": 5657,
    "load_endpoint_port_base": 5757,
    "load_topic": "load",
}

Serve = Callable[[dict[str, tuple[int, bytes]]], str]


def test_one_address_per_rank_at_base_port_plus_rank() -> None:
    first, second = parse_addresses({"kv_events": DESCRIPTOR, "model_path": "m"}, WORKER)
    assert (first.rank, second.rank) == (0, 1)
    assert str(second.events) == "tcp://worker.example:5558"
    assert (str(second.replay), str(second.load)) == ("tcp://worker.example:5658", "tcp://worker.example:5758")
    assert (second.topic, second.block_size) == ("kv", 16)


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "::", "[::]"])
@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("http://10.0.0.7:30000", "tcp://10.0.0.7:5557"),
        ("http://[fd00::7]:30000/", "tcp://[fd00::7]:5557"),
        ("https://worker/prefix", "tcp://worker:5557"),
    ],
)
def test_a_wildcard_becomes_the_host_of_the_url(wildcard: str, url: str, dialled: str) -> None:
    info = {"kv_events": DESCRIPTOR | {"endpoint_host": wildcard}}
    assert str(parse_addresses(info, parse_worker_url(url))[0].events) == dialled


def test_a_concrete_host_is_kept() -> None:
    info = {"kv_events": DESCRIPTOR | {"endpoint_host": "10.1.1.1", "replay_endpoint_host": "*"}}
    address = parse_addresses(info, WORKER)[0]
    assert (address.events.host, address.replay.host) == ("10.1.1.1", "worker.example")


def test_reads_what_the_kit_describes() -> None:
    config = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"}'
    info = kv_events_server_info(config, block_size=16, dp_size=2)
    addresses = parse_addresses(info, WORKER)
    assert [str(address.replay) for address in addresses] == [
        "tcp://worker.example:5657",
        "tcp://worker.example:5658",
    ]


def test_publishers_on_several_nodes_are_read_as_sglang_lists_them() -> None:
    """An endpoint that an entry omits is at base port + rank on its host, or missing if there is no base port."""
    listed = [{"dp_rank": 5, "endpoint": "tcp://10.0.0.2:5562"}, {"dp_rank": 0, "endpoint": "tcp://*:5557"}]
    first, second = parse_addresses({"kv_events": DESCRIPTOR | {"dp_size": 8, "publishers": listed}}, WORKER)
    assert (first.rank, str(first.events), str(first.replay)) == (
        0,
        "tcp://worker.example:5557",
        "tcp://worker.example:5657",
    )
    assert (second.rank, str(second.events), str(second.load)) == (5, "tcp://10.0.0.2:5562", "tcp://10.0.0.2:5762")


tcp_ports = st.integers(1, 65_535)
hosts = st.sampled_from(["10.0.0.1", "node-7.example", "[fd00::7]", "*", "0.0.0.0", "[::]"])


@given(
    st.lists(st.tuples(hosts, tcp_ports, st.none() | tcp_ports, st.none() | tcp_ports), min_size=1, max_size=6),
    st.sampled_from([None, 5557]),
)
@settings(deadline=None)
def test_advertised_endpoints_match_the_bound_ones(
    streams: list[tuple[str, int, int | None, int | None]], base: int | None
) -> None:
    """Without base ports the system assigned the ports; with them they are base + rank, on any host."""

    def at(host: str, port: int | None) -> str | None:
        return None if port is None else f"tcp://{host}:{port}"

    bound = [
        ListeningStream.parse(
            rank, f"tcp://{host}:{base + rank if base else events}", replay=at(host, replay), load=at(host, load)
        )
        for rank, (host, events, replay, load) in enumerate(streams)
    ]
    config = f'{{"publisher": "zmq", "endpoint": "tcp://*:{base or 0}"}}'
    info = kv_events_server_info(config, block_size=16, dp_size=len(bound), publishers=bound)
    addresses = parse_addresses(json.loads(json.dumps(info)), WORKER)
    assert [(each.events, each.replay, each.load) for each in addresses] == [
        (placed.events, placed.replay, placed.load)
        for placed in (stream.with_host("worker.example") for stream in bound)
    ]


def test_a_worker_without_streams_raises_its_reason() -> None:
    with pytest.raises(NoStreamsError, match="publishes no KV events: port is missing"):
        parse_addresses({"kv_events": None, "kv_events_error": "port is missing"}, WORKER)
    with pytest.raises(NoStreamsError, match="has no kv_events"):
        parse_addresses({"model_path": "m"}, WORKER)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"endpoint_port_base": "5557"}, "endpoint_port_base"),
        ({"endpoint_port_base": 0}, "endpoint_port_base"),
        ({"endpoint_port_base": 65_535}, "65535"),
        ({"endpoint_host": "a b"}, "a b"),
        ({"endpoint_host": 5}, "endpoint_host"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": 1_000_000_000}, "dp_size"),
        ({"block_size": -1}, "block_size"),
        ({"topic": None}, "topic"),
        ({"endpoint_host": None}, "endpoint_host"),
        ({"endpoint_port_base": None}, "endpoint_port_base"),
        ({"publishers": [{"dp_rank": 0}]}, "endpoint"),
        ({"publishers": [{"dp_rank": -1, "endpoint": "tcp://h:1"}]}, "dp_rank"),
        ({"publishers": [{"dp_rank": 0, "endpoint": "tcp://h:0"}]}, "tcp://h:0"),
        ({"publishers": [{"dp_rank": 0, "endpoint": "h:1"}]}, "transport"),
        ({"publishers": [{"dp_rank": 0, "endpoint": "tcp://h:1", "replay_endpoint": "x"}]}, "replay_endpoint"),
        ({"publishers": [{"dp_rank": 0, "endpoint": "tcp://h:1"}] * 2}, "names a rank twice"),
    ],
)
def test_an_error_of_a_descriptor_names_its_field(change: dict[str, object], named: str) -> None:
    with pytest.raises(DecodeError, match=named):
        parse_addresses({"kv_events": DESCRIPTOR | change}, WORKER)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.soak
@given(changes=st.dictionaries(st.sampled_from([*DESCRIPTOR, "publishers"]), JSON), whole=JSON, use_whole=st.booleans())
@settings(max_examples=2 * settings().max_examples)
def test_any_json_gives_addresses_or_a_documented_error(
    changes: dict[str, object], whole: object, use_whole: bool
) -> None:
    info = {"kv_events": whole} if use_whole else {"kv_events": DESCRIPTOR | changes}
    try:
        addresses = parse_addresses(info, WORKER)
    except (DecodeError, NoStreamsError):
        return
    for address in addresses:
        assert not address.events.is_wildcard
        assert 0 < address.events.port <= 65_535


def test_discover_asks_server_info(serve: Serve) -> None:
    url = serve({"/server_info": (200, json.dumps({"kv_events": DESCRIPTOR}).encode())})
    assert [str(address.events) for address in discover(url + "/")] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]


def test_certificates_are_read_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **options: read.append(options) or create(**options))
    url = serve({"/server_info": (200, json.dumps({"kv_events": DESCRIPTOR}).encode())})
    for _ in range(3):
        discover(url)
    assert len(read) <= 1


@pytest.mark.parametrize(
    ("page", "error", "words"),
    [
        ((404, b""), StartError, "answers 404"),
        ((200, b"<html>"), DecodeError, "not JSON"),
        ((200, b"[]"), DecodeError, "not an object"),
        ((200, b'"' + b"x" * (5 << 20) + b'"'), DecodeError, "over"),
        ((200, b"[" * 100_000), DecodeError, "not JSON"),
    ],
)
def test_an_invalid_page_raises_a_documented_error(
    serve: Serve, page: tuple[int, bytes], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        discover(serve({"/server_info": page}))


def test_an_unreachable_worker_is_a_start_error() -> None:
    with pytest.raises(StartError, match="server_info"):
        discover("http://127.0.0.1:1", timeout_s=5.0)


@pytest.mark.parametrize("text", ["", "worker:30000", "ftp://worker", "http://", "tcp://worker:5557", "http://a b"])
def test_an_invalid_worker_url_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        parse_worker_url(text)


def test_bare_endpoints_are_used_unchanged() -> None:
    address = static_address("tcp://127.0.0.1:5557", replay="ipc:///tmp/replay", topic="kv", rank=3)
    assert (str(address.events), str(address.replay), address.rank) == ("tcp://127.0.0.1:5557", "ipc:///tmp/replay", 3)


@pytest.mark.parametrize("text", ["tcp://*:5557", "tcp://[::]:5557", "tcp://host:0", "tcp://host", "host:5557"])
def test_an_undialable_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="replay_endpoint"):
        static_address("tcp://127.0.0.1:5557", replay=text)


def test_a_worker_with_keys_gets_the_key_and_refuses_without(
    serve: Callable[[dict[str, tuple[int, bytes]]], str],
) -> None:
    """The test of the whole engine sends one that is accepted."""
    with pytest.raises(StartError, match="API key"):
        discover(serve({"/server_info": (401, b"{}")}), api_key="wrong")
