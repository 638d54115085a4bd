"""The HTTP side of an engine, in this process, for the tests of a proxy: the test sets what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from scheduler_engine.frontend.http_server import bind_http, open_http_server

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Received:
    """A generating request that an engine received."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """An engine without event streams.

    Attributes:
        name: in its answers.
        page_size, dp_size: of its description.
        tokens: answer of ``/tokenize``; None for an engine without that route.
        is_ready: answer of ``/ready``.
        loads: answer of ``/v1/loads``, one object per rank.
        adapters: names in ``/model_info``.
        answer: answers generating requests; by default immediately, with the name.
        received: these requests, in order.
        asked: paths of all requests, in order.
    """

    name: str = "engine"
    page_size: int = 4
    dp_size: int = 1
    tokens: list[int] | None = None
    is_ready: bool = True
    loads: list[dict[str, object]] = field(default_factory=list)
    adapters: tuple[str, ...] = ()
    answer: Answer | None = None
    received: list[Received] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    pages: dict[str, Answer] = field(default_factory=dict)

    @property
    def app(self) -> Starlette:
        everything = Route("/{path:path}", self._respond, methods=["GET", "POST"])
        return Starlette(routes=[everything])

    async def _respond(self, request: Request) -> Response:
        path = str(request.scope["path"])
        self.asked.append(path)
        if path in self.pages:
            return await self.pages[path](request)
        if path == "/server_info":
            return JSONResponse({"page_size": self.page_size, "dp_size": self.dp_size})
        if path == "/model_info":
            return JSONResponse({"model_path": "fake", "adapters": dict.fromkeys(self.adapters, "path")})
        if path == "/ready":
            return JSONResponse({}, 200 if self.is_ready else 503)
        if path == "/v1/loads":
            return JSONResponse({"loads": self.loads})
        if path == "/v1/models":
            return JSONResponse({"data": [{"id": self.name}]})
        if path == "/tokenize" and self.tokens is not None:
            return JSONResponse({"count": len(self.tokens), "tokens": self.tokens})
        if request.method == "POST" and path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            self.received.append(Received(path, dict(request.headers), await request.body()))
            if self.answer is not None:
                return await self.answer(request)
            return JSONResponse({"by": self.name})
        return JSONResponse({"error": "not here"}, 404)


def says(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer with this JSON."""

    async def answer(_: Request) -> Response:
        return JSONResponse(content, status, headers)

    return answer


def holds(event: asyncio.Event, content: object = None) -> Answer:
    """Return an answer with this JSON that comes when the event is set."""

    async def answer(_: Request) -> Response:
        await event.wait()
        return JSONResponse(content)

    return answer


@asynccontextmanager
async def served_engine(engine: FakeEngine, port: int = 0) -> AsyncIterator[str]:
    """Serve an engine on loopback, and yield its URL."""
    with bind_http("127.0.0.1", port) as listener:
        async with open_http_server(engine.app, listener) as server:
            yield server.url


def body_of(**fields: object) -> bytes:
    """Return a JSON body."""
    return json.dumps(fields).encode()
