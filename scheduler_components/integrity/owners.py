"""OwnerLedger: who took and gave which pages, in which step and by which component.

A leak shows when the scheduler is idle, long after the code that lost the pages has run. The ledger is what was written
down at that time: one entry per call that moves pages, with a reference to the caller's own sequence, so a long prompt
costs as much as a short one. Nothing is computed before somebody asks.

It is bounded twice, by entries and by the pages that they name. The oldest entries go first: of a page that has not
been moved for very long nothing is known then. ``one_in`` watches a part of the requests alone: a leak that repeats
hits one of them soon, and its trail is whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scheduler_components.integrity.step_progress import StepProgress
from scheduler_components.validators import check_integer
from scheduler_components.values import OwnerRecord

__all__ = ["OwnerLedger"]

_Action = Literal["took", "gave", "cached", "locked", "unlocked"]


@dataclass(slots=True, kw_only=True)
class OwnerLedger:
    """An ``OwnerLog`` that remembers, and the ``OwnerTrails`` of what it remembers. Of one scheduler's thread.

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
    _entries: deque[tuple[int, str, str, _Action, str, str, Sequence[int]]] = field(
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

    def took(self, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """A holder has taken free pages."""
        self._write("took", pool, holder, component, pages)

    def gave(self, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """A holder has given pages back to the free list."""
        self._write("gave", pool, holder, component, pages)

    def cached(self, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """The pages of a holder went to the cache."""
        self._write("cached", pool, holder, component, pages)

    def locked(self, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """A holder has locked a prefix of cached pages."""
        self._write("locked", pool, holder, component, pages)

    def unlocked(self, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """A holder has given a lock back."""
        self._write("unlocked", pool, holder, component, pages)

    def trail(self, pool: str, pages: Collection[int]) -> list[OwnerRecord]:
        """Return what is known of any of these pages, oldest first. Walks all entries: for reports, not for steps."""
        wanted = set(pages)
        return [
            OwnerRecord(step, phase, component, action, holder, of_pool, moved)
            for step, phase, component, action, holder, of_pool, moved in self._entries
            if of_pool == pool and not wanted.isdisjoint(moved)
        ]

    def _write(self, action: _Action, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        # The hash of a text is kept in it, so this is a look and a division.
        if self.one_in > 1 and hash(holder) % self.one_in:
            return
        if not pages:
            return
        progress, entries = self.progress, self._entries
        entries.append((progress.step, progress.phase, component, action, holder, pool, pages))
        self._num_pages += len(pages)
        while len(entries) > self.max_entries or self._num_pages > self.max_pages:
            self._num_pages -= len(entries.popleft()[-1])
