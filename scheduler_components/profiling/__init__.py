"""Profiles of a running scheduler: which steps are recorded, and the two profilers that record them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.profiling.session import ProfileRequest, ProfilerManager, ProfileStage

if TYPE_CHECKING:
    from scheduler_components.profiling.thread_stack_sampler import StackSampler
    from scheduler_components.profiling.torch_profiler import TorchProfiler

__all__ = ["ProfileRequest", "ProfilerManager", "ProfileStage", "StackSampler", "TorchProfiler"]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.profiling.thread_stack_sampler": "StackSampler",
        "scheduler_components.profiling.torch_profiler": "TorchProfiler",
    },
)
