"""Run one case in virtual time, and return what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import attrs

from benchmarks.studies.policies.cases import Case, Setting
from benchmarks.studies.policies.workloads import continued
from observability.routing import KvRouter, RoutingCostModel, SpeculativeEntries
from scheduler_components.hicache import HiCachePolicy
from scheduler_components.ports import BatchedRequest
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.values import LoadSnapshot
from scheduler_engine.cli.simulate_trace_command import ROUTERS
from scheduler_engine.engine.dp_attn_sim import DpSimConfig, simulate_dp_attn
from scheduler_engine.simulation import (
    ReplicaConfig,
    Router,
    SimulatedRequest,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TierConfig,
    TraceRequest,
)
from scheduler_engine.simulation.report import percentile_of

FIGURES = {
    "finished": "requests that were served",
    "refused": "requests larger than the pool",
    "hit_rate": "prompt tokens that were cached at the first admission / all",
    "hit_rate_host": "the same, of those on the host tier",
    "hit_rate_storage": "the same, of those in storage",
    "ttft_p50_s": "from arrival to the first token, median",
    "ttft_p99_s": "99th percentile",
    "ttft_mean_s": "mean",
    "tpot_p50_s": "mean time between two tokens of a request, median",
    "tpot_p99_s": "99th percentile",
    "e2e_mean_s": "from arrival to the last token, mean",
    "queue_max_s": "longest wait for the first admission",
    "new_queue_p50_s": "wait for the first admission of requests that continue no earlier prompt, median",
    "new_queue_p99_s": "99th percentile",
    "new_queue_max_s": "longest",
    "continued_queue_p50_s": "wait of requests that continue an earlier prompt, median",
    "continued_queue_p99_s": "99th percentile",
    "continued_queue_max_s": "longest",
    "goodput_share": "requests within both bounds of the SLO / all",
    "prefill_tokens": "prefilled positions",
    "recomputed_tokens": "positions that were computed again",
    "recompute_tax": "recomputed / all computed positions",
    "preemptions": "requests that lost their pages",
    "busy_share": "time that replicas computed / all time, mean of the replicas",
    "replica_fairness": "Jain's index of the computed positions of replicas",
    "peak_waiting": "most waiting requests at a full second",
    "idle_pool_share": "share of the pools that no request holds, mean of the full seconds in which requests wait",
    "itl_mean_s": "time between two tokens of a request, mean",
    "itl_p50_s": "median",
    "itl_p99_s": "99th percentile",
    "steps": "steps of replicas that step together",
    "eager_share": "of them, those without a captured graph",
    "padded_tokens": "padding of all batches to the longest of their step",
    "delayed_steps": "steps in which prefills waited for others",
    "duration_s": "from the first arrival to the last token",
    "output_tokens_per_s": "generated tokens / duration",
}
"""Figures of a run by name."""

_DIGITS = 6
_NO_TIME_S = 1e-9  # entries expire before the next request arrives


def run_case(case: Case, requests: Sequence[TraceRequest], *, most_requests: int) -> dict[str, float]:
    """Run a case and return its figures, rounded to six digits.

    Args:
        case: what to run.
        requests: its workload; nothing for the device ``dp-attention``, which makes its own.
        most_requests: that such a device makes.
    """
    settings = case.settings
    if settings.get("device") == "dp-attention":
        figures = _delay_prefills(settings, most_requests)
    else:
        figures = _serve(settings, requests)
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in figures.items()}


class NoReservation(NewTokenRatioTracker):
    """The share 0, even after a preemption: vLLM admits a request whenever its input fits."""

    def on_retract(self, still_running: Iterable[BatchedRequest]) -> None:
        """Learn nothing."""


class UnreservedConfig(ReplicaConfig):
    """A replica that reserves no pages for future output."""

    def make_ratio(self) -> NewTokenRatioTracker:
        return NoReservation(initial=0.0, minimum=0.0)


RESERVATIONS: Mapping[str, tuple[type[ReplicaConfig], Mapping[str, float]]] = {
    "none": (UnreservedConfig, {}),
    "adaptive from 0": (ReplicaConfig, {"new_token_ratio": 0.0, "min_new_token_ratio": 0.0}),
    "adaptive from 0.7": (ReplicaConfig, {"new_token_ratio": 0.7, "min_new_token_ratio": 0.1}),
    "full": (ReplicaConfig, {"new_token_ratio": 1.0, "min_new_token_ratio": 1.0}),
}
"""Pages that an admission reserves for future output: none (vLLM), a share that adapts (SGLang), or all."""


def make_router(settings: Mapping[str, Setting], config: SimulationConfig) -> Router:
    """Return a new router of a run.

    Raises:
        LookupError: there is none of this name.
    """
    name, page_size = str(settings["router"]), config.replica.page_size
    if name in ROUTERS:
        return ROUTERS[name](config)
    if name == "kv without load":
        return KvRouter(page_size=page_size, cost_model=RoutingCostModel(queue_weight=0.0, decode_weight=0.0))
    if name == "kv without speculation":
        return KvRouter(page_size=page_size, speculative=SpeculativeEntries(ttl_s=_NO_TIME_S))
    raise LookupError(f"there is no router {name!r}")


@dataclass(slots=True, kw_only=True)
class RecordingRouter:
    """A router that passes on all calls and keeps the requests that ended, with their times."""

    inner: Router
    finished: list[SimulatedRequest] = field(default_factory=list)

    @property
    def wants_events(self) -> bool:
        return self.inner.wants_events

    @property
    def wants_load(self) -> bool:
        return self.inner.wants_load

    def route(self, request: SimulatedRequest, now_s: float) -> int | None:
        return self.inner.route(request, now_s)

    def on_events(self, replica: int, payload: bytes, now_s: float) -> None:
        self.inner.on_events(replica, payload, now_s)

    def on_load_report(self, replica: int, load: LoadSnapshot, now_s: float) -> None:
        self.inner.on_load_report(replica, load, now_s)

    def on_finished(self, replica: int, request: SimulatedRequest, now_s: float) -> None:
        self.finished.append(request)
        self.inner.on_finished(replica, request, now_s)

    def on_replica_up(self, replica: int, now_s: float) -> None:
        self.inner.on_replica_up(replica, now_s)

    def on_replica_down(self, replica: int, now_s: float) -> None:
        self.inner.on_replica_down(replica, now_s)


def _serve(settings: Mapping[str, Setting], requests: Sequence[TraceRequest]) -> dict[str, float]:
    policy = HiCachePolicy(**_fields(HiCachePolicy, settings))
    tiers = TierConfig(**_fields(TierConfig, settings), policy=policy) if settings.get("host_tokens") else None
    make, ratios = RESERVATIONS[str(settings["reservation"])]
    replica = make(**_fields(ReplicaConfig, settings), **ratios, tiers=tiers)
    config = SimulationConfig(replica=replica, **_fields(SimulationConfig, settings))
    router = RecordingRouter(inner=make_router(settings, config))
    simulation = Simulation(config=config, router=router, arrivals=requests)
    for _ in simulation.run():
        pass
    report = simulation.report()
    return {**_figures(report), **_waits(router.finished, continued(requests))}


def _fields(owner: type[attrs.AttrsInstance], settings: Mapping[str, Setting]) -> dict[str, Setting]:
    names = {each.name for each in attrs.fields(owner)}
    return {name: value for name, value in settings.items() if name in names}


def _figures(report: SimulationReport) -> dict[str, float]:
    prefill_tokens = sum(each.prefill_tokens for each in report.replicas)
    computed_tokens = prefill_tokens + sum(each.decode_tokens for each in report.replicas)
    crowded = [point for point in report.timeline if point.num_waiting]
    return {
        "finished": report.num_finished,
        "refused": report.num_refused,
        "hit_rate": sum(report.hit_rate.values()),
        "hit_rate_host": report.hit_rate.get("host", 0.0),
        "hit_rate_storage": report.hit_rate.get("storage", 0.0),
        "ttft_p50_s": report.ttft_s.p50,
        "ttft_p99_s": report.ttft_s.p99,
        "ttft_mean_s": report.ttft_s.mean,
        "tpot_p50_s": report.tpot_s.p50,
        "tpot_p99_s": report.tpot_s.p99,
        "e2e_mean_s": report.e2e_s.mean,
        "queue_max_s": report.queue_s.max,
        "goodput_share": report.goodput_share,
        "prefill_tokens": prefill_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "recompute_tax": report.recomputed_tokens / computed_tokens,
        "preemptions": report.num_retractions,
        "busy_share": _mean([each.busy_share for each in report.replicas]),
        "replica_fairness": report.replica_fairness,
        "peak_waiting": max((point.num_waiting for point in report.timeline), default=0),
        "idle_pool_share": _mean([1 - point.token_usage for point in crowded]),
        "duration_s": report.duration_s,
        "output_tokens_per_s": report.output_tokens_per_s,
    }


def _waits(finished: Sequence[SimulatedRequest], continuing: frozenset[int]) -> dict[str, float]:
    """Return the waits for the first admission, of new and of continued prompts."""
    waits_s: dict[str, list[float]] = {"new": [], "continued": []}
    for request in finished:
        group = "continued" if request.recorded.index in continuing else "new"
        waits_s[group].append((request.admitted_ns - request.arrived_ns) / 1e9)
    return {
        f"{group}_queue_{name}_s": percentile(sorted(values), percent)
        for group, values in waits_s.items()
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
    }


def _delay_prefills(settings: Mapping[str, Setting], most_requests: int) -> dict[str, float]:
    """Serve generated requests under DP attention."""
    config = DpSimConfig(**_fields(DpSimConfig, settings))
    report = simulate_dp_attn(attrs.evolve(config, num_requests=min(config.num_requests, most_requests)))
    first_s, between_s = sorted(report.first_token_s), sorted(report.inter_token_s)
    stats = report.stats[0]
    return {
        "finished": len(first_s),
        "ttft_mean_s": _mean(first_s),
        "ttft_p50_s": percentile(first_s, 50),
        "ttft_p99_s": percentile(first_s, 99),
        "itl_mean_s": _mean(between_s),
        "itl_p50_s": percentile(between_s, 50),
        "itl_p99_s": percentile(between_s, 99),
        "steps": stats.steps,
        "eager_share": stats.eager_steps / max(1, stats.steps),
        "padded_tokens": sum(each.padded_tokens for each in report.stats),
        "delayed_steps": stats.prefills_delayed,
        "duration_s": report.makespan_s,
        "output_tokens_per_s": report.num_tokens / report.makespan_s,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile of sorted values, as in a report; 0 without any."""
    return percentile_of(ordered, percent) if ordered else 0.0
