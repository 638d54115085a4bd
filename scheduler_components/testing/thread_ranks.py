"""Ranks on threads of this process that agree through a hub: a parallel group without processes or sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition
from typing import TypeVar

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups, elementwise_min
from scheduler_components.errors import SyncTimeoutError
from scheduler_components.rank_groups import world_rank_groups
from scheduler_components.values import SyncCall

__all__ = ["ThreadSyncHub", "run_ranks"]

T = TypeVar("T")


class _Meeting:
    """One collective of one group: what has been brought, and how many have yet to take the result."""

    __slots__ = ("brought", "num_to_leave")

    def __init__(self, num_ranks: int) -> None:
        self.brought: dict[int, list[int]] = {}
        self.num_to_leave = num_ranks


class ThreadSyncHub:
    """Where the threads of one domain meet. Results do not depend on the order in which the threads come.

    Args:
        reduce_groups: rank -> its groups in order, as ``RankGroups.reduce_groups`` gives them.
        timeout_s: longest wait for the other members of a group.
    """

    def __init__(self, reduce_groups: Mapping[int, Sequence[tuple[int, ...]]], *, timeout_s: float) -> None:
        self._hops = {rank: tuple(groups) for rank, groups in reduce_groups.items()}
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._num_met: dict[tuple[tuple[int, ...], int], int] = {}
        self._standing: dict[int, SyncCall] = {}
        self._missing: tuple[int, ...] | None = None

    def parallel_groups(self, rank: int) -> ParallelGroups:
        """Return the domain of one rank, for one thread."""
        groups = tuple(ThreadSyncGroup(hub=self, rank=rank, ranks=ranks) for ranks in self._hops[rank])
        return ParallelGroups(rank=rank, groups=groups)

    def exchange(self, rank: int, ranks: tuple[int, ...], values: Sequence[int], call: SyncCall) -> list[list[int]]:
        """Bring one rank's values to the next meeting of ``ranks``; return all members' values in rank order.

        Raises:
            SyncTimeoutError: members did not come in time, here or in another group of the replica.
        """
        with self._changed:
            self._standing[rank] = call
            number = self._num_met.get((ranks, rank), 0)
            self._num_met[ranks, rank] = number + 1
            meeting = self._meetings.setdefault((ranks, number), _Meeting(len(ranks)))
            meeting.brought[rank] = list(values)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(meeting.brought) == len(ranks) or self._missing is not None, self._timeout_s
            )
            if len(meeting.brought) < len(ranks):
                raise self._failure(call)
            meeting.num_to_leave -= 1
            if not meeting.num_to_leave:
                del self._meetings[ranks, number]
            return [meeting.brought[peer] for peer in ranks]

    def _failure(self, call: SyncCall) -> SyncTimeoutError:
        """Break the domain: the first to time out says who is missing, the others repeat it at once."""
        if self._missing is None:
            behind = [rank for rank in self._hops if self._number_of(rank) < call.number]
            self._missing = tuple(sorted(behind))
            self._changed.notify_all()
        return SyncTimeoutError(call.operation, call.step, self._missing, self._timeout_s)

    def _number_of(self, rank: int) -> int:
        standing = self._standing.get(rank)
        return -1 if standing is None else standing.number


@dataclass(slots=True, kw_only=True)
class ThreadSyncGroup:
    """One rank's end of one group of a ``ThreadSyncHub``."""

    hub: ThreadSyncHub
    rank: int
    ranks: tuple[int, ...]

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return elementwise_min(self.hub.exchange(self.rank, self.ranks, values, call))

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        return [value for brought in self.hub.exchange(self.rank, self.ranks, values, call) for value in brought]

    def close(self) -> None:
        """Nothing to let go of."""


def run_ranks(parallel: ParallelState, work: Callable[[ParallelGroups], T], *, timeout_s: float = 20.0) -> list[T]:
    """Run ``work`` on one thread per rank of the world that ``parallel`` is one rank of; results by rank.

    Raises:
        Exception: what the lowest failing rank raised, after all threads have ended.
    """
    reduce_groups = {sets.rank: sets.reduce_groups for sets in world_rank_groups(parallel)}
    hub = ThreadSyncHub(reduce_groups, timeout_s=timeout_s)
    with ThreadPoolExecutor(len(reduce_groups)) as threads:
        running = [threads.submit(work, hub.parallel_groups(rank)) for rank in sorted(reduce_groups)]
    return [each.result() for each in running]
