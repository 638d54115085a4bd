"""HiCacheController: everything that ranks must agree on about moving pages. Pure: events in, instructions out.

One agreement per step holds it all (see ``agreement.py``). The cache above begins operations, the same ones on every
rank. ``handle`` takes in what this rank's I/O reports, ``fill`` brings it to the agreement, and ``settle`` turns the
agreed values into decisions, the same on every rank.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Generic, NamedTuple, TypeVar

from scheduler_components.agreement import AgreedValues, Proposal, SlotKind, Slots
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.page_operations import (
    BackupDone,
    BackupOutcome,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    Decision,
    DiscardLoadBack,
    Instruction,
    IoEvent,
    LoadBackDone,
    LoadBackOutcome,
    PagesRead,
    PrefetchDrained,
    PrefetchHit,
    PrefetchOutcome,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    ReleaseStorage,
    StorageDetached,
    WriteDone,
    WriteOutcome,
    WriteToStorage,
)
from scheduler_components.ports import HostPages

__all__ = [
    "MAX_ACTIVE_PREFETCHES",
    "AckQueue",
    "HiCacheController",
    "ActivePrefetches",
    "AgreedState",
]

Operation = TypeVar("Operation")


class AckQueue(Generic[Operation]):
    """Operations in the order in which they began, whatever the order in which they end on each rank.

    Two numbers per rank are enough to agree on any number of operations. Both are counted on the way, so that a step
    costs what has ended in it and not what is under way.

    ``done`` counts operations that have ended here, from the oldest on without a hole; ``good`` those that ended well.
    With the MIN of each over all ranks, the first ``good`` operations have ended well on every rank. When ``done`` is
    more, the next one has ended on every rank and, on the rank with the least ``good``, not well.
    """

    __slots__ = ("_ends", "_not_done", "_num_done", "_num_good", "_operations")

    def __init__(self) -> None:
        self._operations: deque[tuple[int, Operation]] = deque()
        self._not_done: deque[int] = deque()  # from the oldest that has not ended on
        self._ends: dict[int, bool | None] = {}  # of each operation; None while it has not ended here
        self._num_done = 0
        self._num_good = 0

    def __len__(self) -> int:
        return len(self._operations)

    def __contains__(self, number: int) -> bool:
        """True for an operation that has not been popped."""
        return number in self._ends

    def push(self, number: int, operation: Operation) -> None:
        """Begin an operation."""
        self._operations.append((number, operation))
        self._not_done.append(number)
        self._ends[number] = None

    def acknowledge(self, number: int, is_ok: bool) -> None:
        """An operation has ended on this rank.

        Raises:
            CacheIntegrityError: it had ended before, or is not under way.
        """
        if number not in self._ends:
            raise CacheIntegrityError(f"operation {number} ended, but is not under way")
        if self._ends[number] is not None:
            raise CacheIntegrityError(f"operation {number} ended twice")
        self._ends[number] = is_ok
        while self._not_done and (end := self._ends[self._not_done[0]]) is not None:
            self._not_done.popleft()
            self._num_good += end and self._num_good == self._num_done
            self._num_done += 1

    def num_done(self) -> int:
        """Operations that have ended here, from the oldest on."""
        return self._num_done

    def num_ok(self) -> int:
        """Operations that have ended well here, from the oldest on."""
        return self._num_good

    def pop(self, done: int, good: int) -> list[tuple[int, Operation, bool]]:
        """Take out what all ranks agree has ended: number, operation, and whether it ended well everywhere.

        Args:
            done: MIN over all ranks of ``done()``.
            good: MIN over all ranks of ``good()``.
        """
        if not done:
            return []
        settled = [(*self._pop(), True) for _ in range(good)]
        if done > good:
            settled.append((*self._pop(), False))
        return settled

    def _pop(self) -> tuple[int, Operation]:
        number, operation = self._operations.popleft()
        self._num_done -= 1
        if self._ends.pop(number):
            self._num_good -= 1
        else:  # what ended well behind it counts from now on; each operation is counted here once
            ended = islice(self._operations, self._num_done)
            self._num_good = sum(1 for _ in takewhile(lambda entry: self._ends[entry[0]], ended))
        return number, operation


MAX_ACTIVE_PREFETCHES = 8
"""Prefetches at a time; more wait. Six slots per lane and the rest fit the proposal's first block."""


