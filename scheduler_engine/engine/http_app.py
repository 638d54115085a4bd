"""The HTTP application of an engine: generating routes, control requests, RPC and status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from observability import error_response, kv_pool_route, status_routes
from scheduler_components import ComponentError, ConfigError, __version__, kv_events_server_info
from scheduler_components.kv_events import Endpoint, ListeningStream
from scheduler_components.kv_events_publisher import kv_metrics_of_load
from scheduler_components.profiler_manager import ProfileRequest
from scheduler_components.values import FORWARD_PASS_VERSION, LoadSnapshot, QuiesceStats
from scheduler_engine.engine.engine import Engine
from scheduler_engine.engine.http_sessions import session_routes
from scheduler_engine.frontend.access import AccessPolicy, RouteAccess
from scheduler_engine.frontend.http_access import AccessGuard, ApiRoute
from scheduler_engine.frontend.http_adapters import adapter_routes
from scheduler_engine.frontend.http_body import (
    JSON,
    MAX_CONTROL_BYTES,
    TEXT,
    BodyReader,
    BodyReceiver,
    body_route,
    respond_with_errors,
)
from scheduler_engine.frontend.http_control import control_routes
from scheduler_engine.frontend.http_generate import GenerateBody, GenerateEndpoint
from scheduler_engine.frontend.http_openai import OpenAiEndpoint
from scheduler_engine.frontend.http_tokenize import tokenize_route
from scheduler_engine.frontend.openai_format import ChatBody, CompletionBody
from scheduler_engine.frontend.openapi import openapi_route
from scheduler_engine.frontend.text_frontend import TextFrontend, open_text_codec
from scheduler_engine.frontend.weights_root import default_weights_root
from scheduler_engine.text.text_tokenizer import TextTokenizer


def _dialable(text: str | None) -> Endpoint | None:
    """Parse the address of a bound socket. Return None for one without a port, such as ipc."""
    endpoint = None if text is None else Endpoint.parse(text)
    return endpoint if endpoint is not None and endpoint.port else None


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineStatus:
    """The ``StatusSource`` of an engine."""

    engine: Engine

    def health_problem(self) -> str | None:
        frontend = self.engine.frontend
        if frontend.replies.failure is not None:
            return str(frontend.replies.failure)
        return "; ".join(map(str, frontend.heartbeats.silent_replicas().values())) or None

    def readiness_problem(self) -> str | None:
        """Return why the engine takes no requests now; None if it takes them."""
        problem = self.health_problem()
        if problem is not None:
            return problem
        if self.engine.frontend.is_draining:
            return "the engine is stopping"
        if (state := self._sleep_state()) != "awake":
            return f"the engine is asleep ({state})"
        return "generation is paused" if any(stats.is_paused for stats in self._quiesce_stats()) else None

    def server_info(self) -> Mapping[str, Any]:
        """Return the configuration, the descriptor of the event streams, and the newest ``KvMetrics`` per DP rank."""
        config = self.engine.config
        info = {
            "version": __version__,
            "weight_version": self.engine.control.weight_version,
            "is_paused": any(stats.is_paused for stats in self._quiesce_stats()),
            "is_sleeping": self._sleep_state() != "awake",
            "engine_sleep_state": self._sleep_state(),
            "model_path": config.model_name,
            "served_model_name": config.model_name,
            "dp_size": config.dp_size,
            "tp_size": config.tp_size,
            "pp_size": config.pp_size,
            "attn_cp_size": config.attn_cp_size,
            "attn_tp_size": config.attn_tp_size,
            "enable_dp_attention": config.dp_size > 1,
            "page_size": config.scheduler.page_size,
            "max_total_num_tokens": config.scheduler.kv_tokens,
            "max_running_requests": config.scheduler.num_request_slots,
            "chunked_prefill_size": config.scheduler.chunk_tokens,
            "kv_metrics": [msgspec.to_builtins(kv_metrics_of_load(load)) for load in self.load_snapshots()],
            "forward_pass_metrics": self._forward_pass_metrics(),
        }
        page_size = config.scheduler.page_size
        return info | kv_events_server_info(
            config.kv_events, block_size=page_size, dp_size=config.dp_size, publishers=self._bound_streams()
        )

    def _forward_pass_metrics(self) -> dict[str, Any] | None:
        """Return where each replica sends its forward-pass metrics; None if it sends none."""
        ready = self.engine.frontend.replies.ready
        bound = {
            self.engine.config.parallel(rank).kv_stream_index: said.forward_pass_endpoint
            for rank, said in ready.items()
            if said.forward_pass_endpoint is not None
        }
        if not bound:
            return None
        publishers = [{"dp_rank": replica, "endpoint": endpoint} for replica, endpoint in sorted(bound.items())]
        worker_id = self.engine.config.telemetry.forward_pass_worker_id
        return {"version": FORWARD_PASS_VERSION, "worker_id": worker_id, "publishers": publishers}

    def _quiesce_stats(self) -> list[QuiesceStats]:
        """Return the newest quiesce state of each replica that has reported one."""
        found = [stats.quiesce for stats in self.engine.stats.read().values()]
        return [each for each in found if each is not None]

    def _sleep_state(self) -> str:
        """Return the state of the replica that sleeps deepest, in the words of the metric ``engine_sleep_state``."""
        found = self._quiesce_stats()
        if any(stats.has_discarded_all for stats in found):
            return "discard_all"
        if any(stats.has_weights_offloaded for stats in found):
            return "weights_offloaded"
        return "awake" if all(stats.is_awake for stats in found) else "memory_released"

    def _bound_streams(self) -> Iterator[ListeningStream]:
        """Yield the bound endpoints of the ranks' streams that a subscriber on another machine can connect to."""
        for rank, ready in self.engine.frontend.replies.ready.items():
            events = _dialable(ready.stream_endpoint)
            if events is not None:
                stream = self.engine.config.parallel(rank).kv_stream_index
                replay, load = _dialable(ready.replay_endpoint), _dialable(ready.load_endpoint)
                yield ListeningStream(rank=stream, events=events, replay=replay, load=load)

    def model_info(self) -> Mapping[str, Any]:
        name = self.engine.config.model_name
        return {
            "model_path": name,
            "served_model_name": name,
            "adapters": {each.name: each.path for each in self.engine.adapters.adapters.values()},
            "is_generation": True,
            "skip_tokenizer_init": False,
            "weight_version": self.engine.control.weight_version,
        }

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        return [stats.load for _, stats in sorted(self.engine.stats.read().items())]


