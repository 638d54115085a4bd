"""Routes that open and close sessions, with SGLang's paths and fields."""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

import msgspec
from starlette.responses import JSONResponse, Response

from scheduler_engine.engine.engine import Engine
from scheduler_engine.engine.messages import CloseSession, OpenSession, RpcMethod
from scheduler_engine.frontend.access import RouteAccess
from scheduler_engine.frontend.http_access import ApiRoute
from scheduler_engine.frontend.http_body import BodyReceiver, body_route
from scheduler_engine.frontend.text_frontend import session_replica

_SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _OpenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capacity_of_str_len: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    session_id: _SessionId | None = None
    streaming: bool | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)] | None = None


class _CloseSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session_id: _SessionId


def session_routes(engine: Engine, bodies: BodyReceiver) -> list[ApiRoute]:
    """Return the routes. A session is on one replica, which its id determines.

    Args:
        engine: has the replicas.
        bodies: receives the bodies.
    """

    async def ask(method: RpcMethod, session_id: str, body: OpenSession | CloseSession) -> None:
        replica = session_replica(session_id, engine.config.dp_size)
        await engine.ask(method, msgspec.json.encode(body), replica=replica)

    async def open_session(given: _OpenSession) -> Response:
        """Open a session and respond with its id."""
        session_id = given.session_id or uuid4().hex
        session = OpenSession(session_id, given.capacity_of_str_len, given.timeout, bool(given.streaming))
        await ask("open_session", session_id, session)
        return JSONResponse(session_id)

    async def close_session(given: _CloseSession) -> Response:
        """Close a session and release its pages."""
        await ask("close_session", given.session_id, CloseSession(given.session_id))
        return JSONResponse(None)

    return [
        body_route("/open_session", _OpenSession, open_session, bodies, access=RouteAccess.CLIENT),
        body_route("/close_session", _CloseSession, close_session, bodies, access=RouteAccess.CLIENT),
    ]
