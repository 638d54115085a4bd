"""Single control requests on a replica of four ranks: failures are undone, deadlines end them, parts run once."""

from __future__ import annotations

import pytest
from kit.quiescable_replica import GOOD, RANKS, Given, OwnFacts, QuiescableReplica

from scheduler_components.quiesce import PauseState, QuiesceState
from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    ContinueGeneration,
    ControlReply,
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
    control_request_name,
)

BOTH = tuple(MemoryTag)


def where(rank: int, facts: OwnFacts) -> tuple[OwnFacts, ...]:
    """One rank's own facts, and nothing special on the others."""
    return tuple(facts if each == rank else OwnFacts() for each in RANKS)


def done(replica: QuiescableReplica, *orders: ControlRequest) -> list[ControlReply]:
    answers = [replica.carry_out(Given(order))[0] for order in orders]
    assert [answer.problem for answer in answers] == [""] * len(orders)
    return answers


@pytest.mark.parametrize("order", [LoadWeights("a", b"a"), CheckWeights(), EndWeightUpdate(GOOD)])
def test_a_failure_on_one_rank_ends_the_update_on_all(order: ControlRequest) -> None:
    replica = QuiescableReplica()
    done(replica, BeginWeightUpdate("v1"))
    answers = replica.carry_out(Given(order, where(2, OwnFacts(fails=True))))
    assert {answer.problem.partition(":")[0] for answer in answers} == {
        f"rank 2 could not {control_request_name(order)}"
    }
    assert [answer.problem.endswith(": no room") for answer in answers] == [False, False, True, False]
    for rank in RANKS:
        assert replica.engines[rank].did == ["old weights"]
        state = replica.ranks[rank].state
        assert (state.updating_to, state.weight_version, state.can_admit) == (None, "default", True)
    assert replica.carry_out(Given(RollBackWeights()))[0].problem == "no weight update is open; begin one"


def test_an_update_does_not_open_if_one_rank_has_no_memory() -> None:
    replica = QuiescableReplica()
    answer = replica.carry_out(Given(BeginWeightUpdate("v1"), where(1, OwnFacts(fails=True))))[0]
    assert answer.problem == "rank 1 could not begin weight update"
    assert all(engine.did == ["old weights"] for engine in replica.engines.values())
    assert replica.ranks[0].state.can_admit


@pytest.mark.parametrize("order", [CheckWeights(), EndWeightUpdate(GOOD)])
def test_ranks_with_different_bytes_keep_the_old_weights(order: ControlRequest) -> None:
    replica = QuiescableReplica()
    done(replica, BeginWeightUpdate("v1"), LoadWeights("a", b"a"))
    answer = replica.carry_out(Given(order, where(3, OwnFacts(reads=GOOD + 1))))[0]
    assert answer.problem in ("ranks have loaded different weights", "rank 3 could not end weight update")
    assert replica.ranks[0].state.weight_version == "default"
    assert all(engine.did == ["old weights"] for engine in replica.engines.values())


def test_memory_that_one_rank_cannot_allocate_is_released_by_all() -> None:
    replica = QuiescableReplica()
    done(replica, ReleaseMemory(BOTH))
    answer = replica.carry_out(Given(ResumeMemory(BOTH), where(0, OwnFacts(fails=True))))[0]
    assert answer.problem == "rank 0 could not resume memory: no room"
    for rank in RANKS:
        assert replica.engines[rank].did[-1] == "gave kv_cache and weights, keeping: True"
        assert replica.ranks[rank].state.released == set(BOTH)
        assert not replica.ranks[rank].state.can_compute
    done(replica, ResumeMemory(BOTH))
    assert replica.ranks[0].state.can_admit


def test_discarded_weights_must_be_loaded_again() -> None:
    replica = QuiescableReplica()
    done(replica, ReleaseMemory(BOTH, keep_weights=False), ResumeMemory(BOTH))
    state = replica.ranks[0].state
    assert (state.can_admit, state.stats().has_discarded_all, state.stats().is_awake) == (False, 1, 0)
    done(replica, BeginWeightUpdate("v1"), RollBackWeights())
    assert not state.can_admit
    done(replica, BeginWeightUpdate("v1"), EndWeightUpdate(GOOD))
    assert (state.can_admit, state.stats().has_discarded_all, state.stats().is_awake) == (True, 0, 1)


