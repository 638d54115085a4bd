"""AllocationLog: who took and gave which pages, in which step and by which component.

A leak shows when the scheduler is idle, long after the code that lost the pages has run. The ledger is what was written
down at that time: one entry per call that moves pages, with a reference to the caller's own sequence, so a long prompt
costs as much as a short one. Nothing is computed before somebody asks.

It is bounded twice, by entries and by the pages that they name. The oldest entries go first: of a page that has not
been moved for very long nothing is known then. ``one_in`` watches a part of the requests alone: a leak that repeats
hits one of them soon, and its trail is whole. Whoever hands out pages asks once per request whether it is watched: at
one token per page a step has a call per running request, and to ask the ledger each time would cost more than to write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from scheduler_components.step_progress import StepProgress
from scheduler_components.validators import check_integer
from scheduler_components.values import AllocationAction, AllocationRecord

__all__ = ["AllocationLog"]


@dataclass(slots=True, kw_only=True)
class AllocationLog:
    """An ``AllocationSink`` that remembers, and the ``OwnerTrails`` of what it remembers. Of one scheduler's thread.

    Attributes:
        progress: the step and phase that entries are written under.
        one_in: requests of which one is watched; 1 watches all.
        max_entries, max_pages: bounds of what is remembered; two million pages take 16 MB.

    Raises:
        ConfigError: a number is below 1.
    """

    progress: StepProgress
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
        """Entries."""
        return len(self._entries)

    def is_sampled(self, holder: str) -> bool:
        """Say whether a holder's pages are noted: the same answer each time."""
        return self.one_in == 1 or not hash(holder) % self.one_in

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """Note what a watched holder does; see ``AllocationSink``. Nothing is noted of no pages."""
        if not pages:
            return
        progress, entries = self.progress, self._entries
        entries.append((progress.step, progress.phase, component, action, holder, pool, pages))
        self._num_pages += len(pages)
        if len(entries) > self.max_entries or self._num_pages > self.max_pages:
            self._forget()

    def history(self, pool: str, pages: Collection[int]) -> list[AllocationRecord]:
        """Return what is known of any of these pages, oldest first. Walks all entries: for reports, not for steps."""
        wanted = set(pages)
        return [
            AllocationRecord(step, phase, component, action, holder, of_pool, moved)
            for step, phase, component, action, holder, of_pool, moved in self._entries
            if of_pool == pool and not wanted.isdisjoint(moved)
        ]

    def _forget(self) -> None:
        entries = self._entries
        while len(entries) > self.max_entries or self._num_pages > self.max_pages:
            self._num_pages -= len(entries.popleft()[-1])
