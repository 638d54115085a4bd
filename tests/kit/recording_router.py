"""A router that records what it is called with, and leaves the decision to another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_components.values import LoadSnapshot, RequestState
from scheduler_engine.simulation import Router, SimulatedRequest


@dataclass(slots=True, kw_only=True)
class RecordingRouter:
    """Checks that requests have no replica when they are routed and that only replicas which serve are heard.

    It records every call with its time in nanoseconds, which never decreases.

    Attributes:
        inner: decides.
        up: replicas that serve.
        routed: replica, time and request of each decision.
        reports: replica, time and load of each report.
        event_times: replica and time of each batch of KV events.
        finished: replica, time and id of each ended request.
        changes: replica, time, and whether it came up.
    """

    inner: Router
    up: set[int] = field(default_factory=set)
    routed: list[tuple[int | None, int, SimulatedRequest]] = field(default_factory=list)
    reports: list[tuple[int, int, LoadSnapshot]] = field(default_factory=list)
    event_times: list[tuple[int, int]] = field(default_factory=list)
    finished: list[tuple[int, int, str]] = field(default_factory=list)
    changes: list[tuple[int, int, bool]] = field(default_factory=list)
    last_ns: int = 0

    wants_events: ClassVar[bool] = True
    wants_load: ClassVar[bool] = True

    def at(self, now_s: float) -> int:
        now_ns = round(now_s * 1e9)
        assert now_ns >= self.last_ns, "time goes back"
        self.last_ns = now_ns
        return now_ns

    def route(self, request: SimulatedRequest, now_s: float) -> int | None:
        assert request.state is RequestState.WAITING
        assert not request.pages
        assert request.ticket is None
        replica = self.inner.route(request, now_s)
        self.routed.append((replica, self.at(now_s), request))
        return replica

    def on_events(self, replica: int, payload: bytes, now_s: float) -> None:
        assert replica in self.up
        self.event_times.append((replica, self.at(now_s)))
        self.inner.on_events(replica, payload, now_s)

    def on_load_report(self, replica: int, load: LoadSnapshot, now_s: float) -> None:
        assert replica in self.up
        self.reports.append((replica, self.at(now_s), load))
        self.inner.on_load_report(replica, load, now_s)

    def on_finished(self, replica: int, request: SimulatedRequest, now_s: float) -> None:
        assert replica in self.up
        self.finished.append((replica, self.at(now_s), request.rid))
        assert request.finished_ns == self.last_ns
        self.inner.on_finished(replica, request, now_s)

    def on_replica_up(self, replica: int, now_s: float) -> None:
        assert replica not in self.up
        self.up.add(replica)
        self.changes.append((replica, self.at(now_s), True))
        self.inner.on_replica_up(replica, now_s)

    def on_replica_down(self, replica: int, now_s: float) -> None:
        self.up.remove(replica)
        self.changes.append((replica, self.at(now_s), False))
        self.inner.on_replica_down(replica, now_s)