_STREAMED = (JSON, "text/event-stream")


def text_routes(text: TextFrontend, model: str, bodies: BodyReceiver | None = None) -> list[ApiRoute]:
    """Return the generating routes of SGLang and OpenAI, and ``/tokenize``.

    Args:
        text: dispatches the requests.
        model: name of the model in responses.
        bodies: receives the bodies.
    """
    bodies = BodyReceiver() if bodies is None else bodies
    generate = GenerateEndpoint(text=text, bodies=bodies)
    openai = partial(OpenAiEndpoint, text=text, model=model, bodies=bodies)
    complete = openai(reader=BodyReader(CompletionBody, "/v1/completions"))
    chat = openai(reader=BodyReader(ChatBody, "/v1/chat/completions"))
    return [
        ApiRoute("/generate", generate, methods=["POST"], body=GenerateBody, answers=_STREAMED),
        ApiRoute("/v1/completions", complete, methods=["POST"], body=CompletionBody, answers=_STREAMED),
        ApiRoute("/v1/chat/completions", chat, methods=["POST"], body=ChatBody, answers=_STREAMED),
        tokenize_route(text, bodies),
    ]


def make_app(
    engine: Engine,
    registry: CollectorRegistry,
    *,
    kv_pool: bool = False,
    codec: TextTokenizer | None = None,
    access: AccessPolicy | None = None,
    weights_root: Path | None = None,
) -> Starlette:
    """Make the application with every route of the engine.

    Args:
        engine: a running engine.
        registry: Prometheus collectors of ``/metrics``.
        kv_pool: also serve ``/kv_pool``.
        codec: tokenizer of the model; None opens it.
        access: who may call the routes; None accepts all requests that name this machine or an IP address.
        weights_root: directory of models for ``/update_weights_from_disk`` and of adapters for ``/load_lora_adapter``;
            None means the served model's own folder.
    """
    status, bodies, model = EngineStatus(engine=engine), BodyReceiver(), engine.config.model
    codec = open_text_codec(engine.config) if codec is None else codec
    text = TextFrontend(
        frontend=engine.frontend,
        codec=codec,
        has_logits=model is not None,
        has_grammars=engine.config.scheduler.grammar is not None,
        adapters=None if engine.config.scheduler.lora is None else engine.adapters.adapters,
    )
    if weights_root is None and model is not None:
        weights_root = default_weights_root(model.path)
    routes: list[Route] = [
        *text_routes(text, engine.config.model_name, bodies),
        *control_routes(engine.control, model, bodies, weights_root=weights_root),
        *session_routes(engine, bodies),
        *adapter_routes(engine.adapters, bodies, has_files=model is not None, adapters_root=weights_root),
        *_rpc_routes(engine, bodies),
        *status_routes(status, registry=registry, readiness=status.readiness_problem),
    ]
    if kv_pool:
        routes.append(kv_pool_route(engine.read_pool, num_ranks=engine.num_ranks))
    routes.append(openapi_route(routes))
    guard = Middleware(AccessGuard, policy=AccessPolicy() if access is None else access, routes=routes)
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: _respond_to_http_error})


