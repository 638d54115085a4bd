"""A step of a rank, by hand: its facts go to the agreement, what was agreed is carried out, its mover gets the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal
from scheduler_components.errors import TierDivergenceError
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy, HiCacheStepper, HiRadixCache
from scheduler_components.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadBackDone,
    QueryDone,
    QueryStorage,
    ReleaseStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_components.reference.device.hicache_sim import SimulatedHostPages

PROMPT = list(range(4))


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


class RecordingMover:
    """A mover whose events, storage and room are what the test says."""

    def __init__(self) -> None:
        self.has_storage = True
        self.load_back_budget_pages = 8
        self.events: list[IoEvent] = []
        self.submitted: list[Instruction] = []

    def submit(self, instructions: Sequence[Instruction]) -> None:
        self.submitted += instructions

    def poll(self) -> list[IoEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        """Do nothing."""

    def take(self) -> list[Instruction]:
        taken, self.submitted = self.submitted, []
        return taken


class Rank:
    def __init__(self, policy: HiCachePolicy) -> None:
        host = SimulatedHostPages(8, rng=random.Random(0), failure=0.0)
        self.cache = HiRadixCache(page_size=2, capacity_tokens=8, host=host, num_host_pages=8, policy=policy)
        self.mover, self.groups, self.now_s = RecordingMover(), RecordingGroups(), 0.0
        self.stepper = HiCacheStepper(
            cache=self.cache, groups=self.groups, mover=self.mover, settings={"model": "m"}, clock=lambda: self.now_s
        )

    def step(self, *events: IoEvent) -> list[Instruction]:
        """Let these things have happened; returns what the mover gets."""
        self.mover.events = list(events)
        self.stepper.step()
        return self.mover.take()

    def compute(self) -> None:
        self.cache.insert(PROMPT, self.cache.allocate(2))


def test_a_page_goes_down_and_up_again_a_step_at_a_time() -> None:
    it = Rank(HiCachePolicy())
    it.compute()
    [copy] = it.step()
    assert isinstance(copy, CopyToHost)
    [write] = it.step(WriteDone(copy.op, True))
    assert isinstance(write, WriteToStorage)
    assert it.step(BackupDone(write.op, True)) == []
    assert [it.cache.num_pages_on(tier) for tier in Tier] == [2, 2, 2]
    it.cache.evict(2)
    it.mover.load_back_budget_pages = 0
    it.step()
    assert it.cache.prefetch_queue.is_done("r", PROMPT), "no room, and no load that will give some back"
    it.mover.load_back_budget_pages = 8
    it.step()
    assert not it.cache.prefetch_queue.is_done("s", PROMPT)
    [load] = it.step()
    assert isinstance(load, CopyToDevice)
    assert it.step(LoadBackDone(load.op, True)) == []
    assert it.cache.prefetch_queue.is_done("s", PROMPT)
    assert [it.cache.num_pages_on(tier) for tier in Tier] == [2, 2, 2]
    assert it.stepper.num_steps == 7
    assert [step for _, step in it.groups.asked] == list(range(8))
    assert it.groups.asked[0] == ("hicache settings", 0)
    assert len({operation for operation, _ in it.groups.asked[1:]}) == 1


def test_storage_is_released_when_no_operation_uses_it() -> None:
    it = Rank(HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1))
    it.compute()
    [copy] = it.step()
    it.cache.prefetch_queue.start("r", [9, 9])
    query, write = it.step(WriteDone(copy.op, True))
    assert (type(query), type(write)) == (QueryStorage, WriteToStorage)
    it.mover.has_storage = False
    assert it.step() == [CancelPrefetch(query.op)]
    assert it.step(BackupDone(write.op, True)) == [], "a question is under way"
    assert it.step(QueryDone(query.op, 0)) == [ReleaseStorage()]
    it.mover.has_storage = True
    assert it.step() == []


def test_the_time_of_a_prefetch_is_this_ranks_clock() -> None:
    it = Rank(HiCachePolicy(prefetch="timeout", prefetch_timeout_s=1.0, prefetch_threshold_pages=1))
    it.step()
    it.cache.prefetch_queue.start("r", PROMPT)
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", PROMPT)
    it.now_s = 0.9
    it.step()
    assert not it.cache.prefetch_queue.is_done("r", PROMPT)
    it.now_s = 1.1
    it.step()
    assert it.cache.prefetch_queue.is_done("r", PROMPT)


def test_ranks_with_different_pages_raise_in_the_same_step() -> None:
    it = Rank(HiCachePolicy())
    it.step()
    it.groups.is_alike = False
    it.compute()
    with pytest.raises(TierDivergenceError, match=r"^step 2: ranks hold different pages") as caught:
        it.step()
    assert (caught.value.step, caught.value.digest) == (2, it.cache.state_digest)
    assert it.mover.take() == []
