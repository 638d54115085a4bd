"""SyncCall: identify one collective call between ranks."""

from __future__ import annotations

import msgspec

__all__ = ["SyncCall"]


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
