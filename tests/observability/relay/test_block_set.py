"""``BlockSet`` equals a set."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.relay import block_set
from observability.relay.block_set import BlockSet

HASHES = st.integers(-(2**63), 2**63 - 1) | st.integers(-20, 20)
STEPS = st.lists(st.tuples(st.sampled_from(["update", "update", "difference_update"]), st.lists(HASHES, max_size=20)))


@settings(max_examples=2 * settings().max_examples)
@given(steps=STEPS)
def test_it_equals_a_set(steps: list[tuple[str, Iterable[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_set, "_SPLIT", 4)
        ours, model = BlockSet(), set[int]()
        for step, hashes in steps:
            getattr(ours, step)(hashes)
            getattr(model, step)(hashes)
            assert (len(ours), list(ours)) == (len(model), sorted(model))
            assert [each in ours for each in (*hashes, 0, 21)] == [each in model for each in (*hashes, 0, 21)]


def test_a_hash_takes_a_tenth_of_the_memory_of_a_dictionary_entry() -> None:
    hashes = [(number * 0x9E3779B97F4A7C15) % 2**64 - 2**63 for number in range(30_000)]
    assert _allocated(lambda: _filled(hashes)) < 12 * len(hashes)


def _filled(hashes: list[int]) -> BlockSet:
    held = BlockSet()
    held.update(hashes)
    return held


def _allocated(make: Callable[[], object]) -> int:
    """Return the bytes of the result of ``make``."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        return tracemalloc.get_traced_memory()[0] - before if made else 0
    finally:
        tracemalloc.stop()
