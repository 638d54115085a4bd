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
from scheduler_components.agreed_queue import AgreedQueue, Departure
from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.errors import QueueDivergenceError
from scheduler_components.step_agreement import StepAgreement
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.testing.thread_ranks import run_ranks

TWO_RANKS = ParallelState.from_tp_rank(0, tp_size=2)
T = TypeVar("T")
_READY = 2


class Model:
    """What has to leave when, from the facts of all ranks."""

    def __init__(self, num_ranks: int, num_lanes: int, max_waiting: int) -> None:
        self.num_ranks, self.num_lanes, self.max_waiting = num_ranks, num_lanes, max_waiting
        self.waiting: dict[str, tuple[float, dict[int, bool]]] = {}
        self.limits: dict[str, float] = {}
        self.now_s = 0.0

    def step(self, turn: Turn) -> list[tuple[str, str]]:
        self.now_s += turn.seconds
        for call in turn.calls:
            if call.verb == "cancel":
                self.waiting.pop(call.rid, None)
            elif call.rid not in self.waiting and len(self.waiting) < self.max_waiting:
                limit_s = MAX_WAIT_S if call.timeout_s is None else call.timeout_s
                self.waiting[call.rid] = (self.now_s + limit_s, {})
        for fact in turn.facts:
            if fact.rid in self.waiting:
                self.waiting[fact.rid][1].setdefault(fact.rank % self.num_ranks, fact.is_ok)
        left = []
        for place, (rid, (deadline_s, facts)) in enumerate(list(self.waiting.items())):
            reason = ""
            if place < self.num_lanes and False in facts.values():
                reason = "failed"
            elif place < self.num_lanes and len(facts) == self.num_ranks:
                reason = "ready"
            elif self.now_s >= deadline_s:
                reason = "expired"
            if reason:
                del self.waiting[rid]
                left.append((rid, reason))
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
        assert reason in ("expired", "ready", "failed"), rid
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
        for step in range(1, 16):
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
    assert {rid: step for step, rid in outcomes[0]}.items() >= {rid: last[rid] for rid in ("r1", "r2", "r3")}.items()
    assert len(outcomes[0]) == 5
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
        [ADD_A, ADD_B, Turn(facts=(Fact(0, "b", True),))],
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
