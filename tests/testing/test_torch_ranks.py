"""Ranks as processes over gloo: results by rank, and the error of a rank in that of the runner."""

from __future__ import annotations

from operator import attrgetter, methodcaller

import pytest

from scheduler_components import ParallelState, StartError

pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[torch]")

from scheduler_components.testing import TorchRanks

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.processes]

TWO_RANKS = ParallelState.from_tp_rank(0, tp_size=2)


def test_each_rank_returns_its_result() -> None:
    assert TorchRanks().run(TWO_RANKS, attrgetter("rank")) == {0: 0, 1: 1}


def test_a_process_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(StartError, match=r"(?s)^rank \d: .*AttributeError: .*has no attribute 'no_such_method'"):
        TorchRanks().run(TWO_RANKS, methodcaller("no_such_method"))
