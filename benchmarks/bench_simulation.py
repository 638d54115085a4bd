"""Time the simulation of 1,000 requests over 4 replicas, next to Dynamo's offline replay in Rust.

The requests are generated, or those of ``BENCH_TRACE=/path/to/trace.jsonl`` in Mooncake's format. With a recorded trace
and full turns, all of its requests are also simulated once over 64 replicas, per router.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.studies.dynamo_replay import (
    engine_args,
    has_dynamo_replay,
    replay_in_dynamo,
    replica_config,
    serve_in_kit,
    write_arrivals,
)
from benchmarks.studies.simulation_cost import measure_simulation
from scheduler_engine.cli.simulate_trace_command import ROUTERS
from scheduler_engine.simulation import (
    ConversationWorkload,
    SimulationConfig,
    TraceRequest,
    generate_conversations,
    open_trace,
)

NAME = "simulation"
_NUM_REQUESTS = 1000
_NUM_REPLICAS = 4
_GOAL_S = 15.0
_MANY_REPLICAS = 64
_WHOLE_GOAL_S = 240.0
_WHOLE_GOAL_MB = 1000.0
_DYNAMO_MODES = {"round-robin": "round_robin", "kv": "kv_router"}


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # the peer is a library
    """Time whole runs, in turns with Dynamo's."""
    trace = os.environ.get("BENCH_TRACE")
    rows = _time_a_thousand(scale, list(_requests(trace, scale.of(_NUM_REQUESTS))))
    return rows + _time_all(Path(trace)) if trace and scale.share == 1 else rows


def _time_a_thousand(scale: Scale, requests: Sequence[TraceRequest]) -> list[Measurement]:
    """Time the first requests, with each router in turns with that of Dynamo."""
    config, rows = replica_config(page_size=64, kv_tokens=1 << 20), []
    with tempfile.TemporaryDirectory(prefix="simulation-") as folder:
        path = Path(folder) / "arrivals.jsonl"
        requests = write_arrivals(requests, path)
        of_replicas = SimulationConfig(replica=config)
        for name, make_router in ROUTERS.items():
            mode, ours, theirs = _DYNAMO_MODES.get(name), list[float](), list[float]()
            for _ in range(scale.turns):
                router = make_router(of_replicas)
                ours.append(_seconds(partial(serve_in_kit, requests, config, _NUM_REPLICAS, router=router)))
                if mode and has_dynamo_replay():
                    replay = partial(replay_in_dynamo, path, engine_args(config), _NUM_REPLICAS, router_mode=mode)
                    theirs.append(_seconds(replay))
            what = f"{len(requests):,} requests over {_NUM_REPLICAS} replicas, {name}"
            rows.append(Measurement(NAME, what, "s", ours, {"Dynamo": theirs} if theirs else {}, Goal(_GOAL_S)))
    return rows


def _time_all(trace: Path) -> list[Measurement]:
    """Time all requests of a trace, once per router."""
    rows = []
    for router in ("least-loaded", "kv"):
        cost = measure_simulation(trace, num_replicas=_MANY_REPLICAS, router=router)
        what = f"{cost.num_finished:,} requests over {_MANY_REPLICAS} replicas, {router}"
        rows.append(Measurement(NAME, what, "s", [cost.wall_s], {}, Goal(_WHOLE_GOAL_S)))
        rows.append(Measurement(NAME, f"{what}: memory", "MB", [cost.peak_bytes / 1e6], {}, Goal(_WHOLE_GOAL_MB)))
    return rows


def _seconds(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def _requests(trace: str | None, count: int) -> Sequence[TraceRequest]:
    if trace:
        return list(open_trace(Path(trace), limit=count))
    return list(generate_conversations(_workload(count)))


def _workload(count: int) -> ConversationWorkload:
    """Return three requests per second of some 11,000 tokens, with 340 tokens of output, as in Mooncake's trace."""
    return ConversationWorkload(
        num_requests=count, seed=27, mean_message_tokens=5_000.0, mean_output_tokens=340.0, mean_think_s=30.0
    )
