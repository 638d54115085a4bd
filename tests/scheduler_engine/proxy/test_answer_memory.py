"""AnswerMemory: all answers together stay within the bound, and small ones always pass."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_engine.proxy.answer_memory import AnswerMemory, AnswerMemoryError

FREE = 64 * 2**10


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3 * FREE)), max_size=12))
def test_the_sum_is_bounded_and_comes_back(sizes: list[tuple[int, int]]) -> None:
    memory, held_bytes = AnswerMemory(max_bytes=3 * FREE), [0, 0, 0]
    with ExitStack() as stack:
        answers = [stack.enter_context(memory.open()) for _ in held_bytes]
        for place, size in sizes:
            with suppress(AnswerMemoryError):
                answers[place].resize(size)
                held_bytes[place] = size
            assert memory.held_bytes == sum(max(0, each - FREE) for each in held_bytes) <= memory.max_bytes
    assert memory.held_bytes == 0


def test_a_small_answer_passes_while_a_large_one_fills_the_memory() -> None:
    memory = AnswerMemory(max_bytes=100)
    with memory.open() as large, memory.open() as small:
        large.resize(FREE + 100)
        small.resize(FREE)
        with pytest.raises(AnswerMemoryError):
            small.resize(FREE + 1)
        large.resize(0)
        small.resize(FREE + 1)
