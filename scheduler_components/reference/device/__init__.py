"""What the reference engine runs on and serves: a simulated device or a real model, generated and recorded requests;
and many simulated ranks of a hierarchical cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from scheduler_components.reference.device.device import (
        SIMULATED_LAYERS,
        CostModel,
        Device,
        DeviceOutput,
        DeviceRequest,
        FencedDevice,
        ScheduledBatch,
        ScheduledWork,
        SimulatedDevice,
        SimulatedModel,
    )
    from scheduler_components.reference.device.hicache_sim import (
        AgreementScope,
        Commands,
        FaultRates,
        SimulatedHostPages,
        SimulatedReplica,
        SimulatedWorkload,
        SimulationConfig,
        SimulationRun,
        agreement_of,
        run_simulation,
    )
    from scheduler_components.reference.device.model_spec import KvShape, ModelDtype, ModelSpec, TokenSpace
    from scheduler_components.reference.device.sampling import MAX_TOP_LOGPROBS, SamplingParams, TokenLogprobs
    from scheduler_components.reference.device.torch_device import TorchDevice
    from scheduler_components.reference.device.torch_model import inspect_model, load_model
    from scheduler_components.reference.device.torch_tensor_parallel import (
        ALONE,
        RankSums,
        TensorGroup,
        cut_model,
        cut_units,
        open_tensor_group,
    )
    from scheduler_components.reference.device.torch_weight_source import ModelTensors, read_weights
    from scheduler_components.reference.device.weights import SimulatedMemory, SimulatedWeights
    from scheduler_components.reference.device.workload import (
        BLOCK_TOKENS,
        QUANTUM_S,
        Chat,
        TraceFacts,
        TraceRequest,
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
    "ALONE",
    "MAX_TOP_LOGPROBS",
    "AgreementScope",
    "Chat",
    "Commands",
    "CostModel",
    "Device",
    "DeviceOutput",
    "DeviceRequest",
    "FencedDevice",
    "FaultRates",
    "KvShape",
    "ModelDtype",
    "ModelSpec",
    "ModelTensors",
    "RankSums",
    "SamplingParams",
    "ScheduledBatch",
    "ScheduledWork",
    "SimulatedDevice",
    "SimulatedHostPages",
    "SimulatedMemory",
    "SimulatedModel",
    "SimulatedReplica",
    "SimulatedWeights",
    "SimulatedWorkload",
    "SimulationConfig",
    "SimulationRun",
    "TensorGroup",
    "TokenLogprobs",
    "TokenSpace",
    "TorchDevice",
    "TraceFacts",
    "TraceRequest",
    "Turn",
    "WorkloadConfig",
    "BLOCK_TOKENS",
    "QUANTUM_S",
    "SIMULATED_LAYERS",
    "agreement_of",
    "check_trace",
    "cut_model",
    "cut_units",
    "generate_chats",
    "inspect_model",
    "load_model",
    "open_tensor_group",
    "open_trace",
    "parse_trace",
    "prompt_tokens",
    "read_weights",
    "run_simulation",
    "spread_arrivals",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.reference.device.device": (
            "SIMULATED_LAYERS CostModel Device DeviceOutput DeviceRequest FencedDevice ScheduledBatch ScheduledWork "
            "SimulatedDevice SimulatedModel"
        ),
        "scheduler_components.reference.device.hicache_sim": (
            "AgreementScope Commands FaultRates SimulatedHostPages SimulatedReplica SimulatedWorkload SimulationConfig "
            "SimulationRun agreement_of run_simulation"
        ),
        "scheduler_components.reference.device.workload": (
            "BLOCK_TOKENS QUANTUM_S Chat TraceFacts TraceRequest Turn WorkloadConfig check_trace generate_chats "
            "open_trace parse_trace prompt_tokens spread_arrivals"
        ),
        "scheduler_components.reference.device.model_spec": "KvShape ModelDtype ModelSpec TokenSpace",
        "scheduler_components.reference.device.torch_device": "TorchDevice",
        "scheduler_components.reference.device.torch_model": "inspect_model load_model",
        "scheduler_components.reference.device.torch_tensor_parallel": (
            "ALONE RankSums TensorGroup cut_model cut_units open_tensor_group"
        ),
        "scheduler_components.reference.device.torch_weight_source": "ModelTensors read_weights",
        "scheduler_components.reference.device.sampling": "MAX_TOP_LOGPROBS SamplingParams TokenLogprobs",
        "scheduler_components.reference.device.weights": "SimulatedMemory SimulatedWeights",
    },
)
