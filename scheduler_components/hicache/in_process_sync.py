"""InProcessSync: the agreement of N simulated ranks inside one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_components.errors import ConfigError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.hicache.ballot import Ballot, Outcome, elementwise_min
from scheduler_components.hicache.sync_call import SyncCall, places_of

__all__ = ["InProcessSync"]


class InProcessSync:
    """Agreement of N ranks inside one thread, for state machines that give out ballots and take outcomes.

    The caller collects every rank's ballot of the step and hands each rank its outcome: deterministic, no waiting. Hops
    are data, so a simulation may leave some out and show what comes of that.

    Args:
        hops: rank -> its groups in order, as ``RankSets.hops`` gives them.

    Raises:
        ConfigError: members of a group do not have that group at the same hop.
    """

    __slots__ = ("_hops", "_num_calls", "num_collectives")

    def __init__(self, hops: Mapping[int, Sequence[tuple[int, ...]]]) -> None:
        for rank, groups in hops.items():
            for at, group in enumerate(groups):
                for peer in group:
                    if peer not in hops or len(hops[peer]) <= at or tuple(hops[peer][at]) != tuple(group):
                        raise ConfigError(
                            "hops",
                            group,
                            f"is hop {at} of rank {rank} but not of rank {peer}",
                            "give every member the same groups in the same order",
                        )
        self._hops = {rank: tuple(hops[rank]) for rank in sorted(hops)}
        self._num_calls = 0
        self.num_collectives = 0

    def agree(self, ballots: Mapping[int, Ballot]) -> dict[int, Outcome]:
        """Reduce all ranks' ballots and return each rank's outcome.

        Raises:
            SyncTimeoutError: a rank has no ballot: it is the missing one.
            SyncDivergenceError: ranks of one group brought different questions.
        """
        number = self._num_calls
        self._num_calls += 1
        calls = {rank: SyncCall(rank, number, ballot.step, ballot.operation) for rank, ballot in ballots.items()}
        missing = tuple(rank for rank in self._hops if rank not in ballots)
        if missing:
            operation, step = next(((call.operation, call.step) for call in calls.values()), ("nothing", -1))
            raise SyncTimeoutError(operation, step, missing, 0.0)
        vectors = {rank: ballots[rank].pack(number) for rank in self._hops}
        for at in range(max((len(groups) for groups in self._hops.values()), default=0)):
            vectors = self._reduce_hop(at, vectors, calls)
            self.num_collectives += 1
        return {rank: ballots[rank].open(vectors[rank]) for rank in self._hops}

    def _reduce_hop(
        self, at: int, vectors: Mapping[int, list[int]], calls: Mapping[int, SyncCall]
    ) -> dict[int, list[int]]:
        reduced: dict[int, list[int]] = {}
        for rank, groups in self._hops.items():
            if rank in reduced:
                continue
            if at >= len(groups):
                reduced[rank] = vectors[rank]
                continue
            # Ballots of different lengths part in the header, which stands in the part that they share.
            shared = min(len(vectors[peer]) for peer in groups[at])
            result = elementwise_min([vectors[peer][:shared] for peer in groups[at]])
            if not Ballot.header_agrees(result):
                places = places_of(calls[peer] for peer in groups[at])
                raise SyncDivergenceError(calls[rank].number, places)
            reduced |= dict.fromkeys(groups[at], result)
        return reduced
