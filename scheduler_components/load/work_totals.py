"""What a scheduler has taken in and worked off since it started, and load reports that say it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from scheduler_components.load.dispatch_ledger import is_dispatcher_name
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.ports import LoadSource, WorkSource

__all__ = ["MAX_DISPATCHERS", "LoadWithTotals", "WorkTotals"]

MAX_DISPATCHERS = 64
"""Dispatchers that are remembered at a time; the one that has been silent longest makes room for a new one."""

_MAX_TICKET = 2**63 - 1


@dataclass(slots=True, kw_only=True)
class WorkTotals:
    """The kit's ``WorkSource``: the scheduler counts here as things happen.

    Attributes:
        total_prefill_uncached_tokens: tokens computed by prefill.
        total_prefill_busy_us: time of the steps that computed them.
        refused_tickets: tickets that no dispatcher of this kit writes; each costs itself.
    """

    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    refused_tickets: int = 0
    _tickets: OrderedDict[str, int] = field(default_factory=OrderedDict, init=False, repr=False)
    _watermarks: tuple[tuple[str, int], ...] | None = field(default=(), init=False, repr=False)

    def took_in(self, dispatcher: str, ticket: int) -> None:
        """Count a request when it enters the queue, or is refused: it is no longer on its way.

        Args:
            dispatcher: who sent it.
            ticket: the number that the dispatcher gave it. Tickets of one dispatcher rise in the order of sending.
        """
        if not is_dispatcher_name(dispatcher) or not 0 <= ticket <= _MAX_TICKET:
            self.refused_tickets += 1
            return
        tickets = self._tickets
        tickets[dispatcher] = max(ticket, tickets.get(dispatcher, ticket))
        tickets.move_to_end(dispatcher)
        if len(tickets) > MAX_DISPATCHERS:
            tickets.popitem(last=False)
        self._watermarks = None

    def prefilled(self, uncached_tokens: int, busy_s: float) -> None:
        """Count one step's prefill; what is negative counts as 0, for a clock may be set back."""
        self.total_prefill_uncached_tokens += max(0, uncached_tokens)
        self.total_prefill_busy_us += max(0, round(busy_s * 1e6))

    @property
    def dispatched_watermarks(self) -> tuple[tuple[str, int], ...]:
        """The highest ticket taken in from each dispatcher, sorted by dispatcher."""
        if self._watermarks is None:
            self._watermarks = tuple(sorted(self._tickets.items()))
        return self._watermarks


@dataclass(slots=True, kw_only=True)
class LoadWithTotals:
    """A ``LoadSource`` that adds the totals to another's snapshots.

    Attributes:
        load: usually a ``LoadInquirer``.
        work: usually ``WorkTotals``.
    """

    load: LoadSource
    work: WorkSource

    def get_loads(self) -> LoadSnapshot:
        """Return the load of this moment with the totals of this moment.

        The watermarks are read first: a request that comes in between is counted by the load and not yet by them.
        Its dispatcher counts it twice for one report then, which is better than not at all.
        """
        work = self.work
        watermarks = work.dispatched_watermarks
        return msgspec.structs.replace(
            self.load.get_loads(),
            total_prefill_uncached_tokens=work.total_prefill_uncached_tokens,
            total_prefill_busy_us=work.total_prefill_busy_us,
            dispatched_watermarks=watermarks,
        )
