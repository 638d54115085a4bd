"""Agreement of several ranks within one thread, for state machines that return proposals and accept agreed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler_components.agreement import AgreedValues, Proposal, SyncCall, elementwise_min
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.agreement.sync import describe_calls
from scheduler_components.errors import ConfigError, SyncDivergenceError, SyncTimeoutError

__all__ = ["InProcessGroups", "agree_on_decisions"]


class InProcessGroups:
    """The groups of all simulated ranks. Deterministic, without waiting.

    The caller collects every rank's proposal of the step and passes each rank its agreed values. The groups are data,
    so a simulation can leave one out and show the consequence.

    Args:
        reduce_groups: rank -> its groups in order, as ``RankGroups.reduce_groups`` returns them.

    Raises:
        ConfigError: a member of a group does not have that group at the same hop.
    """

    __slots__ = ("_hops", "_num_calls", "num_collectives")

    def __init__(self, reduce_groups: Mapping[int, Sequence[tuple[int, ...]]]) -> None:
        for rank, groups in reduce_groups.items():
            for hop, group in enumerate(groups):
                for peer in group:
                    if (
                        peer not in reduce_groups
                        or len(reduce_groups[peer]) <= hop
                        or tuple(reduce_groups[peer][hop]) != tuple(group)
                    ):
                        raise ConfigError(
                            "reduce_groups",
                            group,
                            f"is hop {hop} of rank {rank} but not of rank {peer}",
                            "give every member the same groups in the same order",
                        )
        self._hops = {rank: tuple(reduce_groups[rank]) for rank in sorted(reduce_groups)}
        self._num_calls = 0
        self.num_collectives = 0

    def reduce(self, proposals: Mapping[int, Proposal]) -> dict[int, AgreedValues]:
        """Reduce the proposals of all ranks and return the agreed values of each rank.

        Raises:
            SyncTimeoutError: a rank has no proposal; the error names it as missing.
            SyncDivergenceError: the ranks of one group made different proposals.
        """
        number = self._num_calls
        self._num_calls += 1
        calls = {
            rank: SyncCall(rank, number, proposal.step, proposal.operation) for rank, proposal in proposals.items()
        }
        missing = tuple(rank for rank in self._hops if rank not in proposals)
        if missing:
            operation, step = next(((call.operation, call.step) for call in calls.values()), ("nothing", -1))
            raise SyncTimeoutError(operation, step, missing, 0.0)
        vectors = {rank: proposals[rank].pack(number) for rank in self._hops}
        for hop in range(max((len(groups) for groups in self._hops.values()), default=0)):
            vectors = self._reduce_hop(hop, vectors, calls)
            self.num_collectives += 1
        return {rank: proposals[rank].unpack(vectors[rank]) for rank in self._hops}

    def _reduce_hop(
        self, hop: int, vectors: Mapping[int, list[int]], calls: Mapping[int, SyncCall]
    ) -> dict[int, list[int]]:
        reduced: dict[int, list[int]] = {}
        for rank, groups in self._hops.items():
            if rank in reduced:
                continue
            if hop >= len(groups):
                reduced[rank] = vectors[rank]
                continue
            # Proposals of different lengths differ in the header, which lies within the common length.
            common = min(len(vectors[peer]) for peer in groups[hop])
            result = elementwise_min([vectors[peer][:common] for peer in groups[hop]])
            if not Proposal.headers_match(result):
                raise SyncDivergenceError(calls[rank].number, describe_calls(calls[peer] for peer in groups[hop]))
            reduced |= dict.fromkeys(groups[hop], result)
        return reduced


def agree_on_decisions(groups: InProcessGroups, logs: Mapping[int, DecisionLog], *, step: int) -> bool:
    """Compare the decision logs of all ranks, as `DecisionLog.apply` does with collectives. Return whether they agree.

    Raises:
        DecisionDivergenceError: they do not, and the policy of the logs is ``"stop"``.
    """
    proposals = {rank: Proposal("decisions", step=step) for rank in logs}
    for rank, log in logs.items():
        log.fill(proposals[rank])
    agreed = groups.reduce(proposals)
    if all(each.flags["decisions"] for each in agreed.values()):
        for rank, log in logs.items():
            log.apply(step, agreed[rank])
        return True
    num_bytes = max(each.numbers["decision bytes"] for each in agreed.values())
    gathered = [number for log in logs.values() for number in log.pack_ring(num_bytes)]
    for log in logs.values():
        log.apply_rings(step, gathered)
    return False
