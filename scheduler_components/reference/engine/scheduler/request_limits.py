"""Refuse requests that can never be served: too long for the pool or the model's context, with unknown tokens, or with
a grammar that nothing compiles.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_components import ConfigError
from scheduler_components.reference.device.sampling import MAX_TOKEN_ID
from scheduler_components.reference.engine.config import SchedulerConfig
from scheduler_components.values import GrammarKey

__all__ = ["check_grammar_served", "check_request_fits", "check_tokens_known"]


def check_request_fits(config: SchedulerConfig, num_input_tokens: int, max_new_tokens: int) -> None:
    """Check that the pool and the model's context can hold a request while no other runs.

    Raises:
        ConfigError: the request is too long; the text has the sizes and the largest possible request.
    """
    num_positions = num_input_tokens + max_new_tokens - 1  # the last token needs no KV
    context_tokens = config.tokens.context_tokens
    limit, holder = config.kv_tokens, "the pool"
    if context_tokens is not None and context_tokens < limit:
        limit, holder = context_tokens, "the model's context"
    if num_positions <= limit:
        return
    room = limit - num_input_tokens + 1
    hint = f"ask for at most {room} new tokens with this prompt" if room >= 1 else f"send at most {limit} tokens"
    raise ConfigError(
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
