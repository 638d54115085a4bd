"""AdmissionBudget: what one step may still admit, spent request by request, with a reason for each refusal.

A request is admitted while the step has prefill tokens, a request slot is free, its tenant is below its cap, and the
pool can hold the whole input of the request and a share of its possible output, the new-token ratio, in addition to
what the running requests may still allocate. SGLang's ``PrefillAdder`` and vLLM's token budget keep the same accounts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import attrs
import msgspec

from scheduler_components._internal.validators import MAX_TOKENS, check_integer, choice_validator, integer_validator
from scheduler_components.errors import ConfigError
from scheduler_components.ports import BatchedRequest
from scheduler_components.values import RefusalReason

__all__ = [
    "BATCH_MODES",
    "AdmissionBudget",
    "AdmissionDemand",
    "BatchLimits",
    "BatchMode",
    "estimate_pages",
    "estimate_pages_to_allocate",
    "prefill_chunk",
]

BatchMode: TypeAlias = Literal["mixed", "prefill_first"]
BATCH_MODES: tuple[BatchMode, ...] = ("mixed", "prefill_first")
"""``mixed`` batches hold decodes and prefill chunks. With ``prefill_first`` a batch holds one kind, and decodes wait
while a prefill can be computed, which is SGLang's default."""


def _check_cap(_: object, attribute: attrs.Attribute[int | None], value: object) -> None:
    if value is not None:
        check_integer(attribute.name, value, "is not a number of requests")


@attrs.frozen(kw_only=True)
class BatchLimits:
    """Sizes of a batch.

    Attributes:
        max_running_requests: request slots.
        max_prefill_tokens: prefill tokens of a step over all requests.
        chunk_tokens: prefill tokens of one request in a step, so that a long prompt does not delay the decodes of its
            batch.
        counts_decodes: decodes spend ``max_prefill_tokens`` too, as vLLM's ``max_num_batched_tokens``.
        mode: ``mixed`` or ``prefill_first``.
        watermark_pages: pages that an admission leaves free while other requests run, as vLLM's watermark.
        max_running_per_tenant: running requests of one tenant; None for no cap.
        head_of_line_blocking: a request whose pages are being fetched from a lower tier, or whose tenant is at its
            cap, blocks those behind it. Without it the next one is tried, up to 128 per step. A request that the pool
            cannot hold yet blocks them in either case.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    max_running_requests: int = attrs.field(default=64, validator=integer_validator())
    max_prefill_tokens: int = attrs.field(default=4096, validator=integer_validator(at_most=MAX_TOKENS))
    chunk_tokens: int = attrs.field(default=2048, validator=integer_validator(at_most=MAX_TOKENS))
    counts_decodes: bool = False
    mode: BatchMode = attrs.field(default="mixed", validator=choice_validator(*BATCH_MODES))
    watermark_pages: int = attrs.field(default=0, validator=integer_validator("is not a number of pages", at_least=0))
    max_running_per_tenant: int | None = attrs.field(default=None, validator=_check_cap)
    head_of_line_blocking: bool = True


def prefill_chunk(num_tokens_left: int, *, chunk_tokens: int, budget_tokens: int) -> int:
    """Return the number of tokens of a prefill that this step computes."""
    return min(num_tokens_left, chunk_tokens, budget_tokens)


def estimate_pages(request: BatchedRequest, *, page_size: int, new_token_ratio: float) -> int:
    """Return how many pages a request is expected to hold at its end, with ``new_token_ratio`` of its possible output.

    The last token needs no KV. The number is never more than a request needs that uses all of its output, so a pool
    that holds each request alone always admits a single one.
    """
    num_output_positions = int(new_token_ratio * (request.num_output_tokens_left - 1))
    return -(-(request.num_input_tokens + num_output_positions) // page_size)


def estimate_pages_to_allocate(requests: Iterable[BatchedRequest], *, page_size: int, new_token_ratio: float) -> int:
    """Return how many pages running requests are expected to allocate in addition to those that they hold."""
    num_pages = 0
    for request in requests:  # estimate_pages, inlined
        num_positions = request.num_input_tokens + int(new_token_ratio * (request.num_output_tokens_left - 1))
        num_missing = -(-num_positions // page_size) - len(request.pages)
        if num_missing > 0:
            num_pages += num_missing
    return num_pages


class AdmissionDemand(msgspec.Struct, frozen=True, gc=False):
    """What the admission of a request takes.

    Attributes:
        num_tokens: prefill tokens of its first chunk.
        num_pages: pages that it may allocate until its end, without those of its cached prefix; None before the prefix
            is matched.
        tenant: on whose behalf it runs.
    """

    num_tokens: int = 0
    num_pages: int | None = None
    tenant: str = ""


@dataclass(slots=True, kw_only=True)
class AdmissionBudget:
    """What is left of one step.

    Attributes:
        tokens: prefill tokens that the step may still compute.
        slots: free request slots.
        available_pages: pages that can be allocated now. Write it again after each match, because a locked prefix can
            no longer be evicted.
        reserved_pages: of them, pages that running requests are expected to allocate.
        watermark_pages: pages that stay free while requests run.
        num_running: running requests, those admitted in this step included.
        tenant_cap: running requests of one tenant; None for no cap.
        running_by_tenant: their numbers; not read without a cap.

    Raises:
        ConfigError: a number is negative.
    """

    tokens: int
    slots: int
    available_pages: int = 0
    reserved_pages: int = 0
    watermark_pages: int = 0
    num_running: int = 0
    tenant_cap: int | None = None
    running_by_tenant: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = min(self.tokens, self.slots, self.available_pages, self.reserved_pages, self.watermark_pages)
        if least < 0:
            names = ("tokens", "slots", "available_pages", "reserved_pages", "watermark_pages")
            name = next(name for name in names if getattr(self, name) < 0)
            raise ConfigError(name, getattr(self, name), "is negative", "give what is left, at least 0")

    def refusal_of(self, demand: AdmissionDemand) -> RefusalReason | None:
        """Return why a request cannot be admitted, or None if it can. Without ``num_pages`` the pool is not asked."""
        if self.tokens <= 0 or demand.num_tokens > self.tokens:
            return "tokens"
        if self.slots <= 0:
            return "slots"
        if self.tenant_cap is not None and self.running_by_tenant.get(demand.tenant, 0) >= self.tenant_cap:
            return "tenant"
        if demand.num_pages is None:
            return None
        num_left = self.available_pages - self.reserved_pages - demand.num_pages
        if num_left >= self.watermark_pages:
            return None
        if num_left < 0:
            return "pages"
        return "watermark" if self.num_running else None

    def num_missing_pages(self, demand: AdmissionDemand) -> int:
        """Return how many more pages must be available for a request that ``pages`` or ``watermark`` refuses."""
        num_kept = self.reserved_pages + (self.watermark_pages if self.num_running else 0)
        return (demand.num_pages or 0) + num_kept - self.available_pages

    def spend(self, demand: AdmissionDemand, *, reserved_pages: int = 0) -> None:
        """Subtract an admitted request.

        Args:
            demand: what it takes; its ``num_tokens`` are those of the chunk that this step computes.
            reserved_pages: pages that it may allocate after this step.
        """
        self.tokens -= demand.num_tokens
        self.slots -= 1
        self.num_running += 1
        self.reserved_pages += reserved_pages
        if self.tenant_cap is not None:
            self.running_by_tenant[demand.tenant] = self.running_by_tenant.get(demand.tenant, 0) + 1
