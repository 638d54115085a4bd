"""The HTTP application of an engine: generating routes, control requests, RPC and status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from observability import error_response, kv_pool_route, status_routes
from scheduler_components import ComponentError, ConfigError, __version__, kv_events_server_info
from scheduler_components.kv_events import Endpoint, ListeningStream
from scheduler_components.metrics.kv_metrics import kv_metrics_of_load
from scheduler_components.reference.engine.engine import Engine, RpcError
from scheduler_components.reference.engine.frontend.http_body import BadBodyError, component_error_response, read_body
from scheduler_components.reference.engine.frontend.http_control import control_routes
from scheduler_components.reference.engine.frontend.http_generate import GenerateEndpoint
from scheduler_components.reference.engine.frontend.http_openai import ChatEndpoint, CompletionEndpoint
from scheduler_components.reference.engine.frontend.text_frontend import TextFrontend, open_text_codec
from scheduler_components.reference.text.text_tokenizer import TextTokenizer
from scheduler_components.values import LoadSnapshot, QuiesceStats

__all__ = [
    "EngineStatus",
    "text_routes",
    "make_app",
]


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

    def server_info(self) -> Mapping[str, Any]:
        """Return the configuration, the descriptor of the event streams, and the newest ``KvMetrics`` per DP rank."""
        config = self.engine.config
        info = {
            "version": __version__,
            "weight_version": self.engine.control.weight_version,
            "is_paused": any(stats.is_paused for stats in self._quiesce_stats()),
            "is_sleeping": not all(stats.is_awake for stats in self._quiesce_stats()),
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
            "max_running_requests": config.scheduler.max_running_requests,
            "chunked_prefill_size": config.scheduler.chunk_tokens,
            "kv_metrics": [msgspec.to_builtins(kv_metrics_of_load(load)) for load in self.load_snapshots()],
        }
        page_size = config.scheduler.page_size
        return info | kv_events_server_info(
            config.kv_events, block_size=page_size, dp_size=config.dp_size, publishers=self._bound_streams()
        )

    def _quiesce_stats(self) -> list[QuiesceStats]:
        """Return the newest quiesce state of each replica that has reported one."""
        found = [stats.quiesce for stats in self.engine.stats.read().values()]
        return [each for each in found if each is not None]

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
            "is_generation": True,
            "skip_tokenizer_init": False,
            "weight_version": self.engine.control.weight_version,
        }

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        return [stats.load for _, stats in sorted(self.engine.stats.read().items())]


def text_routes(text: TextFrontend, model: str) -> list[Route]:
    """Return the generating routes of SGLang and OpenAI. ``model`` is the name of the model in responses."""
    return [
        Route("/generate", GenerateEndpoint(text=text), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(text=text, model=model), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(text=text, model=model), methods=["POST"]),
    ]


def make_app(
    engine: Engine, registry: CollectorRegistry, *, kv_pool: bool = False, codec: TextTokenizer | None = None
) -> Starlette:
    """Make the application with every route of the engine.

    Args:
        engine: a running engine.
        registry: Prometheus collectors of ``/metrics``.
        kv_pool: also serve ``/kv_pool``.
        codec: tokenizer of the model; None opens it.
    """

    async def clear_storage(_: Request) -> Response:
        try:
            num_pages = await engine.clear_storage()
        except ConfigError as error:
            return component_error_response(error)
        except ComponentError as error:
            return error_response(500, str(error))
        if num_pages is None:
            return error_response(400, "the store was not cleared: requests or transfers are in flight; try again")
        return PlainTextResponse(f"Storage cleared: {num_pages} pages.\n")

    text = TextFrontend(frontend=engine.frontend, codec=open_text_codec(engine.config) if codec is None else codec)
    generate = text_routes(text, engine.config.model_name)
    clear = Route("/clear_hicache_storage_backend", clear_storage, methods=["POST"])  # SGLang's name
    status = status_routes(EngineStatus(engine=engine), registry=registry)
    routes = [*generate, clear, *control_routes(engine.control, engine.config.model), *_rpc_routes(engine), *status]
    return Starlette(routes=[*routes, kv_pool_route(engine)] if kv_pool else routes)


class _StateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server_args: msgspec.Raw


def _rpc_routes(engine: Engine) -> list[Route]:
    """Return the routes of internal state and profiles. Paths and bodies are those of SGLang 0.5."""

    async def get_state(_: Request) -> Response:
        """Respond with the state of each replica's leader."""
        states = await engine.ask("get_internal_state")
        leaders = map(engine.config.leader_rank, range(engine.config.dp_size))
        return JSONResponse({"internal_states": [states[leader] for leader in leaders]})

    async def set_state(request: Request) -> Response:
        body = await read_body(request)
        try:
            changes = msgspec.json.decode(body, type=_StateBody).server_args
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadBodyError("body", str(error)) from None
        answers = await engine.ask("set_internal_state", bytes(changes))
        return JSONResponse({"updated": True, "server_args": answers[0]})

    async def start_profile(request: Request) -> Response:
        await engine.ask("start_profile", await read_body(request))
        return PlainTextResponse("Start profiling.\n")

    async def stop_profile(_: Request) -> Response:
        answers = await engine.ask("stop_profile")
        return JSONResponse({"traces": [trace for traces in answers.values() for trace in traces]})

    def endpoint(respond: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def respond_or_refuse(request: Request) -> Response:
            try:
                return await respond(request)
            except RpcError as error:
                return error_response(400, str(error))
            except ComponentError as error:
                return component_error_response(error)

        return respond_or_refuse

    return [
        Route("/get_internal_state", endpoint(get_state), methods=["GET"]),
        Route("/set_internal_state", endpoint(set_state), methods=["POST", "PUT"]),
        Route("/start_profile", endpoint(start_profile), methods=["POST"]),
        Route("/stop_profile", endpoint(stop_profile), methods=["POST"]),
    ]
