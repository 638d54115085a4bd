"""The rules of Simulation in numbers that a reader can add up: every step takes exactly 10 ms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import attrs
import pytest
from kit.recording_router import RecordingRouter

from scheduler_components import ConfigError
from scheduler_engine.simulation import (
    CostModel,
    LeastLoaded,
    Outage,
    ReplicaConfig,
    RoundRobin,
    Router,
    Scaling,
    SimulatedRequest,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TierConfig,
    TimelinePoint,
    TraceRequest,
    encode_report,
)

MS = 1_000_000
STEP_10_MS = CostModel(base_ms=10, prefill_us_per_token=0, decode_us_per_request=0, context_us_per_1k_tokens=0)
SMALL = ReplicaConfig(
    page_size=4, kv_tokens=256, max_running_requests=4, max_prefill_tokens=64, chunk_tokens=32, cost=STEP_10_MS
)
ONE = SimulationConfig(replica=SMALL, num_replicas=1, sample_s=10.0)
TWO = attrs.evolve(ONE, num_replicas=2)


def recorded(index: int, arrival_s: float, prompt: int = 8, output: int = 3) -> TraceRequest:
    return TraceRequest(index=index, arrival_s=arrival_s, input_length=prompt, output_length=output, hash_ids=(index,))


@dataclass(slots=True, kw_only=True)
class Run:
    """A finished simulation."""

    report: SimulationReport
    router: RecordingRouter

    def times_ms(self, index: int) -> tuple[float, float, float]:
        """Return when a request was admitted, got its first token, and ended."""
        request = next(request for _, _, request in self.router.routed if request.recorded.index == index)
        return request.admitted_ns / MS, request.first_token_ns / MS, request.finished_ns / MS


def simulate(config: SimulationConfig, arrivals: Sequence[TraceRequest], router: Router | None = None) -> Run:
    recording = RecordingRouter(inner=router or RoundRobin())
    simulation = Simulation(config=config, router=recording, arrivals=arrivals)
    for _ in simulation.run():
        pass
    return Run(report=simulation.report(), router=recording)


both = pytest.mark.parametrize("fast", [True, False])
"""With and without fast-forward."""


@both
def test_the_figures_of_one_request(fast: bool) -> None:
    run = simulate(attrs.evolve(ONE, fast_forward=fast), [recorded(0, 1.0, prompt=8, output=4)])
    assert run.times_ms(0) == (1000, 1010, 1040)
    report, replica = run.report, run.report.replicas[0]
    assert (report.duration_s, report.queue_s.max, report.ttft_s.max, report.e2e_s.max) == (0.04, 0.0, 0.01, 0.04)
    assert (report.tpot_s.max, report.output_tokens_per_s, report.requests_per_s) == (0.01, 100.0, 25.0)
    assert (report.prompt_tokens, report.generated_tokens, report.recomputed_tokens) == (8, 4, 0)
    assert (replica.num_steps, replica.busy_share, replica.prefill_tokens, replica.decode_tokens) == (4, 1.0, 8, 3)
    assert (replica.peak_running, replica.num_requests, replica.num_retractions) == (1, 1, 0)
    [(_, _, request)] = run.router.routed
    assert (request.num_output_tokens, len(request.token_ids)) == (4, 8), "the tokens of an ended request are dropped"


@both
def test_a_faster_device_takes_less_time(fast: bool) -> None:
    config = attrs.evolve(ONE, fast_forward=fast, replica=attrs.evolve(SMALL, speed=4.0))
    assert simulate(config, [recorded(0, 1.0, output=4)]).times_ms(0) == (1000, 1002.5, 1010)


@both
@pytest.mark.parametrize(("arrival_s", "admitted_ms"), [(0.05, 50), (0.051, 60), (0.059999999, 60), (0.06, 60)])
def test_a_request_is_received_by_the_next_step(fast: bool, arrival_s: float, admitted_ms: int) -> None:
    """Arrivals of the time at which a step begins come before it."""
    run = simulate(attrs.evolve(ONE, fast_forward=fast), [recorded(0, 0.0, output=20), recorded(1, arrival_s)])
    assert run.times_ms(1) == (admitted_ms, admitted_ms + 10, admitted_ms + 30)
    assert run.times_ms(0) == (0, 10, 200)


@both
def test_all_requests_that_arrive_in_a_step_are_received_together(fast: bool) -> None:
    arrivals = [recorded(0, 0.0, output=20), recorded(1, 0.051), recorded(2, 0.053), recorded(3, 0.058)]
    run = simulate(attrs.evolve(ONE, fast_forward=fast), arrivals)
    assert [run.times_ms(index)[0] for index in (1, 2, 3)] == [60, 60, 60]


class BusyRouter(RoundRobin):
    """Lets requests wait while ``most`` are in flight."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.num_in_flight = most, 0

    def route(self, request: SimulatedRequest, now_s: float) -> int | None:
        if self.num_in_flight == self.most:
            return None
        self.num_in_flight += 1
        return RoundRobin.route(self, request, now_s)

    def on_finished(self, replica: int, request: SimulatedRequest, now_s: float) -> None:
        self.num_in_flight -= 1


