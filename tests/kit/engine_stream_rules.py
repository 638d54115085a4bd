"""The gates and port plans of SGLang 0.5.23 and vLLM 0.32, transcribed from their sources as data for the checks.

``tests/engines/test_sglang_stream_rules.py`` and ``test_vllm_stream_rules.py`` compare them with the engines
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from scheduler_components import ParallelState
from scheduler_components.testing import TopologyRank

__all__ = [
    "SGLANG_EVENTS",
    "SGLANG_FORWARD_PASSES",
    "SGLANG_KV_METRICS",
    "SGLANG_METRICS",
    "VLLM_EVENTS",
    "EnginePlan",
    "RuleGate",
    "offset_sglang_endpoint",
    "offset_vllm_endpoint",
]


@attrs.frozen
class RuleGate:
    """A ``RankGate`` of two functions of the ranks and sizes."""

    rule: Callable[[ParallelState], bool]
    index: Callable[[ParallelState], int]

    def __call__(self, rank: TopologyRank) -> int | None:
        return self.index(rank.parallel) if self.rule(rank.parallel) else None


def is_first_of_each_axis(parallel: ParallelState) -> bool:
    """SGLang's ``is_kv_publisher_rank`` (``disaggregation/kv_events.py``)."""
    return parallel.pp_rank == 0 and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def select_by_mode(parallel: ParallelState) -> int:
    """SGLang's ``select_kv_publisher_dp_rank`` (``disaggregation/kv_events.py``)."""
    return parallel.attn_dp_rank if parallel.attn_dp_size > 1 else parallel.dp_rank or 0


def dp_rank_or_zero(parallel: ParallelState) -> int:
    """The label of SGLang's ``emit_kv_metrics`` and of its forward-pass metrics."""
    return parallel.dp_rank if parallel.dp_rank is not None else 0


SGLANG_EVENTS = RuleGate(is_first_of_each_axis, select_by_mode)
SGLANG_KV_METRICS = RuleGate(is_first_of_each_axis, dp_rank_or_zero)
SGLANG_METRICS = RuleGate(lambda rank: rank.attn_tp_rank == 0 and rank.attn_cp_rank == 0, select_by_mode)
"""``SchedulerMetricsCollector.init_new``: each pipeline stage has its own series, with a label ``pp_rank``."""

SGLANG_FORWARD_PASSES = RuleGate(
    lambda rank: rank.attn_tp_rank == 0 and rank.pp_rank == rank.pp_size - 1, dp_rank_or_zero
)
"""``_init_fpm`` (``scheduler_components/metrics_reporter.py``): all context-parallel ranks bind one address."""

VLLM_EVENTS = RuleGate(is_first_of_each_axis, select_by_mode)
"""One scheduler per engine core, with ``data_parallel_index`` (``v1/core/sched/scheduler.py``)."""


def offset_sglang_endpoint(endpoint: str | None, rank: int) -> str | None:
    """``ZmqEventPublisher.offset_endpoint_port`` of SGLang 0.5.23."""
    if not endpoint or rank == 0:
        return endpoint
    if "inproc" in endpoint:
        return f"{endpoint}_dp{rank}"
    if "tcp" in endpoint:
        base, _, port = endpoint.rpartition(":")
        return f"{base}:{int(port) + rank}"
    raise ValueError("Invalid endpoint: must contain 'inproc' or 'tcp'")


def offset_vllm_endpoint(endpoint: str | None, rank: int) -> str | None:
    """``ZmqEventPublisher.offset_endpoint_port`` of vLLM 0.32: as SGLang's, but port 0 is left to the system."""
    if endpoint and rank and "inproc" not in endpoint and "tcp" in endpoint and int(endpoint.rpartition(":")[2]) == 0:
        return endpoint
    return offset_sglang_endpoint(endpoint, rank)


@attrs.frozen
class EnginePlan:
    """A ``PortPlanner`` of an engine that offsets each base by itself. Its readers compute base + rank."""

    gate: RuleGate
    offset: Callable[[str | None, int], str | None]

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        index = self.gate(rank)
        if index is None:
            return {}
        return {kind: self.offset(base, index) or "" for kind, base in bases.items()}

    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        """What the engine's ``/server_info`` makes a router compute."""
        dialed = {}
        for kind, base in bases.items():
            transport, _, address = base.partition("://")
            at, _, port = address.rpartition(":")
            if transport != "tcp":
                dialed[kind] = self.offset(base, stream) or ""
                continue
            reached = (f"[{host}]" if ":" in host else host) if at in ("*", "0.0.0.0", "[::]") else at
            dialed[kind] = f"tcp://{reached}:{int(port) + stream}"
        return dialed
