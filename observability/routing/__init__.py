"""Routing: which replica serves a request, by what it has cached and how busy it is.

``KvRouter`` composes the parts: a view of the blocks, the blocks that were sent and are not confirmed yet, dispatch
ledgers, a cost model, a picker and the set of replicas. It opens no socket and reads no clock; times come with each
call, in seconds of one monotonic clock.
"""

from __future__ import annotations

from observability.routing.cost_model import ReplicaId, RoutingCostModel
from observability.routing.hashed_prompt import HashedPrompt
from observability.routing.kv_router import KvRouter, Pick
from observability.routing.picker import (
    BoundedLoad,
    Candidate,
    LeastCost,
    Picker,
    PickerName,
    PowerOfTwo,
    Softmax,
    StickySessions,
    make_picker,
)
from observability.routing.replica_set import ReplicaSet, ReplicaState
from observability.routing.speculative_entries import SpeculativeEntries
from observability.routing.stream_listener import LockedListener, RouterListener

__all__ = [
    "KvRouter",
    "Pick",
    "HashedPrompt",
    "ReplicaId",
    # what a replica costs
    "RoutingCostModel",
    # which one is chosen
    "Picker",
    "PickerName",
    "make_picker",
    "Candidate",
    "LeastCost",
    "Softmax",
    "PowerOfTwo",
    "BoundedLoad",
    "StickySessions",
    # what was sent, and where it may be sent
    "SpeculativeEntries",
    "ReplicaSet",
    "ReplicaState",
    # what feeds it
    "RouterListener",
    "LockedListener",
]
