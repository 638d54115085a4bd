"""The device of a rank that computes with a transformers model. Only such a rank imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import attrs
import torch

from scheduler_components import ParallelState
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_components.reference.device.model_spec import ModelSpec
from scheduler_components.reference.device.torch_device import TorchDevice
from scheduler_components.reference.device.torch_model import load_model
from scheduler_components.reference.device.torch_tensor_parallel import (
    NullTensorParallelGroup,
    TorchTensorParallelGroup,
    open_tensor_parallel_group,
    shard_model,
)
from scheduler_components.reference.engine.config import SchedulerConfig
from scheduler_components.torch_weight_updater import TorchWeightStore

__all__ = ["TorchRank", "open_torch_rank", "rank_torch_device"]


@dataclass(slots=True, kw_only=True, frozen=True)
class TorchRank:
    """A loaded model with its KV pool.

    Attributes:
        device: computes batches with the model and the pool.
        weights: this rank's shard of the weights.
        pool: this rank's slice of each KV page.
        group: the ranks that hold the other shards; None for a rank that holds the whole model.
    """

    device: TorchDevice
    weights: TorchWeightStore
    pool: TorchDeviceMemory
    group: TorchTensorParallelGroup | None = None


def rank_torch_device(first: str, parallel: ParallelState) -> str:
    """Return the torch device of a rank. All ranks share the CPU; CUDA devices are assigned in order from ``first``."""
    device = torch.device(first)
    if device.type == "cpu":
        return first
    number = (parallel.dp_rank or 0) * parallel.attn_tp_size + parallel.attn_tp_rank
    return f"{device.type}:{(device.index or 0) + number}"


def open_torch_rank(
    model: ModelSpec,
    scheduler: SchedulerConfig,
    *,
    num_ranks: int,
    parallel: ParallelState,
    rendezvous: Path | None = None,
) -> TorchRank:
    """Load the model, keep this rank's shard, and allocate a pool with one page per page of the scheduler.

    Args:
        model: the model.
        scheduler: number and size of the pages.
        num_ranks: number of ranks on this machine, which share its cores.
        parallel: this rank. The attention-TP ranks of a replica share the model.
        rendezvous: file in which these ranks find each other.

    Raises:
        ConfigError: the model cannot be loaded, or the pool does not fit.
        StartError: another rank of the replica did not connect in time.
    """
    assert parallel.attn_cp_size == parallel.pp_size == 1, f"{parallel}: a model can be sharded by attention TP only"
    model = attrs.evolve(model, device=rank_torch_device(model.device, parallel))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    group = None
    if parallel.attn_tp_size > 1:
        assert rendezvous is not None, "ranks that share a model need a rendezvous file"
        # Connect before loading the weights, which may take much longer on some ranks than on others.
        group = open_tensor_parallel_group(
            rendezvous,
            rank=parallel.attn_tp_rank,
            size=parallel.attn_tp_size,
            on_cuda=torch.device(model.device).type == "cuda",
        )
    loaded = load_model(model)
    parts = shard_model(loaded, NullTensorParallelGroup() if group is None else group)
    pool = TorchDeviceMemory.allocate(
        num_layers=model.kv.num_layers,
        num_pages=scheduler.kv_pages,
        page_size=scheduler.page_size,
        kv_heads=model.kv.kv_heads // parallel.attn_tp_size,
        head_dim=model.kv.head_dim,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    return TorchRank(
        device=TorchDevice(model=loaded, pool=pool),
        weights=TorchWeightStore(model=loaded, parts=parts),
        pool=pool,
        group=group,
    )
