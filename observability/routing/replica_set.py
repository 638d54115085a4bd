"""ReplicaSet: the replicas of a router, and which of them may get a request now."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from observability.routing.cost_model import ReplicaId
from scheduler_components._internal.validators import check_number

__all__ = ["ReplicaSet", "ReplicaState"]


class ReplicaState(Enum):
    """Whether a replica gets requests.

    Attributes:
        UP: it does.
        DRAINING: it ends the requests that it has, and gets no further ones.
        DOWN: it was silent for too long, or refused a connection. Its next sign of life ends this state.
    """

    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(slots=True)
class _Member:
    heard_s: float
    is_draining: bool = False
    has_failed: bool = False


@dataclass(slots=True, kw_only=True)
class ReplicaSet:
    """Replicas that come and go.

    Attributes:
        silence_s: a replica without a sign of life for so long is down. None trusts ``mark_down`` and ``remove`` alone.

    Raises:
        ConfigError: the time is invalid.
    """

    silence_s: float | None = None
    _members: dict[ReplicaId, _Member] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.silence_s is not None:
            check_number("silence_s", self.silence_s)

    def __contains__(self, replica: ReplicaId) -> bool:
        return replica in self._members

    def __len__(self) -> int:
        return len(self._members)

    def add(self, replica: ReplicaId, now_s: float) -> None:
        """Add a replica that is up, or one that has returned."""
        self._members[replica] = _Member(heard_s=now_s)

    def remove(self, replica: ReplicaId) -> None:
        """Remove a replica, if it is there."""
        self._members.pop(replica, None)

    def drain(self, replica: ReplicaId) -> None:
        """Send no further requests to a replica, if it is there."""
        if replica in self._members:
            self._members[replica].is_draining = True

    def mark_down(self, replica: ReplicaId) -> None:
        """Note that a replica does not answer. Its next sign of life ends this."""
        if replica in self._members:
            self._members[replica].has_failed = True

    def on_heartbeat(self, replica: ReplicaId, now_s: float) -> None:
        """Note a sign of life: a report, events, or an answer. Of an unknown replica it is ignored."""
        member = self._members.get(replica)
        if member is not None:
            member.heard_s = max(member.heard_s, now_s)
            member.has_failed = False

    def state_of(self, replica: ReplicaId, now_s: float) -> ReplicaState | None:
        """Return the state of a replica; None for an unknown one."""
        member = self._members.get(replica)
        if member is None:
            return None
        if member.has_failed or member.heard_s < self._oldest_s(now_s):
            return ReplicaState.DOWN
        return ReplicaState.DRAINING if member.is_draining else ReplicaState.UP

    def up(self, now_s: float) -> list[ReplicaId]:
        """Return the replicas that may get a request, in the order in which they were added."""
        oldest_s = self._oldest_s(now_s)
        return [
            replica
            for replica, member in self._members.items()
            if not (member.is_draining or member.has_failed) and member.heard_s >= oldest_s
        ]

    def _oldest_s(self, now_s: float) -> float:
        """Return when a replica that is not down gave its last sign of life at the earliest."""
        return -math.inf if self.silence_s is None else now_s - self.silence_s
