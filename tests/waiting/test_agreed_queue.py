"""AgreedQueue: whatever arrives when on which rank, all ranks let the same requests go in the same step, once.

The properties compare all ranks of a replica of CP x TP x PP with a model that knows the facts of all ranks. The table
of broken variants takes one rule away each and sees a property fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.agreed_queue_replica import MAX_WAIT_S, Call, Fact, QueueReplica, Turn, turns, worlds
from kit.variants import found, instead_of, variants

from scheduler_components import ParallelState
from scheduler_components.agreement import AgreedValues, ParallelGroups, Proposal, Slots
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.errors import QueueDivergenceError
from scheduler_components.testing.in_process_groups import InProcessGroups
from scheduler_components.testing.thread_ranks import run_ranks
from scheduler_components.waiting.agreed_queue import AgreedQueue

TWO_RANKS = ParallelState.from_tp_rank(0, tp_size=2)
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


class BrokenQueue(AgreedQueue):
    """Each variant takes one rule away."""

    @instead_of("apply")
    def decides_by_its_own_fact(self, step, agreed):
        """A rank that is ready lets the request go."""
        own = dict(zip(self._slots.names[1:], (wait.fact for wait in self._in_lanes()), strict=False))
        super().apply(step, AgreedValues(agreed.numbers | own, agreed.flags))

    # A departure stays among those to pop.
    departs_twice = found(pop_departures=lambda self: tuple(self._departures.values()))

    @instead_of("fill")
    def orders_lanes_by_readiness(self, proposal):
        """The requests that are ready on this rank come first in the lanes."""
        self._waits = dict(sorted(self._waits.items(), key=lambda entry: -entry[1].fact))
        super().fill(proposal)

    # The oldest requests have the lanes until they leave, though any may be ready.
    keeps_the_lanes = found(_pass_lanes_on=lambda self, asked: None)
    # A request that is ready on this rank keeps its lane on this rank.
    passes_on_what_is_not_ready_here = found(
        _pass_lanes_on=lambda self, asked: super()._pass_lanes_on([wait for wait in asked if wait.fact != _READY])
    )

    @instead_of("add")
    def leaves_in_the_order_of_the_lanes(self, rid, item, *, timeout_s=None):
        """Of the requests that leave in one step, the first in the lanes is the first."""
        is_added = super().add(rid, item, timeout_s=timeout_s)
        self._waits[rid].number = 0
        return is_added

    # A failure of the request is reported as an error of the rank, and the other way round.
    confuses_errors_and_failures = found(on_failed=lambda self, rid, problem: super().on_error(rid, problem))

    @instead_of("cancel")
    def loses_aborts(self, rid):
        """A rank that is ready for a request ignores its abort."""
        wait = self._waits.get(rid)
        return wait.item if wait is not None and wait.fact == _READY else super().cancel(rid)

    @instead_of("__post_init__")
    def lets_ready_requests_fail(self):
        """The larger value of all ranks counts, so one rank that is ready outvotes one that has failed."""
        super().__post_init__()
        names = self._slots.names
        self._slots = Slots(("equal", names[0]), *(("max", name) for name in names[1:]))

    @instead_of("on_ready")
    def forgets_facts_behind_the_lanes(self, rid):
        """A fact counts only if its request is in a lane when it arrives."""
        if any(wait.rid == rid for wait in self._in_lanes()):
            super().on_ready(rid)

    @instead_of("apply", now_s=0.0)
    def counts_from_the_last_agreement(self, step, agreed):
        """The wait begins at the last agreed time, which is old after an idle hour."""
        for wait in self._new:
            wait.timeout_s -= agreed.now_s - self.now_s
        self.now_s = agreed.now_s
        super().apply(step, agreed)


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


BOTH_WAIT = Turn((Call("add", "a"), Call("add", "b")), both("b"))
ONE_READY = [ADD_A, Turn(facts=(Fact(0, "a", True),)), Turn()]
ABORTED = [*ONE_READY[:2], Turn((Call("cancel", "a"),)), Turn()]
VARIANTS: dict[str, tuple[dict[str, Any], Sequence[Turn]]] = {
    "decides_by_its_own_fact": ({}, ONE_READY),
    "the slots of the lanes are not agreed": ({"reduction": "grammar [0-9]"}, ONE_READY),
    "each rank expires by its own clock": ({"reduction": "now us", "leading_ranks": (0, 1)}, [ADD_A, Turn()]),
    "another rank's clock counts": ({"leading_ranks": (0, 1)}, [ADD_A]),
    "departs_twice": ({}, [ADD_A, Turn(facts=both("a")), Turn()]),
    "orders_lanes_by_readiness": ({}, [ADD_A, ADD_B, Turn(facts=(Fact(0, "b", True), Fact(1, "a", True)))]),
    "keeps_the_lanes": ({"num_lanes": 1}, [BOTH_WAIT, Turn()]),
    "passes_on_what_is_not_ready_here": (
        {"num_lanes": 1},
        [Turn((Call("add", "a"), Call("add", "b")), (Fact(0, "a", True),)), Turn()],
    ),
    "leaves_in_the_order_of_the_lanes": (
        {},
        [Turn(tuple(Call("add", rid) for rid in "abc")), Turn(facts=both("a") + both("c"))],
    ),
    "confuses_errors_and_failures": (
        {},
        [ADD_A, Turn(facts=(Fact(0, "a", False), Fact(1, "a", False, is_error=True)))],
    ),
    "loses_aborts": ({}, ABORTED),
    "lets_ready_requests_fail": ({}, [ADD_A, Turn(facts=(Fact(0, "a", True), Fact(1, "a", False)))]),
    "forgets_facts_behind_the_lanes": ({"num_lanes": 1}, [BOTH_WAIT, Turn((Call("cancel", "a"),))]),
    "counts_from_the_last_agreement": ({}, [Turn(), Turn((Call("add", "a"),), seconds=3600.0)]),
}
"""What a replica is made with, and a schedule that finds the broken queue of this name, or the broken agreement."""
NOTICED = ("passes_on_what_is_not_ready_here", "loses_aborts")
"""Variants that the queue itself notices, as a divergence."""
QUEUES = variants(BrokenQueue)


def open_variant(name: str) -> QueueReplica:
    parts = dict(VARIANTS[name][0])
    if "reduction" in parts:
        parts["reduction"] = LocalSlots(parts["reduction"])
    return QueueReplica(TWO_RANKS, queue_type=QUEUES.get(name, (AgreedQueue,))[0], **parts)


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
    parts, schedule = VARIANTS[name]
    verify(QueueReplica(TWO_RANKS, num_lanes=parts.get("num_lanes", 2)), schedule)
    with pytest.raises(QueueDivergenceError if name in NOTICED else AssertionError):
        verify(open_variant(name), schedule)


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
    replica = open_variant("decides_by_its_own_fact")
    for turn in ONE_READY[:2]:
        replica.step(turn)
    with pytest.raises(QueueDivergenceError, match="step 3"):
        replica.step(Turn())
