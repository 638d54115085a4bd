"""What a person or a trainer orders of an engine, and the answer: values that travel between processes.

Names are SGLang's (0.5.23, ``io_struct.py``) where it has the order. ``finish`` of ``PauseMode`` is vLLM's ``wait``.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

__all__ = [
    "DEFAULT_WEIGHT_VERSION",
    "BeginWeightUpdate",
    "CheckWeights",
    "ContinueGeneration",
    "EndWeightUpdate",
    "FlushCache",
    "ClearStorageIndex",
    "LoadWeights",
    "MemoryTag",
    "ControlRequest",
    "ControlReply",
    "PauseGeneration",
    "PauseMode",
    "ReleaseMemory",
    "IdleControlRequest",
    "ResumeMemory",
    "RollBackWeights",
    "control_request_name",
]

DEFAULT_WEIGHT_VERSION = "default"
"""Version of the weights that an engine started with, as SGLang calls it. Hashes of blocks are seeded by no other."""


class PauseMode(enum.StrEnum):
    """What becomes of the requests that run: all three of SGLang's, and waiting for their end."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    FINISH = "finish"


class MemoryTag(enum.StrEnum):
    """A region of device memory, with SGLang's names."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class PauseGeneration(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Compute no more. ``abort`` ends what runs and waits; ``retract`` lets what runs wait again, its output kept;
    ``in_place`` leaves it where it is, with its pages; ``finish`` lets it end, and is given up after ``deadline_s``.
    """

    mode: PauseMode = PauseMode.ABORT
    deadline_s: float = 0.0


class ContinueGeneration(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """End a pause."""


class FlushCache(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Forget every cached prefix once nothing runs; given up after ``deadline_s``, at once for 0."""

    deadline_s: float = 0.0


class ClearStorageIndex(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Count no page as stored any more, once nothing runs; given up after ``deadline_s``."""

    deadline_s: float = 0.0


class BeginWeightUpdate(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Open a session that ends in weights of this version, once nothing runs. Nothing is computed while it is open."""

    weight_version: str
    deadline_s: float = 0.0


class LoadWeights(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """One part of the new weights, beside the old ones. A rank that cannot load it ends the session on all."""

    name: str
    content: bytes


class CheckWeights(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Compare what all ranks have loaded. The answer has its checksum; where ranks differ, the session is over."""


class EndWeightUpdate(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Serve the new weights if every rank has loaded what ``checksum`` says; otherwise keep the old ones.

    Pages that began to move for requests that wait are waited for, since the cache is emptied too. At the deadline the
    session stays open.
    """

    checksum: int
    deadline_s: float = 30.0


class RollBackWeights(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """End the session and keep the old weights."""


class ReleaseMemory(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Give device memory back once nothing runs. Weights are kept on the host, or lost without ``keep_weights``."""

    tags: tuple[MemoryTag, ...]
    keep_weights: bool = True
    deadline_s: float = 0.0


class ResumeMemory(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Take released memory again, on all ranks or on none. The cache is empty then."""

    tags: tuple[MemoryTag, ...]


IdleControlRequest: TypeAlias = FlushCache | ClearStorageIndex | BeginWeightUpdate | EndWeightUpdate | ReleaseMemory
"""Orders that wait until nothing runs and no page is on its way."""

ControlRequest: TypeAlias = (
    PauseGeneration
    | ContinueGeneration
    | IdleControlRequest
    | LoadWeights
    | CheckWeights
    | RollBackWeights
    | ResumeMemory
)

_WORDS: dict[type[ControlRequest], str] = {
    PauseGeneration: "pause generation",
    ContinueGeneration: "continue generation",
    FlushCache: "flush cache",
    ClearStorageIndex: "forget storage",
    BeginWeightUpdate: "begin weight update",
    LoadWeights: "load weights",
    CheckWeights: "check weights",
    EndWeightUpdate: "end weight update",
    RollBackWeights: "roll back weights",
    ReleaseMemory: "release memory",
    ResumeMemory: "resume memory",
}


def control_request_name(order: ControlRequest) -> str:
    """Return an order's name in words, for errors."""
    return _WORDS[type(order)]


class ControlReply(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How an order ended; the same on every rank of a replica, save for the words behind a colon.

    Attributes:
        order_id: as it was given with the order.
        problem: why it was not carried out; empty where it was.
        num_requests: that a pause has ended or put back.
        checksum: of the weights that a session has loaded, where it was asked for.
    """

    order_id: int
    problem: str = ""
    num_requests: int = 0
    checksum: int = 0
