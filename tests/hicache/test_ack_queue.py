"""An operation settles when it has ended on every rank, and what is shared is what every rank has."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduler_components.agreement import Proposal
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.prefetch import ActivePrefetches
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.values.page_operations import (
    BackupDone,
    BackupOutcome,
    IoEvent,
    LoadBackDone,
    LoadBackOutcome,
    StorageDetached,
    TierDecision,
    WriteDone,
    WriteOutcome,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages

DIGESTS = bytes(range(32)) * 2


class TwoControllers:
    """Copies and backups of two ranks, which end under control of the test."""

    def __init__(self) -> None:
        self.hosts = [SimulatedHostPages(10, rng=random.Random(0), failure=0.0) for _ in range(2)]
        self.ranks = [
            HiCacheController(host=host, prefetches=ActivePrefetches(policy=HiCachePolicy(), host=host))
            for host in self.hosts
        ]
        self.has_storage, self.load_back_budget_pages = [True, True], [7, 7]
        self._sync = InProcessGroups({0: [(0, 1)], 1: [(0, 1)]})
        self._step = 0

    def agree(self) -> list[list[TierDecision]]:
        self._step += 1
        proposals = {}
        for at, rank in enumerate(self.ranks):
            proposals[at] = Proposal("step", step=self._step)
            proposals[at].clock(0.0)
            rank.fill(
                proposals[at], has_storage=self.has_storage[at], load_back_budget_pages=self.load_back_budget_pages[at]
            )
        agreed = self._sync.reduce(proposals)
        return [rank.apply(agreed[at]) for at, rank in enumerate(self.ranks)]


BEGIN: dict[str, tuple[Callable[[HiCacheController], int], Callable[[int, bool], IoEvent]]] = {
    "writes": (lambda rank: rank.write([1, 2]), WriteDone),
    "loads": (lambda rank: rank.load_back([1, 2], [3, 4]), LoadBackDone),
    "backups": (lambda rank: rank.write_to_storage(DIGESTS, [1, 2]), BackupDone),
}


@pytest.mark.parametrize("is_ok", [True, False])
@pytest.mark.parametrize("kind", BEGIN)
def test_an_operation_settles_after_it_has_ended_on_every_rank(kind: str, is_ok: bool) -> None:
    """Otherwise a rank gives pages back that a copy of its own still reads or writes."""
    it = TwoControllers()
    begin, done = BEGIN[kind]
    numbers = [begin(rank) for rank in it.ranks]
    it.ranks[0].handle(done(numbers[0], is_ok))
    assert it.agree() == [[], []]
    assert [rank.num_operations for rank in it.ranks] == [1, 1]
    it.ranks[1].handle(done(numbers[1], True))
    for [settled] in it.agree():
        assert isinstance(settled, WriteOutcome | LoadBackOutcome | BackupOutcome)
        assert (settled.host_pages != () if isinstance(settled, WriteOutcome) else settled.is_ok) == is_ok
    assert [rank.num_operations for rank in it.ranks] == [0, 0]


def test_agreed_state_is_the_minimum_of_all_ranks() -> None:
    it = TwoControllers()
    it.load_back_budget_pages = [5, 3]
    it.agree()
    assert [(rank.has_storage, rank.load_back_budget_pages) for rank in it.ranks] == [(True, 3)] * 2
    it.has_storage = [True, False]
    assert it.agree() == [[StorageDetached()]] * 2
    assert [rank.has_storage for rank in it.ranks] == [False, False]
    it.has_storage = [False, True]
    it.agree()
    assert [rank.has_storage for rank in it.ranks] == [False, False]
