"""Endpoints. Property: a text is refused with a ConfigError, or means one address whose text is parsed to it again."""

from __future__ import annotations

from ipaddress import IPv6Address  # Python 3.13 writes a mapped address with dots

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.kv_events import Endpoint, PortPlan
from scheduler_components.kv_events.endpoints import MAX_PORT

# Endpoints: valid ones, ones at the limits, and texts that are no endpoints.

_HOSTS = st.one_of(
    st.sampled_from(
        ["*", "0.0.0.0", "::", "localhost", "eth0", "eth0.100", "br-lan", "node_1.example.", "fe80::1%eth0"]
    ),
    st.ip_addresses().map(str),
)
_PATHS = st.from_regex(r"[a-z@/][a-z0-9/._ -]{0,40}[a-z0-9]", fullmatch=True)
_SHARED_PATHS = ["/tmp/kv", "/tmp/kv_dp1", "/tmp/kv_dp2", "/tmp/kv_dp1_dp1", "/tmp/replay"]

INVALID_ENDPOINTS: dict[str, str] = {
    "": "no transport",
    "5557": "no transport",
    "*:5557": "no transport",
    "udp://*:5557": "transport 'udp'",
    "TCP://*:5557": "transport 'TCP'",
    " tcp://*:5557": "transport ' tcp'",
    "tcp://": "no port",
    "tcp://*": "no port",
    "tcp://localhost": "no port",
    "tcp://[::1]": "no port",
    "tcp://*:": "'' where a port",
    "tcp://:5557": "no host",
    "tcp://*:port": "'port' where a port",
    "tcp://*:5557 ": "'5557 ' where a port",
    "tcp://*: 5557": "' 5557' where a port",
    "tcp://*:+5557": "'+5557' where a port",
    "tcp://*:-1": "'-1' where a port",
    "tcp://*:55.5": "'55.5' where a port",
    "tcp://*:5557/path": "'5557/path' where a port",
    "tcp://*:\u0665\u0665": "where a port",
    "tcp://*:65536": "no port from 0 to 65535",
    "tcp://*:70000": "no port from 0 to 65535",
    "tcp://*:100000": "'100000' where a port",
    "tcp://:::5557": "more than one colon",
    "tcp://::1:5557": "more than one colon",
    "tcp://[::1:5557": "more than one colon",
    "tcp://a b:5557": "where a host",
    "tcp://me@host:5557": "where a host",
    "tcp://*.example:5557": "where a host",
    "tcp://a..b:5557": "where a host",
    "tcp://[]:5557": "where a host",
    "tcp://[eth0]:5557": "where a host",
    "tcp://[:::]:5557": "where a host",
    "tcp://[fe80::1%eth 0]:5557": "where a host",
    "tcp://" + "a" * 64 + ":5557": "where a host",
    "tcp://256.0.0.1:5557": "not an IPv4",
    "tcp://127.0.0.01:5557": "not an IPv4",
    "tcp://1.2.3:5557": "not an IPv4",
    "ipc://": "no path",
    "ipc://*": "no path",
    "ipc://@": "no path",
    "inproc://": "no path",
    "ipc:///tmp/x ": "white space",
    "ipc:///tmp/x\x00y": "control characters",
    "ipc:///tmp/" + "x" * 103: "108 bytes",
    "inproc://" + "x" * 246: "246 bytes",
}
"""Texts that must be refused, with a part of what ``ConfigError.problem`` says of each."""


def tcp_endpoints() -> st.SearchStrategy[Endpoint]:
    """Every kind of host and every port, including 0."""
    return st.builds(Endpoint, transport=st.just("tcp"), host=_HOSTS, port=st.integers(0, MAX_PORT))


def local_endpoints() -> st.SearchStrategy[Endpoint]:
    return st.builds(Endpoint, transport=st.sampled_from(["ipc", "inproc"]), path=_PATHS)


def endpoints() -> st.SearchStrategy[Endpoint]:
    return st.one_of(tcp_endpoints(), local_endpoints())


def colliding_endpoints() -> st.SearchStrategy[Endpoint]:
    """Endpoints that collide when offset by ranks, or pass the last port: plans at the edge of validity."""
    ports = st.one_of(st.integers(5557, 5570), st.integers(MAX_PORT - 6, MAX_PORT), st.just(0))
    hosts = st.sampled_from(["*", "127.0.0.1", "::1"])
    tcp = st.builds(Endpoint, transport=st.just("tcp"), host=hosts, port=ports)
    local = st.builds(Endpoint, transport=st.sampled_from(["ipc", "inproc"]), path=st.sampled_from(_SHARED_PATHS))
    return st.one_of(tcp, local)


