"""Simulation: replicas, a router and arrivals in virtual time.

**Order.** Everything happens at a time of the event heap. Of what happens at one time, outages and samples come first,
then what the router learns, then arrivals, then steps. A request that arrives during a step is received by the next
step, as by an engine.

**Horizon.** A replica influences others only through the router, and the router acts only on arrivals. So a replica may
run ahead to the next time at which an input can reach it: the next arrival, outage or sample. What it causes on the way
(events, reports, ends) has its own time and waits in the heap. Runs with and without ``fast_forward`` are therefore
equal, which ``tests/scheduler_engine/simulation/test_simulation.py`` checks. Replicas that share storage influence each
other through it, too, so they take their steps in the order of time. Fast-forwarded steps do not touch storage.

**Outages.** A replica that fails ends its running step, then loses its requests and its cache. The router learns it
after ``detection_s``; until then it may send requests, which are lost, too. Lost requests are routed again and continue
with the tokens that their clients have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

import attrs
import msgspec

from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_components._internal.virtual_clock import MAX_SPAN_S, NEVER_NS, EventHeap, nanoseconds
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.errors import ConfigError
from scheduler_components.ports import NullDecisionLog
from scheduler_components.values import TierStats
from scheduler_engine.simulation.replica import ReplicaConfig, ReplicaCounts, SimulatedReplica
from scheduler_engine.simulation.report import (
    ReplicaReport,
    SimulationReport,
    TenantReport,
    TimelinePoint,
    distribution_of,
    jain_index,
)
from scheduler_engine.simulation.request import SimulatedRequest
from scheduler_engine.simulation.router import Router
from scheduler_engine.simulation.tiers import check_total_pages, make_storage
from scheduler_engine.simulation.trace import TraceRequest
from scheduler_engine.simulation.virtual_page_mover import SimulatedStorage

_CONTROL, _TO_ROUTER, _ARRIVAL, _STEP = 0, 1, 1 << 40, (1 << 40) + 1
"""The order of what happens at one time. What several replicas report, and their steps, are
further ordered by their index. So a replica that has run ahead reports in its turn."""

_PROGRESS_EVERY = 64
"""Events between two reports of progress."""

_MAX_REPLICAS = 10_000

_MAX_POINTS = 8192
"""Distances of the timeline. At the bound every second point is dropped, and the distance doubles."""

_lag = number_validator("is not a lag", or_zero=True, at_most=MAX_SPAN_S)
_moment = number_validator(or_zero=True, at_most=MAX_SPAN_S)
_span = number_validator(at_most=MAX_SPAN_S)


@attrs.frozen(kw_only=True)
class Outage:
    """The failure of a replica.

    Attributes:
        replica: index.
        at_s: when it fails.
        down_s: how long it stays away; None for ever.
        detection_s: until the router knows. A replica that returns earlier is detected when it returns.
    """

    replica: int = attrs.field(validator=integer_validator("is not a replica", at_least=0))
    at_s: float = attrs.field(validator=_moment)
    down_s: float | None = attrs.field(default=None, validator=attrs.validators.optional(_span))
    detection_s: float = attrs.field(default=1.0, validator=_lag)


@attrs.frozen(kw_only=True)
class Scaling:
    """A change of the number of replicas.

    Attributes:
        at_s: when new replicas begin to serve, or the last ones get no further requests and end those that they have.
        num_replicas: replicas that serve from then on. New ones get new indices.
    """

    at_s: float = attrs.field(validator=_moment)
    num_replicas: int = attrs.field(validator=integer_validator(at_most=_MAX_REPLICAS))


@attrs.frozen(kw_only=True)
class SimulationConfig:
    """What is simulated.

    Attributes:
        replica: sizes and policies of each replica.
        num_replicas: replicas at the start.
        event_lag_s, load_lag_s: from a replica's KV events and load reports to the router.
        load_interval_s: shortest time between two load reports of a replica.
        sample_s: distance of the points of the timeline. It doubles whenever there are more than 8193 points.
        ttft_slo_s, tpot_slo_s: bounds of a good request.
        outages, scalings: what happens to replicas.
        fast_forward: False takes every step by itself; the report is the same.
        notes_decisions: keep the digest of each replica's decisions.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    replica: ReplicaConfig = attrs.field(factory=ReplicaConfig)
    num_replicas: int = attrs.field(default=4, validator=integer_validator(at_most=_MAX_REPLICAS))
    event_lag_s: float = attrs.field(default=0.0, validator=_lag)
    load_lag_s: float = attrs.field(default=0.0, validator=_lag)
    load_interval_s: float = attrs.field(default=0.1, validator=_span)
    sample_s: float = attrs.field(default=1.0, validator=_span)
    ttft_slo_s: float = attrs.field(default=2.0, validator=_span)
    tpot_slo_s: float = attrs.field(default=0.05, validator=_span)
    outages: tuple[Outage, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    fast_forward: bool = True
    notes_decisions: bool = False

    def __attrs_post_init__(self) -> None:
        if nanoseconds(self.sample_s) < 1:
            raise ConfigError("sample_s", self.sample_s, "is below a nanosecond", "give at least 1e-9, usually 1")
        starts_s, num_serving = [0.0] * self.num_replicas, self.num_replicas
        for scaling in sorted(self.scalings, key=_at_s):
            starts_s += [scaling.at_s] * (scaling.num_replicas - num_serving)
            num_serving = scaling.num_replicas
        replica = self.replica
        host_tokens = 0 if replica.tiers is None else replica.tiers.host_tokens
        check_total_pages(len(starts_s), replica.kv_tokens + host_tokens, replica.page_size)
        for outage in self.outages:
            if outage.replica >= len(starts_s):
                raise ConfigError("outage", outage.replica, f"is not one of {len(starts_s)} replicas", "count from 0")
            start_s = starts_s[outage.replica]
            if outage.at_s <= start_s and start_s:
                problem = f"fails at {outage.at_s:g} s, and the replica starts at {start_s:g} s"
                raise ConfigError("outage", outage.replica, problem, "let it fail later")
        _check_overlap(self.outages)

    def settings(self) -> dict[str, int | float | str | bool]:
        """Return the values by name, for a report."""
        own = attrs.asdict(self, recurse=False, filter=lambda field, _: field.name not in _NOT_PLAIN)
        replica = attrs.asdict(self.replica, recurse=False, filter=lambda field, _: field.name not in _NOT_PLAIN)
        return {
            **own,
            **replica,
            **{name: value for name, value in attrs.asdict(self.replica.cost).items() if name != "eager_ms"},
            **(self.replica.tiers.settings() if self.replica.tiers is not None else {}),
            "num_outages": len(self.outages),
            "num_scalings": len(self.scalings),
        }


def _check_overlap(outages: Iterable[Outage]) -> None:
    """Check that no replica fails while it is away.

    Raises:
        ConfigError: one does; the error has its index.
    """
    until_ns: dict[int, int] = {}
    for outage in sorted(outages, key=_at_s):
        at_ns = nanoseconds(outage.at_s)
        if at_ns <= until_ns.get(outage.replica, -1):
            problem = f"fails at {outage.at_s:g} s, and is away then"
            raise ConfigError("outage", outage.replica, problem, "let it fail after it has returned, or once")
        until_ns[outage.replica] = NEVER_NS if outage.down_s is None else at_ns + nanoseconds(outage.down_s)


def _at_s(change: Outage | Scaling) -> float:
    return change.at_s


_NOT_PLAIN = ("replica", "outages", "scalings", "cost", "model", "tiers", "fast_forward")


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far a simulation is.

    Attributes:
        now_s: virtual time.
        num_arrived, num_finished: requests so far.
    """

    now_s: float
    num_arrived: int
    num_finished: int


@dataclass(slots=True, kw_only=True)
class _Place:
    """A replica: the scheduler that runs there now, and its requests.

    Attributes:
        index: of the replica.
        scheduler: None while the replica is away.
        known: the scheduler that the router knows of; None after it was reported as down.
        counts: of all schedulers that have run here.
        in_flight: requests that were sent here and have not ended, by id.
        step_ns: time of the next step in the heap; None without one.
        is_drained: it gets no further requests.
        next_report_ns: earliest time of the next load report.
        num_finished: requests that ended here.
        running, waiting: requests at each point of the timeline.
        decisions: the log of all schedulers that have run here.
    """

    index: int
    scheduler: SimulatedReplica | None = None
    known: SimulatedReplica | None = None
    counts: list[ReplicaCounts] = field(default_factory=list)
    in_flight: dict[str, SimulatedRequest] = field(default_factory=dict)
    step_ns: int | None = None
    is_drained: bool = False
    next_report_ns: int = 0
    num_finished: int = 0
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    decisions: DecisionLog | NullDecisionLog = field(default_factory=NullDecisionLog)


@dataclass(slots=True, kw_only=True)
class _Totals:
    """What happened so far, over all replicas."""

    finished: list[SimulatedRequest] = field(default_factory=list)
    unrouted: list[SimulatedRequest] = field(default_factory=list)
    timeline: list[TimelinePoint] = field(default_factory=list)
    first_arrival_ns: int = 0
    num_arrived: int = 0
    num_refused: int = 0
    num_deadlines: int = 0
    num_migrations: int = 0
    has_all_arrived: bool = False

    @property
    def is_served(self) -> bool:
        """True if nothing is left to serve."""
        return self.has_all_arrived and self.num_arrived == len(self.finished) + self.num_refused


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Serves arrivals on simulated replicas. Make one, exhaust ``run``, then read ``report``.

    Attributes:
        config: what is simulated.
        router: chooses the replicas. It must be new.
        arrivals: requests in order of their arrival, read as they are needed.
        title: of the run, for readers of several.
    """

    config: SimulationConfig
    router: Router
    arrivals: Iterable[TraceRequest]
    title: str = "simulation"
    _heap: EventHeap = field(default_factory=EventHeap, init=False, repr=False)
    _input_times: list[int] = field(default_factory=list, init=False, repr=False)
    _places: list[_Place] = field(default_factory=list, init=False, repr=False)
    _totals: _Totals = field(default_factory=_Totals, init=False, repr=False)
    _storage: SimulatedStorage | None = field(init=False, repr=False)
    _sample_ns: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        replica = self.config.replica
        self._sample_ns = nanoseconds(self.config.sample_s)
        self._storage = make_storage(replica.tiers, replica.page_size)

    def run(self) -> Iterator[Progress]:
        """Serve all arrivals, and yield the progress now and then, and at the end.

        Raises:
            ConfigError: an arrival is wrong, such as a line of its trace; or the router names no replica that serves.
        """
        config, heap = self.config, self._heap
        for _ in range(config.num_replicas):
            self._add_place()
        for outage in config.outages:
            self._push_input(nanoseconds(outage.at_s), partial(self._fail, outage))
        for scaling in config.scalings:
            self._push_input(nanoseconds(scaling.at_s), partial(self._scale, scaling.num_replicas))
        self._push_arrival(iter(self.arrivals))
        self._push_input(0, self._sample)
        num_events = 0
        while len(heap):
            heap.pop()()
            num_events += 1
            if num_events % _PROGRESS_EVERY == 0:
                yield self._progress()
        yield self._progress()

    def _progress(self) -> Progress:
        totals = self._totals
        return Progress(self._heap.now_ns / 1e9, totals.num_arrived, len(totals.finished))

    # --- inputs: what can reach a replica ---

    def _push_input(self, time_ns: int, action: Callable[[], None], *, order: int = _CONTROL) -> None:
        """Add an event that may reach a replica. No replica runs ahead of it."""
        heappush(self._input_times, time_ns)
        self._heap.push(time_ns, partial(self._handle_input, action), order=order)

    def _handle_input(self, action: Callable[[], None]) -> None:
        heappop(self._input_times)  # its own time, because events come in order
        action()

    def _push_arrival(self, arrivals: Iterator[TraceRequest]) -> None:
        recorded = next(arrivals, None)
        if recorded is None:
            self._totals.has_all_arrived = True
            return
        time_ns = nanoseconds(recorded.arrival_s)
        self._push_input(time_ns, partial(self._arrive, recorded, arrivals), order=_ARRIVAL)

    def _arrive(self, recorded: TraceRequest, arrivals: Iterator[TraceRequest]) -> None:
        request, totals = SimulatedRequest(recorded), self._totals
        request.arrived_ns = self._heap.now_ns
        if not totals.num_arrived:
            totals.first_arrival_ns = request.arrived_ns
        totals.num_arrived += 1
        totals.num_deadlines += recorded.deadline_s is not None
        if self.config.replica.can_hold(request):
            self._route(request)
        else:
            totals.num_refused += 1
        self._push_arrival(arrivals)

    def _sample(self) -> None:
        """Add a point to the timeline, until all requests are served or nothing else can happen."""
        num_running = num_waiting = num_used = num_tokens = num_serving = 0
        for place in self._places:
            scheduler = place.scheduler
            place.running.append(0 if scheduler is None else len(scheduler.queues.running))
            place.waiting.append(
                len(place.in_flight) if scheduler is None else len(scheduler.queues.waiting) + len(scheduler.inbox)
            )
            num_running += place.running[-1]
            num_waiting += place.waiting[-1]
            if scheduler is None:
                continue
            num_serving += not place.is_drained
            num_used += scheduler.cache.used_tokens
            num_tokens += scheduler.cache.capacity_tokens
        num_waiting += len(self._totals.unrouted)
        now_ns, usage = self._heap.now_ns, num_used / num_tokens if num_tokens else 0.0
        self._totals.timeline.append(TimelinePoint(now_ns / 1e9, num_running, num_waiting, usage, num_serving))
        if len(self._totals.timeline) > _MAX_POINTS:
            self._drop_points()
        if len(self._heap) and not self._totals.is_served:
            self._push_input(now_ns + self._sample_ns, self._sample)

    def _drop_points(self) -> None:
        """Drop every second point, and double the distance of those that follow. The last point stays."""
        self._sample_ns *= 2
        del self._totals.timeline[1::2]
        for place in self._places:
            del place.running[1::2], place.waiting[1::2]

    # --- replicas that come and go ---

    def _add_place(self) -> None:
        num_points = len(self._totals.timeline)
        place = _Place(
            index=len(self._places),
            running=[0] * num_points,
            waiting=[0] * num_points,
            decisions=DecisionLog() if self.config.notes_decisions else NullDecisionLog(),
        )
        self._places.append(place)
        self._start(place)

    def _start(self, place: _Place) -> None:
        """Start a scheduler with an empty cache."""
        config = self.config
        deliver = partial(self._publish, place) if self.router.wants_events else None
        place.scheduler = place.known = SimulatedReplica.compose(
            config.replica,
            start_ns=self._heap.now_ns,
            deliver_events=deliver,
            decisions=place.decisions,
            storage=self._storage,
        )
        place.counts.append(place.scheduler.counts)
        place.next_report_ns = 0
        self.router.on_replica_up(place.index, self._heap.now_ns / 1e9)
        self._route_again()

    def _fail(self, outage: Outage) -> None:
        place = self._places[outage.replica]
        if place.scheduler is None:
            return
        failed, now_ns = place.scheduler, self._heap.now_ns
        place.scheduler, place.step_ns = None, None
        self._push_input(now_ns + nanoseconds(outage.detection_s), partial(self._detect, place, failed))
        if outage.down_s is not None:
            self._push_input(now_ns + nanoseconds(outage.down_s), partial(self._restart, place, failed))

    def _detect(self, place: _Place, failed: SimulatedReplica) -> None:
        """Report a failed replica to the router, and route its requests again."""
        if place.known is not failed:
            return
        place.known = None
        if not place.is_drained:
            self.router.on_replica_down(place.index, self._heap.now_ns / 1e9)
        lost, place.in_flight = list(place.in_flight.values()), {}
        for request in lost:
            if request.pages:
                request.has_lost_replica = True
            request.reset()
            self._totals.num_migrations += 1
            self._route(request)

    def _restart(self, place: _Place, failed: SimulatedReplica) -> None:
        self._detect(place, failed)
        if not place.is_drained:
            failed.counts.busy_ns -= max(0, failed.clock.now_ns - self._heap.now_ns)  # the restart ends its last step
            self._start(place)

    def _scale(self, num_replicas: int) -> None:
        serving = [place for place in self._places if not place.is_drained]
        for place in serving[num_replicas:]:
            place.is_drained = True
            if place.known is not None:
                self.router.on_replica_down(place.index, self._heap.now_ns / 1e9)
        for _ in range(num_replicas - len(serving)):
            self._add_place()

    # --- requests ---

    def _route(self, request: SimulatedRequest) -> None:
        index = self.router.route(request, self._heap.now_ns / 1e9)
        if index is None:
            self._totals.unrouted.append(request)
            return
        place = self._places[index] if 0 <= index < len(self._places) else None
        if place is None or place.known is None or place.is_drained:
            hint = "return the index of a replica that is up, or None"
            raise ConfigError("router", index, "is no replica that serves", hint)
        place.in_flight[request.rid] = request
        if place.scheduler is not None:
            place.scheduler.submit(request)
            self._push_step(place, place.scheduler)

    def _route_again(self) -> None:
        unrouted, self._totals.unrouted = self._totals.unrouted, []
        for request in unrouted:
            self._route(request)

    def _push_step(self, place: _Place, scheduler: SimulatedReplica) -> None:
        """Take a step when the running one has ended, and when there is something to do. A later plan lapses."""
        time_ns = max(scheduler.ready_ns, self._heap.now_ns)
        assert time_ns != NEVER_NS, f"replica {place.index} waits for nothing"
        if time_ns > NEVER_NS:
            hint = "give a faster device, lower costs or more bandwidth"
            raise ConfigError("speed", self.config.replica.speed, "lets a step end after centuries", hint)
        if place.step_ns is None or time_ns < place.step_ns:
            place.step_ns = time_ns
            self._heap.push(time_ns, partial(self._step, place, scheduler), order=_STEP + place.index)

    def _step(self, place: _Place, scheduler: SimulatedReplica) -> None:
        """Take the steps up to the next input."""
        if place.scheduler is not scheduler or place.step_ns != self._heap.now_ns:
            return  # it has failed, or stepped earlier
        place.step_ns = None
        clock, router = scheduler.clock, self.router
        clock.now_ns = max(clock.now_ns, self._heap.now_ns)
        until_ns = self._input_times[0] if self._input_times else NEVER_NS
        if self._totals.unrouted:
            until_ns = self._heap.now_ns
        while True:
            scheduler.step()
            self._end_requests(place, scheduler)
            self._report_load(place, scheduler)
            if self.config.fast_forward:
                limit_ns = min(until_ns, place.next_report_ns) if router.wants_load else until_ns
                if scheduler.fast_forward(limit_ns):
                    self._report_load(place, scheduler)
            if not scheduler.has_work:
                return
            if scheduler.ready_ns >= until_ns or self._storage is not None:
                self._push_step(place, scheduler)
                return
            clock.now_ns = scheduler.ready_ns

    def _end_requests(self, place: _Place, scheduler: SimulatedReplica) -> None:
        for request in scheduler.pop_finished():
            del place.in_flight[request.rid]
            place.num_finished += 1
            self._totals.finished.append(request)
            self._notify_router(place, scheduler, 0, partial(self.router.on_finished, place.index, request))

    # --- what the router learns ---

    def _publish(self, place: _Place, payload: bytes) -> None:
        assert place.scheduler is not None, "only a running scheduler publishes"
        lag_ns = nanoseconds(self.config.event_lag_s)
        self._notify_router(place, place.scheduler, lag_ns, partial(self.router.on_events, place.index, payload))

    def _report_load(self, place: _Place, scheduler: SimulatedReplica) -> None:
        """Report the load if a report is due, or if the replica has become idle."""
        now_ns = scheduler.clock.now_ns
        if not self.router.wants_load or (now_ns < place.next_report_ns and scheduler.is_serving):
            return
        place.next_report_ns = now_ns + nanoseconds(self.config.load_interval_s)
        report = partial(self.router.on_load_report, place.index, scheduler.get_loads())
        self._notify_router(place, scheduler, nanoseconds(self.config.load_lag_s), report)

    def _notify_router(
        self, place: _Place, scheduler: SimulatedReplica, lag_ns: int, call: Callable[[float], None]
    ) -> None:
        """Call the router ``lag_ns`` after the end of the step."""
        action = partial(self._deliver, place, scheduler, call)
        self._heap.push(scheduler.clock.now_ns + lag_ns, action, order=_TO_ROUTER + place.index)

    def _deliver(self, place: _Place, scheduler: SimulatedReplica, call: Callable[[float], None]) -> None:
        if place.known is not scheduler or place.is_drained:
            return  # the router knows that this replica is gone
        call(self._heap.now_ns / 1e9)
        if self._totals.unrouted:
            self._route_again()

    # --- the result ---

    def report(self) -> SimulationReport:
        """Return what was measured so far; after ``run`` it is complete."""
        config, totals = self.config, self._totals
        finished = sorted(totals.finished, key=lambda request: request.recorded.index)
        first_ns = totals.first_arrival_ns
        last_ns = max((request.finished_ns for request in finished), default=first_ns)
        duration_ns = last_ns - first_ns
        duration_s = duration_ns / 1e9
        per_s = 1 / duration_s if duration_s else 0.0
        good = [request for request in finished if self._is_good(request)]
        prompt_tokens = sum(request.num_prompt_tokens for request in finished)
        cached_tokens = sum(request.num_cached_prompt_tokens for request in finished)
        generated_tokens = sum(request.num_output_tokens for request in finished)
        counts = [each for place in self._places for each in place.counts]
        span_ns = max([last_ns, *(each.busy_until_ns for each in counts)]) - first_ns
        replicas = tuple(_report_place(place, span_ns) for place in self._places)
        num_recomputed = sum(each.recomputed_tokens for each in counts)
        num_migrated = sum(each.migrated_tokens for each in counts)
        tenants = _report_tenants(finished)
        num_in_time = sum(_is_in_time(request) for request in finished)
        serving = [replicas[place.index] for place in self._places if not place.is_drained]
        return SimulationReport(
            title=self.title,
            settings={
                "router": type(self.router).__name__,
                **config.settings(),
                **({"sample_s": self._sample_ns / 1e9} if self._sample_ns != nanoseconds(config.sample_s) else {}),
            },
            num_requests=totals.num_arrived,
            num_finished=len(finished),
            num_refused=totals.num_refused,
            num_unfinished=totals.num_arrived - len(finished) - totals.num_refused,
            num_retractions=sum(each.num_retractions for each in counts),
            num_migrations=totals.num_migrations,
            duration_s=duration_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            hit_rate=self._hit_rates(finished),
            generated_tokens=generated_tokens,
            recomputed_tokens=num_recomputed,
            recomputed_by_cause={"preemption": num_recomputed - num_migrated, "migration": num_migrated},
            output_tokens_per_s=generated_tokens * per_s,
            requests_per_s=len(finished) * per_s,
            queue_s=distribution_of(request.admitted_ns - request.arrived_ns for request in finished),
            ttft_s=distribution_of(request.first_token_ns - request.arrived_ns for request in finished),
            tpot_s=distribution_of(_tpot_ns(request) for request in finished if request.num_output_tokens > 1),
            e2e_s=distribution_of(request.finished_ns - request.arrived_ns for request in finished),
            goodput_share=len(good) / totals.num_arrived if totals.num_arrived else 0.0,
            goodput_per_s=len(good) * per_s,
            replica_fairness=jain_index([each.prefill_tokens + each.decode_tokens for each in serving]),
            tenant_fairness=jain_index([each.mean_e2e_s for each in tenants]),
            deadline_share=num_in_time / totals.num_deadlines if totals.num_deadlines else 1.0,
            replicas=replicas,
            timeline=tuple(totals.timeline),
            tenants=tenants if any(each.name for each in tenants) else (),
        )

    def _hit_rates(self, finished: Sequence[SimulatedRequest]) -> dict[str, float]:
        """Return the cached share of the prompts, by tier."""
        prompt_tokens = sum(request.num_prompt_tokens for request in finished) or 1
        num_host = sum(request.cached_prompt.host for request in finished)
        num_storage = sum(request.cached_prompt.storage for request in finished)
        num_device = sum(request.num_cached_prompt_tokens for request in finished) - num_host - num_storage
        rates = {"device": num_device / prompt_tokens}
        if self.config.replica.tiers is not None:
            rates["host"] = num_host / prompt_tokens
        if self._storage is not None:
            rates["storage"] = num_storage / prompt_tokens
        return rates

    def _is_good(self, request: SimulatedRequest) -> bool:
        config = self.config
        is_early = request.first_token_ns - request.arrived_ns <= nanoseconds(config.ttft_slo_s)
        return is_early and _tpot_ns(request) <= nanoseconds(config.tpot_slo_s)


def _tpot_ns(request: SimulatedRequest) -> int:
    """Return the mean time between two tokens; 0 for a single token."""
    num_gaps = request.num_output_tokens - 1
    return (request.finished_ns - request.first_token_ns) // num_gaps if num_gaps else 0


def _is_in_time(request: SimulatedRequest) -> bool:
    """Return True if the first token came before the deadline of a request that has one."""
    deadline_s = request.recorded.deadline_s
    return deadline_s is not None and request.first_token_ns - request.arrived_ns <= nanoseconds(deadline_s)


def _report_tenants(finished: Iterable[SimulatedRequest]) -> tuple[TenantReport, ...]:
    by_tenant: dict[str, list[SimulatedRequest]] = {}
    for request in finished:
        by_tenant.setdefault(request.hints.tenant, []).append(request)
    return tuple(_report_tenant(name, requests) for name, requests in sorted(by_tenant.items()))


def _report_tenant(name: str, requests: Sequence[SimulatedRequest]) -> TenantReport:
    ttft_s = distribution_of(request.first_token_ns - request.arrived_ns for request in requests)
    return TenantReport(
        name=name,
        num_requests=len(requests),
        prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        generated_tokens=sum(request.num_output_tokens for request in requests),
        mean_queue_s=sum(request.admitted_ns - request.arrived_ns for request in requests) / len(requests) / 1e9,
        mean_ttft_s=ttft_s.mean,
        p99_ttft_s=ttft_s.p99,
        mean_e2e_s=sum(request.finished_ns - request.arrived_ns for request in requests) / len(requests) / 1e9,
    )


def _sum_stats(stats: Iterable[TierStats | None]) -> TierStats | None:
    """Return the sum of counters; None if there are none."""
    total: TierStats | None = None
    for each in stats:
        if each is not None and total is not None:
            sums = {name: getattr(total, name) + getattr(each, name) for name in each.__struct_fields__}
            total = TierStats(**sums)
        elif each is not None:
            total = each
    return total


def _report_place(place: _Place, span_ns: int) -> ReplicaReport:
    counts = place.counts
    return ReplicaReport(
        num_requests=place.num_finished,
        num_steps=sum(each.num_steps for each in counts),
        busy_share=sum(each.busy_ns for each in counts) / span_ns if span_ns else 0.0,
        prefill_tokens=sum(each.prefill_tokens for each in counts),
        decode_tokens=sum(each.decode_tokens for each in counts),
        peak_running=max((each.peak_running for each in counts), default=0),
        num_retractions=sum(each.num_retractions for each in counts),
        decision_tip=place.decisions.tip,
        running=tuple(place.running),
        waiting=tuple(place.waiting),
        tiers=_sum_stats(each.tiers for each in counts),
    )
