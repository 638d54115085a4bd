"""A page gives its last whole report or says why not, whatever its writer was in the middle of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import DecodeError, LoadSnapshot, SchedulerStats, SchedulerTotals
from scheduler_components.metrics import RequestLatencies
from scheduler_components.metrics.shm_metrics_board import (
    LAYOUT_ID,
    PAGE_BYTES,
    MetricsPage,
    ReportEncoder,
    decode_report,
    look_at_metrics_page,
)

LABELS = (("dp_rank", "0"),)


def new_page() -> tuple[MetricsPage, bytearray]:
    memory = bytearray(PAGE_BYTES)
    page = MetricsPage(memoryview(memory))
    assert page.claim() == 0
    return page, memory


def read(memory: bytearray) -> SchedulerStats | None:
    found = look_at_metrics_page(lambda num_bytes, at: bytes(memory[at : at + num_bytes]))
    return None if found is None else decode_report(found[1])


def report(number: int) -> SchedulerStats:
    latencies = RequestLatencies()
    latencies.histograms.queue.observe(1.0, number)
    load = LoadSnapshot(sequence=number, num_running_reqs=number * 1_000_003, num_used_tokens=2**40 + number)
    return SchedulerStats(LABELS, load, SchedulerTotals(latencies=latencies.totals()))


def write(page: MetricsPage, number: int) -> None:
    page.reports.write(ReportEncoder(LABELS).encode(report(number)), number)


def test_a_page_that_nobody_has_claimed_is_empty() -> None:
    assert read(bytearray(PAGE_BYTES)) is None


def test_a_claimed_page_is_empty_and_gives_each_report() -> None:
    page, memory = new_page()
    assert read(memory) is None
    for number in range(1, 6):
        write(page, number)
        assert read(memory) == report(number)
    assert MetricsPage(memoryview(memory)).claim() == 5
    assert read(memory) == report(5)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 6), st.lists(st.booleans(), min_size=120, max_size=120))
def test_a_write_that_is_half_seen_leaves_the_report_before_it(count: int, seen: list[bool]) -> None:
    """Any subset of the bytes of the last write may be visible: a torn read, a dead writer, a late store."""
    page, memory = new_page()
    for number in range(1, count + 1):
        write(page, number)
    before = bytes(memory)
    write(page, count + 1)
    changed = [at for at in range(PAGE_BYTES) if memory[at] != before[at]]
    for place, at in enumerate(changed):
        if not seen[place % len(seen)]:
            memory[at] = before[at]
    is_whole = all(memory[at] != before[at] for at in changed)
    assert read(memory) == report(count + 1 if is_whole else count)


def test_a_page_of_another_version_is_refused_with_what_to_do_and_wiped_by_its_next_writer() -> None:
    page, memory = new_page()
    write(page, 7)
    memory[8:16] = b"\x01" * 8
    with pytest.raises(DecodeError, match=f"layout 0101010101010101.*{LAYOUT_ID.hex()}; run both from one version"):
        read(memory)
    assert page.claim() == 0
    assert read(memory) is None


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200).filter(lambda content: any(content[:16])))
def test_foreign_bytes_are_no_page(content: bytes) -> None:
    memory = bytearray(PAGE_BYTES)
    memory[: len(content)] = content
    page = MetricsPage(memoryview(memory))
    with pytest.raises(DecodeError, match=r"not a page of metrics|run both from one version"):
        read(memory)
    assert page.claim() == 0
    assert read(memory) is None


def test_a_whole_buffer_of_something_else_is_refused() -> None:
    page, memory = new_page()
    page.reports.write(b"\xc1", 1)
    with pytest.raises(DecodeError, match="not a metrics report"):
        read(memory)
