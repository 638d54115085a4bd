"""Requests that wait for something other than pages: their time limits, and statistics."""

from __future__ import annotations

import msgspec

__all__ = ["AgreedQueueStats", "DeadlineStats", "LoraStats", "RequestTimeouts"]


class RequestTimeouts(msgspec.Struct, frozen=True, gc=False):
    """How long a request may take, in seconds; None for no limit. Compared with the agreed clock (``StepAgreement``).

    Attributes:
        queue_s: until it is first admitted.
        total_s: until its end.
    """

    queue_s: float | None = None
    total_s: float | None = None


class DeadlineStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of ``RequestDeadlines``, equal on all ranks.

    Attributes:
        waiting: requests in flight that have a limit.
        queue_timeouts: requests that were not admitted in time.
        timeouts: requests that were not complete in time.
    """

    waiting: int = 0
    queue_timeouts: int = 0
    timeouts: int = 0


class AgreedQueueStats(msgspec.Struct, gc=False):
    """Counters of one ``AgreedQueue``. All but ``unknown`` are equal on all ranks.

    Attributes:
        waiting: requests that wait now.
        ready, failed, expired: departures, by reason.
        cancelled: requests that were aborted while they waited.
        refused: requests that were not added because the queue was full.
        unknown: reports of this rank about requests that did not wait.
    """

    waiting: int = 0
    ready: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    refused: int = 0
    unknown: int = 0


class LoraStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of a ``LoraQueue``, equal on all ranks.

    Attributes:
        registered: adapters that requests may name.
        waiting: requests that wait for their adapters.
        loads, loads_failed: adapters that all ranks loaded, and that some rank could not load.
        evictions: adapters that were unloaded.
        requests_failed, requests_refused: requests whose adapter could not be loaded, and that found the queue full.
    """

    registered: int = 0
    waiting: int = 0
    loads: int = 0
    loads_failed: int = 0
    evictions: int = 0
    requests_failed: int = 0
    requests_refused: int = 0
