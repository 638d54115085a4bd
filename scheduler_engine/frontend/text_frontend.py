"""TextFrontend: turn text into a dispatched request and its tokens back into text, for all generating routes.

Tokenizing a long prompt may take long, so it runs in a thread and does not delay the streams of other clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

import msgspec

from scheduler_components import ConfigError
from scheduler_components.values import (
    FinishReason,
    OutputDelta,
    RequestHints,
    RequestTimeouts,
    SessionParams,
    TraceParent,
)
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.engine.config import EngineConfig
from scheduler_engine.engine.messages import pack_tokens
from scheduler_engine.frontend.frontend import Frontend, GenerateReqInput, RequestStream
from scheduler_engine.text.incremental_detokenizer import IncrementalDetokenizer
from scheduler_engine.text.text_tokenizer import ChatMessage, TextTokenizer
from scheduler_engine.text.word_tokenizer import WordTokenizer

DEFAULT_NEW_TOKENS = 1024
"""Limit of new tokens if neither the client nor the API sets one: one or two pages, not the whole context."""

_MAX_SHOWN = 8

_INLINE_CHARACTERS = 2048
"""Longest text to tokenize without a thread. It takes one or two milliseconds."""


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of each output that a client requests.

    Attributes:
        max_new_tokens: None for ``default_new_tokens``, or less if the context or the pool has less room.
        default_new_tokens: limit if the client gives none.
        stop_token_ids, ignore_eos: see ``SamplingLimits``.
        sampling: how tokens are chosen.
        grammar_field: the client's field with the grammar of ``sampling``; empty if it has the name of its kind.
        hints, timeouts: see ``RequestHints`` and ``RequestTimeouts``.
        stops: strings that end the text.
        include_stop_str: keep the stop string in the text.
        stream_interval: tokens between two deltas; 0 for one delta at the end.
        conversation, replica, trace, session: see ``GenerateReqInput``.
    """

    max_new_tokens: int | None = None
    default_new_tokens: int = DEFAULT_NEW_TOKENS
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: SamplingParams = SamplingParams()
    grammar_field: str = ""
    hints: RequestHints = RequestHints()
    timeouts: RequestTimeouts = RequestTimeouts()
    stops: tuple[str, ...] = ()
    include_stop_str: bool = False
    stream_interval: int = 1
    conversation: str | None = None
    replica: int | None = None
    trace: TraceParent | None = None
    session: SessionParams | None = None


class TextDelta(msgspec.Struct, frozen=True):
    """New text of one output.

    Attributes:
        text: the text beyond the previous delta, without characters that a later token may still change.
        delta: the tokens of this step, and the counts.
        finish_reason: None until the output ends.
        matched: the stop string or token that ended the output, or None.
    """

    text: str
    delta: OutputDelta
    finish_reason: str | None
    matched: str | int | None


T = TypeVar("T")


def open_text_codec(config: EngineConfig) -> TextTokenizer:
    """Open the tokenizer of an engine's model. A simulated model has a tokenizer of words.

    Raises:
        ConfigError: the model has no usable tokenizer.
    """
    model = config.model
    if model is None:
        return WordTokenizer()
    # Imported here, so that an engine without a model starts without torch.
    from scheduler_engine.text.model_tokenizer import open_model_tokenizer

    tokens = model.tokens
    return open_model_tokenizer(model.path, vocab_size=tokens.vocab_size, context_tokens=tokens.context_tokens)


