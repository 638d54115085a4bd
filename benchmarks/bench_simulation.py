"""Time the simulation of 1,000 requests over 4 replicas, next to Dynamo's offline replay in Rust.

The requests are generated, or those of ``BENCH_TRACE=/path/to/trace.jsonl`` in Mooncake's format.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.dynamo_replay import (
    engine_args,
    has_dynamo_replay,
    replay_in_dynamo,
    replica_config,
    serve_in_kit,
    write_arrivals,
)
from benchmarks.measure import Goal, Measurement, Scale
from scheduler_components.simulation import (
    ConversationWorkload,
    TraceRequest,
    generate_conversations,
    open_trace,
)

NAME = "simulation"
_NUM_REQUESTS = 1000
_NUM_REPLICAS = 4
_GOAL_S = 15.0


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # noqa: ARG001 - the peer is a library
    """Time whole runs, in turns with Dynamo's."""
    num_requests, config = scale.of(_NUM_REQUESTS), replica_config(page_size=64, kv_tokens=1 << 20)
    with tempfile.TemporaryDirectory(prefix="simulation-") as folder:
        path = Path(folder) / "arrivals.jsonl"
        requests = write_arrivals(_requests(num_requests), path)
        ours, theirs = list[float](), list[float]()
        for _ in range(scale.turns):
            ours.append(_seconds(lambda: serve_in_kit(requests, config, _NUM_REPLICAS)))
            if has_dynamo_replay():
                theirs.append(_seconds(lambda: replay_in_dynamo(path, engine_args(config), _NUM_REPLICAS)))
    what = f"{num_requests:,} requests over {_NUM_REPLICAS} replicas"
    return [Measurement(NAME, what, "s", ours, {"Dynamo": theirs} if theirs else {}, Goal(_GOAL_S))]


def _seconds(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def _requests(count: int) -> list[TraceRequest]:
    path = os.environ.get("BENCH_TRACE")
    return list(open_trace(Path(path), limit=count)) if path else list(generate_conversations(_workload(count)))


def _workload(count: int) -> ConversationWorkload:
    """Return three requests per second of some 11,000 tokens, with 340 tokens of output, as in Mooncake's trace."""
    return ConversationWorkload(
        num_requests=count, seed=27, mean_message_tokens=5_000.0, mean_output_tokens=340.0, mean_think_s=30.0
    )
