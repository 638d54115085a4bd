"""Report a run: a live table on a terminal, plain lines in a log, or JSON lines; then a summary and the checks."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TextIO

import attrs
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from observability.kv_stream import StreamStats
from scheduler_components.metrics.shm_board import ShmBoard
from scheduler_components.ports import StatsSource
from scheduler_components.values import LoadSnapshot, SchedulerStats, TierStats
from scheduler_engine.cli.run_report import RunReport
from scheduler_engine.cli.terminal import make_console
from scheduler_engine.cli.workload_driver import ScheduleLag, WorkloadCounters, percentile


def format_tier_stats(replicas: Sequence[TierStats]) -> Iterator[tuple[str, str]]:
    """Yield name and facts of each summary line over all replicas; nothing without replicas."""
    if not replicas:
        return

    def total(name: str) -> int:
        return sum(getattr(stats, name) for stats in replicas)

    prompt_tokens = max(1, total("prompt_tokens"))
    names = ("device", "host", "storage")
    rates = [f"{name} {total(f'{name}_hit_tokens') / prompt_tokens:.1%}" for name in names]
    yield "hits by tier", f"{', '.join(rates)} of the prompt tokens"
    yield (
        "pages moved",
        f"{total('pages_written'):,} to the host, {total('pages_loaded'):,} back, "
        f"{total('pages_backed_up'):,} to storage, {total('pages_prefetched'):,} from it",
    )
    not_moved = [total(name) for name in ("pages_not_written", "pages_not_loaded", "pages_not_backed_up")]
    yield (
        "pages given up",
        f"{not_moved[0]:,} to the host, {not_moved[1]:,} back, {not_moved[2]:,} to storage, "
        f"{total('pages_revoked'):,} from it; {total('pages_dropped'):,} evicted without a copy",
    )


_NO_LOAD = LoadSnapshot()
_HEADINGS = (
    "dp",
    "running",
    "waiting",
    "KV used",
    "hits",
    "tokens/s",
    "events/s",
    "batches/s",
    "sequence",
    "gaps",
    "stream",
)
"""Eleven columns, which fit 100 characters with their numbers, so that no heading is truncated."""


@attrs.frozen(kw_only=True)
class RankRow:
    """One data-parallel rank at one moment. Events and batches per second count what the observer applied."""

    dp_rank: int
    load: LoadSnapshot
    events_per_s: float = 0.0
    batches_per_s: float = 0.0
    sequence: int = -1
    gaps: int = 0
    state: str = "none"


@dataclass(slots=True)
class CounterRates:
    """Convert counters to rates between two reads."""

    _seen: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)

    def rate(self, name: str, rank: int, value: int, now_s: float) -> float:
        """Return the growth per second of a rank's counter since the last read; 0 for the first."""
        before_s, before = self._seen.get((name, rank), (now_s, value))
        self._seen[name, rank] = (now_s, value)
        return (value - before) / (now_s - before_s) if now_s > before_s else 0.0


def make_rank_rows(
    reports: Mapping[int, SchedulerStats], streams: Mapping[int, StreamStats], *, rates: CounterRates, now_s: float
) -> list[RankRow]:
    """Return one row per rank that has reported or whose stream is followed."""
    rows = []
    for rank in sorted({*reports, *streams}):
        load = reports[rank].load if rank in reports else _NO_LOAD
        stream = streams.get(rank)
        if stream is None:
            rows.append(RankRow(dp_rank=rank, load=load))
            continue
        rows.append(
            RankRow(
                dp_rank=rank,
                load=load,
                events_per_s=rates.rate("events", rank, stream.events, now_s),
                batches_per_s=rates.rate("batches", rank, stream.batches, now_s),
                sequence=stream.last_seq,
                gaps=stream.gaps,
                state=str(stream.state),
            )
        )
    return rows


_SHOWN_BEHIND_S = 1.0  # a busy event loop delays every timer by less


def format_progress(counters: WorkloadCounters, elapsed_s: float, *, behind_s: float = 0.0) -> str:
    """Return the progress of the workload and, if sending is late, its delay."""
    of_total = f"/{counters.total}" if counters.total is not None else ""
    open_requests = counters.sent - counters.ended
    behind = f", {behind_s:.0f} s behind the trace" if behind_s > _SHOWN_BEHIND_S else ""
    return f"{elapsed_s:5.1f} s  {counters.ended}{of_total} requests done, {open_requests} open{behind}"


