"""The command ``relay``: a sidecar that follows an engine's event streams, publishes them again, and serves HTTP."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

import observability.jetstream
from observability import LogCollector, RelayCollector, status_routes
from observability.jetstream import JetStreamConfig
from observability.relay import (
    RelayConfig,
    RelaySinks,
    RelaySource,
    RelayStatus,
    ZmqRelay,
    open_relay,
    parse_relay_config,
)
from scheduler_components import ConfigError
from scheduler_components._internal.extras import require_modules
from scheduler_engine.cli.keys import ApiKey, ApiKeyFile, PublisherKey, SecretKey, read_api_key, read_client_keys
from scheduler_engine.cli.run_reporter import print_lines
from scheduler_engine.cli.sigterm import cancel_on_sigterm
from scheduler_engine.engine.config import DEFAULT_HOST
from scheduler_engine.frontend.http_server import bind_http, open_http_server

if TYPE_CHECKING:  # only --jetstream needs the extra `jetstream`
    from observability.jetstream import JetStreamWriter

_log = logging.getLogger("scheduler_components.relay")

_POLL_S = 0.1
_ROUTES = ("/health", "/ready", "/server_info", "/get_server_info", "/metrics")
"""The routes of a relay, which has neither model nor load."""


Source = Annotated[
    str,
    Parameter(
        help="A worker's URL (http://host:port), or the endpoints of one stream (tcp://host:port,tcp://host:port:"
        " events, then replay; 1= before them for rank 1). Several are sources of one worker."
    ),
]


def relay(
    source: Source,
    /,
    *more_sources: Annotated[str, Parameter(help="Further sources of the same worker.")],
    kv_events_config: Annotated[str, Parameter(help="Configuration of the publisher, as JSON, as for an engine.")],
    host: Annotated[str, Parameter(help="Address of the HTTP server.")] = DEFAULT_HOST,
    port: Annotated[
        int, Parameter(validator=Number(gte=0, lte=65535), help="Port of the HTTP server; 0 lets the system choose.")
    ] = 0,
    topic: Annotated[str | None, Parameter(help="Topic of the sources. Default: the worker's topic, or all.")] = None,
    block_size: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Tokens per block, to advertise. Default: as seen.")
    ] = None,
    jetstream: Annotated[
        str | None,
        Parameter(
            help="Write the streams into NATS JetStream as well: nats://host:port, or a JSON object of settings."
        ),
    ] = None,
    worker: Annotated[str | None, Parameter(help="Name of the worker in JetStream.")] = None,
    secret_key_file: SecretKey = None,
    publisher_key_file: PublisherKey = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
) -> int:
    """Follow an engine's event streams and publish them again, with replay from any point, until Ctrl-C."""
    key = read_api_key("api_key", api_key, api_key_file)
    config = RelayConfig(
        sources=tuple(RelaySource.parse(text, topic=topic, api_key=key) for text in (source, *more_sources)),
        keys=read_client_keys(secret_key_file, publisher_key_file),
    )
    settings = parse_relay_config(kv_events_config)
    writer = jetstream_writer(jetstream, worker, settings.topic)
    with nullcontext() if writer is None else writer:
        asyncio.run(
            _relay(config, RelaySinks(settings=settings, writer=writer), listen=(host, port), block_size=block_size)
        )
    return 0


def jetstream_writer(settings: str | None, worker: str | None, topic: str) -> JetStreamWriter | None:
    """Open the writer that ``--jetstream`` asks for; None without it.

    Raises:
        ConfigError: a setting that cannot work, or no name of the worker.
        MissingExtraError: the extra ``jetstream`` is not installed.
    """
    if settings is None:
        return None
    require_modules("nats", otherwise="leave --jetstream out")
    config = JetStreamConfig.from_cli(settings)
    if worker is None:
        raise ConfigError("worker", worker, "is missing", "give the name that JetStream readers ask for")
    return observability.jetstream.open_jetstream_writer(config, worker, topic=topic)


async def _relay(
    config: RelayConfig,
    sinks: RelaySinks,
    *,
    listen: tuple[str, int],
    block_size: int | None,
) -> None:
    cancel_on_sigterm()
    with bind_http(*listen) as listener, open_relay(config, sinks=sinks, report=_log.warning) as opened:
        registry = CollectorRegistry()
        RelayCollector(registry, opened.followed, opened.relayed)
        if sinks.writer is not None:
            LogCollector(registry, sinks.writer)
        status = RelayStatus(relay=opened, sinks=sinks, block_size=block_size)
        routes = [route for route in status_routes(status, registry=registry) if route.path in _ROUTES]
        async with open_http_server(Starlette(routes=routes), listener) as server:
            print_lines((f"relaying {_source_names(config)}; {server.url}/health says how it is; Ctrl-C stops",))
            await _follow(opened)


# Garbage collection. A relay creates few cycles, all in its HTTP responses, and keeps tens of thousands of tuples of
# hashes. The interpreter would collect in the middle of a batch: 4 ms every 50 ms, and 50 ms for the first walk over
# all modules (measured at 2,000 batches of 16 events per second; the goal is 2 ms). The collector does not walk a tuple
# without containers again, so small and frequent collections between polls cost almost nothing.

_COLLECT_EVERY_S = (0.02, 5.0, 60.0)
"""Interval per generation: some hundred objects, some ten thousand, and all objects since the start."""


class ScheduledGarbageCollector:
    """Collect garbage between two polls only, while a ``with`` block runs.

    Args:
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_last_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = [clock()] * len(_COLLECT_EVERY_S)

    def __enter__(self) -> ScheduledGarbageCollector:
        """Exclude all existing objects from later collections."""
        gc.disable()
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        """Return collection to the interpreter."""
        gc.unfreeze()
        gc.enable()

    def collect_due(self) -> None:
        """Collect the oldest generation that is due."""
        now_s = self._clock()
        for generation in reversed(range(len(_COLLECT_EVERY_S))):
            if now_s - self._last_s[generation] >= _COLLECT_EVERY_S[generation]:
                self._last_s[: generation + 1] = [now_s] * (generation + 1)
                gc.collect(generation)
                return


async def _follow(opened: ZmqRelay) -> None:
    """Poll on a separate thread until this task is cancelled."""
    stopping = threading.Event()

    def run() -> None:
        with ScheduledGarbageCollector() as garbage:
            while not stopping.is_set():
                opened.poll(_POLL_S)
                garbage.collect_due()

    following = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        await asyncio.shield(following)
    finally:
        stopping.set()
        await asyncio.wait([following])


def _source_names(config: RelayConfig) -> str:
    return " and ".join(source.text for source in config.sources)
