"""``POST /generate`` in the shape of SGLang's native API: text or token ids in, text and token ids out.

As in SGLang, each event of a stream has the whole text so far, because clients may read only the last event, and the
token ids that are new since the previous event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_components import ComponentError
from scheduler_components.values import FinishReason, RequestHints, RequestTimeouts
from scheduler_engine.device.sampling import SamplingParams
from scheduler_engine.frontend.frontend import RequestStream
from scheduler_engine.frontend.http_body import (
    BadBodyError,
    BodyReader,
    BodyReceiver,
    component_error_response,
    json_response,
    run_until_disconnected,
    stream_response,
)
from scheduler_engine.frontend.http_openai import RANK_HEADER, with_headers
from scheduler_engine.frontend.openai_format import (
    Count,
    LogitBias,
    Name,
    Priority,
    Seconds,
    SessionFields,
    Stops,
    TokenId,
    by_tier,
    check_supported,
    sorted_bias,
    stop_strings,
)
from scheduler_engine.frontend.text_frontend import GenerationParams, TextDelta, TextFrontend


class _SamplingParams(msgspec.Struct, frozen=True):
    max_new_tokens: Count = 128  # SGLang's default
    stop: Stops = None
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    stream_interval: Count = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    logit_bias: LogitBias | None = None
    json_schema: str | None = None
    regex: str | None = None
    # Refused, unless their value has no effect.
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "ebnf": (),
    "structural_tag": (),
}


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/generate``."""

    text: str | None = None
    input_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    sampling_params: _SamplingParams | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    rid: Name | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    queue_timeout: Seconds | None = None
    conversation: Name | None = None
    lora_path: Name | None = None
    session_params: SessionFields | None = None
    stream: bool = False
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None

    def params(self) -> GenerationParams:
        """Return the parameters of the output. Raises ConfigError for an invalid value."""
        params = self.sampling_params or _SamplingParams()
        check_supported(params, _NEUTRAL)
        return GenerationParams(
            max_new_tokens=params.max_new_tokens,
            stop_token_ids=params.stop_token_ids or (),
            ignore_eos=params.ignore_eos,
            sampling=SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(0, params.top_k),  # -1 means all tokens in SGLang
                min_p=params.min_p,
                seed=params.sampling_seed,
                logprobs=(self.top_logprobs_num or 0) if self.return_logprob else None,
                logit_bias=sorted_bias(params.logit_bias),
                json_schema=params.json_schema,
                regex=params.regex,
            ),
            hints=RequestHints(priority=self.priority or 0, lora=self.lora_path),
            timeouts=RequestTimeouts(self.queue_timeout, self.timeout),
            stops=stop_strings(params.stop),
            include_stop_str=params.no_stop_trim,
            stream_interval=params.stream_interval if self.stream else 0,
            conversation=self.conversation,
            replica=self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank,
            session=None if self.session_params is None else self.session_params.params(),
        )


def read_generate_body(reader: BodyReader[GenerateBody], text: bytes | bytearray) -> GenerateBody:
    """Decode a body that has either text or token ids. Raises BadBodyError, which names the wrong field."""
    body = reader.read(text)
    if (body.text is None) == (body.input_ids is None):
        raise BadBodyError("input_ids", "give either text or input_ids")
    return body


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateEndpoint:
    """Generate outputs for a prompt. A disconnect of the client aborts its request.

    Attributes:
        text: dispatches the requests.
        bodies: receives the bodies.
    """

    text: TextFrontend
    bodies: BodyReceiver = field(default_factory=BodyReceiver)
    _reader: BodyReader[GenerateBody] = field(default_factory=lambda: BodyReader(GenerateBody, "/generate"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one POST."""
        request = Request(scope, receive)
        try:
            async with self.bodies.receive(request) as received:
                body = read_generate_body(self._reader, received)
            params = with_headers(body.params(), request.headers)
            prompt = body.input_ids if body.text is None else await self.text.encode(body.text)
            stream = self.text.frontend.open_request(self.text.request(prompt or (), params, rid=body.rid))
        except ClientDisconnect:
            return
        except ComponentError as error:
            await component_error_response(error)(scope, receive, send)
            return

        async def answer() -> None:
            answers = _answers(self.text, stream, params)
            response = await (stream_response(answers) if body.stream else _single_response(answers))
            response.headers[RANK_HEADER] = str(stream.replica)
            await response(scope, receive, send)

        async with stream:
            with suppress(ClientDisconnect):  # leaving the block aborts the request
                await run_until_disconnected(receive, answer())


async def _single_response(answers: AsyncGenerator[dict[str, Any], None]) -> Response:
    output_ids: list[int] = []
    logprobs: dict[str, list[Any]] = {name: [] for name in _LOGPROBS}
    try:
        async with aclosing(answers):
            async for answer in answers:
                output_ids += answer["output_ids"]
                for name in _LOGPROBS:
                    logprobs[name] += answer["meta_info"].get(name, ())
    except ComponentError as error:
        return component_error_response(error)
    all_logprobs = {name: logprobs[name] for name in _LOGPROBS if name in answer["meta_info"]}
    return json_response({**answer, "output_ids": output_ids, "meta_info": {**answer["meta_info"], **all_logprobs}})


async def _answers(
    text: TextFrontend, stream: RequestStream, params: GenerationParams
) -> AsyncGenerator[dict[str, Any], None]:
    pieces: list[str] = []
    async with aclosing(text.text_deltas(stream, params)) as updates:
        async for update in updates:
            pieces.append(update.text)
            yield {
                "text": "".join(pieces),
                "output_ids": update.delta.output.token_ids,
                "meta_info": _meta_info(stream, update) | _logprobs(update),
            }


def _meta_info(stream: RequestStream, update: TextDelta) -> dict[str, Any]:
    output = update.delta.output
    return {
        "id": update.delta.rid,
        "finish_reason": _finish_reason(update),
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": update.delta.num_output_tokens,
        "cached_tokens": output.num_cached_tokens,
        "cached_tokens_details": by_tier(output.cached),
        "dp_rank": stream.replica,
    }


_LOGPROBS = ("output_token_logprobs", "output_top_logprobs")


def _logprobs(update: TextDelta) -> dict[str, Sequence[Any]]:
    """Format logprobs as SGLang does: logprob, token, and the token's text, which is None here."""
    output = update.delta.output
    if output.logprobs is None:
        return {}
    pairs = zip(output.logprobs, output.token_ids, strict=True)
    tops = [[(value, token, None) for token, value in top] for top in output.top_logprobs or ()]
    return dict(zip(_LOGPROBS, ([(value, token, None) for value, token in pairs], tops), strict=True))


def _finish_reason(update: TextDelta) -> dict[str, Any] | None:
    if update.finish_reason is None:
        return None
    if update.finish_reason == FinishReason.LENGTH:
        return {"type": "length", "length": update.delta.num_output_tokens}
    if update.finish_reason == FinishReason.STOP:
        return {"type": "stop", "matched": update.matched}
    problem = update.delta.output.problem
    return {"type": "abort"} | ({"message": problem} if problem else {})
