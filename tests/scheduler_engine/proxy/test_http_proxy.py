"""The proxy passes requests and answers on, and serves a request elsewhere while its client has received nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import httpx
import pytest
from kit.fake_engine import Answer, FakeEngine, holds, says
from kit.proxied import PROMPT, Proxied, ask, run_proxied, until
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from scheduler_engine.frontend.http_body import BodyReceiver
from scheduler_engine.proxy.http_proxy import REPLICA_HEADER

pytestmark = pytest.mark.sockets


async def begin_request(running: Proxied, *lines: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection with a small receive buffer, and send these bytes."""
    url = running.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=2**10)
    writer.write(b"".join(lines))
    return reader, writer


def streams(
    *pieces: bytes, then: Callable[[], Awaitable[object]] | None = None, media_type: str = "text/event-stream"
) -> Answer:
    """Answer with these pieces of a stream. ``then`` may hold or break it."""

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        if then is not None:
            await then()

    async def answer(_: Request) -> Response:
        return StreamingResponse(stream(), media_type=media_type)

    return answer


def pair(first: Answer, second: Answer | None = None) -> tuple[FakeEngine, FakeEngine]:
    """Return two engines. The first request of both is answered with ``first``, any further one with ``second``."""
    answers = [first]

    async def answer(request: Request) -> Response:
        given = answers.pop() if answers else second
        return JSONResponse({"by": "second"}) if given is None else await given(request)

    return FakeEngine(answer=answer), FakeEngine(answer=answer)


def received(engines: tuple[FakeEngine, ...]) -> list[int]:
    return sorted(len(engine.received) for engine in engines)


async def fail() -> None:
    raise ConnectionError("the engine fails here")


# --- one engine ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_request_and_its_answer_are_passed_on_as_they_are(path: str) -> None:
    engine, body = FakeEngine(name="a"), b'{"prompt": [1, 2],   "unknown": 7}'

    async def scenario(running: Proxied) -> httpx.Response:
        return await running.client.post(path, content=body, headers={"traceparent": "00-1", "x-request-id": "mine"})

    answer = run_proxied(scenario, engine)
    assert (answer.status_code, answer.json()) == (200, {"by": "a"})
    assert (answer.headers["x-request-id"], answer.headers[REPLICA_HEADER]) == ("mine", "0")
    [received] = engine.received
    assert (received.path, received.body) == (path, body)
    assert (received.headers["traceparent"], received.headers["x-request-id"]) == ("00-1", "mine")


def test_a_request_without_an_id_gets_one_and_a_bad_id_is_replaced() -> None:
    engine = FakeEngine()

    async def scenario(running: Proxied) -> list[str]:
        headers = [{}, {"x-request-id": "x" * 200}]
        answers = [await running.client.post("/generate", json=PROMPT, headers=each) for each in headers]
        return [answer.headers["x-request-id"] for answer in answers]

    ids = run_proxied(scenario, engine)
    assert [len(each) for each in ids] == [32, 32]
    assert [each.headers["x-request-id"] for each in engine.received] == ids


def test_keys_of_clients_and_cookies_do_not_reach_engines_and_the_engines_key_does() -> None:
    engine = FakeEngine()

    headers = {"authorization": "Bearer client", "cookie": "a=b", "x-data-parallel-rank": "7"}
    ask(engine, headers=headers, api_key="engine-key")
    [received] = engine.received
    assert received.headers["authorization"] == "Bearer engine-key"
    assert "cookie" not in received.headers
    assert "x-data-parallel-rank" not in received.headers


