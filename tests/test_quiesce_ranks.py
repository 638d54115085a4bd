"""Control requests on all ranks of a replica: equal replies in the same step, although the ranks differ.

Ranks differ here in clocks, in when their transfers end, in which parts they can load, in what they read, and in the
memory that they have left. The tests at the end take single agreements away and see ranks part.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from kit.quiescable_replica import GOOD, Given, OwnFacts, QuiescableReplica

from scheduler_components.errors import QuiesceDivergenceError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.quiesce import PauseState
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
    assert replica.step() == [None] * 4, "carried out, and not confirmed yet"
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


class Arrival(NamedTuple):
    """A control request and the number of steps after the one before it."""

    order: ControlRequest
    after_steps: int


def acts_immediately(order: ControlRequest) -> bool:
    return isinstance(order, PauseGeneration) and order.mode is not PauseMode.FINISH


pauses = st.builds(PauseGeneration, st.sampled_from(PauseMode), st.just(30.0))
waiting = st.sampled_from([FlushCache(30.0), ClearStorageIndex(30.0), BeginWeightUpdate("v1", 30.0)])
arrivals = st.lists(
    st.builds(Arrival, st.one_of(orders, waiting, pauses, st.just(ContinueGeneration())), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)
other_facts = st.tuples(*[own_facts] * 4)


@given(arrivals, other_facts, st.integers(0, 2))
def test_ranks_agree_on_the_order_of_requests_that_arrive_together(
    history: list[Arrival], facts: tuple[OwnFacts, ...], num_new: int
) -> None:
    """Every request gets one reply, in the same step on all ranks, and pauses and continues keep their order."""
    replica = QuiescableReplica()
    replied: list[int] = []

    def step() -> None:
        for engine in replica.engines.values():
            engine.num_waiting += num_new
        answers = replica.step()
        assert not replica.have_parted(answers), f"ranks parted: {answers}"
        replied.extend(answer.request_id for answer in answers[:1] if answer is not None)

    for number, (order, after_steps) in enumerate(history):
        for _ in range(after_steps):
            step()
        replica.give(Given(order, facts), request_id=number)
    for _ in range(200):
        if len(replied) == len(history):
            break
        step()
    assert sorted(replied) == list(range(len(history)))
    in_order = [number for number in replied if isinstance(history[number].order, ContinueGeneration)
                or acts_immediately(history[number].order)]  # fmt: skip
    assert in_order == sorted(in_order)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE])
@pytest.mark.parametrize(
    "behind",
    [
        [FlushCache(60.0)],
        [FlushCache(60.0), FlushCache(60.0)],
        [BeginWeightUpdate("v1", 60.0), LoadWeights("a", b"a")],
        [ReleaseMemory((MemoryTag.KV_CACHE,), deadline_s=60.0)],
    ],
)
def test_a_pause_overtakes_requests_that_only_wait(mode: PauseMode, behind: list[ControlRequest]) -> None:
    replica = QuiescableReplica()
    for rank in replica.engines.values():
        rank.running = [100]
    for number, order in enumerate(behind):
        replica.give(Given(order), request_id=number)
    for _ in range(3):
        assert replica.step() == [None] * 4
    replica.give(Given(PauseGeneration(mode)), request_id=9)
    answers = replica.step()
    assert [answer and (answer.request_id, answer.problem) for answer in answers] == [(9, "")] * 4
    running = list(replica.engines[0].running)
    assert running == replica.engines[0].running and not replica.ranks[0].state.can_compute
    followed = [answer for _ in range(8) if (answer := replica.step()[0]) is not None]
    assert [each.request_id for each in followed] == list(range(len(behind)))
    expected = "1 requests are paused in place" if mode is PauseMode.IN_PLACE else ""
    assert followed[0].problem.startswith(expected) and bool(followed[0].problem) == bool(expected)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT])
def test_a_pause_ends_a_pause_that_waits_for_requests(mode: PauseMode) -> None:
    replica = QuiescableReplica()
    for rank in replica.engines.values():
        rank.running = [100]
    replica.give(Given(PauseGeneration(PauseMode.FINISH, 60.0)), request_id=1)
    replica.step()
    replica.give(Given(PauseGeneration(mode)), request_id=2)
    replies = [answer for _ in range(3) if (answer := replica.step()[0]) is not None]
    assert [(each.request_id, each.problem) for each in replies] == [(2, ""), (1, "")]
    assert replica.ranks[0].state.phase is PauseState.PAUSED


def test_a_pause_in_place_waits_for_a_pause_that_lets_requests_end() -> None:
    """It would freeze the requests for whose end the other one waits."""
    replica = QuiescableReplica()
    for rank in replica.engines.values():
        rank.running = [4]
    replica.give(Given(PauseGeneration(PauseMode.FINISH, 60.0)), request_id=1)
    replica.step()
    replica.give(Given(PauseGeneration(PauseMode.IN_PLACE)), request_id=2)
    replies = [answer.request_id for _ in range(8) if (answer := replica.step()[0]) is not None]
    assert replies == [1, 2]


def test_a_pause_does_not_overtake_a_continue_or_a_request_that_acts() -> None:
    replica = QuiescableReplica()
    replica.give(Given(PauseGeneration(PauseMode.ABORT)), request_id=1)
    replica.give(Given(ContinueGeneration()), request_id=2)
    replica.give(Given(PauseGeneration(PauseMode.RETRACT)), request_id=3)
    replica.give(Given(PauseGeneration(PauseMode.IN_PLACE)), request_id=4)
    replies = [answer.request_id for _ in range(4) if (answer := replica.step()[0]) is not None]
    assert replies == [1, 2, 3, 4]
    replica = QuiescableReplica()
    replica.give(Given(BeginWeightUpdate("v1")), request_id=1)
    assert replica.step() == [None] * 4, "it has begun: the memory is allocated in the next step"
    replica.give(Given(PauseGeneration(PauseMode.ABORT)), request_id=2)
    replies = [answer.request_id for _ in range(3) if (answer := replica.step()[0]) is not None]
    assert replies == [1, 2]


def test_a_rank_on_which_the_pause_does_not_overtake_is_found() -> None:
    replica = QuiescableReplica()
    for rank in replica.engines.values():
        rank.running = [100]
    replica.give(Given(FlushCache(60.0)), request_id=1)
    replica.step()
    replica.give(Given(PauseGeneration(PauseMode.ABORT)), request_id=2)
    replica.ranks[3]._pending.rotate(1)
    with pytest.raises(SyncDivergenceError, match="rank 3: 'quiesce: flush cache'"):
        replica.step()
