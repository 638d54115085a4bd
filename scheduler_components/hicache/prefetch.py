"""Prefetches from storage: a fixed number at a time, so that what ranks agree on in a step never grows.

    waiting -> QUERYING -> RESERVING -> VOTING -> READING -> STOPPING -> settled

Each step on this way is one agreement, but for reserving, which follows the query at once. A rank that has nothing (a
miss, a failed store, no host page left) says so as a 0 or a no; it never stays away.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.hicache.ballot import Ballot, Outcome
from scheduler_components.hicache.operations import (
    Decision,
    Instruction,
    PagesLanded,
    PrefetchHit,
    PrefetchSettled,
    QueryStorage,
    ReadEnded,
    ReadStorage,
    StopReading,
    StorageAnswered,
)
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.tier_ports import HostPages

__all__ = ["NUM_LANES", "PrefetchLanes"]

NUM_LANES = 8
"""Prefetches at a time; more wait their turn. Six slots a lane and the rest fit the ballot's first block."""


class _Phase(enum.Enum):
    QUERYING = enum.auto()
    RESERVING = enum.auto()
    VOTING = enum.auto()
    READING = enum.auto()
    STOPPING = enum.auto()


@dataclass(slots=True, kw_only=True)
class _LocalFacts:
    """What this rank alone knows of a prefetch: brought to the agreement, never acted upon."""

    has_answered: bool = False
    hit_pages: int = 0
    host_pages: tuple[int, ...] | None = None  # None: not reserved
    landed_pages: int = 0
    has_ended: bool = False
    reading_since_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Prefetch:
    """One operation; everything but ``facts`` is the same on every rank."""

    number: int
    digests: bytes
    phase: _Phase = _Phase.QUERYING
    num_pages: int = 0  # to read, as agreed
    is_stopped: bool = False
    is_cancelled: bool = False
    facts: _LocalFacts = field(default_factory=_LocalFacts)


