"""The HTTP application of the engine: all its routes."""

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
from scheduler_components import (
    ComponentError,
    ConfigError,
    LoadSnapshot,
    QuiesceStats,
    __version__,
    kv_events_server_info,
)
from scheduler_components.kv_events import Endpoint, ListeningStream
from scheduler_components.reference.engine.engine import Engine, RpcError
from scheduler_components.reference.engine.frontend.http_body import BadBodyError, component_error_response, read_body
from scheduler_components.reference.engine.frontend.http_control import control_routes
from scheduler_components.reference.engine.frontend.http_generate import GenerateEndpoint
from scheduler_components.reference.engine.frontend.http_openai import ChatEndpoint, CompletionEndpoint
from scheduler_components.reference.engine.frontend.text_frontend import TextFrontend, open_text_codec
from scheduler_components.reference.text.text_tokenizer import TextTokenizer

__all__ = [
    "EngineStatus",
    "text_routes",
    "make_app",
]


def _dialable(text: str | None) -> Endpoint | None:
    """The address of an open socket; None where it has no port."""
    endpoint = None if text is None else Endpoint.parse(text)
    return endpoint if endpoint is not None and endpoint.port else None


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineStatus:
    """A ``StatusSource`` of the engine."""

    engine: Engine

    def health_problem(self) -> str | None:
        frontend = self.engine.frontend
        problems = (
            [frontend.replies.failure]
            if frontend.replies.failure is not None
            else frontend.heartbeats.silent_replicas().values()
        )
        return "; ".join(map(str, problems)) or None

    def server_info(self) -> Mapping[str, Any]:
        """Configuration, the descriptor of the event streams, and each DP rank's newest slots and blocks."""
        config = self.engine.config
        facts = {
            "version": __version__,
            "weight_version": self.engine.control.weight_version,
            "is_paused": any(told.is_paused for told in self._quiesce()),
            "is_sleeping": not all(told.is_awake for told in self._quiesce()),
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
            "kv_metrics": [msgspec.to_builtins(report) for _, report in sorted(self.engine.kv_metrics.items())],
        }
        page_size = config.scheduler.page_size
        return facts | kv_events_server_info(
            config.kv_events, block_size=page_size, dp_size=config.dp_size, publishers=self._bound_streams()
        )

    def _quiesce(self) -> list[QuiesceStats]:
        """What each replica was last ordered to be, as far as it has said."""
        found = [stats.totals.quiesce for stats in self.engine.stats.read().values()]
        return [each for each in found if each is not None]

    def _bound_streams(self) -> Iterator[ListeningStream]:
        """Where the ranks' streams listen, as far as a reader on another machine could dial them."""
        for rank, said in self.engine.frontend.replies.ready.items():
            events = _dialable(said.stream_endpoint)
            if events is not None:
                stream = self.engine.config.parallel(rank).kv_stream_index
                replay, load = _dialable(said.replay_endpoint), _dialable(said.load_endpoint)
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
    """Return the routes that generate: SGLang's and OpenAI's; ``model`` is what answers call it."""
    return [
        Route("/generate", GenerateEndpoint(text=text), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(text=text, model=model), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(text=text, model=model), methods=["POST"]),
    ]


def make_app(
    engine: Engine, registry: CollectorRegistry, *, kv_pool: bool = False, codec: TextTokenizer | None = None
) -> Starlette:
    """Every route of the engine.

    ``/generate``, ``/v1/completions``, ``/v1/chat/completions``, ``/clear_hicache_storage_backend``, those of orders,
    ``/get_internal_state``, ``/set_internal_state``, ``/start_profile``, ``/stop_profile``, the status routes, and
    ``/kv_pool`` where it is asked for. ``codec`` is of the model;
    None loads it.
    """

    async def clear_storage(_: Request) -> Response:
        try:
            num_pages = await engine.clear_storage()
        except ConfigError as error:
            return component_error_response(error)
        except ComponentError as error:
            return error_response(500, str(error))
        if num_pages is None:
            return error_response(400, "the store is kept, for requests or pages are on their way: ask again")
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
    """What a person reads, sets and records in a running engine; paths and bodies are SGLang's (0.5.x)."""

    async def get_state(_: Request) -> Response:
        """One state per replica, as its leader tells it."""
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

    def answered(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except RpcError as error:
                return error_response(400, str(error))
            except ComponentError as error:
                return component_error_response(error)

        return answer

    return [
        Route("/get_internal_state", answered(get_state), methods=["GET"]),
        Route("/set_internal_state", answered(set_state), methods=["POST", "PUT"]),
        Route("/start_profile", answered(start_profile), methods=["POST"]),
        Route("/stop_profile", answered(stop_profile), methods=["POST"]),
    ]
