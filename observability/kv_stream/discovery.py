"""Where a worker's streams are: from its URL, or from endpoints that a person gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec

from observability.kv_stream.follower import MAX_STREAMS
from scheduler_components import ComponentError, ConfigError, DecodeError, StartError
from scheduler_components.kv_events import Endpoint, StreamAddress

if TYPE_CHECKING:
    import httpx

__all__ = [
    "NoStreamsError",
    "UnreachableError",
    "parse_addresses",
    "static_address",
    "discover",
    "fetch_json",
    "fetch_page",
    "escape_unprintable",
    "parse_worker_url",
]

_MAX_REPLY_BYTES = 4 * 1024 * 1024
"""SGLang's ``/server_info`` with all its flags and internal states is some 20 KB."""

_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_048_576)]
_StreamCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]


class NoStreamsError(ComponentError):
    """The worker answers, and says that it publishes no KV events that could be followed.

    Args:
        url: the worker.
        reason: its own ``kv_events_error``, or what is missing.
    """

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = escape_unprintable(reason)
        super().__init__(f"{url} publishes no KV events: {self.reason}")


class UnreachableError(StartError):
    """Nothing at the worker's URL speaks HTTP: it does not run, or the URL is another's."""


class _Publisher(msgspec.Struct, frozen=True):
    """One of ``publishers``: SGLang's two fields, then this kit's."""

    dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STREAMS)]
    endpoint: str
    replay_endpoint: str | None = None
    load_endpoint: str | None = None


class _Descriptor(msgspec.Struct, frozen=True):
    """``kv_events`` of ``/server_info`` (SGLang 0.5.23 and this kit); unknown fields are ignored."""

    endpoint_host: str | None = None
    endpoint_port_base: _Port | None = None
    publishers: Annotated[tuple[_Publisher, ...], msgspec.Meta(max_length=MAX_STREAMS)] | None = None
    dp_size: _StreamCount = 1
    publisher: str = ""
    topic: str = ""
    block_size: _Count | None = None
    replay_endpoint_port_base: _Port | None = None
    replay_endpoint_host: str | None = None
    load_endpoint_port_base: _Port | None = None
    load_endpoint_host: str | None = None


