"""SyncGroup: collective calls between the ranks of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_components.values import SyncCall

__all__ = ["SyncGroup"]


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
