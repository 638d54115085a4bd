"""What ``/v1/loads`` says: load snapshots as JSON values.

Shape and names are SGLang's (0.5.x ``/v1/loads``), with the ``aggregate`` and ``dp_rank_count`` that its earlier
releases sent and gateways still read. The kit adds ``sequence``, ``timestamp`` and ``age_s`` to every rank's load, so
that a dispatcher can tell an old report from a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from scheduler_components.errors import ConfigError
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["SECTIONS", "build_load_report", "parse_include", "select_ranks"]

SECTIONS = {
    "memory": "memory",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
    "queues": "queues",
}
"""Word of ``include`` to the key of the section; the core fields are always sent."""

_VALID = ", ".join(("core", *SECTIONS, "all"))


def parse_include(texts: Iterable[str]) -> frozenset[str]:
    """Read the ``include`` parameters: words split by commas, in any number of parameters; none means all.

    Raises:
        ConfigError: a word is none of the sections.
    """
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    for word in words:
        if word not in SECTIONS and word not in ("core", "all"):
            raise ConfigError("include", word, "is not a section", f"choose from {_VALID}")
    if not words or "all" in words:
        return frozenset(SECTIONS)
    return frozenset(words) - {"core"}


def select_ranks(loads: Sequence[LoadSnapshot], dp_rank: str | None) -> list[LoadSnapshot]:
    """Return the loads in the order of their ranks: all, or that of the one rank which a client wrote.

    Raises:
        ConfigError: ``dp_rank`` is not a number, or no such rank has reported.
    """
    ordered = sorted(loads, key=lambda load: load.dp_rank)
    if dp_rank is None:
        return ordered
    if not (dp_rank.isascii() and dp_rank.isdecimal()):
        raise ConfigError("dp_rank", dp_rank, "is not a rank", "give a number from 0, or leave it out for all ranks")
    selected = [load for load in ordered if str(load.dp_rank) == dp_rank]
    if not selected:
        known = ", ".join(str(load.dp_rank) for load in ordered) or "none so far"
        raise ConfigError("dp_rank", dp_rank, "has not reported", f"ranks that have: {known}")
    return selected


def build_load_report(
    loads: Sequence[LoadSnapshot], include: frozenset[str], *, now: float, version: str
) -> dict[str, Any]:
    """Return the answer for ``loads``, one a DP rank, as values that JSON knows.

    Args:
        loads: newest snapshot of each rank.
        include: from ``parse_include``.
        now: wall-clock seconds since the epoch.
        version: of the engine.
    """
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        "version": version,
        "dp_rank_count": len(loads),
        "loads": [_one_load(load, include, now) for load in loads],
        "aggregate": _aggregate(loads),
    }


def _one_load(load: LoadSnapshot, include: frozenset[str], now: float) -> dict[str, Any]:
    report: dict[str, Any] = {
        "dp_rank": load.dp_rank,
        "sequence": load.sequence,
        "timestamp": load.timestamp,
        "age_s": round(max(0.0, now - load.timestamp), 3),
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_pending_tokens": load.num_pending_tokens,
        "num_waiting_uncached_tokens": load.num_waiting_uncached_tokens,
        "num_used_tokens": load.num_used_tokens,
        "num_total_tokens": load.num_total_tokens,
        "max_total_num_tokens": load.max_total_num_tokens,
        "max_running_requests": load.max_running_requests,
        "token_usage": round(load.token_usage, 4),
        "gen_throughput": round(load.gen_throughput, 2),
        "cache_hit_rate": round(load.cache_hit_rate, 4),
        "utilization": round(load.utilization, 4),
    }
    for word, key in SECTIONS.items():
        section = getattr(load, key)
        if word in include and section is not None:
            report[key] = msgspec.to_builtins(section)
    return report


def _aggregate(loads: Sequence[LoadSnapshot]) -> dict[str, Any]:
    """Sum counts and average shares over ranks; a gateway takes them as they are."""
    ranks = max(1, len(loads))
    running = sum(load.num_running_reqs for load in loads)
    waiting = sum(load.num_waiting_reqs for load in loads)
    return {
        "total_running_reqs": running,
        "total_waiting_reqs": waiting,
        "total_reqs": running + waiting,
        "total_used_tokens": sum(load.num_used_tokens for load in loads),
        "total_tokens": sum(load.num_total_tokens for load in loads),
        "avg_token_usage": round(sum(load.token_usage for load in loads) / ranks, 4),
        "avg_throughput": round(sum(load.gen_throughput for load in loads) / ranks, 2),
        "avg_utilization": round(sum(load.utilization for load in loads) / ranks, 4),
    }
