"""Refusals, preemptions, replaced policies and waits reach the statistics."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_components.testing import VirtualClock
from scheduler_components.values import RequestHints
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.scheduler.request import EngineRequest


class PreemptsTheFirst:
    """A preemption policy of a user."""

    def select_victim(self, candidates: list[EngineRequest]) -> EngineRequest:
        return candidates[0]


def test_refusals_and_preemptions_are_counted(make_bench: Callable) -> None:
    bench = make_bench(new_token_ratio=0.0, min_new_token_ratio=0.0, max_running_requests=3)
    for number in range(5):
        bench.submit(f"r{number}", range(100 * number, 100 * number + 12), 30)
    bench.drain()
    stats = bench.sink.stats[-1].batching
    retracted = bench.sink.stats[-1].counters.num_retractions_total
    assert stats.preempted_latest_arrival == retracted > 0
    assert stats.refused_slots > 0 and stats.refused_pages > 0
    assert (stats.refused_watermark, stats.refused_tenant, stats.refused_not_ready) == (0, 0, 0)
    assert (stats.admitted_high, stats.admitted_normal, stats.admitted_low) == (0, 5, 0)


def test_policies_of_a_user_are_counted_as_others_and_failing_ones_as_replaced(make_bench: Callable) -> None:
    bench = make_bench(new_token_ratio=0.0, min_new_token_ratio=0.0)
    bench.scheduler.batcher.preemption = PreemptsTheFirst()
    bench.scheduler.batcher.policy = None
    for number in range(4):
        bench.submit(f"r{number}", range(100 * number, 100 * number + 12), 30)
    bench.drain()
    stats = bench.sink.stats[-1].batching
    assert stats.preempted_other == bench.sink.stats[-1].counters.num_retractions_total > 0
    assert stats.policies_replaced == 1


def test_waits_are_summed_by_priority(make_bench: Callable) -> None:
    bench = make_bench(max_running_requests=1, schedule_policy="priority")
    clock = VirtualClock(0.0)
    bench.scheduler.request_metrics.latencies.clock = clock
    for number, priority in enumerate((0, -1, 5, 0)):
        request = EngineRequest(f"r{number}", range(8), SamplingLimits(1), hints=RequestHints(priority=priority))
        bench.scheduler.submit(request)
    while bench.scheduler.has_work:
        bench.scheduler.step()
        clock.now_s += 1.0
    stats = bench.scheduler.metrics.sources["batching"].stats()
    assert (stats.admitted_high, stats.admitted_normal, stats.admitted_low) == (1, 2, 1)
    assert (stats.waited_high_s, stats.waited_normal_s, stats.waited_low_s) == (0.0, 1.0 + 2.0, 3.0)
