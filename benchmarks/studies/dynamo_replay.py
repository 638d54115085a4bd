"""Serve a trace in virtual time by this kit and by Dynamo's offline replay (ai-dynamo-runtime 1.6.1), side by side::

    python -m benchmarks.studies.dynamo_replay conversation_trace.jsonl
    python -m benchmarks.studies.dynamo_replay conversation_trace.jsonl kv --event-lag-ms 0 --event-lag-ms 1000
    python -m benchmarks.studies.dynamo_replay conversation_trace.jsonl rules

Both get the same arrivals, rounded to milliseconds, the same pool and the same cost: that of Dynamo's mocker, which
``MockerCost`` computes from what the kit's scheduler has batched. Both are first come first served, count decodes in
the token budget of a step as vLLM does, and reserve nothing for future output.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import msgspec

from benchmarks.measure import count_argument
from benchmarks.studies.dynamo_rules import DynamoRules
from observability.routing import KvRouter, SpeculativeEntries
from scheduler_components.errors import ComponentError, ConfigError
from scheduler_components.values import BatchShape, ScheduledBatch
from scheduler_engine.simulation import (
    TRACE_BLOCK_TOKENS,
    CostModel,
    ReplicaConfig,
    RoundRobin,
    Router,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TraceRequest,
    open_trace,
    parse_trace,
)


@attrs.frozen(kw_only=True)
class MockerCost(CostModel):
    """The cost of Dynamo's mocker: polynomials of the prefill tokens, and of the share of the pool that decodes read.

    A step takes the sum of both. The coefficients are those of its timing model ``polynomial``.

    Attributes:
        kv_tokens: capacity of the pool.
    """

    kv_tokens: int = 1 << 20

    def batch_s(self, batch: ScheduledBatch[object]) -> float:
        decodes = sum(chunk.end for chunk in batch.chunks if not chunk.is_prefill)
        return 1e-3 * (self._prefill_ms(batch.num_prefill_tokens) + self._decode_ms(decodes))

    def shape_s(self, batch: ScheduledBatch[object] | BatchShape) -> float:
        """Return the seconds of a batch that only decodes."""
        return 1e-3 * self._decode_ms(batch.num_context_tokens)

    @staticmethod
    def _prefill_ms(num_tokens: int) -> float:
        return 4.209989e-07 * num_tokens**2 + 1.518344e-02 * num_tokens + 16.50142 if num_tokens else 0.0

    def _decode_ms(self, num_context_tokens: int) -> float:
        share = min(1.0, num_context_tokens / self.kv_tokens)
        return max(1.0, -25.74 * share**2 + 54.01 * share + 5.74) if num_context_tokens else 0.0


def has_dynamo_replay() -> bool:
    """Return whether Dynamo's replay is installed."""
    return importlib.util.find_spec("dynamo") is not None


