"""Bodies and response fields of ``/v1/completions`` and ``/v1/chat/completions``, without I/O.

The bodies have OpenAI's fields and those that vLLM and SGLang add: ``top_k``, ``min_p``, ``stop_token_ids``,
``ignore_eos``, ``json_schema``, ``regex``, ``data_parallel_rank`` and its newer name ``routed_dp_rank``. ``timeout``
and ``queue_timeout`` limit a request in seconds; both are this engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from scheduler_components import ConfigError
from scheduler_components.values import CachedTokens, RequestHints, RequestTimeouts, SessionParams
from scheduler_engine.device.sampling import SamplingParams
from scheduler_engine.frontend.text_frontend import GenerationParams, TextDelta
from scheduler_engine.text.text_tokenizer import ChatMessage, TextTokenizer

MAX_CHOICES = 128
"""Limit of prompts times ``n`` of one body. OpenAI has the same limit of ``n``."""

_ANY_OBJECT = '{"type": "object"}'
_MAX_STOPS = 16
_MAX_TENANT_CHARACTERS = 128  # as of other names; a longer user shares the tenant of its beginning
_MAX_SHOWN = 64
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_DEFAULT_TEMPERATURE = 1.0  # OpenAI's

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""A larger one runs first, as in SGLang. vLLM's order is the opposite."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=10**9)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Stop: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Stops: TypeAlias = _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=_MAX_STOPS)] | None


LogitBias: TypeAlias = Annotated[dict[TokenId, float], msgspec.Meta(max_length=1024)]
"""Bias per token id. JSON has texts as names, so each id is a text of digits there."""


class SessionFields(msgspec.Struct, frozen=True):
    """SGLang's ``session_params``: see ``SessionParams``."""

    id: Name
    rid: Name | None = None
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None

    def params(self) -> SessionParams:
        """Return the fields as a value."""
        return SessionParams(self.id, self.rid, self.offset, self.replace, self.drop_previous_output)


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _JsonSchema(msgspec.Struct, frozen=True):
    name: Name
    schema: dict[str, msgspec.Raw] | None = None
    description: str | None = None  # for a model that is given its schema as text
    strict: bool | None = None  # the output always matches