class _LaneSlots(NamedTuple):
    """Names of the slots of one lane, in their order in a proposal."""

    answered: str
    hit: str
    reserved: str
    landed: str
    ended: str
    timed_out: str


_LANE_KINDS: tuple[SlotKind, ...] = ("all", "min", "all", "min", "all", "any")
_LANES = tuple(
    _LaneSlots(*(f"prefetch {lane} {field.replace('_', ' ')}" for field in _LaneSlots._fields))
    for lane in range(MAX_ACTIVE_PREFETCHES)
)
_FREE_LANE = (False, 0, False, 0, False, False)
_FREE_LANES = _FREE_LANE * MAX_ACTIVE_PREFETCHES
_PREFETCH_SLOTS = Slots(
    *((kind, name) for lane in _LANES for kind, name in zip(_LANE_KINDS, lane, strict=True)),
    ("max", "line timed out"),
    ("min", "drains done"),
)
_TRANSFER_SLOTS = Slots(
    ("all", "storage"),
    ("min", "load room"),
    ("min", "writes done"),
    ("min", "writes good"),
    ("min", "loads done"),
    ("min", "loads good"),
    ("min", "backups done"),
    ("min", "backups good"),
)


class _Phase(enum.Enum):
    IN_LINE = enum.auto()
    QUERYING = enum.auto()
    RESERVING = enum.auto()
    VOTING = enum.auto()
    READING = enum.auto()


@dataclass(slots=True, kw_only=True)
class LocalPrefetchState:
    """What this rank alone knows of a prefetch: brought to the agreement, never acted on."""

    has_answered: bool = False
    hit_pages: int = 0
    host_pages: tuple[int, ...] | None = None  # None: not reserved
    landed_pages: int = 0
    has_ended: bool = False
    blocked_since_s: float = math.inf  # infinite while no request is blocked by it


@dataclass(slots=True, kw_only=True, eq=False)
class _Prefetch:
    """One operation; everything but ``facts`` is the same on every rank."""

    number: int
    digests: bytes
    max_wait_s: float
    phase: _Phase = _Phase.IN_LINE
    num_pages: int = 0  # to read, as agreed
    num_read: int = 0  # on every rank, as agreed
    facts: LocalPrefetchState = field(default_factory=LocalPrefetchState)


class _Line:
    """Prefetches that wait for a lane: those that block a request come first, in the order in which they did."""

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

    def take_first(self) -> _Prefetch:
        waiting = self._blocking or self._others
        return waiting.pop(next(iter(waiting)))

    def first_blocking(self, count: int) -> list[_Prefetch]:
        return list(islice(self._blocking.values(), count))

    def num_late(self, now_s: float) -> int:
        """Prefetches that have blocked for too long: from the first on, since all of them have the same bound."""
        return sum(1 for _ in takewhile(lambda prefetch: _is_late(prefetch, now_s), self._blocking.values()))


def _is_late(prefetch: _Prefetch, now_s: float) -> bool:
    return now_s - prefetch.facts.blocked_since_s > prefetch.max_wait_s


