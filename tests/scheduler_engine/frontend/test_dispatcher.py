"""Dispatching: by load, counting what is on its way once, and keeping conversations together while it costs little."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.values import LoadSnapshot
from scheduler_engine.engine.messages import FRONTEND_DISPATCHER
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad


def make_dispatcher(num_replicas: int, affinity_tokens: int = 0) -> LoadDispatcher:
    replicas = [ReplicaLoad() for _ in range(num_replicas)]
    return LoadDispatcher(replicas=replicas, affinity_tokens=affinity_tokens)


def report(sequence: int, *, num_tokens: int = 0, seen: int = 0) -> LoadSnapshot:
    """A report that counts the first ``seen`` requests."""
    return LoadSnapshot(
        sequence=sequence,
        num_total_tokens=num_tokens,
        dispatched_watermarks=((FRONTEND_DISPATCHER, seen), ("someone else", 9)),
    )


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 8))
def test_unreported_requests_are_balanced(sizes: list[int], num_replicas: int) -> None:
    """Greedy dispatch keeps any two replicas within the largest request of each other."""
    dispatcher = make_dispatcher(num_replicas)
    for size in sizes:
        dispatcher.dispatch(size)
    totals = [replica.total_tokens for replica in dispatcher.replicas]
    assert sum(totals) == sum(sizes)
    assert max(totals) - min(totals) <= max(sizes)


@given(st.lists(st.integers(1, 1000), max_size=20), st.data())
def test_a_load_report_replaces_the_tickets_that_it_counts(sizes: list[int], data: st.DataObject) -> None:
    load = ReplicaLoad()
    for size in sizes:
        load.issue_ticket(size)
    seen = data.draw(st.integers(0, len(sizes)))
    load.on_load_report(report(1, num_tokens=77, seen=seen))
    assert load.total_tokens == 77 + sum(sizes[seen:])
    assert load.is_load_current == (seen == len(sizes))


def test_a_late_report_is_dropped() -> None:
    load = ReplicaLoad()
    load.on_load_report(report(2, num_tokens=5))
    load.on_load_report(report(1, num_tokens=9))
    assert load.total_tokens == 5


def test_the_least_loaded_replica_is_chosen() -> None:
    dispatcher = make_dispatcher(3)
    for replica, tokens in enumerate([30, 10, 20]):
        dispatcher.replicas[replica].on_load_report(report(1, num_tokens=tokens))
    assert [dispatcher.dispatch(15).replica for _ in range(3)] == [1, 2, 1]


def test_a_conversation_stays_on_its_replica_within_the_affinity() -> None:
    dispatcher = make_dispatcher(2, affinity_tokens=100)
    home = dispatcher.dispatch(60, "chat").replica
    assert dispatcher.dispatch(40, "chat").replica == home
    assert dispatcher.dispatch(1, "chat").replica == home
    assert dispatcher.dispatch(1, "chat").replica != home


def test_a_conversation_that_moved_stays_on_the_new_replica() -> None:
    dispatcher = make_dispatcher(2, affinity_tokens=10)
    home = dispatcher.dispatch(50, "chat").replica
    away = dispatcher.dispatch(5, "chat").replica
    assert away != home
    dispatcher.replicas[home].on_load_report(report(1, seen=1))
    assert dispatcher.dispatch(1, "chat").replica == away


def test_without_affinity_only_load_decides() -> None:
    dispatcher = make_dispatcher(2)
    assert {dispatcher.dispatch(10, "chat").replica, dispatcher.dispatch(10, "chat").replica} == {0, 1}