@dataclass(slots=True, kw_only=True)
class PrefetchLanes:
    """The prefetches of one rank.

    Attributes:
        policy: thresholds and time limits.
        host: where pages are reserved, committed and aborted.
    """

    policy: HiCachePolicy
    host: HostPages
    _lanes: list[_Prefetch | None] = field(default_factory=lambda: [None] * NUM_LANES, init=False)
    _waiting: deque[_Prefetch] = field(default_factory=deque, init=False)
    _by_number: dict[int, _Prefetch] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """Prefetches that have not settled."""
        return len(self._by_number)

    def begin(self, number: int, digests: bytes) -> list[Instruction]:
        """Begin a prefetch of the pages with these digests, or let it wait for a lane."""
        prefetch = _Prefetch(number=number, digests=digests)
        self._by_number[number] = prefetch
        self._waiting.append(prefetch)
        return self._fill_lanes()

    def stop(self, number: int) -> None:
        """Read no further than where all ranks are at the next agreements. What landed everywhere is kept."""
        self._by_number[number].is_stopped = True

    def cancel(self, number: int) -> None:
        """End a prefetch as early as its phase allows."""
        prefetch = self._by_number[number]
        prefetch.is_stopped = prefetch.is_cancelled = True

    def cancel_all(self) -> None:
        """End every prefetch."""
        for number in self._by_number:
            self.cancel(number)

    def reserve(self, number: int, num_pages: int, now_s: float) -> None:
        """Answer ``PrefetchHit``: try to take ``num_pages`` host pages, the same number on every rank; 0 gives up.

        Whether this rank could is told at the next agreement. What it may write to, only all together decide.
        """
        prefetch = self._by_number[number]
        prefetch.num_pages = num_pages
        prefetch.phase = _Phase.VOTING
        prefetch.facts.reading_since_s = now_s
        try:
            prefetch.facts.host_pages = tuple(self.host.reserve(num_pages))
        except OutOfPagesError:
            prefetch.facts.host_pages = None

    def handle(self, event: StorageAnswered | PagesLanded | ReadEnded) -> None:
        """Take in what this rank's I/O tells.

        Raises:
            CacheIntegrityError: the operation has settled already.
        """
        prefetch = self._by_number.get(event.op)
        if prefetch is None:
            raise CacheIntegrityError(f"{event} of a prefetch that is not under way")
        facts = prefetch.facts
        if isinstance(event, StorageAnswered):
            facts.has_answered = True
            facts.hit_pages = event.num_pages
        elif isinstance(event, PagesLanded):
            facts.landed_pages = event.num_pages
        else:
            facts.has_ended = True

    def fill(self, ballot: Ballot, now_s: float) -> None:
        """Bring this rank's facts: the same slots at every step, whatever is under way."""
        for lane, prefetch in enumerate(self._lanes):
            facts = prefetch.facts if prefetch is not None else _NOTHING
            ballot.all(f"prefetch {lane} answered", facts.has_answered)
            ballot.min(f"prefetch {lane} hit", facts.hit_pages)
            ballot.all(f"prefetch {lane} reserved", facts.host_pages is not None)
            ballot.min(f"prefetch {lane} landed", facts.landed_pages)
            ballot.all(f"prefetch {lane} ended", facts.has_ended)
            ballot.any(f"prefetch {lane} timed out", prefetch is not None and self._is_late(prefetch, now_s))

    def settle(self, outcome: Outcome) -> tuple[list[Decision], list[Instruction]]:
        """Move every lane on by what all ranks agreed."""
        decisions: list[Decision] = []
        instructions: list[Instruction] = []
        for lane, prefetch in enumerate(self._lanes):
            if prefetch is None:
                continue
            if prefetch.phase is _Phase.QUERYING:
                decision = self._after_query(prefetch, lane, outcome)
            elif prefetch.phase is _Phase.VOTING:
                decision = self._after_vote(prefetch, lane, outcome, instructions)
            else:
                assert prefetch.phase is not _Phase.RESERVING, "a PrefetchHit was not answered with reserve()"
                decision = self._after_reading(prefetch, lane, outcome, instructions)
            if decision is not None:
                decisions.append(decision)
            if isinstance(decision, PrefetchSettled):
                self._lanes[lane] = None
                del self._by_number[prefetch.number]
        return decisions, instructions + self._fill_lanes()

    def _after_query(self, prefetch: _Prefetch, lane: int, outcome: Outcome) -> Decision | None:
        if not outcome.verdicts[f"prefetch {lane} answered"]:
            return None
        num_pages = outcome.numbers[f"prefetch {lane} hit"]
        if prefetch.is_cancelled or num_pages < self.policy.prefetch_threshold_pages:
            return PrefetchSettled(prefetch.number, ())
        prefetch.phase = _Phase.RESERVING
        return PrefetchHit(prefetch.number, num_pages)

    def _after_vote(
        self, prefetch: _Prefetch, lane: int, outcome: Outcome, instructions: list[Instruction]
    ) -> Decision | None:
        facts = prefetch.facts
        is_agreed = outcome.verdicts[f"prefetch {lane} reserved"]
        if is_agreed and prefetch.num_pages and not prefetch.is_cancelled:
            assert facts.host_pages is not None
            prefetch.phase = _Phase.READING
            digests = prefetch.digests[: prefetch.num_pages * DIGEST_BYTES]
            instructions.append(ReadStorage(prefetch.number, digests, facts.host_pages))
            return None
        if facts.host_pages is not None:
            self.host.abort(facts.host_pages)
        return PrefetchSettled(prefetch.number, ())

    def _after_reading(
        self, prefetch: _Prefetch, lane: int, outcome: Outcome, instructions: list[Instruction]
    ) -> Decision | None:
        if outcome.verdicts[f"prefetch {lane} ended"]:
            facts = prefetch.facts
            assert facts.host_pages is not None
            num_landed = outcome.numbers[f"prefetch {lane} landed"]
            kept, left = facts.host_pages[:num_landed], facts.host_pages[num_landed:]
            self.host.commit(kept)
            self.host.abort(left)
            return PrefetchSettled(prefetch.number, kept)
        if outcome.verdicts[f"prefetch {lane} timed out"]:
            prefetch.is_stopped = True
        if prefetch.is_stopped and prefetch.phase is _Phase.READING:
            prefetch.phase = _Phase.STOPPING
            instructions.append(StopReading(prefetch.number))
        return None

    def _is_late(self, prefetch: _Prefetch, now_s: float) -> bool:
        if prefetch.phase is not _Phase.READING:
            return False
        return now_s - prefetch.facts.reading_since_s > self.policy.reading_bound_s(prefetch.num_pages)

    def _fill_lanes(self) -> list[Instruction]:
        """Start waiting prefetches in free lanes."""
        instructions: list[Instruction] = []
        for lane, prefetch in enumerate(self._lanes):
            if prefetch is None and self._waiting:
                started = self._lanes[lane] = self._waiting.popleft()
                instructions.append(QueryStorage(started.number, started.digests))
        return instructions


_NOTHING = _LocalFacts()