@both
def test_a_request_that_waits_at_the_router_is_sent_when_another_ends(fast: bool) -> None:
    """Meanwhile a replica with work takes single steps, because the request may reach it after each of them."""
    arrivals = [recorded(0, 0.0, output=40), recorded(1, 0.0, output=5), recorded(2, 0.0, output=5)]
    run = simulate(attrs.evolve(ONE, fast_forward=fast), arrivals, BusyRouter(2))
    assert run.times_ms(1) == (0, 10, 50)
    assert run.times_ms(2) == (50, 60, 100)
    assert run.times_ms(0) == (0, 10, 400)
    assert run.report.queue_s.max == 0.05


@both
def test_reports_and_events_come_after_their_lags(fast: bool) -> None:
    """A report comes after the first step, at the interval, and when the replica has become idle."""
    config = attrs.evolve(ONE, fast_forward=fast, load_interval_s=0.03, load_lag_s=0.004, event_lag_s=0.002)
    run = simulate(config, [recorded(0, 0.0, output=11)])
    assert [time_ns / MS for _, time_ns, _ in run.router.reports] == [14, 44, 74, 104, 114]
    assert [load.timestamp for _, _, load in run.router.reports] == [0.01, 0.04, 0.07, 0.1, 0.11]
    assert [load.num_running_reqs for _, _, load in run.router.reports] == [1, 1, 1, 1, 0]
    assert [time_ns / MS for _, time_ns in run.router.event_times] == [12, 112], "the prompt, and the output at the end"
    assert run.router.finished == [(0, 110 * MS, "r0")]


def test_a_report_includes_the_requests_that_were_received() -> None:
    run = simulate(ONE, [recorded(0, 0.0, output=2), recorded(1, 0.0, output=9)], LeastLoaded())
    assert [load.dispatched_watermarks for _, _, load in run.router.reports][-1] == (("router-1", 2),)


