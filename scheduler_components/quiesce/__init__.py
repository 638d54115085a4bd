"""Bring an engine to rest: pause, flush, new weights, memory given back; on all ranks in the same step.

``QuiesceController`` decides, ``QuiesceStepper`` asks all ranks once per step while an order stands, ``QuiesceState`` says what
the engine may do now. What is ordered are the structs of ``ControlRequest``; each ends in one ``ControlReply``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.quiesce.orders import (
    DEFAULT_WEIGHT_VERSION,
    BeginWeightUpdate,
    CheckWeights,
    ClearStorageIndex,
    ContinueGeneration,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    FlushCache,
    IdleControlRequest,
    LoadWeights,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
    control_request_name,
)
from scheduler_components.quiesce.quiesce import QuiesceController, QuiesceStepper
from scheduler_components.quiesce.state import PauseState, QuiesceState, weight_namespace
from scheduler_components.quiesce.weights import LoadedTensors

if TYPE_CHECKING:
    from scheduler_components.quiesce.torch_weights import TensorShards, TorchWeightStore

__all__ = [
    "DEFAULT_WEIGHT_VERSION",
    "BeginWeightUpdate",
    "CheckWeights",
    "ContinueGeneration",
    "EndWeightUpdate",
    "FlushCache",
    "ClearStorageIndex",
    "LoadWeights",
    "LoadedTensors",
    "MemoryTag",
    "ControlRequest",
    "ControlReply",
    "PauseGeneration",
    "PauseMode",
    "PauseState",
    "QuiesceController",
    "QuiesceState",
    "QuiesceStepper",
    "ReleaseMemory",
    "IdleControlRequest",
    "ResumeMemory",
    "RollBackWeights",
    "TensorShards",
    "TorchWeightStore",
    "weight_namespace",
    "control_request_name",
]

__getattr__ = lazy_exports(__name__, {"scheduler_components.quiesce.torch_weights": "TensorShards TorchWeightStore"})