def render_rank_table(rows: Sequence[RankRow], title: str) -> Table:
    """Render the rows as a table for a terminal."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def format_rank_line(rows: Sequence[RankRow], title: str) -> str:
    """Format the rows as one line of a log."""
    return " | ".join([title, *(_plain_cells(row) for row in rows)])


def _cells(row: RankRow) -> list[str]:
    load = row.load
    return [
        str(row.dp_rank),
        str(load.num_running_reqs),
        str(load.num_waiting_reqs),
        f"{load.token_usage:.0%}",
        f"{load.cache_hit_rate:.0%}",
        f"{load.gen_throughput:.0f}",
        f"{row.events_per_s:.0f}",
        f"{row.batches_per_s:.0f}",
        str(row.sequence),
        str(row.gaps),
        row.state,
    ]


def _plain_cells(row: RankRow) -> str:
    cells = dict(zip(_HEADINGS, _cells(row), strict=True))
    dp_rank = cells.pop("dp")
    return f"dp{dp_rank} " + ", ".join(f"{heading} {cell}" for heading, cell in cells.items())


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to standard output unchanged, and flush each, for commands whose output other programs read."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


_TABLE_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 2.0


class NullStreamStatsSource:
    """The statistics of an engine without streams."""

    def stats(self) -> Mapping[int, StreamStats]:
        return {}


@dataclass(slots=True, kw_only=True)
class RunView:
    """The sources of the live table, read at each refresh.

    Attributes:
        counters: counters of the workload.
        board: the newest statistics of the ranks.
        streams: the observer's statistics.
        lag: delay of the workload.
        clock: monotonic seconds.
    """

    counters: WorkloadCounters
    board: ShmBoard[SchedulerStats]
    streams: StatsSource[Mapping[int, StreamStats]]
    lag: ScheduleLag = field(default_factory=ScheduleLag)
    clock: Callable[[], float] = time.monotonic
    _start_s: float = field(init=False)
    _end_s: float = field(default=math.inf, init=False)
    _rates: CounterRates = field(default_factory=CounterRates)

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    def stop_clock(self) -> None:
        """Freeze the elapsed time at the end of the workload."""
        self._end_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        return min(self.clock(), self._end_s) - self._start_s

    def title(self) -> str:
        return format_progress(self.counters, self.elapsed_s, behind_s=self.lag.lag_s(self.clock()))

    def rows(self) -> list[RankRow]:
        return make_rank_rows(self.board.read(), self.streams.stats(), rates=self._rates, now_s=self.clock())


class RunReporter(Protocol):
    """The output of a session, for a user (``ConsoleReporter``) or a program (``JsonReporter``)."""

    def note(self, text: str) -> None:
        """Report what happens."""
        ...

    def note_ready(self, url: str) -> None:
        """Report that the engine answers at ``url``."""
        ...

    def warn(self, text: str) -> None:
        """Forward a line of a rank's standard error."""
        ...

    def live_view(self, view: RunView) -> AbstractAsyncContextManager[None]:
        """Show the view while the block runs."""
        ...

    def show_summary(self, view: RunView, tiers: Sequence[TierStats]) -> None:
        """Report the totals of the run; ``tiers`` has an entry per replica with a hierarchical cache."""
        ...

    def show_report(self, report: RunReport) -> None:
        """Report the checks."""
        ...


