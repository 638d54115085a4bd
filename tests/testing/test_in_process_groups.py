"""Simulated ranks agree as real ranks do, and a missing or different proposal raises."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rank_grid import Hops, grid

from scheduler_components import ConfigError
from scheduler_components.agreement import Proposal
from scheduler_components.errors import SyncDivergenceError, SyncTimeoutError
from scheduler_components.testing.in_process_groups import InProcessGroups


@settings(deadline=None, max_examples=60)
@given(cp=st.integers(1, 4), tp=st.integers(1, 4), data=st.data())
def test_simulated_ranks_get_the_reduction_of_the_whole_grid(cp: int, tp: int, data: st.DataObject) -> None:
    sync = InProcessGroups(grid(cp, tp))
    for step in range(3):
        values = data.draw(st.lists(st.integers(-9, 9), min_size=cp * tp, max_size=cp * tp))
        proposals = {}
        for rank, value in enumerate(values):
            proposals[rank] = Proposal("step", step=step)
            proposals[rank].min("acks", value)
            proposals[rank].equal("digest", value)
        for agreed in sync.reduce(proposals).values():
            assert agreed.numbers == {"acks": min(values)}
            assert agreed.flags == {"digest": len(set(values)) == 1}
    assert sync.num_collectives == 3 * ((cp > 1) + (tp > 1))


def test_agreement_over_tp_only_leaves_cp_ranks_apart() -> None:
    tp_only: Hops = {0: ((0, 1),), 1: ((0, 1),), 2: ((2, 3),), 3: ((2, 3),)}
    proposals = {rank: Proposal("step", step=0) for rank in range(4)}
    for rank, proposal in proposals.items():
        proposal.min("landed", rank)
    agreed = InProcessGroups(tp_only).reduce(proposals)
    assert [agreed[rank].numbers["landed"] for rank in range(4)] == [0, 0, 2, 2]


def test_a_simulated_rank_without_a_proposal_is_missing() -> None:
    with pytest.raises(SyncTimeoutError, match=r"'step' at step 8: .* missing ranks: 1, 3") as raised:
        InProcessGroups(grid(2, 2)).reduce({rank: Proposal("step", step=8) for rank in (0, 2)})
    assert raised.value.missing_ranks == (1, 3)


def test_simulated_ranks_with_different_proposals_diverge() -> None:
    proposals = {rank: Proposal("prefetch" if rank else "write back", step=8) for rank in range(4)}
    with pytest.raises(SyncDivergenceError, match="ranks diverge at agreement 0: rank 0: 'write back' at step 8"):
        InProcessGroups(grid(2, 2)).reduce(proposals)


def test_hops_that_members_do_not_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="is hop 0 of rank 0 but not of rank 1"):
        InProcessGroups({0: ((0, 1),), 1: ()})
