"""Talk over ``/v1/chat/completions`` as any client does: streamed answers with usage statistics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from uuid import uuid4

import httpx
import msgspec

from scheduler_components import ComponentError
from scheduler_components.values import CachedTokens
from scheduler_engine.cli.server_sent_events import event_data
from scheduler_engine.frontend.http_openai import RANK_HEADER
from scheduler_engine.text.text_tokenizer import ChatMessage


class ChatRequestError(ComponentError):
    """The engine returned no answer. The text gives the reason."""


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
    """Usage and latency of an answer.

    Attributes:
        prompt_tokens, output_tokens: tokens of the request.
        cached: cached prompt tokens by tier.
        rank: data-parallel rank that served the request.
        finish_reason: the API's name for the reason.
        first_token_s: seconds from sending the request to the first token.
        output_s: seconds from the first token to the last.
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
        """Output tokens per second after the first token; 0 for a single token."""
        return (self.output_tokens - 1) / self.output_s if self.output_s > 0 else 0.0

    @property
    def num_computed(self) -> int:
        """Prompt tokens that no tier had cached."""
        return self.prompt_tokens - self.cached.device - self.cached.host - self.cached.storage


@dataclass(slots=True, kw_only=True)
class ChatSession:
    """One conversation with the engine.

    Attributes:
        client: HTTP client whose base URL is the engine's.
        max_tokens: longest answer, in tokens.
        temperature: 0 is greedy.
        messages: the messages so far, without questions that got no answer.
        clock: monotonic seconds.
    """

    client: httpx.AsyncClient
    max_tokens: int
    temperature: float
    messages: list[ChatMessage] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    _name: str = field(default_factory=lambda: f"chat-{uuid4().hex}")

    async def ask(self, question: str, facts: AnswerStats) -> AsyncIterator[str]:
        """Yield the answer as it streams, and fill in ``facts``. An interrupted answer stays in ``messages``.

        Raises:
            ChatRequestError: the engine returned no answer, or an incomplete one.
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
                    self._record(event, facts, sent_s)
                    yield event
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise ChatRequestError(str(error) or type(error).__name__) from error

    def _record(self, event: _Event, facts: AnswerStats, sent_s: float) -> None:
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
    async for data in event_data(response):
        event = _decode(data)
        if event.error is not None:
            raise ChatRequestError(event.error.message)
        yield event


def _message_in(body: bytes) -> str:
    try:
        event = _decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
    return event.error.message if event.error is not None else body.decode(errors="replace")
