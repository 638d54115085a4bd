"""A step of a rank, by hand: its facts go to the agreement, what was agreed is carried out, its mover gets the rest."""

from __future__ import annotations

import pytest
from kit.hicache_rank import SteppedHiCacheRank, prompt

from scheduler_components.errors import TierDivergenceError
from scheduler_components.events import Tier
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    LoadBackDone,
    QueryDone,
    QueryStorage,
    ReleaseStorage,
    WriteDone,
    WriteToStorage,
)

PROMPT = prompt(0, 2)


def test_a_page_goes_down_and_up_again_a_step_at_a_time() -> None:
    it = SteppedHiCacheRank(HiCachePolicy())
    it.compute(0, 2)
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
    it = SteppedHiCacheRank(HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1))
    it.compute(0, 2)
    [copy] = it.step()
    it.cache.prefetch_queue.start("r", prompt(9, 1))
    query, write = it.step(WriteDone(copy.op, True))
    assert (type(query), type(write)) == (QueryStorage, WriteToStorage)
    it.mover.has_storage = False
    assert it.step() == [CancelPrefetch(query.op)]
    assert it.step(BackupDone(write.op, True)) == [], "a question is under way"
    assert it.step(QueryDone(query.op, 0)) == [ReleaseStorage()]
    it.mover.has_storage = True
    assert it.step() == []


def test_the_time_of_a_prefetch_is_this_ranks_clock() -> None:
    it = SteppedHiCacheRank(HiCachePolicy(prefetch="timeout", prefetch_timeout_s=1.0, prefetch_threshold_pages=1))
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
    it = SteppedHiCacheRank(HiCachePolicy())
    it.step()
    it.groups.is_alike = False
    it.compute(0, 2)
    with pytest.raises(TierDivergenceError, match=r"^step 2: ranks hold different pages") as caught:
        it.step()
    assert (caught.value.step, caught.value.digest) == (2, it.cache.state_digest)
    assert it.mover.take() == []
