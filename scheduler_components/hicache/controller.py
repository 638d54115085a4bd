"""HiCacheController: everything that ranks must agree on about moving pages. Pure: events in, instructions out.

One agreement per step holds it all (see ``agreement.py``). The cache above begins operations, the same ones on every
rank. ``handle`` takes in what this rank's I/O reports, ``fill`` brings it to the agreement, and ``settle`` turns the
agreed values into decisions, the same on every rank.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, Literal, TypeAlias, TypeVar

import attrs

from scheduler_components.cache import DIGEST_BYTES
from scheduler_components.errors import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.hicache.agreement import AgreedValues, Proposal
from scheduler_components.page_operations import (
    BackupDone,
    BackupSettled,
    CopyToDevice,
    CopyToHost,
    Decision,
    Instruction,
    IoEvent,
    LoadDone,
    LoadSettled,
    PagesLanded,
    PrefetchHit,
    PrefetchSettled,
    QueryStorage,
    ReadEnded,
    ReadStorage,
    StopReading,
    StorageAnswered,
    StorageLost,
    StorageUnused,
    WriteDone,
    WriteSettled,
    WriteToStorage,
)
from scheduler_components.ports import HostPages
from scheduler_components.validators import is_integer, is_number

__all__ = [
    "NUM_LANES",
    "AckQueue",
    "HiCacheController",
    "HiCachePolicy",
    "PrefetchLanes",
    "PrefetchStop",
    "SharedFacts",
    "WritePolicy",
]

WritePolicy: TypeAlias = Literal["write_through", "write_back"]
PrefetchStop: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]


def _check_write(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_choice(attribute.name, value, ("write_through", "write_back"))


def _check_stop(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_choice(attribute.name, value, ("best_effort", "wait_complete", "timeout"))


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, value, "is not a policy", f"give one of {', '.join(choices)}")


@attrs.frozen(kw_only=True)
class HiCachePolicy:
    """When a hierarchical cache writes, and when it stops prefetching; the same on every rank of a replica.

    Attributes:
        write: copy pages to the host as soon as they are cached (``write_through``), or when they near eviction from
            the device (``write_back``).
        clean_ahead_pages: with ``write_back``, how many of the next pages to evict are kept copied ahead of need.
            What is evicted uncopied is lost, never waited for.
        prefetch: when a prefetch from storage ends before it is complete: as soon as its request could run
            (``best_effort``), never (``wait_complete``), or when any rank's clock says so (``timeout``).
        prefetch_threshold_pages: shorter hits are not worth a transfer and are revoked.
        prefetch_timeout_s, prefetch_timeout_s_per_page: with ``timeout``, how long reading may take.
        load_threshold_pages: shorter runs are computed anew instead of loaded from the host.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    write: WritePolicy = attrs.field(default="write_through", validator=_check_write)
    clean_ahead_pages: int = attrs.field(default=64, validator=is_integer("is not a count"))
    prefetch: PrefetchStop = attrs.field(default="best_effort", validator=_check_stop)
    prefetch_threshold_pages: int = attrs.field(default=4, validator=is_integer("is not a count"))
    prefetch_timeout_s: float = attrs.field(default=1.0, validator=is_number(or_zero=True))
    prefetch_timeout_s_per_page: float = attrs.field(default=0.001, validator=is_number(or_zero=True))
    load_threshold_pages: int = attrs.field(default=1, validator=is_integer("is not a count"))

    def reading_bound_s(self, num_pages: int) -> float:
        """Longest time that reading ``num_pages`` may take; infinite unless the policy is ``timeout``."""
        if self.prefetch != "timeout":
            return float("inf")
        return self.prefetch_timeout_s + self.prefetch_timeout_s_per_page * num_pages


Operation = TypeVar("Operation")


class AckQueue(Generic[Operation]):
    """Operations in the order in which they began, whatever the order in which they end on each rank.

    Two numbers per rank are enough to agree on any number of operations.

    ``done`` counts operations that have ended here, from the oldest on without a hole; ``good`` those that ended well.
    With the MIN of each over all ranks, the first ``good`` operations have ended well on every rank. When ``done`` is
    more, the next one has ended on every rank and, on the rank with the least ``good``, not well.
    """

    __slots__ = ("_ends", "_operations")

    def __init__(self) -> None:
        self._operations: deque[tuple[int, Operation]] = deque()
        self._ends: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._operations)

    def push(self, number: int, operation: Operation) -> None:
        """Begin an operation."""
        self._operations.append((number, operation))

    def acknowledge(self, number: int, is_good: bool) -> None:
        """An operation has ended on this rank.

        Raises:
            CacheIntegrityError: it had ended before.
        """
        if number in self._ends:
            raise CacheIntegrityError(f"operation {number} ended twice")
        self._ends[number] = is_good

    def done(self) -> int:
        """Operations that have ended here, from the oldest on."""
        return sum(1 for _ in takewhile(lambda entry: entry[0] in self._ends, self._operations))

    def good(self) -> int:
        """Operations that have ended well here, from the oldest on."""
        return sum(1 for _ in takewhile(lambda entry: self._ends.get(entry[0], False), self._operations))

    def pop(self, done: int, good: int) -> list[tuple[int, Operation, bool]]:
        """Take out what all ranks agree has ended: number, operation, and whether it ended well everywhere.

        Args:
            done: MIN over all ranks of ``done()``.
            good: MIN over all ranks of ``good()``.
        """
        settled = [(*self._pop(), True) for _ in range(good)]
        if done > good:
            settled.append((*self._pop(), False))
        return settled

    def _pop(self) -> tuple[int, Operation]:
        number, operation = self._operations.popleft()
        self._ends.pop(number, None)
        return number, operation