async def _respond_to_http_error(_: Request, error: Exception) -> Response:
    """Respond to an unknown path or method in OpenAI's form."""
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


class _StateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server_args: msgspec.Raw


def _rpc_routes(engine: Engine, bodies: BodyReceiver) -> list[ApiRoute]:
    """Return the routes of storage, internal state and profiles. Paths and bodies are those of SGLang 0.5."""

    async def clear_storage(_: Request) -> Response:
        """Remove every page of the file store."""
        try:
            num_pages = await engine.clear_storage()
        except ConfigError:
            raise
        except ComponentError as error:
            return error_response(500, str(error))
        if num_pages is None:
            return error_response(400, "the store was not cleared: requests or transfers are in flight; try again")
        return PlainTextResponse(f"Storage cleared: {num_pages} pages.\n")

    async def get_state(_: Request) -> Response:
        """Respond with the state of each replica's leader."""
        states = await engine.ask("get_internal_state")
        leaders = map(engine.config.leader_rank, range(engine.config.dp_size))
        return JSONResponse({"internal_states": [states[leader] for leader in leaders]})

    async def set_state(given: _StateBody) -> Response:
        """Change settings of all ranks, or of none."""
        answers = await engine.ask("set_internal_state", bytes(given.server_args))
        return JSONResponse({"updated": True, "server_args": answers[0]})

    async def start_profile(request: Request) -> Response:
        """Start a profile of all ranks."""
        async with bodies.receive(request, max_bytes=MAX_CONTROL_BYTES) as body:
            await engine.ask("start_profile", bytes(body))
        return PlainTextResponse("Start profiling.\n")

    async def stop_profile(_: Request) -> Response:
        """End the profile, and name its files."""
        answers = await engine.ask("stop_profile")
        return JSONResponse({"traces": [trace for traces in answers.values() for trace in traces]})

    def admin_route(
        path: str, respond: Callable[[Request], Awaitable[Response]], *, body: type | None = None, answer: str = JSON
    ) -> ApiRoute:
        endpoint = respond_with_errors(respond)
        return ApiRoute(path, endpoint, methods=["POST"], access=RouteAccess.ADMIN, body=body, answers=[answer])

    return [
        admin_route("/clear_hicache_storage_backend", clear_storage, answer=TEXT),  # SGLang's name
        ApiRoute("/get_internal_state", respond_with_errors(get_state), methods=["GET"]),
        body_route("/set_internal_state", _StateBody, set_state, bodies, methods=("POST", "PUT")),
        admin_route("/start_profile", start_profile, body=ProfileRequest, answer=TEXT),
        admin_route("/stop_profile", stop_profile),
    ]
