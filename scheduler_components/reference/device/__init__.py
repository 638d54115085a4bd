"""What the reference engine runs on and runs: a simulated device, generated workloads, traces, and the simulated
hierarchical cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from scheduler_components.reference.device.device import CostModel, Device, SimulatedDevice, SimulatedModel
    from scheduler_components.reference.device.hicache_sim import (
        FaultRates,
        SimulatedHostPages,
        SimulatedReplica,
        SimulatedWorkload,
        SimulationConfig,
        agreement_of,
        run_simulation,
    )
    from scheduler_components.reference.device.request import (
        Request,
        RequestState,
        SamplingLimits,
        ScheduledBatch,
        ScheduledWork,
        StepResult,
    )
    from scheduler_components.reference.device.simulated_kv import SimulatedKv
    from scheduler_components.reference.device.trace import (
        BLOCK_TOKENS,
        TraceRequest,
        open_trace,
        parse_trace,
        prompt_tokens,
        spread_arrivals,
    )
    from scheduler_components.reference.device.workload import WorkloadConfig, generate_chats

__all__ = [
    "Request",
    "RequestState",
    "SamplingLimits",
    "ScheduledBatch",
    "ScheduledWork",
    "StepResult",
    "CostModel",
    "Device",
    "FaultRates",
    "SimulatedDevice",
    "SimulatedHostPages",
    "SimulatedKv",
    "SimulatedModel",
    "SimulatedReplica",
    "SimulatedWorkload",
    "SimulationConfig",
    "TraceRequest",
    "WorkloadConfig",
    "BLOCK_TOKENS",
    "agreement_of",
    "generate_chats",
    "open_trace",
    "parse_trace",
    "prompt_tokens",
    "run_simulation",
    "spread_arrivals",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.reference.device.device": ("CostModel Device SimulatedDevice SimulatedModel"),
        "scheduler_components.reference.device.hicache_sim": (
            "FaultRates SimulatedHostPages SimulatedReplica SimulatedWorkload SimulationConfig agreement_of "
            "run_simulation"
        ),
        "scheduler_components.reference.device.request": (
            "Request RequestState SamplingLimits ScheduledBatch ScheduledWork StepResult"
        ),
        "scheduler_components.reference.device.simulated_kv": "SimulatedKv",
        "scheduler_components.reference.device.trace": (
            "BLOCK_TOKENS TraceRequest open_trace parse_trace prompt_tokens spread_arrivals"
        ),
        "scheduler_components.reference.device.workload": "WorkloadConfig generate_chats",
    },
)
