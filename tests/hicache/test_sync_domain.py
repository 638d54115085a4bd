"""Local, simulated and threaded domains: all ranks of a grid get one answer, or one error that says who is to blame."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState, SyncClosedError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.hicache import AgreedValues, InProcessSync, Proposal, SyncDomain, world_rank_sets
from scheduler_components.testing import ThreadSyncHub

Hops = dict[int, tuple[tuple[int, ...], ...]]


def grid(cp: int, tp: int) -> Hops:
    world = world_rank_sets(ParallelState.from_tp_rank(0, tp_size=cp * tp, attn_cp_size=cp))
    return {sets.rank: sets.hops for sets in world}


def on_threads(hops: Hops, work: Callable[[SyncDomain], object], *, timeout_s: float = 20.0) -> list[object]:
    """Run ``work`` on one thread a rank; a raised error is that rank's result."""
    hub = ThreadSyncHub(hops, timeout_s=timeout_s)

    def run(rank: int) -> object:
        try:
            return work(hub.domain(rank))
        except (SyncDivergenceError, SyncTimeoutError) as error:
            return error

    with ThreadPoolExecutor(len(hops)) as threads:
        return list(threads.map(run, sorted(hops)))


def ask(domain: SyncDomain) -> AgreedValues:
    mine = domain.rank
    domain.barrier("start", step=0)
    assert domain.min("landed", mine + 5, step=1) == 5
    proposal = Proposal("step", step=2)
    proposal.max("wanted", mine)
    proposal.all("allocated", mine != 1)
    proposal.any("aborted", mine == 1)
    proposal.equal("tree digest", 7)
    proposal.equal("host digest", mine)
    return domain.agree(proposal)


def expected(wanted: int, *flags: bool) -> AgreedValues:
    names = ("allocated", "aborted", "tree digest", "host digest")
    return AgreedValues({"wanted": wanted}, dict(zip(names, flags, strict=True)))


def test_one_rank_agrees_with_itself_without_a_collective() -> None:
    domain = SyncDomain()
    assert ask(domain) == expected(0, True, False, True, True)
    assert (domain.num_calls, domain.num_collectives) == (3, 0)


@pytest.mark.parametrize(("cp", "tp"), [(2, 2), (2, 1), (1, 2), (3, 2)])
def test_threads_of_a_grid_all_get_the_answers_of_the_whole_grid(cp: int, tp: int) -> None:
    last = cp * tp - 1
    assert on_threads(grid(cp, tp), ask) == [expected(last, False, True, True, False)] * (last + 1)


@settings(deadline=None, max_examples=60)
@given(cp=st.integers(1, 4), tp=st.integers(1, 4), data=st.data())
def test_simulated_ranks_get_the_answers_of_the_whole_grid(cp: int, tp: int, data: st.DataObject) -> None:
    sync = InProcessSync(grid(cp, tp))
    for step in range(3):
        values = data.draw(st.lists(st.integers(-9, 9), min_size=cp * tp, max_size=cp * tp))
        proposals = {}
        for rank, value in enumerate(values):
            proposals[rank] = Proposal("step", step=step)
            proposals[rank].min("acks", value)
            proposals[rank].equal("digest", value)
        for agreed in sync.agree(proposals).values():
            assert agreed.numbers == {"acks": min(values)}
            assert agreed.flags == {"digest": len(set(values)) == 1}
    assert sync.num_collectives == 3 * ((cp > 1) + (tp > 1))


def test_agreement_over_tp_only_leaves_cp_ranks_apart() -> None:
    tp_only: Hops = {0: ((0, 1),), 1: ((0, 1),), 2: ((2, 3),), 3: ((2, 3),)}
    proposals = {rank: Proposal("step", step=0) for rank in range(4)}
    for rank, proposal in proposals.items():
        proposal.min("landed", rank)
    agreed = InProcessSync(tp_only).agree(proposals)
    assert [agreed[rank].numbers["landed"] for rank in range(4)] == [0, 0, 2, 2]


