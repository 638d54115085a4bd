"""What a person sees of a run: a live table on a terminal, plain lines in a log, then summary and verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live

from observability.kv_stream.stats import StreamStats
from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.reference.hicache_facts import tier_facts
from scheduler_components.reference.table import RateWindow, Row, make_rows, plain_line, progress_text, render_table
from scheduler_components.reference.tally import Tally, percentile
from scheduler_components.reference.verdict import Verdict

__all__ = ["RunView", "Screen"]

_TABLE_EVERY_S = 0.5
_LINE_EVERY_S = 2.0


@dataclass(slots=True, kw_only=True)
class RunView:
    """What the table is made of; read late, so it always shows the present.

    Attributes:
        tally: of the workload.
        reports: newest statistics by data-parallel rank.
        streams: what the observer sees, by rank.
        clock: monotonic seconds.
    """

    tally: Tally
    reports: Mapping[int, SchedulerStats]
    streams: Callable[[], Mapping[int, StreamStats]]
    clock: Callable[[], float] = time.monotonic
    _start_s: float = field(init=False)
    _rates: RateWindow = field(default_factory=RateWindow)

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self._start_s

    def title(self) -> str:
        return progress_text(self.tally, self.elapsed_s)

    def rows(self) -> list[Row]:
        return make_rows(self.reports, self.streams(), rates=self._rates, now_s=self.clock())


@dataclass(slots=True, kw_only=True, frozen=True)
class Screen:
    """Where text goes.

    Attributes:
        out: what a person asked for.
        err: what ranks complain of.
    """

    out: Console
    err: Console

    @classmethod
    def standard(cls) -> Screen:
        """Standard output and standard error."""
        return cls(out=Console(highlight=False), err=Console(stderr=True, highlight=False))

    def say(self, text: str) -> None:
        self.out.print(text, markup=False, soft_wrap=True)

    def complain(self, text: str) -> None:
        self.err.print(text, markup=False, soft_wrap=True)

    @asynccontextmanager
    async def showing(self, view: RunView) -> AsyncIterator[None]:
        """Keep the view on the screen until the block is left."""
        task = asyncio.create_task(self._show_table(view) if self.out.is_terminal else self._show_lines(view))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _show_table(self, view: RunView) -> None:
        with Live(console=self.out, auto_refresh=False) as live:
            try:
                while True:
                    live.update(render_table(view.rows(), view.title()), refresh=True)
                    await asyncio.sleep(_TABLE_EVERY_S)
            finally:
                live.update(render_table(view.rows(), view.title()), refresh=True)  # what stays on the screen

    async def _show_lines(self, view: RunView) -> None:
        while True:
            await asyncio.sleep(_LINE_EVERY_S)
            self.say(plain_line(view.rows(), view.title()))

    def show_summary(self, view: RunView) -> None:
        """What the run came to."""
        self.say("\nSummary")
        for name, facts in _summary(view):
            self.say(f"  {name:<18} {facts}")

    def show_tiers(self, tiers: Sequence[TierStats]) -> None:
        """What of the prompts each tier of a hierarchical cache had; nothing without one."""
        for name, facts in tier_facts(tiers):
            self.say(f"  {name:<18} {facts}")

    def show_verdict(self, verdict: Verdict) -> None:
        """Each check with its facts, then the verdict."""
        self.say("\nVerdict")
        for check in verdict.checks:
            self.say(f"  {check.name:<18} {'ok  ' if check.passed else 'FAIL'}  {check.facts}")
        self.say("PASSED" if verdict.passed else "FAILED")


def _summary(view: RunView) -> Iterator[tuple[str, str]]:
    tally, tokens, elapsed_s = view.tally, view.tally.tokens, max(view.elapsed_s, 1e-9)
    refused, failed = tally.refused, tally.failed
    totals = [report.totals for report in view.reports.values()]
    retractions = sum(total.num_retractions_total for total in totals)
    evicted_tokens = sum(total.evicted_tokens_total for total in totals)
    median_ms, p95_ms = (1000 * percentile(tally.first_token_s, share) for share in (0.5, 0.95))
    yield (
        "requests",
        f"{tally.finished:,} finished, {refused.count:,} refused, {failed.count:,} failed in {elapsed_s:.1f} s",
    )
    yield "prompt tokens", f"{tokens.prompt:,}, {tokens.hit_rate:.0%} of them from the prefix cache"
    yield "generated tokens", f"{tokens.output:,}, {tokens.output / elapsed_s:,.0f} a second"
    yield "first token", f"{median_ms:.0f} ms at the median, {p95_ms:.0f} ms at the 95th percentile"
    yield "KV pools", f"{evicted_tokens:,} tokens evicted, {retractions:,} requests retracted"
    for name, outcomes in (("first refusal", refused), ("first failure", failed)):
        for reason in outcomes.reasons[:1]:
            yield name, reason