def test_a_pause_that_times_out_changes_nothing() -> None:
    replica = QuiescableReplica()
    answer = replica.carry_out(Given(PauseGeneration(PauseMode.FINISH), new_requests=2))[0]
    assert answer.problem == ""  # no request ran yet
    done(replica, ContinueGeneration())
    replica.step()
    answer = replica.carry_out(Given(PauseGeneration(PauseMode.FINISH), new_requests=1))[0]
    assert answer.problem.startswith("given up at its deadline: 2 requests run, 1 wait, 0 transfers")
    assert replica.ranks[0].state.phase is PauseState.RUNNING
    replica.step()
    assert replica.engines[0].num_waiting == 0


def test_a_waiting_pause_admits_no_request() -> None:
    replica = QuiescableReplica()
    for engine in replica.engines.values():
        engine.running = [3]
    answer = replica.carry_out(Given(PauseGeneration(PauseMode.FINISH, 30.0), new_requests=2))[0]
    assert (answer.problem, replica.engines[0].num_running, replica.engines[0].num_waiting) == ("", 0, 2)


def test_deadlines_start_when_the_request_arrives() -> None:
    replica = QuiescableReplica()
    replica.num_steps = 1000
    assert replica.carry_out(Given(FlushCache(30.0), new_requests=2))[0].problem == ""
    problem = replica.carry_out(Given(FlushCache(2.0), where(1, OwnFacts(transfers_end_after=5))))[0].problem
    assert problem.startswith("given up at its deadline: 0 requests run, 0 wait")


def test_a_tensor_is_loaded_once_however_long_quiescing_takes() -> None:
    replica = QuiescableReplica()
    asked = []

    def checksum() -> int:
        asked.append(1)
        return GOOD

    done(replica, BeginWeightUpdate("v1"))
    replica.engines[0].checksum = checksum  # type: ignore[method-assign]
    slow = where(3, OwnFacts(transfers_end_after=6))
    assert replica.carry_out(Given(EndWeightUpdate(GOOD), slow))[0].problem == ""
    assert asked == [1]


@pytest.mark.parametrize(
    ("orders", "refused", "problem"),
    [
        ([], EndWeightUpdate(GOOD), "no weight update is open"),
        ([], LoadWeights("a", b"a"), "no weight update is open"),
        ([BeginWeightUpdate("v1")], BeginWeightUpdate("v2"), "an update to 'v1' is open"),
        ([BeginWeightUpdate("v1")], ReleaseMemory(BOTH), "an update to 'v1' is open"),
        ([ReleaseMemory(BOTH)], ReleaseMemory((MemoryTag.WEIGHTS,)), "weights: released already"),
        ([ReleaseMemory(BOTH)], BeginWeightUpdate("v1"), "the memory of the weights is released"),
        ([ReleaseMemory((MemoryTag.KV_CACHE,))], ResumeMemory(BOTH), "weights: not released"),
        ([], ReleaseMemory(()), "no memory is named; give tags of weights, kv_cache"),
    ],
)
def test_a_request_that_does_not_fit_the_state_is_rejected_and_counted(
    orders: list[ControlRequest], refused: ControlRequest, problem: str
) -> None:
    replica = QuiescableReplica()
    done(replica, *orders)
    before = replica.ranks[0].state.digest()
    assert replica.carry_out(Given(refused))[0].problem.startswith(problem)
    assert replica.ranks[0].state.digest() == before
    assert replica.ranks[0].state.stats().num_orders_refused == 1


def test_requests_paused_in_place_keep_the_cache() -> None:
    replica = QuiescableReplica()
    for engine in replica.engines.values():
        engine.running = [3]
    done(replica, PauseGeneration(PauseMode.IN_PLACE))
    for order in (FlushCache(30.0), BeginWeightUpdate("v1", 30.0), ReleaseMemory(BOTH, deadline_s=30.0)):
        problem = replica.carry_out(Given(order))[0].problem
        assert problem == "1 requests are paused in place; continue, or pause with retract or abort"
    assert done(replica, PauseGeneration(PauseMode.RETRACT))[0].num_requests == 1
    done(replica, FlushCache())


def test_a_flush_waits_for_waiting_requests_unless_paused() -> None:
    replica = QuiescableReplica()
    problem = replica.carry_out(Given(FlushCache(), new_requests=1))[0].problem
    assert problem.startswith("given up at its deadline: 0 requests run, 1 wait")
    assert replica.engines[0].did == []
    done(replica, PauseGeneration(PauseMode.RETRACT), FlushCache())
    assert replica.engines[0].did == ["cleared for default"]


