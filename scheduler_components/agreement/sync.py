"""SyncGroup: collective calls between the ranks of one replica, and the account of each call.

Ranks compare their calls as vectors of integers, so a `SyncCall` is packed into some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

__all__ = [
    "MAX_OPERATION_BYTES",
    "SYNC_CALL_INTS",
    "SyncCall",
    "SyncGroup",
    "describe_calls",
    "pack_call",
    "unpack_call",
    "unpack_calls",
]

MAX_OPERATION_BYTES = 64
SYNC_CALL_INTS = 3 + MAX_OPERATION_BYTES // 8


class SyncCall(msgspec.Struct, frozen=True, gc=False):
    """One rank's part in one collective call.

    Attributes:
        rank: global rank of the caller.
        number: how many calls these groups made before, on this rank.
        step: the caller's step.
        operation: what is agreed, at most 64 bytes of UTF-8.
    """

    rank: int
    number: int
    step: int
    operation: str

    def __str__(self) -> str:
        return f"{self.operation!r} at step {self.step}, call {self.number}"


class SyncGroup(Protocol):
    """Ranks that exchange vectors of integers. Called by `ParallelGroups`.

    `torch_sync.TorchSyncGroup` connects processes, `thread_sync.ThreadSyncGroup` connects threads.
    Every member makes the same calls in the same order.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, this rank included."""
        ...

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        """Return the element-wise minimum of the members' int64 vectors, which have one length.

        Raises:
            SyncTimeoutError: a member did not make the call in time.
            SyncDivergenceError: the members made different calls.
        """
        ...

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        """Return the members' int64 vectors, which have one length, concatenated in rank order.

        Raises:
            SyncTimeoutError: a member did not make the call in time.
            SyncDivergenceError: the members made different calls.
        """
        ...

    def close(self) -> None:
        """Release the sockets. Safe to call twice."""
        ...


def pack_call(call: SyncCall) -> list[int]:
    """Pack a call into `SYNC_CALL_INTS` signed 64-bit integers."""
    name = call.operation.encode().ljust(MAX_OPERATION_BYTES, b"\0")
    words = (int.from_bytes(name[at : at + 8], "big", signed=True) for at in range(0, MAX_OPERATION_BYTES, 8))
    return [call.rank, call.number, call.step, *words]


def unpack_call(record: Sequence[int]) -> SyncCall:
    """Unpack the integers of `pack_call`. Any integers give a printable call, because a failed rank may send any."""
    rank, number, step, *words = record
    name = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
    return SyncCall(rank, number, step, name.rstrip(b"\0").decode(errors="replace"))


def unpack_calls(records: Sequence[int]) -> list[SyncCall]:
    """Unpack the concatenated records of several calls."""
    return [unpack_call(records[at : at + SYNC_CALL_INTS]) for at in range(0, len(records), SYNC_CALL_INTS)]


def describe_calls(calls: Iterable[SyncCall]) -> dict[int, str]:
    """Return rank -> its call in words, as `SyncDivergenceError` lists it."""
    return {call.rank: str(call) for call in calls}
