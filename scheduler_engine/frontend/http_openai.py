"""``/v1/completions`` and ``/v1/chat/completions`` for clients of OpenAI, vLLM and SGLang.

A response is one JSON object, or server-sent events that end with ``[DONE]``. One rank computes all outputs of a
prompt. The response header ``x-data-parallel-rank`` names it. The same header of a request, or ``data_parallel_rank``
in its body, chooses the rank.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_components import ComponentError, ConfigError
from scheduler_components.metrics.request_tracer import read_trace_parent
from scheduler_engine.frontend.frontend import RequestStream
from scheduler_engine.frontend.http_body import (
    BodyReader,
    BodyReceiver,
    component_error_response,
    json_response,
    run_until_disconnected,
    stream_response,
)
from scheduler_engine.frontend.openai_format import (
    MAX_CHOICES,
    ChatBody,
    ChatLogprobs,
    CompletionBody,
    CompletionLogprobs,
    Usage,
    UsageOptions,
)
from scheduler_engine.frontend.text_frontend import (
    GenerationParams,
    TextDelta,
    TextFrontend,
    merge_streams,
)
from scheduler_engine.text.text_tokenizer import TextTokenizer

_MAX_SHOWN = 128

RANK_HEADER = "x-data-parallel-rank"
"""SGLang's header. In a request it names the rank that must serve it, in a response the rank or ranks that did."""


def with_headers(params: GenerationParams, headers: Headers) -> GenerationParams:
    """Return the parameters with what a request's headers add to its body: the rank, and the trace of the client.

    Raises:
        ConfigError: the rank is not a number.
    """
    return msgspec.structs.replace(
        params,
        replica=_requested_replica(headers, params.replica),
        trace=read_trace_parent(headers.get("traceparent"), headers.get("tracestate")),
    )


def _requested_replica(headers: Headers, in_body: int | None) -> int | None:
    """Return the rank that a client has chosen. The header, which a router sets, takes precedence over the body.

    Raises:
        ConfigError: the header is not a number.
    """
    text = headers.get(RANK_HEADER)
    if text is None:
        return in_body
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(RANK_HEADER, text, "is not a rank", "give a number from 0, or leave the header out")
    return int(text)


class _CompletionWriter:
    response_object = event_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, codec: TextTokenizer, num_choices: int, *, echoes: Sequence[str], with_logprobs: bool) -> None:
        self._echoes = dict(enumerate(echoes))  # prompts that are still to be repeated, by output
        self._logprobs = [CompletionLogprobs(codec) for _ in range(num_choices)] if with_logprobs else None

    def event_choice(self, index: int, update: TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes.pop(index, "") + update.text,
            "logprobs": None if self._logprobs is None else self._logprobs[index].format(update),
            **_finish_fields(update),
        }

    def response_choice(self, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**events[-1], "text": "".join(event["text"] for event in events), "logprobs": _join_logprobs(events)}


