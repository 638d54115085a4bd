"""``/generate``: good requests are answered whole or streamed, bad ones get a status and a sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from kit.asgi import ask
from kit.recording_leader import RecordingLeader

from scheduler_components.values import (
    FinishReason,
    OutputBatch,
    OutputDelta,
    RequestTimeouts,
    TokenOutput,
    TraceParent,
)
from scheduler_engine.engine.messages import AbortRequest, RequestRefused, SubmitRequest, unpack_tokens
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_engine.frontend.frontend import Frontend
from scheduler_engine.frontend.http_generate import GenerateEndpoint
from scheduler_engine.frontend.text_frontend import TextFrontend
from scheduler_engine.text.word_tokenizer import WordTokenizer


class EchoingLeader(RecordingLeader):
    """A replica that immediately returns the prompt of each request, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.frontend: Frontend | None = None
        self.answer: Callable[[SubmitRequest], None] = self.echo

    def send(self, frame: bytes, flags: int) -> None:
        super().send(frame, flags)
        command = self.commands[-1]
        if isinstance(command, SubmitRequest):
            asyncio.get_running_loop().call_soon(self.answer, command)

    def echo(self, command: SubmitRequest) -> None:
        prompt = unpack_tokens(command.input_ids)
        for place, token in enumerate(prompt, start=1):
            reason = FinishReason.LENGTH if place == len(prompt) else None
            output = TokenOutput((token,), num_prompt_tokens=len(prompt))
            self.frontend.process_outputs(
                OutputBatch(place, (OutputDelta(command.rid, place - 1, place, reason, output),))
            )

    def fail(self, command: SubmitRequest) -> None:
        delta = OutputDelta(command.rid, 0, 0, FinishReason.ERROR, TokenOutput())
        self.frontend.process_outputs(OutputBatch(0, (delta,)))

    def refuse(self, command: SubmitRequest) -> None:
        self.frontend.receive(RequestRefused(command.rid, "too long for the pool"))

    def say_nothing(self, command: SubmitRequest) -> None:
        pass


def make_front() -> tuple[Frontend, EchoingLeader]:
    leader = EchoingLeader()
    frontend = Frontend(leaders=[leader], dispatcher=LoadDispatcher(replicas=[ReplicaLoad()]))  # type: ignore[arg-type, list-item]
    leader.frontend = frontend
    return frontend, leader


def endpoint(frontend: Frontend) -> GenerateEndpoint:
    return GenerateEndpoint(text=TextFrontend(frontend=frontend, codec=WordTokenizer()))


def post(frontend: Frontend, body: bytes | dict[str, Any], **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(endpoint(frontend), "/generate", content=content, headers=headers)


def test_a_response_has_all_tokens_and_the_counts() -> None:
    frontend, _ = make_front()
    response = post(frontend, {"input_ids": [5, 6, 7], "rid": "mine"})
    assert response.status_code == 200
    assert response.json() == {
        "text": " da de di",
        "output_ids": [5, 6, 7],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "cached_tokens_details": {"device": 0, "host": 0, "storage": 0},
            "dp_rank": 0,
        },
    }


def test_a_streamed_response_is_events_of_new_tokens_and_done() -> None:
    frontend, _ = make_front()
    response = post(frontend, {"input_ids": [5, 6, 7], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    answers = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [answer["output_ids"] for answer in answers] == [[5], [6], [7]]
    assert [answer["meta_info"]["finish_reason"] for answer in answers[:2]] == [None, None]


def test_all_parameters_of_a_body_reach_the_scheduler() -> None:
    frontend, leader = make_front()
    params = {"max_new_tokens": 7, "stop_token_ids": [1, 2], "ignore_eos": True, "stream_interval": 5}
    post(frontend, {"input_ids": [9], "sampling_params": params, "conversation": "chat", "stream": True})
    (command,) = leader.commands
    assert isinstance(command, SubmitRequest)
    limits = command.limits
    assert (limits.max_new_tokens, limits.stop_token_ids, limits.ignore_eos) == (7, (1, 2), True)
    assert command.stream_interval == 5


def test_the_request_belongs_to_the_trace_of_its_client() -> None:
    frontend, leader = make_front()
    post(frontend, {"input_ids": [9]}, traceparent="00-1", tracestate="a=b")
    post(frontend, {"input_ids": [9]}, tracestate="a=b")
    assert [command.trace for command in leader.commands] == [TraceParent("00-1", "a=b"), None]


def test_a_request_without_streaming_gets_one_delta() -> None:
    frontend, leader = make_front()
    post(frontend, {"input_ids": [9]})
    (command,) = leader.commands
    assert isinstance(command, SubmitRequest)
    assert command.stream_interval == 0


BAD_BODIES = [
    (b"", "body"),
    (b"{", "body"),
    (b"\xff", "body"),
    (b"[" * 100_000, "body"),
    (b"[]", "body"),
    ({}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [1, -1]}, "input_ids"),
    ({"input_ids": [2**32]}, "input_ids"),
    ({"input_ids": "text"}, "input_ids"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"text": ""}, "prompt"),
    ({"input_ids": [1], "data_parallel_rank": 1}, "data_parallel_rank"),
    ({"input_ids": [1], "sampling_params": {"stop": ""}}, "stop"),
    ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "regex"),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, "n"),
    ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "stop"),
    ({"input_ids": [1], "text": "hello"}, "text"),
    ({"input_ids": [1], "rid": ""}, "rid"),
    ({"input_ids": [1], "rid": "x" * 129}, "rid"),
    ({"input_ids": [1], "stream": 1}, "stream"),
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES)
def test_a_bad_request_is_400_and_names_the_field(body: bytes | dict[str, Any], field: str) -> None:
    frontend, leader = make_front()
    response = post(frontend, body)
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]
    assert leader.commands == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_scheduler_refuses_is_400_with_its_reason(stream: bool) -> None:
    frontend, leader = make_front()
    leader.answer = leader.refuse
    response = post(frontend, {"input_ids": [1], "stream": stream})
    assert response.status_code == 400
    assert "too long for the pool" in response.json()["error"]["message"]


