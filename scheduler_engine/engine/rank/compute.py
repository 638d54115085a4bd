"""The device of a rank: a simulated one, or a model with its KV pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_components import ParallelState
from scheduler_components.quiesce import MemoryOccupation
from scheduler_components.waiting.thread_adapter_loader import AdapterStore, NullAdapterStore
from scheduler_components.weight_updater import WeightStore
from scheduler_engine.device.device import LayerwiseDevice, SimulatedDevice, SimulatedModel
from scheduler_engine.device.weights import SimulatedMemory, SimulatedWeights
from scheduler_engine.engine.config import EngineConfig, EnginePaths

if TYPE_CHECKING:
    from scheduler_components.hicache import TorchDeviceMemory
    from scheduler_engine.device.torch_model_parallel import ModelParallelGroup

__all__ = ["RankCompute", "open_rank_device"]


@dataclass(slots=True, kw_only=True, frozen=True)
class RankCompute:
    """The device of one rank, and the ports through which control requests change it.

    Attributes:
        device: computes batches.
        weights: loads new weights.
        memory: releases and resumes device memory.
        pool: KV pages that the device computes into; None for a simulated device.
        groups: the ranks that hold the other shards of the model, and those that compute other rows of a prefill; empty
            for a simulated device.
        adapters: the adapters of the device.
    """

    device: LayerwiseDevice
    weights: WeightStore
    memory: MemoryOccupation
    pool: TorchDeviceMemory | None = None
    groups: tuple[ModelParallelGroup, ...] = ()
    adapters: AdapterStore = field(default_factory=NullAdapterStore)

    def close(self) -> None:
        """Leave the groups of ranks. Safe to call twice."""
        for group in self.groups:
            group.close()


def open_rank_device(
    config: EngineConfig,
    parallel: ParallelState,
    paths: EnginePaths | None = None,
    *,
    on_wait: Callable[[], None] = lambda: None,
) -> RankCompute:
    """Open the device that ``config`` names. Loading a model may take minutes.

    Args:
        config: configuration of the engine.
        parallel: this rank.
        paths: rendezvous files of ranks that compute a model together; other ranks need none.
        on_wait: called while a rank waits for ranks that compute a model with it. What it raises ends the wait.

    Raises:
        ConfigError: the model cannot be loaded, or its KV pool does not fit.
        StartError: a rank that shares the model did not connect in time.
    """
    if config.model is not None:
        # Imported here, so that an engine without a model starts without torch.
        from scheduler_engine.engine.rank.torch_compute import open_torch_rank

        return open_torch_rank(
            config.model,
            config.scheduler,
            num_ranks=config.world_size,
            parallel=parallel,
            paths=paths,
            on_wait=on_wait,
        )
    simulated = SimulatedDevice(model=SimulatedModel(seed=config.seed), speed=config.speed)
    return RankCompute(
        device=simulated,
        weights=SimulatedWeights(device=simulated),
        memory=SimulatedMemory(device=simulated),
        adapters=simulated.adapters,
    )
