"""Log metrics: one line per rank and interval."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_components.values import SchedulerStats

__all__ = ["LogSink"]


@dataclass(slots=True, kw_only=True)
class LogSink:
    """A ``MetricsSink`` that logs the newest report of each rank, at most once in ``interval_s``.

    Attributes:
        logger: receives the lines at level INFO.
        interval_s: seconds between two lines of one rank; 0 logs every report.
        clock: seconds from any origin. If it jumps back, the next report is logged.
    """

    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("observability.stats"))
    interval_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    _logged_at: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict, init=False, repr=False)

    def record(self, stats: SchedulerStats) -> None:
        """Log the report if the interval of the rank has passed."""
        now = self.clock()
        logged_at = self._logged_at.get(stats.labels)
        if logged_at is not None and 0 <= now - logged_at < self.interval_s:
            return
        self._logged_at[stats.labels] = now
        self.logger.info("%s", _line_of(stats))


def _line_of(stats: SchedulerStats) -> str:
    """Return one line with queues, KV pool, rates, events and any losses."""
    load, publisher = stats.load, stats.publisher
    parts = [
        f"{load.num_running_reqs} running",
        f"{load.num_waiting_reqs} waiting ({load.num_pending_tokens:,} tokens)",
        f"KV {load.num_used_tokens:,}/{load.max_total_num_tokens:,} tokens ({load.token_usage:.1%})",
        f"hit rate {load.cache_hit_rate:.1%}",
        f"{load.gen_throughput:,.1f} tokens/s",
        f"{publisher.events_sent:,} events in {publisher.batches_sent:,} batches",
    ]
    if publisher.batches_dropped:
        parts.append(f"{publisher.batches_dropped:,} BATCHES DROPPED")
    if publisher.events_refused:
        parts.append(f"{publisher.events_refused:,} EVENTS REFUSED")
    return f"dp{load.dp_rank}: " + ", ".join(parts)
