"""Requests that wait for something other than pages: their time limits, and statistics."""

from __future__ import annotations

import msgspec

__all__ = ["RequestTimeouts"]


class RequestTimeouts(msgspec.Struct, frozen=True, gc=False):
    """How long a request may take, in seconds; None for no limit. Compared with the agreed clock (``StepAgreement``).

    Attributes:
        queue_s: until it is first admitted.
        total_s: until its end.
    """

    queue_s: float | None = None
    total_s: float | None = None
