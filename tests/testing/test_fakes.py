"""The fakes do what the ports say, and the faults that they are asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import (
    AllBlocksCleared,
    KVEventBatch,
    LoadInquirer,
    MetricsEmitter,
    ParallelState,
    SchedulerKvEventsPublisher,
)
from scheduler_components.agreement import ParallelGroups
from scheduler_components.ports import LoadSink
from scheduler_components.testing import (
    FakeClock,
    FakePool,
    FakeQueues,
    ListEventSink,
    PagedModel,
    next_token,
    run_ranks,
)
from scheduler_components.testing.fake_device import InstantDevice
from scheduler_components.testing.fakes import FakeLoad, FakeRequest, ListSink, ScriptedEventSource
from scheduler_components.testing.faulty_network import Fault, FaultyNetwork
from scheduler_components.testing.strategies import fault_plans
from scheduler_components.values import KvMetrics, LoadSnapshot, SchedulerStats

TRIVIAL = ParallelState.trivial()


def test_components_composed_of_fakes_work_and_fail_as_told() -> None:
    clock, sink = FakeClock(5.0), ListEventSink()
    metrics: ListSink[SchedulerStats] = ListSink()
    kv_metrics: ListSink[KvMetrics] = ListSink()
    queues = FakeQueues(running=[1], waiting=[FakeRequest(10, 4)])
    load = LoadInquirer(parallel=TRIVIAL, queues=queues, pool=FakePool(), clock=clock)
    publisher = SchedulerKvEventsPublisher(
        parallel=TRIVIAL, source=ScriptedEventSource([AllBlocksCleared()]), sink=sink, load=load,
        metrics_sink=kv_metrics,
        clock=clock,
    )  # fmt: skip
    for _ in range(2):
        publisher.publish_kv_events()
    publisher.idle()
    publisher.emit_kv_metrics()
    MetricsEmitter(parallel=TRIVIAL, load=load, sink=metrics, sources={"publisher": publisher}).emit()
    assert sink.batches == [KVEventBatch(5.0, (AllBlocksCleared(),), 0)]
    assert (sink.num_idled, len(kv_metrics.sent), metrics.sent[0].load.num_waiting_uncached_tokens) == (1, 1, 6)
    sink.error = metrics.error = RuntimeError("on purpose")
    publisher.idle()
    MetricsEmitter(parallel=TRIVIAL, load=FakeLoad(), sink=metrics).emit()
    publisher.shutdown()
    assert (sum(publisher.failures.counts.values()), sink.num_closed, kv_metrics.num_closed) == (2, 1, 1)


def test_a_load_sink_keeps_reports() -> None:
    fake: ListSink[LoadSnapshot] = ListSink()
    sink: LoadSink = fake
    sink.send(FakeLoad().get_loads())
    sink.close()
    assert (len(fake.sent), fake.num_closed) == (1, 1)


def test_an_instant_device_computes_or_answers_by_its_script() -> None:
    device: InstantDevice[int, int] = InstantDevice(lambda batch: batch + 1)
    device.scripted = [7, ValueError("out of memory")]
    device.launch(1)
    assert device.wait() == 7
    with pytest.raises(ValueError, match="out of memory"):
        device.wait()
    assert (device.wait(), device.launched) == (2, [1])


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20), data=st.data())
def test_a_paged_model_answers_from_its_pages(tokens: list[int], data: st.DataObject) -> None:
    model, pages = PagedModel(page_size=3), list(range(7, 0, -1))
    computed = 0
    while computed < len(tokens):
        end = data.draw(st.integers(computed + 1, len(tokens)))
        token = model.forward(tokens[:end], pages, computed)
        computed = end
    assert token == next_token(tokens)
    # Another request computes into one of its pages, or it gets a page that was never computed.
    place = data.draw(st.integers(0, (len(tokens) - 2) // 3))
    if data.draw(st.booleans()):
        model.forward([tokens[place * 3] ^ 1], [pages[place]], 0)
    else:
        pages[place] = 99
    assert model.forward(tokens, pages, len(tokens) - 1) != next_token(tokens)
    with pytest.raises(IndexError):
        model.forward(tokens, [], 0)
    with pytest.raises(ValueError, match="leave the last one out"):
        model.forward(tokens, pages, len(tokens))


@settings(deadline=None)
@given(plan=fault_plans())
def test_a_faulty_network_loses_repeats_and_delays_what_its_plan_says_and_invents_nothing(plan: list[Fault]) -> None:
    network: FaultyNetwork[int] = FaultyNetwork(plan)
    arrived = [each for number in range(len(plan) + 1) for each in network.send(number)] + network.flush()
    counts = Counter(arrived)
    for number, fault in enumerate([*plan, Fault.NONE]):
        if fault in (Fault.DROP, Fault.DROP_AND_DUPLICATE_LAST):
            assert counts[number] == 0
        else:
            assert counts[number] >= (2 if fault is Fault.DUPLICATE else 1)
    assert counts.keys() <= set(range(len(plan) + 1))
    assert network.num_lost == sum(fault in (Fault.DROP, Fault.DROP_AND_DUPLICATE_LAST) for fault in plan)


def test_a_network_without_a_plan_keeps_order() -> None:
    network: FaultyNetwork[int] = FaultyNetwork()
    assert [network.send(number) for number in range(3)] == [[0], [1], [2]]


def test_ranks_on_threads_agree_and_the_lowest_error_is_told() -> None:
    parallel = ParallelState.from_tp_rank(0, tp_size=4, attn_cp_size=2)
    assert run_ranks(parallel, lambda groups: groups.all_reduce_min("landed", groups.rank + 5, step=0)) == [5] * 4

    def fail(groups: ParallelGroups) -> None:
        groups.barrier("start", step=0)
        raise ValueError(f"rank {groups.rank}")

    with pytest.raises(ValueError, match="rank 0"):
        run_ranks(parallel, fail)
