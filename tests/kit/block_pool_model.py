"""Histories of requests on a block table, and a naive model of one: a list of pages in the order of their next use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hypothesis import strategies as st

from scheduler_components import OutOfPagesError
from scheduler_components.cache import BlockTableCache, TableMatch, hash_pages
from scheduler_components.checks.pool_stats_observer import BlockTablePool
from scheduler_components.invariant_checker import find_pool_violations
from scheduler_components.testing import EventLedger
from scheduler_components.values import HeldCount, PageHolding

PAGE_SIZE = 2


class BlockPool(Protocol):
    """A pool of blocks that a ``BlockTableCache`` is compared with. Blocks are named by their hash."""

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Return the pages of the longest cached prefix."""
        ...

    def touch(self, pages: Sequence[int]) -> None: ...

    def num_free(self) -> int:
        """Return the pages that can be allocated, those of the table without references included."""
        ...

    def allocate(self, num_pages: int) -> list[int]: ...

    def cache(self, pages: Sequence[int], hashes: Sequence[int]) -> None:
        """Enter pages into the table; some may be in it already."""
        ...

    def free(self, pages: Sequence[int]) -> None:
        """Release the pages of a request, given in the order of its tokens."""
        ...

    def reset(self) -> None: ...

    def hashes(self) -> set[int]: ...


class NaiveBlockPool:
    """vLLM's rules with one list for all pages without references. Page 0 is reserved."""

    def __init__(self, num_pages: int) -> None:
        self.queue = list(range(1, num_pages + 1))
        self.hash_of: dict[int, int] = {}  # in the order of entry
        self.references = [0] * (num_pages + 1)

    def match(self, hashes: Sequence[int]) -> list[int]:
        found: list[int] = []
        for each in hashes:
            copies = [page for page, known in self.hash_of.items() if known == each]
            if not copies:
                break
            found.append(copies[0])
        return found

    def touch(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self.references[page]:
                self.queue.remove(page)
            self.references[page] += 1

    def num_free(self) -> int:
        return len(self.queue)

    def allocate(self, num_pages: int) -> list[int]:
        pages, self.queue = self.queue[:num_pages], self.queue[num_pages:]
        for page in pages:
            self.hash_of.pop(page, None)
            self.references[page] = 1
        return pages

    def cache(self, pages: Sequence[int], hashes: Sequence[int]) -> None:
        for page, each in zip(pages, hashes, strict=True):
            self.hash_of.setdefault(page, each)

    def free(self, pages: Sequence[int]) -> None:
        released = []
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                released.append(page)
        uncached = [page for page in released if page not in self.hash_of]
        self.queue = uncached + self.queue + [page for page in released if page in self.hash_of]

    def reset(self) -> None:
        self.hash_of.clear()

    def hashes(self) -> set[int]:
        return set(self.hash_of.values())


@dataclass
class _Request:
    tokens: list[int]
    pages: list[int]
    match: TableMatch
    num_cached: int = 0


_TOKENS = st.lists(st.integers(0, 1), min_size=PAGE_SIZE, max_size=8 * PAGE_SIZE)  # two tokens: prefixes are shared
_WHICH = st.integers(0, 7)

HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), _TOKENS),
        st.tuples(st.just("insert"), _WHICH, st.integers(1, 8)),
        st.tuples(st.just("finish"), _WHICH),
        st.tuples(st.just("finish"), _WHICH),
    ),
    max_size=60,
)
"""Calls of some requests: begin with a prompt, insert some of its pages, finish."""


@dataclass
class BlockTableComparison:
    """The same history on a ``BlockTableCache`` and on another pool: equal pages in every call."""

    cache: BlockTableCache
    pool: BlockPool
    requests: list[_Request] = field(default_factory=list)
    ledger: EventLedger = field(default_factory=lambda: EventLedger(block_size=PAGE_SIZE))

    def run(self, history: Sequence[tuple[object, ...]]) -> None:
        for name, *arguments in history:
            getattr(self, str(name))(*arguments)
            self.check()
        while self.requests:
            self.finish(0)
        self.cache.clear()
        self.pool.reset()
        self.check()

    def begin(self, tokens: list[int]) -> None:
        match = self.cache.match_prefix(tokens)
        assert match.page_array.tolist() == self.pool.match(hash_pages(tokens, PAGE_SIZE))
        self.cache.lock(match)
        self.pool.touch(match.pages)
        lacking = -(-len(tokens) // PAGE_SIZE) - len(match.pages)
        try:
            own = self.cache.allocate(lacking)
        except OutOfPagesError:
            assert lacking > self.pool.num_free()
            self.cache.unlock(match)
            self.pool.free(match.pages)
            return
        assert own == self.pool.allocate(lacking)
        self.requests.append(_Request(tokens, [*match.pages, *own], match, len(match.pages)))

    def insert(self, which: int, num_pages: int) -> None:
        """Cache the first pages of a request, at least those that are cached."""
        if not self.requests:
            return
        request = self.requests[which % len(self.requests)]
        num_pages = max(request.num_cached, min(num_pages, len(request.tokens) // PAGE_SIZE))
        tokens, pages = request.tokens[: num_pages * PAGE_SIZE], request.pages[:num_pages]
        match = self.cache.insert(tokens, pages)
        assert list(match.pages) == pages, "the pages of a running request were replaced"
        self.cache.lock(match)
        self.cache.unlock(request.match)
        self.pool.cache(pages, hash_pages(tokens, PAGE_SIZE))
        request.match, request.num_cached = match, num_pages

    def finish(self, which: int) -> None:
        if self.requests:
            request = self.requests.pop(which % len(self.requests))
            self.cache.free(request.pages[request.num_cached :])
            self.cache.unlock(request.match)
            self.pool.free(request.pages)

    def check(self) -> None:
        """Compare table and free pages; also check the pool's rules, and that the events add up to the table."""
        assert (self.cache.free_tokens + self.cache.evictable_tokens) // PAGE_SIZE == self.pool.num_free()
        hashes = sorted(self.cache.block_hashes())
        assert hashes == sorted(self.pool.hashes())
        assert self.ledger.apply_all(self.cache.take_events()) == []
        assert sorted(self.ledger.hashes()) == hashes
        assert find_pool_violations(BlockTablePool(cache=self.cache, requests=self)) == []
        self.cache.check_integrity()
        assert self.cache.num_locks == len(self.requests)

    def count_held(self) -> HeldCount:
        return HeldCount(sum(len(request.pages) - request.num_cached for request in self.requests))

    def holdings(self) -> Iterator[PageHolding]:
        for number, request in enumerate(self.requests):
            end = request.num_cached
            yield PageHolding(str(number), "request", request.pages[end:], request.pages[:end], request.match)
