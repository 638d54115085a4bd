"""Which data-parallel replica gets the next request: pure, no sockets, no clock.

A replica's load is what it last reported (running and waiting tokens) plus what was sent to it since. A report says how
many submissions its leader had taken in, so that nothing is counted twice and nothing in flight is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["LoadDispatcher", "ReplicaLoad"]

_KEPT_CONVERSATIONS = 65_536


@dataclass(slots=True, kw_only=True)
class ReplicaLoad:
    """What the dispatcher knows of one replica."""

    snapshot: LoadSnapshot = field(default_factory=LoadSnapshot)
    submissions: int = 0
    unreported_tokens: int = 0
    _unreported: deque[int] = field(default_factory=deque)

    @property
    def is_covered(self) -> bool:
        """The last report was made after every submission had come in."""
        return not self._unreported

    @property
    def total_tokens(self) -> int:
        return self.snapshot.num_total_tokens + self.unreported_tokens

    def submitted(self, num_tokens: int) -> None:
        self.submissions += 1
        self.unreported_tokens += num_tokens
        self._unreported.append(num_tokens)

    def reported(self, snapshot: LoadSnapshot, submissions_seen: int) -> None:
        """Take in a report; one that is older than the last is dropped."""
        if snapshot.sequence <= self.snapshot.sequence:
            return
        self.snapshot = snapshot
        while len(self._unreported) > self.submissions - submissions_seen:
            self.unreported_tokens -= self._unreported.popleft()


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

    def choose(self, num_tokens: int, conversation: str | None = None) -> int:
        """Pick a replica for a request of ``num_tokens`` input tokens and count it there."""
        chosen = min(range(len(self.replicas)), key=self._order)
        if conversation is not None and self.affinity_tokens:
            home = self._homes.get(conversation, chosen)
            extra_tokens = self.replicas[home].total_tokens - self.replicas[chosen].total_tokens
            chosen = home if extra_tokens <= self.affinity_tokens else chosen
            self._remember(conversation, chosen)
        self.replicas[chosen].submitted(num_tokens)
        return chosen

    def _order(self, index: int) -> tuple[int, int]:
        """Load first; among equals, such as idle replicas, the one that was given the fewest requests."""
        replica = self.replicas[index]
        return replica.total_tokens, replica.submissions

    def _remember(self, conversation: str, replica: int) -> None:
        self._homes[conversation] = replica
        self._homes.move_to_end(conversation)
        if len(self._homes) > _KEPT_CONVERSATIONS:
            self._homes.popitem(last=False)