def test_nothing_is_computed_during_an_update() -> None:
    replica = QuiescableReplica()
    done(replica, BeginWeightUpdate("v1"))
    assert replica.carry_out(Given(LoadWeights("a", b"a"), new_requests=2))[0].problem == ""
    replica.step()
    assert (replica.engines[0].num_running, replica.engines[0].num_waiting) == (0, 2)
    done(replica, EndWeightUpdate(GOOD))
    assert replica.engines[0].did == ["new weights", "cleared for v1"]
    replica.step()
    assert replica.engines[0].num_running == 2


@pytest.mark.parametrize(
    ("order", "part", "is_update"),
    [
        (FlushCache(), "clear", False),
        (EndWeightUpdate(GOOD), "commit", True),
        (EndWeightUpdate(GOOD), "clear", True),
        (RollBackWeights(), "roll_back", True),
        (ReleaseMemory(BOTH), "release", False),
        (ReleaseMemory(BOTH), "clear", False),
    ],
)
@pytest.mark.parametrize("broken", [(2,), RANKS])
def test_a_part_that_must_not_fail_and_does_is_answered_on_all_ranks(
    order: ControlRequest, part: str, is_update: bool, broken: tuple[int, ...]
) -> None:
    replica = QuiescableReplica()
    if is_update:
        done(replica, BeginWeightUpdate("v1"), LoadWeights("a", b"a"))
    facts = tuple(OwnFacts(breaks=part) if rank in broken else OwnFacts() for rank in RANKS)
    replica.give(Given(order, facts))
    replies = next(answers for _ in range(9) if any(answers := replica.step()))
    problem = f"rank {broken[0]} could not {control_request_name(order)}"
    assert {reply.problem.partition(":")[0] for reply in replies if reply} == {problem}
    assert all(replies[rank].problem.endswith(f": {part} failed") for rank in broken)
    assert all(quiesce.failures.total == (rank in broken) for rank, quiesce in replica.ranks.items())
    for quiesce in replica.ranks.values():
        state = quiesce.state
        assert (state.updating_to, state.weight_version, state.released) == (None, "default", frozenset())
        assert state.can_compute is not isinstance(order, EndWeightUpdate), "weights of unknown content compute nothing"
    assert not replica.have_parted([None] * 4) or broken != RANKS
    if isinstance(order, EndWeightUpdate):
        for engine in replica.engines.values():
            engine.did.clear()
        done(replica, BeginWeightUpdate("v2"), LoadWeights("a", b"a"), EndWeightUpdate(GOOD))
        assert replica.ranks[0].state.can_compute, "another update ends it"


def test_a_rollback_that_fails_ends_the_update_on_all_ranks() -> None:
    """The rollback follows from a part that failed on another rank."""
    replica = QuiescableReplica()
    done(replica, BeginWeightUpdate("v1"))
    facts = (OwnFacts(breaks="roll_back"), OwnFacts(fails=True), OwnFacts(), OwnFacts())
    replica.give(Given(LoadWeights("a", b"a"), facts))
    [reply, *_] = replica.step()
    assert reply is not None and reply.problem == "rank 1 could not load weights"
    assert replica.ranks[0].failures.total == 1
    assert replica.ranks[0].state.can_compute


def test_nothing_is_computed_between_a_request_and_its_confirmation() -> None:
    replica = QuiescableReplica()
    replica.give(Given(ReleaseMemory((MemoryTag.KV_CACHE,))))
    replica.step()
    state = replica.ranks[0].state
    assert replica.engines[0].did[-1].startswith("gave kv_cache")
    assert (state.can_admit, state.can_compute) == (False, False)


PARTS_OF_STATE = {
    "phase": PauseState.FROZEN,
    "released": frozenset({MemoryTag.WEIGHTS}),
    "has_weights": False,
    "weight_version": "v2",
    "updating_to": "v2",
    "num_loaded": 1,
    "is_confirming": True,
}


@pytest.mark.parametrize("name", PARTS_OF_STATE)
def test_the_digest_has_every_part_of_the_state(name: str) -> None:
    state, other = QuiesceState(), QuiesceState()
    setattr(other, name, PARTS_OF_STATE[name])
    assert state.digest() != other.digest()
    assert state.digest() == QuiesceState().digest()


def test_the_digest_has_the_given_facts() -> None:
    state = QuiesceState()
    assert len({state.digest(), state.digest(1), state.digest(1, "x"), state.digest(2, "x")}) == 4
    parts = {name for name in QuiesceState.__slots__ if name != "counts"}
    assert parts == PARTS_OF_STATE.keys(), "counters differ between ranks after a failure, and decide nothing"
