"""What a double buffer holds is the last whole report, in its own stretch of the memory and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.load.double_buffer import DoubleBuffer

BUFFER_BYTES = 64
FITTING_BYTES = 40
"""What is left of a buffer when checksum, sequence and length have their eight bytes each."""


def new_buffer(start: int = 8) -> tuple[DoubleBuffer, bytearray]:
    memory = bytearray(b"\xee" * start + bytes(2 * BUFFER_BYTES) + b"\xee" * 8)
    return DoubleBuffer(memoryview(memory), start=start, buffer_bytes=BUFFER_BYTES), memory


def test_blank_memory_holds_no_report() -> None:
    assert new_buffer()[0].read() is None


@settings(deadline=None)
@given(st.lists(st.binary(max_size=FITTING_BYTES), min_size=1, max_size=10), st.integers(0, 2**33))
def test_the_last_report_is_read_and_its_neighbours_stay(bodies: list[bytes], before: int) -> None:
    buffer, memory = new_buffer()
    for sequence, body in enumerate(bodies, start=before + 1):
        buffer.write(body, sequence)
        assert buffer.read() == (sequence, body)
    assert memory[:8] == memory[-8:] == b"\xee" * 8


def test_a_report_that_is_too_large_leaves_the_last() -> None:
    buffer, _ = new_buffer()
    buffer.write(b"x" * FITTING_BYTES, 1)
    with pytest.raises(ValueError, match="41 bytes, 40 fit"):
        buffer.write(b"y" * (FITTING_BYTES + 1), 2)
    assert buffer.read() == (1, b"x" * FITTING_BYTES)


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
    assert buffer.read() in (None, (before + 2, older), (before + 4, newer))


@settings(deadline=None)
@given(st.binary(min_size=2 * BUFFER_BYTES, max_size=2 * BUFFER_BYTES))
def test_foreign_bytes_are_no_report(content: bytes) -> None:
    assert (
        content == bytes(2 * BUFFER_BYTES)
        or DoubleBuffer(memoryview(content), start=0, buffer_bytes=BUFFER_BYTES).read() is None
    )
