"""The store in memory holds the most recently used pages that fit."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError
from scheduler_components.hicache import MemoryPageStore

KEY = st.sampled_from("abcde")


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(2))
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


def test_mistakes_of_the_caller_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^capacity_bytes=0"):
        MemoryPageStore(0)
    with pytest.raises(ValueError, match="shorter"):
        MemoryPageStore(10).batch_set(["a", "b"], [b"page"])
