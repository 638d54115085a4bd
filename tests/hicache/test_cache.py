"""One rank's hierarchical cache: matches of requests, refused calls, events for a late reader."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from kit.hicache_rank import PAGE_SIZE, HiCacheRank, prompt

from scheduler_components import (
    AllBlocksCleared,
    BlockStored,
    CacheIntegrityError,
    ConfigError,
    OutOfPagesError,
    ParallelState,
)
from scheduler_components.agreement.thread_sync import ThreadSyncHub
from scheduler_components.errors import SettingsDivergenceError
from scheduler_components.events import Tier
from scheduler_components.hicache import (
    HiCachePolicy,
    HiCacheStepper,
    HiRadixCache,
    KeySpace,
    MemoryPageStore,
    Placement,
)
from scheduler_engine.device.hicache_sim import FaultRates, SimulatedHostPages, SimulatedMover


def six_pages(policy: HiCachePolicy | None = None) -> HiCacheRank:
    """Six device pages, eight host pages, no storage."""
    policy = policy if policy is not None else HiCachePolicy()
    return HiCacheRank(policy, num_device_pages=6, num_host_pages=8, has_storage=False, record=True)


def test_pages_that_a_request_computes_while_they_are_loaded_are_kept_once() -> None:
    it = six_pages()
    it.compute(0, 2)
    it.end_copies_and_step()
    it.cache.evict(2)
    assert not it.cache.prefetch_queue.is_done("r", prompt(0, 2))
    it.compute(0, 1)
    it.end_copies_and_step()
    assert it.pages_on() == (2, 2, 0)
    assert it.cache.free_tokens == 4 * PAGE_SIZE


def test_a_node_without_a_host_copy_is_dropped_at_eviction() -> None:
    it = six_pages()
    it.compute(0, 4)
    it.end_copies_and_step(is_ok=False)
    assert it.pages_on() == (4, 0, 0)
    it.cache.evict(4)
    assert it.pages_on() == (0, 0, 0)
    assert it.cache.stats().pages_dropped == 4
    assert it.host.pool.num_free == 8


def test_a_host_tier_has_at_least_one_page() -> None:
    host = SimulatedHostPages(1, rng=random.Random(0), failure=0.0)
    assert HiRadixCache(page_size=1, capacity_tokens=4, host=host, num_host_pages=1).num_pages_on(Tier.HOST) == 0
    with pytest.raises(ConfigError) as caught:
        HiRadixCache(page_size=1, capacity_tokens=4, host=host, num_host_pages=0)
    assert str(caught.value) == "num_host_pages=0: is too small for a host tier; give at least 1, or use RadixCache"


def test_pages_of_a_transfer_are_not_evicted() -> None:
    it = six_pages()
    it.compute(0, 6)
    assert it.cache.evictable_tokens == 0
    with pytest.raises(OutOfPagesError):
        it.cache.allocate(1)
    it.end_copies_and_step()
    assert it.cache.evictable_tokens == 6 * PAGE_SIZE


def test_a_late_reader_receives_the_content_of_every_tier() -> None:
    """More events than are kept: the present content takes their place, tier by tier."""
    it = six_pages()
    for chat in range(12):
        it.compute(chat, 4)
        it.end_copies_and_step()
    assert it.cache.num_event_collapses == 1
    first, *rest = it.cache.take_events()
    assert first == AllBlocksCleared()
    received: dict[str | None, set[int]] = {None: set(), "CPU": set()}
    for event in rest:
        assert isinstance(event, BlockStored)
        received[event.medium] |= {*event.block_hashes}
    assert received == {None: set(it.cache.block_hashes()), "CPU": set(it.cache.block_hashes(Tier.HOST))}


def test_a_host_full_of_device_pages_accepts_no_more() -> None:
    it = six_pages()
    it.host.pool.allocate(5)  # this rank has fewer free pages than the common count
    it.compute(0, 4)
    it.end_copies_and_step()
    assert it.pages_on() == (4, 0, 0)
    assert it.cache.stats().pages_not_written == 4


WRONG_CALLS: dict[str, Callable[[HiRadixCache], object]] = {
    "clearing what is under way": lambda cache: cache.clear(),
    "unlocking what is not locked": lambda cache: [cache.unlock(cache.match_prefix(prompt(1, 2)).node)] * 2,
    "freeing what is free": lambda cache: cache.free([5]),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_changes_nothing(name: str) -> None:
    it = six_pages()
    it.compute(1, 2)
    it.end_copies_and_step()
    it.compute(0, 2)
    before = it.cache.state_digest
    with pytest.raises(CacheIntegrityError):
        WRONG_CALLS[name](it.cache)
    assert it.cache.state_digest == before
    it.cache.check_integrity()


def test_a_node_that_left_the_device_cannot_be_locked() -> None:
    it = six_pages()
    it.compute(0, 2)
    it.end_copies_and_step()
    node = it.cache.match_prefix(prompt(0, 2)).node
    it.cache.evict(2)
    with pytest.raises(CacheIntegrityError, match="not on the device"):
        it.cache.lock(node)


@pytest.mark.parametrize("field, value", [("page_size", 0), ("capacity_tokens", 1), ("num_host_pages", 0)])
def test_an_invalid_size_is_refused(field: str, value: int) -> None:
    host = SimulatedHostPages(8, rng=random.Random(0), failure=0.0)
    sizes = {"page_size": 2, "capacity_tokens": 8, "num_host_pages": 8} | {field: value}
    with pytest.raises(ConfigError) as raised:
        HiRadixCache(host=host, **sizes)
    assert raised.value.field == field


def test_insert_checks_pages_before_it_changes_anything() -> None:
    it = six_pages()
    with pytest.raises(ConfigError, match="give 2 for 4 tokens"):
        it.cache.insert(prompt(0, 2), it.cache.allocate(1))
    with pytest.raises(CacheIntegrityError):
        it.cache.insert(prompt(0, 2), [4, 5])
    assert it.pages_on() == (0, 0, 0)


FIELDS: dict[str, dict[str, object]] = {
    "page_size": {"page_size": 4},
    "capacity_tokens": {"capacity_tokens": 6},
    "num_host_pages": {"num_host_pages": 4},
    "write": {"policy": HiCachePolicy(write="write_back")},
    "prefetch_retry_steps": {"policy": HiCachePolicy(prefetch_retry_steps=0)},
    "prefetch_threshold_pages": {"policy": HiCachePolicy(prefetch_threshold_pages=2)},
    "key namespace": {},
}


KEYS = KeySpace(
    model="model", dtype="digest", page_size=2, layout="digest", placement=Placement(), parallel=ParallelState()
)


@pytest.mark.parametrize("field", FIELDS)
def test_the_first_step_compares_the_settings_of_all_ranks(field: str) -> None:
    hub = ThreadSyncHub({0: ((0, 1),), 1: ((0, 1),)}, timeout_s=60)

    def first_step(rank: int) -> SettingsDivergenceError:
        host = SimulatedHostPages(8, rng=random.Random(0), failure=0.0)
        sizes = {"page_size": 2, "capacity_tokens": 8, "num_host_pages": 8} | (FIELDS[field] if rank else {})
        mover = SimulatedMover(rng=random.Random(0), rates=FaultRates(), store=MemoryPageStore(1 << 20), keys=KEYS)
        key_space = f"model-{rank}" if field == "key namespace" else "model"
        stepper = HiCacheStepper(
            cache=HiRadixCache(host=host, **sizes),
            groups=hub.parallel_groups(rank),
            mover=mover,
            settings={"key namespace": key_space},
        )
        with pytest.raises(SettingsDivergenceError) as raised:
            stepper.step()
        return raised.value

    with ThreadPoolExecutor(2) as threads:
        for error in threads.map(first_step, (0, 1)):
            assert list(error.settings) == [field]
            assert list(error.settings[field]) == [0, 1]
