"""The rows of the metric catalogue about the hierarchical cache: where prompts were found, what moved between tiers.

SGLang's metrics of its hierarchical cache count tokens; these count pages, under names of their own. ``page_size``
makes one of the other.
"""

from __future__ import annotations

from observability.metric import Metric, counter

__all__ = ["HICACHE_METRICS"]


def _row(name: str, unit: str, field: str, help: str) -> Metric:
    return counter(f"hicache_{name}_total", unit, f"totals.tiers.{field}", help)


HICACHE_METRICS: tuple[Metric, ...] = (
    _row("prompt_tokens", "tokens", "prompt_tokens", "Input tokens of requests at their first admission."),
    _row("device_hit_tokens", "tokens", "device_hit_tokens", "The part of them that was cached on the device."),
    _row(
        "host_hit_tokens", "tokens", "host_hit_tokens", "The part of them that was on the host, and loaded from there."
    ),
    _row(
        "storage_hit_tokens",
        "tokens",
        "storage_hit_tokens",
        "The part of them that was in storage, and read from there.",
    ),
    _row("pages_written", "pages", "pages_written", "Pages copied to the host."),
    _row("pages_not_written", "pages", "pages_not_written", "Copies to the host given up: no room, or a failure."),
    _row("pages_loaded", "pages", "pages_loaded", "Pages copied back to the device."),
    _row("pages_not_loaded", "pages", "pages_not_loaded", "Copies back given up after a failure on some rank."),
    _row("pages_backed_up", "pages", "pages_backed_up", "Pages written to storage."),
    _row(
        "pages_not_backed_up",
        "pages",
        "pages_not_backed_up",
        "Writes to storage given up: too many under way, or a failure.",
    ),
    _row("pages_prefetched", "pages", "pages_prefetched", "Pages read from storage and put in the cache."),
    _row("pages_revoked", "pages", "pages_revoked", "Pages found in storage and then not put in the cache."),
    _row("prefetches", "prefetches", "prefetches", "Reads from storage begun."),
    _row("prefetches_revoked", "prefetches", "prefetches_revoked", "The part of them that ended without a page."),
    _row("pages_dropped", "pages", "pages_dropped", "Pages evicted from the device without a copy on the host."),
)
"""One row for each field of ``TierStats``; without a hierarchical cache none of them is exported."""