def endpoint_like_texts() -> st.SearchStrategy[str]:
    """Any text; many look like an endpoint."""
    alike = st.from_regex(r"(tcp|ipc|inproc)://[\[\]:*%@. \x00a-f0-9]{0,12}", fullmatch=True)
    return st.one_of(st.text(), alike, st.sampled_from(sorted(INVALID_ENDPOINTS)))


@given(endpoints())
def test_the_text_of_an_endpoint_is_the_endpoint(endpoint: Endpoint) -> None:
    assert Endpoint.parse(str(endpoint)) == endpoint


@settings(deadline=None)
@given(endpoint_like_texts())
@example("tcp://[::1%] ]:5")
@example("tcp://[::%lo]:5")
@example("tcp://[*]:5557")
@example("ipc://\ud800")
def test_any_text_is_an_endpoint_or_a_config_error_that_names_its_setting(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text, field="replay_endpoint")
    except ConfigError as error:
        assert error.field == "replay_endpoint"
        assert error.value == text
        assert error.problem
        assert error.hint
    else:
        assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "host", "port", "binds", "wildcard", "ipv6", "loopback"),
    [
        ("tcp://*:5557", "*", 5557, True, True, False, False),
        ("tcp://0.0.0.0:5557", "0.0.0.0", 5557, True, True, False, False),
        ("tcp://[::]:5557", "::", 5557, True, True, True, False),
        ("tcp://[0:0:0:0:0:0:0:0]:5557", "::", 5557, True, True, True, False),
        ("tcp://[::ffff:0.0.0.0]:1", str(IPv6Address("::ffff:0:0")), 1, True, True, True, False),
        ("tcp://*:0", "*", 0, True, True, False, False),
        ("tcp://*:*", "*", 0, True, True, False, False),
        ("tcp://127.0.0.1:*", "127.0.0.1", 0, False, False, False, True),
        ("tcp://127.9.9.9:65535", "127.9.9.9", 65535, False, False, False, True),
        ("tcp://[::1]:5557", "::1", 5557, False, False, True, True),
        ("tcp://[::ffff:127.0.0.1]:5557", str(IPv6Address("::ffff:7f00:1")), 5557, False, False, True, True),
        ("tcp://[2001:DB8::0:1]:5557", "2001:db8::1", 5557, False, False, True, False),
        ("tcp://[fe80::1%eth0]:5557", "fe80::1%eth0", 5557, False, False, True, False),
        ("tcp://localhost:1", "localhost", 1, False, False, False, True),
        ("tcp://router.example:5557", "router.example", 5557, False, False, False, False),
        ("tcp://eth0:5557", "eth0", 5557, False, False, False, False),
        ("tcp://eth0.100:5557", "eth0.100", 5557, False, False, False, False),
        # A host that contains "::" or "0.0.0.0" is not necessarily a wildcard.
        ("tcp://[2001:db8::5]:5557", "2001:db8::5", 5557, False, False, True, False),
        ("tcp://10.0.0.0:5557", "10.0.0.0", 5557, False, False, False, False),
    ],
)
def test_tcp_endpoints(
    text: str, host: str, port: int, binds: bool, wildcard: bool, ipv6: bool, loopback: bool
) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.transport, endpoint.host, endpoint.port, endpoint.path) == ("tcp", host, port, "")
    assert (endpoint.binds, endpoint.is_wildcard, endpoint.is_ipv6, endpoint.is_loopback) == (
        binds,
        wildcard,
        ipv6,
        loopback,
    )


@pytest.mark.parametrize("text", ["ipc:///run/kv.sock", "ipc://relative/kv", "ipc://@abstract", "inproc://tcp-cache"])
def test_ipc_and_inproc_bind_and_stay_on_this_machine(text: str) -> None:
    endpoint = Endpoint.parse(text)
    assert str(endpoint) == text
    assert (endpoint.host, endpoint.port) == ("", None)
    assert endpoint.binds
    assert endpoint.is_loopback
    assert not endpoint.is_wildcard


@pytest.mark.parametrize(("text", "problem"), INVALID_ENDPOINTS.items())
def test_bad_endpoints_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Endpoint.parse(text, field="load_endpoint")
    assert problem in refused.value.problem
    assert str(refused.value).startswith("load_endpoint=")


