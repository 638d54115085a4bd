"""Property: a page is in one state at a time, and a call that names a wrong page changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kit.searches import num_examples

from scheduler_components import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.cache import PagePool

PAGES = st.lists(st.integers(-2, 9), max_size=4)


FORMS: dict[str, Callable[[list[int]], Sequence[int]]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda pages: array("I", pages),
}
FAULTS: dict[str, Callable[[list[int], int], list[int]]] = {
    "none": lambda pages, _: pages,
    "turned": lambda pages, at: pages[at:] + pages[:at],
    "reversed": lambda pages, _: pages[::-1],
    "scattered": lambda pages, at: pages[:at:2] + pages[at:],
    "named twice": lambda pages, at: [*pages, pages[at]],
    "negative": lambda pages, at: [*pages[:at], -1, *pages[at:]],
    "beyond": lambda pages, at: [*pages[:at], pages[at] + 600, *pages[at:]],
    "another page": lambda pages, at: [*pages[:at], (pages[at] + 300) % 600, *pages[at:]],
}


class PagePoolMachine(RuleBasedStateMachine):
    """Compare the pool with a model of three sets and the order of free pages. Every call gets arbitrary lists of
    pages.
    """

    @initialize(num_pages=st.integers(1, 8) | st.just(600))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.free, self.held, self.cached = set(range(num_pages)), set[int](), set[int]()
        self.stack = list(range(num_pages))[::-1]  # the next page to allocate is last

    @rule(num_pages=st.integers(-1, 9) | st.integers(100, 600))
    def allocate(self, num_pages: int) -> None:
        if num_pages < 0:
            with pytest.raises(ConfigError, match="num_pages"):
                self.pool.allocate(num_pages)
        elif num_pages > len(self.free):
            with pytest.raises(OutOfPagesError) as caught:
                self.pool.allocate(num_pages)
            assert (caught.value.wanted_pages, caught.value.free_pages) == (num_pages, len(self.free))
        else:
            pages = list(self.pool.allocate(num_pages))
            assert pages == [self.stack.pop() for _ in range(num_pages)]
            self.move(pages, self.free, self.held)

    @rule(pages=PAGES)
    def release(self, pages: list[int]) -> None:
        self.call("free", pages, self.held, self.free)

    @rule(pages=PAGES)
    def move_to_cache(self, pages: list[int]) -> None:
        self.call("move_to_cache", pages, self.held, self.cached)

    @rule(pages=PAGES)
    def free_cached(self, pages: list[int]) -> None:
        self.call("free_cached", pages, self.cached, self.free)

    @rule(
        method=st.sampled_from(["free", "move_to_cache", "move_to_cache", "free_cached"]),
        start=st.integers(0, 500),
        count=st.integers(1, 600),
        at=st.integers(0, 600),
        fault=st.sampled_from(["none", *sorted(FAULTS)]),
        form=st.sampled_from(sorted(FORMS)),
    )
    def move_a_long_run(self, method: str, start: int, count: int, at: int, fault: str, form: str) -> None:
        source = self.cached if method == "free_cached" else self.held
        target = self.cached if method == "move_to_cache" else self.free
        run = sorted(source)[start : start + count]
        if run:
            self.call(method, FAULTS[fault](run, at % len(run)), source, target, FORMS[form])

    def call(
        self,
        method: str,
        pages: list[int],
        source: set[int],
        target: set[int],
        form: Callable[[list[int]], Sequence[int]] = list,
    ) -> None:
        given = form(pages) if min(pages, default=0) >= 0 else pages
        if source.issuperset(pages) and len(set(pages)) == len(pages):
            getattr(self.pool, method)(given)
            self.move(pages, source, target)
            if target is self.free:
                self.stack += pages[::-1]
        else:
            with pytest.raises(CacheIntegrityError):
                getattr(self.pool, method)(given)

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


TestPagePoolMachine = pytest.mark.soak(PagePoolMachine.TestCase)
TestPagePoolMachine.settings = settings(max_examples=num_examples(3), stateful_step_count=30, deadline=None)


def test_pages_are_allocated_in_a_fixed_order() -> None:
    pool = PagePool(6)
    assert list(pool.allocate(4)) == [0, 1, 2, 3]
    pool.free([1, 3])
    assert list(pool.allocate(3)) == [1, 3, 4]
    pool.move_to_cache([3, 0, 4])
    pool.free_cached([3, 0, 4])
    assert list(pool.allocate(4)) == [3, 0, 4, 5]


def test_equal_ends_do_not_make_a_run() -> None:
    pool = PagePool(16)
    pool.allocate(16)
    pool.move_to_cache([0, 9, 2, 3])
    pool.check([0, 2, 3, 9])
    with pytest.raises(CacheIntegrityError, match="page 9 is cached"):
        pool.move_to_cache([1, 9, 10, 4])
    pool.check([0, 2, 3, 9])


def test_a_run_is_not_mistaken_for_its_neighbours() -> None:
    pool = PagePool(12)
    pool.free(pool.allocate(12)[4:8])
    for free_run in ([4, 5, 6, 7], [5, 6, 7, 8], [3, 4, 5, 6]):
        with pytest.raises(CacheIntegrityError, match="is free, not held"):
            pool.free(free_run)
    assert list(pool.allocate(4)) == [4, 5, 6, 7]


@settings(deadline=None, max_examples=50)
@given(order=st.permutations(range(400)), num_moved=st.integers(100, 400), wrong=st.integers(0, 399))
def test_many_pages_in_any_order_are_moved_all_or_none(order: list[int], num_moved: int, wrong: int) -> None:
    pool = PagePool(400)
    pool.allocate(400)
    pages = order[:num_moved]
    pool.move_to_cache(pages)
    pool.check(pages)
    at = wrong % num_moved
    for bad in ([*pages[:at], pages[at - 1], *pages[at + 1 :]], [*pages[:at], 400, *pages[at + 1 :]]):
        with pytest.raises(CacheIntegrityError):
            pool.free_cached(bad)
        pool.check(pages)
    pool.free_cached(pages)
    assert list(pool.allocate(num_moved)) == pages


def test_pages_that_are_named_twice_are_counted() -> None:
    pool = PagePool(4)
    first, second, _ = pool.allocate(3)
    for call in (pool.free, pool.move_to_cache, pool.check_held):
        with pytest.raises(CacheIntegrityError, match="2 of 4 pages are named twice"):
            call([first, second, first, second])
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 3, 0)


def test_a_check_names_the_numbers() -> None:
    pool = PagePool(4)
    pool.move_to_cache(pool.allocate(2))
    with pytest.raises(CacheIntegrityError, match=r"2 free \+ 0 held \+ 2 cached = 4 pages.* the tree has 1$"):
        pool.check([0])
    with pytest.raises(CacheIntegrityError, match="page 3 is free, not cached"):
        pool.check([0, 3])


def test_bytes_are_numbers_of_pages_like_any_sequence() -> None:
    pool = PagePool(4)
    pool.allocate(3)
    pool.free(bytes([0, 2]))
    assert list(pool.allocate(3)) == [0, 2, 3]


@pytest.mark.parametrize("page", [-1, 4, 2**32, 2**80])
def test_an_invalid_page_is_named(page: int) -> None:
    pool = PagePool(4)
    held = pool.allocate(2)
    for call in (pool.free, pool.move_to_cache, pool.free_cached, pool.check_held, pool.as_array):
        if page != 4 or call != pool.as_array:
            with pytest.raises(CacheIntegrityError, match=rf"page {page} is not one of 0 to 3|page 0 is held"):
                call([*held, page])
    pool.free(held)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(0)