def escape_unprintable(text: str) -> str:
    """Put ``?`` for each line break and control character of a text that came over the network.

    A peer must neither control the terminal nor write a line that looks like ours.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def parse_worker_url(text: str) -> httpx.URL:
    """Parse the URL of a worker.

    Raises:
        ConfigError: not an http or https URL with a host.
        StartError: httpx is not installed.
    """
    try:
        import httpx  # here: a bare endpoint needs no HTTP client
    except ImportError as error:
        hint = "pip install 'scheduler-components[http]', or give the streams' endpoints"
        raise StartError("httpx", "is not installed", hint) from error
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError("url", text, f"is not a URL ({error})", "give http://host:port") from None
    if url.scheme not in ("http", "https"):
        raise ConfigError("url", text, "is not the URL of a worker", "give http://host:port")
    try:
        Endpoint(transport="tcp", host=url.host, port=1)  # the host stands in for wildcards, so it must be one
    except ConfigError as error:
        raise ConfigError("url", text, error.problem, "give http://host:port") from None
    return url.copy_with(path=url.path.rstrip("/"), query=None, fragment=None)


def fetch_page(url: httpx.URL, path: str, *, timeout_s: float, accept: str = "*/*") -> bytes:
    """GET one page of a worker, in a form that ``accept`` names.

    Raises:
        UnreachableError: nothing answers.
        StartError: the answer is not 200.
        DecodeError: the page is larger than 4 MiB.
    """
    import httpx  # here, as in ``parse_worker_url``

    page = url.copy_with(path=url.path.rstrip("/") + path)
    body = bytearray()
    try:
        # A worker is asked directly: a proxy that the environment may name does not know its address.
        with httpx.stream("GET", page, headers={"accept": accept}, timeout=timeout_s, trust_env=False) as reply:
            if reply.status_code != httpx.codes.OK:
                raise StartError(str(page), f"answers {reply.status_code}", "check that this is the worker's own URL")
            for chunk in reply.iter_bytes():
                body += chunk
                if len(body) > _MAX_REPLY_BYTES:
                    raise DecodeError(f"{page} is over {_MAX_REPLY_BYTES} bytes")
    except httpx.HTTPError as error:
        problem = str(error) or type(error).__name__
        hint = "check that the worker runs and that the port is its HTTP port"
        raise UnreachableError(str(page), problem, hint) from error
    return bytes(body)


def fetch_json(url: httpx.URL, path: str, *, timeout_s: float) -> Any:
    """GET one page of a worker and read it as JSON.

    Raises:
        UnreachableError, StartError: as ``fetch_page``.
        DecodeError: the page is not JSON, or is larger than 4 MiB.
    """
    body = fetch_page(url, path, timeout_s=timeout_s)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{url.copy_with(path=url.path + path)} is not JSON: {error}") from error


def discover(url: str, *, timeout_s: float = 5.0) -> tuple[StreamAddress, ...]:
    """Ask a worker for its streams: one address per rank.

    Raises:
        ConfigError: ``url`` is not a worker's URL.
        UnreachableError: nothing answers at the URL.
        StartError: what answers has no ``/server_info``.
        NoStreamsError: it publishes no KV events.
        DecodeError: what it says of its streams cannot be dialled.
    """
    worker = parse_worker_url(url)
    return parse_addresses(fetch_json(worker, "/server_info", timeout_s=timeout_s), worker)


def parse_addresses(server_info: object, worker: httpx.URL) -> tuple[StreamAddress, ...]:
    """Read ``/server_info``: one address per rank, with the worker's own host where a wildcard is advertised.

    Raises:
        NoStreamsError, DecodeError: as ``discover``.
    """
    if not isinstance(server_info, dict):
        raise DecodeError(f"/server_info is {type(server_info).__name__}, not an object")
    described = server_info.get("kv_events")
    if described is None:
        reason = server_info.get("kv_events_error") or "/server_info has no kv_events"
        raise NoStreamsError(str(worker), str(reason))
    try:
        descriptor = msgspec.convert(described, _Descriptor)
        return _addresses(descriptor, worker.host)
    except (msgspec.ValidationError, ConfigError) as error:
        raise DecodeError(f"kv_events of /server_info: {error}") from error


def _addresses(descriptor: _Descriptor, worker_host: str) -> tuple[StreamAddress, ...]:
    """One per publisher where they are listed, else one per rank from the bases."""
    if descriptor.publishers:
        ranks = [publisher.dp_rank for publisher in descriptor.publishers]
        if len(set(ranks)) != len(ranks):
            raise ConfigError("publishers", ranks, "names a rank twice", "name each rank once")
        by_rank = sorted(descriptor.publishers, key=lambda publisher: publisher.dp_rank)
        return tuple(_listed(descriptor, publisher, worker_host) for publisher in by_rank)
    if descriptor.endpoint_host is None or descriptor.endpoint_port_base is None:
        missing = "endpoint_host" if descriptor.endpoint_host is None else "endpoint_port_base"
        raise ConfigError(missing, None, "is missing, and no publishers are listed", "ask the worker's operator")
    base = Endpoint(transport="tcp", host=descriptor.endpoint_host, port=descriptor.endpoint_port_base)
    return tuple(_address(descriptor, rank, base.offset(rank), worker_host) for rank in range(descriptor.dp_size))


def _listed(descriptor: _Descriptor, publisher: _Publisher, worker_host: str) -> StreamAddress:
    """The address of a publisher that is listed; a side that its entry leaves out is at base + rank on its host."""
    address = _address(descriptor, publisher.dp_rank, Endpoint.parse(publisher.endpoint), worker_host)
    replay, load = publisher.replay_endpoint, publisher.load_endpoint
    if replay is not None:
        address = attrs.evolve(address, replay=_dialled(Endpoint.parse(replay, field="replay_endpoint"), worker_host))
    if load is not None:
        address = attrs.evolve(address, load=_dialled(Endpoint.parse(load, field="load_endpoint"), worker_host))
    return address


def _address(descriptor: _Descriptor, rank: int, events: Endpoint, worker_host: str) -> StreamAddress:
    def side(host: str | None, port_base: int | None) -> Endpoint | None:
        if port_base is None:
            return None
        return _dialled(Endpoint(transport="tcp", host=host or events.host, port=port_base).offset(rank), worker_host)

    return StreamAddress(
        rank=rank,
        events=_dialled(events, worker_host),
        replay=side(descriptor.replay_endpoint_host, descriptor.replay_endpoint_port_base),
        load=side(descriptor.load_endpoint_host, descriptor.load_endpoint_port_base),
        topic=descriptor.topic,
        block_size=descriptor.block_size,
    )


def _dialled(endpoint: Endpoint, worker_host: str) -> Endpoint:
    return endpoint.with_host(worker_host) if endpoint.is_wildcard else endpoint


def static_address(events: str, *, replay: str | None = None, topic: str = "", rank: int = 0) -> StreamAddress:
    """The address of one stream whose endpoints a person gives; no offset is added.

    Raises:
        ConfigError: an endpoint that cannot be dialled: malformed, a wildcard, or port 0.
    """
    return StreamAddress(
        rank=rank,
        events=Endpoint.parse(events),
        replay=Endpoint.parse(replay, field="replay_endpoint") if replay else None,
        topic=topic,
    )
