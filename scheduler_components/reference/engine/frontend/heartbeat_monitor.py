"""Which ranks are silent: what a process that was stopped, or that hangs, is from outside.

Every rank says ``RankHeartbeat`` from its own loop. Silence is counted in ticks of the front's loop and not by a clock:
while the front itself is stopped nothing is counted, and what the ranks said meanwhile is heard before it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_components.reference.engine.frontend.errors import RankSilentError
from scheduler_components.reference.engine.messages import HEARTBEAT_INTERVAL_S, RankHeartbeat, RankStalled

__all__ = ["HEARTBEAT_TIMEOUT_S", "HeartbeatMonitor", "RankSilentError"]

HEARTBEAT_TIMEOUT_S = 10.0
"""Twenty times what a rank is expected to be silent for: two busy cores make eight ranks late by a second or two."""


@dataclass(slots=True, kw_only=True)
class HeartbeatMonitor:
    """When the front heard last from each rank.

    Attributes:
        timeout_s: silence from which on a rank is not counted on.
        num_lockstep_replicas: replicas that take every step together, so that one silent rank holds all of them up; 0
            where each goes by itself.
    """

    timeout_s: float = HEARTBEAT_TIMEOUT_S
    num_lockstep_replicas: int = 0
    _ticks: dict[RankHeartbeat, int] = field(default_factory=dict, init=False)  # since each rank's last word
    _told: set[int] = field(default_factory=set, init=False)  # replicas whose silence ``tick`` has returned
    _places: dict[RankHeartbeat, str] = field(
        default_factory=dict, init=False
    )  # where ranks are stuck, by their watchdogs

    def on_heartbeat(self, alive: RankHeartbeat) -> None:
        """A rank spoke."""
        self._ticks[alive] = 0
        self._places.pop(alive, None)

    def on_stall(self, report: RankStalled) -> None:
        """A rank's watchdog spoke for it. The rank is as silent as before; it is known where it is stuck."""
        self._places[report.alive] = report.place

    def tick(self) -> Mapping[int, RankSilentError]:
        """``HEARTBEAT_INTERVAL_S`` went by; returns the replicas that have become silent by it, and why."""
        for rank in self._ticks:
            self._ticks[rank] += 1
        silent = self.silent_replicas()
        new = {replica: error for replica, error in silent.items() if replica not in self._told}
        self._told = set(silent)
        return new

    def silent_replicas(self) -> dict[int, RankSilentError]:
        """Replicas that a silent rank holds up, and which rank, for how long."""
        errors: dict[int, RankSilentError] = {}
        for rank, ticks in sorted(self._ticks.items(), key=lambda each: each[1]):  # of several, the longest stays
            if (age_s := ticks * HEARTBEAT_INTERVAL_S) > self.timeout_s:
                place = self._places.get(rank)
                stuck = f"; it is stuck in {place}" if place else ""
                longest = RankSilentError(f"rank {rank.rank} has said nothing for {age_s:g} s{stuck}")
                errors |= dict.fromkeys(range(self.num_lockstep_replicas), longest) | {rank.replica: longest}
        return errors
