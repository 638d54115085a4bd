"""An operation settles when it has ended on every rank, and what is shared is what every rank has."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduler_components.hicache import HiCachePolicy, InProcessSync, Proposal
from scheduler_components.hicache.controller import HiCacheController, PrefetchLanes
from scheduler_components.page_operations import (
    BackupDone,
    BackupSettled,
    Decision,
    IoEvent,
    LoadDone,
    LoadSettled,
    StorageLost,
    WriteDone,
    WriteSettled,
)
from scheduler_components.reference.device import SimulatedHostPages

DIGESTS = bytes(range(32)) * 2


class TwoControllers:
    """Two ranks' copies and backups, of which each ends when it is told to."""

    def __init__(self) -> None:
        self.hosts = [SimulatedHostPages(10, rng=random.Random(0), failure=0.0) for _ in range(2)]
        self.ranks = [
            HiCacheController(host=host, prefetches=PrefetchLanes(policy=HiCachePolicy(), host=host))
            for host in self.hosts
        ]
        self.has_storage, self.load_room_pages = [True, True], [7, 7]
        self._sync = InProcessSync({0: [(0, 1)], 1: [(0, 1)]})
        self._step = 0

    def agree(self) -> list[list[Decision]]:
        self._step += 1
        proposals = {}
        for at, rank in enumerate(self.ranks):
            proposals[at] = Proposal("step", step=self._step)
            rank.fill(
                proposals[at],
                has_storage=self.has_storage[at],
                load_room_pages=self.load_room_pages[at],
                now_s=0.0,
            )
        agreed = self._sync.agree(proposals)
        return [rank.settle(agreed[at]) for at, rank in enumerate(self.ranks)]


BEGIN: dict[str, tuple[Callable[[HiCacheController], int], Callable[[int, bool], IoEvent]]] = {
    "writes": (lambda rank: rank.write([1, 2]), WriteDone),
    "loads": (lambda rank: rank.load([1, 2], [3, 4]), LoadDone),
    "backups": (lambda rank: rank.back_up(DIGESTS, [1, 2]), BackupDone),
}


@pytest.mark.parametrize("is_good", [True, False])
@pytest.mark.parametrize("kind", BEGIN)
def test_nothing_is_settled_before_it_has_ended_on_every_rank(kind: str, is_good: bool) -> None:
    """Otherwise a rank gives pages back that a copy of its own still reads or writes."""
    it = TwoControllers()
    begin, done = BEGIN[kind]
    numbers = [begin(rank) for rank in it.ranks]
    it.ranks[0].handle(done(numbers[0], is_good))
    assert it.agree() == [[], []]
    assert [rank.num_operations for rank in it.ranks] == [1, 1]
    it.ranks[1].handle(done(numbers[1], True))
    for [settled] in it.agree():
        assert isinstance(settled, WriteSettled | LoadSettled | BackupSettled)
        assert (settled.host_pages != () if isinstance(settled, WriteSettled) else settled.is_good) == is_good
    assert [rank.num_operations for rank in it.ranks] == [0, 0]


def test_what_every_rank_has_is_shared() -> None:
    it = TwoControllers()
    it.load_room_pages = [5, 3]
    it.agree()
    assert [(rank.shared.has_storage, rank.shared.load_room_pages) for rank in it.ranks] == [(True, 3)] * 2
    it.has_storage = [True, False]
    assert it.agree() == [[StorageLost()]] * 2
    assert [rank.shared.has_storage for rank in it.ranks] == [False, False]
    it.has_storage = [False, True]
    it.agree()
    assert [rank.shared.has_storage for rank in it.ranks] == [False, False]
