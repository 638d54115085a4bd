"""Forward-pass metrics over ZMQ: a PUB socket per replica, and a reader that counts what it missed.

Source of the frames ``("", counter_id, payload)``: SGLang 0.5.23, and Dynamo's relay, which accepts exactly three.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_components.errors import DecodeError
from scheduler_components.metrics.forward_pass_metrics import (
    MAX_FORWARD_PASS_BYTES,
    decode_forward_pass,
    encode_forward_pass,
    forward_pass_endpoint,
    parse_forward_pass_endpoint,
)
from scheduler_components.metrics.zmq_reports import (
    ReportWire,
    ZmqReportReader,
    open_report_publisher,
    open_report_reader,
    parse_report_endpoints,
)
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import NullReportSink, ReportSink
from scheduler_components.values import ForwardPassMetrics

__all__ = ["FORWARD_PASS_WIRE", "open_zmq_forward_pass_reader", "open_zmq_forward_pass_sink"]


def _encode(metrics: ForwardPassMetrics, _: int) -> tuple[bytes, ...]:
    return b"", metrics.counter_id.to_bytes(8, "big"), encode_forward_pass(metrics)


def _decode(frames: list[bytes]) -> ForwardPassMetrics:
    if len(frames) != 3:
        raise DecodeError(f"forward-pass metrics in {len(frames)} frames, they are topic, number and payload")
    metrics = decode_forward_pass(frames[2])
    if int.from_bytes(frames[1], "big") != metrics.counter_id:
        raise DecodeError(f"the frame's number {frames[1].hex()} is not that of the message, {metrics.counter_id}")
    return metrics


FORWARD_PASS_WIRE: ReportWire[ForwardPassMetrics, ForwardPassMetrics] = ReportWire(
    subject="forward-pass metrics",
    field="forward_pass_endpoint",
    encode=_encode,
    decode=_decode,
    max_bytes=MAX_FORWARD_PASS_BYTES,
    topic=b"",
    max_queued=1000,  # half a megabyte; libzmq's default, which SGLang's socket has
    number_of=lambda metrics: ((metrics.worker_id, metrics.dp_rank), metrics.counter_id),
)


def open_zmq_forward_pass_sink(endpoint: str, parallel: ParallelState) -> ReportSink[ForwardPassMetrics]:
    """Bind the PUB socket of this rank's replica. A rank that reports no metrics opens nothing.

    Replica r binds port + r of a tcp address, or the path with the suffix ``.r`` of an ipc address. These are the
    addresses to which Dynamo's relays connect. Every rank checks the address, also one that opens nothing.

    Args:
        endpoint: the engine's base address; with port 0 the system chooses a port for each replica.
        parallel: decides whether this rank sends, and for which replica.

    Raises:
        ConfigError: the address is not one that other processes can reach.
        StartError: the address is in use, or not one of this machine; nothing stays open.
    """
    base = parse_forward_pass_endpoint(endpoint, num_ranks=parallel.kv_stream_count)
    if not parallel.reports_metrics:
        return NullReportSink()
    return open_report_publisher(FORWARD_PASS_WIRE, forward_pass_endpoint(base, parallel.kv_stream_index))


def open_zmq_forward_pass_reader(endpoints: Iterable[str]) -> ZmqReportReader[ForwardPassMetrics]:
    """Connect to the addresses of all replicas; publishers may start later.

    The reader reads messages of this kit, of SGLang and of Dynamo.

    Args:
        endpoints: one address per replica, with a host that can be dialled. ``/server_info`` lists them.

    Raises:
        ConfigError: an address cannot be dialled, or there is none.
        StartError: the system refused a socket.
    """
    return open_report_reader(FORWARD_PASS_WIRE, parse_report_endpoints(endpoints, FORWARD_PASS_WIRE))
