"""Addresses of sockets: one (``Endpoint``) and all of an engine (``PortPlan``).

Each is parsed and validated once and is immutable afterwards. Only this module parses endpoint texts; other code uses
the properties of an :class:`Endpoint` (``is_wildcard``, ``is_ipv6``) and never searches the text. It accepts what
libzmq 4.3 accepts, except what libzmq accepts by mistake: it binds port 70000 as 4464, reads ``": 5"`` as port 5, and
binds an unbracketed ``tcp://:::5557``, in which no other parser can separate host and port.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import combinations
from typing import Literal

import attrs

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError

__all__ = [
    "MAX_PORT",
    "Endpoint",
    "PortPlan",
    "named_endpoints",
]

MAX_PORT = 65_535

_MAX_IPC_PATH_BYTES = 107
"""Linux's ``sun_path`` has 108 bytes, including the final NUL."""

_MAX_INPROC_NAME_BYTES = 245
"""pyzmq reads a bound address back into 255 bytes, including ``inproc://`` and NUL."""

_SHAPES = "tcp://host:port, ipc://path or inproc://name"
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
_PORT = re.compile(r"0|[1-9][0-9]{0,4}")


@lru_cache(maxsize=256)
def _ip(host: str) -> IPv4Address | IPv6Address | None:
    """Return the host as an address; None for names and ``*``. All addresses of a plan have the same few hosts."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _unmapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return ``::ffff:127.0.0.1`` as ``127.0.0.1``, because Python before 3.13 does not resolve the mapping."""
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def _plain_host(host: str) -> str:
    """Remove the brackets of an IPv6 address and shorten it, so that equal hosts have equal texts."""
    bracketed = host.startswith("[") and host.endswith("]")
    address = _ip(host[1:-1] if bracketed else host)
    return str(address) if isinstance(address, IPv6Address) else host


