"""Property: in any engine, exactly one rank of each KV cache publishes, reports its metrics and has its index.

A whole engine runs each component: all pipeline stages, all tensor-parallel ranks, all worlds of its data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

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
from scheduler_components.testing import FakePool, FakeQueues, ListEventSink
from scheduler_components.testing.fakes import FakeLoad, ListSink, ScriptedEventSource
from scheduler_components.values import ForwardPassMetrics, KvMetrics, LoadSnapshot, SchedulerStats

sizes = st.sampled_from([1, 2, 3])


@attrs.frozen
class Engine:
    """All ranks of an engine, and the index of the KV cache of each."""

    num_caches: int
    ranks: tuple[tuple[ParallelState, int], ...]


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Draw engines with DP attention (whose `dp_rank` may be None), with separate worlds, or with neither."""
    attn_cp_size, attn_tp_size, pp_size, dp_size = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    is_attention = dp_size > 1 and draw(st.booleans())
    has_dp_rank = not is_attention or draw(st.booleans())
    worlds = 1 if is_attention else dp_size
    tp_size = (dp_size if is_attention else 1) * attn_cp_size * attn_tp_size
    ranks = []
    for world in range(worlds):
        for stage in range(pp_size):
            for tp_rank in range(tp_size):
                cache = tp_rank // (attn_cp_size * attn_tp_size) if is_attention else world
                own: dict[str, Any] = {} if is_attention else {"dp_size": dp_size, "dp_rank": world}
                if dp_size == 1 and draw(st.booleans()):
                    own["dp_rank"] = None
                state = ParallelState.from_tp_rank(
                    tp_rank,
                    tp_size=tp_size,
                    attn_dp_size=dp_size if is_attention else 1,
                    attn_cp_size=attn_cp_size,
                    pp_rank=stage,
                    pp_size=pp_size,
                    **own,
                )
                ranks.append((state if has_dp_rank else attrs.evolve(state, dp_rank=None), cache))
    return Engine(dp_size, tuple(ranks))


def once_per_cache(indexes: list[int | None], engine: Engine) -> bool:
    return sorted(indexes, key=str) == sorted(range(engine.num_caches), key=str)


@given(engines())
def test_the_events_of_each_cache_are_published_once_and_every_rank_is_drained(engine: Engine) -> None:
    sink = ListEventSink()
    for parallel, cache in engine.ranks:
        num_before = len(sink.batches)
        source = ScriptedEventSource([AllBlocksCleared()])
        SchedulerKvEventsPublisher(parallel=parallel, source=source, sink=sink).publish_kv_events()
        assert source.steps == []
        assert all(batch.attn_dp_rank == cache for batch in sink.batches[num_before:])
    assert once_per_cache([batch.attn_dp_rank for batch in sink.batches], engine)


class OpenedPublisher(NullEventPublisher):
    """Remembers for which cache it was opened."""

    def __init__(self, attn_dp_rank: int, **_: object) -> None:
        super().__init__(attn_dp_rank)
        self.cache = attn_dp_rank


class Publishers(EventPublisherFactory):
    """A registry of its own, so that no other test sees what is registered."""


Publishers.register_publisher("opened", OpenedPublisher)
OPENED = KVEventsConfig(publisher="opened", endpoint="tcp://127.0.0.1:5557")


@given(engines())
def test_the_publisher_of_each_cache_is_opened_once(engine: Engine) -> None:
    opened: list[int | None] = []
    for parallel, cache in engine.ranks:
        publisher = open_event_publisher(OPENED, parallel=parallel, factory=Publishers)
        if isinstance(publisher, OpenedPublisher):
            assert publisher.cache == cache
            opened.append(publisher.cache)
    assert once_per_cache(opened, engine)


@given(engines())
def test_the_kv_metrics_of_each_cache_are_sent_once(engine: Engine) -> None:
    sent: list[int | None] = []
    for parallel, cache in engine.ranks:
        sink = ListSink[KvMetrics]()
        load = FakeLoad(LoadSnapshot(dp_rank=parallel.kv_stream_index, page_size=1))
        SchedulerKvEventsPublisher(
            parallel=parallel, source=ScriptedEventSource(), sink=NullEventPublisher(0), load=load, metrics_sink=sink
        ).emit_kv_metrics()
        assert all(metrics.data_parallel_rank == cache for metrics in sink.sent)
        sent += [metrics.data_parallel_rank for metrics in sink.sent]
    assert once_per_cache(sent, engine)


@given(engines())
def test_the_statistics_of_each_replica_are_reported_once(engine: Engine) -> None:
    sink = ListSink[SchedulerStats]()
    for parallel, _ in engine.ranks:
        MetricsEmitter(parallel=parallel, load=FakeLoad(LoadSnapshot()), sink=sink).emit()
    assert once_per_cache([int(dict(stats.labels)["dp_rank"]) for stats in sink.sent], engine)
    assert len({stats.labels for stats in sink.sent}) == engine.num_caches


@given(engines())
def test_the_load_of_each_replica_leaves_once(engine: Engine) -> None:
    sink = ListSink[LoadSnapshot]()
    for parallel, cache in engine.ranks:
        load = LoadInquirer(parallel=parallel, queues=FakeQueues(), pool=FakePool())
        assert load.get_loads().dp_rank == cache
        LoadPublisher(parallel=parallel, load=load, sinks=(sink,)).publish_load()
    assert once_per_cache([snapshot.dp_rank for snapshot in sink.sent], engine)


@given(engines())
def test_the_forward_passes_of_each_replica_leave_once(engine: Engine) -> None:
    sink = ListSink[ForwardPassMetrics]()
    for parallel, _ in engine.ranks:
        publisher = ForwardPassPublisher(parallel=parallel, queues=FakeQueues(), sink=sink)
        publisher.publish_forward_pass((), 0.1)
    assert once_per_cache([metrics.dp_rank for metrics in sink.sent], engine)


PROPERTIES = [
    test_the_events_of_each_cache_are_published_once_and_every_rank_is_drained,
    test_the_publisher_of_each_cache_is_opened_once,
    test_the_kv_metrics_of_each_cache_are_sent_once,
    test_the_statistics_of_each_replica_are_reported_once,
    test_the_load_of_each_replica_leaves_once,
    test_the_forward_passes_of_each_replica_leave_once,
]
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
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__.removeprefix("test_the_"))
def test_each_component_is_found_with_a_broken_rank(name: str, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, broken = BROKEN[name]
    monkeypatch.setattr(ParallelState, attribute, property(broken))
    searched = settings(phases=(Phase.generate,), database=None)(given(engines())(check.hypothesis.inner_test))
    with pytest.raises((AssertionError, ExceptionGroup)):
        searched()  # any engine is enough: the smallest one takes ten times as long to find