@dataclass(slots=True, kw_only=True, frozen=True)
class TextFrontend:
    """A ``Frontend`` for text.

    Attributes:
        frontend: dispatches the requests.
        codec: tokenizer of the model.
        has_logits: the device computes logits; a simulated one does not, so a bias would have no effect.
        has_grammars: the ranks compile grammars.
        adapters: names of the adapters that requests may name; None if the engine has no adapters.
    """

    frontend: Frontend
    codec: TextTokenizer
    has_logits: bool = False
    has_grammars: bool = False
    adapters: Collection[str] | None = None

    async def encode(self, text: str) -> list[int]:
        """Tokenize a prompt."""
        return await _in_thread(len(text), lambda: self.codec.encode(text))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokenize a conversation. Raises ConfigError if the model has no chat template."""
        num_characters = sum(len(message.content) for message in messages)
        return await _in_thread(num_characters, lambda: self.codec.encode_chat(messages))

    def request(self, prompt: Sequence[int], params: GenerationParams, *, rid: str | None = None) -> GenerateReqInput:
        """Make the request for a prompt. With ``rid`` None the frontend chooses an id.

        Raises:
            ConfigError: the prompt is empty, has a token that the model does not know, or does not fit the context; or
                a bias or a grammar cannot have an effect; or the adapter is unknown, or the session on another replica.
        """
        self._check_bias(params.sampling.logit_bias)
        self._check_grammar(params)
        self._check_adapter(params.hints.lora)
        return GenerateReqInput(
            rid=rid,
            input_ids=pack_tokens(self._check_prompt(prompt)),
            limits=self._limits(len(prompt), params),
            sampling=params.sampling,
            hints=params.hints,
            timeouts=params.timeouts,
            # With stop strings each token is needed as soon as possible, because it may end the request.
            stream_interval=1 if params.stops else params.stream_interval,
            conversation=params.conversation,
            replica=self._replica(params),
            trace=params.trace,
            session=params.session,
        )

    async def text_deltas(self, stream: RequestStream, params: GenerationParams) -> AsyncGenerator[TextDelta, None]:
        """Yield the text of a request up to its end or a stop string. Closing the generator does not abort the request.

        Raises:
            ComponentError: as ``RequestStream.__anext__`` does.
        """
        text = IncrementalDetokenizer(codec=self.codec, stops=params.stops, include_stop_str=params.include_stop_str)
        async for delta in stream:
            token_ids, reason, matched = delta.output.token_ids, delta.finish_reason, None
            if reason == FinishReason.STOP and token_ids:
                token_ids, matched = token_ids[:-1], token_ids[-1]  # a stop token is not part of the text
            piece = text.push(token_ids, is_last=reason is not None)
            if text.matched is not None:
                yield TextDelta(piece, delta, FinishReason.STOP, text.matched)
                return
            yield TextDelta(piece, delta, reason, matched)

    def _check_prompt(self, prompt: Sequence[int]) -> Sequence[int]:
        if not prompt:
            raise ConfigError("prompt", "0 tokens", "is empty", "give at least one token")
        if (largest := max(prompt)) >= self.codec.vocab_size:
            hint = f"give ids below {self.codec.vocab_size}"
            raise ConfigError("prompt", largest, "is not a token of this model", hint)
        return prompt

    def _check_bias(self, logit_bias: Sequence[tuple[int, float]]) -> None:
        if not logit_bias:
            return
        if not self.has_logits:
            raise ConfigError("logit_bias", len(logit_bias), "has no effect on a simulated model", "leave it out")
        if (largest := max(token for token, _ in logit_bias)) >= self.codec.vocab_size:
            hint = f"give ids below {self.codec.vocab_size}"
            raise ConfigError("logit_bias", largest, "is not a token of this model", hint)

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and name not in (self.adapters or ()):
            known = ", ".join(sorted(self.adapters or ())[:_MAX_SHOWN]) or "none"
            raise ConfigError("lora_path", name, "is no loaded adapter", f"give one of: {known}")

    def _replica(self, params: GenerationParams) -> int | None:
        if params.session is None:
            return params.replica
        replica = session_replica(params.session.id, len(self.frontend.leaders))
        if params.replica not in (None, replica):
            problem = f"does not have session {params.session.id!r}, which is on rank {replica}"
            raise ConfigError("data_parallel_rank", params.replica, problem, "leave the rank out")
        return replica

    def _check_grammar(self, params: GenerationParams) -> None:
        key = params.sampling.grammar_key
        if key is None:
            return
        field = params.grammar_field or key.kind
        if not self.has_logits:
            raise ConfigError(field, key.source, "has no effect on a simulated model", "leave it out")
        if not self.has_grammars:
            hint = "install the extra grammar, and do not start the engine with --grammar-backend none"
            raise ConfigError(field, key.source, "needs a grammar backend, and this engine has none", hint)
        if params.ignore_eos:
            problem = f"contradicts {field}: an end-of-sequence token ends the output"
            raise ConfigError("ignore_eos", True, problem, "leave one of the two out")

    def _limits(self, num_prompt_tokens: int, params: GenerationParams) -> SamplingLimits:
        context, max_new_tokens = self.codec.context_tokens, params.max_new_tokens
        is_default = max_new_tokens is None
        room = params.default_new_tokens if context is None else context - num_prompt_tokens
        if context is not None and room < 1:
            problem = f"leaves no room for an answer in the model's context of {context} tokens"
            raise ConfigError("prompt", f"{num_prompt_tokens} tokens", problem, f"send at most {context - 1}")
        if max_new_tokens is None:
            max_new_tokens = min(params.default_new_tokens, room)
        elif context is not None and max_new_tokens > room:
            problem = f"with a prompt of {num_prompt_tokens} is more than the model's context of {context} tokens"
            raise ConfigError("max_tokens", max_new_tokens, problem, f"ask for at most {room}")
        return SamplingLimits(max_new_tokens, params.stop_token_ids, params.ignore_eos, is_default)


def session_replica(session_id: str, num_replicas: int) -> int:
    """Return the replica that has a session. It depends on the id only, so every frontend of an engine agrees."""
    return crc32(session_id.encode()) % num_replicas


async def _in_thread(num_characters: int, work: Callable[[], T]) -> T:
    return work() if num_characters <= _INLINE_CHARACTERS else await asyncio.to_thread(work)


async def merge_streams(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several iterators as they arrive, each with the index of its iterator.

    Raises:
        Exception: the exception of the first iterator that fails; the others are cancelled.
    """
    if len(streams) == 1:  # the common case needs no tasks
        async for item in streams[0]:
            yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                arrived.put_nowait((index, item))
        except Exception as error:  # noqa: BLE001 - the consumer raises it
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            arrival = await arrived.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_open -= 1
            else:
                yield arrival
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
