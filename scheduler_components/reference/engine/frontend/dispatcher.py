"""Choose the replica of each request by load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_components import (
    ConfigError,
    LoadSnapshot,
)
from scheduler_components.load import DispatchLedger
from scheduler_components.reference.engine.messages import (
    FRONTEND_DISPATCHER,
)

__all__ = [
    "Placement",
    "ReplicaLoad",
    "LoadDispatcher",
]

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
        last_dispatch_ticket: of the last request sent; also how many were.
    """

    ledger: DispatchLedger = field(default_factory=lambda: DispatchLedger(dispatcher=FRONTEND_DISPATCHER))
    snapshot: LoadSnapshot = field(default_factory=LoadSnapshot)
    last_dispatch_ticket: int = 0

    @property
    def is_load_current(self) -> bool:
        """The last report was made after every request had come in."""
        return not self.ledger.unreported_requests

    @property
    def total_tokens(self) -> int:
        return self.snapshot.num_total_tokens + self.ledger.unreported_tokens

    def issue_ticket(self, num_tokens: int) -> int:
        """Note a request that is about to be sent; returns its ticket."""
        self.last_dispatch_ticket = self.ledger.issue_ticket(num_tokens)
        return self.last_dispatch_ticket

    def on_load_report(self, snapshot: LoadSnapshot) -> None:
        """Take in a report; one that is older than the last is dropped."""
        if snapshot.sequence > self.snapshot.sequence:
            self.snapshot = snapshot
            self.ledger.on_load_report(snapshot.dispatched_watermarks)


@dataclass(slots=True, kw_only=True)
class LoadDispatcher:
    """Least total tokens first; a conversation stays where its prefix is cached while that costs little.

    Attributes:
        replicas: one entry per replica.
        affinity_tokens: a conversation's next turn goes to the replica of its last one unless that replica has this
            many tokens more than the least loaded. 0 dispatches by load alone. Affinity matters because a prefix is
            cached on one replica only: without it, a second turn misses with probability (replicas - 1) / replicas.
    """

    replicas: list[ReplicaLoad]
    affinity_tokens: int = 0
    _homes: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def dispatch(self, num_tokens: int, conversation: str | None = None, *, avoid: Collection[int] = ()) -> Placement:
        """Pick a replica, none of ``avoid``, for a request of ``num_tokens`` input tokens and count it there."""
        chosen = min((each for each in range(len(self.replicas)) if each not in avoid), key=self._order)
        if conversation is not None and self.affinity_tokens:
            home = self._homes.get(conversation, chosen)
            home = chosen if home in avoid else home
            extra_tokens = self.replicas[home].total_tokens - self.replicas[chosen].total_tokens
            chosen = home if extra_tokens <= self.affinity_tokens else chosen
            self._remember(conversation, chosen)
        return Placement(chosen, self.replicas[chosen].issue_ticket(num_tokens))

    def dispatch_to(self, num_tokens: int, replica: int) -> Placement:
        """Count a request at the replica that its client has chosen.

        Raises:
            ConfigError: there is no such replica.
        """
        if not 0 <= replica < len(self.replicas):
            hint = f"give 0 to {len(self.replicas) - 1}, or none"
            raise ConfigError("data_parallel_rank", replica, "is not a rank of this engine", hint)
        return Placement(replica, self.replicas[replica].issue_ticket(num_tokens))

    def _order(self, index: int) -> tuple[int, int]:
        """Load first; among equals, such as idle replicas, the one that was given the fewest requests."""
        replica = self.replicas[index]
        return replica.total_tokens, replica.last_dispatch_ticket

    def _remember(self, conversation: str, replica: int) -> None:
        self._homes[conversation] = replica
        self._homes.move_to_end(conversation)
        if len(self._homes) > _KEPT_CONVERSATIONS:
            self._homes.popitem(last=False)
