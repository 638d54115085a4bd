"""A real model reads pages that are loaded from the host while it computes: the text equals that of ``generate``.

Each layer is loaded at the last moment, when the forward waits for it; until then its pages hold random bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.model_bench import PROMPTS, BenchTiers, LastMomentMover, ModelBench, Tiers, open_threads

from scheduler_components.hicache import HiCachePolicy, MemoryPageStore, ThreadPageMover
from scheduler_components.ports import CopyEvent
from scheduler_components.testing import ConformanceError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values.page_operations import CopyToDevice, Instruction, IoEvent, LoadBackDone
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.engine.rank.hicache_tiers import TierLayerDoneCounter

pytestmark = pytest.mark.model

BY_LAYER = HiCachePolicy(load="by_layer", prefetch="wait_complete", prefetch_threshold_pages=1)


@dataclass(slots=True, kw_only=True)
class LayerwiseMover(LastMomentMover):
    """A ``LastMomentMover`` and the ``LayerDoneCounter`` over it.

    Attributes:
        arriving: the layers that are still to come, of each load.
        num_waits: layers that a forward waited for.
    """

    arriving: dict[int, Iterator[CopyEvent]] = field(default_factory=dict)
    num_waits: int = 0
    tiers: BenchTiers | None = None

    def submit(self, instructions: Sequence[Instruction]) -> None:
        loads = [each for each in instructions if isinstance(each, CopyToDevice) and each.by_layer]
        for load in loads:
            self.spoil(load.device_pages)
            self.arriving[load.op] = self.host.copy_to_device_by_layer(load.host_pages, self.device, load.device_pages)
        LastMomentMover.submit(self, [each for each in instructions if each not in loads])

    def poll(self) -> list[IoEvent]:
        events: list[IoEvent] = []
        for op, layers in self.arriving.items():
            assert sum(1 for _ in layers) in (0, len(self.device.keys)), "a forward has waited for some layers alone"
            events.append(LoadBackDone(op, True))
        self.arriving.clear()
        return [*events, *LastMomentMover.poll(self)]

    def begin(self) -> None:
        assert self.tiers is not None
        self.tiers.stepper.submit()

    def wait_for_layer(self, layer: int) -> None:
        for layers in self.arriving.values():
            self.num_waits += next(layers, None) is not None


@dataclass(slots=True, frozen=True)
class Fence:
    mover: LayerwiseMover

    def start_batch(self) -> None:
        self.mover.begin()

    def wait_until(self, layer: int) -> None:
        self.mover.wait_for_layer(layer)


def open_bench(model: Any, judge: GreedyTextVerifier) -> tuple[ModelBench, LayerwiseMover]:
    bench = ModelBench(model, judge, tiers=Tiers(host_pages=64, make_mover=LayerwiseMover, policy=BY_LAYER))
    tiers = bench.scheduler.tiers
    assert isinstance(tiers, BenchTiers)
    assert isinstance(tiers.mover, LayerwiseMover)
    assert isinstance(bench.scheduler.device, TorchDevice)
    tiers.mover.tiers = tiers
    bench.scheduler.device.layer_counter = Fence(tiers.mover)
    return bench, tiers.mover


def test_layers_that_are_loaded_at_the_last_moment_are_used(paged_model: Any, judge: GreedyTextVerifier) -> None:
    bench, mover = open_bench(paged_model, judge)
    for _ in range(2):
        for at in range(0, len(PROMPTS), 3):
            bench.run(*PROMPTS[at : at + 3])
    assert mover.num_waits >= 2 * len(bench.pool.keys)
    assert bench.tier_stats().host_hit_tokens > 0
    bench.judge_pages()
    bench.scheduler.cache.check_integrity()
    bench.close()


def test_a_forward_that_does_not_wait_is_found(
    paged_model: Any, judge: GreedyTextVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fence, "wait_until", lambda *_: None)
    bench, _ = open_bench(paged_model, judge)
    with pytest.raises(ConformanceError):
        for _ in range(2):
            for at in range(0, len(PROMPTS), 3):
                bench.run(*PROMPTS[at : at + 3])
    bench.close()


def test_layers_loaded_by_the_threads_of_an_engine_are_used(paged_model: Any, judge: GreedyTextVerifier) -> None:
    tiers = Tiers(host_pages=64, store=MemoryPageStore(1 << 24), make_mover=open_threads, policy=BY_LAYER)
    bench = ModelBench(paged_model, judge, tiers=tiers)
    opened = bench.scheduler.tiers
    assert isinstance(opened, BenchTiers)
    assert isinstance(opened.mover, ThreadPageMover)
    assert isinstance(bench.scheduler.device, TorchDevice)
    bench.scheduler.device.layer_counter = TierLayerDoneCounter(
        stepper=opened.stepper, layer_counter=opened.mover.layer_counter
    )
    for _ in range(2):
        for at in range(0, len(PROMPTS), 3):
            bench.run(*PROMPTS[at : at + 3])
    assert bench.tier_stats().host_hit_tokens > 0
    bench.judge_pages()
    bench.scheduler.cache.check_integrity()
    bench.close()
