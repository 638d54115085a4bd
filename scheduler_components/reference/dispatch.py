"""Which data-parallel replica gets the next request: pure, no sockets, no clock.

A replica's load is what it last reported (running and waiting tokens) plus what was sent to it and no report counts
yet, which its ``DispatchLedger`` knows.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_components.load.dispatch_ledger import DispatchLedger
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.reference.messages import FRONT

__all__ = ["LoadDispatcher", "Placement", "ReplicaLoad"]

_KEPT_CONVERSATIONS = 65_536


class Placement(NamedTuple):
    """Where a request goes: the replica, and the ticket under which its load reports will count it."""

    replica: int
    ticket: int


@dataclass(slots=True, kw_only=True)
class ReplicaLoad:
    """What the dispatcher knows of one replica.

    Attributes:
        ledger: what was sent and no report counts yet.
        snapshot: the newest report.
        last_ticket: of the last request sent; also how many were.
    """

    ledger: DispatchLedger = field(default_factory=lambda: DispatchLedger(dispatcher=FRONT))
    snapshot: LoadSnapshot = field(default_factory=LoadSnapshot)
    last_ticket: int = 0

    @property
    def is_covered(self) -> bool:
        """The last report was made after every request had come in."""
        return not self.ledger.unreported_requests

    @property
    def total_tokens(self) -> int:
        return self.snapshot.num_total_tokens + self.ledger.unreported_tokens

    def dispatched(self, num_tokens: int) -> int:
        """Note a request that is about to be sent; returns its ticket."""
        self.last_ticket = self.ledger.dispatched(num_tokens)
        return self.last_ticket

    def reported(self, snapshot: LoadSnapshot) -> None:
        """Take in a report; one that is older than the last is dropped."""
        if snapshot.sequence > self.snapshot.sequence:
            self.snapshot = snapshot
            self.ledger.reported(snapshot.dispatched_watermarks)


@dataclass(slots=True, kw_only=True)
class LoadDispatcher:
    """Least total tokens first; a conversation stays where its prefix is cached while that costs little.

    Args:
        replicas: one entry a replica.
        affinity_tokens: a conversation's next turn goes to the replica of its last one unless that replica has this
            many tokens more than the least loaded. 0 dispatches by load alone. Affinity matters because a prefix is
            cached on one replica only: without it, a second turn misses with probability (replicas - 1) / replicas.
    """

    replicas: list[ReplicaLoad]
    affinity_tokens: int = 0
    _homes: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def dispatch(self, num_tokens: int, conversation: str | None = None) -> Placement:
        """Pick a replica for a request of ``num_tokens`` input tokens and count it there."""
        chosen = min(range(len(self.replicas)), key=self._order)
        if conversation is not None and self.affinity_tokens:
            home = self._homes.get(conversation, chosen)
            extra_tokens = self.replicas[home].total_tokens - self.replicas[chosen].total_tokens
            chosen = home if extra_tokens <= self.affinity_tokens else chosen
            self._remember(conversation, chosen)
        return Placement(chosen, self.replicas[chosen].dispatched(num_tokens))

    def _order(self, index: int) -> tuple[int, int]:
        """Load first; among equals, such as idle replicas, the one that was given the fewest requests."""
        replica = self.replicas[index]
        return replica.total_tokens, replica.last_ticket

    def _remember(self, conversation: str, replica: int) -> None:
        self._homes[conversation] = replica
        self._homes.move_to_end(conversation)
        if len(self._homes) > _KEPT_CONVERSATIONS:
            self._homes.popitem(last=False)
