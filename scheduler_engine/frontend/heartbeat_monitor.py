"""HeartbeatMonitor: detect ranks that are stopped or hang, by the heartbeats that they no longer send.

Every rank sends ``RankHeartbeat`` from its step loop. The monitor measures silence in ticks of the frontend's loop, not
by a clock. A suspended frontend counts nothing, and it reads the heartbeats that have arrived before its next tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_engine.engine.messages import HEARTBEAT_INTERVAL_S, RankHeartbeat, RankStalled
from scheduler_engine.frontend.errors import RankSilentError

HEARTBEAT_TIMEOUT_S = 10.0
"""Twenty heartbeat intervals: on two busy cores, eight ranks can be late by one or two seconds."""


@dataclass(slots=True, kw_only=True)
class HeartbeatMonitor:
    """The time since the last heartbeat of each rank, in ticks.

    Attributes:
        timeout_s: a rank that is silent for longer counts as dead.
        num_lockstep_replicas: number of replicas that take every step together, so that one silent rank blocks all of
            them; 0 if each replica steps by itself.
    """

    timeout_s: float = HEARTBEAT_TIMEOUT_S
    num_lockstep_replicas: int = 0
    _ticks: dict[RankHeartbeat, int] = field(default_factory=dict, init=False)  # since the last heartbeat of each rank
    _reported: set[int] = field(default_factory=set, init=False)  # silent replicas that ``tick`` has returned
    _stalled_in: dict[RankHeartbeat, str] = field(default_factory=dict, init=False)  # as watchdogs report it

    def on_heartbeat(self, alive: RankHeartbeat) -> None:
        """Record a heartbeat, which also ends a reported stall of that rank."""
        self._ticks[alive] = 0
        self._stalled_in.pop(alive, None)

    def on_stall(self, report: RankStalled) -> None:
        """Record where a rank is stuck. The watchdog thread sent the report, so it does not count as a heartbeat."""
        self._stalled_in[report.alive] = report.place

    def tick(self) -> Mapping[int, RankSilentError]:
        """Count one ``HEARTBEAT_INTERVAL_S``. Return the replicas that have become silent by it, with the error."""
        for rank in self._ticks:
            self._ticks[rank] += 1
        silent = self.silent_replicas()
        new = {replica: error for replica, error in silent.items() if replica not in self._reported}
        self._reported = set(silent)
        return new

    def silent_replicas(self) -> dict[int, RankSilentError]:
        """Return the replicas that a silent rank blocks, each with an error that names the rank."""
        errors: dict[int, RankSilentError] = {}
        for rank, ticks in sorted(self._ticks.items(), key=lambda item: item[1]):  # the longest silence wins
            if (age_s := ticks * HEARTBEAT_INTERVAL_S) > self.timeout_s:
                place = self._stalled_in.get(rank)
                stuck = f"; it is stuck in {place}" if place else ""
                error = RankSilentError(f"rank {rank.rank} has sent no heartbeat for {age_s:g} s{stuck}")
                errors |= dict.fromkeys(range(self.num_lockstep_replicas), error) | {rank.replica: error}
        return errors
