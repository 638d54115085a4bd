"""A scheduler with a hierarchical cache: what it reports, what it waits for, and what comes back from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from scheduler_components.testing.fakes import ListSink

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.hicache import (
    HiCachePolicy,
    HiCacheStepper,
    HiRadixCache,
    HostPool,
    KeySpace,
    Placement,
    SimulatedDeviceMemory,
    ThreadPageMover,
    WritePolicy,
)
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.testing import ListOutputSink
from scheduler_components.values import CachedTokens, SchedulerStats
from scheduler_components.values.page_shape import PageShape
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.hicache_tiers import HiCacheTiers
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler, StepResult

SHAPE = PageShape(num_layers=1, layer_page_bytes=8)


@pytest.fixture
def open_tiers(stack: ExitStack) -> Callable[[WritePolicy], HiCacheTiers]:
    """A device of 16 pages, a host of 64, one rank."""

    def open_tiers(write: WritePolicy) -> HiCacheTiers:
        parallel, host, device = ParallelState.trivial(), HostPool(SHAPE, 64), SimulatedDeviceMemory(SHAPE, 16)
        placement = Placement()
        keys = KeySpace(model="m", dtype="d", page_size=4, layout="page_first", placement=placement, parallel=parallel)
        mover = ThreadPageMover(host=host, device=device, keys=keys)
        policy = HiCachePolicy(write=write)
        cache = HiRadixCache(page_size=4, capacity_tokens=64, host=host, num_host_pages=64, policy=policy)
        stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover)
        tiers = HiCacheTiers(stepper=stepper, mover=mover, host=host)
        stack.callback(tiers.close)
        return tiers

    return open_tiers


def serve(
    requests: Sequence[EngineRequest], tiers: HiCacheTiers | None, sinks: SchedulerSinks, **settings: float
) -> list[StepResult]:
    """Serve one request after the other, or all together if they may be preempted."""
    config = SchedulerConfig(page_size=4, kv_tokens=64, **settings)
    scheduler = Scheduler.compose(config, ParallelState.trivial(), SimulatedDevice(speed=1e9), tiers=tiers, sinks=sinks)
    results = []
    for request in requests:
        scheduler.submit(request)
        results += [] if settings else scheduler.drain()
    results += scheduler.drain()
    scheduler.close()
    return results


def test_each_step_reports_the_tiers_of_cached_prompts(open_tiers: Callable[..., HiCacheTiers]) -> None:
    """Three prompts of 40 tokens over a device of 64: when the first is repeated, only the host has all of it."""
    sink, outputs = ListSink[SchedulerStats](), ListOutputSink()
    limits = SamplingLimits(max_new_tokens=1)
    prompts = (("a", 0), ("b", 100), ("c", 200), ("a again", 0))
    requests = [EngineRequest(rid, range(first, first + 41), limits) for rid, first in prompts]
    tiers = open_tiers("write_through")
    serve(requests, tiers, SchedulerSinks(metrics=sink, outputs=outputs))
    tier_stats = sink.sent[-1].tiers
    assert tier_stats == tiers.stats()
    assert tier_stats is not None
    assert (tier_stats.prompt_tokens, tier_stats.device_hit_tokens + tier_stats.host_hit_tokens) == (4 * 41, 40)
    assert tier_stats.host_hit_tokens > 0
    last = outputs.deltas[-1].output
    assert (last.cached.device, last.cached.host) == (tier_stats.device_hit_tokens, tier_stats.host_hit_tokens)
    assert last.num_cached_tokens == 40


def test_a_scheduler_without_tiers_reports_none(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("r", range(8))
    bench.drain()
    assert bench.sink.stats[-1].tiers is None


class ComingFromStorage:
    """PrefetchQueue of a cache whose storage brings tokens 8 to 40 of one request, and lets it wait until then."""

    num_look_ahead = 3

    def __init__(self) -> None:
        self.spans = [("waits", (8, 40)), ("never-came", (0, 4))]

    def start(self, *_: object) -> None:
        pass

    def is_done(self, rid: str, *_: object, is_next: bool) -> bool:
        return not self.spans

    def record_admission(self, rid: str, *, cached_tokens: int, **_: int) -> CachedTokens:
        return CachedTokens(device=cached_tokens)

    def prefetched_spans(self) -> list[tuple[str, tuple[int, int]]]:
        return self.spans

    def cancel(self, rid: str) -> None:
        pass


def test_prefetched_tokens_are_not_counted_as_waiting(make_bench: Callable) -> None:
    bench = make_bench(kv_tokens=256)
    coming = ComingFromStorage()
    bench.scheduler.kv_cache.tiers = SimpleNamespace(prefetch_queue=coming, num_pages_in_transfer=0)
    bench.submit("waits", range(100))
    bench.scheduler.step()
    assert bench.sink.stats[-1].load.num_waiting_uncached_tokens == 100 - 32
    coming.spans = []
    bench.drain()
    assert bench.sink.stats[-1].load.num_waiting_uncached_tokens == 0


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_pages_of_a_preempted_request_come_back_from_the_host(
    open_tiers: Callable[..., HiCacheTiers], write: WritePolicy
) -> None:
    """Two requests overfill the device. Without tiers the tokens of the second are computed again, of which with a
    host only the last, unfinished page is."""
    outputs, num_computed_again = [], []
    for tiers in (opened := open_tiers(write), None):
        requests = [EngineRequest(f"r{at}", range(100 * at, 100 * at + 16), SamplingLimits(40)) for at in range(2)]
        results = serve(requests, tiers, SchedulerSinks(), new_token_ratio=0.0, min_new_token_ratio=0.0)
        assert [each.num_retractions for each in requests] == [0, 1], "the earliest waits for the copy of the other"
        num_computed_again.append(sum(result.num_prefill_tokens for result in results) - 2 * 16)
        outputs.append([each.output_ids for each in requests])
    assert outputs[0] == outputs[1]
    assert opened.stats().pages_loaded > 0
    assert num_computed_again[0] <= 4 < num_computed_again[1]
