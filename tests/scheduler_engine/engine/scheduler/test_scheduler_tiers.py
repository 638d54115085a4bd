"""Tokens that come from storage do not count as waiting, and preempted requests come back from the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.values import CachedTokens
from scheduler_components.values.page_shape import PageShape
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import Request
from scheduler_engine.engine.scheduler.scheduler import Scheduler


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


def test_prefetched_tokens_are_not_counted_as_waiting(make_bench: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(kv_tokens=256)
    coming = ComingFromStorage()
    monkeypatch.setattr(type(bench.scheduler.tiers), "prefetch_queue", coming)
    bench.submit("waits", range(100))
    bench.scheduler.step()
    assert bench.sink.stats[-1].load.num_waiting_uncached_tokens == 100 - 32
    coming.spans = []
    bench.drain()
    assert bench.sink.stats[-1].load.num_waiting_uncached_tokens == 0


CONFIG = SchedulerConfig(page_size=4, kv_tokens=64, new_token_ratio=0.0, min_new_token_ratio=0.0)


def serve_two(tiers: CacheTiers | None) -> tuple[int, list[Request]]:
    """Serve two requests that together overfill the device. Return the prefilled tokens and the requests."""
    scheduler = Scheduler.compose(CONFIG, ParallelState.trivial(), SimulatedDevice(speed=1e9), tiers=tiers)
    requests = [Request(f"r{at}", range(100 * at, 100 * at + 16), SamplingLimits(40)) for at in range(2)]
    for request in requests:
        scheduler.submit(request)
    num_prefilled = sum(result.num_prefill_tokens for result in scheduler.drain())
    scheduler.close()
    return num_prefilled, requests


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_pages_of_a_preempted_request_come_back_from_the_host(write: str) -> None:
    """Without tiers its tokens are computed again. With a host only the last, unfinished page is."""
    pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")
    from scheduler_components.hicache import (
        HiCachePolicy,
        HiCacheStepper,
        HiRadixCache,
        HostPool,
        KeySpace,
        Placement,
        SimulatedDeviceMemory,
        ThreadPageMover,
    )
    from scheduler_engine.engine.rank.hicache_tiers import HiCacheTiers

    parallel, shape = ParallelState.trivial(), PageShape(num_layers=1, layer_page_bytes=8)
    host, device = HostPool(shape, 64), SimulatedDeviceMemory(shape, CONFIG.kv_pages)
    keys = KeySpace(model="m", dtype="d", page_size=4, layout="page_first", placement=Placement(), parallel=parallel)
    mover = ThreadPageMover(host=host, device=device, keys=keys)
    policy = HiCachePolicy(write=write)
    cache = HiRadixCache(page_size=4, capacity_tokens=64, host=host, num_host_pages=64, policy=policy)
    tiers = HiCacheTiers(
        stepper=HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover), mover=mover, host=host
    )
    num_prefilled, requests = serve_two(tiers)
    num_prefilled_alone, requests_alone = serve_two(None)
    assert [each.output_ids for each in requests] == [each.output_ids for each in requests_alone]
    assert [each.num_retractions for each in requests] == [0, 1], "the earliest waits for the copy of the other"
    assert tiers.stats().pages_loaded > 0
    num_prompts = sum(each.num_prompt_tokens for each in requests)
    assert num_prefilled - num_prompts <= CONFIG.page_size < num_prefilled_alone - num_prompts
