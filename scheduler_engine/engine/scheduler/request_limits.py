"""Refuse requests that can never be served: too long for the pool or the model's context, with unknown tokens, or with
a grammar that nothing compiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from scheduler_components import ConfigError
from scheduler_components.values import GrammarKey
from scheduler_engine.device.sampling import MAX_TOKEN_ID, SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig


class RequestTooLongError(ConfigError):
    """The pool or the model's context cannot hold a request, even while no other runs."""


def fitting_limits(config: SchedulerConfig, num_input_tokens: int, limits: SamplingLimits) -> SamplingLimits:
    """Return the limits of a request with its default length lowered to what fits; at least one token.

    The earlier turns of a session are part of the input, and only the scheduler knows them.
    """
    if not limits.is_default:
        return limits
    room = _limit(config)[0] - num_input_tokens + 1
    return msgspec.structs.replace(limits, max_new_tokens=max(1, min(limits.max_new_tokens, room)), is_default=False)


def _limit(config: SchedulerConfig) -> tuple[int, str]:
    """Return how many tokens a request may have, and what holds no more."""
    context_tokens = config.tokens.context_tokens
    if context_tokens is not None and context_tokens < config.kv_tokens:
        return context_tokens, "the model's context"
    return config.kv_tokens, "the pool"


def check_request_fits(config: SchedulerConfig, num_input_tokens: int, max_new_tokens: int) -> None:
    """Check that the pool and the model's context can hold a request while no other runs.

    Raises:
        RequestTooLongError: the text has the sizes and the largest possible request.
    """
    num_positions = num_input_tokens + max_new_tokens - 1  # the last token needs no KV
    limit, holder = _limit(config)
    if num_positions <= limit:
        return
    room = limit - num_input_tokens + 1
    hint = f"ask for at most {room} new tokens with this prompt" if room >= 1 else f"send at most {limit} tokens"
    raise RequestTooLongError(
        "input_ids",
        f"{num_input_tokens} tokens",
        f"with max_new_tokens={max_new_tokens} may take {num_positions} KV tokens and {holder} has {limit}",
        hint,
    )


def check_tokens_known(config: SchedulerConfig, token_ids: Sequence[int]) -> None:
    """Check that the model knows all tokens. An unknown one would fail every request of its batch.

    Raises:
        ConfigError: a token is unknown; the error names the largest.
    """
    vocab_size = config.tokens.vocab_size
    if vocab_size <= MAX_TOKEN_ID and (largest := max(token_ids)) >= vocab_size:
        raise ConfigError("input_ids", largest, "is not a token of the model", f"give ids from 0 to {vocab_size - 1}")


def check_grammar_served(config: SchedulerConfig, key: GrammarKey | None) -> None:
    """Check that this scheduler compiles grammars, if a request has one. Otherwise its output would be any text.

    Raises:
        ConfigError: it does not.
    """
    if key is not None and config.grammar is None:
        raise ConfigError(key.kind, key.source, "needs a grammar backend, and this engine has none", "leave it out")
