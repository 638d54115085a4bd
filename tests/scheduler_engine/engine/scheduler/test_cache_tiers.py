"""A scheduler with a hierarchical cache reports the tiers of cached prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from scheduler_components.testing.fakes import ListSink

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.hicache import (
    HiCacheStepper,
    HiRadixCache,
    HostPool,
    KeySpace,
    Placement,
    SimulatedDeviceMemory,
    ThreadPageMover,
)
from scheduler_components.testing import ListOutputSink
from scheduler_components.values import SchedulerStats
from scheduler_components.values.page_shape import PageShape
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.hicache_tiers import HiCacheTiers
from scheduler_engine.engine.scheduler.request import Request
from scheduler_engine.engine.scheduler.scheduler import Scheduler, SchedulerSinks

CONFIG = SchedulerConfig(page_size=4, kv_tokens=64)
SHAPE = PageShape(num_layers=1, layer_page_bytes=8)


@pytest.fixture
def tiers() -> Iterator[HiCacheTiers]:
    """A device of 16 pages, a host of 64, one rank."""
    parallel = ParallelState.trivial()
    host, device = HostPool(SHAPE, 64), SimulatedDeviceMemory(SHAPE, CONFIG.kv_pages)
    keys = KeySpace(model="m", dtype="d", page_size=4, layout="page_first", placement=Placement(), parallel=parallel)
    mover = ThreadPageMover(host=host, device=device, keys=keys)
    cache = HiRadixCache(page_size=4, capacity_tokens=64, host=host, num_host_pages=64)
    stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover)
    tiers = HiCacheTiers(stepper=stepper, mover=mover, host=host)
    yield tiers
    tiers.close()


def test_each_step_reports_the_tiers_of_cached_prompts(tiers: HiCacheTiers) -> None:
    """Three prompts of 40 tokens over a device of 64: when the first is repeated, only the host has all of it."""
    sink, outputs = ListSink[SchedulerStats](), ListOutputSink()
    scheduler = Scheduler.compose(
        CONFIG,
        ParallelState.trivial(),
        SimulatedDevice(speed=1e9),
        tiers=tiers,
        sinks=SchedulerSinks(metrics=sink, outputs=outputs),
    )
    for rid, first in (("a", 0), ("b", 100), ("c", 200), ("a again", 0)):
        scheduler.submit(Request(rid, range(first, first + 41), SamplingLimits(max_new_tokens=1)))
        for _ in scheduler.drain():
            pass
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
