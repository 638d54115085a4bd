"""RoundRobin and LeastLoaded."""

from __future__ import annotations

from scheduler_components.values import LoadSnapshot
from scheduler_engine.simulation.request import SimulatedRequest
from scheduler_engine.simulation.router import LeastLoaded, RoundRobin, Router
from scheduler_engine.simulation.trace import TraceRequest


def request(tokens: int = 100) -> SimulatedRequest:
    hash_ids = tuple(range(-(-tokens // 512)))
    return SimulatedRequest(TraceRequest(index=0, arrival_s=0, input_length=tokens, output_length=1, hash_ids=hash_ids))


def with_replicas(router: Router, count: int = 3) -> Router:
    for replica in range(count):
        router.on_replica_up(replica, 0.0)
    return router


def test_round_robin_takes_turns_and_leaves_out_what_is_down() -> None:
    router = with_replicas(RoundRobin())
    assert [router.route(request(), 0.0) for _ in range(4)] == [0, 1, 2, 0]
    router.on_replica_down(1, 0.0)
    assert [router.route(request(), 0.0) for _ in range(3)] == [2, 0, 2]
    router.on_replica_up(1, 0.0)
    assert [router.route(request(), 0.0) for _ in range(3)] == [0, 1, 2]


def test_without_replicas_no_request_is_routed() -> None:
    for router in (RoundRobin(), LeastLoaded()):
        assert router.route(request(), 0.0) is None
        with_replicas(router, 1).on_replica_down(0, 0.0)
        assert router.route(request(), 0.0) is None


def test_what_was_sent_counts_until_a_report_includes_it() -> None:
    router = with_replicas(LeastLoaded(), 2)
    big = request(1000)
    assert [router.route(each, 0.0) for each in (big, request(), request(), request())] == [0, 1, 1, 1]
    assert big.ticket is not None
    router.on_load_report(0, LoadSnapshot(num_total_tokens=0), 0.0)
    assert router.route(request(), 0.0) == 1, "the report was made before the request arrived"
    router.on_load_report(0, LoadSnapshot(num_total_tokens=200, dispatched_watermarks=(big.ticket,)), 0.0)
    assert router.route(request(), 0.0) == 0, "200 tokens against 400"


def test_a_report_of_a_replica_that_is_down_is_ignored() -> None:
    router = with_replicas(LeastLoaded(), 2)
    router.on_replica_down(0, 0.0)
    router.on_load_report(0, LoadSnapshot(num_total_tokens=7), 0.0)
    router.on_replica_up(0, 0.0)
    assert router.route(request(), 0.0) == 0, "a replica that returns is empty"


def test_of_equal_replicas_the_one_with_the_fewest_requests_is_next() -> None:
    router = with_replicas(LeastLoaded(), 3)
    sent = [request() for _ in range(4)]
    assert [router.route(each, 0.0) for each in sent] == [0, 1, 2, 0]
    for replica, each in ((0, sent[3]), (1, sent[1]), (2, sent[2])):
        assert each.ticket is not None
        router.on_load_report(replica, LoadSnapshot(num_total_tokens=0, dispatched_watermarks=(each.ticket,)), 0.0)
    assert [router.route(request(), 0.0) for _ in range(2)] == [1, 2], (
        "all are idle, and the first one had two requests"
    )


def test_a_replica_that_returns_has_had_no_requests() -> None:
    router = with_replicas(LeastLoaded(), 2)
    assert [router.route(request(), 0.0) for _ in range(3)] == [0, 1, 0]
    for replica in range(2):
        router.on_replica_down(replica, 0.0)
        router.on_replica_up(replica, 0.0)
    assert [router.route(request(), 0.0) for _ in range(3)] == [0, 1, 0]


def test_no_report_of_an_earlier_life_counts_tickets_of_the_next() -> None:
    router = with_replicas(LeastLoaded(), 1)
    old, new = request(), request()
    router.route(old, 0.0)
    router.on_replica_down(0, 0.0)
    router.on_replica_up(0, 0.0)
    router.route(new, 0.0)
    assert old.ticket is not None
    assert new.ticket is not None
    assert old.ticket[0] != new.ticket[0]
