"""Agreement of real processes over gloo, TP2 x CP2 and CP2 alone: one answer, or an error that says why."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.ranks,
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="needs torch: pip install scheduler-components[torch]"
    ),
]

SCRIPT = Path(__file__).parent / "kit" / "gloo_rank.py"
ODD_RANK = 2
PATIENCE_S = 90


@contextmanager
def ranks(
    folder: Path, scenarios: list[str], *, size: int, cp_size: int, dp_size: int = 1, timeout_s: float = 30.0
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one process a rank; they meet through a file, so no port is chosen here."""
    processes = []
    try:
        for rank in range(size):
            arguments = [rank, size, dp_size, cp_size, folder / "rendezvous", timeout_s, *scenarios]
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), *map(str, arguments)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def tp2_cp2(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each rank's answers; one start of four processes serves all that no rank has to die for."""
    folder = tmp_path_factory.mktemp("tp2_cp2")
    with ranks(folder, ["agree", "long", "diverge", "agree"], size=4, cp_size=2) as processes:
        return [answer_of(process) for process in processes]


@pytest.fixture(scope="module")
def cp2(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with ranks(tmp_path_factory.mktemp("cp2"), ["agree"], size=2, cp_size=2) as processes:
        return [answer_of(process) for process in processes]


def test_tp2_cp2_ranks_get_the_answers_of_the_whole_grid_on_two_threads_at_once(tp2_cp2: list[dict[str, Any]]) -> None:
    """Groups opened at run time work after others were closed or diverged."""
    each_thread = [19, 3, False, True, True, False, 2 * 21]  # 20 steps and a barrier, one packed reduction a hop
    assert [found["agree"] for found in tp2_cp2] == [[each_thread, each_thread]] * 4


def test_cp2_ranks_get_the_answers_of_both(cp2: list[dict[str, Any]]) -> None:
    each_thread = [19, 1, False, True, True, False, 21]
    assert [found["agree"] for found in cp2] == [[each_thread, each_thread]] * 2


def test_a_long_proposal_takes_one_more_reduction_per_hop(tp2_cp2: list[dict[str, Any]]) -> None:
    assert [found["long"] for found in tp2_cp2] == [[True, 4]] * 4


def test_different_proposals_raise_on_every_rank_without_aborting(tp2_cp2: list[dict[str, Any]]) -> None:
    for found in tp2_cp2:
        assert found["diverge"]["diverged"] == 1
        assert found["diverge"]["places"] == {str(rank): "'prefetch' at step 5, call 1" for rank in range(4)}


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_rank_is_named_on_every_survivor(tmp_path: Path, how: str) -> None:
    with ranks(tmp_path, [how], size=4, cp_size=2, timeout_s=3) as processes:
        for rank in (0, 1, 3):
            found = answer_of(processes[rank])[how]
            assert found["timeout"] == ["landed", 7, [ODD_RANK]]
            assert "'landed' at step 7: not agreed within 3 s; missing ranks: 2" in found["text"]


def test_another_replica_does_not_notice(tmp_path: Path) -> None:
    with ranks(tmp_path, ["killed"], size=4, dp_size=2, cp_size=2, timeout_s=3) as processes:
        found = [None if rank == ODD_RANK else answer_of(process)["killed"] for rank, process in enumerate(processes)]
    assert found[:2] == [1, 1]
    assert found[3]["timeout"] == ["landed", 7, [ODD_RANK]]


def test_a_rank_that_waits_in_other_groups_is_missing(tmp_path: Path) -> None:
    with ranks(tmp_path, ["part"], size=4, cp_size=2, timeout_s=3) as processes:
        found = [answer_of(process)["part"] for process in processes]
    for rank, answer in enumerate(found):
        missing = [0, 1, 3] if rank == ODD_RANK else [ODD_RANK]
        assert answer["timeout"] == ["landed", 3, missing]
