"""Control requests: what an operator or a trainer asks of an engine, and the reply.

Names are SGLang's (0.5.23, ``io_struct.py``) if it has the request. ``finish`` of `PauseMode` is vLLM's ``wait``.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

__all__ = [
    "BeginWeightUpdate",
    "CheckWeights",
    "ClearStorageIndex",
    "ContinueGeneration",
    "ControlReply",
    "ControlRequest",
    "EndWeightUpdate",
    "FlushCache",
    "IdleControlRequest",
    "LoadWeights",
    "MemoryTag",
    "PauseGeneration",
    "PauseMode",
    "ReleaseMemory",
    "ResumeMemory",
    "RollBackWeights",
    "control_request_name",
]


class PauseMode(enum.StrEnum):
    """What a pause does with running requests: SGLang's three modes, and waiting for their end."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    FINISH = "finish"


class MemoryTag(enum.StrEnum):
    """A region of device memory, with SGLang's names."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class PauseGeneration(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Stop computing.

    ``abort`` ends running and waiting requests. ``retract`` returns running requests to the queue and keeps their
    output. ``in_place`` leaves them where they are, with their pages. ``finish`` lets them end, and gives up after
    `deadline_s`.
    """

    mode: PauseMode = PauseMode.ABORT
    deadline_s: float = 0.0


class ContinueGeneration(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """End a pause."""


class FlushCache(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Discard every cached prefix as soon as the engine is idle. Give up after `deadline_s`; 0 tries once."""

    deadline_s: float = 0.0


class ClearStorageIndex(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Treat no page as stored any more, as soon as the engine is idle. Give up after `deadline_s`."""

    deadline_s: float = 0.0


class BeginWeightUpdate(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Open a weight update to this version as soon as the engine is idle. Nothing is computed while it is open."""

    weight_version: str
    deadline_s: float = 0.0


class LoadWeights(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Load one tensor of the new weights. If a rank cannot load it, the update ends on all ranks."""

    name: str
    content: bytes


class CheckWeights(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Compare the tensors that all ranks have loaded, and reply with their checksum. A difference ends the update."""


class EndWeightUpdate(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Serve the new weights if every rank has loaded tensors with this checksum; otherwise keep the old weights.

    It also empties the cache, so it waits for transfers of pages that were started for waiting requests. At the
    deadline the update stays open.
    """

    checksum: int
    deadline_s: float = 30.0


class RollBackWeights(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """End the update and keep the old weights."""


class ReleaseMemory(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Release device memory as soon as the engine is idle. `keep_weights` keeps the weights on the host."""

    tags: tuple[MemoryTag, ...]
    keep_weights: bool = True
    deadline_s: float = 0.0


class ResumeMemory(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Allocate released memory again, on all ranks or on none. The cache is empty afterwards."""

    tags: tuple[MemoryTag, ...]


IdleControlRequest: TypeAlias = FlushCache | ClearStorageIndex | BeginWeightUpdate | EndWeightUpdate | ReleaseMemory
"""Control requests that wait until no request runs and no page is transferred."""

ControlRequest: TypeAlias = (
    PauseGeneration
    | ContinueGeneration
    | IdleControlRequest
    | LoadWeights
    | CheckWeights
    | RollBackWeights
    | ResumeMemory
)

_NAMES: dict[type[ControlRequest], str] = {
    PauseGeneration: "pause generation",
    ContinueGeneration: "continue generation",
    FlushCache: "flush cache",
    ClearStorageIndex: "clear storage index",
    BeginWeightUpdate: "begin weight update",
    LoadWeights: "load weights",
    CheckWeights: "check weights",
    EndWeightUpdate: "end weight update",
    RollBackWeights: "roll back weights",
    ReleaseMemory: "release memory",
    ResumeMemory: "resume memory",
}


def control_request_name(request: ControlRequest) -> str:
    """Return a request's name in words, for errors."""
    return _NAMES[type(request)]


class ControlReply(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The result of a control request. It is the same on every rank of a replica, except the text after a colon.

    Attributes:
        request_id: id of the request.
        problem: why it was rejected or failed; empty if it was carried out.
        num_requests: requests that a pause has aborted or retracted.
        checksum: checksum of the loaded weights, for requests that ask for it.
    """

    request_id: int
    problem: str = ""
    num_requests: int = 0
    checksum: int = 0
