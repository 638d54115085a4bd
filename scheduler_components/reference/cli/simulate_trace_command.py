"""The command ``simulate trace``: serve a recorded trace on simulated replicas, in virtual time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, TextIO

import attrs
from cyclopts import Parameter, Token
from cyclopts.validators import Number

from observability.routing import KvRouter
from scheduler_components import ConfigError, StartError
from scheduler_components.admission_budget import BatchMode
from scheduler_components.reference.cli.run_reporter import print_lines
from scheduler_components.simulation import (
    Distribution,
    LeastLoaded,
    Outage,
    Progress,
    ReplicaConfig,
    RoundRobin,
    Router,
    Simulation,
    SimulationConfig,
    SimulationReport,
    WallTime,
    check_trace,
    encode_report,
    open_trace,
)
from scheduler_components.simulation.report_page import check_can_draw, render_page

__all__ = ["ROUTERS", "SimulationProgress", "format_report", "parse_outage", "parse_seconds", "simulate_trace"]

_PROGRESS_EVERY_S = 10.0
_PROGRESS_TERMINAL_S = 0.2
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}

RouterName = Literal["round-robin", "least-loaded", "kv"]

ROUTERS: dict[str, Callable[[SimulationConfig], Router]] = {
    "round-robin": lambda config: RoundRobin(),  # noqa: ARG005
    "least-loaded": lambda config: LeastLoaded(),  # noqa: ARG005
    "kv": lambda config: KvRouter(page_size=config.replica.page_size),
}
"""What makes each router, by name."""

_REPLICA, _SIMULATION = ReplicaConfig(), SimulationConfig()


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
Count = Annotated[int, Parameter(validator=Number(gte=1))]


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
        return Outage(replica=int(replica), at_s=parse_seconds(begin), down_s=parse_seconds(down) if plus else None)
    except ValueError:
        raise ConfigError("outage", text, "is no outage", hint) from None


def simulate_trace(
    file: Annotated[Path, Parameter(help="Trace in Mooncake's format: one JSON object per line.")],
    /,
    *,
    replicas: Annotated[int, Parameter(validator=Number(gte=1), help="Replicas.")] = 4,
    requests: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="First requests only. Default: all.")
    ] = None,
    policy: Annotated[
        list[str] | None, Parameter(help="Scheduling policy: a name, or module:name of your own. Repeat it to compare.")
    ] = None,
    preemption: Annotated[str, Parameter(help="Preemption policy.")] = _REPLICA.preemption_policy,
    router: Annotated[list[RouterName] | None, Parameter(help="Router. Repeat it to compare.")] = None,
    page_size: Annotated[int, Parameter(validator=Number(gte=1), help="Tokens per KV page.")] = _REPLICA.page_size,
    kv_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="KV pool per replica.")] = _REPLICA.kv_tokens,
    max_running_requests: Annotated[
        int, Parameter(validator=Number(gte=1), help="Request slots per replica.")
    ] = _REPLICA.max_running_requests,
    max_prefill_tokens: Annotated[
        int, Parameter(validator=Number(gte=1), help="Prefill tokens per step.")
    ] = _REPLICA.max_prefill_tokens,
    chunk_tokens: Annotated[
        int, Parameter(validator=Number(gte=1), help="Prefill tokens per step and request.")
    ] = _REPLICA.chunk_tokens,
    batch_mode: Annotated[BatchMode, Parameter(help="Whether a batch holds prefills and decodes.")] = "mixed",
    speed: Annotated[float, Parameter(help="Speed of the device; 2 is twice as fast.")] = 1.0,
    event_lag: Annotated[Seconds, Parameter(help="From a replica's KV events to the router.")] = 0.0,
    load_lag: Annotated[Seconds, Parameter(help="From a replica's load report to the router.")] = 0.0,
    load_interval: Annotated[
        Seconds, Parameter(help="Shortest time between two load reports.")
    ] = _SIMULATION.load_interval_s,
    outage: Annotated[
        list[str] | None, Parameter(help="Failure of a replica: REPLICA@AT+DOWN, such as 2@60s+30s. May be repeated.")
    ] = None,
    ttft_slo: Annotated[Seconds, Parameter(help="Bound of the time to the first token.")] = _SIMULATION.ttft_slo_s,
    tpot_slo: Annotated[Seconds, Parameter(help="Bound of the time per output token.")] = _SIMULATION.tpot_slo_s,
    report: Annotated[Path | None, Parameter(help="Write a page with plots to this file (HTML).")] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", show_default=False, help="Print each run's report as one line of JSON.")
    ] = False,
) -> int:
    """Serve a recorded trace on simulated replicas, each with the real scheduler, in virtual time.

    The same options give the same report. Several policies or routers are simulated one after the other and compared.
    The exit code is 1 if requests are unfinished at the end, because no replica serves any more.
    """
    config = SimulationConfig(
        replica=ReplicaConfig(
            page_size=page_size,
            kv_tokens=kv_tokens,
            max_running_requests=max_running_requests,
            max_prefill_tokens=max_prefill_tokens,
            chunk_tokens=chunk_tokens,
            batch_mode=batch_mode,
            preemption_policy=preemption,
            speed=speed,
        ),
        num_replicas=replicas,
        event_lag_s=event_lag,
        load_lag_s=load_lag,
        load_interval_s=load_interval,
        ttft_slo_s=ttft_slo,
        tpot_slo_s=tpot_slo,
        outages=tuple(parse_outage(each) for each in outage or ()),
    )
    runs = [
        (f"{policy_name}, {router_name}", attrs.evolve(config, replica=of_policy), ROUTERS[router_name])
        for policy_name, router_name in product(policy or ["fcfs"], router or ["round-robin"])
        for of_policy in [attrs.evolve(config.replica, schedule_policy=policy_name)]
    ]
    if report is not None:
        _check_writable(report)
    summary = check_trace(file, limit=requests)
    reports = []
    for title, of_run, make_router in runs:
        simulation = Simulation(
            config=of_run, router=make_router(of_run), arrivals=open_trace(file, limit=requests), title=title
        )
        progress = SimulationProgress(out=sys.stderr, title=title, num_requests=summary.num_requests)
        wall = _run(simulation, progress)
        reports.append(simulation.report())
        print_lines((encode_report(reports[-1]).decode(),) if as_json else format_report(reports[-1], wall))
    if report is not None:
        _write(report, render_page(reports))
    return int(any(each.num_unfinished for each in reports))


def _run(simulation: Simulation, progress: SimulationProgress) -> WallTime:
    wall_s, cpu_s, now_s = time.perf_counter(), time.process_time(), 0.0
    for reached in simulation.run():
        progress.show(reached)
        now_s = reached.now_s
    progress.clear()
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


@dataclass(slots=True, kw_only=True)
class SimulationProgress:
    """Prints how far a run is: on a single line of a terminal, otherwise a line every ten seconds.

    Attributes:
        out: standard error, so that standard output contains only the report.
        title: of the run.
        num_requests: that will arrive.
        clock: monotonic seconds.
    """

    out: TextIO
    title: str
    num_requests: int
    clock: Callable[[], float] = time.monotonic
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.clock() + self._interval_s

    @property
    def _interval_s(self) -> float:
        return _PROGRESS_TERMINAL_S if self.out.isatty() else _PROGRESS_EVERY_S

    def show(self, progress: Progress) -> None:
        """Show the progress, if the last time is long enough ago."""
        now_s = self.clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        text = f"{self.title}: {progress.num_finished:,} of {self.num_requests:,} requests, at {progress.now_s:,.0f} s"
        self._write(f"\r\033[K{text}" if self.out.isatty() else f"{text}\n")

    def clear(self) -> None:
        """Clear the line for other text."""
        if self.out.isatty():
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def _check_writable(path: Path) -> None:
    """Check before the simulation that the page can be written."""
    check_can_draw()
    target = path if path.exists() else path.parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        hint = "name a file in an existing folder that you may write to"
        raise ConfigError("report", str(path), "cannot be written", hint)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StartError(str(path), str(error), "give a writable file") from error