@dataclass(slots=True, kw_only=True)
class ActivePrefetches:
    """The prefetches of one rank: a fixed number at a time, so that what ranks agree on in a step never grows.

    ``IN_LINE -> QUERYING -> RESERVING -> VOTING -> READING -> settled``

    Each arrow is one agreement, except those to QUERYING, which a free lane is enough for, and to VOTING: reserving
    follows the query at once. A rank that has nothing (a miss, a failed store, no host page left) says so as a 0 or a
    no.

    A prefetch that is given up, in whatever phase, settles in that very call with what the last agreement said had
    landed on every rank. It leaves its lane to others. What storage is still doing for it drains: host pages that a
    rank may still write to are given back when all ranks agree that none does.

    Attributes:
        policy: thresholds and time limits.
        host: where pages are reserved, committed and aborted.
    """

    policy: HiCachePolicy
    host: HostPages
    _lanes: list[_Prefetch | None] = field(default_factory=lambda: [None] * MAX_ACTIVE_PREFETCHES, init=False)
    _line: _Line = field(default_factory=_Line, init=False)
    _by_number: dict[int, _Prefetch] = field(default_factory=dict, init=False)
    _drains: AckQueue[tuple[int, ...]] = field(default_factory=AckQueue, init=False)
    _now_s: float = field(default=math.inf, init=False)  # of the last proposal

    def __len__(self) -> int:
        """Prefetches that have not settled, and those that drain."""
        return len(self._by_number) + len(self._drains)

    def start(self, number: int, digests: bytes) -> list[Instruction]:
        """Begin a prefetch of the pages with these digests, or let it wait for a lane."""
        prefetch = _Prefetch(number=number, digests=digests, max_wait_s=self.policy.prefetch_max_wait_s(0))
        self._by_number[number] = prefetch
        self._line.add(prefetch)
        return self._fill_lanes()

    def mark_blocking(self, number: int) -> None:
        """A request that could run waits for this prefetch: from its first such moment on, the policy's time runs."""
        prefetch = self._by_number[number]
        prefetch.facts.blocked_since_s = min(prefetch.facts.blocked_since_s, self._now_s)
        self._line.block(prefetch)

    def terminate(self, number: int) -> tuple[PrefetchOutcome, list[Instruction]]:
        """End a prefetch at once, in whatever phase it is. What has landed on every rank is kept."""
        settled, instructions = self._give_up(self._by_number[number])
        return settled, instructions + self._fill_lanes()

    def terminate_all(self) -> tuple[list[Decision], list[Instruction]]:
        """End every prefetch."""
        decisions: list[Decision] = []
        instructions: list[Instruction] = []
        for prefetch in list(self._by_number.values()):
            settled, more = self._give_up(prefetch)
            decisions.append(settled)
            instructions += more
        return decisions, instructions

    def reserve(self, number: int, num_pages: int, *, max_wait_s: float) -> None:
        """Answer ``PrefetchHit``: try to take ``num_pages`` host pages, the same number on every rank; 0 gives up.

        Whether this rank could goes into the next agreement. Only when all could, they write to the pages.

        Args:
            max_wait_s: longest time that it may block a request, now that its length is known.
        """
        prefetch = self._by_number[number]
        prefetch.num_pages = num_pages
        prefetch.max_wait_s = max_wait_s
        prefetch.phase = _Phase.VOTING
        try:
            prefetch.facts.host_pages = tuple(self.host.reserve(num_pages))
        except OutOfPagesError:
            prefetch.facts.host_pages = None

    def handle(self, event: QueryDone | PagesRead | ReadDone) -> None:
        """Take in what storage reports of a prefetch, or of one that drains.

        Raises:
            CacheIntegrityError: the prefetch has settled already.
        """
        prefetch = self._by_number.get(event.op)
        if prefetch is None:
            if event.op not in self._drains:
                raise CacheIntegrityError(f"{event} of a prefetch that is not under way")
            if not isinstance(event, PagesRead):
                self._drains.acknowledge(event.op, True)
            return
        facts = prefetch.facts
        match event:
            case QueryDone():
                facts.has_answered, facts.hit_pages = True, event.num_pages
            case PagesRead():
                facts.landed_pages = event.num_pages
            case ReadDone():
                facts.has_ended = True

    def fill(self, proposal: Proposal, now_s: float) -> None:
        """Bring this rank's facts: the same slots at every step, whatever is under way."""
        self._now_s = now_s
        if not self._by_number:
            proposal.fill(_PREFETCH_SLOTS, (*_FREE_LANES, 0, self._drains.num_done()))
            return
        values: list[int] = []
        for prefetch in self._lanes:
            if prefetch is None:
                values += _FREE_LANE
                continue
            facts = prefetch.facts
            values += (
                facts.has_answered,
                facts.hit_pages,
                facts.host_pages is not None,
                facts.landed_pages,
                facts.has_ended,
                _is_late(prefetch, now_s),
            )
        values += (self._line.num_late(now_s), self._drains.num_done())
        proposal.fill(_PREFETCH_SLOTS, values)

    def apply(self, agreed: AgreedValues) -> tuple[list[Decision], list[Instruction]]:
        """Move every prefetch on by what all ranks agreed."""
        if not self._by_number and not self._drains:
            return [], []
        decisions, instructions = self._settle_drains(agreed.numbers["drains done"]), list[Instruction]()
        late = self._line.first_blocking(agreed.numbers["line timed out"])
        for lane, prefetch in enumerate(self._lanes):
            if prefetch is None:
                continue
            prefetch.num_read = agreed.numbers[_LANES[lane].landed]
            decision = self._move_on(prefetch, lane, agreed, instructions)
            if decision is not None:
                decisions.append(decision)
            elif agreed.flags[_LANES[lane].timed_out]:
                late.append(prefetch)
        for prefetch in late:
            settled, more = self._give_up(prefetch)
            decisions.append(settled)
            instructions += more
        return decisions, instructions + self._fill_lanes()

    def _settle_drains(self, num_done: int) -> list[Decision]:
        decisions: list[Decision] = []
        for number, host_pages, _ in self._drains.pop(num_done, num_done):
            self.host.abort(host_pages)
            decisions.append(PrefetchDrained(number, len(host_pages)))
        return decisions

    def _move_on(
        self, prefetch: _Prefetch, lane: int, agreed: AgreedValues, instructions: list[Instruction]
    ) -> Decision | None:
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

    def _after_query(self, prefetch: _Prefetch, num_pages: int) -> Decision:
        if num_pages < self.policy.prefetch_threshold_pages:
            return self._leave(prefetch)
        prefetch.phase = _Phase.RESERVING
        return PrefetchHit(prefetch.number, num_pages)

    def _after_vote(
        self, prefetch: _Prefetch, is_agreed: bool, instructions: list[Instruction]
    ) -> PrefetchOutcome | None:
        host_pages = prefetch.facts.host_pages
        if not is_agreed or not prefetch.num_pages:
            self.host.abort(host_pages or ())
            return self._leave(prefetch)
        assert host_pages is not None
        prefetch.phase = _Phase.READING
        digests = prefetch.digests[: prefetch.num_pages * DIGEST_BYTES]
        instructions.append(ReadFromStorage(prefetch.number, digests, host_pages))
        return None

    def _end_reading(self, prefetch: _Prefetch) -> PrefetchOutcome:
        """No rank writes to the pages any more: keep what landed everywhere, give the rest back."""
        kept, left = _parts(prefetch)
        self.host.commit(kept)
        self.host.abort(left)
        return self._leave(prefetch, kept)

    def _give_up(self, prefetch: _Prefetch) -> tuple[PrefetchOutcome, list[Instruction]]:
        """Every rank does so at the same point: either all were called, or all agreed that it is late."""
        facts = prefetch.facts
        if prefetch.phase is _Phase.IN_LINE:
            self._line.remove(prefetch)
            return self._leave(prefetch), []
        if prefetch.phase is _Phase.VOTING:  # nobody has begun to read
            self.host.abort(facts.host_pages or ())
            return self._leave(prefetch), []
        is_reading = prefetch.phase is _Phase.READING
        kept, left = _parts(prefetch) if is_reading else ((), ())
        self.host.commit(kept)
        self._drains.push(prefetch.number, left)
        if facts.has_ended if is_reading else facts.has_answered:
            self._drains.acknowledge(prefetch.number, True)
        return self._leave(prefetch, kept, num_draining=len(left)), [CancelPrefetch(prefetch.number)]

    def _leave(self, prefetch: _Prefetch, kept: tuple[int, ...] = (), *, num_draining: int = 0) -> PrefetchOutcome:
        del self._by_number[prefetch.number]
        if prefetch in self._lanes:
            self._lanes[self._lanes.index(prefetch)] = None
        return PrefetchOutcome(prefetch.number, kept, num_draining)

    def _fill_lanes(self) -> list[Instruction]:
        """Start waiting prefetches in free lanes."""
        instructions: list[Instruction] = []
        for lane, prefetch in enumerate(self._lanes):
            if prefetch is None and self._line:
                started = self._lanes[lane] = self._line.take_first()
                started.phase = _Phase.QUERYING
                instructions.append(QueryStorage(started.number, started.digests))
        return instructions