def write_arrivals(requests: Sequence[TraceRequest], path: Path) -> list[TraceRequest]:
    """Write requests with their arrivals rounded to milliseconds, and return what a reader finds in the file."""
    lines = [
        {
            "timestamp": round(request.arrival_s * 1e3),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        for request in requests
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with path.open("rb") as file:
        return list(parse_trace(file))


def replica_config(*, page_size: int, kv_tokens: int) -> ReplicaConfig:
    """Return a replica by the rules that Dynamo's mocker of vLLM has."""
    return ReplicaConfig(
        page_size=page_size,
        kv_tokens=kv_tokens,
        max_running_requests=256,
        max_prefill_tokens=8192,
        chunk_tokens=8192,
        counts_decodes=True,
        new_token_ratio=0.0,
        min_new_token_ratio=0.0,
        cost=MockerCost(kv_tokens=kv_tokens),
    )


def serve_in_kit(
    requests: Sequence[TraceRequest],
    config: ReplicaConfig,
    num_replicas: int,
    *,
    router: Router | None = None,
    event_lag_s: float = 0.0,
) -> SimulationReport:
    """Serve requests by this kit, in turns or by another router."""
    simulation = Simulation(
        config=SimulationConfig(replica=config, num_replicas=num_replicas, event_lag_s=event_lag_s),
        router=router or RoundRobin(),
        arrivals=requests,
    )
    for _ in simulation.run():
        pass
    return simulation.report()


def engine_args(config: ReplicaConfig) -> dict[str, object]:
    """Return the mocker's arguments for the same replica."""
    return {
        "engine": {
            "backend": "vllm",
            "num_gpu_blocks": config.kv_tokens // config.page_size,
            "block_size": config.page_size,
            "max_num_seqs": config.max_running_requests,
            "max_num_batched_tokens": config.max_prefill_tokens,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }
    }


def replay_in_dynamo(
    trace: Path,
    arguments: Mapping[str, object],
    num_replicas: int,
    *,
    router_mode: str = "round_robin",
    event_lag_ms: float = 0.0,
    router_options: Mapping[str, object] | None = None,
) -> Mapping[str, Any]:
    """Serve a trace by Dynamo's replay, in turns or by its KV router; return its summary.

    Args:
        trace: what ``write_arrivals`` wrote.
        arguments: of the mocker (``engine_args``).
        num_replicas: workers.
        router_mode: ``round_robin`` or ``kv_router``.
        event_lag_ms: from a worker's KV events to the router.
        router_options: arguments of ``KvRouterConfig``.
    """
    options = _kv_options(event_lag_ms, router_options) if router_mode == "kv_router" else {}
    return dict(_replay(trace, arguments, num_workers=num_replicas, router_mode=router_mode, **options).summary)


def route_in_dynamo(
    trace: Path,
    arguments: Mapping[str, object],
    num_replicas: int,
    *,
    event_lag_ms: float = 0.0,
    router_options: Mapping[str, object] | None = None,
) -> tuple[Mapping[str, Any], list[int]]:
    """Serve a trace by Dynamo's KV router; return its summary, and the worker of each request."""
    options = _kv_options(event_lag_ms, router_options)
    found = _replay(
        trace, arguments, num_workers=num_replicas, router_mode="kv_router", capture_per_request=True, **options
    )
    return dict(found.summary), [each["decode_worker_idx"] for each in found.per_request]


def _dynamo() -> Any:
    os.environ.setdefault("DYN_LOG", "error")  # read at the import; by default it logs each decision
    return importlib.import_module("dynamo._core")


def _kv_options(event_lag_ms: float, router_options: Mapping[str, object] | None) -> dict[str, object]:
    config = _dynamo().KvRouterConfig
    return {"kv_event_lag_ms": event_lag_ms, "router_config": config(**(router_options or {}))}


def _replay(trace: Path, arguments: Mapping[str, object], **options: object) -> Any:
    return _dynamo().run_mocker_trace_replay(
        [str(trace)],
        extra_engine_args=arguments,
        replay_mode="offline",
        trace_block_size=TRACE_BLOCK_TOKENS,
        **options,
    )


class Row(msgspec.Struct, frozen=True):
    """What one of both measured, next to each other in a table.

    Attributes:
        who: the simulation and its router.
        event_lag_ms, kv_tokens: what was set.
        figures: by name, one value per run.
        wall_s: seconds per run.
    """

    who: str
    event_lag_ms: float
    kv_tokens: int
    figures: dict[str, list[float]]
    wall_s: list[float]


COLUMNS = {
    "hit_rate": ("hit rate", 100.0, "%"),
    "ttft_mean_ms": ("TTFT mean", 1e-3, "s"),
    "ttft_p50_ms": ("TTFT p50", 1e-3, "s"),
    "ttft_p99_ms": ("TTFT p99", 1e-3, "s"),
    "tpot_mean_ms": ("TPOT mean", 1.0, "ms"),
    "output_tokens_per_s": ("output", 1.0, "tokens/s"),
}
"""Columns of the table: heading, factor and unit of a figure."""

KIT_ROUTERS: dict[str, Callable[[ReplicaConfig], Router]] = {
    "Dynamo's rules": lambda config: DynamoRules(page_size=config.page_size),
    "Dynamo's rules and speculation": lambda config: DynamoRules(page_size=config.page_size, speculates=True),
    "KvRouter without speculation": lambda config: KvRouter(
        page_size=config.page_size, speculative=SpeculativeEntries(ttl_s=1e-9)
    ),
    "KvRouter": lambda config: KvRouter(page_size=config.page_size),
}
"""Routers of the kit that stand next to Dynamo's KV router."""

RULES: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "all rules": ({}, {}),
    "no overlap": ({"overlap_score_credit": 0.0}, {"overlap_credit": 0.0}),
    "no queued tokens": ({"router_track_prefill_tokens": False}, {"counts_queued": False}),
    "no decode blocks": ({"router_track_active_blocks": False}, {"counts_decode": False}),
}
"""Rules that are switched off in both: options of Dynamo's ``KvRouterConfig``, and arguments of ``DynamoRules``."""


@attrs.frozen(kw_only=True)
class Setup:
    """What both serve.

    Attributes:
        requests, trace: the arrivals, in memory and in a file.
        config: of each replica.
        num_replicas: of both.
        num_runs: of Dynamo's KV router, which decides equal costs by chance.
    """

    requests: Sequence[TraceRequest]
    trace: Path
    config: ReplicaConfig
    num_replicas: int
    num_runs: int = 1

    def run_dynamo(self, who: str, *, router_mode: str, event_lag_ms: float = 0.0) -> list[Row]:
        """Return a row of Dynamo's replay; no row if it is not installed."""
        if not has_dynamo_replay():
            return []
        found, wall_s = [], []
        for _ in range(self.num_runs if router_mode == "kv_router" else 1):
            begun_s = time.perf_counter()
            summary = replay_in_dynamo(
                self.trace,
                engine_args(self.config),
                self.num_replicas,
                router_mode=router_mode,
                event_lag_ms=event_lag_ms,
            )
            wall_s.append(time.perf_counter() - begun_s)
            found.append(figures_of_dynamo(summary))
        return [_row(f"Dynamo: {who}", event_lag_ms, self.config, found, wall_s)]

    def run_kit(self, who: str, router: Router, *, event_lag_ms: float = 0.0) -> Row:
        """Return a row of this kit's simulation."""
        begun_s = time.perf_counter()
        report = serve_in_kit(
            self.requests, self.config, self.num_replicas, router=router, event_lag_s=event_lag_ms / 1e3
        )
        wall_s = time.perf_counter() - begun_s
        return _row(f"kit: {who}", event_lag_ms, self.config, [figures_of(report)], [wall_s])


def compare_round_robin(setup: Setup) -> list[Row]:
    """Serve the requests in turns by both."""
    return [*setup.run_dynamo("round robin", router_mode="round_robin"), setup.run_kit("round robin", RoundRobin())]


def compare_kv_routers(setup: Setup, event_lag_ms: float) -> list[Row]:
    """Serve the requests by Dynamo's KV router and by those of the kit."""
    rows = setup.run_dynamo("kv_router", router_mode="kv_router", event_lag_ms=event_lag_ms)
    return rows + [
        setup.run_kit(who, make(setup.config), event_lag_ms=event_lag_ms) for who, make in KIT_ROUTERS.items()
    ]


class RulesRow(msgspec.Struct, frozen=True):
    """One run of Dynamo's KV router, whose choices the kit's simulation has followed.

    Attributes:
        rules: which of them are on; a name of ``RULES``.
        event_lag_ms: what was set.
        num_decisions, num_ties: of all requests, and those between equal costs.
        num_foreign_choices: choices of Dynamo that do not cost least by ``DynamoRules``.
        theirs, ours: figures.
    """

    rules: str
    event_lag_ms: float
    num_decisions: int
    num_ties: int
    num_foreign_choices: int
    theirs: dict[str, float]
    ours: dict[str, float]


def follow_dynamo(setup: Setup, rules: str, event_lag_ms: float) -> RulesRow:
    """Serve the requests by Dynamo's KV router, then by the kit with the same choices, and check them by the rules."""
    options, arguments = RULES[rules]
    summary, choices = route_in_dynamo(
        setup.trace,
        engine_args(setup.config),
        setup.num_replicas,
        event_lag_ms=event_lag_ms,
        router_options=options,
    )
    router = DynamoRules(page_size=setup.config.page_size, choices=choices, **arguments)
    report = serve_in_kit(
        setup.requests, setup.config, setup.num_replicas, router=router, event_lag_s=event_lag_ms / 1e3
    )
    return RulesRow(
        rules,
        event_lag_ms,
        len(choices),
        router.num_ties,
        router.num_foreign_choices,
        figures_of_dynamo(summary),
        figures_of(report),
    )


def as_rules_table(rows: Sequence[RulesRow]) -> str:
    """Return rows as a Markdown table. Dynamo's figure comes first, then the kit's."""
    names = {
        "hit_rate": ("hit rate (%)", 100.0),
        "ttft_mean_ms": ("TTFT mean (s)", 1e-3),
        "tpot_mean_ms": ("TPOT mean (ms)", 1.0),
    }
    headings = [
        "rules",
        "lag",
        "decisions",
        "between equal costs",
        "not by these rules",
        *(name for name, _ in names.values()),
    ]
    lines = [" | ".join(headings), " | ".join("---" for _ in headings)]
    for row in rows:
        cells = [
            f"{factor * row.theirs[name]:.4f}, {factor * row.ours[name]:.4f}" for name, (_, factor) in names.items()
        ]
        counts = [f"{count:,}" for count in (row.num_decisions, row.num_ties, row.num_foreign_choices)]
        lines.append(" | ".join([row.rules, f"{row.event_lag_ms:g} ms", *counts, *cells]))
    return "".join(f"| {line} |\n" for line in lines)


def _row(
    who: str, event_lag_ms: float, config: ReplicaConfig, found: Sequence[Mapping[str, float]], wall_s: list[float]
) -> Row:
    figures = {name: [each[name] for each in found] for name in COLUMNS}
    return Row(who, event_lag_ms, config.kv_tokens, figures, wall_s)


def as_table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table. A cell with several runs shows the least and the largest value."""
    headings = ["router", "lag", "pool", *(f"{name} ({unit})" for name, _, unit in COLUMNS.values()), "run (s)"]
    lines = [" | ".join(headings), " | ".join("---" for _ in headings)]
    for row in rows:
        cells = [_cell([factor * value for value in row.figures[name]]) for name, (_, factor, _) in COLUMNS.items()]
        pool = f"{row.kv_tokens:,}"
        lines.append(" | ".join([row.who, f"{row.event_lag_ms:g} ms", pool, *cells, _cell([min(row.wall_s)])]))
    return "".join(f"| {line} |\n" for line in lines)


def _cell(values: Sequence[float]) -> str:
    least, most = (f"{value:,.0f}" if value >= 100 else f"{value:.3f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def main() -> int:
    """Serve a trace by both and print the table; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("what", nargs="?", choices=["round-robin", "kv", "rules"], default="round-robin")
    parser.add_argument("--requests", type=count_argument, default=1000)
    parser.add_argument("--replicas", type=count_argument, default=4)
    parser.add_argument("--page-size", type=count_argument, default=64)
    parser.add_argument(
        "--kv-tokens", type=count_argument, action="append", help="pool per replica; repeat it to compare"
    )
    parser.add_argument("--event-lag-ms", type=float, action="append", help="repeat it to compare")
    parser.add_argument(
        "--runs", type=count_argument, default=5, help="runs of Dynamo's router, which decides equal costs by chance"
    )
    options = parser.parse_args()
    try:
        _compare(options)
    except ComponentError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _compare(options: argparse.Namespace) -> None:
    if options.what == "rules" and not has_dynamo_replay():
        raise ConfigError("what", "rules", "needs Dynamo's replay", "install ai-dynamo-runtime")
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrivals.jsonl"
        requests = write_arrivals(list(open_trace(options.trace, limit=options.requests)), path)
        for kv_tokens in options.kv_tokens or [1 << 20]:
            setup = Setup(
                requests=requests,
                trace=path,
                config=replica_config(page_size=options.page_size, kv_tokens=kv_tokens),
                num_replicas=options.replicas,
                num_runs=options.runs,
            )
            lags_ms = options.event_lag_ms or [0.0]
            if options.what == "round-robin":
                rows += compare_round_robin(setup)
            elif options.what == "rules":
                found = [follow_dynamo(setup, rules, lag_ms) for rules, lag_ms in product(RULES, lags_ms)]
                sys.stdout.write(as_rules_table(found))
            else:
                for lag_ms in lags_ms:
                    rows += compare_kv_routers(setup, lag_ms)
    sys.stdout.write(as_table(rows) if rows else "")


def figures_of(report: SimulationReport) -> dict[str, float]:
    """Return the figures of a report that Dynamo has, too."""
    return {
        "finished": report.num_finished,
        "duration_s": report.duration_s,
        "hit_rate": report.hit_rate["device"],
        "ttft_mean_ms": 1e3 * report.ttft_s.mean,
        "ttft_p50_ms": 1e3 * report.ttft_s.p50,
        "ttft_p99_ms": 1e3 * report.ttft_s.p99,
        "tpot_mean_ms": 1e3 * report.tpot_s.mean,
        "tpot_p50_ms": 1e3 * report.tpot_s.p50,
        "e2e_mean_ms": 1e3 * report.e2e_s.mean,
        "output_tokens_per_s": report.output_tokens_per_s,
    }


def figures_of_dynamo(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the same figures of Dynamo's summary."""
    return {
        "finished": summary["completed_requests"],
        "duration_s": 1e-3 * summary["duration_ms"],
        "hit_rate": summary["first_admission_prefix_cache_reused_ratio"],
        "ttft_mean_ms": summary["mean_ttft_ms"],
        "ttft_p50_ms": summary["median_ttft_ms"],
        "ttft_p99_ms": summary["p99_ttft_ms"],
        "tpot_mean_ms": summary["mean_tpot_ms"],
        "tpot_p50_ms": summary["median_tpot_ms"],
        "e2e_mean_ms": summary["mean_e2e_latency_ms"],
        "output_tokens_per_s": summary["output_throughput_tok_s"],
    }


if __name__ == "__main__":
    sys.exit(main())
