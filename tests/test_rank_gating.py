"""In any engine, exactly one rank of each KV cache publishes, reports its metrics and has its index.

The public ``TOPOLOGY_CHECKS`` run each publishing component as a gate: a rank speaks if anything leaves its component.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from scheduler_components import (
    AllBlocksCleared,
    LoadInquirer,
    LoadPublisher,
    MetricsEmitter,
    ParallelState,
    SchedulerKvEventsPublisher,
)
from scheduler_components.forward_pass_publisher import ForwardPassPublisher
from scheduler_components.kv_events import (
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    open_event_publisher,
)
from scheduler_components.testing import (
    TOPOLOGY_CHECKS,
    ConformanceError,
    FakePool,
    FakeQueues,
    ListEventSink,
    TopologyRank,
)
from scheduler_components.testing.fakes import FakeLoad, ListSink, ScriptedEventSource
from scheduler_components.testing.interfaces import RankGate
from scheduler_components.values import ForwardPassMetrics, KvMetrics, LoadSnapshot, SchedulerStats


@attrs.define
class ComponentGate:
    """A ``RankGate`` that runs a component on a rank, once per rank.

    ``run`` returns the index in each thing that left.
    """

    run: Callable[[ParallelState], Sequence[int | None]]
    answers: dict[ParallelState, Sequence[int | None]] = attrs.field(factory=dict)

    def __call__(self, rank: TopologyRank) -> int | None:
        parallel = rank.parallel
        if parallel not in self.answers:
            self.answers[parallel] = self.run(parallel)
        answers = self.answers[parallel]
        if not answers:
            return None
        [index] = answers
        assert index is not None
        return index


def publish_events(parallel: ParallelState) -> list[int | None]:
    sink, source = ListEventSink(), ScriptedEventSource([AllBlocksCleared()])
    SchedulerKvEventsPublisher(parallel=parallel, source=source, sink=sink).publish_kv_events()
    assert source.steps == []  # drained on every rank
    return [batch.attn_dp_rank for batch in sink.batches]


class OpenedPublisher(NullEventPublisher):
    """Remembers for which cache it was opened."""

    def __init__(self, attn_dp_rank: int, **_: object) -> None:
        super().__init__(attn_dp_rank)
        self.cache = attn_dp_rank


class Publishers(EventPublisherFactory):
    """A registry of its own, so that no other test sees what is registered."""


Publishers.register_publisher("opened", OpenedPublisher)
OPENED = KVEventsConfig(publisher="opened", endpoint="tcp://127.0.0.1:5557")


def open_publisher(parallel: ParallelState) -> list[int | None]:
    publisher = open_event_publisher(OPENED, parallel=parallel, factory=Publishers)
    return [publisher.cache] if isinstance(publisher, OpenedPublisher) else []


def send_kv_metrics(parallel: ParallelState) -> list[int | None]:
    sink = ListSink[KvMetrics]()
    load = FakeLoad(LoadSnapshot(dp_rank=parallel.kv_stream_index, page_size=1))
    SchedulerKvEventsPublisher(
        parallel=parallel, source=ScriptedEventSource(), sink=NullEventPublisher(0), load=load, metrics_sink=sink
    ).emit_kv_metrics()
    return [metrics.data_parallel_rank for metrics in sink.sent]


def report_statistics(parallel: ParallelState) -> list[int | None]:
    sink = ListSink[SchedulerStats]()
    MetricsEmitter(parallel=parallel, load=FakeLoad(LoadSnapshot()), sink=sink).emit()
    return [int(dict(stats.labels)["dp_rank"]) for stats in sink.sent]


def publish_load(parallel: ParallelState) -> list[int | None]:
    sink = ListSink[LoadSnapshot]()
    load = LoadInquirer(parallel=parallel, queues=FakeQueues(), pool=FakePool())
    LoadPublisher(parallel=parallel, load=load, sinks=(sink,)).publish_load()
    return [snapshot.dp_rank for snapshot in sink.sent]


def publish_forward_passes(parallel: ParallelState) -> list[int | None]:
    sink = ListSink[ForwardPassMetrics]()
    publisher = ForwardPassPublisher(parallel=parallel, queues=FakeQueues(), sink=sink)
    publisher.publish_forward_pass((), 0.1)
    return [metrics.dp_rank for metrics in sink.sent]


COMPONENTS = [
    publish_events,
    open_publisher,
    send_kv_metrics,
    report_statistics,
    publish_load,
    publish_forward_passes,
]


@pytest.mark.parametrize("run", COMPONENTS, ids=lambda run: run.__name__)
def test_one_rank_of_each_cache_speaks(run: Callable[[ParallelState], Sequence[int | None]]) -> None:
    gate: RankGate = ComponentGate(run)
    for check in TOPOLOGY_CHECKS:
        check(gate)


BROKEN: dict[str, tuple[str, Callable[[ParallelState], Any]]] = {
    "ignores pipeline stages": (
        "owns_kv_stream",
        lambda rank: rank.attn_tp_rank == 0 and rank.attn_cp_rank == 0,
    ),
    "ignores attention-CP": ("owns_kv_stream", lambda rank: rank.pp_rank == 0 and rank.attn_tp_rank == 0),
    "ignores attention-TP": ("owns_kv_stream", lambda rank: rank.pp_rank == 0 and rank.attn_cp_rank == 0),
    "the first rank of all speaks": ("owns_kv_stream", lambda rank: rank.pp_rank == 0 and rank.tp_rank == 0),
    "the index is dp_rank": ("kv_stream_index", lambda rank: rank.dp_rank or 0),
    "the index is the attention's": ("kv_stream_index", lambda rank: rank.attn_dp_rank),
}


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("run", COMPONENTS, ids=lambda run: run.__name__)
def test_each_component_is_found_with_a_broken_rank(
    run: Callable[[ParallelState], Sequence[int | None]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute, broken = BROKEN[name]
    monkeypatch.setattr(ParallelState, attribute, property(broken))
    gate = ComponentGate(run)
    with pytest.raises(ConformanceError):
        for check in TOPOLOGY_CHECKS:
            check(gate)
