"""The guard asks before any handler runs, for each spelling of a path that the router accepts."""

from __future__ import annotations

import logging

import httpx
import pytest
from kit.asgi import ask
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from scheduler_engine.frontend.access import AccessPolicy, RouteAccess
from scheduler_engine.frontend.http_access import AccessGuard, ApiRoute, access_of


class Engine:
    """An application that counts what reaches its handlers."""

    def __init__(self, policy: AccessPolicy | None = None) -> None:
        self.reached: list[str] = []
        routes = [
            ApiRoute("/flush_cache", self.handle, methods=["GET", "POST"], access=RouteAccess.ADMIN),
            ApiRoute("/generate", self.handle, methods=["POST"]),
            Route("/v1/models/{model:path}", self.handle),
            Route("/health", self.handle),
        ]
        guard = Middleware(AccessGuard, policy=policy or AccessPolicy(), routes=routes)
        self.app = Starlette(routes=routes, middleware=[guard])

    async def handle(self, request: Request) -> Response:
        self.reached.append(request.url.path)
        return PlainTextResponse("done")

    def ask(self, method: str, path: str, **headers: str) -> httpx.Response:
        return ask(self.app, path, method=method, headers=headers)


@pytest.mark.parametrize("path", ["/flush_cache", "/flush%5fcache", "/flush_cache%0A", "/flush_cache?timeout=1"])
def test_a_control_request_needs_the_admin_key_however_its_path_is_spelled(path: str) -> None:
    engine = Engine(AccessPolicy(admin_api_key="admin-key"))
    answer = engine.ask("POST", path)
    assert (answer.status_code, engine.reached) == (401, [])
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    engine.ask("POST", path, authorization="Bearer admin-key")
    assert len(engine.reached) == 1
    assert engine.ask("POST", "/generate").status_code == 200, "without an API key clients need none"


def test_a_foreign_page_reaches_no_handler_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    with caplog.at_level(logging.WARNING):
        for method, path in (("GET", "/flush_cache"), ("POST", "/generate"), ("GET", "/health"), ("GET", "/missing")):
            answer = engine.ask(method, path, **{"sec-fetch-site": "cross-site"})
            assert answer.status_code == 403 and "another origin" in answer.json()["error"]["message"]
        assert engine.ask("GET", "/health", host="evil.example").status_code == 403
    assert engine.reached == []
    assert len(caplog.records) == 2
    assert engine.ask("GET", "/flush_cache").status_code == 200


def test_probes_need_no_key_and_other_routes_do() -> None:
    engine = Engine(AccessPolicy(api_key="key"))
    assert engine.ask("GET", "/health").status_code == 200
    assert engine.ask("GET", "/v1/models/simulated").status_code == 401
    assert engine.ask("GET", "/missing").status_code == 401, "a client without a key does not learn which paths exist"
    assert engine.ask("GET", "/v1/models/simulated", authorization="Bearer key").status_code == 200


def test_no_route_is_a_client_s() -> None:
    assert access_of(None) is RouteAccess.CLIENT
