"""The pages of a KV pool: which are free, which a request holds, which the prefix tree holds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from scheduler_components.errors import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.validators import check_integer

__all__ = ["PagePool"]

_FREE, _HELD, _CACHED = 0, 1, 2
_STATE_NAMES = ("free", "held by a request", "cached")


class PagePool:
    """Page indices ``0 .. num_pages - 1``, each free, held by a request, or cached by the tree.

    Allocation is last-in first-out, so ranks that make the same calls get the same pages. A call that names a wrong
    page changes nothing.

    Args:
        num_pages: pages in the pool.

    Raises:
        ConfigError: ``num_pages`` is below 1.
    """

    __slots__ = ("_free", "_num_cached", "_states", "num_pages")

    def __init__(self, num_pages: int) -> None:
        check_integer("num_pages", num_pages)
        self.num_pages = num_pages
        self._free = array("I", range(num_pages - 1, -1, -1))
        self._states = bytearray(num_pages)
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can hand out."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that the tree holds."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - len(self._free) - self._num_cached

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out free pages to a request.

        Raises:
            ConfigError: ``num_pages`` is negative.
            OutOfPagesError: fewer pages are free; nothing is handed out.
        """
        if num_pages < 0:
            raise ConfigError("num_pages", num_pages, "is negative", "ask for 0 or more pages")
        rest = len(self._free) - num_pages
        if rest < 0:
            raise OutOfPagesError(num_pages, len(self._free))
        pages = self._free[rest:].tolist()
        del self._free[rest:]
        pages.reverse()
        self._move(pages, _HELD)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take back pages that a request holds.

        Raises:
            CacheIntegrityError: a page is not held by a request (freed twice, or cached), or is named twice.
        """
        self.expect_held(pages)
        self._move(pages, _FREE)
        self._free.extend(reversed(pages))

    def to_cache(self, pages: Sequence[int]) -> None:
        """Pass pages from a request to the tree.

        Raises:
            CacheIntegrityError: a page is not held by a request, or is named twice.
        """
        self.expect_held(pages)
        self._move(pages, _CACHED)
        self._num_cached += len(pages)

    def from_cache(self, pages: Sequence[int]) -> None:
        """Take back pages from the tree.

        Raises:
            CacheIntegrityError: a page is not cached, or is named twice.
        """
        self._expect(pages, _CACHED)
        self._move(pages, _FREE)
        self._num_cached -= len(pages)
        self._free.extend(reversed(pages))

    def expect_held(self, pages: Sequence[int]) -> None:
        """Check that a request may give these pages away.

        Raises:
            CacheIntegrityError: a page is not held by a request, or is named twice.
        """
        self._expect(pages, _HELD)

    def check(self, cached: Sequence[int]) -> None:
        """Check that every page is in one place, ``cached`` being the pages that the tree holds.

        Raises:
            CacheIntegrityError: with the count that does not add up.
        """
        self._expect(cached, _CACHED)
        free, held, in_tree = (self._states.count(state) for state in (_FREE, _HELD, _CACHED))
        if (free, in_tree, self._num_cached) != (len(self._free), len(cached), len(cached)):
            raise CacheIntegrityError(
                f"{free} free + {held} held + {in_tree} cached = {self.num_pages} pages, but the free list has "
                f"{len(self._free)}, the count of cached pages is {self._num_cached}, and the tree has {len(cached)}"
            )
        self._expect(self._free, _FREE)

    def _move(self, pages: Sequence[int], state: int) -> None:
        states = self._states
        for page in pages:
            states[page] = state

    def _expect(self, pages: Sequence[int], state: int) -> None:
        if len(set(pages)) != len(pages):
            raise CacheIntegrityError(f"{len(pages) - len(set(pages))} of {len(pages)} pages are named twice")
        states = self._states
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise CacheIntegrityError(f"page {page} is not one of 0 to {self.num_pages - 1}")
            if states[page] != state:
                problem = f"page {page} is {_STATE_NAMES[states[page]]}, not {_STATE_NAMES[state]}"
                raise CacheIntegrityError(problem)
