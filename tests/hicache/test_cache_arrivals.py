"""``by_layer`` loads: the pages are in the tree immediately and stay until the load has settled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import CacheIntegrityError
from scheduler_components.agreement import ParallelGroups
from scheduler_components.hicache import HiCachePolicy, HiCacheStepper, HiRadixCache, HostPool
from scheduler_components.page_operations import (
    CopyToDevice,
    CopyToHost,
    DiscardLoadBack,
    Instruction,
    IoEvent,
    LoadBackDone,
    WriteDone,
)
from scheduler_components.page_shape import PageShape

PAGE_SIZE = 2


class HeldMover:
    """Copies to the host end immediately, copies to the device when the test allows it."""

    def __init__(self) -> None:
        self.loads: list[CopyToDevice] = []
        self.forgotten: list[int] = []
        self.load_back_budget_pages = 64
        self._events: list[IoEvent] = []

    has_storage = False

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, CopyToHost):
                self._events.append(WriteDone(instruction.op, True))
            elif isinstance(instruction, CopyToDevice):
                self.loads.append(instruction)
            elif isinstance(instruction, DiscardLoadBack):
                self.forgotten.append(instruction.op)

    def poll(self) -> list[IoEvent]:
        events, self._events = self._events, []
        return events

    def end(self, *, is_ok: bool = True) -> None:
        self._events.append(LoadBackDone(self.loads[-1].op, is_ok))

    def close(self) -> None:
        """Nothing is held."""


class Rank:
    """A cache of twelve device pages; the prefix of six pages that all prompts begin with is on the host alone."""

    def __init__(self) -> None:
        host = HostPool(PageShape(num_layers=1, layer_page_bytes=1), 32)
        self.mover = HeldMover()
        self.cache = HiRadixCache(
            page_size=PAGE_SIZE,
            capacity_tokens=12 * PAGE_SIZE,
            host=host,
            num_host_pages=32,
            policy=HiCachePolicy(load="by_layer"),
        )
        self.stepper = HiCacheStepper(cache=self.cache, groups=ParallelGroups(), mover=self.mover)
        self.cache.insert(prompt(6), self.cache.allocate(6))
        for _ in range(3):
            self.step()
        self.cache.evict(6)

    def step(self) -> None:
        self.stepper.step()
        self.cache.check_integrity()

    def is_ready(self, rid: str, num_pages: int) -> bool:
        is_ready = self.cache.prefetch_queue.is_done(rid, prompt(num_pages))
        self.stepper.submit()
        self.cache.check_integrity()
        return is_ready

    def num_matched(self, num_pages: int = 6) -> int:
        return len(self.cache.match_prefix(prompt(num_pages)).pages)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def prompt(num_pages: int) -> list[int]:
    return list(range(num_pages * PAGE_SIZE))


def test_a_request_is_ready_when_its_load_begins_and_its_pages_may_not_be_evicted(rank: Rank) -> None:
    assert rank.num_matched() == 0
    assert rank.is_ready("r", 6)
    [load] = rank.mover.loads
    assert load.by_layer
    assert rank.cache.match_prefix(prompt(6)).pages == load.device_pages
    assert rank.cache.evict(12) == 0
    rank.mover.end()
    rank.step()
    assert rank.cache.evict(12) == 6


def test_another_request_may_split_a_run_that_is_being_loaded(rank: Rank) -> None:
    assert rank.is_ready("r", 6)
    assert rank.num_matched(4) == 4
    assert rank.is_ready("s", 4)
    rank.mover.end()
    rank.step()
    assert rank.num_matched() == 6
    assert len(rank.mover.loads) == 1


@pytest.mark.parametrize("is_ok", [True, False])
def test_no_run_is_loaded_below_a_load_that_might_fail(rank: Rank, is_ok: bool) -> None:
    assert rank.is_ready("short", 3)
    assert not rank.is_ready("long", 6)
    assert len(rank.mover.loads) == 1
    rank.mover.end(is_ok=is_ok)
    rank.step()
    assert rank.num_matched() == (3 if is_ok else 0)
    assert rank.mover.forgotten == ([] if is_ok else [rank.mover.loads[0].op])
    assert rank.is_ready("long", 6)
    assert len(rank.mover.loads[-1].device_pages) == (3 if is_ok else 6)


def test_a_request_waits_for_the_pages_beyond_the_load_budget(rank: Rank) -> None:
    rank.mover.load_back_budget_pages = 4
    rank.step()
    assert not rank.is_ready("r", 6)
    assert rank.num_matched() == 4
    assert not rank.is_ready("r", 6)
    rank.mover.end()
    rank.step()
    assert rank.is_ready("r", 6)
    assert [len(load.device_pages) for load in rank.mover.loads] == [4, 2]


def test_a_request_further_back_waits_for_whole_pages(rank: Rank) -> None:
    assert not rank.cache.prefetch_queue.is_done("r", prompt(6), is_next=False)
    rank.stepper.submit()
    assert not rank.mover.loads[0].by_layer
    assert rank.num_matched() == 0


def test_a_failed_load_of_pages_in_use_is_an_error_of_the_device(rank: Rank) -> None:
    """The scheduler must release the pages after its forward has failed; otherwise an error is raised."""
    assert rank.is_ready("r", 6)
    rank.cache.lock(rank.cache.match_prefix(prompt(6)).node)
    rank.mover.end(is_ok=False)
    with pytest.raises(CacheIntegrityError, match="is in use, but its pages do not hold what they should"):
        rank.stepper.step()
