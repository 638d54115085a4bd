"""The HTTP server binds before it says where it is, gives the port back, and complains in one sentence."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from scheduler_components import StartError
from scheduler_components.reference.engine import open_http_server


async def hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", hello)])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_it_answers_at_the_url_that_it_gives_and_lets_go_of_the_port(host: str) -> None:
    async def scenario() -> str:
        async with open_http_server(APP, host=host, port=0) as url:
            async with httpx.AsyncClient() as client:
                assert (await client.get(url)).text == "hello"
            assert "0.0.0.0" not in url
            return url

    url = httpx.URL(asyncio.run(asyncio.wait_for(scenario(), timeout=20)))
    socket.create_server((url.host, url.port)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "host.invalid"])
def test_an_address_that_cannot_be_had_is_a_start_error(host: str) -> None:
    async def scenario(port: int) -> None:
        async with open_http_server(APP, host=host, port=port):
            raise AssertionError("it started")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(StartError, match="--port"):
            asyncio.run(scenario(taken.getsockname()[1]))
