"""The HTTP status routes of an engine, for routers, dashboards and users.

Paths and answers are SGLang's (0.5.x), so that gateways that register and poll an SGLang worker can use this one.
``/v1/loads`` has the shape and names of SGLang's, with the ``aggregate`` and ``dp_rank_count`` that its earlier
releases sent and gateways still read. The kit adds ``sequence``, ``timestamp`` and ``age_s`` to every rank's load, so
that a dispatcher can distinguish an old report from a new one.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from observability.http_status_page import PAGE_POLICY, render_status_page
from observability.prometheus_page import render_metrics
from scheduler_components import ConfigError, __version__
from scheduler_components._internal.extras import naming_extras
from scheduler_components.values import LoadSnapshot

with naming_extras:
    from prometheus_client import CollectorRegistry
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

__all__ = [
    "StatusSource",
    "error_response",
    "status_routes",
]

logger = logging.getLogger(__name__)

_Endpoint = Callable[[Request], Awaitable[Response]]

# --- the body of /v1/loads ---

_SECTIONS = {
    "memory": "memory",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
    "queues": "queues",
}
"""Word of ``include`` -> key of the section. The core fields are always sent."""

_MAX_SHOWN = 128

_VALID = ", ".join(("core", *_SECTIONS, "all"))


def _parse_include(texts: Iterable[str]) -> frozenset[str]:
    """Parse the ``include`` parameters: words separated by commas, in any number of parameters; none means all.

    Raises:
        ConfigError: a word is not a section.
    """
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    for word in words:
        if word not in _SECTIONS and word not in ("core", "all"):
            raise ConfigError("include", word, "is not a section", f"choose from {_VALID}")
    if not words or "all" in words:
        return frozenset(_SECTIONS)
    return frozenset(words) - {"core"}


def _select_ranks(loads: Sequence[LoadSnapshot], dp_rank: str | None) -> list[LoadSnapshot]:
    """Return the loads ordered by rank: all, or only that of the rank in the request.

    Raises:
        ConfigError: ``dp_rank`` is not a number, or no such rank has reported.
    """
    ordered = sorted(loads, key=lambda load: load.dp_rank)
    if dp_rank is None:
        return ordered
    if not (dp_rank.isascii() and dp_rank.isdecimal()):
        raise ConfigError("dp_rank", dp_rank, "is not a rank", "give a number from 0, or leave it out for all ranks")
    selected = [load for load in ordered if str(load.dp_rank) == dp_rank]
    if not selected:
        known = ", ".join(str(load.dp_rank) for load in ordered) or "none so far"
        raise ConfigError("dp_rank", dp_rank, "has not reported", f"ranks that have: {known}")
    return selected


def _one_load(load: LoadSnapshot, include: frozenset[str], now: float) -> dict[str, Any]:
    report: dict[str, Any] = {
        "dp_rank": load.dp_rank,
        "sequence": load.sequence,
        "timestamp": load.timestamp,
        "age_s": round(max(0.0, now - load.timestamp), 3),
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_pending_tokens": load.num_pending_tokens,
        "num_waiting_uncached_tokens": load.num_waiting_uncached_tokens,
        "num_used_tokens": load.num_used_tokens,
        "num_total_tokens": load.num_total_tokens,
        "max_total_num_tokens": load.max_total_num_tokens,
        "max_running_requests": load.max_running_requests,
        "token_usage": round(load.token_usage, 4),
        "gen_throughput": round(load.gen_throughput, 2),
        "cache_hit_rate": round(load.cache_hit_rate, 4),
        "utilization": round(load.utilization, 4),
    }
    if load.decode_moments is not None:
        report["decode_moments"] = msgspec.to_builtins(load.decode_moments)
    for word, key in _SECTIONS.items():
        section = getattr(load, key)
        if word in include and section is not None:
            report[key] = msgspec.to_builtins(section)
    return report


def _aggregate(loads: Sequence[LoadSnapshot]) -> dict[str, Any]:
    """Sum counts and average shares over ranks, for gateways."""
    ranks = max(1, len(loads))
    running = sum(load.num_running_reqs for load in loads)
    waiting = sum(load.num_waiting_reqs for load in loads)
    return {
        "total_running_reqs": running,
        "total_waiting_reqs": waiting,
        "total_reqs": running + waiting,
        "total_used_tokens": sum(load.num_used_tokens for load in loads),
        "total_tokens": sum(load.num_total_tokens for load in loads),
        "avg_token_usage": round(sum(load.token_usage for load in loads) / ranks, 4),
        "avg_throughput": round(sum(load.gen_throughput for load in loads) / ranks, 2),
        "avg_utilization": round(sum(load.utilization for load in loads) / ranks, 4),
    }


# --- the routes ---


class StatusSource(Protocol):
    """The state of an engine, usually in the frontend process. Called on the event loop, so it must not block."""

    def health_problem(self) -> str | None:
        """Return None while every rank can serve requests, else one sentence about the rank that cannot."""
        ...

    def server_info(self) -> Mapping[str, Any]:
        """Return configuration and descriptors as JSON values, including ``kv_events``."""
        ...

    def model_info(self) -> Mapping[str, Any]:
        """Return ``model_path``, and ``served_model_name`` if the model is served under another name.

        ``adapters`` maps the names of LoRA adapters that requests may name as their model to their paths.
        """
        ...

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        """Return the newest load of each DP rank that has reported, in any order."""
        ...


def error_response(status_code: int, message: str, *, param: str | None = None) -> JSONResponse:
    """Return an error in OpenAI's format; ``param`` is the name of the invalid field."""
    kind = "invalid_request_error" if status_code < 500 else "internal_error"
    error = {"message": message, "type": kind, "param": param, "code": status_code}
    return JSONResponse({"error": error}, status_code)


