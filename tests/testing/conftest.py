"""Fixtures of the tests of the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from scheduler_components import ParallelState
from scheduler_components.testing import interfaces
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers

PAGE_SIZE = 4  # of ``reference_scheduler``


@pytest.fixture
def open_host_tier() -> Iterator[Callable[[], CacheTiers]]:
    """A host tier of 200 pages behind the device of ``Reference``; closed after the test."""
    pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")
    from scheduler_components.agreement import ParallelGroups  # fmt: skip
    from scheduler_components.hicache import (  # fmt: skip
        HiCacheStepper,
        HiRadixCache,
        HostPool,
        KeySpace,
        Placement,
        SimulatedDeviceMemory,
        ThreadPageMover,
    )
    from scheduler_components.values.page_shape import PageShape  # fmt: skip
    from scheduler_engine.engine.rank.hicache_tiers import HiCacheTiers

    opened: list[HiCacheTiers] = []

    def open_one() -> HiCacheTiers:
        parallel, shape = ParallelState.trivial(), PageShape(num_layers=1, layer_page_bytes=8)
        host, device = HostPool(shape, 200), SimulatedDeviceMemory(shape, interfaces.MIN_POOL_TOKENS // PAGE_SIZE)
        keys = KeySpace(model="m", dtype="d", page_size=PAGE_SIZE, layout="page_first", placement=Placement(),
                        parallel=parallel)  # fmt: skip
        mover = ThreadPageMover(host=host, device=device, keys=keys)
        cache = HiRadixCache(page_size=PAGE_SIZE, capacity_tokens=interfaces.MIN_POOL_TOKENS, host=host,
                             num_host_pages=200, record=True)  # fmt: skip
        stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover)
        opened.append(HiCacheTiers(stepper=stepper, mover=mover, host=host))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()
