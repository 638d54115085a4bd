"""A cache with tiers takes a flush and a weight update itself: pages of old weights match nothing afterwards."""

from __future__ import annotations

import random

import pytest
from kit.quiescable_replica import GOOD, QuiescableEngine

from scheduler_components.agreement import ParallelGroups
from scheduler_components.cache import RadixCache
from scheduler_components.hicache import HiCachePolicy, HiRadixCache
from scheduler_components.quiesce import FlushableCache, QuiesceController, QuiesceStepper, weight_namespace
from scheduler_components.values import BeginWeightUpdate, ControlRequest, EndWeightUpdate, FlushCache, LoadWeights
from scheduler_engine.device.hicache_sim import SimulatedHostPages


def tiered_cache() -> HiRadixCache:
    host = SimulatedHostPages(8, rng=random.Random(0), failure=0.0)
    return HiRadixCache(
        page_size=2,
        capacity_tokens=16,
        host=host,
        num_host_pages=8,
        policy=HiCachePolicy(write="write_back"),
        record=True,
    )


def carry_out(stepper: QuiesceStepper, *requests: ControlRequest) -> None:
    for number, request in enumerate(requests):
        stepper.enqueue(number, request)
        while (reply := stepper.step()) is None:
            pass
        assert not reply.problem


def test_control_requests_change_the_namespace_of_the_cache() -> None:
    cache = tiered_cache()
    flushable: FlushableCache = cache
    engine = QuiescableEngine()
    quiesce = QuiesceController(work=engine, cache=flushable, weights=engine)
    stepper = QuiesceStepper(quiesce=quiesce, groups=ParallelGroups())
    tokens = range(4)
    cache.insert(tokens, cache.allocate(2))
    carry_out(stepper, FlushCache())
    assert cache.match_prefix(tokens).num_tokens == 0
    before = cache.insert(tokens, cache.allocate(2))
    old = set(cache.block_hashes())
    carry_out(stepper, BeginWeightUpdate("v1"), LoadWeights("a", b"a"), EndWeightUpdate(GOOD))
    assert cache.match_prefix(tokens).num_tokens == 0
    cache.insert(tokens, cache.allocate(2))
    assert cache.match_prefix(tokens, weight_namespace("v1")).num_tokens == before.num_tokens
    assert old.isdisjoint(cache.block_hashes())


@pytest.mark.parametrize("cache", [tiered_cache(), RadixCache(page_size=2, capacity_tokens=16)])
def test_a_clear_without_a_version_keeps_the_namespace(cache: HiRadixCache | RadixCache) -> None:
    cache.clear("v1")
    cache.clear()
    cache.insert(range(4), cache.allocate(2))
    assert cache.match_prefix(range(4), weight_namespace("default")).num_tokens == 0
    assert cache.match_prefix(range(4), weight_namespace("v1")).num_tokens == 4
