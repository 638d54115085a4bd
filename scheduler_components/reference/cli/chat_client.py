"""A conversation over ``/v1/chat/completions``, as any client has one: streamed, with what each answer cost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from uuid import uuid4

import httpx
import msgspec

from scheduler_components import CachedTokens, ComponentError
from scheduler_components.reference.engine.frontend.http_openai import RANK_HEADER
from scheduler_components.reference.text.text_tokenizer import ChatMessage

__all__ = ["AnswerStats", "ChatSession", "ChatRequestError"]


class ChatRequestError(ComponentError):
    """The engine gave no answer; the text says why."""


class _Delta(msgspec.Struct, frozen=True):
    content: str = ""


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _CachedByTier(msgspec.Struct, frozen=True):
    device: int = 0
    host: int = 0
    storage: int = 0


class _Extension(msgspec.Struct, frozen=True):
    cached_tokens_details: _CachedByTier = _CachedByTier()


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    sglext: _Extension = _Extension()
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True, kw_only=True)
class AnswerStats:
    """What an answer cost.

    Attributes:
        prompt_tokens, output_tokens: of the request.
        cached: of the prompt, by tier.
        rank: data-parallel rank that served it.
        finish_reason: as the API names it.
        first_token_s: from sending to the first token.
        output_s: from the first token to the last.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    rank: str = ""
    finish_reason: str = ""
    first_token_s: float = 0.0
    output_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of the output, without the first token's wait; 0 for a single token."""
        return (self.output_tokens - 1) / self.output_s if self.output_s > 0 else 0.0

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that no tier had."""
        return self.prompt_tokens - self.cached.device - self.cached.host - self.cached.storage


@dataclass(slots=True, kw_only=True)
class ChatSession:
    """Messages so far, and a way to the engine.

    Attributes:
        client: its base URL is the engine's.
        max_tokens: of an answer.
        temperature: 0 is greedy.
        messages: what was said; a question without an answer is not in it.
        clock: monotonic seconds.
    """

    client: httpx.AsyncClient
    max_tokens: int
    temperature: float
    messages: list[ChatMessage] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    _name: str = field(default_factory=lambda: f"chat-{uuid4().hex}")

    async def ask(self, question: str, facts: AnswerStats) -> AsyncIterator[str]:
        """Yield the answer as it comes, and fill ``facts`` in by its end. What was given up is kept as far as it came.

        Raises:
            ChatRequestError: the engine does not answer, or only in part.
        """
        asked = [*self.messages, ChatMessage("user", question)]
        pieces: list[str] = []
        try:
            async for event in self._events(asked, facts):
                if event.choices:
                    pieces.append(event.choices[0].delta.content)
                    yield pieces[-1]
        finally:
            if pieces:
                self.messages = [*asked, ChatMessage("assistant", "".join(pieces))]

    async def _events(self, asked: list[ChatMessage], facts: AnswerStats) -> AsyncIterator[_Event]:
        body = msgspec.json.encode(
            {
                "messages": asked,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_cached_tokens_details": True,
                "conversation": self._name,
            }
        )
        sent_s = self.clock()
        try:
            async with self.client.stream("POST", "/v1/chat/completions", content=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise ChatRequestError(_message_in(await response.aread()))
                facts.rank = response.headers[RANK_HEADER]
                async for event in _events_of(response):
                    self._note(event, facts, sent_s)
                    yield event
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise ChatRequestError(str(error) or type(error).__name__) from error

    def _note(self, event: _Event, facts: AnswerStats, sent_s: float) -> None:
        now_s = self.clock()
        if event.choices:
            if not facts.first_token_s:
                facts.first_token_s = now_s - sent_s
            facts.output_s = now_s - sent_s - facts.first_token_s
            facts.finish_reason = event.choices[0].finish_reason or facts.finish_reason
        if event.usage is not None:
            found = event.sglext.cached_tokens_details
            facts.prompt_tokens, facts.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            facts.cached = CachedTokens(found.device, found.host, found.storage)


async def _events_of(response: httpx.Response) -> AsyncIterator[_Event]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            event = _decode(data)
            if event.error is not None:
                raise ChatRequestError(event.error.message)
            yield event
    raise ChatRequestError("the stream ended without [DONE]")


def _message_in(body: bytes) -> str:
    try:
        event = _decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
    return event.error.message if event.error is not None else body.decode(errors="replace")
