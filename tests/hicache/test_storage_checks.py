"""Every page store passes the same checks, bare and as the cache uses it: behind a deadline and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_components.hicache import (
    CheckedPageStore,
    MemoryPageStore,
    open_deadline_page_store,
    open_file_page_store,
)
from scheduler_components.hicache.storage import StorageStats
from scheduler_components.ports import PageStore
from scheduler_components.testing import PAGE_STORE_CHECKS
from scheduler_components.testing.interfaces import MAX_BYTES, PAGE_BYTES, page_of


@pytest.fixture(params=["memory", "file"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PageStore]:
    if request.param == "memory":
        store: PageStore = MemoryPageStore(MAX_BYTES)
    else:
        store = open_file_page_store(tmp_path / "pages", capacity_bytes=MAX_BYTES)
    yield store
    store.close()


@pytest.mark.parametrize("check", PAGE_STORE_CHECKS)
def test_bare(bare: PageStore, check: Callable[[PageStore, str], None]) -> None:
    check(bare, "key ")


@pytest.mark.parametrize("check", PAGE_STORE_CHECKS)
def test_as_the_cache_uses_it(bare: PageStore, check: Callable[[PageStore, str], None]) -> None:
    store = CheckedPageStore(store=open_deadline_page_store(bare, deadline_s=60), page_bytes=PAGE_BYTES)
    check(store, "key ")
    store.close()
    store.close()
    stats = store.stats()
    assert (stats.stalls, stats.failures, stats.bad_answers, stats.pages_corrupt) == (0, 0, 0, 0), stats.last_problem


def test_a_closed_store_returns_misses(bare: PageStore) -> None:
    store = CheckedPageStore(store=open_deadline_page_store(bare, deadline_s=60), page_bytes=PAGE_BYTES)
    store.batch_set(["a"], [page_of("a")])
    store.close()
    assert store.batch_exists(["a"]) == 0
    assert store.batch_get(["a"]) == [None]
    assert store.batch_set(["b"], [page_of("b")]) == [False]
    assert store.delete(["a"]) == 0
    assert store.stats() == StorageStats(
        pages_missed=1,
        pages_written=1,
        pages_refused=1,
        failures=4,
        last_problem="delete: StorageError: deadline delete: the store is closed",
    )
