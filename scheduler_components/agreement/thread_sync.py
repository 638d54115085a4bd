"""Agreement between ranks that are threads of one process: simulations and tests need no processes or sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Condition

from scheduler_components.agreement import ParallelGroups, elementwise_min
from scheduler_components.agreement.sync import SyncCall, describe_calls
from scheduler_components.errors import SyncDivergenceError, SyncTimeoutError

__all__ = ["ThreadSyncGroup", "ThreadSyncHub"]


class ThreadSyncHub:
    """Connects the threads of the agreeing ranks. Results do not depend on the order in which the threads call.

    Args:
        reduce_groups: rank -> its groups in order, as ``RankGroups.reduce_groups`` returns them.
        timeout_s: longest wait for the other members of a group.
    """

    def __init__(self, reduce_groups: Mapping[int, Sequence[tuple[int, ...]]], *, timeout_s: float) -> None:
        self._hops = {rank: tuple(groups) for rank, groups in reduce_groups.items()}
        self._timeout_s = timeout_s
        self._changed = Condition()
        # By ranks and number of the call: the contributions, and how many ranks have read all of them.
        self._collectives: dict[tuple[tuple[int, ...], int], dict[int, list[int]]] = {}
        self._num_read: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._num_calls: dict[tuple[tuple[int, ...], int], int] = {}
        self._calls: dict[int, SyncCall] = {}
        self._missing: tuple[int, ...] | None = None
        self._failed_call: SyncCall | None = None

    def parallel_groups(self, rank: int) -> ParallelGroups:
        """Return the groups of one rank, for one thread."""
        groups = tuple(ThreadSyncGroup(hub=self, rank=rank, ranks=ranks) for ranks in self._hops[rank])
        return ParallelGroups(rank=rank, groups=groups)

    def exchange(self, rank: int, ranks: tuple[int, ...], values: Sequence[int], call: SyncCall) -> list[list[int]]:
        """Contribute one rank's values to the next collective of ``ranks``; return all members' values in rank order.

        Raises:
            SyncTimeoutError: a member did not join in time, in this group or in another group of the replica.
            SyncDivergenceError: this rank is the one that did not join in time, because it makes another call.
        """
        with self._changed:
            self._calls[rank] = call
            number = self._num_calls.get((ranks, rank), 0)
            self._num_calls[ranks, rank] = number + 1
            key = ranks, number
            contributions = self._collectives.setdefault(key, {})
            contributions[rank] = list(values)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(contributions) == len(ranks) or self._missing is not None, self._timeout_s
            )
            if len(contributions) < len(ranks):
                raise self._failure(call)
            self._num_read[key] += 1
            if self._num_read[key] == len(ranks):
                del self._collectives[key], self._num_read[key]
            return [contributions[peer] for peer in ranks]

    def _failure(self, call: SyncCall) -> SyncTimeoutError | SyncDivergenceError:
        """Return the error of a timeout. The first rank determines the missing ranks for all."""
        if self._missing is None:
            behind = [rank for rank in self._hops if self._number_of(rank) < call.number]
            self._missing, self._failed_call = tuple(sorted(behind)), call
            self._changed.notify_all()
        failed = self._failed_call
        if failed is not None and call.rank in self._missing and failed.operation != call.operation:
            return SyncDivergenceError(call.number, describe_calls((failed, call)))
        return SyncTimeoutError(call.operation, call.step, self._missing, self._timeout_s)

    def _number_of(self, rank: int) -> int:
        call_of_rank = self._calls.get(rank)
        return -1 if call_of_rank is None else call_of_rank.number


@dataclass(slots=True, kw_only=True)
class ThreadSyncGroup:
    """One rank's end of one group of a ``ThreadSyncHub``."""

    hub: ThreadSyncHub
    rank: int
    ranks: tuple[int, ...]

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return elementwise_min(self.hub.exchange(self.rank, self.ranks, values, call))

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return [
            value for contribution in self.hub.exchange(self.rank, self.ranks, values, call) for value in contribution
        ]

    def close(self) -> None:
        pass