@both
def test_goodput_counts_requests_within_both_bounds(fast: bool) -> None:
    arrivals = [recorded(0, 0.0, output=11), recorded(1, 0.0, prompt=300), recorded(2, 0.005, output=1)]

    def goodput(ttft_slo_s: float, tpot_slo_s: float) -> tuple[float, float]:
        config = attrs.evolve(ONE, fast_forward=fast, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
        report = simulate(config, arrivals).report
        assert (report.num_refused, report.duration_s, report.ttft_s.max) == (1, 0.11, 0.015)
        assert report.tpot_s.num_values == 1, "a single token has no time per token"
        return report.goodput_share, report.goodput_per_s

    assert goodput(0.015, 0.01) == (2 / 3, pytest.approx(2 / 0.11)), "the bounds are inclusive; one of three is refused"
    assert goodput(0.0149, 0.01) == (1 / 3, pytest.approx(1 / 0.11))
    assert goodput(0.015, 0.0099) == (1 / 3, pytest.approx(1 / 0.11)), "a single token has no time per token"


def test_a_first_token_at_its_deadline_is_in_time() -> None:
    arrivals = [attrs.evolve(recorded(at, at), deadline_s=deadline_s) for at, deadline_s in enumerate((0.01, 0.0099))]
    assert simulate(ONE, arrivals).report.deadline_share == 0.5


def points(run: Run) -> list[tuple[int, int, int, int]]:
    def point(each: TimelinePoint) -> tuple[int, int, int, int]:
        return round(each.time_s * 1e3), each.num_running, each.num_waiting, each.num_replicas

    return [point(each) for each in run.report.timeline]


@both
def test_the_timeline_counts_every_request_once(fast: bool) -> None:
    """One slot and four requests. The replica fails at 55 ms, is missed at 75 ms and returns at 115 ms."""
    config = attrs.evolve(
        ONE,
        fast_forward=fast,
        sample_s=0.02,
        replica=attrs.evolve(SMALL, max_running_requests=1),
        outages=(Outage(replica=0, at_s=0.055, down_s=0.06, detection_s=0.02),),
    )
    arrivals = [recorded(0, 0.0, output=4), *(recorded(index, 0.0, output=8) for index in (1, 2)), recorded(3, 0.019)]
    run = simulate(config, arrivals)
    assert points(run)[:9] == [
        (0, 0, 0, 1),  # samples come before the arrivals of their time
        (20, 1, 3, 1),  # the last one arrived during a step, which has not received it
        (40, 0, 3, 1),  # r0 has ended, and the step that admits r1 comes after the sample
        (60, 0, 3, 0),  # away, and the router does not know
        (80, 0, 3, 0),  # they wait at the router
        (100, 0, 3, 0),
        (120, 1, 2, 1),
        (140, 1, 2, 1),
        (160, 1, 2, 1),
    ]
    assert run.router.changes == [(0, 0, True), (0, 75 * MS, False), (0, 115 * MS, True)]
    assert run.times_ms(1) == (40, 50, 175), "two tokens before the failure, six after the return"
    assert run.report.num_migrations == 3
    assert run.report.recomputed_tokens == 8 + 1, "the prompt and one token of r1; the others had computed nothing"


def test_the_timeline_ends_when_all_requests_are_served() -> None:
    config = attrs.evolve(ONE, sample_s=0.02, outages=(Outage(replica=0, at_s=5.0),))
    run = simulate(config, [recorded(0, 0.0, output=3), recorded(1, 0.0, prompt=300)])
    assert run.report.num_refused == 1
    assert [time_ms for time_ms, *_ in points(run)] == [0, 20, 40]
    assert run.report.timeline[1].token_usage == pytest.approx(12 / 256)


@both
def test_requests_that_were_sent_to_a_failed_replica_are_lost_until_it_is_missed(fast: bool) -> None:
    config = attrs.evolve(TWO, fast_forward=fast, outages=(Outage(replica=1, at_s=0.025, detection_s=0.05),))
    arrivals = [recorded(0, 0.0, output=2), recorded(1, 0.0, output=6), recorded(2, 0.03), recorded(3, 0.03)]
    run = simulate(config, arrivals)
    assert [(replica, time_ns // MS) for replica, time_ns, _ in run.router.routed] == [
        (0, 0),
        (1, 0),
        (0, 30),
        (1, 30),
        (0, 75),
        (0, 75),
    ]
    assert run.times_ms(1) == (0, 10, 105), "three tokens by 30 ms, the end of the step in which it failed, three more"
    assert run.times_ms(3) == (75, 85, 105)
    assert run.report.recomputed_tokens == 8 + 2
    assert run.report.replicas[1].num_requests == 0


@both
def test_chunks_of_a_prompt_are_computed_again_after_a_failure(fast: bool) -> None:
    """The third of three chunks begins at 20 ms. The replica fails at 15 ms, after two."""
    config = attrs.evolve(ONE, fast_forward=fast, outages=(Outage(replica=0, at_s=0.015, down_s=0.1),))
    run = simulate(config, [recorded(0, 0.0, prompt=96)])
    assert run.report.replicas[0].prefill_tokens == 96 + 64
    assert run.report.recomputed_by_cause == {"preemption": 0, "migration": 64}


def test_a_replica_that_returns_before_it_is_missed_is_missed_then() -> None:
    config = attrs.evolve(ONE, outages=(Outage(replica=0, at_s=0.02, down_s=0.03, detection_s=9.0),))
    run = simulate(config, [recorded(0, 0.0, output=4)])
    assert run.router.changes == [(0, 0, True), (0, 50 * MS, False), (0, 50 * MS, True)]
    assert run.times_ms(0) == (0, 10, 70)
    assert run.report.num_migrations == 1


def test_a_replica_that_returns_reports_after_its_first_step() -> None:
    outage = Outage(replica=0, at_s=0.055, down_s=0.005, detection_s=0.0)
    run = simulate(attrs.evolve(ONE, load_interval_s=9.0, outages=(outage,)), [recorded(0, 0.0, output=50)])
    assert [time_ns // MS for _, time_ns, _ in run.router.reports] == [10, 70, 500]


@both
def test_a_replica_that_fails_while_it_is_drained_is_not_reported_again(fast: bool) -> None:
    """Its requests are routed again, and it does not return."""
    config = attrs.evolve(
        TWO,
        fast_forward=fast,
        scalings=(Scaling(at_s=0.02, num_replicas=1),),
        outages=(Outage(replica=1, at_s=0.045, down_s=0.02, detection_s=0.01),),
    )
    run = simulate(config, [recorded(0, 0.0, output=9), recorded(1, 0.0, output=9)])
    assert run.router.changes == [(0, 0, True), (1, 0, True), (1, 20 * MS, False)]
    assert (run.report.num_finished, run.report.num_migrations) == (2, 1)
    assert run.times_ms(1) == (0, 10, 100), "five tokens by 50 ms, routed at 55 ms, received at 60 ms"
    assert run.report.replica_fairness == 1.0, "only one replica serves to the end"


def test_a_drained_replica_ends_its_requests_and_is_not_heard() -> None:
    """`RecordingRouter` refuses calls about replicas that do not serve."""
    config = attrs.evolve(TWO, load_interval_s=0.01, scalings=(Scaling(at_s=0.02, num_replicas=1),))
    run = simulate(config, [recorded(0, 0.0), recorded(1, 0.0, output=9), recorded(2, 0.03)])
    assert run.times_ms(1) == (0, 10, 90)
    assert [rid for _, _, rid in run.router.finished] == ["r0", "r2"]
    assert [each.num_requests for each in run.report.replicas] == [2, 1]


def test_what_a_failed_replica_sent_is_dropped_after_it_was_missed() -> None:
    """Its events of 10 ms would come at 60 ms, when another scheduler with an empty cache serves there."""
    outage = Outage(replica=0, at_s=0.02, down_s=0.02, detection_s=0.01)
    run = simulate(attrs.evolve(ONE, event_lag_s=0.05, outages=(outage,)), [recorded(0, 0.0, output=6)])
    assert run.router.changes == [(0, 0, True), (0, 30 * MS, False), (0, 40 * MS, True)]
    assert [time_ns // MS for _, time_ns in run.router.event_times] == [100, 130]
    assert run.times_ms(0) == (0, 10, 80)


def test_the_router_learns_of_an_end_before_an_arrival_of_the_same_time() -> None:
    run = simulate(ONE, [recorded(0, 0.0, output=5), recorded(1, 0.05)], BusyRouter(1))
    assert [(replica, time_ns // MS) for replica, time_ns, _ in run.router.routed] == [(0, 0), (0, 50)]


@pytest.mark.parametrize(
    "change",
    [
        {"outages": (Outage(replica=1, at_s=0.1, detection_s=0.0),)},
        {"scalings": (Scaling(at_s=0.1, num_replicas=1),)},
        {"num_replicas": 1},
    ],
)
def test_a_router_may_not_name_a_replica_that_does_not_serve(change: dict[str, object]) -> None:
    class Stubborn(RoundRobin):
        def route(self, request: SimulatedRequest, now_s: float) -> int | None:
            return 1

    with pytest.raises(ConfigError, match=r"router=1: is no replica that serves"):
        simulate(attrs.evolve(TWO, **change), [recorded(0, 0.0), recorded(1, 0.2)], Stubborn())


@pytest.mark.parametrize(
    ("outages", "problem"),
    [
        ([(2, 0.5)], "outage=2: fails at 0.5 s, and the replica starts at 1 s"),
        ([(2, 1.0)], "outage=2: fails at 1 s, and the replica starts at 1 s"),
        ([(5, 1.0)], "outage=5: is not one of 3 replicas"),
        ([(0, 1.0), (0, 9.0, 1.0)], "outage=0: fails at 9 s, and is away then"),
        ([(0, 1.0, 2.0), (0, 2.0, 9.0)], "outage=0: fails at 2 s, and is away then"),
        ([(0, 3.0), (0, 1.0, 2.0)], "outage=0: fails at 3 s, and is away then"),
        ([(0, 1.0, 2.0), (0, 1.0, 2.0)], "outage=0: fails at 1 s, and is away then"),
    ],
)
def test_a_replica_that_does_not_run_cannot_fail(outages: list[tuple[int, ...]], problem: str) -> None:
    config = attrs.evolve(TWO, scalings=(Scaling(at_s=1.0, num_replicas=3),))
    made = [
        Outage(replica=replica, at_s=at_s, down_s=down_s[0] if down_s else None) for replica, at_s, *down_s in outages
    ]
    for order in (made, made[::-1]):
        with pytest.raises(ConfigError, match=problem):
            attrs.evolve(config, outages=tuple(order))


def test_replicas_may_fail_while_they_run() -> None:
    outages = (Outage(replica=2, at_s=1.01), Outage(replica=0, at_s=0.0, down_s=2.0), Outage(replica=0, at_s=2.01))
    config = attrs.evolve(TWO, scalings=(Scaling(at_s=1.0, num_replicas=3),), outages=outages)
    assert simulate(config, [recorded(0, 2.0)]).report.num_finished == 1


def test_steps_that_begin_together_are_taken_by_index() -> None:
    """The second replica gets its request first. Both steps end at 10 ms, and the first replica is heard first."""

    class Backwards(RoundRobin):
        def route(self, request: SimulatedRequest, now_s: float) -> int | None:
            return 1 - request.recorded.index

    run = simulate(TWO, [recorded(0, 0.0, output=1), recorded(1, 0.0, output=1)], Backwards())
    assert run.router.finished == [(0, 10 * MS, "r1"), (1, 10 * MS, "r0")]


@pytest.mark.parametrize("make_router", [RoundRobin, LeastLoaded])
def test_runs_without_a_decision_log_skip_steps_in_bulk_and_agree(make_router: Callable[[], Router]) -> None:
    """Without a log `fast_forward` appends the tokens of all steps together, as `simulate trace` does."""
    config = attrs.evolve(
        TWO, replica=attrs.evolve(SMALL, kv_tokens=136, new_token_ratio=0.1, cost=CostModel()), load_interval_s=0.03
    )
    arrivals = [recorded(index, 0.013 * index, prompt=20 + index, output=40) for index in range(16)]
    fast = simulate(config, arrivals, make_router())
    slow = simulate(attrs.evolve(config, fast_forward=False), arrivals, make_router())
    assert encode_report(fast.report) == encode_report(slow.report)
    assert fast.router.reports == slow.router.reports
    assert fast.router.event_times == slow.router.event_times
    assert fast.report.num_retractions > 3
    assert fast.report.recomputed_tokens > 0
    assert all(each.decision_tip == 0 for each in fast.report.replicas)


def test_the_rates_of_a_replica_begin_with_its_start() -> None:
    """A window from the beginning of the simulation on would show a replica that was added slower than the first."""
    config = attrs.evolve(ONE, scalings=(Scaling(at_s=5.0, num_replicas=2),))
    run = simulate(config, [recorded(0, 0.0, output=40), recorded(1, 5.0, output=40)])
    first, added = (
        [load.gen_throughput for replica, _, load in run.router.reports if replica == index] for index in (0, 1)
    )
    assert first == pytest.approx(added)
    assert max(first) == 80, "40 tokens; the shortest window is half a second"


def test_the_duration_begins_with_an_arrival_that_is_refused() -> None:
    report = simulate(ONE, [recorded(0, 1.0, prompt=300), recorded(1, 2.0, output=4)]).report
    assert (report.num_refused, report.num_finished) == (1, 1)
    assert (report.duration_s, report.replicas[0].busy_share) == (1.04, pytest.approx(0.04 / 1.04))


@both
def test_the_work_for_requests_that_never_end_is_a_share_of_the_time(fast: bool) -> None:
    """One request ends after 30 ms. The replica of the other fails after 500 ms, and the first one before."""
    outages = (Outage(replica=0, at_s=0.2), Outage(replica=1, at_s=0.5))
    config = attrs.evolve(TWO, outages=outages, fast_forward=fast)
    report = simulate(config, [recorded(0, 0.0), recorded(1, 0.0, output=240)]).report
    assert (report.num_finished, report.num_unfinished, report.duration_s) == (1, 1, 0.03)
    assert [each.busy_share for each in report.replicas] == [pytest.approx(0.03 / 0.5), 1.0]


@both
def test_a_restart_ends_the_step_of_the_scheduler_that_failed(fast: bool) -> None:
    outage = Outage(replica=0, at_s=0.005, down_s=0.001, detection_s=0.0)
    report = simulate(attrs.evolve(ONE, outages=(outage,), fast_forward=fast), [recorded(0, 0.0)]).report
    assert (report.num_finished, report.replicas[0].busy_share) == (1, 1.0)


@both
def test_the_decisions_of_a_replica_include_those_before_its_restart(fast: bool) -> None:
    outage = Outage(replica=0, at_s=1.0, down_s=0.5, detection_s=0.0)
    config = attrs.evolve(ONE, outages=(outage,), fast_forward=fast, notes_decisions=True)
    tips = [
        simulate(config, [recorded(0, 0.0, output=output), recorded(1, 2.0)]).report.replicas[0].decision_tip
        for output in (3, 3, 9)
    ]
    assert tips[0] == tips[1] != tips[2]


def test_a_request_without_pages_loses_none_with_its_replica() -> None:
    outage = Outage(replica=0, at_s=0.105, down_s=2.0, detection_s=1.0)
    run = simulate(attrs.evolve(ONE, outages=(outage,)), [recorded(0, 0.0, output=60), recorded(1, 0.5)])
    lost = {request.rid: request.has_lost_replica for _, _, request in run.router.routed}
    assert (run.report.num_migrations, lost) == (2, {"r0": True, "r1": False})
    assert run.report.replicas[0].peak_running == 2, "one before the failure, both for a while after it"


def test_a_long_timeline_has_a_greater_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_engine.simulation.simulation._MAX_POINTS", 4)
    config = attrs.evolve(ONE, sample_s=1.0, scalings=(Scaling(at_s=9.5, num_replicas=2),))
    report = simulate(config, [recorded(0, 0.0), recorded(1, 13.0, output=240)]).report
    assert [point.time_s for point in report.timeline] == [0, 8, 16]
    assert [point.num_replicas for point in report.timeline] == [1, 1, 2]
    assert [len(each.running) for each in report.replicas] == [3, 3]
    assert report.settings["sample_s"] == 8.0
    short = simulate(config, [recorded(0, 0.0)]).report
    assert (len(short.timeline), short.settings["sample_s"]) == (2, 1.0)


def test_the_timeline_of_a_year_has_a_bound() -> None:
    report = simulate(attrs.evolve(ONE, sample_s=1.0), [recorded(0, 0.0), recorded(1, 366 * 24 * 3600.0)]).report
    assert report.num_finished == 2
    assert 4096 < len(report.timeline) <= 8193


_LARGE = ReplicaConfig(page_size=16, kv_tokens=2**20)
_TIERED = attrs.evolve(_LARGE, tiers=TierConfig(host_tokens=2**20))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        *[
            (
                partial(SimulationConfig, **settings),
                f"num_replicas={num}: have {pages:,} pages together, more than 268,435,456; give",
            )
            for settings, num, pages in (
                ({"num_replicas": 5000, "replica": _LARGE}, 5000, 5000 * 2**16),
                ({"scalings": (Scaling(at_s=1, num_replicas=5000),), "replica": _LARGE}, 5000, 5000 * 2**16),
                ({"num_replicas": 3000, "replica": _TIERED}, 3000, 3000 * 2**17),
            )
        ],
        (lambda: SimulationConfig(sample_s=1e-10), "sample_s=1e-10: is below a nanosecond"),
        (lambda: ReplicaConfig(kv_tokens=2**31), "kv_tokens=2147483648: is not a size"),
        (
            lambda: ReplicaConfig(kv_tokens=2**31 - 1, page_size=1),
            "kv_tokens=2147483647: has more than 16,777,216 pages",
        ),
        (lambda: ReplicaConfig(speed=1e-300), "speed=1e-300: is not a speed; give a number of at least 1e-06"),
        (lambda: CostModel(base_ms=1e300), r"base_ms=1e\+300: is not a cost"),
        (lambda: Scaling(at_s=1.0, num_replicas=10_001), "num_replicas=10001"),
        (lambda: Scaling(at_s=1e300, num_replicas=1), "at_s="),
        (lambda: Outage(replica=0, at_s=1e300), "at_s="),
        (lambda: Outage(replica=0, at_s=0.0, down_s=1e300), "down_s="),
        (lambda: SimulationConfig(event_lag_s=1e300), "event_lag_s="),
        (lambda: SimulationConfig(load_interval_s=1e300), "load_interval_s="),
        (lambda: SimulationConfig(ttft_slo_s=1e300), "ttft_slo_s="),
    ],
)
def test_impossible_sizes_and_times_are_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()
    SimulationConfig(num_replicas=4096, replica=_LARGE)


def test_a_step_of_centuries_is_refused() -> None:
    cost = attrs.evolve(STEP_10_MS, base_ms=1e9)
    config = attrs.evolve(ONE, replica=attrs.evolve(SMALL, speed=1e-6, cost=cost))
    with pytest.raises(ConfigError, match="speed=1e-06: lets a step end after centuries"):
        simulate(config, [recorded(index, index) for index in range(3)])
