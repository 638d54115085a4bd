"""Counters of a hierarchical cache, and where the cached tokens of a prompt were found."""

from __future__ import annotations

import msgspec

__all__ = [
    "CachedTokens",
    "TierStats",
]


class CachedTokens(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The cached tokens of one prompt, by the tier that held them, as `TierStats` defines it."""

    device: int = 0
    host: int = 0
    storage: int = 0


class TierStats(msgspec.Struct, gc=False):
    """Counters since the start. They never decrease, and are equal on all ranks of a replica.

    Attributes:
        prompt_tokens: tokens of prompts at their first admission.
        device_hit_tokens, host_hit_tokens, storage_hit_tokens: the cached part of them, by tier. A page that was loaded
            back from the host counts as a host hit, a page that was prefetched from storage as a storage hit.
        pages_written, pages_not_written: copied to the host; not copied because of no room or a failure of a rank.
        pages_loaded, pages_not_loaded: copied back to the device; not copied.
        pages_backed_up, pages_not_backed_up: written to storage; not written.
        pages_prefetched: read from storage and inserted into the tree.
        pages_revoked: found in storage on every rank, but not inserted into the tree.
        prefetches, prefetches_revoked: started prefetches; those that ended without a page.
        pages_dropped: evicted from the device without a copy on the host.
    """

    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    pages_written: int = 0
    pages_not_written: int = 0
    pages_loaded: int = 0
    pages_not_loaded: int = 0
    pages_backed_up: int = 0
    pages_not_backed_up: int = 0
    pages_prefetched: int = 0
    pages_revoked: int = 0
    prefetches: int = 0
    prefetches_revoked: int = 0
    pages_dropped: int = 0

    def copy(self) -> TierStats:
        return msgspec.structs.replace(self)
