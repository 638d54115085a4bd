"""EngineClient: answers have limits and forms, and what an engine does wrong is an error that names its URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.fake_engine import FakeEngine, served_engine
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from scheduler_engine.proxy.answer_memory import AnswerMemory
from scheduler_engine.proxy.config import ProxyConfig
from scheduler_engine.proxy.http_replica import (
    EngineClient,
    EngineDownError,
    ReplicaError,
    open_engine_client,
)

pytestmark = pytest.mark.sockets


def run(scenario: Callable[[EngineClient], Awaitable[Any]], engine: FakeEngine, **settings: Any) -> Any:
    async def with_a_client() -> Any:
        async with served_engine(engine) as url:
            config = ProxyConfig(urls=(url,), **settings)
            async with open_engine_client(url, config) as client:
                return await scenario(client)

    return asyncio.run(asyncio.wait_for(with_a_client(), 60))


def pages(path: str, content: bytes, status: int = 200) -> FakeEngine:
    async def answer(_: Request) -> Response:
        return Response(content, status)

    return FakeEngine(pages={path: answer})


def test_an_engine_that_does_not_listen_refuses() -> None:
    async def scenario() -> bool:
        async with served_engine(FakeEngine()) as url:
            pass
        async with open_engine_client(url, ProxyConfig(urls=(url,))) as client:
            with pytest.raises(EngineDownError, match=url) as caught:
                await client.is_ready()
            return caught.value.is_refused

    assert asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_engine_that_is_silent_is_down_and_does_not_refuse() -> None:
    held = asyncio.Event()

    async def silent(_: Request) -> Response:
        await held.wait()
        return Response()

    async def scenario(client: EngineClient) -> bool:
        with pytest.raises(EngineDownError) as caught:
            await client.is_ready()
        held.set()
        return caught.value.is_refused

    assert run(scenario, FakeEngine(pages={"/ready": silent}), poll_timeout_s=0.05) is False


def test_a_long_answer_is_cut_off() -> None:
    async def long() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b" " * 2**20

    async def answer(_: Request) -> Response:
        return StreamingResponse(long())

    async def scenario(client: EngineClient) -> None:
        with pytest.raises(ReplicaError, match="is over"):
            await client.server_info()

    run(scenario, FakeEngine(pages={"/server_info": answer}), poll_timeout_s=30.0)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b'{"loads": 5}', b'{"loads": [{"num_total_tokens": "x"}]}', b"\xff"]
)
def test_loads_of_another_form_are_an_error(content: bytes) -> None:
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(ReplicaError, match="/v1/loads"):
            await client.loads()

    run(scenario, pages("/v1/loads", content))


@pytest.mark.parametrize(("status", "is_ready"), [(200, True), (503, False), (500, False)])
def test_readiness_is_a_status(status: int, is_ready: bool) -> None:
    async def scenario(client: EngineClient) -> bool:
        return await client.is_ready()

    assert run(scenario, pages("/ready", b"{}", status)) is is_ready


def test_redirects_are_not_followed() -> None:
    """An engine must not lead the proxy, which sends a key, to another host."""

    async def elsewhere(_: Request) -> Response:
        return Response(status_code=302, headers={"location": "http://127.0.0.1:1/"})

    async def scenario(client: EngineClient) -> bool:
        return await client.is_ready()

    assert run(scenario, FakeEngine(pages={"/ready": elsewhere})) is False


class Chunks(httpx.AsyncByteStream):
    """The body of a response, in these chunks."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


async def split(text: bytes, sizes: list[int], max_bytes: int) -> list[bytes]:
    chunks, place = [], 0
    for size in sizes:
        chunks.append(text[place : place + size])
        place += size
    response = httpx.Response(200, stream=Chunks([*chunks, text[place:]]))
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: response)) as http:  # none reads certificates
        client = EngineClient(url="http://engine", http=http, poll_timeout_s=1.0, tokenize_timeout_s=1.0)
        with AnswerMemory(max_bytes=1).open() as held:
            return [event async for event in client.events(response, held, max_bytes=max_bytes)]


@given(
    pieces=st.lists(st.sampled_from([b"data: 1", b"x", b"\n", b"\n\n", b"\r\n\r\n", b"\r"]), max_size=12),
    sizes=st.lists(st.integers(0, 6), max_size=8),
)
def test_events_are_cut_at_their_ends_only_and_nothing_is_lost(pieces: list[bytes], sizes: list[int]) -> None:
    text = b"".join(pieces)
    found = asyncio.run(split(text, sizes, 1000))
    assert b"".join(found) == text
    assert all(each.endswith((b"\n\n", b"\r\n\r\n")) for each in found[:-1])


def test_an_event_beyond_the_limit_is_passed_on_in_parts() -> None:
    found = asyncio.run(split(b"x" * 100, [30, 30, 30], 50))
    assert [len(each) for each in found] == [60, 40]


MODELS = {
    b'{"data": [{"id": "a", "n": 1}, {"id": "b"}]}': {"a": b'{"id": "a", "n": 1}', "b": b'{"id": "b"}'},
    b'{"data": []}': {},
}


@pytest.mark.parametrize("content", MODELS)
def test_models_are_kept_as_the_engine_describes_them(content: bytes) -> None:
    async def scenario(client: EngineClient) -> dict[str, bytes]:
        return {name: bytes(each) for name, each in (await client.models()).items()}

    assert run(scenario, pages("/v1/models", content)) == MODELS[content]


@pytest.mark.parametrize(
    "content", [b'{"data": 5}', b'{"data": [{"name": "a"}]}', b"\xff", b'{"data": [' + b" " * 2**20]
)
def test_models_of_another_form_are_an_error(content: bytes) -> None:
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(ReplicaError, match="/v1/models"):
            await client.models()

    run(scenario, pages("/v1/models", content), poll_timeout_s=30.0)


@pytest.mark.parametrize("status", [404, 500])
def test_an_engine_without_a_list_of_models_has_none(status: int) -> None:
    async def scenario(client: EngineClient) -> object:
        return await client.models()

    if status == 404:
        assert run(scenario, pages("/v1/models", b"", status)) == {}
    else:
        with pytest.raises(ReplicaError, match="answers 500"):
            run(scenario, pages("/v1/models", b"", status))
