"""Input of a scheduler: messages at the leading rank, and how they reach the other ranks."""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

import msgspec

__all__ = [
    "ForwardMode",
    "InputKind",
    "InputMessage",
    "RejectionReason",
    "RequestRejection",
    "RelayedInput",
]

Message_co = TypeVar("Message_co", covariant=True)


class ForwardMode(enum.StrEnum):
    """What a step computed; equal on all ranks of a replica. Names are SGLang's (`ForwardMode`, 0.5.23)."""

    IDLE = "idle"
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"


class InputKind(enum.StrEnum):
    """How the receiver treats a message.

    A ``REQUEST`` may be held or rejected. An ``ABORT`` ends a request. A ``COMMAND`` is for the scheduler and always
    relayed. ``BLOCK``, ``UNBLOCK`` and ``DRAIN`` are for the `InputBlocker` and not relayed.
    """

    REQUEST = "request"
    ABORT = "abort"
    COMMAND = "command"
    BLOCK = "block"
    UNBLOCK = "unblock"
    DRAIN = "drain"


class InputMessage(msgspec.Struct, Generic[Message_co], frozen=True, gc=False):
    """One decoded message.

    Attributes:
        kind: how the receiver treats it.
        message: the content for the scheduler, decoded by the engine's `MessageDecoder`.
        rid: id of the request, for requests and aborts.
    """

    kind: InputKind
    message: Message_co
    rid: str = ""


class RejectionReason(enum.StrEnum):
    """Why a request was rejected."""

    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    HELD_FULL = "held_full"
    DRAINING = "draining"
    IN_USE = "in_use"
    SERVED = "served"
    ABORTED = "aborted"
    STOPPED = "stopped"


class RequestRejection(msgspec.Struct, frozen=True, gc=False):
    """The answer to a rejected request.

    Attributes:
        rid: id of the request.
        reason: the reason, for programs.
        text: the reason and what to do, in one sentence for the user.
        retry_after_s: seconds after which to retry; None if a retry would not help, or the time is unknown.
    """

    rid: str
    reason: RejectionReason
    text: str
    retry_after_s: float | None = None


class RelayedInput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The input that the leading rank broadcasts before a step.

    Attributes:
        step: the caller's step.
        state_digest: digest of the caller's state before the step, 32 bits.
        input_digest: digest of all frames relayed before, in order, 32 bits.
        frames: admitted messages in order, as received.
    """

    step: int
    state_digest: int
    input_digest: int
    frames: tuple[bytes, ...] = ()
