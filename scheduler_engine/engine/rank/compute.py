"""The device of a rank: a simulated one, or a model with its KV pool."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_components import ParallelState
from scheduler_engine.device.device import RankCompute, SimulatedDevice, SimulatedModel
from scheduler_engine.device.weights import SimulatedMemory, SimulatedWeights
from scheduler_engine.engine.config import EngineConfig, EnginePaths


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
