"""Finding the addresses of a worker's streams, from its URL or from given endpoints."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec

from observability.kv_stream.stream_stats import MAX_STREAMS
from scheduler_components import ComponentError, ConfigError, DecodeError, StartError
from scheduler_components._internal.extras import require_modules
from scheduler_components.kv_events import Endpoint, StreamAddress

if TYPE_CHECKING:
    import ssl

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
    "trusted_certificates",
    "parse_worker_url",
]

_MAX_REPLY_BYTES = 4 * 1024 * 1024
"""SGLang's ``/server_info`` with all flags and internal states has 20 KB."""

_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_048_576)]
_StreamCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]


class NoStreamsError(ComponentError):
    """The worker answers, but publishes no KV events.

    Args:
        url: of the worker.
        reason: its ``kv_events_error``, or the missing field.
    """

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = escape_unprintable(reason)
        super().__init__(f"{url} publishes no KV events: {self.reason}")


class UnreachableError(StartError):
    """No HTTP server answers at the worker's URL: the worker is not running, or the URL is wrong."""


class _Publisher(msgspec.Struct, frozen=True):
    """An item of ``publishers``: SGLang's two fields, then those of this kit."""

    dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STREAMS)]
    endpoint: str
    replay_endpoint: str | None = None
    load_endpoint: str | None = None


class _Descriptor(msgspec.Struct, frozen=True):
    """``kv_events`` of ``/server_info``, as in SGLang 0.5.23 and this kit. Unknown fields are ignored."""

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
    """Replace each line break and control character of a text from the network by ``?``.

    A peer must not control the terminal, or forge a line of output.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def parse_worker_url(text: str) -> httpx.URL:
    """Parse the URL of a worker.

    Raises:
        ConfigError: the text is not an http or https URL with a host.
        MissingExtraError: httpx is not installed.
    """
    require_modules("httpx", otherwise="give the streams' endpoints")
    import httpx  # imported here because a bare endpoint needs no HTTP client

    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError("url", text, f"is not a URL ({error})", "give http://host:port") from None
    if url.scheme not in ("http", "https"):
        raise ConfigError("url", text, "is not the URL of a worker", "give http://host:port")
    try:
        Endpoint(transport="tcp", host=url.host, port=1)  # the host will replace wildcards, so it must be valid
    except ConfigError as error:
        raise ConfigError("url", text, error.problem, "give http://host:port") from None
    return url.copy_with(path=url.path.rstrip("/"), query=None, fragment=None)


def fetch_page(
    url: httpx.URL, path: str, *, timeout_s: float, accept: str = "*/*", api_key: str | None = None
) -> bytes:
    """GET one page of a worker in a media type of ``accept``. A worker with keys wants its ``api_key``.

    Raises:
        UnreachableError: no server answers.
        StartError: the status is not 200.
        DecodeError: the page is larger than 4 MiB.
    """
    import httpx  # here, as in ``parse_worker_url``

    page = url.copy_with(path=url.path.rstrip("/") + path)
    body, headers = bytearray(), {"accept": accept}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        # Without the environment's proxy, which usually cannot reach a worker.
        with httpx.stream(
            "GET", page, headers=headers, timeout=timeout_s, trust_env=False, verify=trusted_certificates()
        ) as reply:
            if reply.status_code == httpx.codes.UNAUTHORIZED:
                raise StartError(str(page), "answers 401", "give the worker's API key")
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


@cache
def trusted_certificates() -> ssl.SSLContext:
    """Return what https trusts, read once per process: reading it takes longer than most pages."""
    import httpx  # here, as in ``parse_worker_url``

    return httpx.create_ssl_context(trust_env=False)


def fetch_json(url: httpx.URL, path: str, *, timeout_s: float, api_key: str | None = None) -> Any:
    """GET one page of a worker and read it as JSON.

    Raises:
        UnreachableError, StartError: as ``fetch_page``.
        DecodeError: the page is not JSON, or larger than 4 MiB.
    """
    body = fetch_page(url, path, timeout_s=timeout_s, api_key=api_key)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"{url.copy_with(path=url.path + path)} is not JSON: {error}") from error


def discover(url: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> tuple[StreamAddress, ...]:
    """Ask a worker for the addresses of its streams; return one per rank.

    Args:
        url: URL of the worker.
        timeout_s: timeout of the request.
        api_key: key of a worker that requires one.

    Raises:
        ConfigError: ``url`` is not the URL of a worker.
        UnreachableError: no server answers at the URL.
        StartError: the server has no ``/server_info``.
        NoStreamsError: the worker publishes no KV events.
        DecodeError: an advertised address cannot be dialed.
    """
    worker = parse_worker_url(url)
    return parse_addresses(fetch_json(worker, "/server_info", timeout_s=timeout_s, api_key=api_key), worker)


def parse_addresses(server_info: object, worker: httpx.URL) -> tuple[StreamAddress, ...]:
    """Read ``/server_info`` and return one address per rank. The worker's host replaces an advertised wildcard.

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
    """Return one address per listed publisher; without a list, one per rank from the base ports."""
    if descriptor.publishers:
        ranks = [publisher.dp_rank for publisher in descriptor.publishers]
        if len(set(ranks)) != len(ranks):
            raise ConfigError("publishers", ranks, "names a rank twice", "name each rank once")
        by_rank = sorted(descriptor.publishers, key=lambda publisher: publisher.dp_rank)
        return tuple(_listed_address(descriptor, publisher, worker_host) for publisher in by_rank)
    if descriptor.endpoint_host is None or descriptor.endpoint_port_base is None:
        missing = "endpoint_host" if descriptor.endpoint_host is None else "endpoint_port_base"
        raise ConfigError(missing, None, "is missing, and no publishers are listed", "ask the worker's operator")
    base = Endpoint(transport="tcp", host=descriptor.endpoint_host, port=descriptor.endpoint_port_base)
    return tuple(_address(descriptor, rank, base.offset(rank), worker_host) for rank in range(descriptor.dp_size))