def test_headers_of_engines_that_are_not_for_clients_are_left_out() -> None:
    given = {"set-cookie": "a=b", "x-internal": "1", "x-data-parallel-rank": "0"}
    headers = ask(FakeEngine(answer=says({}, 200, given))).headers
    assert headers["x-data-parallel-rank"] == "0"
    assert "set-cookie" not in headers
    assert "x-internal" not in headers


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_an_error_of_an_engine_is_passed_on_and_not_repeated(status: int) -> None:
    engines = [FakeEngine(answer=says({"error": {"message": "no"}}, status)) for _ in range(2)]
    found = ask(*engines)
    assert (found.status_code, found.json()["error"]["message"]) == (status, "no")
    assert sum(len(engine.received) for engine in engines) == 1


MALFORMED = (
    b"",
    b"nonsense",
    b"[1]",
    b'{"prompt": [1]',
    b"\xef\xbb\xbf{}",
    b'{"a": ' + b"[" * 100_000,
)


def test_a_malformed_body_is_refused_by_the_proxy() -> None:
    engine = FakeEngine()

    async def scenario(running: Proxied) -> None:
        for path in ("/v1/completions", "/open_session"):
            for body in MALFORMED:
                answer = await running.client.post(path, content=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400), (path, body[:20])

    run_proxied(scenario, engine)
    assert engine.received == []


def test_events_are_passed_on_as_they_arrive_and_never_in_halves() -> None:
    """The engine sends the next piece when the client has the last one, so a buffer would never end."""
    may_go_on = asyncio.Event()

    async def stream() -> AsyncIterator[bytes]:
        yield b"data: 1\n\nda"
        await may_go_on.wait()
        yield b"ta: 2\n\n"
        yield b"data: 3\r\n\r\n"
        yield b"data: [DONE]"

    async def answer(_: Request) -> Response:
        return StreamingResponse(stream(), media_type="text/event-stream")

    async def scenario(running: Proxied) -> list[bytes]:
        async with running.client.stream("POST", "/generate", json=PROMPT) as response:
            chunks = response.aiter_raw()
            found = [await anext(chunks)]
            may_go_on.set()
            return [*found, b"".join([chunk async for chunk in chunks])]

    assert run_proxied(scenario, FakeEngine(answer=answer)) == [
        b"data: 1\n\n",
        b"data: 2\n\ndata: 3\r\n\r\ndata: [DONE]",
    ]


def test_the_disconnect_of_a_client_ends_the_request_of_the_engine() -> None:
    ended = asyncio.Event()

    async def stream() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def answer(_: Request) -> Response:
        return StreamingResponse(stream(), media_type="text/event-stream")

    async def scenario(running: Proxied) -> None:
        async with running.client.stream("POST", "/generate", json=PROMPT) as response:
            await anext(response.aiter_raw())
        await ended.wait()
        await until(lambda: not running.endpoint.counters.open)

    run_proxied(scenario, FakeEngine(answer=answer))


# --- several engines ---


def test_a_request_goes_on_to_another_engine_if_the_first_one_takes_none() -> None:
    engines = pair(says({"error": {"message": "draining"}}, 503))
    assert ask(*engines).json() == {"by": "second"}
    assert received(engines) == [1, 1]


def test_the_last_refusal_is_passed_on_if_all_engines_take_none() -> None:
    engines = [FakeEngine(answer=says({"error": {"message": "draining"}}, 503, {"retry-after": "7"})) for _ in range(2)]
    answer = ask(*engines)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert [len(engine.received) for engine in engines] == [1, 1]


def test_no_more_engines_are_tried_than_the_limit_says() -> None:
    engines = [FakeEngine(answer=says({}, 503)) for _ in range(4)]
    assert ask(*engines, max_attempts=2).status_code == 503
    assert sum(len(engine.received) for engine in engines) == 2


def test_an_engine_that_fails_before_its_first_event_is_replaced() -> None:
    engines = pair(streams(then=fail), streams(b"data: b\n\n"))

    async def scenario(running: Proxied) -> tuple[bytes, int]:
        answer = await running.client.post("/generate", json=PROMPT)
        return answer.content, running.endpoint.counters.retried

    assert run_proxied(scenario, *engines) == (b"data: b\n\n", 1)


