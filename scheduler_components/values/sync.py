"""SyncCall: identify one collective call between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

__all__ = [
    "MAX_OPERATION_BYTES",
    "SYNC_CALL_INTS",
    "SyncCall",
    "describe_calls",
]


MAX_OPERATION_BYTES = 64


SYNC_CALL_INTS = 3 + MAX_OPERATION_BYTES // 8


class SyncCall(msgspec.Struct, frozen=True, gc=False):
    """One rank's part in one agreement.

    Attributes:
        rank: the global rank that asks.
        number: how many agreements this domain had before, on this rank.
        step: the caller's step.
        operation: what is agreed, at most 64 bytes of UTF-8.
    """

    rank: int
    number: int
    step: int
    operation: str

    def __str__(self) -> str:
        return f"{self.operation!r} at step {self.step}, call {self.number}"

    def to_ints(self) -> list[int]:
        """Pack into ``SYNC_CALL_INTS`` signed 64-bit integers."""
        name = self.operation.encode().ljust(MAX_OPERATION_BYTES, b"\0")
        words = (int.from_bytes(name[at : at + 8], "big", signed=True) for at in range(0, MAX_OPERATION_BYTES, 8))
        return [self.rank, self.number, self.step, *words]

    @classmethod
    def from_ints(cls, record: Sequence[int]) -> SyncCall:
        """Read what ``to_ints`` packed."""
        rank, number, step, *words = record
        name = b"".join(word.to_bytes(8, "big", signed=True) for word in words)
        # A rank that is lost may have sent anything; its record must still be printable.
        return cls(rank, number, step, name.rstrip(b"\0").decode(errors="replace"))

    @classmethod
    def many_from_ints(cls, records: Sequence[int]) -> list[SyncCall]:
        """Read records that stand one after the other."""
        return [cls.from_ints(records[at : at + SYNC_CALL_INTS]) for at in range(0, len(records), SYNC_CALL_INTS)]


def describe_calls(calls: Iterable[SyncCall]) -> dict[int, str]:
    """Return what each rank asked, as ``SyncDivergenceError`` lists it."""
    return {call.rank: str(call) for call in calls}
