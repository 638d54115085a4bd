"""Describe the routes of an application as an OpenAPI document, from the declarations that parse their requests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from scheduler_components import __version__
from scheduler_engine.frontend.access import RouteAccess
from scheduler_engine.frontend.http_access import ApiRoute, access_of

_SCHEMAS = "#/components/schemas/{name}"

_ANSWERS = {"/": "text/html", "/metrics": "text/plain"}
"""Media types of routes that are not ``ApiRoute``; others answer with JSON."""

_JSON_TYPES = {"/open_session": "string"}
"""Types of JSON answers that are no objects. As in SGLang, the id of a session is answered alone."""

_QUERIES: dict[str, Mapping[str, Any]] = {
    "/v1/loads": {"include": {"type": "string"}, "dp_rank": {"type": "integer", "minimum": 0}},
    "/kv_pool": {"rank": {"type": "integer", "minimum": 0}, "page": {"type": "integer"}, "reading": {"type": "string"}},
}
"""Query parameters of routes that are not ``ApiRoute``."""


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorDetail


def openapi_route(described: Sequence[Route]) -> ApiRoute:
    """Return ``/openapi.json``, which describes the given routes and itself."""

    @cache
    def document() -> dict[str, Any]:
        return openapi_document([*described, route])

    async def openapi(_: Request) -> Response:
        """This description."""
        return JSONResponse(document())

    route = ApiRoute("/openapi.json", openapi, methods=["GET"])
    return route


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document with every method of every route."""
    bodies = {route.path: route.body for route in routes if isinstance(route, ApiRoute) and route.body is not None}
    refs, schemas = msgspec.json.schema_components((*bodies.values(), _ErrorBody), ref_template=_SCHEMAS)
    body_refs = dict(zip(bodies, refs, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path_format
        paths[path] = {
            method.lower(): _operation(route, method, body_refs.get(route.path))
            for method in sorted(route.methods or ())
            if method != "HEAD"  # as GET
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "scheduler-components", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Error": {
                    "description": "An error in OpenAI's form.",
                    "content": {"application/json": {"schema": refs[-1]}},
                }
            },
        },
    }


def _operation(route: Route, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
    answers = route.answers if isinstance(route, ApiRoute) else (_ANSWERS.get(route.path, "application/json"),)
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()} {route.path}",
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "parameters": list(_parameters(route)),
        "responses": {
            "200": {"description": "Done.", "content": {each: _content(route.path, each) for each in answers}},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    if access_of(route) is not RouteAccess.PUBLIC:
        operation["security"] = [{}, {"bearer": []}]  # a key is needed only if the server has one
    if body is not None and method != "GET":
        operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return operation


def _content(path: str, media_type: str) -> dict[str, Any]:
    if media_type == "text/event-stream":
        return {"schema": {}}  # of one event, or of the whole text: readers differ
    json_type = _JSON_TYPES.get(path, "object")
    return {"schema": {"type": json_type if media_type == "application/json" else "string"}}


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in route.param_convertors:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, schema in _query(route).items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _query(route: Route) -> Mapping[str, Any]:
    if not isinstance(route, ApiRoute):
        return _QUERIES.get(route.path, {})
    if route.query is None:
        return {}
    schema = msgspec.json.schema(route.query)
    properties: Mapping[str, Any] = schema["$defs"][route.query.__name__]["properties"]
    return properties