def test_an_engine_that_fails_after_its_first_event_ends_the_stream_with_an_error() -> None:
    engines = pair(streams(b"data: 1\n\ndata: half", then=fail))

    async def scenario(running: Proxied) -> tuple[bytes, int]:
        answer = await running.client.post("/generate", json=PROMPT)
        return answer.content, running.endpoint.counters.cut

    content, num_cut = run_proxied(scenario, *engines)
    first, error, done, rest = content.split(b"\n\n")
    assert (first, done, rest, num_cut) == (b"data: 1", b"data: [DONE]", b"", 1)
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the engine failed"
    assert received(engines) == [0, 1]


def test_a_stream_of_an_engine_that_is_lost_ends_although_its_connection_stays_open() -> None:
    held = asyncio.Event()

    engine = FakeEngine(answer=streams(b"data: 1\n\n", then=held.wait))

    async def scenario(running: Proxied) -> bytes:
        asking = asyncio.create_task(running.client.post("/generate", json=PROMPT))
        await until(lambda: engine.received)
        engine.pages["/ready"] = engine.pages["/server_info"] = holds(held)
        answer = await asking
        held.set()
        return answer.content

    content = run_proxied(scenario, engine, poll_timeout_s=0.3, max_failed_polls=2)
    assert content.startswith(b"data: 1\n\n")
    assert content.endswith(b"data: [DONE]\n\n")


def test_headers_that_are_not_ascii_are_left_out() -> None:
    async def answer(_: Request) -> Response:
        return Response(b"{}", headers={"cache-control": "caf\xe9", "retry-after": "5"})

    engine = FakeEngine(answer=answer)

    answered = ask(engine, headers={b"user-agent": b"caf\xe9", b"tracestate": b"\xff", b"traceparent": b"00-1"})
    assert (answered.status_code, answered.headers["retry-after"]) == (200, "5")
    assert "cache-control" not in answered.headers
    [got] = engine.received
    assert got.headers["traceparent"] == "00-1"
    assert "tracestate" not in got.headers


def test_an_answer_that_is_not_a_stream_arrives_whole_from_one_engine() -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b'{"by": '
        raise ConnectionError("the engine fails here")

    async def answer(_: Request) -> Response:
        return StreamingResponse(half(), media_type="application/json")

    engines = pair(answer)
    assert ask(*engines).json() == {"by": "second"}
    assert received(engines) == [1, 1]


def test_an_engine_that_is_silent_for_too_long_is_a_timeout_and_not_repeated() -> None:
    never = asyncio.Event()

    engines = [FakeEngine(answer=holds(never)) for _ in range(2)]

    async def scenario(running: Proxied) -> int:
        status = (await running.client.post("/generate", json=PROMPT)).status_code
        never.set()
        return status

    assert run_proxied(scenario, *engines, answer_timeout_s=0.2) == 504
    assert sum(len(engine.received) for engine in engines) == 1


def test_a_request_that_waits_at_an_engine_which_is_lost_goes_elsewhere() -> None:
    """Its probes fail, and the connection of the request stays open."""
    held = asyncio.Event()
    engines = pair(holds(held))

    async def scenario(running: Proxied) -> object:
        asking = asyncio.create_task(running.client.post("/generate", json=PROMPT))
        await until(lambda: sum(received(engines)))
        stuck = next(engine for engine in engines if engine.received)
        stuck.pages["/ready"] = stuck.pages["/server_info"] = holds(held)
        answer = (await asking).json()
        held.set()
        return answer

    assert run_proxied(scenario, *engines, poll_timeout_s=0.5, max_failed_polls=2) == {"by": "second"}


# --- sessions ---


async def _open(request: Request) -> Response:
    return JSONResponse((await request.json())["session_id"])


def _with_sessions(name: str) -> FakeEngine:
    return FakeEngine(name=name, pages={"/open_session": _open, "/close_session": says(None)})


