"""Every page-store check fails with a trace on a broken store. Correct stores are tested in tests/hicache."""

from __future__ import annotations

import pytest
from kit.variants import found, instead_of, variants

from scheduler_components.hicache import MemoryPageStore
from scheduler_components.testing import ConformanceError, interfaces
from scheduler_components.testing import page_store_checks as checks


class BrokenStore(MemoryPageStore):
    finds_absent_keys = found(
        checks.check_absent_keys_are_misses,
        "batch_exists() of 3 absent keys",
        batch_exists=lambda self, keys: len(keys),
    )
    sorts_keys = found(
        checks.check_pages_come_back_byte_for_byte_in_the_order_asked,
        "its page under",
        batch_get=lambda self, keys: super().batch_get(sorted(keys)),
    )
    counts_beyond_holes = found(
        checks.check_exists_counts_the_longest_prefix,
        "keys held without a hole: 2",
        batch_exists=lambda self, keys: sum(MemoryPageStore.batch_exists(self, [key]) for key in keys),
    )
    omits_misses = found(
        checks.check_missing_key_affects_only_itself,
        "pages of the answer: 3",
        batch_get=lambda self, keys: list(filter(None, super().batch_get(keys))),
    )

    @instead_of("batch_set", checks.check_a_page_may_be_set_again, "each key held")
    def refuses_held_keys(self, keys, pages):
        new = [not self.batch_exists([key]) for key in keys]
        super().batch_set(keys, pages)
        return new

    never_deletes = found(
        checks.check_a_deleted_page_is_gone_and_can_come_back,
        "delete() of it again",
        delete=lambda self, keys: self.batch_exists(keys),
    )
    ignores_case = found(
        checks.check_any_text_is_a_valid_key,
        "its page under 'key A.b'",
        batch_set=lambda self, keys, pages: super().batch_set([key.lower() for key in keys], pages),
        batch_get=lambda self, keys: super().batch_get([key.lower() for key in keys]),
    )

    @found(checks.check_stored_page_is_a_copy, "overwrote that memory")
    class keeps_views(MemoryPageStore):
        """A store that keeps the given buffers instead of copies."""

        def batch_get(self, keys):
            return [self.views.get(key) for key in keys]

        def batch_set(self, keys, pages):
            self.views = dict(zip(keys, pages, strict=True))
            return [True] * len(keys)

    @instead_of("batch_get", checks.check_empty_batches_are_accepted, "ValueError: no keys")
    def refuses_empty_batches(self, keys):
        if not keys:
            raise ValueError("no keys")
        return super().batch_get(keys)


BROKEN = variants(BrokenStore)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_store_fails_with_its_trace(name):
    broken, check, message = BROKEN[name]
    store = broken(interfaces.MAX_BYTES)
    with pytest.raises(ConformanceError) as failed:
        check(store, "key ")
    store.close()
    assert message in str(failed.value)


def test_every_check_has_a_broken_store():
    assert [check for _, check, _ in BROKEN.values()] == list(checks.PAGE_STORE_CHECKS)
