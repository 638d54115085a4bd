"""A request, its outputs, and counters over all requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from scheduler_components.cache import RadixNode
from scheduler_components.values import RequestHints

__all__ = ["Output", "Outbox", "Request", "finish_reason"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request and the KV pages that it holds. Plain data that ``batching`` and the results write.

    Attributes:
        token_ids: the prompt, then the generated tokens.
        pages: of the first ``num_computed_tokens`` positions, and of those that this step computes.
        num_cached_pages: the first of them that are in the cache, locked through ``node``.
        prefill_end: ``len(token_ids)`` at the last admission: computing up to here is prefill.
        num_cached_tokens: tokens that the cache covered at the last lookup.
        arrival: number of its submission, which the last stage writes. Policies read it.
        hints: what the client says about the order. Policies read it.
    """

    rid: str
    token_ids: list[int]
    max_new_tokens: int
    num_prompt_tokens: int = field(init=False)
    pages: list[int] = field(default_factory=list)
    num_cached_pages: int = 0
    node: RadixNode | None = None
    num_computed_tokens: int = 0
    prefill_end: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    arrival: int = 0
    hints: RequestHints = field(default_factory=RequestHints)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill when nothing is cached."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Positions that the device must compute before the next token."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        """Tokens of the prefill that are not computed."""
        return max(0, self.prefill_end - self.num_computed_tokens)

    @property
    def num_output_tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self.num_prompt_tokens + self.max_new_tokens - len(self.token_ids)


def finish_reason(request: Request, eos_token_id: int) -> str | None:
    """Return why the request ends after its last token, or None if it continues."""
    if request.token_ids[-1] == eos_token_id:
        return "stop"
    return "length" if len(request.token_ids) - request.num_prompt_tokens >= request.max_new_tokens else None


class Output(msgspec.Struct, frozen=True):
    """New output of one request."""

    rid: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Outbox:
    """Receives the outputs that the scheduler sends to its clients."""

    def __init__(self, receive: Callable[[Output], None]) -> None:
        self._receive = receive

    def send(self, output: Output) -> None:
        self._receive(output)
