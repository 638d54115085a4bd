"""AllocationLog: record which holder allocates and frees which pages, in which step and by which component.

A leak shows when the scheduler is idle, long after the code that lost the pages has run. The log keeps what was
recorded at that time: one entry per call that moves pages, with a reference to the caller's sequence, so a long prompt
costs as much as a short one. Entries are only interpreted when a report needs them.

The log has two bounds: the number of entries, and of the pages that they name. The oldest entries are dropped first, so
the log knows nothing of a page that has not moved for very long. `one_in` samples the requests: a repeated leak soon
hits a sampled one, whose history is complete. Callers ask `is_sampled` once per request, because with one token per
page a step has one call per running request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_components._internal.validators import check_integer
from scheduler_components.values import AllocationAction, AllocationRecord
from scheduler_components.watchdog import StepProgress

__all__ = ["AllocationLog", "PairedRecords", "pair_records"]


@dataclass(slots=True, kw_only=True)
class AllocationLog:
    """An `AllocationSink` that keeps its entries. Used on the scheduler's thread.

    The code that gives pages to requests calls `record`; `PoolInvariantChecker` reads `history` if it finds a
    violation.

    Attributes:
        progress: step and phase of new entries.
        one_in: sampling: record one of so many requests; 1 records all.
        max_entries, max_pages: bounds; two million pages take 16 MB.

    Raises:
        ConfigError: a number is below 1.
    """

    progress: StepProgress = field(default_factory=StepProgress)
    one_in: int = 1
    max_entries: int = 1 << 16
    max_pages: int = 1 << 21
    _entries: deque[tuple[int, str, str, AllocationAction, str, str, Sequence[int]]] = field(
        default_factory=deque, init=False, repr=False
    )
    _num_pages: int = field(default=0, init=False)
    _has_dropped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_integer("one_in", self.one_in)
        check_integer("max_entries", self.max_entries)
        check_integer("max_pages", self.max_pages)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_complete(self) -> bool:
        """Whether the log has dropped no entry. Otherwise the entry before the oldest one of a page is unknown."""
        return not self._has_dropped

    def is_sampled(self, holder: str) -> bool:
        """Return whether the pages of a holder are recorded. The answer for a holder never changes."""
        return self.one_in == 1 or not hash(holder) % self.one_in

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """Record one action of a sampled holder, as `AllocationSink` describes. An action without pages is ignored."""
        if not pages:
            return
        progress, entries = self.progress, self._entries
        entries.append((progress.step, progress.phase, component, action, holder, pool, pages))
        self._num_pages += len(pages)
        if len(entries) > self.max_entries or self._num_pages > self.max_pages:
            self._drop_oldest()

    def history(self, pool: str, pages: Collection[int]) -> list[AllocationRecord]:
        """Return the entries about any of these pages, oldest first. Walks the whole log, so only reports use it."""
        wanted = set(pages)
        return [
            AllocationRecord(step, phase, component, action, holder, entry_pool, moved)
            for step, phase, component, action, holder, entry_pool, moved in self._entries
            if entry_pool == pool and not wanted.isdisjoint(moved)
        ]

    def _drop_oldest(self) -> None:
        entries = self._entries
        while len(entries) > self.max_entries or self._num_pages > self.max_pages:
            self._num_pages -= len(entries.popleft()[-1])
            self._has_dropped = True


@dataclass(slots=True, kw_only=True)
class PairedRecords:
    """The entries of some pages, as pairs of taking and returning. Made by `pair_records`.

    Attributes:
        open: (holder, page) -> the entries by which it took the page and has not returned it, oldest first. Empty for a
            page that it has returned.
        returned: (holder, page) -> the entry by which it returned the page last.
        strays: entries that return a page that their holder did not have.
    """

    open: dict[tuple[str, int], list[AllocationRecord]] = field(default_factory=dict)
    returned: dict[tuple[str, int], AllocationRecord] = field(default_factory=dict)
    strays: list[AllocationRecord] = field(default_factory=list)

    @property
    def holders(self) -> set[str]:
        """Holders that have not returned one of the pages."""
        return {holder for (holder, _), records in self.open.items() if records}

    def unreturned(self, expected: Mapping[str, int]) -> list[AllocationRecord]:
        """Return the entries by which a holder took a page more often than `expected` says and did not return it."""
        return [records[-1] for (holder, _), records in self.open.items() if len(records) > expected.get(holder, 0)]

    def last_returns(self, holders: Collection[str]) -> list[AllocationRecord]:
        """Return the entries by which `holders`, which have a page now, returned it last."""
        return [
            record
            for (holder, page), record in self.returned.items()
            if holder in holders and not self.open.get((holder, page))
        ]


def pair_records(
    records: Sequence[AllocationRecord],
    pages: Collection[int],
    taking: AllocationAction,
    returning: Collection[AllocationAction],
    *,
    is_complete: bool,
) -> PairedRecords:
    """Pair the entries of each holder and page.

    Args:
        records: a result of `AllocationLog.history`.
        pages: the pages to look at.
        taking, returning: actions by which a holder takes and returns a page.
        is_complete: the log has dropped nothing. Otherwise a return without its entry before it may be proper.
    """
    paired, wanted = PairedRecords(), set(pages)
    for record in records:
        if record.action != taking and record.action not in returning:
            continue
        for page in record.pages:
            if page not in wanted:
                continue
            key = record.holder, page
            taken = paired.open.setdefault(key, [])
            if record.action == taking:
                taken.append(record)
                continue
            if taken:
                taken.pop()
            elif is_complete:
                paired.strays.append(record)
            paired.returned[key] = record
    return paired
