"""SimulationReport: what a simulation measured, as values that depend on its input alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from scheduler_components.values import TierStats

_PERCENTILES = 101
_Value = TypeVar("_Value", int, float)


class Distribution(msgspec.Struct, frozen=True):
    """A distribution in seconds.

    Attributes:
        num_values: 0 for an empty one, whose other values are 0.
        mean: of all values.
        p50, p90, p99, max: percentiles, each a value that occurred. The least is percentile 0, the largest 100, and
            between two ranks it is the higher one (numpy's method ``higher``).
        percentiles: the percentiles 0 to 100, for a plot; empty for an empty one.
    """

    num_values: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    percentiles: tuple[float, ...] = ()


class ReplicaReport(msgspec.Struct, frozen=True):
    """What one replica did, its restarts included.

    Attributes:
        num_requests: requests that ended on it.
        num_steps: steps of its scheduler.
        busy_share: time of its steps / time from the first arrival to the last token or the end of the last step.
        prefill_tokens, decode_tokens: computed positions.
        peak_running: most requests that ran together.
        num_retractions: requests that lost their pages to others.
        decision_tip: digest of all decisions; 0 if none were noted.
        running, waiting: requests at each point of the timeline. Requests that were sent to a replica which is away
            wait.
        tiers: counters of host and storage; None without.
    """

    num_requests: int
    num_steps: int
    busy_share: float
    prefill_tokens: int
    decode_tokens: int
    peak_running: int
    num_retractions: int
    decision_tip: int = 0
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    tiers: TierStats | None = None


class TenantReport(msgspec.Struct, frozen=True):
    """The finished requests of one tenant.

    Attributes:
        name: of the tenant.
        num_requests: that ended.
        prompt_tokens, generated_tokens: of these requests.
        mean_queue_s, mean_ttft_s, p99_ttft_s, mean_e2e_s: from their arrival to admission, first and last token.
    """

    name: str
    num_requests: int
    prompt_tokens: int
    generated_tokens: int
    mean_queue_s: float
    mean_ttft_s: float
    p99_ttft_s: float
    mean_e2e_s: float


class TimelinePoint(msgspec.Struct, frozen=True, array_like=True):
    """All replicas at one moment.

    Attributes:
        time_s: virtual seconds since the start.
        num_running, num_waiting: requests, over all replicas. Those that no replica has yet wait.
        token_usage: share of all pools that running requests hold.
        num_replicas: replicas that serve.
    """

    time_s: float
    num_running: int
    num_waiting: int
    token_usage: float
    num_replicas: int


class SimulationReport(msgspec.Struct, frozen=True):
    """The result of a simulation. The same input gives the same report on every machine with the same Python.

    Attributes:
        title: of the run, for readers of several.
        settings: what was simulated, by name.
        num_requests: that arrived. Each of them is finished, refused (no pool can hold it), or unfinished.
        num_finished, num_refused, num_unfinished: by outcome.
        num_retractions, num_migrations: requests that lost their pages to others, or their replica.
        duration_s: virtual time from the first arrival to the last token.
        prompt_tokens, cached_tokens: of finished requests; how many were cached at the first admission.
        hit_rate: cached / prompt tokens, by tier.
        generated_tokens, recomputed_tokens: tokens of finished requests, and positions that were computed again after a
            preemption or a migration.
        output_tokens_per_s, requests_per_s: of finished requests, over the duration.
        queue_s: from arrival to admission.
        ttft_s: from arrival to the first token.
        tpot_s: mean time between two tokens of a request, of requests with several.
        e2e_s: from arrival to the last token.
        goodput_share, goodput_per_s: finished requests within both bounds of the SLO: / all, and per second.
        replica_fairness: Jain's index of the computed positions of the replicas that served to the end; 1 is equal.
        tenant_fairness: Jain's index of the mean end-to-end time of tenants; 1 is equal.
        deadline_share: requests whose first token came before their deadline / those that arrived with a deadline; 1
            without any.
        replicas: by index.
        timeline: at equal distances of the setting ``sample_s``, at most 8193 points. In a long run the distance is a
            multiple of the configured one.
        tenants: sorted by name; empty if no request has a tenant.
        recomputed_by_cause: what ``recomputed_tokens`` consists of: after a ``preemption``, and after a ``migration``.
    """

    title: str
    settings: dict[str, int | float | str | bool]
    num_requests: int
    num_finished: int
    num_refused: int
    num_unfinished: int
    num_retractions: int
    num_migrations: int
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    hit_rate: dict[str, float]
    generated_tokens: int
    recomputed_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    queue_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    goodput_share: float
    goodput_per_s: float
    replica_fairness: float
    tenant_fairness: float
    deadline_share: float
    replicas: tuple[ReplicaReport, ...]
    timeline: tuple[TimelinePoint, ...]
    tenants: tuple[TenantReport, ...] = ()
    recomputed_by_cause: dict[str, int] = {}


class WallTime(msgspec.Struct, frozen=True):
    """How long a simulation took. It is no part of the report, because it differs from run to run.

    Attributes:
        wall_s, cpu_s: seconds of the machine.
        simulated_s_per_s: virtual seconds per second.
    """

    wall_s: float
    cpu_s: float
    simulated_s_per_s: float


def distribution_of(values_ns: Iterable[int]) -> Distribution:
    """Return the distribution of time spans in nanoseconds."""
    ordered = sorted(values_ns)
    if not ordered:
        return Distribution()
    percentiles = tuple(percentile_of(ordered, percent) / 1e9 for percent in range(_PERCENTILES))
    return Distribution(
        num_values=len(ordered),
        mean=sum(ordered) / len(ordered) / 1e9,
        p50=percentiles[50],
        p90=percentiles[90],
        p99=percentiles[99],
        max=ordered[-1] / 1e9,
        percentiles=percentiles,
    )


def percentile_of(ordered: Sequence[_Value], percent: int) -> _Value:
    """Return a percentile of sorted values, at least one, as ``Distribution`` defines it."""
    return ordered[-(-(len(ordered) - 1) * percent // 100)]


def jain_index(shares: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all shares are equal, 1/n if one of n has all; 1 without any."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def encode_report(report: SimulationReport) -> bytes:
    """Return a report as JSON; equal reports give equal bytes."""
    return msgspec.json.encode(report, order="deterministic")
