"""Counters of a hierarchical cache, and where the cached tokens of a prompt were found."""

from __future__ import annotations

import msgspec

__all__ = [
    "CachedTokens",
]


class CachedTokens(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The cached tokens of one prompt, by the tier that held them, as `TierStats` defines it."""

    device: int = 0
    host: int = 0
    storage: int = 0
