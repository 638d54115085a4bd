"""Real schedulers in virtual time: replicas, a router and arrivals in one process.

``SimulatedReplica`` is a scheduler composed of the kit's parts over a device that only charges its cost. ``Simulation``
drives several of them from a trace or from generated conversations. Nothing reads a clock or a random number of the
machine, so a run depends on its input alone.
"""

from __future__ import annotations

from scheduler_components.simulation.conversations import ConversationWorkload, generate_conversations
from scheduler_components.simulation.replica import ReplicaConfig, SimulatedReplica
from scheduler_components.simulation.report import (
    Distribution,
    ReplicaReport,
    SimulationReport,
    TimelinePoint,
    WallTime,
    encode_report,
)
from scheduler_components.simulation.request import SimulatedRequest
from scheduler_components.simulation.router import LeastLoaded, RoundRobin, Router
from scheduler_components.simulation.simulated_model import CostModel, SimulatedModel
from scheduler_components.simulation.simulation import Outage, Progress, Scaling, Simulation, SimulationConfig
from scheduler_components.simulation.trace import TraceRequest, check_trace, open_trace, prompt_tokens
from scheduler_components.simulation.virtual_clock import EventHeap, VirtualClock

__all__ = [
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
    "TimelinePoint",
    "TraceRequest",
    "VirtualClock",
    "WallTime",
    "check_trace",
    "encode_report",
    "generate_conversations",
    "open_trace",
    "prompt_tokens",
]
