"""Workloads: generated chats, which follow from a seed, and recorded traces in Mooncake's format.

The distributions of the generated chats:

- System prompt: one of ``num_system_prompts``, by a Zipf law (weight 1/k), with one third to all of
  ``max_system_prompt_tokens``, because a few assistants cause most of the traffic.
- Start of the chats: a Poisson process of ``chats_per_s``.
- Turns per chat: geometric with mean ``mean_turns``, at most 8. The prompt of a turn contains all earlier messages and
  real outputs, plus the new message. This is the case that prefix caches are made for.
- Message and answer lengths: log-normal around their means (sigma 0.6), as in real chats: many short, few long.
- Think time between an answer and the next message: exponential with mean ``mean_think_s``.

Token ids are below ``vocab_size``. Prompts with different system prompts differ from their first token.

The traces are those of ``scheduler_engine.simulation.trace``, whose names this module exports too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import attrs

from scheduler_components import ConfigError
from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_engine.simulation import (
    ARRIVAL_QUANTUM_S,
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    TraceSummary,
    check_trace,
    open_trace,
    parse_trace,
    prompt_tokens,
    spread_arrivals,
)

__all__ = [
    "TRACE_BLOCK_TOKENS",
    "ARRIVAL_QUANTUM_S",
    "Chat",
    "TraceSummary",
    "TraceRequest",
    "Turn",
    "WorkloadConfig",
    "check_trace",
    "generate_chats",
    "open_trace",
    "parse_trace",
    "prompt_tokens",
    "spread_arrivals",
]

_LENGTH_SIGMA = 0.6
_MAX_TURNS = 8
_MAX_LENGTH_FACTOR = 4  # cuts the tail, so that the longest chat of the defaults stays below 5,000 tokens


@attrs.frozen(kw_only=True)
class WorkloadConfig:
    """Sizes of the generated workload. The module docstring describes the distributions.

    Raises:
        ConfigError: a value is not positive, or the mean is less than one turn.
    """

    num_requests: int = attrs.field(default=300, validator=integer_validator("is not a count"))
    seed: int = 0
    num_system_prompts: int = attrs.field(default=6, validator=integer_validator("is not a count"))
    # A third of what eight scheduler processes can serve on two cores. Near that limit requests wait for a core
    # instead of the device.
    chats_per_s: float = attrs.field(default=5.0, validator=number_validator("is not a positive number"))
    mean_turns: float = attrs.field(default=3.0, validator=number_validator("is not a positive number"))
    mean_message_tokens: float = attrs.field(default=60.0, validator=number_validator("is not a positive number"))
    mean_output_tokens: float = attrs.field(default=60.0, validator=number_validator("is not a positive number"))
    mean_think_s: float = attrs.field(default=1.0, validator=number_validator("is not a positive number"))
    max_system_prompt_tokens: int = attrs.field(default=768, validator=integer_validator("is not a length"))
    vocab_size: int = attrs.field(default=32_768, validator=integer_validator("is not a vocabulary"))

    def __attrs_post_init__(self) -> None:
        if self.mean_turns < 1:
            raise ConfigError("mean_turns", self.mean_turns, "is less than one turn per chat", "give at least 1")


@attrs.frozen(kw_only=True)
class Turn:
    """One message of a user and the length of its answer.

    Attributes:
        think_s: pause after the previous answer; 0 for the first turn.
        message_ids: the new tokens of the prompt.
        output_tokens: tokens to generate.
    """

    think_s: float
    message_ids: tuple[int, ...]
    output_tokens: int


@attrs.frozen(kw_only=True)
class Chat:
    """One conversation. It starts ``start_s`` after the workload does, with ``system_ids`` as its prefix."""

    chat_id: str
    start_s: float
    system_ids: tuple[int, ...]
    turns: tuple[Turn, ...]


def generate_chats(config: WorkloadConfig) -> Iterator[Chat]:
    """Yield chats in order of their start, with exactly ``num_requests`` turns in all."""
    random = Random(config.seed)
    systems = [_system_prompt(config, number) for number in range(config.num_system_prompts)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    left, start_s, number = config.num_requests, 0.0, 0
    while left > 0:
        num_turns = min(left, _draw_turns(random, config.mean_turns))
        yield Chat(
            chat_id=f"chat-{config.seed}-{number}",
            start_s=start_s,
            system_ids=random.choices(systems, weights)[0],
            turns=tuple(_draw_turn(random, config, place) for place in range(num_turns)),
        )
        left -= num_turns
        number += 1
        start_s += random.expovariate(config.chats_per_s)


def _system_prompt(config: WorkloadConfig, number: int) -> tuple[int, ...]:
    random = Random(f"system-{config.seed}-{number}")
    longest = config.max_system_prompt_tokens
    return _draw_tokens(random, config, random.randint(-(-longest // 3), longest))


def _draw_turns(random: Random, mean: float) -> int:
    turns = 1
    while turns < _MAX_TURNS and random.random() < 1 - 1 / mean:
        turns += 1
    return turns


def _draw_turn(random: Random, config: WorkloadConfig, place: int) -> Turn:
    return Turn(
        think_s=random.expovariate(1 / config.mean_think_s) if place else 0.0,
        message_ids=_draw_tokens(random, config, _draw_length(random, config.mean_message_tokens)),
        output_tokens=_draw_length(random, config.mean_output_tokens),
    )


def _draw_length(random: Random, mean: float) -> int:
    """Draw from a log-normal distribution with the given mean; at least 1."""
    length = random.lognormvariate(math.log(mean) - _LENGTH_SIGMA**2 / 2, _LENGTH_SIGMA)
    return max(1, min(round(length), math.ceil(_MAX_LENGTH_FACTOR * mean)))


def _draw_tokens(random: Random, config: WorkloadConfig, count: int) -> tuple[int, ...]:
    return tuple(random.choices(range(config.vocab_size), k=count))