@asynccontextmanager
async def _meanwhile(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run ``work`` while the block runs. An error of ``work`` ends the block: the reader of the output may be gone."""
    block = asyncio.current_task()
    assert block is not None
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() or done.exception() is None else block.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if task.done() and not task.cancelled():
            block.uncancel()  # the error of `task`, raised below, ends the block
        raise
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(slots=True, kw_only=True, frozen=True)
class ConsoleReporter:
    """Report to a user as text.

    Attributes:
        out: console of the output.
        err: console of the ranks' standard error.
    """

    out: Console
    err: Console

    @classmethod
    def standard(cls) -> ConsoleReporter:
        """Standard output and standard error."""
        return cls(out=make_console(), err=make_console(stderr=True))

    def note(self, text: str) -> None:
        self.out.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.err.print(text, markup=False, soft_wrap=True)

    def note_ready(self, url: str) -> None:
        self.note(f"ready at {url}; see /server_info, /v1/loads and /metrics")

    @asynccontextmanager
    async def live_view(self, view: RunView) -> AsyncIterator[None]:
        """Keep the view on the screen while the block runs."""
        async with _meanwhile(self._show_table(view) if self.out.is_terminal else self._show_lines(view)):
            yield

    async def _show_table(self, view: RunView) -> None:
        with Live(console=self.out, auto_refresh=False) as live:
            try:
                while True:
                    live.update(render_rank_table(view.rows(), view.title()), refresh=True)
                    await asyncio.sleep(_TABLE_INTERVAL_S)
            finally:
                live.update(render_rank_table(view.rows(), view.title()), refresh=True)  # stays on the screen

    async def _show_lines(self, view: RunView) -> None:
        while True:
            await asyncio.sleep(_LINE_INTERVAL_S)
            self.note(format_rank_line(view.rows(), view.title()))

    def show_summary(self, view: RunView, tiers: Sequence[TierStats]) -> None:
        """Print the totals of the run, and the hit rate of each tier of a hierarchical cache."""
        self.note("\nSummary")
        for name, facts in chain(_summary(view), format_tier_stats(tiers)):
            self.note(f"  {name:<18} {facts}")

    def show_report(self, report: RunReport) -> None:
        """Print each check with its facts, then the overall result."""
        self.note("\nReport")
        for check in report.checks:
            self.note(f"  {check.name:<18} {'ok  ' if check.passed else 'FAIL'}  {check.facts}")
        self.note("PASSED" if report.passed else "FAILED")


@dataclass(slots=True, kw_only=True, frozen=True)
class JsonReporter:
    """Report one JSON object per line, each with a ``kind``: note, ready, progress, summary, report.

    Attributes:
        out: stream of the JSON lines.
        err: stream of the ranks' standard error, as text.
    """

    out: TextIO
    err: TextIO

    @classmethod
    def standard(cls) -> JsonReporter:
        """Standard output and standard error."""
        return cls(out=sys.stdout, err=sys.stderr)

    def note(self, text: str) -> None:
        self._write("note", text=text)

    def note_ready(self, url: str) -> None:
        self._write("ready", url=url)

    def warn(self, text: str) -> None:
        self.err.write(f"{text}\n")
        self.err.flush()

    @asynccontextmanager
    async def live_view(self, view: RunView) -> AsyncIterator[None]:
        """Write a line of progress every two seconds while the block runs."""
        async with _meanwhile(self._write_progress(view)):
            yield

    async def _write_progress(self, view: RunView) -> None:
        while True:
            await asyncio.sleep(_LINE_INTERVAL_S)
            self._write("progress", **_progress_facts(view), ranks=[attrs.asdict(row) for row in view.rows()])

    def show_summary(self, view: RunView, tiers: Sequence[TierStats]) -> None:
        counters, totals = view.counters, [report.counters for report in view.board.read().values()]
        self._write(
            "summary",
            **_progress_facts(view),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            first_token_s={
                "p50": percentile(counters.first_token_s, 0.5),
                "p95": percentile(counters.first_token_s, 0.95),
            },
            evicted_tokens=sum(total.evicted_tokens_total for total in totals),
            retractions=sum(total.num_retractions_total for total in totals),
            refusals=counters.refused.reasons,
            failures=counters.failed.reasons,
            tiers=tiers,
        )

    def show_report(self, report: RunReport) -> None:
        self._write("report", passed=report.passed, checks=[attrs.asdict(check) for check in report.checks])

    def _write(self, kind: str, **facts: Any) -> None:
        self.out.write(msgspec.json.encode({"kind": kind, **facts}).decode() + "\n")
        self.out.flush()


def _progress_facts(view: RunView) -> dict[str, Any]:
    counters = view.counters
    return {
        "elapsed_s": round(view.elapsed_s, 3),
        "requests": counters.total,
        "sent": counters.sent,
        "finished": counters.finished,
        "refused": counters.refused.count,
        "failed": counters.failed.count,
        "behind_s": round(view.lag.lag_s(view.clock()), 3),
    }


def _summary(view: RunView) -> Iterator[tuple[str, str]]:
    counters, elapsed_s = view.counters, max(view.elapsed_s, 1e-9)
    refused, failed = counters.refused, counters.failed
    totals = [report.counters for report in view.board.read().values()]
    retractions = sum(total.num_retractions_total for total in totals)
    evicted_tokens = sum(total.evicted_tokens_total for total in totals)
    median_ms, p95_ms = (1000 * percentile(counters.first_token_s, share) for share in (0.5, 0.95))
    yield (
        "requests",
        f"{counters.finished:,} finished, {refused.count:,} refused, {failed.count:,} failed in {elapsed_s:.1f} s",
    )
    yield "prompt tokens", f"{counters.prompt_tokens:,}, {counters.hit_rate:.0%} of them from the prefix cache"
    yield "generated tokens", f"{counters.output_tokens:,}, {counters.output_tokens / elapsed_s:,.0f} per second"
    yield "first token", f"{median_ms:.0f} ms at the median, {p95_ms:.0f} ms at the 95th percentile"
    yield "KV pools", f"{evicted_tokens:,} tokens evicted, {retractions:,} requests retracted"
    for name, outcomes in (("first refusal", refused), ("first failure", failed)):
        for reason in outcomes.reasons[:1]:
            yield name, reason
