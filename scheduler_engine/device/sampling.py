"""Sampling parameters of a request, and the log probabilities of its answer, as values.

``torch_sampling`` samples; this module imports no model.
"""

from __future__ import annotations

import math

import msgspec

from scheduler_components import ConfigError
from scheduler_components._internal.validators import check_integer, check_number
from scheduler_components.values import GrammarKey

MAX_TOP_LOGPROBS = 20
"""The most alternatives per token, as in OpenAI's API."""

MAX_GRAMMAR_CHARACTERS = 64 * 1024
"""The longest schema or expression. Every rank compiles and keeps it."""

_MAX_SEED = 2**63 - 1
_MAX_BIAS = 100  # OpenAI's
_GREEDY_BELOW = 1e-5  # as in vLLM: only the best token remains, and the divided logits would overflow


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """How to choose the next token. The default is greedy.

    The draw for a position depends on ``seed`` and the position, not on the batch or on retractions. Equal requests
    with equal seeds therefore get equal tokens on every rank.

    Attributes:
        temperature: divides the logits. 0 (or less than 1e-5) is greedy; then only ``logprobs`` and ``logit_bias``
            have an effect.
        top_p: keep the most probable tokens up to this total probability; 1 keeps all.
        top_k: keep this many of the most probable tokens; 0 keeps all.
        min_p: keep tokens with at least this fraction of the highest probability; 0 keeps all.
        seed: seed of the draws, 0 to 2**63 - 1. For None the frontend chooses one; a scheduler without a frontend uses
            the request id.
        logprobs: None for none. Otherwise each token comes with its log probability and those of this many most
            probable tokens, 0 to ``MAX_TOP_LOGPROBS``. They are the model's, before bias, temperature and filters.
        logit_bias: (token, number that is added to its logit), by token, from -100 (never) to 100 (always). It has an
            effect at each temperature. A simulated device has no logits.
        json_schema: the output is JSON of this schema, itself JSON text; None for any text.
        regex: the whole output matches this regular expression; None for any text. At most one of the two.

    Raises:
        ConfigError: a value is out of range; the error names it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "is not a temperature", or_zero=True)
        _check_share("top_p", self.top_p, or_zero=False)
        check_integer("top_k", self.top_k, "is not a number of tokens", at_least=0)
        _check_share("min_p", self.min_p, or_zero=True)
        if self.seed is not None:
            check_integer("seed", self.seed, "is not a seed", at_least=0)
            if self.seed > _MAX_SEED:
                raise ConfigError("seed", self.seed, "is not a seed", f"give at most {_MAX_SEED}")
        for token, bias in self.logit_bias:
            check_integer("logit_bias", token, "is not a token", at_least=0)
            if not -_MAX_BIAS <= bias <= _MAX_BIAS:
                raise ConfigError("logit_bias", bias, "is out of range", f"give {-_MAX_BIAS} to {_MAX_BIAS}")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, "is not a number of tokens", at_least=0)
            if self.logprobs > MAX_TOP_LOGPROBS:
                hint = f"ask for at most {MAX_TOP_LOGPROBS}"
                raise ConfigError("logprobs", self.logprobs, "is above the limit per token", hint)
        _check_grammar("json_schema", self.json_schema)
        _check_grammar("regex", self.regex)
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError("regex", self.regex, "cannot be combined with json_schema", "leave one of the two out")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen without a draw."""
        return self.temperature < _GREEDY_BELOW

    @property
    def grammar_key(self) -> GrammarKey | None:
        """The grammar of the output; None for any text."""
        if self.json_schema is not None:
            return GrammarKey("json_schema", self.json_schema)
        return None if self.regex is None else GrammarKey("regex", self.regex)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The log probabilities at one generated token.

    Attributes:
        logprob: natural logarithm of the token's probability.
        top: (token, log probability) of the most probable tokens, in descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _check_share(field: str, value: float, *, or_zero: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value <= 1 or (or_zero and value == 0)) or math.isnan(value):
        raise ConfigError(field, value, "is not a share", f"give a number {'from' if or_zero else 'above'} 0 to 1")


def _check_grammar(field: str, source: str | None) -> None:
    if source is None:
        return
    if not source:
        raise ConfigError(field, source, "is empty", "leave it out for any text")
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        hint = f"give at most {MAX_GRAMMAR_CHARACTERS}"
        raise ConfigError(field, f"{len(source)} characters", "is too long to compile", hint)


MAX_TOKEN_ID = 2**32 - 1
"""Token ids are u32 on the wire of KV events."""


class SamplingLimits(msgspec.Struct, frozen=True, gc=False):
    """When a request ends.

    Attributes:
        max_new_tokens: the most tokens to generate, 1 or more.
        stop_token_ids: generating one of them ends the request; the token is part of the output.
        ignore_eos: the model's end-of-sequence token does not end the request; ``stop_token_ids`` still do.
        is_default: the client did not give ``max_new_tokens``, so the scheduler may lower it to what fits.

    Raises:
        ConfigError: ``max_new_tokens`` below 1.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    is_default: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", self.max_new_tokens, "asks for nothing", "give 1 or more")