def _listed_address(descriptor: _Descriptor, publisher: _Publisher, worker_host: str) -> StreamAddress:
    """Return the address of a listed publisher. An endpoint that its entry omits is at base port + rank on its host."""
    address = _address(descriptor, publisher.dp_rank, Endpoint.parse(publisher.endpoint), worker_host)
    replay, load = publisher.replay_endpoint, publisher.load_endpoint
    if replay is not None:
        address = attrs.evolve(address, replay=_dialable(Endpoint.parse(replay, field="replay_endpoint"), worker_host))
    if load is not None:
        address = attrs.evolve(address, load=_dialable(Endpoint.parse(load, field="load_endpoint"), worker_host))
    return address


def _address(descriptor: _Descriptor, rank: int, events: Endpoint, worker_host: str) -> StreamAddress:
    def endpoint(host: str | None, port_base: int | None) -> Endpoint | None:
        if port_base is None:
            return None
        return _dialable(Endpoint(transport="tcp", host=host or events.host, port=port_base).offset(rank), worker_host)

    return StreamAddress(
        rank=rank,
        events=_dialable(events, worker_host),
        replay=endpoint(descriptor.replay_endpoint_host, descriptor.replay_endpoint_port_base),
        load=endpoint(descriptor.load_endpoint_host, descriptor.load_endpoint_port_base),
        topic=descriptor.topic,
        block_size=descriptor.block_size,
    )


def _dialable(endpoint: Endpoint, worker_host: str) -> Endpoint:
    return endpoint.with_host(worker_host) if endpoint.is_wildcard else endpoint


def static_address(events: str, *, replay: str | None = None, topic: str = "", rank: int = 0) -> StreamAddress:
    """Return the address of one stream with the given endpoints; ``rank`` is not added to the ports.

    Raises:
        ConfigError: an endpoint cannot be dialed: it is malformed, a wildcard, or has port 0.
    """
    return StreamAddress(
        rank=rank,
        events=Endpoint.parse(events),
        replay=Endpoint.parse(replay, field="replay_endpoint") if replay else None,
        topic=topic,
    )
