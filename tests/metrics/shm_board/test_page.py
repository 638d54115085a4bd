"""A page has its last complete report at every point of a write, in any order in which the bytes become visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import DecodeError
from scheduler_components.metrics.shm_board import DoubleBufferedPage, ReportCodec, read_newest

HEAD_BYTES = 16
BUFFER_BYTES = 64
FITTING_BYTES = 40
"""What is left of a buffer when checksum, sequence and length have their eight bytes each."""

BYTES: ReportCodec[bytes] = ReportCodec(
    subject="bytes", layout_id=b"12345678", buffer_bytes=BUFFER_BYTES, encode=bytes, decode=bytes
)
for_each_kind = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def new_page(codec: ReportCodec[Any] = BYTES) -> tuple[DoubleBufferedPage[Any], bytearray]:
    memory = bytearray(codec.page_bytes)
    page = DoubleBufferedPage(memoryview(memory), codec)
    assert page.format() == 0
    return page, memory


def read(
    memory: bytes | bytearray, codec: ReportCodec[Any] = BYTES, known_sequence: int = 0
) -> tuple[int, bytes] | None:
    return read_newest(lambda num_bytes, at: bytes(memory[at : at + num_bytes]), codec, known_sequence)


def test_an_unclaimed_page_and_a_claimed_page_are_empty() -> None:
    assert read(bytes(BYTES.page_bytes)) is None
    assert read(new_page()[1]) is None


@settings(deadline=None)
@given(st.lists(st.binary(max_size=FITTING_BYTES), min_size=1, max_size=10), st.integers(0, 2**33))
def test_the_last_report_is_read_and_its_neighbours_stay(bodies: list[bytes], before: int) -> None:
    memory = bytearray(BYTES.page_bytes) + b"\xee" * 8
    page = DoubleBufferedPage(memoryview(memory), BYTES)
    page.format()
    for sequence, body in enumerate(bodies, start=before + 1):
        page.write(body, sequence)
        assert read(memory) == (sequence, body)
        assert page.format() == sequence
    assert memory[-8:] == b"\xee" * 8


def test_a_report_that_is_too_large_leaves_the_last() -> None:
    page, memory = new_page()
    page.write(b"x" * FITTING_BYTES, 1)
    with pytest.raises(ValueError, match="41 bytes, only 40 fit"):
        page.write(b"y" * (FITTING_BYTES + 1), 2)
    assert read(memory) == (1, b"x" * FITTING_BYTES)


@for_each_kind
@given(st.integers(1, 20))
def test_a_report_is_read_as_it_was_written(codec: ReportCodec[Any], report: Callable[[int], Any], count: int) -> None:
    page, memory = new_page(codec)
    for sequence in range(1, count + 1):
        page.write(report(sequence), sequence)
        found = read(memory, codec)
        assert found is not None
        assert (found[0], codec.decode(found[1])) == (sequence, report(sequence))


@pytest.mark.soak
@settings(for_each_kind, max_examples=num_examples(3))
@given(st.integers(1, 6), st.lists(st.booleans(), min_size=120, max_size=120))
@example(1, [False] * 120)
@example(1, [True] * 120)
def test_a_partial_write_leaves_the_previous_report(
    codec: ReportCodec[Any], report: Callable[[int], Any], count: int, seen: list[bool]
) -> None:
    """Any subset of the bytes of the last write may be visible: a torn read, a dead writer, a late store."""
    page, memory = new_page(codec)
    for sequence in range(1, count + 1):
        page.write(report(sequence), sequence)
    before = bytes(memory)
    page.write(report(count + 1), count + 1)
    changed = [at for at in range(codec.page_bytes) if memory[at] != before[at]]
    for place, at in enumerate(changed):
        if not seen[place % len(seen)]:
            memory[at] = before[at]
    is_whole = all(memory[at] != before[at] for at in changed)
    last = count + 1 if is_whole else count
    found = read(memory, codec)
    assert found is not None
    assert (found[0], codec.decode(found[1])) == (last, report(last))
    assert read(memory, codec, known_sequence=count + 1) == (found if is_whole else None)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(6))
@given(
    st.binary(min_size=1, max_size=FITTING_BYTES),
    st.binary(min_size=1, max_size=FITTING_BYTES),
    st.integers(0, 2**33),
    st.integers(0, BUFFER_BYTES),
)
def test_no_torn_report_is_read(older: bytes, newer: bytes, before: int, seen_bytes: int) -> None:
    """The other buffer is gone: the one left shows the beginning of a write over what was there before it."""
    page, memory = new_page()
    page.write(older, before + 2)
    page.write(b"", before + 3)
    first = bytes(memory)
    page.write(newer, before + 4)
    at = HEAD_BYTES + before % 2 * BUFFER_BYTES
    other = HEAD_BYTES + (before + 1) % 2 * BUFFER_BYTES
    memory[at + seen_bytes : at + BUFFER_BYTES] = first[at + seen_bytes : at + BUFFER_BYTES]
    memory[other : other + BUFFER_BYTES] = bytes(BUFFER_BYTES)
    assert read(memory) in (None, (before + 2, older), (before + 4, newer))


@settings(deadline=None)
@given(st.binary(min_size=2 * BUFFER_BYTES, max_size=2 * BUFFER_BYTES))
def test_foreign_buffers_hold_no_report(content: bytes) -> None:
    assert content == bytes(2 * BUFFER_BYTES) or read(BYTES.head + content) is None


@for_each_kind
@given(st.binary(min_size=1, max_size=200).filter(lambda content: any(content[:16])))
def test_foreign_bytes_are_no_page_and_are_cleared_by_the_next_writer(codec: ReportCodec[Any], content: bytes) -> None:
    memory = bytearray(codec.page_bytes)
    memory[: len(content)] = content
    with pytest.raises(DecodeError, match=f"not a page of {codec.subject}|from one version"):
        read(memory, codec)
    assert DoubleBufferedPage(memoryview(memory), codec).format() == 0
    assert read(memory, codec) is None


def test_a_page_of_another_version_is_refused_with_a_remedy_and_cleared_by_its_next_writer(
    codec: ReportCodec[Any], report: Callable[[int], Any]
) -> None:
    newer = attrs.evolve(codec, layout_id=b"\x01" * 8)
    page, memory = new_page(codec)
    page.write(report(7), 7)
    with pytest.raises(DecodeError, match=f"layout {codec.layout_id.hex()}.*0101010101010101; run .* from one version"):
        read(memory, newer)
    assert DoubleBufferedPage(memoryview(memory), newer).format() == 0
    assert read(memory, newer) is None


def test_a_whole_buffer_of_another_program_is_a_decode_error(codec: ReportCodec[Any]) -> None:
    page, memory = new_page(attrs.evolve(codec, encode=bytes))
    page.write(b"\xc1", 1)
    found = read(memory, codec)
    assert found is not None
    with pytest.raises(DecodeError, match=f"not a {codec.subject} report"):
        codec.decode(found[1])


@settings(deadline=None)
@given(st.integers(2, 2**33), st.integers(1, 2**33))
def test_the_previous_report_is_ignored_and_an_older_one_is_a_restarted_page(last: int, known: int) -> None:
    page, memory = new_page()
    page.write(b"a", last)
    assert read(memory, known_sequence=last) == (last, b"a")
    assert read(memory, known_sequence=last + 1) is None
    assert read(memory, known_sequence=last + 1 + known) == (last, b"a")


@settings(deadline=None)
@given(st.integers(0, HEAD_BYTES + 2 * BUFFER_BYTES))
def test_a_truncated_page_is_refused_or_incomplete(num_bytes: int) -> None:
    """If all headers are present, the end of a report is missing, and its checksum shows that."""
    page, memory = new_page()
    for sequence in (1, 2):
        page.write(b"x" * FITTING_BYTES, sequence)
    if num_bytes < HEAD_BYTES + BUFFER_BYTES + 24:
        with pytest.raises(DecodeError, match="truncated"):
            read(memory[:num_bytes])
    else:
        assert read(memory[:num_bytes]) == (2, b"x" * FITTING_BYTES)


def test_a_report_longer_than_the_first_read_is_read_completely() -> None:
    codec = attrs.evolve(BYTES, buffer_bytes=10_000)
    page, memory = new_page(codec)
    for length in (999, 1000, 1001, 9_976):
        body = bytes(at % 251 for at in range(length))
        page.write(body, length)
        assert read(memory, codec) == (length, body)
