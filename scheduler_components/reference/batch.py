"""Values that pass between the scheduler, its device and its callers in one step."""

from __future__ import annotations

import msgspec

from scheduler_components.reference.request import Request

__all__ = ["ScheduledBatch", "ScheduledWork", "StepResult"]


class ScheduledWork(msgspec.Struct, frozen=True):
    """Positions ``start`` to ``end`` of one request, to go through the device in this step.

    Attributes:
        request: whose tokens they are; ``request.pages`` covers ``end`` positions.
        start, end: half-open range of positions in ``request.token_ids``.
        is_prefill: False for the one new position of a decode.
    """

    request: Request
    start: int
    end: int
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class ScheduledBatch(msgspec.Struct, frozen=True):
    """What one forward pass computes: decodes and prefill chunks, mixed, in order of arrival.

    Attributes:
        works: at most one entry a request.
        num_prefill_tokens, num_decode_tokens: positions computed, by kind.
        num_context_tokens: positions whose KV is read: the sum of all ``end``.
        num_admitted, num_retracted: requests that began and lost their residence while the batch was made.
    """

    works: tuple[ScheduledWork, ...] = ()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    num_admitted: int = 0
    num_retracted: int = 0


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What one ``Scheduler.step`` did.

    Attributes:
        step: number of the step, from 1.
        num_news: requests that got tokens or ended; the tokens themselves go to the scheduler's output sink.
        num_prefill_tokens, num_decode_tokens: positions computed, by kind.
        num_admitted, num_retracted: requests that began and lost their residence.
        digest: ``Scheduler.state_digest`` after the step.
    """

    step: int
    num_news: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_admitted: int
    num_retracted: int
    digest: int