@pytest.mark.parametrize("num_slots", [1, 250, 251, 5000])
def test_collectives_do_not_grow_with_the_slots_beyond_one_more_a_hop(num_slots: int) -> None:
    def work(domain: SyncDomain) -> object:
        proposal = Proposal("step", step=0)
        for slot in range(num_slots):
            proposal.min(f"operation {slot}", domain.rank + slot)
        agreed = domain.agree(proposal)
        assert list(agreed.numbers.values()) == list(range(num_slots))
        return domain.num_collectives

    assert set(on_threads(grid(2, 2), work)) == {2 if num_slots <= 250 else 4}


@pytest.mark.parametrize("odd_rank", range(4))
def test_a_rank_that_leaves_out_a_call_is_named_on_all_ranks(odd_rank: int) -> None:
    def work(domain: SyncDomain) -> object:
        domain.barrier("start", step=4)
        if domain.rank != odd_rank:  # the mistake: a rank-local condition in front of a collective
            domain.min("prefetch", 1, step=5)
        return domain.min("write acks", 1, step=5)

    for error in on_threads(grid(2, 2), work):
        assert isinstance(error, SyncDivergenceError)
        assert error.call == 1
        assert sorted(error.places) == [0, 1, 2, 3]
        for rank, place in error.places.items():
            assert ("write acks" if rank == odd_rank else "prefetch") in place


def test_proposals_of_different_length_part_before_their_rests_meet() -> None:
    def work(domain: SyncDomain) -> object:
        proposal = Proposal("step", step=0)
        for slot in range(1000 if domain.rank == 2 else 3):
            proposal.min(f"operation {slot}", 1)
        return domain.agree(proposal)

    assert all(isinstance(error, SyncDivergenceError) for error in on_threads(grid(2, 2), work))


@pytest.mark.parametrize("dead_rank", range(4))
def test_a_dead_rank_is_named_on_all_survivors(dead_rank: int) -> None:
    def work(domain: SyncDomain) -> object:
        domain.barrier("start", step=0)
        return None if domain.rank == dead_rank else domain.min("landed", 1, step=9)

    for rank, error in enumerate(on_threads(grid(2, 2), work, timeout_s=0.2)):
        if rank != dead_rank:
            assert isinstance(error, SyncTimeoutError)
            assert (error.operation, error.step, error.missing_ranks) == ("landed", 9, (dead_rank,))


def test_a_broken_domain_stays_broken() -> None:
    def work(domain: SyncDomain) -> object:
        if domain.rank == 1:
            return None
        for _ in range(2):
            with pytest.raises(SyncTimeoutError, match=r"'landed' at step 3: not agreed within 0\.1 s; missing.* 1"):
                domain.min("landed", 1, step=3)
        return domain.num_collectives

    assert on_threads(grid(2, 1), work, timeout_s=0.1) == [0, None]


def test_a_closed_domain_refuses() -> None:
    domain = SyncDomain()
    domain.close()
    domain.close()
    with pytest.raises(SyncClosedError):
        domain.barrier("start", step=0)


def test_a_simulated_rank_without_a_proposal_is_missing() -> None:
    with pytest.raises(SyncTimeoutError, match=r"'step' at step 8: .* missing ranks: 1, 3") as raised:
        InProcessSync(grid(2, 2)).agree({rank: Proposal("step", step=8) for rank in (0, 2)})
    assert raised.value.missing_ranks == (1, 3)


def test_simulated_ranks_with_different_questions_part() -> None:
    proposals = {rank: Proposal("prefetch" if rank else "write back", step=8) for rank in range(4)}
    with pytest.raises(SyncDivergenceError, match="ranks part at agreement 0: rank 0: 'write back' at step 8"):
        InProcessSync(grid(2, 2)).agree(proposals)


def test_hops_that_members_do_not_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="is hop 0 of rank 0 but not of rank 1"):
        InProcessSync({0: ((0, 1),), 1: ()})
