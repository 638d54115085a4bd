"""What the reference engine runs on and serves: a simulated device or a real model, generated and recorded requests;
and many simulated ranks of a hierarchical cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.reference.device.device import (
        NUM_SIMULATED_LAYERS,
        CostModel,
        Device,
        DeviceOutput,
        DeviceRequest,
        LayerwiseDevice,
        ScheduledBatch,
        ScheduledChunk,
        SimulatedDevice,
        SimulatedModel,
    )
    from scheduler_components.reference.device.hicache_sim import (
        AgreementScope,
        FaultRates,
        SimulatedHostPages,
        SimulatedReplica,
        SimulatedWorkload,
        SimulationConfig,
        SimulationRun,
        StepCommands,
        make_in_process_groups,
        run_simulation,
    )
    from scheduler_components.reference.device.model_spec import KvShape, ModelDtype, ModelSpec, TokenSpec
    from scheduler_components.reference.device.sampling import MAX_TOP_LOGPROBS, SamplingParams, TokenLogprobs
    from scheduler_components.reference.device.torch_device import TorchDevice
    from scheduler_components.reference.device.torch_model import inspect_model, load_model
    from scheduler_components.reference.device.torch_tensor_parallel import (
        NullTensorParallelGroup,
        TensorParallelGroup,
        TorchTensorParallelGroup,
        max_tp_size,
        open_tensor_parallel_group,
        shard_model,
    )
    from scheduler_components.reference.device.torch_weight_source import ModelTensors, read_weights
    from scheduler_components.reference.device.weights import SimulatedMemory, SimulatedWeights
    from scheduler_components.reference.device.workload import (
        ARRIVAL_QUANTUM_S,
        TRACE_BLOCK_TOKENS,
        Chat,
        TraceRequest,
        TraceSummary,
        Turn,
        WorkloadConfig,
        check_trace,
        generate_chats,
        open_trace,
        parse_trace,
        prompt_tokens,
        spread_arrivals,
    )

__all__ = [
    "NullTensorParallelGroup",
    "MAX_TOP_LOGPROBS",
    "AgreementScope",
    "Chat",
    "StepCommands",
    "CostModel",
    "Device",
    "DeviceOutput",
    "DeviceRequest",
    "LayerwiseDevice",
    "FaultRates",
    "KvShape",
    "ModelDtype",
    "ModelSpec",
    "ModelTensors",
    "TensorParallelGroup",
    "SamplingParams",
    "ScheduledBatch",
    "ScheduledChunk",
    "SimulatedDevice",
    "SimulatedHostPages",
    "SimulatedMemory",
    "SimulatedModel",
    "SimulatedReplica",
    "SimulatedWeights",
    "SimulatedWorkload",
    "SimulationConfig",
    "SimulationRun",
    "TorchTensorParallelGroup",
    "TokenLogprobs",
    "TokenSpec",
    "TorchDevice",
    "TraceSummary",
    "TraceRequest",
    "Turn",
    "WorkloadConfig",
    "TRACE_BLOCK_TOKENS",
    "ARRIVAL_QUANTUM_S",
    "NUM_SIMULATED_LAYERS",
    "make_in_process_groups",
    "check_trace",
    "shard_model",
    "max_tp_size",
    "generate_chats",
    "inspect_model",
    "load_model",
    "open_tensor_parallel_group",
    "open_trace",
    "parse_trace",
    "prompt_tokens",
    "read_weights",
    "run_simulation",
    "spread_arrivals",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.reference.device.device": (
            "NUM_SIMULATED_LAYERS CostModel Device DeviceOutput DeviceRequest LayerwiseDevice ScheduledBatch ScheduledChunk "
            "SimulatedDevice SimulatedModel"
        ),
        "scheduler_components.reference.device.hicache_sim": (
            "AgreementScope StepCommands FaultRates SimulatedHostPages SimulatedReplica SimulatedWorkload SimulationConfig "
            "SimulationRun make_in_process_groups run_simulation"
        ),
        "scheduler_components.reference.device.workload": (
            "TRACE_BLOCK_TOKENS ARRIVAL_QUANTUM_S Chat TraceSummary TraceRequest Turn WorkloadConfig check_trace generate_chats "
            "open_trace parse_trace prompt_tokens spread_arrivals"
        ),
        "scheduler_components.reference.device.model_spec": "KvShape ModelDtype ModelSpec TokenSpec",
        "scheduler_components.reference.device.torch_device": "TorchDevice",
        "scheduler_components.reference.device.torch_model": "inspect_model load_model",
        "scheduler_components.reference.device.torch_tensor_parallel": (
            "NullTensorParallelGroup() TensorParallelGroup TorchTensorParallelGroup shard_model max_tp_size open_tensor_parallel_group"
        ),
        "scheduler_components.reference.device.torch_weight_source": "ModelTensors read_weights",
        "scheduler_components.reference.device.sampling": "MAX_TOP_LOGPROBS SamplingParams TokenLogprobs",
        "scheduler_components.reference.device.weights": "SimulatedMemory SimulatedWeights",
    },
)
