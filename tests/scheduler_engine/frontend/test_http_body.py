"""Bodies have limits, wrong ones name their field, errors get a status, and a disconnect ends the work."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from scheduler_components import ConfigError
from scheduler_components.errors import ComponentError
from scheduler_engine.frontend.errors import (
    EngineFailedError,
    RankSilentError,
    RequestFailedError,
    RequestRefusedError,
    TooBusyError,
)
from scheduler_engine.frontend.http_body import (
    BadBodyError,
    BodyReader,
    BodyReceiver,
    BodyTimeoutError,
    BodyTooLargeError,
    component_error_response,
    json_response,
    respond_with_errors,
    run_until_disconnected,
    stream_response,
)

KIB = 1024


async def read(bodies: BodyReceiver, request: Request, max_bytes: int = 1024 * KIB) -> bytes:
    async with bodies.receive(request, max_bytes=max_bytes) as body:
        return bytes(body)


async def read_body(request: Request, timeout_s: float = 30.0, *, max_bytes: int = 1024 * KIB) -> bytes:
    return await read(BodyReceiver(timeout_s=timeout_s), request, max_bytes)


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 10))


def request_of(*chunks: bytes, ends: str = "complete") -> Request:
    """A request whose body comes in these chunks, and then is complete, waits, or is cut off by a disconnect."""
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    if ends == "complete":
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    elif ends == "disconnect":
        messages.append({"type": "http.disconnect"})
    arriving = iter(messages)

    async def receive() -> Any:
        message = next(arriving, None)
        return await asyncio.Future() if message is None else message

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


@pytest.mark.parametrize("chunks", [[b"0123456789"], [b"01234", b"", b"56789"], [b"%d" % at for at in range(10)]])
def test_a_body_of_the_largest_size_is_read_whole(chunks: list[bytes]) -> None:
    assert run(read_body(request_of(*chunks), max_bytes=10)) == b"0123456789"


def test_one_byte_more_is_refused_before_the_body_is_complete() -> None:
    with pytest.raises(BodyTooLargeError, match=r"^body: is longer than 10 bytes; send a shorter one$"):
        run(read_body(request_of(b"0123456789", b"!", ends="wait"), max_bytes=10))


def test_a_body_that_stops_halfway_is_a_timeout_with_its_length() -> None:
    with pytest.raises(BodyTimeoutError, match=r"^body: is incomplete after 0\.01 s \(4 bytes\)$"):
        run(read_body(request_of(b"half", ends="wait"), 0.01))


def test_a_disconnect_in_the_body_is_a_disconnect() -> None:
    with pytest.raises(ClientDisconnect):
        run(read_body(request_of(b"half", ends="disconnect")))


def sized(*chunks: bytes, ends: str = "complete", length: int | None = None) -> Request:
    """A request as of ``request_of`` that may announce its length."""
    request = request_of(*chunks, ends=ends)
    if length is not None:
        request.scope["headers"] = [(b"content-length", str(length).encode())]
    return request


def test_a_body_that_announces_to_be_longer_is_refused_unread() -> None:
    with pytest.raises(BodyTooLargeError):
        run(read_body(sized(ends="wait", length=4), max_bytes=3))
    assert run(read_body(sized(b"abc", length=3), max_bytes=3)) == b"abc"


async def test_all_bodies_together_are_bounded_and_small_ones_always_pass() -> None:
    bodies = BodyReceiver(timeout_s=5, max_pending_bytes=256 * KIB)
    large = 200 * KIB * b"x"
    async with bodies.receive(sized(large), max_bytes=1024 * KIB) as first:
        assert len(first) == len(large)
        with pytest.raises(TooBusyError, match="memory"):
            await read(bodies, sized(large))
        assert len(await read(bodies, sized(64 * KIB * b"y"))) == 64 * KIB
    for ending in (sized(large), sized(large, ends="wait", length=10**9), sized(large)):
        if ending.headers:
            with pytest.raises(BodyTooLargeError):
                await read(bodies, ending)
        else:
            assert await read(bodies, ending) == large, "memory is given back"


async def test_memory_is_given_back_after_each_failure() -> None:
    bodies = BodyReceiver(timeout_s=0.05, max_pending_bytes=256 * KIB)
    large = 200 * KIB * b"x"
    for _ in range(3):
        with pytest.raises(BodyTimeoutError):
            await read(bodies, sized(large, ends="wait"))
        with pytest.raises(BodyTooLargeError):
            await read(bodies, sized(large, large), 300 * KIB)
        reading = asyncio.ensure_future(read(bodies, sized(large, ends="wait")))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        with pytest.raises(ValueError, match="handler"):
            async with bodies.receive(sized(large)):
                raise ValueError("handler")
    assert await read(bodies, sized(large)) == large


def answer(respond: Callable[[Request], Awaitable[Response]], asked: Request) -> Response:
    async def call() -> Response:
        return await respond_with_errors(respond)(asked)

    return asyncio.run(call())


def test_a_disconnect_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def respond(asked: Request) -> Response:
        return PlainTextResponse(await read(BodyReceiver(), asked))

    with caplog.at_level(logging.INFO):
        assert answer(respond, request_of(ends="disconnect")).body == b""
    assert caplog.records == []
    with pytest.raises(ClientDisconnect):
        asyncio.run(read(BodyReceiver(), request_of(ends="disconnect")))


class Inner(msgspec.Struct):
    depth: int = 0


class Body(msgspec.Struct):
    name: str
    inner: Inner | None = None
    tags: list[int] = []


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"null", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"\xff", "body"),
        (b'{"name": "\xff"}', "body"),
        (b'{"name": "a"} more', "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "body"),
        (b'{"name": 5}', "name"),
        (b'{"name": "a", "inner": {"depth": "deep"}}', "inner.depth"),
        (b'{"name": "a", "inner": 5}', "inner"),
        (b'{"name": "a", "tags": [1, "x"]}', "tags[1]"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:40]),
)
def test_a_wrong_body_names_the_path_of_its_wrong_value(text: bytes, field: str) -> None:
    with pytest.raises(BadBodyError) as raised:
        BodyReader(Body, "/route").read(text)
    assert raised.value.field == field
    assert str(raised.value) == f"{field}: {raised.value.problem}"


@settings(deadline=None, max_examples=50)
@given(text=st.binary(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_a_body_or_a_bad_body(text: bytes | str) -> None:
    try:
        BodyReader(Body, "/route").read(text.encode(errors="surrogatepass") if isinstance(text, str) else text)
    except BadBodyError as error:
        assert error.field
        assert error.problem


def test_unknown_fields_are_logged_once_by_their_path(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader(Body, "/route")
    text = b'{"name": "a", "later": 1, "unset": null, "inner": {"depth": 1, "wide": 2, "low": null}}'
    with caplog.at_level(logging.WARNING):
        assert reader.read(text) == reader.read(text) == Body("a", Inner(1))
    assert [record.getMessage() for record in caplog.records] == [
        "/route: the field 'later' is unknown and has no effect",
        "/route: the field 'inner.wide' is unknown and has no effect",
    ]


def test_the_log_of_unknown_fields_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader(Body, "/route")
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            reader.read(json.dumps({"name": "a", f"{number}-{'x' * 500}": 1}).encode())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 65
    assert messages[-1] == "/route: further unknown fields are not logged"
    assert max(map(len, messages)) < 150


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (BadBodyError("stop", "is empty"), 400, "stop"),
        (ConfigError("top_k", -2, "is negative", "give -1"), 400, "top_k"),
        (RequestRefusedError("too long"), 400, None),
        (BodyTimeoutError("slow"), 408, None),
        (BodyTooLargeError("long"), 413, None),
        (RequestFailedError("half an answer"), 500, None),
        (TooBusyError("full"), 503, None),
        (RankSilentError("rank 1 is silent"), 503, None),
        (EngineFailedError("rank 1 died"), 503, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_has_a_status_and_its_text(error: ComponentError, status: int, param: str | None) -> None:
    response = component_error_response(error)
    content = json.loads(bytes(response.body))["error"]
    assert (response.status_code, content["message"], content.get("param")) == (status, str(error), param)


def test_any_struct_is_a_json_response() -> None:
    response = json_response(Body("a", tags=[1]))
    assert (response.media_type, json.loads(bytes(response.body))["tags"]) == ("application/json", [1])


async def answers(*given: object) -> AsyncIterator[object]:
    for each in given:
        if isinstance(each, Exception):
            raise each
        yield each


async def events_of(*given: object) -> list[bytes]:
    response = await stream_response(answers(*given))
    assert isinstance(response, StreamingResponse)
    assert response.media_type == "text/event-stream"
    return [bytes(chunk) async for chunk in response.body_iterator]  # type: ignore[arg-type]


def test_a_stream_is_one_event_per_answer_and_done() -> None:
    assert run(events_of({"n": 1}, {"n": 2})) == [b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', b"data: [DONE]\n\n"]


def test_a_failure_before_the_first_answer_is_a_status() -> None:
    assert run(stream_response(answers(TooBusyError("full")))).status_code == 503


def test_a_failure_after_the_first_answer_is_an_event() -> None:
    first, failure, done = run(events_of({"n": 1}, RequestFailedError("no more")))
    assert json.loads(failure.removeprefix(b"data: "))["error"]["message"] == "no more"
    assert (first, done) == (b'data: {"n":1}\n\n', b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["disconnected", "cancelled by the server"])
def test_the_work_ends_with_the_connection(is_cancelled: bool) -> None:
    ended: list[str] = []

    async def scenario() -> None:
        arriving = asyncio.Queue[dict[str, str]]()
        begun = asyncio.Event()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.Future()
            finally:
                ended.append("work")

        serving = asyncio.ensure_future(run_until_disconnected(arriving.get, work()))
        await begun.wait()
        arriving.put_nowait({"type": "http.request"})  # the rest of a body is no disconnect
        await asyncio.sleep(0)
        assert not serving.done()
        if is_cancelled:
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            return
        arriving.put_nowait({"type": "http.disconnect"})
        await serving

    run(scenario())
    assert ended == ["work"]


def test_work_that_ends_first_gives_its_error_and_leaves_no_task() -> None:
    async def fail() -> None:
        raise RequestFailedError("no answer")

    async def never() -> dict[str, str]:
        return await asyncio.Future()

    async def scenario() -> int:
        before = asyncio.all_tasks()
        with pytest.raises(RequestFailedError):
            await run_until_disconnected(never, fail())
        return len(asyncio.all_tasks() - before)

    assert run(scenario()) == 0
