"""Endpoints: good ones, ones at the edges, and texts that are none."""

from __future__ import annotations

from hypothesis import strategies as st

from scheduler_components.kv_events.endpoint import MAX_PORT, Endpoint

__all__ = ["BAD_ENDPOINTS", "any_endpoint_texts", "crowded_endpoints", "endpoints", "local_endpoints", "tcp_endpoints"]

_HOSTS = st.one_of(
    st.sampled_from(
        ["*", "0.0.0.0", "::", "localhost", "eth0", "eth0.100", "br-lan", "node_1.example.", "fe80::1%eth0"]  # noqa: S104
    ),
    st.ip_addresses().map(str),
)
_PATHS = st.from_regex(r"[a-z@/][a-z0-9/._ -]{0,40}[a-z0-9]", fullmatch=True)
_SHARED_PATHS = ["/tmp/kv", "/tmp/kv_dp1", "/tmp/kv_dp2", "/tmp/kv_dp1_dp1", "/tmp/replay"]  # noqa: S108 - never opened

BAD_ENDPOINTS: dict[str, str] = {
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
    """Every kind of host, every port, 0 included."""
    return st.builds(Endpoint, transport=st.just("tcp"), host=_HOSTS, port=st.integers(0, MAX_PORT))


def local_endpoints() -> st.SearchStrategy[Endpoint]:
    """ipc and inproc."""
    return st.builds(Endpoint, transport=st.sampled_from(["ipc", "inproc"]), path=_PATHS)


def endpoints() -> st.SearchStrategy[Endpoint]:
    """Any endpoint."""
    return st.one_of(tcp_endpoints(), local_endpoints())


def crowded_endpoints() -> st.SearchStrategy[Endpoint]:
    """Endpoints that meet when they are offset by ranks, or pass the last port: plans near the line of good and bad."""
    ports = st.one_of(st.integers(5557, 5570), st.integers(MAX_PORT - 6, MAX_PORT), st.just(0))
    hosts = st.sampled_from(["*", "127.0.0.1", "::1"])
    tcp = st.builds(Endpoint, transport=st.just("tcp"), host=hosts, port=ports)
    local = st.builds(Endpoint, transport=st.sampled_from(["ipc", "inproc"]), path=st.sampled_from(_SHARED_PATHS))
    return st.one_of(tcp, local)


def any_endpoint_texts() -> st.SearchStrategy[str]:
    """Any text, often one that looks like an endpoint."""
    alike = st.from_regex(r"(tcp|ipc|inproc)://[\[\]:*%@. \x00a-f0-9]{0,12}", fullmatch=True)
    return st.one_of(st.text(), alike, st.sampled_from(sorted(BAD_ENDPOINTS)))
