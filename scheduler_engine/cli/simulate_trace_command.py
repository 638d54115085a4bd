"""The commands ``simulate trace`` and ``simulate conversations``: replicas serve arrivals in virtual time."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Literal

import attrs
from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from observability.routing import KvRouter, PickerName, make_picker
from scheduler_components import ConfigError, StartError
from scheduler_components.hicache import HiCachePolicy, LoadBackMode, PrefetchPolicy, WritePolicy
from scheduler_components.scheduling.admission_budget import BatchMode
from scheduler_engine.cli.progress_line import ProgressLine
from scheduler_engine.cli.run_reporter import print_lines
from scheduler_engine.simulation import (
    ConversationWorkload,
    Distribution,
    LeastLoaded,
    Outage,
    ReplicaConfig,
    RoundRobin,
    Router,
    Scaling,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TierConfig,
    TraceRequest,
    WallTime,
    check_trace,
    encode_report,
    generate_conversations,
    open_trace,
)
from scheduler_engine.simulation.report_page import check_can_draw, render_page

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}

RouterName = Literal["round-robin", "least-loaded", "kv"]

_PICKER_SEED = 0


def _make_kv_router(config: SimulationConfig, *, picker: PickerName = "least-cost") -> KvRouter:
    rng = random.Random(_PICKER_SEED)  # the same options give the same report
    return KvRouter(page_size=config.replica.page_size, picker=make_picker(picker, rng))


ROUTERS: dict[str, Callable[[SimulationConfig], Router]] = {
    "round-robin": lambda config: RoundRobin(),
    "least-loaded": lambda config: LeastLoaded(),
    "kv": _make_kv_router,
}
"""What makes each router, by name."""

_REPLICA, _SIMULATION, _TIERS, _WORKLOAD = ReplicaConfig(), SimulationConfig(), TierConfig(), ConversationWorkload()


def parse_seconds(text: str) -> float:
    """Return a time span in seconds: a number with the unit us, ms, s or min, or in seconds without one.

    Raises:
        ValueError: it is no time span.
    """
    for unit in ("us", "ms", "min", "s", ""):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * _UNITS_S.get(unit, 1.0)
    raise ValueError(text)


def _convert_seconds(_: object, tokens: Sequence[Token]) -> float:
    try:
        return parse_seconds(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is no time span: give 50ms, 1.5s or 2min") from None


Seconds = Annotated[float, Parameter(converter=_convert_seconds)]


def parse_outage(text: str) -> Outage:
    """Return an outage written as REPLICA@AT or REPLICA@AT+DOWN, such as ``2@60s+30s``.

    Raises:
        ConfigError: it is not written like this, or a value is invalid.
    """
    hint = "give REPLICA@AT+DOWN, such as 2@60s+30s, or REPLICA@AT for one that does not return"
    replica, at, times = text.partition("@")
    begin, plus, down = times.partition("+")
    try:
        if not at:
            raise ValueError(text)
        index, at_s, down_s = int(replica), parse_seconds(begin), parse_seconds(down) if plus else None
    except ValueError:
        raise ConfigError("outage", text, "is no outage", hint) from None
    return Outage(replica=index, at_s=at_s, down_s=down_s)


def parse_scaling(text: str) -> Scaling:
    """Return a change of the number of replicas written as REPLICAS@AT, such as ``8@120s``.

    Raises:
        ConfigError: it is not written like this, or a value is invalid.
    """
    replicas, _, at = text.partition("@")
    try:
        num_replicas, at_s = int(replicas), parse_seconds(at)
    except ValueError:
        hint = "give REPLICAS@AT, such as 8@120s"
        raise ConfigError("scale", text, "is no number of replicas and time", hint) from None
    return Scaling(num_replicas=num_replicas, at_s=at_s)


@Parameter(name="*", group=Group("Replicas and router", sort_key=1))
@attrs.frozen(kw_only=True)
class ReplicaOptions:
    """The options of replicas and router, one field per option."""

    replicas: Annotated[int, Parameter(validator=Number(gte=1), help="Replicas.")] = 4
    policy: Annotated[
        list[str] | None, Parameter(help="Scheduling policy: a name, or module:name of your own. Repeat it to compare.")
    ] = None
    preemption: Annotated[str, Parameter(help="Preemption policy.")] = _REPLICA.preemption_policy
    router: Annotated[list[RouterName] | None, Parameter(help="Router. Repeat it to compare.")] = None
    picker: Annotated[
        list[PickerName] | None,
        Parameter(help="Picker of the router kv. Repeat it to compare. Default: least-cost."),
    ] = None
    page_size: Annotated[int, Parameter(validator=Number(gte=1), help="Tokens per KV page.")] = _REPLICA.page_size
    kv_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="KV pool per replica.")] = _REPLICA.kv_tokens
    max_running_requests: Annotated[int, Parameter(validator=Number(gte=1), help="Request slots per replica.")] = (
        _REPLICA.max_running_requests
    )
    max_prefill_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="Prefill tokens per step.")] = (
        _REPLICA.max_prefill_tokens
    )
    chunk_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="Prefill tokens per step and request.")] = (
        _REPLICA.chunk_tokens
    )
    batch_mode: Annotated[BatchMode, Parameter(help="Whether a batch holds prefills and decodes.")] = "mixed"
    speed: Annotated[float, Parameter(help="Speed of the device; 2 is twice as fast.")] = 1.0
    event_lag: Annotated[Seconds, Parameter(help="From a replica's KV events to the router.")] = 0.0
    load_lag: Annotated[Seconds, Parameter(help="From a replica's load report to the router.")] = 0.0
    load_interval: Annotated[Seconds, Parameter(help="Shortest time between two load reports.")] = (
        _SIMULATION.load_interval_s
    )
    outage: Annotated[
        list[str] | None, Parameter(help="Failure of a replica: REPLICA@AT+DOWN, such as 2@60s+30s. May be repeated.")
    ] = None
    scale: Annotated[
        list[str] | None, Parameter(help="Replicas from a moment on: REPLICAS@AT, such as 8@120s. May be repeated.")
    ] = None

    def routers(self) -> list[tuple[str, Callable[[SimulationConfig], Router]]]:
        """Return the title of each router to compare, and what makes it.

        Raises:
            ConfigError: a picker is given, and no router that has one.
        """
        names: list[RouterName] = self.router or ["round-robin"]
        if self.picker is None:
            return [(name, ROUTERS[name]) for name in names]
        if "kv" not in names:
            raise ConfigError("picker", self.picker[0], "needs the router that has pickers", "give --router kv, too")
        of_kv = [(f"kv {picker}", partial(_make_kv_router, picker=picker)) for picker in self.picker]
        routers = [of_kv if name == "kv" else [(name, ROUTERS[name])] for name in names]
        return list(chain.from_iterable(routers))

    def config(self) -> SimulationConfig:
        """Return what is simulated, with the default policy.

        Raises:
            ConfigError: a value is invalid; the error names it.
        """
        return SimulationConfig(
            replica=ReplicaConfig(
                page_size=self.page_size,
                kv_tokens=self.kv_tokens,
                max_running_requests=self.max_running_requests,
                max_prefill_tokens=self.max_prefill_tokens,
                chunk_tokens=self.chunk_tokens,
                batch_mode=self.batch_mode,
                preemption_policy=self.preemption,
                speed=self.speed,
            ),
            num_replicas=self.replicas,
            event_lag_s=self.event_lag,
            load_lag_s=self.load_lag,
            load_interval_s=self.load_interval,
            outages=tuple(parse_outage(each) for each in self.outage or ()),
            scalings=tuple(parse_scaling(each) for each in self.scale or ()),
        )


@Parameter(name="*", group=Group("Host and storage tiers", sort_key=2))
@attrs.frozen(kw_only=True)
class TierOptions:
    """The options of the tiers below the device, one field per option."""

    host_tokens: Annotated[
        list[int] | None,
        Parameter(help="Size of the host tier per replica; 0 for none. Repeat it to compare. Default: none."),
    ] = None
    host_gb_per_s: Annotated[float, Parameter(help="Bandwidth to the host, and back.")] = _TIERS.load_gb_per_s
    storage_tokens: Annotated[
        int, Parameter(validator=Number(gte=0), help="Size of the storage that replicas share; 0 for none.")
    ] = 0
    storage_gb_per_s: Annotated[float, Parameter(help="Bandwidth of each replica to storage, and back.")] = (
        _TIERS.storage_read_gb_per_s
    )
    storage_total_gb_per_s: Annotated[
        float, Parameter(help="Bandwidth of storage for all replicas together; 0 for no bound.")
    ] = _TIERS.storage_total_gb_per_s
    storage_latency: Annotated[Seconds, Parameter(help="Latency of storage.")] = _TIERS.storage_latency_s
    kv_token_bytes: Annotated[int, Parameter(validator=Number(gte=1), help="Bytes of KV per token.")] = (
        _TIERS.token_bytes
    )
    hicache_write: Annotated[WritePolicy, Parameter(help="When to copy pages to the host.")] = "write_through"
    hicache_prefetch: Annotated[PrefetchPolicy, Parameter(help="When to stop a prefetch from storage.")] = "best_effort"
    hicache_load: Annotated[
        LoadBackMode, Parameter(help="When a request starts: after all its pages are loaded, or layer by layer.")
    ] = "whole"

    def configs(self) -> list[TierConfig | None]:
        """Return the tiers to compare, one per size of the host tier.

        Raises:
            ConfigError: a value is invalid; the error names it.
        """
        sizes = self.host_tokens or [0]
        if self.storage_tokens and not all(sizes):
            raise ConfigError("storage_tokens", self.storage_tokens, "needs a host tier", "give --host-tokens, too")
        return [self._config(host_tokens) if host_tokens else None for host_tokens in sizes]

    def _config(self, host_tokens: int) -> TierConfig:
        return TierConfig(
            host_tokens=host_tokens,
            write_gb_per_s=self.host_gb_per_s,
            load_gb_per_s=self.host_gb_per_s,
            storage_tokens=self.storage_tokens,
            storage_write_gb_per_s=self.storage_gb_per_s,
            storage_read_gb_per_s=self.storage_gb_per_s,
            storage_total_gb_per_s=self.storage_total_gb_per_s,
            storage_latency_s=self.storage_latency,
            token_bytes=self.kv_token_bytes,
            policy=HiCachePolicy(write=self.hicache_write, prefetch=self.hicache_prefetch, load=self.hicache_load),
        )


@Parameter(name="*", group=Group("Report", sort_key=3))
@attrs.frozen(kw_only=True)
class ReportOptions:
    """The options of reports, one field per option."""

    ttft_slo: Annotated[Seconds, Parameter(help="Bound of the time to the first token.")] = _SIMULATION.ttft_slo_s
    tpot_slo: Annotated[Seconds, Parameter(help="Bound of the time per output token.")] = _SIMULATION.tpot_slo_s
    report: Annotated[Path | None, Parameter(help="Write a page with plots to this file (HTML).")] = None
    as_json: Annotated[
        bool, Parameter(name="--json", show_default=False, help="Print each run's report as one line of JSON.")
    ] = False


_NO_TIERS, _REPLICAS, _REPORT = TierOptions(), ReplicaOptions(), ReportOptions()


def simulate_trace(
    file: Annotated[Path, Parameter(help="Trace in Mooncake's format: one JSON object per line.")],
    /,
    *,
    requests: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="First requests only. Default: all.")
    ] = None,
    replicas: ReplicaOptions = _REPLICAS,
    tiers: TierOptions = _NO_TIERS,
    reports: ReportOptions = _REPORT,
) -> int:
    """Serve a recorded trace on simulated replicas, each with the real scheduler, in virtual time.

    The same options give the same report. Several policies, routers or sizes of the host tier are simulated one after
    the other and compared. The exit code is 1 if requests are unfinished at the end, because no replica serves any
    more.
    """
    comparison = Comparison.of(replicas, tiers, reports)
    summary = check_trace(file, limit=requests)
    return comparison.simulate(partial(open_trace, file, limit=requests), num_requests=summary.num_requests)


def simulate_conversations(
    *,
    requests: Annotated[int, Parameter(validator=Number(gte=1), help="Requests.")] = _WORKLOAD.num_requests,
    seed: Annotated[int, Parameter(help="Seed of the conversations.")] = _WORKLOAD.seed,
    rate: Annotated[float, Parameter(help="Conversations that begin per second.")] = _WORKLOAD.conversations_per_s,
    turns: Annotated[float, Parameter(help="Mean number of turns.")] = _WORKLOAD.mean_turns,
    think: Annotated[Seconds, Parameter(help="Mean time between two turns.")] = _WORKLOAD.mean_think_s,
    message_tokens: Annotated[float, Parameter(help="Mean length of a message.")] = _WORKLOAD.mean_message_tokens,
    output_tokens: Annotated[float, Parameter(help="Mean length of an answer.")] = _WORKLOAD.mean_output_tokens,
    system_prompts: Annotated[
        int, Parameter(validator=Number(gte=1), help="System prompts, of unequal popularity.")
    ] = _WORKLOAD.num_system_prompts,
    system_prompt_tokens: Annotated[
        int, Parameter(validator=Number(gte=1), help="Length of a system prompt.")
    ] = _WORKLOAD.system_prompt_tokens,
    tenants: Annotated[
        int, Parameter(validator=Number(gte=1), help="Tenants, of unequal traffic.")
    ] = _WORKLOAD.num_tenants,
    replicas: ReplicaOptions = _REPLICAS,
    tiers: TierOptions = _NO_TIERS,
    reports: ReportOptions = _REPORT,
) -> int:
    """Serve generated conversations of several turns on simulated replicas, in virtual time.

    Everything else is as in ``simulate trace``.
    """
    workload = ConversationWorkload(
        num_requests=requests,
        seed=seed,
        conversations_per_s=rate,
        mean_turns=turns,
        mean_think_s=think,
        mean_message_tokens=message_tokens,
        mean_output_tokens=output_tokens,
        num_system_prompts=system_prompts,
        system_prompt_tokens=system_prompt_tokens,
        num_tenants=tenants,
    )
    comparison = Comparison.of(replicas, tiers, reports)
    return comparison.simulate(partial(generate_conversations, workload), num_requests=requests)


@attrs.frozen(kw_only=True)
class Comparison:
    """Runs to simulate one after the other, with the same arrivals.

    Attributes:
        runs: title, configuration and router of each run.
        reports: what is reported, and where.
    """

    runs: Sequence[tuple[str, SimulationConfig, Callable[[SimulationConfig], Router]]]
    reports: ReportOptions

    @classmethod
    def of(cls, replicas: ReplicaOptions, tiers: TierOptions, reports: ReportOptions) -> Comparison:
        """Return the runs of all combinations.

        Raises:
            ConfigError: an option is invalid, or the page cannot be written.
            StartError: the page needs a library that is not installed.
        """
        config = attrs.evolve(replicas.config(), ttft_slo_s=reports.ttft_slo, tpot_slo_s=reports.tpot_slo)
        of_tiers = tiers.configs()
        runs = []
        for policy, (router, make), each in product(replicas.policy or ["fcfs"], replicas.routers(), of_tiers):
            of_run = attrs.evolve(config, replica=attrs.evolve(config.replica, schedule_policy=policy, tiers=each))
            size = f"host {each.host_tokens:,}" if each is not None else "no host"
            title = ", ".join([policy, router, size] if len(of_tiers) > 1 else [policy, router])
            runs.append((title, of_run, make))
        if reports.report is not None:
            _check_writable(reports.report)
        return cls(runs=runs, reports=reports)

    def simulate(self, open_arrivals: Callable[[], Iterable[TraceRequest]], *, num_requests: int) -> int:
        """Simulate all runs and report them. Return the exit code.

        Args:
            open_arrivals: returns the arrivals, from the first one on.
            num_requests: number of arrivals.
        """
        reports, path = [], self.reports.report
        for title, config, make_router in self.runs:
            simulation = Simulation(config=config, router=make_router(config), arrivals=open_arrivals(), title=title)
            wall = _run(simulation, ProgressLine(out=sys.stderr), num_requests)
            reports.append(simulation.report())
            as_json = (encode_report(reports[-1]).decode(),)
            print_lines(as_json if self.reports.as_json else format_report(reports[-1], wall))
        if path is not None:
            _write(path, render_page(reports))
        return int(any(each.num_unfinished for each in reports))


def _run(simulation: Simulation, line: ProgressLine, num_requests: int) -> WallTime:
    wall_s, cpu_s, now_s = time.perf_counter(), time.process_time(), 0.0
    for reached in simulation.run():
        finished = f"{reached.num_finished:,} of {num_requests:,} requests"
        line.show(f"{simulation.title}: {finished}, at {reached.now_s:,.0f} s")
        now_s = reached.now_s
    line.clear()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return WallTime(wall_s=wall_s, cpu_s=cpu_s, simulated_s_per_s=now_s / wall_s)


def format_report(report: SimulationReport, wall: WallTime) -> Iterator[str]:
    """Yield the lines that summarize one run."""
    yield f"{report.title}: {report.num_finished:,} of {report.num_requests:,} requests in {report.duration_s:,.1f} s"
    if report.num_refused:
        yield f"  {report.num_refused:,} requests are larger than the pool"
    for what, values in (
        ("to the first token", report.ttft_s),
        ("per output token", report.tpot_s),
        ("end to end", report.e2e_s),
        ("in the queue", report.queue_s),
    ):
        yield f"  {what}: {_percentiles(values)}"
    rates = ", ".join(f"{tier} {rate:.1%}" for tier, rate in report.hit_rate.items())
    yield f"  hit rate: {rates}; {report.recomputed_tokens:,} positions computed again"
    yield f"  {report.output_tokens_per_s:,.0f} output tokens per second; {report.goodput_share:.1%} within the SLO"
    yield f"  {report.num_retractions:,} preemptions, {report.num_migrations:,} migrations"
    yield f"  simulated in {wall.wall_s:.1f} s, {wall.simulated_s_per_s:,.0f} s per second"


def _percentiles(values: Distribution) -> str:
    p50, p90, p99 = (1e3 * value for value in (values.p50, values.p90, values.p99))
    return f"p50 {p50:,.1f} ms, p90 {p90:,.1f} ms, p99 {p99:,.1f} ms"


def _check_writable(path: Path) -> None:
    """Check before the simulation that the page can be written."""
    check_can_draw()
    hint = "name a file in an existing folder that you may write to"
    try:
        target = path if path.exists() else path.parent
        is_writable = not path.is_dir() and target.exists() and os.access(target, os.W_OK)
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be entered, a zero byte
        raise ConfigError("report", str(path), "cannot be written", hint) from error
    if not is_writable:
        raise ConfigError("report", str(path), "cannot be written", hint)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StartError(str(path), str(error), "give a writable file") from error
