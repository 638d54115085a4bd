"""Frames and checks: a store returns the right page or a counted miss."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.page_stores import FixedAnswerStore
from kit.searches import num_examples

from scheduler_components.errors import StorageError, StorageStallError
from scheduler_components.hicache import CheckedPageStore, MemoryPageStore
from scheduler_components.hicache.storage import FRAME_BYTES, frame_page, unframe_page

PAGE_BYTES = 8
KEYS = ["a", "b"]
PAGES = {key: key.encode() * PAGE_BYTES for key in KEYS}


SEALED = st.sampled_from([frame_page(key, page) for key, page in PAGES.items()])
PARTS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.text(max_size=3)
    | st.binary(max_size=FRAME_BYTES + PAGE_BYTES - 1)  # a whole frame would be a forgery, which no checksum finds
    | SEALED
    | st.builds(lambda sealed, at: sealed[:at], SEALED, st.integers(0, 30))
    | st.builds(frame_page, st.sampled_from(KEYS), st.binary(max_size=12).filter(lambda page: len(page) != PAGE_BYTES))
)
ERRORS = st.sampled_from(
    [StorageError("net", "op", "gone"), StorageStallError("net", "op", "slow"), OSError(5, "io"), KeyError("x")]
)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(6))
@given(answer=PARTS | st.lists(PARTS, max_size=3) | st.tuples(PARTS, PARTS) | ERRORS)
@example(answer=[frame_page("b", PAGES["b"]), frame_page("a", PAGES["a"])])  # swapped
@example(answer=[frame_page("a", PAGES["a"])])  # half
@example(answer=[frame_page("a", b"short"), None])
@example(answer=3)
def test_any_answer_is_the_right_page_or_a_counted_miss(answer: object) -> None:
    store = CheckedPageStore(store=FixedAnswerStore(answer), page_bytes=PAGE_BYTES)
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
def test_problems_are_counted_and_described(answer: object, counted: str, problem: str) -> None:
    store = CheckedPageStore(store=FixedAnswerStore(answer), page_bytes=PAGE_BYTES)
    assert store.batch_exists(KEYS) == 0
    assert getattr(store.stats(), counted) == 1
    assert store.stats().last_problem == problem


def test_problems_name_their_operation() -> None:
    failing = CheckedPageStore(store=FixedAnswerStore(OSError("broken")), page_bytes=PAGE_BYTES)
    pages = [PAGES[key] for key in KEYS]
    asked = {
        "batch_get": lambda: failing.batch_get(KEYS),
        "batch_set": lambda: failing.batch_set(KEYS, pages),
        "delete": lambda: failing.delete(KEYS),
        "close": failing.close,
    }
    for name, ask in asked.items():
        ask()
        assert failing.stats().last_problem == f"{name}: OSError: broken"
    odd = CheckedPageStore(store=FixedAnswerStore("many"), page_bytes=PAGE_BYTES)
    odd.batch_get(KEYS)
    assert odd.stats().last_problem == "batch_get: str instead of one answer per key for 2 keys"


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(4))
@given(key=st.text(max_size=5), page=st.binary(max_size=40), data=st.data())
def test_a_frame_opens_only_as_it_was_sealed(key: str, page: bytes, data: st.DataObject) -> None:
    sealed = frame_page(key, page)
    assert len(sealed) == FRAME_BYTES + len(page)
    assert unframe_page(key, sealed) == page
    assert unframe_page(key + "x", sealed) is None
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert unframe_page(key, sealed[:cut]) is None
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    changed = bytearray(sealed)
    changed[bit // 8] ^= 1 << bit % 8
    assert unframe_page(key, changed) is None


@pytest.mark.parametrize(("keys", "pages"), [(["a"], []), (["a"], [b"short"])])
def test_a_callers_mistake_is_raised(keys: list[str], pages: list[bytes]) -> None:
    store = CheckedPageStore(store=MemoryPageStore(1000), page_bytes=PAGE_BYTES)
    with pytest.raises(ValueError, match="one page of 8 bytes per key"):
        store.batch_set(keys, pages)
