"""Ranks of a hierarchical cache whose transfers end when the test says so: a cache alone, and one in its stepper."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiCacheStepper, HiRadixCache
from scheduler_components.values.page_operations import (
    BackupDone,
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages

PAGE_SIZE = 2
PATIENT = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1)

AnInstruction = TypeVar("AnInstruction", bound=Instruction)


def host_pages(num_pages: int) -> SimulatedHostPages:
    """Return host pages whose reservations fail only when there is no room."""
    return SimulatedHostPages(num_pages, rng=random.Random(0), failure=0.0)


def make_cache(
    policy: HiCachePolicy, host: SimulatedHostPages, *, num_device_pages: int, num_host_pages: int, record: bool = False
) -> HiRadixCache:
    """Make a cache over these host pages. The last token of its capacity fills no page."""
    return HiRadixCache(
        page_size=PAGE_SIZE,
        capacity_tokens=num_device_pages * PAGE_SIZE + 1,
        host=host,
        num_host_pages=num_host_pages,
        policy=policy,
        record=record,
    )


class HiCacheRank:
    """One rank whose I/O ends when the test says so. Storage is attached while ``has_storage`` is True."""

    def __init__(
        self,
        policy: HiCachePolicy = PATIENT,
        *,
        num_device_pages: int = 8,
        num_host_pages: int = 16,
        has_storage: bool = True,
        record: bool = False,
    ) -> None:
        self.host = host_pages(num_host_pages)
        self.cache = make_cache(
            policy, self.host, num_device_pages=num_device_pages, num_host_pages=num_host_pages, record=record
        )
        self.has_storage, self.load_back_budget_pages = has_storage, 100
        self._instructions: list[Instruction] = []
        self._step = 0
        self.step()

    def step(self) -> None:
        """Agree once, without ending any I/O."""
        self._step += 1
        cache = self.cache
        proposal = cache.proposal(
            self._step,
            has_storage=self.has_storage,
            load_back_budget_pages=self.load_back_budget_pages,
            now_s=float(self._step),
        )
        cache.apply(self._step, proposal.unpack(proposal.pack(0)))
        cache.check_integrity()

    def pop(self, kind: type[AnInstruction]) -> list[AnInstruction]:
        """Return the new instructions of one kind."""
        self._instructions += self.cache.pop_instructions()
        popped: list[AnInstruction] = [each for each in self._instructions if isinstance(each, kind)]
        self._instructions = [instruction for instruction in self._instructions if not isinstance(instruction, kind)]
        return popped

    def end_writes(self, *, is_ok: bool = True) -> None:
        for copy in self.pop(CopyToHost):
            self.cache.handle(WriteDone(copy.op, is_ok))

    def end_loads(self, *, is_ok: bool = True) -> int:
        """End all loads and return their number of pages."""
        loads = self.pop(CopyToDevice)
        for copy in loads:
            self.cache.handle(LoadBackDone(copy.op, is_ok))
        return sum(len(copy.device_pages) for copy in loads)

    def end_copies_and_step(self, *, is_ok: bool = True) -> None:
        """End all copies between device and host, then agree."""
        self.end_writes(is_ok=is_ok)
        self.end_loads(is_ok=is_ok)
        self.step()

    def end_backups(self, *, is_ok: bool = True) -> int:
        """End all backups and return their number of pages."""
        writes = self.pop(WriteToStorage)
        for write in writes:
            self.cache.handle(BackupDone(write.op, is_ok))
        return sum(len(write.host_pages) for write in writes)

    def compute(self, chat: int, num_pages: int) -> None:
        """Compute a prompt of a chat after its cached prefix, without ending any I/O."""
        tokens = prompt(chat, num_pages)
        match = self.cache.match_prefix(tokens)
        self.cache.lock(match.node)
        self.cache.insert(tokens, [*match.pages, *self.cache.allocate(num_pages - len(match.pages))])
        self.cache.unlock(match.node)

    def cache_on_host(self, chat: int, num_pages: int) -> None:
        """Compute a prompt, copy it to the host and evict it from the device. Backups stay in flight."""
        self.compute(chat, num_pages)
        self.end_writes()
        self.step()
        assert self.cache.evict(num_pages) == num_pages

    def read(self, rid: str, chat: int, num_pages: int, *, num_hit: int) -> ReadFromStorage:
        """Start a prefetch and return its read."""
        self.cache.prefetch_queue.start(rid, prompt(chat, num_pages))
        [query] = self.pop(QueryStorage)
        self.cache.handle(QueryDone(query.op, num_hit))
        self.step()
        self.step()
        [read] = self.pop(ReadFromStorage)
        return read

    def end_read(self, read: ReadFromStorage, num_read: int) -> None:
        self.cache.handle(PagesRead(read.op, num_read))
        self.cache.handle(ReadDone(read.op))

    def pages_on(self) -> tuple[int, int, int]:
        device, host, storage = (self.cache.num_pages_on(tier) for tier in Tier)
        return device, host, storage


class ScriptedMover:
    """A ``PageMover`` that records its instructions. The test adds the events that ``poll`` returns.

    Args:
        ends_writes: copies to the host end well immediately.
    """

    def __init__(self, *, ends_writes: bool = False, has_storage: bool = True, load_back_budget_pages: int = 8) -> None:
        self.ends_writes, self.has_storage = ends_writes, has_storage
        self.load_back_budget_pages = load_back_budget_pages
        self.events: list[IoEvent] = []
        self.submitted: list[Instruction] = []
        self._num_taken = 0

    def submit(self, instructions: Sequence[Instruction]) -> None:
        self.submitted += instructions
        if self.ends_writes:
            self.events += [WriteDone(each.op, True) for each in instructions if isinstance(each, CopyToHost)]

    def poll(self) -> list[IoEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        """Do nothing."""

    def take(self) -> list[Instruction]:
        """Return the instructions since the last call."""
        first, self._num_taken = self._num_taken, len(self.submitted)
        return self.submitted[first:]

    @property
    def loads(self) -> list[CopyToDevice]:
        """All copies to the device."""
        return [each for each in self.submitted if isinstance(each, CopyToDevice)]


class RecordingGroups(ParallelGroups):
    """One rank's groups, which record their calls. The result is the rank's own values unless ``is_alike`` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []
        self.is_alike = True

    def reduce(self, proposal: Proposal) -> AgreedValues:
        self.asked.append((proposal.operation, proposal.step))
        agreed = super().reduce(proposal)
        return agreed if self.is_alike else AgreedValues(agreed.numbers, agreed.flags | {"state": False})