@attrs.frozen(kw_only=True)
class Endpoint:
    """One ZeroMQ address. ``str()`` returns the text for libzmq.

    Attributes:
        transport: ``tcp``, ``ipc`` or ``inproc``.
        host: tcp only. ``*``, an IPv4 or IPv6 address (without brackets), a host name, or the name of a network
            interface, which libzmq binds by its address.
        port: tcp only; 0 lets the system choose a port (``*`` in a text means the same).
        path: ipc: a file's path, or ``@name`` for Linux's abstract namespace; inproc: a name.

    Raises:
        ConfigError: the parts are not an address.
    """

    transport: Literal["tcp", "ipc", "inproc"]
    host: str = attrs.field(default="", converter=_plain_host)
    port: int | None = None
    path: str = ""

    def __attrs_post_init__(self) -> None:
        if self.transport == "tcp":
            self._check_tcp()
        elif self.transport in ("ipc", "inproc"):
            self._check_path()
        else:
            raise self._error("has a transport that is not one of tcp, ipc and inproc", f"write {_SHAPES}")

    def _check_tcp(self) -> None:
        if self.path:
            raise self._error("has a path, which tcp does not have", "write tcp://host:port")
        if type(self.port) is not int or not 0 <= self.port <= MAX_PORT:
            raise self._error("has no port from 0 to 65535", "write tcp://host:port")
        address, _, zone = self.host.partition("%")
        if self.host == "*" or (_ip(self.host) is not None and _NAME.fullmatch(zone or "none")):
            return
        if _DIGITS_AND_DOTS.fullmatch(address):
            raise self._error("has a host that is not an IPv4 address", "give four numbers of 0 to 255")
        if not _NAME.fullmatch(self.host):
            raise self._error(
                f"has {self.host!r} where a host belongs",
                "give *, an IPv4 address, an IPv6 address in brackets or a host name",
            )

    def _check_path(self) -> None:
        if self.host or self.port is not None:
            raise self._error(
                f"has a host or port, which {self.transport} does not have", f"write {self.transport}://path"
            )
        if not self.path or self.path in ("*", "@"):
            raise self._error("has no path", f"write {self.transport}:// and a path that subscribers know")
        if self.path != self.path.strip() or not self.path.isprintable():
            raise self._error("starts or ends with white space, or contains control characters", "remove them")
        limit = _MAX_IPC_PATH_BYTES if self.transport == "ipc" else _MAX_INPROC_NAME_BYTES
        length = len(self.path.encode())
        if length > limit:
            raise self._error(f"has a path of {length} bytes, the system accepts {limit}", "give a shorter path")

    def _error(self, problem: str, hint: str) -> ConfigError:
        return ConfigError("endpoint", str(self), problem, hint)

    @classmethod
    def parse(cls, text: str, *, field: str = "endpoint") -> Endpoint:
        """Parse the address that a user wrote as the setting ``field``.

        Raises:
            ConfigError: with ``field``, the text, the problem and a hint.
        """
        try:
            return cls._from_text(text)
        except ConfigError as error:
            raise ConfigError(field, text, error.problem, error.hint) from None

    @classmethod
    def _from_text(cls, text: str) -> Endpoint:
        if not isinstance(text, str):
            raise ConfigError("endpoint", text, "is not a string", f"write {_SHAPES}")
        transport, separator, address = text.partition("://")
        if not separator:
            raise ConfigError("endpoint", text, "has no transport", f"write {_SHAPES}")
        if transport == "tcp":
            host, port = cls._split_tcp(text, address)
            return cls(transport="tcp", host=host, port=port)
        if transport == "ipc":
            return cls(transport="ipc", path=address)
        if transport == "inproc":
            return cls(transport="inproc", path=address)
        raise ConfigError("endpoint", text, f"has the transport {transport!r}", f"write {_SHAPES}, in small letters")

    @staticmethod
    def _split_tcp(text: str, address: str) -> tuple[str, int]:
        host, colon, port = address.rpartition(":")
        if not colon or port.endswith("]"):
            raise ConfigError("endpoint", text, "has no port", "write tcp://host:port")
        if not host:
            raise ConfigError("endpoint", text, "has no host", "write * for every interface, or a host")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ConfigError(
                "endpoint", text, "has more than one colon outside brackets", "write IPv6 as tcp://[address]:port"
            )
        if port == "*":
            return host, 0
        if not _PORT.fullmatch(port):
            raise ConfigError("endpoint", text, f"has {port!r} where a port belongs", "give a number from 0 to 65535")
        return host, int(port)

    def offset(self, rank: int, *, field: str = "endpoint") -> Endpoint:
        """Return the address of stream ``rank``: port + rank for tcp, the suffix ``_dp{rank}`` for ipc and inproc.

        Rank 0 has the unchanged address, as in SGLang's ``offset_endpoint_port``. Port 0 stays 0: the system gives
        every rank its own port.

        Raises:
            ConfigError: with ``field``: the rank is negative, or the port or path becomes invalid.
        """
        if type(rank) is not int or rank < 0:
            raise ConfigError(field, str(self), f"cannot be offset by rank {rank!r}", "give a rank of at least 0")
        if rank == 0 or self.port == 0:
            return self
        try:
            if self.port is None:
                return attrs.evolve(self, path=f"{self.path}_dp{rank}")
            return attrs.evolve(self, port=self.port + rank)
        except ConfigError as error:
            if self.port is None:
                raise ConfigError(field, str(self), f"with the suffix _dp{rank} {error.problem}", error.hint) from None
            problem = f"gives rank {rank} the port {self.port + rank}, and ports end at {MAX_PORT}"
            hint = f"give a port of at most {MAX_PORT - rank}" if rank < MAX_PORT else "give a smaller rank"
            raise ConfigError(field, str(self), problem, hint) from None

    def with_host(self, host: str) -> Endpoint:
        """Return this endpoint with another host.

        A reader uses it to connect to an address that is advertised with a wildcard.

        Args:
            host: with or without the brackets of a URL.

        Raises:
            ConfigError: ``host`` is invalid, or this is not a tcp endpoint.
        """
        return attrs.evolve(self, host=host)

    def resolve_bind(self, bind: bool | None, *, field: str = "endpoint") -> bool:
        """Return whether a PUB socket binds here. ``bind`` is the operator's setting, None for the default.

        The default is that of SGLang and vLLM: wildcards, ipc and inproc bind; a concrete host is connected to.

        Raises:
            ConfigError: the socket would connect to a wildcard or to port 0.
        """
        binds = self.binds if bind is None else bind
        if not binds and self.is_wildcard:
            raise ConfigError(field, str(self), "is a wildcard and bind is false", "name the host to connect to")
        if not binds and self.port == 0:
            raise ConfigError(
                field, str(self), "connects to a host and has port 0", 'give its port, or "bind": true to listen'
            )
        return binds

    def check_leaves_process(self, *, field: str) -> None:
        """Check that other processes can reach the address.

        Raises:
            ConfigError: it is an inproc address.
        """
        if self.transport == "inproc":
            raise ConfigError(field, str(self), "does not leave the process", "give a tcp or ipc address")

    @property
    def binds(self) -> bool:
        """True if a PUB socket binds by default: wildcards, ipc and inproc."""
        return self.transport != "tcp" or self.is_wildcard

    @property
    def is_wildcard(self) -> bool:
        """True for a host that means every interface: ``*``, ``0.0.0.0`` and ``::``."""
        address = _ip(self.host)
        return self.host == "*" or (address is not None and _unmapped(address).is_unspecified)

    @property
    def is_ipv6(self) -> bool:
        """True for an IPv6 address, which needs a socket with IPv6 enabled. ``*`` is not one."""
        return isinstance(_ip(self.host), IPv6Address)

    @property
    def is_loopback(self) -> bool:
        """True if no other machine can connect: loopback addresses, ``localhost``, ipc and inproc."""
        if self.transport != "tcp" or self.host.lower() == "localhost":
            return True
        address = _ip(self.host)
        return address is not None and _unmapped(address).is_loopback

    @property
    def advertised_host(self) -> str:
        """The host as ``/server_info`` writes it: a wildcard unchanged, a concrete IPv6 address in brackets."""
        return f"[{self.host}]" if self.is_ipv6 and not self.is_wildcard else self.host

    def __str__(self) -> str:
        if self.transport != "tcp":
            return f"{self.transport}://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if self.is_ipv6 else f"tcp://{self.host}:{self.port}"


