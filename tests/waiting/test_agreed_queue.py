"""AgreedQueue: whatever arrives when on which rank, all ranks let the same requests go in the same step, once.

The properties compare all ranks of a replica of CP x TP x PP with a model that knows the facts of all ranks. The table
of broken variants takes one rule away each and sees a property fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.agreed_queue_replica import MAX_WAIT_S, Call, Fact, QueueReplica, Turn, turns, worlds

from scheduler_components import ParallelState
from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.errors import QueueDivergenceError
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.testing.thread_ranks import run_ranks
from scheduler_components.waiting.agreed_queue import AgreedQueue, Departure, _Wait

TWO_RANKS = ParallelState.from_tp_rank(0, tp_size=2)
T = TypeVar("T")
_READY = 3


class Model:
    """What has to leave when, from the facts of all ranks."""

    def __init__(self, num_ranks: int, num_lanes: int, max_waiting: int) -> None:
        self.num_ranks, self.num_lanes, self.max_waiting = num_ranks, num_lanes, max_waiting
        self.waiting: dict[str, tuple[float, dict[int, str]]] = {}
        self.lanes: list[str] = []  # who waits, the next in the lanes first
        self.limits: dict[str, float] = {}
        self.now_s = 0.0

    def step(self, turn: Turn) -> list[tuple[str, str]]:
        self.now_s += turn.seconds
        for call in turn.calls:
            if call.verb == "cancel":
                if self.waiting.pop(call.rid, None) is not None:
                    self.lanes.remove(call.rid)
            elif call.rid not in self.waiting and len(self.waiting) < self.max_waiting:
                limit_s = MAX_WAIT_S if call.timeout_s is None else call.timeout_s
                self.waiting[call.rid] = (self.now_s + limit_s, {})
                self.lanes.append(call.rid)
        for fact in turn.facts:
            if fact.rid in self.waiting:
                said = "ready" if fact.is_ok else "error" if fact.is_error else "failed"
                self.waiting[fact.rid][1].setdefault(fact.rank % self.num_ranks, said)
        asked, left = self.lanes[: self.num_lanes], []
        for rid, (deadline_s, facts) in list(self.waiting.items()):
            said = [*facts.values()] if rid in asked else []
            reason = "expired" if self.now_s >= deadline_s else ""
            if "failed" in said or "error" in said:
                reason = "failed" if "failed" in said else "error"
            elif len(said) == self.num_ranks:
                reason = "ready"
            if reason:
                del self.waiting[rid]
                self.lanes.remove(rid)
                left.append((rid, reason))
        if len(self.lanes) > self.num_lanes:
            self.lanes.sort(key=asked.__contains__)  # stable: who was asked goes behind the others
        return left


@given(world=worlds, schedule=turns, num_lanes=st.integers(1, 4), max_waiting=st.integers(1, 6))
def test_every_rank_lets_the_same_requests_go_in_the_same_step(
    world: ParallelState, schedule: Sequence[Turn], num_lanes: int, max_waiting: int
) -> None:
    replica = QueueReplica(world, num_lanes=num_lanes, max_waiting=max_waiting)
    model = Model(len(replica.ranks), num_lanes, max_waiting)
    num_left = 0
    for turn in schedule:
        expected = model.step(turn)
        assert [(each.rid, each.reason) for each in replica.step(turn)] == expected
        replica.check()
        num_left += len(expected)
        stats = replica.leader.queue.stats()
        assert stats.waiting == len(replica.leader.queue) == len(model.waiting) <= max_waiting
        assert stats.ready + stats.failed + stats.expired == num_left
    # No wait is without bound: with no fact at all everything leaves.
    for rid, reason in model.step(Turn(seconds=MAX_WAIT_S)):
        assert reason in ("expired", "ready", "failed", "error"), rid
    replica.step(Turn(seconds=MAX_WAIT_S))
    replica.check()
    assert not len(replica.leader.queue)


def both(rid: str, *, is_ok: bool = True) -> tuple[Fact, ...]:
    return tuple(Fact(rank, rid, is_ok) for rank in range(2))


ADD_A, ADD_B, ADD_C = (Turn((Call("add", rid),)) for rid in "abc")


def test_a_request_leaves_when_the_last_rank_is_ready() -> None:
    replica = QueueReplica(TWO_RANKS)
    assert replica.step(Turn((Call("add", "a"),), (Fact(0, "a", True),))) == ()
    [departure] = replica.step(Turn(facts=(Fact(1, "a", True),)))
    assert (departure.rid, departure.item, departure.reason, departure.problem) == ("a", "A", "ready", "")
    assert replica.leader.queue.next_deadline_s == float("inf")


def test_a_failure_of_one_rank_ends_the_wait_on_all_and_says_why_where_it_is_known() -> None:
    replica = QueueReplica(TWO_RANKS)
    replica.run([ADD_A, Turn(facts=(Fact(0, "a", True), Fact(1, "a", False), Fact(1, "a", True)))])
    assert replica.leader.departed == [(2, "a", "failed")]
    assert [rank.problems for rank in replica.ranks.values()] == [["failed on another rank"], ["rank 1 cannot"]]


def test_an_error_of_one_rank_is_none_of_the_request_unless_another_rank_refuses_it() -> None:
    replica = QueueReplica(TWO_RANKS)
    replica.run([ADD_A, Turn(facts=(Fact(0, "a", True), Fact(1, "a", False, is_error=True)))])
    replica.run([ADD_B, Turn(facts=(Fact(0, "b", False), Fact(1, "b", False, is_error=True)))])
    assert replica.leader.departed == [(2, "a", "error"), (4, "b", "failed")]
    assert replica.leader.problems == ["failed on another rank", "rank 0 cannot"]
    assert replica.ranks[1].problems == ["rank 1 broke", "failed on another rank"]
    assert replica.leader.queue.stats().failed == 2


def test_slow_requests_delay_a_ready_one_by_their_turns_in_the_lanes() -> None:
    """Forty requests and 16 lanes: each is asked about in one of three steps."""
    replica = QueueReplica(TWO_RANKS, num_lanes=16, max_waiting=40)
    rids = [f"r{number}" for number in range(40)]
    steps = [replica.step(Turn(tuple(Call("add", rid, timeout_s=100.0) for rid in rids), both("r39")))]
    steps += [replica.step(Turn()) for _ in range(2)]
    assert [[each.rid for each in left] for left in steps] == [[], [], ["r39"]]
    replica.run([Turn(facts=both("r20") + both("r3")), Turn(), Turn()])
    assert {rid: step for step, rid, _ in replica.leader.departed} == {"r39": 3, "r20": 4, "r3": 6}


def test_without_turns_the_oldest_have_the_lanes() -> None:
    queue = AgreedQueue[str](name="q", num_lanes=1, in_turns=False)
    agreement = StepAgreement(parts=[queue])
    for rid in ("old", "new"):
        queue.add(rid, rid)
    queue.on_ready("new")
    for step in range(1, 4):
        agreement.step(step)
    assert not queue.pop_departures()
    queue.on_ready("old")
    agreement.step(4)
    agreement.step(5)
    assert [each.rid for each in queue.pop_departures()] == ["old", "new"]


def test_a_time_limit_is_counted_from_the_first_agreement_on_the_leading_ranks_clock() -> None:
    replica = QueueReplica(TWO_RANKS)
    replica.step(Turn())
    replica.step(Turn((Call("add", "a"), Call("add", "b", timeout_s=2.0)), seconds=3600.0))  # the replica was idle
    assert replica.leader.queue.next_deadline_s == replica.now_s + 2.0
    assert replica.step(Turn(seconds=1.9)) == ()
    [first] = replica.step(Turn(seconds=0.1))
    assert (first.rid, first.reason, first.problem) == ("b", "expired", "waited longer than 2 s")
    [second] = replica.step(Turn(seconds=4.0))
    assert (second.rid, second.problem) == ("a", "waited longer than 6 s")
    assert replica.leader.queue.next_deadline_s == float("inf")


def test_requests_behind_the_lanes_keep_their_facts_and_move_up() -> None:
    replica = QueueReplica(TWO_RANKS, num_lanes=1)
    replica.step(Turn((Call("add", "a"), Call("add", "b")), both("b")))
    assert replica.step(Turn((Call("cancel", "a"),)))[0].rid == "b"


def test_a_full_queue_refuses_and_reports_about_unknown_requests_are_counted() -> None:
    replica = QueueReplica(TWO_RANKS, max_waiting=1)
    queue = replica.leader.queue
    assert queue.add("a", "A")
    assert not queue.add("b", "B")
    with pytest.raises(ValueError, match="'a' already waits in 'grammar'"):
        queue.add("a", "A")
    queue.on_ready("b")
    queue.on_failed("never seen", "no")
    stats = queue.stats()
    assert (stats.waiting, stats.refused, stats.unknown) == (1, 1, 2)


def test_a_cancelled_request_does_not_depart_even_if_its_departure_was_not_popped() -> None:
    queue = AgreedQueue[str](name="adapter")
    agreement = StepAgreement(parts=[queue], clock=lambda: 0.0)
    for rid in "ab":
        queue.add(rid, rid)
        queue.on_ready(rid)
    agreement.step(1)
    assert queue.cancel("a") == "a"
    assert queue.cancel("a") is None
    with pytest.raises(ValueError, match="already waits"):
        queue.add("b", "b")
    assert [each.rid for each in queue.pop_departures()] == ["b"]
    assert not queue.pop_departures()
    assert queue.stats().cancelled == 1


def test_a_cancelled_request_leaves_no_deadline() -> None:
    replica = QueueReplica(TWO_RANKS)
    replica.step(Turn((Call("add", "a", timeout_s=1.0), Call("add", "b"), Call("cancel", "a"))))
    assert replica.leader.queue.next_deadline_s == replica.now_s + MAX_WAIT_S
    replica.step(Turn((Call("cancel", "b"),)))
    assert replica.leader.queue.next_deadline_s == float("inf")


def test_what_all_ranks_decide_needs_no_lane() -> None:
    queue = AgreedQueue[str](name="q", num_lanes=1)
    agreement = StepAgreement(parts=[queue])
    for rid in ("slow", "ready", "failed"):
        queue.add(rid, rid)
    queue.depart("failed", "failed", "no such adapter")
    agreement.step(1)
    queue.depart("ready", "ready")
    queue.depart("unknown", "ready")
    agreement.step(2)
    assert [(each.rid, each.reason, each.problem) for each in queue.pop_departures()] == [
        ("failed", "failed", "no such adapter"),
        ("ready", "ready", ""),
    ]
    assert (queue.stats().ready, queue.stats().failed, list(queue)) == (1, 1, ["slow"])


def test_several_queues_share_the_step_and_their_slots_do_not_depend_on_who_waits() -> None:
    queues = [AgreedQueue[str](name=name, num_lanes=40) for name in ("grammar", "lora", "transfer")]
    agreement = StepAgreement(parts=queues)
    idle = len(agreement.propose(1))
    for number in range(100):
        for queue in queues:
            queue.add(str(number), "item")
    assert len(agreement.propose(1)) == idle
    assert len(agreement.propose(1).pack(0)) == len(Proposal("nothing", step=0).pack(0))  # one block


def test_ranks_on_threads_see_the_same_departures() -> None:
    """Each rank becomes ready in another step; the last one decides."""

    def ready_step(rank: int, number: int) -> int:
        return number + (3 * number + 5 * rank) % 7

    def serve(groups: ParallelGroups) -> list[tuple[int, str]]:
        queue = AgreedQueue[str](name="grammar", num_lanes=3)
        agreement = StepAgreement(groups=groups, parts=[queue], clock=lambda: 0.0, leads=not groups.rank)
        left = []
        for step in range(1, 17):
            if step <= 5:
                queue.add(f"r{step}", "item")
            for number in range(1, 6):
                if step == ready_step(groups.rank, number):
                    queue.on_ready(f"r{number}")
            agreement.step(step)
            left += [(step, each.rid) for each in queue.pop_departures()]
        return left

    outcomes = run_ranks(ParallelState.from_tp_rank(0, tp_size=4, attn_cp_size=2), serve)
    last = {f"r{number}": max(ready_step(rank, number) for rank in range(4)) for number in range(1, 6)}
    assert len(outcomes[0]) == 5
    assert all(last[rid] <= step <= last[rid] + 1 for step, rid in outcomes[0])  # five requests, three lanes
    assert outcomes == [outcomes[0]] * 4


# --- broken variants: each takes one rule away ---


@dataclass(slots=True, kw_only=True)
class DecidesByItsOwnFact(AgreedQueue[T]):
    """A rank that is ready lets the request go."""

    def apply(self, step: int, agreed: AgreedValues) -> None:
        own = dict(zip(self._slots.names[1:], (wait.fact for wait in self._in_lanes()), strict=False))
        AgreedQueue.apply(self, step, AgreedValues(agreed.numbers | own, agreed.flags))


@dataclass(slots=True, kw_only=True)
class DepartsTwice(AgreedQueue[T]):
    """A departure stays among those to pop."""

    def pop_departures(self) -> Sequence[Departure[T]]:
        return tuple(self._departures.values())


@dataclass(slots=True, kw_only=True)
class OrdersLanesByReadiness(AgreedQueue[T]):
    """The requests that are ready on this rank come first in the lanes."""

    def fill(self, proposal: Proposal) -> None:
        self._waits = dict(sorted(self._waits.items(), key=lambda entry: -entry[1].fact))
        AgreedQueue.fill(self, proposal)


@dataclass(slots=True, kw_only=True)
class KeepsTheLanes(AgreedQueue[T]):
    """The oldest requests have the lanes until they leave, though any may be ready."""

    def _pass_lanes_on(self, asked: object) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class PassesOnWhatIsNotReadyHere(AgreedQueue[T]):
    """A request that is ready on this rank keeps its lane on this rank."""

    def _pass_lanes_on(self, asked: Sequence[_Wait[T]]) -> None:
        AgreedQueue._pass_lanes_on(self, [wait for wait in asked if wait.fact != _READY])


@dataclass(slots=True, kw_only=True)
class LeavesInTheOrderOfTheLanes(AgreedQueue[T]):
    """Of the requests that leave in one step, the first in the lanes is the first."""

    def add(self, rid: str, item: T, *, timeout_s: float | None = None) -> bool:
        is_added = AgreedQueue.add(self, rid, item, timeout_s=timeout_s)
        self._waits[rid].number = 0
        return is_added


@dataclass(slots=True, kw_only=True)
class ConfusesErrorsAndFailures(AgreedQueue[T]):
    """A failure of the request is reported as an error of the rank, and the other way round."""

    def on_failed(self, rid: str, problem: str) -> None:
        AgreedQueue.on_error(self, rid, problem)


@dataclass(slots=True, kw_only=True)
class LosesAborts(AgreedQueue[T]):
    """A rank that is ready for a request ignores its abort."""

    def cancel(self, rid: str) -> T | None:
        wait = self._waits.get(rid)
        return wait.item if wait is not None and wait.fact == _READY else AgreedQueue.cancel(self, rid)


@dataclass(slots=True, kw_only=True)
class LetsReadyRequestsFail(AgreedQueue[T]):
    """The larger value of all ranks counts, so one rank that is ready outvotes one that has failed."""

    def __post_init__(self) -> None:
        AgreedQueue.__post_init__(self)
        names = self._slots.names
        self._slots = Slots(("equal", names[0]), *(("max", name) for name in names[1:]))


@dataclass(slots=True, kw_only=True)
class ForgetsFactsBehindTheLanes(AgreedQueue[T]):
    """A fact counts only if its request is in a lane when it arrives."""

    def on_ready(self, rid: str) -> None:
        if any(wait.rid == rid for wait in self._in_lanes()):
            AgreedQueue.on_ready(self, rid)


@dataclass(slots=True, kw_only=True)
class CountsFromTheLastAgreement(AgreedQueue[T]):
    """The wait begins at the last agreed time, which is old after an idle hour."""

    now_s: float = 0.0

    def apply(self, step: int, agreed: AgreedValues) -> None:
        for wait in self._new:
            wait.timeout_s -= agreed.now_s - self.now_s
        self.now_s = agreed.now_s
        AgreedQueue.apply(self, step, agreed)


class LocalSlots:
    """A broken agreement: in slots that match a pattern, each rank gets its own value."""

    def __init__(self, pattern: str) -> None:
        self._sync, self._pattern = InProcessGroups({0: [(0, 1)], 1: [(0, 1)]}), pattern

    def reduce(self, proposals: Mapping[int, Proposal]) -> Mapping[int, AgreedValues]:
        agreed = self._sync.reduce(proposals)
        return {rank: self._with_own(agreed[rank], proposal.own_values()) for rank, proposal in proposals.items()}

    def _with_own(self, agreed: AgreedValues, own: AgreedValues) -> AgreedValues:
        return AgreedValues(
            agreed.numbers | {name: each for name, each in own.numbers.items() if fnmatch(name, self._pattern)},
            agreed.flags | {name: each for name, each in own.flags.items() if fnmatch(name, self._pattern)},
        )


Variant = Callable[[], QueueReplica]
ONE_READY = [ADD_A, Turn(facts=(Fact(0, "a", True),)), Turn()]
ABORTED = [ADD_A, Turn(facts=(Fact(0, "a", True),)), Turn((Call("cancel", "a"),)), Turn()]
VARIANTS: dict[str, tuple[Variant, Sequence[Turn], type[Exception]]] = {
    "a fact of one rank decides": (
        lambda: QueueReplica(TWO_RANKS, queue_type=DecidesByItsOwnFact),
        ONE_READY,
        AssertionError,
    ),
    "the slots of the lanes are not agreed": (
        lambda: QueueReplica(TWO_RANKS, reduction=LocalSlots("grammar [0-9]")),
        ONE_READY,
        AssertionError,
    ),
    "each rank expires by its own clock": (
        lambda: QueueReplica(TWO_RANKS, reduction=LocalSlots("now us"), leading_ranks=(0, 1)),
        [ADD_A, Turn()],
        AssertionError,
    ),
    "another rank's clock counts": (
        lambda: QueueReplica(TWO_RANKS, leading_ranks=(0, 1)),
        [ADD_A],
        AssertionError,
    ),
    "a departure is popped twice": (
        lambda: QueueReplica(TWO_RANKS, queue_type=DepartsTwice),
        [ADD_A, Turn(facts=both("a")), Turn()],
        AssertionError,
    ),
    "lanes in an order of one rank": (
        lambda: QueueReplica(TWO_RANKS, queue_type=OrdersLanesByReadiness),
        [ADD_A, ADD_B, Turn(facts=(Fact(0, "b", True), Fact(1, "a", True)))],
        AssertionError,
    ),
    "the lanes stay with the oldest": (
        lambda: QueueReplica(TWO_RANKS, queue_type=KeepsTheLanes, num_lanes=1),
        [Turn((Call("add", "a"), Call("add", "b")), both("b")), Turn()],
        AssertionError,
    ),
    "each rank passes on the lanes of what it is not ready for": (
        lambda: QueueReplica(TWO_RANKS, queue_type=PassesOnWhatIsNotReadyHere, num_lanes=1),
        [Turn((Call("add", "a"), Call("add", "b")), (Fact(0, "a", True),)), Turn()],
        QueueDivergenceError,
    ),
    "requests of a turn leave in the order of the lanes": (
        lambda: QueueReplica(TWO_RANKS, queue_type=LeavesInTheOrderOfTheLanes),
        [Turn(tuple(Call("add", rid) for rid in "abc")), Turn(facts=both("a") + both("c"))],
        AssertionError,
    ),
    "an error of a rank outvotes a failure of the request": (
        lambda: QueueReplica(TWO_RANKS, queue_type=ConfusesErrorsAndFailures),
        [ADD_A, Turn(facts=(Fact(0, "a", False), Fact(1, "a", False, is_error=True)))],
        AssertionError,
    ),
    "a lost abort": (
        lambda: QueueReplica(TWO_RANKS, queue_type=LosesAborts),
        ABORTED,
        QueueDivergenceError,
    ),
    "one ready rank outvotes a failed one": (
        lambda: QueueReplica(TWO_RANKS, queue_type=LetsReadyRequestsFail),
        [ADD_A, Turn(facts=(Fact(0, "a", True), Fact(1, "a", False)))],
        AssertionError,
    ),
    "facts behind the lanes are lost": (
        lambda: QueueReplica(TWO_RANKS, queue_type=ForgetsFactsBehindTheLanes, num_lanes=1),
        [Turn((Call("add", "a"), Call("add", "b")), both("b")), Turn((Call("cancel", "a"),))],
        AssertionError,
    ),
    "a wait is counted from the last agreement": (
        lambda: QueueReplica(TWO_RANKS, queue_type=CountsFromTheLastAgreement),
        [Turn(), Turn((Call("add", "a"),), seconds=3600.0)],
        AssertionError,
    ),
}


def verify(replica: QueueReplica, schedule: Sequence[Turn]) -> None:
    """Run a schedule and compare every step with the model."""
    model = Model(len(replica.ranks), replica.leader.queue.num_lanes, replica.leader.queue.max_waiting)
    for turn in schedule:
        left = [(each.rid, each.reason) for each in replica.step(turn)]
        assert left == model.step(turn)
        replica.check()


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", VARIANTS)
def test_without_this_rule_the_checks_fail(name: str) -> None:
    make, schedule, error = VARIANTS[name]
    sound = QueueReplica(TWO_RANKS, num_lanes=make().leader.queue.num_lanes)
    verify(sound, schedule)
    with pytest.raises(error):
        verify(make(), schedule)


def test_a_rank_that_missed_a_call_is_found_in_the_next_agreement() -> None:
    replica = QueueReplica(TWO_RANKS)
    replica.step(ADD_A)
    replica.ranks[1].queue.cancel("a")
    with pytest.raises(
        QueueDivergenceError, match="step 2: ranks hold different requests in queue 'grammar'"
    ) as raised:
        replica.step(Turn())
    assert (raised.value.step, raised.value.queue) == (2, "grammar")
    assert not replica.leader.departed


def test_a_rank_that_let_a_request_go_alone_is_found_in_the_next_agreement() -> None:
    replica = QueueReplica(TWO_RANKS, queue_type=DecidesByItsOwnFact)
    for turn in ONE_READY[:2]:
        replica.step(turn)
    with pytest.raises(QueueDivergenceError, match="step 3"):
        replica.step(Turn())