class _ChatWriter:
    response_object, event_object = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, codec: TextTokenizer, *, with_logprobs: bool) -> None:
        self._logprobs = ChatLogprobs(codec) if with_logprobs else None
        self._started: set[int] = set()

    def event_choice(self, index: int, update: TextDelta) -> dict[str, Any]:
        role = {} if index in self._started else {"role": "assistant"}
        self._started.add(index)
        return {
            "index": index,
            "delta": {**role, "content": update.text},
            "logprobs": None if self._logprobs is None else self._logprobs.format(update),
            **_finish_fields(update),
        }

    def response_choice(self, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
        fields = {name: events[-1][name] for name in ("index", "finish_reason", "matched_stop")}
        message = {"role": "assistant", "content": "".join(event["delta"]["content"] for event in events)}
        return {**fields, "message": message, "logprobs": _join_logprobs(events)}


def _finish_fields(update: TextDelta) -> dict[str, Any]:
    return {"finish_reason": update.finish_reason, "matched_stop": update.matched}


def _join_logprobs(events: Sequence[dict[str, Any]]) -> dict[str, list[Any]] | None:
    joined: dict[str, list[Any]] = {}
    for event in events:
        for name, values in (event["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    return joined or None


@dataclass(slots=True, kw_only=True, frozen=True)
class _Job:
    """The outputs that one body requests.

    Attributes:
        params: parameters of each output.
        prompts: tokens of each prompt.
        num_choices: outputs per prompt.
        writer: formats the choices.
        stream: respond with events.
        usage: which usage to report.
        rid: id of the first request and of the response; the ids of the other requests have a number appended.
    """

    params: GenerationParams
    prompts: Sequence[Sequence[int]]
    num_choices: int
    writer: _CompletionWriter | _ChatWriter
    stream: bool
    usage: UsageOptions
    rid: str


@dataclass(slots=True, kw_only=True, frozen=True)
class _JobStreams:
    """The open requests of a job, in the order of the response's choices."""

    text: TextFrontend
    job: _Job
    model: str
    streams: Sequence[RequestStream]
    created_s: int = field(default_factory=lambda: int(time.time()))

    async def response(self) -> Response:
        events: list[list[dict[str, Any]]] = [[] for _ in self.streams]
        usage, writer = Usage(by_tier=self.job.usage.by_tier), self.job.writer
        try:
            async with aclosing(self._updates()) as updates:
                async for index, update in updates:
                    usage.count(index // self.job.num_choices, index, update)
                    events[index].append(writer.event_choice(index, update))
        except ComponentError as error:
            return component_error_response(error)
        choices = [writer.response_choice(each) for each in events]
        return json_response(self._envelope(writer.response_object, choices, usage.to_json()))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        options, writer = self.job.usage, self.job.writer
        usage, no_usage = Usage(by_tier=options.by_tier), {"usage": None} if options.in_last_event else {}
        async with aclosing(self._updates()) as updates:
            async for index, update in updates:
                usage.count(index // self.job.num_choices, index, update)
                usage_fields = usage.to_json() if options.in_each_event else no_usage
                yield self._envelope(writer.event_object, [writer.event_choice(index, update)], usage_fields)
        if options.in_last_event:
            yield self._envelope(writer.event_object, [], usage.to_json())

    def _updates(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        return merge_streams([self.text.text_deltas(stream, self.job.params) for stream in self.streams])

    def _envelope(self, name: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        envelope = {"id": self.job.rid, "object": name, "created": self.created_s, "model": self.model}
        return {**envelope, "choices": choices, **usage}


async def _serve(text: TextFrontend, model: str, job: _Job, exchange: tuple[Scope, Receive, Send]) -> None:
    """Dispatch the requests of a job and respond. A disconnect of the client or an error aborts all of them."""
    scope, receive, send = exchange

    async def respond(streams: Sequence[RequestStream]) -> None:
        answer = _JobStreams(text=text, job=job, model=job.params.hints.lora or model, streams=streams)
        response = await (stream_response(answer.events()) if job.stream else answer.response())
        ranks = dict.fromkeys(str(stream.replica) for stream in streams)
        response.headers[RANK_HEADER] = ",".join(ranks)
        await response(scope, receive, send)

    async with AsyncExitStack() as stack:
        try:
            streams = await _open_streams(text, job, stack)
        except ComponentError as error:
            await component_error_response(error)(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            await run_until_disconnected(receive, respond(streams))


async def _open_streams(text: TextFrontend, job: _Job, stack: AsyncExitStack) -> list[RequestStream]:
    """Open all requests of a job: those of one prompt on one rank, whose cache has the prompt, each with its seed."""
    requests = [text.request(prompt, job.params) for prompt in job.prompts]  # checks all before it dispatches one
    streams: list[RequestStream] = []
    for request in requests:
        replica, seed = request.replica, request.sampling.seed
        for number in range(job.num_choices):
            stream = text.frontend.open_request(
                msgspec.structs.replace(
                    request,
                    rid=f"{job.rid}-{len(streams)}" if streams else job.rid,
                    sampling=msgspec.structs.replace(request.sampling, seed=None if seed is None else seed + number),
                    replica=replica,
                )
            )
            streams.append(await stack.enter_async_context(stream))
            replica = stream.replica
    return streams


@dataclass(slots=True, kw_only=True, frozen=True)
class OpenAiEndpoint:
    """Generate the outputs of a completion or a chat in OpenAI's form.

    Attributes:
        reader: decodes the bodies of its route.
        text: dispatches the requests.
        model: name of the model in responses.
        bodies: receives the bodies.
    """

    reader: BodyReader[CompletionBody] | BodyReader[ChatBody]
    text: TextFrontend
    model: str
    bodies: BodyReceiver = field(default_factory=BodyReceiver)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one POST."""
        request = Request(scope, receive)
        try:
            async with self.bodies.receive(request) as received:
                job = await self._job(self.reader.read(received), request.headers)
        except ClientDisconnect:
            return
        except ComponentError as error:
            await component_error_response(error)(scope, receive, send)
            return
        await _serve(self.text, self.model, job, (scope, receive, send))

    async def _job(self, body: CompletionBody | ChatBody, headers: Headers) -> _Job:
        params = self._with_adapter(body, body.params())
        writer: _CompletionWriter | _ChatWriter
        with_logprobs = params.sampling.logprobs is not None
        if isinstance(body, ChatBody):
            _check_outputs(params, 1, body.num_choices)
            prompts: list[list[int]] = [await self.text.encode_chat(body.chat_messages())]
            writer = _ChatWriter(self.text.codec, with_logprobs=with_logprobs)
        else:
            given, num_choices = body.prompts(), body.num_choices
            _check_outputs(params, len(given), num_choices)
            prompts = [await self.text.encode(each) if isinstance(each, str) else each for each in given]
            echoed = [each if isinstance(each, str) else self.text.codec.decode(each) for each in given if body.echo]
            writer = _CompletionWriter(
                self.text.codec,
                len(prompts) * num_choices,
                echoes=[echo for echo in echoed for _ in range(num_choices)],
                with_logprobs=with_logprobs,
            )
        return _Job(
            params=with_headers(params, headers),
            prompts=prompts,
            num_choices=body.num_choices,
            writer=writer,
            stream=bool(body.stream),
            usage=body.usage_options,
            rid=f"{writer.id_prefix}-{uuid4().hex}" if body.rid is None else body.rid,
        )

    def _with_adapter(self, body: CompletionBody | ChatBody, params: GenerationParams) -> GenerationParams:
        """Return the parameters with the adapter that ``model`` names, as in vLLM. Without adapters any name will do.

        Raises:
            ConfigError: ``model`` names neither the model nor an adapter, or ``lora_path`` names another adapter.
        """
        hints, adapters = params.hints, self.text.adapters
        if adapters is None or body.model in (None, self.model, hints.lora):
            return params
        if body.model not in adapters:
            # The text of the base model would be a wrong answer to a client of an adapter that was unloaded.
            raise ConfigError("model", body.model[:_MAX_SHOWN], "is neither the model nor an adapter", "see /v1/models")
        if hints.lora is not None:
            problem = f"is another adapter than model={body.model!r}"
            raise ConfigError("lora_path", hints.lora, problem, "leave one of the two out")
        return msgspec.structs.replace(params, hints=msgspec.structs.replace(hints, lora=body.model))


def _check_outputs(params: GenerationParams, num_prompts: int, num_choices: int) -> None:
    num_outputs = num_prompts * num_choices
    if params.session is not None and num_outputs > 1:
        raise ConfigError("n", num_outputs, "outputs cannot be one turn of a session", "request one output")
    if num_outputs > MAX_CHOICES:
        hint = f"request at most {MAX_CHOICES}"
        raise ConfigError("n", num_choices, f"times {num_prompts} prompts are too many outputs", hint)