def test_the_turns_of_a_session_go_where_it_was_opened() -> None:
    engines = [_with_sessions(name) for name in "abc"]

    async def scenario(running: Proxied) -> None:
        for number in range(3):
            opened = {"capacity_of_str_len": 100, "session_id": f"s{number}"}
            answer = await running.client.post("/open_session", json=opened)
            assert (answer.status_code, answer.json()) == (200, f"s{number}")
            turns = [
                (await running.client.post("/generate", json={**PROMPT, "session_params": {"id": f"s{number}"}})).json()
                for _ in range(3)
            ]
            assert turns == [{"by": engines[int(answer.headers[REPLICA_HEADER])].name}] * 3
            closed = await running.client.post("/close_session", json={"session_id": f"s{number}"})
            assert closed.headers[REPLICA_HEADER] == answer.headers[REPLICA_HEADER]

    run_proxied(scenario, *engines)


def test_an_id_that_is_open_is_opened_nowhere_else() -> None:
    """Otherwise a client could take over the turns of another one."""
    engines = [_with_sessions(name) for name in "ab"]

    async def scenario(running: Proxied) -> list[str]:
        opened = {"session_id": "s"}
        both = [running.client.post("/open_session", json=opened) for _ in range(2)]
        answers = [*await asyncio.gather(*both), *[await running.client.post("/open_session", json=opened)] * 2]
        turn = await running.client.post("/generate", json={**PROMPT, "session_params": {"id": "s"}})
        return [answer.headers[REPLICA_HEADER] for answer in (*answers, turn)]

    assert len(set(run_proxied(scenario, *engines))) == 1


@pytest.mark.parametrize("status", [400, 503])
def test_a_session_that_an_engine_does_not_open_is_not_open(status: int) -> None:
    engines = [FakeEngine(pages={"/open_session": says({}, status)}) for _ in range(2)]

    async def scenario(running: Proxied) -> list[int]:
        opened = await running.client.post("/open_session", json={"session_id": "s"})
        turn = await running.client.post("/generate", json={**PROMPT, "session_params": {"id": "s"}})
        return [opened.status_code, turn.status_code]

    assert run_proxied(scenario, *engines) == [status, 400]
    assert sum(engine.asked.count("/open_session") for engine in engines) == 1


def test_an_opening_that_an_engine_may_have_received_is_not_repeated() -> None:
    engines = [FakeEngine(pages={"/open_session": streams(then=fail)}) for _ in range(2)]
    assert ask(*engines, path="/open_session", body={"session_id": "s"}).status_code == 502
    assert sum(engine.asked.count("/open_session") for engine in engines) == 1


def test_a_session_that_was_closed_is_forgotten_and_can_be_opened_again() -> None:
    async def scenario(running: Proxied) -> list[int]:
        named, turn = {"session_id": "s"}, {**PROMPT, "session_params": {"id": "s"}}
        asked = (
            ("/open_session", named),
            ("/close_session", named),
            ("/generate", turn),
            ("/open_session", named),
            ("/generate", turn),
        )
        return [(await running.client.post(path, json=body)).status_code for path, body in asked]

    assert run_proxied(scenario, _with_sessions("a")) == [200, 200, 400, 200, 200]


def test_a_prompt_that_an_engine_has_refused_does_not_count_as_cached() -> None:
    async def scenario(running: Proxied) -> int:
        for _ in range(2):
            await running.client.post("/generate", json={"prompt": list(range(64))})
        [replica] = running.fleet.engines[0].replicas.values()
        return replica.stats.cached_blocks

    assert run_proxied(scenario, FakeEngine(answer=says({}, 400))) == 0


