"""A page is in one place at a time; a call that names a wrong page changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler_components import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.cache import PagePool

PAGES = st.lists(st.integers(-2, 9), max_size=4)


class PagePoolMachine(RuleBasedStateMachine):
    """Three sets stand for the pool; any list of pages is tried on every call."""

    @initialize(num_pages=st.integers(1, 8))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.free, self.held, self.cached = set(range(num_pages)), set[int](), set[int]()

    @rule(num_pages=st.integers(-1, 9))
    def allocate(self, num_pages: int) -> None:
        if num_pages < 0:
            with pytest.raises(ConfigError, match="num_pages"):
                self.pool.allocate(num_pages)
        elif num_pages > len(self.free):
            with pytest.raises(OutOfPagesError) as caught:
                self.pool.allocate(num_pages)
            assert (caught.value.wanted_pages, caught.value.free_pages) == (num_pages, len(self.free))
        else:
            pages = self.pool.allocate(num_pages)
            assert len(pages) == num_pages
            self.move(pages, self.free, self.held)

    @rule(pages=PAGES)
    def release(self, pages: list[int]) -> None:
        self.call("free", pages, self.held, self.free)

    @rule(pages=PAGES)
    def to_cache(self, pages: list[int]) -> None:
        self.call("to_cache", pages, self.held, self.cached)

    @rule(pages=PAGES)
    def from_cache(self, pages: list[int]) -> None:
        self.call("from_cache", pages, self.cached, self.free)

    def call(self, method: str, pages: list[int], source: set[int], target: set[int]) -> None:
        if source.issuperset(pages) and len(set(pages)) == len(pages):
            getattr(self.pool, method)(pages)
            self.move(pages, source, target)
        else:
            with pytest.raises(CacheIntegrityError):
                getattr(self.pool, method)(pages)

    def move(self, pages: list[int], source: set[int], target: set[int]) -> None:
        assert source.issuperset(pages)
        source.difference_update(pages)
        target.update(pages)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_cached == len(self.cached)
        self.pool.check(sorted(self.cached))


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_pages_come_in_a_fixed_order() -> None:
    pool = PagePool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([1, 3])
    assert pool.allocate(3) == [1, 3, 4]


def test_a_check_names_the_numbers() -> None:
    pool = PagePool(4)
    pool.to_cache(pool.allocate(2))
    with pytest.raises(CacheIntegrityError, match=r"2 free \+ 0 held \+ 2 cached = 4 pages.* the tree has 1$"):
        pool.check([0])
    with pytest.raises(CacheIntegrityError, match="page 3 is free, not cached"):
        pool.check([0, 3])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(0)
