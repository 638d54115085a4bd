"""The command ``relay``: a sidecar that follows an engine's streams and publishes them again, with its HTTP answers."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
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
    RelaySinkFactory,
    RelaySource,
    RelayStatus,
    TeeSinkFactory,
    ZmqRelay,
    ZmqSinkFactory,
    open_relay,
    parse_relay_config,
)
from scheduler_components import ConfigError, StartError
from scheduler_components.reference.cli.client_keys import PublisherKey, SecretKey, read_client_keys
from scheduler_components.reference.cli.run_reporter import print_lines
from scheduler_components.reference.engine.config import DEFAULT_HOST
from scheduler_components.reference.engine.frontend.http_server import bind_http, open_http_server

if TYPE_CHECKING:  # the command works without the extra `jetstream`, as long as nobody asks for it
    from observability.jetstream import JetStreamWriter

__all__ = ["ScheduledGarbageCollector", "jetstream_writer", "relay"]

_POLL_S = 0.1
_ROUTES = ("/health", "/server_info", "/get_server_info", "/metrics")
"""What a relay can answer; it has neither model nor load."""


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
    kv_events_config: Annotated[str, Parameter(help="Where and how to publish, as JSON; as an engine's.")],
    host: Annotated[str, Parameter(help="Address of the HTTP server.")] = DEFAULT_HOST,
    port: Annotated[
        int, Parameter(validator=Number(gte=0, lte=65535), help="Port of the HTTP server; 0 lets the system choose.")
    ] = 0,
    topic: Annotated[str | None, Parameter(help="Topic of the sources. Default: what a worker says, or all.")] = None,
    block_size: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Tokens per block, to advertise. Default: as seen.")
    ] = None,
    jetstream: Annotated[
        str | None,
        Parameter(
            help="Write the streams into NATS JetStream as well: nats://host:port, or a JSON object of settings."
        ),
    ] = None,
    worker: Annotated[str | None, Parameter(help="The worker's name there, by which readers ask for it.")] = None,
    secret_key_file: SecretKey = None,
    publisher_key_file: PublisherKey = None,
) -> int:
    """Follow an engine's event streams and publish them again, with replay from any point, until Ctrl-C."""
    config = RelayConfig(
        sources=tuple(RelaySource.parse(text, topic=topic) for text in (source, *more_sources)),
        keys=read_client_keys(secret_key_file, publisher_key_file),
    )
    settings = parse_relay_config(kv_events_config)
    writer = jetstream_writer(jetstream, worker, settings.topic)
    with nullcontext() if writer is None else writer:
        asyncio.run(_relay(config, ZmqSinkFactory(settings), writer, listen=(host, port), block_size=block_size))
    return 0


def jetstream_writer(settings: str | None, worker: str | None, topic: str) -> JetStreamWriter | None:
    """Open the writer that ``--jetstream`` asks for; None without it.

    Raises:
        ConfigError: a setting that cannot work, or no name of the worker.
        StartError: the extra ``jetstream`` is not installed.
    """
    if settings is None:
        return None
    if find_spec("nats") is None:
        raise StartError("nats-py", "is not installed", "pip install 'scheduler-components[jetstream]'")
    config = JetStreamConfig.from_cli(settings)
    if worker is None:
        raise ConfigError("worker", worker, "is missing", "give the name by which readers of JetStream ask for it")
    return observability.jetstream.open_jetstream_writer(config, worker, topic=topic)


async def _relay(
    config: RelayConfig,
    published: ZmqSinkFactory,
    writer: JetStreamWriter | None,
    *,
    listen: tuple[str, int],
    block_size: int | None,
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    sinks: RelaySinkFactory = published if writer is None else TeeSinkFactory(others=published, writer=writer)
    with bind_http(*listen) as listener, open_relay(config, sinks=sinks, report=_complain) as opened:
        registry = CollectorRegistry()
        RelayCollector(registry, opened)
        if writer is not None:
            LogCollector(registry, writer)
        status = RelayStatus(relay=opened, sinks=sinks, block_size=block_size)
        routes = [route for route in status_routes(status, registry=registry) if route.path in _ROUTES]
        async with open_http_server(Starlette(routes=routes), listener) as url:
            print_lines((f"relaying {_named(config)}; {url}/health says how it is; Ctrl-C stops",))
            await _follow(opened)


# Garbage. A relay makes few cycles, all of them in its HTTP answers, and keeps tuples of hashes by the ten thousand.
# The interpreter's collector walks all that is new whenever it thinks fit, in the middle of a batch: 4 ms every 50 ms,
# and 50 ms for its first look at all modules (measured at 2,000 batches of 16 events per second; the goal is 2 ms).
# What has been walked once and holds no container is not walked again, so little and often costs next to nothing.

_COLLECT_EVERY_S = (0.02, 5.0, 60.0)
"""By generation: a walk of some hundred objects, of some ten thousand, and of all that was made since the start."""


class ScheduledGarbageCollector:
    """Collects between two polls, and never within one; in a ``with`` block, which is the process's life.

    Args:
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_last_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = [clock()] * len(_COLLECT_EVERY_S)

    def __enter__(self) -> ScheduledGarbageCollector:
        """Let nobody look again at what is there."""
        gc.disable()
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the rest to the interpreter."""
        gc.unfreeze()
        gc.enable()

    def collect_due(self) -> None:
        """Collect what is due."""
        now_s = self._clock()
        for generation in reversed(range(len(_COLLECT_EVERY_S))):
            if now_s - self._last_s[generation] >= _COLLECT_EVERY_S[generation]:
                self._last_s[: generation + 1] = [now_s] * (generation + 1)
                gc.collect(generation)
                return


async def _follow(opened: ZmqRelay) -> None:
    """Poll on a thread of its own until this task is cancelled."""
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


def _named(config: RelayConfig) -> str:
    return " and ".join(source.text for source in config.sources)


def _complain(text: str) -> None:
    sys.stderr.write(f"scheduler-components: {text}\n")
    sys.stderr.flush()