def status_routes(
    source: StatusSource,
    *,
    registry: CollectorRegistry,
    clock: Callable[[], float] = time.time,
    readiness: Callable[[], str | None] | None = None,
) -> list[Route]:
    """Return the status routes, to mount in an application.

    ``/`` (a page for users), ``/health``, ``/ready``, ``/server_info`` (``/get_server_info``), ``/model_info``
    (``/get_model_info``), ``/v1/models``, ``/v1/models/NAME``, ``/v1/loads`` and ``/metrics``. All support GET and
    HEAD. An invalid request gets 400 with one sentence. An error of ``source`` gets 500; its details go to the log.

    ``/health`` is for liveness: 503 means that a restart helps. ``/ready`` is for readiness: 503 means that the engine
    takes no requests now.

    Args:
        source: state of the engine.
        registry: metrics of ``/metrics``, which is rendered on a thread.
        clock: wall-clock seconds since the epoch.
        readiness: returns why the engine takes no requests now, or None; by default an engine that is alive takes them.
    """
    routes = _StatusRoutes(source, registry, clock, readiness or source.health_problem, int(clock()))
    endpoints: dict[str, _Endpoint] = {
        "/": routes.page,
        "/health": routes.health,
        "/ready": routes.ready,
        "/server_info": routes.server_info,
        "/get_server_info": routes.server_info,
        "/model_info": routes.model_info,
        "/get_model_info": routes.model_info,
        "/v1/models": routes.models,
        "/v1/models/{model:path}": routes.model,
        "/v1/loads": routes.loads,
        "/metrics": routes.metrics,
    }
    return [Route(path, _guarded(endpoint), methods=["GET"]) for path, endpoint in endpoints.items()]


@dataclass(slots=True)
class _StatusRoutes:
    source: StatusSource
    registry: CollectorRegistry
    clock: Callable[[], float]
    not_ready: Callable[[], str | None]
    created_s: int

    async def page(self, request: Request) -> Response:
        """A page for users: load, streams and links."""
        source = self.source
        text = render_status_page(
            str(request.base_url),
            problem=source.health_problem(),
            info=source.server_info(),
            loads=source.load_snapshots(),
            now=self.clock(),
        )
        return HTMLResponse(text, headers={"content-security-policy": PAGE_POLICY, "cache-control": "no-store"})

    async def health(self, _: Request) -> Response:
        """Liveness: 503 if a rank has failed or is silent."""
        return _answer_unless(self.source.health_problem(), "ok", "unhealthy")

    async def ready(self, _: Request) -> Response:
        """Readiness: 503 while the engine takes no requests."""
        return _answer_unless(self.not_ready(), "ready", "not ready")

    async def server_info(self, _: Request) -> Response:
        """Configuration, state and event streams of the engine."""
        return JSONResponse(dict(self.source.server_info()))

    async def model_info(self, _: Request) -> Response:
        """The served model."""
        return JSONResponse(dict(self.source.model_info()))

    async def models(self, _: Request) -> Response:
        """List the served model and its adapters."""
        cards = _model_cards(self.source.model_info(), self.created_s)
        return JSONResponse({"object": "list", "data": list(cards)})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        served, *adapters = _model_cards(self.source.model_info(), self.created_s)
        wanted = request.path_params["model"]
        for card in (served, *adapters):
            if wanted == card["id"]:
                return JSONResponse(card)
        message = f"model: {wanted[:_MAX_SHOWN]!r} is not served here; {served['id']!r} is"
        return error_response(404, message, param="model")

    async def loads(self, request: Request) -> Response:
        """The newest load of each DP rank."""
        snapshots = self.source.load_snapshots()
        try:
            return JSONResponse(_load_report(snapshots, request, self.clock()))
        except ConfigError as error:
            return error_response(400, str(error), param=error.field)

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        accept = ", ".join(request.headers.getlist("accept"))
        page, content_type = await run_in_threadpool(render_metrics, self.registry, accept)
        return Response(page, headers={"content-type": content_type, "vary": "accept"})


def _answer_unless(problem: str | None, good: str, bad: str) -> Response:
    if problem is None:
        return JSONResponse({"status": good})
    return JSONResponse({"status": bad, "problem": problem}, 503)


def _guarded(endpoint: _Endpoint) -> _Endpoint:
    """Convert an exception of the source to 500 without details; the traceback goes to the log."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception:
            logger.exception("%s failed", request.url.path)
            return error_response(500, f"{request.url.path} failed; the server's log says why")

    return answer


def _model_cards(info: Mapping[str, Any], created_s: int) -> Iterator[dict[str, Any]]:
    """Yield the served model, then its adapters, as vLLM and SGLang list them."""
    model = info.get("served_model_name", info["model_path"])
    common = {"object": "model", "created": created_s, "owned_by": "scheduler-components"}
    yield {"id": model, **common, "root": info["model_path"]}
    for name, path in info.get("adapters", {}).items():
        yield {"id": name, **common, "root": path, "parent": model}


def _load_report(snapshots: Sequence[LoadSnapshot], request: Request, now: float) -> dict[str, Any]:
    query = request.query_params
    wanted = query.get("format", "json")
    if wanted != "json":
        raise ConfigError("format", wanted, "is not supported", "use json, or read /metrics")
    include = _parse_include(query.getlist("include"))
    selected = _select_ranks(snapshots, query.get("dp_rank"))
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": len(selected),
        "loads": [_one_load(load, include, now) for load in selected],
        "aggregate": _aggregate(selected),
    }
