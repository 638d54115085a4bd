"""The reports of the reference scheduler and their steps: events, metrics, and their order around the device."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from kit.reference_scheduler import drain

from scheduler_components import AllBlocksCleared, CacheIntegrityError, ParallelState
from scheduler_components.metrics.forward_pass_metrics import decode_forward_pass, encode_forward_pass
from scheduler_components.scheduling.composition import Clocks, SchedulerSinks
from scheduler_components.scheduling.dynamic_chunk_sizer import PrefillLatencyFit
from scheduler_components.testing import VirtualClock
from scheduler_components.testing.fake_device import InstantDevice as FunctionDevice
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import ForwardPassMetrics, RequestSpan, SpanStats, TraceParent
from scheduler_engine.device.device import DeviceOutput, ScheduledBatch
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler


class SpanList(ListSink[RequestSpan]):
    wants_reports = True

    def stats(self) -> SpanStats:
        return SpanStats(exported=len(self.sent))


def test_each_chunk_is_stored_in_the_step_that_computed_it(make_bench: Callable) -> None:
    bench = make_bench(chunk_tokens=6)
    bench.submit("r", range(20), 2)
    stored = []
    for _ in bench.scheduler.drain():
        stored.append(len(bench.stored_tokens()))
    assert stored == [4, 12, 16, 20, 20]  # 6, 12, 18 and 20 tokens computed, whole pages published; then one decode
    assert bench.stored_tokens() == list(range(20))


def test_output_is_cached_at_the_end_except_its_last_token(make_bench: Callable) -> None:
    bench = make_bench()
    request = bench.submit("r", range(6), 7)
    bench.drain()
    assert bench.stored_tokens() == [*range(6), *request.output_ids[:6]]


def test_concurrent_requests_with_one_prompt_store_it_once(make_bench: Callable) -> None:
    bench = make_bench()
    requests = [bench.submit(f"r{index}", range(9), 3) for index in range(3)]
    bench.scheduler.step()
    assert bench.stored_tokens() == list(range(8))
    assert len({tuple(request.pages[:2]) for request in requests}) == 1
    assert len({request.pages[2] for request in requests}) == 3
    bench.drain()
    assert bench.scheduler.cache.used_tokens == 0


def test_events_are_sent_between_launch_and_wait(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("r", range(8))
    bench.scheduler.step()
    assert bench.journal == ["launch", "idle", "wait", "publish"]


def test_batches_carry_time_and_stream_index(make_bench: Callable) -> None:
    bench = make_bench(ParallelState.from_tp_rank(2, tp_size=4, attn_dp_size=2))
    bench.submit("r", range(8))
    bench.drain()
    assert [(batch.ts, batch.attn_dp_rank) for batch in bench.publisher.batches] == [(1_700_000_000.0, 1)]


def test_a_cleared_cache_publishes_the_event_immediately(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("r", range(8))
    bench.scheduler.step()
    bench.submit("holds its pages", range(8), 2)
    bench.scheduler.step()
    with pytest.raises(CacheIntegrityError, match="locked"):
        bench.scheduler.clear_cache()
    bench.drain()
    bench.scheduler.clear_cache()
    assert bench.publisher.events()[-1] == AllBlocksCleared()
    bench.submit("again", range(8))
    assert bench.drain()[0].num_prefill_tokens == 8


def test_every_step_reports_and_ranks_that_do_not_report_stay_silent(make_bench: Callable) -> None:
    leader = make_bench(ParallelState.from_tp_rank(0, tp_size=2), kv_metrics_every_steps=2)
    follower = make_bench(ParallelState.from_tp_rank(1, tp_size=2), kv_metrics_every_steps=2)
    for bench in (leader, follower):
        bench.submit("r", range(8), 6)
        assert len(bench.drain()) == 6
    assert [stats.load.num_running_reqs for stats in leader.sink.stats] == [1, 1, 1, 1, 1, 0]
    counts = [stats.counters.generation_tokens_total for stats in leader.sink.stats]
    assert counts == [1, 1, 1, 1, 1, 6], "counters are read every 32nd step, and when nothing is left to do"
    assert leader.sink.stats[-1].load.num_running_reqs == 0
    assert [metrics.request_active_slots for metrics in leader.sink.kv_metrics] == [1, 1, 0]
    assert leader.publisher.batches
    assert (follower.sink.stats, follower.sink.kv_metrics, follower.publisher.batches) == ([], [], [])


def test_close_sends_pending_batches_and_closes_both_sinks(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("r", range(7), 20)
    bench.scheduler.step()
    bench.scheduler.step()
    bench.scheduler.abort("r")  # its second page is full by now and goes to the cache
    bench.scheduler.close()
    bench.scheduler.close()
    assert bench.journal[-3:] == ["publish", "shutdown", "shutdown"]
    assert len(bench.stored_tokens()) == 8
    assert bench.sink.closed


def test_an_idle_step_is_harmless(make_bench: Callable) -> None:
    bench = make_bench()
    result = bench.scheduler.step()
    assert (result.step, result.num_updated_requests, result.num_prefill_tokens) == (1, 0, 0)
    assert bench.journal == []
    assert not bench.scheduler.has_work


def test_after_a_clear_waiting_requests_have_no_cached_tokens(make_bench: Callable) -> None:
    """Also in the namespace of other weights, in which the same tokens are not found."""
    bench = make_bench(max_running_requests=1)
    bench.submit("first", range(8))
    bench.drain()
    bench.submit("waits", range(8))
    assert bench.scheduler.load.get_loads().num_waiting_uncached_tokens < 8
    bench.scheduler.clear_cache("v2")
    assert bench.scheduler.load.get_loads().num_waiting_uncached_tokens == 8
    bench.drain()
    assert bench.publisher.events()[-1].extra_keys == (("weight_version=v2",),) * 2


def test_each_batch_is_reported_to_planners_whose_fit_is_the_schedulers_own() -> None:
    """Durations follow the batch, so that both fits have something to find."""
    passes, now = ListSink[ForwardPassMetrics](), VirtualClock(0.0)

    def compute(batch: ScheduledBatch) -> DeviceOutput:
        now.now_s += 0.01 + 1e-4 * batch.num_prefill_tokens + 1e-6 * sum(chunk.end**2 for chunk in batch.chunks)
        return DeviceOutput(tuple(7 for _ in batch.chunks))

    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=4, kv_tokens=256, chunk_tokens=8),
        ParallelState.trivial(),
        FunctionDevice(compute),
        sinks=SchedulerSinks(forward_passes=passes, worker_id="w7"),
        clocks=Clocks(monotonic=now),
    )
    fit = PrefillLatencyFit()
    for length in (20, 37, 64, 61):
        drain(scheduler, EngineRequest(f"r{length}", range(length), SamplingLimits(max_new_tokens=3)))
        scheduler.clear_cache()
    for metrics in passes.sent:
        fit.observe_metrics(decode_forward_pass(encode_forward_pass(metrics)))
    assert fit.num_steps > 16
    own = scheduler.batcher.conditions.chunk_sizer.fit.model()
    assert own is not None
    assert fit.model() == own
    first = [msgspec.structs.astuple(metrics.scheduled_requests) for metrics in passes.sent[:5]]
    assert [(*each[:2], *each[3:6]) for each in first] == [
        (1, 8, 0, 0, 0), (1, 8, 8, 0, 0), (1, 4, 16, 0, 0), (0, 0, 0, 1, 21), (0, 0, 0, 1, 22),
    ]  # fmt: skip
    assert {metrics.worker_id for metrics in passes.sent} == {"w7"}
    assert [metrics.counter_id for metrics in passes.sent] == list(range(len(passes.sent)))
    scheduler.close()
    assert passes.num_closed == 1


def test_a_batch_that_fails_is_not_reported_to_planners(make_bench: Callable) -> None:
    bench, passes = make_bench(), ListSink[ForwardPassMetrics]()
    bench.scheduler.forward_passes.sink = passes
    bench.device.answers.append(RuntimeError("the device is gone"))
    bench.submit("r", range(8))
    bench.drain()
    assert (passes.sent, bench.scheduler.forward_passes.stats().failed) == ([], 0)


def test_the_pages_of_a_retracted_request_are_no_hit_of_its_span(make_bench: Callable) -> None:
    bench, sink = make_bench(), SpanList()
    bench.scheduler.request_metrics.tracer.sink = sink
    request = bench.submit("r", range(12), 3)
    bench.scheduler.step()
    bench.scheduler.retract_all()
    bench.drain()
    assert request.num_cached_tokens == 12
    assert [span.attributes["gen_ai.usage.cached_tokens"] for span in sink.sent] == [0]


def test_an_ended_request_has_a_span(make_bench: Callable) -> None:
    bench, sink = make_bench(), SpanList()
    bench.scheduler.request_metrics.tracer.sink = sink
    bench.submit("warm", range(9))
    bench.drain()
    parent = TraceParent("00-1")
    request = EngineRequest("r", range(9), SamplingLimits(max_new_tokens=2))
    request.trace = parent
    bench.scheduler.submit(request)
    bench.drain()
    bench.submit("aborted", range(9), 5)
    bench.scheduler.abort("aborted")
    bench.device.answers.append(RuntimeError("the device is gone"))
    bench.submit("failed", range(9))
    bench.drain()
    by_rid = {str(span.attributes["gen_ai.request.id"]): span for span in sink.sent}
    ends = {rid: span.attributes["gen_ai.response.finish_reasons"] for rid, span in by_rid.items()}
    assert ends == {"warm": ("length",), "r": ("length",), "aborted": ("abort",), "failed": ("error",)}
    assert [rid for rid, span in by_rid.items() if span.is_error] == ["failed"]
    attributes = by_rid["r"].attributes
    assert (by_rid["r"].parent, attributes["gen_ai.usage.cached_tokens"]) == (parent, 8)
    counts = [attributes[f"gen_ai.{name}"] for name in ("usage.prompt_tokens", "usage.completion_tokens")]
    assert [*counts, attributes["gen_ai.request.max_tokens"]] == [9, 2, 2]
    bench.scheduler.close()
    assert sink.num_closed == 1
