"""The status half of an engine's HTTP face: what routers, dashboards and people ask.

Paths and answers are SGLang's (0.5.x), so that gateways which register and poll an SGLang worker take this one.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from observability.load_report import build_load_report, parse_include, select_ranks
from scheduler_components import __version__
from scheduler_components.errors import ConfigError
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["StatusSource", "error_response", "status_routes"]

logger = logging.getLogger(__name__)

_Endpoint = Callable[[Request], Awaitable[Response]]


class StatusSource(Protocol):
    """Whoever knows how the engine is: usually the front process. Asked on the event loop, so it answers at once."""

    def is_healthy(self) -> bool:
        """True while requests can be served."""
        ...

    def server_info(self) -> Mapping[str, Any]:
        """Configuration and descriptors, as values that JSON knows; ``kv_events`` among them."""
        ...

    def model_info(self) -> Mapping[str, Any]:
        """Facts of the model: ``model_path`` at least, ``served_model_name`` where it has another name."""
        ...

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        """The newest load of each DP rank that has reported, in any order."""
        ...


def error_response(status_code: int, message: str, *, param: str | None = None) -> JSONResponse:
    """Return an error in the shape that OpenAI clients read; ``param`` names the field that was wrong."""
    kind = "invalid_request_error" if status_code < 500 else "internal_error"
    error = {"message": message, "type": kind, "param": param, "code": status_code}
    return JSONResponse({"error": error}, status_code)


def status_routes(
    source: StatusSource, *, registry: CollectorRegistry, clock: Callable[[], float] = time.time
) -> list[Route]:
    """Return the routes of the status answers, to mount in an application.

    ``/health``, ``/server_info`` (``/get_server_info``), ``/model_info`` (``/get_model_info``), ``/v1/models``,
    ``/v1/loads`` and ``/metrics``; all answer GET and HEAD. A client's mistake gets 400 with one sentence, an error of
    ``source`` gets 500 without its details, which go to the log.

    Args:
        source: who answers.
        registry: what ``/metrics`` exposes.
        clock: wall-clock seconds since the epoch.
    """
    created_s = int(clock())

    async def health(_: Request) -> Response:
        healthy = source.is_healthy()
        return JSONResponse({"status": "ok" if healthy else "unhealthy"}, 200 if healthy else 503)

    async def server_info(_: Request) -> Response:
        return JSONResponse(dict(source.server_info()))

    async def model_info(_: Request) -> Response:
        return JSONResponse(dict(source.model_info()))

    async def models(_: Request) -> Response:
        return JSONResponse(_model_list(source.model_info(), created_s))

    async def loads(request: Request) -> Response:
        snapshots = source.load_snapshots()
        try:
            return JSONResponse(_load_report(snapshots, request, clock()))
        except ConfigError as error:
            return error_response(400, str(error), param=error.field)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    endpoints: dict[str, _Endpoint] = {
        "/health": health,
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/v1/models": models,
        "/v1/loads": loads,
        "/metrics": metrics,
    }
    return [Route(path, _guarded(endpoint), methods=["GET"]) for path, endpoint in endpoints.items()]


def _guarded(endpoint: _Endpoint) -> _Endpoint:
    """Turn an error of the source into 500 without a traceback; the log gets it whole."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception:
            logger.exception("%s failed", request.url.path)
            return error_response(500, f"{request.url.path} failed; the server's log says why")

    return answer


def _model_list(info: Mapping[str, Any], created_s: int) -> dict[str, Any]:
    model = {
        "id": info.get("served_model_name", info["model_path"]),
        "object": "model",
        "created": created_s,
        "owned_by": "scheduler-components",
        "root": info["model_path"],
    }
    return {"object": "list", "data": [model]}


def _load_report(snapshots: Sequence[LoadSnapshot], request: Request, now: float) -> dict[str, Any]:
    query = request.query_params
    wanted = query.get("format", "json")
    if wanted != "json":
        raise ConfigError("format", wanted, "is not spoken here", "take json, or read /metrics")
    include = parse_include(query.getlist("include"))
    selected = select_ranks(snapshots, query.get("dp_rank"))
    return build_load_report(selected, include, now=now, version=__version__)
