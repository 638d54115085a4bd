"""The table shows the ranks' reports next to the observer's counts, and the arithmetic of the counters is right."""

from __future__ import annotations

import asyncio
import io
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from observability.kv_stream import StreamState, StreamStats
from scheduler_components.values import LoadSnapshot, SchedulerStats
from scheduler_engine.cli import run_reporter
from scheduler_engine.cli.run_reporter import (
    ConsoleReporter,
    CounterRates,
    JsonReporter,
    NullStreamStatsSource,
    RunView,
    format_progress,
    format_rank_line,
    make_rank_rows,
    render_rank_table,
)
from scheduler_engine.cli.terminal import make_console
from scheduler_engine.cli.workload_driver import ScheduleLag, WorkloadCounters, percentile


def report(**load: float) -> SchedulerStats:
    return SchedulerStats(labels=(), load=LoadSnapshot(**load))


def stream(rank: int, *, events: int, batches: int, gaps: int = 0) -> StreamStats:
    return StreamStats(
        rank=rank,
        endpoint="tcp://h:1",
        state=StreamState.LIVE,
        last_seq=batches - 1,
        batches=batches,
        events=events,
        gaps=gaps,
    )


def test_a_rate_is_the_growth_between_two_reads() -> None:
    rates = CounterRates()
    make_rank_rows({}, {0: stream(0, events=10, batches=5)}, rates=rates, now_s=100.0)
    (row,) = make_rank_rows({}, {0: stream(0, events=30, batches=9)}, rates=rates, now_s=102.0)
    assert (row.events_per_s, row.batches_per_s, row.sequence) == (10.0, 2.0, 8)


def test_two_reads_at_the_same_time_show_no_rate() -> None:
    rates = CounterRates()
    for _ in range(2):
        (row,) = make_rank_rows({}, {0: stream(0, events=10, batches=5)}, rates=rates, now_s=100.0)
        assert row.events_per_s == 0


def test_a_rank_that_reports_or_is_followed_is_shown() -> None:
    rows = make_rank_rows({2: report()}, {1: stream(1, events=0, batches=0)}, rates=CounterRates(), now_s=0.0)
    assert [row.dp_rank for row in rows] == [1, 2]


def test_table_and_line_show_the_same_facts() -> None:
    load = report(num_running_reqs=7, num_waiting_reqs=3, token_usage=0.25, cache_hit_rate=0.5, gen_throughput=99.0)
    rows = make_rank_rows({0: load}, {0: stream(0, events=4, batches=2, gaps=6)}, rates=CounterRates(), now_s=0.0)
    shown = io.StringIO()
    Console(file=shown, width=200).print(render_rank_table(rows, "title"))
    line = format_rank_line(rows, "title")
    for fact in ("7", "3", "25%", "50%", "99", "6", "live", "title"):
        assert fact in shown.getvalue()
        assert fact in line


def test_the_table_of_a_large_engine_fits_100_columns_with_whole_headings() -> None:
    load = report(num_running_reqs=4096, num_waiting_reqs=12345, token_usage=1, cache_hit_rate=1, gen_throughput=123456)
    rates = CounterRates()
    many = [stream(15, events=events, batches=batches, gaps=999) for events, batches in ((0, 0), (500_000, 99_999))]
    recovering = [msgspec.structs.replace(each, state=StreamState.RECOVERING) for each in many]
    for now_s, seen in enumerate(recovering):
        rows = make_rank_rows({15: load}, {15: seen}, rates=rates, now_s=float(now_s))
    shown = io.StringIO()
    Console(file=shown, width=100).print(render_rank_table(rows, "title"))
    assert "\u2026" not in shown.getvalue(), "something was cut"
    cells = shown.getvalue().split()
    for whole in ("running", "waiting", "tokens/s", "batches/s", "sequence", "recovering", "123456", "500000", "99998"):
        assert whole in cells


def test_progress_counts_ended_and_open_requests() -> None:
    counters = WorkloadCounters(total=10, sent=5)
    counters.finish(prompt_tokens=4, cached_tokens=1, output_tokens=2)
    counters.refused.add("too long")
    assert "2/10 requests done, 3 open" in format_progress(counters, 1.0)
    assert counters.hit_rate == 0.25


def test_progress_shows_the_delay_of_sending_without_that_of_a_busy_loop() -> None:
    counters, lag = WorkloadCounters(total=10), ScheduleLag(due_s=100.0)
    assert format_progress(counters, 1.0, behind_s=lag.lag_s(112.3)).endswith("12 s behind the trace")
    assert "behind" not in format_progress(counters, 1.0, behind_s=lag.lag_s(100.2))
    lag.due_s = None
    assert lag.lag_s(1e9) == 0.0


def test_reasons_are_bounded_and_counts_are_not() -> None:
    counters = WorkloadCounters()
    for number in range(1000):
        counters.failed.add(f"reason {number}")
    assert counters.failed.count == 1000
    assert len(counters.failed.reasons) < 20


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([0.5, 0.95]))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_the_percentile_of_nothing_is_zero() -> None:
    assert percentile([], 0.5) == 0.0


def test_text_between_colons_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank's complaint may quote anything; rich would make pictures of some of it."""
    screen = ConsoleReporter.standard()
    screen.note("tcp://host:warning:1 [bold]")
    screen.warn("rank 3: :bomb:")
    assert capsys.readouterr() == ("tcp://host:warning:1 [bold]\n", "rank 3: :bomb:\n")


class GoneReader(io.StringIO):
    """Standard output whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


class NoReports:
    def read(self) -> dict[int, SchedulerStats]:
        return {}


@pytest.mark.parametrize("kind", ["json", "text"])
def test_a_run_ends_when_the_reader_of_its_progress_is_gone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reporter, "_LINE_INTERVAL_S", 0)
    gone = GoneReader()
    view = RunView(counters=WorkloadCounters(), board=NoReports(), streams=NullStreamStatsSource())  # type: ignore[arg-type]
    console = make_console()
    console.file = gone
    reporter = JsonReporter(out=gone, err=gone) if kind == "json" else ConsoleReporter(out=console, err=console)

    async def run() -> str:
        outcome = "cancelled"
        with pytest.raises(BrokenPipeError):
            async with reporter.live_view(view):
                try:
                    await asyncio.wait_for(asyncio.Event().wait(), 30)
                except TimeoutError:
                    outcome = "late"
        this = asyncio.current_task()
        assert this is not None
        assert this.cancelling() == 0, "a later timeout would take this for its own"
        return outcome

    assert asyncio.run(run()) == "cancelled"


def test_a_cancelled_run_stays_cancelled() -> None:
    view = RunView(counters=WorkloadCounters(), board=NoReports(), streams=NullStreamStatsSource())  # type: ignore[arg-type]

    async def run() -> bool:
        async def work() -> None:
            async with JsonReporter(out=io.StringIO(), err=io.StringIO()).live_view(view):
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert asyncio.run(run())
