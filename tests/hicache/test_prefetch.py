"""The wait of a request for storage is bounded from the first step in which only storage delays it.

The model has two ranks. Each has a reader that processes one operation at a time, like a store behind one thread. An
example sets the steps per operation, which may be infinite. Properties, for any number of earlier prefetches, active or
aborted, and for clocks of different rates:

- ``best_effort``: a request that could run never waits for storage.
- ``timeout``: it waits no longer than the formula by the fastest clock, plus the steps of a load.
- ``wait_complete``: aborted prefetches delay it only by the operations that the readers have begun.
- All ranks hold the same pages at every step, and finally all pages are released.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.hicache import HiCachePolicy, HiRadixCache
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.values.page_operations import (
    CancelPrefetch,
    CopyToDevice,
    Instruction,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages

PAGE_SIZE, NUM_PAGES = 512, 6
NEVER_ENDS = 10_000
BASE_S, PER_KI_TOKEN_S = 3.0, 1.0


@dataclass
class Reader:
    """The storage of one rank. It holds every page and answers after the configured number of steps."""

    query_steps: int
    page_steps: int
    events: list[IoEvent] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    jobs: deque[QueryStorage | ReadFromStorage] = field(default_factory=deque)
    spent_steps: int = 0
    num_begun: int = 0

    def submit(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case QueryStorage() | ReadFromStorage():
                    self.jobs.append(instruction)
                case CancelPrefetch():
                    self.stopped.add(instruction.op)
                case CopyToDevice():
                    self.events.append(LoadBackDone(instruction.op, True))

    def poll(self) -> list[IoEvent]:
        """Process one step. Operations that were cancelled before they began take no time."""
        while self.jobs and self.jobs[0].op in self.stopped and not self.spent_steps:
            self._end(self.jobs.popleft())
        if self.jobs:
            self._work()
        events, self.events = self.events, []
        return events

    def _work(self) -> None:
        job = self.jobs[0]
        self.num_begun += not self.spent_steps
        self.spent_steps += 1
        if isinstance(job, QueryStorage):
            has_ended = self.spent_steps >= self.query_steps
        else:
            num_read, remainder = divmod(self.spent_steps, self.page_steps)
            if not remainder:
                self.events.append(PagesRead(job.op, num_read))
            has_ended = num_read == len(job.host_pages) or (not remainder and job.op in self.stopped)
        if has_ended:
            self.spent_steps = 0
            self._end(self.jobs.popleft())

    def _end(self, job: QueryStorage | ReadFromStorage) -> None:
        if isinstance(job, ReadFromStorage):
            self.events.append(ReadDone(job.op))
        else:
            num_pages = 0 if job.op in self.stopped else len(job.digests) // DIGEST_BYTES
            self.events.append(QueryDone(job.op, num_pages))


class Ranks:
    def __init__(self, policy: HiCachePolicy, readers: list[Reader], clock_rate: float) -> None:
        self.readers, self.clock_rate = readers, clock_rate
        self.hosts = [SimulatedHostPages(400, rng=random.Random(0), failure=0.0) for _ in readers]
        self.caches = [
            HiRadixCache(
                page_size=PAGE_SIZE, capacity_tokens=40 * PAGE_SIZE, host=host, num_host_pages=400, policy=policy
            )
            for host in self.hosts
        ]
        self._sync = InProcessGroups({0: [(0, 1)], 1: [(0, 1)]})
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        proposals = {}
        for rank, (cache, reader) in enumerate(zip(self.caches, self.readers, strict=True)):
            reader.submit(cache.pop_instructions())
            for event in reader.poll():
                cache.handle(event)
            now_s = None if rank else self.num_steps * self.clock_rate  # rank 0 leads
            proposals[rank] = cache.proposal(self.num_steps, has_storage=True, load_back_budget_pages=100, now_s=now_s)
        for rank, agreed in self._sync.reduce(proposals).items():
            self.caches[rank].apply(self.num_steps, agreed)
            self.caches[rank].check_integrity()

    def start(self, rid: int) -> None:
        for cache in self.caches:
            cache.prefetch_queue.start(str(rid), prompt(rid))

    def cancel(self, rid: int) -> None:
        for cache in self.caches:
            cache.prefetch_queue.cancel(str(rid))

    def is_done(self, rid: int) -> bool:
        [answer] = {cache.prefetch_queue.is_done(str(rid), prompt(rid)) for cache in self.caches}
        return answer

    def steps_until_done(self, rid: int, at_most: int) -> int:
        """Return the steps from the first query of the request until it may run."""
        for waited in range(at_most + 1):
            if self.is_done(rid):
                return waited
            self.step()
        return at_most + 1

    def drain(self) -> None:
        """Make storage fast and run until all operations have ended."""
        for reader in self.readers:
            reader.query_steps = reader.page_steps = 1
            reader.spent_steps = min(reader.spent_steps, 1)
        for _ in range(400):
            if not any(cache.num_operations for cache in self.caches):
                break
            self.step()
        for cache, host in zip(self.caches, self.hosts, strict=True):
            assert not cache.num_operations
            assert not host.pool.num_held
            cache.clear()
            assert host.pool.num_free == 400


def prompt(rid: int) -> list[int]:
    return [rid] * (NUM_PAGES * PAGE_SIZE)


TIMES = st.sampled_from([1, 2, 7, NEVER_ENDS])
READERS = st.builds(Reader, query_steps=TIMES, page_steps=TIMES)
RATES = st.sampled_from([0.5, 1.0, 2.0])


@pytest.mark.soak
@settings(max_examples=num_examples(1), deadline=None)
@given(
    prefetch=st.sampled_from(["best_effort", "timeout", "wait_complete"]),
    readers=st.tuples(READERS, READERS),
    clock_rate=RATES,
    are_aborted=st.lists(st.booleans(), max_size=14),
    num_steps_before=st.integers(0, 12),
)
@example("best_effort", (Reader(NEVER_ENDS, 1), Reader(1, 1)), 1.0, [True] * 12, 1)
@example("timeout", (Reader(NEVER_ENDS, 1), Reader(1, 1)), 1.0, [False] * 12, 1)
@example("timeout", (Reader(1, NEVER_ENDS), Reader(1, 1)), 2.0, [], 3)
@example("wait_complete", (Reader(7, 1), Reader(7, 1)), 1.0, [True] * 12, 1)
def test_no_request_waits_longer_than_its_policy_allows(
    prefetch: str, readers: tuple[Reader, Reader], clock_rate: float, are_aborted: list[bool], num_steps_before: int
) -> None:
    policy = HiCachePolicy(prefetch=prefetch, prefetch_timeout_s=BASE_S, prefetch_timeout_s_per_ki_token=PER_KI_TOKEN_S)
    ranks = Ranks(policy, [Reader(reader.query_steps, reader.page_steps) for reader in readers], clock_rate)
    ranks.step()  # the ranks agree that all of them have storage
    for rid in range(len(are_aborted)):
        ranks.start(rid)
    for _ in range(num_steps_before):
        ranks.step()
    for rid, is_aborted in enumerate(are_aborted):
        if is_aborted:
            ranks.cancel(rid)
    num_begun = [reader.num_begun for reader in ranks.readers]
    last = len(are_aborted)
    ranks.start(last)
    load_steps = 2
    max_wait_s = BASE_S + PER_KI_TOKEN_S * NUM_PAGES * PAGE_SIZE / 1024
    bound_steps = {"best_effort": 0, "timeout": math.floor(max_wait_s / clock_rate) + 2}.get(prefetch, 300)
    waited = ranks.steps_until_done(last, bound_steps + load_steps)
    if prefetch != "wait_complete":
        assert waited <= bound_steps + load_steps
    elif waited <= bound_steps and all(are_aborted):
        # Per rank, only the query and the read of this request began. Aborted requests started no operation.
        assert all(now.num_begun - before <= 2 for now, before in zip(ranks.readers, num_begun, strict=True))
    for rid in range(last + 1):
        ranks.cancel(rid)
    ranks.drain()