class SteppedHiCacheRank:
    """One rank in its ``HiCacheStepper``, with a ``ScriptedMover``, recording groups and a clock that the test sets."""

    def __init__(
        self,
        policy: HiCachePolicy,
        *,
        mover: ScriptedMover | None = None,
        num_device_pages: int = 4,
        num_host_pages: int = 8,
    ) -> None:
        host = host_pages(num_host_pages)
        self.cache = make_cache(policy, host, num_device_pages=num_device_pages, num_host_pages=num_host_pages)
        self.mover = mover if mover is not None else ScriptedMover()
        self.groups, self.now_s = RecordingGroups(), 0.0
        self.stepper = HiCacheStepper(
            cache=self.cache, groups=self.groups, mover=self.mover, settings={"model": "m"}, clock=lambda: self.now_s
        )

    def step(self, *events: IoEvent) -> list[Instruction]:
        """Step after these events and return the new instructions for the mover."""
        self.mover.events += events
        self.stepper.step()
        self.cache.check_integrity()
        return self.mover.take()

    def compute(self, chat: int, num_pages: int) -> None:
        """Compute a prompt of a chat without looking at what is cached."""
        self.cache.insert(prompt(chat, num_pages), self.cache.allocate(num_pages))


def prompt(chat: int, num_pages: int) -> list[int]:
    return [chat * 100 + at for at in range(num_pages * PAGE_SIZE)]
