"""Bring an engine to rest: pause, flush, new weights, memory given back; on all ranks in the same step.

``Quiesce`` decides, ``QuiesceStepper`` asks all ranks once per step while an order stands, ``QuiesceState`` says what
the engine may do now. What is ordered are the structs of ``Order``; each ends in one ``OrderAnswer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.quiesce.orders import (
    DEFAULT_WEIGHT_VERSION,
    BeginWeightUpdate,
    CheckWeights,
    ContinueGeneration,
    EndWeightUpdate,
    FlushCache,
    ForgetStorage,
    LoadWeights,
    MemoryTag,
    Order,
    OrderAnswer,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    RestOrder,
    ResumeMemory,
    RollBackWeights,
    what_is_ordered,
)
from scheduler_components.quiesce.quiesce import Quiesce, QuiesceStepper
from scheduler_components.quiesce.state import Phase, QuiesceState, namespace_of
from scheduler_components.quiesce.weights import LoadedParts

if TYPE_CHECKING:
    from scheduler_components.quiesce.torch_weights import TensorParts, TorchWeights

__all__ = [
    "DEFAULT_WEIGHT_VERSION",
    "BeginWeightUpdate",
    "CheckWeights",
    "ContinueGeneration",
    "EndWeightUpdate",
    "FlushCache",
    "ForgetStorage",
    "LoadWeights",
    "LoadedParts",
    "MemoryTag",
    "Order",
    "OrderAnswer",
    "PauseGeneration",
    "PauseMode",
    "Phase",
    "Quiesce",
    "QuiesceState",
    "QuiesceStepper",
    "ReleaseMemory",
    "RestOrder",
    "ResumeMemory",
    "RollBackWeights",
    "TensorParts",
    "TorchWeights",
    "namespace_of",
    "what_is_ordered",
]

__getattr__ = lazy_names(__name__, {"scheduler_components.quiesce.torch_weights": "TensorParts TorchWeights"})
