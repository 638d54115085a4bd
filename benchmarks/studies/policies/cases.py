"""The runs of the study. A factor is a section of the page: what varies in it, and what stays.

A run is a dictionary of settings and nothing else. Its names are fields of ``SimulationConfig``, ``ReplicaConfig``,
``TierConfig`` and ``HiCachePolicy``, and ``workload``, ``router``, ``reservation`` and ``device``. ``STANDARD`` has the
settings that all runs begin with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TypeAlias

import attrs

Setting: TypeAlias = int | float | str

STANDARD: Mapping[str, Setting] = {
    "num_replicas": 4,
    "router": "round-robin",
    "page_size": 128,
    "kv_tokens": 262_144,
    "max_running_requests": 64,
    "max_prefill_tokens": 4096,
    "chunk_tokens": 2048,
    "batch_mode": "mixed",
    "reservation": "adaptive from 0.7",
    "schedule_policy": "fcfs",
    "preemption_policy": "latest-arrival",
    "speed": 0.75,
    "host_tokens": 0,
    "load_gb_per_s": 25.0,
    "storage_tokens": 0,
    "storage_total_gb_per_s": 0.0,
    "prefetch": "wait_complete",
    "event_lag_s": 0.0,
    "load_lag_s": 0.05,
    "load_interval_s": 0.1,
    "ttft_slo_s": 2.0,
    "tpot_slo_s": 0.05,
}
"""Settings of all runs that serve on replicas, save for what a factor changes."""


@attrs.frozen(kw_only=True)
class Case:
    """One run.

    Attributes:
        factor: name of the factor.
        varied: what distinguishes it from the other runs of the factor.
        fixed: what all runs of the factor have instead of the standard settings.
        standard: settings that it begins with.
    """

    factor: str
    varied: dict[str, Setting]
    fixed: dict[str, Setting]
    standard: Mapping[str, Setting] = attrs.field(default=STANDARD, repr=False)

    @property
    def settings(self) -> dict[str, Setting]:
        """All settings of the run."""
        return {**self.standard, **self.fixed, **self.varied}

    @property
    def workload(self) -> str | None:
        """Name of its workload; None for a run that makes its own requests."""
        name = self.settings.get("workload")
        return None if name is None else str(name)

    @property
    def title(self) -> str:
        """Name the run, for its progress."""
        return f"{self.factor}: {', '.join(f'{name} {value}' for name, value in self.varied.items())}"


@attrs.frozen(kw_only=True)
class Factor:
    """One section of the page.

    Attributes:
        name: of the factor.
        fixed: what all its runs have instead of the standard setting.
        varied: the values of each setting that varies. All combinations are run.
        standard: settings that the runs begin with.
    """

    name: str
    fixed: Mapping[str, Setting]
    varied: Mapping[str, tuple[Setting, ...]]
    standard: Mapping[str, Setting] = attrs.field(default=STANDARD, repr=False)

    def cases(self) -> Iterator[Case]:
        """Yield the runs: the last varied setting changes fastest."""
        for values in product(*self.varied.values()):
            varied = dict(zip(self.varied, values, strict=True))
            yield Case(factor=self.name, varied=varied, fixed=dict(self.fixed), standard=self.standard)


_BOTH = ("trace", "conversations")

_OFFLINE: Mapping[str, Setting] = {
    "max_running_requests": 72,
    "workload": "offline",
    "num_replicas": 1,
    "speed": 1.0,
    "page_size": 16,
    "max_prefill_tokens": 8192,
    "chunk_tokens": 8192,
}
"""vLLM's page size and token budget."""

_DOCUMENTS: Mapping[str, Setting] = {"workload": "documents", "num_replicas": 1}

_STORED: Mapping[str, Setting] = {"workload": "conversations", "host_tokens": 1_048_576, "storage_tokens": 4_194_304}

FACTORS: tuple[Factor, ...] = (
    Factor(
        name="policies",
        fixed={},
        varied={
            "workload": _BOTH,
            "schedule_policy": ("fcfs", "lpm", "dfs-weight", "shortest-prefill-first", "hrrn"),
        },
    ),
    Factor(
        name="seeds",
        fixed={"speed": 0.4},
        varied={
            "workload": tuple(f"conversations:{seed}" for seed in range(1, 4)),
            "schedule_policy": ("fcfs", "lpm"),
        },
    ),
    Factor(
        name="load",
        fixed=_DOCUMENTS,
        varied={
            "schedule_policy": ("fcfs", "lpm", "hrrn"),
            "speed": (1.0, 0.75, 0.5),
        },
    ),
    Factor(
        name="pool",
        fixed={**_DOCUMENTS, "speed": 0.5},
        varied={"schedule_policy": ("fcfs", "lpm"), "kv_tokens": (65_536, 131_072, 524_288)},
    ),
    Factor(
        name="blocking",
        fixed={"workload": "trace", "kv_tokens": 131_072},
        varied={"schedule_policy": ("fcfs", "shortest-prefill-first")},
    ),
    Factor(
        name="preemption",
        fixed={**_OFFLINE, "reservation": "none"},
        varied={
            "preemption_policy": ("latest-arrival", "least-recomputation", "longest-remaining"),
            "kv_tokens": (44_800, 25_600, 12_800, 6_400),
        },
    ),
    Factor(
        name="reservation",
        fixed={**_OFFLINE, "kv_tokens": 12_800},
        varied={"reservation": ("none", "adaptive from 0", "adaptive from 0.7", "full")},
    ),
    Factor(
        name="routers",
        fixed={},
        varied={"workload": _BOTH, "router": ("round-robin", "least-loaded", "kv", "kv without load")},
    ),
    Factor(
        name="event-lag",
        fixed={"workload": "conversations"},
        varied={
            "router": ("kv", "kv without speculation"),
            "event_lag_s": (0.0, 0.05, 0.2, 1.0),
        },
    ),
    Factor(
        name="event-lag-trace",
        fixed={"workload": "trace", "router": "kv"},
        varied={"event_lag_s": (0.0, 1.0)},
    ),
    Factor(
        name="tiers",
        fixed={},
        varied={"workload": _BOTH, "host_tokens": (0, 262_144, 1_048_576)},
    ),
    Factor(
        name="tier-bandwidth",
        fixed={"workload": "conversations", "host_tokens": 1_048_576},
        varied={"load_gb_per_s": (25.0, 1.0)},
    ),
    Factor(
        name="storage",
        fixed={},
        varied={"workload": _BOTH, "host_tokens": (262_144, 1_048_576), "storage_tokens": (0, 4_194_304)},
    ),
    Factor(
        name="storage-prefetch",
        fixed=_STORED,
        varied={"prefetch": ("best_effort", "wait_complete")},
    ),
    Factor(
        name="storage-bandwidth",
        fixed=_STORED,
        varied={"storage_total_gb_per_s": (0.0, 12.5, 2.5)},
    ),
    Factor(
        name="prefill-delay",
        standard={"device": "dp-attention"},
        fixed={"dp_size": 4, "num_requests": 200, "prompt_tokens": 500, "output_tokens": 100},
        varied={"rate_per_s": (10.0, 40.0), "max_delay_steps": (0, 10, 30)},
    ),
)
"""The study, in the order of the page."""


def make_cases() -> list[Case]:
    """Return all runs, in the order of the page."""
    return [case for factor in FACTORS for case in factor.cases()]
