"""Agreement of real processes over gloo, TP2 x CP2 and CP2 alone: equal values, or an error with its cause."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from kit.forked_ranks import ForkedRanks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.ranks,
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="needs torch: pip install scheduler-components[torch]"
    ),
]

ODD_RANK = 2
SHORT_S = 3.0  # a timeout that a lost rank makes the others wait for
LONG_S = 30.0


class Ranks(ForkedRanks):
    """Ranks that run scenarios. They meet through a file, so no port is chosen here."""

    def __init__(self, folder: Path, scenarios: dict[str, float], *, size: int, cp_size: int, dp_size: int = 1) -> None:
        super().__init__(folder, size, run_rank, folder, size, dp_size, cp_size, [*scenarios.items()])

    def answer(self, rank: int) -> dict[str, Any]:
        self.wait(rank)
        return self.read(rank)

    def read(self, rank: int) -> dict[str, Any]:
        """Return the answers to the scenarios that the rank has finished."""
        answer: dict[str, Any] = json.loads((self.folder / f"{rank}.json").read_text())
        return answer


def run_rank(*args: Any) -> None:
    """Import torch in the rank only."""
    from kit import gloo_rank

    gloo_rank.main(*args)


@pytest.fixture(scope="module")
def tp2_cp2(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the answers of each rank. One start of four processes runs all. The odd rank stops in the last one."""
    scenarios = {"long": LONG_S, "diverge": LONG_S, "agree": LONG_S, "part": SHORT_S, "stopped": SHORT_S}
    with Ranks(tmp_path_factory.mktemp("tp2_cp2"), scenarios, size=4, cp_size=2) as ranks:
        survivors = {rank: ranks.answer(rank) for rank in range(4) if rank != ODD_RANK}
        return [survivors.get(rank) or ranks.read(rank) for rank in range(4)]


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any] | None]:
    """Return the answers of two CP2 replicas. The odd rank, which is in the second one, is killed in the end."""
    with Ranks(
        tmp_path_factory.mktemp("two_replicas"), {"agree": LONG_S, "killed": SHORT_S}, size=4, dp_size=2, cp_size=2
    ) as ranks:
        return [None if rank == ODD_RANK else ranks.answer(rank) for rank in range(4)]


def test_tp2_cp2_ranks_get_the_answers_of_the_whole_grid_on_two_threads_at_once(tp2_cp2: list[dict[str, Any]]) -> None:
    """Groups opened at run time work after others were closed or diverged."""
    each_thread = [19, 3, False, True, True, False, 2 * 21]  # 20 steps and a barrier, one packed reduction a hop
    assert [found["agree"] for found in tp2_cp2] == [[each_thread, each_thread]] * 4


def test_cp2_ranks_get_the_answers_of_both(two_replicas: list[Any]) -> None:
    first, second = [19, 1, False, True, True, False, 21], [21, 3, True, False, True, False, 21]
    assert [two_replicas[rank]["agree"] for rank in (0, 1, 3)] == [[first] * 2, [first] * 2, [second] * 2]


def test_a_long_proposal_takes_one_more_reduction_per_hop(tp2_cp2: list[dict[str, Any]]) -> None:
    assert [found["long"] for found in tp2_cp2] == [[True, 4]] * 4


def test_different_proposals_raise_on_every_rank_without_aborting(tp2_cp2: list[dict[str, Any]]) -> None:
    for found in tp2_cp2:
        assert found["diverge"]["diverged"] == 1
        assert found["diverge"]["places"] == {str(rank): "'prefetch' at step 5, call 1" for rank in range(4)}


def expect_lost(found: dict[str, Any]) -> None:
    assert found["timeout"] == ["landed", 7, [ODD_RANK]]
    assert "'landed' at step 7: not agreed within 3 s; missing ranks: 2" in found["text"]


@pytest.mark.soak_only  # in make test, a stopped rank of the same world, and a killed one of a smaller world
def test_a_killed_rank_is_named_on_every_survivor(tmp_path: Path) -> None:
    with Ranks(tmp_path, {"killed": SHORT_S}, size=4, cp_size=2) as ranks:
        for rank in (0, 1, 3):
            expect_lost(ranks.answer(rank)["killed"])


def test_a_stopped_rank_is_named_on_every_survivor(tp2_cp2: list[dict[str, Any]]) -> None:
    for rank in (0, 1, 3):
        expect_lost(tp2_cp2[rank]["stopped"])


def test_another_replica_does_not_notice(two_replicas: list[Any]) -> None:
    assert [two_replicas[rank]["killed"] for rank in (0, 1)] == [1, 1]
    assert two_replicas[3]["killed"]["timeout"] == ["landed", 7, [ODD_RANK]]


def test_a_rank_that_waits_in_other_groups_is_missing(tp2_cp2: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(tp2_cp2):
        missing = [0, 1, 3] if rank == ODD_RANK else [ODD_RANK]
        assert found["part"]["timeout"] == ["landed", 3, missing]
