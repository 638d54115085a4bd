"""Real schedulers in virtual time: replicas, a router and arrivals in one process.

``SimulatedReplica`` is a scheduler composed of the kit's parts over a device that only charges its cost. ``Simulation``
drives several of them from a trace or from generated conversations. Nothing reads a clock or a random number of the
machine, so a run depends on its input alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports
from scheduler_components._internal.virtual_clock import EventHeap
from scheduler_engine.simulation.simulated_model import CostModel, SimulatedModel
from scheduler_engine.simulation.trace import (
    ARRIVAL_QUANTUM_S,
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    TraceSummary,
    check_trace,
    open_trace,
    parse_trace,
    prompt_tokens,
    spread_arrivals,
)

if TYPE_CHECKING:
    from scheduler_engine.simulation.conversations import ConversationWorkload, generate_conversations
    from scheduler_engine.simulation.replica import ReplicaConfig, SimulatedReplica
    from scheduler_engine.simulation.report import (
        Distribution,
        ReplicaReport,
        SimulationReport,
        TenantReport,
        TimelinePoint,
        WallTime,
        encode_report,
    )
    from scheduler_engine.simulation.request import SimulatedRequest
    from scheduler_engine.simulation.router import LeastLoaded, RoundRobin, Router
    from scheduler_engine.simulation.simulation import Outage, Progress, Scaling, Simulation, SimulationConfig
    from scheduler_engine.simulation.tiers import TierConfig

__all__ = [
    "ARRIVAL_QUANTUM_S",
    "TRACE_BLOCK_TOKENS",
    "TraceSummary",
    "parse_trace",
    "spread_arrivals",
    "ConversationWorkload",
    "CostModel",
    "Distribution",
    "EventHeap",
    "LeastLoaded",
    "Outage",
    "Progress",
    "ReplicaConfig",
    "ReplicaReport",
    "RoundRobin",
    "Router",
    "Scaling",
    "SimulatedModel",
    "SimulatedReplica",
    "SimulatedRequest",
    "Simulation",
    "SimulationConfig",
    "SimulationReport",
    "TenantReport",
    "TierConfig",
    "TimelinePoint",
    "TraceRequest",
    "WallTime",
    "check_trace",
    "encode_report",
    "generate_conversations",
    "open_trace",
    "prompt_tokens",
]

# A process that only reads a trace or a cost model loads no scheduler.
__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_engine.simulation.conversations": "ConversationWorkload generate_conversations",
        "scheduler_engine.simulation.replica": "ReplicaConfig SimulatedReplica",
        "scheduler_engine.simulation.report": (
            "Distribution ReplicaReport SimulationReport TenantReport TimelinePoint WallTime encode_report"
        ),
        "scheduler_engine.simulation.request": "SimulatedRequest",
        "scheduler_engine.simulation.router": "LeastLoaded RoundRobin Router",
        "scheduler_engine.simulation.simulation": "Outage Progress Scaling Simulation SimulationConfig",
        "scheduler_engine.simulation.tiers": "TierConfig",
    },
)
