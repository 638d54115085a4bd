"""Control requests on all ranks of a replica: equal replies in the same step, although the ranks differ.

Ranks differ here in clocks, in when their transfers end, in which parts they can load, in what they read, and in the
memory that they have left. The tests at the end take single agreements away and see ranks part.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from kit.quiescable_replica import GOOD, Given, OwnFacts, QuiescableReplica

from scheduler_components.errors import QuiesceDivergenceError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    ClearStorageIndex,
    ContinueGeneration,
    ControlRequest,
    EndWeightUpdate,
    FlushCache,
    LoadWeights,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
)

deadlines = st.sampled_from([0.0, 4.0, 30.0])
tags = st.lists(st.sampled_from(MemoryTag), max_size=2, unique=True).map(tuple)
orders = st.one_of(
    st.builds(PauseGeneration, st.sampled_from(PauseMode), deadlines),
    st.sampled_from([ContinueGeneration(), CheckWeights(), RollBackWeights(), LoadWeights("a", b"a")]),
    st.builds(EndWeightUpdate, st.sampled_from([GOOD, GOOD + 1]), deadlines),
    st.builds(FlushCache, deadlines),
    st.builds(ClearStorageIndex, deadlines),
    st.builds(BeginWeightUpdate, st.sampled_from(["v1", "v2"]), deadlines),
    st.builds(ReleaseMemory, tags, st.booleans(), deadlines),
    st.builds(ResumeMemory, tags),
)
mostly_good = st.sampled_from([False] * 5 + [True])
own_facts = st.builds(
    OwnFacts,
    st.integers(0, 6),
    st.sampled_from([0.0, 0.0, 3.0, -2.0]),
    mostly_good,
    st.sampled_from([GOOD] * 5 + [GOOD + 1]),
)
givens = st.builds(Given, orders, st.tuples(*[own_facts] * 4), st.integers(0, 3), st.integers(0, 2))
histories = st.lists(givens, min_size=1, max_size=8)


@given(histories)
def test_all_ranks_reply_alike_in_the_same_step(history: list[Given]) -> None:
    replica = QuiescableReplica()
    for each in history:
        replica.carry_out(each)


@given(histories)
def test_requests_run_only_as_the_replies_allow(history: list[Given]) -> None:
    """Requests run on only where the answers so far say so; the version is that of the last session that ended."""
    replica, version = QuiescableReplica(), "default"
    engine, quiesce = replica.engines[0], replica.ranks[0]
    for each in history:
        answer = replica.carry_out(each)[0]
        if isinstance(each.order, EndWeightUpdate) and not answer.problem:
            version = quiesce.state.weight_version
            assert engine.did[-2:] == ["new weights", f"cleared for {version}"]
        assert quiesce.state.weight_version == version
        if isinstance(each.order, FlushCache) and not answer.problem:
            assert engine.did[-1] == f"cleared for {version}"
        if isinstance(each.order, PauseGeneration) and not answer.problem:
            assert not quiesce.state.can_compute
            assert each.order.mode is PauseMode.IN_PLACE or not engine.num_running
        if isinstance(each.order, ReleaseMemory) and not answer.problem:
            assert not engine.num_running and not quiesce.state.can_compute
        if quiesce.state.updating_to is not None or MemoryTag.KV_CACHE in quiesce.state.released:
            assert not engine.num_running
        before = list(engine.running)
        if not quiesce.state.can_compute:
            replica.step()
            assert engine.running == before


def parts(history: list[Given], local_slot: str) -> bool:
    """Say whether ranks part somewhere in a history in which they do not agree on one slot."""
    replica = QuiescableReplica(local_slot)
    try:
        for each in history:
            replica.give(each)
            for _ in range(60):
                answers = replica.step()
                if replica.have_parted(answers):
                    return True
                if answers[0] is not None:
                    break
    except AssertionError:  # one of them emptied what another still used
        return True
    return False


@pytest.mark.broken_variants
@pytest.mark.parametrize("slot", ["quiesced", "late", "failed_rank", "checksum"])
def test_without_this_agreement_ranks_diverge(slot: str) -> None:
    in_session = st.lists(givens, min_size=1, max_size=3).map(
        lambda history: [Given(BeginWeightUpdate("v1")), *history]
    )
    found = find(
        in_session,
        lambda history: parts(history, slot),
        settings=settings(max_examples=3000, derandomize=True, database=None, phases=(Phase.generate,)),
    )
    assert not parts(found, ""), "they part with it too"


def test_a_rank_in_another_state_is_found_at_the_next_request() -> None:
    replica = QuiescableReplica()
    replica.ranks[2].state.weight_version = "v7"
    replica.give(Given(FlushCache()))
    with pytest.raises(QuiesceDivergenceError, match="agreement 1, 'flush cache': ranks are in different states"):
        replica.step()
    assert not any(engine.did for engine in replica.engines.values())


def test_without_the_agreement_on_state_it_is_not_found() -> None:
    replica = QuiescableReplica("state")
    replica.ranks[2].state.weight_version = "v7"
    replica.give(Given(FlushCache()))
    assert [answer.problem for answer in replica.step() if answer] == [""] * 4


def test_a_rank_with_another_request_is_found_by_the_agreement() -> None:
    replica = QuiescableReplica()
    orders: list[ControlRequest] = [FlushCache(), FlushCache(), ContinueGeneration(), FlushCache()]
    for quiesce, order in zip(replica.ranks.values(), orders, strict=True):
        quiesce.enqueue(1, order, now_s=0.0)
    with pytest.raises(SyncDivergenceError, match="rank 2: 'quiesce: continue generation' at step 1"):
        replica.step()


def test_a_missing_rank_is_named_with_the_request() -> None:
    replica = QuiescableReplica()
    replica.give(Given(BeginWeightUpdate("v2", 9.0)))
    proposals = {rank: quiesce.propose(1, rank=rank, now_s=0.0) for rank, quiesce in replica.ranks.items()}
    del proposals[3]
    with pytest.raises(SyncTimeoutError, match=r"'quiesce: begin weight update' at step 1.*missing ranks: 3"):
        replica.sync.reduce(proposals)
