"""The command ``route``: a proxy that sends each request to the replica that has most of its prompt."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from cyclopts import Parameter
from cyclopts.validators import Number
from prometheus_client import CollectorRegistry

from observability.routing import KvRouter, Picker, PickerName, make_picker
from scheduler_engine.cli.keys import PublisherKey, SecretKey, read_api_key, read_client_keys
from scheduler_engine.cli.run_reporter import print_lines
from scheduler_engine.cli.server_options import AccessOptions
from scheduler_engine.cli.session import ServerConfig, with_host
from scheduler_engine.cli.sigterm import Termination, cancel_on_sigterm
from scheduler_engine.engine.config import DEFAULT_HOST
from scheduler_engine.frontend.access import is_loopback
from scheduler_engine.frontend.http_body import BodyReceiver
from scheduler_engine.frontend.http_server import bind_http, open_http_server
from scheduler_engine.proxy.config import (
    ANSWER_TIMEOUT_S,
    MAX_REQUESTS,
    POLL_INTERVAL_S,
    ProxyConfig,
)
from scheduler_engine.proxy.http_app import make_proxy_app
from scheduler_engine.proxy.http_fleet import open_fleet
from scheduler_engine.proxy.http_proxy import ProxyEndpoint
from scheduler_engine.proxy.prometheus_proxy import ProxyCollector

_log = logging.getLogger("scheduler_components.proxy")


_NO_KEYS = AccessOptions()


def route(
    replica: Annotated[str, Parameter(help="URL of an engine: http://host:port.")],
    /,
    *more_replicas: Annotated[str, Parameter(help="URLs of further engines with the same model and page size.")],
    host: Annotated[str, Parameter(help="Address of the proxy's HTTP server.")] = DEFAULT_HOST,
    port: Annotated[
        int, Parameter(validator=Number(gte=0, lte=65535), help="Port of the proxy; 0 lets the system choose.")
    ] = 8000,
    server: AccessOptions = _NO_KEYS,
    replica_api_key: Annotated[
        str | None,
        Parameter(
            env_var="SCHEDULER_COMPONENTS_REPLICA_API_KEY",
            show_default=False,
            help="API key that the engines require. Default: the API key of the proxy.",
        ),
    ] = None,
    replica_api_key_file: Annotated[Path | None, Parameter(help="File with the API key of the engines.")] = None,
    picker: Annotated[
        PickerName,
        Parameter(
            help="How to choose by cost: the lowest, at random but low costs more often, the lower of two random ones,"
            " the lowest below 1.25 times the mean load, or the engine of the session's last request."
        ),
    ] = "least-cost",
    max_requests: Annotated[
        int, Parameter(validator=Number(gte=1), help="Open requests; further ones get 503.")
    ] = MAX_REQUESTS,
    answer_timeout: Annotated[
        float, Parameter(validator=Number(gt=0), help="Longest silence of an engine that serves a request, in seconds.")
    ] = ANSWER_TIMEOUT_S,
    poll_interval: Annotated[
        float, Parameter(validator=Number(gt=0), help="Seconds between two questions for an engine's load.")
    ] = POLL_INTERVAL_S,
    secret_key_file: SecretKey = None,
    publisher_key_file: PublisherKey = None,
) -> int:
    """Route OpenAI requests, and /generate, to the engine that has most of the prompt cached, until Ctrl-C."""
    served = server.config()
    engine_key = read_api_key("replica_api_key", replica_api_key, replica_api_key_file)
    config = ProxyConfig(
        urls=(replica, *more_replicas),
        api_key=served.access.api_key if engine_key is None else engine_key,
        stream_keys=read_client_keys(secret_key_file, publisher_key_file),
        max_requests=max_requests,
        answer_timeout_s=answer_timeout,
        poll_interval_s=poll_interval,
    )
    rng = random.Random()  # it spreads load
    asyncio.run(_route(config, (host, port), served, partial(_make_router, picker=make_picker(picker, rng))))
    return 0


def _make_router(page_size: int, *, picker: Picker) -> KvRouter:
    """Make a router whose name is unique among the dispatchers of an engine, also after a restart."""
    return KvRouter(page_size=page_size, picker=picker, name=f"proxy-{uuid4().hex[:8]}")


async def _route(
    config: ProxyConfig, address: tuple[str, int], served: ServerConfig, make_router: Callable[[int], KvRouter]
) -> None:
    termination, access = cancel_on_sigterm(), with_host(served.access, address[0])
    with bind_http(*address) as bound:
        bound_host = bound.getsockname()[0]
        if access.api_key is None and not is_loopback(bound_host):
            _log.warning(
                "the proxy listens at %s without --api-key: every host that reaches it can send requests", bound_host
            )
        async with open_fleet(config, make_router=make_router) as fleet:
            bodies = BodyReceiver(max_pending_bytes=config.max_pending_bytes)
            endpoint, registry = ProxyEndpoint(fleet=fleet, bodies=bodies), CollectorRegistry()
            ProxyCollector(registry, endpoint)
            app = make_proxy_app(endpoint, registry, access=access)
            async with open_http_server(app, bound) as server:
                print_lines((f"routing to {len(config.urls)} engines at {server.url}; Ctrl-C stops",))
                await _serve_until_terminated(endpoint, termination, served.drain_timeout_s)


async def _serve_until_terminated(endpoint: ProxyEndpoint, termination: Termination, drain_timeout_s: float) -> None:
    """Serve until SIGTERM. Then refuse new requests and wait for open ones.

    Raises:
        CancelledError: always, so that the command ends as after any signal.
    """
    with termination.deferred():
        await termination.requested.wait()
        print_lines((f"stopping: {endpoint.counters.open} requests are open",))
        num_left = await endpoint.drain(drain_timeout_s)
        if num_left:
            _log.warning("%d requests were still open after %g s", num_left, drain_timeout_s)
    raise asyncio.CancelledError