def exchange(frontend: Frontend, *messages: dict[str, Any]) -> list[Any]:
    """Call the endpoint as a server does, with what a client does; what would be sent to it."""
    arriving = iter(messages)
    sent: list[Any] = []

    async def receive() -> Any:
        return next(arriving)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    asyncio.run(asyncio.wait_for(endpoint(frontend)(scope, receive, send), timeout=10))
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_could_not_be_computed_is_500(stream: bool) -> None:
    frontend, leader = make_front()
    leader.answer = leader.fail
    response = post(frontend, {"input_ids": [1], "stream": stream})
    assert response.status_code == 500
    assert "could not be computed" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status"),
    [(FinishReason.REFUSED, 400), (FinishReason.QUEUE_TIMEOUT, 503), (FinishReason.TIMEOUT, 504)],
    ids=str,
)
def test_a_request_that_ends_before_its_first_token_says_why(reason: FinishReason, status: int, stream: bool) -> None:
    frontend, leader = make_front()
    output = TokenOutput(problem="the limit, in words")
    leader.answer = lambda command: frontend.process_outputs(
        OutputBatch(0, (OutputDelta(command.rid, 0, 0, reason, output),))
    )
    response = post(frontend, {"input_ids": [1], "stream": stream, "timeout": 2, "queue_timeout": 0.5})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "the limit, in words"
    (command,) = leader.commands
    assert isinstance(command, SubmitRequest)
    assert command.timeouts == RequestTimeouts(0.5, 2.0)


def test_a_request_keeps_the_tokens_that_it_has_when_its_time_is_over() -> None:
    frontend, leader = make_front()

    def answer(command: SubmitRequest) -> None:
        for number, reason in enumerate((None, FinishReason.TIMEOUT)):
            output = TokenOutput((5,)[number:], num_prompt_tokens=1, problem="timeout=2: too long" if reason else "")
            delta = OutputDelta(command.rid, number, 1, reason, output)
            frontend.process_outputs(OutputBatch(number, (delta,)))

    leader.answer = answer
    response = post(frontend, {"input_ids": [1], "timeout": 2.0})
    assert response.status_code == 200
    assert response.json()["output_ids"] == [5]
    assert response.json()["meta_info"]["finish_reason"] == {"type": "abort", "message": "timeout=2: too long"}


@pytest.mark.parametrize("field", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("value", [0, -1, "soon", 1e300])
def test_a_limit_that_is_no_number_of_seconds_is_refused(field: str, value: object) -> None:
    frontend, leader = make_front()
    response = post(frontend, {"input_ids": [1], field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert not leader.commands


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_the_request(stream: bool) -> None:
    frontend, leader = make_front()
    leader.answer = leader.say_nothing
    body = json.dumps({"input_ids": [1], "rid": "gone", "stream": stream}).encode()
    sent = exchange(frontend, {"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"})
    assert leader.commands[-1] == AbortRequest("gone")
    assert sent == []


def test_a_disconnect_within_the_body_dispatches_nothing() -> None:
    frontend, leader = make_front()
    half = {"type": "http.request", "body": b'{"input', "more_body": True}
    assert exchange(frontend, half, {"type": "http.disconnect"}) == []
    assert leader.commands == []


def test_a_disconnect_between_two_tokens_aborts_the_request() -> None:
    """A server of ASGI 2.4 reports a disconnect by failing to send."""
    frontend, leader = make_front()

    def answer_one_token(command: SubmitRequest) -> None:
        frontend.process_outputs(OutputBatch(0, (OutputDelta(command.rid, 0, 1, None, TokenOutput((7,), 1)),)))

    leader.answer = answer_one_token
    body = json.dumps({"input_ids": [1], "rid": "gone", "stream": True}).encode()
    gone = asyncio.Event()

    async def receive() -> Any:
        if not gone.is_set():
            gone.set()
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.Future()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the connection is closed")

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    scope["asgi"] = {"spec_version": "2.4"}
    asyncio.run(asyncio.wait_for(endpoint(frontend)(scope, receive, send), timeout=10))
    assert leader.commands[-1] == AbortRequest("gone")
