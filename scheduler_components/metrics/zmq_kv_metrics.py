"""KvMetrics over ZMQ: schedulers push one msgpack map per report, the serving process pulls them.

Source: SGLang 0.5.x, where every scheduler pushes its ``KvMetrics`` to the serving process over an ipc socket. Here the
payload is msgpack and not pickle.
"""

from __future__ import annotations

import math

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events import Endpoint
from scheduler_components.metrics.zmq_reports import (
    ReportWire,
    ZmqReportReader,
    ZmqReportSink,
    open_report_pusher,
    open_report_reader,
)
from scheduler_components.values import KvMetrics

__all__ = [
    "KV_METRICS_WIRE",
    "MAX_KV_METRICS_BYTES",
    "decode_kv_metrics",
    "encode_kv_metrics",
    "open_zmq_kv_metrics_receiver",
    "open_zmq_kv_metrics_sink",
    "parse_kv_metrics_endpoint",
]


MAX_KV_METRICS_BYTES = 4096
"""Eight numbers with their names take about 250 bytes; the rest is reserved for fields of later versions."""

encode_kv_metrics = msgspec.msgpack.Encoder().encode
_decode_map = msgspec.msgpack.Decoder(KvMetrics).decode


def decode_kv_metrics(payload: bytes) -> KvMetrics:
    """Decode one report. Unknown fields are skipped, missing ones are 0.

    Raises:
        DecodeError: the payload is not such a map, is too long, or has a negative or infinite number.
    """
    if len(payload) > MAX_KV_METRICS_BYTES:
        raise DecodeError(f"KvMetrics of {len(payload)} bytes, at most {MAX_KV_METRICS_BYTES} are read")
    try:
        metrics = _decode_map(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not KvMetrics: {error}") from error
    for name in KvMetrics.__struct_fields__:
        value = getattr(metrics, name)
        if not 0 <= value < math.inf:
            raise DecodeError(f"KvMetrics.{name} is {value!r}, a count or a share is not")
    return metrics


def _decode(frames: list[bytes]) -> KvMetrics:
    if len(frames) != 1:
        raise DecodeError(f"KvMetrics in {len(frames)} frames, a report is one")
    return decode_kv_metrics(frames[0])


KV_METRICS_WIRE: ReportWire[KvMetrics, KvMetrics] = ReportWire(
    subject="KV metrics",
    field="metrics_endpoint",
    encode=lambda metrics, _: (encode_kv_metrics(metrics),),
    decode=_decode,
    max_bytes=MAX_KV_METRICS_BYTES,
    max_queued=64,  # a report replaces the one before it, so a late reader misses little
    buffer_bytes=32 * 1024,  # about 100 reports; by default, megabytes of old reports queue for a reader that stalls
)


def parse_kv_metrics_endpoint(endpoint: str, *, bind: bool) -> Endpoint:
    """Parse the address that the serving process binds and schedulers connect to.

    Raises:
        ConfigError: it is not an address, is inproc, or is a wildcard or port 0 to connect to.
    """
    address = Endpoint.parse(endpoint, field="metrics_endpoint")
    address.check_leaves_process(field="metrics_endpoint")
    address.resolve_bind(bind, field="metrics_endpoint")
    return address


def open_zmq_kv_metrics_sink(endpoint: str) -> ZmqReportSink[KvMetrics]:
    """Connect a PUSH socket to the serving process, which may start later.

    Raises:
        ConfigError: the endpoint is not an address of another process.
        StartError: the system refused the socket.
    """
    return open_report_pusher(KV_METRICS_WIRE, parse_kv_metrics_endpoint(endpoint, bind=False))


def open_zmq_kv_metrics_receiver(endpoint: str) -> ZmqReportReader[KvMetrics]:
    """Bind a PULL socket for the reports of all ranks; the system chooses a port for port 0.

    Raises:
        ConfigError: the endpoint is not an address that another process can reach.
        StartError: the address is in use, or the system refused the socket.
    """
    return open_report_reader(KV_METRICS_WIRE, (parse_kv_metrics_endpoint(endpoint, bind=True),))
