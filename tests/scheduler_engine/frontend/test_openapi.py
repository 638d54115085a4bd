"""The OpenAPI description has every route of the router, and the fields that the parsers read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kit.asgi import ask
from kit.served import Served
from kit.status_engine import StatusEngine
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from observability import status_routes
from scheduler_engine.frontend.access import RouteAccess
from scheduler_engine.frontend.http_access import ApiRoute
from scheduler_engine.frontend.openai_format import ChatBody
from scheduler_engine.frontend.openapi import openapi_document, openapi_route


class _Query(msgspec.Struct):
    timeout: float = 0.0


async def handle(_: Request) -> Response:
    """Do it. Then more."""
    return Response()


CONTROL = ApiRoute("/control", handle, methods=["GET", "POST"], access=RouteAccess.ADMIN, query=_Query)

SESSION = ApiRoute("/open_session", handle, methods=["POST"])


def make_routes() -> list[Route]:
    status = status_routes(StatusEngine(), registry=CollectorRegistry())
    routes: list[Route] = [*Served().app.routes, CONTROL, SESSION, *status]  # type: ignore[list-item]  # all are routes
    return [*routes, openapi_route(routes)]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = ask(Starlette(routes=make_routes()), "/openapi.json", method="GET").json()
    return found


def test_every_method_of_every_route_is_described(document: dict[str, Any]) -> None:
    routes = make_routes()
    expected = {(each.path_format, method.lower()) for each in routes for method in (each.methods or set()) - {"HEAD"}}
    operations = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert operations == expected
    assert ("/openapi.json", "get") in operations and ("/v1/models/{model}", "get") in operations


def test_every_operation_has_a_summary_and_its_own_name(document: dict[str, Any]) -> None:
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    assert all(each["summary"].endswith((".", "?")) or each["summary"] for each in operations), operations
    assert len({each["operationId"] for each in operations}) == len(operations)


def test_bodies_are_those_that_the_parsers_read(document: dict[str, Any]) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat == {"$ref": "#/components/schemas/ChatBody"}
    described = document["components"]["schemas"]["ChatBody"]
    assert set(described["properties"]) == {each.encode_name for each in msgspec.structs.fields(ChatBody)}
    assert described["required"] == ["messages"]


def test_a_session_is_answered_by_its_id_alone(document: dict[str, Any]) -> None:
    content = document["paths"]["/open_session"]["post"]["responses"]["200"]["content"]
    assert content == {"application/json": {"schema": {"type": "string"}}}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [found for each in value.values() for found in references(each)]
        return [found for each in value for found in references(each)] if isinstance(value, list) else []

    for reference in references(document):
        place: Any = document
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]


def test_control_requests_may_need_a_key_and_probes_do_not(document: dict[str, Any]) -> None:
    assert "security" not in document["paths"]["/health"]["get"]
    assert document["paths"]["/control"]["post"]["security"] == [{}, {"bearer": []}]
    (timeout,) = document["paths"]["/control"]["get"]["parameters"]
    assert (timeout["name"], timeout["in"], timeout["required"]) == ("timeout", "query", False)


def test_a_document_of_no_routes_has_the_error() -> None:
    assert openapi_document([])["components"]["schemas"].keys() == {"_ErrorBody", "_ErrorDetail"}
