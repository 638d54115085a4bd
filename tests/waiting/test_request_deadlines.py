"""RequestDeadlines: each request ends at its first limit, once, in one order, by the agreed clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.testing.thread_ranks import run_ranks
from scheduler_components.values import DeadlineStats, FinishReason, RequestState, RequestTimeouts
from scheduler_components.waiting.request_deadlines import RequestDeadlines

NO_LIMITS = RequestTimeouts()


@dataclass
class Timed:
    rid: str
    timeouts: RequestTimeouts = NO_LIMITS
    state: RequestState = RequestState.WAITING
    num_retractions: int = 0


def pop(deadlines: RequestDeadlines[Timed], now_s: float) -> list[tuple[str, str]]:
    return [(request.rid, reason.value) for request, reason, _ in deadlines.pop_expired(now_s)]


def test_a_limit_is_counted_from_the_next_agreement() -> None:
    deadlines = RequestDeadlines[Timed]()
    assert pop(deadlines, 5.0) == []
    deadlines.add(Timed("a", RequestTimeouts(queue_s=1.0)))
    assert pop(deadlines, 3600.0) == []  # the replica was idle for an hour
    assert deadlines.next_deadline_s == 3601.0
    assert pop(deadlines, 3600.9) == []
    [(request, reason, problem)] = deadlines.pop_expired(3601.0)
    assert (request.rid, reason) == ("a", FinishReason.QUEUE_TIMEOUT)
    assert problem == "queue_timeout=1: the request was not admitted within 1 s; try again later"
    assert deadlines.next_deadline_s == float("inf")
    assert not len(deadlines)


@pytest.mark.parametrize(("state", "num_retractions"), [(RequestState.RUNNING, 0), (RequestState.WAITING, 1)])
def test_a_request_that_was_admitted_has_its_total_limit_only(state: RequestState, num_retractions: int) -> None:
    deadlines = RequestDeadlines[Timed]()
    request = Timed("a", RequestTimeouts(queue_s=1.0, total_s=2.5))
    deadlines.add(request)
    pop(deadlines, 0.0)
    request.state, request.num_retractions = state, num_retractions
    assert pop(deadlines, 1.0) == []
    [(_, reason, problem)] = deadlines.pop_expired(2.5)
    assert reason is FinishReason.TIMEOUT
    assert problem == "timeout=2.5: the request was not complete within 2.5 s; ask for less or allow more"
    assert deadlines.stats() == DeadlineStats(waiting=0, queue_timeouts=0, timeouts=1)


def test_the_limits_of_the_operator_count_where_a_client_sets_none() -> None:
    deadlines = RequestDeadlines[Timed](defaults=RequestTimeouts(queue_s=1.0, total_s=9.0))
    deadlines.add(Timed("default"))
    deadlines.add(Timed("own", RequestTimeouts(queue_s=4.0)))
    assert pop(deadlines, 0.0) == []
    assert pop(deadlines, 1.0) == [("default", "queue_timeout")]
    assert pop(deadlines, 4.0) == [("own", "queue_timeout")]


def test_an_ended_request_does_not_expire_and_its_id_can_be_used_again() -> None:
    deadlines = RequestDeadlines[Timed]()
    first, second = Timed("a", RequestTimeouts(total_s=1.0)), Timed("a", RequestTimeouts(total_s=5.0))
    deadlines.add(first)
    deadlines.discard(first)
    assert pop(deadlines, 0.0) == []
    deadlines.add(first)
    assert pop(deadlines, 0.0) == []
    deadlines.discard(first)
    deadlines.add(second)
    assert pop(deadlines, 1.0) == []
    assert pop(deadlines, 6.0) == [("a", "timeout")]


def test_a_server_with_long_limits_keeps_no_ended_request() -> None:
    deadlines = RequestDeadlines[Timed](defaults=RequestTimeouts(total_s=1e6))
    for number in range(1000):
        request = Timed(str(number))
        deadlines.add(request)
        pop(deadlines, float(number))
        deadlines.discard(request)
    assert not len(deadlines)
    assert deadlines.next_deadline_s == float("inf")


LIMITS = st.sampled_from([None, None, 1.0, 2.0, 5.0])
EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "run", "end", "wait"]), st.sampled_from("abcd"), LIMITS, LIMITS), max_size=40
)


@given(EVENTS)
def test_every_request_ends_at_its_first_limit_and_never_before(
    events: Sequence[tuple[str, str, float | None, float | None]],
) -> None:
    deadlines, now_s = RequestDeadlines[Timed](), 0.0
    inside: dict[str, tuple[Timed, float]] = {}
    for verb, rid, queue_s, total_s in events:
        if verb == "add" and rid not in inside:
            inside[rid] = Timed(rid, RequestTimeouts(queue_s, total_s)), now_s
            deadlines.add(inside[rid][0])
        elif verb == "run" and rid in inside:
            inside[rid][0].state = RequestState.RUNNING
        elif verb == "end" and rid in inside:
            deadlines.discard(inside.pop(rid)[0])
        elif verb == "wait":
            now_s += 1.0
        due = []
        for request, added_s in inside.values():
            limits = request.timeouts
            if (
                request.state is RequestState.WAITING
                and limits.queue_s is not None
                and now_s >= added_s + limits.queue_s
            ):
                due.append((added_s + limits.queue_s, request.rid))
            elif limits.total_s is not None and now_s >= added_s + limits.total_s:
                due.append((added_s + limits.total_s, request.rid))
        left = [request.rid for request, *_ in deadlines.pop_expired(now_s)]
        assert sorted(left) == sorted(rid for _, rid in due)
        for rid_left in left:
            del inside[rid_left]
        assert deadlines.next_deadline_s > now_s
        assert len(deadlines) == sum(request.timeouts != NO_LIMITS for request, _ in inside.values())


def test_ranks_whose_clocks_differ_end_a_request_in_the_same_step() -> None:
    def serve(groups: ParallelGroups) -> list[list[tuple[str, str]]]:
        seconds = iter(1000.0 * groups.rank + second * (1.0 + groups.rank) for second in range(10))
        agreement = StepAgreement(groups=groups, clock=lambda: next(seconds), leads=not groups.rank)
        deadlines = RequestDeadlines[Timed]()
        deadlines.add(Timed("b", RequestTimeouts(queue_s=3.0, total_s=9.0)))
        deadlines.add(Timed("a", RequestTimeouts(total_s=3.0)))
        left = []
        for step in range(1, 6):
            agreement.step(step)
            left.append(pop(deadlines, agreement.now_s))
        return left

    outcomes = run_ranks(ParallelState.from_tp_rank(0, tp_size=2), serve)
    assert outcomes == [[[], [], [], [("b", "queue_timeout"), ("a", "timeout")], []]] * 2
