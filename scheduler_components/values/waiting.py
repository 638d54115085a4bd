"""Requests that wait for something other than pages: their time limits, and statistics."""

from __future__ import annotations

import msgspec

__all__ = ["AgreedQueueStats"]


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
