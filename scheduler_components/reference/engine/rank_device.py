"""What a rank computes with: a simulated device, or a model with its KV pool; and what orders change of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_components import ParallelState
from scheduler_components.ports import NO_MEMORY, MemoryOccupation, WeightStore
from scheduler_components.reference.device import (
    Device,
    SimulatedDevice,
    SimulatedMemory,
    SimulatedModel,
    SimulatedWeights,
)
from scheduler_components.reference.engine.config import EngineConfig

if TYPE_CHECKING:
    from scheduler_components.hicache import TorchDeviceMemory

__all__ = ["RankDevice", "open_rank_device"]


@dataclass(slots=True, kw_only=True, frozen=True)
class RankDevice:
    """One rank's device.

    Attributes:
        device: computes batches.
        weights: what an update changes.
        memory: what a release gives back.
        pool: the KV pages that it computes into; None where there are none.
    """

    device: Device
    weights: WeightStore
    memory: MemoryOccupation
    pool: TorchDeviceMemory | None = None


def open_rank_device(config: EngineConfig, parallel: ParallelState) -> RankDevice:
    """Open the device that ``config`` names; a model is loaded here, which may take minutes.

    Raises:
        ConfigError: the model cannot be loaded, or its pool has no room.
    """
    if config.model is not None:
        # Imported here: an engine without a model starts without torch.
        from scheduler_components.quiesce import TorchWeights
        from scheduler_components.reference.engine.torch_rank import open_torch_rank

        computes, pool = open_torch_rank(config.model, config.scheduler, num_ranks=config.world_size, parallel=parallel)
        return RankDevice(device=computes, weights=TorchWeights(model=computes.model), memory=NO_MEMORY, pool=pool)
    simulated = SimulatedDevice(model=SimulatedModel(seed=config.seed), speed=config.speed)
    return RankDevice(
        device=simulated, weights=SimulatedWeights(device=simulated), memory=SimulatedMemory(device=simulated)
    )
