"""``POST /generate`` in the shape of SGLang's native API: text or token ids in, text and token ids out.

A streamed event carries all text so far, as SGLang's do, whose clients read the last event alone; and the token ids
that are new since the event before, as SGLang's do where it streams tokens alone.
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

from scheduler_components import ComponentError, FinishReason
from scheduler_components.reference.device.sampling import SamplingParams
from scheduler_components.reference.engine.frontend.frontend import RequestStream
from scheduler_components.reference.engine.frontend.http_body import (
    BODY_TIMEOUT_S,
    BadBodyError,
    BodyReader,
    component_error_response,
    json_response,
    read_body,
    run_until_disconnected,
    stream_response,
)
from scheduler_components.reference.engine.frontend.http_openai import RANK_HEADER, requested_replica
from scheduler_components.reference.engine.frontend.openai_format import (
    Count,
    Name,
    Stops,
    TokenId,
    by_tier,
    stop_strings,
)
from scheduler_components.reference.engine.frontend.text_frontend import GenerationParams, TextDelta, TextFrontend

__all__ = ["GenerateBody", "GenerateEndpoint", "read_generate_body"]


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


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``/generate``."""

    text: str | None = None
    input_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    sampling_params: _SamplingParams | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    rid: Name | None = None
    conversation: Name | None = None
    stream: bool = False
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None

    def params(self) -> GenerationParams:
        """Raises ConfigError for what cannot be served."""
        params = self.sampling_params or _SamplingParams()
        return GenerationParams(
            max_new_tokens=params.max_new_tokens,
            stop_token_ids=params.stop_token_ids or (),
            ignore_eos=params.ignore_eos,
            sampling=SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(0, params.top_k),  # -1 is SGLang's word for all
                min_p=params.min_p,
                seed=params.sampling_seed,
                logprobs=(self.top_logprobs_num or 0) if self.return_logprob else None,
            ),
            stops=stop_strings(params.stop),
            include_stop_str=params.no_stop_trim,
            stream_interval=params.stream_interval if self.stream else 0,
            conversation=self.conversation,
            replica=self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank,
        )


def read_generate_body(reader: BodyReader[GenerateBody], text: bytes) -> GenerateBody:
    """Read a body that has either text or token ids. Raises BadBodyError, naming the field that is wrong."""
    body = reader.read(text)
    if (body.text is None) == (body.input_ids is None):
        raise BadBodyError("input_ids", "give either text or input_ids")
    return body


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateEndpoint:
    """The ASGI application behind the route; a client that goes away aborts its request.

    Attributes:
        text: takes the requests.
        body_timeout_s: a body that is not whole by then gets 408, and its connection ends.
    """

    text: TextFrontend
    body_timeout_s: float = BODY_TIMEOUT_S
    _reader: BodyReader[GenerateBody] = field(default_factory=lambda: BodyReader(GenerateBody, "/generate"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST."""
        request = Request(scope, receive)
        try:
            body = read_generate_body(self._reader, await read_body(request, self.body_timeout_s))
            wanted = body.params()
            wanted = msgspec.structs.replace(wanted, replica=requested_replica(request.headers, wanted.replica))
            prompt = body.input_ids if body.text is None else await self.text.encode(body.text)
            opened = self.text.frontend.open_request(self.text.request(prompt or (), wanted, rid=body.rid))
        except ClientDisconnect:
            return
        except ComponentError as error:
            await component_error_response(error)(scope, receive, send)
            return

        async def answer() -> None:
            told = _answers(self.text, opened, wanted)
            response = await (stream_response(told) if body.stream else _whole(told))
            response.headers[RANK_HEADER] = str(opened.replica)
            await response(scope, receive, send)

        async with opened:
            with suppress(ClientDisconnect):  # leaving the block aborts the request
                await run_until_disconnected(receive, answer())


async def _whole(answers: AsyncGenerator[dict[str, Any], None]) -> Response:
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
    told = {name: logprobs[name] for name in _LOGPROBS if name in answer["meta_info"]}
    return json_response({**answer, "output_ids": output_ids, "meta_info": {**answer["meta_info"], **told}})


async def _answers(
    text: TextFrontend, opened: RequestStream, wanted: GenerationParams
) -> AsyncGenerator[dict[str, Any], None]:
    written: list[str] = []
    async with aclosing(text.text_deltas(opened, wanted)) as news:
        async for each in news:
            written.append(each.text)
            yield {
                "text": "".join(written),
                "output_ids": each.delta.output.token_ids,
                "meta_info": _meta_info(opened, each) | _logprobs(each),
            }


def _meta_info(opened: RequestStream, news: TextDelta) -> dict[str, Any]:
    output = news.delta.output
    return {
        "id": news.delta.rid,
        "finish_reason": _finish_reason(news),
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": news.delta.num_output_tokens,
        "cached_tokens": output.num_cached_tokens,
        "cached_tokens_details": by_tier(output.cached),
        "dp_rank": opened.replica,
    }


_LOGPROBS = ("output_token_logprobs", "output_top_logprobs")


def _logprobs(news: TextDelta) -> dict[str, Sequence[Any]]:
    """As SGLang tells them: logprob, token, and its text, which is left out."""
    output = news.delta.output
    if output.logprobs is None:
        return {}
    pairs = zip(output.logprobs, output.token_ids, strict=True)
    tops = [[(value, token, None) for token, value in top] for top in output.top_logprobs or ()]
    return dict(zip(_LOGPROBS, ([(value, token, None) for value, token in pairs], tops), strict=True))


def _finish_reason(news: TextDelta) -> dict[str, Any] | None:
    if news.finish_reason is None:
        return None
    if news.finish_reason == FinishReason.LENGTH:
        return {"type": "length", "length": news.delta.num_output_tokens}
    if news.finish_reason == FinishReason.STOP:
        return {"type": "stop", "matched": news.matched}
    return {"type": "abort"}
