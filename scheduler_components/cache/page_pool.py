"""PagePool: the pages of a KV pool, each free, held by a request, or cached by the prefix tree.

Pages are passed in arrays, and mostly form runs: 40, 41, 42 and so on. With one token per page, a prompt has ten
thousand of them, so the pool checks and moves a run as a whole. It halves other arrays until the parts are runs, or so
short that moving single pages is faster. Pages are allocated again in the order in which they were freed, so runs stay
runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import CacheIntegrityError, ConfigError, OutOfPagesError

__all__ = ["PagePool"]

_FREE, _HELD, _CACHED = 0, 1, 2
_STATE_NAMES = ("free", "held by a request", "cached")

_SHORT = 128
"""Below this number of pages, moving them one by one is faster: checking for a run costs as much as a dozen pages."""


class PagePool:
    """The page indices ``0 .. num_pages - 1``, each free, held by a request, or cached by the tree.

    Allocation is last-in first-out, so ranks that make equal calls get equal pages. A call that raises changes nothing.

    Args:
        num_pages: pages in the pool.

    Raises:
        ConfigError: ``num_pages`` is below 1.
    """

    __slots__ = ("_num_cached", "_num_taken", "_numbers", "_stack", "_states", "num_pages")

    def __init__(self, num_pages: int) -> None:
        check_integer("num_pages", num_pages)
        self.num_pages = num_pages
        # The free pages, the next one first, after ``_num_taken`` places without meaning.
        self._stack = array("I", range(num_pages))
        self._num_taken = 0
        self._numbers = self._stack.tobytes()  # bytes that a run is compared with
        self._states = bytearray(num_pages)
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can return."""
        return self.num_pages - self._num_taken

    @property
    def num_cached(self) -> int:
        """Pages that the tree holds."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Pages that requests hold."""
        return self._num_taken - self._num_cached

    def free_pages(self) -> array[int]:
        """Return a copy of the free list, the next page first. Use it in checks, not in steps."""
        return self._stack[self._num_taken :]

    def allocate(self, num_pages: int) -> array[int]:
        """Move free pages to a request and return them as an ``array("I")``.

        Raises:
            ConfigError: ``num_pages`` is negative.
            OutOfPagesError: fewer pages are free; nothing has changed.
        """
        if num_pages < 0:
            raise ConfigError("num_pages", num_pages, "is negative", "ask for 0 or more pages")
        stop = self._num_taken + num_pages
        if stop > self.num_pages:
            raise OutOfPagesError(num_pages, self.num_free)
        pages = self._stack[self._num_taken : stop]
        self._move(pages, _FREE, _HELD)
        self._num_taken = stop
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Free pages that a request holds.

        Raises:
            CacheIntegrityError: a page is not held by a request (freed twice, or cached), or is named twice.
        """
        self._push(self._move(pages, _HELD, _FREE))

    def move_to_cache(self, pages: Sequence[int]) -> None:
        """Pass pages from a request to the tree.

        Raises:
            CacheIntegrityError: a page is not held by a request, or is named twice.
        """
        self._num_cached += len(self._move(pages, _HELD, _CACHED))

    def free_cached(self, pages: Sequence[int]) -> None:
        """Free pages that the tree holds.

        Raises:
            CacheIntegrityError: a page is not cached, or is named twice.
        """
        moved = self._move(pages, _CACHED, _FREE)
        self._num_cached -= len(moved)
        self._push(moved)

    def as_array(self, pages: Sequence[int]) -> array[int]:
        """Return pages as an ``array("I")``, which every method here accepts without a copy.

        Raises:
            CacheIntegrityError: a page is negative or beyond 32 bits, so it is not in this pool.
        """
        if isinstance(pages, array) and pages.typecode == "I":
            return pages
        try:
            # array() would read bytes as raw memory, not as a sequence of numbers.
            return array("I", list(pages) if isinstance(pages, bytes | bytearray) else pages)
        except OverflowError as error:
            wrong = next(page for page in pages if not 0 <= page < self.num_pages)
            raise CacheIntegrityError(f"page {wrong} is not one of 0 to {self.num_pages - 1}") from error

    def check_held(self, pages: Sequence[int]) -> None:
        """Check that a request holds these pages.

        Raises:
            CacheIntegrityError: a page is not held by a request, or is named twice.
        """
        self._expect(pages, _HELD)

    def check(self, cached: Sequence[int]) -> None:
        """Check that every page is in exactly one state.

        Args:
            cached: the pages that the tree holds.

        Raises:
            CacheIntegrityError: with the counts that differ.
        """
        self._expect(cached, _CACHED)
        free, held, in_tree = (self._states.count(state) for state in (_FREE, _HELD, _CACHED))
        if (free, in_tree, self._num_cached) != (self.num_free, len(cached), len(cached)):
            raise CacheIntegrityError(
                f"{free} free + {held} held + {in_tree} cached = {self.num_pages} pages, but the free list has "
                f"{self.num_free}, the count of cached pages is {self._num_cached}, and the tree has {len(cached)}"
            )
        self._expect(self.free_pages(), _FREE)

    def _push(self, pages: array[int]) -> None:
        """Put free pages on the stack. Its array keeps its size: one that shrinks and grows costs page faults."""
        start = self._num_taken - len(pages)
        self._stack[start : self._num_taken] = pages
        self._num_taken = start

    def _move(self, pages: Sequence[int], old: int, new: int) -> array[int]:
        """Move pages from one state to another and return them. If a page is not in state ``old``, nothing changes."""
        moving = self.as_array(pages)
        num_moved = self._move_from_start(moving, old, new)
        if num_moved < len(moving):  # the second occurrence of a page is no longer in ``old``
            for page in moving[:num_moved]:
                self._states[page] = old
            self._expect(moving, old)
        return moving

    def _move_from_start(self, pages: array[int], old: int, new: int) -> int:
        """Move pages up to the first one that is not in ``old``. Return how many were moved."""
        num_pages = len(pages)
        if not num_pages:
            return 0
        states, first = self._states, pages[0]
        end = first + num_pages
        is_run = pages[-1] == end - 1 and self._numbers.startswith(pages, first * pages.itemsize)
        if is_run and states.startswith(bytes((old,)) * num_pages, first):
            states[first:end] = bytes((new,)) * num_pages
            return num_pages
        if num_pages > _SHORT:
            half = num_pages // 2
            num_moved = self._move_from_start(pages[:half], old, new)
            return num_moved if num_moved < half else half + self._move_from_start(pages[half:], old, new)
        num_moved = 0
        try:
            for num_moved, page in enumerate(pages):
                if states[page] != old:
                    return num_moved
                states[page] = new
        except IndexError:
            return num_moved
        return num_pages

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
