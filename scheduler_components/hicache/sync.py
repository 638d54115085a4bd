"""SyncDomain: the agreement of all attention-CP x attention-TP ranks of a replica.

Every rank makes the same calls in the same order, always: no rank-local condition stands in front of a collective.
What a rank cannot do is a vote of no, or a 0 for a MIN; never an absence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.errors import SyncClosedError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.hicache.ballot import BLOCK_INTS, Ballot, Outcome
from scheduler_components.hicache.sync_call import SyncCall, places_of
from scheduler_components.ports import SyncGroup

__all__ = ["SyncDomain"]


@dataclass(slots=True, kw_only=True)
class SyncDomain:
    """One rank's end of the agreement of a replica; used by one thread, with groups of its own.

    The checker is part of every agreement (see ``ballot``), so it is never off: ranks that come with another operation,
    other slots, another step or another count raise ``SyncDivergenceError`` on all of them, naming what each one
    asked. After any error the domain is broken and raises the same again: ranks that failed once are not in step.

    Attributes:
        rank: this process's global rank.
        groups: reduced over in order, each with more than one rank; none for a replica of one rank.
        num_calls: agreements so far.
        num_collectives: reductions so far, over all groups: ``len(groups)`` an agreement while ballots fit one block.
    """

    rank: int = 0
    groups: tuple[SyncGroup, ...] = ()
    num_calls: int = field(default=0, init=False)
    num_collectives: int = field(default=0, init=False)
    _failure: SyncTimeoutError | SyncDivergenceError | SyncClosedError | None = field(default=None, init=False)

    def agree(self, ballot: Ballot) -> Outcome:
        """Bring this rank's ballot and return what all ranks agreed on.

        Raises:
            SyncTimeoutError: ranks did not come in time.
            SyncDivergenceError: ranks came with different questions.
            SyncClosedError: the domain has been closed.
        """
        if self._failure is not None:
            raise self._failure
        call = SyncCall(self.rank, self.num_calls, ballot.step, ballot.operation)
        self.num_calls += 1
        packed = ballot.pack(call.number)
        try:
            reduced = self._reduce(packed[:BLOCK_INTS], call)
            if not ballot.header_agrees(reduced):
                # The reduced header is the same on all ranks, so all of them come here.
                raise self._divergence(call)
            if len(packed) > BLOCK_INTS:
                reduced += self._reduce(packed[BLOCK_INTS:], call)
        except (SyncTimeoutError, SyncDivergenceError) as error:
            self._failure = error
            raise
        return ballot.open(reduced)

    def min(self, operation: str, value: int, *, step: int) -> int:
        """Return the smallest value of all ranks."""
        ballot = Ballot(operation, step=step)
        ballot.min("value", value)
        return self.agree(ballot).numbers["value"]

    def max(self, operation: str, value: int, *, step: int) -> int:
        """Return the largest value of all ranks."""
        ballot = Ballot(operation, step=step)
        ballot.max("value", value)
        return self.agree(ballot).numbers["value"]

    def vote_all(self, operation: str, agrees: bool, *, step: int) -> bool:
        """Return whether every rank agrees."""
        ballot = Ballot(operation, step=step)
        ballot.all("vote", agrees)
        return self.agree(ballot).verdicts["vote"]

    def vote_any(self, operation: str, agrees: bool, *, step: int) -> bool:
        """Return whether at least one rank agrees."""
        ballot = Ballot(operation, step=step)
        ballot.any("vote", agrees)
        return self.agree(ballot).verdicts["vote"]

    def equal(self, operation: str, value: int, *, step: int) -> bool:
        """Return whether all ranks have the same value."""
        ballot = Ballot(operation, step=step)
        ballot.equal("value", value)
        return self.agree(ballot).verdicts["value"]

    def barrier(self, operation: str, *, step: int) -> None:
        """Return when all ranks have come."""
        self.agree(Ballot(operation, step=step))

    def close(self) -> None:
        """Let go of the groups; agreements raise from now on. Safe to call twice."""
        self._failure = SyncClosedError("the sync domain is closed")
        for group in self.groups:
            group.close()

    def _reduce(self, values: list[int], call: SyncCall) -> list[int]:
        for group in self.groups:
            values = group.all_reduce_min(values, call)
            self.num_collectives += 1
        return values

    def _divergence(self, call: SyncCall) -> SyncDivergenceError:
        records = call.to_ints()
        for group in self.groups:
            records = group.all_gather(records, call)
        return SyncDivergenceError(call.number, places_of(SyncCall.many_from_ints(records)))
