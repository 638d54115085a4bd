"""``/v1/completions`` and ``/v1/chat/completions`` as OpenAI's clients, and those of vLLM and SGLang, use them.

Text goes in and comes out, whole or as server-sent events that end with ``[DONE]``. All outputs of one prompt are
computed by one rank, which the answer's header ``x-data-parallel-rank`` names; the same header of a request, or
``data_parallel_rank`` in its body, chooses the rank.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_components import ComponentError, ConfigError
from scheduler_components.reference.engine.frontend.frontend import RequestStream
from scheduler_components.reference.engine.frontend.http_body import (
    BODY_TIMEOUT_S,
    BodyReader,
    component_error_response,
    json_response,
    read_body,
    run_until_disconnected,
    stream_response,
)
from scheduler_components.reference.engine.frontend.openai_format import (
    MAX_CHOICES,
    ChatBody,
    ChatLogprobs,
    CompletionBody,
    CompletionLogprobs,
    Usage,
    UsageOptions,
)
from scheduler_components.reference.engine.frontend.text_frontend import (
    GenerationParams,
    TextDelta,
    TextFrontend,
    merge_streams,
)
from scheduler_components.reference.text.text_tokenizer import TextTokenizer

__all__ = [
    "RANK_HEADER",
    "ChatEndpoint",
    "CompletionEndpoint",
    "requested_replica",
]

RANK_HEADER = "x-data-parallel-rank"
"""SGLang's: of a request, the rank that must serve it; of an answer, the rank or ranks that did."""


def requested_replica(headers: Headers, in_body: int | None) -> int | None:
    """The rank that a client has chosen: in the header, which a router writes, or in the body.

    Raises:
        ConfigError: the header is no number.
    """
    text = headers.get(RANK_HEADER)
    if text is None:
        return in_body
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(RANK_HEADER, text, "is not a rank", "give a number from 0, or leave the header out")
    return int(text)


