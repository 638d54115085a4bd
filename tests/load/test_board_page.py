"""A page holds its last whole report, whatever its writer was in the middle of, in whatever order bytes are seen."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import DecodeError, LoadSnapshot
from scheduler_components.load.shm_load_board import PAGE_BYTES, LoadPage, decode_load, look_at_load_page
from scheduler_components.load_inquirer import MAX_DISPATCHERS
from scheduler_components.shm_board import DoubleBuffer


def new_page() -> tuple[LoadPage, bytearray]:
    memory = bytearray(PAGE_BYTES)
    return LoadPage(memoryview(memory)), memory


def read(memory: bytearray, known_sequence: int = 0) -> tuple[int, LoadSnapshot] | None:
    found = look_at_load_page(lambda num_bytes, at: bytes(memory[at : at + num_bytes]), known_sequence)
    return None if found is None else (found[0], decode_load(found[1]))


def report(sequence: int) -> LoadSnapshot:
    return LoadSnapshot(sequence=sequence, num_running_reqs=sequence * 1_000_003, num_used_tokens=2**40 + sequence)


def test_an_empty_page_holds_nothing() -> None:
    page, memory = new_page()
    assert read(memory) is None
    assert page.last_sequence() == 0


@settings(deadline=None)
@given(st.integers(1, 20))
def test_the_last_report_is_read(count: int) -> None:
    page, memory = new_page()
    for sequence in range(1, count + 1):
        page.write(report(sequence), sequence)
        assert read(memory) == (sequence, report(sequence))
        assert page.last_sequence() == sequence


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 6), st.lists(st.booleans(), min_size=120, max_size=120))
@example(1, [False] * 120)
@example(1, [True] * 120)
def test_a_write_that_is_half_seen_leaves_the_report_before_it(count: int, seen: list[bool]) -> None:
    """Any subset of the bytes of the last write may be visible: a torn read, a dead writer, a late store."""
    page, memory = new_page()
    for sequence in range(1, count + 1):
        page.write(report(sequence), sequence)
    before = bytes(memory)
    page.write(report(count + 1), count + 1)
    changed = [at for at in range(PAGE_BYTES) if memory[at] != before[at]]
    for place, at in enumerate(changed):
        if not seen[place % len(seen)]:
            memory[at] = before[at]
    is_whole = all(memory[at] != before[at] for at in changed)
    last = count + 1 if is_whole else count
    assert read(memory) == (last, report(last))
    assert read(memory, count + 1) == ((last, report(last)) if is_whole else None)


@settings(deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_foreign_bytes_are_no_report(first: bytes, second: bytes) -> None:
    _, memory = new_page()
    memory[: len(first)] = first
    memory[PAGE_BYTES // 2 : PAGE_BYTES // 2 + len(second)] = second
    assert read(memory) is None


def test_a_whole_buffer_of_another_program_is_a_decode_error() -> None:
    _, memory = new_page()
    DoubleBuffer(memoryview(memory), start=0, buffer_bytes=PAGE_BYTES // 2).write(b"\xc1", 2)
    with pytest.raises(DecodeError):
        read(memory)


def test_the_largest_report_fits_and_a_larger_one_leaves_the_last() -> None:
    page, memory = new_page()
    largest = LoadSnapshot(dispatched_watermarks=tuple((f"{index:064}", 2**63 - 1) for index in range(MAX_DISPATCHERS)))
    page.write(largest, 1)
    with pytest.raises(ValueError, match="fit"):
        page.write(LoadSnapshot(dispatched_watermarks=(("x" * PAGE_BYTES, 1),)), 2)
    assert read(memory) == (1, largest)
