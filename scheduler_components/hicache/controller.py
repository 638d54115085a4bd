"""HiCacheController: everything that ranks must agree on about moving pages. Pure: events in, instructions out.

One agreement a step holds it all. The cache above begins operations, the same ones on every rank; what I/O tells is
each rank's own and goes nowhere but into the ballot; what the outcome says is decided, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_components.errors import OutOfPagesError
from scheduler_components.hicache.ack_queue import AckQueue
from scheduler_components.hicache.ballot import Ballot, Outcome
from scheduler_components.hicache.operations import (
    BackupDone,
    BackupSettled,
    CopyToDevice,
    CopyToHost,
    Decision,
    Instruction,
    IoEvent,
    LoadDone,
    LoadSettled,
    StorageLost,
    StorageUnused,
    WriteDone,
    WriteSettled,
    WriteToStorage,
)
from scheduler_components.hicache.prefetch import PrefetchLanes
from scheduler_components.tier_ports import HostPages

__all__ = ["Agreed", "HiCacheController"]


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
class Agreed:
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
        agreed: read it, do not write it.
    """

    host: HostPages
    prefetches: PrefetchLanes
    agreed: Agreed = field(default_factory=Agreed, init=False)
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
        """Take in what this rank's I/O tells. Nothing is decided by it."""
        if isinstance(event, WriteDone):
            self._writes.acknowledge(event.op, event.is_good)
        elif isinstance(event, LoadDone):
            self._loads.acknowledge(event.op, event.is_good)
        elif isinstance(event, BackupDone):
            self._backups.acknowledge(event.op, event.is_good)
        else:
            self.prefetches.handle(event)

    def fill(self, ballot: Ballot, *, has_storage: bool, load_room_pages: int, now_s: float) -> None:
        """Bring this rank's facts: the same slots at every step, whatever is under way."""
        ballot.all("storage", has_storage)
        ballot.min("load room", load_room_pages)
        for name, queue in (("writes", self._writes), ("loads", self._loads), ("backups", self._backups)):
            ballot.min(f"{name} done", queue.done())
            ballot.min(f"{name} good", queue.good())
        self.prefetches.fill(ballot, now_s)

    def settle(self, outcome: Outcome) -> list[Decision]:
        """Decide by what all ranks agreed. The caller carries the decisions out in this order."""
        numbers = outcome.numbers
        had_storage = self.agreed.has_storage
        self.agreed.has_storage = outcome.verdicts["storage"]
        self.agreed.load_room_pages = numbers["load room"]
        decisions: list[Decision] = []
        for number, host_pages, is_good in self._writes.pop(numbers["writes done"], numbers["writes good"]):
            decisions.append(self._settle_write(number, host_pages, is_good))
        for number, _, is_good in self._loads.pop(numbers["loads done"], numbers["loads good"]):
            decisions.append(LoadSettled(number, is_good))
        for number, _, is_good in self._backups.pop(numbers["backups done"], numbers["backups good"]):
            decisions.append(BackupSettled(number, is_good))
        if had_storage and not self.agreed.has_storage:
            self.prefetches.cancel_all()
            decisions.append(StorageLost())
        prefetched, instructions = self.prefetches.settle(outcome)
        self._outbox.put(*instructions)
        return decisions + prefetched

    def take_instructions(self) -> list[Instruction]:
        """Return what is to be done since the last call, in order."""
        if not self.agreed.has_storage and not self._backups and not self.prefetches:
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
