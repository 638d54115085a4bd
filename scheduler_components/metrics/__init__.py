"""Metrics: rates and times of requests, and the ways of a step's statistics to other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.metrics.request_times import (
    Histogram,
    LatencyHistograms,
    RateMeter,
    RequestLatencyRecorder,
    RequestPhase,
    RequestTimeStats,
    RollingSums,
)
from scheduler_components.shm_board import ShmBoard

if TYPE_CHECKING:
    from scheduler_components.metrics.shm_metrics_board import (
        ShmMetricsSink,
        open_shm_metrics_board,
        open_shm_metrics_sink,
    )
    from scheduler_components.metrics.zmq_kv_metrics import (
        ZmqKvMetricsReceiver,
        ZmqKvMetricsSink,
        decode_kv_metrics,
        encode_kv_metrics,
        open_zmq_kv_metrics_receiver,
        open_zmq_kv_metrics_sink,
        parse_kv_metrics_endpoint,
    )

__all__ = [
    "ShmBoard",
    "Histogram",
    "LatencyHistograms",
    "RateMeter",
    "RequestLatencyRecorder",
    "RequestPhase",
    "RequestTimeStats",
    "RollingSums",
    "ShmMetricsSink",
    "ZmqKvMetricsReceiver",
    "ZmqKvMetricsSink",
    "decode_kv_metrics",
    "encode_kv_metrics",
    "open_shm_metrics_board",
    "open_shm_metrics_sink",
    "open_zmq_kv_metrics_receiver",
    "open_zmq_kv_metrics_sink",
    "parse_kv_metrics_endpoint",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.metrics.shm_metrics_board": "ShmMetricsSink open_shm_metrics_board open_shm_metrics_sink",
        "scheduler_components.metrics.zmq_kv_metrics": (
            "ZmqKvMetricsReceiver ZmqKvMetricsSink decode_kv_metrics encode_kv_metrics "
            "open_zmq_kv_metrics_receiver open_zmq_kv_metrics_sink parse_kv_metrics_endpoint"
        ),
    },
)
