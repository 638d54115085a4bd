"""Observe schedulers: Prometheus collectors, status routes, stream subscriber, watch, doctor and conformance checks.

Names are imported on first use, so Prometheus, starlette, httpx and pyzmq are needed only by what uses them. Further
public modules: ``observability.catalog`` (the metric catalogue), ``observability.kv_stream`` (the parts of the
subscriber), ``worlds`` (the test kit), ``observability.grafana`` (the dashboard).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from observability.conformance import check_conformance
    from observability.doctor import DoctorOptions, check_worker
    from observability.http_kv_pool import kv_pool_route
    from observability.http_status import StatusSource, error_response, status_routes
    from observability.kv_pool_client import fetch_kv_pool
    from observability.kv_stream import discover, open_async_subscriber, open_subscriber
    from observability.log_sink import LogSink
    from observability.prometheus_page import render_metrics
    from observability.prometheus_schedulers import MetricsBoardCollector, PrometheusSink
    from observability.prometheus_streams import LogCollector, RelayCollector, StreamCollector
    from observability.watch import WatchOptions, watch_streams

__all__ = [
    # metrics
    "PrometheusSink",
    "MetricsBoardCollector",
    "StreamCollector",
    "RelayCollector",
    "LogCollector",
    "LogSink",
    "render_metrics",
    # HTTP
    "StatusSource",
    "status_routes",
    "error_response",
    "kv_pool_route",
    "fetch_kv_pool",
    # streams
    "discover",
    "open_subscriber",
    "open_async_subscriber",
    "WatchOptions",
    "watch_streams",
    # checks of a worker
    "DoctorOptions",
    "check_worker",
    "check_conformance",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.conformance": "check_conformance",
        "observability.doctor": "DoctorOptions check_worker",
        "observability.http_status": "StatusSource error_response status_routes",
        "observability.http_kv_pool": "kv_pool_route",
        "observability.kv_pool_client": "fetch_kv_pool",
        "observability.kv_stream": "discover open_async_subscriber open_subscriber",
        "observability.log_sink": "LogSink",
        "observability.prometheus_page": "render_metrics",
        "observability.prometheus_schedulers": "MetricsBoardCollector PrometheusSink",
        "observability.prometheus_streams": "LogCollector RelayCollector StreamCollector",
        "observability.watch": "WatchOptions watch_streams",
    },
)
