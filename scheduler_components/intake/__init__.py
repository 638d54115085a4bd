"""Input: one rank receives, screens and relays; all ranks of a replica admit the same messages in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.intake.intake import Intake
from scheduler_components.intake.screen import InputBounds, InputScreen, InputState
from scheduler_components.intake.skipper import WEIGHTS, RecvSkipper
from scheduler_components.intake.sync_relay import SyncRelay
from scheduler_components.ports import (
    ALONE,
    NO_IDS,
    NO_INPUT,
    NO_REFUSALS,
    InputReader,
    InputRelay,
    InputSource,
    RefusalSink,
    RequestIds,
)
from scheduler_components.values import (
    ForwardMode,
    Incoming,
    InputKind,
    InputRefusal,
    IntakeStats,
    RefusalReason,
    RelayedInput,
)

if TYPE_CHECKING:
    from scheduler_components.intake.zmq_idle_sleeper import IdleSleeper
    from scheduler_components.intake.zmq_relay import (
        StopRequested,
        WaitFor,
        ZmqFollowerRelay,
        ZmqInputSource,
        ZmqLeaderRelay,
    )

__all__ = [
    "ForwardMode",
    "IdleSleeper",
    "Incoming",
    "InputBounds",
    "InputKind",
    "InputReader",
    "InputRefusal",
    "InputRelay",
    "InputScreen",
    "InputSource",
    "InputState",
    "Intake",
    "IntakeStats",
    "RecvSkipper",
    "RefusalReason",
    "RefusalSink",
    "RelayedInput",
    "RequestIds",
    "StopRequested",
    "SyncRelay",
    "WaitFor",
    "ZmqFollowerRelay",
    "ZmqInputSource",
    "ZmqLeaderRelay",
    "ALONE",
    "NO_IDS",
    "NO_INPUT",
    "NO_REFUSALS",
    "WEIGHTS",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.intake.zmq_idle_sleeper": "IdleSleeper",
        "scheduler_components.intake.zmq_relay": (
            "StopRequested WaitFor ZmqFollowerRelay ZmqInputSource ZmqLeaderRelay"
        ),
    },
)
