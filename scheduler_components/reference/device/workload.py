"""The generated workload: multi-turn chats over shared system prompts, the same for the same seed.

What is drawn, and why:

- System prompt: one of ``num_system_prompts``, chosen by a Zipf law (weight 1/k), 256 to 768 tokens: a few
  assistants take most of the traffic.
- Chats start by a Poisson process of ``chats_per_s``.
- Turns a chat: geometric with mean ``mean_turns``, at most 8. Each turn's prompt is everything before it, the real
  outputs included, plus the new message: this is where a prefix cache earns its keep.
- Message and answer lengths: log-normal around their means (sigma 0.6), as chat traffic is: many short, few long.
- Think time between an answer and the next message: exponential with mean ``mean_think_s``.

Token ids are drawn below 32,768: prompts that do not share a system prompt part at their first token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import attrs

from scheduler_components import ConfigError

__all__ = [
    "Chat",
    "Turn",
    "WorkloadConfig",
    "generate_chats",
]

_VOCABULARY = 32_768
_SYSTEM_PROMPT_TOKENS = (256, 768)
_LENGTH_SIGMA = 0.6
_MAX_TURNS = 8
_LONGEST_FACTOR = 4  # the tail is cut, so that the longest chat of the defaults stays below 5,000 tokens


def _check_count(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ConfigError(attribute.name, value, "is not a count", "give an integer of at least 1")


def _check_mean(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(attribute.name, value, "is not a positive number", "give a number above 0")


@attrs.frozen(kw_only=True)
class WorkloadConfig:
    """Sizes of the generated workload; the module's text says what each distribution is.

    Raises:
        ConfigError: for a value that is not above 0, or a mean of less than one turn.
    """

    num_requests: int = attrs.field(default=700, validator=_check_count)
    seed: int = 0
    num_system_prompts: int = attrs.field(default=6, validator=_check_count)
    chats_per_s: float = attrs.field(default=16.0, validator=_check_mean)
    mean_turns: float = attrs.field(default=3.0, validator=_check_mean)
    mean_message_tokens: float = attrs.field(default=60.0, validator=_check_mean)
    mean_output_tokens: float = attrs.field(default=60.0, validator=_check_mean)
    mean_think_s: float = attrs.field(default=1.0, validator=_check_mean)

    def __attrs_post_init__(self) -> None:
        if self.mean_turns < 1:
            raise ConfigError("mean_turns", self.mean_turns, "is less than one turn a chat", "give at least 1")


@attrs.frozen(kw_only=True)
class Turn:
    """One message of a person and how much is answered.

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
    """One conversation: it starts ``start_s`` after the workload's start with ``system_ids`` as its prefix."""

    chat_id: str
    start_s: float
    system_ids: tuple[int, ...]
    turns: tuple[Turn, ...]


def generate_chats(config: WorkloadConfig) -> Iterator[Chat]:
    """Yield chats in order of their start until their turns come to exactly ``num_requests``."""
    random = Random(config.seed)  # noqa: S311  a workload wants to be repeatable, not secret
    systems = [_system_prompt(config.seed, number) for number in range(config.num_system_prompts)]
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


def _system_prompt(seed: int, number: int) -> tuple[int, ...]:
    random = Random(f"system-{seed}-{number}")  # noqa: S311
    return _draw_tokens(random, random.randint(*_SYSTEM_PROMPT_TOKENS))


def _draw_turns(random: Random, mean: float) -> int:
    turns = 1
    while turns < _MAX_TURNS and random.random() < 1 - 1 / mean:
        turns += 1
    return turns


def _draw_turn(random: Random, config: WorkloadConfig, place: int) -> Turn:
    return Turn(
        think_s=random.expovariate(1 / config.mean_think_s) if place else 0.0,
        message_ids=_draw_tokens(random, _draw_length(random, config.mean_message_tokens)),
        output_tokens=_draw_length(random, config.mean_output_tokens),
    )


def _draw_length(random: Random, mean: float) -> int:
    """Log-normal with the given mean, at least 1."""
    length = random.lognormvariate(math.log(mean) - _LENGTH_SIGMA**2 / 2, _LENGTH_SIGMA)
    return max(1, min(round(length), math.ceil(_LONGEST_FACTOR * mean)))


def _draw_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.choices(range(_VOCABULARY), k=count))
