"""Where a worker's streams are: from its URL, or from endpoints that a person gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from observability.kv_stream.follower import MAX_STREAMS
from scheduler_components import ComponentError, ConfigError, DecodeError, StartError
from scheduler_components.kv_events import Endpoint, StreamAddress

if TYPE_CHECKING:
    import httpx

__all__ = [
    "NoStreamsError",
    "UnreachableError",
    "addresses_in",
    "bare_address",
    "discover",
    "fetch_json",
    "fetch_page",
    "printable",
    "worker_url",
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
        self.reason = printable(reason)
        super().__init__(f"{url} publishes no KV events: {self.reason}")


class UnreachableError(StartError):
    """Nothing at the worker's URL speaks HTTP: it does not run, or the URL is another's."""


class _Descriptor(msgspec.Struct, frozen=True):
    """``kv_events`` of ``/server_info`` (SGLang 0.5.23 and this kit); unknown fields are ignored."""

    endpoint_host: str
    endpoint_port_base: _Port
    dp_size: _StreamCount = 1
    publisher: str = ""
    topic: str = ""
    block_size: _Count | None = None
    replay_endpoint_port_base: _Port | None = None
    replay_endpoint_host: str | None = None
    load_endpoint_port_base: _Port | None = None
    load_endpoint_host: str | None = None


def printable(text: str) -> str:
    """Put ``?`` for each line break and control character of a text that came over the network.

    A peer must neither control the terminal nor write a line that looks like ours.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def worker_url(text: str) -> httpx.URL:
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
    import httpx  # here, as in ``worker_url``

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
    worker = worker_url(url)
    return addresses_in(fetch_json(worker, "/server_info", timeout_s=timeout_s), worker)


def addresses_in(server_info: object, worker: httpx.URL) -> tuple[StreamAddress, ...]:
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
        return tuple(_address(descriptor, rank, worker.host) for rank in range(descriptor.dp_size))
    except (msgspec.ValidationError, ConfigError) as error:
        raise DecodeError(f"kv_events of /server_info: {error}") from error


def _address(descriptor: _Descriptor, rank: int, worker_host: str) -> StreamAddress:
    host = descriptor.endpoint_host
    return StreamAddress(
        rank=rank,
        events=_dialled(host, descriptor.endpoint_port_base, rank, worker_host),
        replay=_side(descriptor.replay_endpoint_host or host, descriptor.replay_endpoint_port_base, rank, worker_host),
        load=_side(descriptor.load_endpoint_host or host, descriptor.load_endpoint_port_base, rank, worker_host),
        topic=descriptor.topic,
        block_size=descriptor.block_size,
    )


def _side(host: str, port_base: int | None, rank: int, worker_host: str) -> Endpoint | None:
    return None if port_base is None else _dialled(host, port_base, rank, worker_host)


def _dialled(host: str, port_base: int, rank: int, worker_host: str) -> Endpoint:
    endpoint = Endpoint(transport="tcp", host=host, port=port_base).offset(rank)
    return endpoint.with_host(worker_host) if endpoint.is_wildcard else endpoint


def bare_address(events: str, *, replay: str | None = None, topic: str = "", rank: int = 0) -> StreamAddress:
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
