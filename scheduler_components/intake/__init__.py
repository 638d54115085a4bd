"""Input: one rank receives, screens and relays; all ranks of a replica admit the same messages in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.intake.intake import RequestReceiver
from scheduler_components.intake.screen import BlockerState, InputBlocker, InputLimits
from scheduler_components.intake.skipper import DEFAULT_RECV_WEIGHTS, RecvSkipper
from scheduler_components.intake.sync_relay import SyncGroupRelay
from scheduler_components.ports import (
    InputRelay,
    InputSource,
    MessageDecoder,
    NullInputRelay,
    NullInputSource,
    NullRejectionSink,
    NullRequestIds,
    RejectionSink,
    RequestIds,
)
from scheduler_components.values import (
    ForwardMode,
    InputKind,
    InputMessage,
    ReceiverStats,
    RejectionReason,
    RelayedInput,
    RequestRejection,
)

if TYPE_CHECKING:
    from scheduler_components.intake.zmq_idle_sleeper import IdleSleeper
    from scheduler_components.intake.zmq_relay import (
        StopRequestedError,
        WaitForSocket,
        ZmqFollowerRelay,
        ZmqInputSource,
        ZmqLeaderRelay,
    )

__all__ = [
    "ForwardMode",
    "IdleSleeper",
    "InputMessage",
    "InputLimits",
    "InputKind",
    "MessageDecoder",
    "RequestRejection",
    "InputRelay",
    "InputBlocker",
    "InputSource",
    "BlockerState",
    "RequestReceiver",
    "ReceiverStats",
    "RecvSkipper",
    "RejectionReason",
    "RejectionSink",
    "RelayedInput",
    "RequestIds",
    "StopRequestedError",
    "SyncGroupRelay",
    "WaitForSocket",
    "ZmqFollowerRelay",
    "ZmqInputSource",
    "ZmqLeaderRelay",
    "NullInputRelay",
    "NullRequestIds",
    "NullInputSource",
    "NullRejectionSink",
    "DEFAULT_RECV_WEIGHTS",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.intake.zmq_idle_sleeper": "IdleSleeper",
        "scheduler_components.intake.zmq_relay": (
            "StopRequestedError WaitForSocket ZmqFollowerRelay ZmqInputSource ZmqLeaderRelay"
        ),
    },
)
