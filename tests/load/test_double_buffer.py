"""What a double buffer holds is the last whole report, in its own stretch of the memory and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import DecodeError
from scheduler_components.shm_board import DoubleBuffer, read_newest

BUFFER_BYTES = 64
FITTING_BYTES = 40
"""What is left of a buffer when checksum, sequence and length have their eight bytes each."""


def new_buffer(start: int = 8) -> tuple[DoubleBuffer, bytearray]:
    memory = bytearray(b"\xee" * start + bytes(2 * BUFFER_BYTES) + b"\xee" * 8)
    return DoubleBuffer(memoryview(memory), start=start, buffer_bytes=BUFFER_BYTES), memory


def read(memory: bytes | bytearray, start: int = 8, known_sequence: int = 0) -> tuple[int, bytes] | None:
    def read_at(num_bytes: int, at: int) -> bytes:
        return bytes(memory[at : at + num_bytes])

    return read_newest(read_at, start=start, buffer_bytes=BUFFER_BYTES, known_sequence=known_sequence)


def test_blank_memory_holds_no_report() -> None:
    buffer, memory = new_buffer()
    assert (read(memory), buffer.last_sequence()) == (None, 0)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=FITTING_BYTES), min_size=1, max_size=10), st.integers(0, 2**33))
def test_the_last_report_is_read_and_its_neighbours_stay(bodies: list[bytes], before: int) -> None:
    buffer, memory = new_buffer()
    for sequence, body in enumerate(bodies, start=before + 1):
        buffer.write(body, sequence)
        assert read(memory) == (sequence, body)
        assert buffer.last_sequence() == sequence
    assert memory[:8] == memory[-8:] == b"\xee" * 8


def test_a_report_that_is_too_large_leaves_the_last() -> None:
    buffer, memory = new_buffer()
    buffer.write(b"x" * FITTING_BYTES, 1)
    with pytest.raises(ValueError, match="41 bytes, 40 fit"):
        buffer.write(b"y" * (FITTING_BYTES + 1), 2)
    assert read(memory) == (1, b"x" * FITTING_BYTES)


@settings(deadline=None, max_examples=300)
@given(
    st.binary(min_size=1, max_size=FITTING_BYTES),
    st.binary(min_size=1, max_size=FITTING_BYTES),
    st.integers(0, 2**33),
    st.integers(0, BUFFER_BYTES),
)
def test_no_torn_report_is_read(older: bytes, newer: bytes, before: int, seen_bytes: int) -> None:
    """The other buffer is gone: the one left shows the beginning of a write over what was there before it."""
    buffer, memory = new_buffer(0)
    buffer.write(older, before + 2)
    buffer.write(b"", before + 3)
    first = bytes(memory)
    buffer.write(newer, before + 4)
    at = before % 2 * BUFFER_BYTES
    memory[at + seen_bytes : at + BUFFER_BYTES] = first[at + seen_bytes : at + BUFFER_BYTES]
    other = BUFFER_BYTES - at
    memory[other : other + BUFFER_BYTES] = bytes(BUFFER_BYTES)
    assert read(memory, 0) in (None, (before + 2, older), (before + 4, newer))


@settings(deadline=None)
@given(st.binary(min_size=2 * BUFFER_BYTES, max_size=2 * BUFFER_BYTES))
def test_foreign_bytes_are_no_report(content: bytes) -> None:
    assert content == bytes(2 * BUFFER_BYTES) or read(content, 0) is None


@settings(deadline=None)
@given(st.integers(2, 2**33), st.integers(1, 2**33))
def test_the_report_before_the_known_one_is_no_news_and_an_older_one_is_a_page_begun_anew(
    last: int, known: int
) -> None:
    buffer, memory = new_buffer()
    buffer.write(b"a", last)
    assert read(memory, known_sequence=last) == (last, b"a")
    assert read(memory, known_sequence=last + 1) is None
    assert read(memory, known_sequence=last + 1 + known) == (last, b"a")


@settings(deadline=None)
@given(st.integers(0, 8 + 2 * BUFFER_BYTES))
def test_buffers_that_end_early_are_refused_or_not_whole(num_bytes: int) -> None:
    """Where both heads are left, what is missing is the end of a report, which its checksum tells."""
    buffer, memory = new_buffer()
    for sequence in (1, 2):
        buffer.write(b"x" * FITTING_BYTES, sequence)
    if num_bytes < 8 + BUFFER_BYTES + 24:
        with pytest.raises(DecodeError, match="cut short"):
            read(memory[:num_bytes])
    else:
        assert read(memory[:num_bytes]) == (2, b"x" * FITTING_BYTES)


def test_a_report_longer_than_the_first_look_is_read_whole() -> None:
    memory = bytearray(20_000)
    buffer = DoubleBuffer(memoryview(memory), start=0, buffer_bytes=10_000)
    for length in (999, 1000, 1001, 9_976):
        body = bytes(at % 251 for at in range(length))
        buffer.write(body, length)
        found = read_newest(lambda num_bytes, at: bytes(memory[at : at + num_bytes]), start=0, buffer_bytes=10_000)
        assert found == (length, body)
