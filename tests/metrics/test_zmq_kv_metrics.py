"""One call wires a scheduler to the process that serves its KV metrics."""

from __future__ import annotations

import pytest
from kit.waiting import wait_until

from scheduler_components import ParallelState, SchedulerKvEventsPublisher
from scheduler_components.metrics import open_zmq_kv_metrics_receiver
from scheduler_components.values import KvMetrics, LoadSnapshot

pytestmark = pytest.mark.sockets


class Idle:
    def take_events(self) -> tuple[()]:
        return ()

    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot(num_running_reqs=2, max_running_requests=8, max_total_num_tokens=64, page_size=16)


def test_one_call_wires_a_scheduler_to_its_serving_process() -> None:
    receiver = open_zmq_kv_metrics_receiver("tcp://127.0.0.1:0")
    publisher, silent = (
        SchedulerKvEventsPublisher.open(
            None,
            parallel=ParallelState.from_tp_rank(tp_rank, tp_size=2),
            source=Idle(),
            load=Idle(),
            metrics_endpoint=receiver.endpoint,
        )
        for tp_rank in range(2)
    )
    arrived: list[KvMetrics] = []

    def emit() -> None:
        publisher.emit_kv_metrics()
        arrived.extend(receiver.receive(0.01))

    wait_until(lambda: arrived, poll=emit)
    assert arrived[0] == KvMetrics(request_active_slots=2, request_total_slots=8, kv_total_blocks=4)
    assert silent.metrics_sink is None
    for each in (publisher, silent):
        each.shutdown()
    receiver.close()
