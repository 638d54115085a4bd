"""Choose and check the TCP ports of an engine's event streams and forward-pass metrics."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator

from scheduler_components import StartError
from scheduler_components.kv_events import Endpoint, KVEventsConfig
from scheduler_components.metrics.forward_pass_metrics import parse_forward_pass_endpoint
from scheduler_engine.engine.config import DEFAULT_HOST, EngineConfig

_SEARCHED_PORTS = (20_000, 32_000)  # below the ephemeral ports of outgoing connections
_SEARCHES = 64


def default_kv_events(engine: EngineConfig, *, host: str = DEFAULT_HOST) -> KVEventsConfig:
    """Return the configuration of an event stream with replay and load gauge on free ports of ``host``.

    It reserves one event port per rank, although only ``dp_size`` of them are used, so that a probe of the others can
    show that no other rank publishes.

    Raises:
        StartError: there is no range of free ports.
    """
    base = _free_ports(host, engine.world_size + 2 * engine.dp_size)
    return KVEventsConfig(
        publisher="zmq",
        endpoint=f"tcp://{host}:{base}",
        replay_endpoint=f"tcp://{host}:{base + engine.world_size}",
        load_endpoint=f"tcp://{host}:{base + engine.world_size + engine.dp_size}",
        bind=True,
    )


def check_ports_free(engine: EngineConfig) -> None:
    """Check that the TCP ports of the streams are free, before any process is started.

    A port may still be taken before a rank binds it. Then the rank reports the error.

    Raises:
        StartError: an endpoint is in use; the error names the first one.
    """
    for base in _bound_endpoints(engine):
        for index in range(engine.dp_size if base.port else 0):
            endpoint = base.offset(index)
            if _is_taken(endpoint.host, endpoint.port or 0):
                raise StartError(
                    str(endpoint), "is in use", "stop the process that listens there, or give another port"
                )


def _bound_endpoints(engine: EngineConfig) -> Iterator[Endpoint]:
    """Yield the base of each range of addresses that the ranks bind."""
    if engine.telemetry.forward_pass_endpoint:
        yield parse_forward_pass_endpoint(engine.telemetry.forward_pass_endpoint)
    settings = engine.kv_events
    if settings is None or settings.publisher != "zmq":
        return
    plan = settings.port_plan(engine.dp_size)
    yield from (base for base in (plan.replay, plan.load) if base is not None)
    if plan.events.resolve_bind(settings.bind):
        yield plan.events


def _is_taken(host: str, port: int) -> bool:
    """Return True if the port is in use. Any other error of binding is left to the rank."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server(("" if host == "*" else host, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _free_ports(host: str, count: int) -> int:
    """Return the first of ``count`` consecutive free ports."""
    for _ in range(_SEARCHES):
        base = random.randrange(*_SEARCHED_PORTS)  # any port will do
        if all(_is_free(host, port) for port in range(base, base + count)):
            return base
    raise StartError(f"{count} ports on {host}", "are not free in sequence", "choose ports with --kv-events-config")


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
