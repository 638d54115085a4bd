"""Forward-pass metrics have SGLang's frames and addresses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from kit.waiting import wait_until

from scheduler_components import ConfigError, ParallelState
from scheduler_components.metrics import ZmqReportSink, open_zmq_forward_pass_sink
from scheduler_components.metrics.forward_pass_metrics import encode_forward_pass
from scheduler_components.ports import NullReportSink
from scheduler_components.testing.golden import forward_pass_vectors
from scheduler_components.values import ForwardPassMetrics

pytestmark = pytest.mark.sockets

PROBE = ForwardPassMetrics(worker_id="probe")


def opened(endpoint: str, **parallel: int) -> ZmqReportSink[ForwardPassMetrics]:
    sink = open_zmq_forward_pass_sink(endpoint, ParallelState(**parallel))
    assert isinstance(sink, ZmqReportSink)
    return sink


def test_the_frames_are_those_of_sglang(subscribe: Callable[..., zmq.Socket[bytes]]) -> None:
    sink = opened("tcp://127.0.0.1:0")
    socket = subscribe(sink.endpoint)
    wait_until(lambda: socket.poll(1), poll=lambda: sink.send(PROBE))
    vector = forward_pass_vectors()[0]
    sink.send(vector.metrics)
    while (frames := socket.recv_multipart())[2] == encode_forward_pass(PROBE):
        pass
    assert frames == [b"", vector.metrics.counter_id.to_bytes(8, "big"), vector.payload]
    sink.close()


def test_a_replica_binds_at_its_own_offset(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    port = free_ports(2)
    for base, address in (
        (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"),
        (f"ipc://{tmp_path}/fpm", f"ipc://{tmp_path}/fpm.1"),
    ):
        sink = opened(base, dp_size=2, dp_rank=1)
        assert sink.endpoint == address
        sink.close()


def test_a_rank_that_reports_nothing_opens_nothing_but_checks_the_address(free_ports: Callable[[int], int]) -> None:
    parallel = ParallelState.from_tp_rank(1, tp_size=2)
    endpoint = f"tcp://127.0.0.1:{free_ports(1)}"
    assert isinstance(open_zmq_forward_pass_sink(endpoint, parallel), NullReportSink)
    opened(endpoint).close()
    with pytest.raises(ConfigError, match="forward_pass_endpoint"):
        open_zmq_forward_pass_sink("inproc://fpm", parallel)
