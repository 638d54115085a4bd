"""The public checks of agreement on SGLang's own grammar manager, on two tensor-parallel ranks over gloo.

SGLang 0.5.23 agrees on which grammars are done, but not on whether they failed: a compilation that fails on one rank
ends the request there, and the other ranks compute it. Its time limit counts polls, so time alone ends no wait.
The error of a dead rank is gloo's, which names an address.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import forkserver, get_context

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

from sglang_grammar_rank import SglangGrammarRank

from scheduler_components.testing import AGREEMENT_CHECKS, ConformanceError, TorchRanks
from scheduler_components.testing import agreement_checks as checks

Check = Callable[..., None]
pytestmark = [pytest.mark.engine, pytest.mark.processes, pytest.mark.filterwarnings("default")]

FAULTS = {
    checks.check_ranks_let_the_same_requests_go: "'failed'",
    checks.check_reasons_follow_the_facts: "'failed'",
    checks.check_each_request_leaves_once: "'failed'",
    checks.check_no_request_waits_without_bound: "(1, 'bad', ",
    checks.check_a_crowd_expires: "requests that have not expired",
    checks.check_dead_rank_ends_in_an_error: "RuntimeError: ",
}
"""Checks that SGLang's manager fails, and a part of each trace. In the first four the ranks disagree on failures."""


@pytest.fixture(scope="module", autouse=True)
def _import_sglang_once() -> None:
    """Let the process from which all ranks are forked import SGLang."""
    get_context("forkserver").set_forkserver_preload(["sglang.srt.constrained.grammar_manager"])
    forkserver.ensure_running()


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_the_faults_of_the_grammar_manager_are_found(check: Check) -> None:
    with pytest.raises(ConformanceError) as error:
        check(SglangGrammarRank, TorchRanks())
    assert FAULTS[check] in str(error.value)


KEPT = [check for check in AGREEMENT_CHECKS if check not in FAULTS]


@pytest.mark.parametrize("check", KEPT, ids=lambda check: check.__name__)
def test_it_keeps_the_other_promises(check: Check) -> None:
    check(SglangGrammarRank, TorchRanks())
