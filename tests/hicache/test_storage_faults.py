"""Whatever a store does, the cache gets the right page or a miss, a count of it, and its thread back in time."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import StorageError, StorageStallError
from scheduler_components.hicache import CheckedPageStore, MemoryPageStore, open_deadline_page_store
from scheduler_components.hicache.storage import FRAME_BYTES, seal_page, unseal_page

PAGE_BYTES = 8
KEYS = ["a", "b"]
PAGES = {key: key.encode() * PAGE_BYTES for key in KEYS}


class SayingStore:
    """Answers everything with one object, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _say(self, *_: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    batch_exists = batch_get = batch_set = delete = close = _say


SEALED = st.sampled_from([seal_page(key, page) for key, page in PAGES.items()])
PARTS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.text(max_size=3)
    | st.binary(max_size=FRAME_BYTES + PAGE_BYTES - 1)  # a whole frame would be a forgery, which no checksum finds
    | SEALED
    | st.builds(lambda sealed, at: sealed[:at], SEALED, st.integers(0, 30))
    | st.builds(seal_page, st.sampled_from(KEYS), st.binary(max_size=12).filter(lambda page: len(page) != PAGE_BYTES))
)
ERRORS = st.sampled_from(
    [StorageError("net", "op", "gone"), StorageStallError("net", "op", "slow"), OSError(5, "io"), KeyError("x")]
)


@settings(deadline=None, max_examples=300)
@given(answer=PARTS | st.lists(PARTS, max_size=3) | st.tuples(PARTS, PARTS) | ERRORS)
@example(answer=[seal_page("b", PAGES["b"]), seal_page("a", PAGES["a"])])  # swapped
@example(answer=[seal_page("a", PAGES["a"])])  # half
@example(answer=[seal_page("a", b"short"), None])
@example(answer=3)
def test_any_answer_is_the_right_page_or_a_counted_miss(answer: object) -> None:
    store = CheckedPageStore(store=SayingStore(answer), page_bytes=PAGE_BYTES)
    got = store.batch_get(KEYS)
    assert len(got) == 2
    for key, page in zip(KEYS, got, strict=True):
        assert page is None or bytes(page) == PAGES[key]
    stats = store.stats()
    num_hit = sum(page is not None for page in got)
    assert (stats.pages_hit, stats.pages_missed) == (num_hit, 2 - num_hit)
    if num_hit == 0 and answer not in ([None, None], (None, None)):
        assert stats.stalls + stats.failures + stats.bad_answers + stats.pages_corrupt > 0
    assert 0 <= store.batch_exists(KEYS) <= 2
    assert len(store.batch_set(KEYS, [PAGES[key] for key in KEYS])) == 2
    assert 0 <= store.delete(KEYS) <= 2
    store.close()


@pytest.mark.parametrize(
    ("answer", "counted", "problem"),
    [
        (StorageStallError("net", "batch_exists", "slow"), "stalls", "net batch_exists: slow"),
        (OSError("broken"), "failures", "batch_exists: OSError: broken"),
        (-1, "bad_answers", "batch_exists: -1 of 2 keys"),
        ("many", "bad_answers", "batch_exists: 'many' of 2 keys"),
    ],
)
def test_what_went_wrong_is_counted_and_said(answer: object, counted: str, problem: str) -> None:
    store = CheckedPageStore(store=SayingStore(answer), page_bytes=PAGE_BYTES)
    assert store.batch_exists(KEYS) == 0
    assert getattr(store.stats(), counted) == 1
    assert store.stats().last_problem == problem


