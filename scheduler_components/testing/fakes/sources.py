"""Sources whose answers are plain attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_components.kv_events.events import KVCacheEvent
from scheduler_components.load.snapshot import (
    DisaggregationLoad,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)

__all__ = ["FakeLoad", "FakeParts", "FakePool", "FakeQueues", "FakeRates", "FakeRequest", "ScriptedEvents"]


@dataclass
class FakeRequest:
    """A ``QueuedRequest``. Requests of equal counts are equal, so that a queue which compares them is caught."""

    num_input_tokens: int = 100
    num_cached_tokens: int = 0


@dataclass
class FakeQueues:
    """A ``QueueSource``."""

    running: Any = field(default_factory=list)
    waiting: Any = field(default_factory=list)
    max_running_requests: int = 8
    num_chunked_tokens_left: int = 0


@dataclass
class FakePool:
    """A ``PoolSource``."""

    page_size: int = 16
    capacity_tokens: int = 1600
    used_tokens: int = 400


@dataclass
class FakeRates:
    """A ``RateSource``."""

    gen_throughput: float = 12.5
    cache_hit_rate: float = 0.75


@dataclass
class FakeParts:
    """A ``LoadPartsSource``."""

    queues: QueueLoad | None = None
    disaggregation: DisaggregationLoad | None = None
    lora: LoraLoad | None = None
    speculative: SpeculativeLoad | None = None
    memory: MemoryLoad | None = None

    def queue_load(self) -> QueueLoad | None:
        return self.queues

    def disaggregation_load(self) -> DisaggregationLoad | None:
        return self.disaggregation

    def lora_load(self) -> LoraLoad | None:
        return self.lora

    def speculative_load(self) -> SpeculativeLoad | None:
        return self.speculative

    def memory_load(self) -> MemoryLoad | None:
        return self.memory


@dataclass
class FakeLoad:
    """A ``LoadSource``."""

    load: LoadSnapshot = field(default_factory=LoadSnapshot)

    def get_loads(self) -> LoadSnapshot:
        return self.load


class ScriptedEvents:
    """A ``KvEventSource`` that gives one list of events a drain, then nothing."""

    def __init__(self, *steps: Sequence[KVCacheEvent]) -> None:
        self.steps = list(steps)

    def take_events(self) -> Sequence[KVCacheEvent]:
        return self.steps.pop(0) if self.steps else ()
