"""The live table: one row a data-parallel rank, from what the ranks report and what the observer sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import attrs
from rich.table import Table

from observability.kv_stream.stats import StreamStats
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.reference.tally import Tally

__all__ = ["RateWindow", "Row", "make_rows", "plain_line", "progress_text", "render_table"]

_NO_LOAD = LoadSnapshot()
_HEADINGS = (
    "dp rank",
    "running",
    "waiting",
    "token usage",
    "hit rate",
    "tokens/s",
    "events/s",
    "batches/s",
    "sequence",
    "gaps",
    "stream",
)


@attrs.frozen(kw_only=True)
class Row:
    """One data-parallel rank at one moment. Events and batches a second are those that the observer applied."""

    dp_rank: int
    load: LoadSnapshot
    events_per_s: float = 0.0
    batches_per_s: float = 0.0
    sequence: int = -1
    gaps: int = 0
    state: str = "none"


@dataclass(slots=True)
class RateWindow:
    """Turns growing counters into rates between two looks."""

    _seen: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)

    def rate(self, name: str, rank: int, value: int, now_s: float) -> float:
        """Growth a second of a rank's counter since it was last asked for; 0 at first."""
        before_s, before = self._seen.get((name, rank), (now_s, value))
        self._seen[name, rank] = (now_s, value)
        return (value - before) / (now_s - before_s) if now_s > before_s else 0.0


def make_rows(
    reports: Mapping[int, SchedulerStats], streams: Mapping[int, StreamStats], *, rates: RateWindow, now_s: float
) -> list[Row]:
    """One row for each rank that has reported or is followed."""
    rows = []
    for rank in sorted({*reports, *streams}):
        load = reports[rank].load if rank in reports else _NO_LOAD
        stream = streams.get(rank)
        if stream is None:
            rows.append(Row(dp_rank=rank, load=load))
            continue
        rows.append(
            Row(
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


def progress_text(tally: Tally, elapsed_s: float) -> str:
    """How far the workload is."""
    of_total = f"/{tally.total}" if tally.total is not None else ""
    open_requests = tally.sent - tally.ended
    return f"{elapsed_s:5.1f} s  {tally.ended}{of_total} requests done, {open_requests} open"


def render_table(rows: Sequence[Row], title: str) -> Table:
    """The table as a terminal shows it."""
    table = Table(title=title, title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def plain_line(rows: Sequence[Row], title: str) -> str:
    """The same facts in one line, for a log."""
    return " | ".join([title, *(_plain_cells(row) for row in rows)])


def _cells(row: Row) -> list[str]:
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


def _plain_cells(row: Row) -> str:
    cells = dict(zip(_HEADINGS, _cells(row), strict=True))
    dp_rank = cells.pop("dp rank")
    return f"dp{dp_rank} " + ", ".join(f"{heading} {cell}" for heading, cell in cells.items())
