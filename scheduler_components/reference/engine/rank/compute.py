"""What a rank computes with: a simulated device, or a model with its KV pool; and what orders change of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_components import ParallelState
from scheduler_components.ports import MemoryOccupation, NullMemoryOccupation, WeightStore
from scheduler_components.reference.device.device import LayerwiseDevice, SimulatedDevice, SimulatedModel
from scheduler_components.reference.device.weights import SimulatedMemory, SimulatedWeights
from scheduler_components.reference.engine.config import EngineConfig, EnginePaths

if TYPE_CHECKING:
    from scheduler_components.hicache import TorchDeviceMemory
    from scheduler_components.reference.device.torch_tensor_parallel import TorchTensorParallelGroup

__all__ = ["RankCompute", "open_rank_device"]


@dataclass(slots=True, kw_only=True, frozen=True)
class RankCompute:
    """One rank's device.

    Attributes:
        device: computes batches.
        weights: what an update changes.
        memory: what a release gives back.
        pool: the KV pages that it computes into; None where there are none.
        group: the ranks that have the other parts of each layer; None where it has all of them.
    """

    device: LayerwiseDevice
    weights: WeightStore
    memory: MemoryOccupation
    pool: TorchDeviceMemory | None = None
    group: TorchTensorParallelGroup | None = None

    def close(self) -> None:
        """Let go of the other ranks; safe to call twice."""
        if self.group is not None:
            self.group.close()


def open_rank_device(config: EngineConfig, parallel: ParallelState, paths: EnginePaths | None = None) -> RankCompute:
    """Open the device that ``config`` names; a model is loaded here, which may take minutes.

    Args:
        config: of the engine.
        parallel: this rank.
        paths: where ranks meet that share a model's layers; needed by these alone.

    Raises:
        ConfigError: the model cannot be loaded, or its pool has no room.
        StartError: the ranks that share its layers did not come.
    """
    if config.model is not None:
        # Imported here: an engine without a model starts without torch.
        from scheduler_components.reference.engine.rank.torch_compute import open_torch_rank

        rendezvous = None if paths is None else paths.tensor_rendezvous(parallel.attn_dp_rank)
        rank = open_torch_rank(
            config.model, config.scheduler, num_ranks=config.world_size, parallel=parallel, rendezvous=rendezvous
        )
        return RankCompute(
            device=rank.device, weights=rank.weights, memory=NullMemoryOccupation(), pool=rank.pool, group=rank.group
        )
    simulated = SimulatedDevice(model=SimulatedModel(seed=config.seed), speed=config.speed)
    return RankCompute(
        device=simulated, weights=SimulatedWeights(device=simulated), memory=SimulatedMemory(device=simulated)
    )
