"""Checks of any ``PageStore``, as plain functions: run each of ``PAGE_STORE_CHECKS`` on your store.

A check takes an open store and a prefix under which the store holds no key. If the store violates the contract of the
interface, the check raises ``ConformanceError`` with the trace of its calls. No check causes evictions if the store can
hold ``MAX_BYTES`` in pages of ``PAGE_BYTES``. A zero-copy store also passes ``IN_PLACE_STORE_CHECKS``; each of them
registers memory, so give it a store without registered memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scheduler_components.ports import PageStore, ZeroCopyPageStore
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.interfaces import PAGE_BYTES, page_of

__all__ = ["IN_PLACE_STORE_CHECKS", "PAGE_STORE_CHECKS"]


def check_absent_keys_are_misses(store: PageStore, prefix: str) -> None:
    """Keys that were never stored are misses."""
    trace = CheckTrace("Keys that were never stored are misses")
    keys = [f"{prefix}{at}" for at in range(3)]
    trace.expect(0, trace.call("batch_exists() of 3 absent keys", lambda: store.batch_exists(keys)))
    trace.expect([None] * 3, _read(trace, store, keys))
    trace.expect(0, trace.call("delete() of them", lambda: store.delete(keys)), "keys removed")


def check_pages_come_back_byte_for_byte_in_the_order_asked(store: PageStore, prefix: str) -> None:
    """64 pages are read in reverse order."""
    trace = CheckTrace("Pages come back byte for byte, in the order asked")
    keys = [f"{prefix}{at}" for at in range(64)]
    _store(trace, store, keys)
    trace.expect(len(keys), trace.call("batch_exists()", lambda: store.batch_exists(keys)), "keys held")
    _expect_pages(trace, store, keys[::-1])


def check_exists_counts_the_longest_prefix(store: PageStore, prefix: str) -> None:
    """Only a prefix without a gap is useful."""
    trace = CheckTrace("batch_exists() counts up to the first key that is not held")
    keys = [f"{prefix}{at}" for at in range(5)]
    _store(trace, store, [keys[0], keys[1], keys[3], keys[4]])
    for first, held in ((0, 2), (2, 0), (3, 2)):
        asked = keys[first:]
        found = trace.call(f"batch_exists(keys {first} to 4), key 2 absent", partial(store.batch_exists, asked))
        trace.expect(held, found, "keys held without a hole")


def check_missing_key_affects_only_itself(store: PageStore, prefix: str) -> None:
    """Keys next to an absent key are still read."""
    trace = CheckTrace("An absent key among held ones costs only itself")
    first, hole, last = (f"{prefix}{name}" for name in ("first", "hole", "last"))
    _store(trace, store, [first, last])
    _expect_pages(trace, store, [first, hole, last], absent=hole)


def check_a_page_may_be_set_again(store: PageStore, prefix: str) -> None:
    """Storing is idempotent, also twice in one batch."""
    trace = CheckTrace("A page that is held may be stored again")
    key = f"{prefix}twice"
    _store(trace, store, [key])
    _store(trace, store, [key, key])
    _expect_pages(trace, store, [key])


def check_a_deleted_page_is_gone_and_can_come_back(store: PageStore, prefix: str) -> None:
    """The page is deleted before it is read, because a distributed store may grant leases to readers."""
    trace = CheckTrace("A deleted page is gone, and can be stored again")
    keep, gone = f"{prefix}keep", f"{prefix}gone"
    _store(trace, store, [keep, gone])
    trace.expect(1, trace.call("delete() of one of two keys", lambda: store.delete([gone])), "keys removed")
    trace.expect(0, trace.call("delete() of it again", lambda: store.delete([gone])), "keys removed")
    _expect_pages(trace, store, [keep, gone], absent=gone)
    _store(trace, store, [gone])
    _expect_pages(trace, store, [gone])


def check_any_text_is_a_valid_key(store: PageStore, prefix: str) -> None:
    """Slashes, dots, blanks, capitals and 300 characters have no special meaning in keys."""
    trace = CheckTrace("Any text is a key, and different texts are different keys")
    names = ["a/b", "a-b", "../../up", "/root", "a b", "a.b", "A.b", "naïve 页", "x" * 300, "*", "%2F"]
    keys = [f"{prefix}{name}" for name in names]
    _store(trace, store, keys)
    _expect_pages(trace, store, keys)


def check_stored_page_is_a_copy(store: PageStore, prefix: str) -> None:
    """The caller reuses its buffer as soon as ``batch_set`` returns."""
    trace = CheckTrace("A stored page does not change with the memory that it came from")
    key = f"{prefix}memory"
    memory = bytearray(page_of(key))
    held = trace.call("batch_set() of a memoryview", lambda: list(store.batch_set([key], [memoryview(memory)])))
    trace.expect([True], held)
    trace.note("overwrote that memory with zeros")
    memory[:] = bytes(PAGE_BYTES)
    _expect_pages(trace, store, [key])


def check_empty_batches_are_accepted(store: PageStore, prefix: str) -> None:
    """Empty batches are valid."""
    del prefix
    trace = CheckTrace("Empty batches are no error")
    trace.expect(0, trace.call("batch_exists([])", lambda: store.batch_exists([])))
    trace.expect([], _read(trace, store, []))
    trace.expect([], trace.call("batch_set([], [])", lambda: list(store.batch_set([], []))))
    trace.expect(0, trace.call("delete([])", lambda: store.delete([])))


def _store(trace: CheckTrace, store: PageStore, keys: list[str]) -> None:
    step = f"batch_set() of {len(keys)} keys: {', '.join(keys):.80}"
    held = trace.call(step, lambda: list(store.batch_set(keys, [page_of(key) for key in keys])))
    trace.expect([True] * len(keys), held, "each key held")


def _read(trace: CheckTrace, store: PageStore, keys: list[str]) -> list[bytes | None]:
    pages = trace.call(f"batch_get() of {len(keys)} keys", lambda: store.batch_get(keys))
    return [None if page is None else bytes(page) for page in pages]


def _expect_pages(trace: CheckTrace, store: PageStore, keys: list[str], *, absent: str | None = None) -> None:
    found = _read(trace, store, keys)
    trace.expect(len(keys), len(found), "pages of the answer")
    for key, page in zip(keys, found, strict=True):
        wanted = None if key == absent else page_of(key)
        trace.require(page == wanted, f"{'no page' if wanted is None else 'its page'} under {key!r:.80}", page)


PAGE_STORE_CHECKS: tuple[Callable[[PageStore, str], None], ...] = checks_in(globals())


def check_in_place_put_and_get(store: ZeroCopyPageStore, prefix: str) -> None:
    """Pages are put from registered memory and got into other pages of it, also those set by ``batch_set``."""
    trace = CheckTrace("Pages are put from memory and got into it")
    keys = [f"{prefix}{at}" for at in range(8)]
    memory, pages = _registered(trace, store, 2 * len(keys))
    for page, key in zip(pages, keys, strict=False):
        page[:] = page_of(key)
    own = [page.toreadonly() for page in pages[: len(keys)]]
    held = trace.call("batch_put_from() of 8 pages", lambda: list(store.batch_put_from(keys, own)))
    trace.expect([True] * len(keys), held, "each key held")
    _expect_pages(trace, store, keys)
    copied = f"{prefix}copied"
    _store(trace, store, [copied])
    asked = [*keys[::-1], copied]
    others = pages[-len(asked) :]
    got = trace.call("batch_get_into() other places", lambda: list(store.batch_get_into(asked, others)))
    trace.expect([True] * len(asked), got, "each page read")
    for key, page in zip(asked, others, strict=True):
        trace.require(bytes(page) == page_of(key), f"the page of {key!r:.80} in its buffer", bytes(page))
    del memory


def check_miss_leaves_other_buffers_unchanged(store: ZeroCopyPageStore, prefix: str) -> None:
    """An absent key and a page of another length return False and leave other pages unchanged."""
    trace = CheckTrace("A miss in place costs only itself")
    first, hole, short, long, last = (f"{prefix}{name}" for name in ("first", "hole", "short", "long", "last"))
    _store(trace, store, [first, last])
    others = {short: page_of(short)[:-1], long: page_of(long) + b"x"}
    held = trace.call(
        "batch_set() of a shorter and a longer page", lambda: list(store.batch_set(list(others), list(others.values())))
    )
    trace.expect([True, True], held, "each key held")
    memory, pages = _registered(trace, store, 7)
    asked = [first, hole, short, long, last]
    got = trace.call("batch_get_into()", lambda: list(store.batch_get_into(asked, pages[1:6])))
    trace.expect([True, False, False, False, True], got, "each page read")
    for key, page in ((first, pages[1]), (last, pages[5])):
        trace.require(bytes(page) == page_of(key), f"the page of {key!r:.80} in its buffer", bytes(page))
    for at in (0, 6):
        trace.require(
            bytes(pages[at]) == bytes(PAGE_BYTES), f"buffer {at}, which was not passed, unchanged", bytes(pages[at])
        )
    trace.expect([], trace.call("batch_get_into([], [])", lambda: list(store.batch_get_into([], []))))
    trace.expect([], trace.call("batch_put_from([], [])", lambda: list(store.batch_put_from([], []))))
    del memory


def _registered(trace: CheckTrace, store: ZeroCopyPageStore, num_pages: int) -> tuple[bytearray, list[memoryview]]:
    memory = bytearray(num_pages * PAGE_BYTES)
    view = memoryview(memory)
    trace.call(f"register() of {len(memory)} bytes", lambda: store.register(view))
    return memory, [view[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(num_pages)]


IN_PLACE_STORE_CHECKS: tuple[Callable[[ZeroCopyPageStore, str], None], ...] = (
    check_in_place_put_and_get,
    check_miss_leaves_other_buffers_unchanged,
)
