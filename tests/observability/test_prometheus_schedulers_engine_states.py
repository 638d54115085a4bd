"""The states of an engine, as vLLM reports them: a sample per state, each 0 or 1."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from observability import PrometheusSink
from scheduler_components.quiesce import QuiesceState
from scheduler_components.values import LoadSnapshot, MemoryTag, QuiesceStats, SchedulerStats


def states_of(quiesce: QuiesceStats | None) -> dict[str, float | None]:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, vllm_names=True)
    labels = (("dp_rank", "0"),)
    sink.record(SchedulerStats(labels, LoadSnapshot(), quiesce=quiesce))
    return {
        state: registry.get_sample_value(f"vllm:{name}", dict(labels) | {"sleep_state": state})
        for name in ("engine_sleep_state",)
        for state in ("awake", "weights_offloaded", "discard_all")
    }


@pytest.mark.parametrize(
    ("state", "samples"),
    [
        (QuiesceState(), (1, 0, 0)),
        (QuiesceState(released=frozenset({MemoryTag.KV_CACHE})), (0, 0, 0)),
        (QuiesceState(released=frozenset(MemoryTag)), (0, 1, 0)),
        (QuiesceState(released=frozenset(MemoryTag), has_weights=False), (0, 0, 1)),
        (QuiesceState(has_weights=False), (0, 0, 1)),
    ],
)
def test_each_state_is_told(state: QuiesceState, samples: tuple[int, int, int]) -> None:
    assert tuple(states_of(state.stats()).values()) == samples


def test_an_engine_that_takes_no_orders_tells_none() -> None:
    assert set(states_of(None).values()) == {None}
