"""A rank that computes with a model of transformers. Imported by such a rank alone."""

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
    """What a rank computes with.

    Attributes:
        device: the model over the pool.
        weights: this rank's part of them.
        pool: its part of each page.
        group: the ranks that have the other parts; None for a rank that has the whole model.
    """

    device: TorchDevice
    weights: TorchWeightStore
    pool: TorchDeviceMemory
    group: TorchTensorParallelGroup | None = None


def rank_torch_device(first: str, parallel: ParallelState) -> str:
    """Return the device of one rank: CPUs are shared, CUDA devices are taken one after another from ``first`` on."""
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
    """Load the model, keep this rank's part of it, and make its pool, one page for each of the scheduler's.

    Args:
        model: as it was inspected.
        scheduler: its pages.
        num_ranks: of this machine: they share its cores.
        parallel: which of them this is; the attention-TP ranks of a replica share the model.
        rendezvous: where these find each other.

    Raises:
        ConfigError: the model cannot be loaded, or the pool has no room.
        StartError: the other ranks of the replica did not come.
    """
    assert parallel.attn_cp_size == parallel.pp_size == 1, f"{parallel} has a part of a model that cannot be had"
    model = attrs.evolve(model, device=rank_torch_device(model.device, parallel))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    group = None
    if parallel.attn_tp_size > 1:
        assert rendezvous is not None, "ranks that share a model need a place to meet"
        # Before the weights are read, which may take some ranks much longer than others.
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
