"""How a request's next token is chosen from the model's logits, as values: what travels with a request, and back.

Imports no model: ``torch_sampling`` chooses.
"""

from __future__ import annotations

import math

import msgspec

from scheduler_components import ConfigError
from scheduler_components.validators import check_integer, check_number

__all__ = [
    "MAX_TOP_LOGPROBS",
    "SamplingParams",
    "TokenLogprobs",
    "MAX_TOKEN_ID",
    "SamplingLimits",
]

MAX_TOP_LOGPROBS = 20
"""Alternatives per token, as OpenAI's API bounds them."""

_MAX_SEED = 2**63 - 1
_GREEDY_BELOW = 1e-5  # as in vLLM: nothing but the best token is left, and the logits would grow out of their type


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """How the next token is chosen. The default is greedy: the most probable one.

    The draw for a position depends on ``seed`` and the position alone, not on the batch nor on how often the request
    was retracted. So equal requests with equal seeds get equal tokens, on every rank.

    Attributes:
        temperature: divides the logits; 0, and what is next to it, is greedy: then all but ``logprobs`` has no effect.
        top_p: the most probable tokens that together have this share are kept; 1 keeps all.
        top_k: so many most probable tokens are kept; 0 keeps all.
        min_p: tokens of at least this share of the most probable one's probability are kept; 0 keeps all.
        seed: of the draws, 0 to 2**63 - 1; None lets the front choose, and a scheduler without one take the request id.
        logprobs: None for none; otherwise each token comes with its log probability and those of so many most probable
            tokens, 0 to ``MAX_TOP_LOGPROBS``. They are the model's own, before temperature and cuts.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "is not a temperature", or_zero=True)
        _check_share("top_p", self.top_p, or_zero=False)
        check_integer("top_k", self.top_k, "is not a number of tokens", at_least=0)
        _check_share("min_p", self.min_p, or_zero=True)
        if self.seed is not None:
            check_integer("seed", self.seed, "is not a seed", at_least=0)
            if self.seed > _MAX_SEED:
                raise ConfigError("seed", self.seed, "is not a seed", f"give at most {_MAX_SEED}")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, "is not a number of tokens", at_least=0)
            if self.logprobs > MAX_TOP_LOGPROBS:
                hint = f"ask for at most {MAX_TOP_LOGPROBS}"
                raise ConfigError("logprobs", self.logprobs, "is more than are told per token", hint)

    @property
    def is_greedy(self) -> bool:
        """No draw decides."""
        return self.temperature < _GREEDY_BELOW


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How probable a generated token was to the model.

    Attributes:
        logprob: natural logarithm of its probability.
        top: token and logarithm of the most probable ones, in descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def _check_share(field: str, value: float, *, or_zero: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value <= 1 or (or_zero and value == 0)) or math.isnan(value):
        raise ConfigError(field, value, "is not a share", f"give a number {'from' if or_zero else 'above'} 0 to 1")


MAX_TOKEN_ID = 2**32 - 1
"""Token ids are u32 on the wire of KV events."""


class SamplingLimits(msgspec.Struct, frozen=True, gc=False):
    """When a request ends.

    Attributes:
        max_new_tokens: tokens to generate at most, 1 or more.
        stop_token_ids: any of them, once generated, ends the request; it is part of the output.
        ignore_eos: the model's own end-of-sequence token does not end the request (``stop_token_ids`` still do).

    Raises:
        ConfigError: ``max_new_tokens`` below 1.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", self.max_new_tokens, "asks for nothing", "give 1 or more")