@pytest.mark.parametrize("value", [None, 5557, b"tcp://*:5557"])
def test_a_value_that_is_no_string_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="is not a string"):
        Endpoint.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parts",
    [
        {"transport": "udp", "host": "*", "port": 1},
        {"transport": "tcp", "host": "*"},
        {"transport": "tcp", "host": "*", "port": True},
        {"transport": "tcp", "host": "*", "port": "5557"},
        {"transport": "tcp", "host": "*", "port": 1, "path": "x"},
        {"transport": "ipc", "path": "x", "port": 1},
        {"transport": "inproc", "path": "x", "host": "*"},
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Endpoint(**parts)  # type: ignore[arg-type]


@settings(deadline=None)
@given(endpoints(), st.integers(0, 64))
def test_offsets_give_every_rank_its_own_address_and_lead_back(base: Endpoint, ranks: int) -> None:
    try:
        offsets = [base.offset(rank) for rank in range(ranks + 1)]
    except ConfigError:
        assert base.port is not None
        assert base.port + ranks > MAX_PORT
        return
    assert offsets[0] == base
    if base.port == 0:
        assert set(offsets) == {base}  # the system assigns different ports
        return
    assert len(set(offsets)) == ranks + 1
    for rank, endpoint in enumerate(offsets):
        if base.port is not None and endpoint.port is not None:
            assert endpoint.port - base.port == rank
            assert attrs.evolve(endpoint, port=base.port) == base
        else:
            assert endpoint.path.removeprefix(base.path) == (f"_dp{rank}" if rank else "")


@pytest.mark.parametrize(
    ("text", "rank", "expected"),
    [
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:65534", 1, "tcp://*:65535"),
        ("tcp://*:0", 7, "tcp://*:0"),
        ("ipc:///tmp/kv", 0, "ipc:///tmp/kv"),
        ("ipc:///tmp/kv", 2, "ipc:///tmp/kv_dp2"),
        ("inproc://tcp", 1, "inproc://tcp_dp1"),
        ("ipc:///tmp/" + "x" * 98, 1, "ipc:///tmp/" + "x" * 98 + "_dp1"),
    ],
)
def test_offset(text: str, rank: int, expected: str) -> None:
    assert str(Endpoint.parse(text).offset(rank)) == expected


@pytest.mark.parametrize(
    ("text", "rank", "problem", "hint"),
    [
        ("tcp://*:5557", -1, "rank -1", "at least 0"),
        ("tcp://*:5557", True, "rank True", "at least 0"),
        ("tcp://*:5557", "1", "rank '1'", "at least 0"),
        ("tcp://*:65535", 1, "port 65536", "at most 65534"),
        ("tcp://*:5557", 70_000, "port 75557", "smaller rank"),
        ("ipc:///tmp/" + "x" * 99, 1, "suffix _dp1", "shorter path"),
    ],
)
def test_offsets_that_cannot_be_are_refused(text: str, rank: int, problem: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Endpoint.parse(text).offset(rank, field="replay_endpoint")
    assert refused.value.field == "replay_endpoint"
    assert problem in refused.value.problem
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.7", "tcp://10.0.0.7:5557"),
        ("worker-3.example", "tcp://worker-3.example:5557"),
        ("2001:db8::7", "tcp://[2001:db8::7]:5557"),
        ("[2001:db8::7]", "tcp://[2001:db8::7]:5557"),
    ],
)
@pytest.mark.parametrize("wildcard", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557"])
def test_a_reader_puts_the_workers_host_for_a_wildcard(wildcard: str, host: str, expected: str) -> None:
    endpoint = Endpoint.parse(wildcard)
    assert endpoint.is_wildcard
    assert str(endpoint.with_host(host)) == expected


def test_hosts_and_ports_are_checked_when_they_are_replaced() -> None:
    with pytest.raises(ConfigError, match="no port"):
        attrs.evolve(Endpoint.parse("tcp://*:5557"), port=65_536)
    with pytest.raises(ConfigError, match="where a host"):
        Endpoint.parse("tcp://*:5557").with_host("a b")
    with pytest.raises(ConfigError, match="host or port"):
        Endpoint.parse("ipc:///tmp/kv").with_host("localhost")


@pytest.mark.parametrize(
    ("text", "bind", "binds"),
    [
        ("tcp://*:5557", None, True),
        ("tcp://*:5557", True, True),
        ("tcp://10.0.0.7:5557", None, False),
        ("tcp://10.0.0.7:5557", False, False),
        ("tcp://10.0.0.7:5557", True, True),
        ("tcp://127.0.0.1:0", True, True),
        ("ipc:///tmp/kv", None, True),
        ("ipc:///tmp/kv", False, False),
        ("inproc://kv", None, True),
    ],
)
def test_the_default_of_bind_follows_the_host(text: str, bind: bool | None, binds: bool) -> None:
    assert Endpoint.parse(text).resolve_bind(bind) is binds


@pytest.mark.parametrize(
    ("text", "bind", "problem"),
    [
        ("tcp://*:5557", False, "wildcard"),
        ("tcp://[::]:5557", False, "wildcard"),
        ("tcp://10.0.0.7:0", None, "port 0"),
        ("tcp://10.0.0.7:0", False, "port 0"),
    ],
)
def test_a_wildcard_or_port_0_cannot_be_dialled(text: str, bind: bool | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Endpoint.parse(text).resolve_bind(bind)


@pytest.mark.parametrize(
    ("text", "host"),
    [("tcp://[::]:1", "::"), ("tcp://*:1", "*"), ("tcp://[::1]:1", "[::1]"), ("tcp://10.0.0.7:1", "10.0.0.7")],
)
def test_the_advertised_host_can_be_spliced_or_is_a_wildcard(text: str, host: str) -> None:
    assert Endpoint.parse(text).advertised_host == host


# Port plans. Property: a plan is refused exactly if two of its endpoints are equal, or a port passes 65535.


def key(endpoint: Endpoint) -> object:
    """Return the resource that two sockets cannot share: a port on any host, or the path of one transport."""
    return endpoint.port if endpoint.transport == "tcp" else (endpoint.transport, endpoint.path)


def fits(bases: list[Endpoint], stream_count: int) -> bool:
    try:
        every = [base.offset(index) for base in bases for index in range(stream_count)]
    except ConfigError:
        return False
    keys = [key(endpoint) for endpoint in every if endpoint.port != 0]
    return len(keys) == len(set(keys))


@settings(deadline=None)
@given(colliding_endpoints(), st.none() | colliding_endpoints(), st.none() | colliding_endpoints(), st.integers(1, 6))
@example(Endpoint.parse("ipc:///tmp/kv"), Endpoint.parse("ipc:///tmp/kv_dp1"), None, 2)
def test_a_plan_is_valid_exactly_if_all_its_endpoints_differ(
    events: Endpoint, replay: Endpoint | None, load: Endpoint | None, stream_count: int
) -> None:
    given_bases = [base for base in (events, replay, load) if base is not None]
    try:
        plan = PortPlan(events=events, replay=replay, load=load, stream_count=stream_count)
    except ConfigError as error:
        assert error.field in ("endpoint", "replay_endpoint", "load_endpoint")
        assert not fits(given_bases, stream_count)
        return
    assert fits(given_bases, stream_count)
    for index in range(stream_count):
        assert plan.event_endpoint(index) == events.offset(index)
        assert plan.replay_endpoint(index) == (None if replay is None else replay.offset(index))
        assert plan.load_endpoint(index) == (None if load is None else load.offset(index))


def test_the_habitual_replay_port_next_to_the_events_is_refused_with_two_streams() -> None:
    events, replay = Endpoint.parse("tcp://*:5557"), Endpoint.parse("tcp://*:5558")
    assert PortPlan(events=events, replay=replay, stream_count=1).replay_endpoint(0) == replay
    with pytest.raises(ConfigError) as refused:
        PortPlan(events=events, replay=replay, stream_count=2)
    assert refused.value.field == "replay_endpoint"
    assert "overlaps endpoint='tcp://*:5557' with 2 streams" in refused.value.problem
    assert "at least 2 apart" in refused.value.hint


def test_a_range_past_the_last_port_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        PortPlan(events=Endpoint.parse("tcp://*:5557"), load=Endpoint.parse("tcp://*:65530"), stream_count=8)
    assert refused.value.field == "load_endpoint"
    assert "at most 65528" in refused.value.hint


@pytest.mark.parametrize("stream_count", [0, -1, True, 1.0, "2", None])
def test_the_number_of_streams_is_a_number(stream_count: int) -> None:
    with pytest.raises(ConfigError, match="stream_count"):
        PortPlan(events=Endpoint.parse("tcp://*:5557"), stream_count=stream_count)


@pytest.mark.parametrize("index", [-1, 2, True, "0"])
def test_a_stream_outside_the_plan_has_no_endpoint(index: int) -> None:
    plan = PortPlan(
        events=Endpoint.parse("tcp://*:5557"),
        replay=Endpoint.parse("tcp://*:5567"),
        load=Endpoint.parse("tcp://*:5577"),
        stream_count=2,
    )
    for ask in (plan.event_endpoint, plan.replay_endpoint, plan.load_endpoint):
        with pytest.raises(ConfigError, match="give 0 to 1"):
            ask(index)
