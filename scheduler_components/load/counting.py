"""How many tokens a waiting request stands for: one rule, used by every queue and every report.

The rule is that of SGLang's load reports (0.5.23, ``num_total_tokens`` and ``num_waiting_uncached_tokens``): a
waiting request counts its whole input as pending, and the part that no cached prefix covers as uncached.
"""

from __future__ import annotations

from scheduler_components.ports import QueuedRequest

__all__ = ["count_request"]


def count_request(request: QueuedRequest) -> tuple[int, int]:
    """Return ``(pending_tokens, uncached_tokens)`` of one request, with ``0 <= uncached <= pending``.

    Values outside that range are cut off: a count goes into gauges and dispatch decisions, and a prefix match
    that is longer than a request since shortened must not make them negative.
    """
    pending_tokens = request.num_input_tokens
    uncached_tokens = pending_tokens - request.num_cached_tokens
    if 0 <= uncached_tokens <= pending_tokens:
        return pending_tokens, uncached_tokens
    pending_tokens = max(0, pending_tokens)
    return pending_tokens, min(max(0, uncached_tokens), pending_tokens)
