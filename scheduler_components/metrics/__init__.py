"""Metrics: rates and times of requests, and the transports of a step's statistics to other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.metrics.otel_spans import OtelSpanSink, open_otel_span_sink
    from scheduler_components.metrics.request_times import RateMeter, RequestLatencyRecorder, RequestTimeStats
    from scheduler_components.metrics.shm_metrics_board import open_shm_metrics_board, open_shm_metrics_sink
    from scheduler_components.metrics.zmq_forward_pass import open_zmq_forward_pass_reader, open_zmq_forward_pass_sink
    from scheduler_components.metrics.zmq_kv_metrics import open_zmq_kv_metrics_receiver
    from scheduler_components.metrics.zmq_reports import ZmqReportReader, ZmqReportSink

__all__ = [
    "OtelSpanSink",
    "RateMeter",
    "RequestLatencyRecorder",
    "RequestTimeStats",
    "ZmqReportReader",
    "ZmqReportSink",
    "open_otel_span_sink",
    "open_shm_metrics_board",
    "open_shm_metrics_sink",
    "open_zmq_forward_pass_reader",
    "open_zmq_forward_pass_sink",
    "open_zmq_kv_metrics_receiver",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.metrics.otel_spans": "OtelSpanSink open_otel_span_sink",
        "scheduler_components.metrics.request_times": "RateMeter RequestLatencyRecorder RequestTimeStats",
        "scheduler_components.metrics.shm_metrics_board": "open_shm_metrics_board open_shm_metrics_sink",
        "scheduler_components.metrics.zmq_forward_pass": "open_zmq_forward_pass_reader open_zmq_forward_pass_sink",
        "scheduler_components.metrics.zmq_kv_metrics": "open_zmq_kv_metrics_receiver",
        "scheduler_components.metrics.zmq_reports": "ZmqReportReader ZmqReportSink",
    },
)
