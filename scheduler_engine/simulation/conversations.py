"""Generated arrivals: conversations of several turns that share system prompts. They follow from a seed.

- Start of the conversations: a Poisson process of ``conversations_per_s``.
- System prompt: one of ``num_system_prompts``, by a Zipf law (weight 1/k).
- Tenant of a conversation: one of ``num_tenants``, by the same law, so the first one asks most.
- Turns: geometric with mean ``mean_turns``. The prompt of a turn is that of the turn before, its output and a message.
- Messages and outputs: exponential around their means, at least one token.
- Time between two turns: exponential with mean ``mean_think_s`` after the arrival of the turn before. It does not
  depend on when that turn is served, so all policies get the same arrivals.

As in a recorded trace, a hash id identifies the tokens of a block. The output in a later prompt has other tokens than
the generated ones, so only the prompts are shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from random import Random

import attrs

from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_components._internal.virtual_clock import MAX_SPAN_S
from scheduler_components.errors import ConfigError
from scheduler_engine.simulation.trace import TRACE_BLOCK_TOKENS, TraceRequest

_MAX_MEAN_TOKENS = 10_000_000  # a line of a trace has no longer prompt
_MAX_COUNT = 10_000
_MAX_SYSTEM_BLOCKS = 10_000_000  # ids that the system prompts keep in memory

_rate = number_validator("is not a rate", at_least=1e-6)
_turns = number_validator("is not a number of turns", at_most=_MAX_COUNT)
_length = number_validator("is not a length", at_most=_MAX_MEAN_TOKENS)
_few = integer_validator("is not a count", at_most=_MAX_COUNT)


@attrs.frozen(kw_only=True)
class ConversationWorkload:
    """Sizes of the generated conversations. The module docstring describes the distributions.

    A single tenant has no name.

    Raises:
        ConfigError: a value is not positive or too large, or the mean is less than one turn.
    """

    num_requests: int = attrs.field(default=1000, validator=integer_validator("is not a count"))
    seed: int = 0
    conversations_per_s: float = attrs.field(default=1.0, validator=_rate)
    mean_turns: float = attrs.field(default=3.0, validator=_turns)
    mean_think_s: float = attrs.field(default=20.0, validator=number_validator(at_most=MAX_SPAN_S))
    mean_message_tokens: float = attrs.field(default=1000.0, validator=_length)
    mean_output_tokens: float = attrs.field(default=300.0, validator=_length)
    num_system_prompts: int = attrs.field(default=6, validator=_few)
    system_prompt_tokens: int = attrs.field(
        default=2048, validator=integer_validator("is not a length", at_most=_MAX_MEAN_TOKENS)
    )
    num_tenants: int = attrs.field(default=1, validator=_few)

    def __attrs_post_init__(self) -> None:
        if self.mean_turns < 1:
            raise ConfigError("mean_turns", self.mean_turns, "is less than one turn", "give at least 1")
        if self.num_system_prompts * self.system_prompt_tokens > _MAX_SYSTEM_BLOCKS * TRACE_BLOCK_TOKENS:
            hint = "give fewer or shorter system prompts"
            raise ConfigError("num_system_prompts", self.num_system_prompts, "do not fit into memory", hint)


def generate_conversations(workload: ConversationWorkload) -> Iterator[TraceRequest]:
    """Yield requests in order of their arrival, exactly ``num_requests`` of them."""
    random, ids = Random(workload.seed), count()
    num_blocks = -(-workload.system_prompt_tokens // TRACE_BLOCK_TOKENS)
    systems = [tuple(next(ids) for _ in range(num_blocks)) for _ in range(workload.num_system_prompts)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    tenants = [f"tenant-{rank}" for rank in range(1, workload.num_tenants + 1)]
    shares = [1 / rank for rank in range(1, len(tenants) + 1)]
    # (time, number, prompt tokens before, hash ids before, tenant)
    turns: list[tuple[float, int, int, tuple[int, ...], str]] = []
    numbers, next_start_s = count(), 0.0
    for index in range(workload.num_requests):
        while not turns or next_start_s <= turns[0][0]:
            system = random.choices(systems, weights)[0]
            tenant = random.choices(tenants, shares)[0] if len(tenants) > 1 else ""
            heappush(turns, (next_start_s, next(numbers), workload.system_prompt_tokens, system, tenant))
            next_start_s += random.expovariate(workload.conversations_per_s)
        arrival_s, number, num_tokens, hash_ids, tenant = heappop(turns)
        num_tokens += draw_tokens(random, workload.mean_message_tokens)
        hash_ids += tuple(next(ids) for _ in range(-(-num_tokens // TRACE_BLOCK_TOKENS) - len(hash_ids)))
        num_output_tokens = draw_tokens(random, workload.mean_output_tokens)
        yield TraceRequest(
            index=index,
            arrival_s=arrival_s,
            input_length=num_tokens,
            output_length=num_output_tokens,
            hash_ids=hash_ids,
            tenant=tenant,
        )
        if random.random() < 1 - 1 / workload.mean_turns:
            again_s = arrival_s + random.expovariate(1 / workload.mean_think_s)
            heappush(turns, (again_s, number, num_tokens + num_output_tokens, hash_ids, tenant))


def draw_tokens(random: Random, mean: float) -> int:
    """Return a length from the exponential distribution around ``mean``, at least one token."""
    return max(1, round(random.expovariate(1 / mean)))
