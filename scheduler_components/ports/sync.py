"""SyncGroup: collective calls between the ranks of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_components.values import SyncCall

__all__ = [
    "SyncGroup",
]


class SyncGroup(Protocol):
    """Ranks that agree with each other: ``hicache.TorchSyncGroup``. Called by ``hicache.ParallelGroups``.

    Every member makes the same calls, in the same order, always.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, this rank included."""
        ...

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        """Return the element-wise minimum of all members' int64 vectors, which have one length.

        Raises:
            SyncTimeoutError: a member did not come in time.
            SyncDivergenceError: all came, with different calls.
        """
        ...

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        """Return all members' int64 vectors, which have one length, one after the other in rank order.

        Raises:
            SyncTimeoutError: a member did not come in time.
            SyncDivergenceError: all came, with different calls.
        """
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...