class _Writer(Protocol):
    """How one route words what its outputs say."""

    whole_object: str
    event_object: str

    def piece(self, place: int, news: TextDelta) -> dict[str, Any]:
        """The next piece of output ``place``, as an event's choice."""
        ...

    def whole(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An output from all its pieces."""
        ...


class _CompletionWriter:
    whole_object = event_object = "text_completion"

    def __init__(self, codec: TextTokenizer, num_choices: int, *, echoes: Sequence[str], with_logprobs: bool) -> None:
        self._echoes = dict(enumerate(echoes))  # each is written once
        self._logprobs = [CompletionLogprobs(codec) for _ in range(num_choices)] if with_logprobs else None

    def piece(self, place: int, news: TextDelta) -> dict[str, Any]:
        return {
            "index": place,
            "text": self._echoes.pop(place, "") + news.text,
            "logprobs": None if self._logprobs is None else self._logprobs[place].format(news),
            **_end(news),
        }

    def whole(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**pieces[-1], "text": "".join(each["text"] for each in pieces), "logprobs": _joined_logprobs(pieces)}


class _ChatWriter:
    whole_object, event_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: TextTokenizer, *, with_logprobs: bool) -> None:
        self._logprobs = ChatLogprobs(codec) if with_logprobs else None
        self._begun: set[int] = set()

    def piece(self, place: int, news: TextDelta) -> dict[str, Any]:
        role = {} if place in self._begun else {"role": "assistant"}
        self._begun.add(place)
        return {
            "index": place,
            "delta": {**role, "content": news.text},
            "logprobs": None if self._logprobs is None else self._logprobs.format(news),
            **_end(news),
        }

    def whole(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(each["delta"]["content"] for each in pieces)
        told = {name: pieces[-1][name] for name in ("index", "finish_reason", "matched_stop")}
        message = {"role": "assistant", "content": text}
        return {**told, "message": message, "logprobs": _joined_logprobs(pieces)}


def _end(news: TextDelta) -> dict[str, Any]:
    return {"finish_reason": news.finish_reason, "matched_stop": news.matched}


def _joined_logprobs(pieces: Sequence[dict[str, Any]]) -> dict[str, list[Any]] | None:
    joined: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in (piece["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    return joined or None


@dataclass(slots=True, kw_only=True, frozen=True)
class _Job:
    """What one body asks for.

    Attributes:
        wanted: of each output.
        prompts: tokens of each prompt.
        num_choices: outputs per prompt.
        writer: words the answer.
        stream: as events.
        usage: what is told of it.
        rid: of the first request; the next ones add a number.
    """

    wanted: GenerationParams
    prompts: Sequence[Sequence[int]]
    num_choices: int
    writer: _Writer
    stream: bool
    usage: UsageOptions
    rid: str | None

    @classmethod
    def of(
        cls,
        asked: CompletionBody | ChatBody,
        wanted: GenerationParams,
        headers: Headers,
        prompts: Sequence[Sequence[int]],
        writer: _Writer,
    ) -> _Job:
        return cls(
            wanted=msgspec.structs.replace(wanted, replica=requested_replica(headers, wanted.replica)),
            prompts=prompts,
            num_choices=asked.num_choices,
            writer=writer,
            stream=bool(asked.stream),
            usage=asked.usage_options,
            rid=asked.rid,
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class _Answering:
    """One job under way: its open requests, in the order of the answer's choices."""

    text: TextFrontend
    job: _Job
    model: str
    opened: Sequence[RequestStream]
    id: str = field(default_factory=lambda: uuid4().hex)
    created_s: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> Response:
        pieces: list[list[dict[str, Any]]] = [[] for _ in self.opened]
        usage = Usage(by_tier=self.job.usage.by_tier)
        try:
            async with aclosing(self._news()) as news:
                async for place, each in news:
                    usage.count(place // self.job.num_choices, place, each)
                    pieces[place].append(self.job.writer.piece(place, each))
        except ComponentError as error:
            return component_error_response(error)
        choices = [self.job.writer.whole(each) for each in pieces]
        return json_response(self._envelope(self.job.writer.whole_object, choices, usage.to_json()))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        wanted, name = self.job.usage, self.job.writer.event_object
        usage, silence = Usage(by_tier=wanted.by_tier), {"usage": None} if wanted.in_last_event else {}
        async with aclosing(self._news()) as news:
            async for place, each in news:
                usage.count(place // self.job.num_choices, place, each)
                told = usage.to_json() if wanted.in_each_event else silence
                yield self._envelope(name, [self.job.writer.piece(place, each)], told)
        if wanted.in_last_event:
            yield self._envelope(name, [], usage.to_json())

    def _news(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        return merge_streams([self.text.text_deltas(opened, self.job.wanted) for opened in self.opened])

    def _envelope(self, name: str, choices: list[dict[str, Any]], rest: dict[str, Any]) -> dict[str, Any]:
        prefix = "cmpl" if name == _CompletionWriter.whole_object else "chatcmpl"
        envelope = {"id": f"{prefix}-{self.id}", "object": name, "created": self.created_s, "model": self.model}
        return {**envelope, "choices": choices, **rest}


async def _serve(text: TextFrontend, model: str, job: _Job, exchange: tuple[Scope, Receive, Send]) -> None:
    """Dispatch a job's requests and answer; a client that goes away aborts all of them, and so does an error."""
    scope, receive, send = exchange

    async def answer() -> None:
        response = await (stream_response(answering.events()) if job.stream else answering.whole())
        ranks = dict.fromkeys(str(each.replica) for each in answering.opened)
        response.headers[RANK_HEADER] = ",".join(ranks)
        await response(scope, receive, send)

    async with AsyncExitStack() as stack:
        try:
            opened = await _open_all(text, job, stack)
        except ComponentError as error:
            await component_error_response(error)(scope, receive, send)
            return
        answering = _Answering(text=text, job=job, model=model, opened=opened)
        with suppress(ClientDisconnect):
            await run_until_disconnected(receive, answer())


async def _open_all(text: TextFrontend, job: _Job, stack: AsyncExitStack) -> list[RequestStream]:
    """All outputs of a prompt go to one rank, whose cache holds the prompt; each has draws of its own."""
    requests = [text.request(prompt, job.wanted) for prompt in job.prompts]  # all are good before one is dispatched
    opened: list[RequestStream] = []
    for request in requests:
        replica, seed = request.replica, request.sampling.seed
        for number in range(job.num_choices):
            one = text.frontend.open_request(
                msgspec.structs.replace(
                    request,
                    rid=job.rid if job.rid is None or not opened else f"{job.rid}-{len(opened)}",
                    sampling=msgspec.structs.replace(request.sampling, seed=None if seed is None else seed + number),
                    replica=replica,
                )
            )
            opened.append(await stack.enter_async_context(one))
            replica = one.replica
    return opened


def _check_number(num_prompts: int, num_choices: int) -> None:
    if num_prompts * num_choices > MAX_CHOICES:
        hint = f"ask for at most {MAX_CHOICES} at once"
        raise ConfigError("n", num_choices, f"times {num_prompts} prompts are too many outputs", hint)


class _Endpoint(Protocol):
    """What differs between the two routes is how a body becomes a job."""

    @property
    def text(self) -> TextFrontend:
        """Takes the requests."""
        ...

    @property
    def model(self) -> str:
        """What answers call it."""
        ...

    @property
    def body_timeout_s(self) -> float:
        """A body that is not whole by then gets 408, and its connection ends."""
        ...

    async def job(self, body: bytes, headers: Headers) -> _Job:
        """Read and tokenize a body. Raises BadBodyError and ConfigError for what cannot be served."""
        ...


async def _answer(endpoint: _Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    try:
        body = await read_body(request, endpoint.body_timeout_s)
        job = await endpoint.job(body, request.headers)
    except ClientDisconnect:
        return
    except ComponentError as error:
        await component_error_response(error)(scope, receive, send)
        return
    await _serve(endpoint.text, endpoint.model, job, (scope, receive, send))


@dataclass(slots=True, kw_only=True, frozen=True)
class CompletionEndpoint:
    """The ASGI application behind ``/v1/completions``.

    Attributes:
        text: takes the requests.
        model: what answers call it.
        body_timeout_s: a body that is not whole by then gets 408, and its connection ends.
    """

    text: TextFrontend
    model: str
    body_timeout_s: float = BODY_TIMEOUT_S
    _reader: BodyReader[CompletionBody] = field(default_factory=lambda: BodyReader(CompletionBody, "/v1/completions"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST."""
        await _answer(self, scope, receive, send)

    async def job(self, body: bytes, headers: Headers) -> _Job:
        asked = self._reader.read(body)
        wanted, given, number = asked.params(), asked.prompts(), asked.num_choices
        _check_number(len(given), number)
        codec = self.text.codec
        prompts = [await self.text.encode(each) if isinstance(each, str) else each for each in given]
        echoes = [each if isinstance(each, str) else codec.decode(each) for each in given] if asked.echo else []
        writer = _CompletionWriter(
            codec,
            len(prompts) * number,
            echoes=[echo for echo in echoes for _ in range(number)],
            with_logprobs=wanted.sampling.logprobs is not None,
        )
        return _Job.of(asked, wanted, headers, prompts, writer)


@dataclass(slots=True, kw_only=True, frozen=True)
class ChatEndpoint:
    """The ASGI application behind ``/v1/chat/completions``; attributes as of ``CompletionEndpoint``."""

    text: TextFrontend
    model: str
    body_timeout_s: float = BODY_TIMEOUT_S
    _reader: BodyReader[ChatBody] = field(default_factory=lambda: BodyReader(ChatBody, "/v1/chat/completions"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST."""
        await _answer(self, scope, receive, send)

    async def job(self, body: bytes, headers: Headers) -> _Job:
        asked = self._reader.read(body)
        wanted = asked.params()
        prompt = await self.text.encode_chat(asked.chat_messages())
        writer = _ChatWriter(self.text.codec, with_logprobs=wanted.sampling.logprobs is not None)
        return _Job.of(asked, wanted, headers, [prompt], writer)
