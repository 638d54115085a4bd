"""Who runs next, and how much memory it is promised: configuration and pure functions, no state but one ratio.

The rules, in the order in which a step applies them:

1. First come, first served. A request that cannot be admitted blocks those behind it: nothing overtakes, so
   nothing starves.
2. Every running request moves on by one decode token or one chunk of its prefill.
3. Where the pool is full, the latest arrival is retracted until the earlier ones fit. The oldest request is
   therefore never retracted, so each step makes progress, whatever the pool's size.
4. A request is admitted while the step has prefill budget, a slot is free, and the pool can hold its whole input
   and a share (the new-token ratio) of the output that it may still produce, beside what the running ones may
   still take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import attrs

from scheduler_components import ConfigError
from scheduler_components.reference.device import Request

__all__ = [
    "NewTokenRatio",
    "SchedulerConfig",
    "check_request_fits",
    "expected_pages",
    "pages_for",
    "prefill_chunk",
    "pages_to_come",
    "retraction_victim",
]


def _at_least_one(_: SchedulerConfig, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(attribute.name, value, "is not a positive count", "give an integer of at least 1")


def _ratio(_: SchedulerConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(attribute.name, value, "is not a share", "give a number from 0 to 1")


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Sizes of one scheduler; frozen, checked at construction.

    Attributes:
        page_size: tokens a KV page; 16 as in vLLM: small enough to share prefixes, large enough to hash cheaply.
        kv_tokens: capacity of the KV pool in tokens, a multiple of ``page_size``.
        max_running_requests: request slots of a batch.
        max_prefill_tokens: prefill budget of a step over all requests. Decodes come on top: they are few.
        chunk_tokens: the most that one request prefills in a step, so that a long prompt does not hold up the
            decodes that share its batch.
        new_token_ratio: share of a request's possible output that admission reserves at first. 0.7 as in SGLang:
            few requests use all of ``max_new_tokens``.
        min_new_token_ratio: what that share decays to over 600 steps without a retraction.
        eos_token_id: the model's end-of-sequence token; None for a model that has none.
        kv_metrics_every_steps: cadence of ``KvMetrics`` to the serving process. Events go out every step.

    Raises:
        ConfigError: naming the size that cannot work.
    """

    page_size: int = attrs.field(default=16, validator=_at_least_one)
    kv_tokens: int = attrs.field(default=65_536, validator=_at_least_one)
    max_running_requests: int = attrs.field(default=64, validator=_at_least_one)
    max_prefill_tokens: int = attrs.field(default=4096, validator=_at_least_one)
    chunk_tokens: int = attrs.field(default=2048, validator=_at_least_one)
    new_token_ratio: float = attrs.field(default=0.7, validator=_ratio)
    min_new_token_ratio: float = attrs.field(default=0.1, validator=_ratio)
    eos_token_id: int | None = None
    kv_metrics_every_steps: int = attrs.field(default=8, validator=_at_least_one)

    def __attrs_post_init__(self) -> None:
        whole_tokens = self.kv_tokens // self.page_size * self.page_size
        if whole_tokens != self.kv_tokens:
            hint = f"give {max(whole_tokens, self.page_size)}"
            raise ConfigError("kv_tokens", self.kv_tokens, f"is not a multiple of page_size={self.page_size}", hint)
        if self.min_new_token_ratio > self.new_token_ratio:
            raise ConfigError(
                "min_new_token_ratio",
                self.min_new_token_ratio,
                f"is above new_token_ratio={self.new_token_ratio}",
                f"give at most {self.new_token_ratio}",
            )

    @property
    def kv_pages(self) -> int:
        """Pages of the pool."""
        return self.kv_tokens // self.page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold ``num_tokens`` positions."""
    return -(-num_tokens // page_size)


def check_request_fits(config: SchedulerConfig, num_input_tokens: int, max_new_tokens: int) -> None:
    """Refuse a request that the whole pool could not hold; any other one fits once it is alone.

    Pure, so that a front process can refuse before it dispatches.

    Raises:
        ConfigError: with the arithmetic, and the most that may be asked for.
    """
    num_positions = num_input_tokens + max_new_tokens - 1  # the last token needs no KV of its own
    if num_positions <= config.kv_tokens:
        return
    room = config.kv_tokens - num_input_tokens + 1
    if room >= 1:
        hint = f"ask for at most {room} new tokens with this prompt"
    else:
        hint = f"send at most {config.kv_tokens} tokens"
    raise ConfigError(
        "input_ids",
        f"{num_input_tokens} tokens",
        f"with max_new_tokens={max_new_tokens} may take {num_positions} KV tokens and the pool has {config.kv_tokens}",
        hint,
    )


def prefill_chunk(num_tokens_left: int, *, chunk_tokens: int, budget_tokens: int) -> int:
    """Tokens of one prefill that go into this step."""
    return min(num_tokens_left, chunk_tokens, budget_tokens)


def expected_pages(request: Request, *, page_size: int, new_token_ratio: float) -> int:
    """Pages that a request is expected to hold in the end, at ``new_token_ratio`` of its possible output.

    Never more than ``check_request_fits`` has allowed, so a request that is alone is always admitted.
    """
    num_output_positions = int(new_token_ratio * (request.num_output_tokens_left - 1))
    return pages_for(request.num_input_tokens + num_output_positions, page_size)


def pages_to_come(requests: Iterable[Request], *, page_size: int, new_token_ratio: float) -> int:
    """Pages that running requests are expected to take beyond those that they hold."""
    return sum(
        max(0, expected_pages(request, page_size=page_size, new_token_ratio=new_token_ratio) - len(request.pages))
        for request in requests
    )


def retraction_victim(running: Sequence[Request]) -> Request:
    """The running request that gives its pages to the others: the latest arrival.

    It goes back to the front of the queue, and as all that wait there arrived even later, order of arrival is kept.
    """
    return max(running, key=lambda request: request.arrival)


@dataclass(slots=True, kw_only=True)
class NewTokenRatio:
    """The share of possible output that admission reserves: decays while all goes well, jumps back at a retraction.

    Counts steps and no time, so all ranks of a replica agree on it.
    """

    initial: float
    minimum: float
    value: float
    decay_steps: int = 600

    @classmethod
    def of(cls, config: SchedulerConfig) -> NewTokenRatio:
        ratio = config.new_token_ratio
        return cls(initial=ratio, minimum=config.min_new_token_ratio, value=ratio)

    def after_step(self, *, retracted: bool) -> None:
        """Learn from one step."""
        if retracted:
            self.value = self.initial
        else:
            self.value = max(self.minimum, self.value - (self.initial - self.minimum) / self.decay_steps)
