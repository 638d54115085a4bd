"""Packing of `SyncCall`, so that ranks can compare their collective calls as vectors of integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_components.values import SyncCall

__all__ = ["MAX_OPERATION_BYTES", "SYNC_CALL_INTS", "describe_calls", "pack_call", "unpack_call", "unpack_calls"]

MAX_OPERATION_BYTES = 64
SYNC_CALL_INTS = 3 + MAX_OPERATION_BYTES // 8


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
