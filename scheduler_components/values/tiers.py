"""Counters of a hierarchical cache, and where the cached tokens of a prompt were found."""

from __future__ import annotations

import msgspec

__all__ = [
    "CachedTokens",
    "TierStats",
]


class CachedTokens(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The cached tokens of one prompt, by the tier on which they were found, as ``TierStats`` tells hits apart."""

    device: int = 0
    host: int = 0
    storage: int = 0


class TierStats(msgspec.Struct, gc=False):
    """Counters since the start; each only ever grows. The same on every rank of a replica.

    Attributes:
        prompt_tokens: prompts at their first admission.
        device_hit_tokens, host_hit_tokens, storage_hit_tokens: of them, what was cached, by the tier on which it was
            found: a page that had to be loaded from the host first is a hit of the host, one that had to be read
            from storage is a hit of storage.
        pages_written, pages_not_written: copied to the host; given up because of no room or a failure on some rank.
        pages_loaded, pages_not_loaded: copied back to the device; given up.
        pages_backed_up, pages_not_backed_up: written to storage; given up.
        pages_prefetched: read from storage and put in the tree.
        pages_revoked: found in storage on every rank and then not put in the tree.
        prefetches, prefetches_revoked: begun; of them, ended without a page.
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

    def record_admission(
        self, *, prompt_tokens: int, cached_tokens: int, loaded_tokens: int, read_tokens: int
    ) -> CachedTokens:
        """Count one prompt that begins to run: how much of it is cached, and what was moved for it before."""
        loaded = min(loaded_tokens, cached_tokens)
        read = min(read_tokens, loaded)
        cached = CachedTokens(cached_tokens - loaded, loaded - read, read)
        self.prompt_tokens += prompt_tokens
        self.device_hit_tokens += cached.device
        self.host_hit_tokens += cached.host
        self.storage_hit_tokens += cached.storage
        return cached

    def copy(self) -> TierStats:
        """Return the counts of this moment."""
        return msgspec.structs.replace(self)
