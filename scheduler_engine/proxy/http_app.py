"""The routes of a proxy: the generating ones, the models of the engines, and its own health, status and metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from observability import error_response, render_metrics
from scheduler_components import __version__
from scheduler_engine.frontend.access import AccessPolicy, RouteAccess
from scheduler_engine.frontend.http_access import AccessGuard, ApiRoute
from scheduler_engine.proxy.http_fleet import Fleet, ProxiedEngine
from scheduler_engine.proxy.http_proxy import FORWARDED_PATHS, ProxyEndpoint

_MODELS = "/v1/models"


def make_proxy_app(
    endpoint: ProxyEndpoint, registry: CollectorRegistry, *, access: AccessPolicy | None = None
) -> Starlette:
    """Make the application of a proxy.

    Args:
        endpoint: forwards requests to its fleet.
        registry: Prometheus collectors of ``/metrics``.
        access: who may call the routes; None accepts all requests that name this machine or an IP address.
    """
    fleet = endpoint.fleet

    async def models(_: Request) -> Response:
        """The models of all engines that take requests."""
        return _json({"object": "list", "data": list(fleet.models().values())})

    async def model(request: Request) -> Response:
        """One of these models."""
        found = fleet.models().get(str(request.path_params["model"]))
        return error_response(404, "no engine that takes requests has this model") if found is None else _json(found)

    async def health(_: Request) -> Response:
        """Liveness of the proxy itself."""
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        """Readiness: 503 while the proxy stops or no engine takes requests."""
        problem = "the proxy is stopping" if endpoint.is_draining else None
        if problem is None and not fleet.num_ready:
            problem = "no engine takes requests"
        if problem is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "problem": problem}, 503)

    async def status(_: Request) -> Response:
        """The engines, their replicas and what was sent to them."""
        return JSONResponse(proxy_status(endpoint))

    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        accept = ", ".join(request.headers.getlist("accept"))
        page, content_type = await run_in_threadpool(render_metrics, registry, accept)
        return Response(page, headers={"content-type": content_type, "vary": "accept"})

    public = RouteAccess.PUBLIC
    routes = [
        *(ApiRoute(path, endpoint, methods=["POST"]) for path in FORWARDED_PATHS),
        ApiRoute(_MODELS, models, methods=["GET"]),
        ApiRoute(_MODELS + "/{model:path}", model, methods=["GET"]),
        ApiRoute("/health", health, methods=["GET"], access=public),
        ApiRoute("/ready", ready, methods=["GET"], access=public),
        ApiRoute("/status", status, methods=["GET"]),
        ApiRoute("/metrics", metrics, methods=["GET"], access=public),
    ]
    guard = Middleware(AccessGuard, policy=AccessPolicy() if access is None else access, routes=routes)
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: _respond_to_http_error})


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _respond_to_http_error(_: Request, error: Exception) -> Response:
    """Respond to an unknown path or method in OpenAI's form."""
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


def proxy_status(endpoint: ProxyEndpoint) -> dict[str, Any]:
    """Return the state of a proxy as JSON values: its counters, and its engines with their replicas."""
    return {
        "version": __version__,
        "is_draining": endpoint.is_draining,
        **msgspec.to_builtins(endpoint.counters),
        "unknown_prompts": endpoint.fleet.num_unknown_prompts,
        "engines": [_engine_status(endpoint.fleet, engine) for engine in endpoint.fleet.engines],
    }


def _engine_status(fleet: Fleet, engine: ProxiedEngine) -> dict[str, Any]:
    streams = {} if engine.subscriber is None else engine.subscriber.positions()
    return {
        "engine": engine.number,
        "url": engine.url,
        "state": engine.state.value,
        "problem": engine.problem or None,
        "times_lost": engine.num_times_lost,
        "adapters": sorted(engine.adapters or ()),
        "replicas": [
            {
                "dp_rank": rank,
                "stream": streams[rank].state.value if rank in streams else None,
                "last_seq": streams[rank].last_seq if rank in streams else None,
                "in_flight": fleet.num_in_flight(replica),
                "load_blocks": fleet.load_blocks(replica),
                **msgspec.to_builtins(replica.stats),
            }
            for rank, replica in engine.replicas.items()
        ],
    }
