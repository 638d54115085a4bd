"""ActivePrefetches: the prefetches of one rank, from the query to the last page. Pure; see ``agreement.py``."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from scheduler_components.agreement import AgreedValues, Proposal, Slots
from scheduler_components.agreement.proposals import SlotKind
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.hicache.ack_queue import AckQueue
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.ports import AllocationSink, HostPages, NullAllocationSink
from scheduler_components.values import AllocationAction
from scheduler_components.values.page_operations import (
    CancelPrefetch,
    Instruction,
    PagesRead,
    PrefetchDrained,
    PrefetchHit,
    PrefetchOutcome,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    TierDecision,
)

__all__ = ["MAX_ACTIVE_PREFETCHES", "ActivePrefetches"]

MAX_ACTIVE_PREFETCHES = 8
"""The number of lanes; further prefetches wait. Five slots per lane and all other slots fit the first block."""


class _LaneSlots(NamedTuple):
    """The names of the slots of one lane, in the order of a proposal."""

    answered: str
    hit: str
    reserved: str
    landed: str
    ended: str


_LANE_KINDS: tuple[SlotKind, ...] = ("all", "min", "all", "min", "all")
_LANES = tuple(
    _LaneSlots(*(f"prefetch {lane} {field.replace('_', ' ')}" for field in _LaneSlots._fields))
    for lane in range(MAX_ACTIVE_PREFETCHES)
)
_FREE_LANE = (False, 0, False, 0, False)
_FREE_LANES = _FREE_LANE * MAX_ACTIVE_PREFETCHES
_PREFETCH_SLOTS = Slots(
    *((kind, name) for lane in _LANES for kind, name in zip(_LANE_KINDS, lane, strict=True)),
    ("min", "drains done"),
)


class _Phase(enum.Enum):
    WAITING = enum.auto()
    QUERYING = enum.auto()
    RESERVING = enum.auto()
    VOTING = enum.auto()
    READING = enum.auto()


@dataclass(slots=True, kw_only=True, eq=False)
class _Prefetch:
    """One operation. The fields before ``has_answered`` are the same on all ranks."""

    number: int
    digests: bytes
    max_wait_s: float
    blocked_since_s: float = math.inf  # agreed time; infinite while it blocks no request
    phase: _Phase = _Phase.WAITING
    num_pages: int = 0  # to read, as agreed
    num_read: int = 0  # on every rank, as agreed
    # The state on this rank. It goes into the proposal; the rank does not act on it.
    has_answered: bool = False
    hit_pages: int = 0
    host_pages: tuple[int, ...] | None = None  # None: not reserved
    landed_pages: int = 0
    has_ended: bool = False


class _WaitingPrefetches:
    """The prefetches that wait for a lane. Those that block a request come first, in the order of their blocking."""

    __slots__ = ("_blocking", "_others")

    def __init__(self) -> None:
        self._blocking: dict[int, _Prefetch] = {}
        self._others: dict[int, _Prefetch] = {}

    def __bool__(self) -> bool:
        return bool(self._blocking or self._others)

    def add(self, prefetch: _Prefetch) -> None:
        self._others[prefetch.number] = prefetch

    def block(self, prefetch: _Prefetch) -> None:
        if self._others.pop(prefetch.number, None) is not None:
            self._blocking[prefetch.number] = prefetch

    def remove(self, prefetch: _Prefetch) -> None:
        for waiting in (self._blocking, self._others):
            waiting.pop(prefetch.number, None)

    def pop_first(self) -> _Prefetch:
        waiting = self._blocking or self._others
        return waiting.pop(next(iter(waiting)))

    def late(self, now_s: float) -> list[_Prefetch]:
        """Return the blocking prefetches that are late. They are the first ones, because all have the same limit."""
        return list(takewhile(lambda prefetch: _is_late(prefetch, now_s), self._blocking.values()))


def _is_late(prefetch: _Prefetch, now_s: float) -> bool:
    return now_s - prefetch.blocked_since_s > prefetch.max_wait_s


@dataclass(slots=True, kw_only=True)
class ActivePrefetches:
    """The prefetches of one rank. A fixed number of lanes keeps the size of the step's agreement constant.

    ``WAITING -> QUERYING -> RESERVING -> VOTING -> READING -> settled``

    Each arrow needs one agreement, with two exceptions: a free lane suffices for QUERYING, and the reservation, and so
    VOTING, follows the agreed query immediately. A rank that has a miss, a failed store or no free host page
    contributes 0 or False.

    ``terminate`` settles a prefetch immediately, in any phase, with the pages that had landed on all ranks at the last
    agreement, and frees its lane. The prefetch then drains: a rank may still write to its other host pages, so they are
    released once all ranks agree that their storage has stopped.

    Attributes:
        policy: thresholds and time limits.
        host: the host pool in which pages are reserved, committed and aborted.
        allocation_log: records which prefetch reserves and returns which host pages.
    """

    policy: HiCachePolicy
    host: HostPages
    allocation_log: AllocationSink = field(default_factory=NullAllocationSink)
    _lanes: list[_Prefetch | None] = field(default_factory=lambda: [None] * MAX_ACTIVE_PREFETCHES, init=False)
    _waiting: _WaitingPrefetches = field(default_factory=_WaitingPrefetches, init=False)
    _by_number: dict[int, _Prefetch] = field(default_factory=dict, init=False)
    _drains: AckQueue[tuple[int, ...]] = field(default_factory=AckQueue, init=False)
    _now_s: float = field(default=math.inf, init=False)  # at the last agreement

    def __len__(self) -> int:
        """Return how many prefetches have not settled or are draining."""
        return len(self._by_number) + len(self._drains)

    def start(self, number: int, digests: bytes) -> list[Instruction]:
        """Begin to prefetch the pages with these digests, or queue the prefetch until a lane is free."""
        prefetch = _Prefetch(number=number, digests=digests, max_wait_s=self.policy.prefetch_max_wait_s(0))
        self._by_number[number] = prefetch
        self._waiting.add(prefetch)
        return self._fill_lanes()

    def mark_blocking(self, number: int) -> None:
        """Note that a request waits for this prefetch only. The first call starts the policy's timeout."""
        prefetch = self._by_number[number]
        prefetch.blocked_since_s = min(prefetch.blocked_since_s, self._now_s)
        self._waiting.block(prefetch)

    def terminate(self, number: int) -> tuple[PrefetchOutcome, list[Instruction]]:
        """End a prefetch immediately, in any phase. The pages that have landed on all ranks are kept."""
        settled, instructions = self._terminate(self._by_number[number])
        return settled, instructions + self._fill_lanes()

    def terminate_all(self) -> tuple[list[TierDecision], list[Instruction]]:
        """End every prefetch."""
        decisions: list[TierDecision] = []
        instructions: list[Instruction] = []
        for prefetch in list(self._by_number.values()):
            settled, more = self._terminate(prefetch)
            decisions.append(settled)
            instructions += more
        return decisions, instructions

    def reserve(self, number: int, num_pages: int, *, max_wait_s: float) -> None:
        """Answer a ``PrefetchHit``: try to reserve ``num_pages`` host pages, the same number on all ranks; 0 gives up.

        The result goes into the next proposal. Reading begins only if the reservation succeeded on all ranks.

        Args:
            max_wait_s: how long the prefetch may block a request, now that its length is known.
        """
        prefetch = self._by_number[number]
        prefetch.num_pages = num_pages
        prefetch.max_wait_s = max_wait_s
        prefetch.phase = _Phase.VOTING
        try:
            host_pages = tuple(self.host.reserve(num_pages))
        except OutOfPagesError:
            prefetch.host_pages = None
        else:
            prefetch.host_pages = host_pages
            self._record("allocated", number, host_pages)

    def host_pages_held(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield each prefetch that has reserved host pages on this rank, with these pages, for checks."""
        for prefetch in self._by_number.values():
            if prefetch.host_pages:
                yield f"prefetch {prefetch.number}", prefetch.host_pages
        for number, host_pages in self._drains:
            yield f"prefetch {number}", host_pages

    def handle(self, event: QueryDone | PagesRead | ReadDone) -> None:
        """Record an I/O event of an active or a draining prefetch.

        Raises:
            CacheIntegrityError: the prefetch has settled.
        """
        prefetch = self._by_number.get(event.op)
        if prefetch is None:
            if event.op not in self._drains:
                raise CacheIntegrityError(f"{event} of a prefetch that is not under way")
            if not isinstance(event, PagesRead):
                self._drains.acknowledge(event.op, True)
            return
        match event:
            case QueryDone():
                prefetch.has_answered, prefetch.hit_pages = True, event.num_pages
            case PagesRead():
                prefetch.landed_pages = event.num_pages
            case ReadDone():
                prefetch.has_ended = True

    def fill(self, proposal: Proposal) -> None:
        """Add this rank's state to the proposal: the same slots at every step."""
        if not self._by_number:
            proposal.fill(_PREFETCH_SLOTS, (*_FREE_LANES, self._drains.num_done()))
            return
        values: list[int] = []
        for prefetch in self._lanes:
            if prefetch is None:
                values += _FREE_LANE
                continue
            values += (
                prefetch.has_answered,
                prefetch.hit_pages,
                prefetch.host_pages is not None,
                prefetch.landed_pages,
                prefetch.has_ended,
            )
        values.append(self._drains.num_done())
        proposal.fill(_PREFETCH_SLOTS, values)

    def apply(self, agreed: AgreedValues) -> tuple[list[TierDecision], list[Instruction]]:
        """Advance every prefetch according to the agreed values, and end those that are late on the agreed clock."""
        self._now_s = agreed.now_s
        if not self._by_number and not self._drains:
            return [], []
        decisions, instructions = self._settle_drains(agreed.numbers["drains done"]), list[Instruction]()
        late = self._waiting.late(self._now_s)
        for lane, prefetch in enumerate(self._lanes):
            if prefetch is None:
                continue
            prefetch.num_read = agreed.numbers[_LANES[lane].landed]
            decision = self._advance(prefetch, lane, agreed, instructions)
            if decision is not None:
                decisions.append(decision)
            elif _is_late(prefetch, self._now_s):
                late.append(prefetch)
        for prefetch in late:
            settled, more = self._terminate(prefetch)
            decisions.append(settled)
            instructions += more
        return decisions, instructions + self._fill_lanes()

    def _settle_drains(self, num_done: int) -> list[TierDecision]:
        decisions: list[TierDecision] = []
        for number, host_pages, _ in self._drains.pop(num_done, num_done):
            self._abort(number, host_pages)
            decisions.append(PrefetchDrained(number, len(host_pages)))
        return decisions

    def _advance(
        self, prefetch: _Prefetch, lane: int, agreed: AgreedValues, instructions: list[Instruction]
    ) -> TierDecision | None:
        if prefetch.phase is _Phase.QUERYING:
            if agreed.flags[_LANES[lane].answered]:
                return self._after_query(prefetch, agreed.numbers[_LANES[lane].hit])
        elif prefetch.phase is _Phase.VOTING:
            return self._after_vote(prefetch, agreed.flags[_LANES[lane].reserved], instructions)
        else:
            assert prefetch.phase is _Phase.READING, "a PrefetchHit was not answered with reserve()"
            if agreed.flags[_LANES[lane].ended]:
                return self._end_reading(prefetch)
        return None

    def _after_query(self, prefetch: _Prefetch, num_pages: int) -> TierDecision:
        if num_pages < self.policy.prefetch_threshold_pages:
            return self._remove(prefetch)
        prefetch.phase = _Phase.RESERVING
        return PrefetchHit(prefetch.number, num_pages)

    def _after_vote(
        self, prefetch: _Prefetch, is_agreed: bool, instructions: list[Instruction]
    ) -> PrefetchOutcome | None:
        host_pages = prefetch.host_pages
        if not is_agreed or not prefetch.num_pages:
            self._abort(prefetch.number, host_pages or ())
            return self._remove(prefetch)
        assert host_pages is not None
        prefetch.phase = _Phase.READING
        digests = prefetch.digests[: prefetch.num_pages * DIGEST_BYTES]
        instructions.append(ReadFromStorage(prefetch.number, digests, host_pages))
        return None

    def _end_reading(self, prefetch: _Prefetch) -> PrefetchOutcome:
        """Commit the pages that landed on all ranks and release the others. No rank writes to any of them now."""
        landed, others = _split_landed(prefetch)
        self._commit(prefetch.number, landed)
        self._abort(prefetch.number, others)
        return self._remove(prefetch, landed)

    def _terminate(self, prefetch: _Prefetch) -> tuple[PrefetchOutcome, list[Instruction]]:
        """End a prefetch. All ranks do so at the same point: they make the same call, or agreed that it is late."""
        if prefetch.phase is _Phase.WAITING:
            self._waiting.remove(prefetch)
            return self._remove(prefetch), []
        if prefetch.phase is _Phase.VOTING:  # no rank has begun to read
            self._abort(prefetch.number, prefetch.host_pages or ())
            return self._remove(prefetch), []
        is_reading = prefetch.phase is _Phase.READING
        landed, others = _split_landed(prefetch) if is_reading else ((), ())
        self._commit(prefetch.number, landed)
        self._drains.push(prefetch.number, others)
        if prefetch.has_ended if is_reading else prefetch.has_answered:
            self._drains.acknowledge(prefetch.number, True)
        return self._remove(prefetch, landed, num_draining=len(others)), [CancelPrefetch(prefetch.number)]

    def _commit(self, number: int, host_pages: tuple[int, ...]) -> None:
        self.host.commit(host_pages)
        self._record("cached", number, host_pages)

    def _abort(self, number: int, host_pages: tuple[int, ...]) -> None:
        self.host.abort(host_pages)
        self._record("freed", number, host_pages)

    def _record(self, action: AllocationAction, number: int, host_pages: tuple[int, ...]) -> None:
        self.allocation_log.record(action, "host", f"prefetch {number}", "ActivePrefetches", host_pages)

    def _remove(self, prefetch: _Prefetch, landed: tuple[int, ...] = (), *, num_draining: int = 0) -> PrefetchOutcome:
        del self._by_number[prefetch.number]
        if prefetch in self._lanes:
            self._lanes[self._lanes.index(prefetch)] = None
        return PrefetchOutcome(prefetch.number, landed, num_draining)

    def _fill_lanes(self) -> list[Instruction]:
        """Assign waiting prefetches to free lanes."""
        instructions: list[Instruction] = []
        for lane, prefetch in enumerate(self._lanes):
            if prefetch is None and self._waiting:
                started = self._lanes[lane] = self._waiting.pop_first()
                started.phase = _Phase.QUERYING
                instructions.append(QueryStorage(started.number, started.digests))
        return instructions


def _split_landed(prefetch: _Prefetch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the host pages that have landed on all ranks, and the others."""
    host_pages = prefetch.host_pages
    assert host_pages is not None
    return host_pages[: prefetch.num_read], host_pages[prefetch.num_read :]
