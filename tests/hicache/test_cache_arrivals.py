"""``by_layer`` loads: the pages are in the tree immediately and stay until the load has settled."""

from __future__ import annotations

import pytest
from kit.hicache_rank import ScriptedMover, SteppedHiCacheRank, prompt

from scheduler_components import CacheIntegrityError
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.values.page_operations import DiscardLoadBack, LoadBackDone


@pytest.fixture
def rank() -> SteppedHiCacheRank:
    """The prefix of six pages that all prompts begin with is on the host alone."""
    mover = ScriptedMover(ends_writes=True, has_storage=False, load_back_budget_pages=64)
    rank = SteppedHiCacheRank(HiCachePolicy(load="by_layer"), mover=mover, num_device_pages=12, num_host_pages=32)
    rank.compute(0, 6)
    for _ in range(3):
        rank.step()
    rank.cache.evict(6)
    return rank


def is_ready(rank: SteppedHiCacheRank, rid: str, num_pages: int) -> bool:
    is_ready = rank.cache.prefetch_queue.is_done(rid, prompt(0, num_pages))
    rank.stepper.submit()
    rank.cache.check_integrity()
    return is_ready


def num_matched(rank: SteppedHiCacheRank, num_pages: int = 6) -> int:
    return len(rank.cache.match_prefix(prompt(0, num_pages)).pages)


def end_load(rank: SteppedHiCacheRank, *, is_ok: bool = True) -> None:
    """End the newest load and step."""
    rank.step(LoadBackDone(rank.mover.loads[-1].op, is_ok))


def test_a_request_is_ready_when_its_load_begins_and_its_pages_may_not_be_evicted(rank: SteppedHiCacheRank) -> None:
    assert num_matched(rank) == 0
    assert is_ready(rank, "r", 6)
    [load] = rank.mover.loads
    assert load.by_layer
    assert rank.cache.match_prefix(prompt(0, 6)).pages == load.device_pages
    assert rank.cache.evict(12) == 0
    end_load(rank)
    assert rank.cache.evict(12) == 6


def test_another_request_may_split_a_run_that_is_being_loaded(rank: SteppedHiCacheRank) -> None:
    assert is_ready(rank, "r", 6)
    assert num_matched(rank, 4) == 4
    assert is_ready(rank, "s", 4)
    end_load(rank)
    assert num_matched(rank) == 6
    assert len(rank.mover.loads) == 1


@pytest.mark.parametrize("is_ok", [True, False])
def test_no_run_is_loaded_below_a_load_that_might_fail(rank: SteppedHiCacheRank, is_ok: bool) -> None:
    assert is_ready(rank, "short", 3)
    assert not is_ready(rank, "long", 6)
    assert len(rank.mover.loads) == 1
    end_load(rank, is_ok=is_ok)
    assert num_matched(rank) == (3 if is_ok else 0)
    discarded = [each.op for each in rank.mover.submitted if isinstance(each, DiscardLoadBack)]
    assert discarded == ([] if is_ok else [rank.mover.loads[0].op])
    assert is_ready(rank, "long", 6)
    assert len(rank.mover.loads[-1].device_pages) == (3 if is_ok else 6)


def test_a_request_waits_for_the_pages_beyond_the_load_budget(rank: SteppedHiCacheRank) -> None:
    rank.mover.load_back_budget_pages = 4
    rank.step()
    assert not is_ready(rank, "r", 6)
    assert num_matched(rank) == 4
    assert not is_ready(rank, "r", 6)
    end_load(rank)
    assert is_ready(rank, "r", 6)
    assert [len(load.device_pages) for load in rank.mover.loads] == [4, 2]


def test_a_request_further_back_waits_for_whole_pages(rank: SteppedHiCacheRank) -> None:
    assert not rank.cache.prefetch_queue.is_done("r", prompt(0, 6), is_next=False)
    rank.stepper.submit()
    assert not rank.mover.loads[0].by_layer
    assert num_matched(rank) == 0


def test_a_failed_load_of_pages_in_use_is_an_error_of_the_device(rank: SteppedHiCacheRank) -> None:
    """The scheduler must release the pages after its forward has failed; otherwise an error is raised."""
    assert is_ready(rank, "r", 6)
    rank.cache.lock(rank.cache.match_prefix(prompt(0, 6)).node)
    with pytest.raises(CacheIntegrityError, match="is in use, but its pages do not hold what they should"):
        end_load(rank, is_ok=False)
