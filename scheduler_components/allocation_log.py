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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from scheduler_components.validators import check_integer
from scheduler_components.values import AllocationAction, AllocationRecord
from scheduler_components.watchdog import StepProgress

__all__ = ["AllocationLog"]


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

    def __post_init__(self) -> None:
        check_integer("one_in", self.one_in)
        check_integer("max_entries", self.max_entries)
        check_integer("max_pages", self.max_pages)

    def __len__(self) -> int:
        return len(self._entries)

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