def _parts(prefetch: _Prefetch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The host pages of a prefetch that have landed on every rank, and the others."""
    host_pages = prefetch.facts.host_pages
    assert host_pages is not None
    return host_pages[: prefetch.num_read], host_pages[prefetch.num_read :]


class _Outbox:
    """Numbers operations and keeps what is to be done."""

    __slots__ = ("_instructions", "_last_number")

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._last_number = 0

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def put(self, *instructions: Instruction) -> None:
        self._instructions += instructions

    def take(self) -> list[Instruction]:
        instructions, self._instructions = self._instructions, []
        return instructions


@dataclass(slots=True)
class AgreedState:
    """What the last agreement said of the present, for decisions until the next one.

    Attributes:
        has_storage: every rank has a storage backend attached.
        load_back_budget_pages: pages that every rank can begin to copy to the device.
    """

    has_storage: bool = False
    load_back_budget_pages: int = 0


@dataclass(slots=True, kw_only=True)
class HiCacheController:
    """The operations under way on one rank.

    Attributes:
        host: where host pages are reserved, committed and aborted.
        prefetches: reads from storage.
        shared: what the last agreement said; read it, do not write it.
    """

    host: HostPages
    prefetches: ActivePrefetches
    agreed: AgreedState = field(default_factory=AgreedState, init=False)
    _writes: AckQueue[tuple[int, ...] | None] = field(default_factory=AckQueue, init=False)
    _loads: AckQueue[None] = field(default_factory=AckQueue, init=False)
    _backups: AckQueue[None] = field(default_factory=AckQueue, init=False)
    _outbox: _Outbox = field(default_factory=_Outbox, init=False)

    @property
    def num_operations(self) -> int:
        """Operations that have not settled; the same on every rank."""
        return len(self._writes) + len(self._loads) + len(self._backups) + len(self.prefetches)

    def write(self, device_pages: Sequence[int]) -> int:
        """Begin to copy device pages to the host; returns the operation's number.

        A rank that finds no host page takes part all the same, with an end that is not good.
        """
        number = self._outbox.next_number()
        try:
            host_pages = tuple(self.host.reserve(len(device_pages)))
        except OutOfPagesError:
            self._writes.push(number, None)
            self._writes.acknowledge(number, False)
            return number
        self._writes.push(number, host_pages)
        self._outbox.put(CopyToHost(number, tuple(device_pages), host_pages))
        return number

    def load_back(self, host_pages: Sequence[int], device_pages: Sequence[int], *, by_layer: bool = False) -> int:
        """Begin to copy host pages to the device, for requests that run already or not; returns the number."""
        number = self._outbox.next_number()
        self._loads.push(number, None)
        self._outbox.put(CopyToDevice(number, tuple(host_pages), tuple(device_pages), by_layer))
        return number

    def discard_load_back(self, number: int) -> None:
        """Nobody reads any more what a failed load was to bring."""
        self._outbox.put(DiscardLoadBack(number))

    def write_to_storage(self, digests: bytes, host_pages: Sequence[int]) -> int:
        """Begin to write host pages to storage; returns the operation's number."""
        number = self._outbox.next_number()
        self._backups.push(number, None)
        self._outbox.put(WriteToStorage(number, digests, tuple(host_pages)))
        return number

    def prefetch(self, digests: bytes) -> int:
        """Begin to read the pages with these digests from storage; returns the operation's number."""
        number = self._outbox.next_number()
        self._outbox.put(*self.prefetches.start(number, digests))
        return number

    def terminate(self, number: int) -> PrefetchOutcome:
        """End a prefetch at once; returns what it has brought."""
        settled, instructions = self.prefetches.terminate(number)
        self._outbox.put(*instructions)
        return settled

    def handle(self, event: IoEvent) -> None:
        """Take in what this rank's I/O reports. Nothing is decided by it.

        Raises:
            CacheIntegrityError: the operation has ended before, or has settled already.
        """
        match event:
            case WriteDone():
                self._writes.acknowledge(event.op, event.is_ok)
            case LoadBackDone():
                self._loads.acknowledge(event.op, event.is_ok)
            case BackupDone():
                self._backups.acknowledge(event.op, event.is_ok)
            case QueryDone() | PagesRead() | ReadDone():
                self.prefetches.handle(event)

    def fill(self, proposal: Proposal, *, has_storage: bool, load_back_budget_pages: int, now_s: float) -> None:
        """Bring this rank's facts: the same slots at every step, whatever is under way."""
        values = [has_storage, load_back_budget_pages]
        for queue in (self._writes, self._loads, self._backups):
            values += (queue.num_done(), queue.num_ok())
        proposal.fill(_TRANSFER_SLOTS, values)
        self.prefetches.fill(proposal, now_s)

    def apply(self, agreed: AgreedValues) -> list[Decision]:
        """Decide by what all ranks agreed. The caller carries the decisions out in this order."""
        numbers = agreed.numbers
        had_storage = self.agreed.has_storage
        self.agreed.has_storage = agreed.flags["storage"]
        self.agreed.load_back_budget_pages = numbers["load room"]
        decisions: list[Decision] = []
        for number, host_pages, is_ok in self._writes.pop(numbers["writes done"], numbers["writes good"]):
            decisions.append(self._settle_write(number, host_pages, is_ok))
        for number, _, is_ok in self._loads.pop(numbers["loads done"], numbers["loads good"]):
            decisions.append(LoadBackOutcome(number, is_ok))
        for number, _, is_ok in self._backups.pop(numbers["backups done"], numbers["backups good"]):
            decisions.append(BackupOutcome(number, is_ok))
        if had_storage and not self.agreed.has_storage:
            given_up, stops = self.prefetches.terminate_all()
            self._outbox.put(*stops)
            decisions += (StorageDetached(), *given_up)
        prefetched, instructions = self.prefetches.apply(agreed)
        self._outbox.put(*instructions)
        return decisions + prefetched

    def pop_instructions(self) -> list[Instruction]:
        """Return what is to be done since the last call, in order."""
        if not self.agreed.has_storage and not self._backups and not self.prefetches:
            self._outbox.put(ReleaseStorage())
        return self._outbox.take()

    def _settle_write(self, number: int, host_pages: tuple[int, ...] | None, is_ok: bool) -> WriteOutcome:
        """Commit on all ranks or on none."""
        if host_pages is None:
            return WriteOutcome(number, ())
        if is_ok:
            self.host.commit(host_pages)
            return WriteOutcome(number, host_pages)
        self.host.abort(host_pages)
        return WriteOutcome(number, ())