@settings(deadline=None, max_examples=200)
@given(key=st.text(max_size=5), page=st.binary(max_size=40), data=st.data())
def test_a_frame_opens_only_as_it_was_sealed(key: str, page: bytes, data: st.DataObject) -> None:
    sealed = seal_page(key, page)
    assert len(sealed) == FRAME_BYTES + len(page)
    assert unseal_page(key, sealed) == page
    assert unseal_page(key + "x", sealed) is None
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert unseal_page(key, sealed[:cut]) is None
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    changed = bytearray(sealed)
    changed[bit // 8] ^= 1 << bit % 8
    assert unseal_page(key, changed) is None


@pytest.mark.parametrize(("keys", "pages"), [(["a"], []), (["a"], [b"short"])])
def test_a_callers_mistake_is_raised(keys: list[str], pages: list[bytes]) -> None:
    store = CheckedPageStore(store=MemoryPageStore(1000), page_bytes=PAGE_BYTES)
    with pytest.raises(ValueError, match="one page of 8 bytes per key"):
        store.batch_set(keys, pages)


class GatedStore:
    """A memory store whose writes wait at a gate."""

    def __init__(self) -> None:
        self.pages = MemoryPageStore(1000)
        self.entered, self.gate = Event(), Event()

    def batch_exists(self, keys: Sequence[str]) -> int:
        return self.pages.batch_exists(keys)

    def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
        return self.pages.batch_get(keys)

    def batch_set(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        self.entered.set()
        assert self.gate.wait(60)
        return self.pages.batch_set(keys, pages)

    def delete(self, keys: Sequence[str]) -> int:
        return self.pages.delete(keys)

    def close(self) -> None:
        """Keeps its pages, for the test to see."""


def test_a_stalled_write_is_a_miss_at_once_and_lands_late_with_what_was_meant() -> None:
    gated = GatedStore()
    deadline = open_deadline_page_store(gated, deadline_s=0.05)
    store = CheckedPageStore(store=deadline, page_bytes=PAGE_BYTES)
    memory = bytearray(PAGES["a"])
    assert store.batch_set(["a"], [memory]) == [False]
    assert gated.entered.wait(60)
    memory[:] = bytes(PAGE_BYTES)  # the host page has another owner by now
    assert store.batch_exists(["a"]) == 0
    assert store.stats().stalls == 2
    assert store.stats().last_problem == "deadline batch_exists: still at an earlier batch_set"
    with pytest.raises(StorageStallError, match="close: still at work"):
        deadline.close()
    gated.gate.set()
    deadline.join()
    assert unseal_page("a", gated.pages.batch_get(["a"])[0] or b"") == PAGES["a"]


def test_a_store_that_recovers_is_used_again() -> None:
    gated = GatedStore()
    deadline = open_deadline_page_store(gated, deadline_s=0.05)
    store = CheckedPageStore(store=deadline, page_bytes=PAGE_BYTES)
    assert store.batch_set(["a"], [PAGES["a"]]) == [False]
    gated.gate.set()
    patient = Event()
    for _ in range(6000):
        if store.batch_set(["b"], [PAGES["b"]]) == [True]:
            break
        patient.wait(0.01)
    assert store.batch_get(["b"]) == [PAGES["b"]]
    store.close()


def test_an_error_of_the_store_reaches_its_caller() -> None:
    deadline = open_deadline_page_store(SayingStore(KeyError("x")), deadline_s=60)
    with pytest.raises(KeyError, match="x"):
        deadline.batch_exists(["a"])
    with pytest.raises(KeyError, match="x"):
        deadline.close()


KEY = st.sampled_from("abcde")


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["set", "get", "delete"]), KEY, st.integers(1, 5)), max_size=30))
@example([("set", "a", 5), ("set", "b", 5), ("get", "a", 1), ("set", "c", 1)])
def test_memory_holds_the_most_recently_used_pages_that_fit(steps: list[tuple[str, str, int]]) -> None:
    store = MemoryPageStore(10)
    model: dict[str, bytes] = {}  # in order of use
    for verb, key, size in steps:
        page = model.pop(key, None)
        if verb == "get":
            assert store.batch_get([key]) == [page]
        elif verb == "delete":
            assert store.delete([key]) == (page is not None)
            page = None
        else:
            assert store.batch_set([key], [bytes(size)]) == [True]
            page = page or bytes(size)
        if page is not None:
            while sum(map(len, model.values())) + len(page) > 10:
                del model[next(iter(model))]
            model[key] = page
        assert store.used_bytes == sum(map(len, model.values()))
        assert [k for k in "abcde" if store.batch_exists([k])] == sorted(model)


def test_memory_refuses_a_page_larger_than_itself() -> None:
    store = MemoryPageStore(10)
    assert store.batch_set(["a", "b"], [bytes(11), bytes(10)]) == [False, True]
