"""KvMetrics over real sockets: reports arrive, invalid ones are dropped, and no side blocks the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from scheduler_components import ConfigError, ParallelState, SchedulerKvEventsPublisher, StartError
from scheduler_components.metrics import open_zmq_kv_metrics_receiver
from scheduler_components.metrics.zmq_kv_metrics import (
    ZmqKvMetricsReceiver,
    ZmqKvMetricsSink,
    open_zmq_kv_metrics_sink,
)
from scheduler_components.values import KvMetrics, LoadSnapshot

pytestmark = pytest.mark.sockets

Eventually = Callable[[Callable[[], object]], None]


@pytest.fixture(params=["tcp", "ipc"])
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZmqKvMetricsReceiver]:
    endpoint = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/metrics"
    receiver = open_zmq_kv_metrics_receiver(endpoint)
    yield receiver
    receiver.close()


@pytest.fixture
def sink(receiver: ZmqKvMetricsReceiver) -> Iterator[ZmqKvMetricsSink]:
    sink = open_zmq_kv_metrics_sink(receiver.endpoint)
    yield sink
    sink.close()


def test_reports_arrive_whole_and_in_order(
    sink: ZmqKvMetricsSink, receiver: ZmqKvMetricsReceiver, eventually: Eventually
) -> None:
    arrived: list[KvMetrics] = []

    def first_arrived() -> bool:
        sink.send(KvMetrics(gpu_cache_usage_perc=0.25))
        arrived.extend(receiver.receive(0.01))
        return bool(arrived)

    eventually(first_arrived)
    for slots in range(20):
        sink.send(KvMetrics(request_active_slots=slots + 1, data_parallel_rank=3))

    def all_arrived() -> bool:
        arrived.extend(receiver.receive(0.01))
        return receiver.received == sink.sent

    eventually(all_arrived)
    assert arrived[0] == KvMetrics(gpu_cache_usage_perc=0.25)
    assert arrived[-20:] == [KvMetrics(request_active_slots=slots + 1, data_parallel_rank=3) for slots in range(20)]


def test_without_a_receiver_every_report_is_dropped_and_counted(tmp_path: Path) -> None:
    sink = open_zmq_kv_metrics_sink(f"ipc://{tmp_path}/unread")
    for _ in range(5000):
        sink.send(KvMetrics())
    assert (sink.sent, sink.dropped) == (0, 5000)
    sink.close()


def test_the_queue_of_a_receiver_that_never_reads_is_bounded(
    sink: ZmqKvMetricsSink, receiver: ZmqKvMetricsReceiver, eventually: Eventually
) -> None:
    def connected() -> bool:
        sink.send(KvMetrics())
        return sink.sent > 0

    eventually(connected)
    for _ in range(50_000):
        sink.send(KvMetrics())
    assert sink.dropped > 25_000


def test_invalid_payloads_are_dropped_alone(
    receiver: ZmqKvMetricsReceiver, open_socket: Callable[[int], zmq.Socket[bytes]], eventually: Eventually
) -> None:
    push = open_socket(zmq.PUSH)
    push.connect(receiver.endpoint)
    push.send(b"\xc1 not msgpack")
    push.send_multipart([b"\x80", b"\x80"])
    push.send(b"\x80")
    eventually(lambda: receiver.receive(0.01))
    assert (receiver.received, receiver.refused) == (1, 2)


def test_one_call_reads_at_most_its_limit(
    sink: ZmqKvMetricsSink, receiver: ZmqKvMetricsReceiver, eventually: Eventually
) -> None:
    def ten_sent() -> bool:
        sink.send(KvMetrics())
        return sink.sent >= 10

    eventually(ten_sent)
    sizes: list[int] = []

    def all_arrived() -> bool:
        sizes.append(len(receiver.receive(0.01, limit=3)))
        return receiver.received == sink.sent

    eventually(all_arrived)
    assert max(sizes) <= 3


def test_after_close_a_report_is_dropped_and_closing_twice_is_quiet(tmp_path: Path) -> None:
    sink = open_zmq_kv_metrics_sink(f"ipc://{tmp_path}/unread")
    sink.close()
    sink.send(KvMetrics())
    sink.close()
    assert sink.dropped == 1


def test_an_address_in_use_is_a_start_error(receiver: ZmqKvMetricsReceiver) -> None:
    if receiver.endpoint.startswith("tcp"):
        with pytest.raises(StartError, match=r"127\.0\.0\.1"):
            open_zmq_kv_metrics_receiver(receiver.endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://127.0.0.1:0", "inproc://x", "nonsense"])
def test_a_sink_needs_an_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="metrics_endpoint"):
        open_zmq_kv_metrics_sink(endpoint)


class Idle:
    def take_events(self) -> tuple[()]:
        return ()

    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot(num_running_reqs=2, max_running_requests=8, max_total_num_tokens=64, page_size=16)


def test_one_call_wires_a_scheduler_to_its_serving_process(
    receiver: ZmqKvMetricsReceiver, eventually: Eventually
) -> None:
    publisher = SchedulerKvEventsPublisher.open(
        None, parallel=ParallelState(), source=Idle(), load=Idle(), metrics_endpoint=receiver.endpoint
    )
    arrived: list[KvMetrics] = []

    def first_arrived() -> bool:
        publisher.emit_kv_metrics()
        arrived.extend(receiver.receive(0.01))
        return bool(arrived)

    eventually(first_arrived)
    assert arrived[0] == KvMetrics(request_active_slots=2, request_total_slots=8, kv_total_blocks=4)
    publisher.shutdown()


def test_a_rank_that_does_not_report_opens_no_metrics_socket(receiver: ZmqKvMetricsReceiver) -> None:
    parallel = ParallelState.from_tp_rank(1, tp_size=2)
    publisher = SchedulerKvEventsPublisher.open(
        None, parallel=parallel, source=Idle(), load=Idle(), metrics_endpoint=receiver.endpoint
    )
    assert publisher.metrics_sink is None
    publisher.shutdown()
