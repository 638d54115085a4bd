"""LoadDispatcher: choose the replica of each request by load.

The load of a replica is its last reported number of tokens, running and waiting, plus the tokens of requests that were
sent to it and that no report counts yet. ``DispatchLedger`` knows the latter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_components import ConfigError
from scheduler_components.load import DispatchLedger
from scheduler_components.values import LoadSnapshot
from scheduler_engine.engine.messages import FRONTEND_DISPATCHER

_MAX_CONVERSATIONS = 65_536


class DispatchChoice(NamedTuple):
    """The replica of a request, and the ticket under which load reports will count it."""

    replica: int
    ticket: int


@dataclass(slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica as the dispatcher knows it.

    Attributes:
        ledger: requests that were sent and that no report counts yet.
        snapshot: the newest report.
        last_dispatch_ticket: ticket of the last request sent, which is also the number of requests sent.
    """

    ledger: DispatchLedger = field(default_factory=lambda: DispatchLedger(dispatcher=FRONTEND_DISPATCHER))
    snapshot: LoadSnapshot = field(default_factory=LoadSnapshot)
    last_dispatch_ticket: int = 0

    @property
    def is_load_current(self) -> bool:
        """True if the newest report counts every request that was sent."""
        return not self.ledger.unreported_requests

    @property
    def total_tokens(self) -> int:
        """Reported and unreported tokens."""
        return self.snapshot.num_total_tokens + self.ledger.unreported_tokens

    def issue_ticket(self, num_tokens: int) -> int:
        """Count a request that is about to be sent, and return its ticket."""
        self.last_dispatch_ticket = self.ledger.issue_ticket(num_tokens)
        return self.last_dispatch_ticket

    def on_load_report(self, snapshot: LoadSnapshot) -> None:
        """Store a report. Drop one that is older than the stored one."""
        if snapshot.sequence > self.snapshot.sequence:
            self.snapshot = snapshot
            self.ledger.on_load_report(snapshot.dispatched_watermarks)


@dataclass(slots=True, kw_only=True)
class LoadDispatcher:
    """Send each request to the replica with the fewest tokens, with affinity of conversations.

    Attributes:
        replicas: one entry per replica.
        affinity_tokens: the next request of a conversation goes to the replica of its last one unless that replica has
            this many tokens more than the least loaded. 0 dispatches by load alone. A prefix is cached on one replica
            only, so without affinity a second turn misses with probability (replicas - 1) / replicas.
    """

    replicas: list[ReplicaLoad]
    affinity_tokens: int = 0
    _last_replicas: OrderedDict[str, int] = field(default_factory=OrderedDict)  # by conversation, oldest first

    def dispatch(
        self, num_tokens: int, conversation: str | None = None, *, avoid: Collection[int] = ()
    ) -> DispatchChoice:
        """Choose a replica that is not in ``avoid`` for a request of ``num_tokens`` input tokens, and count it."""
        chosen = min((index for index in range(len(self.replicas)) if index not in avoid), key=self._load_key)
        if conversation is not None and self.affinity_tokens:
            last = self._last_replicas.get(conversation, chosen)
            last = chosen if last in avoid else last
            extra_tokens = self.replicas[last].total_tokens - self.replicas[chosen].total_tokens
            chosen = last if extra_tokens <= self.affinity_tokens else chosen
            self._remember(conversation, chosen)
        return DispatchChoice(chosen, self.replicas[chosen].issue_ticket(num_tokens))

    def dispatch_to(self, num_tokens: int, replica: int) -> DispatchChoice:
        """Count a request at the replica that its client has chosen.

        Raises:
            ConfigError: there is no such replica.
        """
        if not 0 <= replica < len(self.replicas):
            hint = f"give 0 to {len(self.replicas) - 1}, or none"
            raise ConfigError("data_parallel_rank", replica, "is not a rank of this engine", hint)
        return DispatchChoice(replica, self.replicas[replica].issue_ticket(num_tokens))

    def _load_key(self, index: int) -> tuple[int, int]:
        """Sort by load, and replicas of equal load by the number of requests that they were sent."""
        replica = self.replicas[index]
        return replica.total_tokens, replica.last_dispatch_ticket

    def _remember(self, conversation: str, replica: int) -> None:
        self._last_replicas[conversation] = replica
        self._last_replicas.move_to_end(conversation)
        if len(self._last_replicas) > _MAX_CONVERSATIONS:
            self._last_replicas.popitem(last=False)
