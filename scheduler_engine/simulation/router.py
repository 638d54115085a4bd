"""Router: which replica serves a request. The port, and two routers that need no KV events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from scheduler_components.load import DispatchLedger
from scheduler_components.values import LoadSnapshot
from scheduler_engine.simulation.request import SimulatedRequest


class Router(Protocol):
    """Chooses the replica of each request. ``Simulation`` calls it; time is virtual and comes with each call.

    It has six methods because it learns all that a router in front of engines learns: what it knows of a replica comes
    through events and reports, with their lags. One thing is different. It gets the live ``SimulatedRequest``, which
    also has the recorded length of the output, and from which it could read the state of the request on its replica.
    A router that is to serve real requests reads only the prompt, ``hints`` and ``ticket``.

    Attributes:
        wants_events: False for a router that reads no KV events. The replicas then record none.
        wants_load: False for a router that reads no load reports. The replicas then send none.
    """

    @property
    def wants_events(self) -> bool: ...

    @property
    def wants_load(self) -> bool: ...

    def route(self, request: SimulatedRequest, now_s: float) -> int | None:
        """Return the index of the replica that serves a request, or None if none can now.

        A request without a replica is routed again when a replica comes up, reports, or ends a request.
        """
        ...

    def on_events(self, replica: int, payload: bytes, now_s: float) -> None:
        """Handle an encoded batch of KV events of a replica."""
        ...

    def on_load_report(self, replica: int, load: LoadSnapshot, now_s: float) -> None:
        """Handle a load report of a replica."""
        ...

    def on_finished(self, replica: int, request: SimulatedRequest, now_s: float) -> None:
        """Handle the end of a request."""
        ...

    def on_replica_up(self, replica: int, now_s: float) -> None:
        """Handle that a replica with an empty cache serves requests from now on."""
        ...

    def on_replica_down(self, replica: int, now_s: float) -> None:
        """Handle that a replica gets no further request: it has failed, or it is drained."""
        ...


@dataclass(slots=True, kw_only=True)
class RoundRobin:
    """Sends each request to the next replica."""

    wants_events: ClassVar[bool] = False
    wants_load: ClassVar[bool] = False

    _replicas: list[int] = field(default_factory=list, init=False, repr=False)
    _last: int = field(default=-1, init=False, repr=False)

    def route(self, request: SimulatedRequest, now_s: float) -> int | None:
        if not self._replicas:
            return None
        later = [replica for replica in self._replicas if replica > self._last]
        self._last = later[0] if later else self._replicas[0]
        return self._last

    def on_events(self, replica: int, payload: bytes, now_s: float) -> None:
        pass

    def on_load_report(self, replica: int, load: LoadSnapshot, now_s: float) -> None:
        pass

    def on_finished(self, replica: int, request: SimulatedRequest, now_s: float) -> None:
        pass

    def on_replica_up(self, replica: int, now_s: float) -> None:
        self._replicas = sorted({*self._replicas, replica})

    def on_replica_down(self, replica: int, now_s: float) -> None:
        self._replicas = [each for each in self._replicas if each != replica]


@dataclass(slots=True, kw_only=True)
class _ReplicaLoad:
    """The last reported load of a replica, and what was sent to it since."""

    ledger: DispatchLedger
    reported_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.reported_tokens + self.ledger.unreported_tokens


@dataclass(slots=True, kw_only=True)
class LeastLoaded:
    """Sends each request where the fewest tokens are held or wait: in the last report, or sent and not reported yet.

    Of equal replicas the one with the fewest dispatched requests is next, then the lowest index.
    """

    wants_events: ClassVar[bool] = False
    wants_load: ClassVar[bool] = True

    _loads: dict[int, _ReplicaLoad] = field(default_factory=dict, init=False, repr=False)
    _num_sent: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _num_ledgers: int = field(default=0, init=False, repr=False)

    def route(self, request: SimulatedRequest, now_s: float) -> int | None:
        if not self._loads:
            return None
        replica = min(self._loads, key=lambda each: (self._loads[each].num_tokens, self._num_sent[each], each))
        ledger = self._loads[replica].ledger
        request.ticket = (ledger.dispatcher, ledger.issue_ticket(request.num_input_tokens))
        self._num_sent[replica] += 1
        return replica

    def on_events(self, replica: int, payload: bytes, now_s: float) -> None:
        pass

    def on_load_report(self, replica: int, load: LoadSnapshot, now_s: float) -> None:
        known = self._loads.get(replica)
        if known is not None:
            known.reported_tokens = load.num_total_tokens
            known.ledger.on_load_report(load.dispatched_watermarks)

    def on_finished(self, replica: int, request: SimulatedRequest, now_s: float) -> None:
        pass

    def on_replica_up(self, replica: int, now_s: float) -> None:
        self._num_ledgers += 1
        self._loads[replica] = _ReplicaLoad(ledger=DispatchLedger(dispatcher=f"router-{self._num_ledgers}"))
        self._num_sent[replica] = 0

    def on_replica_down(self, replica: int, now_s: float) -> None:
        self._loads.pop(replica, None)
