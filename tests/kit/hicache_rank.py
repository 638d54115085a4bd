"""A rank of a hierarchical cache whose transfers end when the test says so."""

from __future__ import annotations

import random
from typing import TypeVar

from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiRadixCache
from scheduler_components.page_operations import (
    BackupDone,
    CopyToDevice,
    CopyToHost,
    Instruction,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_components.reference.device.hicache_sim import SimulatedHostPages

PAGE_SIZE = 2
PATIENT = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1)

AnInstruction = TypeVar("AnInstruction", bound=Instruction)


class Rank:
    """One rank whose I/O ends when the test says so. Storage is attached while ``has_storage`` is True."""

    def __init__(self, policy: HiCachePolicy = PATIENT, *, num_device_pages: int = 8, num_host_pages: int = 16) -> None:
        self.host = SimulatedHostPages(num_host_pages, rng=random.Random(0), failure=0.0)
        self.cache = HiRadixCache(
            page_size=PAGE_SIZE,
            capacity_tokens=num_device_pages * PAGE_SIZE,
            host=self.host,
            num_host_pages=num_host_pages,
            policy=policy,
        )
        self.has_storage, self.load_back_budget_pages = True, 100
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


def prompt(chat: int, num_pages: int) -> list[int]:
    return [chat * 100 + at for at in range(num_pages * PAGE_SIZE)]
