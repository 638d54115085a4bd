"""The device of a rank that computes with a transformers model. Only such a rank imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs
import torch

from scheduler_components import ParallelState
from scheduler_components.agreement.rank_groups import world_rank_groups
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_components.quiesce import NullMemoryOccupation
from scheduler_components.torch_weight_updater import TorchWeightStore
from scheduler_components.waiting.thread_adapter_loader import AdapterStore, NullAdapterStore
from scheduler_engine.device.device import RankCompute
from scheduler_engine.device.model_spec import ModelSpec
from scheduler_engine.device.torch_adapters import TorchAdapters
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.device.torch_model import load_model
from scheduler_engine.device.torch_model_parallel import (
    ModelParallelGroup,
    NullModelParallelGroup,
    keep_waiting,
    open_model_parallel_group,
)
from scheduler_engine.device.torch_tensor_parallel import shard_model
from scheduler_engine.engine.config import EnginePaths, SchedulerConfig


def rank_torch_device(first: str, parallel: ParallelState) -> str:
    """Return the torch device of a rank. All ranks share the CPU; CUDA devices are assigned in order from ``first``."""
    device = torch.device(first)
    if device.type == "cpu":
        return first
    ranks_per_replica = parallel.attn_cp_size * parallel.attn_tp_size
    rank_in_replica = parallel.attn_cp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
    number = (parallel.dp_rank or 0) * ranks_per_replica + rank_in_replica
    return f"{device.type}:{(device.index or 0) + number}"


def open_torch_rank(
    model: ModelSpec,
    scheduler: SchedulerConfig,
    *,
    num_ranks: int,
    parallel: ParallelState,
    paths: EnginePaths | None = None,
    on_wait: Callable[[], None] = keep_waiting,
) -> RankCompute:
    """Load the model, keep this rank's shard, and allocate a pool with one page per page of the scheduler.

    Args:
        model: the model.
        scheduler: number and size of the pages.
        num_ranks: number of ranks on this machine, which share its cores.
        parallel: this rank. The attention-TP ranks of a replica share the layers of the model, its attention-CP ranks
            the rows of prefills.
        paths: files in which these ranks find each other; None for a replica of one rank.
        on_wait: called while this rank waits for these ranks. What it raises ends the wait.

    Raises:
        ConfigError: the model cannot be loaded, or the pool does not fit.
        StartError: another rank of the replica did not connect in time.
    """
    assert parallel.pp_size == 1, f"{parallel}: a model has no pipeline stages"
    model = attrs.evolve(model, device=rank_torch_device(model.device, parallel))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    # Connect before loading the weights, which may take much longer on some ranks than on others.
    on_cuda = torch.device(model.device).type == "cuda"
    shards, context = _open_groups(parallel, paths, on_cuda=on_cuda, on_wait=on_wait)
    loaded = load_model(model)
    parts = shard_model(loaded, shards)
    pool = TorchDeviceMemory.allocate(
        num_layers=model.kv.num_layers,
        num_pages=scheduler.kv_pages,
        page_size=scheduler.page_size,
        kv_heads=model.kv.kv_heads // parallel.attn_tp_size,
        head_dim=model.kv.head_dim,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    device = TorchDevice(model=loaded, pool=pool, context=context)
    adapters: AdapterStore = NullAdapterStore()
    if scheduler.lora is not None:
        adapters = device.adapters = TorchAdapters(loaded)
    return RankCompute(
        device=device,
        weights=TorchWeightStore(model=loaded, parts=parts),
        memory=NullMemoryOccupation(),
        pool=pool,
        groups=(shards, context),
        adapters=adapters,
    )


def _open_groups(
    parallel: ParallelState, paths: EnginePaths | None, *, on_cuda: bool, on_wait: Callable[[], None]
) -> tuple[ModelParallelGroup, ModelParallelGroup]:
    """Join the ranks that share the layers, then those that share the rows. All ranks join in this order."""
    groups = world_rank_groups(parallel)[parallel.world_rank]

    def join(axis: str, names: tuple[int, ...] | None, line: int) -> ModelParallelGroup:
        if names is None or len(names) == 1:
            return NullModelParallelGroup()
        assert paths is not None, "ranks that share a model need rendezvous files"
        meeting = paths.model_rendezvous(parallel.attn_dp_rank, axis, line)
        rank = names.index(parallel.world_rank)
        return open_model_parallel_group(meeting, rank=rank, names=names, on_cuda=on_cuda, on_wait=on_wait)

    shards = join("tp", groups.attn_tp, parallel.attn_cp_rank)
    return shards, join("cp", groups.attn_cp, parallel.attn_tp_rank)
