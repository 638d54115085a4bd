"""A rank that computes with a model of transformers. Imported by such a rank alone."""

from __future__ import annotations

import os

import torch

from scheduler_components import ParallelState
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_components.reference.device import ModelSpec, TorchDevice, load_model
from scheduler_components.reference.engine.config import SchedulerConfig

__all__ = ["open_torch_rank"]


def open_torch_rank(
    model: ModelSpec, scheduler: SchedulerConfig, *, num_ranks: int, parallel: ParallelState
) -> tuple[TorchDevice, TorchDeviceMemory]:
    """Load the model and make its pool, one page for each of the scheduler's.

    Args:
        model: as it was inspected.
        scheduler: its pages.
        num_ranks: of this machine: they share its cores.
        parallel: which of them this is; each replica has the whole model.

    Raises:
        ConfigError: the model cannot be loaded, or the pool has no room.
    """
    assert parallel.attn_tp_size == parallel.attn_cp_size == parallel.pp_size == 1, f"{parallel} has a part of a model"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    loaded = load_model(model)
    pool = TorchDeviceMemory.allocate(
        num_layers=model.kv.num_layers,
        num_pages=scheduler.kv_pages,
        page_size=scheduler.page_size,
        kv_heads=model.kv.kv_heads,
        head_dim=model.kv.head_dim,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    return TorchDevice(model=loaded, pool=pool), pool
