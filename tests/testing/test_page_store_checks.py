"""Every page-store check fails with a trace on a broken store. Correct stores are tested in tests/hicache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from scheduler_components.hicache import MemoryPageStore
from scheduler_components.ports import PageBytes, PageStore
from scheduler_components.testing import ConformanceError, interfaces
from scheduler_components.testing import page_store_checks as checks


class Store(MemoryPageStore):
    def __init__(self) -> None:
        super().__init__(interfaces.MAX_BYTES)


class FindsAbsentKeys(Store):
    def batch_exists(self, keys: Sequence[str]) -> int:
        return len(keys)


class SortsKeys(Store):
    def batch_get(self, keys: Sequence[str]) -> list[PageBytes | None]:
        return list(super().batch_get(sorted(keys)))


class CountsBeyondHoles(Store):
    def batch_exists(self, keys: Sequence[str]) -> int:
        return sum(super(CountsBeyondHoles, self).batch_exists([key]) for key in keys)


class OmitsMisses(Store):
    def batch_get(self, keys: Sequence[str]) -> list[PageBytes | None]:
        return [page for page in super().batch_get(keys) if page is not None]


class RefusesHeldKeys(Store):
    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        new = [not self.batch_exists([key]) for key in keys]
        super().batch_set(keys, pages)
        return new


class NeverDeletes(Store):
    def delete(self, keys: Sequence[str]) -> int:
        return self.batch_exists(keys)


class IgnoresCase(Store):
    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        return list(super().batch_set([key.lower() for key in keys], pages))

    def batch_get(self, keys: Sequence[str]) -> list[PageBytes | None]:
        return list(super().batch_get([key.lower() for key in keys]))


class KeepsViews:
    """A store that keeps the given buffers instead of copies."""

    def __init__(self) -> None:
        self.pages: dict[str, PageBytes] = {}

    def batch_exists(self, keys: Sequence[str]) -> int:
        return len(keys)

    def batch_get(self, keys: Sequence[str]) -> list[PageBytes | None]:
        return [self.pages.get(key) for key in keys]

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        self.pages.update(zip(keys, pages, strict=True))
        return [True] * len(keys)

    def delete(self, keys: Sequence[str]) -> int:
        return 0

    def close(self) -> None:
        pass


class RefusesEmptyBatches(Store):
    def batch_get(self, keys: Sequence[str]) -> list[PageBytes | None]:
        if not keys:
            raise ValueError("no keys")
        return list(super().batch_get(keys))


CASES: list[tuple[Callable[[PageStore, str], None], Callable[[], PageStore], str]] = [
    (checks.check_absent_keys_are_misses, FindsAbsentKeys, "batch_exists() of 3 absent keys"),
    (checks.check_pages_come_back_byte_for_byte_in_the_order_asked, SortsKeys, "its page under"),
    (checks.check_exists_counts_the_longest_prefix, CountsBeyondHoles, "keys held without a hole: 2"),
    (checks.check_missing_key_affects_only_itself, OmitsMisses, "pages of the answer: 3"),
    (checks.check_a_page_may_be_set_again, RefusesHeldKeys, "each key held"),
    (checks.check_a_deleted_page_is_gone_and_can_come_back, NeverDeletes, "delete() of it again"),
    (checks.check_any_text_is_a_valid_key, IgnoresCase, "its page under 'key A.b'"),
    (checks.check_stored_page_is_a_copy, KeepsViews, "overwrote that memory"),
    (checks.check_empty_batches_are_accepted, RefusesEmptyBatches, "ValueError: no keys"),
]


@pytest.mark.broken_variants
@pytest.mark.parametrize(("check", "broken", "message"), CASES)
def test_a_broken_store_fails_with_its_trace(
    check: Callable[[PageStore, str], None], broken: Callable[[], PageStore], message: str
) -> None:
    store = broken()
    with pytest.raises(ConformanceError) as failed:
        check(store, "key ")
    store.close()
    assert message in str(failed.value)


def test_every_check_has_a_broken_store() -> None:
    assert [check for check, _, _ in CASES] == list(checks.PAGE_STORE_CHECKS)