def named_endpoints(events: Endpoint, replay: Endpoint | None, load: Endpoint | None) -> list[tuple[str, Endpoint]]:
    """Return the endpoints that are not None, each with its setting's name in ``KVEventsConfig``."""
    named = [("endpoint", events), ("replay_endpoint", replay), ("load_endpoint", load)]
    return [(field, endpoint) for field, endpoint in named if endpoint is not None]


# The ports of one engine, which publishers bind and ``/server_info`` advertises.


@attrs.frozen(kw_only=True)
class PortPlan:
    """The event, replay and load endpoints of all streams of an engine, validated together.

    Stream ``i`` has each base endpoint offset by ``i``. Two tcp ranges may not share a port, whatever their hosts are:
    ``0.0.0.0``, a name and an address can mean one interface, and a plan must be valid on every machine. Port 0 never
    overlaps, because the system assigns each port once.

    Attributes:
        events: base of the PUB sockets.
        replay: base of the replay ROUTER sockets; None without replay.
        load: base of the load gauge's PUB sockets; None without a gauge.
        stream_count: number of streams (``ParallelState.kv_stream_count``).

    Raises:
        ConfigError: a range passes port 65535, or two ranges share an address. The field is the setting's name in
            ``KVEventsConfig``.
    """

    events: Endpoint
    replay: Endpoint | None = None
    load: Endpoint | None = None
    stream_count: int = 1

    def __attrs_post_init__(self) -> None:
        check_integer("stream_count", self.stream_count, "is not a number of streams")
        ranges = named_endpoints(self.events, self.replay, self.load)
        for field, base in ranges:
            base.offset(self.stream_count - 1, field=field)
        for (field, base), (other_field, other) in combinations(ranges, 2):
            self._check_apart(field, base, other_field, other)

    def _check_apart(self, field: str, base: Endpoint, other_field: str, other: Endpoint) -> None:
        if base.transport != other.transport:
            return
        if base.port is None or other.port is None:
            shared = {base.offset(i).path for i in range(self.stream_count)}
            if shared.isdisjoint(other.offset(i).path for i in range(self.stream_count)):
                return
            hint = "give the two paths that differ in more than the suffix _dp"
        elif base.port == 0 or other.port == 0 or abs(base.port - other.port) >= self.stream_count:
            return
        else:
            hint = f"give the two ports that are at least {self.stream_count} apart"
        streams = f"{self.stream_count} stream" + ("s" if self.stream_count > 1 else "")
        raise ConfigError(other_field, str(other), f"overlaps {field}={str(base)!r} with {streams}", hint)

    def event_endpoint(self, index: int) -> Endpoint:
        """Return the PUB endpoint of stream ``index``, from 0 to ``stream_count - 1``; ConfigError otherwise."""
        return self._at(index, self.events)

    def replay_endpoint(self, index: int) -> Endpoint | None:
        """Return the replay endpoint of stream ``index``; None without replay."""
        return None if self.replay is None else self._at(index, self.replay)

    def load_endpoint(self, index: int) -> Endpoint | None:
        """Return the load gauge's endpoint of stream ``index``; None without a gauge."""
        return None if self.load is None else self._at(index, self.load)

    def _at(self, index: int, base: Endpoint) -> Endpoint:
        if type(index) is not int or not 0 <= index < self.stream_count:
            raise ConfigError("index", index, "is not a stream of this plan", f"give 0 to {self.stream_count - 1}")
        return base.offset(index)