NUM_LANES = 8
"""Prefetches at a time; more wait. Six slots per lane and the rest fit the proposal's first block."""


class _Phase(enum.Enum):
    QUERYING = enum.auto()
    RESERVING = enum.auto()
    VOTING = enum.auto()
    READING = enum.auto()
    STOPPING = enum.auto()


@dataclass(slots=True, kw_only=True)
class LocalFacts:
    """What this rank alone knows of a prefetch: brought to the agreement, never acted on."""

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
    facts: LocalFacts = field(default_factory=LocalFacts)


@dataclass(slots=True, kw_only=True)
class PrefetchLanes:
    """The prefetches of one rank: a fixed number at a time, so that what ranks agree on in a step never grows.

    ``waiting -> QUERYING -> RESERVING -> VOTING -> READING -> STOPPING -> settled``

    Each arrow is one agreement, except the one to VOTING: reserving follows the query at once. A rank that has nothing
    (a miss, a failed store, no host page left) says so as a 0 or a no.

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

        Whether this rank could goes into the next agreement. Only when all could, they write to the pages.
        """
        prefetch = self._by_number[number]
        prefetch.num_pages = num_pages
        prefetch.phase = _Phase.VOTING
        prefetch.facts.reading_since_s = now_s
        try:
            prefetch.facts.host_pages = tuple(self.host.reserve(num_pages))
        except OutOfPagesError:
            prefetch.facts.host_pages = None

    def facts_of(self, event: StorageAnswered | PagesLanded | ReadEnded) -> LocalFacts:
        """Return what this rank knows of an event's prefetch, to add to it.

        Raises:
            CacheIntegrityError: the prefetch has settled already.
        """
        prefetch = self._by_number.get(event.op)
        if prefetch is None:
            raise CacheIntegrityError(f"{event} of a prefetch that is not under way")
        return prefetch.facts

    def fill(self, proposal: Proposal, now_s: float) -> None:
        """Bring this rank's facts: the same slots at every step, whatever is under way."""
        for lane, prefetch in enumerate(self._lanes):
            facts = prefetch.facts if prefetch is not None else _NOTHING
            proposal.all(f"prefetch {lane} answered", facts.has_answered)
            proposal.min(f"prefetch {lane} hit", facts.hit_pages)
            proposal.all(f"prefetch {lane} reserved", facts.host_pages is not None)
            proposal.min(f"prefetch {lane} landed", facts.landed_pages)
            proposal.all(f"prefetch {lane} ended", facts.has_ended)
            proposal.any(f"prefetch {lane} timed out", prefetch is not None and self._is_late(prefetch, now_s))

    def settle(self, agreed: AgreedValues) -> tuple[list[Decision], list[Instruction]]:
        """Move every lane on by what all ranks agreed."""
        decisions: list[Decision] = []
        instructions: list[Instruction] = []
        for lane, prefetch in enumerate(self._lanes):
            if prefetch is None:
                continue
            if prefetch.phase is _Phase.QUERYING:
                decision = self._after_query(prefetch, lane, agreed)
            elif prefetch.phase is _Phase.VOTING:
                decision = self._after_vote(prefetch, lane, agreed, instructions)
            else:
                assert prefetch.phase is not _Phase.RESERVING, "a PrefetchHit was not answered with reserve()"
                decision = self._after_reading(prefetch, lane, agreed, instructions)
            if decision is not None:
                decisions.append(decision)
            if isinstance(decision, PrefetchSettled):
                self._lanes[lane] = None
                del self._by_number[prefetch.number]
        return decisions, instructions + self._fill_lanes()

    def _after_query(self, prefetch: _Prefetch, lane: int, agreed: AgreedValues) -> Decision | None:
        if not agreed.flags[f"prefetch {lane} answered"]:
            return None
        num_pages = agreed.numbers[f"prefetch {lane} hit"]
        if prefetch.is_cancelled or num_pages < self.policy.prefetch_threshold_pages:
            return PrefetchSettled(prefetch.number, ())
        prefetch.phase = _Phase.RESERVING
        return PrefetchHit(prefetch.number, num_pages)

    def _after_vote(
        self, prefetch: _Prefetch, lane: int, agreed: AgreedValues, instructions: list[Instruction]
    ) -> Decision | None:
        facts = prefetch.facts
        is_agreed = agreed.flags[f"prefetch {lane} reserved"]
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
        self, prefetch: _Prefetch, lane: int, agreed: AgreedValues, instructions: list[Instruction]
    ) -> Decision | None:
        if agreed.flags[f"prefetch {lane} ended"]:
            facts = prefetch.facts
            assert facts.host_pages is not None
            num_landed = agreed.numbers[f"prefetch {lane} landed"]
            kept, left = facts.host_pages[:num_landed], facts.host_pages[num_landed:]
            self.host.commit(kept)
            self.host.abort(left)
            return PrefetchSettled(prefetch.number, kept)
        if agreed.flags[f"prefetch {lane} timed out"]:
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


