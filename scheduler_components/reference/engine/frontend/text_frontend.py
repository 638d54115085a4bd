"""From text to a dispatched request, and from its tokens back to text: what all routes that generate have in common.

All of it runs in the serving process. What may take long, tokenizing a long prompt, runs in a thread, so that neither a
step of a scheduler nor another client's stream waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from scheduler_components import ConfigError, FinishReason, OutputDelta
from scheduler_components.reference.device.sampling import SamplingLimits, SamplingParams
from scheduler_components.reference.engine.config import EngineConfig
from scheduler_components.reference.engine.frontend.frontend import Frontend, GenerateReqInput, RequestStream
from scheduler_components.reference.engine.messages import pack_tokens
from scheduler_components.reference.text.incremental_detokenizer import IncrementalDetokenizer
from scheduler_components.reference.text.text_tokenizer import ChatMessage, TextTokenizer
from scheduler_components.reference.text.word_tokenizer import WordTokenizer

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "TextFrontend",
    "TextDelta",
    "GenerationParams",
    "open_text_codec",
    "merge_streams",
]

DEFAULT_NEW_TOKENS = 1024
"""Where a client sets no bound and the API none either: an answer of a page or two, and not the whole context."""

_INLINE_CHARACTERS = 2048
"""So much is tokenized in a millisecond or two, which is less than a thread's detour is worth."""


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of each output.

    Attributes:
        max_new_tokens: None for ``DEFAULT_NEW_TOKENS``, or what is left of the context.
        stop_token_ids, ignore_eos: see ``SamplingLimits``.
        sampling: how tokens are chosen.
        stops: strings that end the text.
        include_stop_str: the stop string is part of the text.
        stream_interval: tokens between two pieces of news; 0 for all at the end.
        conversation, replica: see ``GenerateReqInput``.
    """

    max_new_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: SamplingParams = SamplingParams()
    stops: tuple[str, ...] = ()
    include_stop_str: bool = False
    stream_interval: int = 1
    conversation: str | None = None
    replica: int | None = None


class TextDelta(msgspec.Struct, frozen=True):
    """News of one output.

    Attributes:
        text: what is certain of it, beyond what was told before.
        delta: the tokens behind it, and the counts.
        finish_reason: None while the output goes on.
        matched: the string or token that ended it; None where none did.
    """

    text: str
    delta: OutputDelta
    finish_reason: str | None
    matched: str | int | None


T = TypeVar("T")


def open_text_codec(config: EngineConfig) -> TextTokenizer:
    """Return what reads and writes the text of an engine's model; words for a simulated one.

    Raises:
        ConfigError: the model has no tokenizer that can be used.
    """
    model = config.model
    if model is None:
        return WordTokenizer()
    # Imported here: an engine without a model starts without torch.
    from scheduler_components.reference.text.model_tokenizer import open_model_tokenizer

    tokens = model.tokens
    return open_model_tokenizer(model.path, vocab_size=tokens.vocab_size, context_tokens=tokens.context_tokens)


@dataclass(slots=True, kw_only=True, frozen=True)
class TextFrontend:
    """The front, for clients that write text.

    Attributes:
        front: takes the requests.
        codec: of the model.
    """

    front: Frontend
    codec: TextTokenizer

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return await _in_thread(len(text), lambda: self.codec.encode(text))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation. Raises ConfigError where the model has no template for it."""
        num_characters = sum(len(message.content) for message in messages)
        return await _in_thread(num_characters, lambda: self.codec.encode_chat(messages))

    def request(self, prompt: Sequence[int], wanted: GenerationParams, *, rid: str | None = None) -> GenerateReqInput:
        """Return what to open at the front. ``rid`` None lets the front choose an id.

        Raises:
            ConfigError: the prompt has no tokens, or one that the model has not, or does not fit the context.
        """
        return GenerateReqInput(
            rid=rid,
            input_ids=pack_tokens(self._checked(prompt)),
            limits=self._limits(len(prompt), wanted),
            sampling=wanted.sampling,
            stream_interval=1 if wanted.stops else wanted.stream_interval,  # a stop string ends the work at once
            conversation=wanted.conversation,
            replica=wanted.replica,
        )

    async def text_deltas(self, opened: RequestStream, wanted: GenerationParams) -> AsyncGenerator[TextDelta, None]:
        """Return the news of a request as text, up to its end or to a stop string; leaving it early aborts nothing.

        Raises:
            ComponentError: as ``RequestStream.__anext__`` does.
        """
        text = IncrementalDetokenizer(codec=self.codec, stops=wanted.stops, include_stop_str=wanted.include_stop_str)
        async for delta in opened:
            token_ids, reason, matched = delta.output.token_ids, delta.finish_reason, None
            if reason == FinishReason.STOP and token_ids:
                token_ids, matched = token_ids[:-1], token_ids[-1]  # what ends the text is not part of it
            piece = text.push(token_ids, is_last=reason is not None)
            if text.matched is not None:
                yield TextDelta(piece, delta, FinishReason.STOP, text.matched)
                return
            yield TextDelta(piece, delta, reason, matched)

    def _checked(self, prompt: Sequence[int]) -> Sequence[int]:
        if not prompt:
            raise ConfigError("prompt", "0 tokens", "is empty", "give at least one token")
        if (largest := max(prompt)) >= self.codec.vocab_size:
            hint = f"give ids below {self.codec.vocab_size}"
            raise ConfigError("prompt", largest, "is not a token of this model", hint)
        return prompt

    def _limits(self, num_prompt_tokens: int, wanted: GenerationParams) -> SamplingLimits:
        context, max_new_tokens = self.codec.context_tokens, wanted.max_new_tokens
        room = DEFAULT_NEW_TOKENS if context is None else context - num_prompt_tokens
        if context is not None and room < 1:
            problem = f"leaves no room for an answer in the model's context of {context} tokens"
            raise ConfigError("prompt", f"{num_prompt_tokens} tokens", problem, f"send at most {context - 1}")
        if max_new_tokens is None:
            max_new_tokens = min(DEFAULT_NEW_TOKENS, room)
        elif context is not None and max_new_tokens > room:
            problem = f"with a prompt of {num_prompt_tokens} is more than the model's context of {context} tokens"
            raise ConfigError("max_tokens", max_new_tokens, problem, f"ask for at most {room}")
        return SamplingLimits(max_new_tokens, wanted.stop_token_ids, wanted.ignore_eos)


async def _in_thread(num_characters: int, work: Callable[[], T]) -> T:
    return work() if num_characters <= _INLINE_CHARACTERS else await asyncio.to_thread(work)


async def merge_streams(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Return what several iterators give, as it comes, each with its iterator's place; ends after the last of them.

    Raises:
        Exception: of the first that fails; the others are given up.
    """
    if len(streams) == 1:  # the common case needs no tasks
        async for only in streams[0]:
            yield 0, only
        return
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(place: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                arrived.put_nowait((place, item))
        except Exception as error:  # noqa: BLE001 - raised again by who waits
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    pumps = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
