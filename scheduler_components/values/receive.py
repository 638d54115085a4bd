"""Input of a scheduler: messages at the leading rank, and how they reach the other ranks."""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

import msgspec

__all__ = [
    "ReceiverStats",
    "ForwardMode",
    "InputKind",
    "InputMessage",
    "RejectionReason",
    "RequestRejection",
    "RelayedInput",
]

Message_co = TypeVar("Message_co", covariant=True)


class ReceiverStats(msgspec.Struct, gc=False):
    """Counters of one rank's intake; those of messages are the leading rank's.

    Attributes:
        receives: times that all ranks met for input.
        receives_skipped: steps that took no input, by the weight of their forward mode.
        requests_admitted: requests that went to all ranks.
        requests_refused: requests that were answered instead, whatever the reason.
        requests_repeated: further copies of requests in flight, which were dropped.
        messages_unreadable: frames that are no message of the engine.
        requests_held: requests that wait now because input is blocked.
    """

    receives: int = 0
    receives_skipped: int = 0
    requests_admitted: int = 0
    requests_refused: int = 0
    requests_repeated: int = 0
    messages_unreadable: int = 0
    requests_held: int = 0

    def copy(self) -> ReceiverStats:
        """Return the counts of this moment."""
        return msgspec.structs.replace(self)


class ForwardMode(enum.StrEnum):
    """What a step computed; equal on all ranks of a replica. Names are SGLang's (``ForwardMode``, 0.5.23)."""

    IDLE = "idle"
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"


class InputKind(enum.StrEnum):
    """What an intake must know of a message.

    A ``REQUEST`` may wait and may be refused. An ``ABORT`` ends one. A ``COMMAND`` is for the scheduler and always
    passes. ``BLOCK``, ``UNBLOCK`` and ``DRAIN`` are for the intake itself and go no further.
    """

    REQUEST = "request"
    ABORT = "abort"
    COMMAND = "command"
    BLOCK = "block"
    UNBLOCK = "unblock"
    DRAIN = "drain"


class InputMessage(msgspec.Struct, Generic[Message_co], frozen=True, gc=False):
    """One message, read.

    Attributes:
        kind: what the intake does with it.
        message: for the scheduler, as the engine's own reader made it.
        rid: of requests and aborts: which request.
    """

    kind: InputKind
    message: Message_co
    rid: str = ""


class RejectionReason(enum.StrEnum):
    """Why a request was not let in."""

    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    HELD_FULL = "held_full"
    DRAINING = "draining"
    IN_USE = "in_use"
    SERVED = "served"
    ABORTED = "aborted"


class RequestRejection(msgspec.Struct, frozen=True, gc=False):
    """The answer to a request that was not let in.

    Attributes:
        rid: which request.
        reason: why, for programs.
        text: why, in one sentence with what to do, for the request's author.
        retry_after_s: when to try again; None where that would not help, or where nobody knows.
    """

    rid: str
    reason: RejectionReason
    text: str
    retry_after_s: float | None = None


class RelayedInput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the leading rank brings to all ranks before a step.

    Attributes:
        step: the caller's step.
        state_digest: the caller's state before it, 32 bits.
        input_digest: of all frames that were relayed before, in order, 32 bits.
        frames: messages in the order in which they are let in, as they came.
    """

    step: int
    state_digest: int
    input_digest: int
    frames: tuple[bytes, ...] = ()