class _ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: _JsonSchema | None = None

    def schema(self) -> str | None:
        """Return the JSON schema of the output; None for any text. Raises ConfigError for an unknown type."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return _ANY_OBJECT
        if self.type != "json_schema":
            problem = "is not supported by this engine"
            raise ConfigError(
                "response_format.type", self.type[:_MAX_SHOWN], problem, "give text, json_object or json_schema"
            )
        if self.json_schema is None or self.json_schema.schema is None:
            hint = "give the schema of the output"
            raise ConfigError("response_format.json_schema.schema", None, "is missing", hint)
        return msgspec.json.encode(self.json_schema.schema).decode()


class UsageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which token usage a client requests.

    Attributes:
        in_last_event, in_each_event: in a separate last event of a stream, and in every event.
        by_tier: split the cached tokens by tier.
    """

    in_last_event: bool
    in_each_event: bool
    by_tier: bool


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both routes."""

    model: str | None = None  # names an adapter, as in vLLM; without adapters any name means the served model
    lora_path: Name | None = None
    session_params: SessionFields | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stops = None
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)] | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    queue_timeout: Seconds | None = None
    rid: Name | None = None
    conversation: Name | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    response_format: _ResponseFormat | None = None
    json_schema: str | None = None
    regex: str | None = None
    return_cached_tokens_details: bool | None = None
    # Refused, unless their value has no effect: see ``check_supported``.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    structured_outputs: dict[str, msgspec.Raw] | None = None
    ebnf: str | None = None
    prompt_logprobs: int | None = None

    @property
    def num_choices(self) -> int:
        """Number of outputs per prompt."""
        return self.n or 1

    @property
    def usage_options(self) -> UsageOptions:
        """The options of usage reports."""
        options = self.stream_options or _StreamOptions()
        return UsageOptions(
            in_last_event=options.include_usage,
            in_each_event=options.include_usage and options.continuous_usage_stats,
            by_tier=bool(self.return_cached_tokens_details),
        )

    def generation_params(self, *, max_new_tokens: int | None, logprobs: int | None) -> GenerationParams:
        """Return the parameters of each output. Raises ConfigError for an invalid value."""
        check_supported(self, _NEUTRAL)
        if self.min_tokens and not self.ignore_eos:  # otherwise nothing ends the text before ``max_tokens``
            raise _unsupported("min_tokens", self.min_tokens)
        return GenerationParams(
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            sampling=SamplingParams(
                temperature=_DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(0, self.top_k or 0),  # -1 means all tokens in vLLM and SGLang
                min_p=self.min_p or 0.0,
                seed=self.seed,
                logprobs=logprobs,
                logit_bias=sorted_bias(self.logit_bias),
                json_schema=self._schema(),
                regex=self.regex,
            ),
            grammar_field="" if self.response_format is None else "response_format",
            hints=RequestHints(
                priority=self.priority or 0, tenant=(self.user or "")[:_MAX_TENANT_CHARACTERS], lora=self.lora_path
            ),
            timeouts=RequestTimeouts(self.queue_timeout, self.timeout),
            stops=stop_strings(self.stop),
            include_stop_str=bool(self.include_stop_str_in_output),
            stream_interval=1 if self.stream else 0,
            conversation=self.conversation,
            replica=self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank,
            session=None if self.session_params is None else self.session_params.params(),
        )

    def _schema(self) -> str | None:
        schema = None if self.response_format is None else self.response_format.schema()
        if schema is not None and self.json_schema is not None:
            raise ConfigError("json_schema", self.json_schema, "is given twice", "leave it or response_format out")
        return self.json_schema if schema is None else schema


_FREE_CHOICES = ("none", "auto")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "structured_outputs": (),
    "ebnf": (),
    "prompt_logprobs": (),
}


def check_supported(body: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Check fields that this engine does not implement. A client that sets one would get another text than it expects.

    Args:
        body: has the fields; None is always accepted.
        neutral: the values without effect of each field.

    Raises:
        ConfigError: a field has another value.
    """
    for name, values in neutral.items():
        given = getattr(body, name)
        if given is not None and given not in values:
            raise _unsupported(name, given)


def _unsupported(name: str, given: object) -> ConfigError:
    shown = given if isinstance(given, int | float) else str(given)[:_MAX_SHOWN]
    return ConfigError(name, shown, "is not supported by this engine", "leave it out")


def by_tier(cached: CachedTokens) -> dict[str, int]:
    """Format cached tokens as SGLang's ``cached_tokens_details``."""
    return {"device": cached.device, "host": cached.host, "storage": cached.storage}


