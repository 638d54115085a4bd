"""A check costs what runs: a pool of ten million free slots is checked like one of ten."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.checks.pool_stats_observer import SlotPool
from scheduler_components.invariant_checker import find_pool_violations
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import HeldCount, PageHolding
from scheduler_engine.engine.scheduler.integrity import RequestSlotPool

MANY = 10**7
MAX_BYTES = 200_000


@dataclass
class ListedHolders:
    """Holders with these slots."""

    held: list[list[int]]

    def count_held(self) -> HeldCount:
        return HeldCount(sum(map(len, self.held)))

    def holdings(self) -> list[PageHolding]:
        return [PageHolding(f"r{number}", "request", slots) for number, slots in enumerate(self.held)]


def slot_pool(total: int, free: Sequence[int], held: list[list[int]]) -> SlotPool:
    return SlotPool(name="req", total=total, holders=ListedHolders(held), free=free)


def peak_bytes(pool: SlotPool | RequestSlotPool) -> int:
    tracemalloc.start()
    try:
        find_pool_violations(pool)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_check_of_free_slots_takes_no_memory_for_each() -> None:
    assert peak_bytes(slot_pool(MANY, range(3, MANY), [[0, 1], [2]])) < MAX_BYTES
    assert peak_bytes(RequestSlotPool(queues=RequestQueues(max_running_requests=MANY))) < MAX_BYTES
    lossy = slot_pool(MANY, range(5, MANY), [[0, 1], [2]])
    assert peak_bytes(lossy) < MAX_BYTES
    [lost] = [each for each in find_pool_violations(lossy) if each.rule == "lost"]
    assert lost.pages == (3, 4)


@given(
    total=st.integers(0, 12),
    start=st.integers(-2, 14),
    length=st.integers(0, 14),
    held=st.lists(st.lists(st.integers(-1, 13), max_size=4), max_size=4),
)
def test_a_range_of_free_slots_gives_the_violations_of_a_list(
    total: int, start: int, length: int, held: list[list[int]]
) -> None:
    free = range(start, start + length)
    as_range = find_pool_violations(slot_pool(total, free, held))
    as_list = find_pool_violations(slot_pool(total, list(free), held))
    assert as_range == as_list
    owned = {slot for slots in held for slot in slots}
    lost = {page for each in as_range if each.rule == "lost" for page in each.pages}
    assert lost == set(range(total)) - owned - set(free)
    wrong = {page for each in as_range if each.rule == "no-such-page" for page in each.pages}
    assert wrong == (owned | set(free)) - set(range(total))
