"""What every ``PageStore`` must do, as plain functions: run each of ``PAGE_STORE_CHECKS`` on a store of your own.

A check takes an open store and a prefix under which the store holds no key, and raises AssertionError where the store
breaks the port's contract. No check evicts: give the store room for ``MAX_BYTES``, and let it hold pages of
``PAGE_BYTES``.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from scheduler_components.ports import PageStore

__all__ = ["MAX_BYTES", "PAGE_BYTES", "PAGE_STORE_CHECKS", "page_of"]

PAGE_BYTES = 4096
MAX_BYTES = 256 * 2 * PAGE_BYTES


def page_of(key: str) -> bytes:
    """Return a page that belongs to ``key`` alone and has every byte value in it."""
    name = sha256(key.encode()).digest()
    return b"".join(sha256(name + at.to_bytes(4, "big")).digest() for at in range(PAGE_BYTES // 32))


def check_absent_keys_are_misses(store: PageStore, prefix: str) -> None:
    keys = [f"{prefix}{at}" for at in range(3)]
    assert store.batch_exists(keys) == 0
    assert list(store.batch_get(keys)) == [None, None, None]
    assert store.delete(keys) == 0


def check_pages_come_back_byte_for_byte_in_the_order_asked(store: PageStore, prefix: str) -> None:
    keys = [f"{prefix}{at}" for at in range(64)]
    assert all(store.batch_set(keys, [page_of(key) for key in keys]))
    assert store.batch_exists(keys) == len(keys)
    assert _read(store, keys[::-1]) == [page_of(key) for key in keys[::-1]]


def check_exists_counts_the_longest_prefix(store: PageStore, prefix: str) -> None:
    keys = [f"{prefix}{at}" for at in range(5)]
    stored = [keys[0], keys[1], keys[3], keys[4]]
    assert all(store.batch_set(stored, [page_of(key) for key in stored]))
    assert store.batch_exists(keys) == 2
    assert store.batch_exists(keys[2:]) == 0
    assert store.batch_exists(keys[3:]) == 2


def check_a_hole_costs_only_itself(store: PageStore, prefix: str) -> None:
    first, hole, last = (f"{prefix}{name}" for name in ("first", "hole", "last"))
    assert all(store.batch_set([first, last], [page_of(first), page_of(last)]))
    assert _read(store, [first, hole, last]) == [page_of(first), None, page_of(last)]


def check_a_page_may_be_set_again(store: PageStore, prefix: str) -> None:
    key = f"{prefix}twice"
    assert list(store.batch_set([key], [page_of(key)])) == [True]
    assert list(store.batch_set([key, key], [page_of(key)] * 2)) == [True, True]
    assert _read(store, [key]) == [page_of(key)]


def check_a_deleted_page_is_gone_and_can_come_back(store: PageStore, prefix: str) -> None:
    # Deleted before it is read: a distributed store may hold a lease for a reader.
    keep, gone = f"{prefix}keep", f"{prefix}gone"
    assert all(store.batch_set([keep, gone], [page_of(keep), page_of(gone)]))
    assert store.delete([gone]) == 1
    assert store.delete([gone]) == 0
    assert _read(store, [keep, gone]) == [page_of(keep), None]
    assert list(store.batch_set([gone], [page_of(gone)])) == [True]
    assert _read(store, [gone]) == [page_of(gone)]


def check_any_key_is_a_plain_name(store: PageStore, prefix: str) -> None:
    names = ["a/b", "a-b", "../../up", "/root", "a b", "a.b", "A.b", "naïve 页", "x" * 300, "*", "%2F"]
    keys = [f"{prefix}{name}" for name in names]
    assert all(store.batch_set(keys, [page_of(key) for key in keys]))
    assert _read(store, keys) == [page_of(key) for key in keys]


def check_a_page_does_not_follow_its_memory(store: PageStore, prefix: str) -> None:
    key = f"{prefix}memory"
    memory = bytearray(page_of(key))
    assert list(store.batch_set([key], [memoryview(memory)])) == [True]
    memory[:] = bytes(PAGE_BYTES)
    assert _read(store, [key]) == [page_of(key)]


def check_nothing_asked_is_nothing_done(store: PageStore, prefix: str) -> None:
    del prefix
    assert store.batch_exists([]) == 0
    assert list(store.batch_get([])) == []
    assert list(store.batch_set([], [])) == []
    assert store.delete([]) == 0


def _read(store: PageStore, keys: list[str]) -> list[bytes | None]:
    return [None if page is None else bytes(page) for page in store.batch_get(keys)]


PAGE_STORE_CHECKS: tuple[Callable[[PageStore, str], None], ...] = (
    check_absent_keys_are_misses,
    check_pages_come_back_byte_for_byte_in_the_order_asked,
    check_exists_counts_the_longest_prefix,
    check_a_hole_costs_only_itself,
    check_a_page_may_be_set_again,
    check_a_deleted_page_is_gone_and_can_come_back,
    check_any_key_is_a_plain_name,
    check_a_page_does_not_follow_its_memory,
    check_nothing_asked_is_nothing_done,
)
