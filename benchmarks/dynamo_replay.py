"""Serve a trace in virtual time by this kit and by Dynamo's offline replay (ai-dynamo-runtime 1.6.1), side by side::

    python -m benchmarks.dynamo_replay conversation_trace.jsonl --requests 1000 --replicas 4

Both get the same arrivals, rounded to milliseconds, the same pool and the same cost: that of Dynamo's mocker, which
``MockerCost`` computes from what the kit's scheduler has batched. Both are first come first served, count decodes in
the token budget of a step as vLLM does, and reserve nothing for future output.
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

import attrs

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
from scheduler_components.values import BatchShape, ScheduledBatch

__all__ = ["has_dynamo_replay", "replay_in_dynamo", "serve_in_kit", "write_arrivals"]

_BLOCK_TOKENS = 512


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


def serve_in_kit(requests: Sequence[TraceRequest], config: ReplicaConfig, num_replicas: int) -> SimulationReport:
    """Serve requests by this kit, in turns."""
    simulation = Simulation(
        config=SimulationConfig(replica=config, num_replicas=num_replicas), router=RoundRobin(), arrivals=requests
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
    return dict(found.summary)


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
        path = Path(folder) / "arrivals.jsonl"
        requests = write_arrivals(list(open_trace(options.trace, limit=options.requests)), path)
        begun_s = time.perf_counter()
        report = serve_in_kit(requests, config, options.replicas)
        ours_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        summary = replay_in_dynamo(path, engine_args(config), options.replicas)
        theirs_s = time.perf_counter() - begun_s
    sys.stdout.write(f"this kit, {ours_s:.2f} s: {json.dumps(_figures(report))}\n")
    sys.stdout.write(f"Dynamo, {theirs_s:.2f} s: {json.dumps(_figures_of_dynamo(summary))}\n")


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


def _figures_of_dynamo(summary: Mapping[str, Any]) -> dict[str, float]:
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
    main()