def sorted_bias(given: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    """Return the biases that are not zero, in the order of their tokens."""
    return tuple(sorted((token, bias) for token, bias in (given or {}).items() if bias))


def stop_strings(given: Stops) -> tuple[str, ...]:
    """Return the stop strings of a body as a tuple."""
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


class CompletionBody(_Body, frozen=True, kw_only=True):
    """Body of ``/v1/completions``."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def params(self) -> GenerationParams:
        """Return the parameters of each output. Raises ConfigError for an invalid value."""
        check_supported(self, {"best_of": (self.num_choices,), "suffix": ("",)})
        if self.echo and self.logprobs is not None:
            problem = "with logprobs requests logprobs of the prompt, which are not computed"
            raise ConfigError("echo", True, problem, "leave one of the two out")
        params = self.generation_params(max_new_tokens=self.max_tokens, logprobs=self.logprobs)
        return msgspec.structs.replace(params, default_new_tokens=_DEFAULT_COMPLETION_TOKENS)

    def prompts(self) -> list[str | list[int]]:
        """Return one or more prompts as text or tokens. Raises ConfigError for a list of both."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        tokens = [each for each in given if isinstance(each, int)]
        if len(tokens) == len(given):
            return [tokens]
        if tokens:
            raise ConfigError("prompt", tokens[0], "is a token in a list of prompts", "give texts or lists of tokens")
        return [each for each in given if not isinstance(each, int)]


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class MessageFields(msgspec.Struct, frozen=True):
    """A message of a conversation; its content is text or parts of text."""

    role: Name
    content: str | list[_Part] | None = None

    def text(self) -> str:
        """Return the content. Raises ConfigError for a part that is not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise ConfigError("messages.content.type", part.type, "is not supported by this model", "send text")
        return "".join(part.text or "" for part in self.content)


Messages: TypeAlias = Annotated[list[MessageFields], msgspec.Meta(min_length=1, max_length=4096)]


class ChatBody(_Body, frozen=True, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, msgspec.Raw] | None = None
    function_call: str | dict[str, msgspec.Raw] | None = None

    def params(self) -> GenerationParams:
        """Return the parameters of each output. Raises ConfigError for an invalid value."""
        check_supported(self, {"tool_choice": _FREE_CHOICES, "function_call": _FREE_CHOICES})
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs", self.top_logprobs, "has no effect without logprobs", "set logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.generation_params(
            max_new_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )

    def chat_messages(self) -> list[ChatMessage]:
        """Return the messages as text. Raises ConfigError for content other than text."""
        return chat_messages(self.messages)


def chat_messages(messages: Messages) -> list[ChatMessage]:
    """Return the messages as text. Raises ConfigError for content other than text."""
    return [ChatMessage(message.role, message.text()) for message in messages]


class Usage:
    """Token counts of one body. Each prompt counts once, with the cached tokens of its first output."""

    __slots__ = ("_by_tier", "_cached", "_num_output", "_num_prompt")

    def __init__(self, *, by_tier: bool = False) -> None:
        self._by_tier = by_tier
        self._num_prompt: dict[int, int] = {}
        self._cached: dict[int, CachedTokens] = {}
        self._num_output: dict[int, int] = {}

    def count(self, prompt: int, choice: int, update: TextDelta) -> None:
        """Count the tokens of an update of output ``choice``."""
        output = update.delta.output
        self._num_prompt[prompt] = output.num_prompt_tokens
        self._cached.setdefault(prompt, output.cached)
        self._num_output[choice] = update.delta.num_output_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the usage fields of a response. Cached tokens by tier are in SGLang's extension field."""
        prompt, output = sum(self._num_prompt.values()), sum(self._num_output.values())
        found = self._cached.values()
        tiers = [sum(tier) for tier in zip(*((each.device, each.host, each.storage) for each in found), strict=True)]
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(tiers)},
        }
        if not self._by_tier:
            return {"usage": usage}
        return {"usage": usage, "sglext": {"cached_tokens_details": by_tier(CachedTokens(*tiers))}}


def _token_logprobs(update: TextDelta) -> Iterator[tuple[int, float, Sequence[tuple[int, float]]]]:
    """Iterate over the new tokens: token, its logprob, and the most probable tokens at its position."""
    output = update.delta.output
    logprobs = output.logprobs or ()
    return zip(output.token_ids, logprobs, output.top_logprobs or ((),) * len(logprobs), strict=True)


class CompletionLogprobs:
    """The ``logprobs`` of a completion. ``text_offset`` is the length of all previous tokens, decoded one by one."""

    __slots__ = ("_codec", "_offset")

    def __init__(self, codec: TextTokenizer, *, offset: int = 0) -> None:
        self._codec, self._offset = codec, offset

    def format(self, update: TextDelta) -> dict[str, list[Any]]:
        """Format the logprobs of the new tokens."""
        fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob, top in _token_logprobs(update):
            text = self._codec.token_text(token)
            fields["tokens"].append(text)
            fields["token_logprobs"].append(logprob)
            fields["top_logprobs"].append({self._codec.token_text(each): value for each, value in top} or None)
            fields["text_offset"].append(self._offset)
            self._offset += len(text)
        return fields


class ChatLogprobs:
    """The ``logprobs`` of a chat completion."""

    __slots__ = ("_codec",)

    def __init__(self, codec: TextTokenizer) -> None:
        self._codec = codec

    def format(self, update: TextDelta) -> dict[str, list[Any]]:
        """Format the logprobs of the new tokens."""
        tokens = _token_logprobs(update)
        return {
            "content": [
                {**self._one(token, logprob), "top_logprobs": [self._one(*each) for each in top]}
                for token, logprob, top in tokens
            ]
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._codec.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="surrogatepass"))}