_NOTHING = LocalFacts()


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
class SharedFacts:
    """What the last agreement said of the present, for decisions until the next one.

    Attributes:
        has_storage: every rank has a storage backend attached.
        load_room_pages: pages that every rank can begin to copy to the device.
    """

    has_storage: bool = False
    load_room_pages: int = 0


@dataclass(slots=True, kw_only=True)
class HiCacheController:
    """The operations under way on one rank.

    Attributes:
        host: where host pages are reserved, committed and aborted.
        prefetches: reads from storage.
        shared: what the last agreement said; read it, do not write it.
    """

    host: HostPages
    prefetches: PrefetchLanes
    shared: SharedFacts = field(default_factory=SharedFacts, init=False)
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

    def load(self, host_pages: Sequence[int], device_pages: Sequence[int]) -> int:
        """Begin to copy host pages to the device; returns the operation's number."""
        number = self._outbox.next_number()
        self._loads.push(number, None)
        self._outbox.put(CopyToDevice(number, tuple(host_pages), tuple(device_pages)))
        return number

    def back_up(self, digests: bytes, host_pages: Sequence[int]) -> int:
        """Begin to write host pages to storage; returns the operation's number."""
        number = self._outbox.next_number()
        self._backups.push(number, None)
        self._outbox.put(WriteToStorage(number, digests, tuple(host_pages)))
        return number

    def prefetch(self, digests: bytes) -> int:
        """Begin to read the pages with these digests from storage; returns the operation's number."""
        number = self._outbox.next_number()
        self._outbox.put(*self.prefetches.begin(number, digests))
        return number

    def handle(self, event: IoEvent) -> None:
        """Take in what this rank's I/O reports. Nothing is decided by it.

        Raises:
            CacheIntegrityError: the operation has ended before, or has settled already.
        """
        match event:
            case WriteDone():
                self._writes.acknowledge(event.op, event.is_good)
            case LoadDone():
                self._loads.acknowledge(event.op, event.is_good)
            case BackupDone():
                self._backups.acknowledge(event.op, event.is_good)
            case StorageAnswered():
                facts = self.prefetches.facts_of(event)
                facts.has_answered, facts.hit_pages = True, event.num_pages
            case PagesLanded():
                self.prefetches.facts_of(event).landed_pages = event.num_pages
            case ReadEnded():
                self.prefetches.facts_of(event).has_ended = True

    def fill(self, proposal: Proposal, *, has_storage: bool, load_room_pages: int, now_s: float) -> None:
        """Bring this rank's facts: the same slots at every step, whatever is under way."""
        proposal.all("storage", has_storage)
        proposal.min("load room", load_room_pages)
        for name, queue in (("writes", self._writes), ("loads", self._loads), ("backups", self._backups)):
            proposal.min(f"{name} done", queue.done())
            proposal.min(f"{name} good", queue.good())
        self.prefetches.fill(proposal, now_s)

    def settle(self, agreed: AgreedValues) -> list[Decision]:
        """Decide by what all ranks agreed. The caller carries the decisions out in this order."""
        numbers = agreed.numbers
        had_storage = self.shared.has_storage
        self.shared.has_storage = agreed.flags["storage"]
        self.shared.load_room_pages = numbers["load room"]
        decisions: list[Decision] = []
        for number, host_pages, is_good in self._writes.pop(numbers["writes done"], numbers["writes good"]):
            decisions.append(self._settle_write(number, host_pages, is_good))
        for number, _, is_good in self._loads.pop(numbers["loads done"], numbers["loads good"]):
            decisions.append(LoadSettled(number, is_good))
        for number, _, is_good in self._backups.pop(numbers["backups done"], numbers["backups good"]):
            decisions.append(BackupSettled(number, is_good))
        if had_storage and not self.shared.has_storage:
            self.prefetches.cancel_all()
            decisions.append(StorageLost())
        prefetched, instructions = self.prefetches.settle(agreed)
        self._outbox.put(*instructions)
        return decisions + prefetched

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done since the last call, in order."""
        if not self.shared.has_storage and not self._backups and not self.prefetches:
            self._outbox.put(StorageUnused())
        return self._outbox.take()

    def _settle_write(self, number: int, host_pages: tuple[int, ...] | None, is_good: bool) -> WriteSettled:
        """Commit on all ranks or on none."""
        if host_pages is None:
            return WriteSettled(number, ())
        if is_good:
            self.host.commit(host_pages)
            return WriteSettled(number, host_pages)
        self.host.abort(host_pages)
        return WriteSettled(number, ())
