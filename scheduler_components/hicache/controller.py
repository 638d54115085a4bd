"""HiCacheController: the operations that move pages, as far as ranks must agree on them. Pure.

The cache begins operations, the same ones on every rank. ``handle`` records this rank's I/O events, ``fill`` adds them
to the step's proposal, and ``apply`` turns the agreed values into decisions, which are the same on every rank. The
rules are explained at the top of ``agreement.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from scheduler_components.agreement import AgreedValues, Proposal, Slots
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.errors import OutOfPagesError
from scheduler_components.hicache.ack_queue import AckQueue
from scheduler_components.hicache.prefetch import ActivePrefetches
from scheduler_components.ports import AllocationSink, DecisionSink, HostPages, NullAllocationSink, NullDecisionLog
from scheduler_components.values import AllocationAction
from scheduler_components.values.page_operations import (
    BackupDone,
    BackupOutcome,
    CopyToDevice,
    CopyToHost,
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
    ReadDone,
    ReleaseStorage,
    StorageDetached,
    TierDecision,
    WriteDone,
    WriteOutcome,
    WriteToStorage,
)

__all__ = ["HiCacheController"]

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


@dataclass(slots=True, kw_only=True)
class HiCacheController:
    """The operations under way on one rank.

    Attributes:
        host: the host pool in which pages are reserved, committed and aborted.
        prefetches: reads from storage.
        allocation_log: records which operation reserves and returns which host pages.
        decisions: where it notes which operations begin, and what all ranks agreed about them.
        has_storage: as of the last agreement, all ranks have a storage backend attached.
        load_back_budget_pages: pages that, as of the last agreement, all ranks can begin to copy to the device.
    """

    host: HostPages
    prefetches: ActivePrefetches
    allocation_log: AllocationSink = field(default_factory=NullAllocationSink)
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    has_storage: bool = field(default=False, init=False)
    load_back_budget_pages: int = field(default=0, init=False)
    _writes: AckQueue[tuple[int, ...] | None] = field(default_factory=AckQueue, init=False)
    _loads: AckQueue[None] = field(default_factory=AckQueue, init=False)
    _backups: AckQueue[None] = field(default_factory=AckQueue, init=False)
    _instructions: list[Instruction] = field(default_factory=list, init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1), init=False)

    @property
    def num_operations(self) -> int:
        """Operations that have not settled; the same number on all ranks."""
        return len(self._writes) + len(self._loads) + len(self._backups) + len(self.prefetches)

    def write(self, device_pages: Sequence[int]) -> int:
        """Begin to copy device pages to the host; return the operation's number.

        A rank without enough host pages also begins the operation and reports a failure.
        """
        number = self._begin("write", len(device_pages))
        try:
            host_pages = tuple(self.host.reserve(len(device_pages)))
        except OutOfPagesError:
            self._writes.push(number, None)
            self._writes.acknowledge(number, False)
            return number
        self._writes.push(number, host_pages)
        self.allocation_log.record("allocated", "host", f"write {number}", "HiCacheController.write", host_pages)
        self._instructions.append(CopyToHost(number, tuple(device_pages), host_pages))
        return number

    def load_back(self, host_pages: Sequence[int], device_pages: Sequence[int], *, by_layer: bool = False) -> int:
        """Begin to copy host pages to the device; return the operation's number."""
        number = self._begin("load back", len(device_pages))
        self._loads.push(number, None)
        self._instructions.append(CopyToDevice(number, tuple(host_pages), tuple(device_pages), by_layer))
        return number

    def discard_load_back(self, number: int) -> None:
        """Note that no request reads the pages of a failed load any more."""
        self._instructions.append(DiscardLoadBack(number))

    def write_to_storage(self, digests: bytes, host_pages: Sequence[int]) -> int:
        """Begin to write host pages to storage; return the operation's number."""
        number = self._begin("backup", len(host_pages))
        self._backups.push(number, None)
        self._instructions.append(WriteToStorage(number, digests, tuple(host_pages)))
        return number

    def prefetch(self, digests: bytes) -> int:
        """Begin to read the pages with these digests from storage; return the operation's number."""
        number = self._begin("prefetch", len(digests) // DIGEST_BYTES)
        self._instructions += self.prefetches.start(number, digests)
        return number

    def terminate(self, number: int) -> PrefetchOutcome:
        """End a prefetch immediately; return its outcome."""
        settled, instructions = self.prefetches.terminate(number)
        self._instructions += instructions
        self._note(settled)
        return settled

    def handle(self, event: IoEvent) -> None:
        """Record an I/O event of this rank. It decides nothing before the next agreement.

        Raises:
            CacheIntegrityError: the operation has ended before, or has settled.
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

    def fill(self, proposal: Proposal, *, has_storage: bool, load_back_budget_pages: int) -> None:
        """Add this rank's state to the proposal: the same slots at every step. The caller adds the clock."""
        values = [has_storage, load_back_budget_pages]
        for queue in (self._writes, self._loads, self._backups):
            values += (queue.num_done(), queue.num_ok())
        proposal.fill(_TRANSFER_SLOTS, values)
        self.prefetches.fill(proposal)

    def apply(self, agreed: AgreedValues) -> list[TierDecision]:
        """Return the decisions that follow from the agreed values, in the order in which to carry them out."""
        numbers, had_storage, before = agreed.numbers, self.has_storage, self.load_back_budget_pages
        self.has_storage, self.load_back_budget_pages = agreed.flags["storage"], numbers["load room"]
        if (self.has_storage, self.load_back_budget_pages) != (had_storage, before):
            self.decisions.note("apply", "hicache", "limits", self.has_storage, self.load_back_budget_pages)
        decisions: list[TierDecision] = []
        for number, host_pages, is_ok in self._writes.pop(numbers["writes done"], numbers["writes good"]):
            decisions.append(self._settle_write(number, host_pages, is_ok))
        for number, _, is_ok in self._loads.pop(numbers["loads done"], numbers["loads good"]):
            decisions.append(LoadBackOutcome(number, is_ok))
        for number, _, is_ok in self._backups.pop(numbers["backups done"], numbers["backups good"]):
            decisions.append(BackupOutcome(number, is_ok))
        if had_storage and not self.has_storage:
            terminated, cancels = self.prefetches.terminate_all()
            self._instructions += cancels
            decisions += (StorageDetached(), *terminated)
        prefetched, instructions = self.prefetches.apply(agreed)
        self._instructions += instructions
        decisions += prefetched
        for decision in decisions:
            self._note(decision)
        return decisions

    def host_pages_held(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield each operation that has reserved host pages on this rank, with these pages, for checks."""
        for number, host_pages in self._writes:
            if host_pages is not None:
                yield f"write {number}", host_pages
        yield from self.prefetches.host_pages_held()

    def pop_instructions(self) -> list[Instruction]:
        """Return the instructions since the last call, in order."""
        if not self.has_storage and not self._backups and not self.prefetches:
            self._instructions.append(ReleaseStorage())
        instructions, self._instructions = self._instructions, []
        return instructions

    def _begin(self, operation: str, num_pages: int) -> int:
        """Return the number of an operation that begins."""
        number = next(self._numbers)
        self.decisions.note("apply", "hicache", operation, number, num_pages)
        return number

    def _note(self, decision: TierDecision) -> None:
        """Note a decision by its facts that are equal on all ranks: not by host pages, which each rank chooses."""
        name = type(decision).__name__
        match decision:
            case WriteOutcome(op, host_pages) | PrefetchOutcome(op, host_pages):
                self.decisions.note("apply", "hicache", name, op, len(host_pages))
            case LoadBackOutcome(op, is_ok) | BackupOutcome(op, is_ok):
                self.decisions.note("apply", "hicache", name, op, is_ok)
            case PrefetchHit(op, num_pages) | PrefetchDrained(op, num_pages):
                self.decisions.note("apply", "hicache", name, op, num_pages)
            case StorageDetached():
                self.decisions.note("apply", "hicache", name)

    def _settle_write(self, number: int, host_pages: tuple[int, ...] | None, is_ok: bool) -> WriteOutcome:
        """Commit the host pages on all ranks or on none."""
        if host_pages is None:
            return WriteOutcome(number, ())
        if is_ok:
            self.host.commit(host_pages)
        else:
            self.host.abort(host_pages)
        action: AllocationAction = "cached" if is_ok else "freed"
        self.allocation_log.record(action, "host", f"write {number}", "HiCacheController.apply", host_pages)
        return WriteOutcome(number, host_pages if is_ok else ())
