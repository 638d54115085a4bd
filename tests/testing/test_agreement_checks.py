"""The checks of waiting queues pass on ``AgreedQueue``, over threads and over gloo, and find each broken queue."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from kit.waiting_ranks import AgreedRank, GrammarRank, LoraRank, open_agreed_rank

from scheduler_components import ParallelState
from scheduler_components.testing import AGREEMENT_CHECKS, ConformanceError, ThreadRanks
from scheduler_components.testing import agreement_checks as checks
from scheduler_components.testing.interfaces import OpenWaitingRank, RankRunner

TWO_RANKS = ParallelState.from_tp_rank(0, tp_size=2)
Check = Callable[[OpenWaitingRank, RankRunner], None]


@pytest.mark.parametrize("check", AGREEMENT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_agreed_queue_passes(check: Check) -> None:
    check(open_agreed_rank, ThreadRanks())


CP2_PP2 = ParallelState.from_tp_rank(0, tp_size=2, attn_cp_size=2, pp_size=2)


@pytest.mark.parametrize("check", AGREEMENT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("open_rank", [GrammarRank, LoraRank])
def test_the_queues_of_grammars_and_adapters_pass(open_rank: OpenWaitingRank, check: Check) -> None:
    check(open_rank, ThreadRanks(worlds=[CP2_PP2]))


IN_MAKE_TEST = (checks.check_ranks_let_the_same_requests_go, checks.check_dead_rank_ends_in_an_error)


@pytest.mark.torch
@pytest.mark.ranks
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize(
    "check",
    [pytest.param(each, marks=() if each in IN_MAKE_TEST else pytest.mark.soak_only) for each in AGREEMENT_CHECKS],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_the_agreed_queue_passes_over_gloo(check: Check) -> None:
    from scheduler_components.testing import TorchRanks

    check(open_agreed_rank, TorchRanks())


def test_a_failure_names_the_ranks_the_history_and_both_sequences() -> None:
    class Alone(AgreedRank):
        """Lets a request go when this rank is ready."""

        def report(self, rid: str, is_ready: bool) -> None:
            self.queue.cancel(rid)

    with pytest.raises(ConformanceError) as error:
        checks.check_no_request_waits_without_bound(Alone, ThreadRanks(worlds=[TWO_RANKS]))
    assert str(error.value).startswith(
        "No request waits without bound\n"
        "  1. CP 1 x TP 2 x PP 1: 2 ranks of ThreadRanks\n"
        "  2. 11 steps, 5 requests, the clock of rank r differs by -1000.5 s x r\n"
    )
    assert "QueueDivergenceError" in str(error.value)
