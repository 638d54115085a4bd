"""Serve a trace in virtual time by this kit and by Dynamo's offline replay (ai-dynamo-runtime 1.6.1), with one pool and one
cost model, as far as both allow::

    python -m benchmarks.dynamo_replay conversation_trace.jsonl --requests 1000 --replicas 4

Both get the same arrivals, rounded to milliseconds, first come first served, decodes counted in the token budget of a
step as in vLLM, and no reservation for future output. Dynamo interpolates a table of this kit's cost model. What the
table cannot express: Dynamo adds the times of the prefills and decodes of a step, so the base cost is part of the decode
table alone, and prefills read their context for nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_components.simulation import (
    CostModel,
    ReplicaConfig,
    RoundRobin,
    Simulation,
    SimulationConfig,
    SimulationReport,
    TraceRequest,
    open_trace,
    parse_trace,
)

__all__ = ["has_dynamo_replay", "replay_in_dynamo", "serve_in_kit", "write_arrivals"]

_BLOCK_TOKENS = 512
_CONTEXTS = (1, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 262_144)
_ACTIVE = tuple(sorted({0, *_CONTEXTS, *(2**power for power in range(18, 24))}))


def has_dynamo_replay() -> bool:
    """Return whether Dynamo's replay is installed."""
    return importlib.util.find_spec("dynamo") is not None


def write_arrivals(requests: Sequence[TraceRequest], path: Path) -> list[TraceRequest]:
    """Write requests with their spread arrivals, rounded to milliseconds, and return what a reader finds in the file."""
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
    )


def serve_in_kit(requests: Sequence[TraceRequest], config: ReplicaConfig, num_replicas: int) -> SimulationReport:
    """Serve requests by this kit, in turns."""
    simulation = Simulation(
        config=SimulationConfig(replica=config, num_replicas=num_replicas), router=RoundRobin(), arrivals=requests
    )
    for _ in simulation.run():
        pass
    return simulation.report()


def write_cost_table(cost: CostModel, path: Path) -> None:
    """Write the cost model as a profile that Dynamo's mocker interpolates, in milliseconds."""
    tokens = np.array([0.0, 1e6])
    decode = [
        [
            cost.base_ms
            + 1e-3 * cost.decode_us_per_request * max(1.0, active / context)
            + 1e-6 * cost.context_us_per_1k_tokens * active
            for context in _CONTEXTS
        ]
        for active in _ACTIVE
    ]
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=tokens * cost.prefill_us_per_token * 1e-3,
        decode_active_kv_tokens=np.array(_ACTIVE, dtype=float),
        decode_context_length=np.array(_CONTEXTS, dtype=float),
        decode_itl=np.array(decode),
    )


def engine_args(config: ReplicaConfig, profile: Path) -> dict[str, object]:
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
            "planner_profile_data": str(profile),
        }
    }


def replay_in_dynamo(trace: Path, arguments: Mapping[str, object], num_replicas: int) -> Mapping[str, Any]:
    """Serve a trace by Dynamo's replay, in turns; return its summary."""
    replay = importlib.import_module("dynamo._core").run_mocker_trace_replay
    found = replay(
        [str(trace)],
        extra_engine_args=arguments,
        num_workers=num_replicas,
        replay_mode="offline",
        router_mode="round_robin",
        trace_block_size=_BLOCK_TOKENS,
    )
    summary = found.summary
    return dict(summary() if callable(summary) else summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=1 << 20)
    options = parser.parse_args()
    config = replica_config(page_size=options.page_size, kv_tokens=options.kv_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path, profile = Path(folder) / "arrivals.jsonl", Path(folder) / "profile.npz"
        requests = write_arrivals(list(open_trace(options.trace, limit=options.requests)), path)
        write_cost_table(config.cost, profile)
        begun_s = time.perf_counter()
        report = serve_in_kit(requests, config, options.replicas)
        ours_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        summary = replay_in_dynamo(path, engine_args(config, profile), options.replicas)
        theirs_s = time.perf_counter() - begun_s
    sys.stdout.write(f"this kit, {ours_s:.2f} s: {json.dumps(_figures(report))}\n")
    sys.stdout.write(f"Dynamo, {theirs_s:.2f} s: {json.dumps(summary, default=str)}\n")


def _figures(report: SimulationReport) -> dict[str, float]:
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
        "preemptions": report.num_retractions,
    }


if __name__ == "__main__":
    main()
