"""The ASGI middleware in front of all routes: it asks ``AccessPolicy`` about the head of each request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from observability import error_response
from scheduler_engine.frontend.access import AccessPolicy, RouteAccess

logger = logging.getLogger(__name__)

_PUBLIC_PATHS = ("/health", "/ready", "/metrics")


class ApiRoute(Route):
    """A route that states who may call it, and what it reads.

    Args:
        path: path of the route.
        endpoint: as in ``starlette.routing.Route``.
        methods: HTTP methods.
        access: who may call it.
        body: struct of its JSON body; None for a route that reads no body.
        query: struct of its query parameters; None for none.
        answers: media types of its responses.
    """

    def __init__(
        self,
        path: str,
        endpoint: Any,
        *,
        methods: Sequence[str],
        access: RouteAccess = RouteAccess.CLIENT,
        body: type | None = None,
        query: type | None = None,
        answers: Sequence[str] = ("application/json",),
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.access, self.body, self.query, self.answers = access, body, query, answers


class AccessGuard:
    """Refuse requests that the policy refuses, before a route sees them. The log names each kind of refusal once.

    Args:
        app: the application.
        policy: decides.
        routes: its routes, which state who may call them.
    """

    def __init__(self, app: ASGIApp, *, policy: AccessPolicy, routes: Sequence[BaseRoute]) -> None:
        self._app, self._policy, self._routes = app, policy, routes
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._policy.refusal(scope["method"], scope["headers"], self._access_of(scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        kind = refusal.message.partition(":")[0]
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("refused a request, and further ones are not logged: %s", refusal.message)
        response = error_response(refusal.status_code, refusal.message)
        if refusal.status_code == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _access_of(self, scope: Scope) -> RouteAccess:
        """Return who may call the route of a request. The router's own matching decides, so both always agree."""
        matching = (route for route in self._routes if route.matches(scope)[0] is Match.FULL)
        return access_of(next(matching, None))


def access_of(route: BaseRoute | None) -> RouteAccess:
    """Return who may call a route. A route of ``observability`` does not say it: probes and metrics are public."""
    if isinstance(route, ApiRoute):
        return route.access
    is_public = isinstance(route, Route) and route.path in _PUBLIC_PATHS
    return RouteAccess.PUBLIC if is_public else RouteAccess.CLIENT
