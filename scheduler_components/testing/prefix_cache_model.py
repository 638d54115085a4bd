"""A prefix cache that is too simple to be wrong: one dictionary entry a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["ModelPrefix", "PrefixCacheModel"]


class ModelPrefix(NamedTuple):
    """One cached page, named by everything before it: its tenant's salt and all tokens up to its end."""

    salt: str
    tokens: tuple[int, ...]


@dataclass
class PrefixCacheModel:
    """Cached prefixes with their page indices; time is a count of calls.

    Evicts the least recently used, the deepest page of a prefix first. Subclass it and override ``victims`` for a
    cache with another policy.
    """

    page_size: int
    num_pages: int
    pages: dict[ModelPrefix, int] = field(default_factory=dict)
    used_at: dict[ModelPrefix, int] = field(default_factory=dict)
    locks: Counter[ModelPrefix] = field(default_factory=Counter)
    held: set[int] = field(default_factory=set)
    clock: int = 0

    def whole(self, salt: str, tokens: Sequence[int]) -> list[ModelPrefix]:
        """The whole pages of a prompt, cached or not."""
        size = self.page_size
        return [ModelPrefix(salt, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def cached(self, salt: str, tokens: Sequence[int]) -> list[ModelPrefix]:
        """Those of them that are cached."""
        return [prefix for prefix in self.whole(salt, tokens) if prefix in self.pages]

    def touch(self, prefixes: list[ModelPrefix]) -> None:
        """Mark as the most recently used."""
        self.clock += 1
        self.used_at.update(dict.fromkeys(prefixes, self.clock))

    def unlock(self, prefixes: list[ModelPrefix]) -> None:
        """Give back a lock; what nobody locks any more was used now."""
        self.locks.subtract(prefixes)
        self.touch([prefix for prefix in prefixes if not self.locks[prefix]])

    def unlocked(self) -> list[ModelPrefix]:
        """Evictable pages."""
        return [prefix for prefix in self.pages if not self.locks[prefix]]

    def num_free(self) -> int:
        """Pages that are neither cached nor held by a request."""
        return self.num_pages - len(self.pages) - len(self.held)

    def victims(self) -> list[ModelPrefix]:
        """Evictable pages in the order in which they go."""
        return sorted(self.unlocked(), key=lambda prefix: (self.used_at[prefix], -len(prefix.tokens)))

    def evict(self, num_pages: int) -> int:
        """Evict up to ``num_pages``; returns how many."""
        gone = self.victims()[: max(0, num_pages)]
        for prefix in gone:
            del self.pages[prefix]
        return len(gone)