def test_a_turn_of_an_unknown_session_is_refused() -> None:
    engine = FakeEngine()
    answer = ask(engine, body={**PROMPT, "session_params": {"id": "s"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_params.id")
    assert engine.received == []


def test_a_turn_that_an_engine_may_have_received_is_not_repeated() -> None:
    engines = _with_sessions("a"), _with_sessions("b")
    for engine in engines:
        engine.answer = streams(then=fail)

    async def scenario(running: Proxied) -> int:
        await running.client.post("/open_session", json={"session_id": "s"})
        turn = {**PROMPT, "session_params": {"id": "s"}}
        return (await running.client.post("/generate", json=turn)).status_code

    assert run_proxied(scenario, *engines) == 502
    assert sum(len(engine.received) for engine in engines) == 1


def test_a_request_counts_at_its_replica_until_it_has_ended_in_any_way() -> None:
    held = asyncio.Event()

    answers = [says({}), streams(b"data: 1\n\n"), streams(b"data: 1\n\n", then=fail), says({}, 503), holds(held)]
    engine = FakeEngine()

    async def scenario(running: Proxied) -> list[int]:
        [replica] = running.fleet.engines[0].replicas.values()
        counts = []
        for engine.answer in answers:
            before = len(engine.received)
            asking = asyncio.create_task(running.client.post("/generate", json=PROMPT))
            await until(lambda: len(engine.received) > before)  # noqa: B023 - awaited here
            counts.append(running.fleet.num_in_flight(replica))
            if engine.answer is not answers[-1]:
                await asking
            else:
                asking.cancel()
            await until(lambda: not running.endpoint.counters.open)
            counts.append(running.fleet.num_in_flight(replica))
        held.set()
        return counts

    found = run_proxied(scenario, engine)
    assert found[1::2] == [0] * len(answers)
    assert found[-2] == 1


# --- limits and the end ---


def test_requests_beyond_the_limit_are_refused_and_the_others_are_served() -> None:
    may_answer = asyncio.Event()

    engine = FakeEngine(answer=holds(may_answer))

    async def scenario(running: Proxied) -> list[int]:
        first = asyncio.create_task(running.client.post("/generate", json=PROMPT))
        await until(lambda: engine.received)
        refused = await running.client.post("/generate", json=PROMPT)
        may_answer.set()
        return [refused.status_code, (await first).status_code, running.endpoint.counters.refused]

    assert run_proxied(scenario, engine, max_requests=1) == [503, 200, 1]


def test_a_proxy_that_stops_refuses_new_requests_and_ends_open_ones() -> None:
    may_answer = asyncio.Event()

    engine = FakeEngine(answer=holds(may_answer))

    async def scenario(running: Proxied) -> list[object]:
        first = asyncio.create_task(running.client.post("/generate", json=PROMPT))
        await until(lambda: engine.received)
        assert await running.endpoint.drain(0.01) == 1
        draining = asyncio.create_task(running.endpoint.drain(30.0))
        refused = await running.client.post("/generate", json=PROMPT)
        ready = await running.client.get("/ready")
        may_answer.set()
        return [refused.status_code, ready.status_code, (await first).status_code, await draining]

    assert run_proxied(scenario, engine) == [503, 503, 200, 0]


def test_without_an_engine_that_takes_requests_the_answer_is_503() -> None:
    answer = ask(FakeEngine(is_ready=False))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


# --- clients that mean no good ---

HEAD = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\n"


def test_headers_without_end_are_refused() -> None:
    engine = FakeEngine()

    async def scenario(running: Proxied) -> bytes:
        reader, writer = await begin_request(running, HEAD, b"x-long: ", b"x" * 2**17)
        with suppress(ConnectionResetError):  # the server does not read the rest
            while answer := await reader.read(2**16):
                assert b" 400 " in answer.partition(b"\r\n")[0]
        writer.close()
        return (await running.client.post("/generate", json=PROMPT)).content

    assert run_proxied(scenario, engine) == b'{"by":"engine"}'
    assert len(engine.received) == 1


BODY = b'{"prompt":[1,2,3]}'
WITH_LENGTH = b"content-length: 18\r\nconnection: close\r\n\r\n" + BODY
TWO_LENGTHS = b"content-length: 5\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
AMBIGUOUS = {
    "two lengths": (HEAD + b"content-length: 5\r\n" + WITH_LENGTH, b"400"),
    "a negative length": (HEAD + b"content-length: -1\r\n\r\n", b"400"),
    "a length of 20 digits": (HEAD + b"content-length: 99999999999999999999\r\n\r\n", b"413"),
    "two hosts": (HEAD + b"host: other\r\n" + WITH_LENGTH, b"400"),
    "another URL": (HEAD.replace(b"/generate", b"http://127.0.0.1:1/flush_cache") + WITH_LENGTH, b"404"),
    "a length and chunks": (HEAD + TWO_LENGTHS + b"12\r\n" + BODY + b"\r\n0\r\n\r\n", b"200"),
}


def test_what_servers_may_read_in_two_ways_is_refused_or_sent_in_one_way() -> None:
    """Otherwise an engine could see a second request in the body of the first one."""
    engine = FakeEngine()

    async def scenario(running: Proxied) -> None:
        for case, (sent, status) in AMBIGUOUS.items():
            reader, writer = await begin_request(running, sent)
            assert (await reader.readuntil(b"\r\n")).split()[1] == status, case
            writer.close()

    run_proxied(scenario, engine)
    [received] = engine.received
    assert (received.body, "transfer-encoding" in received.headers) == (BODY, False)


def test_a_client_that_stops_halfway_costs_its_place_for_a_limited_time() -> None:
    engine = FakeEngine()

    async def scenario(running: Proxied) -> tuple[bytes, int]:
        reader, writer = await begin_request(running, HEAD, b'content-length: 100\r\n\r\n{"prompt')
        answer = await reader.readuntil(b"\r\n")
        await until(lambda: not running.endpoint.counters.open)
        writer.close()
        return answer, running.endpoint.counters.open

    answer, num_open = run_proxied(scenario, engine, bodies=BodyReceiver(timeout_s=0.1))
    assert (b" 408 " in answer.partition(b"\r\n")[0], num_open) == (True, 0)
    assert engine.received == []


def test_a_client_that_does_not_read_its_stream_ends_the_request_of_the_engine() -> None:
    """The engine is not read further while the client takes nothing, and the place is free after a while."""
    ended, num_sent = asyncio.Event(), 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        try:
            while True:
                num_sent += 1
                yield b"data: " + b"x" * 2**16 + b"\n\n"
                await asyncio.sleep(0)  # so that the server sees its client leave
        finally:
            ended.set()

    async def answer(_: Request) -> Response:
        return StreamingResponse(endless(), media_type="text/event-stream")

    engine = FakeEngine(answer=answer)

    async def scenario(running: Proxied) -> int:
        _, writer = await begin_request(running, HEAD, b"content-length: 2\r\n\r\n{}")
        await ended.wait()
        await until(lambda: not running.endpoint.counters.open)
        writer.close()
        [replica] = running.fleet.engines[0].replicas.values()
        return running.fleet.num_in_flight(replica)

    assert run_proxied(scenario, engine, stall_timeout_s=0.1) == 0
    assert num_sent < 2_000, "sockets hold some megabytes each"


def test_a_client_that_leaves_before_its_prompt_is_known_is_sent_nowhere() -> None:
    held, asked = asyncio.Event(), asyncio.Event()

    async def tokenize(_: Request) -> Response:
        asked.set()
        await held.wait()
        return JSONResponse({"tokens": [1]})

    engine = FakeEngine(pages={"/tokenize": tokenize})

    async def scenario(running: Proxied) -> int:
        asking = asyncio.create_task(running.client.post("/generate", json={"text": "a"}))
        await asked.wait()
        asking.cancel()
        await until(lambda: not running.endpoint.counters.open)
        held.set()
        [replica] = running.fleet.engines[0].replicas.values()
        return replica.stats.picks

    assert run_proxied(scenario, engine) == 0
    assert engine.received == []


def test_the_engine_that_is_given_up_sees_its_client_leave() -> None:
    """So it ends the request, which another engine serves: no prompt is computed twice to its end."""
    left = asyncio.Event()

    async def stuck(request: Request) -> Response:
        while not await request.is_disconnected():
            await asyncio.sleep(0.005)
        left.set()
        return JSONResponse({})

    engines, never = pair(stuck), asyncio.Event()

    async def scenario(running: Proxied) -> object:
        asking = asyncio.create_task(running.client.post("/generate", json=PROMPT))
        await until(lambda: sum(received(engines)))
        lost = next(engine for engine in engines if engine.received)
        lost.pages["/ready"] = lost.pages["/server_info"] = holds(never)
        answer = (await asking).json()
        await left.wait()
        never.set()
        return answer

    assert run_proxied(scenario, *engines, poll_timeout_s=0.3, max_failed_polls=2) == {"by": "second"}


# --- memory ---


def large_answers(size: int) -> tuple[FakeEngine, asyncio.Event]:
    """Return an engine whose answers have ``size`` bytes and end when the event is set."""
    may_end = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'"' + b"x" * (size - 2)
        await may_end.wait()
        yield b'"'

    async def answer(_: Request) -> Response:
        return StreamingResponse(body(), media_type="application/json")

    return FakeEngine(answer=answer), may_end


def test_answers_that_are_held_have_one_bound_and_a_refused_one_is_a_503_and_a_counter() -> None:
    size = 2**18
    engine, may_end = large_answers(size)

    async def scenario(running: Proxied) -> None:
        first = asyncio.create_task(running.client.post("/generate", json=PROMPT))
        await until(lambda: running.fleet.answers.held_bytes == size - 1 - 2**16)
        refused = await running.client.post("/generate", json=PROMPT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "fill the memory" in refused.json()["error"]["message"]
        assert running.endpoint.counters.answers_refused == 1
        may_end.set()
        assert len((await first).content) == size
        await until(lambda: not running.endpoint.counters.open)
        assert running.fleet.answers.held_bytes == 0
        assert (await running.client.post("/generate", json=PROMPT)).status_code == 200
        assert "kv_proxy_answers_refused_total 1.0" in (await running.client.get("/metrics")).text

    run_proxied(scenario, engine, max_answer_bytes=size)


def test_an_event_for_which_there_is_no_memory_ends_its_stream_with_an_error() -> None:
    engine = FakeEngine(answer=streams(b"data: 1\n\n", b"data: " + b"x" * 2**17))

    async def scenario(running: Proxied) -> tuple[bytes, int, int]:
        content = (await running.client.post("/generate", json=PROMPT)).content
        return content, running.endpoint.counters.cut, running.endpoint.counters.answers_refused

    content, num_cut, num_refused = run_proxied(scenario, engine, max_answer_bytes=1)
    first, error, done, rest = content.split(b"\n\n")
    assert (first, done, rest, num_cut, num_refused) == (b"data: 1", b"data: [DONE]", b"", 1, 1)
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503


# --- sessions and pickers ---


@pytest.mark.parametrize(("picker", "stays"), [("sticky", True), ("least-cost", False)])
def test_the_requests_of_a_conversation_stay_on_one_engine_with_the_sticky_picker(picker: str, stays: bool) -> None:
    """Each prompt is new and no request is open, so the lowest cost is that of each engine in turn."""
    engines = [FakeEngine(name=name) for name in "ab"]

    async def scenario(running: Proxied) -> set[str]:
        placed = set[str]()
        for number in range(4):
            body = {"prompt": list(range(1000 * number, 1000 * number + 64)), "conversation": "c"}
            placed.add((await running.client.post("/generate", json=body)).json()["by"])
        return placed

    assert (len(run_proxied(scenario, *engines, picker=picker)) == 1) == stays
