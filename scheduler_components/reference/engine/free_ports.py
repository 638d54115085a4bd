"""Choose and check the TCP ports of an engine's event streams."""

from __future__ import annotations

import errno
import random
import socket

import msgspec

from scheduler_components import StartError
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.reference.engine.config import DEFAULT_HOST, EngineConfig

__all__ = [
    "default_kv_events",
    "check_ports_free",
]

_SEARCHED_PORTS = (20_000, 32_000)  # below the ports that systems give to outgoing connections


_SEARCHES = 64


def default_kv_events(engine: EngineConfig, *, host: str = DEFAULT_HOST) -> str:
    """Configuration of an event stream with replay and load gauge on free ports of ``host``.

    One port per rank is kept for events, though only ``dp_size`` of them are used: whoever probes the others learns
    that no other rank publishes.

    Raises:
        StartError: no run of free ports was found.
    """
    base = _free_ports(host, engine.world_size + 2 * engine.dp_size)
    return msgspec.json.encode(
        {
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{base}",
            "replay_endpoint": f"tcp://{host}:{base + engine.world_size}",
            "load_endpoint": f"tcp://{host}:{base + engine.world_size + engine.dp_size}",
            "bind": True,
        }
    ).decode()


def check_ports_free(engine: EngineConfig) -> None:
    """Look whether the event stream's tcp ports can be had, so that a taken one costs no process.

    A port may still be taken before a rank binds it: then the rank says so.

    Raises:
        StartError: naming the first endpoint that is in use.
    """
    if engine.kv_events is None:
        return
    settings = KVEventsConfig.from_cli(engine.kv_events)
    if settings.publisher != "zmq":
        return
    plan = settings.port_plan(engine.dp_size)
    bound = [plan.replay, plan.load]
    if plan.events.resolve_bind(settings.bind):
        bound.append(plan.events)
    for base in bound:
        for index in range(engine.dp_size if base is not None and base.port else 0):
            assert base is not None
            endpoint = base.offset(index)
            if _is_taken(endpoint.host, endpoint.port or 0):
                raise StartError(str(endpoint), "is in use", "stop who listens there, or give another port")


def _is_taken(host: str, port: int) -> bool:
    """True when somebody listens there; what else keeps a rank from binding is left to the rank to say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server(("" if host == "*" else host, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _free_ports(host: str, count: int) -> int:
    """First of ``count`` consecutive ports that were free a moment ago."""
    for _ in range(_SEARCHES):
        base = random.randrange(*_SEARCHED_PORTS)  # noqa: S311  any port will do
        if all(_is_free(host, port) for port in range(base, base + count)):
            return base
    raise StartError(f"{count} ports on {host}", "no free run found", "give --kv-events-config with ports of your own")


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
